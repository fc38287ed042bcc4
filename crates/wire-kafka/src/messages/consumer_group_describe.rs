//! ConsumerGroupDescribe (69): state and members of new-style groups.

use crate::codec::messages;
use crate::{KString, Uuid};

messages! {
    /// Asks for state and members of new-style groups.
    ConsumerGroupDescribeRequest(ConsumerGroupDescribe) {
        group_ids: Vec<KString>,
        include_authorized_operations: bool,
    }

    /// The answer to [`ConsumerGroupDescribeRequest`].
    ConsumerGroupDescribeResponse(ConsumerGroupDescribe) {
        throttle_time_ms: i32,
        groups: Vec<DescribedGroup>,
    }

    /// An entry of [`ConsumerGroupDescribeResponse::groups`].
    DescribedGroup {
        error_code: i16,
        error_message: Option<KString>,
        group_id: KString,
        group_state: KString,
        group_epoch: i32,
        assignment_epoch: i32,
        assignor_name: KString,
        members: Vec<Member>,
        authorized_operations: i32 = i32::MIN,
    }

    /// An entry of [`DescribedGroup::members`].
    Member {
        member_id: KString,
        instance_id: Option<KString>,
        rack_id: Option<KString>,
        member_epoch: i32,
        client_id: KString,
        client_host: KString,
        subscribed_topic_names: Vec<KString>,
        subscribed_topic_regex: Option<KString>,
        assignment: Assignment,
        target_assignment: Assignment,
        member_type: i8 [1.., ignorable] = -1,
    }

    /// The value of [`Member::assignment`].
    Assignment {
        topic_partitions: Vec<TopicPartitions>,
    }

    /// An entry of [`Assignment::topic_partitions`].
    TopicPartitions {
        topic_id: Uuid,
        topic_name: KString,
        partitions: Vec<i32>,
    }
}
