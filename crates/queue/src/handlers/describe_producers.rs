//! DescribeProducers: the active producers of a partition. Any replica responds, from its own producer state: tools
//! that look for hanging transactions query every broker about the partitions that it holds.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::describe_producers::{
    DescribeProducersRequest, DescribeProducersResponse, PartitionResponse, ProducerState, TopicResponse,
};

use crate::broker::Broker;

pub(crate) fn handle(
    broker: &Broker,
    request: DescribeProducersRequest,
    _version: i16,
) -> DescribeProducersResponse {
    let topics = request.topics.into_iter().map(|topic| TopicResponse {
        partitions: topic
            .partition_indexes
            .iter()
            .map(|&index| describe(broker, &topic.name, index))
            .collect(),
        name: topic.name,
    });
    DescribeProducersResponse { topics: topics.collect(), ..Default::default() }
}

fn describe(broker: &Broker, topic: &str, index: i32) -> PartitionResponse {
    let known = broker.topics.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition);
    let partition = match known.and_then(|topic| topic.replica(index)) {
        Ok(partition) => partition,
        Err(code) => {
            return PartitionResponse {
                partition_index: index,
                error_code: code as i16,
                error_message: Some(code.message().into()),
                ..Default::default()
            };
        }
    };
    let producers = partition.with_producers(|p| p.describe());
    let active_producers = producers.into_iter().map(|p| ProducerState {
        producer_id: p.producer_id,
        producer_epoch: i32::from(p.epoch),
        last_sequence: p.last_sequence,
        last_timestamp: p.last_timestamp,
        coordinator_epoch: p.coordinator_epoch,
        current_txn_start_offset: p.txn_start.unwrap_or(-1),
    });
    PartitionResponse {
        partition_index: index,
        active_producers: active_producers.collect(),
        ..Default::default()
    }
}
