//! Why the coordination core gave no answer, with the code and the text that etcd's clients match on.
//!
//! Invariant: [`CoordError::Timeout`] is the answer whenever a change may still happen; every other error means that
//! nothing was changed.

use moim_raft::GroupError;

use crate::error::{Code, Error};

/// Why there is no answer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CoordError {
    /// The state machine refused.
    #[error(transparent)]
    Refused(#[from] Error),
    /// Nobody led for as long as the request was waited for.
    #[error("etcdserver: no leader")]
    NoLeader,
    /// No answer in time. A change may or may not happen.
    #[error("etcdserver: request timed out")]
    Timeout,
    /// The leader changed while a request that only a leader can answer was under way.
    #[error("etcdserver: leader changed")]
    LeaderChanged,
    /// More is waiting than this node takes.
    #[error("etcdserver: too many requests")]
    TooManyRequests,
    /// Only a leader can do this, and this node was asked to do it itself.
    #[error("etcdserver: not leader")]
    NotLeader,
    /// Leadership cannot go there.
    #[error("etcdserver: bad leader transferee")]
    BadLeaderTransferee,
    /// No such member.
    #[error("etcdserver: member not found")]
    MemberNotFound,
    /// A member of this id or address exists.
    #[error("etcdserver: Peer URLs already exists")]
    MemberExists,
    /// A member that already votes.
    #[error("etcdserver: can only promote a learner member")]
    NotLearner,
    /// A learner that has not caught up.
    #[error("etcdserver: can only promote a learner member which is in sync with leader")]
    LearnerNotReady,
    /// The change would leave too few members, or another change is under way.
    #[error("etcdserver: unhealthy cluster")]
    UnhealthyCluster,
    /// The last member stays.
    #[error("etcdserver: re-configuration failed due to not enough started members")]
    NotEnoughMembers,
    /// The node stops, or its core has failed.
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

    /// The text that goes with the code.
    pub fn message(&self) -> String {
        self.to_string()
    }

    /// Whether a change may still happen.
    pub fn is_unknown(&self) -> bool {
        *self == Self::Timeout
    }

    /// What a group's refusal of a read or of a change of members means to a caller.
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
