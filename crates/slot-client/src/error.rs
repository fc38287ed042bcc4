//! What can go wrong with a command, as its caller sees it.
//!
//! Invariant: an outcome nobody knows is never told as a failure. [`Error::Timeout`] and [`Error::Interrupted`] say that the
//! command may have happened; [`Error::happened_not`] says for every error whether it certainly did not.

use std::time::Duration;

use moim_wire_resp::ReplyError;
use thiserror::Error;

/// Why a command has no answer.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The server refused: wrong type, wrong arguments, no permission.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// No answer before the deadline, although the command was sent: it may have happened.
    #[error("no answer from {node} within {after:?}")]
    Timeout {
        /// Where it was sent last.
        node: String,
        /// The time that was given.
        after: Duration,
    },
    /// The connection broke after the command was sent, and it may not be sent again (at most once): it may have happened.
    #[error("connection to {node} broke while the command was under way: {reason}")]
    Interrupted {
        /// Where it was sent.
        node: String,
        /// What happened to the connection.
        reason: String,
    },
    /// Nobody could take the command before its deadline; it did not happen.
    #[error("no node could take the command within {after:?}: {reason}")]
    Unavailable {
        /// What stood in the way at the end.
        reason: String,
        /// The time that was given.
        after: Duration,
    },
    /// Servers sent the command around in circles until its deadline, the last time to this one.
    #[error("redirected too often, the last time to {0}")]
    TooManyRedirects(String),
    /// The command concerns several slots or nodes; some did it and others did not, for this reason.
    #[error("done in part only: {0}")]
    Partly(#[source] Box<Error>),
    /// Keys of one command that must be in one slot are not.
    #[error("the keys are in different slots")]
    CrossSlot,
    /// The answer is not what the caller asked it to be.
    #[error("expected {expected}, got {got}")]
    Unexpected {
        /// The type asked for.
        expected: &'static str,
        /// The answer, shortened.
        got: String,
    },
    /// The server sent something that is no answer.
    #[error("bad answer from the server: {0}")]
    Protocol(#[from] ReplyError),
    /// An address or a setting cannot be used.
    #[error("{0}")]
    Config(String),
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
}

impl Error {
    /// Whether it is certain that the command had no effect.
    pub fn happened_not(&self) -> bool {
        match self {
            Self::Timeout { .. }
            | Self::Interrupted { .. }
            | Self::Partly(_)
            | Self::Unexpected { .. }
            | Self::Protocol(_) => false,
            // A script may have written before it failed.
            Self::Server(error) => !error.repeated && error.code() != "EXECABORT" && !error.is_of_script(),
            Self::Unavailable { .. }
            | Self::TooManyRedirects(..)
            | Self::CrossSlot
            | Self::Config(_)
            | Self::Closed => true,
        }
    }

    /// The server's error code (`WRONGTYPE`, `ERR`), when the server refused.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Server(error) => Some(error.code()),
            Self::Partly(error) => error.code(),
            _ => None,
        }
    }
}

/// An error a server answered.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct ServerError {
    text: String,
    /// The command had been sent before, and nobody knows what became of it then.
    repeated: bool,
}

impl ServerError {
    pub(crate) fn new(text: &[u8]) -> Self {
        Self { text: String::from_utf8_lossy(text).into_owned(), repeated: false }
    }

    /// Of a command that may have happened already when it was sent before.
    pub(crate) fn of_repetition(text: &[u8]) -> Self {
        Self { repeated: true, ..Self::new(text) }
    }

    /// The first word: `ERR`, `WRONGTYPE`, `NOSCRIPT`.
    pub fn code(&self) -> &str {
        self.text.split(' ').next().unwrap_or_default()
    }

    /// The whole text, code included.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn is_of_script(&self) -> bool {
        self.text.contains("script:")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_certain_failures_say_so() {
        let server = |text: &str| Error::Server(ServerError::new(text.as_bytes()));
        assert!(server("WRONGTYPE Operation against a key").happened_not());
        assert!(!server("ERR oops script: 12, on @user_script:1.").happened_not());
        assert!(!Error::Timeout { node: String::new(), after: Duration::ZERO }.happened_not());
        assert_eq!(server("NOSCRIPT No matching script").code(), Some("NOSCRIPT"));
    }
}
