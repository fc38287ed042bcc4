//! Encoding of pages: elements in leaves and branches, and the tree above a row of leaves.

use super::{BRANCH, ELEMENT_BYTES, LEAF, PAGE_BYTES, PAGE_HEADER_BYTES};

/// Bytes of a leaf element.
pub(super) fn leaf_cost(key: usize, value: usize) -> usize {
    ELEMENT_BYTES + key + value
}

/// Number of pages for content of this size, including the header.
pub(super) fn pages_for(content: usize) -> u32 {
    u32::try_from((PAGE_HEADER_BYTES + content).div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX)
}

/// A page that is being filled.
pub(super) struct Page {
    flags: u16,
    /// Flags or child, key, value.
    elements: Vec<(u64, Vec<u8>, Vec<u8>)>,
    bytes: usize,
}

impl Page {
    pub(super) fn leaf() -> Self {
        Self { flags: LEAF, elements: Vec::new(), bytes: 0 }
    }

    fn branch() -> Self {
        Self { flags: BRANCH, ..Self::leaf() }
    }

    /// True if another element would exceed the page.
    pub(super) fn is_full_for(&self, cost: usize) -> bool {
        !self.elements.is_empty() && PAGE_HEADER_BYTES + self.bytes + cost > PAGE_BYTES
    }

    pub(super) fn push(&mut self, flags: u32, key: Vec<u8>, value: Vec<u8>) {
        self.bytes += leaf_cost(key.len(), value.len());
        self.elements.push((flags.into(), key, value));
    }

    fn push_child(&mut self, key: Vec<u8>, child: u64) {
        self.bytes += leaf_cost(key.len(), 0);
        self.elements.push((child, key, Vec::new()));
    }

    fn first_key(&self) -> Vec<u8> {
        self.elements.first().map(|(_, key, _)| key.clone()).unwrap_or_default()
    }

    /// Writes it as page `id`; returns the number of pages written.
    pub(super) fn write(&self, id: u64, out: &mut Vec<u8>) -> u32 {
        let start = out.len();
        let pages = pages_for(self.bytes);
        header(out, id, self.flags, self.elements.len(), pages - 1);
        let mut data = PAGE_HEADER_BYTES + self.elements.len() * ELEMENT_BYTES;
        for (index, (what, key, value)) in self.elements.iter().enumerate() {
            // Relative to the element itself.
            let at = number(data - (PAGE_HEADER_BYTES + index * ELEMENT_BYTES));
            if self.flags == BRANCH {
                out.extend_from_slice(&at.to_le_bytes());
                out.extend_from_slice(&number(key.len()).to_le_bytes());
                out.extend_from_slice(&what.to_le_bytes());
            } else {
                for field in [number(*what as usize), at, number(key.len()), number(value.len())] {
                    out.extend_from_slice(&field.to_le_bytes());
                }
            }
            data += key.len() + value.len();
        }
        for (_, key, value) in &self.elements {
            out.extend_from_slice(key);
            out.extend_from_slice(value);
        }
        out.resize(start + pages as usize * PAGE_BYTES, 0);
        pages
    }
}

pub(super) fn header(out: &mut Vec<u8>, id: u64, flags: u16, count: usize, overflow: u32) {
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&flags.to_le_bytes());
    out.extend_from_slice(&u16::try_from(count).unwrap_or(u16::MAX).to_le_bytes());
    out.extend_from_slice(&overflow.to_le_bytes());
}

/// Lengths are those of keys and values, which the request size limit bounds.
fn number(length: usize) -> u32 {
    u32::try_from(length).expect("a key and its value are shorter than 4 GiB")
}

/// Writes the branches above a row of pages (first key, id), from page `next` on; returns the root.
pub(super) fn branches(mut row: Vec<(Vec<u8>, u64)>, next: &mut u64, out: &mut Vec<u8>) -> u64 {
    while row.len() > 1 {
        let mut above = Vec::new();
        let mut page = Page::branch();
        let mut close = |page: Page| {
            above.push((page.first_key(), *next));
            *next += u64::from(page.write(*next, out));
        };
        for (key, child) in row {
            if page.is_full_for(leaf_cost(key.len(), 0)) {
                close(std::mem::replace(&mut page, Page::branch()));
            }
            page.push_child(key, child);
        }
        close(page);
        row = above;
    }
    row.first().map_or(0, |(_, root)| *root)
}

/// Writes a whole tree of elements in key order, from page `next` on; returns its root.
pub(super) fn tree(
    elements: impl IntoIterator<Item = (u32, Vec<u8>, Vec<u8>)>,
    next: &mut u64,
    out: &mut Vec<u8>,
) -> u64 {
    let mut row = Vec::new();
    let mut page = Page::leaf();
    let mut close = |page: Page, out: &mut Vec<u8>| {
        row.push((page.first_key(), *next));
        *next += u64::from(page.write(*next, out));
    };
    for (flags, key, value) in elements {
        if page.is_full_for(leaf_cost(key.len(), value.len())) {
            close(std::mem::replace(&mut page, Page::leaf()), out);
        }
        page.push(flags, key, value);
    }
    close(page, out);
    branches(row, next, out)
}
