//! CreateTopics.

use std::collections::BTreeMap;
use std::sync::Arc;

use moim_wire_kafka::messages::{
    CreatableTopic, CreatableTopicConfigs, CreatableTopicResult, CreateTopicsRequest, CreateTopicsResponse,
};
use moim_wire_kafka::{ErrorCode, Uuid};

use crate::broker::Broker;
use crate::config;
use crate::dispatch::Request;
use crate::handlers::repeated;
use crate::partition::Refused;
use crate::topics::{self, NewTopic};

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: CreateTopicsRequest,
    _: Request,
) -> CreateTopicsResponse {
    let mut results = Vec::with_capacity(request.topics.len());
    let twice = repeated(request.topics.iter().map(|t| t.name.as_str()));
    for wanted in &request.topics {
        let result = if twice.contains(wanted.name.as_str()) {
            Err(Refused::new(ErrorCode::InvalidRequest, "The topic is named twice in the request."))
        } else {
            create(&broker, wanted, request.validate_only).await
        };
        results.push(match result {
            Ok(result) => result,
            Err(refused) => CreatableTopicResult {
                name: wanted.name.clone(),
                error_code: refused.code as i16,
                error_message: refused.message.map(Into::into),
                configs: Some(Vec::new()),
                ..Default::default()
            },
        });
    }
    CreateTopicsResponse { topics: results, ..Default::default() }
}

async fn create(
    broker: &Broker,
    wanted: &CreatableTopic,
    validate_only: bool,
) -> Result<CreatableTopicResult, Refused> {
    let new = new_topic(broker, wanted)?;
    if topics::is_internal(&new.name) {
        return Err(Refused::new(
            ErrorCode::InvalidTopicException,
            "The broker makes its internal topics itself.",
        ));
    }
    let (partitions, replication_factor, configs) =
        (new.partitions, new.replication_factor, new.configs.clone());
    let id = if validate_only {
        broker.topics.refuse_new(&new).map_or(Ok(Uuid::ZERO), Err)?
    } else {
        Uuid(broker.topics.create(new).await?.id.to_bytes())
    };
    let defaults = broker.topics.defaults();
    let shown = config::TOPIC_SETTINGS.iter().map(|setting| CreatableTopicConfigs {
        name: setting.name.into(),
        value: Some(config::effective(setting.name, &configs, &defaults).into()),
        read_only: false,
        config_source: config::source(setting.name, &configs, &defaults),
        is_sensitive: false,
    });
    Ok(CreatableTopicResult {
        name: wanted.name.clone(),
        topic_id: id,
        num_partitions: partitions,
        replication_factor,
        configs: Some(shown.collect()),
        ..Default::default()
    })
}

fn new_topic(broker: &Broker, wanted: &CreatableTopic) -> Result<NewTopic, Refused> {
    let mut configs = BTreeMap::new();
    for setting in &wanted.configs {
        let value = setting.value.as_ref().ok_or_else(|| {
            Refused::new(
                ErrorCode::InvalidConfig,
                format!("Null value not supported for topic configs: {}", setting.name),
            )
        })?;
        configs.insert(setting.name.to_string(), value.to_string());
    }
    let (mut partitions, mut replication_factor) = (wanted.num_partitions, wanted.replication_factor);
    if !wanted.assignments.is_empty() {
        if partitions != -1 || replication_factor != -1 {
            return Err(Refused::new(
                ErrorCode::InvalidRequest,
                "Both replica assignments and a number of partitions or a replication factor are given; use one of them.",
            ));
        }
        let mut indexes: Vec<i32> = wanted.assignments.iter().map(|a| a.partition_index).collect();
        indexes.sort_unstable();
        let complete = indexes.iter().enumerate().all(|(i, index)| i32::try_from(i) == Ok(*index));
        let here = wanted.assignments.iter().all(|a| a.broker_ids == [broker.options.node_id.0]);
        if !complete || !here {
            return Err(Refused::new(
                ErrorCode::InvalidReplicaAssignment,
                format!(
                    "Partitions must be numbered from 0 without gaps and placed on broker {}.",
                    broker.options.node_id
                ),
            ));
        }
        partitions = i32::try_from(indexes.len()).unwrap_or(i32::MAX);
        replication_factor = 1;
    }
    if partitions == -1 {
        partitions = broker.options.num_partitions;
    }
    if replication_factor == -1 {
        replication_factor = 1;
    }
    Ok(NewTopic { name: wanted.name.to_string(), partitions, replication_factor, configs })
}
