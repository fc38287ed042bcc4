//! When leases end: the leader's side of them.
//!
//! Deadlines are times of the leader's monotonic clock and never leave it. Renewals move a deadline and are
//! not in the log; ends are, as revocations; what is left of long leases is noted in the log from time to
//! time, so that a new leader does not give every lease its whole time again.
//!
//! Invariant: a lease never ends early. A new leader grants what may be left at most, plus one election
//! timeout for the time in which nobody could renew. A lease whose end was proposed is not renewed any more:
//! the proposal may already be on its way to commit.

use std::collections::{BTreeMap, BTreeSet};

use crate::lease::LeaseId;
use crate::request::{Command, Op};
use crate::state::State;

/// At most this many leases in one checkpoint command.
const CHECKPOINT_BATCH: usize = 1_000;

/// How a [`LeaseClock`] behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseClockConfig {
    /// How often what is left of a lease is noted in the log. Shorter leases are never noted.
    pub checkpoint_interval_ms: u64,
    /// How long after a proposed end it is proposed again, if the lease is still there.
    pub retry_ms: u64,
}

impl Default for LeaseClockConfig {
    fn default() -> Self {
        Self { checkpoint_interval_ms: 5 * 60 * 1_000, retry_ms: 3_000 }
    }
}

/// What came of a renewal. Confirm the leadership before answering with it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Renewal {
    /// It has its whole time again.
    Renewed {
        /// How long that is.
        ttl_ms: i64,
        /// Commit this before answering: the log still says that less is left.
        checkpoint: Option<Command>,
    },
    /// Its end was proposed: wait for that, then answer that it is gone.
    Ending,
    /// There is no such lease.
    NotFound,
}

#[derive(Debug)]
struct Timed {
    ttl_ms: i64,
    /// When it ends.
    deadline_ms: u64,
    /// When its end is proposed: the deadline, later for a repetition.
    propose_ms: u64,
    /// When what is left is to be noted next; `None` for leases too short for that.
    checkpoint_ms: Option<u64>,
    /// Whether the log says, or is about to say, that less than the whole time is left.
    is_noted: bool,
}

/// See the top of the file.
#[derive(Debug)]
pub struct LeaseClock {
    config: LeaseClockConfig,
    leases: BTreeMap<LeaseId, Timed>,
    /// Invariant: `(propose_ms, id)` of every lease.
    ends: BTreeSet<(u64, LeaseId)>,
    /// Invariant: `(checkpoint_ms, id)` of every lease that has one.
    checkpoints: BTreeSet<(u64, LeaseId)>,
}

impl LeaseClock {
    /// A clock that knows no leases: a follower's.
    pub fn new(config: LeaseClockConfig) -> Self {
        let (ends, checkpoints) = (BTreeSet::new(), BTreeSet::new());
        Self { config, leases: BTreeMap::new(), ends, checkpoints }
    }

    /// Takes over every lease of the state, which has everything that was committed.
    pub fn on_become_leader(&mut self, state: &State, now_ms: u64, election_timeout_ms: u64) {
        self.on_lose_leadership();
        for (id, lease) in state.leases() {
            let rest_ms = lease.rest_ms().max(0) as u64;
            self.insert(id, lease.ttl_ms, rest_ms.saturating_add(election_timeout_ms), now_ms);
            self.set_noted(id, lease.remaining_ms > 0);
        }
    }

    /// Forgets everything: the deadlines are another's business now.
    pub fn on_lose_leadership(&mut self) {
        self.leases.clear();
        self.ends.clear();
        self.checkpoints.clear();
    }

    /// A grant was applied.
    pub fn on_granted(&mut self, id: LeaseId, ttl_ms: i64, now_ms: u64) {
        self.remove(id);
        self.insert(id, ttl_ms, ttl_ms.max(0) as u64, now_ms);
    }

    /// A revocation was applied.
    pub fn on_revoked(&mut self, id: LeaseId) {
        self.remove(id);
    }

    /// A checkpoint was applied.
    pub fn on_checkpoint(&mut self, remaining: &[(LeaseId, i64)]) {
        for (id, remaining_ms) in remaining {
            self.set_noted(*id, *remaining_ms > 0);
        }
    }

    /// Gives a lease its whole time again.
    pub fn renew(&mut self, id: LeaseId, now_ms: u64) -> Renewal {
        let Some(lease) = self.leases.get(&id) else { return Renewal::NotFound };
        if lease.deadline_ms <= now_ms {
            return Renewal::Ending;
        }
        let (ttl_ms, is_noted) = (lease.ttl_ms, lease.is_noted);
        self.remove(id);
        self.insert(id, ttl_ms, ttl_ms.max(0) as u64, now_ms);
        self.set_noted(id, is_noted);
        let checkpoint = is_noted.then(|| Command::node(Op::LeaseCheckpoint { remaining: vec![(id, 0)] }));
        Renewal::Renewed { ttl_ms, checkpoint }
    }

    /// What a lease has left; `None` when it is not known.
    pub fn remaining_ms(&self, id: LeaseId, now_ms: u64) -> Option<u64> {
        self.leases.get(&id).map(|lease| lease.deadline_ms.saturating_sub(now_ms))
    }

    /// When to call [`LeaseClock::expired`] next.
    pub fn next_end_ms(&self) -> Option<u64> {
        self.ends.first().map(|(at, _)| *at)
    }

    /// When the first lease ends, whether or not its end was proposed.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn next_deadline_ms(&self) -> Option<u64> {
        self.leases.values().map(|lease| lease.deadline_ms).min()
    }

    /// The revocations to propose now, at most `max` of them.
    pub fn expired(&mut self, now_ms: u64, max: usize) -> Vec<Command> {
        let mut commands = Vec::new();
        while commands.len() < max
            && let Some((propose_ms, id)) = self.ends.first().copied()
            && propose_ms <= now_ms
        {
            self.ends.pop_first();
            let again_ms = now_ms.saturating_add(self.config.retry_ms.max(1));
            if let Some(lease) = self.leases.get_mut(&id) {
                lease.propose_ms = again_ms;
                self.ends.insert((again_ms, id));
                commands.push(Command::node(Op::LeaseRevoke { id }));
            }
        }
        commands
    }

    /// What to note in the log now, if it is time for any lease.
    pub fn checkpoint(&mut self, now_ms: u64) -> Option<Command> {
        let mut remaining = Vec::new();
        while remaining.len() < CHECKPOINT_BATCH
            && let Some((at, id)) = self.checkpoints.first().copied()
            && at <= now_ms
        {
            self.checkpoints.pop_first();
            let next_ms = now_ms.saturating_add(self.config.checkpoint_interval_ms.max(1));
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            let rest_ms = lease.deadline_ms.saturating_sub(now_ms);
            lease.checkpoint_ms = Some(next_ms);
            self.checkpoints.insert((next_ms, id));
            // A rest of 0 would say "the whole time", and such a lease is about to end anyway.
            if rest_ms > 0 {
                // From now on, not from when it is applied: a renewal in between must take the note back.
                lease.is_noted = true;
                remaining.push((id, i64::try_from(rest_ms).unwrap_or(i64::MAX)));
            }
        }
        (!remaining.is_empty()).then(|| Command::node(Op::LeaseCheckpoint { remaining }))
    }

    fn insert(&mut self, id: LeaseId, ttl_ms: i64, rest_ms: u64, now_ms: u64) {
        let deadline_ms = now_ms.saturating_add(rest_ms);
        let interval_ms = self.config.checkpoint_interval_ms;
        let checkpoint_ms = (rest_ms > interval_ms).then(|| now_ms.saturating_add(interval_ms));
        self.ends.insert((deadline_ms, id));
        self.checkpoints.extend(checkpoint_ms.map(|at| (at, id)));
        let timed = Timed { ttl_ms, deadline_ms, propose_ms: deadline_ms, checkpoint_ms, is_noted: false };
        self.leases.insert(id, timed);
    }

    fn remove(&mut self, id: LeaseId) {
        let Some(lease) = self.leases.remove(&id) else { return };
        self.ends.remove(&(lease.propose_ms, id));
        if let Some(at) = lease.checkpoint_ms {
            self.checkpoints.remove(&(at, id));
        }
    }

    fn set_noted(&mut self, id: LeaseId, is_noted: bool) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.is_noted = is_noted;
        }
    }
}

#[cfg(test)]
mod tests;
