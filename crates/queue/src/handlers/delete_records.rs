//! DeleteRecords: moves the start of partitions up.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::delete_records::{
    DeleteRecordsPartitionResult, DeleteRecordsRequest, DeleteRecordsResponse, DeleteRecordsTopicResult,
};

use crate::broker::Broker;
use crate::dispatch::Request;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: DeleteRecordsRequest,
    _: Request,
) -> DeleteRecordsResponse {
    let mut topics = Vec::with_capacity(request.topics.len());
    for wanted in request.topics {
        let mut partitions = Vec::with_capacity(wanted.partitions.len());
        for p in wanted.partitions {
            let result = delete(&broker, &wanted.name, p.partition_index, p.offset).await;
            let (low_watermark, code) = result.map_or_else(|code| (-1, code), |low| (low, ErrorCode::None));
            partitions.push(DeleteRecordsPartitionResult {
                partition_index: p.partition_index,
                low_watermark,
                error_code: code as i16,
            });
        }
        topics.push(DeleteRecordsTopicResult { name: wanted.name, partitions });
    }
    DeleteRecordsResponse { topics, ..Default::default() }
}

async fn delete(broker: &Broker, topic: &str, index: i32, offset: i64) -> Result<i64, ErrorCode> {
    let topic = broker.topics.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    let partition = topic.partition(index)?;
    let config = topic.config.load();
    if topic.is_internal() {
        return Err(ErrorCode::InvalidTopicException);
    }
    if config.compact && !config.delete {
        return Err(ErrorCode::PolicyViolation);
    }
    // Waits for the disk, so it leaves the loop.
    let done = tokio::task::spawn_blocking(move || partition.delete_records(offset)).await;
    done.unwrap_or(Err(ErrorCode::UnknownServerError))
}
