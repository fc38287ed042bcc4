//! Whole compaction rounds over a real journal: a replay from the log start must not change its meaning.

use moim_wire_kafka::records::{BatchBuilder, ControlKind, control_batch};

use super::*;
use crate::testing::{TestBroker, append, batch};

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
fn round(fixture: &TestBroker, partition: &Partition, progress: &mut Progress) {
    fixture.sync(partition);
    partition.journal.roll_if_older(i64::MAX);
    append(partition, batch(|b| b, "last", "seals the segment before it"));
    fixture.sync(partition);
    let config = partition.config.load();
    if let Some(done) = compact(partition, &config, progress.of(partition), LATER).unwrap() {
        progress.note(partition, done.first_dirty_offset);
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
fn marker_is_kept_until_its_records_are_removed() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", SETTINGS);
    append(&partition, batch(transactional(0), "a", "1"));
    end(&partition, ControlKind::Commit);
    append(&partition, batch(transactional(1), "b", "1"));
    end(&partition, ControlKind::Commit);
    let mut progress = Progress::default();
    round(&fixture, &partition, &mut progress);
    round(&fixture, &partition, &mut progress);
    let offsets = offsets(&partition);
    assert!(offsets.starts_with(&[0, 1, 2, 3]), "{offsets:?}");
}

#[test]
fn aborted_transaction_entry_is_removed_with_its_marker() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", SETTINGS);
    append(&partition, batch(transactional(0), "a", "aborted"));
    end(&partition, ControlKind::Abort);
    append(&partition, batch(transactional(1), "a", "committed"));
    end(&partition, ControlKind::Commit);
    let mut progress = Progress::default();
    round(&fixture, &partition, &mut progress);
    assert_eq!(offsets(&partition)[..3], [1, 2, 3], "the marker outlives its records by one round");
    assert_eq!(partition.with_producers(|p| p.aborted(0, 4).len()), 1);
    round(&fixture, &partition, &mut progress);
    assert_eq!(offsets(&partition)[..2], [2, 3]);
    let aborted = partition.with_producers(|p| p.aborted(0, 4));
    assert_eq!(aborted, [], "readers would take the committed record at 2 for an aborted one");
}

#[test]
fn snapshot_older_than_compaction_drops_removed_aborted_transactions() {
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", SETTINGS);
    append(&partition, batch(transactional(0), "a", "aborted"));
    end(&partition, ControlKind::Abort);
    append(&partition, batch(transactional(1), "a", "committed"));
    end(&partition, ControlKind::Commit);
    let mut progress = Progress::default();
    round(&fixture, &partition, &mut progress);
    partition.snapshot_producers();
    let (at, old) = partition.journal.snapshot().unwrap();
    round(&fixture, &partition, &mut progress);
    fixture.sync(&partition);
    partition.with_producers(|p| *p = Default::default());
    partition.journal.put_snapshot(at, old);
    drop(partition);
    let fixture = fixture.restart(true);
    let aborted = fixture.partition("t").with_producers(|p| p.aborted(0, 4));
    assert_eq!(aborted, []);
}

#[test]
fn tombstone_retention_uses_broker_clock_and_removal_is_recorded() {
    const SETTINGS: &[(&str, &str)] =
        &[("cleanup.policy", "compact"), ("delete.retention.ms", "1000"), ("min.cleanable.dirty.ratio", "0")];
    let fixture = TestBroker::new();
    let partition = fixture.topic("t", SETTINGS);
    append(&partition, batch(|b| b, "gone", "value"));
    let mut tombstone = BatchBuilder::new(moim_wire_kafka::compression::Compression::None);
    // The client's clock is decades behind: the tombstone must still be kept.
    tombstone.push(1_000, Some(b"gone"), None, &[]);
    append(&partition, tombstone.build());
    let mut progress = Progress::default();
    let mut round_at = |now_ms: i64| {
        partition.journal.roll_if_older(i64::MAX);
        append(&partition, batch(|b| b, "last", "seals the segment before it"));
        fixture.sync(&partition);
        let config = partition.config.load();
        if let Some(done) = compact(&partition, &config, progress.of(&partition), now_ms).unwrap() {
            progress.note(&partition, done.first_dirty_offset);
        }
        (offsets(&partition), partition.journal.cleaned_below())
    };
    fixture.sync(&partition);
    let now_ms = 1_700_000_000_000;
    let (first, below) = round_at(now_ms);
    assert_eq!((first[0], below), (1, 0), "the tombstone stays, the older record is gone");
    let (second, below) = round_at(now_ms + 999);
    assert_eq!((second[0], below), (1, 0));
    let (third, below) = round_at(now_ms + 1_000);
    assert!(third[0] > 1, "{third:?}");
    assert_eq!(below, 2, "a replica that ends below is rebuilt");
}
