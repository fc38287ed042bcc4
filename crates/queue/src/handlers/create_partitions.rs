//! CreatePartitions: adds partitions to topics. The partition count never shrinks.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::create_partitions::{
    CreatePartitionsRequest, CreatePartitionsResponse, CreatePartitionsTopic, CreatePartitionsTopicResult,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::create_topics::assigned;
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
    broker.topics.catch_up(&wanted.name).await?;
    let topic = broker.topics.get(&wanted.name).ok_or(ErrorCode::UnknownTopicOrPartition)?;
    if topic.is_internal() {
        return Err(Refused::new(
            ErrorCode::InvalidTopicException,
            "The partitions of internal topics are fixed.",
        ));
    }
    if let Some(refused) = broker.topics.refuse_growth(&topic, wanted.count, &broker.maker()) {
        return Err(refused);
    }
    let places = match &wanted.assignments {
        None => None,
        Some(assignments) => {
            let new = wanted.count - topic.count();
            if i32::try_from(assignments.len()) != Ok(new) {
                let why = format!("{new} assignments are needed.");
                return Err(Refused::new(ErrorCode::InvalidReplicaAssignment, why));
            }
            let factor = topic.entry(0).map(|entry| entry.registration().replicas().len());
            Some(assigned(broker, assignments.iter().map(|a| a.broker_ids.as_slice()), factor)?)
        }
    };
    if validate_only {
        return Ok(());
    }
    let maker = || broker.maker();
    let grown = broker.topics.grow(&topic, wanted.count, &maker, places.as_deref()).await;
    broker.apply_topic_events();
    grown
}
