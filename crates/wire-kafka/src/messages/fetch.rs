//! Fetch (1): read record batches, for consumers and followers. Versions 7+ have sessions, 13+ topic ids.

use super::produce::{LeaderIdAndEpoch, NodeEndpoint};
use crate::codec::messages;
use crate::{KString, Records, Uuid};

messages! {
    /// Positions to read from, and how long to wait for how much.
    FetchRequest(Fetch) {
        cluster_id: Option<KString> [12.., tag 0, ignorable],
        replica_id: i32 [..=14] = -1,
        replica_state: ReplicaState [15.., tag 1],
        max_wait_ms: i32,
        min_bytes: i32,
        max_bytes: i32 = i32::MAX,
        isolation_level: i8,
        session_id: i32 [7.., ignorable],
        session_epoch: i32 [7.., ignorable] = -1,
        topics: Vec<FetchTopic>,
        forgotten_topics_data: Vec<ForgottenTopic> [7..],
        rack_id: KString [11.., ignorable],
    }

    /// The value of [`FetchRequest::replica_state`].
    ReplicaState {
        replica_id: i32 = -1,
        replica_epoch: i64 = -1,
    }

    /// An entry of [`FetchRequest::topics`].
    FetchTopic {
        topic: KString [..=12, ignorable],
        topic_id: Uuid [13.., ignorable],
        partitions: Vec<FetchPartition>,
    }

    /// An entry of [`FetchTopic::partitions`].
    FetchPartition {
        partition: i32,
        current_leader_epoch: i32 [9.., ignorable] = -1,
        fetch_offset: i64,
        last_fetched_epoch: i32 [12..] = -1,
        log_start_offset: i64 [5.., ignorable] = -1,
        partition_max_bytes: i32,
        replica_directory_id: Uuid [17.., tag 0, ignorable],
        high_watermark: i64 [18.., tag 1, ignorable] = i64::MAX,
    }

    /// An entry of [`FetchRequest::forgotten_topics_data`].
    ForgottenTopic {
        topic: KString [..=12, ignorable],
        topic_id: Uuid [13.., ignorable],
        partitions: Vec<i32>,
    }

    /// The batches found.
    FetchResponse(Fetch) {
        throttle_time_ms: i32,
        error_code: i16 [7.., ignorable],
        session_id: i32 [7..],
        responses: Vec<FetchableTopicResponse>,
        node_endpoints: Vec<NodeEndpoint> [16.., tag 0],
    }

    /// An entry of [`FetchResponse::responses`].
    FetchableTopicResponse {
        topic: KString [..=12, ignorable],
        topic_id: Uuid [13.., ignorable],
        partitions: Vec<PartitionData>,
    }

    /// An entry of [`FetchableTopicResponse::partitions`].
    PartitionData {
        partition_index: i32,
        error_code: i16,
        high_watermark: i64,
        last_stable_offset: i64 = -1,
        log_start_offset: i64 [5.., ignorable] = -1,
        diverging_epoch: EpochEndOffset [12.., tag 0],
        current_leader: LeaderIdAndEpoch [12.., tag 1],
        snapshot_id: SnapshotId [12.., tag 2],
        aborted_transactions: Option<Vec<AbortedTransaction>>,
        preferred_read_replica: i32 [11..] = -1,
        records: Option<Records>,
    }

    /// The value of [`PartitionData::diverging_epoch`].
    EpochEndOffset {
        epoch: i32 = -1,
        end_offset: i64 = -1,
    }

    /// The value of [`PartitionData::snapshot_id`].
    SnapshotId {
        end_offset: i64 = -1,
        epoch: i32 = -1,
    }

    /// An entry of [`PartitionData::aborted_transactions`].
    AbortedTransaction {
        producer_id: i64,
        first_offset: i64,
    }
}
