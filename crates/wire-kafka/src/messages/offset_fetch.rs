//! OffsetFetch (9): ask how far a group has read. Versions 8+ ask for several groups at once.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// Asks how far a group has read.
    OffsetFetchRequest(OffsetFetch) {
        group_id: KString [..=7],
        topics: Option<Vec<OffsetFetchRequestTopic>> [..=7, null 2..=7] = Some(Vec::new()),
        groups: Vec<OffsetFetchRequestGroup> [8..],
        require_stable: bool [7..],
    }

    /// An entry of [`OffsetFetchRequest::topics`].
    OffsetFetchRequestTopic {
        name: KString,
        partition_indexes: Vec<i32>,
    }

    /// An entry of [`OffsetFetchRequest::groups`].
    OffsetFetchRequestGroup {
        group_id: KString,
        member_id: Option<KString> [9.., ignorable],
        member_epoch: i32 [9.., ignorable] = -1,
        topics: Option<Vec<OffsetFetchRequestTopics>>,
    }

    /// An entry of [`OffsetFetchRequestGroup::topics`].
    OffsetFetchRequestTopics {
        name: KString [..=9, ignorable],
        topic_id: Uuid [10.., ignorable],
        partition_indexes: Vec<i32>,
    }

    /// The answer to [`OffsetFetchRequest`].
    OffsetFetchResponse(OffsetFetch) {
        throttle_time_ms: i32 [3.., ignorable],
        topics: Vec<OffsetFetchResponseTopic> [..=7],
        error_code: i16 [2..=7, ignorable],
        groups: Vec<OffsetFetchResponseGroup> [8..],
    }

    /// An entry of [`OffsetFetchResponse::topics`].
    OffsetFetchResponseTopic {
        name: KString,
        partitions: Vec<OffsetFetchResponsePartition>,
    }

    /// An entry of [`OffsetFetchResponseTopic::partitions`].
    OffsetFetchResponsePartition {
        partition_index: i32,
        committed_offset: i64,
        committed_leader_epoch: i32 [5.., ignorable] = -1,
        metadata: Option<KString>,
        error_code: i16,
    }

    /// An entry of [`OffsetFetchResponse::groups`].
    OffsetFetchResponseGroup {
        group_id: KString,
        topics: Vec<OffsetFetchResponseTopics>,
        error_code: i16,
    }

    /// An entry of [`OffsetFetchResponseGroup::topics`].
    OffsetFetchResponseTopics {
        name: KString [..=9, ignorable],
        topic_id: Uuid [10.., ignorable],
        partitions: Vec<OffsetFetchResponsePartitions>,
    }

    /// An entry of [`OffsetFetchResponseTopics::partitions`].
    OffsetFetchResponsePartitions {
        partition_index: i32,
        committed_offset: i64,
        committed_leader_epoch: i32 = -1,
        metadata: Option<KString>,
        error_code: i16,
    }
}
