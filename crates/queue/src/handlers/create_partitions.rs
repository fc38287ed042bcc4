//! CreatePartitions: gives topics more partitions. Fewer is never possible.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::create_partitions::{
    CreatePartitionsRequest, CreatePartitionsResponse, CreatePartitionsTopic, CreatePartitionsTopicResult,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::repeated;
use crate::partition::Refused;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: CreatePartitionsRequest,
    _: Request,
) -> CreatePartitionsResponse {
    let mut results = Vec::with_capacity(request.topics.len());
    let twice = repeated(request.topics.iter().map(|t| t.name.as_str()));
    for wanted in &request.topics {
        let result = if twice.contains(wanted.name.as_str()) {
            Err(Refused::new(ErrorCode::InvalidRequest, "The topic is named twice in the request."))
        } else {
            grow(&broker, wanted, request.validate_only).await
        };
        let (code, message) = result.err().map_or((ErrorCode::None, None), |r| (r.code, r.message));
        results.push(CreatePartitionsTopicResult {
            name: wanted.name.clone(),
            error_code: code as i16,
            error_message: message.map(Into::into),
        });
    }
    CreatePartitionsResponse { results, ..Default::default() }
}

async fn grow(broker: &Broker, wanted: &CreatePartitionsTopic, validate_only: bool) -> Result<(), Refused> {
    let topic = broker.topics.get(&wanted.name).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    if topic.is_internal() {
        return Err(Refused::new(
            ErrorCode::InvalidTopicException,
            "The partitions of internal topics are fixed.",
        ));
    }
    if let Some(refused) = broker.topics.refuse_growth(&topic, wanted.count) {
        return Err(refused);
    }
    if let Some(assignments) = &wanted.assignments {
        let new = (wanted.count as usize).saturating_sub(topic.partitions.load().len());
        let here = assignments.iter().all(|a| a.broker_ids == [broker.options.node_id.0]);
        if assignments.len() != new || !here {
            return Err(Refused::new(
                ErrorCode::InvalidReplicaAssignment,
                format!("{new} assignments to broker {} are needed.", broker.options.node_id),
            ));
        }
    }
    if validate_only { Ok(()) } else { broker.topics.grow(&topic, wanted.count).await }
}
