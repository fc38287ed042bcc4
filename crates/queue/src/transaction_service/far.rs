//! What transactions need of other brokers: markers written there, and questions to the coordinator.
//!
//! A marker whose answer got lost is sent again, and may then be there twice. That is harmless for as long as the
//! transaction after it has not begun. If the first one is handled later than that, the partition refuses it: it carries
//! the number of its attempt and the leader epoch it was sent to.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::add_partitions_to_txn::{
    AddPartitionsToTxnRequest, AddPartitionsToTxnResponse, AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
};
use moim_wire_kafka::messages::{
    WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest, WriteTxnMarkersResponse,
};

use super::markers::FarMarker;
use super::{ADDED, Verification};
use crate::brokers::LiveBroker;
use crate::peers::Peers;

/// The first version that says whether every transaction of the producer has an epoch of its own.
const WRITE_MARKERS_VERSION: i16 = 2;
/// The first version in which brokers may verify without adding.
const VERIFY_VERSION: i16 = 4;
/// In which a broker adds partitions on behalf of a producer that does not announce them.
pub(super) const ADD_VERSION: i16 = 5;

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
                coordinator_epoch: far.marker.coordinator_epoch,
                transaction_version: if far.marker.epoch_per_transaction { 2 } else { 1 },
                attempt: far.marker.attempt.and_then(|attempt| i64::try_from(attempt).ok()).unwrap_or(-1),
                leader_epoch: far.leader_epoch,
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
    producer: (i64, i16),
    partitions: &[(&str, i32)],
) -> Result<Vec<Verification>, ErrorCode> {
    ask(peers, keeper, (transactional_id, producer, true), partitions).await
}

/// Has the coordinator of a transactional id add partitions to its transaction.
pub(super) async fn add(
    peers: &Peers,
    keeper: &LiveBroker,
    transactional_id: &str,
    producer: (i64, i16),
    partitions: &[(&str, i32)],
) -> Result<Vec<Verification>, ErrorCode> {
    let added = ask(peers, keeper, (transactional_id, producer, false), partitions).await?;
    Ok(added.into_iter().map(|added| added.map(|_| ADDED)).collect())
}

async fn ask(
    peers: &Peers,
    keeper: &LiveBroker,
    (transactional_id, (producer_id, producer_epoch), verify_only): (&str, (i64, i16), bool),
    partitions: &[(&str, i32)],
) -> Result<Vec<Verification>, ErrorCode> {
    let topics = partitions
        .iter()
        .map(|(topic, index)| AddPartitionsToTxnTopic { name: (*topic).into(), partitions: vec![*index] });
    let transaction = AddPartitionsToTxnTransaction {
        transactional_id: transactional_id.into(),
        producer_id,
        producer_epoch,
        verify_only,
        topics: topics.collect(),
    };
    let request = AddPartitionsToTxnRequest { transactions: vec![transaction], ..Default::default() };
    let version = if verify_only { VERIFY_VERSION } else { ADD_VERSION };
    let answer: AddPartitionsToTxnResponse = peers.call(keeper, &request, version).await?;
    of(answer.error_code)?;
    let result = answer.results_by_transaction.into_iter().next().ok_or(ErrorCode::UnknownServerError)?;
    let code_of = |topic: &str, index: i32| {
        let topics = result.topic_results.iter().filter(|t| &*t.name == topic);
        let found = topics.flat_map(|t| &t.results_by_partition).find(|p| p.partition_index == index);
        found.map_or(Err(ErrorCode::UnknownServerError), |p| {
            of(p.partition_error_code).map(|()| result.coordinator_epoch)
        })
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
