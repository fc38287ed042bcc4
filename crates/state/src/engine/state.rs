//! The key and lease state machine: pure, no clock, no I/O.
//!
//! `decide_*` reads and changes nothing; `apply` changes and cannot reject. In between the caller makes the
//! decision durable, so a decision lost in a crash was never part of the acknowledged state. Lease deadlines
//! are in [`super::leases`].
//!
//! Invariant: every entry's revisions are at most `revision`, and every lease of an entry exists and lists
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::repository::{
    Compare, Entry, Event, LeaseId, MAX_TXN_BYTES, MAX_TXN_OPS, Op, RepositoryError, Txn, TxnOutcome,
};

/// A decision: written to the log, then applied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// Changes keys, at the next revision.
    Change {
        /// The revision of the change.
        revision: i64,
        /// The changes.
        ops: Vec<Op>,
    },
    /// Grants a lease.
    Grant {
        /// Lease id.
        id: LeaseId,
        /// TTL without renewal.
        ttl_ms: u64,
    },
    /// Revokes a lease and deletes its keys, at the next revision if it had any.
    Revoke {
        /// Lease id.
        id: LeaseId,
    },
}

/// A lease and the keys that its expiry deletes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseState {
    /// TTL without renewal.
    pub ttl_ms: u64,
    /// Keys attached to the lease.
    pub keys: BTreeSet<String>,
}

/// The complete state of a repository.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct State {
    pub(crate) revision: i64,
    pub(crate) next_lease: i64,
    pub(crate) entries: BTreeMap<String, Entry>,
    pub(crate) leases: BTreeMap<LeaseId, LeaseState>,
}

impl Default for State {
    fn default() -> Self {
        Self { revision: 1, next_lease: 1, entries: BTreeMap::new(), leases: BTreeMap::new() }
    }
}

impl State {
    /// The revision of the last change. An empty store has revision 1, as etcd's.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The entry of a key.
    pub fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// The entries whose key starts with `prefix`, in key order.
    pub fn list<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a Entry> {
        let from = self.entries.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        from.take_while(move |(key, _)| key.starts_with(prefix)).map(|(_, entry)| entry)
    }

    /// The leases with their TTL.
    pub fn leases(&self) -> impl Iterator<Item = (LeaseId, u64)> {
        self.leases.iter().map(|(id, lease)| (*id, lease.ttl_ms))
    }

    /// Evaluates a transaction: the record to log, `None` when nothing changes, and the outcome.
    pub fn decide_txn(&self, txn: Txn) -> Result<(Option<Record>, TxnOutcome), RepositoryError> {
        self.check(&txn)?;
        if !txn.compares.iter().all(|compare| self.holds(compare)) {
            let current = txn.compares.iter().map(|compare| self.get(compare.key()).cloned()).collect();
            return Ok((None, TxnOutcome::Conflict { revision: self.revision, current }));
        }
        let acts = |op: &Op| matches!(op, Op::Put { .. }) || self.entries.contains_key(op.key());
        let ops: Vec<Op> = txn.ops.into_iter().filter(acts).collect();
        if ops.is_empty() {
            return Ok((None, TxnOutcome::Done { revision: self.revision }));
        }
        let revision = self.revision + 1;
        Ok((Some(Record::Change { revision, ops }), TxnOutcome::Done { revision }))
    }

    /// The next lease id and the record that grants it.
    pub fn decide_grant(&self, ttl_ms: u64) -> (LeaseId, Record) {
        let id = LeaseId(self.next_lease);
        (id, Record::Grant { id, ttl_ms })
    }

    /// The record that revokes a lease.
    pub fn decide_revoke(&self, id: LeaseId) -> Result<Record, RepositoryError> {
        if !self.leases.contains_key(&id) {
            return Err(RepositoryError::LeaseNotFound(id));
        }
        Ok(Record::Revoke { id })
    }

    /// Applies a decision and returns the events.
    ///
    /// Records come from `decide_*` on the current state, or from a log of such records: a record that does
    /// not fit means a damaged log, and the state is then unchanged.
    pub fn apply(&mut self, record: &Record) -> Result<Vec<Event>, RepositoryError> {
        match record {
            Record::Change { revision, ops } => self.apply_change(*revision, ops),
            Record::Grant { id, ttl_ms } => {
                if id.0 != self.next_lease {
                    return Err(RepositoryError::Damaged(format!("lease {id} out of order")));
                }
                self.next_lease += 1;
                self.leases.insert(*id, LeaseState { ttl_ms: *ttl_ms, keys: BTreeSet::new() });
                Ok(Vec::new())
            }
            Record::Revoke { id } => {
                let Some(lease) = self.leases.remove(id) else {
                    return Err(RepositoryError::Damaged(format!("lease {id} ends twice")));
                };
                if lease.keys.is_empty() {
                    return Ok(Vec::new());
                }
                self.revision += 1;
                Ok(lease.keys.into_iter().map(|key| self.delete(key)).collect())
            }
        }
    }

    fn check(&self, txn: &Txn) -> Result<(), RepositoryError> {
        if txn.ops.len() > MAX_TXN_OPS || txn.compares.len() > MAX_TXN_OPS {
            return Err(RepositoryError::Invalid(format!(
                "more than {MAX_TXN_OPS} operations in one transaction"
            )));
        }
        let mut bytes = 0;
        let mut keys = BTreeSet::new();
        for op in &txn.ops {
            if op.key().is_empty() {
                return Err(RepositoryError::Invalid("a key is empty".to_owned()));
            }
            if !keys.insert(op.key()) {
                return Err(RepositoryError::Invalid(format!("key {} is changed twice", op.key())));
            }
            bytes += op.key().len();
            if let Op::Put { value, lease, .. } = op {
                bytes += value.len();
                if let Some(id) = lease
                    && !self.leases.contains_key(id)
                {
                    return Err(RepositoryError::LeaseNotFound(*id));
                }
            }
        }
        if bytes > MAX_TXN_BYTES {
            return Err(RepositoryError::Invalid(format!(
                "{bytes} bytes in one transaction, more than {MAX_TXN_BYTES}"
            )));
        }
        Ok(())
    }

    fn holds(&self, compare: &Compare) -> bool {
        let entry = self.get(compare.key());
        match compare {
            Compare::Absent(_) => entry.is_none(),
            Compare::Present(_) => entry.is_some(),
            Compare::ModRevision(_, revision) => entry.is_some_and(|entry| entry.mod_revision == *revision),
            Compare::CreateRevision(_, revision) => {
                entry.is_some_and(|entry| entry.create_revision == *revision)
            }
            Compare::Value(_, value) => entry.is_some_and(|entry| entry.value == *value),
        }
    }

    fn apply_change(&mut self, revision: i64, ops: &[Op]) -> Result<Vec<Event>, RepositoryError> {
        if revision != self.revision + 1 {
            let message = format!("a change at revision {revision} follows revision {}", self.revision);
            return Err(RepositoryError::Damaged(message));
        }
        let unknown = ops.iter().find_map(|op| match op {
            Op::Put { lease: Some(id), .. } if !self.leases.contains_key(id) => Some(*id),
            _ => None,
        });
        if let Some(id) = unknown {
            return Err(RepositoryError::Damaged(format!("a key under the unknown lease {id}")));
        }
        self.revision = revision;
        let apply = |op: &Op| match op {
            Op::Put { key, value, lease } => self.put(key, value.clone(), *lease),
            Op::Delete { key } => self.delete(key.clone()),
        };
        Ok(ops.iter().map(apply).collect())
    }

    fn put(&mut self, key: &str, value: bytes::Bytes, lease: Option<LeaseId>) -> Event {
        let before = self.entries.get(key);
        let entry = Entry {
            key: key.to_owned(),
            value,
            create_revision: before.map_or(self.revision, |entry| entry.create_revision),
            mod_revision: self.revision,
            version: before.map_or(1, |entry| entry.version + 1),
            lease,
        };
        let held = before.and_then(|entry| entry.lease);
        self.detach(held, key);
        if let Some(lease) = lease.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.insert(key.to_owned());
        }
        self.entries.insert(key.to_owned(), entry.clone());
        Event::Put(entry)
    }

    fn delete(&mut self, key: String) -> Event {
        let held = self.entries.remove(&key).and_then(|entry| entry.lease);
        self.detach(held, &key);
        Event::Delete { key, revision: self.revision }
    }

    fn detach(&mut self, lease: Option<LeaseId>, key: &str) {
        if let Some(lease) = lease.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.remove(key);
        }
    }
}
