//! List type: a deque of packed chunks (quicklist), so that both ends are cheap and the middle is dense.
//!
//! Invariant: no chunk is empty, and `len` and `size` are the sums over the chunks. A chunk over the limit holds one
//! entry, or was created under another limit.

use std::collections::VecDeque;

use super::limits::Limits;
use super::packed::{self, Packed};

/// A list value.
#[derive(Clone, Debug, Default)]
pub struct List {
    chunks: VecDeque<Packed>,
    len: usize,
    /// Total size of the chunks, cached so that memory accounting is O(1).
    size: usize,
}

/// An end of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Head of the list.
    Left,
    /// Tail of the list.
    Right,
}

impl List {
    /// An empty list.
    pub fn new() -> List {
        List::default()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the list is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The encoding name of `OBJECT ENCODING`.
    pub fn encoding(&self) -> &'static str {
        "quicklist"
    }

    /// Heap memory in bytes.
    pub fn heap_size(&self) -> usize {
        self.chunks.capacity() * size_of::<Packed>() + self.size
    }

    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Pushes an element at one end.
    pub fn push(&mut self, end: End, data: &[u8], limits: &Limits) {
        let chunk = match end {
            End::Left => self.chunks.front_mut(),
            End::Right => self.chunks.back_mut(),
        };
        let fits = chunk.filter(|chunk| !limits.chunk_full(chunk.len() + 1, chunk.size() + data.len() + 4));
        let entry = packed::entry_size(data.len());
        match (fits, end) {
            (Some(chunk), End::Left) => chunk.push_front(data),
            (Some(chunk), End::Right) => chunk.push_back(data),
            (None, End::Left) => self.chunks.push_front([data].into_iter().collect()),
            (None, End::Right) => self.chunks.push_back([data].into_iter().collect()),
        }
        self.len += 1;
        self.size += entry;
    }

    /// Pops the element at one end.
    pub fn pop(&mut self, end: End) -> Option<Vec<u8>> {
        let chunk = match end {
            End::Left => self.chunks.front_mut()?,
            End::Right => self.chunks.back_mut()?,
        };
        let pos = match end {
            End::Left => 0,
            End::Right => chunk.before(chunk.end())?,
        };
        let data = chunk.entry(pos).0.to_vec();
        chunk.remove(pos, 1);
        if chunk.is_empty() {
            match end {
                End::Left => self.chunks.pop_front(),
                End::Right => self.chunks.pop_back(),
            };
        }
        self.len -= 1;
        self.size -= packed::entry_size(data.len());
        Some(data)
    }

    /// The element at `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let (chunk, inner) = self.locate(index)?;
        self.chunks[chunk].get(inner)
    }

    /// Replaces the element at `index`; false if there is no such element.
    pub fn set(&mut self, index: usize, data: &[u8], limits: &Limits) -> bool {
        let Some((at, inner)) = self.locate(index) else { return false };
        let chunk = &mut self.chunks[at];
        self.size -= chunk.size();
        if let Some(pos) = chunk.position(inner) {
            chunk.replace(pos, data);
        }
        self.size += chunk.size();
        self.split_if_full(at, limits);
        true
    }

    /// Inserts an element before `index` (or at the end, for `len`).
    pub fn insert(&mut self, index: usize, data: &[u8], limits: &Limits) {
        let Some((at, inner)) = self.locate(index) else {
            return self.push(End::Right, data, limits);
        };
        let chunk = &mut self.chunks[at];
        let pos = chunk.position(inner).unwrap_or(chunk.end());
        chunk.insert(pos, data);
        self.len += 1;
        self.size += packed::entry_size(data.len());
        self.split_if_full(at, limits);
    }

    /// Removes `count` elements starting at `index`.
    pub fn remove_range(&mut self, index: usize, count: usize) {
        let mut left = count.min(self.len.saturating_sub(index));
        self.len -= left;
        let Some((mut at, mut inner)) = self.locate_in(index, self.len + left) else { return };
        while left > 0 {
            let chunk = &mut self.chunks[at];
            let here = left.min(chunk.len() - inner);
            left -= here;
            self.size -= chunk.size();
            if here == chunk.len() {
                self.chunks.remove(at);
            } else {
                if let Some(pos) = chunk.position(inner) {
                    chunk.remove(pos, here);
                }
                self.size += chunk.size();
                at += 1;
            }
            inner = 0;
        }
        self.join(at.saturating_sub(1));
    }

    /// Removes up to `count` elements equal to `data`, starting at the given end; returns how many.
    pub fn remove_equal(&mut self, data: &[u8], count: usize, from: End) -> usize {
        let mut removed = 0;
        let chunks = self.chunks.len();
        for step in 0..chunks {
            if removed == count {
                break;
            }
            let at = if from == End::Left { step } else { chunks - 1 - step };
            removed += remove_in_chunk(&mut self.chunks[at], data, count - removed, from);
        }
        self.chunks.retain(|chunk| !chunk.is_empty());
        self.len -= removed;
        self.size -= removed * packed::entry_size(data.len());
        removed
    }

    /// The elements from `index` towards the tail.
    pub fn iter_from(&self, index: usize) -> impl Iterator<Item = &[u8]> + '_ {
        let (at, inner) = self.locate(index).unwrap_or((self.chunks.len(), 0));
        let first: Option<packed::Iter<'_>> =
            self.chunks.get(at).map(|chunk| chunk.iter_from(chunk.position(inner).unwrap_or(chunk.end())));
        first
            .into_iter()
            .flatten()
            .chain(self.chunks.range((at + 1).min(self.chunks.len())..).flat_map(Packed::iter))
    }

    /// All elements, from head to tail.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &[u8]> + '_ {
        self.chunks.iter().flat_map(Packed::iter)
    }

    fn locate(&self, index: usize) -> Option<(usize, usize)> {
        self.locate_in(index, self.len)
    }

    /// The chunk of element `index` and the position in it, located from the nearer end.
    fn locate_in(&self, index: usize, len: usize) -> Option<(usize, usize)> {
        if index >= len {
            return None;
        }
        if index <= len / 2 {
            let mut before = 0;
            for (at, chunk) in self.chunks.iter().enumerate() {
                if index < before + chunk.len() {
                    return Some((at, index - before));
                }
                before += chunk.len();
            }
            return None;
        }
        let mut behind = len;
        for (at, chunk) in self.chunks.iter().enumerate().rev() {
            behind -= chunk.len();
            if index >= behind {
                return Some((at, index - behind));
            }
        }
        None
    }

    fn split_if_full(&mut self, at: usize, limits: &Limits) {
        let chunk = &mut self.chunks[at];
        if chunk.len() < 2 || !limits.chunk_full(chunk.len(), chunk.size()) {
            return;
        }
        let half = chunk.len() / 2;
        if let Some(pos) = chunk.position(half) {
            let tail = chunk.split_off(pos, half);
            self.chunks.insert(at + 1, tail);
        }
    }

    /// Merges two neighbours that removals left nearly empty.
    fn join(&mut self, at: usize) {
        if let (Some(left), Some(right)) = (self.chunks.get(at), self.chunks.get(at + 1))
            && left.size() + right.size() < 1024
            && let Some(right) = self.chunks.remove(at + 1)
        {
            self.chunks[at].append(&right);
        }
    }
}

fn remove_in_chunk(chunk: &mut Packed, data: &[u8], count: usize, from: End) -> usize {
    let mut removed = 0;
    match from {
        End::Left => {
            let mut pos = 0;
            while pos < chunk.end() && removed < count {
                let (entry, next) = chunk.entry(pos);
                if entry == data {
                    chunk.remove(pos, 1);
                    removed += 1;
                } else {
                    pos = next;
                }
            }
        }
        End::Right => {
            let mut pos = chunk.end();
            while removed < count
                && let Some(before) = chunk.before(pos)
            {
                if chunk.entry(before).0 == data {
                    chunk.remove(before, 1);
                    removed += 1;
                }
                pos = before;
            }
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_matches_model() {
        for (seed, chunk) in [(1, 4), (2, -1), (3, 1), (4, 20)] {
            let limits = Limits { list_chunk: chunk, ..Limits::default() };
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut list, mut model) = (List::new(), VecDeque::<Vec<u8>>::new());
            for _ in 0..3000 {
                let data = vec![b'a' + random.u8(..4); random.usize(..4) * 50];
                let end = if random.bool() { End::Left } else { End::Right };
                let at = random.usize(..=model.len());
                match random.u8(..20) {
                    0 => {
                        let count = random.usize(..20);
                        list.remove_range(at, count);
                        model.drain(at..(at + count).min(model.len()));
                    }
                    1 => {
                        let count = random.usize(1..5);
                        let mut expected = 0;
                        while expected < count {
                            let found = match end {
                                End::Left => model.iter().position(|entry| *entry == data),
                                End::Right => model.iter().rposition(|entry| *entry == data),
                            };
                            let Some(found) = found else { break };
                            model.remove(found);
                            expected += 1;
                        }
                        assert_eq!(list.remove_equal(&data, count, end), expected);
                    }
                    2..=4 => {
                        list.insert(at, &data, &limits);
                        model.insert(at, data);
                    }
                    5..=7 => {
                        let there = at < model.len();
                        assert_eq!(list.set(at, &data, &limits), there);
                        if there {
                            model[at] = data;
                        }
                    }
                    8..=10 => assert_eq!(
                        list.pop(end),
                        if end == End::Left { model.pop_front() } else { model.pop_back() }
                    ),
                    _ => {
                        list.push(end, &data, &limits);
                        match end {
                            End::Left => model.push_front(data),
                            End::Right => model.push_back(data),
                        }
                    }
                }
                assert_eq!(list.len(), model.len());
                assert_eq!(list.size, list.chunks.iter().map(Packed::size).sum::<usize>());
                assert_eq!(list.get(at), model.get(at).map(Vec::as_slice));
                assert!(list.iter_from(at).eq(model.iter().skip(at).map(Vec::as_slice)));
            }
            assert!(list.iter().rev().eq(model.iter().rev().map(Vec::as_slice)));
        }
    }
}
