//! DeleteRecords (21): move the start of partitions forward.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to move the start of partitions forward.
    DeleteRecordsRequest(DeleteRecords) {
        topics: Vec<DeleteRecordsTopic>,
        timeout_ms: i32,
    }

    /// An entry of [`DeleteRecordsRequest::topics`].
    DeleteRecordsTopic {
        name: KString,
        partitions: Vec<DeleteRecordsPartition>,
    }

    /// An entry of [`DeleteRecordsTopic::partitions`].
    DeleteRecordsPartition {
        partition_index: i32,
        offset: i64,
    }

    /// The answer to [`DeleteRecordsRequest`].
    DeleteRecordsResponse(DeleteRecords) {
        throttle_time_ms: i32,
        topics: Vec<DeleteRecordsTopicResult>,
    }

    /// An entry of [`DeleteRecordsResponse::topics`].
    DeleteRecordsTopicResult {
        name: KString,
        partitions: Vec<DeleteRecordsPartitionResult>,
    }

    /// An entry of [`DeleteRecordsTopicResult::partitions`].
    DeleteRecordsPartitionResult {
        partition_index: i32,
        low_watermark: i64,
        error_code: i16,
    }
}
