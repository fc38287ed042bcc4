//! A hash bucket: up to some hundred references in one allocation, in eight groups.
//!
//! Layout: the end of each group (2 bytes each), a hash tag byte per reference, the references (4 bytes each). The
//! references of a group are contiguous and the groups follow one another without gaps; inserting into a group moves
//! at most one reference of each later group. A lookup reads the tags of one group, which are mostly in the cache
//! line of the group ends.
//!
//! Invariants: the group ends never decrease, and the last is the number of references; bytes past it are undefined.
//! Zero bytes are an empty bucket.

use crate::keyspace::arena::Ref;

/// Groups per bucket.
pub(super) const GROUPS: usize = 8;
const HEAD: usize = 2 * GROUPS;
/// Bytes of one reference with its tag.
const REF_BYTES: usize = 5;
/// Minimum capacity of a non-empty bucket, see [`Bucket::find`].
const MIN_CAPACITY: usize = 4;

/// Bytes for a capacity of `many` references.
pub(super) fn bytes_for(many: usize) -> usize {
    HEAD + many.max(MIN_CAPACITY) * REF_BYTES
}

/// References, found by group and tag.
#[derive(Clone, Copy)]
pub(super) struct Bucket<B>(pub(super) B);

impl<B: AsRef<[u8]>> Bucket<B> {
    #[inline]
    fn bytes(&self) -> &[u8] {
        self.0.as_ref()
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        if self.bytes().is_empty() { 0 } else { self.end(GROUPS - 1) }
    }

    /// Capacity in references.
    #[inline]
    pub(super) fn capacity(&self) -> usize {
        self.bytes().len().saturating_sub(HEAD) / REF_BYTES
    }

    #[inline]
    fn end(&self, group: usize) -> usize {
        let bytes = self.bytes();
        usize::from(u16::from_le_bytes([bytes[2 * group], bytes[2 * group + 1]]))
    }

    #[inline]
    fn start(&self, group: usize) -> usize {
        if group == 0 { 0 } else { self.end(group - 1) }
    }

    #[inline]
    pub(super) fn at(&self, at: usize) -> Ref {
        let from = HEAD + self.capacity() + 4 * at;
        Ref(u32::from_le_bytes(self.bytes()[from..from + 4].try_into().expect("four bytes")))
    }

    fn tag(&self, at: usize) -> u8 {
        self.bytes()[HEAD + at]
    }

    /// Prefetches the tags and the approximate position of a group's references, without a data-dependent branch.
    #[inline]
    pub(super) fn prefetch(&self, group: usize) -> u8 {
        let (bytes, capacity) = (self.bytes(), self.capacity());
        let reference = HEAD + capacity + 4 * (capacity * group / GROUPS);
        bytes.first().unwrap_or(&0) ^ bytes.get(reference).unwrap_or(&0)
    }

    /// The first reference of a group with this tag that satisfies `is`, and its position.
    #[inline]
    pub(super) fn find(
        &self,
        group: usize,
        tag: u8,
        mut is: impl FnMut(Ref) -> bool,
    ) -> Option<(usize, Ref)> {
        if self.bytes().is_empty() {
            return None;
        }
        let (mut from, end) = (self.start(group), self.end(group));
        while from < end {
            // Compares sixteen tags at once, because a loop with an unpredictable end costs more than the
            // comparisons. Sixteen bytes always exist: references follow the tags, with a capacity of at least four.
            let tags = self.bytes()[HEAD + from..HEAD + from + 16].try_into().expect("sixteen bytes");
            let mut alike = alike(tags, tag, end - from);
            while alike != 0 {
                let at = from + alike.trailing_zeros() as usize / 8;
                alike &= alike - 1;
                let entry = self.at(at);
                if is(entry) {
                    return Some((at, entry));
                }
            }
            from += 16;
        }
        None
    }

    /// All references with their tags.
    pub(super) fn all(&self) -> impl Iterator<Item = (Ref, u8)> {
        (0..self.len()).map(|at| (self.at(at), self.tag(at)))
    }

    /// The references of one group.
    pub(super) fn group(&self, group: usize) -> impl ExactSizeIterator<Item = Ref> {
        let range = if self.bytes().is_empty() { 0..0 } else { self.start(group)..self.end(group) };
        range.map(|at| self.at(at))
    }
}

impl Bucket<&mut [u8]> {
    /// Makes the bucket empty.
    pub(super) fn clear(&mut self) {
        self.0[..HEAD].fill(0);
    }

    /// Copies the contents of another bucket, which must fit.
    pub(super) fn copy_from(&mut self, other: Bucket<&[u8]>) {
        let len = other.len();
        if len == 0 {
            return self.clear();
        }
        let (ours, theirs) = (HEAD + self.capacity(), HEAD + other.capacity());
        self.0[..HEAD + len].copy_from_slice(&other.0[..HEAD + len]);
        self.0[ours..ours + 4 * len].copy_from_slice(&other.0[theirs..theirs + 4 * len]);
    }

    fn set_end(&mut self, group: usize, end: usize) {
        self.0[2 * group..2 * group + 2].copy_from_slice(&(end as u16).to_le_bytes());
    }

    fn put(&mut self, at: usize, tag: u8, entry: Ref) {
        self.0[HEAD + at] = tag;
        self.replace(at, entry);
    }

    pub(super) fn replace(&mut self, at: usize, with: Ref) {
        let from = HEAD + self.capacity() + 4 * at;
        self.0[from..from + 4].copy_from_slice(&with.0.to_le_bytes());
    }

    /// Inserts a reference into a group; there must be capacity.
    pub(super) fn insert(&mut self, group: usize, tag: u8, entry: Ref) {
        let mut hole = self.len();
        debug_assert!(hole < self.capacity());
        for later in (group + 1..GROUPS).rev() {
            let start = self.end(later - 1);
            if start != hole {
                self.put(hole, self.tag(start), self.at(start));
            }
            self.set_end(later, self.end(later) + 1);
            hole = start;
        }
        self.put(hole, tag, entry);
        self.set_end(group, hole + 1);
    }

    /// Removes the reference at a position of a group.
    pub(super) fn remove(&mut self, group: usize, at: usize) {
        let mut hole = at;
        for later in group..GROUPS {
            let last = self.end(later) - 1;
            if last != hole {
                self.put(hole, self.tag(last), self.at(last));
            }
            self.set_end(later, last);
            hole = last;
        }
    }
}

/// Bit mask of the first `many` bytes equal to a value: the top bit of byte n stands for position n.
#[inline]
fn alike(bytes: [u8; 16], byte: u8, many: usize) -> u128 {
    const LOW: u128 = u128::from_ne_bytes([0x7f; 16]);
    let differ = u128::from_le_bytes(bytes) ^ u128::from_ne_bytes([byte; 16]);
    // A byte is zero exactly if its top bit is clear and adding 0x7f to its low bits does not set it.
    let same = !(((differ & LOW) + LOW) | differ | LOW);
    if many < 16 { same & ((1 << (8 * many)) - 1) } else { same }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_their_references_during_inserts_and_removals() {
        let mut bytes = vec![0xee; bytes_for(150)];
        let mut bucket = Bucket(&mut bytes[..]);
        bucket.clear();
        let mut model: Vec<Vec<u32>> = vec![Vec::new(); GROUPS];
        let mut rng = fastrand::Rng::with_seed(11);
        for round in 1..20_000u32 {
            let group = rng.usize(..GROUPS);
            let grow = (round / 300) % 2 == 0;
            if model[group].is_empty() || bucket.len() < 150 && rng.u8(..) < if grow { 150 } else { 90 } {
                if bucket.len() == 150 {
                    continue;
                }
                bucket.insert(group, round as u8, Ref(round));
                model[group].push(round);
            } else {
                let which = rng.usize(..model[group].len());
                let one = model[group].swap_remove(which);
                let (at, _) = bucket
                    .find(group, one as u8, |entry| entry.0 == one)
                    .expect("inserted reference not found");
                bucket.remove(group, at);
                assert_eq!(bucket.find(group, one as u8, |entry| entry.0 == one), None);
            }
            assert_eq!(bucket.len(), model.iter().map(Vec::len).sum::<usize>());
            let group = rng.usize(..GROUPS);
            let mut found: Vec<u32> = bucket.group(group).map(|entry| entry.0).collect();
            let mut wanted = model[group].clone();
            found.sort_unstable();
            wanted.sort_unstable();
            assert_eq!(found, wanted);
            assert!(
                bucket.all().all(|(entry, tag)| entry.0 as u8 == tag),
                "tag does not match its reference"
            );
        }
        let mut other = vec![0xee; bytes_for(bucket.len() + 9)];
        Bucket(&mut other[..]).copy_from(Bucket(&*bucket.0));
        assert!(Bucket(&other[..]).all().eq(bucket.all()));
    }

    #[test]
    fn full_bucket_is_searched_within_its_bounds() {
        let mut bytes = vec![0; bytes_for(1)];
        let mut bucket = Bucket(&mut bytes[..]);
        for n in 1..=MIN_CAPACITY as u32 {
            bucket.insert(GROUPS - 1, 7, Ref(n));
            assert_eq!(bucket.find(GROUPS - 1, 7, |entry| entry.0 == n), Some((n as usize - 1, Ref(n))));
        }
        assert_eq!(bucket.capacity(), MIN_CAPACITY);
    }

    #[test]
    fn tags_are_compared_in_parallel() {
        for byte in [0u8, 1, 0x7f, 0x80, 0xff] {
            for many in [1, 5, 15, 16, 40] {
                let bytes = std::array::from_fn(|at| if at % 5 == 2 { byte } else { byte ^ (1 << (at % 8)) });
                let expected = bytes.iter().take(many).enumerate().filter(|(_, found)| **found == byte);
                let expected: u128 = expected.map(|(at, _)| 0x80 << (8 * at)).sum();
                assert_eq!(alike(bytes, byte, many), expected, "{byte} {many}");
            }
        }
    }
}
