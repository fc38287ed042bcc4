//! AlterPartitionReassignments: partitions stay where they are. A plan that names the place a partition has is done
//! already; any other is refused.

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
    let Some(seat) = broker.topics.get(topic).and_then(|t| t.seat(wanted.partition_index)) else {
        return ErrorCode::UnknownTopicOrPartition;
    };
    match &wanted.replicas {
        None => ErrorCode::NoReassignmentInProgress,
        Some(replicas) if **replicas == *seat.place().replicas => ErrorCode::None,
        Some(_) => ErrorCode::InvalidReplicaAssignment,
    }
}
