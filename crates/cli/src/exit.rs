//! The exit status of a command, one per kind of failure, and a message that the user can act on.
//!
//! Invariant: the process exits with one of the statuses below; scripts branch on them, so a number never changes its
//! meaning. A broken pipe on stdout is not a failure.

use std::fmt;
use std::io;
use std::process::ExitCode;

use crate::output::escape_control;

/// The exit status of a failure. Zero is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// A failure without a status of its own.
    Error = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// The named topic, group, key, node or file does not exist.
    NotFound = 3,
    /// No server answers at the address.
    Unreachable = 4,
    /// The server or a safety rule refuses the command.
    NotAllowed = 5,
    /// No response in time; the outcome may be unknown.
    Timeout = 6,
    /// The object exists already, or is in use.
    Conflict = 7,
    /// A check found something wrong.
    Unhealthy = 8,
    /// A lock was not acquired, or was lost: the command of `lock run` did not run, or was stopped.
    NotHeld = 125,
}

impl Status {
    /// The status with this number, from the exit of another `moim` process.
    pub(crate) fn from_number(number: u8) -> Self {
        let all = [
            Self::Usage,
            Self::NotFound,
            Self::Unreachable,
            Self::NotAllowed,
            Self::Timeout,
            Self::Conflict,
            Self::Unhealthy,
            Self::NotHeld,
        ];
        all.into_iter().find(|status| *status as u8 == number).unwrap_or(Self::Error)
    }
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Decides the exit status.
    pub(crate) status: Status,
    /// What happened.
    pub(crate) message: String,
    /// What the user can do about it.
    pub(crate) hint: Option<String>,
    /// The reader of stdout closed the pipe: exit without a message.
    broken_pipe: bool,
}

/// The result of a command.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure with this status and message.
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), hint: None, broken_pipe: false }
    }

    /// A mistake in the command line or the configuration.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Status::Usage, message)
    }

    /// A failure without a status of its own.
    pub(crate) fn error(message: impl Into<String>) -> Self {
        Self::new(Status::Error, message)
    }

    /// Adds what the user can do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prefixes the message with the operation or the object that it is about.
    pub(crate) fn context(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Prints the message on stderr and returns the exit status.
    pub(crate) fn report(&self) -> ExitCode {
        if self.broken_pipe {
            return ExitCode::SUCCESS;
        }
        let lines: Vec<_> = self.message.lines().map(escape_control).collect();
        eprintln!("moim: {}", lines.join("\n"));
        if let Some(hint) = &self.hint {
            eprintln!("      {hint}");
        }
        ExitCode::from(self.status as u8)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let mut failure = Self::error(error.to_string());
        failure.broken_pipe = error.kind() == io::ErrorKind::BrokenPipe;
        failure
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        Self::from(io::Error::from(error))
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::from(io::Error::from(error))
    }
}

impl From<moim_node::Failure> for Failure {
    fn from(failure: moim_node::Failure) -> Self {
        let status = match failure.status {
            moim_node::Status::Error => Status::Error,
            moim_node::Status::Usage => Status::Usage,
            moim_node::Status::NotFound => Status::NotFound,
            moim_node::Status::NotAllowed => Status::NotAllowed,
            moim_node::Status::Conflict => Status::Conflict,
        };
        Self { hint: failure.hint, ..Self::new(status, failure.message) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
