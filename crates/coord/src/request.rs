//! What can be asked: reads, and the commands that go into the Raft log.
//!
//! Owns the shape of requests and the checks that need no state ([`Command::check`]): a server runs them
//! before it proposes, and [`State::apply`](crate::State::apply) runs them again, because a log outlives the
//! version that wrote it. Numbers and flags mean what etcd's messages of the same name mean.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use crate::error::Error;
use crate::lease::LeaseId;
use crate::range::{KeyRange, RangeEnd, SpaceId};

/// The largest number of comparisons, or of operations in a branch, nested transactions included on the way down.
pub const MAX_TXN_OPS: usize = 128;
/// The largest encoded command a client may propose.
pub const MAX_REQUEST_BYTES: usize = 1_572_864;

/// How a range is sorted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SortOrder {
    /// By key; ascending when the target is not the key.
    #[default]
    None,
    /// Smallest first.
    Ascend,
    /// Largest first.
    Descend,
}

/// What a range is sorted by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SortTarget {
    /// The key.
    #[default]
    Key,
    /// The number of puts since the key appeared.
    Version,
    /// The revision at which the key appeared.
    Create,
    /// The revision of the last change.
    Mod,
    /// The value.
    Value,
}

/// A read of neighbouring keys.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RangeRequest {
    /// The first key.
    pub key: Bytes,
    /// Empty: that key alone; one zero byte: every key from there on; else the first key past the range.
    pub range_end: Bytes,
    /// At most this many entries; 0 is all.
    pub limit: i64,
    /// Read as of this revision; 0 or less is now.
    pub revision: i64,
    /// In which direction to sort.
    pub sort_order: SortOrder,
    /// What to sort by.
    pub sort_target: SortTarget,
    /// Leave the values out.
    pub keys_only: bool,
    /// Leave the entries out.
    pub count_only: bool,
    /// Only entries last changed at this revision or later; 0 is no bound, here and below.
    pub min_mod_revision: i64,
    /// Only entries last changed at this revision or earlier.
    pub max_mod_revision: i64,
    /// Only entries that appeared at this revision or later.
    pub min_create_revision: i64,
    /// Only entries that appeared at this revision or earlier.
    pub max_create_revision: i64,
}

impl RangeRequest {
    /// A read of one key as it is now.
    pub fn key(key: impl Into<Bytes>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }

    /// A read from a key to another as they are now.
    pub fn between(key: impl Into<Bytes>, range_end: impl Into<Bytes>) -> Self {
        Self { key: key.into(), range_end: range_end.into(), ..Self::default() }
    }

    /// The keys it means.
    pub fn range(&self) -> KeyRange {
        KeyRange::new(self.key.clone(), self.range_end.clone())
    }

    /// Checks what needs no state.
    pub fn check(&self) -> Result<(), Error> {
        check_key(&self.key)
    }
}

/// Gives a key a value.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PutRequest {
    /// The key.
    pub key: Bytes,
    /// What it holds from now on.
    pub value: Bytes,
    /// The lease that takes it away; 0 is none.
    pub lease: LeaseId,
    /// Answer with what the key held before.
    pub prev_kv: bool,
    /// Keep the value it has.
    pub ignore_value: bool,
    /// Keep the lease it has.
    pub ignore_lease: bool,
}

impl PutRequest {
    /// A put without a lease.
    pub fn new(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self { key: key.into(), value: value.into(), ..Self::default() }
    }

    /// Checks what needs no state.
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

/// Takes keys away.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeleteRequest {
    /// The first key.
    pub key: Bytes,
    /// As in [`RangeRequest::range_end`].
    pub range_end: Bytes,
    /// Answer with what the keys held.
    pub prev_kv: bool,
}

impl DeleteRequest {
    /// Takes one key away.
    pub fn key(key: impl Into<Bytes>) -> Self {
        Self { key: key.into(), ..Self::default() }
    }

    /// The keys it means.
    pub fn range(&self) -> KeyRange {
        KeyRange::new(self.key.clone(), self.range_end.clone())
    }
}

/// How the found and the given must relate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompareResult {
    /// Found is given.
    Equal,
    /// Found is more than given.
    Greater,
    /// Found is less than given.
    Less,
    /// Found is not given.
    NotEqual,
}

/// What of a key is compared, and with what. A key that does not exist has 0 everywhere and no value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CompareTarget {
    /// The number of puts since it appeared.
    Version(i64),
    /// The revision at which it appeared.
    Create(i64),
    /// The revision of its last change.
    Mod(i64),
    /// Its value. Never true of a key that does not exist.
    Value(Bytes),
    /// Its lease.
    Lease(LeaseId),
}

/// A condition on every key of a range.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Compare {
    /// The first key.
    pub key: Bytes,
    /// As in [`RangeRequest::range_end`].
    pub range_end: Bytes,
    /// What is compared.
    pub target: CompareTarget,
    /// How.
    pub result: CompareResult,
}

/// One step of a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TxnOp {
    /// A read; it sees the steps before it.
    Range(RangeRequest),
    /// A put.
    Put(PutRequest),
    /// A deletion.
    Delete(DeleteRequest),
    /// A transaction inside; its conditions look at the state before the outermost one.
    Txn(TxnRequest),
}

/// Conditions, and what to do when all hold or one does not. All changes happen at one revision.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TxnRequest {
    /// All must hold.
    pub compares: Vec<Compare>,
    /// Done when they do.
    pub success: Vec<TxnOp>,
    /// Done when they do not.
    pub failure: Vec<TxnOp>,
}

impl TxnRequest {
    /// Whether neither branch can change anything. Such a transaction needs no log entry.
    pub fn is_read_only(&self) -> bool {
        self.all_ops(&|op| match op {
            TxnOp::Range(_) => true,
            TxnOp::Put(_) | TxnOp::Delete(_) => false,
            TxnOp::Txn(inner) => inner.is_read_only(),
        })
    }

    /// Whether a branch puts anything: what a full store refuses.
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

    /// Checks what needs no state: sizes, empty keys, keys changed twice, the two spaces.
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

    /// The one space of all its keys; a transaction without keys is the user's.
    pub fn space(&self) -> Result<SpaceId, Error> {
        let mut found = None;
        self.find_space(&mut found)?;
        Ok(found.unwrap_or(SpaceId::User))
    }

    fn find_space(&self, found: &mut Option<SpaceId>) -> Result<(), Error> {
        self.compares.iter().try_for_each(|compare| see_space(found, &compare.key))?;
        for op in self.success.iter().chain(&self.failure) {
            match op {
                TxnOp::Range(range) => see_space(found, &range.key)?,
                TxnOp::Put(put) => see_space(found, &put.key)?,
                TxnOp::Delete(delete) => see_space(found, &delete.key)?,
                TxnOp::Txn(inner) => inner.find_space(found)?,
            }
        }
        Ok(())
    }
}

fn see_space(found: &mut Option<SpaceId>, key: &[u8]) -> Result<(), Error> {
    let space = SpaceId::of(key);
    if *found.get_or_insert(space) == space { Ok(()) } else { Err(Error::TxnAcrossSpaces) }
}

/// A kind of trouble that stops writes until an operator has dealt with it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum AlarmKind {
    /// A member has no room left: nothing may grow.
    NoSpace,
    /// Members disagree: nothing may be trusted.
    Corrupt,
}

/// An alarm and the member that raised it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Alarm {
    /// What is wrong.
    pub kind: AlarmKind,
    /// Where.
    pub member: u64,
}

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Anybody on the etcd port.
    Client,
    /// A node of the cluster.
    Node,
}

/// A change, as it goes into the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Command {
    /// Who asks.
    pub origin: Origin,
    /// For what.
    pub op: Op,
}

/// What a command does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Gives a key a value.
    Put(PutRequest),
    /// Takes keys away.
    Delete(DeleteRequest),
    /// Compares, then does.
    Txn(TxnRequest),
    /// Forgets history before a revision; an error when that is forgotten already or still to come.
    Compact {
        /// Of which space.
        space: SpaceId,
        /// The first revision that stays readable.
        revision: i64,
    },
    /// Forgets history as far as there is any: what the leader proposes by itself, possibly twice.
    AutoCompact {
        /// The first revision of the user's space that stays readable.
        user: i64,
        /// The same for the system keys.
        system: i64,
    },
    /// Makes a lease.
    LeaseGrant {
        /// Its name, chosen by the proposer. Not 0.
        id: LeaseId,
        /// How long it lives without being kept alive.
        ttl_ms: i64,
    },
    /// Ends a lease and its keys.
    LeaseRevoke {
        /// Its name.
        id: LeaseId,
    },
    /// Notes how long leases have left, for the next leader. 0 is the whole time. Unknown leases are passed over.
    LeaseCheckpoint {
        /// Leases and their rest in milliseconds.
        remaining: Vec<(LeaseId, i64)>,
    },
    /// Raises an alarm.
    AlarmOn(Alarm),
    /// Takes an alarm back.
    AlarmOff(Alarm),
    /// Nothing: what a new leader commits first.
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

    /// Checks what needs no state. What fails here is answered without a log entry.
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
            // What only a leader proposes has no client's form.
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
/// The rule is etcd's, in its order: deletions may overlap each other; a put may not meet a deletion of the
/// same list or of a nested transaction that came before, nor another put, except one in the other branch of
/// the same nested transaction. A nested put and a *later* nested deletion of the same key pass; both happen,
/// in order, at one revision. So do a put and a deletion "from this key on" (`range_end` of one zero byte): etcd
/// compares with that end as a key, before which nothing is.
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
    /// Start to end (exclusive). Invariant: disjoint and not touching.
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
            // The last interval that starts at or before our end is the only one that can still meet us.
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
