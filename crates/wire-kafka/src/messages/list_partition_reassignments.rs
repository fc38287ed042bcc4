//! ListPartitionReassignments (46): the moves under way.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for the moves under way.
    ListPartitionReassignmentsRequest(ListPartitionReassignments) {
        timeout_ms: i32 = 60000,
        topics: Option<Vec<ListPartitionReassignmentsTopics>>,
    }

    /// An entry of [`ListPartitionReassignmentsRequest::topics`].
    ListPartitionReassignmentsTopics {
        name: KString,
        partition_indexes: Vec<i32>,
    }

    /// The answer to [`ListPartitionReassignmentsRequest`].
    ListPartitionReassignmentsResponse(ListPartitionReassignments) {
        throttle_time_ms: i32,
        error_code: i16,
        error_message: Option<KString>,
        topics: Vec<OngoingTopicReassignment>,
    }

    /// An entry of [`ListPartitionReassignmentsResponse::topics`].
    OngoingTopicReassignment {
        name: KString,
        partitions: Vec<OngoingPartitionReassignment>,
    }

    /// An entry of [`OngoingTopicReassignment::partitions`].
    OngoingPartitionReassignment {
        partition_index: i32,
        replicas: Vec<i32>,
        adding_replicas: Vec<i32>,
        removing_replicas: Vec<i32>,
    }
}
