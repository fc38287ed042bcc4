//! The keyspace of one moment, written down while it goes on changing.
//!
//! Slots are written one after the other. Before a slot changes that has not been written, it is written first: what
//! comes out is the keyspace as it was when the image was begun. Every change of the keyspace goes through
//! [`Keyspace::before_change`], so nothing slips by.
//!
//! Limit: the first change of a slot that holds very much pays for writing all of it.

use super::{Item, Keyspace, SLOTS};

/// Writes one key down.
pub(crate) type WriteKey = fn(&mut Vec<u8>, &[u8], Item<'_>, Option<i64>);

/// An image in the making.
pub(super) struct Image {
    /// Which slots are still to be written.
    pending: Vec<bool>,
    /// Everything before is written.
    next: usize,
    out: Vec<u8>,
    write: WriteKey,
}

impl Keyspace {
    /// Begins an image of the keyspace as it is now.
    pub(crate) fn begin_image(&mut self, write: WriteKey) {
        let pending = self.tables.iter().map(Option::is_some).collect();
        self.image = Some(Box::new(Image { pending, next: 0, out: Vec::new(), write }));
    }

    /// Gives an image up.
    pub(crate) fn drop_image(&mut self) {
        self.image = None;
    }

    /// Whether an image is being made.
    pub(crate) fn has_image(&self) -> bool {
        self.image.is_some()
    }

    /// Writes more of the image, about `bytes`; gives what there is and whether it was the end. `None` when the image was
    /// given up.
    pub(crate) fn image_step(&mut self, bytes: usize) -> Option<(Vec<u8>, bool)> {
        let mut image = self.image.take()?;
        while image.next < SLOTS && image.out.len() < bytes {
            let slot = image.next;
            image.next += 1;
            self.write_slot(&mut image, slot);
        }
        let (out, done) = (std::mem::take(&mut image.out), image.next == SLOTS);
        if !done {
            self.image = Some(image);
        }
        Some((out, done))
    }

    fn write_slot(&self, image: &mut Image, slot: usize) {
        if !std::mem::take(&mut image.pending[slot]) {
            return;
        }
        if let Some(table) = self.tables[slot].as_deref() {
            let (out, write) = (&mut image.out, image.write);
            table.for_each(|at| write(out, self.key_at(at), self.item(at), self.expiry_at(at)));
        }
    }

    /// A slot is about to change.
    #[inline]
    pub(super) fn before_change(&mut self, slot: u16) {
        if self.image.is_some() {
            self.write_before(usize::from(slot));
        }
    }

    #[cold]
    fn write_before(&mut self, slot: usize) {
        if let Some(mut image) = self.image.take() {
            self.write_slot(&mut image, slot);
            self.image = Some(image);
        }
    }

    /// Everything is about to go.
    pub(super) fn before_clear(&mut self) {
        if let Some(mut image) = self.image.take() {
            (0..SLOTS).for_each(|slot| self.write_slot(&mut image, slot));
            self.image = Some(image);
        }
    }
}
