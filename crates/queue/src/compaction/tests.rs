//! Whole rounds over a real journal: what a log says when it is read from the start must not change.

use moim_wire_kafka::records::{BatchBuilder, ControlKind, control_batch};

use super::*;
use crate::testing::{Still, append, batch};

const SETTINGS: &[(&str, &str)] =
    &[("cleanup.policy", "compact"), ("delete.retention.ms", "0"), ("min.cleanable.dirty.ratio", "0")];
const LATER: i64 = 10_000;

fn transactional(sequence: i32) -> impl FnOnce(BatchBuilder) -> BatchBuilder {
    move |builder| builder.producer(7, 0, sequence).transactional(true)
}

fn end(partition: &Partition, kind: ControlKind) {
    append(partition, control_batch(kind, 7, 0, 0, 1_000, 0, 0));
}

/// Compacts everything written so far.
fn round(still: &Still, partition: &Partition, progress: &mut Progress) {
    still.sync(partition);
    partition.journal.roll_if_older(i64::MAX);
    append(partition, batch(|b| b, "last", "so that the segment before it is sealed"));
    still.sync(partition);
    let config = partition.config.load();
    if let Some(done) = compact(partition, &config, progress.of(partition), LATER).unwrap() {
        progress.note(partition, done.clean_until);
    }
}

fn offsets(partition: &Partition) -> Vec<i64> {
    let mut all = Vec::new();
    let journal = &partition.journal;
    journal
        .for_each_frame(journal.start(), journal.end(), &mut |frame, _| {
            all.push(frame.last);
            true
        })
        .unwrap();
    all
}

#[test]
fn a_marker_outlives_the_records_of_its_transaction() {
    let still = Still::new();
    let partition = still.topic("t", SETTINGS);
    append(&partition, batch(transactional(0), "a", "1"));
    end(&partition, ControlKind::Commit);
    append(&partition, batch(transactional(1), "b", "1"));
    end(&partition, ControlKind::Commit);
    let mut progress = Progress::default();
    round(&still, &partition, &mut progress);
    round(&still, &partition, &mut progress);
    let offsets = offsets(&partition);
    assert!(offsets.starts_with(&[0, 1, 2, 3]), "{offsets:?}");
}

#[test]
fn an_aborted_transaction_is_forgotten_with_its_marker() {
    let still = Still::new();
    let partition = still.topic("t", SETTINGS);
    append(&partition, batch(transactional(0), "a", "aborted"));
    end(&partition, ControlKind::Abort);
    append(&partition, batch(transactional(1), "a", "committed"));
    end(&partition, ControlKind::Commit);
    let mut progress = Progress::default();
    round(&still, &partition, &mut progress);
    assert_eq!(offsets(&partition)[..3], [1, 2, 3], "the marker stays a round longer than its records");
    assert_eq!(partition.with_producers(|p| p.aborted(0, 4).len()), 1);
    round(&still, &partition, &mut progress);
    assert_eq!(offsets(&partition)[..2], [2, 3]);
    let told = partition.with_producers(|p| p.aborted(0, 4));
    assert_eq!(told, [], "readers would take the committed record at 2 for an aborted one");
}

#[test]
fn a_snapshot_older_than_a_compaction_mentions_no_marker_that_is_gone() {
    let still = Still::new();
    let partition = still.topic("t", SETTINGS);
    append(&partition, batch(transactional(0), "a", "aborted"));
    end(&partition, ControlKind::Abort);
    append(&partition, batch(transactional(1), "a", "committed"));
    end(&partition, ControlKind::Commit);
    let mut progress = Progress::default();
    round(&still, &partition, &mut progress);
    partition.snapshot_producers();
    let (at, old) = partition.journal.snapshot().unwrap();
    round(&still, &partition, &mut progress);
    still.sync(&partition);
    partition.with_producers(|p| *p = Default::default());
    partition.journal.put_snapshot(at, old);
    drop(partition);
    let still = still.restart(true);
    let told = still.partition("t").with_producers(|p| p.aborted(0, 4));
    assert_eq!(told, []);
}

#[test]
fn a_tombstone_stays_for_its_time_by_the_brokers_clock_and_its_removal_is_on_record() {
    const SETTINGS: &[(&str, &str)] =
        &[("cleanup.policy", "compact"), ("delete.retention.ms", "1000"), ("min.cleanable.dirty.ratio", "0")];
    let still = Still::new();
    let partition = still.topic("t", SETTINGS);
    append(&partition, batch(|b| b, "gone", "value"));
    let mut tombstone = BatchBuilder::new(moim_wire_kafka::compression::Compression::None);
    // The client's clock is decades behind: that is no reason to forget the tombstone at once.
    tombstone.push(1_000, Some(b"gone"), None, &[]);
    append(&partition, tombstone.build());
    let mut progress = Progress::default();
    let mut round_at = |now_ms: i64| {
        partition.journal.roll_if_older(i64::MAX);
        append(&partition, batch(|b| b, "last", "so that the segment before it is sealed"));
        still.sync(&partition);
        let config = partition.config.load();
        if let Some(done) = compact(&partition, &config, progress.of(&partition), now_ms).unwrap() {
            progress.note(&partition, done.clean_until);
        }
        (offsets(&partition), partition.journal.cleaned_below())
    };
    still.sync(&partition);
    let now_ms = 1_700_000_000_000;
    let (first, below) = round_at(now_ms);
    assert_eq!((first[0], below), (1, 0), "the tombstone stays, its key is gone");
    let (second, below) = round_at(now_ms + 999);
    assert_eq!((second[0], below), (1, 0));
    let (third, below) = round_at(now_ms + 1_000);
    assert!(third[0] > 1, "{third:?}");
    assert_eq!(below, 2, "a replica that ends below has to be rebuilt");
}
