//! One replica of one partition on this node: leader, follower or neither, from the records it has seen.
//!
//! Records are the only source of roles, and only newer ones count. A record that names this node in another run does
//! not make it a leader: after a restart it waits for the controller to write one that names the present run, and that
//! one has a new leader epoch.
//!
//! The driver carries out the effects of one call, in order, before it makes the next call for the same partition.

use moim_base::{BrokerId, LeaderEpoch, Offset};

use crate::follower::{Follower, FollowerTuning, Following, ResetPolicy};
use crate::leader::{Leader, LeaderTuning, Outcome};
use crate::log::LogView;
use crate::machine::{Snapshot, SnapshotFetch};
use crate::message::{Answer, Fetch, Refusal, Report, Sender};
use crate::mutant::{Mutant, Mutants};
use crate::state::PartitionState;
use crate::transition::Change;
use crate::types::{PartitionId, Versioned};

/// What the driver has to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Note in the log that `epoch` begins at `start`, before anything is appended.
    NoteEpoch {
        /// The new leadership.
        epoch: LeaderEpoch,
        /// The log end at its beginning.
        start: Offset,
    },
    /// The high watermark is here now: answer who waited, wake who fetches.
    HighWatermark(Offset),
    /// The logs of those in sync may all start later now: whoever waits for records to be gone everywhere looks again.
    LowWatermark,
    /// The in-sync set fell below the minimum: whoever waits gets NOT_ENOUGH_REPLICAS_AFTER_APPEND.
    UnderMinIsr,
    /// No longer the leader: whoever waits gets NOT_LEADER_OR_FOLLOWER.
    LeadershipEnded,
    /// Write a record, and say how it ended.
    Propose(Box<Proposal>),
    /// Read the record from the repository, linearizably, and pass it on.
    Refresh,
    /// Send a fetch to the leader.
    Fetch {
        /// The leader.
        to: BrokerId,
        /// To be given back with the answer.
        id: u64,
        /// The fetch.
        fetch: Fetch,
    },
    /// Tell the leader how far the disk is. Losing it is harmless.
    Report {
        /// The leader.
        to: BrokerId,
        /// The report.
        report: Report,
    },
    /// Cut the log, durably, then call `on_changed`.
    Truncate {
        /// The first offset that goes.
        to: Offset,
    },
    /// Drop the whole log and begin an empty one here, durably, then call `on_changed`.
    Reset {
        /// Its start and end.
        start: Offset,
    },
    /// Remember, durably, that compaction elsewhere removed tombstones and markers below this, then call `on_changed`.
    NoteCleaned {
        /// They may be missing below this offset.
        below: Offset,
    },
    /// The same, and after it drop the whole log and begin an empty one: it holds what those ended.
    Rebuild {
        /// They may be missing below this offset.
        below: Offset,
        /// The new log's start and end.
        start: Offset,
    },
    /// Records below this are no longer needed.
    SetStart {
        /// The new log start.
        start: Offset,
    },
    /// Send a fetch for a part of the leader's snapshot.
    FetchSnapshot {
        /// The leader.
        to: BrokerId,
        /// The fetch.
        fetch: SnapshotFetch,
    },
    /// Install the snapshot, begin an empty log at its end in its last epoch, durably, then call `on_changed`.
    Install(Snapshot),
    /// This node has no part in the partition any more: its copy may go.
    Drop,
}

/// A change a leader wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proposal {
    /// To be given back with the outcome.
    pub id: u64,
    /// The change and its conditions.
    pub change: Change,
}

/// What a replica is.
#[derive(Debug)]
pub enum Role {
    /// Nobody leads, or the record does not know this run.
    Idle,
    /// It leads.
    Leader(Box<Leader>),
    /// It follows.
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
    /// Invariant: the newest revision seen.
    revision: i64,
    role: Role,
    high_watermark: Offset,
    next_fetch: u64,
    /// See [`Following::rebuilding`].
    rebuilding: bool,
}

impl Replica {
    /// A replica that has seen no record yet. `high_watermark` is what was known before the restart, 0 if nothing.
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

    /// With other times than the usual ones.
    #[must_use]
    pub fn tuned(mut self, leader: LeaderTuning, follower: FollowerTuning) -> Self {
        (self.leader_tuning, self.follower_tuning) = (leader, follower);
        self
    }

    /// With a bug.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn planted(mut self, mutants: Mutants) -> Self {
        self.mutants = mutants;
        self
    }

    /// In whose name it acts.
    pub fn me(&self) -> Sender {
        self.me
    }

    /// What it is.
    pub fn role(&self) -> &Role {
        &self.role
    }

    /// The leader's side, if it leads.
    pub fn leader(&mut self) -> Option<&mut Leader> {
        match &mut self.role {
            Role::Leader(leader) => Some(leader),
            Role::Idle | Role::Follower(_) => None,
        }
    }

    /// The follower's side, if it follows.
    pub fn follower(&mut self) -> Option<&mut Follower> {
        match &mut self.role {
            Role::Follower(follower) => Some(follower),
            Role::Idle | Role::Leader(_) => None,
        }
    }

    /// Everything below is known to be committed.
    pub fn high_watermark(&self) -> Offset {
        match &self.role {
            Role::Idle => self.high_watermark,
            Role::Leader(leader) => leader.high_watermark(),
            Role::Follower(follower) => follower.high_watermark(),
        }
    }

    /// The newest record, from a watch or a read.
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
                let how = Following {
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

    /// The partition is deleted, or its record cannot be read.
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

    /// A follower's fetch came in.
    pub fn on_fetch(
        &mut self,
        fetch: &Fetch,
        log: &dyn LogView,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<Answer, Refusal> {
        self.leader().ok_or(Refusal::NotLeader)?.on_fetch(fetch, log, now_ms, effects)
    }

    /// A follower's report came in.
    pub fn on_report(
        &mut self,
        report: &Report,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        self.leader().ok_or(Refusal::NotLeader)?.on_report(report, now_ms, effects)
    }

    /// A proposal ended.
    pub fn on_outcome(&mut self, id: u64, outcome: Outcome, now_ms: u64, effects: &mut Vec<Effect>) {
        if let Some(leader) = self.leader() {
            leader.on_outcome(id, outcome, now_ms, effects);
            self.revision = self.revision.max(leader_revision(&self.role));
        }
    }

    /// Our disk has got further.
    pub fn on_durable(&mut self, log: &dyn LogView, effects: &mut Vec<Effect>) {
        match &mut self.role {
            Role::Idle => {}
            Role::Leader(leader) => leader.on_durable(log.written(), log.durable(), effects),
            Role::Follower(follower) => follower.on_durable(log, effects),
        }
    }

    /// Time passed. To be called a few times a second.
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
