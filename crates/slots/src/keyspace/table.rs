//! Finds entries by key: one small table per slot.
//!
//! A table per slot makes the questions of a cluster cheap (how many keys has a slot, which, drop them all) without a
//! second index. Each is a linear hash table: it grows by one bucket at a time, splitting the next one in line, and
//! shrinks the same way, so that no operation ever moves more than a few entries and the load is always near
//! [`LOAD`]. A bucket is one cache line: 12 references with a byte of the hash beside each, and a link to an
//! overflow bucket for those that do not fit.
//!
//! Scanning walks the hash values in bit-reversed order. In that order the values of one bucket are a contiguous run,
//! and a split only cuts a run in two: a position stays meaningful whatever the table does meanwhile. What is there
//! during the whole scan is seen; something may be seen twice when buckets merge.

use super::arena::Ref;

const PLACES: usize = 12;
/// Entries per bucket, on average, that make the table grow.
const LOAD: usize = 10;
/// And shrink.
const LOW: usize = 4;
/// Buckets that are one allocation; the first grows up to this, further ones come whole.
const CHUNK: usize = 1024;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    refs: [u32; PLACES],
    tags: [u8; PLACES],
    /// Index + 1 of an overflow bucket.
    next: u32,
}

const EMPTY: Bucket = Bucket { refs: [0; PLACES], tags: [0; PLACES], next: 0 };

impl Bucket {
    /// The places whose tag is this one: the top bit of byte n stands for place n. All twelve are compared at once, because a
    /// loop that ends somewhere else each time costs more than the comparisons.
    #[inline]
    fn alike(&self, tag: u8) -> u128 {
        const LOW: u128 = u128::from_ne_bytes([0x7f; 16]);
        const PLACES_ONLY: u128 = (1 << (8 * PLACES)) - 1;
        let mut tags = [0; 16];
        tags[..PLACES].copy_from_slice(&self.tags);
        let differ = u128::from_le_bytes(tags) ^ u128::from_ne_bytes([tag; 16]);
        // A byte is zero exactly if neither its top bit is set nor adding to the others sets it.
        !(((differ & LOW) + LOW) | differ | LOW) & PLACES_ONLY
    }
}

/// The keys of one slot.
#[derive(Default)]
pub(crate) struct Table {
    first: Vec<Bucket>,
    more: Vec<Box<[Bucket]>>,
    overflow: Vec<Bucket>,
    /// First free overflow bucket, index + 1, linked through `next`.
    free: u32,
    buckets: u32,
    len: u32,
}

/// A place in a table, for as long as nothing is added or removed.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// Bucket, or overflow bucket with the top bit.
    line: u32,
    at: u8,
}

const OVERFLOW: u32 = 1 << 31;

fn tag(hash: u64) -> u8 {
    (hash >> 56) as u8
}

impl Table {
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    /// Bytes of its buckets.
    pub(crate) fn bytes(&self) -> usize {
        (self.first.capacity() + self.more.len() * CHUNK + self.overflow.capacity()) * size_of::<Bucket>()
            + size_of::<Self>()
    }

    fn home(&self, hash: u64) -> u32 {
        home(hash, self.buckets)
    }

    fn line(&self, line: u32) -> &Bucket {
        if line & OVERFLOW != 0 {
            return &self.overflow[(line & !OVERFLOW) as usize];
        }
        let line = line as usize;
        if line < CHUNK { &self.first[line] } else { &self.more[line / CHUNK - 1][line % CHUNK] }
    }

    fn line_mut(&mut self, line: u32) -> &mut Bucket {
        if line & OVERFLOW != 0 {
            return &mut self.overflow[(line & !OVERFLOW) as usize];
        }
        let line = line as usize;
        if line < CHUNK { &mut self.first[line] } else { &mut self.more[line / CHUNK - 1][line % CHUNK] }
    }

    /// The entry with this hash for which `is` says yes.
    #[inline]
    pub(crate) fn find(&self, hash: u64, mut is: impl FnMut(Ref) -> bool) -> Option<(Place, Ref)> {
        if self.buckets == 0 {
            return None;
        }
        let (mut line, wanted) = (self.home(hash), tag(hash));
        loop {
            let bucket = self.line(line);
            let mut alike = bucket.alike(wanted);
            while alike != 0 {
                let at = alike.trailing_zeros() as usize / 8;
                alike &= alike - 1;
                if bucket.refs[at] != 0 && is(Ref(bucket.refs[at])) {
                    return Some((Place { line, at: at as u8 }, Ref(bucket.refs[at])));
                }
            }
            if bucket.next == 0 {
                return None;
            }
            line = (bucket.next - 1) | OVERFLOW;
        }
    }

    /// The first entry of its bucket that may have this hash: for looking ahead.
    #[inline]
    pub(crate) fn guess(&self, hash: u64) -> Ref {
        if self.buckets == 0 {
            return Ref::NONE;
        }
        let bucket = self.line(self.home(hash));
        match bucket.alike(tag(hash)) {
            0 => Ref::NONE,
            alike => Ref(bucket.refs[alike.trailing_zeros() as usize / 8]),
        }
    }

    /// Points a place at where its entry has moved to.
    pub(crate) fn replace(&mut self, place: Place, with: Ref) {
        self.line_mut(place.line).refs[place.at as usize] = with.0;
    }

    /// Adds an entry that is not there. `hash_of` tells the hash of those that have to move.
    pub(crate) fn insert(&mut self, hash: u64, entry: Ref, hash_of: impl Fn(Ref) -> u64) {
        if self.buckets == 0 {
            self.push_bucket();
        }
        self.len += 1;
        if self.len as usize > self.buckets as usize * LOAD {
            self.split(&hash_of);
        }
        let home = self.home(hash);
        self.put(home, tag(hash), entry);
    }

    fn put(&mut self, home: u32, tag: u8, entry: Ref) {
        let mut line = home;
        loop {
            let bucket = self.line_mut(line);
            if let Some(at) = bucket.refs.iter().position(|r| *r == 0) {
                bucket.refs[at] = entry.0;
                bucket.tags[at] = tag;
                return;
            }
            if bucket.next == 0 {
                break;
            }
            line = (bucket.next - 1) | OVERFLOW;
        }
        let mut fresh = EMPTY;
        fresh.refs[0] = entry.0;
        fresh.tags[0] = tag;
        let at = match self.free {
            0 => {
                self.overflow.reserve_exact((self.overflow.len() / 8).max(1));
                self.overflow.push(fresh);
                self.overflow.len() as u32
            }
            free => {
                let slot = &mut self.overflow[free as usize - 1];
                self.free = slot.next;
                *slot = fresh;
                free
            }
        };
        self.line_mut(line).next = at;
    }

    /// Takes an entry out. `hash_of` tells the hash of those that have to move.
    pub(crate) fn remove(&mut self, home_hash: u64, place: Place, hash_of: impl Fn(Ref) -> u64) {
        // The last entry of the last line fills the hole: only a last line has free places, and none is empty.
        let mut before = None;
        let mut line = self.home(home_hash);
        while self.line(line).next != 0 {
            before = Some(line);
            line = (self.line(line).next - 1) | OVERFLOW;
        }
        let last = self.line_mut(line);
        let from = last.refs.iter().rposition(|r| *r != 0).expect("a line with a place holds an entry");
        let (moved, moved_tag) = (last.refs[from], last.tags[from]);
        (last.refs[from], last.tags[from]) = (0, 0);
        let is_empty = last.refs.iter().all(|r| *r == 0);
        if !(line == place.line && from == place.at as usize) {
            let hole = self.line_mut(place.line);
            (hole.refs[place.at as usize], hole.tags[place.at as usize]) = (moved, moved_tag);
        }
        if let (true, Some(before)) = (is_empty, before) {
            self.line_mut(before).next = 0;
            self.release(line & !OVERFLOW);
        }
        self.len -= 1;
        if self.buckets > 1 && (self.len as usize) < self.buckets as usize * LOW {
            self.merge(&hash_of);
        }
    }

    fn release(&mut self, overflow: u32) {
        let free = self.free;
        let slot = &mut self.overflow[overflow as usize];
        *slot = EMPTY;
        slot.next = free;
        self.free = overflow + 1;
    }

    fn push_bucket(&mut self) {
        let at = self.buckets as usize;
        if at < CHUNK {
            if self.first.len() == self.first.capacity() {
                // By an eighth: doubling would leave a quarter of all tables' memory unused.
                self.first.reserve_exact((at / 8).max(1).min(CHUNK - at));
            }
            self.first.push(EMPTY);
        } else if at.is_multiple_of(CHUNK) {
            self.more.push(vec![EMPTY; CHUNK].into_boxed_slice());
        }
        self.buckets += 1;
    }

    /// Splits the next bucket in line.
    fn split(&mut self, hash_of: &impl Fn(Ref) -> u64) {
        let new = self.buckets;
        let old = new & (prev_power(new) - 1);
        self.push_bucket();
        let mut all = Vec::with_capacity(2 * PLACES);
        self.drain(old, &mut all);
        for (entry, tag) in all {
            let home = self.home(hash_of(entry));
            debug_assert!(home == old || home == new);
            self.put(home, tag, entry);
        }
    }

    /// Puts the last bucket back into the one it was split from.
    fn merge(&mut self, hash_of: &impl Fn(Ref) -> u64) {
        let last = self.buckets - 1;
        let mut all = Vec::with_capacity(2 * PLACES);
        self.drain(last, &mut all);
        self.buckets = last;
        if (last as usize) < CHUNK {
            self.first.pop();
            if self.first.capacity() > 2 * self.first.len() + 4 {
                self.first.shrink_to(self.first.len() + self.first.len() / 8);
            }
        } else if (last as usize).is_multiple_of(CHUNK) {
            self.more.pop();
        }
        for (entry, tag) in all {
            let home = self.home(hash_of(entry));
            self.put(home, tag, entry);
        }
    }

    fn drain(&mut self, line: u32, into: &mut Vec<(Ref, u8)>) {
        let mut next = Some(line);
        while let Some(line) = next {
            let bucket = *self.line(line);
            into.extend(
                bucket.refs.iter().zip(bucket.tags).filter(|(r, _)| **r != 0).map(|(r, tag)| (Ref(*r), tag)),
            );
            if line & OVERFLOW != 0 {
                self.release(line & !OVERFLOW);
            } else {
                *self.line_mut(line) = EMPTY;
            }
            next = (bucket.next != 0).then(|| (bucket.next - 1) | OVERFLOW);
        }
    }

    /// Shows the entries of the bucket that holds `position` and gives the position of the next; `None` at the end.
    pub(crate) fn scan(&self, position: u64, mut show: impl FnMut(Ref)) -> Option<u64> {
        if self.buckets == 0 {
            return None;
        }
        let hash = position.reverse_bits();
        let home = self.home(hash);
        self.for_line(home, &mut show);
        // The bits of the hash that decide about this bucket.
        let full = self.buckets.next_power_of_two();
        let wide = (hash & u64::from(full - 1)) == u64::from(home);
        let bits = if wide { full.trailing_zeros() } else { full.trailing_zeros() - 1 };
        // A bucket that has no twin yet covers the twin's values, too.
        let bits = if wide && bits > 0 && home < full / 2 && home + full / 2 >= self.buckets {
            bits - 1
        } else {
            bits
        };
        if bits == 0 {
            return None;
        }
        let run = 1u64 << (64 - bits);
        (position & !(run - 1)).checked_add(run)
    }

    fn for_line(&self, home: u32, show: &mut impl FnMut(Ref)) {
        let mut line = home;
        loop {
            let bucket = self.line(line);
            bucket.refs.iter().filter(|r| **r != 0).for_each(|r| show(Ref(*r)));
            if bucket.next == 0 {
                return;
            }
            line = (bucket.next - 1) | OVERFLOW;
        }
    }

    /// Shows every entry.
    pub(crate) fn for_each(&self, mut show: impl FnMut(Ref)) {
        for line in 0..self.buckets {
            self.for_line(line, &mut show);
        }
    }

    /// Some entry, picked by `dice`; `None` when there is none.
    pub(crate) fn pick(&self, mut dice: impl FnMut(usize) -> usize) -> Option<Ref> {
        if self.len == 0 {
            return None;
        }
        let mut seen = Vec::with_capacity(2 * PLACES);
        loop {
            let line = dice(self.buckets as usize) as u32;
            self.for_line(line, &mut |entry| seen.push(entry));
            if !seen.is_empty() {
                return Some(seen[dice(seen.len())]);
            }
        }
    }
}

/// The largest power of two that is at most `n`.
fn prev_power(n: u32) -> u32 {
    1 << (31 - n.leading_zeros())
}

fn home(hash: u64, buckets: u32) -> u32 {
    let full = buckets.next_power_of_two();
    let wide = (hash as u32) & (full - 1);
    if wide < buckets { wide } else { wide & (full / 2 - 1) }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn mix(n: u32) -> u64 {
        u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }

    fn whole_scan(table: &Table, mut between: impl FnMut()) -> Vec<u32> {
        let (mut seen, mut at) = (Vec::new(), Some(0));
        while let Some(position) = at {
            at = table.scan(position, |entry| seen.push(entry.0));
            between();
        }
        seen
    }

    #[test]
    fn finds_what_was_put_and_not_what_was_removed() {
        let mut table = Table::default();
        let mut model = HashSet::new();
        let mut rng = fastrand::Rng::with_seed(3);
        for round in 0..60_000 {
            let n = rng.u32(1..8_000);
            let grow = (round / 10_000) % 2 == 0;
            let found = table.find(mix(n), |r| r.0 == n);
            assert_eq!(found.is_some(), model.contains(&n));
            match found {
                None if grow || rng.u8(..) < 60 => {
                    table.insert(mix(n), Ref(n), |r| mix(r.0));
                    model.insert(n);
                }
                Some((place, _)) if !grow || rng.u8(..) < 60 => {
                    table.remove(mix(n), place, |r| mix(r.0));
                    model.remove(&n);
                }
                _ => {}
            }
            assert_eq!(table.len(), model.len());
        }
        let mut all = whole_scan(&table, || {});
        all.sort_unstable();
        let mut wanted: Vec<_> = model.into_iter().collect();
        wanted.sort_unstable();
        assert_eq!(all, wanted, "a scan of a still table shows everything once");
    }

    #[test]
    fn a_scan_shows_what_stays_although_the_table_grows_and_shrinks() {
        for (start, step, grow) in [(50u32, 37u32, true), (6_000, 211, false), (700, 90, true)] {
            let mut table = Table::default();
            for n in 1..=start {
                table.insert(mix(n), Ref(n), |r| mix(r.0));
            }
            let stays: HashSet<u32> = (1..=start).filter(|n| n % 5 == 0).collect();
            let mut seen: HashMap<u32, u32> = HashMap::new();
            let (mut at, mut next_new, mut next_gone) = (Some(0), start + 1, 1);
            while let Some(position) = at {
                at = table.scan(position, |entry| *seen.entry(entry.0).or_default() += 1);
                for _ in 0..step {
                    if grow {
                        if next_new < 20_000 {
                            table.insert(mix(next_new), Ref(next_new), |r| mix(r.0));
                            next_new += 1;
                        }
                    } else if next_gone <= start {
                        if next_gone % 5 != 0 {
                            let n = next_gone;
                            let (place, _) = table.find(mix(n), |r| r.0 == n).unwrap();
                            table.remove(mix(n), place, |r| mix(r.0));
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
    fn tags_are_compared_all_at_once() {
        for tag in [0u8, 1, 0x7f, 0x80, 0xff] {
            let mut bucket = EMPTY;
            bucket.tags = std::array::from_fn(|at| if at % 5 == 2 { tag } else { tag ^ (1 << (at % 8)) });
            let expected = bucket.tags.iter().enumerate().filter(|(_, found)| **found == tag);
            let expected: u128 = expected.map(|(at, _)| 0x80 << (8 * at)).sum();
            assert_eq!(bucket.alike(tag), expected, "{tag}");
        }
    }

    #[test]
    fn the_load_stays_near_its_aim_while_it_grows() {
        let mut table = Table::default();
        for n in 1..=200_000 {
            table.insert(mix(n), Ref(n), |r| mix(r.0));
            if n % 1_000 == 0 && n > 20_000 {
                assert!(table.bytes() < n as usize * 12, "{} bytes for {n} entries", table.bytes());
            }
        }
    }
}
