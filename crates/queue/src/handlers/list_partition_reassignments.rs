//! ListPartitionReassignments: the moves under way, as the records of the partitions say.

use moim_base::BrokerId;
use moim_wire_kafka::messages::list_partition_reassignments::{
    ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse, OngoingPartitionReassignment,
    OngoingTopicReassignment,
};

use crate::broker::Broker;
use crate::topics::{Seat, Topic};

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
    let seats = topic.seats.load();
    let asked = |seat: &&std::sync::Arc<Seat>| wanted.is_none_or(|w| w.contains(&seat.index));
    let partitions: Vec<_> = seats.iter().filter(asked).filter_map(|seat| of_partition(seat)).collect();
    (!partitions.is_empty()).then(|| OngoingTopicReassignment { name: (&*topic.name).into(), partitions })
}

fn of_partition(seat: &Seat) -> Option<OngoingPartitionReassignment> {
    let numbers = |nodes: &[BrokerId]| nodes.iter().map(|node| node.0).collect();
    let place = seat.place();
    let record = place.record().filter(|record| record.is_moving())?;
    Some(OngoingPartitionReassignment {
        partition_index: seat.index,
        replicas: numbers(&record.replicas),
        adding_replicas: numbers(&record.adding),
        removing_replicas: numbers(&record.removing),
    })
}
