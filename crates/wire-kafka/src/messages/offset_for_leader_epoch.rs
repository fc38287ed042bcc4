//! OffsetForLeaderEpoch (23): where a leader epoch ended, to find where two logs part.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks where a leader epoch ended, to find where two logs part.
    OffsetForLeaderEpochRequest(OffsetForLeaderEpoch) {
        replica_id: i32 [3.., ignorable] = -2,
        topics: Vec<OffsetForLeaderTopic>,
    }

    /// An entry of [`OffsetForLeaderEpochRequest::topics`].
    OffsetForLeaderTopic {
        topic: KString,
        partitions: Vec<OffsetForLeaderPartition>,
    }

    /// An entry of [`OffsetForLeaderTopic::partitions`].
    OffsetForLeaderPartition {
        partition: i32,
        current_leader_epoch: i32 = -1,
        leader_epoch: i32,
    }

    /// The answer to [`OffsetForLeaderEpochRequest`].
    OffsetForLeaderEpochResponse(OffsetForLeaderEpoch) {
        throttle_time_ms: i32,
        topics: Vec<OffsetForLeaderTopicResult>,
    }

    /// An entry of [`OffsetForLeaderEpochResponse::topics`].
    OffsetForLeaderTopicResult {
        topic: KString,
        partitions: Vec<EpochEndOffset>,
    }

    /// An entry of [`OffsetForLeaderTopicResult::partitions`].
    EpochEndOffset {
        error_code: i16,
        partition: i32,
        leader_epoch: i32 = -1,
        end_offset: i64 = -1,
    }
}
