//! The repository as the simulated nodes see it: transactions, leases, and a history to watch.

use std::collections::BTreeMap;

use bytes::Bytes;
use moim_state::{Compare, Entry, Event, LeaseId, Op, Txn, TxnOutcome};

/// A key store that never loses anything. All faults happen on the path to it.
#[derive(Debug, Default)]
pub(super) struct Store {
    revision: i64,
    entries: BTreeMap<String, Entry>,
    pub(super) history: Vec<Event>,
    /// The expiry of each lease.
    leases: BTreeMap<i64, u64>,
}

impl Store {
    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    pub(super) fn list(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    pub(super) fn grant(&mut self, until_ms: u64) -> LeaseId {
        let id = self.leases.last_key_value().map_or(1, |(id, _)| id + 1).max(self.revision + 1);
        self.leases.insert(id, until_ms);
        LeaseId(id)
    }

    /// True if the lease still existed.
    pub(super) fn keep_alive(&mut self, lease: LeaseId, until_ms: u64) -> bool {
        self.leases.get_mut(&lease.0).map(|deadline| *deadline = until_ms).is_some()
    }

    pub(super) fn revoke(&mut self, lease: LeaseId) {
        self.leases.remove(&lease.0);
        let keys = self.entries.values().filter(|entry| entry.lease == Some(lease));
        let ops = keys.map(|entry| Op::Delete { key: entry.key.clone() }).collect();
        self.txn(Txn { compares: Vec::new(), ops });
    }

    pub(super) fn expire(&mut self, now_ms: u64) {
        let due = self.leases.iter().filter(|(_, deadline)| **deadline <= now_ms);
        for lease in due.map(|(id, _)| LeaseId(*id)).collect::<Vec<_>>() {
            self.revoke(lease);
        }
    }

    pub(super) fn txn(&mut self, txn: Txn) -> TxnOutcome {
        let current: Vec<Option<Entry>> =
            txn.compares.iter().map(|compare| self.entries.get(compare.key()).cloned()).collect();
        let holds = |(compare, found): (&Compare, &Option<Entry>)| match (compare, found) {
            (Compare::Absent(_), found) => found.is_none(),
            (_, None) => false,
            (Compare::Present(_), Some(_)) => true,
            (Compare::ModRevision(_, revision), Some(entry)) => entry.mod_revision == *revision,
            (Compare::CreateRevision(_, revision), Some(entry)) => entry.create_revision == *revision,
            (Compare::Value(_, value), Some(entry)) => entry.value == *value,
        };
        if !txn.compares.iter().zip(&current).all(holds) {
            return TxnOutcome::Conflict { revision: self.revision, current };
        }
        let revision = self.revision + 1;
        for op in txn.ops {
            match op {
                Op::Put { key, value, lease } => self.put(key, value, lease, revision),
                Op::Delete { key } => {
                    if self.entries.remove(&key).is_some() {
                        self.revision = revision;
                        self.history.push(Event::Delete { key, revision });
                    }
                }
            }
        }
        TxnOutcome::Done { revision: self.revision }
    }

    fn put(&mut self, key: String, value: Bytes, lease: Option<LeaseId>, revision: i64) {
        let (create_revision, version) = match self.entries.get(&key) {
            Some(known) => (known.create_revision, known.version + 1),
            None => (revision, 1),
        };
        let entry =
            Entry { key: key.clone(), value, create_revision, mod_revision: revision, version, lease };
        self.revision = revision;
        self.history.push(Event::Put(entry.clone()));
        self.entries.insert(key, entry);
    }
}
