//! Why a call to an etcd gave no result, and what that says about its effect.

use moim_wire_grpc::{Code, Status};

/// What etcd says when the member asked knows no leader. It says so before it does anything.
pub(super) const NO_LEADER: &str = "etcdserver: no leader";

/// Why a call gave no result.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EtcdError {
    /// A server answered, and the answer is an error.
    #[error("{}", .0.message)]
    Refused(Status),
    /// No server could be reached: the request was never sent.
    #[error("no server can be reached: {0}")]
    Unreachable(String),
    /// The request was sent, and no answer came.
    #[error("no answer: {0}")]
    Unknown(String),
}

impl EtcdError {
    /// Whether a change may have happened although its call failed.
    ///
    /// Most errors of a server are said before anything is proposed. Those that can come after are not told
    /// apart by their code alone, so whatever is not known to come before counts as unknown.
    pub fn may_have_happened(&self) -> bool {
        match self {
            Self::Unreachable(_) => false,
            Self::Unknown(_) => true,
            Self::Refused(status) => match status.code {
                Code::Unavailable => status.message != NO_LEADER,
                Code::Canceled
                | Code::Unknown
                | Code::DeadlineExceeded
                | Code::Aborted
                | Code::Internal
                | Code::DataLoss => true,
                Code::Ok
                | Code::InvalidArgument
                | Code::NotFound
                | Code::AlreadyExists
                | Code::PermissionDenied
                | Code::ResourceExhausted
                | Code::FailedPrecondition
                | Code::OutOfRange
                | Code::Unimplemented
                | Code::Unauthenticated => false,
            },
        }
    }

    /// Whether a read may be asked again, here or elsewhere.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Unknown(_) => true,
            Self::Refused(status) => matches!(status.code, Code::Unavailable | Code::DeadlineExceeded),
        }
    }

    /// The code of a server's answer.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Refused(status) => Some(status.code),
            Self::Unreachable(_) | Self::Unknown(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_said_before_a_proposal_is_a_no() {
        let cases = [
            (Code::Unavailable, NO_LEADER, false),
            (Code::Unavailable, "etcdserver: request timed out", true),
            (Code::Unavailable, "etcdserver: leader changed", true),
            (Code::Unknown, "", true),
            (Code::DeadlineExceeded, "", true),
            (Code::InvalidArgument, "etcdserver: key is not provided", false),
            (Code::ResourceExhausted, "etcdserver: too many requests", false),
        ];
        for (code, message, expected) in cases {
            let error = EtcdError::Refused(Status::new(code, message));
            assert_eq!(error.may_have_happened(), expected, "{code:?} {message}");
        }
        assert!(EtcdError::Unknown(String::new()).may_have_happened());
        assert!(!EtcdError::Unreachable(String::new()).may_have_happened());
    }
}
