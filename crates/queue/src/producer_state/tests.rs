//! Idempotence and transactions of one partition, by scenario and by property.

use proptest::prelude::*;

use super::*;

fn batch(epoch: i16, base: i32, count: i32) -> BatchInfo {
    BatchInfo {
        producer_id: 7,
        producer_epoch: epoch,
        base_sequence: base,
        last_sequence: base.wrapping_add(count - 1) & i32::MAX,
        max_timestamp: 100,
        transactional: false,
        control: None,
    }
}

fn txn(producer_id: i64, base: i32) -> BatchInfo {
    BatchInfo { producer_id, transactional: true, ..batch(0, base, 1) }
}

fn marker(producer_id: i64, kind: ControlKind) -> BatchInfo {
    BatchInfo {
        producer_id,
        base_sequence: NO_SEQUENCE,
        last_sequence: NO_SEQUENCE,
        control: Some(Marker { kind, coordinator_epoch: 0 }),
        ..txn(producer_id, 0)
    }
}

/// A log that appends what `check` accepts.
#[derive(Default)]
struct Log {
    producers: ProducerStateManager,
    end: i64,
    batches: Vec<(BatchInfo, i64, i64)>,
}

impl Log {
    fn offer(&mut self, info: BatchInfo) -> Check {
        let check = self.producers.check(0, &info);
        if check == Check::Append {
            let count = if info.base_sequence == NO_SEQUENCE {
                1
            } else {
                i64::from(ahead(info.base_sequence, info.last_sequence)) + 1
            };
            let (base, last) = (self.end, self.end + count - 1);
            self.producers.on_append(0, &info, base, last);
            self.batches.push((info, base, last));
            self.end = last + 1;
        }
        check
    }
}

#[test]
fn duplicate_of_the_last_five_batches_gets_its_original_offset() {
    let mut log = Log::default();
    for i in 0..6 {
        assert_eq!(log.offer(batch(0, i * 10, 10)), Check::Append);
    }
    for i in 1..6 {
        let expected = Check::Duplicate {
            base_offset: i64::from(i) * 10,
            last_offset: i64::from(i) * 10 + 9,
            timestamp: 100,
        };
        assert_eq!(log.offer(batch(0, i * 10, 10)), expected);
    }
    assert_eq!(log.offer(batch(0, 0, 10)), Check::Reject(ErrorCode::DuplicateSequenceNumber));
}

#[test]
fn only_a_proven_gap_is_out_of_order() {
    let mut log = Log::default();
    log.offer(batch(0, 0, 5));
    assert_eq!(log.offer(batch(0, 6, 5)), Check::Reject(ErrorCode::OutOfOrderSequenceNumber));
    assert_eq!(log.offer(batch(0, 5, 5)), Check::Append);
}

#[test]
fn unknown_producer_may_start_with_any_sequence() {
    assert_eq!(Log::default().offer(batch(3, 4711, 1)), Check::Append);
}

#[test]
fn unproven_sequence_is_not_a_duplicate() {
    let mut log = Log::default();
    log.offer(batch(0, 50, 10));
    log.offer(batch(0, 60, 1));
    for (base, count) in [(40, 10), (45, 10), (49, 1), (59, 3)] {
        let expected = Check::Reject(ErrorCode::OutOfOrderSequenceNumber);
        assert_eq!(log.offer(batch(0, base, count)), expected, "{base}+{count}");
    }
    assert_eq!(log.offer(batch(0, 51, 5)), Check::Reject(ErrorCode::DuplicateSequenceNumber));
    // A replay of a compacted log has a gap: no sequence before it is proven.
    let mut producers = ProducerStateManager::default();
    producers.on_append(0, &batch(0, 0, 5), 0, 4);
    producers.on_append(0, &batch(0, 90, 5), 90, 94);
    let reject = |base| producers.check(0, &batch(0, base, 2));
    assert_eq!(reject(50), Check::Reject(ErrorCode::OutOfOrderSequenceNumber));
    assert_eq!(reject(91), Check::Reject(ErrorCode::DuplicateSequenceNumber));
}

#[test]
fn epoch_started_by_a_marker_begins_at_sequence_zero() {
    let mut log = Log::default();
    log.offer(txn(7, 0));
    log.offer(BatchInfo { producer_epoch: 1, ..marker(7, ControlKind::Abort) });
    let first = |base| BatchInfo { producer_epoch: 1, ..txn(7, base) };
    assert_eq!(log.offer(first(1)), Check::Reject(ErrorCode::OutOfOrderSequenceNumber));
    assert_eq!(log.offer(first(0)), Check::Append);
    // A marker of an expired producer proves nothing about its sequences.
    let mut log = Log::default();
    log.offer(marker(7, ControlKind::Commit));
    assert_eq!(log.offer(txn(7, 500)), Check::Append);
}

#[test]
fn non_transactional_batch_inside_a_transaction_is_rejected() {
    let mut log = Log::default();
    log.offer(txn(7, 0));
    assert_eq!(log.offer(batch(0, 1, 1)), Check::Reject(ErrorCode::InvalidTxnState));
    log.offer(marker(7, ControlKind::Commit));
    assert_eq!(log.offer(batch(0, 1, 1)), Check::Append);
}

#[test]
fn sequence_wraps_to_zero() {
    let mut log = Log::default();
    log.offer(batch(0, i32::MAX - 1, 2));
    assert_eq!(log.offer(batch(0, 0, 1)), Check::Append);
    let mut log = Log::default();
    log.offer(batch(0, i32::MAX, 2));
    assert_eq!(log.offer(batch(0, 1, 1)), Check::Append);
    assert!(matches!(log.offer(batch(0, i32::MAX, 2)), Check::Duplicate { base_offset: 0, .. }));
}

#[test]
fn new_epoch_begins_at_sequence_zero_and_fences_the_old_one() {
    let mut log = Log::default();
    log.offer(batch(1, 0, 5));
    assert_eq!(log.offer(batch(2, 5, 1)), Check::Reject(ErrorCode::OutOfOrderSequenceNumber));
    assert_eq!(log.offer(batch(2, 0, 1)), Check::Append);
    assert_eq!(log.offer(batch(1, 5, 1)), Check::Reject(ErrorCode::InvalidProducerEpoch));
}

#[test]
fn last_stable_offset_is_the_first_open_transaction() {
    let mut log = Log::default();
    log.offer(batch(0, 0, 3));
    log.offer(txn(1, 0));
    log.offer(txn(2, 0));
    assert_eq!(log.producers.lso(5), 3);
    log.offer(marker(1, ControlKind::Commit));
    assert_eq!(log.producers.lso(5), 3, "the marker at offset 5 is not committed yet");
    assert_eq!(log.producers.lso(6), 4);
    log.offer(marker(2, ControlKind::Abort));
    assert_eq!(log.producers.lso(7), 7);
    let aborted = AbortedTxn { producer_id: 2, first_offset: 4, last_offset: 6 };
    assert_eq!(log.producers.aborted(0, 7), [aborted]);
    assert_eq!(log.producers.aborted(0, 4), []);
    assert_eq!(log.producers.aborted(7, 9), []);
}

#[test]
fn marker_of_old_coordinator_or_producer_epoch_is_rejected() {
    let mut log = Log::default();
    log.offer(BatchInfo { producer_epoch: 2, ..txn(1, 0) });
    assert_eq!(log.offer(marker(1, ControlKind::Abort)), Check::Reject(ErrorCode::InvalidProducerEpoch));
    let late = |coordinator_epoch| BatchInfo {
        producer_epoch: 2,
        control: Some(Marker { kind: ControlKind::Abort, coordinator_epoch }),
        ..marker(1, ControlKind::Abort)
    };
    assert_eq!(log.offer(late(5)), Check::Append);
    assert_eq!(log.offer(late(4)), Check::Reject(ErrorCode::TransactionCoordinatorFenced));
}

#[test]
fn idle_producers_expire_except_with_open_transactions() {
    let mut producers = ProducerStateManager::default();
    producers.on_append(0, &batch(0, 0, 1), 0, 0);
    producers.on_append(0, &txn(8, 0), 1, 1);
    producers.expire(1_000, 500);
    assert_eq!(producers.describe().iter().map(|d| d.producer_id).collect::<Vec<_>>(), [8]);
    producers.on_append(1_000, &marker(8, ControlKind::Commit), 2, 2);
    producers.on_watermark(3);
    producers.expire(9_000, 500);
    assert!(producers.is_empty());
}

#[test]
fn damaged_snapshot_is_rejected() {
    let mut log = Log::default();
    log.offer(txn(1, 0));
    let good = log.producers.snapshot().unwrap();
    assert_eq!(ProducerStateManager::load(&good).map(|loaded| loaded.producers), Ok(log.producers.clone()));
    for i in 0..good.len() {
        let mut bad = good.clone();
        bad[i] ^= 1;
        assert!(ProducerStateManager::load(&bad).is_err(), "bit flipped at {i}");
        assert!(ProducerStateManager::load(&good[..i]).is_err(), "cut at {i}");
    }
    assert_eq!(&good[..6], b"MPRD\0\x02", "the format has a magic and a version");
}

#[derive(Clone, Debug)]
enum Step {
    Send { producer: i64, skip: i32, count: i32, transactional: bool },
    Repeat(usize),
    End { producer: i64, commit: bool },
    NewEpoch(i64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3i64, prop_oneof![8 => Just(0), 1 => 1..3i32], 1..4i32, any::<bool>())
            .prop_map(|(producer, skip, count, transactional)| Step::Send { producer, skip, count, transactional }),
        3 => (0..8usize).prop_map(Step::Repeat),
        2 => (0..3i64, any::<bool>()).prop_map(|(producer, commit)| Step::End { producer, commit }),
        1 => (0..3i64).prop_map(Step::NewEpoch),
    ]
}

proptest! {
    /// Whatever clients send, the log never holds a batch twice or out of order, and a snapshot taken anywhere plus
    /// the rest of the log equals the state.
    #[test]
    fn log_has_every_sequence_once_and_replays(steps in prop::collection::vec(step(), 1..60), cut in 0..60usize) {
        let mut log = Log::default();
        let mut sequences = [(0i16, 0i32); 3];
        let mut sent: Vec<BatchInfo> = Vec::new();
        for step in steps {
            let info = match step {
                Step::Send { producer, skip, count, transactional } => {
                    let (epoch, at) = sequences[producer as usize];
                    BatchInfo { producer_id: producer, transactional, ..batch(epoch, at + skip, count) }
                }
                Step::Repeat(back) => match sent.iter().rev().nth(back) {
                    Some(info) => *info,
                    None => continue,
                },
                Step::End { producer, commit } => {
                    let kind = if commit { ControlKind::Commit } else { ControlKind::Abort };
                    BatchInfo { producer_epoch: sequences[producer as usize].0, ..marker(producer, kind) }
                }
                Step::NewEpoch(producer) => {
                    let at = &mut sequences[producer as usize];
                    *at = (at.0 + 1, 0);
                    continue;
                }
            };
            let fresh = log.offer(info) == Check::Append;
            if fresh && info.control.is_none() {
                sent.push(info);
                sequences[info.producer_id as usize] = (info.producer_epoch, info.last_sequence + 1);
            }
        }
        let mut seen = std::collections::HashSet::new();
        let mut last: HashMap<i64, (i16, i32)> = HashMap::new();
        for (info, _, _) in log.batches.iter().filter(|(i, _, _)| i.control.is_none()) {
            prop_assert!(seen.insert((info.producer_id, info.producer_epoch, info.base_sequence)), "twice: {info:?}");
            if let Some((epoch, sequence)) = last.insert(info.producer_id, (info.producer_epoch, info.last_sequence)) {
                prop_assert!(info.producer_epoch > epoch || info.base_sequence == sequence + 1, "out of order: {info:?}");
            }
        }
        let cut = cut.min(log.batches.len());
        let mut replayed = ProducerStateManager::default();
        for (info, base, end) in &log.batches[..cut] {
            replayed.on_append(0, info, *base, *end);
        }
        let mut replayed = ProducerStateManager::load(&replayed.snapshot().unwrap()).unwrap().producers;
        for (info, base, end) in &log.batches[cut..] {
            replayed.on_append(0, info, *base, *end);
        }
        prop_assert_eq!(replayed, log.producers);
    }
}
