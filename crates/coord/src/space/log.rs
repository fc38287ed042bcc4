//! The changes of a key space in revision order, each at a position that never moves.
//!
//! Stored in chunks: a single growing buffer would be copied whole each time it is full, which with millions of changes
//! is a pause long enough to lose leadership.
//!
//! Invariants: positions `first..next` are held; revisions (and the sub-numbers within one) only grow.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::lease::LeaseId;
use crate::spill::Value;

const CHUNK: u64 = 1024;

/// One version of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Version {
    /// `None` is a tombstone.
    pub(crate) value: Option<Value>,
    pub(crate) revision: i64,
    /// The number of the change within its revision.
    pub(crate) sub: u32,
    /// The slot of the key's entry. Valid in this process only.
    pub(crate) slot: u32,
    pub(crate) create_revision: i64,
    pub(crate) version: i64,
    pub(crate) lease: LeaseId,
}

impl Version {
    pub(crate) fn tombstone(revision: i64, sub: u32) -> Self {
        Self { value: None, revision, sub, slot: 0, create_revision: 0, version: 0, lease: LeaseId::NONE }
    }
}

/// A key and its new version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Change {
    pub(crate) key: Bytes,
    pub(crate) version: Version,
}

/// See the module comment.
#[derive(Debug)]
pub(crate) struct Log {
    chunks: VecDeque<Vec<Change>>,
    first: u64,
    next: u64,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self { chunks: VecDeque::new(), first: 0, next: 0 }
    }

    pub(crate) fn first(&self) -> u64 {
        self.first
    }

    /// The position of the next change.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first == self.next
    }

    pub(crate) fn last(&self) -> Option<&Change> {
        (!self.is_empty()).then(|| self.get(self.next - 1))
    }

    pub(crate) fn push(&mut self, change: Change) -> u64 {
        let at = self.next;
        if at.is_multiple_of(CHUNK) {
            self.chunks.push_back(Vec::new());
        }
        self.chunks.back_mut().expect("push adds a chunk for this position").push(change);
        self.next += 1;
        at
    }

    /// The change at a held position.
    pub(crate) fn get(&self, at: u64) -> &Change {
        assert!((self.first..self.next).contains(&at), "position {at} is not in the log");
        &self.chunks[self.chunk_of(at)][(at % CHUNK) as usize]
    }

    /// The value at a held position, to be spilled.
    pub(crate) fn value_mut(&mut self, at: u64) -> Option<&mut Value> {
        assert!((self.first..self.next).contains(&at), "position {at} is not in the log");
        let chunk = self.chunk_of(at);
        self.chunks[chunk][(at % CHUNK) as usize].version.value.as_mut()
    }

    fn chunk_of(&self, at: u64) -> usize {
        (at / CHUNK - self.first / CHUNK) as usize
    }

    /// Removes the oldest change. The log must not be empty.
    pub(crate) fn pop_front(&mut self) -> Change {
        assert!(!self.is_empty(), "pop_front on an empty log");
        let at = (self.first % CHUNK) as usize;
        let empty = Change { key: Bytes::new(), version: Version::tombstone(0, 0) };
        let change = std::mem::replace(&mut self.chunks[0][at], empty);
        self.first += 1;
        if self.first.is_multiple_of(CHUNK) {
            self.chunks.pop_front();
        }
        change
    }

    /// The position of the first change at `revision` or later; `next` without one.
    pub(crate) fn position_of(&self, revision: i64) -> u64 {
        let (mut low, mut high) = (self.first, self.next);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.get(middle).version.revision < revision {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Change> {
        (self.first..self.next).map(|at| self.get(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_stable_across_chunks() {
        let mut log = Log::new();
        for n in 0..3 * CHUNK {
            let at = log.push(Change {
                key: Bytes::from(n.to_string()),
                version: Version::tombstone(2 + (n / 2) as i64, (n % 2) as u32),
            });
            assert_eq!(at, n);
        }
        for n in 0..2 * CHUNK + 5 {
            assert_eq!(log.pop_front().key, n.to_string());
        }
        assert_eq!((log.first(), log.next()), (2 * CHUNK + 5, 3 * CHUNK));
        for n in log.first()..log.next() {
            assert_eq!(log.get(n).key, n.to_string());
        }
        assert_eq!(log.position_of(0), log.first());
        assert_eq!(log.position_of(i64::MAX), log.next());
        let revision = log.get(2 * CHUNK + 100).version.revision;
        assert_eq!(log.position_of(revision), 2 * CHUNK + 100);
        while !log.is_empty() {
            log.pop_front();
        }
        assert_eq!(log.push(Change { key: Bytes::new(), version: Version::tombstone(1, 0) }), 3 * CHUNK);
        assert_eq!(log.get(3 * CHUNK).version.revision, 1);
    }
}
