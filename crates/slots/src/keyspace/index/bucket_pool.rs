//! Compacting allocator for buckets of any size.
//!
//! The tables of slots grow continuously, each through the same sizes. A general allocator keeps the freed blocks for
//! other buckets of that size, and after a million keys the free memory is half as large as the tables. Here buckets
//! of one size are stored contiguously: when one is freed, the last one moves into its place and its owner is
//! updated.
//!
//! Invariant: all pages of a size but the last are full, and the last is not empty.

/// Allocation granularity.
const UNIT: usize = 32;
const PAGE_BYTES: usize = 64 << 10;

/// Address of a bucket. Changes when another bucket of its size is freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BucketRef {
    /// Size in units; 0 for no bucket.
    size: u16,
    at: u16,
    page: u32,
}

impl BucketRef {
    pub(super) const NONE: BucketRef = BucketRef { size: 0, at: 0, page: 0 };
}

/// Owner of a bucket: the slot of its table, and its index in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) slot: u16,
    pub(super) bucket: u32,
}

struct Page {
    /// Grows to the highest byte ever used: the operating system backs memory on first touch.
    bytes: Vec<u8>,
    owners: Vec<Owner>,
}

/// The buckets of all sizes.
#[derive(Default)]
pub(super) struct BucketPool {
    /// Pages by bucket size in units.
    sizes: Vec<Vec<Page>>,
    held: usize,
    taken: usize,
}

/// Allocated size for a requested size.
pub(super) fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(UNIT)
}

impl BucketPool {
    /// Bytes of buckets and their owner records.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Bytes of the pages, used or not.
    pub(super) fn taken(&self) -> usize {
        self.taken
    }

    /// Allocates an uninitialized bucket.
    pub(super) fn add(&mut self, bytes: usize, owner: Owner) -> BucketRef {
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
        BucketRef { size: size as u16, at: (last.owners.len() - 1) as u16, page: page as u32 }
    }

    /// Frees a bucket. The last bucket of that size moves into its place: returns its owner, unless the freed one was
    /// the last.
    pub(super) fn remove(&mut self, bucket_ref: BucketRef) -> Option<Owner> {
        if bucket_ref == BucketRef::NONE {
            return None;
        }
        let bytes = usize::from(bucket_ref.size) * UNIT;
        self.held -= bytes + size_of::<Owner>();
        let pages = &mut self.sizes[usize::from(bucket_ref.size)];
        let last = pages.len() - 1;
        let owner = pages[last].owners.pop().expect("the last page is not empty");
        let from = pages[last].owners.len() * bytes;
        let (page, at) = (bucket_ref.page as usize, usize::from(bucket_ref.at));
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

    /// The bytes of a bucket.
    #[inline]
    pub(super) fn bytes(&self, bucket_ref: BucketRef) -> &[u8] {
        if bucket_ref.size == 0 {
            return &[];
        }
        let bytes = usize::from(bucket_ref.size) * UNIT;
        let page = &self.sizes[usize::from(bucket_ref.size)][bucket_ref.page as usize];
        &page.bytes[usize::from(bucket_ref.at) * bytes..][..bytes]
    }

    pub(super) fn bytes_mut(&mut self, bucket_ref: BucketRef) -> &mut [u8] {
        if bucket_ref.size == 0 {
            return &mut [];
        }
        let bytes = usize::from(bucket_ref.size) * UNIT;
        let page = &mut self.sizes[usize::from(bucket_ref.size)][bucket_ref.page as usize];
        &mut page.bytes[usize::from(bucket_ref.at) * bytes..][..bytes]
    }

    /// The bytes of two buckets of different sizes.
    pub(super) fn both(&mut self, one: BucketRef, other: BucketRef) -> (&[u8], &mut [u8]) {
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
    fn buckets_keep_their_bytes_when_compacted() {
        let mut pool = BucketPool::default();
        let mut live: HashMap<u32, (BucketRef, usize)> = HashMap::new();
        let mut rng = fastrand::Rng::with_seed(5);
        for round in 0..30_000u32 {
            let grows = (round / 5_000) % 2 == 0;
            if live.is_empty() || rng.u8(..) < if grows { 170 } else { 80 } {
                // Most buckets have few sizes, so that there are several pages; some are larger than a page.
                let bytes = if rng.u8(..) == 0 { 100_000 } else { 300 + 40 * rng.usize(..4) };
                let bucket_ref = pool.add(bytes, Owner { slot: round as u16, bucket: round });
                pool.bytes_mut(bucket_ref)[..bytes].fill(round as u8);
                live.insert(round, (bucket_ref, bytes));
            } else {
                let key = *live.keys().nth(rng.usize(..live.len().min(40))).unwrap();
                let (bucket_ref, bytes) = live.remove(&key).unwrap();
                assert!(pool.bytes(bucket_ref)[..bytes].iter().all(|byte| *byte == key as u8));
                if let Some(owner) = pool.remove(bucket_ref) {
                    live.get_mut(&owner.bucket).expect("a freed bucket was moved").0 = bucket_ref;
                }
            }
        }
        let wanted: usize = live.values().map(|(_, bytes)| rounded(*bytes) + size_of::<Owner>()).sum();
        assert_eq!(pool.held(), wanted);
        assert!(pool.taken() >= wanted);
        for pages in &pool.sizes {
            let full = pages.first().map_or(0, |page| page.owners.len());
            let before_last = &pages[..pages.len().saturating_sub(1)];
            assert!(before_last.iter().all(|page| page.owners.len() == full), "a gap");
        }
        for (key, (bucket_ref, bytes)) in &live {
            assert!(pool.bytes(*bucket_ref)[..*bytes].iter().all(|byte| *byte == *key as u8));
        }
        while let Some(key) = live.keys().next().copied() {
            let (bucket_ref, _) = live.remove(&key).unwrap();
            if let Some(owner) = pool.remove(bucket_ref) {
                live.get_mut(&owner.bucket).unwrap().0 = bucket_ref;
            }
        }
        assert_eq!((pool.held(), pool.taken()), (0, 0));
        assert!(pool.sizes.iter().all(Vec::is_empty));
    }
}
