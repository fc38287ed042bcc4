//! Errors of commands, as returned to the caller.
//!
//! Invariant: an unknown outcome is never reported as a failure. [`Error::Timeout`] and
//! [`Error::Interrupted`] mean that the command may have been executed; [`Error::happened_not`] is true for
//! every error that proves that it was not.

use std::time::Duration;

use moim_wire_resp::ReplyError;
use thiserror::Error;

/// A failed command.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The server replied with an error: wrong type, wrong arguments, no permission.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// No reply before the deadline, although the command was sent: it may have been executed.
    #[error("no answer from {node} within {after:?}")]
    Timeout {
        /// The last node it was sent to.
        node: String,
        /// The timeout.
        after: Duration,
    },
    /// The connection failed after the command was sent, and the delivery mode (at most once) forbids a
    /// retry: it may have been executed.
    #[error("connection to {node} broke while the command was under way: {reason}")]
    Interrupted {
        /// The node it was sent to.
        node: String,
        /// The connection error.
        reason: String,
    },
    /// No node accepted the command before its deadline; it was not executed.
    #[error("no node could take the command within {after:?}: {reason}")]
    Unavailable {
        /// The last failure.
        reason: String,
        /// The timeout.
        after: Duration,
    },
    /// Redirection loop until the deadline; the last target.
    #[error("redirected too often, the last time to {0}")]
    TooManyRedirects(String),
    /// The command spans several slots or nodes; some executed it and others failed, with this error.
    #[error("done in part only: {0}")]
    Partly(#[source] Box<Error>),
    /// Keys of one command that must be in one slot are in different slots.
    #[error("the keys are in different slots")]
    CrossSlot,
    /// The reply does not convert to the requested type.
    #[error("expected {expected}, got {got}")]
    Unexpected {
        /// The requested type.
        expected: &'static str,
        /// The reply, shortened.
        got: String,
    },
    /// The server sent a malformed reply.
    #[error("bad answer from the server: {0}")]
    Protocol(#[from] ReplyError),
    /// An invalid address or setting.
    #[error("{0}")]
    Config(String),
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
}

impl Error {
    /// True if the command certainly had no effect.
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

    /// The server's error code (`WRONGTYPE`, `ERR`), for an error reply.
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Server(error) => Some(error.code()),
            Self::Partly(error) => error.code(),
            _ => None,
        }
    }
}

/// An error reply of a server.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct ServerError {
    text: String,
    /// The command had been sent before, with an unknown outcome.
    repeated: bool,
}

impl ServerError {
    pub(crate) fn new(text: &[u8]) -> Self {
        Self { text: String::from_utf8_lossy(text).into_owned(), repeated: false }
    }

    /// The error of a retried command whose earlier attempt may have been executed.
    pub(crate) fn of_repetition(text: &[u8]) -> Self {
        Self { repeated: true, ..Self::new(text) }
    }

    /// The first word: `ERR`, `WRONGTYPE`, `NOSCRIPT`.
    pub fn code(&self) -> &str {
        self.text.split(' ').next().unwrap_or_default()
    }

    /// The complete text, including the code.
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
    fn only_certain_failures_are_definite() {
        let server = |text: &str| Error::Server(ServerError::new(text.as_bytes()));
        assert!(server("WRONGTYPE Operation against a key").happened_not());
        assert!(!server("ERR oops script: 12, on @user_script:1.").happened_not());
        assert!(!Error::Timeout { node: String::new(), after: Duration::ZERO }.happened_not());
        assert_eq!(server("NOSCRIPT No matching script").code(), Some("NOSCRIPT"));
    }
}
