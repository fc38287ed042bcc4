//! Partitions over a real journal whose disk works when told to.

use std::sync::Arc;

use bytes::Bytes;

use moim_wire_kafka::messages::{WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest};
use moim_wire_kafka::records::{ControlKind, control_batch};

use super::{ErrorCode, FromClient, NotAppended, Partition, TxnMarker, VerificationGuard};
use crate::dispatch::Request;
use crate::handlers;
use crate::testing::{Still, append, batch, wait};

#[test]
fn late_news_of_a_deleted_partition_do_not_move_the_watermark_of_the_next() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, batch(|b| b, "k", "not durable"));
    partition.on_durable();
    assert_eq!(partition.high_watermark(), 0);
    still.sync(&partition);
    assert_eq!(partition.high_watermark(), 1);
}

#[test]
fn a_leader_epoch_never_goes_back_also_without_appends() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    drop(partition);
    let still = still.restart(false);
    assert_eq!(still.partition("t").leader_epoch(), 1, "a crash begins a new epoch");
    let still = still.restart(true);
    assert_eq!(still.partition("t").leader_epoch(), 2, "and so does every other run");
    assert_eq!(still.partition("t").end_of_epoch(0), (0, 1));
}

#[test]
fn the_last_stable_offset_follows_the_log_start() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0).transactional(true), "k", "open"));
    append(&partition, batch(|b| b, "k", "v"));
    still.sync(&partition);
    assert_eq!(partition.last_stable(), 0);
    assert_eq!(partition.delete_records(1), Ok(1));
    assert_eq!(partition.last_stable(), 1);
}

#[test]
fn a_producer_whose_clock_is_decades_behind_is_not_forgotten_at_once() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0), "k", "from 1970"));
    still.sync(&partition);
    drop(partition);
    let still = still.restart(false);
    let partition = still.partition("t");
    let now_ms = still.broker.clock.wall_ms();
    partition.with_producers(|p| p.expire(now_ms, 86_400_000));
    assert_eq!(partition.with_producers(|p| p.last_offset(7)), Some(0), "its repeats would be taken for new");
}

#[test]
fn the_newest_record_is_found_behind_a_marker() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0).transactional(true), "k", "v"));
    append(&partition, control_batch(ControlKind::Commit, 7, 0, 0, i64::MAX / 2, 0, 0));
    still.sync(&partition);
    let (timestamp, offset) = partition.newest(2).unwrap().unwrap();
    assert_eq!(offset, 0, "a marker has no timestamp to look for");
    assert!((0..i64::MAX / 2).contains(&timestamp));
    append(&partition, batch(|b| b, "k", "later"));
    still.sync(&partition);
    assert_eq!(partition.newest(1).unwrap(), Some((timestamp, 0)), "what is not visible is not found");
}

#[test]
fn what_is_behind_a_refused_batch_is_no_gap() {
    let still = Still::new();
    let partition = still.topic("t", &[("min.insync.replicas", "2")]);
    let offer_at = |now_ms: i64, acks_all: bool, producer: i64, sequence: i32| {
        let verify = |guard: VerificationGuard| Ok(guard);
        let work = std::cell::Cell::new(usize::MAX);
        let client = FromClient { now_ms, acks_all, verify: &verify, work: &work };
        let one = batch(|b| b.producer(producer, 0, sequence), "k", "v");
        let appended = partition.append_from_client(&one, &client).map(|appended| appended.base_offset);
        appended.map_err(|not| match not {
            NotAppended::Refused(refused) => refused.code,
            NotAppended::TooMuchWork => panic!("there is all the time in the world"),
        })
    };
    let offer = |acks_all, producer, sequence| offer_at(1_000, acks_all, producer, sequence);
    let (refused, gap) = (Err(ErrorCode::NotEnoughReplicas), Err(ErrorCode::OutOfOrderSequenceNumber));
    assert_eq!(offer(false, 7, 0), Ok(0));
    assert_eq!(offer(true, 7, 1), refused);
    // It was on its way already. Called a gap, it would have the client begin a new epoch.
    assert_eq!(offer(false, 7, 2), refused);
    assert_eq!(offer(true, 7, 3), refused);
    assert_eq!(offer(false, 7, 0), Ok(0), "a repeat is one");
    assert_eq!(offer(false, 7, 2), refused, "and changes nothing");
    assert_eq!(offer(false, 7, 1), Ok(1));
    assert_eq!(offer(false, 7, 3), gap, "which the client made");
    assert_eq!(offer(false, 7, 2), Ok(2));
    // Of a producer that is new here any sequence would be taken for the first.
    assert_eq!(offer(true, 8, 0), refused);
    assert_eq!(offer(false, 8, 1), refused);
    assert_eq!(offer(false, 8, 0), Ok(3));
    assert_eq!(offer(false, 8, 1), Ok(4));
    // A client that gave up is told what it did.
    assert_eq!(offer(true, 7, 3), refused);
    assert_eq!(offer_at(40_000, false, 7, 4), gap);
}

/// A batch of producer 7 that is part of a transaction.
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
fn a_batch_whose_transaction_ended_meanwhile_opens_none() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
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
    still.sync(&partition);
    assert_eq!(partition.last_stable(), partition.high_watermark(), "no transaction is open");
    assert_eq!(offer(&partition, transactional(0, 1), guard(1)), Ok(3));
}

#[test]
fn a_coordinator_that_was_replaced_verifies_nothing() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, transactional(0, 0));
    let by_the_next = TxnMarker { coordinator_epoch: 5, ..marker(0, true, 1) };
    partition.append_marker(by_the_next, 1_000, None).unwrap();
    let guard = partition.begin_verification((7, 0), 1).unwrap();
    let refused = Err(ErrorCode::NotEnoughReplicas);
    assert_eq!(offer(&partition, transactional(0, 1), Some(guard.verified(4))), refused);
    assert_eq!(offer(&partition, transactional(0, 1), Some(guard.verified(5))), Ok(2));
}

#[test]
fn a_late_marker_does_not_end_the_next_transaction() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, transactional(0, 0));
    // The first attempt was not answered in time; the second one ends the transaction.
    partition.append_marker(marker(0, true, 2), 1_000, None).unwrap();
    append(&partition, transactional(0, 1));
    let late = |marker: TxnMarker, leader_epoch| {
        partition.append_marker(marker, 1_000, leader_epoch).map(|_| ()).map_err(|refused| refused.code)
    };
    assert_eq!(late(marker(0, true, 1), None), Err(ErrorCode::RequestTimedOut));
    assert_eq!(late(marker(0, true, 2), None), Err(ErrorCode::RequestTimedOut), "sent twice");
    assert_eq!(late(marker(0, true, 9), Some(77)), Err(ErrorCode::NotLeaderOrFollower));
    still.sync(&partition);
    assert_eq!(partition.last_stable(), 2, "the next transaction is open");
    assert_eq!(late(marker(0, false, 3), None), Ok(()));
    still.sync(&partition);
    assert_eq!(partition.last_stable(), 4);
    assert_eq!(partition.with_producers(|p| p.aborted(0, 4)).len(), 1);
}

#[test]
fn a_marker_of_version_2_has_a_newer_epoch_than_the_transaction() {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, transactional(3, 0));
    let end = |epoch, attempt| {
        let marker = TxnMarker { epoch_per_transaction: true, ..marker(epoch, true, attempt) };
        partition.append_marker(marker, 1_000, None).map(|_| ()).map_err(|refused| refused.code)
    };
    assert_eq!(end(3, 1), Err(ErrorCode::InvalidProducerEpoch));
    assert_eq!(end(4, 2), Ok(()));
    assert_eq!(end(4, 3), Ok(()), "there is nothing to end");
    append(&partition, transactional(4, 0));
    assert_eq!(end(4, 4), Err(ErrorCode::InvalidProducerEpoch), "the end of the transaction before");
    assert_eq!(end(3, 5), Err(ErrorCode::InvalidProducerEpoch));
}

#[test]
fn all_markers_of_a_request_are_appended_when_it_is_read() {
    let still = Still::new();
    let partitions = ["a", "b"].map(|name| still.topic(name, &[]));
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
    let answer = handlers::write_txn_markers::handle(Arc::clone(&still.broker), request, context);
    // Nothing waits for the commit of another: the caller may give up before it comes.
    assert_eq!(partitions.each_ref().map(|partition| partition.journal.end()), [2, 2]);
    partitions.iter().for_each(|partition| still.sync(partition));
    let answer = wait(answer);
    let codes = answer.markers[0].topics.iter().map(|topic| topic.partitions[0].error_code);
    assert_eq!(codes.collect::<Vec<_>>(), [0, 0]);
}

/// A partition whose producer snapshot, as a crash finds it, is from offset 1, and whose log starts at offset 4.
fn with_a_snapshot_from_below_the_log_start(transactions: bool) -> (Still, Arc<Partition>) {
    let still = Still::new();
    let partition = still.topic("t", &[]);
    append(&partition, batch(|b| b.producer(7, 0, 0).transactional(transactions), "k", "v"));
    still.sync(&partition);
    drop(partition);
    let still = still.restart(true);
    let partition = still.partition("t");
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
    still.sync(&partition);
    assert_eq!(partition.delete_records(4), Ok(4));
    still.sync(&partition);
    drop(partition);
    let still = still.restart(false);
    let partition = still.partition("t");
    assert_eq!((partition.journal.start(), partition.high_watermark()), (4, 5));
    (still, partition)
}

#[test]
fn a_transaction_that_ended_below_the_log_start_is_not_open_after_a_crash() {
    let (_still, partition) = with_a_snapshot_from_below_the_log_start(true);
    assert_eq!(partition.last_stable(), 5);
    assert_eq!(partition.begin_verification((7, 0), 3).map(|guard| guard.producer()), Some((7, 0)));
}

#[test]
fn a_producer_goes_on_after_a_crash_although_its_batches_are_below_the_log_start() {
    let (_still, partition) = with_a_snapshot_from_below_the_log_start(false);
    assert_eq!(offer(&partition, batch(|b| b.producer(7, 0, 4), "k", "v"), None), Ok(5));
}
