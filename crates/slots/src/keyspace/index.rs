//! The key index: one small hash table per slot.
//!
//! A table per slot makes cluster operations cheap (count the keys of a slot, list them, drop them all) without a
//! second index. A small table is one [`bucket`]; a larger one is a linear hash table of buckets: it grows by
//! splitting one bucket at a time, in order, and shrinks the same way, so that no operation moves more than some
//! hundred references. Buckets are allocated in the [`bucket_pool`], without gaps. With some dozens of keys in a slot
//! a reference takes about six bytes, everything included.
//!
//! The low bits of a hash select the bucket, the next three bits the group in it. SCAN visits the hash values in
//! bit-reversed order. In that order the values of one group are a contiguous range, and a split only divides a
//! range: a cursor stays valid however the table is resized. A key that exists during the whole scan is returned; a
//! key may be returned twice when buckets merge.
//!
//! Limits: a slot with a single key takes 72 bytes; the bucket list of a slot with very many keys is copied as a
//! whole when it grows, 4 MB for 50 million keys; a bucket holds at most 65,535 references, which would take as many
//! colliding hashes.

mod bucket;
mod bucket_pool;

use self::bucket::{Bucket, GROUPS, bytes_for};
use self::bucket_pool::{BucketPool, BucketRef, Owner, rounded};
use super::arena::Ref;
use crate::SLOTS;

/// Average references per bucket above which a table grows.
const LOAD: usize = 96;
/// Average references per bucket below which a table shrinks.
const LOW: usize = 40;

/// The hash table of one slot.
enum Table {
    /// A single bucket, or none.
    One(BucketRef),
    /// Several buckets.
    Many(Box<Buckets>),
}

struct Buckets {
    refs: Vec<BucketRef>,
    len: usize,
}

/// The tables of all slots.
pub(super) struct Index {
    tables: Box<[Table]>,
    pool: BucketPool,
    /// Bytes of the bucket lists.
    lists: usize,
}

/// Position of an entry in a table, valid until an insertion or removal.
#[derive(Clone, Copy)]
pub(super) struct Place {
    bucket: u32,
    at: u32,
}

/// Bucket and group of a hash.
struct Location {
    bucket: u32,
    group: usize,
    /// Number of hash bits that selected both.
    bits: u32,
}

impl Location {
    #[inline]
    fn new(hash: u64, buckets: usize) -> Self {
        let buckets = buckets as u32;
        let full = buckets.next_power_of_two();
        let wide = (hash as u32) & (full - 1);
        let bucket = if wide < buckets { wide } else { wide & (full / 2 - 1) };
        // A bucket that is not yet split also holds the hashes of its future sibling.
        let alone = bucket < full / 2 && bucket + full / 2 >= buckets;
        let bits = full.trailing_zeros() - u32::from(alone);
        Self { bucket, group: (hash >> bits) as usize % GROUPS, bits: bits + GROUPS.trailing_zeros() }
    }
}

fn tag(hash: u64) -> u8 {
    (hash >> 56) as u8
}

impl Table {
    fn buckets(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(buckets) => buckets.refs.len(),
        }
    }

    #[inline]
    fn bucket_ref(&self, bucket: u32) -> BucketRef {
        match self {
            Self::One(bucket_ref) => *bucket_ref,
            Self::Many(buckets) => buckets.refs[bucket as usize],
        }
    }

    fn set_bucket_ref(&mut self, bucket: u32, to: BucketRef) {
        match self {
            Self::One(bucket_ref) => *bucket_ref = to,
            Self::Many(buckets) => buckets.refs[bucket as usize] = to,
        }
    }

    #[inline]
    fn locate(&self, hash: u64) -> (Location, BucketRef) {
        match self {
            Self::One(bucket_ref) => (Location::new(hash, 1), *bucket_ref),
            Self::Many(buckets) => {
                let location = Location::new(hash, buckets.refs.len());
                let bucket_ref = buckets.refs[location.bucket as usize];
                (location, bucket_ref)
            }
        }
    }

    /// Bytes of the bucket list.
    fn list(&self) -> usize {
        match self {
            Self::One(_) => 0,
            Self::Many(buckets) => buckets.refs.capacity() * size_of::<BucketRef>() + size_of::<Buckets>(),
        }
    }
}

impl Index {
    pub(super) fn new() -> Self {
        let tables = (0..SLOTS).map(|_| Table::One(BucketRef::NONE)).collect();
        Self { tables, pool: BucketPool::default(), lists: 0 }
    }

    /// Number of entries in a slot.
    pub(super) fn len(&self, slot: u16) -> usize {
        match &self.tables[usize::from(slot)] {
            Table::One(bucket_ref) => Bucket(self.pool.bytes(*bucket_ref)).len(),
            Table::Many(buckets) => buckets.len,
        }
    }

    /// True if a slot has no entries.
    #[inline]
    pub(super) fn is_empty(&self, slot: u16) -> bool {
        // No access to the bucket is needed: an empty bucket is freed.
        matches!(self.tables[usize::from(slot)], Table::One(BucketRef::NONE))
    }

    /// Bytes allocated, used or not.
    pub(super) fn taken(&self) -> usize {
        self.pool.taken() + self.lists + self.tables.len() * size_of::<Table>()
    }

    /// Bytes in use, besides the fixed part.
    pub(super) fn bytes(&self) -> usize {
        self.pool.held() + self.lists
    }

    /// The entry with this hash that satisfies `is`.
    #[inline]
    pub(super) fn find(&self, slot: u16, hash: u64, is: impl FnMut(Ref) -> bool) -> Option<(Place, Ref)> {
        let (location, bucket_ref) = self.tables[usize::from(slot)].locate(hash);
        let (at, entry) = Bucket(self.pool.bytes(bucket_ref)).find(location.group, tag(hash), is)?;
        Some((Place { bucket: location.bucket, at: at as u32 }, entry))
    }

    /// Prefetches the bucket header of a hash.
    #[inline]
    pub(super) fn prefetch(&self, slot: u16, hash: u64) -> u8 {
        let (location, bucket_ref) = self.tables[usize::from(slot)].locate(hash);
        Bucket(self.pool.bytes(bucket_ref)).prefetch(location.group)
    }

    /// The first entry that may have this hash, for prefetching.
    #[inline]
    pub(super) fn guess(&self, slot: u16, hash: u64) -> Ref {
        self.find(slot, hash, |_| true).map_or(Ref::NONE, |(_, entry)| entry)
    }

    /// Updates the reference of an entry that was reallocated.
    pub(super) fn replace(&mut self, slot: u16, place: Place, with: Ref) {
        let bucket_ref = self.tables[usize::from(slot)].bucket_ref(place.bucket);
        Bucket(self.pool.bytes_mut(bucket_ref)).replace(place.at as usize, with);
    }

    /// Inserts a new entry. `hash_of` returns the hash of entries that must move.
    pub(super) fn insert(&mut self, slot: u16, hash: u64, entry: Ref, hash_of: impl Fn(Ref) -> u64) {
        if self.len(slot) >= self.tables[usize::from(slot)].buckets() * LOAD {
            self.split(slot, hash_of);
        }
        let (location, bucket_ref) = self.tables[usize::from(slot)].locate(hash);
        self.put(slot, &location, bucket_ref, tag(hash), entry);
        if let Table::Many(buckets) = &mut self.tables[usize::from(slot)] {
            buckets.len += 1;
        }
    }

    fn put(&mut self, slot: u16, location: &Location, mut bucket_ref: BucketRef, tag: u8, entry: Ref) {
        let bucket = Bucket(self.pool.bytes(bucket_ref));
        let len = bucket.len();
        if len == bucket.capacity() {
            bucket_ref = self.resize(Owner { slot, bucket: location.bucket }, bucket_ref, len + 1);
        }
        Bucket(self.pool.bytes_mut(bucket_ref)).insert(location.group, tag, entry);
    }

    /// Removes an entry. `hash_of` returns the hash of entries that must move.
    pub(super) fn remove(&mut self, slot: u16, hash: u64, place: Place, hash_of: impl Fn(Ref) -> u64) {
        let (location, bucket_ref) = self.tables[usize::from(slot)].locate(hash);
        let mut bucket = Bucket(self.pool.bytes_mut(bucket_ref));
        bucket.remove(location.group, place.at as usize);
        let (len, bytes) = (bucket.len(), bucket.0.len());
        if len == 0 {
            self.release(bucket_ref);
            self.tables[usize::from(slot)].set_bucket_ref(location.bucket, BucketRef::NONE);
        } else if rounded(bytes_for(len + len / 4 + 2)) < bytes {
            // Shrinks only after a margin: the bucket may grow again.
            self.resize(Owner { slot, bucket: location.bucket }, bucket_ref, len + len / 8);
        }
        if let Table::Many(buckets) = &mut self.tables[usize::from(slot)] {
            buckets.len -= 1;
            if buckets.len < buckets.refs.len() * LOW {
                self.merge(slot, hash_of);
            }
        }
    }

    /// Frees a bucket.
    fn release(&mut self, bucket_ref: BucketRef) {
        if let Some(owner) = self.pool.remove(bucket_ref) {
            self.tables[usize::from(owner.slot)].set_bucket_ref(owner.bucket, bucket_ref);
        }
    }

    /// Reallocates a bucket with the given capacity.
    fn resize(&mut self, owner: Owner, from: BucketRef, capacity: usize) -> BucketRef {
        assert!(capacity <= usize::from(u16::MAX), "bucket overflow: too many equal hashes");
        let to = self.pool.add(bytes_for(capacity), owner);
        let (old, new) = self.pool.both(from, to);
        Bucket(new).copy_from(Bucket(old));
        self.tables[usize::from(owner.slot)].set_bucket_ref(owner.bucket, to);
        self.release(from);
        to
    }

    /// Changes the bucket list of a table.
    fn relist(&mut self, slot: u16, change: impl FnOnce(&mut Table)) {
        let table = &mut self.tables[usize::from(slot)];
        self.lists -= table.list();
        change(table);
        self.lists += table.list();
    }

    /// Splits the next bucket in order.
    #[cold]
    fn split(&mut self, slot: u16, hash_of: impl Fn(Ref) -> u64) {
        let new = self.tables[usize::from(slot)].buckets() as u32;
        let old = new & (prev_power(new) - 1);
        let all = self.take_bucket(slot, old);
        let len = self.len(slot) + if new == 1 { all.len() } else { 0 };
        self.relist(slot, |table| match table {
            Table::One(bucket_ref) => {
                *table = Table::Many(Box::new(Buckets { refs: vec![*bucket_ref, BucketRef::NONE], len }));
            }
            Table::Many(buckets) => buckets.refs.push(BucketRef::NONE),
        });
        self.spread(slot, &all, &[old, new], hash_of);
    }

    /// Merges the last bucket into the one it was split from.
    #[cold]
    fn merge(&mut self, slot: u16, hash_of: impl Fn(Ref) -> u64) {
        let last = self.tables[usize::from(slot)].buckets() as u32 - 1;
        let twin = last & (prev_power(last) - 1);
        let mut all = self.take_bucket(slot, last);
        all.append(&mut self.take_bucket(slot, twin));
        self.relist(slot, |table| {
            if let Table::Many(buckets) = table {
                buckets.refs.pop();
                if buckets.refs.len() == 1 {
                    *table = Table::One(BucketRef::NONE);
                } else if buckets.refs.capacity() > 2 * buckets.refs.len() + 4 {
                    buckets.refs.shrink_to(buckets.refs.len() * 9 / 8);
                }
            }
        });
        self.spread(slot, &all, &[twin], hash_of);
    }

    fn take_bucket(&mut self, slot: u16, bucket: u32) -> Vec<(Ref, u8)> {
        let bucket_ref = self.tables[usize::from(slot)].bucket_ref(bucket);
        let all = Bucket(self.pool.bytes(bucket_ref)).all().collect();
        self.release(bucket_ref);
        self.tables[usize::from(slot)].set_bucket_ref(bucket, BucketRef::NONE);
        all
    }

    /// Distributes entries over the given empty buckets.
    fn spread(&mut self, slot: u16, all: &[(Ref, u8)], into: &[u32], hash_of: impl Fn(Ref) -> u64) {
        let buckets = self.tables[usize::from(slot)].buckets();
        let locations: Vec<Location> =
            all.iter().map(|(entry, _)| Location::new(hash_of(*entry), buckets)).collect();
        for bucket in into.iter().copied() {
            let here = locations.iter().filter(|location| location.bucket == bucket).count();
            if here > 0 {
                self.resize(Owner { slot, bucket }, BucketRef::NONE, here);
            }
        }
        for (location, (entry, tag)) in locations.iter().zip(all) {
            debug_assert!(into.contains(&location.bucket));
            let bucket_ref = self.tables[usize::from(slot)].bucket_ref(location.bucket);
            self.put(slot, location, bucket_ref, *tag, *entry);
        }
    }

    /// Removes all entries of a slot.
    pub(super) fn take(&mut self, slot: u16) -> Vec<Ref> {
        let mut all = Vec::with_capacity(self.len(slot));
        for bucket in 0..self.tables[usize::from(slot)].buckets() {
            all.extend(self.take_bucket(slot, bucket as u32).into_iter().map(|(entry, _)| entry));
        }
        self.relist(slot, |table| *table = Table::One(BucketRef::NONE));
        all
    }

    /// Visits the entries of the group that contains `position`, or of the next non-empty group, and returns the
    /// position after it; `None` at the end.
    pub(super) fn scan(&self, slot: u16, mut position: u64, mut visit: impl FnMut(Ref)) -> Option<u64> {
        loop {
            let (location, bucket_ref) = self.tables[usize::from(slot)].locate(position.reverse_bits());
            let bucket = Bucket(self.pool.bytes(bucket_ref));
            let group = bucket.group(location.group);
            let is_empty = group.len() == 0;
            group.for_each(&mut visit);
            let run = 1u64 << (64 - location.bits);
            position = (position & !(run - 1)).checked_add(run)?;
            if !is_empty {
                return Some(position);
            }
        }
    }

    /// Visits every entry of a slot.
    pub(super) fn for_each(&self, slot: u16, mut visit: impl FnMut(Ref)) {
        let table = &self.tables[usize::from(slot)];
        for bucket in 0..table.buckets() {
            let bucket = Bucket(self.pool.bytes(table.bucket_ref(bucket as u32)));
            bucket.all().for_each(|(entry, _)| visit(entry));
        }
    }

    /// A random entry of a slot, selected by `random_below`; `None` if the slot is empty.
    pub(super) fn pick(&self, slot: u16, mut random_below: impl FnMut(usize) -> usize) -> Option<Ref> {
        if self.is_empty(slot) {
            return None;
        }
        let table = &self.tables[usize::from(slot)];
        loop {
            let bucket = Bucket(self.pool.bytes(table.bucket_ref(random_below(table.buckets()) as u32)));
            if bucket.len() > 0 {
                return Some(bucket.at(random_below(bucket.len())));
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

    /// A slot of an index whose entries are their own keys.
    struct Slot<'a>(&'a mut Index, u16);

    impl Slot<'_> {
        fn find(&self, n: u32) -> Option<Place> {
            self.0.find(self.1, mix(n), |entry| entry.0 == n).map(|(place, _)| place)
        }

        fn insert(&mut self, n: u32) {
            self.0.insert(self.1, mix(n), Ref(n), |entry| mix(entry.0));
        }

        fn remove(&mut self, n: u32) {
            let place = self.find(n).expect("entry exists");
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
    fn slots_find_inserted_entries_and_not_removed_ones() {
        let mut index = Index::new();
        let mut models = vec![HashSet::new(); 5];
        let mut rng = fastrand::Rng::with_seed(3);
        for round in 0..200_000 {
            let at = rng.usize(..models.len());
            let (mut slot, model) = (Slot(&mut index, at as u16 * 3_000), &mut models[at]);
            // Slots of very different sizes: buckets of one slot reuse the space freed by those of another.
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
            assert_eq!(slot.all(), wanted, "a scan of an unchanged table returns every entry once");
            let mut taken: Vec<_> = index.take(at as u16 * 3_000).into_iter().map(|entry| entry.0).collect();
            taken.sort_unstable();
            assert_eq!(taken, wanted);
        }
        assert_eq!(index.bytes(), 0);
    }

    #[test]
    fn scan_returns_stable_entries_while_the_table_is_resized() {
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
                assert!(seen.contains_key(&n), "{n} existed during the whole scan");
            }
        }
    }

    #[test]
    fn memory_per_reference_is_bounded() {
        let mut index = Index::new();
        for n in 1..=300_000u32 {
            // Many keys in one slot, and some in each.
            let slot = if n % 3 == 0 { 9 } else { (mix(n) >> 20) as u16 % 1_500 };
            Slot(&mut index, slot).insert(n);
            if n % 10_000 == 0 && n > 100_000 {
                assert!(index.bytes() < n as usize * 13 / 2, "{} bytes for {n} entries", index.bytes());
            }
        }
    }

    #[test]
    fn emptied_slot_frees_its_memory() {
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
    fn random_entry_comes_from_any_non_empty_bucket() {
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
