//! Hash type: fields and values. Small hashes are packed pairs (reported as listpack), large ones a hash table.
//!
//! A field and its value share one allocation in the table. A hash never returns to the packed encoding.

use super::limits::Limits;
use super::packed::{self, Packed};
use super::table::{self, Keyed, Table};

/// A field with its value in one allocation: four bytes of length, field, value.
#[derive(Clone, Debug)]
pub struct Field(Box<[u8]>);

impl Field {
    fn new(field: &[u8], value: &[u8]) -> Field {
        let length = u32::try_from(field.len()).expect("a field is shorter than 4 GiB");
        let mut bytes = Vec::with_capacity(4 + field.len() + value.len());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(field);
        bytes.extend_from_slice(value);
        Field(bytes.into_boxed_slice())
    }

    fn split(&self) -> (&[u8], &[u8]) {
        let length = u32::from_le_bytes([self.0[0], self.0[1], self.0[2], self.0[3]]) as usize;
        self.0[4..].split_at(length)
    }
}

impl Keyed for Field {
    fn key(&self) -> &[u8] {
        self.split().0
    }

    fn heap_size(&self) -> usize {
        self.0.len()
    }
}

/// A hash value.
#[derive(Clone, Debug)]
pub enum Hash {
    /// Packed: field, value, field, value …
    Packed(Packed),
    /// Hash table, for many or large fields.
    Table(Box<Table<Field>>),
}

impl Default for Hash {
    fn default() -> Hash {
        Hash::Packed(Packed::new())
    }
}

impl Hash {
    /// An empty hash.
    pub fn new() -> Hash {
        Hash::default()
    }

    /// Number of fields.
    pub fn len(&self) -> usize {
        match self {
            Hash::Packed(list) => list.len() / 2,
            Hash::Table(table) => table.len(),
        }
    }

    /// True if there are no fields.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The encoding name of `OBJECT ENCODING`.
    pub fn encoding(&self) -> &'static str {
        match self {
            Hash::Packed(_) => "listpack",
            Hash::Table(_) => "hashtable",
        }
    }

    /// Heap memory in bytes.
    pub fn heap_size(&self) -> usize {
        match self {
            Hash::Packed(list) => list.heap_size(),
            Hash::Table(table) => size_of::<Table<Field>>() + table.heap_size(),
        }
    }

    /// The value of a field.
    pub fn get(&self, field: &[u8]) -> Option<&[u8]> {
        match self {
            Hash::Packed(list) => {
                let (_, pos) = list.find(field, 2)?;
                Some(list.entry(list.entry(pos).1).0)
            }
            Hash::Table(table) => table.get(field).map(|entry| entry.split().1),
        }
    }

    /// Sets a field; returns true if it is new.
    pub fn set(&mut self, field: &[u8], value: &[u8], limits: &Limits) -> bool {
        if let Hash::Packed(list) = self {
            let found = list.find(field, 2);
            let entries = list.len() / 2 + usize::from(found.is_none());
            if entries <= limits.hash_entries && field.len().max(value.len()) <= limits.hash_value {
                match found {
                    Some((_, pos)) => list.replace(list.entry(pos).1, value),
                    None => {
                        list.push_back(field);
                        list.push_back(value);
                    }
                }
                return found.is_none();
            }
        }
        let table = self.table();
        match table.position(field) {
            Some(at) => {
                table.replace_at(at, Field::new(field, value));
                false
            }
            None => {
                table.push(Field::new(field, value));
                true
            }
        }
    }

    /// Removes a field; returns true if it existed.
    pub fn remove(&mut self, field: &[u8]) -> bool {
        match self {
            Hash::Packed(list) => match list.find(field, 2) {
                Some((_, pos)) => {
                    list.remove(pos, 2);
                    true
                }
                None => false,
            },
            Hash::Table(table) => match table.position(field) {
                Some(at) => {
                    table.swap_remove(at);
                    true
                }
                None => false,
            },
        }
    }

    /// The field and value at `index`, in the order of [`Hash::iter`].
    pub fn at(&self, index: usize) -> Option<(&[u8], &[u8])> {
        match self {
            Hash::Packed(list) => {
                let (field, next) = list.entry(list.position(index * 2)?);
                Some((field, list.entry(next).0))
            }
            Hash::Table(table) => table.entries().get(index).map(Field::split),
        }
    }

    /// All fields with their values.
    pub fn iter(&self) -> Iter<'_> {
        match self {
            Hash::Packed(list) => Iter::Packed(list.iter()),
            Hash::Table(table) => Iter::Table(table.entries().iter()),
        }
    }

    /// One HSCAN step: a packed hash is returned in full.
    pub fn scan(&self, cursor: u64, count: usize, mut visit: impl FnMut(&[u8], &[u8])) -> u64 {
        match self {
            Hash::Packed(_) => {
                self.iter().for_each(|(field, value)| visit(field, value));
                0
            }
            Hash::Table(table) => {
                let (range, next) = table::scan_step(table.len(), cursor, count);
                for entry in &table.entries()[range] {
                    let (field, value) = entry.split();
                    visit(field, value);
                }
                next
            }
        }
    }

    fn table(&mut self) -> &mut Table<Field> {
        if let Hash::Packed(_) = self {
            let mut table = Table::with_capacity(self.len() + 1);
            self.iter().for_each(|(field, value)| table.push(Field::new(field, value)));
            *self = Hash::Table(Box::new(table));
        }
        match self {
            Hash::Table(table) => table,
            Hash::Packed(_) => unreachable!("it was changed above"),
        }
    }
}

/// Iterator over fields and values.
#[derive(Clone, Debug)]
pub enum Iter<'a> {
    /// Over the packed encoding.
    Packed(packed::Iter<'a>),
    /// Over the hash table.
    Table(std::slice::Iter<'a, Field>),
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Iter::Packed(entries) => Some((entries.next()?, entries.next()?)),
            Iter::Table(entries) => entries.next().map(Field::split),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn hash_matches_model_in_both_encodings() {
        for (seed, entries, value) in [(1, 128, 64), (2, 10, 64), (3, 0, 0), (4, 128, 20)] {
            let limits = Limits { hash_entries: entries, hash_value: value, ..Limits::default() };
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut hash, mut model) = (Hash::new(), BTreeMap::<Vec<u8>, Vec<u8>>::new());
            for _ in 0..2000 {
                let field = random.u8(..100).to_string().into_bytes();
                let data = vec![b'x'; random.usize(..30)];
                match random.u8(..3) {
                    0 => assert_eq!(hash.remove(&field), model.remove(&field).is_some()),
                    1 => assert_eq!(hash.get(&field), model.get(&field).map(Vec::as_slice)),
                    _ => {
                        assert_eq!(hash.set(&field, &data, &limits), model.insert(field, data).is_none());
                    }
                }
                assert_eq!(hash.len(), model.len());
            }
            let shown: BTreeMap<_, _> = hash.iter().map(|(f, v)| (f.to_vec(), v.to_vec())).collect();
            assert_eq!(shown, model);
            let by_index: BTreeMap<_, _> = (0..hash.len())
                .map(|at| hash.at(at).unwrap())
                .map(|(f, v)| (f.to_vec(), v.to_vec()))
                .collect();
            assert_eq!(by_index, model);
            assert_eq!(hash.encoding(), if seed == 1 { "listpack" } else { "hashtable" });
        }
    }
}
