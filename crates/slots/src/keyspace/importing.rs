//! Importing slots: their keys are stored but hidden, because they are being migrated here from another shard.
//! Commands can access them by name, so that writes at the source can be applied here, too; operations on the whole
//! keyspace (counting, scanning, sampling, expiring) skip them.
//!
//! Invariants: `hidden_keys` is the number of keys in hidden slots; their expire times are in `hidden_expires`, all
//! others in `expires`.

use std::collections::BTreeSet;

use super::entry::{self, LONG_KEY};
use super::{Keyspace, PREFETCH_KEYS, Ref};
#[cfg(test)]
use crate::slot_set::SlotSet;

impl Keyspace {
    /// Number of keys, including hidden ones.
    pub(crate) fn total(&self) -> usize {
        self.keys
    }

    /// Number of keys in a slot, hidden or not.
    pub(crate) fn all_in_slot(&self, slot: u16) -> usize {
        self.index.len(slot)
    }

    #[inline]
    pub(super) fn is_hidden(&self, slot: u16) -> bool {
        self.hidden.as_ref().is_some_and(|hidden| hidden.contains(slot))
    }

    /// True if a slot has keys and is not hidden.
    #[inline]
    pub(super) fn is_visible(&self, slot: u16) -> bool {
        !self.index.is_empty(slot) && !self.is_hidden(slot)
    }

    #[inline]
    pub(super) fn expires_of(&mut self, slot: u16) -> &mut BTreeSet<(i64, Ref)> {
        if self.is_hidden(slot) { &mut self.hidden_expires } else { &mut self.expires }
    }

    /// Hides a slot for import. Its previous keys are deleted.
    pub(crate) fn hide_slot(&mut self, slot: u16) {
        self.clear_slot(slot);
        self.hidden.get_or_insert_default().insert(slot);
    }

    /// Reveals a hidden slot with its keys: the import is complete.
    pub(crate) fn reveal_slot(&mut self, slot: u16) {
        if !self.is_hidden(slot) {
            return;
        }
        let (arena, hidden, expires) = (&self.arena, &mut self.hidden_expires, &mut self.expires);
        if !hidden.is_empty() {
            self.index.for_each(slot, |at| {
                if let Some(expires_at) = entry::expiry_of(arena.bytes(at)) {
                    hidden.remove(&(expires_at, at));
                    expires.insert((expires_at, at));
                }
            });
        }
        self.hidden_keys -= self.index.len(slot);
        self.drop_hidden(slot);
    }

    fn drop_hidden(&mut self, slot: u16) {
        if let Some(hidden) = &mut self.hidden {
            hidden.remove(slot);
            if hidden.is_empty() {
                self.hidden = None;
            }
        }
    }

    /// The hidden slots.
    #[cfg(test)]
    pub(crate) fn hidden(&self) -> Option<&SlotSet> {
        self.hidden.as_ref()
    }

    /// Deletes all keys of a slot, hidden or not.
    pub(crate) fn clear_slot(&mut self, slot: u16) {
        self.before_change(slot);
        let entries = self.index.take(slot);
        self.keys -= entries.len();
        if self.is_hidden(slot) {
            self.hidden_keys -= entries.len();
        }
        for (number, at) in entries.iter().copied().enumerate() {
            if number.is_multiple_of(PREFETCH_KEYS) {
                self.prefetch_entries(&entries[number..entries.len().min(number + PREFETCH_KEYS)]);
            }
            let bytes = self.arena.bytes(at);
            let head = entry::parse(bytes);
            let value = head.is_outside().then(|| entry::number(bytes, head.value.0));
            let long_key = (head.flags & LONG_KEY != 0).then(|| entry::number(bytes, head.key.0));
            if let Some(expires_at) = head.expires_at {
                self.expires_of(slot).remove(&(expires_at, at));
            }
            if let Some(number) = value {
                self.drop_value(number);
            }
            if let Some(number) = long_key {
                let (_, bytes) = self.long_keys.remove(number);
                self.outside -= bytes;
            }
            self.arena.free(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyspace::Owned;
    use crate::slot_of;

    /// Keys of one slot, some with an expire time.
    fn fill(db: &mut Keyspace, tag: &str) {
        for n in 0..50 {
            let key = format!("{{{tag}}}:{n}");
            db.set_str(key.as_bytes(), &[b'v'; 40], (n % 2 == 0).then_some(100 + n));
        }
        db.put_owned(format!("{{{tag}}}{}", "k".repeat(400)).as_bytes(), Owned::Str(vec![1; 5_000]), Some(7));
    }

    #[test]
    fn importing_slot_is_accessible_by_key_and_hidden_from_scans() {
        let mut db = Keyspace::new(1);
        let slot = slot_of(b"{a}");
        fill(&mut db, "b");
        let before = db.memory();
        db.hide_slot(slot);
        fill(&mut db, "a");
        assert_eq!((db.len(), db.total(), db.expiring()), (51, 102, 26));
        assert!(db.contains(b"{a}:3"), "by name");
        let mut seen = 0;
        db.for_each(|key, _, _| {
            assert!(key.starts_with(b"{b}"));
            seen += 1;
        });
        assert_eq!((seen, db.slot_len(slot), db.keys_in_slot(slot, 9).len()), (51, 0, 0));
        assert!((0..200).all(|_| db.random_key(|n| fastrand::usize(..n)).unwrap().starts_with(b"{b}")));
        let (mut cursor, mut scanned) = (0, 0);
        loop {
            cursor = db.scan(cursor, |_, _, _| scanned += 1);
            if cursor == 0 {
                break;
            }
        }
        assert_eq!(scanned, 51);
        assert!(db.first_expired(1_000).unwrap().starts_with(b"{b}"));
        db.reveal_slot(slot);
        assert_eq!((db.len(), db.expiring(), db.slot_len(slot)), (102, 52, 51));
        db.clear_slot(slot);
        assert_eq!((db.len(), db.total(), db.expiring(), db.memory()), (51, 51, 26, before));
    }

    #[test]
    fn flush_keeps_importing_slots() {
        let mut db = Keyspace::new(1);
        db.hide_slot(slot_of(b"{a}"));
        fill(&mut db, "a");
        fill(&mut db, "b");
        db.clear();
        assert_eq!((db.len(), db.total(), db.expiring()), (0, 51, 0));
        db.reveal_slot(slot_of(b"{a}"));
        assert_eq!((db.len(), db.expiring()), (51, 26));
        db.clear();
        assert_eq!((db.total(), db.memory()), (0, Keyspace::new(1).memory()));
    }
}
