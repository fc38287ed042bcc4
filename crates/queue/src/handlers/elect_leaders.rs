//! ElectLeaders: a partition on one node has its preferred leader, whenever it has one.

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::elect_leaders::{
    ElectLeadersRequest, ElectLeadersResponse, PartitionResult, ReplicaElectionResult,
};

use crate::broker::Broker;

pub(crate) fn handle(broker: &Broker, request: ElectLeadersRequest, _version: i16) -> ElectLeadersResponse {
    let Some(wanted) = request.topic_partitions else {
        // Asked for all partitions, only those that changed are listed: none.
        return ElectLeadersResponse::default();
    };
    let results = wanted.into_iter().map(|topic| ReplicaElectionResult {
        partition_result: topic
            .partitions
            .iter()
            .map(|&partition_id| {
                let code = if !broker.topics.has(&topic.topic, partition_id) {
                    ErrorCode::UnknownTopicOrPartition
                } else if broker.leader_of(&topic.topic, partition_id).is_some() {
                    ErrorCode::ElectionNotNeeded
                } else {
                    ErrorCode::PreferredLeaderNotAvailable
                };
                let error_message = Some(code.message().into());
                PartitionResult { partition_id, error_code: code as i16, error_message }
            })
            .collect(),
        topic: topic.topic,
    });
    ElectLeadersResponse { replica_election_results: results.collect(), ..Default::default() }
}
