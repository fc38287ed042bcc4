//! Errors of the coordination service as gRPC status: code and text are etcd's, because clients match both.

use moim_wire_grpc::{Code, Status};

use crate::engine::CoordError;
use crate::error::Error;

impl From<CoordError> for Status {
    fn from(error: CoordError) -> Self {
        // The codes are the protocol's numbers.
        let code = Code::from_number(error.code() as u8).unwrap_or(Code::Unknown);
        Self::new(code, error.message())
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        CoordError::Refused(error).into()
    }
}

/// There is no quorum.
pub(super) fn no_leader() -> Status {
    CoordError::NoLeader.into()
}

/// The server stops a stream that has no end of its own.
pub(super) fn stopped() -> Status {
    Status::new(Code::Unavailable, "etcdserver: server stopped")
}

/// The deadline of the call has passed.
pub(super) fn deadline_exceeded() -> Status {
    Status::new(Code::DeadlineExceeded, "context deadline exceeded")
}

/// An error of a lock or an election. etcd implements these with an internal client, which loses the code of a refusal:
/// the text stays, the code is `Unknown`.
pub(super) fn of_recipe(status: Status) -> Status {
    let code = match status.code {
        Code::InvalidArgument
        | Code::NotFound
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::OutOfRange
        | Code::DataLoss => Code::Unknown,
        code => code,
    };
    Status { code, ..status }
}

/// The reply does not match the request: a bug, reported rather than hidden.
pub(super) fn mismatched() -> Status {
    Status::new(Code::Internal, "moim: the coordination service replied to another request")
}
