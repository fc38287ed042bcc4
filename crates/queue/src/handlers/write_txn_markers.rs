//! WriteTxnMarkers: ends transactions in single partitions. Brokers send it to each other, and administrators to
//! end a transaction that hangs.

use std::sync::Arc;

use tokio::sync::oneshot;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::{
    WritableTxnMarker, WritableTxnMarkerPartitionResult, WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult, WriteTxnMarkersRequest, WriteTxnMarkersResponse,
};
use moim_wire_kafka::records::{self, ControlKind};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::partition::Ack;
use crate::topics::OFFSETS_TOPIC;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: WriteTxnMarkersRequest,
    _: Request,
) -> WriteTxnMarkersResponse {
    let mut markers = Vec::with_capacity(request.markers.len());
    for marker in &request.markers {
        let mut topics = Vec::with_capacity(marker.topics.len());
        for topic in &marker.topics {
            let mut partitions = Vec::with_capacity(topic.partition_indexes.len());
            for &partition_index in &topic.partition_indexes {
                let code = write(&broker, marker, &topic.name, partition_index).await.err();
                let error_code = code.unwrap_or(ErrorCode::None) as i16;
                partitions.push(WritableTxnMarkerPartitionResult { partition_index, error_code });
            }
            topics.push(WritableTxnMarkerTopicResult { name: topic.name.clone(), partitions });
        }
        markers.push(WritableTxnMarkerResult { producer_id: marker.producer_id, topics });
    }
    WriteTxnMarkersResponse { markers }
}

async fn write(
    broker: &Broker,
    marker: &WritableTxnMarker,
    topic: &str,
    index: i32,
) -> Result<(), ErrorCode> {
    let partition = broker.topics.partition(topic, index)?;
    let kind = if marker.transaction_result { ControlKind::Commit } else { ControlKind::Abort };
    let wall_ms = broker.clock.wall_ms();
    let WritableTxnMarker { producer_id, producer_epoch, coordinator_epoch, .. } = *marker;
    let batch = records::control_batch(kind, producer_id, producer_epoch, coordinator_epoch, wall_ms, 0, 0);
    if topic == OFFSETS_TOPIC && !broker.groups.is_ready(index) {
        // Whoever reads the groups now might not read the marker: not before it is done.
        return Err(ErrorCode::CoordinatorLoadInProgress);
    }
    let appended = partition.append_own(batch, wall_ms, None).map_err(|refused| refused.code)?;
    let (done, committed) = oneshot::channel();
    let done = move |result| {
        // The request may have been given up meanwhile.
        let _ = done.send(result);
    };
    partition.when_committed(&appended, Ack::Call(Box::new(done)));
    committed.await.unwrap_or(Err(ErrorCode::UnknownServerError))?;
    if topic == OFFSETS_TOPIC {
        broker.groups.on_marker(broker, index, producer_id, producer_epoch, marker.transaction_result);
    }
    Ok(())
}
