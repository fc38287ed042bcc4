//! ElectLeaders: preferred election, or unclean election when no in-sync replica can lead and an operator accepts
//! data loss.

use std::sync::Arc;

use moim_replica::controller::requests::{self, ElectionKind};
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::elect_leaders::{
    ElectLeadersRequest, ElectLeadersResponse, PartitionResult, ReplicaElectionResult,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::alter_partition_reassignments::refuse;
use crate::partition::Refused;
use crate::partition_registration;

const PREFERRED: i8 = 0;
const UNCLEAN: i8 = 1;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: ElectLeadersRequest,
    _: Request,
) -> ElectLeadersResponse {
    let kind = match request.election_type {
        PREFERRED => ElectionKind::Preferred,
        UNCLEAN => ElectionKind::Unclean,
        _ => {
            let error_code = ErrorCode::InvalidRequest as i16;
            return ElectLeadersResponse { error_code, ..Default::default() };
        }
    };
    // A request for all partitions lists only those that changed, or should have.
    let all = request.topic_partitions.is_none();
    let wanted: Vec<(String, Vec<i32>)> = match request.topic_partitions {
        Some(wanted) => wanted.into_iter().map(|t| (t.topic.to_string(), t.partitions)).collect(),
        None => broker.topics.all().iter().map(|t| (t.name.to_string(), (0..t.count()).collect())).collect(),
    };
    let mut results = Vec::new();
    for (topic, partitions) in wanted {
        let mut partition_result = Vec::new();
        for partition_id in partitions {
            if all && !needs(&broker, &topic, partition_id, kind) {
                continue;
            }
            let refused = elect(&broker, &topic, partition_id, kind).await.err();
            if all && refused.as_ref().is_some_and(|r| r.code == ErrorCode::ElectionNotNeeded) {
                continue;
            }
            partition_result.push(PartitionResult {
                partition_id,
                error_code: refused.as_ref().map_or(ErrorCode::None, |r| r.code) as i16,
                error_message: refused.map(|r| r.message.unwrap_or_else(|| r.code.message().into()).into()),
            });
        }
        if !partition_result.is_empty() || !all {
            results.push(ReplicaElectionResult { topic: topic.into(), partition_result });
        }
    }
    ElectLeadersResponse { replica_election_results: results, ..Default::default() }
}

/// True if an election is needed, as far as this broker has read: a repository read for every partition of a large
/// cluster would be too expensive.
fn needs(broker: &Broker, topic: &str, index: i32, kind: ElectionKind) -> bool {
    let entry = broker.topics.get(topic).and_then(|topic| topic.entry(index));
    entry.is_some_and(|entry| match (entry.registration().record(), kind) {
        (None, _) => false,
        (Some(record), ElectionKind::Preferred) => record.leader != record.replicas.first().copied(),
        (Some(record), ElectionKind::Unclean) => record.leader.is_none(),
    })
}

async fn elect(broker: &Broker, topic: &str, index: i32, kind: ElectionKind) -> Result<(), Refused> {
    let topic = broker.topics.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    topic.entry(index).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    let id = partition_registration::id(topic.id, index);
    requests::elect(broker.repository.as_ref(), id, kind).await.map_err(refuse)
}
