//! How a group is set up.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moim_journal::{Disk, Store};
use openraft::{Config, SnapshotPolicy, StepDownPolicy};

use crate::log::Place;
use crate::transport::{Router, Transport};
use crate::types::{GroupId, OpenError, VoterId};

/// The largest entry a group takes.
pub const MAX_ENTRY_BYTES: usize = 4 << 20;

/// What the groups of one process share.
#[derive(Clone)]
pub struct Host {
    /// The node's store: the logs are journals of it.
    pub store: Store,
    /// The disk the store is on: the snapshots are files of it.
    pub disk: Arc<dyn Disk>,
    /// The data directory.
    pub root: PathBuf,
    /// Takes in what peers and the disk thread say.
    pub router: Router,
    /// Carries what groups say to their peers.
    pub transport: Arc<dyn Transport>,
}

/// When a member thinks what about the others.
///
/// A follower stands for election when it has heard nothing for `election_max_ms` (until then the leader has its
/// lease) and then a random time between both limits, so between 650 and 800 ms by default; a pre-vote and a vote
/// later, two syncs at most, there is a leader: under a second. Nothing a member owes its peers in time waits for a
/// sync, except its vote; a disk that stalls for half a second starts no election.
#[derive(Clone, Copy, Debug)]
pub struct Timers {
    /// Between signs of life from the leader.
    pub heartbeat_ms: u64,
    /// Least patience of a candidate.
    pub election_min_ms: u64,
    /// Most, and the leader's lease.
    pub election_max_ms: u64,
}

impl Default for Timers {
    fn default() -> Self {
        Self { heartbeat_ms: 100, election_min_ms: 250, election_max_ms: 400 }
    }
}

/// How to open one group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// Which group.
    pub group: GroupId,
    /// Which member of it this is. Belongs to this data directory and to no other, ever.
    pub voter: VoterId,
    /// Of its journals' ids: never used twice.
    pub incarnation: u128,
    /// Its folder below the data directory.
    pub folder: String,
    /// What the durable sink calls its journals: this number and the next.
    pub tag: u64,
    /// Timers.
    pub timers: Timers,
    /// Entries between snapshots.
    pub snapshot_after: u64,
    /// Entries kept behind a snapshot, for members that are only a little late.
    pub keep_entries: u64,
    /// How long a proposal, a change or a read is waited for.
    pub proposal_timeout: Duration,
    /// Whether the member grants no vote, acknowledges no append and does not stand for election before
    /// [`crate::Group::confirm`]: its folder has to prove first that it is the newest state of this voter.
    pub unconfirmed: bool,
}

/// The journals of Raft groups: the first 32 bits of their incarnations.
const RAFT: u128 = 0x7261_6674 << 96;

/// Whether a journal with this incarnation holds the log or the votes of a Raft group.
pub fn is_raft_journal(incarnation: u128) -> bool {
    incarnation >> 96 == RAFT >> 96
}

impl GroupOptions {
    /// The usual settings.
    pub fn new(group: GroupId, voter: VoterId, tag: u64) -> Self {
        Self {
            group,
            voter,
            incarnation: RAFT | u128::from(group.0),
            folder: format!("raft/{group}"),
            tag,
            timers: Timers::default(),
            snapshot_after: 50_000,
            keep_entries: 5_000,
            proposal_timeout: Duration::from_secs(5),
            unconfirmed: false,
        }
    }

    pub(super) fn place(&self) -> Place {
        Place {
            group: self.group,
            voter: self.voter,
            incarnation: self.incarnation,
            folder: self.folder.clone(),
            tag: self.tag,
        }
    }

    pub(super) fn config(&self) -> Result<Config, OpenError> {
        let timers = self.timers;
        let config = Config {
            cluster_name: format!("group {}", self.group),
            heartbeat_interval: timers.heartbeat_ms,
            election_timeout_min: timers.election_min_ms,
            election_timeout_max: timers.election_max_ms,
            snapshot_policy: SnapshotPolicy::LogsSinceLast(self.snapshot_after),
            max_in_snapshot_log_to_keep: self.keep_entries,
            // The log reader bounds a request in bytes.
            max_payload_entries: 1_024,
            // A cut costs a sync: not for every entry.
            purge_batch_size: (self.keep_entries / 4).max(1),
            // A member cut off for a while must not depose a working leader when it comes back.
            enable_pre_vote: Some(true),
            // A leader that restarts has lost its state machine; only an election tells it what is committed.
            enable_leader_restore: Some(false),
            enable_elect: !self.unconfirmed,
            removed_leader_step_down: StepDownPolicy::After(timers.heartbeat_ms),
            backoff: "20ms 40ms 80ms ...500ms".to_owned(),
            ..Config::default()
        };
        config.validate().map_err(|error| OpenError::Settings { group: self.group, what: error.to_string() })
    }
}
