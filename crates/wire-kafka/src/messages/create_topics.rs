//! CreateTopics (19): create topics.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// Asks to create topics.
    CreateTopicsRequest(CreateTopics) {
        topics: Vec<CreatableTopic>,
        timeout_ms: i32 = 60000,
        validate_only: bool,
    }

    /// An entry of [`CreateTopicsRequest::topics`].
    CreatableTopic {
        name: KString,
        num_partitions: i32,
        replication_factor: i16,
        assignments: Vec<CreatableReplicaAssignment>,
        configs: Vec<CreatableTopicConfig>,
    }

    /// An entry of [`CreatableTopic::assignments`].
    CreatableReplicaAssignment {
        partition_index: i32,
        broker_ids: Vec<i32>,
    }

    /// An entry of [`CreatableTopic::configs`].
    CreatableTopicConfig {
        name: KString,
        value: Option<KString>,
    }

    /// The answer to [`CreateTopicsRequest`].
    CreateTopicsResponse(CreateTopics) {
        throttle_time_ms: i32,
        topics: Vec<CreatableTopicResult>,
    }

    /// An entry of [`CreateTopicsResponse::topics`].
    CreatableTopicResult {
        name: KString,
        topic_id: Uuid [7.., ignorable],
        error_code: i16,
        error_message: Option<KString>,
        topic_config_error_code: i16 [5.., tag 0, ignorable],
        num_partitions: i32 [5.., ignorable] = -1,
        replication_factor: i16 [5.., ignorable] = -1,
        configs: Option<Vec<CreatableTopicConfigs>> [5.., ignorable],
    }

    /// An entry of [`CreatableTopicResult::configs`].
    CreatableTopicConfigs {
        name: KString,
        value: Option<KString>,
        read_only: bool,
        config_source: i8 = -1,
        is_sensitive: bool,
    }
}
