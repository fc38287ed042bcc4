//! Set type: intset while all members are integers, packed while small, otherwise a hash table.
//!
//! The encoding names are those of Redis 7.0, which has no packed sets: a packed set reports `hashtable`.

use std::borrow::Cow;

use super::intset::IntSet;
use super::limits::Limits;
use super::number;
use super::packed::Packed;
use super::table::{self, Table};

/// A set value.
#[derive(Clone, Debug)]
pub enum Set {
    /// Intset: all members are integers.
    Ints(IntSet),
    /// Packed: few short members.
    Packed(Packed),
    /// Hash table, for many or long members.
    Table(Box<Table<Box<[u8]>>>),
}

impl Default for Set {
    fn default() -> Set {
        Set::Ints(IntSet::new())
    }
}

impl Set {
    /// An empty set.
    pub fn new() -> Set {
        Set::default()
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        match self {
            Set::Ints(set) => set.len(),
            Set::Packed(list) => list.len(),
            Set::Table(table) => table.len(),
        }
    }

    /// True if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The encoding name of `OBJECT ENCODING`.
    pub fn encoding(&self) -> &'static str {
        match self {
            Set::Ints(_) => "intset",
            Set::Packed(_) | Set::Table(_) => "hashtable",
        }
    }

    /// Heap memory in bytes.
    pub fn heap_size(&self) -> usize {
        match self {
            Set::Ints(set) => set.heap_size(),
            Set::Packed(list) => list.heap_size(),
            Set::Table(table) => size_of::<Table<Box<[u8]>>>() + table.heap_size(),
        }
    }

    /// True if `member` is in the set.
    pub fn contains(&self, member: &[u8]) -> bool {
        match self {
            Set::Ints(set) => number::parse_i64(member).is_some_and(|number| set.contains(number)),
            Set::Packed(list) => list.find(member, 1).is_some(),
            Set::Table(table) => table.position(member).is_some(),
        }
    }

    /// Adds a member; returns true if it is new.
    pub fn insert(&mut self, member: &[u8], limits: &Limits) -> bool {
        if let Set::Ints(set) = self {
            match number::parse_i64(member) {
                Some(number) if set.contains(number) => return false,
                Some(number) if set.len() < limits.set_ints => return set.insert(number),
                _ => self.convert_from_intset(limits),
            }
        }
        if let Set::Packed(list) = self {
            if list.find(member, 1).is_some() {
                return false;
            }
            if list.len() < limits.set_entries && member.len() <= limits.set_value {
                list.push_back(member);
                return true;
            }
        }
        let table = self.table();
        if table.position(member).is_some() {
            return false;
        }
        table.push(member.into());
        true
    }

    /// Removes a member; returns true if it existed.
    pub fn remove(&mut self, member: &[u8]) -> bool {
        match self {
            Set::Ints(set) => number::parse_i64(member).is_some_and(|number| set.remove(number)),
            Set::Packed(list) => match list.find(member, 1) {
                Some((_, pos)) => {
                    list.remove(pos, 1);
                    true
                }
                None => false,
            },
            Set::Table(table) => match table.position(member) {
                Some(at) => {
                    table.swap_remove(at);
                    true
                }
                None => false,
            },
        }
    }

    /// The member at `index`, in the order of [`Set::iter`].
    pub fn at(&self, index: usize) -> Option<Cow<'_, [u8]>> {
        match self {
            Set::Ints(set) if index < set.len() => Some(Cow::Owned(number::from_i64(set.get(index)))),
            Set::Ints(_) => None,
            Set::Packed(list) => list.get(index).map(Cow::Borrowed),
            Set::Table(table) => table.entries().get(index).map(|member| Cow::Borrowed(&member[..])),
        }
    }

    /// All members.
    pub fn iter(&self) -> Box<dyn Iterator<Item = Cow<'_, [u8]>> + '_> {
        match self {
            Set::Ints(set) => Box::new(set.iter().map(|number| Cow::Owned(number::from_i64(number)))),
            Set::Packed(list) => Box::new(list.iter().map(Cow::Borrowed)),
            Set::Table(table) => Box::new(table.entries().iter().map(|member| Cow::Borrowed(&member[..]))),
        }
    }

    /// One SSCAN step: a compact set is returned in full.
    pub fn scan(&self, cursor: u64, count: usize, mut visit: impl FnMut(&[u8])) -> u64 {
        match self {
            Set::Table(table) => {
                let (range, next) = table::scan_step(table.len(), cursor, count);
                table.entries()[range].iter().for_each(|member| visit(member));
                next
            }
            _ => {
                self.iter().for_each(|member| visit(&member));
                0
            }
        }
    }

    fn convert_from_intset(&mut self, limits: &Limits) {
        if self.len() >= limits.set_entries || limits.set_value < 20 {
            self.table();
        } else {
            let mut list = Packed::new();
            self.iter().for_each(|member| list.push_back(&member));
            *self = Set::Packed(list);
        }
    }

    fn table(&mut self) -> &mut Table<Box<[u8]>> {
        if !matches!(self, Set::Table(_)) {
            let mut table = Table::with_capacity(self.len() + 1);
            self.iter().for_each(|member| table.push(member.as_ref().into()));
            *self = Set::Table(Box::new(table));
        }
        match self {
            Set::Table(table) => table,
            _ => unreachable!("it was changed above"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn set_matches_model_in_all_encodings() {
        for (seed, ints, entries, words) in
            [(1, 512, 128, false), (2, 20, 40, false), (3, 512, 128, true), (4, 5, 0, true)]
        {
            let limits = Limits { set_ints: ints, set_entries: entries, ..Limits::default() };
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut set, mut model) = (Set::new(), BTreeSet::<Vec<u8>>::new());
            for _ in 0..3000 {
                let mut member = random.u8(..100).to_string();
                if words && random.bool() {
                    member.push('x');
                }
                let member = member.into_bytes();
                match random.u8(..3) {
                    0 => assert_eq!(set.remove(&member), model.remove(&member)),
                    1 => assert_eq!(set.contains(&member), model.contains(&member)),
                    _ => assert_eq!(set.insert(&member, &limits), model.insert(member)),
                }
                assert_eq!(set.len(), model.len());
            }
            assert_eq!(set.iter().map(Cow::into_owned).collect::<BTreeSet<_>>(), model);
            let by_index: BTreeSet<_> = (0..set.len()).map(|at| set.at(at).unwrap().into_owned()).collect();
            assert_eq!(by_index, model);
            assert_eq!(set.encoding(), if seed == 1 { "intset" } else { "hashtable" });
        }
    }
}
