//! The types of this crate's interface, and the type configuration of openraft.
//!
//! No other crate names openraft: every type that callers need is defined here. Terms are as in the Raft paper, at
//! most one leader per term, so a log position is (term, index).

use std::fmt;

use bytes::Bytes;
use openraft::impls::leader_id_std;
use openraft::type_config::alias;

/// The id of a group among those that share a process and a transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct GroupId(pub u64);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The id of a group member. Assigned once per data directory and never reused: a voter that returns with an empty
/// log could elect a second history.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct VoterId(pub u64);

impl fmt::Display for VoterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A member of a group: its voter id and its peer address.
#[derive(Clone, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct Member {
    /// The voter id.
    pub id: VoterId,
    /// The address, in the transport's format.
    pub address: String,
}

/// The result of a committed entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applied {
    /// The log index of the entry.
    pub index: u64,
    /// The state machine's reply.
    pub reply: Bytes,
}

/// The present leadership, as known to this member.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Leadership {
    /// The term.
    pub term: u64,
    /// Its leader, once known.
    pub leader: Option<VoterId>,
}

/// The Raft role of a member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Accepts proposals and replicates them.
    Leader,
    /// Votes and follows.
    Follower,
    /// Requests votes.
    Candidate,
    /// Follows without a vote.
    Learner,
    /// Stopped or stopping.
    Stopped,
}

/// The metrics of a group at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMetrics {
    /// This member.
    pub voter: VoterId,
    /// Its role.
    pub role: Role,
    /// Term and leader.
    pub leadership: Leadership,
    /// The last entry in the log.
    pub last_index: Option<u64>,
    /// The commit index.
    pub committed: Option<u64>,
    /// The last applied index.
    pub applied: Option<u64>,
    /// The last index included in the newest snapshot.
    pub snapshot: Option<u64>,
    /// The last purged index.
    pub purged: Option<u64>,
    /// The voters; both configurations during joint consensus.
    pub voters: Vec<Member>,
    /// The target voters of an unfinished membership change. The change stays in joint consensus until a caller
    /// requests its completion: a leader that dies between the two steps leaves the group in the joint configuration,
    /// in which each side needs a majority.
    pub unfinished: Option<Vec<VoterId>>,
    /// The learners.
    pub learners: Vec<Member>,
    /// On the leader: the match index of each member.
    pub matched: Vec<(VoterId, Option<u64>)>,
}

/// Why a group operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// Another member leads, or there is no leader. Nothing was changed.
    #[error("this member is not the leader")]
    NotLeader {
        /// The leader, if known.
        leader: Option<Member>,
    },
    /// The outcome is unknown: the answer did not arrive in time, or the leader changed meanwhile.
    #[error("the outcome is not known")]
    Unknown,
    /// No quorum confirmed the leader in time. Nothing was changed.
    #[error("no quorum: {0}")]
    NoQuorum(String),
    /// The entry exceeds the size limit of a group.
    #[error("an entry of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// The size of the entry.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The disk is full, including the reserve for Raft: reads continue, proposals do not.
    #[error("the disk is full")]
    Full,
    /// The change is not possible in the present state.
    #[error("refused: {0}")]
    Refused(String),
    /// The group has stopped on this node.
    #[error("the group has stopped: {0}")]
    Stopped(String),
}

/// Why a group could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The journal returned an error.
    #[error("group {group}: {source}")]
    Journal {
        /// The group.
        group: GroupId,
        /// The journal's error.
        source: moim_journal::JournalError,
    },
    /// The data on disk cannot be the log of a voter. The remedy: remove this voter from the group, and join with an
    /// empty directory under a new id.
    #[error("group {group} is damaged: {what}")]
    Damaged {
        /// The group.
        group: GroupId,
        /// The kind of damage.
        what: String,
    },
    /// The directory belongs to another voter.
    #[error("the log of group {group} belongs to voter {found}, not to voter {wanted}")]
    OtherVoter {
        /// The group.
        group: GroupId,
        /// The voter that the directory belongs to.
        found: VoterId,
        /// The requested voter.
        wanted: VoterId,
    },
    /// The disk returned an error.
    #[error("group {group}: {source}")]
    Io {
        /// The group.
        group: GroupId,
        /// The I/O error.
        source: std::io::Error,
    },
    /// The options contradict each other.
    #[error("group {group}: {what}")]
    Settings {
        /// The group.
        group: GroupId,
        /// The contradiction.
        what: String,
    },
}

/// The bytes of one proposal; opaque here.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Proposal(pub(crate) Bytes);

impl fmt::Debug for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

openraft::declare_raft_types!(
    /// The type configuration of openraft.
    pub(crate) Types:
        D = Proposal,
        R = Bytes,
        LeaderId = leader_id_std::LeaderId<u64, u64>,
        AsyncRuntime = crate::runtime::Runtime,
);

pub(crate) type LogId = alias::LogIdOf<Types>;
pub(crate) type Vote = alias::VoteOf<Types>;
pub(crate) type Entry = alias::EntryOf<Types>;
pub(crate) type Payload = alias::EntryPayloadOf<Types>;
pub(crate) type Membership = openraft::Membership<u64, openraft::BasicNode>;
pub(crate) type StoredMembership = alias::StoredMembershipOf<Types>;
pub(crate) type SnapshotMeta = alias::SnapshotMetaOf<Types>;
