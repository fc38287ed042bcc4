//! What followers and leaders tell each other about one partition.
//!
//! A driver puts many of these into one request (docs/decisions/0010-replication-over-fetch.md); records travel beside
//! them as the bytes they are and are no part of these types.

use moim_base::{BrokerId, LeaderEpoch, Offset};

use crate::types::{BrokerEpoch, DirectoryId};

/// Who asks, and in which run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sender {
    /// Which node.
    pub node: BrokerId,
    /// In which run.
    pub epoch: BrokerEpoch,
    /// On which data directory.
    pub directory: DirectoryId,
}

/// A follower wants what comes next, and says what it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fetch {
    /// Who asks.
    pub from: Sender,
    /// The leadership it believes in.
    pub leader_epoch: LeaderEpoch,
    /// The revision of the record it acts on: a copy that was dropped since speaks of a log that is gone.
    pub record: i64,
    /// Its log end: what it wants next.
    pub offset: Offset,
    /// The newest epoch in its log; with `offset` it names its log's content.
    pub last_epoch: Option<LeaderEpoch>,
    /// Everything below survives a crash of its process.
    pub written: Offset,
    /// Everything below survives a crash of its machine.
    pub durable: Offset,
    /// Where its log starts: what lies below is gone from it.
    pub log_start: Offset,
    /// Compaction of other replicas up to here is no harm to its log: it has what was removed, or began anew since.
    pub cleaned_below: Offset,
}

/// A follower's disk has got further. Only sent after the leader of this epoch has answered with records or with
/// nothing new, so that the log it speaks of is known to be the leader's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    /// Who reports.
    pub from: Sender,
    /// The leadership it believes in.
    pub leader_epoch: LeaderEpoch,
    /// The revision of the record it acts on.
    pub record: i64,
    /// Everything below survives a crash of its process.
    pub written: Offset,
    /// Everything below survives a crash of its machine.
    pub durable: Offset,
    /// Where its log starts: what lies below is gone from it.
    pub log_start: Offset,
}

/// What a leader answers to a fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Records from the offset asked for; none yet when the follower has all.
    Records {
        /// The leader's high watermark when it read.
        high_watermark: Offset,
        /// The leader's log start.
        log_start: Offset,
        /// Where the records it sends end at most.
        log_end: Offset,
    },
    /// The follower's log is not a beginning of the leader's: the greatest epoch they may share and where the leader
    /// has its end. Without an epoch they share nothing at or past `end`.
    Diverging {
        /// The greatest epoch of the leader at or below the follower's newest.
        epoch: Option<LeaderEpoch>,
        /// Where it ends on the leader.
        end: Offset,
    },
    /// The follower ends before the leader's log starts, or is empty and begins inside of a batch.
    OutOfRange {
        /// Where to begin: the base of the leader's first batch that is needed, not above its log start.
        log_start: Offset,
    },
    /// Compaction has removed tombstones or markers that the follower may not have seen.
    Cleaned {
        /// They may be missing below this offset.
        below: Offset,
        /// Where a follower begins that has to be rebuilt.
        log_start: Offset,
    },
}

/// Why a leader does not answer a fetch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The follower is behind: there is a newer leadership.
    #[error("FENCED_LEADER_EPOCH: the leadership is {0}")]
    FencedEpoch(LeaderEpoch),
    /// The follower is ahead: this leader has missed something.
    #[error("UNKNOWN_LEADER_EPOCH: the leadership is {0}")]
    UnknownEpoch(LeaderEpoch),
    /// Not a leader.
    #[error("NOT_LEADER_OR_FOLLOWER")]
    NotLeader,
    /// Not a replica of this partition.
    #[error("UNKNOWN_TOPIC_OR_PARTITION: not a replica")]
    NotReplica,
    /// A newer run of the follower has been heard of.
    #[error("STALE_BROKER_EPOCH")]
    StaleBroker,
}
