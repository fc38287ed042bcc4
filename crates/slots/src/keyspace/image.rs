//! Point-in-time image of the keyspace, written incrementally while the keyspace changes (copy on write, by slot).
//!
//! Slots are written one after the other, a large one in several steps. Before a slot changes that is not completely
//! written, its remaining entries are written first: the output is the keyspace as it was when the image was started.
//! Every change of the keyspace goes through [`Keyspace::before_change`], so none is missed.
//!
//! Limit: the first change of a very large slot pays for writing all of it; so does a very large key.

use std::collections::VecDeque;

use super::arena::Ref;
use super::{Item, Keyspace, PREFETCH_KEYS, SLOTS};
use crate::slot_set::SlotSet;

/// Serializes one key.
pub(crate) type WriteKey = fn(&mut Vec<u8>, &[u8], Item<'_>, Option<i64>);

/// Image id of a snapshot; images of slot migrations have the number of their migration.
pub(crate) const SNAPSHOT: u64 = 0;

/// Size of a chunk of early output: the consumer of the image takes it chunk by chunk.
const PART: usize = 64 << 10;

/// An image in progress.
pub(super) struct Image {
    /// Image id: several images may be in progress.
    of: u64,
    /// Slots that are still to be written.
    pending: Vec<bool>,
    /// All slots before this one are written, except the rest of a partially written slot.
    next: usize,
    /// A partially written slot with its remaining entries. They stay valid until the slot changes.
    partial: Option<(usize, Vec<Ref>)>,
    /// Output written ahead of a change, in full chunks.
    early: VecDeque<Vec<u8>>,
    out: Vec<u8>,
    write: WriteKey,
}

impl Keyspace {
    /// Starts an image of the current keyspace, or of some of its slots.
    pub(crate) fn begin_image(&mut self, of: u64, slots: Option<&SlotSet>, write: WriteKey) {
        self.drop_image(of);
        let wanted = |slot: u16| slots.is_none_or(|slots| slots.contains(slot));
        let pending = (0..SLOTS as u16).map(|slot| !self.index.is_empty(slot) && wanted(slot)).collect();
        let early = VecDeque::new();
        self.images.push(Image { of, pending, next: 0, partial: None, early, out: Vec::new(), write });
    }

    /// Cancels an image.
    pub(crate) fn drop_image(&mut self, of: u64) {
        self.images.retain(|image| image.of != of);
    }

    /// True if this image is in progress.
    pub(crate) fn has_image(&self, of: u64) -> bool {
        self.images.iter().any(|image| image.of == of)
    }

    /// Appends about `bytes` more of an image to `out`; returns true at the end. `None` if the image was cancelled.
    pub(crate) fn image_step(&mut self, of: u64, bytes: usize, out: &mut Vec<u8>) -> Option<bool> {
        let at = self.images.iter().position(|image| image.of == of)?;
        let mut image = self.images.swap_remove(at);
        let until = out.len() + bytes;
        // Output written ahead of changes comes first; then slots are written directly.
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

    /// The entries of a slot in reverse order, if it is still to be written.
    fn entries_of(&self, pending: &mut [bool], slot: usize) -> Option<(usize, Vec<Ref>)> {
        if !std::mem::take(&mut pending[slot]) {
            return None;
        }
        let mut entries = Vec::with_capacity(self.index.len(slot as u16));
        self.index.for_each(slot as u16, |at| entries.push(at));
        entries.reverse();
        Some((slot, entries))
    }

    /// Continues the partially written slot up to a number of bytes.
    fn write_partial(&self, image: &mut Image, until: usize) {
        let Some((slot, mut entries)) = image.partial.take() else { return };
        let (out, write) = (&mut image.out, image.write);
        while !entries.is_empty() && out.len() < until {
            let some = entries.split_off(entries.len().saturating_sub(PREFETCH_KEYS));
            // The entries are scattered in memory and prefetched together.
            self.prefetch_entries(&some);
            for at in some.iter().rev() {
                write(out, self.key_at(*at), self.item(*at), self.expiry_at(*at));
            }
        }
        image.partial = Some((slot, entries)).filter(|(_, entries)| !entries.is_empty());
    }

    /// Writes a slot before it changes.
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

    /// Writes all remaining slots before the keyspace is cleared.
    pub(super) fn before_clear(&mut self) {
        if !self.images.is_empty() {
            self.write_before(0..=SLOTS - 1);
        }
    }
}
