//! Hash table with entries stored densely in one vector: the large encoding of hashes, sets and sorted sets.
//!
//! A random entry is one index away, and a scan needs no server state: it walks the vector from its end to its start.
//! Removing an entry moves the last one into the hole, always towards the part a scan has yet to visit, so an entry
//! that exists during the whole scan is always returned. New entries are appended, behind the scan.
//!
//! Invariant: `index` holds every position of `entries` exactly once.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// An entry with a byte-string key.
pub trait Keyed {
    /// The key. It never changes while the entry is in a table.
    fn key(&self) -> &[u8];
    /// Heap memory of the entry.
    fn heap_size(&self) -> usize;
}

impl Keyed for Box<[u8]> {
    fn key(&self) -> &[u8] {
        self
    }

    fn heap_size(&self) -> usize {
        self.len()
    }
}

/// A hash table with access by key and by position.
#[derive(Clone, Debug)]
pub struct Table<E> {
    entries: Vec<E>,
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// Total heap memory of the entries, cached so that memory accounting is O(1).
    heap: usize,
}

impl<E> Default for Table<E> {
    fn default() -> Table<E> {
        Table { entries: Vec::new(), index: HashTable::new(), hasher: DefaultHashBuilder::default(), heap: 0 }
    }
}

impl<E: Keyed> Table<E> {
    /// An empty table with capacity for `count` entries.
    pub fn with_capacity(count: usize) -> Table<E> {
        Table {
            entries: Vec::with_capacity(count),
            index: HashTable::with_capacity(count),
            ..Table::default()
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries by position.
    pub fn entries(&self) -> &[E] {
        &self.entries
    }

    /// Heap memory in bytes.
    pub fn heap_size(&self) -> usize {
        self.heap + self.entries.capacity() * size_of::<E>() + self.index.capacity() * 5
    }

    /// The position of the entry with this key.
    pub fn position(&self, key: &[u8]) -> Option<usize> {
        let hash = self.hasher.hash_one(key);
        self.index.find(hash, |&at| self.entries[at as usize].key() == key).map(|&at| at as usize)
    }

    /// The entry with this key.
    pub fn get(&self, key: &[u8]) -> Option<&E> {
        self.position(key).map(|at| &self.entries[at])
    }

    /// The entry at `position`, for changes that affect neither its key nor its size.
    pub fn at_mut(&mut self, position: usize) -> &mut E {
        &mut self.entries[position]
    }

    /// Replaces the entry at `position` by one with the same key.
    pub fn replace_at(&mut self, position: usize, entry: E) {
        debug_assert!(self.entries[position].key() == entry.key());
        self.heap = self.heap - self.entries[position].heap_size() + entry.heap_size();
        self.entries[position] = entry;
    }

    /// Appends an entry whose key is not in the table.
    pub fn push(&mut self, entry: E) {
        let Table { entries, index, hasher, heap } = self;
        *heap += entry.heap_size();
        let at = u32::try_from(entries.len()).expect("a value holds fewer than 2^32 entries");
        let hash = hasher.hash_one(entry.key());
        entries.push(entry);
        index.insert_unique(hash, at, |&at| hasher.hash_one(entries[at as usize].key()));
    }

    /// Removes the entry at `position`; the last entry moves there.
    pub fn swap_remove(&mut self, position: usize) -> E {
        let Table { entries, index, hasher, heap } = self;
        let hash = hasher.hash_one(entries[position].key());
        if let Ok(slot) = index.find_entry(hash, |&at| at as usize == position) {
            slot.remove();
        }
        let last = entries.len() - 1;
        if position != last {
            let hash = hasher.hash_one(entries[last].key());
            if let Some(at) = index.find_mut(hash, |&at| at as usize == last) {
                *at = position as u32;
            }
        }
        let entry = entries.swap_remove(position);
        *heap -= entry.heap_size();
        if entries.capacity() > 64 && entries.len() < entries.capacity() / 4 {
            entries.shrink_to(entries.len() * 2);
            index.shrink_to(entries.len() * 2, |&at| hasher.hash_one(entries[at as usize].key()));
        }
        entry
    }
}

/// The positions of the next scan step, and the cursor of the step after it.
///
/// A cursor is the number of positions not yet visited; 0 both starts and ends a scan.
pub(crate) fn scan_step(len: usize, cursor: u64, count: usize) -> (std::ops::Range<usize>, u64) {
    let high = if cursor == 0 { len } else { usize::try_from(cursor).unwrap_or(usize::MAX).min(len) };
    let low = high.saturating_sub(count.max(1));
    (low..high, low as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn behaves_as_a_set() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut table, mut model) = (Table::<Box<[u8]>>::default(), HashSet::<Vec<u8>>::new());
        for round in 0..20_000 {
            let key = random.u16(..3000).to_string().into_bytes();
            assert_eq!(table.position(&key).is_some(), model.contains(&key));
            let growing = (round / 4000) % 2 == 0;
            match table.position(&key) {
                Some(at) if !growing => {
                    table.swap_remove(at);
                    model.remove(&key);
                }
                None if growing => {
                    table.push(key.clone().into());
                    model.insert(key);
                }
                _ => {}
            }
        }
        assert_eq!(table.len(), model.len());
        assert!(table.entries().iter().all(|key| model.contains(&key[..])));
        assert_eq!(table.heap, model.iter().map(Vec::len).sum::<usize>());
    }

    #[test]
    fn scan_returns_stable_entries() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut table = Table::<Box<[u8]>>::default();
        (0..1000u32).for_each(|n| table.push(n.to_string().into_bytes().into()));
        let (mut cursor, mut seen) = (0, HashSet::new());
        loop {
            let (range, next) = scan_step(table.len(), cursor, 7);
            seen.extend(table.entries()[range].to_vec());
            if next == 0 {
                break;
            }
            cursor = next;
            // Odd entries are inserted and removed meanwhile.
            for _ in 0..5 {
                let key = (random.u32(..500) * 2 + 1).to_string().into_bytes();
                match table.position(&key) {
                    Some(at) => drop(table.swap_remove(at)),
                    None => table.push(key.into()),
                }
            }
        }
        assert!((0..500u32).all(|n| seen.contains((n * 2).to_string().as_bytes())));
    }
}
