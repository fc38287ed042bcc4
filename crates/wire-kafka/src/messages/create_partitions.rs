//! CreatePartitions (37): give topics more partitions.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to give topics more partitions.
    CreatePartitionsRequest(CreatePartitions) {
        topics: Vec<CreatePartitionsTopic>,
        timeout_ms: i32,
        validate_only: bool,
    }

    /// An entry of [`CreatePartitionsRequest::topics`].
    CreatePartitionsTopic {
        name: KString,
        count: i32,
        assignments: Option<Vec<CreatePartitionsAssignment>>,
    }

    /// An entry of [`CreatePartitionsTopic::assignments`].
    CreatePartitionsAssignment {
        broker_ids: Vec<i32>,
    }

    /// The answer to [`CreatePartitionsRequest`].
    CreatePartitionsResponse(CreatePartitions) {
        throttle_time_ms: i32,
        results: Vec<CreatePartitionsTopicResult>,
    }

    /// An entry of [`CreatePartitionsResponse::results`].
    CreatePartitionsTopicResult {
        name: KString,
        error_code: i16,
        error_message: Option<KString>,
    }
}
