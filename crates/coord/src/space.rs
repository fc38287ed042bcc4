//! One key space with all its versions since the last compaction.
//!
//! Changes are stored once, in a [log](log::Log) in revision order, which watchers read. A key is an
//! [entry](keys::Keys) that points into the log. Compaction removes changes from the front of the log; the last change
//! of a key that is still visible moves into the key's entry as its base. So the cost of compaction is the number of
//! changes removed, not of keys, and [`Space::reclaim`] pays it in small steps after `compact` has moved the compact
//! revision at once.
//!
//! Superseded values leave memory for a [spill file](crate::spill), except the most recent ones: watchers with
//! `prev_kv` read those.
//!
//! Invariants: an entry has at least one version, and the last is a tombstone only while the log holds it. A read at
//! `compact_revision` or later finds every version visible then. `revision` grows by one for each committed group of
//! changes; changes in a group are numbered.

use std::collections::VecDeque;
use std::ops::Bound;

use bytes::Bytes;

use crate::lease::LeaseId;
use crate::range::{KeyRange, RangeEnd};
use crate::reply::KeyValue;
use crate::spill::{SpillFile, SpillWriter, Value};

mod keys;
pub(crate) mod log;

use keys::Keys;
use log::{Change, Log, Version};

/// Approximate memory of a retained change beside its bytes: the change, its entry and their allocations.
const OVERHEAD_BYTES: usize = 200;

/// Superseded values kept in memory: at most this many, and at most this many bytes. Few in tests, so that tests reach
/// spilled values.
const MAX_SUPERSEDED_VALUES: usize = if cfg!(test) { 4 } else { 1_024 };
const MAX_SUPERSEDED_BYTES: usize = 1 << 20;

/// See the module comment.
#[derive(Debug)]
pub(crate) struct Space {
    keys: Keys,
    log: Log,
    revision: i64,
    compact_revision: i64,
    /// Changes in the open group. Invariant: 0 between commands.
    open_changes: u32,
    live_keys: usize,
    bytes: usize,
    spill_writer: SpillWriter,
    superseded: VecDeque<Superseded>,
    superseded_bytes: usize,
}

/// A value that is no longer its key's newest and waits to be spilled.
#[derive(Debug)]
struct Superseded {
    slot: u32,
    /// Its log position; it may have become its key's base, or be removed.
    at: Option<u64>,
    bytes: usize,
}

/// The versions of one key.
#[derive(Debug, Default)]
struct Entry {
    /// The newest version that compaction has removed from the log. Never a tombstone.
    base: Option<Box<Change>>,
    /// The log positions of the other versions, oldest first.
    recent: Recent,
}

/// Log positions, without an allocation for the many keys that have one or none.
#[derive(Debug, Default)]
enum Recent {
    #[default]
    None,
    One(u64),
    #[allow(clippy::box_collection)] // 16 bytes in each of a million entries count; the extra hop does not
    Many(Box<VecDeque<u64>>),
}

impl Recent {
    fn push(&mut self, at: u64) {
        match self {
            Self::None => *self = Self::One(at),
            Self::One(first) => *self = Self::Many(Box::new(VecDeque::from([*first, at]))),
            Self::Many(all) => all.push_back(at),
        }
    }

    fn pop_front(&mut self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::One(at) => {
                let at = *at;
                *self = Self::None;
                Some(at)
            }
            Self::Many(all) => {
                let at = all.pop_front();
                if let (1, Some(&last)) = (all.len(), all.front()) {
                    *self = Self::One(last);
                }
                at
            }
        }
    }

    fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::One(_) => 1,
            Self::Many(all) => all.len(),
        }
    }

    fn get(&self, index: usize) -> Option<u64> {
        match self {
            Self::None => None,
            Self::One(at) => (index == 0).then_some(*at),
            Self::Many(all) => all.get(index).copied(),
        }
    }

    /// The number of positions with a revision before `revision`.
    fn count_before(&self, log: &Log, revision: i64) -> usize {
        match self {
            Self::None => 0,
            Self::One(at) => usize::from(log.get(*at).version.revision < revision),
            // Reads at the current revision, which are most, want all of them.
            Self::Many(all) if all.back().is_some_and(|at| log.get(*at).version.revision < revision) => {
                all.len()
            }
            Self::Many(all) => all.partition_point(|at| log.get(*at).version.revision < revision),
        }
    }
}

impl Entry {
    fn newest<'a>(&'a self, log: &'a Log) -> &'a Change {
        match self.recent.len() {
            0 => self.base.as_deref(),
            n => self.recent.get(n - 1).map(|at| log.get(at)),
        }
        .expect("an entry has a version")
    }

    /// The last version at `revision`, tombstones included.
    fn at<'a>(&'a self, log: &'a Log, revision: i64) -> Option<&'a Change> {
        match self.recent.count_before(log, revision.saturating_add(1)) {
            0 => self.base.as_deref().filter(|base| base.version.revision <= revision),
            n => self.recent.get(n - 1).map(|at| log.get(at)),
        }
    }
}

impl Space {
    pub(crate) fn new() -> Self {
        Self::restored(1, -1, None)
    }

    /// Sets the spill file for values superseded from now on.
    pub(crate) fn set_spill(&mut self, spill: Option<SpillFile>) {
        self.spill_writer = SpillWriter::new(spill);
        self.superseded = VecDeque::new();
        self.superseded_bytes = 0;
    }

    pub(crate) fn spill(&self) -> Option<&SpillFile> {
        self.spill_writer.file()
    }

    /// An empty key space at a revision, to be filled from a snapshot.
    pub(crate) fn restored(revision: i64, compact_revision: i64, spill: Option<SpillFile>) -> Self {
        Self {
            keys: Keys::default(),
            log: Log::new(),
            revision,
            compact_revision,
            open_changes: 0,
            live_keys: 0,
            bytes: 0,
            spill_writer: SpillWriter::new(spill),
            superseded: VecDeque::new(),
            superseded_bytes: 0,
        }
    }

    pub(crate) fn revision(&self) -> i64 {
        self.revision
    }

    pub(crate) fn compact_revision(&self) -> i64 {
        self.compact_revision
    }

    pub(crate) fn live_keys(&self) -> usize {
        self.live_keys
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    /// The revision that reads see: includes the open group, if it has changes.
    pub(crate) fn view_revision(&self) -> i64 {
        self.revision + i64::from(self.open_changes > 0)
    }

    /// Ends the open group of changes; the revision advances if there were any.
    pub(crate) fn commit(&mut self) {
        self.revision = self.view_revision();
        self.open_changes = 0;
    }

    /// The newest version of a key, if it is live.
    pub(crate) fn current(&self, key: &[u8]) -> Option<&Change> {
        let change = self.find(key)?.newest(&self.log);
        change.is_put().then_some(change)
    }

    /// The version of a key at a revision, if it was live then.
    pub(crate) fn get_at(&self, key: &[u8], revision: i64) -> Option<&Change> {
        self.find(key)?.at(&self.log, revision).filter(|change| change.is_put())
    }

    /// The live keys of a range at a revision, in key order.
    pub(crate) fn scan<'a>(&'a self, range: &KeyRange, revision: i64) -> impl Iterator<Item = &'a Change> {
        let (one, many) = match range.end {
            RangeEnd::Single => (self.find(&range.start), None),
            RangeEnd::Before(_) | RangeEnd::Open => {
                (None, range.bounds().map(|bounds| self.keys.range(bounds)))
            }
        };
        let entries = one.into_iter().chain(many.into_iter().flatten());
        let changes = entries.filter_map(move |entry| entry.at(&self.log, revision));
        changes.filter(|change| change.is_put())
    }

    /// Puts a key in the open group; returns the lease it had and the stored key.
    pub(crate) fn put(&mut self, key: &[u8], value: Bytes, lease: LeaseId) -> (LeaseId, Bytes) {
        let revision = self.revision + 1;
        let found = self.keys.find(key, &self.log);
        let (stored, create_revision, version, old_lease) = match found {
            None => (Bytes::copy_from_slice(key), revision, 1, LeaseId::NONE),
            Some(slot) => {
                let newest = self.keys.entry(slot).newest(&self.log);
                let v = &newest.version;
                match &v.value {
                    Some(_) => (newest.key.clone(), v.create_revision, v.version + 1, v.lease),
                    None => (newest.key.clone(), revision, 1, LeaseId::NONE),
                }
            }
        };
        self.live_keys += usize::from(version == 1);
        let sub = self.open_changes;
        let slot = found.unwrap_or_else(|| self.keys.next_slot());
        let version =
            Version { value: Some(value.into()), revision, sub, slot, create_revision, version, lease };
        self.push(found, Change { key: stored.clone(), version });
        self.open_changes += 1;
        (old_lease, stored)
    }

    /// Deletes a live key in the open group; returns the lease it had and the stored key.
    pub(crate) fn delete(&mut self, key: &[u8]) -> Option<(LeaseId, Bytes)> {
        let slot = self.keys.find(key, &self.log)?;
        let newest = self.keys.entry(slot).newest(&self.log);
        if !newest.is_put() {
            return None;
        }
        let (stored, lease) = (newest.key.clone(), newest.version.lease);
        let version = Version { slot, ..Version::tombstone(self.revision + 1, self.open_changes) };
        self.push(Some(slot), Change { key: stored.clone(), version });
        self.live_keys -= 1;
        self.open_changes += 1;
        Some((lease, stored))
    }

    /// Logs a change of a key in a slot, or of a new key.
    fn push(&mut self, found: Option<u32>, change: Change) {
        self.bytes += change.cost();
        let key = change.key.clone();
        let at = self.log.push(change);
        match found {
            Some(slot) => {
                self.on_superseded(slot);
                self.keys.entry_mut(slot).recent.push(at);
            }
            None => self.keys.insert(key, Entry { base: None, recent: Recent::One(at) }),
        }
    }

    /// Called before a change supersedes the newest value of the key in this slot.
    fn on_superseded(&mut self, slot: u32) {
        if self.spill_writer.file().is_none() {
            return;
        }
        let entry = self.keys.entry(slot);
        let bytes = entry.newest(&self.log).version.value.as_ref().map_or(0, Value::len);
        let at = entry.recent.len().checked_sub(1).and_then(|last| entry.recent.get(last));
        self.superseded.push_back(Superseded { slot, at, bytes });
        self.superseded_bytes += bytes;
        while self.superseded.len() > MAX_SUPERSEDED_VALUES || self.superseded_bytes > MAX_SUPERSEDED_BYTES {
            let Some(oldest) = self.superseded.pop_front() else { return };
            self.superseded_bytes -= oldest.bytes;
            self.spill_value(&oldest);
        }
    }

    fn spill_value(&mut self, superseded: &Superseded) {
        let value = match superseded.at.filter(|at| *at >= self.log.first()) {
            Some(at) => self.log.value_mut(at),
            None => {
                let entry = self.keys.entry_mut(superseded.slot);
                let is_old = !entry.recent.is_empty();
                entry.base.as_mut().filter(|_| is_old).and_then(|base| base.version.value.as_mut())
            }
        };
        if let Some(value) = value {
            self.spill_writer.spill(value);
        }
    }

    fn find(&self, key: &[u8]) -> Option<&Entry> {
        self.keys.find(key, &self.log).map(|slot| self.keys.entry(slot))
    }

    /// Moves the compact revision. [`Space::reclaim`] frees the memory.
    pub(crate) fn compact(&mut self, revision: i64) {
        assert!(
            revision > self.compact_revision && revision <= self.revision,
            "unchecked compact revision {revision}"
        );
        self.compact_revision = revision;
    }

    /// Reclaims up to `max` compacted changes; true if more are left.
    ///
    /// Changes *at* the compact revision stay, including deletions: a watch may start there.
    pub(crate) fn reclaim(&mut self, max: usize) -> bool {
        for _ in 0..max {
            if !self.is_reclaimable() {
                return false;
            }
            let at = self.log.first();
            let change = self.log.pop_front();
            self.bytes -= change.cost();
            let slot = change.version.slot;
            let entry = self.keys.entry_mut(slot);
            let oldest = entry.recent.pop_front();
            assert_eq!(oldest, Some(at), "a key's changes leave the log in order");
            if let Some(base) = entry.base.take() {
                self.bytes -= base.cost();
            }
            if change.is_put() {
                self.bytes += change.cost();
                entry.base = Some(Box::new(change));
            } else if entry.recent.is_empty() {
                self.keys.remove(&change.key, slot);
            }
        }
        self.is_reclaimable()
    }

    fn is_reclaimable(&self) -> bool {
        !self.log.is_empty() && self.log.get(self.log.first()).version.revision < self.compact_revision
    }

    /// The log positions of the changes of one key at `revision` and later.
    pub(crate) fn changes_of(&self, key: &[u8], revision: i64) -> impl Iterator<Item = u64> {
        let entry = self.find(key);
        let from = entry.map_or(0, |entry| entry.recent.count_before(&self.log, revision));
        let to = entry.map_or(0, |entry| entry.recent.len());
        (from..to).filter_map(move |index| entry?.recent.get(index))
    }

    /// Every version visible at `compact_revision` or later, by key and age: the input of the hash.
    ///
    /// Returns the same before and after [`Space::reclaim`].
    pub(crate) fn versions(&self) -> impl Iterator<Item = &Change> {
        self.keys.iter().flat_map(move |entry| {
            let compacted = entry.at(&self.log, self.compact_revision);
            let compacted =
                compacted.filter(|last| last.is_put() && last.version.revision < self.compact_revision);
            let from = entry.recent.count_before(&self.log, self.compact_revision);
            let open = (from..entry.recent.len()).filter_map(|index| entry.recent.get(index));
            compacted.into_iter().chain(open.map(|at| self.log.get(at)))
        })
    }

    /// The newest version of every live key.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Change> {
        self.keys.iter().map(|entry| entry.newest(&self.log)).filter(|change| change.is_put())
    }

    /// The base versions of the keys after this one: together with the log, the whole key space.
    pub(crate) fn bases_after(&self, key: Option<&Bytes>) -> impl Iterator<Item = &Change> {
        let from = key.map_or(Bound::Unbounded, |key| Bound::Excluded(&key[..]));
        self.keys.range((from, Bound::Unbounded)).filter_map(|entry| entry.base.as_deref())
    }

    /// Restores a base from a snapshot. False if it cannot be one.
    pub(crate) fn restore_base(&mut self, change: Change) -> bool {
        let fits = change.is_put()
            && change.version.revision < self.compact_revision
            && self.log.is_empty()
            && self.keys.last().is_none_or(|last| *last < change.key);
        if fits {
            self.bytes += change.cost();
            self.live_keys += 1;
            let key = change.key.clone();
            self.keys.insert(key, Entry { base: Some(Box::new(change)), recent: Recent::None });
        }
        fits
    }

    /// Restores a change from a snapshot. False if it does not follow the last one.
    pub(crate) fn restore_change(&mut self, mut change: Change) -> bool {
        let after = match self.log.last() {
            Some(last) => (last.version.revision, i64::from(last.version.sub)),
            None => (0, -1),
        };
        if change.version.revision > self.revision
            || (change.version.revision, i64::from(change.version.sub)) <= after
        {
            return false;
        }
        let found = self.keys.find(&change.key, &self.log);
        let newest = found.map(|slot| self.keys.entry(slot).newest(&self.log));
        let lived = newest.is_some_and(Change::is_put);
        if let Some(newest) = newest {
            change.key = newest.key.clone(); // one copy of a key for all its changes
        }
        match (lived, change.is_put()) {
            (false, true) => self.live_keys += 1,
            (true, false) => self.live_keys -= 1,
            (true, true) => {}
            (false, false) => return false,
        }
        change.version.slot = found.unwrap_or_else(|| self.keys.next_slot());
        self.push(found, change);
        true
    }
}

impl Change {
    /// True if this version is a put, not a tombstone.
    pub(crate) fn is_put(&self) -> bool {
        self.version.value.is_some()
    }

    fn cost(&self) -> usize {
        self.key.len() + self.version.value.as_ref().map_or(0, Value::len) + OVERHEAD_BYTES
    }

    /// As a reply; a deletion has only key and mod revision.
    pub(crate) fn to_kv(&self) -> KeyValue {
        let v = &self.version;
        KeyValue {
            key: self.key.clone(),
            value: v.value.as_ref().map(Value::bytes).unwrap_or_default(),
            create_revision: v.create_revision,
            mod_revision: v.revision,
            version: v.version,
            lease: v.lease,
        }
    }
}

#[cfg(test)]
mod tests;
