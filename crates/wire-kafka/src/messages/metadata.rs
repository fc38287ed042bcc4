//! Metadata (3): brokers, topics, and who leads which partition.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// Topics to describe; null means all of them.
    MetadataRequest(Metadata) {
        topics: Option<Vec<MetadataRequestTopic>> [null 1..] = Some(Vec::new()),
        allow_auto_topic_creation: bool [4..] = true,
        include_cluster_authorized_operations: bool [8..=10],
        include_topic_authorized_operations: bool [8..],
    }

    /// An entry of [`MetadataRequest::topics`].
    MetadataRequestTopic {
        topic_id: Uuid [10.., ignorable],
        name: Option<KString> [null 10..] = Some(KString::default()),
    }

    /// The brokers and the topics asked for.
    MetadataResponse(Metadata) {
        throttle_time_ms: i32 [3.., ignorable],
        brokers: Vec<MetadataResponseBroker>,
        cluster_id: Option<KString> [2.., ignorable],
        controller_id: i32 [1.., ignorable] = -1,
        topics: Vec<MetadataResponseTopic>,
        cluster_authorized_operations: i32 [8..=10] = i32::MIN,
        error_code: i16 [13.., ignorable],
    }

    /// An entry of [`MetadataResponse::brokers`].
    MetadataResponseBroker {
        node_id: i32,
        host: KString,
        port: i32,
        rack: Option<KString> [1.., ignorable],
    }

    /// An entry of [`MetadataResponse::topics`].
    MetadataResponseTopic {
        error_code: i16,
        name: Option<KString> [null 12..] = Some(KString::default()),
        topic_id: Uuid [10.., ignorable],
        is_internal: bool [1.., ignorable],
        partitions: Vec<MetadataResponsePartition>,
        topic_authorized_operations: i32 [8..] = i32::MIN,
    }

    /// An entry of [`MetadataResponseTopic::partitions`].
    MetadataResponsePartition {
        error_code: i16,
        partition_index: i32,
        leader_id: i32,
        leader_epoch: i32 [7.., ignorable] = -1,
        replica_nodes: Vec<i32>,
        isr_nodes: Vec<i32>,
        offline_replicas: Vec<i32> [5.., ignorable],
    }
}
