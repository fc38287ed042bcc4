//! AlterPartitionReassignments (45): move partitions to other brokers, or cancel the move.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to move partitions to other brokers, or cancel the move.
    AlterPartitionReassignmentsRequest(AlterPartitionReassignments) {
        timeout_ms: i32 = 60000,
        allow_replication_factor_change: bool [1..] = true,
        topics: Vec<ReassignableTopic>,
    }

    /// An entry of [`AlterPartitionReassignmentsRequest::topics`].
    ReassignableTopic {
        name: KString,
        partitions: Vec<ReassignablePartition>,
    }

    /// An entry of [`ReassignableTopic::partitions`].
    ReassignablePartition {
        partition_index: i32,
        replicas: Option<Vec<i32>>,
    }

    /// The answer to [`AlterPartitionReassignmentsRequest`].
    AlterPartitionReassignmentsResponse(AlterPartitionReassignments) {
        throttle_time_ms: i32,
        allow_replication_factor_change: bool [1.., ignorable] = true,
        error_code: i16,
        error_message: Option<KString>,
        responses: Vec<ReassignableTopicResponse>,
    }

    /// An entry of [`AlterPartitionReassignmentsResponse::responses`].
    ReassignableTopicResponse {
        name: KString,
        partitions: Vec<ReassignablePartitionResponse>,
    }

    /// An entry of [`ReassignableTopicResponse::partitions`].
    ReassignablePartitionResponse {
        partition_index: i32,
        error_code: i16,
        error_message: Option<KString>,
    }
}
