//! Maps the error of a failed write to one that a member or a committing client handles.
//!
//! Invariant: `of_offset_write` and `of_group_write` are the only functions that map a storage error; clients retry
//! or rejoin on the result, so no arm may turn an unknown outcome into a failure.

pub use moim_wire_kafka::error::ErrorCode;

/// The client's error if its offsets could not be written.
pub(super) fn of_offset_write(error: ErrorCode) -> ErrorCode {
    match error {
        ErrorCode::UnknownTopicOrPartition
        | ErrorCode::NotEnoughReplicas
        | ErrorCode::NotEnoughReplicasAfterAppend
        | ErrorCode::RequestTimedOut => ErrorCode::CoordinatorNotAvailable,
        ErrorCode::NotLeaderOrFollower | ErrorCode::KafkaStorageError => ErrorCode::NotCoordinator,
        ErrorCode::MessageTooLarge | ErrorCode::RecordListTooLarge => ErrorCode::InvalidCommitOffsetSize,
        other => other,
    }
}

/// The member's error if its group's metadata could not be written.
pub(super) fn of_group_write(error: ErrorCode) -> ErrorCode {
    match error {
        ErrorCode::UnknownTopicOrPartition
        | ErrorCode::NotEnoughReplicas
        | ErrorCode::NotEnoughReplicasAfterAppend => ErrorCode::CoordinatorNotAvailable,
        ErrorCode::NotLeaderOrFollower | ErrorCode::KafkaStorageError => ErrorCode::NotCoordinator,
        ErrorCode::RequestTimedOut => ErrorCode::RebalanceInProgress,
        ErrorCode::MessageTooLarge | ErrorCode::RecordListTooLarge => ErrorCode::UnknownServerError,
        other => other,
    }
}
