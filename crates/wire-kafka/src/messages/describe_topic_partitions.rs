//! DescribeTopicPartitions (75): partitions of topics, page by page.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// Asks for partitions of topics, page by page.
    DescribeTopicPartitionsRequest(DescribeTopicPartitions) {
        topics: Vec<TopicRequest>,
        response_partition_limit: i32 = 2000,
        cursor: Option<Cursor>,
    }

    /// An entry of [`DescribeTopicPartitionsRequest::topics`].
    TopicRequest {
        name: KString,
    }

    /// The value of [`DescribeTopicPartitionsRequest::cursor`].
    Cursor {
        topic_name: KString,
        partition_index: i32,
    }

    /// The answer to [`DescribeTopicPartitionsRequest`].
    DescribeTopicPartitionsResponse(DescribeTopicPartitions) {
        throttle_time_ms: i32,
        topics: Vec<DescribeTopicPartitionsResponseTopic>,
        next_cursor: Option<Cursor>,
    }

    /// An entry of [`DescribeTopicPartitionsResponse::topics`].
    DescribeTopicPartitionsResponseTopic {
        error_code: i16,
        name: Option<KString>,
        topic_id: Uuid,
        is_internal: bool,
        partitions: Vec<DescribeTopicPartitionsResponsePartition>,
        topic_authorized_operations: i32 = i32::MIN,
    }

    /// An entry of [`DescribeTopicPartitionsResponseTopic::partitions`].
    DescribeTopicPartitionsResponsePartition {
        error_code: i16,
        partition_index: i32,
        leader_id: i32,
        leader_epoch: i32 = -1,
        replica_nodes: Vec<i32>,
        isr_nodes: Vec<i32>,
        eligible_leader_replicas: Option<Vec<i32>>,
        last_known_elr: Option<Vec<i32>>,
        offline_replicas: Vec<i32>,
    }
}
