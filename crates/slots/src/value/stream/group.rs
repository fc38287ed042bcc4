//! Consumer groups: last delivered id, consumers, and the pending entries list (PEL).
//!
//! Invariant: an id is in a consumer's PEL exactly if it is in the group's PEL with that consumer as owner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Id;

/// A consumer group.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// Last delivered id.
    pub last_id: Id,
    /// Number of entries read (`entries-read`); `None` if unknown.
    pub entries_read: Option<u64>,
    pending: BTreeMap<Id, Pending>,
    consumers: BTreeMap<Arc<[u8]>, Consumer>,
}

/// A pending entry: delivered and not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// The consumer that owns the entry.
    pub consumer: Arc<[u8]>,
    /// Last delivery time, in milliseconds since 1970.
    pub delivered_ms: i64,
    /// Delivery count.
    pub deliveries: u64,
}

/// A consumer of a group.
#[derive(Clone, Debug, Default)]
pub struct Consumer {
    /// Last attempted interaction (`seen-time`).
    pub seen_ms: i64,
    pending: BTreeSet<Id>,
}

impl Consumer {
    /// The consumer's pending ids, from an id on.
    pub fn pending_from(&self, start: Id) -> impl Iterator<Item = Id> + '_ {
        self.pending.range(start..).copied()
    }

    /// Number of pending entries of the consumer.
    pub fn pending_len(&self) -> usize {
        self.pending.len()
    }
}

impl Group {
    /// A group with a last delivered id.
    pub fn new(last_id: Id, entries_read: Option<u64>) -> Group {
        Group { last_id, entries_read, ..Group::default() }
    }

    /// The group's pending entries, from an id on.
    pub fn pending_from(&self, start: Id) -> impl DoubleEndedIterator<Item = (Id, &Pending)> {
        self.pending.range(start..).map(|(id, pending)| (*id, pending))
    }

    /// Number of pending entries of the group.
    pub fn pending_len(&self) -> usize {
        self.pending.len()
    }

    /// The pending entry with an id.
    pub fn pending(&self, id: Id) -> Option<&Pending> {
        self.pending.get(&id)
    }

    /// The consumers by name.
    pub fn consumers(&self) -> impl ExactSizeIterator<Item = (&[u8], &Consumer)> {
        self.consumers.iter().map(|(name, consumer)| (&**name, consumer))
    }

    /// A consumer by name.
    pub fn consumer(&self, name: &[u8]) -> Option<&Consumer> {
        self.consumers.get(name)
    }

    /// Updates a consumer's seen time, creating the consumer if needed. Returns its name, and whether it is new.
    pub fn touch_consumer(&mut self, name: &[u8], now_ms: i64) -> (Arc<[u8]>, bool) {
        if let Some((known, _)) = self.consumers.get_key_value(name) {
            let known = Arc::clone(known);
            if let Some(consumer) = self.consumers.get_mut(name) {
                consumer.seen_ms = now_ms;
            }
            return (known, false);
        }
        let name: Arc<[u8]> = name.into();
        let consumer = Consumer { seen_ms: now_ms, pending: BTreeSet::new() };
        self.consumers.insert(Arc::clone(&name), consumer);
        (name, true)
    }

    /// Assigns an entry to a known consumer, replacing its previous owner.
    pub fn assign(&mut self, id: Id, consumer: &Arc<[u8]>, delivered_ms: i64, deliveries: u64) {
        let pending = Pending { consumer: Arc::clone(consumer), delivered_ms, deliveries };
        if let Some(before) = self.pending.insert(id, pending)
            && let Some(owner) = self.consumers.get_mut(&before.consumer)
        {
            owner.pending.remove(&id);
        }
        if let Some(owner) = self.consumers.get_mut(consumer) {
            owner.pending.insert(id);
        }
    }

    /// Removes a pending entry. Returns whether it existed.
    pub fn release(&mut self, id: Id) -> bool {
        let Some(pending) = self.pending.remove(&id) else { return false };
        if let Some(owner) = self.consumers.get_mut(&pending.consumer) {
            owner.pending.remove(&id);
        }
        true
    }

    /// Removes a consumer with its pending entries. Returns their number; `None` if there is no such consumer.
    pub fn remove_consumer(&mut self, name: &[u8]) -> Option<usize> {
        let consumer = self.consumers.remove(name)?;
        consumer.pending.iter().for_each(|id| drop(self.pending.remove(id)));
        Some(consumer.pending.len())
    }

    /// Approximate heap memory in bytes.
    pub(super) fn heap_size(&self) -> usize {
        const PER_PENDING: usize = size_of::<(Id, Pending)>() + size_of::<Id>();
        const PER_CONSUMER: usize = size_of::<(Arc<[u8]>, Consumer)>() + 48;
        self.pending.len() * PER_PENDING + self.consumers.len() * PER_CONSUMER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_pending_for_one_consumer() {
        let id = |ms| Id { ms, seq: 0 };
        let mut group = Group::default();
        let (a, is_new) = group.touch_consumer(b"a", 5);
        assert!(is_new);
        let (b, _) = group.touch_consumer(b"b", 5);
        group.assign(id(1), &a, 7, 1);
        group.assign(id(2), &a, 7, 1);
        group.assign(id(1), &b, 8, 2);
        assert_eq!(group.consumer(b"a").unwrap().pending_len(), 1);
        assert_eq!(group.consumer(b"b").unwrap().pending_from(Id::MIN).collect::<Vec<_>>(), [id(1)]);
        assert_eq!(group.pending(id(1)).unwrap().deliveries, 2);
        assert!(group.release(id(1)) && !group.release(id(1)));
        assert_eq!(group.consumer(b"b").unwrap().pending_len(), 0);
        assert_eq!(group.remove_consumer(b"a"), Some(1));
        assert_eq!((group.pending_len(), group.remove_consumer(b"a")), (0, None));
    }
}
