//! Produce (0): append record batches to partitions.

use crate::codec::messages;
use crate::{KString, Records, Uuid};

messages! {
    /// Batches to append, by topic and partition.
    ProduceRequest(Produce) {
        transactional_id: Option<KString> [3..],
        acks: i16,
        timeout_ms: i32,
        topic_data: Vec<TopicProduceData>,
    }

    /// An entry of [`ProduceRequest::topic_data`].
    TopicProduceData {
        name: KString [..=12, ignorable],
        topic_id: Uuid [13.., ignorable],
        partition_data: Vec<PartitionProduceData>,
    }

    /// An entry of [`TopicProduceData::partition_data`].
    PartitionProduceData {
        index: i32,
        records: Option<Records>,
    }

    /// Where the batches went, or why not.
    ProduceResponse(Produce) {
        responses: Vec<TopicProduceResponse>,
        throttle_time_ms: i32 [1.., ignorable],
        node_endpoints: Vec<NodeEndpoint> [10.., tag 0],
    }

    /// An entry of [`ProduceResponse::responses`].
    TopicProduceResponse {
        name: KString [..=12, ignorable],
        topic_id: Uuid [13.., ignorable],
        partition_responses: Vec<PartitionProduceResponse>,
    }

    /// An entry of [`TopicProduceResponse::partition_responses`].
    PartitionProduceResponse {
        index: i32,
        error_code: i16,
        base_offset: i64,
        log_append_time_ms: i64 [2.., ignorable] = -1,
        log_start_offset: i64 [5.., ignorable] = -1,
        record_errors: Vec<BatchIndexAndErrorMessage> [8.., ignorable],
        error_message: Option<KString> [8.., ignorable],
        current_leader: LeaderIdAndEpoch [10.., tag 0],
    }

    /// An entry of [`PartitionProduceResponse::record_errors`].
    BatchIndexAndErrorMessage {
        batch_index: i32,
        batch_index_error_message: Option<KString>,
    }

    /// The value of [`PartitionProduceResponse::current_leader`].
    LeaderIdAndEpoch {
        leader_id: i32 = -1,
        leader_epoch: i32 = -1,
    }

    /// An entry of [`ProduceResponse::node_endpoints`].
    NodeEndpoint {
        node_id: i32,
        host: KString,
        port: i32,
        rack: Option<KString>,
    }
}
