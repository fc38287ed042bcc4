//! Up to some hundred references in one piece of memory, in eight groups.
//!
//! Layout: where each group ends (2 bytes each), a byte of the hash for each reference, the references (4 bytes each). The
//! references of a group lie together and the groups one behind the other, so that no place is kept empty for any of
//! them; adding one to a group moves at most one of each later group. Looking one up reads the tags of one group, which
//! are mostly in the cache line of the ends.
//!
//! Invariants: the ends never fall, the last is the number of references; what is behind it means nothing. No bytes at all
//! are an empty piece.

use crate::keyspace::arena::Ref;

/// Groups of a piece.
pub(super) const GROUPS: usize = 8;
const HEAD: usize = 2 * GROUPS;
/// Of one reference with its tag.
const PLACE: usize = 5;
/// References that have room in any piece that is not empty: see [`Piece::find`].
const LEAST: usize = 4;

/// Bytes for this many references.
pub(super) fn bytes_for(many: usize) -> usize {
    HEAD + many.max(LEAST) * PLACE
}

/// References, found by group and tag.
#[derive(Clone, Copy)]
pub(super) struct Piece<B>(pub(super) B);

impl<B: AsRef<[u8]>> Piece<B> {
    #[inline]
    fn bytes(&self) -> &[u8] {
        self.0.as_ref()
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        if self.bytes().is_empty() { 0 } else { self.end(GROUPS - 1) }
    }

    /// How many have room.
    #[inline]
    pub(super) fn room(&self) -> usize {
        self.bytes().len().saturating_sub(HEAD) / PLACE
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
        let from = HEAD + self.room() + 4 * at;
        Ref(u32::from_le_bytes(self.bytes()[from..from + 4].try_into().expect("four bytes")))
    }

    fn tag(&self, at: usize) -> u8 {
        self.bytes()[HEAD + at]
    }

    /// Reads where a group's search begins and about where its references are, and decides nothing by it.
    #[inline]
    pub(super) fn touch(&self, group: usize) -> u8 {
        let (bytes, room) = (self.bytes(), self.room());
        let reference = HEAD + room + 4 * (room * group / GROUPS);
        bytes.first().unwrap_or(&0) ^ bytes.get(reference).unwrap_or(&0)
    }

    /// The first of a group with this tag for which `is` says yes, and where it is.
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
            // Sixteen at once, because a loop that ends somewhere else each time costs more than the comparisons. There
            // are always that many bytes: references are behind the tags, and room for four of them at least.
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

    /// Everything in it, with the tags.
    pub(super) fn all(&self) -> impl Iterator<Item = (Ref, u8)> {
        (0..self.len()).map(|at| (self.at(at), self.tag(at)))
    }

    /// What is in one group.
    pub(super) fn group(&self, group: usize) -> impl ExactSizeIterator<Item = Ref> {
        let range = if self.bytes().is_empty() { 0..0 } else { self.start(group)..self.end(group) };
        range.map(|at| self.at(at))
    }
}

impl Piece<&mut [u8]> {
    /// Makes it an empty one.
    pub(super) fn clear(&mut self) {
        self.0[..HEAD].fill(0);
    }

    /// Makes it one with the same content as another, which fits.
    pub(super) fn copy_from(&mut self, other: Piece<&[u8]>) {
        let len = other.len();
        if len == 0 {
            return self.clear();
        }
        let (ours, theirs) = (HEAD + self.room(), HEAD + other.room());
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
        let from = HEAD + self.room() + 4 * at;
        self.0[from..from + 4].copy_from_slice(&with.0.to_le_bytes());
    }

    /// Adds one to a group; there has to be room.
    pub(super) fn insert(&mut self, group: usize, tag: u8, entry: Ref) {
        let mut hole = self.len();
        debug_assert!(hole < self.room());
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

    /// Takes out what is in a place of a group.
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

/// Which of the first `many` bytes are this one: the top bit of byte n stands for the one at n.
#[inline]
fn alike(bytes: [u8; 16], byte: u8, many: usize) -> u128 {
    const LOW: u128 = u128::from_ne_bytes([0x7f; 16]);
    let differ = u128::from_le_bytes(bytes) ^ u128::from_ne_bytes([byte; 16]);
    // A byte is zero exactly if neither its top bit is set nor adding to the others sets it.
    let same = !(((differ & LOW) + LOW) | differ | LOW);
    if many < 16 { same & ((1 << (8 * many)) - 1) } else { same }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_what_is_theirs_while_others_come_and_go() {
        let mut bytes = vec![0xee; bytes_for(150)];
        let mut piece = Piece(&mut bytes[..]);
        piece.clear();
        let mut model: Vec<Vec<u32>> = vec![Vec::new(); GROUPS];
        let mut rng = fastrand::Rng::with_seed(11);
        for round in 1..20_000u32 {
            let group = rng.usize(..GROUPS);
            let grow = (round / 300) % 2 == 0;
            if model[group].is_empty() || piece.len() < 150 && rng.u8(..) < if grow { 150 } else { 90 } {
                if piece.len() == 150 {
                    continue;
                }
                piece.insert(group, round as u8, Ref(round));
                model[group].push(round);
            } else {
                let which = rng.usize(..model[group].len());
                let one = model[group].swap_remove(which);
                let (at, _) = piece.find(group, one as u8, |entry| entry.0 == one).expect("it was put there");
                piece.remove(group, at);
                assert_eq!(piece.find(group, one as u8, |entry| entry.0 == one), None);
            }
            assert_eq!(piece.len(), model.iter().map(Vec::len).sum::<usize>());
            let group = rng.usize(..GROUPS);
            let mut found: Vec<u32> = piece.group(group).map(|entry| entry.0).collect();
            let mut wanted = model[group].clone();
            found.sort_unstable();
            wanted.sort_unstable();
            assert_eq!(found, wanted);
            assert!(piece.all().all(|(entry, tag)| entry.0 as u8 == tag), "the tag goes with its reference");
        }
        let mut other = vec![0xee; bytes_for(piece.len() + 9)];
        Piece(&mut other[..]).copy_from(Piece(&*piece.0));
        assert!(Piece(&other[..]).all().eq(piece.all()));
    }

    #[test]
    fn a_piece_without_room_to_spare_is_searched_within_its_bounds() {
        let mut bytes = vec![0; bytes_for(1)];
        let mut piece = Piece(&mut bytes[..]);
        for n in 1..=LEAST as u32 {
            piece.insert(GROUPS - 1, 7, Ref(n));
            assert_eq!(piece.find(GROUPS - 1, 7, |entry| entry.0 == n), Some((n as usize - 1, Ref(n))));
        }
        assert_eq!(piece.room(), LEAST);
    }

    #[test]
    fn tags_are_compared_all_at_once() {
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
