//! DescribeTopicPartitions: paginated topic metadata.

use moim_wire_kafka::messages::describe_topic_partitions::{
    Cursor, DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition, DescribeTopicPartitionsResponseTopic,
};
use moim_wire_kafka::{ErrorCode, Uuid};

use crate::broker::Broker;
use crate::handlers::metadata::{self, ALL_TOPIC_OPERATIONS};
use crate::topics;

const MAX_PER_PAGE: i32 = 2_000;

pub(crate) fn handle(
    broker: &Broker,
    request: DescribeTopicPartitionsRequest,
    _version: i16,
) -> DescribeTopicPartitionsResponse {
    let mut names: Vec<String> = if request.topics.is_empty() {
        broker.topics.all().iter().map(|t| t.name.to_string()).collect()
    } else {
        request.topics.iter().map(|t| t.name.to_string()).collect()
    };
    names.sort();
    names.dedup();
    let (from_topic, from_partition) =
        request.cursor.as_ref().map_or(("", 0), |c| (c.topic_name.as_str(), c.partition_index.max(0)));
    let mut room = request.response_partition_limit.clamp(1, MAX_PER_PAGE) as usize;
    let mut response = DescribeTopicPartitionsResponse::default();
    for name in names.iter().filter(|n| n.as_str() >= from_topic) {
        if room == 0 {
            response.next_cursor = Some(Cursor { topic_name: name.into(), partition_index: 0 });
            break;
        }
        let first = if name == from_topic { from_partition } else { 0 };
        let (topic, rest) = describe(broker, name, first, room);
        room -= topic.partitions.len().min(room);
        response.topics.push(topic);
        if let Some(partition_index) = rest {
            response.next_cursor = Some(Cursor { topic_name: name.into(), partition_index });
            break;
        }
    }
    response
}

/// A page of one topic, and where the next page of it begins.
fn describe(
    broker: &Broker,
    name: &str,
    first: i32,
    room: usize,
) -> (DescribeTopicPartitionsResponseTopic, Option<i32>) {
    let Some(topic) = broker.topics.get(name) else {
        let code = match topics::refuse_name(name) {
            Some(_) => ErrorCode::InvalidTopicException,
            None => ErrorCode::UnknownTopicOrPartition,
        };
        let missing = DescribeTopicPartitionsResponseTopic {
            error_code: code as i16,
            name: Some(name.into()),
            ..Default::default()
        };
        return (missing, None);
    };
    let live = broker.live();
    let all = topic.partitions.load();
    let page = all.iter().skip(first as usize).take(room);
    let partitions: Vec<_> = page
        .map(|entry| {
            let shown = metadata::partition(entry, &live, 5);
            let registration = entry.registration();
            DescribeTopicPartitionsResponsePartition {
                error_code: shown.error_code,
                partition_index: shown.partition_index,
                leader_id: shown.leader_id,
                leader_epoch: shown.leader_epoch,
                replica_nodes: shown.replica_nodes,
                isr_nodes: shown.isr_nodes,
                eligible_leader_replicas: Some(registration.eligible()),
                last_known_elr: Some(registration.last_known()),
                offline_replicas: shown.offline_replicas,
            }
        })
        .collect();
    let next = first as usize + partitions.len();
    let rest = (next < all.len()).then_some(next as i32);
    let described = DescribeTopicPartitionsResponseTopic {
        name: Some(name.into()),
        topic_id: Uuid(topic.id.to_bytes()),
        is_internal: topic.is_internal(),
        partitions,
        topic_authorized_operations: ALL_TOPIC_OPERATIONS,
        ..Default::default()
    };
    (described, rest)
}
