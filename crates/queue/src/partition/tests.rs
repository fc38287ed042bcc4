//! Partitions over a real journal whose disk syncs on request.

use std::sync::Arc;

use bytes::Bytes;

use moim_wire_kafka::messages::{WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest};
use moim_wire_kafka::records::{ControlKind, control_batch};

use super::{ErrorCode, FromClient, NotAppended, Partition, TxnMarker, VerificationGuard};
use crate::dispatch::Request;
use crate::handlers;
use crate::testing::{TestBroker, append, batch, wait};

#[test]
fn late_durability_notification_of_deleted_partition_does_not_move_high_watermark() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, batch(|b| b, "k", "not durable"));
    partition.on_durable();
    assert_eq!(partition.high_watermark(), 0);
    fixture.sync(&partition);
    assert_eq!(partition.high_watermark(), 1);
}

#[test]
fn leader_epoch_never_decreases_without_appends() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, batch(|b| b, "k", "v"));
    fixture.sync(&partition);
    drop(partition);
    let fixture = fixture.restart(false);
    assert_eq!(fixture.partition("t").leader_epoch(), 1, "a crash starts a new epoch");
    let fixture = fixture.restart(true);
    assert_eq!(fixture.partition("t").leader_epoch(), 2, "and so does every other run");
    assert_eq!(fixture.partition("t").end_of_epoch(0), (0, 1));
}

#[test]
fn last_stable_offset_follows_log_start_offset() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0).transactional(true), "k", "open"));
    append(&partition, batch(|b| b, "k", "v"));
    fixture.sync(&partition);
    assert_eq!(partition.last_stable(), 0);
    assert_eq!(partition.delete_records(1), Ok(1));
    assert_eq!(partition.last_stable(), 1);
}

#[test]
fn producer_with_old_timestamps_is_not_expired() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0), "k", "from 1970"));
    fixture.sync(&partition);
    drop(partition);
    let fixture = fixture.restart(false);
    let partition = fixture.partition("t");
    let now_ms = fixture.broker.clock.wall_ms();
    partition.with_producers(|p| p.expire(now_ms, 86_400_000));
    assert_eq!(partition.with_producers(|p| p.last_offset(7)), Some(0), "its duplicates would be appended");
}

#[test]
fn max_timestamp_lookup_ignores_transaction_markers() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0).transactional(true), "k", "v"));
    append(&partition, control_batch(ControlKind::Commit, 7, 0, 0, i64::MAX / 2, 0, 0));
    fixture.sync(&partition);
    let (timestamp, offset) = partition.max_timestamp_record(2).unwrap().unwrap();
    assert_eq!(offset, 0, "a marker is not a data record");
    assert!((0..i64::MAX / 2).contains(&timestamp));
    append(&partition, batch(|b| b, "k", "later"));
    fixture.sync(&partition);
    assert_eq!(
        partition.max_timestamp_record(1).unwrap(),
        Some((timestamp, 0)),
        "records above the limit are not found"
    );
}

#[test]
fn batch_after_rejected_batch_gets_the_same_error() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[("min.insync.replicas", "2")]);
    let offer_at = |now_ms: i64, acks_all: bool, producer: i64, sequence: i32| {
        let verify = |guard: VerificationGuard| Ok(guard);
        let work = std::cell::Cell::new(usize::MAX);
        let client = FromClient { now_ms, acks_all, verify: &verify, work: &work };
        let one = batch(|b| b.producer(producer, 0, sequence), "k", "v");
        let appended = partition.append_from_client(&one, &client).map(|appended| appended.base_offset);
        appended.map_err(|not| match not {
            NotAppended::Refused(refused) => refused.code,
            NotAppended::TooMuchWork => panic!("the work budget is unlimited"),
        })
    };
    let offer = |acks_all, producer, sequence| offer_at(1_000, acks_all, producer, sequence);
    let (refused, gap) = (Err(ErrorCode::NotEnoughReplicas), Err(ErrorCode::OutOfOrderSequenceNumber));
    assert_eq!(offer(false, 7, 0), Ok(0));
    assert_eq!(offer(true, 7, 1), refused);
    // A batch already in flight. OUT_OF_ORDER_SEQUENCE_NUMBER would make the client start a new epoch.
    assert_eq!(offer(false, 7, 2), refused);
    assert_eq!(offer(true, 7, 3), refused);
    assert_eq!(offer(false, 7, 0), Ok(0), "a retry is a duplicate");
    assert_eq!(offer(false, 7, 2), refused, "and has no effect");
    assert_eq!(offer(false, 7, 1), Ok(1));
    assert_eq!(offer(false, 7, 3), gap, "caused by the client");
    assert_eq!(offer(false, 7, 2), Ok(2));
    // A new producer may begin with any sequence, so the rejected batch must be remembered.
    assert_eq!(offer(true, 8, 0), refused);
    assert_eq!(offer(false, 8, 1), refused);
    assert_eq!(offer(false, 8, 0), Ok(3));
    assert_eq!(offer(false, 8, 1), Ok(4));
    // A client that gave up its batch gets the sequence error.
    assert_eq!(offer(true, 7, 3), refused);
    assert_eq!(offer_at(40_000, false, 7, 4), gap);
}

/// A transactional batch of producer 7.
fn transactional(epoch: i16, sequence: i32) -> Bytes {
    batch(|b| b.producer(7, epoch, sequence).transactional(true), "k", "v")
}

fn marker(epoch: i16, commit: bool, attempt: u64) -> TxnMarker {
    TxnMarker {
        producer_id: 7,
        producer_epoch: epoch,
        commit,
        coordinator_epoch: 0,
        epoch_per_transaction: false,
        attempt: Some(attempt),
    }
}

fn offer(partition: &Partition, batch: Bytes, guard: Option<VerificationGuard>) -> Result<i64, ErrorCode> {
    let appended = partition.append_own(batch, 1_000, None, guard);
    appended.map(|appended| appended.base_offset).map_err(|refused| refused.code)
}

#[test]
fn batch_verified_before_the_marker_opens_no_transaction() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    let refused = Err(ErrorCode::NotEnoughReplicas);
    let guard = |sequence| partition.begin_verification((7, 0), sequence).map(|guard| guard.verified(0));
    assert_eq!(offer(&partition, transactional(0, 0), None), refused, "never verified");
    assert_eq!(offer(&partition, transactional(0, 0), guard(0)), Ok(0));
    assert_eq!(guard(1), None, "the transaction is open");
    partition.append_marker(marker(0, false, 1), 1_000, None).unwrap();
    // Checked while the transaction was open, appended after its end.
    assert_eq!(offer(&partition, transactional(0, 1), None), refused);
    // Verified while the transaction was open, appended after its end.
    let verified = guard(1);
    partition.append_marker(marker(0, false, 2), 1_000, None).unwrap();
    assert_eq!(offer(&partition, transactional(0, 1), verified), refused);
    // Verified for another batch.
    assert_eq!(offer(&partition, transactional(0, 1), guard(2)), refused);
    assert_eq!(offer(&partition, transactional(1, 0), guard(0)), refused);
    fixture.sync(&partition);
    assert_eq!(partition.last_stable(), partition.high_watermark(), "no transaction is open");
    assert_eq!(offer(&partition, transactional(0, 1), guard(1)), Ok(3));
}

#[test]
fn verification_by_replaced_coordinator_is_rejected() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, transactional(0, 0));
    let by_the_next = TxnMarker { coordinator_epoch: 5, ..marker(0, true, 1) };
    partition.append_marker(by_the_next, 1_000, None).unwrap();
    let guard = partition.begin_verification((7, 0), 1).unwrap();
    let refused = Err(ErrorCode::NotEnoughReplicas);
    assert_eq!(offer(&partition, transactional(0, 1), Some(guard.verified(4))), refused);
    assert_eq!(offer(&partition, transactional(0, 1), Some(guard.verified(5))), Ok(2));
}

#[test]
fn late_marker_does_not_end_the_next_transaction() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, transactional(0, 0));
    // The first attempt was not acknowledged in time; the second one ends the transaction.
    partition.append_marker(marker(0, true, 2), 1_000, None).unwrap();
    append(&partition, transactional(0, 1));
    let late = |marker: TxnMarker, leader_epoch| {
        partition.append_marker(marker, 1_000, leader_epoch).map(|_| ()).map_err(|refused| refused.code)
    };
    assert_eq!(late(marker(0, true, 1), None), Err(ErrorCode::RequestTimedOut));
    assert_eq!(late(marker(0, true, 2), None), Err(ErrorCode::RequestTimedOut), "sent twice");
    assert_eq!(late(marker(0, true, 9), Some(77)), Err(ErrorCode::NotLeaderOrFollower));
    fixture.sync(&partition);
    assert_eq!(partition.last_stable(), 2, "the next transaction is open");
    assert_eq!(late(marker(0, false, 3), None), Ok(()));
    fixture.sync(&partition);
    assert_eq!(partition.last_stable(), 4);
    assert_eq!(partition.with_producers(|p| p.aborted(0, 4)).len(), 1);
}

#[test]
fn version_2_marker_needs_a_newer_epoch_than_the_transaction() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, transactional(3, 0));
    let end = |epoch, attempt| {
        let marker = TxnMarker { epoch_per_transaction: true, ..marker(epoch, true, attempt) };
        partition.append_marker(marker, 1_000, None).map(|_| ()).map_err(|refused| refused.code)
    };
    assert_eq!(end(3, 1), Err(ErrorCode::InvalidProducerEpoch));
    assert_eq!(end(4, 2), Ok(()));
    assert_eq!(end(4, 3), Ok(()), "no transaction is open");
    append(&partition, transactional(4, 0));
    assert_eq!(end(4, 4), Err(ErrorCode::InvalidProducerEpoch), "the marker of the previous transaction");
    assert_eq!(end(3, 5), Err(ErrorCode::InvalidProducerEpoch));
}

#[test]
fn all_markers_of_a_request_are_appended_at_once() {
    let fixture = TestBroker::new();
    let partitions = ["a", "b"].map(|name| fixture.topic(name, &[]));
    for partition in &partitions {
        append(partition, transactional(0, 0));
    }
    let topics =
        ["a", "b"].map(|name| WritableTxnMarkerTopic { name: name.into(), partition_indexes: vec![0] });
    let marker = WritableTxnMarker {
        producer_id: 7,
        producer_epoch: 0,
        transaction_result: true,
        topics: topics.into(),
        ..Default::default()
    };
    let request = WriteTxnMarkersRequest { markers: vec![marker] };
    let context = Request { version: 1, client_id: "test".into(), client_host: "/127.0.0.1".into() };
    let answer = handlers::write_txn_markers::handle(Arc::clone(&fixture.broker), request, context);
    // No marker waits for the commit of another: the caller may time out before it comes.
    assert_eq!(partitions.each_ref().map(|partition| partition.journal.end()), [2, 2]);
    partitions.iter().for_each(|partition| fixture.sync(partition));
    let answer = wait(answer);
    let codes = answer.markers[0].topics.iter().map(|topic| topic.partitions[0].error_code);
    assert_eq!(codes.collect::<Vec<_>>(), [0, 0]);
}

/// A partition whose producer snapshot, as a crash finds it, is from offset 1, and whose log starts at offset 4.
fn with_snapshot_below_log_start(transactions: bool) -> (TestBroker, Arc<Partition>) {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0).transactional(transactions), "k", "v"));
    fixture.sync(&partition);
    drop(partition);
    let fixture = fixture.restart(true);
    let partition = fixture.partition("t");
    assert_eq!(partition.journal.snapshot().unwrap().0, 1);
    for sequence in 1..3 {
        append(&partition, batch(|b| b.producer(7, 0, sequence).transactional(transactions), "k", "v"));
    }
    if transactions {
        partition.append_marker(marker(0, true, 1), 1_000, None).unwrap();
    } else {
        append(&partition, batch(|b| b.producer(7, 0, 3), "k", "v"));
    }
    append(&partition, batch(|b| b, "k", "another"));
    fixture.sync(&partition);
    assert_eq!(partition.delete_records(4), Ok(4));
    fixture.sync(&partition);
    drop(partition);
    let fixture = fixture.restart(false);
    let partition = fixture.partition("t");
    assert_eq!((partition.journal.start(), partition.high_watermark()), (4, 5));
    (fixture, partition)
}

#[test]
fn transaction_ended_below_log_start_is_not_open_after_crash() {
    let (_still, partition) = with_snapshot_below_log_start(true);
    assert_eq!(partition.last_stable(), 5);
    assert_eq!(partition.begin_verification((7, 0), 3).map(|guard| guard.producer()), Some((7, 0)));
}

#[test]
fn producer_with_batches_below_log_start_continues_after_crash() {
    let (_still, partition) = with_snapshot_below_log_start(false);
    assert_eq!(offer(&partition, batch(|b| b.producer(7, 0, 4), "k", "v"), None), Ok(5));
}
