//! What one partition knows of its producers: the last batches of each, for idempotence, and the transactions
//! that are open or were aborted.
//!
//! Pure: it is asked before an append ([`Producers::check`]) and told after it ([`Producers::on_append`]).
//! Invariant: the state is what replaying the partition's batches through `on_append` gives, so a snapshot
//! plus the batches after it equals the whole.

use std::collections::{BTreeMap, VecDeque};

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::{ControlKind, NO_SEQUENCE};

mod refused;
mod snapshot;
mod stragglers;
#[cfg(test)]
mod tests;

pub(crate) use self::refused::{RefusedBatches, TurnedAway};
pub(crate) use self::snapshot::Loaded;
pub(crate) use self::stragglers::Stragglers;

/// How many batches of a producer are remembered: what a client may have in flight.
const REMEMBERED: usize = 5;

/// What the partition must know of a batch that has a producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchInfo {
    pub(crate) producer_id: i64,
    pub(crate) producer_epoch: i16,
    /// -1 for batches a coordinator writes on the producer's behalf.
    pub(crate) base_sequence: i32,
    pub(crate) last_sequence: i32,
    pub(crate) max_timestamp: i64,
    pub(crate) transactional: bool,
    pub(crate) control: Option<Marker>,
}

/// The end of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marker {
    pub(crate) kind: ControlKind,
    pub(crate) coordinator_epoch: i32,
}

/// What to do with a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    Append,
    /// It is there already.
    Duplicate {
        base_offset: i64,
        last_offset: i64,
        timestamp: i64,
    },
    Reject(ErrorCode),
}

/// A transaction whose records must not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AbortedTxn {
    pub(crate) producer_id: i64,
    pub(crate) first_offset: i64,
    /// Where its marker is.
    pub(crate) last_offset: i64,
}

/// A producer as DescribeProducers shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) producer_id: i64,
    pub(crate) epoch: i16,
    pub(crate) last_sequence: i32,
    pub(crate) last_timestamp: i64,
    pub(crate) coordinator_epoch: i32,
    pub(crate) txn_start: Option<i64>,
}

/// The producers of one partition. One without any costs a pointer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Producers {
    inner: Option<Box<Inner>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Inner {
    producers: HashMap<i64, Producer>,
    /// Invariant: holds `(first offset, producer)` exactly for the producers with an open transaction.
    open: BTreeMap<i64, i64>,
    /// Transactions that ended, until the watermark has passed their marker: first and last offset.
    ended: VecDeque<(i64, i64)>,
    /// Invariant: ordered by last offset.
    aborted: Vec<AbortedTxn>,
}

#[derive(Clone, Debug, PartialEq)]
struct Producer {
    epoch: i16,
    coordinator_epoch: i32,
    /// When it was last heard of: the newest of append times.
    last_ms: i64,
    last_offset: i64,
    txn_start: Option<i64>,
    /// How many sequences up to the last one are known to be in the log, without a hole. Only these may be
    /// called duplicates: a client takes that word for success.
    proven: i32,
    /// Whether the epoch began under our eyes, so that its first sequence can only be 0.
    from_zero: bool,
    /// Invariant: at most [`REMEMBERED`], oldest first, all of `epoch`.
    batches: VecDeque<Remembered>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Remembered {
    base_sequence: i32,
    last_sequence: i32,
    base_offset: i64,
    last_offset: i64,
    timestamp: i64,
}

/// The sequence that follows, which begins again at 0 after the largest.
fn next(sequence: i32) -> i32 {
    if sequence == i32::MAX { 0 } else { sequence + 1 }
}

/// How far `later` is ahead of `earlier`, modulo 2^31; more than half the circle means that it is behind.
fn ahead(earlier: i32, later: i32) -> i32 {
    later.wrapping_sub(earlier) & i32::MAX
}

/// How many sequences a batch has.
fn count(batch: &BatchInfo) -> i32 {
    ahead(batch.base_sequence, batch.last_sequence).saturating_add(1)
}

impl Producers {
    /// Whether a batch may be appended now.
    pub(crate) fn check(&self, _now_ms: i64, batch: &BatchInfo) -> Check {
        let Some(producer) = self.inner.as_ref().and_then(|i| i.producers.get(&batch.producer_id)) else {
            // Nothing is known (any more): whatever sequence it has is a beginning.
            return Check::Append;
        };
        if let Some(marker) = batch.control {
            return check_marker(producer, batch, marker);
        }
        if batch.producer_epoch < producer.epoch {
            return Check::Reject(ErrorCode::InvalidProducerEpoch);
        }
        if producer.txn_start.is_some() && batch.producer_epoch > producer.epoch {
            // The coordinator begins the next transaction after the marker of this one. Taken, the batch would move the
            // epoch of the open transaction past that of its marker, which would be refused.
            return Check::Reject(ErrorCode::InvalidTxnState);
        }
        if batch.base_sequence == NO_SEQUENCE {
            return Check::Append;
        }
        if batch.producer_epoch > producer.epoch {
            let fresh = batch.base_sequence == 0;
            return if fresh { Check::Append } else { Check::Reject(ErrorCode::OutOfOrderSequenceNumber) };
        }
        let same = |b: &&Remembered| {
            b.base_sequence == batch.base_sequence && b.last_sequence == batch.last_sequence
        };
        if let Some(known) = producer.batches.iter().find(same) {
            let Remembered { base_offset, last_offset, timestamp, .. } = *known;
            return Check::Duplicate { base_offset, last_offset, timestamp };
        }
        if producer.txn_start.is_some() && !batch.transactional {
            return Check::Reject(ErrorCode::InvalidTxnState);
        }
        check_sequence(producer, batch)
    }

    /// Takes in a batch that was appended.
    pub(crate) fn on_append(&mut self, now_ms: i64, batch: &BatchInfo, base_offset: i64, last_offset: i64) {
        let inner = self.inner.get_or_insert_with(Box::default);
        let producer = inner.producers.entry(batch.producer_id).or_insert_with(|| Producer {
            epoch: batch.producer_epoch,
            coordinator_epoch: -1,
            last_ms: now_ms,
            last_offset,
            txn_start: None,
            proven: 0,
            from_zero: false,
            batches: VecDeque::new(),
        });
        if batch.producer_epoch > producer.epoch {
            producer.epoch = batch.producer_epoch;
            producer.batches.clear();
            producer.proven = 0;
            producer.from_zero = true;
        }
        producer.last_ms = producer.last_ms.max(now_ms);
        producer.last_offset = last_offset;
        if let Some(marker) = batch.control {
            producer.coordinator_epoch = marker.coordinator_epoch;
            if let Some(first_offset) = producer.txn_start.take() {
                inner.open.remove(&first_offset);
                inner.ended.push_back((first_offset, last_offset));
                if marker.kind == ControlKind::Abort {
                    let producer_id = batch.producer_id;
                    inner.aborted.push(AbortedTxn { producer_id, first_offset, last_offset });
                }
            }
            return;
        }
        if batch.base_sequence != NO_SEQUENCE {
            // Replaying a compacted log meets holes; what lies before one is not proven.
            let follows =
                producer.batches.back().is_some_and(|b| next(b.last_sequence) == batch.base_sequence);
            let before = if follows { producer.proven } else { 0 };
            producer.proven = before.saturating_add(count(batch));
            if producer.batches.len() == REMEMBERED {
                producer.batches.pop_front();
            }
            producer.batches.push_back(Remembered {
                base_sequence: batch.base_sequence,
                last_sequence: batch.last_sequence,
                base_offset,
                last_offset,
                timestamp: batch.max_timestamp,
            });
        }
        if batch.transactional && producer.txn_start.is_none() {
            producer.txn_start = Some(base_offset);
            inner.open.insert(base_offset, batch.producer_id);
        }
    }

    /// The offset below which every transaction has ended and its end is committed.
    pub(crate) fn lso(&self, high_watermark: i64) -> i64 {
        let Some(inner) = &self.inner else { return high_watermark };
        let open = inner.open.keys().next().copied().unwrap_or(i64::MAX);
        let ended =
            inner.ended.iter().filter(|(_, last)| *last >= high_watermark).map(|(first, _)| *first).min();
        high_watermark.min(open).min(ended.unwrap_or(i64::MAX))
    }

    /// The watermark has passed: transactions that ended below it no longer hold anything back.
    pub(crate) fn on_watermark(&mut self, high_watermark: i64) {
        if let Some(inner) = &mut self.inner {
            while inner.ended.front().is_some_and(|(_, last)| *last < high_watermark) {
                inner.ended.pop_front();
            }
        }
    }

    /// The aborted transactions that have records in `from..until`.
    pub(crate) fn aborted(&self, from: i64, until: i64) -> Vec<AbortedTxn> {
        let Some(inner) = &self.inner else { return Vec::new() };
        let first = inner.aborted.partition_point(|a| a.last_offset < from);
        inner.aborted[first..].iter().filter(|a| a.first_offset < until).copied().collect()
    }

    /// The marker at `last_offset` goes, after the records of its transaction: nobody must be told of it.
    pub(crate) fn forget_aborted(&mut self, last_offset: i64) {
        self.retain_aborted(|a| a.last_offset != last_offset);
    }

    /// Puts the aborted transactions of an earlier part of the log before those that are known.
    pub(crate) fn take_aborted(&mut self, before: Self) {
        let Some(before) = before.inner.filter(|before| !before.aborted.is_empty()) else { return };
        let mut aborted = before.aborted;
        let inner = self.inner.get_or_insert_with(Box::default);
        aborted.append(&mut inner.aborted);
        inner.aborted = aborted;
    }

    /// Keeps the aborted transactions that please.
    pub(crate) fn retain_aborted(&mut self, pleases: impl FnMut(&AbortedTxn) -> bool) {
        if let Some(inner) = &mut self.inner {
            inner.aborted.retain(pleases);
        }
    }

    /// Whether the producer has a transaction open here, in this epoch.
    pub(crate) fn has_open_transaction(&self, producer_id: i64, epoch: i16) -> bool {
        self.open_epoch(producer_id) == Some(epoch)
    }

    /// The epoch of the open transaction of a producer.
    pub(crate) fn open_epoch(&self, producer_id: i64) -> Option<i16> {
        self.producer(producer_id).filter(|p| p.txn_start.is_some()).map(|p| p.epoch)
    }

    /// The epoch of the coordinator that sent the last marker of a producer; -1 if there was none.
    pub(crate) fn coordinator_epoch(&self, producer_id: i64) -> Option<i32> {
        self.producer(producer_id).map(|p| p.coordinator_epoch)
    }

    /// The offset of the last record of a producer.
    pub(crate) fn last_offset(&self, producer_id: i64) -> Option<i64> {
        self.producer(producer_id).map(|p| p.last_offset)
    }

    fn producer(&self, producer_id: i64) -> Option<&Producer> {
        self.inner.as_ref()?.producers.get(&producer_id)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inner.is_none()
    }

    /// Forgets producers that were silent for longer than `max_idle_ms`; never one with an open transaction.
    pub(crate) fn expire(&mut self, now_ms: i64, max_idle_ms: i64) {
        if let Some(inner) = &mut self.inner {
            inner
                .producers
                .retain(|_, p| p.txn_start.is_some() || now_ms.saturating_sub(p.last_ms) <= max_idle_ms);
        }
        self.shrink();
    }

    /// The log begins at `start` now: aborted transactions that lie below it need no mention.
    pub(crate) fn on_log_start(&mut self, start: i64) {
        if let Some(inner) = &mut self.inner {
            inner.aborted.retain(|a| a.last_offset >= start);
        }
        self.shrink();
    }

    fn shrink(&mut self) {
        let empty = |i: &Inner| {
            i.producers.is_empty() && i.aborted.is_empty() && i.ended.is_empty() && i.open.is_empty()
        };
        if self.inner.as_deref().is_some_and(empty) {
            self.inner = None;
        }
    }

    /// All producers, by id.
    pub(crate) fn describe(&self) -> Vec<Described> {
        let producers = self.inner.iter().flat_map(|i| &i.producers);
        let mut all: Vec<_> = producers
            .map(|(id, p)| Described {
                producer_id: *id,
                epoch: p.epoch,
                last_sequence: p.batches.back().map_or(NO_SEQUENCE, |b| b.last_sequence),
                last_timestamp: p.batches.back().map_or(p.last_ms, |b| b.timestamp),
                coordinator_epoch: p.coordinator_epoch,
                txn_start: p.txn_start,
            })
            .collect();
        all.sort_by_key(|d| d.producer_id);
        all
    }
}

fn check_sequence(producer: &Producer, batch: &BatchInfo) -> Check {
    let Some(last) = producer.batches.back() else {
        let gap = producer.from_zero && batch.base_sequence != 0;
        return if gap { Check::Reject(ErrorCode::OutOfOrderSequenceNumber) } else { Check::Append };
    };
    let behind = ahead(batch.base_sequence, next(last.last_sequence));
    if behind == 0 {
        Check::Append
    } else if behind <= producer.proven.min(i32::MAX / 2) && count(batch) <= behind {
        Check::Reject(ErrorCode::DuplicateSequenceNumber)
    } else {
        // Ahead of what is expected, across it, or so far behind that it may never have been appended.
        Check::Reject(ErrorCode::OutOfOrderSequenceNumber)
    }
}

fn check_marker(producer: &Producer, batch: &BatchInfo, marker: Marker) -> Check {
    if batch.producer_epoch < producer.epoch {
        Check::Reject(ErrorCode::InvalidProducerEpoch)
    } else if marker.coordinator_epoch < producer.coordinator_epoch {
        Check::Reject(ErrorCode::TransactionCoordinatorFenced)
    } else {
        Check::Append
    }
}
