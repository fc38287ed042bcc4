//! Why an operation of a node failed: the kind, which decides the exit status of the process, and a message that an
//! operator can act on.

use std::fmt;
use std::io;

/// The kind of a failure. The command line maps each to one exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// A failure without a kind of its own.
    Error,
    /// The configuration is wrong.
    Usage,
    /// The data directory does not exist.
    NotFound,
    /// A safety rule or the system forbids it.
    NotAllowed,
    /// The address, the data directory or the place in the cluster is in use.
    Conflict,
}

/// A failed operation of a node.
#[derive(Debug)]
pub struct Failure {
    /// The kind of the failure.
    pub status: Status,
    /// What failed, and why.
    pub message: String,
    /// What the operator can do about it.
    pub hint: Option<String>,
}

/// The result of an operation of a node.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure of this kind.
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), hint: None }
    }

    /// A mistake in the configuration.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Status::Usage, message)
    }

    /// A failure without a kind of its own.
    pub(crate) fn error(message: impl Into<String>) -> Self {
        Self::new(Status::Error, message)
    }

    /// Adds what the operator can do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::error(error.to_string())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
