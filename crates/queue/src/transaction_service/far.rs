//! What transactions need of other brokers: markers written there, and questions to the coordinator.
//!
//! A marker whose answer got lost is sent again, and may then be there twice. That is harmless for as long as the
//! transaction after it has not begun, which waits for the answer; the connection of an unanswered marker is closed
//! before the next try, so that an old one does not arrive behind a new transaction.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::add_partitions_to_txn::{
    AddPartitionsToTxnRequest, AddPartitionsToTxnResponse, AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
};
use moim_wire_kafka::messages::{
    WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest, WriteTxnMarkersResponse,
};

use super::FarMarker;
use crate::brokers::LiveBroker;
use crate::peers::Peers;

const WRITE_MARKERS_VERSION: i16 = 1;
/// The first version in which brokers may verify without adding.
const VERIFY_VERSION: i16 = 4;

/// Has a broker write markers; one result each, in order.
pub(super) async fn write_markers(
    peers: &Peers,
    leader: &LiveBroker,
    markers: &[FarMarker],
) -> Vec<Result<(), ErrorCode>> {
    let request = WriteTxnMarkersRequest {
        markers: markers
            .iter()
            .map(|far| WritableTxnMarker {
                producer_id: far.marker.producer_id,
                producer_epoch: far.marker.producer_epoch,
                transaction_result: far.marker.commit,
                topics: vec![WritableTxnMarkerTopic {
                    name: (&*far.at.topic).into(),
                    partition_indexes: vec![far.at.partition],
                }],
                coordinator_epoch: far.coordinator_epoch,
                ..Default::default()
            })
            .collect(),
    };
    let answer: Result<WriteTxnMarkersResponse, _> =
        peers.call(leader, &request, WRITE_MARKERS_VERSION).await;
    match answer {
        Err(code) => vec![Err(code); markers.len()],
        // Answered in the order asked, one partition each.
        Ok(answer) => (0..markers.len())
            .map(|at| {
                let result = answer.markers.get(at).and_then(|m| m.topics.first()?.partitions.first());
                result.map_or(Err(ErrorCode::UnknownServerError), |result| of(result.error_code))
            })
            .collect(),
    }
}

/// Asks the coordinator of a transactional id whether partitions belong to its transaction.
pub(super) async fn verify(
    peers: &Peers,
    keeper: &LiveBroker,
    transactional_id: &str,
    (producer_id, producer_epoch): (i64, i16),
    partitions: &[(&str, i32)],
) -> Result<Vec<Result<(), ErrorCode>>, ErrorCode> {
    let topics = partitions
        .iter()
        .map(|(topic, index)| AddPartitionsToTxnTopic { name: (*topic).into(), partitions: vec![*index] });
    let transaction = AddPartitionsToTxnTransaction {
        transactional_id: transactional_id.into(),
        producer_id,
        producer_epoch,
        verify_only: true,
        topics: topics.collect(),
    };
    let request = AddPartitionsToTxnRequest { transactions: vec![transaction], ..Default::default() };
    let answer: AddPartitionsToTxnResponse = peers.call(keeper, &request, VERIFY_VERSION).await?;
    of(answer.error_code)?;
    let result = answer.results_by_transaction.into_iter().next().ok_or(ErrorCode::UnknownServerError)?;
    let code_of = |topic: &str, index: i32| {
        let topics = result.topic_results.iter().filter(|t| &*t.name == topic);
        let found = topics.flat_map(|t| &t.results_by_partition).find(|p| p.partition_index == index);
        found.map_or(Err(ErrorCode::UnknownServerError), |p| of(p.partition_error_code))
    };
    Ok(partitions.iter().map(|(topic, index)| code_of(topic, *index)).collect())
}

fn of(code: i16) -> Result<(), ErrorCode> {
    match ErrorCode::try_from(code) {
        Ok(ErrorCode::None) => Ok(()),
        Ok(code) => Err(code),
        Err(_) => Err(ErrorCode::UnknownServerError),
    }
}
