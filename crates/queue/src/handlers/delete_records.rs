//! DeleteRecords: moves the start of partitions up, on everybody in sync.
//!
//! The leader's log is cut first, for all partitions of the request; then the answer waits, at most for the time the
//! client gives it, until every log in sync starts there. What was cut stays cut when that time is over.

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

/// A partition whose log starts later now, and where.
type Cut = (Arc<Partition>, i64);

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
            of_topic.push((p.partition_index, cut(&broker, &wanted.name, p.partition_index, p.offset).await));
        }
        cuts.push((wanted.name, of_topic));
    }
    let mut topics = Vec::with_capacity(cuts.len());
    for (name, of_topic) in cuts {
        let mut partitions = Vec::with_capacity(of_topic.len());
        for (partition_index, cut) in of_topic {
            let (low_watermark, code) = match cut {
                Ok(cut) => everywhere(cut, deadline).await,
                Err(code) => (-1, code),
            };
            let error_code = code as i16;
            partitions.push(DeleteRecordsPartitionResult { partition_index, low_watermark, error_code });
        }
        topics.push(DeleteRecordsTopicResult { name, partitions });
    }
    DeleteRecordsResponse { topics, ..Default::default() }
}

async fn cut(broker: &Broker, topic: &str, index: i32, offset: i64) -> Result<Cut, ErrorCode> {
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
    let here = Arc::clone(&partition);
    let done = offload(move || Ok(here.delete_records(offset))).await;
    done.unwrap_or(Err(ErrorCode::UnknownServerError)).map(|start| (partition, start))
}

/// Where the logs of everybody in sync start, and whether all of them start at the cut.
async fn everywhere((partition, start): Cut, deadline: Instant) -> (i64, ErrorCode) {
    match tokio::time::timeout_at(deadline, partition.gone_everywhere(start)).await {
        Ok(Ok(low)) => (low, ErrorCode::None),
        Ok(Err(code)) => (-1, code),
        Err(_) => (partition.low_watermark(), ErrorCode::RequestTimedOut),
    }
}
