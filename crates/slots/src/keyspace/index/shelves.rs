//! Room for pieces of any size that leaves no gaps.
//!
//! Tables of slots grow all the time, each through the same sizes. A general allocator keeps the places they have left for
//! others of that size, and after a million keys as much memory stands empty as half of the tables take. Here the pieces
//! of one size lie one behind the other: where one leaves, the last takes its place, and its owner is told.
//!
//! Invariant: of the pages of a size all but the last are full, and the last is not empty.

/// Sizes are rounded up to this.
const UNIT: usize = 32;
const PAGE_BYTES: usize = 64 << 10;

/// Where a piece is. Changes when another one of its size leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Berth {
    /// In units; 0 is nowhere.
    size: u16,
    at: u16,
    page: u32,
}

impl Berth {
    pub(super) const NONE: Berth = Berth { size: 0, at: 0, page: 0 };
}

/// Whose a piece is: the table's slot, and which of its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) slot: u16,
    pub(super) piece: u32,
}

struct Page {
    /// As long as what was ever used of it: the machine gives memory when it is touched.
    bytes: Vec<u8>,
    owners: Vec<Owner>,
}

/// The pieces of all sizes.
#[derive(Default)]
pub(super) struct Shelves {
    /// By size in units.
    sizes: Vec<Vec<Page>>,
    held: usize,
    taken: usize,
}

/// How many bytes a piece of this many gets.
pub(super) fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(UNIT)
}

impl Shelves {
    /// Bytes of pieces and of the notes whose they are.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Bytes of the pages that have them, used or not.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// A place for a piece, not cleared.
    pub(super) fn add(&mut self, bytes: usize, owner: Owner) -> Berth {
        let bytes = rounded(bytes);
        let size = bytes / UNIT;
        if self.sizes.len() <= size {
            self.sizes.resize_with(size + 1, Vec::new);
        }
        let pages = &mut self.sizes[size];
        let per_page = (PAGE_BYTES / bytes).max(1);
        if pages.last().is_none_or(|page| page.owners.len() == per_page) {
            self.taken += per_page * (bytes + size_of::<Owner>());
            pages.push(Page {
                bytes: Vec::with_capacity(per_page * bytes),
                owners: Vec::with_capacity(per_page),
            });
        }
        let page = pages.len() - 1;
        let last = &mut pages[page];
        last.owners.push(owner);
        let end = last.owners.len() * bytes;
        if last.bytes.len() < end {
            last.bytes.resize(end, 0);
        }
        self.held += bytes + size_of::<Owner>();
        Berth { size: size as u16, at: (last.owners.len() - 1) as u16, page: page as u32 }
    }

    /// Gives a place back. The last piece of that size is there from now on: gives whose it is, unless it was the last itself.
    pub(super) fn remove(&mut self, berth: Berth) -> Option<Owner> {
        if berth == Berth::NONE {
            return None;
        }
        let bytes = usize::from(berth.size) * UNIT;
        self.held -= bytes + size_of::<Owner>();
        let pages = &mut self.sizes[usize::from(berth.size)];
        let last = pages.len() - 1;
        let owner = pages[last].owners.pop().expect("the last page is not empty");
        let from = pages[last].owners.len() * bytes;
        let (page, at) = (berth.page as usize, usize::from(berth.at));
        let moved = (page, at * bytes) != (last, from);
        if moved {
            match pages.get_disjoint_mut([page, last]) {
                Ok([here, there]) => {
                    here.bytes[at * bytes..][..bytes].copy_from_slice(&there.bytes[from..][..bytes]);
                }
                Err(_) => pages[page].bytes.copy_within(from..from + bytes, at * bytes),
            }
            pages[page].owners[at] = owner;
        }
        if pages[last].owners.is_empty() {
            self.taken -= (PAGE_BYTES / bytes).max(1) * (bytes + size_of::<Owner>());
            pages.pop();
        }
        moved.then_some(owner)
    }

    /// A piece's bytes.
    #[inline]
    pub(super) fn bytes(&self, berth: Berth) -> &[u8] {
        if berth.size == 0 {
            return &[];
        }
        let bytes = usize::from(berth.size) * UNIT;
        let page = &self.sizes[usize::from(berth.size)][berth.page as usize];
        &page.bytes[usize::from(berth.at) * bytes..][..bytes]
    }

    pub(super) fn bytes_mut(&mut self, berth: Berth) -> &mut [u8] {
        if berth.size == 0 {
            return &mut [];
        }
        let bytes = usize::from(berth.size) * UNIT;
        let page = &mut self.sizes[usize::from(berth.size)][berth.page as usize];
        &mut page.bytes[usize::from(berth.at) * bytes..][..bytes]
    }

    /// The bytes of two pieces of different sizes.
    pub(super) fn both(&mut self, one: Berth, other: Berth) -> (&[u8], &mut [u8]) {
        if one.size == 0 {
            return (&[], self.bytes_mut(other));
        }
        let sizes = [usize::from(one.size), usize::from(other.size)];
        let [ones, others] = self.sizes.get_disjoint_mut(sizes).expect("of different sizes");
        let (at, len) = (usize::from(one.at) * sizes[0] * UNIT, sizes[0] * UNIT);
        let (other_at, other_len) = (usize::from(other.at) * sizes[1] * UNIT, sizes[1] * UNIT);
        (
            &ones[one.page as usize].bytes[at..][..len],
            &mut others[other.page as usize].bytes[other_at..][..other_len],
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn pieces_keep_their_bytes_wherever_they_go_and_leave_no_gaps() {
        let mut shelves = Shelves::default();
        let mut live: HashMap<u32, (Berth, usize)> = HashMap::new();
        let mut rng = fastrand::Rng::with_seed(5);
        for round in 0..30_000u32 {
            let grows = (round / 5_000) % 2 == 0;
            if live.is_empty() || rng.u8(..) < if grows { 170 } else { 80 } {
                // Most are of few sizes, so that there are several pages; some are larger than a page.
                let bytes = if rng.u8(..) == 0 { 100_000 } else { 300 + 40 * rng.usize(..4) };
                let berth = shelves.add(bytes, Owner { slot: round as u16, piece: round });
                shelves.bytes_mut(berth)[..bytes].fill(round as u8);
                live.insert(round, (berth, bytes));
            } else {
                let key = *live.keys().nth(rng.usize(..live.len().min(40))).unwrap();
                let (berth, bytes) = live.remove(&key).unwrap();
                assert!(shelves.bytes(berth)[..bytes].iter().all(|byte| *byte == key as u8));
                if let Some(owner) = shelves.remove(berth) {
                    live.get_mut(&owner.piece).expect("only the living move").0 = berth;
                }
            }
        }
        let wanted: usize = live.values().map(|(_, bytes)| rounded(*bytes) + size_of::<Owner>()).sum();
        assert_eq!(shelves.held(), wanted);
        assert!(shelves.taken() >= wanted);
        for pages in &shelves.sizes {
            let full = pages.first().map_or(0, |page| page.owners.len());
            let before_last = &pages[..pages.len().saturating_sub(1)];
            assert!(before_last.iter().all(|page| page.owners.len() == full), "a gap");
        }
        for (key, (berth, bytes)) in &live {
            assert!(shelves.bytes(*berth)[..*bytes].iter().all(|byte| *byte == *key as u8));
        }
        while let Some(key) = live.keys().next().copied() {
            let (berth, _) = live.remove(&key).unwrap();
            if let Some(owner) = shelves.remove(berth) {
                live.get_mut(&owner.piece).unwrap().0 = berth;
            }
        }
        assert_eq!((shelves.held(), shelves.taken()), (0, 0));
        assert!(shelves.sizes.iter().all(Vec::is_empty));
    }
}
