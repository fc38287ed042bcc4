//! What a server's error code means for the person and for the exit status.

use moim_wire_kafka::ErrorCode;

use crate::exit::{Failure, Outcome, Status};

/// Fails unless the code is zero.
pub(crate) fn check(code: i16, message: Option<&str>) -> Outcome {
    if code == 0 { Ok(()) } else { Err(failure(code, message)) }
}

/// The failure a code stands for. The server's own words win over the general ones.
pub(crate) fn failure(code: i16, message: Option<&str>) -> Failure {
    let Ok(error) = ErrorCode::try_from(code) else {
        return Failure::error(format!("the server answered with the unknown error code {code}"));
    };
    let text = message.filter(|text| !text.is_empty()).unwrap_or(error.message());
    let failure = Failure::new(status(error), format!("{text} ({})", error.name()));
    match hint(error) {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// The name of a code, for programs.
pub(crate) fn name(code: i16) -> String {
    ErrorCode::try_from(code).map_or_else(|code| code.to_string(), |error| error.name().to_owned())
}

fn status(error: ErrorCode) -> Status {
    use ErrorCode as E;
    match error {
        E::UnknownTopicOrPartition | E::UnknownTopicId | E::GroupIdNotFound | E::ResourceNotFound => {
            Status::NotFound
        }
        E::TopicAuthorizationFailed
        | E::GroupAuthorizationFailed
        | E::ClusterAuthorizationFailed
        | E::TransactionalIdAuthorizationFailed
        | E::SaslAuthenticationFailed
        | E::UnsupportedSaslMechanism
        | E::IllegalSaslState
        | E::PolicyViolation => Status::NotAllowed,
        E::RequestTimedOut => Status::Timeout,
        E::TopicAlreadyExists
        | E::NonEmptyGroup
        | E::GroupSubscribedToTopic
        | E::RebalanceInProgress
        | E::ReassignmentInProgress
        | E::UnknownMemberId
        | E::IllegalGeneration
        | E::FencedInstanceId
        | E::ProducerFenced
        | E::InvalidProducerEpoch => Status::Conflict,
        E::BrokerNotAvailable | E::LeaderNotAvailable | E::CoordinatorNotAvailable | E::NetworkException => {
            Status::Unreachable
        }
        E::InvalidTopicException
        | E::InvalidPartitions
        | E::InvalidReplicationFactor
        | E::InvalidReplicaAssignment
        | E::InvalidConfig
        | E::InvalidGroupId => Status::Usage,
        // The rest has no status of its own; its name is in the message.
        _ => Status::Error,
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
    fn scripts_can_tell_failures_apart() {
        for (error, status) in [
            (ErrorCode::UnknownTopicOrPartition, Status::NotFound),
            (ErrorCode::GroupIdNotFound, Status::NotFound),
            (ErrorCode::TopicAuthorizationFailed, Status::NotAllowed),
            (ErrorCode::RequestTimedOut, Status::Timeout),
            (ErrorCode::TopicAlreadyExists, Status::Conflict),
            (ErrorCode::NonEmptyGroup, Status::Conflict),
            (ErrorCode::CorruptMessage, Status::Error),
        ] {
            assert_eq!(failure(error.code(), None).status, status, "{error}");
        }
        assert_eq!(failure(9999, None).status, Status::Error);
        assert!(check(0, None).is_ok());
        let shown = failure(ErrorCode::InvalidConfig.code(), Some("no such key")).message;
        assert_eq!(shown, "no such key (INVALID_CONFIG)");
    }
}
