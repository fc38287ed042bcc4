//! AlterPartitionReassignments: starts or cancels a reassignment. The change is one of the partition's registration;
//! the controller completes the reassignment when the new replicas are in sync.

use std::sync::Arc;

use moim_base::BrokerId;
use moim_replica::controller::MoveError;
use moim_replica::controller::requests::{self, RequestError};
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::alter_partition_reassignments::{
    AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse, ReassignablePartition,
    ReassignablePartitionResponse, ReassignableTopicResponse,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::partition::Refused;
use crate::partition_registration;
use crate::topics::refuse_repository;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: AlterPartitionReassignmentsRequest,
    _: Request,
) -> AlterPartitionReassignmentsResponse {
    let mut responses = Vec::with_capacity(request.topics.len());
    for topic in request.topics {
        let mut partitions = Vec::with_capacity(topic.partitions.len());
        for wanted in &topic.partitions {
            let refused =
                reassign(&broker, &topic.name, wanted, request.allow_replication_factor_change).await.err();
            partitions.push(ReassignablePartitionResponse {
                partition_index: wanted.partition_index,
                error_code: refused.as_ref().map_or(ErrorCode::None, |r| r.code) as i16,
                error_message: refused.map(|r| r.message.unwrap_or_else(|| r.code.message().into()).into()),
            });
        }
        responses.push(ReassignableTopicResponse { name: topic.name, partitions });
    }
    AlterPartitionReassignmentsResponse {
        allow_replication_factor_change: request.allow_replication_factor_change,
        responses,
        ..Default::default()
    }
}

async fn reassign(
    broker: &Broker,
    topic: &str,
    wanted: &ReassignablePartition,
    may_change_factor: bool,
) -> Result<(), Refused> {
    let index = wanted.partition_index;
    let topic = broker.topics.get(topic).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    let entry = topic.entry(index).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    let target: Option<Vec<BrokerId>> =
        wanted.replicas.as_ref().map(|nodes| nodes.iter().map(|node| BrokerId(*node)).collect());
    if let Some(target) = &target {
        let registration = entry.registration();
        let settled = registration.record().map_or(0, |record| record.settled().len());
        if !may_change_factor && target.len() != settled {
            return Err(Refused::new(
                ErrorCode::InvalidReplicationFactor,
                format!("The partition has {settled} replicas, and {} are named.", target.len()),
            ));
        }
        if let Some(away) = target.iter().find(|node| broker.live_broker(**node).is_none()) {
            let why = format!("Broker {away} does not run.");
            return Err(Refused::new(ErrorCode::InvalidReplicaAssignment, why));
        }
    }
    let id = partition_registration::id(topic.id, index);
    requests::reassign(broker.repository.as_ref(), id, target.as_deref()).await.map_err(refuse)
}

/// Maps a failed request to the client's error.
pub(crate) fn refuse(error: RequestError) -> Refused {
    let code = match &error {
        RequestError::Move(MoveError::UnknownPartition) => ErrorCode::UnknownTopicOrPartition,
        RequestError::Move(MoveError::InvalidReplicas | MoveError::NoInSyncReplicaStays) => {
            ErrorCode::InvalidReplicaAssignment
        }
        RequestError::Move(MoveError::NoneInProgress) => ErrorCode::NoReassignmentInProgress,
        RequestError::Move(MoveError::Busy) | RequestError::Contended => ErrorCode::RequestTimedOut,
        RequestError::ElectionNotNeeded => ErrorCode::ElectionNotNeeded,
        RequestError::PreferredNotAvailable => ErrorCode::PreferredLeaderNotAvailable,
        RequestError::NoReplicaAvailable => ErrorCode::EligibleLeadersNotAvailable,
        RequestError::Damaged(_) => ErrorCode::UnknownServerError,
        RequestError::Repository(_) => ErrorCode::None,
    };
    match error {
        RequestError::Repository(error) => refuse_repository(error),
        error => Refused::new(code, error.to_string()),
    }
}
