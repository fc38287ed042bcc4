//! ListOffsets (2): the offset of a point in time, or of either end of the log.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Timestamps to look up; -1 is the end, -2 the start.
    ListOffsetsRequest(ListOffsets) {
        replica_id: i32,
        isolation_level: i8 [2..],
        topics: Vec<ListOffsetsTopic>,
        timeout_ms: i32 [10.., ignorable],
    }

    /// An entry of [`ListOffsetsRequest::topics`].
    ListOffsetsTopic {
        name: KString,
        partitions: Vec<ListOffsetsPartition>,
    }

    /// An entry of [`ListOffsetsTopic::partitions`].
    ListOffsetsPartition {
        partition_index: i32,
        current_leader_epoch: i32 [4.., ignorable] = -1,
        timestamp: i64,
    }

    /// The offsets found.
    ListOffsetsResponse(ListOffsets) {
        throttle_time_ms: i32 [2.., ignorable],
        topics: Vec<ListOffsetsTopicResponse>,
    }

    /// An entry of [`ListOffsetsResponse::topics`].
    ListOffsetsTopicResponse {
        name: KString,
        partitions: Vec<ListOffsetsPartitionResponse>,
    }

    /// An entry of [`ListOffsetsTopicResponse::partitions`].
    ListOffsetsPartitionResponse {
        partition_index: i32,
        error_code: i16,
        timestamp: i64 = -1,
        offset: i64 = -1,
        leader_epoch: i32 [4..] = -1,
    }
}
