//! Streams: entries in the order of their ids, in runs ([`block`]), and the groups that read them ([`group`]).
//!
//! Pure: ids and times are arguments. An empty stream is a value like any other; it goes when its key is deleted.
//!
//! Invariants: no entry is above `last_id`; blocks are found by the id of their first entry, and none is without a live
//! entry; `length` counts those.

pub mod block;
pub mod group;

use std::collections::BTreeMap;

use self::block::Block;
pub use self::block::Entry;
use self::group::Group;
use super::limits::Limits;

/// The id of an entry: milliseconds, and a number within them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id {
    /// Milliseconds since 1970, unless the client chose something else.
    pub ms: u64,
    /// Which one of that millisecond.
    pub seq: u64,
}

impl Id {
    /// Below or equal to every other.
    pub const MIN: Id = Id { ms: 0, seq: 0 };
    /// Above or equal to every other.
    pub const MAX: Id = Id { ms: u64::MAX, seq: u64::MAX };

    /// The one behind it.
    pub fn next(self) -> Option<Id> {
        match self.seq.checked_add(1) {
            Some(seq) => Some(Id { seq, ..self }),
            None => self.ms.checked_add(1).map(|ms| Id { ms, seq: 0 }),
        }
    }

    /// The one before it.
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

/// Which entries go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All but so many.
    Newest(u64),
    /// Those below an id.
    From(Id),
}

/// Entries with ids, and who has read them.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    blocks: BTreeMap<Id, Block>,
    length: u64,
    heap: usize,
    /// The highest id that was ever given out.
    pub last_id: Id,
    /// The highest that was ever deleted by itself.
    pub max_deleted: Id,
    /// How many entries were ever added.
    pub added: u64,
    /// The groups by name.
    pub groups: BTreeMap<Box<[u8]>, Group>,
}

impl Stream {
    /// How many entries there are.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Blocks with the ids of their first entries.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = (Id, &Block)> {
        self.blocks.iter().map(|(id, block)| (*id, block))
    }

    /// Bytes it takes on the heap. As many steps as there are groups, which are few.
    pub fn heap_size(&self) -> usize {
        const PER_BLOCK: usize = size_of::<(Id, Block)>();
        let groups =
            self.groups.iter().map(|(name, group)| name.len() + size_of::<Group>() + group.heap_size());
        size_of::<Stream>() + self.heap + self.blocks.len() * PER_BLOCK + groups.sum::<usize>()
    }

    /// How many pieces have to be freed one by one.
    pub(super) fn pieces(&self) -> usize {
        let groups = self.groups.values().map(|group| 2 * group.pending_len() + group.consumers().len());
        self.blocks.len() + groups.sum::<usize>()
    }

    /// Adds an entry above all others.
    pub fn push(&mut self, id: Id, pairs: &[(&[u8], &[u8])], limits: &Limits) {
        let bytes: usize = pairs.iter().map(|(field, value)| field.len() + value.len()).sum();
        let is_full = |block: &Block| {
            block.packed_size() + bytes >= limits.stream_block_bytes()
                || limits.stream_entries > 0 && block.live() + block.dead() >= limits.stream_entries
        };
        let last = self.blocks.last_entry().filter(|last| {
            // A distance of more than half of all numbers has no form.
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

    /// The entries between two ids, both included.
    pub fn range(&self, start: Id, end: Id) -> impl Iterator<Item = Entry<'_>> {
        self.blocks_of(start, end)
            .flat_map(|(base, block)| block.entries(*base))
            .skip_while(move |entry| entry.id < start)
            .take_while(move |entry| entry.id <= end)
            .filter(|entry| !entry.is_deleted())
    }

    /// The same from the end.
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

    /// The lowest id of an entry; zeros if there is none.
    pub fn first_id(&self) -> Id {
        self.range(Id::MIN, Id::MAX).next().map_or(Id::MIN, |entry| entry.id)
    }

    /// The highest id of an entry.
    pub fn last_entry_id(&self) -> Option<Id> {
        let (base, block) = self.blocks.last_key_value()?;
        block.entries(*base).filter(|entry| !entry.is_deleted()).last().map(|entry| entry.id)
    }

    /// Takes an entry away. Answers whether it was there.
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

    /// Lets old entries go. `whole_blocks` stops where only a part of a block would go; `limit` is the most that may go
    /// (0: any number). Gives how many went.
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

    /// Whether something was deleted in the middle, from an id on.
    pub fn has_gaps_from(&self, start: Id) -> bool {
        !self.is_empty()
            && self.max_deleted != Id::MIN
            && self.first_id() <= self.max_deleted
            && start <= self.max_deleted
    }

    /// How many entries were added up to an id, where that can be known.
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

    /// How many entries a group has yet to read, where that can be known.
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

    /// Takes in a block as it was, entry by entry; for payloads. The ids must be above all before. Answers whether they are.
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

/// An entry that was read from a payload.
pub(crate) struct RawEntry<'a> {
    pub(crate) id: Id,
    pub(crate) is_deleted: bool,
    pub(crate) pairs: Vec<(&'a [u8], &'a [u8])>,
}

#[cfg(test)]
mod tests;
