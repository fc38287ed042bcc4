//! ListPartitionReassignments: the ongoing reassignments, from the partition registrations.

use moim_base::BrokerId;
use moim_wire_kafka::messages::list_partition_reassignments::{
    ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse, OngoingPartitionReassignment,
    OngoingTopicReassignment,
};

use crate::broker::Broker;
use crate::topics::{PartitionEntry, Topic};

pub(crate) fn handle(
    broker: &Broker,
    request: ListPartitionReassignmentsRequest,
    _version: i16,
) -> ListPartitionReassignmentsResponse {
    let topics: Vec<_> = match request.topics {
        None => broker.topics.all().iter().filter_map(|topic| of_topic(topic, None)).collect(),
        Some(wanted) => wanted
            .iter()
            .filter_map(|wanted| {
                of_topic(&*broker.topics.get(&wanted.name)?, Some(&wanted.partition_indexes))
            })
            .collect(),
    };
    ListPartitionReassignmentsResponse { topics, ..Default::default() }
}

fn of_topic(topic: &Topic, wanted: Option<&[i32]>) -> Option<OngoingTopicReassignment> {
    let partitions = topic.partitions.load();
    let asked = |entry: &&std::sync::Arc<PartitionEntry>| wanted.is_none_or(|w| w.contains(&entry.index));
    let partitions: Vec<_> =
        partitions.iter().filter(asked).filter_map(|entry| of_partition(entry)).collect();
    (!partitions.is_empty()).then(|| OngoingTopicReassignment { name: (&*topic.name).into(), partitions })
}

fn of_partition(entry: &PartitionEntry) -> Option<OngoingPartitionReassignment> {
    let numbers = |nodes: &[BrokerId]| nodes.iter().map(|node| node.0).collect();
    let registration = entry.registration();
    let record = registration.record().filter(|record| record.is_moving())?;
    Some(OngoingPartitionReassignment {
        partition_index: entry.index,
        replicas: numbers(&record.replicas),
        adding_replicas: numbers(&record.adding),
        removing_replicas: numbers(&record.removing),
    })
}
