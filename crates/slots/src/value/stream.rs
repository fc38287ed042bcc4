//! Stream type: entries in id order, in blocks ([`block`]), and consumer groups ([`group`]).
//!
//! Pure: ids and times are arguments. An empty stream remains a value; it is removed when its key is deleted.
//!
//! Invariants: no entry is above `last_id`; blocks are indexed by the id of their first entry, and each has a live
//! entry; `length` counts the live entries.

pub mod block;
pub mod group;

use std::collections::BTreeMap;

use self::block::Block;
pub use self::block::Entry;
use self::group::Group;
use super::limits::Limits;

/// Entry id: milliseconds and a sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id {
    /// Milliseconds since 1970, unless the client chose otherwise.
    pub ms: u64,
    /// Sequence number within the millisecond.
    pub seq: u64,
}

impl Id {
    /// The lowest id.
    pub const MIN: Id = Id { ms: 0, seq: 0 };
    /// The highest id.
    pub const MAX: Id = Id { ms: u64::MAX, seq: u64::MAX };

    /// The next id.
    pub fn next(self) -> Option<Id> {
        match self.seq.checked_add(1) {
            Some(seq) => Some(Id { seq, ..self }),
            None => self.ms.checked_add(1).map(|ms| Id { ms, seq: 0 }),
        }
    }

    /// The previous id.
    pub fn previous(self) -> Option<Id> {
        match self.seq.checked_sub(1) {
            Some(seq) => Some(Id { seq, ..self }),
            None => self.ms.checked_sub(1).map(|ms| Id { ms, seq: u64::MAX }),
        }
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}-{}", self.ms, self.seq)
    }
}

/// Which entries a trim keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// MAXLEN: the newest entries.
    Newest(u64),
    /// MINID: entries from this id on.
    From(Id),
}

/// A stream value.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    blocks: BTreeMap<Id, Block>,
    length: u64,
    heap: usize,
    /// The highest id ever added.
    pub last_id: Id,
    /// The highest id ever deleted by XDEL (`max-deleted-entry-id`).
    pub max_deleted: Id,
    /// Number of entries ever added (`entries-added`).
    pub added: u64,
    /// Consumer groups by name.
    pub groups: BTreeMap<Box<[u8]>, Group>,
}

impl Stream {
    /// Number of entries.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Blocks with the ids of their first entries.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = (Id, &Block)> {
        self.blocks.iter().map(|(id, block)| (*id, block))
    }

    /// Heap memory in bytes. Linear in the number of groups, which are few.
    pub fn heap_size(&self) -> usize {
        const PER_BLOCK: usize = size_of::<(Id, Block)>();
        let groups =
            self.groups.iter().map(|(name, group)| name.len() + size_of::<Group>() + group.heap_size());
        size_of::<Stream>() + self.heap + self.blocks.len() * PER_BLOCK + groups.sum::<usize>()
    }

    /// Number of allocations to free.
    pub(super) fn pieces(&self) -> usize {
        let groups = self.groups.values().map(|group| 2 * group.pending_len() + group.consumers().len());
        self.blocks.len() + groups.sum::<usize>()
    }

    /// Appends an entry, whose id must be the highest.
    pub fn push(&mut self, id: Id, pairs: &[(&[u8], &[u8])], limits: &Limits) {
        let bytes: usize = pairs.iter().map(|(field, value)| field.len() + value.len()).sum();
        let is_full = |block: &Block| {
            block.packed_size() + bytes >= limits.stream_block_bytes()
                || limits.stream_entries > 0 && block.live() + block.dead() >= limits.stream_entries
        };
        let last = self.blocks.last_entry().filter(|last| {
            // A larger id distance cannot be encoded.
            !is_full(last.get()) && id.ms - last.key().ms <= i64::MAX as u64
        });
        let (base, block) = match last {
            Some(last) => (*last.key(), last.into_mut()),
            None => {
                if let Some(mut full) = self.blocks.last_entry() {
                    let before = full.get().heap_size();
                    full.get_mut().close();
                    self.heap = self.heap - before + full.get().heap_size();
                }
                let block = Block::new(pairs.iter().map(|(field, _)| *field));
                self.heap += block.heap_size();
                (id, self.blocks.entry(id).or_insert(block))
            }
        };
        let before = block.heap_size();
        block.push(base, id, pairs);
        self.heap = self.heap - before + block.heap_size();
        self.length += 1;
        self.added += 1;
        self.last_id = id;
    }

    /// The entries between two ids, inclusive.
    pub fn range(&self, start: Id, end: Id) -> impl Iterator<Item = Entry<'_>> {
        self.blocks_of(start, end)
            .flat_map(|(base, block)| block.entries(*base))
            .skip_while(move |entry| entry.id < start)
            .take_while(move |entry| entry.id <= end)
            .filter(|entry| !entry.is_deleted())
    }

    /// The entries between two ids, inclusive, in reverse order.
    pub fn range_back(&self, start: Id, end: Id) -> impl Iterator<Item = Entry<'_>> {
        self.blocks_of(start, end)
            .rev()
            .flat_map(|(base, block)| {
                let mut entries: Vec<_> = block.entries(*base).filter(|entry| !entry.is_deleted()).collect();
                entries.reverse();
                entries
            })
            .skip_while(move |entry| entry.id > end)
            .take_while(move |entry| entry.id >= start)
    }

    fn blocks_of(&self, start: Id, end: Id) -> std::collections::btree_map::Range<'_, Id, Block> {
        let from = self.blocks.range(..=start).next_back().map_or(start, |(base, _)| *base);
        self.blocks.range(from..=end.max(from))
    }

    /// The entry with an id.
    pub fn get(&self, id: Id) -> Option<Entry<'_>> {
        let (base, block) = self.blocks.range(..=id).next_back()?;
        block
            .entries(*base)
            .take_while(|entry| entry.id <= id)
            .find(|entry| entry.id == id && !entry.is_deleted())
    }

    /// The lowest id of an entry; zero if there are no entries.
    pub fn first_id(&self) -> Id {
        self.range(Id::MIN, Id::MAX).next().map_or(Id::MIN, |entry| entry.id)
    }

    /// The highest id of an entry.
    pub fn last_entry_id(&self) -> Option<Id> {
        let (base, block) = self.blocks.last_key_value()?;
        block.entries(*base).filter(|entry| !entry.is_deleted()).last().map(|entry| entry.id)
    }

    /// Deletes an entry. Returns whether it existed.
    pub fn delete(&mut self, id: Id) -> bool {
        let Some(position) = self.get(id).map(|entry| entry.position()) else { return false };
        let Some((&base, block)) = self.blocks.range_mut(..=id).next_back() else { return false };
        block.delete(position);
        if block.live() == 0 {
            self.heap -= block.heap_size();
            self.blocks.remove(&base);
        }
        self.length -= 1;
        self.max_deleted = self.max_deleted.max(id);
        true
    }

    /// Trims old entries. `whole_blocks` (`~`) stops where only part of a block would be removed; `limit` is the
    /// maximum number to remove (0 for no limit). Returns the number removed.
    pub fn trim(&mut self, keep: Keep, whole_blocks: bool, limit: u64) -> u64 {
        let mut gone = 0;
        while let Some(mut first) = self.blocks.first_entry() {
            let base = *first.key();
            let live = first.get().live() as u64;
            let goes_whole = match keep {
                Keep::Newest(count) if self.length <= count => break,
                Keep::Newest(count) => self.length - live >= count,
                Keep::From(id) => first.get().entries(base).last().is_none_or(|entry| entry.id < id),
            };
            if limit > 0 && gone + live > limit {
                break;
            }
            if goes_whole {
                self.heap -= first.remove().heap_size();
                self.length -= live;
                gone += live;
                continue;
            }
            if whole_blocks {
                break;
            }
            let excess = match keep {
                Keep::Newest(count) => (self.length - count) as usize,
                Keep::From(_) => usize::MAX,
            };
            let goes = |entry: &Entry<'_>| match keep {
                Keep::Newest(_) => true,
                Keep::From(id) => entry.id < id,
            };
            let entries = first.get().entries(base).take_while(goes).filter(|entry| !entry.is_deleted());
            let positions: Vec<usize> = entries.take(excess).map(|entry| entry.position()).collect();
            positions.iter().for_each(|position| first.get_mut().delete(*position));
            self.length -= positions.len() as u64;
            gone += positions.len() as u64;
            break;
        }
        gone
    }

    /// True if an entry was deleted in the middle, at or after an id.
    pub fn has_gaps_from(&self, start: Id) -> bool {
        !self.is_empty()
            && self.max_deleted != Id::MIN
            && self.first_id() <= self.max_deleted
            && start <= self.max_deleted
    }

    /// Number of entries added up to an id, if it can be determined.
    pub fn count_up_to(&self, id: Id) -> Option<u64> {
        if self.added == 0 {
            return Some(0);
        }
        if id == self.last_id || self.is_empty() && id < self.last_id {
            return Some(self.added);
        }
        if id > self.last_id {
            return None;
        }
        let first = self.first_id();
        if self.max_deleted != Id::MIN && self.max_deleted >= first {
            return None;
        }
        match id.cmp(&first) {
            std::cmp::Ordering::Less => Some(self.added.saturating_sub(self.length)),
            std::cmp::Ordering::Equal => Some(self.added.saturating_sub(self.length) + 1),
            std::cmp::Ordering::Greater => None,
        }
    }

    /// Entries a group has yet to read (lag), if it can be determined.
    pub fn lag(&self, group: &Group) -> Option<i64> {
        if self.added == 0 {
            return Some(0);
        }
        let read = match group.entries_read {
            Some(read) if !self.has_gaps_from(group.last_id) => Some(read),
            _ => self.count_up_to(group.last_id),
        };
        read.map(|read| self.added as i64 - read as i64)
    }

    /// Appends a block from a payload, entry by entry. The ids must be above all previous ones; returns false if they
    /// are not.
    pub(crate) fn push_block(&mut self, base: Id, names: &[&[u8]], entries: &[RawEntry<'_>]) -> bool {
        let mut block = Block::new(names.iter().copied());
        let mut last = self
            .blocks
            .iter()
            .next_back()
            .and_then(|(base, block)| block.entries(*base).last())
            .map(|entry| entry.id);
        for entry in entries {
            if last.is_some_and(|last| entry.id <= last) || entry.id < base {
                return false;
            }
            last = Some(entry.id);
            block.push(base, entry.id, &entry.pairs);
            if entry.is_deleted
                && let Some(position) = block.entries(base).last().map(|entry| entry.position())
            {
                block.delete(position);
            }
        }
        if block.live() == 0 {
            return false;
        }
        block.close();
        self.length += block.live() as u64;
        self.heap += block.heap_size();
        self.blocks.insert(base, block);
        true
    }
}

/// An entry decoded from a payload.
pub(crate) struct RawEntry<'a> {
    pub(crate) id: Id,
    pub(crate) is_deleted: bool,
    pub(crate) pairs: Vec<(&'a [u8], &'a [u8])>,
}

#[cfg(test)]
mod tests;
