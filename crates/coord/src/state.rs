//! The state machine: the result of applying the commands of the Raft log.
//!
//! [`State::apply`] is deterministic. It depends only on the state and the command, applies a command completely or not
//! at all, and never fails: a refusal is a [`Reply`]. Reads ([`State::range`], [`State::read_txn`]) see the current
//! applied state; the caller ensures that it is recent enough.
//!
//! Must never: read a clock, iterate in an order that differs between nodes, or keep a slice of the log entry that a
//! command was decoded from (it would hold the whole entry in memory).

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::Error;
use crate::lease::{Lease, LeaseId, Leases, MAX_LEASE_TTL_MS, MIN_CLIENT_TTL_MS, MIN_NODE_TTL_MS};
use crate::range::SpaceId;
use crate::reply::{DeleteReply, HashReply, KeyValue, PutReply, RangeReply, Reply, TxnReply};
use crate::request::{
    Alarm, AlarmKind, Command, DeleteRequest, Op, Origin, PutRequest, RangeRequest, TxnRequest,
};
use crate::space::Space;
use crate::space::log::Change;
use crate::spill::{SpillFile, Value};

mod range;
mod txn;

pub(crate) use range::RangeReading;

/// Compacted changes reclaimed by each command: more than a command adds on average, far less than a pause.
const RECLAIM_PER_COMMAND: usize = 16;

/// Approximate memory of a lease, here and on the leader's lease clock.
const LEASE_BYTES: usize = 256;

/// Maximum number of active alarms: clients name the members, and could name any number.
const MAX_ALARMS: usize = 256;

/// See the module comment.
#[derive(Debug)]
pub struct State {
    pub(crate) applied: u64,
    pub(crate) user: Space,
    pub(crate) system: Space,
    pub(crate) leases: Leases,
    pub(crate) alarms: BTreeSet<Alarm>,
    /// Cloned by every snapshot in progress; its count tells whether one is.
    pub(crate) pin: Arc<()>,
}

impl Default for State {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    /// An empty state: both key spaces at revision 1, as in etcd.
    pub fn new() -> Self {
        Self {
            applied: 0,
            user: Space::new(),
            system: Space::new(),
            leases: Leases::default(),
            alarms: BTreeSet::new(),
            pin: Arc::new(()),
        }
    }

    /// An empty state with a spill file for superseded values.
    pub fn with_spill(spill: Option<SpillFile>) -> Self {
        let mut state = Self::new();
        state.set_spill(spill);
        state
    }

    /// Sets the spill file for values superseded from now on.
    pub(crate) fn set_spill(&mut self, spill: Option<SpillFile>) {
        self.user.set_spill(spill.clone());
        self.system.set_spill(spill);
    }

    /// The log index of the last applied command.
    pub fn applied_index(&self) -> u64 {
        self.applied
    }

    /// The current revision of a key space.
    pub fn revision(&self, space: SpaceId) -> i64 {
        self.space(space).revision()
    }

    /// The compact revision of a key space: the first readable one; -1 if it was never compacted.
    pub fn compact_revision(&self, space: SpaceId) -> i64 {
        self.space(space).compact_revision()
    }

    /// The number of live keys in a key space.
    pub fn live_keys(&self, space: SpaceId) -> usize {
        self.space(space).live_keys()
    }

    /// Approximate memory in bytes of keys, history and leases: compared with the quota.
    pub fn size_bytes(&self) -> usize {
        self.user.bytes() + self.system.bytes() + self.leases.by_id.len() * LEASE_BYTES
    }

    /// The active alarms, in order.
    pub fn alarms(&self) -> impl Iterator<Item = Alarm> {
        self.alarms.iter().copied()
    }

    /// A lease, if it exists.
    pub fn lease(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.by_id.get(&id)
    }

    /// Every lease, by id.
    pub fn leases(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        self.leases.by_id.iter().map(|(id, lease)| (*id, lease))
    }

    /// Applies a command. Each command is applied once, in log order; one log entry may hold several.
    pub fn apply(&mut self, index: u64, command: Command) -> Reply {
        assert!(index >= self.applied, "apply out of order: index {index} after {}", self.applied);
        self.applied = index;
        let reply = self.run(command).unwrap_or_else(Reply::Error);
        self.user.commit();
        self.system.commit();
        self.reclaim(RECLAIM_PER_COMMAND);
        reply
    }

    /// The client keys with their revisions, history and leases, as the initial state of another cluster, without the
    /// system keys and leases of the old one.
    #[must_use]
    pub fn for_new_cluster(mut self) -> Self {
        self.leases.by_id.retain(|_, lease| {
            lease.keys.retain(|(space, _)| *space == SpaceId::User);
            lease.origin == Origin::Client || !lease.keys.is_empty()
        });
        let Self { user, leases, .. } = self;
        Self { user, leases, ..Self::new() }
    }

    /// Reclaims up to `max` compacted changes in each key space; true if more are left.
    ///
    /// No reply depends on it. Every command reclaims a little; call this when the node is idle. Nothing is reclaimed
    /// while a snapshot is in progress.
    pub fn reclaim(&mut self, max: usize) -> bool {
        if Arc::strong_count(&self.pin) > 1 {
            return false;
        }
        let user = self.user.reclaim(max);
        let system = self.system.reclaim(max);
        user || system
    }

    fn run(&mut self, command: Command) -> Result<Reply, Error> {
        command.check()?;
        self.check_alarms(&command)?;
        let Command { origin, op } = command;
        match op {
            Op::Put(put) => self.put(put).map(Reply::Put),
            Op::Delete(delete) => Ok(Reply::Delete(self.delete(&delete))),
            Op::Txn(txn) => self.txn(txn).map(Reply::Txn),
            Op::Compact { space, revision } => self.compact(space, revision),
            Op::AutoCompact { user, system } => Ok(self.auto_compact(user, system)),
            Op::LeaseGrant { id, ttl_ms } => self.grant(origin, id, ttl_ms),
            Op::LeaseRevoke { id } => self.revoke(origin, id),
            Op::LeaseCheckpoint { remaining } => Ok(self.checkpoint(&remaining)),
            Op::AlarmOn(alarm) => Ok(self.alarm(alarm, true)),
            Op::AlarmOff(alarm) => Ok(self.alarm(alarm, false)),
            Op::Nothing => Ok(Reply::Done { revision: self.user.revision() }),
        }
    }

    /// NOSPACE refuses puts and lease grants of clients; CORRUPT refuses every client command.
    ///
    /// Nodes may still write system keys: without leaders and members in them space could not be freed, and an alarm
    /// that any client can raise must not stop the cluster.
    fn check_alarms(&self, command: &Command) -> Result<(), Error> {
        if self.alarms.is_empty() {
            return Ok(());
        }
        let on = |kind| self.alarms.iter().any(|alarm| alarm.kind == kind);
        let (changes, grows, space) = match &command.op {
            Op::Put(put) => (true, true, SpaceId::of(&put.key)),
            Op::Delete(delete) => (true, false, SpaceId::of(&delete.key)),
            Op::Txn(txn) => (true, txn.has_put(), txn.space()?),
            Op::LeaseGrant { .. } => {
                let space = if command.origin == Origin::Node { SpaceId::System } else { SpaceId::User };
                (true, true, space)
            }
            Op::LeaseRevoke { id } => {
                let is_node_lease = self.lease(*id).is_some_and(|lease| lease.origin == Origin::Node);
                (true, false, if is_node_lease { SpaceId::System } else { SpaceId::User })
            }
            Op::Compact { space, .. } => (true, false, *space),
            Op::AutoCompact { .. }
            | Op::LeaseCheckpoint { .. }
            | Op::AlarmOn(_)
            | Op::AlarmOff(_)
            | Op::Nothing => (false, false, SpaceId::User),
        };
        if space == SpaceId::System {
            return Ok(());
        }
        if changes && on(AlarmKind::Corrupt) {
            return Err(Error::Corrupt);
        }
        if grows && on(AlarmKind::NoSpace) {
            return Err(Error::NoSpace);
        }
        Ok(())
    }

    pub(crate) fn space(&self, space: SpaceId) -> &Space {
        match space {
            SpaceId::User => &self.user,
            SpaceId::System => &self.system,
        }
    }

    fn space_mut(&mut self, space: SpaceId) -> &mut Space {
        match space {
            SpaceId::User => &mut self.user,
            SpaceId::System => &mut self.system,
        }
    }

    /// Checks a put against the state, without the open group of changes.
    fn check_put(&self, put: &PutRequest) -> Result<(), Error> {
        if !put.lease.is_none() && !self.leases.by_id.contains_key(&put.lease) {
            return Err(Error::LeaseNotFound);
        }
        if put.ignore_value || put.ignore_lease {
            self.space(SpaceId::of(&put.key)).current(&put.key).ok_or(Error::KeyNotFound)?;
        }
        Ok(())
    }

    fn put(&mut self, put: PutRequest) -> Result<PutReply, Error> {
        self.check_put(&put)?;
        Ok(self.put_checked(put))
    }

    fn put_checked(&mut self, put: PutRequest) -> PutReply {
        let id = SpaceId::of(&put.key);
        let space = self.space_mut(id);
        let (mut prev_kv, mut value, mut lease) = (None, None, put.lease);
        if put.prev_kv || put.ignore_value || put.ignore_lease {
            let current = space.current(&put.key);
            prev_kv = current.filter(|_| put.prev_kv).map(Change::to_kv);
            if put.ignore_value {
                value = current.and_then(|current| current.version.value.as_ref()).map(Value::bytes);
            }
            if put.ignore_lease {
                lease = current.map_or(LeaseId::NONE, |current| current.version.lease);
            }
        }
        let value = value.unwrap_or_else(|| Bytes::copy_from_slice(&put.value));
        let (old_lease, key) = space.put(&put.key, value, lease);
        let revision = space.view_revision();
        self.leases.move_key(id, &key, old_lease, lease);
        PutReply { revision, prev_kv }
    }

    fn delete(&mut self, delete: &DeleteRequest) -> DeleteReply {
        let range = delete.range();
        let id = range.space();
        let space = self.space(id);
        let found: Vec<&Change> = space.scan(&range, space.view_revision()).collect();
        let prev_kvs: Vec<KeyValue> =
            if delete.prev_kv { found.iter().map(|change| change.to_kv()).collect() } else { Vec::new() };
        let keys: Vec<Bytes> = found.iter().map(|change| change.key.clone()).collect();
        for key in &keys {
            self.delete_key(id, key);
        }
        DeleteReply { revision: self.space(id).view_revision(), deleted: keys.len() as i64, prev_kvs }
    }

    fn delete_key(&mut self, id: SpaceId, key: &[u8]) {
        if let Some((lease, stored)) = self.space_mut(id).delete(key) {
            self.leases.move_key(id, &stored, lease, LeaseId::NONE);
        }
    }

    fn compact(&mut self, space: SpaceId, revision: i64) -> Result<Reply, Error> {
        let space = self.space_mut(space);
        if revision <= space.compact_revision() {
            return Err(Error::Compacted);
        }
        if revision > space.revision() {
            return Err(Error::FutureRevision);
        }
        space.compact(revision);
        Ok(Reply::Compacted { revision: space.revision() })
    }

    fn auto_compact(&mut self, user: i64, system: i64) -> Reply {
        for (space, revision) in [(&mut self.user, user), (&mut self.system, system)] {
            let revision = revision.min(space.revision());
            if revision > space.compact_revision() {
                space.compact(revision);
            }
        }
        Reply::Compacted { revision: self.user.revision() }
    }

    fn grant(&mut self, origin: Origin, id: LeaseId, ttl_ms: i64) -> Result<Reply, Error> {
        if id.is_none() {
            return Err(Error::LeaseNotFound);
        }
        if ttl_ms > MAX_LEASE_TTL_MS {
            return Err(Error::LeaseTtlTooLarge);
        }
        if self.leases.by_id.contains_key(&id) {
            return Err(Error::LeaseExists);
        }
        let min_ttl_ms = match origin {
            Origin::Client => MIN_CLIENT_TTL_MS,
            Origin::Node => MIN_NODE_TTL_MS,
        };
        let ttl_ms = ttl_ms.max(min_ttl_ms);
        let lease = Lease { ttl_ms, remaining_ms: 0, origin, keys: BTreeSet::new() };
        self.leases.by_id.insert(id, lease);
        Ok(Reply::LeaseGranted { revision: self.user.revision(), id, ttl_ms })
    }

    /// Revokes a lease; its keys are deleted at one revision of each key space it has keys in.
    fn revoke(&mut self, origin: Origin, id: LeaseId) -> Result<Reply, Error> {
        let lease = self.leases.by_id.get(&id).ok_or(Error::LeaseNotFound)?;
        if lease.origin == Origin::Node && origin == Origin::Client {
            return Err(Error::PermissionDenied);
        }
        let keys = self.leases.by_id.remove(&id).map(|lease| lease.keys).unwrap_or_default();
        for (space, key) in keys {
            self.space_mut(space).delete(&key);
        }
        Ok(Reply::LeaseRevoked { revision: self.user.view_revision() })
    }

    fn checkpoint(&mut self, remaining: &[(LeaseId, i64)]) -> Reply {
        for (id, remaining_ms) in remaining {
            if let Some(lease) = self.leases.by_id.get_mut(id) {
                lease.remaining_ms = (*remaining_ms).clamp(0, lease.ttl_ms);
            }
        }
        Reply::Done { revision: self.user.revision() }
    }

    fn alarm(&mut self, alarm: Alarm, on: bool) -> Reply {
        let changed = match on {
            true => self.alarms.len() < MAX_ALARMS && self.alarms.insert(alarm),
            false => self.alarms.remove(&alarm),
        };
        let changed = if changed { vec![alarm] } else { Vec::new() };
        Reply::Alarms { revision: self.user.revision(), changed }
    }

    /// Reads a key range.
    pub fn range(&self, request: &RangeRequest) -> Result<RangeReply, Error> {
        request.check()?;
        let space = SpaceId::of(&request.key);
        self.check_readable(space)?;
        range::range(self.space(space), request)
    }

    /// Begins a range read in steps, all at the current revision.
    pub(crate) fn begin_range<'a>(&self, request: &'a RangeRequest) -> Result<RangeReading<'a>, Error> {
        request.check()?;
        self.check_readable(SpaceId::of(&request.key))?;
        RangeReading::begin(self.space(SpaceId::of(&request.key)), request)
    }

    /// Reads the next step; true if there may be more keys.
    pub(crate) fn step_range(&self, reading: &mut RangeReading<'_>, max: usize) -> Result<bool, Error> {
        self.check_readable(reading.space())?;
        reading.step(self.space(reading.space()), max)
    }

    /// Runs a read-only transaction, without a log entry.
    ///
    /// # Panics
    /// If the transaction may write ([`TxnRequest::is_read_only`]).
    pub fn read_txn(&self, txn: &TxnRequest) -> Result<TxnReply, Error> {
        assert!(txn.is_read_only(), "read_txn called with a transaction that writes");
        txn.check()?;
        self.check_readable(txn.space()?)?;
        self.run_read_txn(txn)
    }

    fn check_readable(&self, space: SpaceId) -> Result<(), Error> {
        let corrupt = self.alarms.iter().any(|alarm| alarm.kind == AlarmKind::Corrupt);
        if corrupt && space == SpaceId::User { Err(Error::Corrupt) } else { Ok(()) }
    }

    /// Checksum of a key space at a revision; 0 is the current one.
    pub fn hash_kv(&self, space: SpaceId, revision: i64) -> Result<HashReply, Error> {
        let space = self.space(space);
        if revision > space.revision() {
            return Err(Error::FutureRevision);
        }
        if revision > 0 && revision < space.compact_revision() {
            return Err(Error::Compacted);
        }
        let hash_revision = if revision > 0 { revision } else { space.revision() };
        let mut hash = 0;
        let mut frame = Vec::new();
        for change in space.versions().filter(|change| change.version.revision <= hash_revision) {
            frame.clear();
            crate::snapshot::encode_change(&mut frame, change);
            hash = crc32c::crc32c_append(hash, &frame);
        }
        let compact_revision = space.compact_revision();
        Ok(HashReply { hash, hash_revision, compact_revision, revision: space.revision() })
    }
}

#[cfg(test)]
mod tests;
