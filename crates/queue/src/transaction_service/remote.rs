//! Requests to remote brokers: WriteTxnMarkers, and AddPartitionsToTxn to a remote coordinator.
//!
//! A marker whose response was lost is sent again, and may then be in the log twice. That is harmless as long as the
//! next transaction has not begun. If the first one is handled later than that, the partition rejects it: it carries
//! the number of its attempt and the leader epoch it was sent to.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::add_partitions_to_txn::{
    AddPartitionsToTxnRequest, AddPartitionsToTxnResponse, AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
};
use moim_wire_kafka::messages::{
    WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest, WriteTxnMarkersResponse,
};

use super::markers::RemoteMarker;
use super::{ADDED, Verification};
use crate::brokers::LiveBroker;
use crate::peers::Peers;

/// The first WriteTxnMarkers version that says whether every transaction of the producer has its own epoch.
const WRITE_MARKERS_VERSION: i16 = 2;
/// The first AddPartitionsToTxn version with verify-only transactions.
const VERIFY_VERSION: i16 = 4;
/// The AddPartitionsToTxn version with which a broker adds partitions for a producer that does not send the request.
pub(super) const ADD_VERSION: i16 = 5;

/// Sends markers to a broker; one result each, in order.
pub(super) async fn write_markers(
    peers: &Peers,
    leader: &LiveBroker,
    markers: &[RemoteMarker],
) -> Vec<Result<(), ErrorCode>> {
    let request = WriteTxnMarkersRequest {
        markers: markers
            .iter()
            .map(|remote| WritableTxnMarker {
                producer_id: remote.marker.producer_id,
                producer_epoch: remote.marker.producer_epoch,
                transaction_result: remote.marker.commit,
                topics: vec![WritableTxnMarkerTopic {
                    name: (&*remote.at.topic).into(),
                    partition_indexes: vec![remote.at.partition],
                }],
                coordinator_epoch: remote.marker.coordinator_epoch,
                transaction_version: if remote.marker.epoch_per_transaction { 2 } else { 1 },
                attempt: remote.marker.attempt.and_then(|attempt| i64::try_from(attempt).ok()).unwrap_or(-1),
                leader_epoch: remote.leader_epoch,
            })
            .collect(),
    };
    let response: Result<WriteTxnMarkersResponse, _> =
        peers.call(leader, &request, WRITE_MARKERS_VERSION).await;
    match response {
        Err(code) => vec![Err(code); markers.len()],
        // The response is in request order, one partition per marker.
        Ok(response) => (0..markers.len())
            .map(|at| {
                let result = response.markers.get(at).and_then(|m| m.topics.first()?.partitions.first());
                result.map_or(Err(ErrorCode::UnknownServerError), |result| of(result.error_code))
            })
            .collect(),
    }
}

/// Verifies with a remote coordinator that partitions belong to a transaction.
pub(super) async fn verify(
    peers: &Peers,
    coordinator_broker: &LiveBroker,
    transactional_id: &str,
    producer: (i64, i16),
    partitions: &[(&str, i32)],
) -> Result<Vec<Verification>, ErrorCode> {
    request_partitions(peers, coordinator_broker, (transactional_id, producer, true), partitions).await
}

/// Has a remote coordinator add partitions to a transaction.
pub(super) async fn add(
    peers: &Peers,
    coordinator_broker: &LiveBroker,
    transactional_id: &str,
    producer: (i64, i16),
    partitions: &[(&str, i32)],
) -> Result<Vec<Verification>, ErrorCode> {
    let added =
        request_partitions(peers, coordinator_broker, (transactional_id, producer, false), partitions)
            .await?;
    Ok(added.into_iter().map(|added| added.map(|_| ADDED)).collect())
}

async fn request_partitions(
    peers: &Peers,
    coordinator_broker: &LiveBroker,
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
    let response: AddPartitionsToTxnResponse = peers.call(coordinator_broker, &request, version).await?;
    of(response.error_code)?;
    let result = response.results_by_transaction.into_iter().next().ok_or(ErrorCode::UnknownServerError)?;
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
