//! Partitions over a real journal whose disk works when told to.

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
