//! OffsetCommit (8): store how far a group has read.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// Asks to store how far a group has read.
    OffsetCommitRequest(OffsetCommit) {
        group_id: KString,
        generation_id_or_member_epoch: i32 [1.., ignorable] = -1,
        member_id: KString [1.., ignorable],
        group_instance_id: Option<KString> [7..],
        retention_time_ms: i64 [2..=4, ignorable] = -1,
        topics: Vec<OffsetCommitRequestTopic>,
    }

    /// An entry of [`OffsetCommitRequest::topics`].
    OffsetCommitRequestTopic {
        name: KString [..=9, ignorable],
        topic_id: Uuid [10.., ignorable],
        partitions: Vec<OffsetCommitRequestPartition>,
    }

    /// An entry of [`OffsetCommitRequestTopic::partitions`].
    OffsetCommitRequestPartition {
        partition_index: i32,
        committed_offset: i64,
        committed_leader_epoch: i32 [6.., ignorable] = -1,
        commit_timestamp: i64 [1..=1] = -1,
        committed_metadata: Option<KString>,
    }

    /// The answer to [`OffsetCommitRequest`].
    OffsetCommitResponse(OffsetCommit) {
        throttle_time_ms: i32 [3.., ignorable],
        topics: Vec<OffsetCommitResponseTopic>,
    }

    /// An entry of [`OffsetCommitResponse::topics`].
    OffsetCommitResponseTopic {
        name: KString [..=9, ignorable],
        topic_id: Uuid [10.., ignorable],
        partitions: Vec<OffsetCommitResponsePartition>,
    }

    /// An entry of [`OffsetCommitResponseTopic::partitions`].
    OffsetCommitResponsePartition {
        partition_index: i32,
        error_code: i16,
    }
}
