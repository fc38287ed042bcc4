//! OffsetDelete (47): forget the committed offsets of single partitions.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to forget the committed offsets of single partitions.
    OffsetDeleteRequest(OffsetDelete) {
        group_id: KString,
        topics: Vec<OffsetDeleteRequestTopic>,
    }

    /// An entry of [`OffsetDeleteRequest::topics`].
    OffsetDeleteRequestTopic {
        name: KString,
        partitions: Vec<OffsetDeleteRequestPartition>,
    }

    /// An entry of [`OffsetDeleteRequestTopic::partitions`].
    OffsetDeleteRequestPartition {
        partition_index: i32,
    }

    /// The answer to [`OffsetDeleteRequest`].
    OffsetDeleteResponse(OffsetDelete) {
        error_code: i16,
        throttle_time_ms: i32,
        topics: Vec<OffsetDeleteResponseTopic>,
    }

    /// An entry of [`OffsetDeleteResponse::topics`].
    OffsetDeleteResponseTopic {
        name: KString,
        partitions: Vec<OffsetDeleteResponsePartition>,
    }

    /// An entry of [`OffsetDeleteResponseTopic::partitions`].
    OffsetDeleteResponsePartition {
        partition_index: i32,
        error_code: i16,
    }
}
