//! Requests: range reads, and the commands that are proposed to the Raft log.
//!
//! Owns the types of requests and the checks that need no state ([`Command::check`]): a server runs them before it
//! proposes, and [`State::apply`](crate::State::apply) runs them again, because a log outlives the version that wrote
//! it. Numbers and flags have the meaning of etcd's fields of the same name.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::error::Error;
use crate::lease::LeaseId;
use crate::range::{KeyRange, RangeEnd, SpaceId};

/// Maximum number of compares, or of operations in a branch, counted along each path of nested transactions.
pub const MAX_TXN_OPS: usize = 128;
/// Maximum size of an encoded command of a client.
pub const MAX_REQUEST_BYTES: usize = 1_572_864;

/// Sort order of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SortOrder {
    /// Key order; ascending if the target is not the key.
    #[default]
    None,
    /// Smallest first.
    Ascend,
    /// Largest first.
    Descend,
}

/// Sort target of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SortTarget {
    /// The key.
    #[default]
    Key,
    /// The version: the number of puts since the key was created.
    Version,
    /// The create revision.
    Create,
    /// The mod revision.
    Mod,
    /// The value.
    Value,
}

/// A range read.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RangeRequest {
    /// The first key.
    pub key: Bytes,
    /// Empty: `key` alone; one zero byte: every key from `key` on; else the exclusive end.
    pub range_end: Bytes,
    /// Maximum number of key-values; 0 is no limit.
    pub limit: i64,
    /// The revision to read; 0 or less is the current one.
    pub revision: i64,
    /// The sort order.
    pub sort_order: SortOrder,
    /// The sort target.
    pub sort_target: SortTarget,
    /// Omit the values.
    pub keys_only: bool,
    /// Return only the count.
    pub count_only: bool,
    /// Only keys with this mod revision or later; 0 is no bound, here and below.
    pub min_mod_revision: i64,
    /// Only keys with this mod revision or earlier.
    pub max_mod_revision: i64,
    /// Only keys with this create revision or later.
    pub min_create_revision: i64,
    /// Only keys with this create revision or earlier.
    pub max_create_revision: i64,
}

impl RangeRequest {
    /// A read of one key at the current revision.
    pub fn key(key: impl Into<Bytes>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }

    /// A read of a key range at the current revision.
    pub fn between(key: impl Into<Bytes>, range_end: impl Into<Bytes>) -> Self {
        Self { key: key.into(), range_end: range_end.into(), ..Self::default() }
    }

    /// The key range of the request.
    pub fn range(&self) -> KeyRange {
        KeyRange::new(self.key.clone(), self.range_end.clone())
    }

    /// Checks that need no state.
    pub fn check(&self) -> Result<(), Error> {
        check_key(&self.key)
    }
}

/// A put of one key.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PutRequest {
    /// The key.
    pub key: Bytes,
    /// The new value.
    pub value: Bytes,
    /// The lease to attach the key to; 0 for no lease.
    pub lease: LeaseId,
    /// Return the previous key-value.
    pub prev_kv: bool,
    /// Keep the current value.
    pub ignore_value: bool,
    /// Keep the current lease.
    pub ignore_lease: bool,
}

impl PutRequest {
    /// A put without a lease.
    pub fn new(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self { key: key.into(), value: value.into(), ..Self::default() }
    }

    /// Checks that need no state.
    pub(crate) fn check(&self) -> Result<(), Error> {
        check_key(&self.key)?;
        if self.ignore_value && !self.value.is_empty() {
            return Err(Error::ValueProvided);
        }
        if self.ignore_lease && !self.lease.is_none() {
            return Err(Error::LeaseProvided);
        }
        Ok(())
    }
}

/// A deletion of a key range.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeleteRequest {
    /// The first key.
    pub key: Bytes,
    /// As in [`RangeRequest::range_end`].
    pub range_end: Bytes,
    /// Return the deleted key-values.
    pub prev_kv: bool,
}

impl DeleteRequest {
    /// A deletion of one key.
    pub fn key(key: impl Into<Bytes>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }

    /// The key range of the request.
    pub fn range(&self) -> KeyRange {
        KeyRange::new(self.key.clone(), self.range_end.clone())
    }
}

/// The relation that a compare requires between the stored and the given value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompareResult {
    /// Stored equals given.
    Equal,
    /// Stored is greater than given.
    Greater,
    /// Stored is less than given.
    Less,
    /// Stored differs from given.
    NotEqual,
}

/// The compared field and the given value. A missing key has 0 in every number and no value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CompareTarget {
    /// The version: the number of puts since the key was created.
    Version(i64),
    /// The create revision.
    Create(i64),
    /// The mod revision.
    Mod(i64),
    /// The value. Never true for a missing key.
    Value(Bytes),
    /// The lease.
    Lease(LeaseId),
}

/// A condition on every key of a range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compare {
    /// The first key.
    pub key: Bytes,
    /// As in [`RangeRequest::range_end`].
    pub range_end: Bytes,
    /// The compared field and the given value.
    pub target: CompareTarget,
    /// The required relation.
    pub result: CompareResult,
}

/// One operation of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TxnOp {
    /// A range read; it sees the operations before it.
    Range(RangeRequest),
    /// A put.
    Put(PutRequest),
    /// A deletion.
    Delete(DeleteRequest),
    /// A nested transaction; its compares see the state before the outermost one.
    Txn(TxnRequest),
}

/// Compares, and the operations to run if all hold or not. All changes have one revision.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TxnRequest {
    /// Conditions that must all hold for the success branch.
    pub compares: Vec<Compare>,
    /// Operations if all compares hold.
    pub success: Vec<TxnOp>,
    /// Operations if a compare does not hold.
    pub failure: Vec<TxnOp>,
}

impl TxnRequest {
    /// True if neither branch can change anything. Such a transaction needs no log entry.
    pub fn is_read_only(&self) -> bool {
        self.all_ops(&|op| match op {
            TxnOp::Range(_) => true,
            TxnOp::Put(_) | TxnOp::Delete(_) => false,
            TxnOp::Txn(inner) => inner.is_read_only(),
        })
    }

    /// True if a branch has a put: refused under NOSPACE.
    pub(crate) fn has_put(&self) -> bool {
        !self.all_ops(&|op| match op {
            TxnOp::Put(_) => false,
            TxnOp::Range(_) | TxnOp::Delete(_) => true,
            TxnOp::Txn(inner) => !inner.has_put(),
        })
    }

    /// The bytes of keys and values in its puts.
    pub(crate) fn put_bytes(&self) -> usize {
        let bytes = |op: &TxnOp| match op {
            TxnOp::Put(put) => put.key.len() + put.value.len(),
            TxnOp::Range(_) | TxnOp::Delete(_) => 0,
            TxnOp::Txn(inner) => inner.put_bytes(),
        };
        self.success.iter().chain(&self.failure).map(bytes).sum()
    }

    fn all_ops(&self, holds: &dyn Fn(&TxnOp) -> bool) -> bool {
        self.success.iter().chain(&self.failure).all(holds)
    }

    /// Checks that need no state: sizes, empty keys, keys changed twice, one key space.
    pub fn check(&self) -> Result<(), Error> {
        self.check_ops(MAX_TXN_OPS)?;
        changed_by(&self.success)?;
        changed_by(&self.failure)?;
        self.space().map(|_| ())
    }

    fn check_ops(&self, allowed: usize) -> Result<(), Error> {
        let ops = self.compares.len().max(self.success.len()).max(self.failure.len());
        if ops > allowed {
            return Err(Error::TooManyOps);
        }
        self.compares.iter().try_for_each(|compare| check_key(&compare.key))?;
        for op in self.success.iter().chain(&self.failure) {
            match op {
                TxnOp::Range(range) => range.check()?,
                TxnOp::Put(put) => put.check()?,
                TxnOp::Delete(delete) => check_key(&delete.key)?,
                TxnOp::Txn(inner) => inner.check_ops(allowed - ops)?,
            }
        }
        Ok(())
    }

    /// The key space of all its keys; a transaction without keys belongs to the user keys.
    pub fn space(&self) -> Result<SpaceId, Error> {
        let mut found = None;
        self.find_space(&mut found)?;
        Ok(found.unwrap_or(SpaceId::User))
    }

    fn find_space(&self, found: &mut Option<SpaceId>) -> Result<(), Error> {
        self.compares.iter().try_for_each(|compare| check_same_space(found, &compare.key))?;
        for op in self.success.iter().chain(&self.failure) {
            match op {
                TxnOp::Range(range) => check_same_space(found, &range.key)?,
                TxnOp::Put(put) => check_same_space(found, &put.key)?,
                TxnOp::Delete(delete) => check_same_space(found, &delete.key)?,
                TxnOp::Txn(inner) => inner.find_space(found)?,
            }
        }
        Ok(())
    }
}

fn check_same_space(found: &mut Option<SpaceId>, key: &[u8]) -> Result<(), Error> {
    let space = SpaceId::of(key);
    if *found.get_or_insert(space) == space { Ok(()) } else { Err(Error::TxnAcrossSpaces) }
}

/// A condition that stops writes until an operator disarms it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AlarmKind {
    /// A member has no space left: commands that grow the state are refused.
    NoSpace,
    /// Members disagree: all client commands are refused.
    Corrupt,
}

/// An alarm and the member that raised it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Alarm {
    /// The kind of alarm.
    pub kind: AlarmKind,
    /// The member that raised it.
    pub member: u64,
}

/// The origin of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// A client of the etcd port.
    Client,
    /// A node of the cluster.
    Node,
}

/// A change, as proposed to the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Command {
    /// The origin of the command.
    pub origin: Origin,
    /// The operation.
    pub op: Op,
}

/// The operation of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Puts a key.
    Put(PutRequest),
    /// Deletes a key range.
    Delete(DeleteRequest),
    /// Runs a transaction.
    Txn(TxnRequest),
    /// Compacts history before a revision; fails if the revision is compacted already or in the future.
    Compact {
        /// The key space.
        space: SpaceId,
        /// The compact revision: the first one that stays readable.
        revision: i64,
    },
    /// Compacts history as far as possible: proposed by the leader itself, possibly twice.
    AutoCompact {
        /// The compact revision of the user keys.
        user: i64,
        /// The compact revision of the system keys.
        system: i64,
    },
    /// Grants a lease.
    LeaseGrant {
        /// The lease id, chosen by the proposer. Not 0.
        id: LeaseId,
        /// The requested TTL.
        ttl_ms: i64,
    },
    /// Revokes a lease and deletes its keys.
    LeaseRevoke {
        /// The lease id.
        id: LeaseId,
    },
    /// Checkpoints the remaining TTLs of leases, for the next leader. 0 is the full TTL. Unknown leases are skipped.
    LeaseCheckpoint {
        /// Leases and their remaining TTL in milliseconds.
        remaining: Vec<(LeaseId, i64)>,
    },
    /// Raises an alarm.
    AlarmOn(Alarm),
    /// Disarms an alarm.
    AlarmOff(Alarm),
    /// No operation: the first entry of a new leader.
    Nothing,
}

impl Command {
    /// A client's command.
    pub fn client(op: Op) -> Self {
        Self { origin: Origin::Client, op }
    }

    /// A node's command.
    pub fn node(op: Op) -> Self {
        Self { origin: Origin::Node, op }
    }

    /// Checks that need no state. A command that fails here is refused without a log entry.
    pub fn check(&self) -> Result<(), Error> {
        match &self.op {
            Op::Put(put) => {
                put.check()?;
                self.check_writer(SpaceId::of(&put.key))
            }
            Op::Delete(delete) => {
                check_key(&delete.key)?;
                self.check_writer(SpaceId::of(&delete.key))
            }
            Op::Txn(txn) => {
                txn.check()?;
                if txn.is_read_only() { Ok(()) } else { self.check_writer(txn.space()?) }
            }
            Op::Compact { space, .. } => self.check_writer(*space),
            // Only a leader proposes these; clients have no such request.
            Op::LeaseCheckpoint { .. } | Op::AutoCompact { .. } => self.check_writer(SpaceId::System),
            Op::LeaseGrant { .. }
            | Op::LeaseRevoke { .. }
            | Op::AlarmOn(_)
            | Op::AlarmOff(_)
            | Op::Nothing => Ok(()),
        }
    }

    fn check_writer(&self, space: SpaceId) -> Result<(), Error> {
        match (space, self.origin) {
            (SpaceId::System, Origin::Client) => Err(Error::PermissionDenied),
            (SpaceId::System, Origin::Node) | (SpaceId::User, _) => Ok(()),
        }
    }
}

fn check_key(key: &[u8]) -> Result<(), Error> {
    if key.is_empty() { Err(Error::EmptyKey) } else { Ok(()) }
}

/// The keys that a list of operations may put, and the ranges it may delete; refuses a key changed twice.
///
/// The rule is etcd's, in its order: deletions may overlap each other; a put may not overlap a deletion of the same
/// list or of an earlier nested transaction, nor another put, except one in the other branch of the same nested
/// transaction. A nested put and a *later* nested deletion of the same key pass; both are applied, in order, at one
/// revision. So do a put and a deletion "from this key on" (`range_end` of one zero byte): etcd compares with that end
/// as a key, which no key precedes.
fn changed_by(ops: &[TxnOp]) -> Result<(BTreeSet<&[u8]>, Deletions), Error> {
    let mut deleted = Deletions::default();
    for op in ops {
        if let TxnOp::Delete(delete) = op {
            deleted.insert(&delete.range());
        }
    }
    let mut puts: BTreeSet<&[u8]> = BTreeSet::new();
    for op in ops {
        let TxnOp::Txn(inner) = op else { continue };
        let (then_puts, then_deleted) = changed_by(&inner.success)?;
        let (else_puts, else_deleted) = changed_by(&inner.failure)?;
        for key in then_puts.union(&else_puts) {
            if puts.contains(key) || deleted.contains(key) {
                return Err(Error::DuplicateKey);
            }
        }
        puts.extend(then_puts);
        puts.extend(else_puts);
        deleted.extend(then_deleted);
        deleted.extend(else_deleted);
    }
    for op in ops {
        let TxnOp::Put(put) = op else { continue };
        if deleted.contains(&put.key) || !puts.insert(&put.key) {
            return Err(Error::DuplicateKey);
        }
    }
    Ok((puts, deleted))
}

/// A set of keys as disjoint intervals, so that thousands of deletions against thousands of puts stay cheap.
#[derive(Default)]
struct Deletions {
    /// Start to end (exclusive). Invariant: disjoint and not adjacent.
    intervals: BTreeMap<Bytes, Bytes>,
}

impl Deletions {
    fn insert(&mut self, range: &KeyRange) {
        if range.is_empty() {
            return;
        }
        let end = match &range.end {
            RangeEnd::Single => {
                let mut next = range.start.to_vec();
                next.push(0);
                Bytes::from(next)
            }
            RangeEnd::Before(end) => end.clone(),
            RangeEnd::Open => return,
        };
        self.insert_interval(range.start.clone(), end);
    }

    fn insert_interval(&mut self, mut start: Bytes, mut end: Bytes) {
        loop {
            // Only the last interval that starts at or before `end` can still overlap.
            let candidate = self.intervals.range(..=end.clone()).next_back();
            let Some((other_start, other_end)) = candidate else { break };
            if *other_end < start {
                break;
            }
            let (other_start, other_end) = (other_start.clone(), other_end.clone());
            self.intervals.remove(&other_start);
            start = start.min(other_start);
            end = end.max(other_end);
        }
        self.intervals.insert(start, end);
    }

    fn extend(&mut self, other: Self) {
        for (start, end) in other.intervals {
            self.insert_interval(start, end);
        }
    }

    fn contains(&self, key: &[u8]) -> bool {
        use std::ops::Bound::{Included, Unbounded};
        let before = self.intervals.range::<[u8], _>((Unbounded, Included(key))).next_back();
        before.is_some_and(|(_, end)| key < &end[..])
    }
}

#[cfg(test)]
mod tests;
