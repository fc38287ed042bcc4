//! Kafka's error codes: numbers, names, and whether a retry can help.
//!
//! The numbers and names are the protocol's and never change. Codes we do not know arrive as plain `i16` and
//! stay that way: [`ErrorCode::try_from`] returns the number instead of guessing.

use std::fmt;

macro_rules! error_codes {
    ($( $variant:ident = $code:literal $name:literal $($default:ident)?: $message:literal; )+) => {
        /// The outcome of a request, or of a part of it.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(i16)]
        pub enum ErrorCode {
            $( #[doc = $message] $( #[$default] )? $variant = $code, )+
        }

        impl ErrorCode {
            /// Every code, in order.
            pub const ALL: &'static [ErrorCode] = &[$( ErrorCode::$variant, )+];

            /// The protocol's name, such as `UNKNOWN_TOPIC_OR_PARTITION`.
            pub const fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $name, )+
                }
            }

            /// One line for people.
            pub const fn message(self) -> &'static str {
                match self {
                    $( Self::$variant => $message, )+
                }
            }
        }

        impl TryFrom<i16> for ErrorCode {
            type Error = i16;

            fn try_from(code: i16) -> Result<Self, i16> {
                match code {
                    $( $code => Ok(Self::$variant), )+
                    _ => Err(code),
                }
            }
        }
    };
}

error_codes! {
    UnknownServerError = -1 "UNKNOWN_SERVER_ERROR": "Something went wrong inside the broker.";
    None = 0 "NONE" default: "Success.";
    OffsetOutOfRange = 1 "OFFSET_OUT_OF_RANGE": "The offset lies outside what the partition holds.";
    CorruptMessage = 2 "CORRUPT_MESSAGE": "The batch is damaged: bad checksum, impossible size, or no key on a compacted topic.";
    UnknownTopicOrPartition = 3 "UNKNOWN_TOPIC_OR_PARTITION": "The broker does not know this topic or partition.";
    InvalidFetchSize = 4 "INVALID_FETCH_SIZE": "The fetch size makes no sense.";
    LeaderNotAvailable = 5 "LEADER_NOT_AVAILABLE": "The partition has no leader right now.";
    NotLeaderOrFollower = 6 "NOT_LEADER_OR_FOLLOWER": "The broker neither leads nor follows this partition; refresh the metadata.";
    RequestTimedOut = 7 "REQUEST_TIMED_OUT": "Time ran out; whether the request took effect is unknown.";
    BrokerNotAvailable = 8 "BROKER_NOT_AVAILABLE": "The broker is down.";
    ReplicaNotAvailable = 9 "REPLICA_NOT_AVAILABLE": "The broker has no such replica.";
    MessageTooLarge = 10 "MESSAGE_TOO_LARGE": "The batch is larger than the topic allows.";
    StaleControllerEpoch = 11 "STALE_CONTROLLER_EPOCH": "A newer controller has taken over.";
    OffsetMetadataTooLarge = 12 "OFFSET_METADATA_TOO_LARGE": "The text committed with the offset is too long.";
    NetworkException = 13 "NETWORK_EXCEPTION": "The connection broke before the answer came.";
    CoordinatorLoadInProgress = 14 "COORDINATOR_LOAD_IN_PROGRESS": "The coordinator is still loading its state.";
    CoordinatorNotAvailable = 15 "COORDINATOR_NOT_AVAILABLE": "There is no coordinator right now.";
    NotCoordinator = 16 "NOT_COORDINATOR": "Another broker coordinates this group or transaction.";
    InvalidTopicException = 17 "INVALID_TOPIC_EXCEPTION": "The topic name is not allowed.";
    RecordListTooLarge = 18 "RECORD_LIST_TOO_LARGE": "The batch does not fit into a segment.";
    NotEnoughReplicas = 19 "NOT_ENOUGH_REPLICAS": "Too few replicas are in sync; nothing was written.";
    NotEnoughReplicasAfterAppend = 20 "NOT_ENOUGH_REPLICAS_AFTER_APPEND": "The batch was written, but too few replicas have it.";
    InvalidRequiredAcks = 21 "INVALID_REQUIRED_ACKS": "Acks must be -1, 0 or 1.";
    IllegalGeneration = 22 "ILLEGAL_GENERATION": "The generation is not the group's current one.";
    InconsistentGroupProtocol = 23 "INCONSISTENT_GROUP_PROTOCOL": "The member shares no protocol with its group.";
    InvalidGroupId = 24 "INVALID_GROUP_ID": "The group id is not allowed.";
    UnknownMemberId = 25 "UNKNOWN_MEMBER_ID": "The group has no such member.";
    InvalidSessionTimeout = 26 "INVALID_SESSION_TIMEOUT": "The session timeout lies outside the broker's limits.";
    RebalanceInProgress = 27 "REBALANCE_IN_PROGRESS": "The group is rebalancing; join again.";
    InvalidCommitOffsetSize = 28 "INVALID_COMMIT_OFFSET_SIZE": "The committed offset has an impossible size.";
    TopicAuthorizationFailed = 29 "TOPIC_AUTHORIZATION_FAILED": "No permission for this topic.";
    GroupAuthorizationFailed = 30 "GROUP_AUTHORIZATION_FAILED": "No permission for this group.";
    ClusterAuthorizationFailed = 31 "CLUSTER_AUTHORIZATION_FAILED": "No permission for this cluster operation.";
    InvalidTimestamp = 32 "INVALID_TIMESTAMP": "The timestamp is too far from the broker's time.";
    UnsupportedSaslMechanism = 33 "UNSUPPORTED_SASL_MECHANISM": "The broker does not offer this SASL mechanism.";
    IllegalSaslState = 34 "ILLEGAL_SASL_STATE": "This SASL step does not belong here.";
    UnsupportedVersion = 35 "UNSUPPORTED_VERSION": "The broker does not speak this version of the API.";
    TopicAlreadyExists = 36 "TOPIC_ALREADY_EXISTS": "The topic exists already.";
    InvalidPartitions = 37 "INVALID_PARTITIONS": "The number of partitions is not allowed.";
    InvalidReplicationFactor = 38 "INVALID_REPLICATION_FACTOR": "The replication factor is not allowed.";
    InvalidReplicaAssignment = 39 "INVALID_REPLICA_ASSIGNMENT": "The replica assignment is not allowed.";
    InvalidConfig = 40 "INVALID_CONFIG": "A setting has a value that is not allowed.";
    NotController = 41 "NOT_CONTROLLER": "Another broker is the controller.";
    InvalidRequest = 42 "INVALID_REQUEST": "The request contradicts itself or the protocol.";
    UnsupportedForMessageFormat = 43 "UNSUPPORTED_FOR_MESSAGE_FORMAT": "The record format does not support this request.";
    PolicyViolation = 44 "POLICY_VIOLATION": "A policy of the cluster forbids this.";
    OutOfOrderSequenceNumber = 45 "OUT_OF_ORDER_SEQUENCE_NUMBER": "A batch of this producer is missing before this one.";
    DuplicateSequenceNumber = 46 "DUPLICATE_SEQUENCE_NUMBER": "This batch is here already.";
    InvalidProducerEpoch = 47 "INVALID_PRODUCER_EPOCH": "The producer's epoch is outdated.";
    InvalidTxnState = 48 "INVALID_TXN_STATE": "The transaction is in no state for this.";
    InvalidProducerIdMapping = 49 "INVALID_PRODUCER_ID_MAPPING": "The producer id does not belong to this transactional id.";
    InvalidTransactionTimeout = 50 "INVALID_TRANSACTION_TIMEOUT": "The transaction timeout is longer than the broker allows.";
    ConcurrentTransactions = 51 "CONCURRENT_TRANSACTIONS": "Another step of the same transaction is still under way.";
    TransactionCoordinatorFenced = 52 "TRANSACTION_COORDINATOR_FENCED": "A newer transaction coordinator has taken over.";
    TransactionalIdAuthorizationFailed = 53 "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "No permission for this transactional id.";
    SecurityDisabled = 54 "SECURITY_DISABLED": "Security is switched off.";
    OperationNotAttempted = 55 "OPERATION_NOT_ATTEMPTED": "The broker did not get to this part of the request.";
    KafkaStorageError = 56 "KAFKA_STORAGE_ERROR": "The disk failed.";
    LogDirNotFound = 57 "LOG_DIR_NOT_FOUND": "The broker has no such log directory.";
    SaslAuthenticationFailed = 58 "SASL_AUTHENTICATION_FAILED": "Authentication failed.";
    UnknownProducerId = 59 "UNKNOWN_PRODUCER_ID": "The partition remembers nothing of this producer.";
    ReassignmentInProgress = 60 "REASSIGNMENT_IN_PROGRESS": "The partition is being moved.";
    DelegationTokenAuthDisabled = 61 "DELEGATION_TOKEN_AUTH_DISABLED": "Delegation tokens are switched off.";
    DelegationTokenNotFound = 62 "DELEGATION_TOKEN_NOT_FOUND": "There is no such delegation token.";
    DelegationTokenOwnerMismatch = 63 "DELEGATION_TOKEN_OWNER_MISMATCH": "The delegation token belongs to someone else.";
    DelegationTokenRequestNotAllowed = 64 "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED": "This connection may not ask for delegation tokens.";
    DelegationTokenAuthorizationFailed = 65 "DELEGATION_TOKEN_AUTHORIZATION_FAILED": "No permission for this delegation token.";
    DelegationTokenExpired = 66 "DELEGATION_TOKEN_EXPIRED": "The delegation token has expired.";
    InvalidPrincipalType = 67 "INVALID_PRINCIPAL_TYPE": "This kind of principal is not supported.";
    NonEmptyGroup = 68 "NON_EMPTY_GROUP": "The group still has members.";
    GroupIdNotFound = 69 "GROUP_ID_NOT_FOUND": "There is no such group.";
    FetchSessionIdNotFound = 70 "FETCH_SESSION_ID_NOT_FOUND": "The broker has forgotten this fetch session.";
    InvalidFetchSessionEpoch = 71 "INVALID_FETCH_SESSION_EPOCH": "The fetch session is at another epoch.";
    ListenerNotFound = 72 "LISTENER_NOT_FOUND": "The leader does not listen where the client asked.";
    TopicDeletionDisabled = 73 "TOPIC_DELETION_DISABLED": "Deleting topics is switched off.";
    FencedLeaderEpoch = 74 "FENCED_LEADER_EPOCH": "The client knows an older leader epoch than the broker.";
    UnknownLeaderEpoch = 75 "UNKNOWN_LEADER_EPOCH": "The client knows a newer leader epoch than the broker.";
    UnsupportedCompressionType = 76 "UNSUPPORTED_COMPRESSION_TYPE": "The client cannot read this compression.";
    StaleBrokerEpoch = 77 "STALE_BROKER_EPOCH": "The broker has registered again since.";
    OffsetNotAvailable = 78 "OFFSET_NOT_AVAILABLE": "The new leader does not know yet how far the log is committed.";
    MemberIdRequired = 79 "MEMBER_ID_REQUIRED": "Join again with the member id that came with this answer.";
    PreferredLeaderNotAvailable = 80 "PREFERRED_LEADER_NOT_AVAILABLE": "The preferred leader is not available.";
    GroupMaxSizeReached = 81 "GROUP_MAX_SIZE_REACHED": "The group is full.";
    FencedInstanceId = 82 "FENCED_INSTANCE_ID": "Another member has taken over this group instance id.";
    EligibleLeadersNotAvailable = 83 "ELIGIBLE_LEADERS_NOT_AVAILABLE": "No eligible leader is available.";
    ElectionNotNeeded = 84 "ELECTION_NOT_NEEDED": "The leader is fine; no election took place.";
    NoReassignmentInProgress = 85 "NO_REASSIGNMENT_IN_PROGRESS": "The partition is not being moved.";
    GroupSubscribedToTopic = 86 "GROUP_SUBSCRIBED_TO_TOPIC": "The group is reading the topic.";
    InvalidRecord = 87 "INVALID_RECORD": "The broker refuses this record.";
    UnstableOffsetCommit = 88 "UNSTABLE_OFFSET_COMMIT": "An open transaction still covers these offsets.";
    ThrottlingQuotaExceeded = 89 "THROTTLING_QUOTA_EXCEEDED": "The quota is used up.";
    ProducerFenced = 90 "PRODUCER_FENCED": "A newer producer has taken over this transactional id.";
    ResourceNotFound = 91 "RESOURCE_NOT_FOUND": "There is no such resource.";
    DuplicateResource = 92 "DUPLICATE_RESOURCE": "The same resource appears twice.";
    UnacceptableCredential = 93 "UNACCEPTABLE_CREDENTIAL": "The credential is not acceptable.";
    InconsistentVoterSet = 94 "INCONSISTENT_VOTER_SET": "The voters do not agree on who they are.";
    InvalidUpdateVersion = 95 "INVALID_UPDATE_VERSION": "The update version is not allowed.";
    FeatureUpdateFailed = 96 "FEATURE_UPDATE_FAILED": "The feature update failed.";
    PrincipalDeserializationFailure = 97 "PRINCIPAL_DESERIALIZATION_FAILURE": "The forwarded principal cannot be read.";
    SnapshotNotFound = 98 "SNAPSHOT_NOT_FOUND": "There is no such snapshot.";
    PositionOutOfRange = 99 "POSITION_OUT_OF_RANGE": "The position lies outside the snapshot.";
    UnknownTopicId = 100 "UNKNOWN_TOPIC_ID": "The broker does not know this topic id.";
    DuplicateBrokerRegistration = 101 "DUPLICATE_BROKER_REGISTRATION": "Another broker has this id.";
    BrokerIdNotRegistered = 102 "BROKER_ID_NOT_REGISTERED": "No broker has registered with this id.";
    InconsistentTopicId = 103 "INCONSISTENT_TOPIC_ID": "The log belongs to another topic id.";
    InconsistentClusterId = 104 "INCONSISTENT_CLUSTER_ID": "The request is meant for another cluster.";
    TransactionalIdNotFound = 105 "TRANSACTIONAL_ID_NOT_FOUND": "There is no such transactional id.";
    FetchSessionTopicIdError = 106 "FETCH_SESSION_TOPIC_ID_ERROR": "The fetch session mixes topic names and ids.";
    IneligibleReplica = 107 "INELIGIBLE_REPLICA": "A replica in the new ISR may not be there.";
    NewLeaderElected = 108 "NEW_LEADER_ELECTED": "The change is done and elected another leader.";
    OffsetMovedToTieredStorage = 109 "OFFSET_MOVED_TO_TIERED_STORAGE": "The offset now lies in tiered storage.";
    FencedMemberEpoch = 110 "FENCED_MEMBER_EPOCH": "The member's epoch is fenced; join anew.";
    UnreleasedInstanceId = 111 "UNRELEASED_INSTANCE_ID": "The group instance id is still in use.";
    UnsupportedAssignor = 112 "UNSUPPORTED_ASSIGNOR": "The group does not know this assignor.";
    StaleMemberEpoch = 113 "STALE_MEMBER_EPOCH": "The member's epoch is outdated; heartbeat first.";
    MismatchedEndpointType = 114 "MISMATCHED_ENDPOINT_TYPE": "This endpoint is of another kind.";
    UnsupportedEndpointType = 115 "UNSUPPORTED_ENDPOINT_TYPE": "This kind of endpoint is not supported.";
    UnknownControllerId = 116 "UNKNOWN_CONTROLLER_ID": "There is no such controller.";
    UnknownSubscriptionId = 117 "UNKNOWN_SUBSCRIPTION_ID": "There is no such telemetry subscription.";
    TelemetryTooLarge = 118 "TELEMETRY_TOO_LARGE": "The telemetry is too large.";
    InvalidRegistration = 119 "INVALID_REGISTRATION": "The broker registration is not valid.";
    TransactionAbortable = 120 "TRANSACTION_ABORTABLE": "The transaction must be aborted; the producer may go on.";
    InvalidRecordState = 121 "INVALID_RECORD_STATE": "The record is in no state for this acknowledgement.";
    ShareSessionNotFound = 122 "SHARE_SESSION_NOT_FOUND": "There is no such share session.";
    InvalidShareSessionEpoch = 123 "INVALID_SHARE_SESSION_EPOCH": "The share session is at another epoch.";
    FencedStateEpoch = 124 "FENCED_STATE_EPOCH": "The share group's state has moved to a newer epoch.";
    InvalidVoterKey = 125 "INVALID_VOTER_KEY": "The voter's key is another one.";
    DuplicateVoter = 126 "DUPLICATE_VOTER": "The voter is in the set already.";
    VoterNotFound = 127 "VOTER_NOT_FOUND": "The voter is not in the set.";
    InvalidRegularExpression = 128 "INVALID_REGULAR_EXPRESSION": "The regular expression is malformed.";
    RebootstrapRequired = 129 "REBOOTSTRAP_REQUIRED": "The client must start again from its bootstrap servers.";
    StreamsInvalidTopology = 130 "STREAMS_INVALID_TOPOLOGY": "The streams topology is not valid.";
    StreamsInvalidTopologyEpoch = 131 "STREAMS_INVALID_TOPOLOGY_EPOCH": "The streams topology is at another epoch.";
    StreamsTopologyFenced = 132 "STREAMS_TOPOLOGY_FENCED": "The streams topology is outdated.";
    ShareSessionLimitReached = 133 "SHARE_SESSION_LIMIT_REACHED": "The broker has no room for another share session.";
}

impl ErrorCode {
    /// The code on the wire.
    pub const fn code(self) -> i16 {
        self as i16
    }

    /// True for [`ErrorCode::None`].
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::None)
    }

    /// True when the same request may succeed later, perhaps after refreshing metadata.
    pub const fn is_retriable(self) -> bool {
        matches!(
            self,
            Self::CorruptMessage
                | Self::UnknownTopicOrPartition
                | Self::LeaderNotAvailable
                | Self::NotLeaderOrFollower
                | Self::RequestTimedOut
                | Self::ReplicaNotAvailable
                | Self::NetworkException
                | Self::CoordinatorLoadInProgress
                | Self::CoordinatorNotAvailable
                | Self::NotCoordinator
                | Self::NotEnoughReplicas
                | Self::NotEnoughReplicasAfterAppend
                | Self::NotController
                | Self::ConcurrentTransactions
                | Self::KafkaStorageError
                | Self::FetchSessionIdNotFound
                | Self::InvalidFetchSessionEpoch
                | Self::ListenerNotFound
                | Self::FencedLeaderEpoch
                | Self::UnknownLeaderEpoch
                | Self::OffsetNotAvailable
                | Self::PreferredLeaderNotAvailable
                | Self::EligibleLeadersNotAvailable
                | Self::ElectionNotNeeded
                | Self::UnstableOffsetCommit
                | Self::ThrottlingQuotaExceeded
                | Self::UnknownTopicId
                | Self::InconsistentTopicId
                | Self::FetchSessionTopicIdError
                | Self::ShareSessionNotFound
                | Self::InvalidShareSessionEpoch
                | Self::ShareSessionLimitReached
        )
    }
}

impl From<ErrorCode> for i16 {
    fn from(code: ErrorCode) -> Self {
        code as i16
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::error::Error for ErrorCode {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_dense_and_survive_the_trip_through_numbers() {
        assert_eq!(ErrorCode::ALL.len(), 135);
        for (code, error) in (-1..).zip(ErrorCode::ALL) {
            assert_eq!(error.code(), code);
            assert_eq!(ErrorCode::try_from(code), Ok(*error));
        }
        assert_eq!(ErrorCode::try_from(134), Err(134));
        assert_eq!(ErrorCode::try_from(-2), Err(-2));
    }

    #[test]
    fn names_spell_the_variants() {
        for error in ErrorCode::ALL {
            let spelled = error
                .name()
                .split('_')
                .fold(String::new(), |text, word| text + &word[..1] + &word[1..].to_lowercase());
            assert_eq!(spelled, format!("{error:?}"));
        }
    }

    #[test]
    fn a_moved_leader_is_retriable_and_a_fenced_producer_is_not() {
        assert!(ErrorCode::NotLeaderOrFollower.is_retriable());
        assert!(!ErrorCode::ProducerFenced.is_retriable());
        assert!(!ErrorCode::None.is_retriable());
    }
}
