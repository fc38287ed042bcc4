//! How the errors of the coordination core are told to clients: code and text as etcd's, because clients match both.

use moim_wire_grpc::{Code, Status};

use crate::engine::CoordError;
use crate::error::Error;

impl From<CoordError> for Status {
    fn from(error: CoordError) -> Self {
        // The core's codes are the protocol's numbers.
        let code = Code::from_number(error.code() as u8).unwrap_or(Code::Unknown);
        Self::new(code, error.message())
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        CoordError::Refused(error).into()
    }
}

/// The quorum is not there.
pub(super) fn no_leader() -> Status {
    CoordError::NoLeader.into()
}

/// The server ends what has no end of its own.
pub(super) fn stopped() -> Status {
    Status::new(Code::Unavailable, "etcdserver: server stopped")
}

/// The caller's time is over.
pub(super) fn deadline_exceeded() -> Status {
    Status::new(Code::DeadlineExceeded, "context deadline exceeded")
}

/// An error of a lock or an election. In etcd the server does these with a client of its own, and on the way through it
/// the code of a refusal gets lost: the text stays, the code is `Unknown`.
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

/// The core answered with something that is no answer to the question: a bug, told rather than hidden.
pub(super) fn mismatched() -> Status {
    Status::new(Code::Internal, "moim: the coordination core gave the answer of another request")
}
