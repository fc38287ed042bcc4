//! The options of a group.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moim_journal::{Disk, Store};
use openraft::{Config, SnapshotPolicy, StepDownPolicy};

use crate::log::Place;
use crate::transport::{Router, Transport};
use crate::types::{GroupId, OpenError, VoterId};

/// The maximum entry size of a group.
pub const MAX_ENTRY_BYTES: usize = 4 << 20;

/// The resources shared by the groups of one process.
#[derive(Clone)]
pub struct Host {
    /// The node's store: the logs are journals of it.
    pub store: Store,
    /// The disk of the store: the snapshots are files on it.
    pub disk: Arc<dyn Disk>,
    /// The data directory.
    pub root: PathBuf,
    /// Receives peer requests and durable reports.
    pub router: Router,
    /// Carries the groups' requests to their peers.
    pub transport: Arc<dyn Transport>,
}

/// Heartbeat and election timeouts.
///
/// A follower starts an election when it has received nothing for `election_max_ms` (until then the leader has its
/// lease) and then a random time between both limits, so between 650 and 800 ms by default. A pre-vote and a vote
/// later, two syncs at most, there is a leader: under a second. Nothing that a member owes its peers in time waits
/// for a sync, except its vote; a disk that stalls for half a second starts no election.
#[derive(Clone, Copy, Debug)]
pub struct Timers {
    /// The leader's heartbeat interval.
    pub heartbeat_ms: u64,
    /// The minimum election timeout.
    pub election_min_ms: u64,
    /// The maximum election timeout, and the leader's lease.
    pub election_max_ms: u64,
}

impl Default for Timers {
    fn default() -> Self {
        Self { heartbeat_ms: 100, election_min_ms: 250, election_max_ms: 400 }
    }
}

/// The options for opening one group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// The group id.
    pub group: GroupId,
    /// The voter id of this member. Belongs to this data directory and to no other, ever.
    pub voter: VoterId,
    /// The incarnation of its journal ids: never reused.
    pub incarnation: u128,
    /// Its directory below the data directory.
    pub folder: String,
    /// The durable sink's tag for its journals: this number and the next.
    pub tag: u64,
    /// Heartbeat and election timeouts.
    pub timers: Timers,
    /// The number of entries between snapshots.
    pub snapshot_after: u64,
    /// The number of entries kept behind a snapshot, for members that lag slightly.
    pub keep_entries: u64,
    /// The timeout of a proposal, a membership change or a read.
    pub proposal_timeout: Duration,
    /// True if the member must grant no vote, acknowledge no append and start no election before
    /// [`crate::Group::confirm`]: its directory must first prove that it is the newest state of this voter.
    pub unconfirmed: bool,
}

/// The journals of Raft groups: the first 32 bits of their incarnations.
const RAFT: u128 = 0x7261_6674 << 96;

/// True if a journal with this incarnation holds the log or the votes of a Raft group.
pub fn is_raft_journal(incarnation: u128) -> bool {
    incarnation >> 96 == RAFT >> 96
}

impl GroupOptions {
    /// The default options.
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
            // A purge costs a sync: not for every entry.
            purge_batch_size: (self.keep_entries / 4).max(1),
            // A member that was isolated for a while must not depose a working leader when it returns.
            enable_pre_vote: Some(true),
            // A restarted leader has lost its state machine; only an election establishes what is committed.
            enable_leader_restore: Some(false),
            enable_elect: !self.unconfirmed,
            removed_leader_step_down: StepDownPolicy::After(timers.heartbeat_ms),
            backoff: "20ms 40ms 80ms ...500ms".to_owned(),
            ..Config::default()
        };
        config.validate().map_err(|error| OpenError::Settings { group: self.group, what: error.to_string() })
    }
}
