//! TxnOffsetCommit (28): store a group's offsets when the transaction commits.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to store a group's offsets when the transaction commits.
    TxnOffsetCommitRequest(TxnOffsetCommit) {
        transactional_id: KString,
        group_id: KString,
        producer_id: i64,
        producer_epoch: i16,
        generation_id: i32 [3..] = -1,
        member_id: KString [3..],
        group_instance_id: Option<KString> [3..],
        topics: Vec<TxnOffsetCommitRequestTopic>,
    }

    /// An entry of [`TxnOffsetCommitRequest::topics`].
    TxnOffsetCommitRequestTopic {
        name: KString,
        partitions: Vec<TxnOffsetCommitRequestPartition>,
    }

    /// An entry of [`TxnOffsetCommitRequestTopic::partitions`].
    TxnOffsetCommitRequestPartition {
        partition_index: i32,
        committed_offset: i64,
        committed_leader_epoch: i32 [2.., ignorable] = -1,
        committed_metadata: Option<KString>,
    }

    /// The answer to [`TxnOffsetCommitRequest`].
    TxnOffsetCommitResponse(TxnOffsetCommit) {
        throttle_time_ms: i32,
        topics: Vec<TxnOffsetCommitResponseTopic>,
    }

    /// An entry of [`TxnOffsetCommitResponse::topics`].
    TxnOffsetCommitResponseTopic {
        name: KString,
        partitions: Vec<TxnOffsetCommitResponsePartition>,
    }

    /// An entry of [`TxnOffsetCommitResponseTopic::partitions`].
    TxnOffsetCommitResponsePartition {
        partition_index: i32,
        error_code: i16,
    }
}
