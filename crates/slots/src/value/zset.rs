//! Sorted set type: members ordered by score, then by bytes.
//!
//! Small sorted sets are packed pairs (member, eight bytes of score) in order; large ones are a table of members
//! beside an order-statistic tree of scores. All range operations use ranks: score and lexicographic bounds are
//! converted by [`Zset::rank_where`].
//!
//! Invariant: no score is NaN; the table and the tree hold the same members.

use std::cmp::Ordering;

use super::limits::Limits;
use super::packed::{Packed, Pos};
use super::ranks::{self, Item, Members, Ranks};
use super::table::{self, Keyed, Table};

/// A member with its score.
#[derive(Clone, Debug)]
pub struct Scored {
    member: Box<[u8]>,
    score: f64,
}

impl Keyed for Scored {
    fn key(&self) -> &[u8] {
        &self.member
    }

    fn heap_size(&self) -> usize {
        self.member.len()
    }
}

impl Members for Table<Scored> {
    fn member(&self, id: u32) -> &[u8] {
        &self.entries()[id as usize].member
    }
}

/// The large encoding.
#[derive(Clone, Debug, Default)]
pub struct Large {
    table: Table<Scored>,
    ranks: Ranks,
}

/// A sorted set value.
#[derive(Clone, Debug)]
pub enum Zset {
    /// Packed: member, score, member, score … in order.
    Packed(Packed),
    /// Table and tree, for many or long members.
    Large(Box<Large>),
}

impl Default for Zset {
    fn default() -> Zset {
        Zset::Packed(Packed::new())
    }
}

/// The outcome of [`Zset::insert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The member was added.
    New,
    /// The score was changed.
    Moved,
    /// The member already had this score.
    Same,
}

impl Zset {
    /// An empty sorted set.
    pub fn new() -> Zset {
        Zset::default()
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        match self {
            Zset::Packed(list) => list.len() / 2,
            Zset::Large(large) => large.ranks.len(),
        }
    }

    /// True if the sorted set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The encoding name of `OBJECT ENCODING`.
    pub fn encoding(&self) -> &'static str {
        match self {
            Zset::Packed(_) => "listpack",
            Zset::Large(_) => "skiplist",
        }
    }

    /// Heap memory in bytes.
    pub fn heap_size(&self) -> usize {
        match self {
            Zset::Packed(list) => list.heap_size(),
            Zset::Large(large) => size_of::<Large>() + large.table.heap_size() + large.ranks.heap_size(),
        }
    }

    /// The score of a member.
    pub fn score(&self, member: &[u8]) -> Option<f64> {
        match self {
            Zset::Packed(list) => {
                let (_, pos) = list.find(member, 2)?;
                Some(score_of(list.entry(list.entry(pos).1).0))
            }
            Zset::Large(large) => large.table.get(member).map(|entry| entry.score),
        }
    }

    /// Sets the score of a member; it must not be NaN.
    pub fn insert(&mut self, member: &[u8], score: f64, limits: &Limits) -> Inserted {
        assert!(!score.is_nan(), "a score is a number");
        if let Zset::Packed(list) = self {
            let (found, mut place) = locate(list, member, score);
            if let Some((pos, old)) = found {
                if old == score {
                    return Inserted::Same;
                }
                let end = list.end();
                list.remove(pos, 2);
                place = if place > pos { place - (end - list.end()) } else { place };
            }
            if list.len() / 2 < limits.zset_entries && member.len() <= limits.zset_value {
                list.insert(place, &score.to_le_bytes());
                list.insert(place, member);
            } else {
                self.large().add(member, score);
            }
            return if found.is_some() { Inserted::Moved } else { Inserted::New };
        }
        self.large().insert(member, score)
    }

    /// Removes a member; returns true if it existed.
    pub fn remove(&mut self, member: &[u8]) -> bool {
        match self {
            Zset::Packed(list) => match list.find(member, 2) {
                Some((_, pos)) => {
                    list.remove(pos, 2);
                    true
                }
                None => false,
            },
            Zset::Large(large) => match large.table.position(member) {
                Some(at) => {
                    large.remove_at(at);
                    true
                }
                None => false,
            },
        }
    }

    /// Removes the members of a rank range.
    pub fn remove_range(&mut self, low: usize, high: usize) {
        match self {
            Zset::Packed(list) => {
                if let Some(pos) = list.position(low * 2) {
                    let count = high.min(list.len() / 2).saturating_sub(low);
                    list.remove(pos, count * 2);
                }
            }
            Zset::Large(large) => {
                let members: Vec<Box<[u8]>> =
                    large.ranks.range(low, high).map(|item| large.table.member(item.id).into()).collect();
                for member in members {
                    if let Some(at) = large.table.position(&member) {
                        large.remove_at(at);
                    }
                }
            }
        }
    }

    /// Rank of a member.
    pub fn rank(&self, member: &[u8]) -> Option<usize> {
        match self {
            Zset::Packed(list) => list.find(member, 2).map(|(index, _)| index),
            Zset::Large(large) => {
                let score = large.table.get(member)?.score;
                Some(large.ranks.rank(score, member, &large.table))
            }
        }
    }

    /// Number of members that satisfy `before`, which must hold for a prefix of them.
    pub fn rank_where(&self, before: impl Fn(f64, &[u8]) -> bool) -> usize {
        match self {
            Zset::Packed(_) => {
                self.range(0, usize::MAX).take_while(|(member, score)| before(*score, member)).count()
            }
            Zset::Large(large) => {
                large.ranks.partition(|item| before(item.score, large.table.member(item.id)))
            }
        }
    }

    /// The members of a rank range (`high` excluded) with their scores, from either end.
    pub fn range(&self, low: usize, high: usize) -> Range<'_> {
        match self {
            Zset::Packed(list) => {
                let high = high.min(list.len() / 2);
                let front = list.position(low * 2).unwrap_or(list.end());
                Range(Ranged::Packed { list, front, low: low.min(high), high, back: None })
            }
            Zset::Large(large) => {
                Range(Ranged::Large { table: &large.table, items: large.ranks.range(low, high) })
            }
        }
    }

    /// All members with their scores, in order.
    pub fn iter(&self) -> Range<'_> {
        self.range(0, usize::MAX)
    }

    /// A member by position, for random selection: arbitrary order, each member once.
    pub fn at(&self, index: usize) -> Option<(&[u8], f64)> {
        match self {
            Zset::Packed(_) => self.range(index, index + 1).next(),
            Zset::Large(large) => {
                large.table.entries().get(index).map(|entry| (&entry.member[..], entry.score))
            }
        }
    }

    /// One ZSCAN step: a packed sorted set is returned in full.
    pub fn scan(&self, cursor: u64, count: usize, mut visit: impl FnMut(&[u8], f64)) -> u64 {
        match self {
            Zset::Packed(_) => {
                self.iter().for_each(|(member, score)| visit(member, score));
                0
            }
            Zset::Large(large) => {
                let (range, next) = table::scan_step(large.table.len(), cursor, count);
                large.table.entries()[range].iter().for_each(|entry| visit(&entry.member, entry.score));
                next
            }
        }
    }

    fn large(&mut self) -> &mut Large {
        if let Zset::Packed(_) = self {
            let mut large = Large::default();
            self.iter().for_each(|(member, score)| large.add(member, score));
            *self = Zset::Large(Box::new(large));
        }
        match self {
            Zset::Large(large) => large,
            Zset::Packed(_) => unreachable!("it was changed above"),
        }
    }
}

impl Large {
    fn add(&mut self, member: &[u8], score: f64) {
        let id = self.table.len() as u32;
        self.table.push(Scored { member: member.into(), score });
        self.ranks.insert(Item { score, id }, &self.table);
    }

    fn insert(&mut self, member: &[u8], score: f64) -> Inserted {
        let Some(at) = self.table.position(member) else {
            self.add(member, score);
            return Inserted::New;
        };
        let old = self.table.entries()[at].score;
        if old == score {
            return Inserted::Same;
        }
        self.ranks.remove(old, member, &self.table);
        self.table.at_mut(at).score = score;
        self.ranks.insert(Item { score, id: at as u32 }, &self.table);
        Inserted::Moved
    }

    fn remove_at(&mut self, at: usize) {
        let Large { table, ranks } = self;
        let entry = &table.entries()[at];
        ranks.remove(entry.score, &entry.member, &*table);
        let last = table.len() - 1;
        if at != last {
            // The table is about to move its last entry here. The tree must be updated first: it compares through
            // ids.
            let moved = &table.entries()[last];
            ranks.relabel(moved.score, &moved.member, at as u32, &*table);
        }
        table.swap_remove(at);
    }
}

/// Iterator over members with their scores, by rank.
#[derive(Clone, Debug)]
pub struct Range<'a>(Ranged<'a>);

#[derive(Clone, Debug)]
enum Ranged<'a> {
    /// `front` is the position of rank `low`, `back` that of rank `high` once it was needed.
    Packed {
        list: &'a Packed,
        front: usize,
        low: usize,
        high: usize,
        back: Option<usize>,
    },
    Large {
        table: &'a Table<Scored>,
        items: ranks::Range<'a>,
    },
}

impl<'a> Iterator for Range<'a> {
    type Item = (&'a [u8], f64);

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            Ranged::Packed { list, front, low, high, .. } => {
                if low >= high {
                    return None;
                }
                let (member, next) = list.entry(*front);
                let (score, next) = list.entry(next);
                *front = next;
                *low += 1;
                Some((member, score_of(score)))
            }
            Ranged::Large { table, items } => {
                let table: &'a Table<Scored> = table;
                items.next().map(|item| (table.member(item.id), item.score))
            }
        }
    }
}

impl DoubleEndedIterator for Range<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            Ranged::Packed { list, low, high, back, .. } => {
                if low >= high {
                    return None;
                }
                let end = back.unwrap_or_else(|| list.position(*high * 2).unwrap_or(list.end()));
                let score = list.before(end)?;
                let member = list.before(score)?;
                *back = Some(member);
                *high -= 1;
                Some((list.entry(member).0, score_of(list.entry(score).0)))
            }
            Ranged::Large { table, items } => {
                items.next_back().map(|item| (table.member(item.id), item.score))
            }
        }
    }
}

fn score_of(bytes: &[u8]) -> f64 {
    bytes.try_into().map_or(0.0, f64::from_le_bytes)
}

/// Current position and score of a member, and its position with the new score: both in one pass.
fn locate(list: &Packed, member: &[u8], score: f64) -> (Option<(Pos, f64)>, Pos) {
    let (mut pos, mut found, mut place) = (0, None, None);
    while pos < list.end() {
        let (other, next) = list.entry(pos);
        let (other_score, next) = list.entry(next);
        let other_score = score_of(other_score);
        if found.is_none() && other == member {
            found = Some((pos, other_score));
        }
        let is_before = match other_score.partial_cmp(&score) {
            Some(Ordering::Equal) | None => other < member,
            Some(order) => order == Ordering::Less,
        };
        if place.is_none() && !is_before {
            place = Some(pos);
        }
        if found.is_some() && place.is_some() {
            break;
        }
        pos = next;
    }
    (found, place.unwrap_or(list.end()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn sorted(model: &BTreeMap<Vec<u8>, f64>) -> Vec<(Vec<u8>, f64)> {
        let mut all: Vec<_> = model.iter().map(|(member, score)| (member.clone(), *score)).collect();
        all.sort_by(|a, b| a.1.partial_cmp(&b.1).unwrap().then_with(|| a.0.cmp(&b.0)));
        all
    }

    fn check(set: &Zset, model: &BTreeMap<Vec<u8>, f64>, random: &mut fastrand::Rng) {
        let all = sorted(model);
        let shown: Vec<_> = set.iter().map(|(member, score)| (member.to_vec(), score)).collect();
        assert_eq!(shown, all);
        let mut back: Vec<_> = set.iter().rev().map(|(member, score)| (member.to_vec(), score)).collect();
        back.reverse();
        assert_eq!(back, all);
        for (rank, (member, score)) in all.iter().enumerate() {
            assert_eq!(set.rank(member), Some(rank));
            assert_eq!(set.score(member), Some(*score));
        }
        let low = random.usize(..=all.len());
        let high = random.usize(low..=all.len());
        assert!(set.range(low, high).eq(all[low..high].iter().map(|(m, s)| (m.as_slice(), *s))));
        assert!(set.range(low, high).rev().eq(all[low..high].iter().rev().map(|(m, s)| (m.as_slice(), *s))));
        let bound = random.i32(-3..23) as f64;
        assert_eq!(
            set.rank_where(|score, _| score < bound),
            all.iter().take_while(|(_, score)| *score < bound).count()
        );
    }

    #[test]
    fn sorted_set_matches_model_in_both_encodings() {
        for (seed, entries, members, scores) in
            [(1, 128, 100, 20), (2, 10, 300, 20), (3, 0, 5000, 20), (4, 0, 5000, 1), (5, 0, 3000, 100_000)]
        {
            let limits = Limits { zset_entries: entries, ..Limits::default() };
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut set, mut model) = (Zset::new(), BTreeMap::<Vec<u8>, f64>::new());
            for round in 0..20_000 {
                let member = random.u32(..members).to_string().into_bytes();
                let score = f64::from(random.u32(..scores));
                let growing = (round / 5000) % 2 == 0;
                if random.u8(..10) < if growing { 2 } else { 8 } {
                    assert_eq!(set.remove(&member), model.remove(&member).is_some());
                } else {
                    let expected = match model.insert(member.clone(), score) {
                        None => Inserted::New,
                        Some(old) if old == score => Inserted::Same,
                        Some(_) => Inserted::Moved,
                    };
                    assert_eq!(set.insert(&member, score, &limits), expected);
                }
                if round % 2500 == 2499 {
                    check(&set, &model, &mut random);
                    let low = random.usize(..=set.len());
                    let high = low + random.usize(..50);
                    for (member, _) in sorted(&model).into_iter().take(high).skip(low) {
                        model.remove(&member);
                    }
                    set.remove_range(low, high);
                    check(&set, &model, &mut random);
                }
            }
            assert_eq!(set.encoding(), if seed == 1 { "listpack" } else { "skiplist" });
        }
    }

    #[test]
    fn scan_and_at_return_every_member() {
        let limits = Limits::default();
        let mut set = Zset::new();
        (0..500).for_each(|n: i32| {
            assert_eq!(set.insert(n.to_string().as_bytes(), f64::from(n), &limits), Inserted::New)
        });
        let (mut cursor, mut seen) = (0, 0);
        loop {
            cursor = set.scan(cursor, 10, |_, _| seen += 1);
            if cursor == 0 {
                break;
            }
        }
        assert_eq!(seen, 500);
        assert!((0..500).all(|index| set.at(index).is_some()));
        assert!(set.at(500).is_none());
    }
}
