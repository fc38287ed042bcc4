//! Replication messages between the followers and the leader of one partition.
//!
//! A driver packs many of these into one request (docs/decisions/0010-replication-over-fetch.md). Records travel
//! beside them as raw bytes and are not part of these types.

use moim_base::{BrokerId, LeaderEpoch, Offset};

use crate::types::{BrokerEpoch, DirectoryId};

/// The sender of a replication message: node, broker epoch and data directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sender {
    /// The node id.
    pub node: BrokerId,
    /// The broker epoch of the sending run.
    pub epoch: BrokerEpoch,
    /// The data directory of the sender.
    pub directory: DirectoryId,
}

/// A follower's fetch: it requests the next records and states the follower's log positions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// The follower.
    pub from: Sender,
    /// The leader epoch that the follower believes is current.
    pub leader_epoch: LeaderEpoch,
    /// The mod revision of the partition record that the follower acts on. A replica that was dropped since then
    /// describes a log that no longer exists.
    pub record: i64,
    /// The follower's log end offset: the fetch offset.
    pub offset: Offset,
    /// The newest leader epoch in the follower's log. Together with `offset` it identifies the log's content.
    pub last_epoch: Option<LeaderEpoch>,
    /// The written offset: everything below survives a process crash.
    pub written: Offset,
    /// The durable offset: everything below survives a machine crash.
    pub durable: Offset,
    /// The follower's log start offset: nothing below it is left.
    pub log_start: Offset,
    /// Compaction of other replicas below this offset is harmless to the follower's log: it has the removed records,
    /// or was rebuilt since.
    pub cleaned_below: Offset,
}

/// A follower's disk has progressed. Only sent after the leader of this epoch has answered a fetch with records or
/// with nothing new, so that the reported log is known to be a prefix of the leader's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    /// The follower.
    pub from: Sender,
    /// The leader epoch that the follower believes is current.
    pub leader_epoch: LeaderEpoch,
    /// The mod revision of the partition record that the follower acts on.
    pub record: i64,
    /// The written offset: everything below survives a process crash.
    pub written: Offset,
    /// The durable offset: everything below survives a machine crash.
    pub durable: Offset,
    /// The follower's log start offset: nothing below it is left.
    pub log_start: Offset,
}

/// A leader's answer to a fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Records from the fetch offset; empty if the follower has caught up.
    Records {
        /// The leader's high watermark at the time of the read.
        high_watermark: Offset,
        /// The leader's log start offset.
        log_start: Offset,
        /// The upper bound of the records in this answer.
        log_end: Offset,
    },
    /// The follower's log is not a prefix of the leader's. Carries the greatest epoch that both may share and its end
    /// offset on the leader. Without an epoch, the logs share nothing at or past `end`.
    Diverging {
        /// The leader's greatest epoch at or below the follower's newest epoch.
        epoch: Option<LeaderEpoch>,
        /// The end offset of that epoch on the leader.
        end: Offset,
    },
    /// The follower's log ends below the leader's log start, or is empty and starts inside a batch.
    OutOfRange {
        /// The offset to start from: the base offset of the leader's first needed batch, not above its log start.
        log_start: Offset,
    },
    /// Compaction has removed tombstones or transaction markers that the follower may not have seen.
    Cleaned {
        /// Tombstones and markers may be missing below this offset.
        below: Offset,
        /// The offset to start from if the follower must be rebuilt.
        log_start: Offset,
    },
}

/// Why a leader refuses a fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The follower's leader epoch is older than the leader's.
    #[error("FENCED_LEADER_EPOCH: the leadership is {0}")]
    FencedEpoch(LeaderEpoch),
    /// The follower's leader epoch is newer than the leader's: the leader has missed a record.
    #[error("UNKNOWN_LEADER_EPOCH: the leadership is {0}")]
    UnknownEpoch(LeaderEpoch),
    /// This node does not lead the partition.
    #[error("NOT_LEADER_OR_FOLLOWER")]
    NotLeader,
    /// The sender is not a replica of this partition.
    #[error("UNKNOWN_TOPIC_OR_PARTITION: not a replica")]
    NotReplica,
    /// A newer run of the follower is known.
    #[error("STALE_BROKER_EPOCH")]
    StaleBroker,
}
