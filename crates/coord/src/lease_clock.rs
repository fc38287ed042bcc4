//! Lease deadlines: the leader's part of leases.
//!
//! Deadlines are times of the leader's monotonic clock and never leave it. Keepalives move a deadline and are not in
//! the log; expiries are, as revocations. The remaining TTL of long leases is checkpointed in the log periodically, so
//! that a new leader does not give every lease its full TTL again.
//!
//! Invariant: a lease never expires early. A new leader grants the maximum that may remain, plus one election timeout
//! for the time in which no client could send a keepalive. A lease whose revocation was proposed is not renewed any
//! more: the proposal may already be about to commit.

use std::collections::{BTreeMap, BTreeSet};

use crate::lease::LeaseId;
use crate::request::{Command, Op};
use crate::state::State;

/// Maximum number of leases in one checkpoint command.
const CHECKPOINT_BATCH: usize = 1_000;

/// Settings of a [`LeaseClock`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseClockConfig {
    /// Interval of lease checkpoints. Shorter leases are never checkpointed.
    pub checkpoint_interval_ms: u64,
    /// Delay after which a proposed revocation is proposed again, if the lease still exists.
    pub retry_ms: u64,
}

impl Default for LeaseClockConfig {
    fn default() -> Self {
        Self { checkpoint_interval_ms: 5 * 60 * 1_000, retry_ms: 3_000 }
    }
}

/// Outcome of a renewal. Confirm leadership before replying with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Renewal {
    /// The lease has its full TTL again.
    Renewed {
        /// The full TTL.
        ttl_ms: i64,
        /// Commit this before replying: the log still holds a shorter remaining TTL.
        checkpoint: Option<Command>,
    },
    /// The revocation was proposed: wait until it is applied, then reply that the lease does not exist.
    Expiring,
    /// The lease does not exist.
    NotFound,
}

#[derive(Debug)]
struct LeaseDeadline {
    ttl_ms: i64,
    /// When the lease expires.
    deadline_ms: u64,
    /// When its revocation is proposed: the deadline, later for a repetition.
    propose_ms: u64,
    /// When its next checkpoint is due; `None` for leases too short for checkpoints.
    checkpoint_ms: Option<u64>,
    /// True if the log says, or is about to say, that less than the full TTL remains.
    is_checkpointed: bool,
}

/// See the module comment.
#[derive(Debug)]
pub struct LeaseClock {
    config: LeaseClockConfig,
    leases: BTreeMap<LeaseId, LeaseDeadline>,
    /// Invariant: `(propose_ms, id)` of every lease.
    expiries: BTreeSet<(u64, LeaseId)>,
    /// Invariant: `(checkpoint_ms, id)` of every lease that has one.
    checkpoints: BTreeSet<(u64, LeaseId)>,
}

impl LeaseClock {
    /// A clock without leases, as on a follower.
    pub fn new(config: LeaseClockConfig) -> Self {
        let (expiries, checkpoints) = (BTreeSet::new(), BTreeSet::new());
        Self { config, leases: BTreeMap::new(), expiries, checkpoints }
    }

    /// Takes over every lease of the state, which must contain every committed entry.
    pub fn on_become_leader(&mut self, state: &State, now_ms: u64, election_timeout_ms: u64) {
        self.on_lose_leadership();
        for (id, lease) in state.leases() {
            let remaining_ms = lease.remaining_ttl_ms().max(0) as u64;
            self.insert(id, lease.ttl_ms, remaining_ms.saturating_add(election_timeout_ms), now_ms);
            self.set_checkpointed(id, lease.remaining_ms > 0);
        }
    }

    /// Drops all deadlines: the new leader keeps its own.
    pub fn on_lose_leadership(&mut self) {
        self.leases.clear();
        self.expiries.clear();
        self.checkpoints.clear();
    }

    /// On an applied lease grant.
    pub fn on_granted(&mut self, id: LeaseId, ttl_ms: i64, now_ms: u64) {
        self.remove(id);
        self.insert(id, ttl_ms, ttl_ms.max(0) as u64, now_ms);
    }

    /// On an applied lease revocation.
    pub fn on_revoked(&mut self, id: LeaseId) {
        self.remove(id);
    }

    /// On an applied lease checkpoint.
    pub fn on_checkpoint(&mut self, remaining: &[(LeaseId, i64)]) {
        for (id, remaining_ms) in remaining {
            self.set_checkpointed(*id, *remaining_ms > 0);
        }
    }

    /// Renews a lease to its full TTL.
    pub fn renew(&mut self, id: LeaseId, now_ms: u64) -> Renewal {
        let Some(lease) = self.leases.get(&id) else { return Renewal::NotFound };
        if lease.deadline_ms <= now_ms {
            return Renewal::Expiring;
        }
        let (ttl_ms, is_checkpointed) = (lease.ttl_ms, lease.is_checkpointed);
        self.remove(id);
        self.insert(id, ttl_ms, ttl_ms.max(0) as u64, now_ms);
        self.set_checkpointed(id, is_checkpointed);
        let checkpoint =
            is_checkpointed.then(|| Command::node(Op::LeaseCheckpoint { remaining: vec![(id, 0)] }));
        Renewal::Renewed { ttl_ms, checkpoint }
    }

    /// The remaining TTL of a lease; `None` if it is unknown.
    pub fn remaining_ms(&self, id: LeaseId, now_ms: u64) -> Option<u64> {
        self.leases.get(&id).map(|lease| lease.deadline_ms.saturating_sub(now_ms))
    }

    /// When to call [`LeaseClock::expired`] next.
    pub fn next_expiry_ms(&self) -> Option<u64> {
        self.expiries.first().map(|(at, _)| *at)
    }

    /// The earliest deadline, whether or not its revocation was proposed.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn next_deadline_ms(&self) -> Option<u64> {
        self.leases.values().map(|lease| lease.deadline_ms).min()
    }

    /// The revocations to propose now, at most `max`.
    pub fn expired(&mut self, now_ms: u64, max: usize) -> Vec<Command> {
        let mut commands = Vec::new();
        while commands.len() < max
            && let Some((propose_ms, id)) = self.expiries.first().copied()
            && propose_ms <= now_ms
        {
            self.expiries.pop_first();
            let retry_at_ms = now_ms.saturating_add(self.config.retry_ms.max(1));
            if let Some(lease) = self.leases.get_mut(&id) {
                lease.propose_ms = retry_at_ms;
                self.expiries.insert((retry_at_ms, id));
                commands.push(Command::node(Op::LeaseRevoke { id }));
            }
        }
        commands
    }

    /// The lease checkpoint to propose now, if one is due.
    pub fn checkpoint(&mut self, now_ms: u64) -> Option<Command> {
        let mut remaining = Vec::new();
        while remaining.len() < CHECKPOINT_BATCH
            && let Some((at, id)) = self.checkpoints.first().copied()
            && at <= now_ms
        {
            self.checkpoints.pop_first();
            let next_ms = now_ms.saturating_add(self.config.checkpoint_interval_ms.max(1));
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            let remaining_ms = lease.deadline_ms.saturating_sub(now_ms);
            lease.checkpoint_ms = Some(next_ms);
            self.checkpoints.insert((next_ms, id));
            // A remaining TTL of 0 would mean the full TTL, and such a lease is about to expire anyway.
            if remaining_ms > 0 {
                // Set at the proposal, not at apply: a renewal in between must reset the checkpoint.
                lease.is_checkpointed = true;
                remaining.push((id, i64::try_from(remaining_ms).unwrap_or(i64::MAX)));
            }
        }
        (!remaining.is_empty()).then(|| Command::node(Op::LeaseCheckpoint { remaining }))
    }

    fn insert(&mut self, id: LeaseId, ttl_ms: i64, remaining_ms: u64, now_ms: u64) {
        let deadline_ms = now_ms.saturating_add(remaining_ms);
        let interval_ms = self.config.checkpoint_interval_ms;
        let checkpoint_ms = (remaining_ms > interval_ms).then(|| now_ms.saturating_add(interval_ms));
        self.expiries.insert((deadline_ms, id));
        self.checkpoints.extend(checkpoint_ms.map(|at| (at, id)));
        let deadline = LeaseDeadline {
            ttl_ms,
            deadline_ms,
            propose_ms: deadline_ms,
            checkpoint_ms,
            is_checkpointed: false,
        };
        self.leases.insert(id, deadline);
    }

    fn remove(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.remove(&id) else { return };
        self.expiries.remove(&(lease.propose_ms, id));
        if let Some(at) = lease.checkpoint_ms {
            self.checkpoints.remove(&(at, id));
        }
    }

    fn set_checkpointed(&mut self, id: LeaseId, is_checkpointed: bool) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.is_checkpointed = is_checkpointed;
        }
    }
}

#[cfg(test)]
mod tests;
