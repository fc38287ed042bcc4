//! AlterPartitionReassignments: with one node there is nowhere to move a partition to. A plan that names
//! this node alone is done already; any other is refused.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::alter_partition_reassignments::{
    AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse, ReassignablePartition,
    ReassignablePartitionResponse, ReassignableTopicResponse,
};

use crate::broker::Broker;

pub(crate) fn handle(
    broker: &Broker,
    request: AlterPartitionReassignmentsRequest,
    _version: i16,
) -> AlterPartitionReassignmentsResponse {
    let responses = request.topics.into_iter().map(|topic| ReassignableTopicResponse {
        partitions: topic
            .partitions
            .iter()
            .map(|wanted| {
                let code = judge(broker, &topic.name, wanted);
                ReassignablePartitionResponse {
                    partition_index: wanted.partition_index,
                    error_code: code as i16,
                    error_message: (code != ErrorCode::None).then(|| code.message().into()),
                }
            })
            .collect(),
        name: topic.name,
    });
    AlterPartitionReassignmentsResponse { responses: responses.collect(), ..Default::default() }
}

fn judge(broker: &Broker, topic: &str, wanted: &ReassignablePartition) -> ErrorCode {
    if broker.topics.partition(topic, wanted.partition_index).is_none() {
        return ErrorCode::UnknownTopicOrPartition;
    }
    match &wanted.replicas {
        None => ErrorCode::NoReassignmentInProgress,
        Some(replicas) if *replicas == [broker.options.node_id.0] => ErrorCode::None,
        Some(_) => ErrorCode::InvalidReplicaAssignment,
    }
}
