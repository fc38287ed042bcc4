//! Errors of the coordination service, with the gRPC code and the text that etcd clients match on.
//!
//! Invariant: [`CoordError::Timeout`] is returned whenever a change may still be applied; every other error means that
//! nothing was changed.

use moim_raft::GroupError;

use crate::error::{Code, Error};

/// Why a request failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CoordError {
    /// The state machine refused the command.
    #[error(transparent)]
    Refused(#[from] Error),
    /// There was no leader until the request timed out.
    #[error("etcdserver: no leader")]
    NoLeader,
    /// The request timed out. A change may or may not be applied.
    #[error("etcdserver: request timed out")]
    Timeout,
    /// The leader changed during a request that only a leader can answer.
    #[error("etcdserver: leader changed")]
    LeaderChanged,
    /// The request queue of this node is full.
    #[error("etcdserver: too many requests")]
    TooManyRequests,
    /// The request needs the leader, and this node was asked to serve it itself.
    #[error("etcdserver: not leader")]
    NotLeader,
    /// Leadership cannot be transferred to this member.
    #[error("etcdserver: bad leader transferee")]
    BadLeaderTransferee,
    /// The member does not exist.
    #[error("etcdserver: member not found")]
    MemberNotFound,
    /// A member of this id or address exists.
    #[error("etcdserver: Peer URLs already exists")]
    MemberExists,
    /// The member is already a voter.
    #[error("etcdserver: can only promote a learner member")]
    NotLearner,
    /// The learner has not caught up.
    #[error("etcdserver: can only promote a learner member which is in sync with leader")]
    LearnerNotReady,
    /// The change would leave too few members, or another membership change is in progress.
    #[error("etcdserver: unhealthy cluster")]
    UnhealthyCluster,
    /// The last member cannot be removed.
    #[error("etcdserver: re-configuration failed due to not enough started members")]
    NotEnoughMembers,
    /// The node is stopping, or its coordination service has failed.
    #[error("etcdserver: server stopped")]
    Stopped,
}

impl CoordError {
    /// The gRPC status code.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(error) => error.code(),
            Self::NoLeader | Self::Timeout | Self::LeaderChanged | Self::UnhealthyCluster | Self::Stopped => {
                Code::Unavailable
            }
            Self::TooManyRequests => Code::ResourceExhausted,
            Self::NotLeader
            | Self::BadLeaderTransferee
            | Self::MemberExists
            | Self::NotLearner
            | Self::LearnerNotReady
            | Self::NotEnoughMembers => Code::FailedPrecondition,
            Self::MemberNotFound => Code::NotFound,
        }
    }

    /// The error text of the gRPC status.
    pub fn message(&self) -> String {
        self.to_string()
    }

    /// True if the change may still be applied.
    pub fn is_unknown(&self) -> bool {
        *self == Self::Timeout
    }

    /// Maps a Raft group's refusal of a read or of a membership change.
    pub(super) fn of_group(error: GroupError) -> Self {
        match error {
            GroupError::NotLeader { .. } => Self::NotLeader,
            GroupError::Unknown | GroupError::NoQuorum(_) => Self::Timeout,
            GroupError::TooLarge { .. } => Self::Refused(Error::RequestTooLarge),
            GroupError::Full => Self::Refused(Error::NoSpace),
            GroupError::Refused(_) => Self::UnhealthyCluster,
            GroupError::Stopped(_) => Self::Stopped,
        }
    }
}
