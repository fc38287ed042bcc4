//! The keys of a space: ordered for ranges, hashed for single keys.
//!
//! A lookup in an ordered map of a million keys touches some twenty scattered cache lines; by hash it touches three.
//! Entries have slots of their own, and a change stores its slot, so compaction needs no lookup. Slots are allocated in
//! chunks, so that growth never copies them all at once.
//!
//! Invariant: `ordered`, `hashed` and the used slots hold the same keys. The key bytes are in the entry's newest
//! change. Hash order is never visible outside.

use std::collections::BTreeMap;
use std::hash::BuildHasher;

use bytes::Bytes;
use hashbrown::{DefaultHashBuilder, HashTable};

use crate::range::Bounds;

use super::Entry;
use super::log::Log;

const CHUNK: usize = 4096;

/// See the module comment.
#[derive(Debug, Default)]
pub(super) struct Keys {
    ordered: BTreeMap<Bytes, u32>,
    /// The upper half of the hash, and the slot: growing rehashes without reading keys.
    hashed: HashTable<(u32, u32)>,
    slots: Vec<Vec<Entry>>,
    free: Vec<u32>,
    hasher: DefaultHashBuilder,
}

impl Keys {
    pub(super) fn last(&self) -> Option<&Bytes> {
        self.ordered.last_key_value().map(|(key, _)| key)
    }

    pub(super) fn entry(&self, slot: u32) -> &Entry {
        &self.slots[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    pub(super) fn entry_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.slots[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    /// The slot of a key.
    pub(super) fn find(&self, key: &[u8], log: &Log) -> Option<u32> {
        let half = self.half(key);
        let found = self
            .hashed
            .find(spread(half), |(other, slot)| *other == half && self.entry(*slot).newest(log).key == key);
        found.map(|(_, slot)| *slot)
    }

    /// The slot that [`Keys::insert`] will use next.
    pub(super) fn next_slot(&self) -> u32 {
        let next = || u32::try_from(self.ordered.len()).expect("fewer than 2^32 keys");
        self.free.last().copied().unwrap_or_else(next)
    }

    /// Inserts an absent key, in the slot of [`Keys::next_slot`].
    pub(super) fn insert(&mut self, key: Bytes, entry: Entry) {
        let slot = self.next_slot();
        match self.free.pop() {
            Some(_) => *self.entry_mut(slot) = entry,
            None => {
                if (slot as usize).is_multiple_of(CHUNK) {
                    self.slots.push(Vec::new());
                }
                self.slots[slot as usize / CHUNK].push(entry);
            }
        }
        let half = self.half(&key);
        self.hashed.insert_unique(spread(half), (half, slot), |(half, _)| spread(*half));
        self.ordered.insert(key, slot);
    }

    pub(super) fn remove(&mut self, key: &[u8], slot: u32) {
        let half = self.half(key);
        if let Ok(found) = self.hashed.find_entry(spread(half), |(_, other)| *other == slot) {
            found.remove();
        }
        self.ordered.remove(key);
        *self.entry_mut(slot) = Entry::default();
        self.free.push(slot);
    }

    /// Entries in key order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.ordered.values().map(|slot| self.entry(*slot))
    }

    /// Entries between two keys, in key order.
    pub(super) fn range(&self, bounds: Bounds<'_>) -> impl Iterator<Item = &Entry> {
        self.ordered.range::<[u8], _>(bounds).map(|(_, slot)| self.entry(*slot))
    }

    fn half(&self, key: &[u8]) -> u32 {
        (self.hasher.hash_one(key) >> 32) as u32
    }
}

/// Spreads half a hash over all 64 bits: the table uses both ends.
fn spread(half: u32) -> u64 {
    u64::from(half).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
