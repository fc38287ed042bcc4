//! The keyspace of one moment, written down while it goes on changing.
//!
//! Slots are written one after the other, a large one in several steps. Before a slot changes that has not been written, or
//! not all of it, what is missing is written first: what comes out is the keyspace as it was when the image was begun. Every
//! change of the keyspace goes through [`Keyspace::before_change`], so nothing slips by.
//!
//! Limit: the first change of a slot that holds very much pays for writing all of it; so does a very large key.

use std::collections::VecDeque;

use super::arena::Ref;
use super::{Item, Keyspace, LOOK_AHEAD, SLOTS};
use crate::slot_set::SlotSet;

/// Writes one key down.
pub(crate) type WriteKey = fn(&mut Vec<u8>, &[u8], Item<'_>, Option<i64>);

/// The image that a snapshot is written from; images of moves have the number of their move.
pub(crate) const SNAPSHOT: u64 = 0;

/// A part of what is written before its time is full with this many bytes: whoever takes the image takes it piece by piece.
const PART: usize = 64 << 10;

/// An image in the making.
pub(super) struct Image {
    /// Whose it is: several may be made at once.
    of: u64,
    /// Which slots are still to be written.
    pending: Vec<bool>,
    /// Everything before is written, apart from what is left of one slot.
    next: usize,
    /// A slot that is written in part, and its entries that are not. They stay where they are until the slot changes.
    partial: Option<(usize, Vec<Ref>)>,
    /// What was written before its time, in parts that were full.
    early: VecDeque<Vec<u8>>,
    out: Vec<u8>,
    write: WriteKey,
}

impl Keyspace {
    /// Begins an image of the keyspace, or of these slots of it, as it is now.
    pub(crate) fn begin_image(&mut self, of: u64, slots: Option<&SlotSet>, write: WriteKey) {
        self.drop_image(of);
        let wanted = |slot: u16| slots.is_none_or(|slots| slots.contains(slot));
        let pending = (0..SLOTS as u16).map(|slot| !self.index.is_empty(slot) && wanted(slot)).collect();
        let early = VecDeque::new();
        self.images.push(Image { of, pending, next: 0, partial: None, early, out: Vec::new(), write });
    }

    /// Gives an image up.
    pub(crate) fn drop_image(&mut self, of: u64) {
        self.images.retain(|image| image.of != of);
    }

    /// Whether this image is being made.
    pub(crate) fn has_image(&self, of: u64) -> bool {
        self.images.iter().any(|image| image.of == of)
    }

    /// Writes more of an image behind `out`, about `bytes`; gives whether it was the end. `None` when the image was given up.
    pub(crate) fn image_step(&mut self, of: u64, bytes: usize, out: &mut Vec<u8>) -> Option<bool> {
        let at = self.images.iter().position(|image| image.of == of)?;
        let mut image = self.images.swap_remove(at);
        let until = out.len() + bytes;
        // What was written before its time comes first; then slots go straight to where they are wanted.
        while out.len() < until
            && let Some(mut part) = image.early.pop_front()
        {
            out.append(&mut part);
        }
        if out.len() < until {
            out.append(&mut image.out);
            std::mem::swap(out, &mut image.out);
            while image.out.len() < until && (image.partial.is_some() || image.next < SLOTS) {
                if image.partial.is_none() {
                    let slot = image.next;
                    image.next += 1;
                    image.partial = self.entries_of(&mut image.pending, slot);
                }
                self.write_partial(&mut image, until);
            }
            std::mem::swap(out, &mut image.out);
        }
        let is_written = image.next == SLOTS && image.partial.is_none();
        let done = is_written && image.early.is_empty() && image.out.is_empty();
        if !done {
            self.images.push(image);
        }
        Some(done)
    }

    /// The entries of a slot, last first, if it is still to be written.
    fn entries_of(&self, pending: &mut [bool], slot: usize) -> Option<(usize, Vec<Ref>)> {
        if !std::mem::take(&mut pending[slot]) {
            return None;
        }
        let mut entries = Vec::with_capacity(self.index.len(slot as u16));
        self.index.for_each(slot as u16, |at| entries.push(at));
        entries.reverse();
        Some((slot, entries))
    }

    /// Goes on with the slot that is written in part, until there are so many bytes.
    fn write_partial(&self, image: &mut Image, until: usize) {
        let Some((slot, mut entries)) = image.partial.take() else { return };
        let (out, write) = (&mut image.out, image.write);
        while !entries.is_empty() && out.len() < until {
            let some = entries.split_off(entries.len().saturating_sub(LOOK_AHEAD));
            // They are all over the memory, and waited for together.
            self.bring(&some);
            for at in some.iter().rev() {
                write(out, self.key_at(*at), self.item(*at), self.expiry_at(*at));
            }
        }
        image.partial = Some((slot, entries)).filter(|(_, entries)| !entries.is_empty());
    }

    /// A slot is about to change.
    #[inline]
    pub(super) fn before_change(&mut self, slot: u16) {
        if !self.images.is_empty() {
            self.write_before(usize::from(slot)..=usize::from(slot));
        }
    }

    #[cold]
    fn write_before(&mut self, slots: std::ops::RangeInclusive<usize>) {
        let mut images = std::mem::take(&mut self.images);
        for image in &mut images {
            for slot in slots.clone() {
                let later = image.partial.take_if(|(partial, _)| *partial != slot);
                if image.partial.is_none() {
                    image.partial = self.entries_of(&mut image.pending, slot);
                }
                self.write_partial(image, usize::MAX);
                image.partial = later;
                if image.out.len() >= PART {
                    image.early.push_back(std::mem::take(&mut image.out));
                }
            }
        }
        self.images = images;
    }

    /// Everything is about to go.
    pub(super) fn before_clear(&mut self) {
        if !self.images.is_empty() {
            self.write_before(0..=SLOTS - 1);
        }
    }
}
