//! ConsumerGroupHeartbeat (68): all that a member of a new-style group says.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// What changed at the member since its last heartbeat; null means no change.
    ConsumerGroupHeartbeatRequest(ConsumerGroupHeartbeat) {
        group_id: KString,
        member_id: KString,
        member_epoch: i32,
        instance_id: Option<KString>,
        rack_id: Option<KString>,
        rebalance_timeout_ms: i32 = -1,
        subscribed_topic_names: Option<Vec<KString>>,
        subscribed_topic_regex: Option<KString> [1..],
        server_assignor: Option<KString>,
        topic_partitions: Option<Vec<TopicPartitions>>,
    }

    /// An entry of [`ConsumerGroupHeartbeatRequest::topic_partitions`].
    TopicPartitions {
        topic_id: Uuid,
        partitions: Vec<i32>,
    }

    /// The epoch of the member, and its assignment when that changed.
    ConsumerGroupHeartbeatResponse(ConsumerGroupHeartbeat) {
        throttle_time_ms: i32,
        error_code: i16,
        error_message: Option<KString>,
        member_id: Option<KString>,
        member_epoch: i32,
        heartbeat_interval_ms: i32,
        assignment: Option<Assignment>,
    }

    /// The value of [`ConsumerGroupHeartbeatResponse::assignment`].
    Assignment {
        topic_partitions: Vec<TopicPartitions>,
    }
}
