//! Key compaction: of every key only the newest record stays.
//!
//! Two passes. The first reads the part that was never compacted and remembers, for each key, the offset of
//! its newest record; the second has the journal rewrite its sealed segments, keeping a record when no newer
//! one of its key is known. Tombstones stay for `delete.retention.ms` after this broker first compacted them, so that a
//! consumer that reads along sees them; the records of aborted transactions go.
//!
//! A tombstone or a marker that is gone is gone for replicas too. A leader keeps it until every replica that fetches has
//! it, and notes with the journal below which offset some are missing before the first of them goes
//! ([`moim_journal::Cleaned`]); a replica that was away for longer is rebuilt. A follower removes only what its leader may
//! have removed.
//!
//! A transaction's marker goes only in a round that meets none of its batches any more: without it the log
//! would say, when it is read from the start, that the transaction never ended. With the marker goes the
//! mention of the aborted transaction that readers are given, or they would take the producer's next
//! transaction for the aborted one.
//!
//! Limits: the map holds hashes of keys (128 bits each), so memory is bounded by [`MAX_KEYS`] and a larger
//! dirty part is compacted in several rounds.

use std::hash::{BuildHasher, RandomState};
use std::io;

use bytes::Bytes;
use hashbrown::{HashMap, HashSet};

use moim_journal::{Cleaned, Compactor, Frame, Journal, JournalError, ReadError, Rewrite};
use moim_wire_kafka::records::{self, BatchHeader};

use crate::config::TopicConfig;
use crate::partition::{MAX_DECOMPRESSED_BYTES, Partition};

/// How many keys one round remembers: about 40 bytes each.
const MAX_KEYS: usize = 4_000_000;

/// Why a round failed; the partition is as it was.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompactionError {
    #[error("cannot read: {0}")]
    Read(#[from] ReadError),
    #[error("cannot rewrite: {0}")]
    Rewrite(#[from] JournalError),
}

/// What a round did.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Compacted {
    pub(crate) keys: usize,
    /// Compacted up to here; the next round begins there.
    pub(crate) clean_until: i64,
}

struct Newest {
    hashers: (RandomState, RandomState),
    by_key: HashMap<u128, i64>,
}

impl Newest {
    fn new() -> Self {
        Self { hashers: (RandomState::new(), RandomState::new()), by_key: HashMap::new() }
    }

    /// Two independent hashes: with 64 bits alone, millions of keys would not be safe from a collision.
    fn hash(&self, key: &[u8]) -> u128 {
        u128::from(self.hashers.0.hash_one(key)) << 64 | u128::from(self.hashers.1.hash_one(key))
    }
}

/// Compacts one partition. `clean_until` is where the last round ended.
pub(crate) fn compact(
    partition: &Partition,
    config: &TopicConfig,
    clean_until: i64,
    now_ms: i64,
) -> Result<Option<Compacted>, CompactionError> {
    let Some(dirty) = dirty_range(partition, config, clean_until, now_ms) else { return Ok(None) };
    let mut newest = Newest::new();
    let mut until = dirty.start;
    let aborted = aborted_producers(partition, dirty.end);
    let mut first_pass = |frame: &Frame, batch: &[u8]| {
        if newest.by_key.len() >= MAX_KEYS {
            return false;
        }
        remember(batch, &mut newest, &aborted);
        until = frame.last + 1;
        true
    };
    partition.journal.for_each_frame(dirty.start, dirty.end, &mut first_pass)?;
    if until == dirty.start {
        return Ok(None);
    }
    let keys = newest.by_key.len();
    let mut cleaned = partition.journal.cleaned();
    cleaned.note_round(until, now_ms);
    let removable = removable_below(partition, &cleaned, now_ms.saturating_sub(config.delete_retention_ms));
    let mut second_pass = SecondPass { partition, newest, aborted, removable, cleaned, open: HashSet::new() };
    partition.journal.compact_by(until, &mut second_pass)?;
    partition.journal.note_cleaned(second_pass.cleaned).map_err(JournalError::Io)?;
    Ok(Some(Compacted { keys, clean_until: until }))
}

/// The part of the log to be compacted now, if it is worth it.
fn dirty_range(
    partition: &Partition,
    config: &TopicConfig,
    clean_until: i64,
    now_ms: i64,
) -> Option<std::ops::Range<i64>> {
    let stable = partition.last_stable();
    let (mut dirty_bytes, mut clean_bytes, mut end, mut oldest) = (0u64, 0u64, clean_until, i64::MAX);
    for segment in partition.journal.segments() {
        let young = segment.max_timestamp_ms > now_ms.saturating_sub(config.min_compaction_lag_ms)
            && config.min_compaction_lag_ms > 0;
        if !segment.sealed || segment.end > stable || young {
            break;
        }
        if segment.end <= clean_until {
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
    worth_it.then(|| clean_until.max(partition.journal.start())..end)
}

/// Tombstones and markers below this offset may go: first compacted by `horizon_ms`, and no replica that fetches is behind.
fn removable_below(partition: &Partition, cleaned: &Cleaned, horizon_ms: i64) -> i64 {
    let expired = cleaned.compacted_by(horizon_ms);
    match partition.replicated() {
        Some(replicated) if partition.leading().is_none() => replicated.removable_below().0,
        Some(replicated) => expired.min(replicated.removable_below().0),
        None => expired,
    }
}

/// The aborted transactions below `end`: producer and the range of offsets.
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

fn remember(batch: &[u8], newest: &mut Newest, aborted: &Aborted) {
    let Some(header) = BatchHeader::parse(batch) else { return };
    if header.is_control() || aborted.covers(&header) {
        return;
    }
    let _ = records::for_each_record(batch, MAX_DECOMPRESSED_BYTES, &mut |record| {
        if let Some(key) = record.key {
            let hash = newest.hash(key);
            newest.by_key.insert(hash, header.base_offset + i64::from(record.offset_delta));
        }
        std::ops::ControlFlow::Continue(())
    });
}

/// Decides frame by frame, from the start of the log, what stays.
struct SecondPass<'a> {
    partition: &'a Partition,
    newest: Newest,
    aborted: Aborted,
    /// Tombstones and markers below this offset go.
    removable: i64,
    /// What is on record of removals, and of this round.
    cleaned: Cleaned,
    /// Producers of which a batch was met since their last marker.
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
        let (newest, removable, mut removed) = (&self.newest, self.removable, 0);
        let mut keep = |offset: i64, key: Option<&[u8]>, tombstone: bool| {
            let Some(key) = key else { return false };
            let newer = newest.by_key.get(&newest.hash(key)).is_some_and(|at| *at > offset);
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
            // The last batch of a producer stays as an empty one: its sequence number must outlive its records.
            Ok(None) => match self.is_last_of_producer(&header).then(|| records::empty_batch(frame)) {
                Some(Ok(empty)) => Rewrite::Replace(empty),
                _ => Rewrite::Drop,
            },
            Err(_) => Rewrite::Keep,
        }
    }

    /// What is about to be gone is on record first.
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
        // Before the marker is gone: its records went in an earlier round.
        self.partition.with_producers(|p| p.forget_aborted(header.last_offset()));
        self.cleaned.below = self.cleaned.below.max(header.last_offset() + 1);
        Rewrite::Drop
    }

    fn is_last_of_producer(&self, header: &BatchHeader) -> bool {
        self.partition.with_producers(|p| p.last_offset(header.producer_id)) == Some(header.last_offset())
    }
}

/// Where each partition's last round ended. Lost at a restart, which costs one round over all of it.
#[derive(Default)]
pub(crate) struct Progress {
    clean_until: HashMap<(u128, i32), i64>,
}

impl Progress {
    pub(crate) fn of(&self, partition: &Partition) -> i64 {
        let known = self.clean_until.get(&(partition.topic_id.0, partition.index)).copied().unwrap_or(0);
        known.max(partition.journal.start())
    }

    pub(crate) fn note(&mut self, partition: &Partition, clean_until: i64) {
        self.clean_until.insert((partition.topic_id.0, partition.index), clean_until);
    }

    pub(crate) fn keep_only(&mut self, topics: &HashSet<u128>) {
        self.clean_until.retain(|(topic, _), _| topics.contains(topic));
    }
}

#[cfg(test)]
mod tests;
