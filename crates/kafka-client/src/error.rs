//! The error of a Kafka operation: what kind of failure it is for the caller, and the mapping of Kafka's error codes.

use std::fmt;

use moim_wire_kafka::ErrorCode;

/// The result of a Kafka operation.
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// The kind of a failure, for callers that branch on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A failure without a kind of its own.
    Other,
    /// The request is invalid: a topic name, a configuration value, a replica assignment.
    InvalidRequest,
    /// The topic, partition or group does not exist.
    NotFound,
    /// No broker answers, or the leader or the coordinator is not available.
    Unreachable,
    /// Authentication, authorization or a policy forbids the request.
    NotAllowed,
    /// No response in time; the request may have been executed.
    Timeout,
    /// The request conflicts with the present state: the topic exists, the group has members, the producer is fenced.
    Conflict,
}

/// A failed Kafka operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What the caller can branch on.
    pub kind: ErrorKind,
    /// What failed, and why.
    pub message: String,
    /// What the reader of the message can do about it.
    pub hint: Option<String>,
}

impl Error {
    /// An error of this kind.
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None }
    }

    /// An error without a kind of its own.
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Other, message)
    }

    /// Adds what the reader can do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prefixes the message with the operation or the object that it is about.
    pub(crate) fn context(mut self, what: impl fmt::Display) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

/// Errors that can be tolerated for a while, because the cluster may recover by itself.
pub trait Transient {
    /// True if a server was unavailable or did not answer in time: a restart or a leader election may end that.
    fn is_transient(&self) -> bool;
}

impl Transient for Error {
    fn is_transient(&self) -> bool {
        matches!(self.kind, ErrorKind::Unreachable | ErrorKind::Timeout)
    }
}

/// Fails unless the error code is zero.
pub fn check(code: i16, message: Option<&str>) -> Result {
    if code == 0 { Ok(()) } else { Err(server_error(code, message)) }
}

/// The error for an error code of a response. The server's own message is preferred to the general text of the code.
pub fn server_error(code: i16, message: Option<&str>) -> Error {
    let Ok(error) = ErrorCode::try_from(code) else {
        return Error::other(format!("the server answered with the unknown error code {code}"));
    };
    let text = message.filter(|text| !text.is_empty()).unwrap_or(error.message());
    let failure = Error::new(kind(error), format!("{text} ({})", error.name()));
    match hint(error) {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// The name of an error code, such as `NOT_COORDINATOR`; the number of an unknown one.
pub fn error_name(code: i16) -> String {
    ErrorCode::try_from(code).map_or_else(|code| code.to_string(), |error| error.name().to_owned())
}

fn kind(error: ErrorCode) -> ErrorKind {
    use ErrorCode as E;
    match error {
        E::UnknownTopicOrPartition | E::UnknownTopicId | E::GroupIdNotFound | E::ResourceNotFound => {
            ErrorKind::NotFound
        }
        E::TopicAuthorizationFailed
        | E::GroupAuthorizationFailed
        | E::ClusterAuthorizationFailed
        | E::TransactionalIdAuthorizationFailed
        | E::SaslAuthenticationFailed
        | E::UnsupportedSaslMechanism
        | E::IllegalSaslState
        | E::PolicyViolation => ErrorKind::NotAllowed,
        E::RequestTimedOut => ErrorKind::Timeout,
        E::TopicAlreadyExists
        | E::NonEmptyGroup
        | E::GroupSubscribedToTopic
        | E::RebalanceInProgress
        | E::ReassignmentInProgress
        | E::UnknownMemberId
        | E::IllegalGeneration
        | E::FencedInstanceId
        | E::ProducerFenced
        | E::InvalidProducerEpoch => ErrorKind::Conflict,
        E::BrokerNotAvailable | E::LeaderNotAvailable | E::CoordinatorNotAvailable | E::NetworkException => {
            ErrorKind::Unreachable
        }
        E::InvalidTopicException
        | E::InvalidPartitions
        | E::InvalidReplicationFactor
        | E::InvalidReplicaAssignment
        | E::InvalidConfig
        | E::InvalidGroupId => ErrorKind::InvalidRequest,
        // The other codes have no kind of their own; the message has the name of the code.
        _ => ErrorKind::Other,
    }
}

fn hint(error: ErrorCode) -> Option<&'static str> {
    match error {
        ErrorCode::NonEmptyGroup => Some("stop its members first"),
        ErrorCode::MessageTooLarge => Some("raise the topic's max.message.bytes"),
        ErrorCode::UnknownTopicOrPartition => Some("`moim topic list` shows what there is"),
        ErrorCode::GroupIdNotFound => Some("`moim group list` shows what there is"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_map_to_kinds() {
        for (error, kind) in [
            (ErrorCode::UnknownTopicOrPartition, ErrorKind::NotFound),
            (ErrorCode::GroupIdNotFound, ErrorKind::NotFound),
            (ErrorCode::TopicAuthorizationFailed, ErrorKind::NotAllowed),
            (ErrorCode::RequestTimedOut, ErrorKind::Timeout),
            (ErrorCode::TopicAlreadyExists, ErrorKind::Conflict),
            (ErrorCode::NonEmptyGroup, ErrorKind::Conflict),
            (ErrorCode::CorruptMessage, ErrorKind::Other),
        ] {
            assert_eq!(server_error(error.code(), None).kind, kind, "{error}");
        }
        assert_eq!(server_error(9999, None).kind, ErrorKind::Other);
        assert!(check(0, None).is_ok());
        let shown = server_error(ErrorCode::InvalidConfig.code(), Some("no such key")).message;
        assert_eq!(shown, "no such key (INVALID_CONFIG)");
    }
}
