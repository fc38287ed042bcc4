//! DescribeProducers (61): the producers that a partition remembers.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for the producers that a partition remembers.
    DescribeProducersRequest(DescribeProducers) {
        topics: Vec<TopicRequest>,
    }

    /// An entry of [`DescribeProducersRequest::topics`].
    TopicRequest {
        name: KString,
        partition_indexes: Vec<i32>,
    }

    /// The answer to [`DescribeProducersRequest`].
    DescribeProducersResponse(DescribeProducers) {
        throttle_time_ms: i32,
        topics: Vec<TopicResponse>,
    }

    /// An entry of [`DescribeProducersResponse::topics`].
    TopicResponse {
        name: KString,
        partitions: Vec<PartitionResponse>,
    }

    /// An entry of [`TopicResponse::partitions`].
    PartitionResponse {
        partition_index: i32,
        error_code: i16,
        error_message: Option<KString>,
        active_producers: Vec<ProducerState>,
    }

    /// An entry of [`PartitionResponse::active_producers`].
    ProducerState {
        producer_id: i64,
        producer_epoch: i32,
        last_sequence: i32 = -1,
        last_timestamp: i64 = -1,
        coordinator_epoch: i32,
        current_txn_start_offset: i64 = -1,
    }
}
