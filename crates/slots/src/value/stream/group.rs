//! Consumer groups: how far each has read, and who has which entries without having acknowledged them.
//!
//! Invariant: an id is pending for a consumer exactly when it is pending in the group with that consumer as its owner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Id;

/// A group of consumers of a stream.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// The last entry that anybody was given.
    pub last_id: Id,
    /// How many entries were ever read; `None` when nobody can say.
    pub entries_read: Option<u64>,
    pending: BTreeMap<Id, Pending>,
    consumers: BTreeMap<Arc<[u8]>, Consumer>,
}

/// An entry that was delivered and not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pending {
    /// Whose it is.
    pub consumer: Arc<[u8]>,
    /// When it was delivered last, in milliseconds since 1970.
    pub delivered_ms: i64,
    /// How often.
    pub deliveries: u64,
}

/// A member of a group.
#[derive(Clone, Debug, Default)]
pub struct Consumer {
    /// When it was heard of last.
    pub seen_ms: i64,
    pending: BTreeSet<Id>,
}

impl Consumer {
    /// What it has not acknowledged, from an id on.
    pub fn pending_from(&self, start: Id) -> impl Iterator<Item = Id> + '_ {
        self.pending.range(start..).copied()
    }

    /// How many those are.
    pub fn pending_len(&self) -> usize {
        self.pending.len()
    }
}

impl Group {
    /// A group that has read up to an id.
    pub fn new(last_id: Id, entries_read: Option<u64>) -> Group {
        Group { last_id, entries_read, ..Group::default() }
    }

    /// All that is pending, from an id on.
    pub fn pending_from(&self, start: Id) -> impl DoubleEndedIterator<Item = (Id, &Pending)> {
        self.pending.range(start..).map(|(id, pending)| (*id, pending))
    }

    /// How much is pending.
    pub fn pending_len(&self) -> usize {
        self.pending.len()
    }

    /// What is known about an entry that is pending.
    pub fn pending(&self, id: Id) -> Option<&Pending> {
        self.pending.get(&id)
    }

    /// All consumers by name.
    pub fn consumers(&self) -> impl ExactSizeIterator<Item = (&[u8], &Consumer)> {
        self.consumers.iter().map(|(name, consumer)| (&**name, consumer))
    }

    /// A consumer.
    pub fn consumer(&self, name: &[u8]) -> Option<&Consumer> {
        self.consumers.get(name)
    }

    /// A consumer has been heard of. Gives its name, and whether it is new.
    pub fn see(&mut self, name: &[u8], now_ms: i64) -> (Arc<[u8]>, bool) {
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

    /// An entry is pending for a consumer now, whoever had it before. The consumer must be known.
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

    /// An entry is pending no more. Answers whether it was.
    pub fn release(&mut self, id: Id) -> bool {
        let Some(pending) = self.pending.remove(&id) else { return false };
        if let Some(owner) = self.consumers.get_mut(&pending.consumer) {
            owner.pending.remove(&id);
        }
        true
    }

    /// A consumer leaves, and what was pending for it is let go. Gives how much that was; `None` if it was not there.
    pub fn remove_consumer(&mut self, name: &[u8]) -> Option<usize> {
        let consumer = self.consumers.remove(name)?;
        consumer.pending.iter().for_each(|id| drop(self.pending.remove(id)));
        Some(consumer.pending.len())
    }

    /// Bytes it takes on the heap, about.
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
    fn an_entry_is_pending_for_one_consumer_at_a_time() {
        let id = |ms| Id { ms, seq: 0 };
        let mut group = Group::default();
        let (a, is_new) = group.see(b"a", 5);
        assert!(is_new);
        let (b, _) = group.see(b"b", 5);
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
