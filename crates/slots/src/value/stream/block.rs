//! A stream block: the field names of its first entry (master entry), then its entries in sequence.
//!
//! The bytes are those of a Redis listpack without its header, so that a payload is a copy. An entry is its flags,
//! the difference of its id from the block's, its fields (omitted if they equal those of the first entry) and values,
//! and the number of its elements. A deleted entry keeps its bytes, with a flag, until its block is removed.
//!
//! Invariant: `live` and `dead` count the entries without and with that flag; ids ascend.

use super::Id;
use crate::value::listpack::{Element, Elements, put, put_int};

const DELETED: u8 = 1;
const SAME_FIELDS: u8 = 2;

/// A block of entries.
#[derive(Clone, Debug)]
pub struct Block {
    names: Vec<u8>,
    names_count: usize,
    body: Vec<u8>,
    live: usize,
    dead: usize,
}

/// A stream entry.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    /// Id of the entry.
    pub id: Id,
    is_deleted: bool,
    has_same_fields: bool,
    fields: usize,
    flags_at: usize,
    values: Elements<'a>,
    block: &'a Block,
}

impl<'a> Entry<'a> {
    /// Number of fields.
    pub fn fields(&self) -> usize {
        self.fields
    }

    /// True if the entry is deleted.
    pub(super) fn is_deleted(&self) -> bool {
        self.is_deleted
    }

    /// Position of the entry in its block.
    pub(super) fn position(&self) -> usize {
        self.flags_at
    }

    /// Field-value pairs.
    pub fn pairs(&self) -> impl Iterator<Item = (Element<'a>, Element<'a>)> + use<'a> {
        let mut values = self.values;
        let mut names = Elements::at(&self.block.names, 0);
        let has_same_fields = self.has_same_fields;
        (0..self.fields).map(move |_| {
            let name = if has_same_fields { names.read() } else { values.read() };
            (name, values.read())
        })
    }
}

impl Block {
    /// A block whose first entry will have these fields.
    pub(super) fn new<'n>(names: impl ExactSizeIterator<Item = &'n [u8]>) -> Block {
        let names_count = names.len();
        let mut bytes = Vec::new();
        names.for_each(|name| put(&mut bytes, name));
        Block { names: bytes, names_count, body: Vec::new(), live: 0, dead: 0 }
    }

    /// Appends an entry, whose id must be the highest.
    pub(super) fn push(&mut self, base: Id, id: Id, pairs: &[(&[u8], &[u8])]) {
        let same = self.has_names(pairs);
        let body = &mut self.body;
        put_int(body, i64::from(if same { SAME_FIELDS } else { 0 }));
        // Differences wrap around, as in Redis: a later id may have a lower sequence.
        put_int(body, id.ms.wrapping_sub(base.ms) as i64);
        put_int(body, id.seq.wrapping_sub(base.seq) as i64);
        if !same {
            put_int(body, pairs.len() as i64);
        }
        for (field, value) in pairs {
            if !same {
                put(body, field);
            }
            put(body, value);
        }
        let elements = if same { pairs.len() + 3 } else { 2 * pairs.len() + 4 };
        put_int(body, elements as i64);
        self.live += 1;
    }

    fn has_names(&self, pairs: &[(&[u8], &[u8])]) -> bool {
        let mut names = Elements::at(&self.names, 0);
        pairs.len() == self.names_count && pairs.iter().all(|(field, _)| names.read().as_bytes() == *field)
    }

    /// All entries, including deleted ones.
    pub(super) fn entries(&self, base: Id) -> Entries<'_> {
        Entries { block: self, base, elements: Elements::at(&self.body, 0) }
    }

    /// Marks the entry at a position as deleted.
    pub(super) fn delete(&mut self, position: usize) {
        // Flags are small integers, which are encoded in one byte.
        self.body[position] |= DELETED;
        self.live -= 1;
        self.dead += 1;
    }

    /// Number of entries that are not deleted.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Number of deleted entries.
    pub(super) fn dead(&self) -> usize {
        self.dead
    }

    /// Heap memory in bytes.
    pub(super) fn heap_size(&self) -> usize {
        self.names.capacity() + self.body.capacity()
    }

    /// Releases spare capacity: no more entries follow.
    pub(super) fn close(&mut self) {
        self.names.shrink_to_fit();
        self.body.shrink_to_fit();
    }

    /// Size as a listpack.
    pub(super) fn packed_size(&self) -> usize {
        // Header and terminator are seven bytes; the four integers of the master entry take two to four bytes each.
        6 + 1 + 8 + self.names.len() + self.body.len()
    }

    /// The listpack as Redis stores it.
    pub fn to_listpack(&self) -> Vec<u8> {
        let mut bytes = vec![0; 6];
        put_int(&mut bytes, self.live as i64);
        put_int(&mut bytes, self.dead as i64);
        put_int(&mut bytes, self.names_count as i64);
        bytes.extend_from_slice(&self.names);
        put_int(&mut bytes, 0);
        bytes.extend_from_slice(&self.body);
        bytes.push(0xff);
        let total = bytes.len() as u32;
        bytes[..4].copy_from_slice(&total.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.elements().to_le_bytes());
        bytes
    }

    /// The element count of the listpack header: the number, or "unknown" if it is too large.
    fn elements(&self) -> u16 {
        let mut elements = Elements::at(&self.body, 0);
        let mut count = 4 + self.names_count;
        while !elements.is_at_end() && count < usize::from(u16::MAX) {
            elements.skip(1);
            count += 1;
        }
        u16::try_from(count).unwrap_or(u16::MAX)
    }
}

/// Iterator of [`Block::entries`].
#[derive(Clone)]
pub(super) struct Entries<'a> {
    block: &'a Block,
    base: Id,
    elements: Elements<'a>,
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    fn next(&mut self) -> Option<Entry<'a>> {
        if self.elements.is_at_end() {
            return None;
        }
        let flags_at = self.elements.position();
        let flags = self.elements.read_int() as u8;
        let ms = self.base.ms.wrapping_add(self.elements.read_int() as u64);
        let seq = self.base.seq.wrapping_add(self.elements.read_int() as u64);
        let has_same_fields = flags & SAME_FIELDS != 0;
        let fields = if has_same_fields { self.block.names_count } else { self.elements.read_int() as usize };
        let values = self.elements;
        self.elements.skip(if has_same_fields { fields } else { 2 * fields } + 1);
        Some(Entry {
            id: Id { ms, seq },
            is_deleted: flags & DELETED != 0,
            has_same_fields,
            fields,
            flags_at,
            values,
            block: self.block,
        })
    }
}
