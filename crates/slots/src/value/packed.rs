//! Packed list: byte strings in one allocation, the compact encoding of hashes, sets and sorted sets, and the chunks
//! of lists.
//!
//! An entry is `length | bytes | size`, where `length` is a varint (7 bits per byte, low bits first) and `size` is
//! the size of the two parts before it, encoded so that it can be read backwards from its last byte. Short entries
//! cost two bytes more than their data, and the list can be traversed from both ends.
//!
//! Positions (`Pos`) are byte offsets of entries, valid until the list changes. Untrusted bytes become a `Packed`
//! only through `push_back`.

use std::ops::Range;

/// Byte offset of an entry.
pub(crate) type Pos = usize;

/// A packed list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    bytes: Vec<u8>,
    count: u32,
}

impl Packed {
    /// An empty list. Does not allocate.
    pub fn new() -> Packed {
        Packed::default()
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Total bytes of all entries with their overhead.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Heap memory in bytes.
    pub fn heap_size(&self) -> usize {
        self.bytes.capacity()
    }

    /// The position past the last entry.
    pub(crate) fn end(&self) -> Pos {
        self.bytes.len()
    }

    /// The entry at `pos` and the position of the next one.
    pub(crate) fn entry(&self, pos: Pos) -> (&[u8], Pos) {
        let (data, next) = self.spans(pos);
        (&self.bytes[data], next)
    }

    /// The position of the entry before `pos`.
    pub(crate) fn before(&self, pos: Pos) -> Option<Pos> {
        if pos == 0 {
            return None;
        }
        let (mut size, mut shift, mut at) = (0usize, 0, pos);
        loop {
            at -= 1;
            let byte = self.bytes[at];
            size |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return Some(at - size);
            }
        }
    }

    /// The position of entry `index`, located from the nearer end.
    pub(crate) fn position(&self, index: usize) -> Option<Pos> {
        if index >= self.len() {
            return None;
        }
        if index <= self.len() / 2 {
            let mut pos = 0;
            for _ in 0..index {
                pos = self.spans(pos).1;
            }
            return Some(pos);
        }
        let mut pos = self.end();
        for _ in index..self.len() {
            pos = self.before(pos)?;
        }
        Some(pos)
    }

    /// Entry `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        self.position(index).map(|pos| self.entry(pos).0)
    }

    /// Appends an entry.
    pub fn push_back(&mut self, data: &[u8]) {
        self.grow(data.len());
        write_entry(&mut self.bytes, data);
        self.count += 1;
    }

    /// Prepends an entry.
    pub fn push_front(&mut self, data: &[u8]) {
        self.insert(0, data);
    }

    /// Inserts an entry before the one at `pos` (or at the end, for `end()`).
    pub(crate) fn insert(&mut self, pos: Pos, data: &[u8]) {
        if pos == self.bytes.len() {
            return self.push_back(data);
        }
        self.grow(data.len());
        let old_end = self.bytes.len();
        write_entry(&mut self.bytes, data);
        let added = self.bytes.len() - old_end;
        self.bytes[pos..].rotate_right(added);
        self.count += 1;
    }

    /// Replaces the entry at `pos`.
    pub(crate) fn replace(&mut self, pos: Pos, data: &[u8]) {
        let (span, next) = self.spans(pos);
        if span.len() == data.len() {
            self.bytes[span].copy_from_slice(data);
            return;
        }
        let mut entry = Vec::with_capacity(data.len() + 8);
        write_entry(&mut entry, data);
        self.bytes.splice(pos..next, entry);
    }

    /// Removes `count` entries starting at `pos`.
    pub(crate) fn remove(&mut self, pos: Pos, count: usize) {
        let mut next = pos;
        for _ in 0..count {
            next = self.spans(next).1;
        }
        self.bytes.drain(pos..next);
        self.count -= count as u32;
        if self.bytes.capacity() > 64 && self.bytes.len() * 2 < self.bytes.capacity() {
            self.bytes.shrink_to(self.bytes.len() + 16);
        }
    }

    /// Splits off everything from `pos` on, which is entry `index`.
    pub(crate) fn split_off(&mut self, pos: Pos, index: usize) -> Packed {
        let tail = Packed { bytes: self.bytes.split_off(pos), count: self.count - index as u32 };
        self.count = index as u32;
        tail
    }

    /// Appends all entries of `other`.
    pub(crate) fn append(&mut self, other: &Packed) {
        self.bytes.extend_from_slice(&other.bytes);
        self.count += other.count;
    }

    /// All entries, from either end.
    pub fn iter(&self) -> Iter<'_> {
        Iter { list: self, front: 0, back: self.end() }
    }

    /// The entries from `pos` on.
    pub(crate) fn iter_from(&self, pos: Pos) -> Iter<'_> {
        Iter { list: self, front: pos, back: self.end() }
    }

    /// Index and position of the first entry equal to `data` among every `step`-th one.
    pub(crate) fn find(&self, data: &[u8], step: usize) -> Option<(usize, Pos)> {
        let (mut pos, mut index) = (0, 0);
        while pos < self.bytes.len() {
            let (entry, next) = self.entry(pos);
            if entry == data {
                return Some((index, pos));
            }
            pos = next;
            for _ in 1..step {
                pos = self.spans(pos).1;
            }
            index += 1;
        }
        None
    }

    fn spans(&self, pos: Pos) -> (Range<usize>, Pos) {
        let (mut len, mut shift, mut at) = (0usize, 0, pos);
        loop {
            let byte = self.bytes[at];
            at += 1;
            len |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let data = at..at + len;
        let size = at - pos + len;
        (data.clone(), data.end + number_size(size))
    }

    /// Grows by the exact amount while small: doubling would cost more than the entries.
    fn grow(&mut self, data: usize) {
        let need = data + 2 * number_size(data + 10);
        if self.bytes.capacity() - self.bytes.len() < need {
            self.bytes.reserve_exact(need + (self.bytes.len() / 8).min(1024));
        }
    }
}

impl<'a> FromIterator<&'a [u8]> for Packed {
    fn from_iter<I: IntoIterator<Item = &'a [u8]>>(entries: I) -> Packed {
        let mut list = Packed::new();
        entries.into_iter().for_each(|entry| list.push_back(entry));
        list
    }
}

/// Iterator over a [`Packed`], from either end.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    list: &'a Packed,
    front: Pos,
    back: Pos,
}

impl<'a> Iterator for Iter<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.front >= self.back {
            return None;
        }
        let (data, next) = self.list.entry(self.front);
        self.front = next;
        Some(data)
    }
}

impl DoubleEndedIterator for Iter<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        if self.front >= self.back {
            return None;
        }
        self.back = self.list.before(self.back)?;
        Some(self.list.entry(self.back).0)
    }
}

/// Encoded size of an entry with this much data.
pub(crate) fn entry_size(data: usize) -> usize {
    let size = number_size(data) + data;
    size + number_size(size)
}

fn number_size(mut number: usize) -> usize {
    let mut size = 1;
    while number >= 0x80 {
        number >>= 7;
        size += 1;
    }
    size
}

fn write_entry(to: &mut Vec<u8>, data: &[u8]) {
    let begin = to.len();
    let mut number = data.len();
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
    to.extend_from_slice(data);
    // Read backwards from its last byte: the last byte carries the low bits and a continuation flag.
    let size = to.len() - begin;
    for part in (0..number_size(size)).rev() {
        let bits = (size >> (7 * part)) as u8 & 0x7f;
        let more_before = part + 1 < number_size(size);
        to.push(bits | if more_before { 0x80 } else { 0 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(list: &Packed, model: &[Vec<u8>]) {
        assert_eq!(list.len(), model.len());
        assert!(list.iter().eq(model.iter().map(Vec::as_slice)));
        assert!(list.iter().rev().eq(model.iter().rev().map(Vec::as_slice)));
        for (index, entry) in model.iter().enumerate() {
            assert_eq!(list.get(index), Some(entry.as_slice()));
        }
        assert_eq!(list.get(model.len()), None);
    }

    #[test]
    fn packed_list_matches_model() {
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..40 {
            let (mut list, mut model) = (Packed::new(), Vec::<Vec<u8>>::new());
            for _ in 0..120 {
                let size = *random.choice(&[0, 1, 5, 60, 127, 128, 300, 17_000]).unwrap();
                let data = vec![random.u8(..); size];
                let at = random.usize(..=model.len());
                match random.u8(..6) {
                    0 | 1 => {
                        list.insert(list.position(at).unwrap_or(list.end()), &data);
                        model.insert(at, data);
                    }
                    2 => {
                        list.push_front(&data);
                        model.insert(0, data);
                    }
                    3 if at < model.len() => {
                        list.replace(list.position(at).unwrap(), &data);
                        model[at] = data;
                    }
                    4 if at < model.len() => {
                        let count = random.usize(..=model.len() - at).min(3);
                        list.remove(list.position(at).unwrap(), count);
                        model.drain(at..at + count);
                    }
                    5 if at < model.len() => {
                        let tail = list.split_off(list.position(at).unwrap(), at);
                        check(&tail, &model[at..]);
                        list.append(&tail);
                    }
                    _ => {
                        list.push_back(&data);
                        model.push(data);
                    }
                }
            }
            check(&list, &model);
        }
    }

    #[test]
    fn find_with_step_compares_keys_of_pairs_only() {
        let list: Packed = [b"a".as_slice(), b"b", b"b", b"c"].into_iter().collect();
        assert_eq!(list.find(b"b", 2).map(|(index, _)| index), Some(1));
        assert_eq!(list.find(b"b", 1).map(|(index, _)| index), Some(1));
        assert_eq!(list.find(b"c", 2), None);
    }
}
