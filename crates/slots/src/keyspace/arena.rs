//! Slab allocator for entries: one allocation per entry, packed into pages, addressed by 32 bits.
//!
//! A general allocator rounds an 88-byte entry up to 96, and a pointer takes 8 bytes. Here an entry is rounded up to
//! 8 bytes and its address is a [`Ref`] of 4, because with hundreds of millions of small keys these dominate memory.
//! A page holds entries of one size class; an empty page is reused for any class.
//!
//! Invariants: `Ref(0)` is not an entry; an entry never straddles pages; a page is in its class's list exactly while
//! it has a free slot. Limits: 2^32 units of 8 bytes, 32 GiB of entries per keyspace; larger values are allocated
//! outside.

/// Address of an entry. Changes when the entry is reallocated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) struct Ref(pub(crate) u32);

impl Ref {
    pub(crate) const NONE: Ref = Ref(0);

    fn page(self) -> usize {
        (self.0 >> PAGE_UNITS_LOG) as usize
    }

    fn byte(self) -> usize {
        (self.0 as usize & (PAGE_UNITS - 1)) * UNIT
    }
}

/// Allocation granularity.
const UNIT: usize = 8;
const PAGE_UNITS_LOG: u32 = 13;
const PAGE_UNITS: usize = 1 << PAGE_UNITS_LOG;
const PAGE_BYTES: usize = PAGE_UNITS * UNIT;
const MAX_PAGES: usize = 1 << (32 - PAGE_UNITS_LOG);

/// Maximum entry size; larger keys or values are stored outside.
pub(crate) const MAX_ENTRY: usize = 2048;
const CLASSES: usize = MAX_ENTRY / UNIT + 1;

const NO_PAGE: u32 = u32::MAX;

struct Page {
    /// Grows to the highest byte ever allocated: the operating system backs memory on first touch.
    data: Vec<u8>,
    /// Units per entry; 0 while the page belongs to no class.
    class: u16,
    live: u16,
    /// Entries allocated without reuse so far; memory past it was never touched.
    fresh: u16,
    /// Head of the free list, as unit + 1; each free slot holds the next in its first two bytes.
    free: u16,
    /// Neighbours in the class's list of pages with free slots.
    prev: u32,
    next: u32,
}

impl Page {
    fn capacity(&self) -> u16 {
        // Unit 0 of page 0 is never an entry; skipping it in every page keeps the arithmetic uniform.
        ((PAGE_UNITS - 1) / self.class as usize) as u16
    }

    fn has_room(&self) -> bool {
        self.live < self.capacity()
    }
}

/// The pages of a keyspace.
pub(crate) struct Arena {
    pages: Vec<Page>,
    /// First page with free slots, by size in units.
    open: Box<[u32; CLASSES]>,
    /// Pages without a class.
    spare: Vec<u32>,
    used: usize,
}

impl Arena {
    pub(crate) fn new() -> Self {
        Self { pages: Vec::new(), open: Box::new([NO_PAGE; CLASSES]), spare: Vec::new(), used: 0 }
    }

    /// Allocated bytes, including rounding.
    pub(crate) fn used_bytes(&self) -> usize {
        self.used
    }

    /// Bytes obtained from the operating system.
    pub(crate) fn held_bytes(&self) -> usize {
        (self.pages.len() - self.spare.len()) * PAGE_BYTES
    }

    /// True if entries of both sizes belong to the same size class.
    pub(crate) fn same_class(old: usize, new: usize) -> bool {
        old.div_ceil(UNIT) == new.div_ceil(UNIT)
    }

    /// Allocates `len` uninitialized bytes. `None` if the 32 GiB are exhausted.
    pub(crate) fn alloc(&mut self, len: usize) -> Option<Ref> {
        debug_assert!(len > 0 && len <= MAX_ENTRY);
        let class = len.div_ceil(UNIT);
        let mut at = self.open[class];
        if at == NO_PAGE {
            at = self.new_page(class)?;
        }
        let page = &mut self.pages[at as usize];
        let unit = if page.free != 0 {
            let unit = page.free as usize - 1;
            page.free = u16::from_le_bytes([page.data[unit * UNIT], page.data[unit * UNIT + 1]]);
            unit
        } else {
            let unit = 1 + page.fresh as usize * class;
            page.fresh += 1;
            page.data.resize((unit + class) * UNIT, 0);
            unit
        };
        page.live += 1;
        self.used += class * UNIT;
        if !page.has_room() {
            self.unlink(class, at);
        }
        Some(Ref((at << PAGE_UNITS_LOG) | unit as u32))
    }

    /// Frees an entry.
    pub(crate) fn free(&mut self, at: Ref) {
        let index = at.page();
        let page = &mut self.pages[index];
        let class = page.class as usize;
        let had_room = page.has_room();
        let unit = at.byte() / UNIT;
        let next = page.free.to_le_bytes();
        page.data[unit * UNIT..unit * UNIT + 2].copy_from_slice(&next);
        page.free = unit as u16 + 1;
        page.live -= 1;
        self.used -= class * UNIT;
        if page.live == 0 {
            if had_room {
                self.unlink(class, index as u32);
            }
            self.retire(index);
        } else if !had_room {
            self.link(class, index as u32);
        }
    }

    /// The bytes of an entry, including the rounding after it.
    #[inline]
    pub(crate) fn bytes(&self, at: Ref) -> &[u8] {
        let page = &self.pages[at.page()];
        let from = at.byte();
        &page.data[from..from + page.class as usize * UNIT]
    }

    pub(crate) fn bytes_mut(&mut self, at: Ref) -> &mut [u8] {
        let page = &mut self.pages[at.page()];
        let from = at.byte();
        &mut page.data[from..from + page.class as usize * UNIT]
    }

    fn new_page(&mut self, class: usize) -> Option<u32> {
        let at = match self.spare.pop() {
            Some(at) => at,
            None if self.pages.len() == MAX_PAGES => return None,
            None => {
                self.pages.push(Page {
                    data: Vec::new(),
                    class: 0,
                    live: 0,
                    fresh: 0,
                    free: 0,
                    prev: NO_PAGE,
                    next: NO_PAGE,
                });
                self.pages.len() as u32 - 1
            }
        };
        let page = &mut self.pages[at as usize];
        page.data = Vec::with_capacity(PAGE_BYTES);
        page.class = class as u16;
        (page.live, page.fresh, page.free) = (0, 0, 0);
        self.link(class, at);
        Some(at)
    }

    /// Returns an empty page to the operating system; its number is reused.
    fn retire(&mut self, index: usize) {
        let page = &mut self.pages[index];
        page.data = Vec::new();
        page.class = 0;
        self.spare.push(index as u32);
    }

    fn link(&mut self, class: usize, at: u32) {
        let first = self.open[class];
        if first != NO_PAGE {
            self.pages[first as usize].prev = at;
        }
        let page = &mut self.pages[at as usize];
        page.prev = NO_PAGE;
        page.next = first;
        self.open[class] = at;
    }

    fn unlink(&mut self, class: usize, at: u32) {
        let (prev, next) = {
            let page = &self.pages[at as usize];
            (page.prev, page.next)
        };
        match prev {
            NO_PAGE => self.open[class] = next,
            prev => self.pages[prev as usize].next = next,
        }
        if next != NO_PAGE {
            self.pages[next as usize].prev = prev;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_entries_are_reused_and_never_overlap() {
        let mut arena = Arena::new();
        let mut rng = fastrand::Rng::with_seed(7);
        let mut live: Vec<(Ref, usize, u8)> = Vec::new();
        for round in 0..40_000u32 {
            if live.is_empty() || rng.u8(..) < 140 {
                let len = rng.usize(1..300);
                let at = arena.alloc(len).unwrap();
                let mark = round as u8;
                arena.bytes_mut(at)[..len].fill(mark);
                live.push((at, len, mark));
            } else {
                let (at, len, mark) = live.swap_remove(rng.usize(..live.len()));
                assert!(
                    arena.bytes(at)[..len].iter().all(|byte| *byte == mark),
                    "entry overwritten by another allocation"
                );
                arena.free(at);
            }
        }
        for (at, len, mark) in live.drain(..) {
            assert!(arena.bytes(at)[..len].iter().all(|byte| *byte == mark));
            arena.free(at);
        }
        assert_eq!((arena.used_bytes(), arena.held_bytes()), (0, 0));
    }

    #[test]
    fn small_entries_have_little_overhead() {
        let mut arena = Arena::new();
        for _ in 0..100_000 {
            assert_ne!(arena.alloc(86), Some(Ref::NONE));
        }
        assert_eq!(arena.used_bytes(), 100_000 * 88);
        assert!(arena.held_bytes() < 100_000 * 89);
    }
}
