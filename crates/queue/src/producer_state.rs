//! The producer state manager of one partition: the last batches of each producer, for idempotence, its open
//! transactions, and the aborted transaction index.
//!
//! Pure: it is queried before an append ([`ProducerStateManager::check`]) and updated after it
//! ([`ProducerStateManager::on_append`]). Invariant: the state is what a replay of the partition's batches through
//! `on_append` gives, so a snapshot plus the batches after it equals the whole.

use std::collections::{BTreeMap, VecDeque};

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::{ControlKind, NO_SEQUENCE};

mod rejected;
mod reordered;
mod snapshot;
#[cfg(test)]
mod tests;

pub(crate) use self::rejected::{EarlyBatches, RejectedBatches};
pub(crate) use self::reordered::ReorderedBatches;
pub(crate) use self::snapshot::Loaded;

/// Number of cached batches per producer: the in-flight limit of an idempotent client.
const MAX_BATCHES: usize = 5;

/// The fields of a producer's batch that producer state needs.
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

/// A transaction marker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marker {
    pub(crate) kind: ControlKind,
    pub(crate) coordinator_epoch: i32,
}

/// The decision about a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    Append,
    /// The batch is already in the log.
    Duplicate {
        base_offset: i64,
        last_offset: i64,
        timestamp: i64,
    },
    Reject(ErrorCode),
}

/// An entry of the aborted transaction index: its records must not be returned to `read_committed` consumers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AbortedTxn {
    pub(crate) producer_id: i64,
    pub(crate) first_offset: i64,
    /// The offset of its abort marker.
    pub(crate) last_offset: i64,
}

/// A producer in DescribeProducers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ActiveProducer {
    pub(crate) producer_id: i64,
    pub(crate) epoch: i16,
    pub(crate) last_sequence: i32,
    pub(crate) last_timestamp: i64,
    pub(crate) coordinator_epoch: i32,
    pub(crate) txn_start: Option<i64>,
}

/// The producers of one partition. Without producers it costs a pointer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ProducerStateManager {
    inner: Option<Box<Inner>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Inner {
    producers: HashMap<i64, ProducerStateEntry>,
    /// Invariant: holds `(first offset, producer)` exactly for the producers with an open transaction.
    open: BTreeMap<i64, i64>,
    /// Ended transactions until the high watermark has passed their marker: first and last offset.
    ended: VecDeque<(i64, i64)>,
    /// The aborted transaction index. Invariant: ordered by last offset.
    aborted: Vec<AbortedTxn>,
}

#[derive(Clone, Debug, PartialEq)]
struct ProducerStateEntry {
    epoch: i16,
    coordinator_epoch: i32,
    /// Time of the last activity: the newest append time.
    last_ms: i64,
    last_offset: i64,
    txn_start: Option<i64>,
    /// Number of sequences up to the last one that are known to be in the log, without a gap. Only these may be
    /// reported as duplicates: a client takes DUPLICATE for success.
    proven: i32,
    /// True if the start of the epoch was observed, so that its first sequence must be 0.
    from_zero: bool,
    /// Invariant: at most [`MAX_BATCHES`], oldest first, all of `epoch`.
    batches: VecDeque<BatchMetadata>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct BatchMetadata {
    base_sequence: i32,
    last_sequence: i32,
    base_offset: i64,
    last_offset: i64,
    timestamp: i64,
}

/// The next sequence; wraps to 0 after the largest.
fn next(sequence: i32) -> i32 {
    if sequence == i32::MAX { 0 } else { sequence + 1 }
}

/// The distance from `earlier` to `later`, modulo 2^31; more than half the circle means that it is behind.
fn ahead(earlier: i32, later: i32) -> i32 {
    later.wrapping_sub(earlier) & i32::MAX
}

/// Number of sequences of a batch.
fn count(batch: &BatchInfo) -> i32 {
    ahead(batch.base_sequence, batch.last_sequence).saturating_add(1)
}

impl ProducerStateManager {
    /// Checks whether a batch may be appended now.
    pub(crate) fn check(&self, _now_ms: i64, batch: &BatchInfo) -> Check {
        let Some(producer) = self.inner.as_ref().and_then(|i| i.producers.get(&batch.producer_id)) else {
            // Unknown or expired producer: any sequence is accepted as the first.
            return Check::Append;
        };
        if let Some(marker) = batch.control {
            return check_marker(producer, batch, marker);
        }
        if batch.producer_epoch < producer.epoch {
            return Check::Reject(ErrorCode::InvalidProducerEpoch);
        }
        if producer.txn_start.is_some() && batch.producer_epoch > producer.epoch {
            // The coordinator starts the next transaction after the marker of this one. An append here would move the
            // epoch of the open transaction past that of its marker, which would then be rejected.
            return Check::Reject(ErrorCode::InvalidTxnState);
        }
        if batch.base_sequence == NO_SEQUENCE {
            return Check::Append;
        }
        if batch.producer_epoch > producer.epoch {
            let fresh = batch.base_sequence == 0;
            return if fresh { Check::Append } else { Check::Reject(ErrorCode::OutOfOrderSequenceNumber) };
        }
        let same = |b: &&BatchMetadata| {
            b.base_sequence == batch.base_sequence && b.last_sequence == batch.last_sequence
        };
        if let Some(known) = producer.batches.iter().find(same) {
            let BatchMetadata { base_offset, last_offset, timestamp, .. } = *known;
            return Check::Duplicate { base_offset, last_offset, timestamp };
        }
        if producer.txn_start.is_some() && !batch.transactional {
            return Check::Reject(ErrorCode::InvalidTxnState);
        }
        check_sequence(producer, batch)
    }

    /// Applies a batch that was appended.
    pub(crate) fn on_append(&mut self, now_ms: i64, batch: &BatchInfo, base_offset: i64, last_offset: i64) {
        let inner = self.inner.get_or_insert_with(Box::default);
        let producer = inner.producers.entry(batch.producer_id).or_insert_with(|| ProducerStateEntry {
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
            // A replay of a compacted log has gaps; sequences before a gap are not proven.
            let follows =
                producer.batches.back().is_some_and(|b| next(b.last_sequence) == batch.base_sequence);
            let before = if follows { producer.proven } else { 0 };
            producer.proven = before.saturating_add(count(batch));
            if producer.batches.len() == MAX_BATCHES {
                producer.batches.pop_front();
            }
            producer.batches.push_back(BatchMetadata {
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

    /// The last stable offset: every transaction below it has ended, and its marker is committed.
    pub(crate) fn lso(&self, high_watermark: i64) -> i64 {
        let Some(inner) = &self.inner else { return high_watermark };
        let open = inner.open.keys().next().copied().unwrap_or(i64::MAX);
        let ended =
            inner.ended.iter().filter(|(_, last)| *last >= high_watermark).map(|(first, _)| *first).min();
        high_watermark.min(open).min(ended.unwrap_or(i64::MAX))
    }

    /// The high watermark moved: transactions that ended below it no longer hold back the last stable offset.
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

    /// Removes the aborted transaction with the marker at `last_offset`: its records and its marker are compacted
    /// away.
    pub(crate) fn forget_aborted(&mut self, last_offset: i64) {
        self.retain_aborted(|a| a.last_offset != last_offset);
    }

    /// Prepends the aborted transactions of an earlier part of the log.
    pub(crate) fn take_aborted(&mut self, before: Self) {
        let Some(before) = before.inner.filter(|before| !before.aborted.is_empty()) else { return };
        let mut aborted = before.aborted;
        let inner = self.inner.get_or_insert_with(Box::default);
        aborted.append(&mut inner.aborted);
        inner.aborted = aborted;
    }

    /// Keeps the aborted transactions that match the predicate.
    pub(crate) fn retain_aborted(&mut self, matches_predicate: impl FnMut(&AbortedTxn) -> bool) {
        if let Some(inner) = &mut self.inner {
            inner.aborted.retain(matches_predicate);
        }
    }

    /// True if the producer has a transaction open here, in this epoch.
    pub(crate) fn has_open_transaction(&self, producer_id: i64, epoch: i16) -> bool {
        self.open_epoch(producer_id) == Some(epoch)
    }

    /// The epoch of the open transaction of a producer.
    pub(crate) fn open_epoch(&self, producer_id: i64) -> Option<i16> {
        self.producer(producer_id).filter(|p| p.txn_start.is_some()).map(|p| p.epoch)
    }

    /// The epoch of the coordinator that wrote the last marker of a producer; -1 without a marker.
    pub(crate) fn coordinator_epoch(&self, producer_id: i64) -> Option<i32> {
        self.producer(producer_id).map(|p| p.coordinator_epoch)
    }

    /// The last offset of a producer.
    pub(crate) fn last_offset(&self, producer_id: i64) -> Option<i64> {
        self.producer(producer_id).map(|p| p.last_offset)
    }

    fn producer(&self, producer_id: i64) -> Option<&ProducerStateEntry> {
        self.inner.as_ref()?.producers.get(&producer_id)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inner.is_none()
    }

    /// Expires producers that were idle for longer than `max_idle_ms`; never one with an open transaction.
    pub(crate) fn expire(&mut self, now_ms: i64, max_idle_ms: i64) {
        if let Some(inner) = &mut self.inner {
            inner
                .producers
                .retain(|_, p| p.txn_start.is_some() || now_ms.saturating_sub(p.last_ms) <= max_idle_ms);
        }
        self.shrink();
    }

    /// The log start offset moved to `start`: drops aborted transactions below it.
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
    pub(crate) fn describe(&self) -> Vec<ActiveProducer> {
        let producers = self.inner.iter().flat_map(|i| &i.producers);
        let mut all: Vec<_> = producers
            .map(|(id, p)| ActiveProducer {
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

fn check_sequence(producer: &ProducerStateEntry, batch: &BatchInfo) -> Check {
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
        // Ahead of the expected sequence, overlapping it, or so far behind that it may never have been appended.
        Check::Reject(ErrorCode::OutOfOrderSequenceNumber)
    }
}

fn check_marker(producer: &ProducerStateEntry, batch: &BatchInfo, marker: Marker) -> Check {
    if batch.producer_epoch < producer.epoch {
        Check::Reject(ErrorCode::InvalidProducerEpoch)
    } else if marker.coordinator_epoch < producer.coordinator_epoch {
        Check::Reject(ErrorCode::TransactionCoordinatorFenced)
    } else {
        Check::Append
    }
}
