//! Log compaction: only the newest record of each key is kept.
//!
//! Two passes. The first reads the dirty part of the log and builds the offset map: for each key, the offset of its
//! newest record. In the second the journal rewrites its sealed segments and keeps a record if the offset map has no
//! newer one of its key. Tombstones are kept for `delete.retention.ms` after this broker first compacted them, so
//! that a consumer that follows the log sees them; the records of aborted transactions are removed.
//!
//! A removed tombstone or transaction marker is lost for replicas too. A leader keeps it until every fetching replica
//! has it, and records with the journal below which offset some are missing before it removes the first
//! ([`moim_journal::Cleaned`]); a replica that was offline for longer is rebuilt. A follower removes only what its
//! leader may have removed.
//!
//! A transaction marker is removed only in a round that finds none of its batches any more: without the marker, a
//! replay from the log start would find a transaction that never ended. The entry in the aborted transaction index is
//! removed with the marker, or readers would take the producer's next transaction for the aborted one.
//!
//! Limits: the offset map holds key hashes (128 bits each), so memory is bounded by [`MAX_KEYS`], and a larger dirty
//! part is compacted in several rounds.

use std::hash::{BuildHasher, RandomState};
use std::io;

use bytes::Bytes;
use hashbrown::{HashMap, HashSet};

use moim_journal::{Cleaned, Compactor, Frame, Journal, JournalError, ReadError, Rewrite};
use moim_wire_kafka::records::{self, BatchHeader};

use crate::config::TopicConfig;
use crate::partition::{MAX_DECOMPRESSED_BYTES, Partition};

/// Maximum number of keys of one round's offset map: about 40 bytes each.
const MAX_KEYS: usize = 4_000_000;

/// A failed round; the partition is unchanged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompactionError {
    #[error("log read failed: {0}")]
    Read(#[from] ReadError),
    #[error("segment rewrite failed: {0}")]
    Rewrite(#[from] JournalError),
}

/// The result of a round.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Compacted {
    pub(crate) keys: usize,
    /// The log is compacted up to this offset; the next round begins here.
    pub(crate) first_dirty_offset: i64,
}

struct OffsetMap {
    hashers: (RandomState, RandomState),
    by_key: HashMap<u128, i64>,
}

impl OffsetMap {
    fn new() -> Self {
        Self { hashers: (RandomState::new(), RandomState::new()), by_key: HashMap::new() }
    }

    /// Two independent hashes: 64 bits alone would risk collisions with millions of keys.
    fn hash(&self, key: &[u8]) -> u128 {
        u128::from(self.hashers.0.hash_one(key)) << 64 | u128::from(self.hashers.1.hash_one(key))
    }
}

/// Compacts one partition. `first_dirty_offset` is where the last round ended.
pub(crate) fn compact(
    partition: &Partition,
    config: &TopicConfig,
    first_dirty_offset: i64,
    now_ms: i64,
) -> Result<Option<Compacted>, CompactionError> {
    let Some(dirty) = dirty_range(partition, config, first_dirty_offset, now_ms) else { return Ok(None) };
    let mut offset_map = OffsetMap::new();
    let mut until = dirty.start;
    let aborted = aborted_producers(partition, dirty.end);
    let mut first_pass = |frame: &Frame, batch: &[u8]| {
        if offset_map.by_key.len() >= MAX_KEYS {
            return false;
        }
        index_batch(batch, &mut offset_map, &aborted);
        until = frame.last + 1;
        true
    };
    partition.journal.for_each_frame(dirty.start, dirty.end, &mut first_pass)?;
    if until == dirty.start {
        return Ok(None);
    }
    let keys = offset_map.by_key.len();
    let mut cleaned = partition.journal.cleaned();
    cleaned.note_round(until, now_ms);
    let removable = removable_below(partition, &cleaned, now_ms.saturating_sub(config.delete_retention_ms));
    let mut second_pass =
        SecondPass { partition, offset_map, aborted, removable, cleaned, open: HashSet::new() };
    partition.journal.compact_by(until, &mut second_pass)?;
    partition.journal.note_cleaned(second_pass.cleaned).map_err(JournalError::Io)?;
    Ok(Some(Compacted { keys, first_dirty_offset: until }))
}

/// The dirty range to compact now, if its ratio or age justifies a round.
fn dirty_range(
    partition: &Partition,
    config: &TopicConfig,
    first_dirty_offset: i64,
    now_ms: i64,
) -> Option<std::ops::Range<i64>> {
    let stable = partition.last_stable();
    let (mut dirty_bytes, mut clean_bytes, mut end, mut oldest) = (0u64, 0u64, first_dirty_offset, i64::MAX);
    for segment in partition.journal.segments() {
        let young = segment.max_timestamp_ms > now_ms.saturating_sub(config.min_compaction_lag_ms)
            && config.min_compaction_lag_ms > 0;
        if !segment.sealed || segment.end > stable || young {
            break;
        }
        if segment.end <= first_dirty_offset {
            clean_bytes += segment.bytes;
        } else {
            dirty_bytes += segment.bytes;
            end = segment.end;
            oldest = oldest.min(segment.max_timestamp_ms);
        }
    }
    let overdue = now_ms.saturating_sub(oldest) > config.max_compaction_lag_ms;
    let ratio = dirty_bytes as f64 / (dirty_bytes + clean_bytes).max(1) as f64;
    let worth_it = dirty_bytes > 0 && (overdue || ratio >= config.min_cleanable_ratio);
    worth_it.then(|| first_dirty_offset.max(partition.journal.start())..end)
}

/// The offset below which tombstones and markers may be removed: first compacted by `horizon_ms`, and fetched by
/// every fetching replica.
fn removable_below(partition: &Partition, cleaned: &Cleaned, horizon_ms: i64) -> i64 {
    let expired = cleaned.compacted_by(horizon_ms);
    match partition.replicated() {
        Some(replicated) if partition.leading().is_none() => replicated.removable_below().0,
        Some(replicated) => expired.min(replicated.removable_below().0),
        None => expired,
    }
}

/// The aborted transactions below `end`: producer and offset range.
struct Aborted {
    ranges: Vec<(i64, i64, i64)>,
}

impl Aborted {
    fn covers(&self, header: &BatchHeader) -> bool {
        header.is_transactional()
            && self.ranges.iter().any(|(producer, first, last)| {
                *producer == header.producer_id && (*first..=*last).contains(&header.base_offset)
            })
    }
}

fn aborted_producers(partition: &Partition, end: i64) -> Aborted {
    let start = partition.journal.start();
    let ranges = partition.with_producers(|p| p.aborted(start, end));
    Aborted { ranges: ranges.iter().map(|a| (a.producer_id, a.first_offset, a.last_offset)).collect() }
}

fn index_batch(batch: &[u8], offset_map: &mut OffsetMap, aborted: &Aborted) {
    let Some(header) = BatchHeader::parse(batch) else { return };
    if header.is_control() || aborted.covers(&header) {
        return;
    }
    let _ = records::for_each_record(batch, MAX_DECOMPRESSED_BYTES, &mut |record| {
        if let Some(key) = record.key {
            let hash = offset_map.hash(key);
            offset_map.by_key.insert(hash, header.base_offset + i64::from(record.offset_delta));
        }
        std::ops::ControlFlow::Continue(())
    });
}

/// The second pass: decides for each frame, from the log start, which records are kept.
struct SecondPass<'a> {
    partition: &'a Partition,
    offset_map: OffsetMap,
    aborted: Aborted,
    /// Tombstones and markers below this offset are removed.
    removable: i64,
    /// The recorded removals, this round's included.
    cleaned: Cleaned,
    /// Producers with a batch since their last marker.
    open: HashSet<i64>,
}

impl Compactor for SecondPass<'_> {
    fn rewrite(&mut self, frame: &[u8]) -> Rewrite {
        let Some(header) = BatchHeader::parse(frame) else { return Rewrite::Keep };
        if header.is_control() {
            return self.marker(&header);
        }
        if header.is_transactional() {
            self.open.insert(header.producer_id);
        }
        let aborted = self.aborted.covers(&header);
        let (offset_map, removable, mut removed) = (&self.offset_map, self.removable, 0);
        let mut keep = |offset: i64, key: Option<&[u8]>, tombstone: bool| {
            let Some(key) = key else { return false };
            let newer = offset_map.by_key.get(&offset_map.hash(key)).is_some_and(|at| *at > offset);
            if aborted || newer {
                return false;
            }
            let goes = tombstone && offset < removable;
            if goes {
                removed = offset + 1;
            }
            !goes
        };
        let batch = Bytes::copy_from_slice(frame);
        let retained = records::retain_records(&batch, MAX_DECOMPRESSED_BYTES, &mut keep);
        self.cleaned.below = self.cleaned.below.max(removed);
        match retained {
            Ok(Some(same)) if same.len() == frame.len() => Rewrite::Keep,
            Ok(Some(smaller)) => Rewrite::Replace(smaller),
            // The last batch of a producer stays as an empty batch: its sequence number must outlive its records.
            Ok(None) => match self.is_last_of_producer(&header).then(|| records::empty_batch(frame)) {
                Some(Ok(empty)) => Rewrite::Replace(empty),
                _ => Rewrite::Drop,
            },
            Err(_) => Rewrite::Keep,
        }
    }

    /// Records the removals before they happen.
    fn before_swap(&mut self, journal: &Journal) -> io::Result<()> {
        match self.cleaned.below > journal.cleaned_below() {
            true => journal.note_cleaned(self.cleaned.clone()),
            false => Ok(()),
        }
    }
}

impl SecondPass<'_> {
    fn marker(&mut self, header: &BatchHeader) -> Rewrite {
        let needed = self.open.remove(&header.producer_id);
        if needed || header.last_offset() >= self.removable || self.is_last_of_producer(header) {
            return Rewrite::Keep;
        }
        // Before the marker is removed: its records were removed in an earlier round.
        self.partition.with_producers(|p| p.forget_aborted(header.last_offset()));
        self.cleaned.below = self.cleaned.below.max(header.last_offset() + 1);
        Rewrite::Drop
    }

    fn is_last_of_producer(&self, header: &BatchHeader) -> bool {
        self.partition.with_producers(|p| p.last_offset(header.producer_id)) == Some(header.last_offset())
    }
}

/// Where each partition's last round ended. Lost at a restart, which costs one round over the whole log.
#[derive(Default)]
pub(crate) struct Progress {
    first_dirty_offset: HashMap<(u128, i32), i64>,
}

impl Progress {
    pub(crate) fn of(&self, partition: &Partition) -> i64 {
        let known =
            self.first_dirty_offset.get(&(partition.topic_id.0, partition.index)).copied().unwrap_or(0);
        known.max(partition.journal.start())
    }

    pub(crate) fn note(&mut self, partition: &Partition, first_dirty_offset: i64) {
        self.first_dirty_offset.insert((partition.topic_id.0, partition.index), first_dirty_offset);
    }

    pub(crate) fn keep_only(&mut self, topics: &HashSet<u128>) {
        self.first_dirty_offset.retain(|(topic, _), _| topics.contains(topic));
    }
}

#[cfg(test)]
mod tests;
