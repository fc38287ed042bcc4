//! Errors of etcd calls, and whether the call can have taken effect.

use moim_wire_grpc::{Code, Status};

/// etcd's error of a member without a leader. It is returned before anything is proposed.
pub(super) const NO_LEADER: &str = "etcdserver: no leader";

/// A failed call.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EtcdError {
    /// A server responded with an error status.
    #[error("{}", .0.message)]
    Refused(Status),
    /// No server is reachable: the request was never sent.
    #[error("no server can be reached: {0}")]
    Unreachable(String),
    /// The request was sent, and no response arrived.
    #[error("no answer: {0}")]
    Unknown(String),
}

impl EtcdError {
    /// True if a write may have been applied although its call failed.
    ///
    /// Most server errors are returned before anything is proposed. Errors after a proposal cannot be
    /// identified by their code alone, so every error that is not known to precede the proposal counts as
    /// unknown.
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

    /// True if a read may be retried, on the same or on another server.
    pub(super) fn is_retryable_read(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Unknown(_) => true,
            Self::Refused(status) => matches!(status.code, Code::Unavailable | Code::DeadlineExceeded),
        }
    }

    /// gRPC status code of the server's response.
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
    fn only_errors_before_a_proposal_are_definite() {
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
