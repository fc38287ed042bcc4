//! The words of this crate's interface, and the types openraft is told to use.
//!
//! Nothing outside this crate names openraft: what callers need has its own type here. Leaders are numbered as in
//! the Raft paper, one leader per term at most, so a log position is (term, index).

use std::fmt;

use bytes::Bytes;
use openraft::impls::leader_id_std;
use openraft::type_config::alias;

/// Which group, among those that share a process and a transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct GroupId(pub u64);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Which member of a group. Given out once per data directory and never used again: a voter that comes back with an
/// empty log can elect a second history.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct VoterId(pub u64);

impl fmt::Display for VoterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A member of a group: who, and where its peers reach it.
#[derive(Clone, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct Member {
    /// Who.
    pub id: VoterId,
    /// Where, in the transport's terms.
    pub address: String,
}

/// What a committed entry led to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applied {
    /// The entry's place in the log.
    pub index: u64,
    /// What the state machine answered.
    pub reply: Bytes,
}

/// Who leads, as this member knows.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Leadership {
    /// The term.
    pub term: u64,
    /// Its leader, once known.
    pub leader: Option<VoterId>,
}

/// A member's part in its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Takes proposals and replicates them.
    Leader,
    /// Votes and follows.
    Follower,
    /// Asks for votes.
    Candidate,
    /// Follows without a vote.
    Learner,
    /// Stopped, or about to.
    Stopped,
}

/// What a group knows about itself at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupMetrics {
    /// This member.
    pub voter: VoterId,
    /// Its part.
    pub role: Role,
    /// Term and leader.
    pub leadership: Leadership,
    /// The last entry in the log.
    pub last_index: Option<u64>,
    /// The last entry known to be committed.
    pub committed: Option<u64>,
    /// The last entry the state machine has seen.
    pub applied: Option<u64>,
    /// The last entry in the newest snapshot.
    pub snapshot: Option<u64>,
    /// The last entry that is no longer in the log.
    pub purged: Option<u64>,
    /// Members with a vote; both sides while a change is under way.
    pub voters: Vec<Member>,
    /// Who votes once the change under way is through. It stays under way until somebody asks for its end: a leader
    /// that dies between the two steps leaves the group with both sides, and each must have a majority.
    pub unfinished: Option<Vec<VoterId>>,
    /// Members without.
    pub learners: Vec<Member>,
    /// On the leader: the last entry each member is known to hold.
    pub matched: Vec<(VoterId, Option<u64>)>,
}

/// Why a group could not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// Another member leads, or nobody does. Nothing was changed.
    #[error("this member is not the leader")]
    NotLeader {
        /// The leader, where known.
        leader: Option<Member>,
    },
    /// It may or may not happen: the answer did not come in time, or the leader changed under way.
    #[error("the outcome is not known")]
    Unknown,
    /// No quorum confirmed the leader in time. Nothing was changed.
    #[error("no quorum: {0}")]
    NoQuorum(String),
    /// The entry is larger than a group takes.
    #[error("an entry of {bytes} bytes is over the limit of {limit}")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The disk is full, and so is what was kept free for Raft: reads go on, proposals do not.
    #[error("the disk is full")]
    Full,
    /// The change cannot be made as things stand.
    #[error("refused: {0}")]
    Refused(String),
    /// The group has stopped here.
    #[error("the group has stopped: {0}")]
    Stopped(String),
}

/// Why a group could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The journal refused.
    #[error("group {group}: {source}")]
    Journal {
        /// Which group.
        group: GroupId,
        /// Why.
        source: moim_journal::JournalError,
    },
    /// What is on disk cannot be the log of a voter. The cure is to remove this voter from the group and to join with
    /// an empty folder under a new id.
    #[error("group {group} is damaged: {what}")]
    Damaged {
        /// Which group.
        group: GroupId,
        /// How.
        what: String,
    },
    /// The folder belongs to another voter.
    #[error("the log of group {group} belongs to voter {found}, not to voter {wanted}")]
    OtherVoter {
        /// Which group.
        group: GroupId,
        /// The voter in the folder.
        found: VoterId,
        /// The voter asked for.
        wanted: VoterId,
    },
    /// The disk refused.
    #[error("group {group}: {source}")]
    Io {
        /// Which group.
        group: GroupId,
        /// Why.
        source: std::io::Error,
    },
    /// The settings contradict each other.
    #[error("group {group}: {what}")]
    Settings {
        /// Which group.
        group: GroupId,
        /// How.
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
    /// What openraft is told to use.
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
