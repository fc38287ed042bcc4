//! DeleteRecords: moves the log start offset of partitions up, on every in-sync replica.
//!
//! The leader's log start moves first, for all partitions of the request; then the response waits, at most for the
//! client's timeout, until every in-sync log starts there. After a timeout the records stay deleted.

use std::sync::Arc;
use std::time::Duration;

use moim_base::task::offload;
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::delete_records::{
    DeleteRecordsPartitionResult, DeleteRecordsRequest, DeleteRecordsResponse, DeleteRecordsTopicResult,
};
use tokio::time::Instant;

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::partition::Partition;

/// A partition with its new log start offset.
type Deleted = (Arc<Partition>, i64);

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: DeleteRecordsRequest,
    _: Request,
) -> DeleteRecordsResponse {
    let deadline = Instant::now() + Duration::from_millis(u64::try_from(request.timeout_ms).unwrap_or(0));
    let mut cuts = Vec::with_capacity(request.topics.len());
    for wanted in request.topics {
        let mut of_topic = Vec::with_capacity(wanted.partitions.len());
        for p in wanted.partitions {
            of_topic.push((
                p.partition_index,
                delete_local(&broker, &wanted.name, p.partition_index, p.offset).await,
            ));
        }
        cuts.push((wanted.name, of_topic));
    }
    let mut topics = Vec::with_capacity(cuts.len());
    for (name, of_topic) in cuts {
        let mut partitions = Vec::with_capacity(of_topic.len());
        for (partition_index, delete_local) in of_topic {
            let (low_watermark, code) = match delete_local {
                Ok(delete_local) => wait_in_sync(delete_local, deadline).await,
                Err(code) => (-1, code),
            };
            let error_code = code as i16;
            partitions.push(DeleteRecordsPartitionResult { partition_index, low_watermark, error_code });
        }
        topics.push(DeleteRecordsTopicResult { name, partitions });
    }
    DeleteRecordsResponse { topics, ..Default::default() }
}

async fn delete_local(broker: &Broker, topic: &str, index: i32, offset: i64) -> Result<Deleted, ErrorCode> {
    let topic = broker.topics.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    let partition = topic.partition(index)?;
    let config = topic.config.load();
    if topic.is_internal() {
        return Err(ErrorCode::InvalidTopicException);
    }
    if config.compact && !config.delete {
        return Err(ErrorCode::PolicyViolation);
    }
    // Waits for the disk, so it runs off the loop.
    let local = Arc::clone(&partition);
    let done = offload(move || Ok(local.delete_records(offset))).await;
    done.unwrap_or(Err(ErrorCode::UnknownServerError)).map(|start| (partition, start))
}

/// Waits for the low watermark; returns it, and an error if it did not reach the new log start in time.
async fn wait_in_sync((partition, start): Deleted, deadline: Instant) -> (i64, ErrorCode) {
    match tokio::time::timeout_at(deadline, partition.wait_low_watermark(start)).await {
        Ok(Ok(low)) => (low, ErrorCode::None),
        Ok(Err(code)) => (-1, code),
        Err(_) => (partition.low_watermark(), ErrorCode::RequestTimedOut),
    }
}
