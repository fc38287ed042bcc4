//! Partitions over a real journal whose disk works when told to.

use super::{BatchHeader, ErrorCode, FromClient};
use crate::testing::{Still, append, batch};

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
fn what_is_behind_a_refused_batch_is_no_gap() {
    let still = Still::new();
    let partition = still.topic("t", &[("min.insync.replicas", "2")]);
    let offer_at = |now_ms: i64, acks_all: bool, producer: i64, sequence: i32| {
        let verify = |_: &BatchHeader| Ok(None);
        let client = FromClient { now_ms, acks_all, verify: &verify };
        let one = batch(|b| b.producer(producer, 0, sequence), "k", "v");
        partition.append_from_client(one, &client).map(|appended| appended.base_offset).map_err(|r| r.code)
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
