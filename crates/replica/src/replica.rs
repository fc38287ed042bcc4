//! One replica of one partition on this node: leader, follower or idle, from the partition records it has seen.
//!
//! Partition records are the only source of roles, and only newer ones count. A record that names another run of this
//! node does not make it the leader: after a restart the replica waits until the controller writes a record that
//! names the present run, with a new leader epoch.
//!
//! The driver carries out the effects of one call, in order, before it makes the next call for the same partition.

use moim_base::{BrokerId, LeaderEpoch, Offset};

use crate::follower::{Follower, FollowerParams, FollowerTuning, ResetPolicy};
use crate::leader::{Leader, LeaderTuning, Outcome};
use crate::log::LogView;
use crate::machine::{Snapshot, SnapshotFetch};
use crate::message::{Answer, Fetch, Refusal, Report, Sender};
use crate::mutant::{Mutant, Mutants};
use crate::state::PartitionState;
use crate::transition::Change;
use crate::types::{PartitionId, Versioned};

/// An effect that the driver must carry out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Note in the log's epoch table that `epoch` begins at `start`, before any append.
    NoteEpoch {
        /// The new leader epoch.
        epoch: LeaderEpoch,
        /// The log end at its beginning.
        start: Offset,
    },
    /// The high watermark advanced: complete the acknowledgements and wake the fetches that waited for it.
    HighWatermark(Offset),
    /// The low watermark may have advanced: waiters for record deletion on the whole in-sync set must check again.
    LowWatermark,
    /// The in-sync set fell below the minimum: waiters for a commit get NOT_ENOUGH_REPLICAS_AFTER_APPEND.
    UnderMinIsr,
    /// The leadership ended: waiters for a commit get NOT_LEADER_OR_FOLLOWER.
    LeadershipEnded,
    /// Write a partition record, and report the outcome.
    Propose(Box<Proposal>),
    /// Read the partition record from the repository, linearizably, and pass it on.
    Refresh,
    /// Send a fetch to the leader.
    Fetch {
        /// The leader.
        to: BrokerId,
        /// Correlates the answer with this fetch.
        id: u64,
        /// The fetch.
        fetch: Fetch,
    },
    /// Report the follower's disk progress to the leader. Losing the report is harmless.
    Report {
        /// The leader.
        to: BrokerId,
        /// The report.
        report: Report,
    },
    /// Truncate the log, durably, then call `on_changed`.
    Truncate {
        /// The first removed offset.
        to: Offset,
    },
    /// Reset the log: drop it and start an empty one here, durably, then call `on_changed`.
    Reset {
        /// The start and end of the new log.
        start: Offset,
    },
    /// Note, durably, that compaction elsewhere removed tombstones and markers below this offset, then call
    /// `on_changed`.
    NoteCleaned {
        /// Tombstones and markers may be missing below this offset.
        below: Offset,
    },
    /// The same as `NoteCleaned`, then reset the log: it contains records that the removed tombstones and markers
    /// ended.
    Rebuild {
        /// Tombstones and markers may be missing below this offset.
        below: Offset,
        /// The start and end of the new log.
        start: Offset,
    },
    /// Advance the log start: records below it are no longer needed.
    SetStart {
        /// The new log start.
        start: Offset,
    },
    /// Request a chunk of the leader's snapshot.
    FetchSnapshot {
        /// The leader.
        to: BrokerId,
        /// The fetch.
        fetch: SnapshotFetch,
    },
    /// Install the snapshot and reset the log to its end and last epoch, durably, then call `on_changed`.
    Install(Snapshot),
    /// This node no longer has a replica of the partition: the local replica may be deleted.
    Drop,
}

/// A record change that a leader proposes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proposal {
    /// Correlates the outcome with this proposal.
    pub id: u64,
    /// The change and its conditions.
    pub change: Change,
}

/// The role of a replica.
#[derive(Debug)]
pub enum Role {
    /// No replica leads, or the record does not name this run.
    Idle,
    /// This replica leads.
    Leader(Box<Leader>),
    /// This replica follows.
    Follower(Follower),
}

/// One replica.
#[derive(Debug)]
pub struct Replica {
    me: Sender,
    partition: PartitionId,
    policy: ResetPolicy,
    leader_tuning: LeaderTuning,
    follower_tuning: FollowerTuning,
    mutants: Mutants,
    /// Invariant: the newest mod revision seen.
    revision: i64,
    role: Role,
    high_watermark: Offset,
    next_fetch: u64,
    /// See [`FollowerParams::rebuilding`].
    rebuilding: bool,
}

impl Replica {
    /// A replica that has seen no record yet. `high_watermark` is the value known before the restart, or 0.
    pub fn new(me: Sender, partition: PartitionId, policy: ResetPolicy, high_watermark: Offset) -> Self {
        Self {
            me,
            partition,
            policy,
            leader_tuning: LeaderTuning::default(),
            follower_tuning: FollowerTuning::default(),
            mutants: Mutants::default(),
            revision: 0,
            role: Role::Idle,
            high_watermark,
            next_fetch: 1,
            rebuilding: false,
        }
    }

    /// Replaces the default timeouts.
    #[must_use]
    pub fn tuned(mut self, leader: LeaderTuning, follower: FollowerTuning) -> Self {
        (self.leader_tuning, self.follower_tuning) = (leader, follower);
        self
    }

    /// Plants a bug.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn planted(mut self, mutants: Mutants) -> Self {
        self.mutants = mutants;
        self
    }

    /// The identity under which the replica sends.
    pub fn me(&self) -> Sender {
        self.me
    }

    /// The present role.
    pub fn role(&self) -> &Role {
        &self.role
    }

    /// The leader state, if this replica leads.
    pub fn leader(&mut self) -> Option<&mut Leader> {
        match &mut self.role {
            Role::Leader(leader) => Some(leader),
            Role::Idle | Role::Follower(_) => None,
        }
    }

    /// The follower state, if this replica follows.
    pub fn follower(&mut self) -> Option<&mut Follower> {
        match &mut self.role {
            Role::Follower(follower) => Some(follower),
            Role::Idle | Role::Leader(_) => None,
        }
    }

    /// The known high watermark: everything below is committed.
    pub fn high_watermark(&self) -> Offset {
        match &self.role {
            Role::Idle => self.high_watermark,
            Role::Leader(leader) => leader.high_watermark(),
            Role::Follower(follower) => follower.high_watermark(),
        }
    }

    /// A partition record arrived, from a watch or a read.
    pub fn on_record(
        &mut self,
        record: Versioned<PartitionState>,
        log: &dyn LogView,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        if record.revision <= self.revision {
            return;
        }
        self.revision = record.revision;
        let state = &record.value;
        let leads = state.is_led_by(self.me.node, self.me.epoch)
            || (self.mutants.has(Mutant::ReuseLeaderEpoch) && state.leader == Some(self.me.node));
        match (&mut self.role, state.leader) {
            (Role::Leader(leader), _) if leads && leader.epoch() == state.leader_epoch => {
                leader.on_record(record, now_ms, effects);
            }
            (Role::Follower(follower), Some(leader))
                if follower.leader() == (leader, state.leader_epoch)
                    && state.replicas.contains(&self.me.node) =>
            {
                follower.on_record(record.revision);
            }
            _ if !state.replicas.contains(&self.me.node) => {
                self.become_idle(effects);
                effects.push(Effect::Drop);
            }
            _ if leads => self.become_leader(record, log, now_ms, effects),
            (_, Some(leader)) if leader != self.me.node => {
                let leadership = (leader, state.leader_epoch);
                self.become_idle(effects);
                let how = FollowerParams {
                    me: self.me,
                    policy: self.policy,
                    tuning: self.follower_tuning,
                    mutants: self.mutants,
                    record: record.revision,
                    next_id: self.next_fetch,
                    rebuilding: self.rebuilding,
                };
                let hw = self.high_watermark;
                self.role =
                    Role::Follower(Follower::become_follower(how, leadership, log, hw, now_ms, effects));
            }
            _ => self.become_idle(effects),
        }
    }

    /// The partition was deleted, or its record cannot be decoded.
    pub fn become_idle(&mut self, effects: &mut Vec<Effect>) {
        self.high_watermark = self.high_watermark();
        match &self.role {
            Role::Idle => {}
            Role::Leader(_) => effects.push(Effect::LeadershipEnded),
            Role::Follower(follower) => {
                self.next_fetch = follower.next_id();
                self.rebuilding = follower.is_rebuilding();
            }
        }
        self.role = Role::Idle;
    }

    fn become_leader(
        &mut self,
        record: Versioned<PartitionState>,
        log: &dyn LogView,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        self.become_idle(effects);
        let mut leader = Leader::become_leader(
            self.me.node,
            self.partition,
            record,
            log,
            self.high_watermark,
            now_ms,
            effects,
        );
        leader.set_tuning(self.leader_tuning, self.mutants);
        self.role = Role::Leader(Box::new(leader));
    }

    /// A follower's fetch arrived.
    pub fn on_fetch(
        &mut self,
        fetch: &Fetch,
        log: &dyn LogView,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<Answer, Refusal> {
        self.leader().ok_or(Refusal::NotLeader)?.on_fetch(fetch, log, now_ms, effects)
    }

    /// A follower's report arrived.
    pub fn on_report(
        &mut self,
        report: &Report,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        self.leader().ok_or(Refusal::NotLeader)?.on_report(report, now_ms, effects)
    }

    /// The outcome of a proposal arrived.
    pub fn on_outcome(&mut self, id: u64, outcome: Outcome, now_ms: u64, effects: &mut Vec<Effect>) {
        if let Some(leader) = self.leader() {
            leader.on_outcome(id, outcome, now_ms, effects);
            self.revision = self.revision.max(leader_revision(&self.role));
        }
    }

    /// The local disk has progressed.
    pub fn on_durable(&mut self, log: &dyn LogView, effects: &mut Vec<Effect>) {
        match &mut self.role {
            Role::Idle => {}
            Role::Leader(leader) => leader.on_durable(log.written(), log.durable(), effects),
            Role::Follower(follower) => follower.on_durable(log, effects),
        }
    }

    /// Time passed. Called a few times a second.
    pub fn on_tick(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        match &mut self.role {
            Role::Idle => {}
            Role::Leader(leader) => leader.on_tick(now_ms, effects),
            Role::Follower(follower) => follower.on_tick(log, now_ms, effects),
        }
    }
}

fn leader_revision(role: &Role) -> i64 {
    match role {
        Role::Leader(leader) => leader.record().revision,
        Role::Idle | Role::Follower(_) => 0,
    }
}
