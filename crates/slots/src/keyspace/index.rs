//! Finds entries by key: one small table per slot.
//!
//! A table per slot makes the questions of a cluster cheap (how many keys has a slot, which, drop them all) without a
//! second index. It is one [`piece`] while it is small, and a linear hash table of pieces when it is not: that grows by
//! one piece at a time, splitting the next one in line, and shrinks the same way, so that no operation ever moves more
//! than some hundred references. Pieces lie on [`shelves`], without gaps. With some dozens in a slot a reference takes about
//! six bytes, everything included.
//!
//! The low bits of a hash choose the piece, the three above them the group in it. Scanning walks the hash values in
//! bit-reversed order. In that order the values of one group are a contiguous run, and a split only cuts a run in two: a
//! position stays meaningful whatever the table does meanwhile. What is there during the whole scan is seen; something
//! may be seen twice when pieces merge.
//!
//! Limits: a slot with a single key takes 72 bytes; the list of the pieces of a slot with very many keys is copied as a whole
//! when it grows, 4 MB for 50 million; more than 65,535 references in one piece are not to be had, which takes as many
//! hashes that are alike.

mod piece;
mod shelves;

use self::piece::{GROUPS, Piece, bytes_for};
use self::shelves::{Berth, Owner, Shelves, rounded};
use super::arena::Ref;
use crate::SLOTS;

/// References per piece, on average, that make a table grow.
const LOAD: usize = 96;
/// And shrink.
const LOW: usize = 40;

/// The keys of one slot.
enum Table {
    /// In one piece, or none.
    One(Berth),
    /// In several.
    Many(Box<Pieces>),
}

struct Pieces {
    berths: Vec<Berth>,
    len: usize,
}

/// The tables of all slots.
pub(super) struct Index {
    tables: Box<[Table]>,
    shelves: Shelves,
    /// Bytes of tables with several pieces.
    lists: usize,
}

/// A place in a table, for as long as nothing is added or removed.
#[derive(Clone, Copy)]
pub(super) struct Place {
    piece: u32,
    at: u32,
}

/// Where a hash belongs.
struct Home {
    piece: u32,
    group: usize,
    /// How many of its bits decided about both.
    bits: u32,
}

impl Home {
    #[inline]
    fn new(hash: u64, pieces: usize) -> Self {
        let pieces = pieces as u32;
        let full = pieces.next_power_of_two();
        let wide = (hash as u32) & (full - 1);
        let piece = if wide < pieces { wide } else { wide & (full / 2 - 1) };
        // A piece that has no twin yet has its twin's values, too.
        let alone = piece < full / 2 && piece + full / 2 >= pieces;
        let bits = full.trailing_zeros() - u32::from(alone);
        Self { piece, group: (hash >> bits) as usize % GROUPS, bits: bits + GROUPS.trailing_zeros() }
    }
}

fn tag(hash: u64) -> u8 {
    (hash >> 56) as u8
}

impl Table {
    fn pieces(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(pieces) => pieces.berths.len(),
        }
    }

    #[inline]
    fn berth(&self, piece: u32) -> Berth {
        match self {
            Self::One(berth) => *berth,
            Self::Many(pieces) => pieces.berths[piece as usize],
        }
    }

    fn set_berth(&mut self, piece: u32, to: Berth) {
        match self {
            Self::One(berth) => *berth = to,
            Self::Many(pieces) => pieces.berths[piece as usize] = to,
        }
    }

    #[inline]
    fn home(&self, hash: u64) -> (Home, Berth) {
        match self {
            Self::One(berth) => (Home::new(hash, 1), *berth),
            Self::Many(pieces) => {
                let home = Home::new(hash, pieces.berths.len());
                let berth = pieces.berths[home.piece as usize];
                (home, berth)
            }
        }
    }

    /// Bytes of the list of its pieces.
    fn list(&self) -> usize {
        match self {
            Self::One(_) => 0,
            Self::Many(pieces) => pieces.berths.capacity() * size_of::<Berth>() + size_of::<Pieces>(),
        }
    }
}

impl Index {
    pub(super) fn new() -> Self {
        let tables = (0..SLOTS).map(|_| Table::One(Berth::NONE)).collect();
        Self { tables, shelves: Shelves::default(), lists: 0 }
    }

    /// How many entries a slot has.
    pub(super) fn len(&self, slot: u16) -> usize {
        match &self.tables[usize::from(slot)] {
            Table::One(berth) => Piece(self.shelves.bytes(*berth)).len(),
            Table::Many(pieces) => pieces.len,
        }
    }

    /// Whether a slot has none.
    #[inline]
    pub(super) fn is_empty(&self, slot: u16) -> bool {
        // Without a look at the piece: one that empties is given back.
        matches!(self.tables[usize::from(slot)], Table::One(Berth::NONE))
    }

    /// Bytes the machine gave for it, used or not.
    pub(super) fn taken(&self) -> usize {
        self.shelves.taken() + self.lists + self.tables.len() * size_of::<Table>()
    }

    /// Bytes it holds, besides the fixed part.
    pub(super) fn bytes(&self) -> usize {
        self.shelves.held() + self.lists
    }

    /// The entry with this hash for which `is` says yes.
    #[inline]
    pub(super) fn find(&self, slot: u16, hash: u64, is: impl FnMut(Ref) -> bool) -> Option<(Place, Ref)> {
        let (home, berth) = self.tables[usize::from(slot)].home(hash);
        let (at, entry) = Piece(self.shelves.bytes(berth)).find(home.group, tag(hash), is)?;
        Some((Place { piece: home.piece, at: at as u32 }, entry))
    }

    /// Brings from memory what looking for this hash reads first.
    #[inline]
    pub(super) fn touch(&self, slot: u16, hash: u64) -> u8 {
        let (home, berth) = self.tables[usize::from(slot)].home(hash);
        Piece(self.shelves.bytes(berth)).touch(home.group)
    }

    /// The first entry that may have this hash: for looking ahead.
    #[inline]
    pub(super) fn guess(&self, slot: u16, hash: u64) -> Ref {
        self.find(slot, hash, |_| true).map_or(Ref::NONE, |(_, entry)| entry)
    }

    /// Points a place at where its entry has moved to.
    pub(super) fn replace(&mut self, slot: u16, place: Place, with: Ref) {
        let berth = self.tables[usize::from(slot)].berth(place.piece);
        Piece(self.shelves.bytes_mut(berth)).replace(place.at as usize, with);
    }

    /// Adds an entry that is not there. `hash_of` tells the hash of those that have to move.
    pub(super) fn insert(&mut self, slot: u16, hash: u64, entry: Ref, hash_of: impl Fn(Ref) -> u64) {
        if self.len(slot) >= self.tables[usize::from(slot)].pieces() * LOAD {
            self.split(slot, hash_of);
        }
        let (home, berth) = self.tables[usize::from(slot)].home(hash);
        self.put(slot, &home, berth, tag(hash), entry);
        if let Table::Many(pieces) = &mut self.tables[usize::from(slot)] {
            pieces.len += 1;
        }
    }

    fn put(&mut self, slot: u16, home: &Home, mut berth: Berth, tag: u8, entry: Ref) {
        let piece = Piece(self.shelves.bytes(berth));
        let len = piece.len();
        if len == piece.room() {
            berth = self.resize(Owner { slot, piece: home.piece }, berth, len + 1);
        }
        Piece(self.shelves.bytes_mut(berth)).insert(home.group, tag, entry);
    }

    /// Takes an entry out. `hash_of` tells the hash of those that have to move.
    pub(super) fn remove(&mut self, slot: u16, hash: u64, place: Place, hash_of: impl Fn(Ref) -> u64) {
        let (home, berth) = self.tables[usize::from(slot)].home(hash);
        let mut piece = Piece(self.shelves.bytes_mut(berth));
        piece.remove(home.group, place.at as usize);
        let (len, bytes) = (piece.len(), piece.0.len());
        if len == 0 {
            self.release(berth);
            self.tables[usize::from(slot)].set_berth(home.piece, Berth::NONE);
        } else if rounded(bytes_for(len + len / 4 + 2)) < bytes {
            // Not at once: it may grow again.
            self.resize(Owner { slot, piece: home.piece }, berth, len + len / 8);
        }
        if let Table::Many(pieces) = &mut self.tables[usize::from(slot)] {
            pieces.len -= 1;
            if pieces.len < pieces.berths.len() * LOW {
                self.merge(slot, hash_of);
            }
        }
    }

    /// Gives a piece's place back.
    fn release(&mut self, berth: Berth) {
        if let Some(owner) = self.shelves.remove(berth) {
            self.tables[usize::from(owner.slot)].set_berth(owner.piece, berth);
        }
    }

    /// Moves a piece to where it has room for this many, or little more room than it needs.
    fn resize(&mut self, owner: Owner, from: Berth, room: usize) -> Berth {
        assert!(room <= usize::from(u16::MAX), "hashes that are all alike");
        let to = self.shelves.add(bytes_for(room), owner);
        let (old, new) = self.shelves.both(from, to);
        Piece(new).copy_from(Piece(old));
        self.tables[usize::from(owner.slot)].set_berth(owner.piece, to);
        self.release(from);
        to
    }

    /// Changes the list of a table's pieces.
    fn relist(&mut self, slot: u16, change: impl FnOnce(&mut Table)) {
        let table = &mut self.tables[usize::from(slot)];
        self.lists -= table.list();
        change(table);
        self.lists += table.list();
    }

    /// Splits the next piece in line.
    #[cold]
    fn split(&mut self, slot: u16, hash_of: impl Fn(Ref) -> u64) {
        let new = self.tables[usize::from(slot)].pieces() as u32;
        let old = new & (prev_power(new) - 1);
        let all = self.take_piece(slot, old);
        let len = self.len(slot) + if new == 1 { all.len() } else { 0 };
        self.relist(slot, |table| match table {
            Table::One(berth) => {
                *table = Table::Many(Box::new(Pieces { berths: vec![*berth, Berth::NONE], len }));
            }
            Table::Many(pieces) => pieces.berths.push(Berth::NONE),
        });
        self.spread(slot, &all, &[old, new], hash_of);
    }

    /// Puts the last piece back into the one it was split from.
    #[cold]
    fn merge(&mut self, slot: u16, hash_of: impl Fn(Ref) -> u64) {
        let last = self.tables[usize::from(slot)].pieces() as u32 - 1;
        let twin = last & (prev_power(last) - 1);
        let mut all = self.take_piece(slot, last);
        all.append(&mut self.take_piece(slot, twin));
        self.relist(slot, |table| {
            if let Table::Many(pieces) = table {
                pieces.berths.pop();
                if pieces.berths.len() == 1 {
                    *table = Table::One(Berth::NONE);
                } else if pieces.berths.capacity() > 2 * pieces.berths.len() + 4 {
                    pieces.berths.shrink_to(pieces.berths.len() * 9 / 8);
                }
            }
        });
        self.spread(slot, &all, &[twin], hash_of);
    }

    fn take_piece(&mut self, slot: u16, piece: u32) -> Vec<(Ref, u8)> {
        let berth = self.tables[usize::from(slot)].berth(piece);
        let all = Piece(self.shelves.bytes(berth)).all().collect();
        self.release(berth);
        self.tables[usize::from(slot)].set_berth(piece, Berth::NONE);
        all
    }

    /// Puts these where they belong: into these pieces, which are empty.
    fn spread(&mut self, slot: u16, all: &[(Ref, u8)], into: &[u32], hash_of: impl Fn(Ref) -> u64) {
        let pieces = self.tables[usize::from(slot)].pieces();
        let homes: Vec<Home> = all.iter().map(|(entry, _)| Home::new(hash_of(*entry), pieces)).collect();
        for piece in into.iter().copied() {
            let here = homes.iter().filter(|home| home.piece == piece).count();
            if here > 0 {
                self.resize(Owner { slot, piece }, Berth::NONE, here);
            }
        }
        for (home, (entry, tag)) in homes.iter().zip(all) {
            debug_assert!(into.contains(&home.piece));
            let berth = self.tables[usize::from(slot)].berth(home.piece);
            self.put(slot, home, berth, *tag, *entry);
        }
    }

    /// Takes everything out of a slot.
    pub(super) fn take(&mut self, slot: u16) -> Vec<Ref> {
        let mut all = Vec::with_capacity(self.len(slot));
        for piece in 0..self.tables[usize::from(slot)].pieces() {
            all.extend(self.take_piece(slot, piece as u32).into_iter().map(|(entry, _)| entry));
        }
        self.relist(slot, |table| *table = Table::One(Berth::NONE));
        all
    }

    /// Shows the entries of the group that holds `position`, or of the first after it that has some, and gives the position
    /// of the next; `None` at the end.
    pub(super) fn scan(&self, slot: u16, mut position: u64, mut show: impl FnMut(Ref)) -> Option<u64> {
        loop {
            let (home, berth) = self.tables[usize::from(slot)].home(position.reverse_bits());
            let piece = Piece(self.shelves.bytes(berth));
            let group = piece.group(home.group);
            let is_empty = group.len() == 0;
            group.for_each(&mut show);
            let run = 1u64 << (64 - home.bits);
            position = (position & !(run - 1)).checked_add(run)?;
            if !is_empty {
                return Some(position);
            }
        }
    }

    /// Shows every entry of a slot.
    pub(super) fn for_each(&self, slot: u16, mut show: impl FnMut(Ref)) {
        let table = &self.tables[usize::from(slot)];
        for piece in 0..table.pieces() {
            let piece = Piece(self.shelves.bytes(table.berth(piece as u32)));
            piece.all().for_each(|(entry, _)| show(entry));
        }
    }

    /// Some entry of a slot, picked by `dice`; `None` when there is none.
    pub(super) fn pick(&self, slot: u16, mut dice: impl FnMut(usize) -> usize) -> Option<Ref> {
        if self.is_empty(slot) {
            return None;
        }
        let table = &self.tables[usize::from(slot)];
        loop {
            let piece = Piece(self.shelves.bytes(table.berth(dice(table.pieces()) as u32)));
            if piece.len() > 0 {
                return Some(piece.at(dice(piece.len())));
            }
        }
    }
}

/// The largest power of two that is at most `n`.
fn prev_power(n: u32) -> u32 {
    1 << (31 - n.leading_zeros())
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn mix(n: u32) -> u64 {
        u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }

    /// A slot of an index, whose entries are their own keys.
    struct Slot<'a>(&'a mut Index, u16);

    impl Slot<'_> {
        fn find(&self, n: u32) -> Option<Place> {
            self.0.find(self.1, mix(n), |entry| entry.0 == n).map(|(place, _)| place)
        }

        fn insert(&mut self, n: u32) {
            self.0.insert(self.1, mix(n), Ref(n), |entry| mix(entry.0));
        }

        fn remove(&mut self, n: u32) {
            let place = self.find(n).expect("it is there");
            self.0.remove(self.1, mix(n), place, |entry| mix(entry.0));
        }

        fn all(&self) -> Vec<u32> {
            let (mut seen, mut at) = (Vec::new(), Some(0));
            while let Some(position) = at {
                at = self.0.scan(self.1, position, |entry| seen.push(entry.0));
            }
            seen.sort_unstable();
            seen
        }
    }

    #[test]
    fn slots_find_what_was_put_there_and_not_what_was_removed() {
        let mut index = Index::new();
        let mut models = vec![HashSet::new(); 5];
        let mut rng = fastrand::Rng::with_seed(3);
        for round in 0..200_000 {
            let at = rng.usize(..models.len());
            let (mut slot, model) = (Slot(&mut index, at as u16 * 3_000), &mut models[at]);
            // Slots of very different sizes: pieces of one take the places that those of another leave.
            let n = rng.u32(1..[4, 40, 200, 1_000, 8_000][at]);
            let grow = (round / 30_000) % 2 == 0;
            let is_there = slot.find(n).is_some();
            assert_eq!(is_there, model.contains(&n));
            if !is_there && (grow || rng.u8(..) < 60) {
                slot.insert(n);
                model.insert(n);
            } else if is_there && (!grow || rng.u8(..) < 60) {
                slot.remove(n);
                model.remove(&n);
            }
            assert_eq!(
                (index.len(at as u16 * 3_000), index.is_empty(at as u16 * 3_000)),
                (model.len(), model.is_empty())
            );
        }
        for (at, model) in models.into_iter().enumerate() {
            let slot = Slot(&mut index, at as u16 * 3_000);
            let mut wanted: Vec<_> = model.into_iter().collect();
            wanted.sort_unstable();
            assert_eq!(slot.all(), wanted, "a scan of a still table shows everything once");
            let mut taken: Vec<_> = index.take(at as u16 * 3_000).into_iter().map(|entry| entry.0).collect();
            taken.sort_unstable();
            assert_eq!(taken, wanted);
        }
        assert_eq!(index.bytes(), 0);
    }

    #[test]
    fn a_scan_shows_what_stays_although_the_table_grows_and_shrinks() {
        for (start, step, grow) in
            [(50u32, 37u32, true), (6_000, 211, false), (700, 90, true), (150, 3, false)]
        {
            let mut index = Index::new();
            let mut slot = Slot(&mut index, 7);
            (1..=start).for_each(|n| slot.insert(n));
            let stays: HashSet<u32> = (1..=start).filter(|n| n % 5 == 0).collect();
            let mut seen: HashMap<u32, u32> = HashMap::new();
            let (mut at, mut next_new, mut next_gone) = (Some(0), start + 1, 1);
            while let Some(position) = at {
                at = slot.0.scan(7, position, |entry| *seen.entry(entry.0).or_default() += 1);
                for _ in 0..step {
                    if grow && next_new < 20_000 {
                        slot.insert(next_new);
                        next_new += 1;
                    } else if !grow && next_gone <= start {
                        if next_gone % 5 != 0 {
                            slot.remove(next_gone);
                        }
                        next_gone += 1;
                    }
                }
            }
            for n in stays {
                assert!(seen.contains_key(&n), "{n} was there all the time");
            }
        }
    }

    #[test]
    fn a_reference_takes_little_however_many_there_are() {
        let mut index = Index::new();
        for n in 1..=300_000u32 {
            // Many in one slot, and some in each.
            let slot = if n % 3 == 0 { 9 } else { (mix(n) >> 20) as u16 % 1_500 };
            Slot(&mut index, slot).insert(n);
            if n % 10_000 == 0 && n > 100_000 {
                assert!(index.bytes() < n as usize * 13 / 2, "{} bytes for {n} entries", index.bytes());
            }
        }
    }

    #[test]
    fn a_slot_that_empties_gives_its_memory_back() {
        let mut index = Index::new();
        let most = 10_000;
        (1..=most).for_each(|n| Slot(&mut index, 5).insert(n));
        for n in 1..=most {
            Slot(&mut index, 5).remove(n);
            let left = (most - n) as usize;
            assert!(index.bytes() <= left * 15 + 200, "{} bytes for {left}", index.bytes());
        }
        assert!(index.is_empty(5));
        assert_eq!(index.bytes(), 0);
    }

    #[test]
    fn one_is_picked_from_wherever_there_are_some() {
        let mut index = Index::new();
        assert_eq!(index.pick(3, |_| 0), None);
        for many in [1, 90, 5_000] {
            (index.len(3) as u32..many).for_each(|n| Slot(&mut index, 3).insert(n + 1));
            let picked: HashSet<u32> = (0..400)
                .filter_map(|_| index.pick(3, |n| fastrand::usize(..n)))
                .map(|entry| entry.0)
                .collect();
            assert!(
                picked.len() >= (many as usize).min(60) && picked.iter().all(|n| *n <= many),
                "{picked:?}"
            );
        }
    }
}
