//! WriteTxnMarkers: ends transactions in single partitions. Sent by transaction coordinators, and by administrators
//! to end a hanging transaction.
//!
//! All markers of a request are appended when it is read, and their commits are awaited together. So nothing is
//! appended after the caller may have timed out: only the wait is left then.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::oneshot;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::{
    WritableTxnMarker, WritableTxnMarkerPartitionResult, WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult, WriteTxnMarkersRequest, WriteTxnMarkersResponse,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::shared;
use crate::partition::TxnMarker;
use crate::transaction_service::append_marker;
use crate::transactions::TopicPartition;

/// Completes when one marker is committed.
type Commit = oneshot::Receiver<Result<(), ErrorCode>>;

pub(crate) fn handle(
    broker: Arc<Broker>,
    request: WriteTxnMarkersRequest,
    _: Request,
) -> impl Future<Output = WriteTxnMarkersResponse> + Send {
    #[cfg(feature = "planted")]
    let late = crate::planted::is_on(crate::planted::Bug::LateMarker);
    #[cfg(not(feature = "planted"))]
    let late = false;
    let commits = if late { None } else { Some(append_all(&broker, &request)) };
    async move {
        let commits = match commits {
            Some(commits) => commits,
            // Planted bug: often so late that the caller has timed out and retries.
            None => {
                tokio::time::sleep(std::time::Duration::from_millis(fastrand::u64(..600))).await;
                append_all(&broker, &request)
            }
        };
        respond(request, commits).await
    }
}

fn append_all(broker: &Broker, request: &WriteTxnMarkersRequest) -> Vec<Commit> {
    let mut commits = Vec::new();
    for marker in &request.markers {
        let leader_epoch = (marker.leader_epoch >= 0).then_some(marker.leader_epoch);
        for topic in &marker.topics {
            let name = shared(&topic.name);
            for index in &topic.partition_indexes {
                let at = TopicPartition::new(Arc::clone(&name), *index);
                commits.push(append(broker, &at, to_write(marker), leader_epoch));
            }
        }
    }
    commits
}

fn to_write(marker: &WritableTxnMarker) -> TxnMarker {
    TxnMarker {
        producer_id: marker.producer_id,
        producer_epoch: marker.producer_epoch,
        commit: marker.transaction_result,
        coordinator_epoch: marker.coordinator_epoch,
        epoch_per_transaction: marker.transaction_version >= 2,
        attempt: u64::try_from(marker.attempt).ok(),
    }
}

fn append(broker: &Broker, at: &TopicPartition, marker: TxnMarker, leader_epoch: Option<i32>) -> Commit {
    let (sender, committed) = oneshot::channel();
    let done = move |result| {
        // The request may have been dropped meanwhile.
        let _ = sender.send(result);
    };
    append_marker(broker, at, marker, leader_epoch, Box::new(done));
    committed
}

/// Waits for all markers; `commits` are in request order.
async fn respond(request: WriteTxnMarkersRequest, commits: Vec<Commit>) -> WriteTxnMarkersResponse {
    let mut commits = commits.into_iter();
    let mut markers = Vec::with_capacity(request.markers.len());
    for marker in request.markers {
        let mut topics = Vec::with_capacity(marker.topics.len());
        for topic in marker.topics {
            let mut partitions = Vec::with_capacity(topic.partition_indexes.len());
            for partition_index in topic.partition_indexes {
                let lost = Err(ErrorCode::UnknownServerError);
                let result = match commits.next() {
                    Some(commit) => commit.await.unwrap_or(lost),
                    None => lost,
                };
                let error_code = result.err().unwrap_or(ErrorCode::None) as i16;
                partitions.push(WritableTxnMarkerPartitionResult { partition_index, error_code });
            }
            topics.push(WritableTxnMarkerTopicResult { name: topic.name, partitions });
        }
        markers.push(WritableTxnMarkerResult { producer_id: marker.producer_id, topics });
    }
    WriteTxnMarkersResponse { markers }
}
