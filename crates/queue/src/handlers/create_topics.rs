//! CreateTopics: creates topics with the requested partitions, replicas and settings.

use std::collections::BTreeMap;
use std::sync::Arc;

use moim_base::BrokerId;
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
            "The broker creates its internal topics itself.",
        ));
    }
    let maker = broker.maker();
    let (partitions, replication_factor, configs) = (new.partitions, new.factor(&maker), new.configs.clone());
    let id = if validate_only {
        broker.topics.refuse_new(&new, &maker).map_or(Ok(Uuid::ZERO), Err)?
    } else {
        Uuid(broker.create_topic(new).await?.id.to_bytes())
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

/// Validates a requested topic.
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
    let (mut partitions, factor) = (wanted.num_partitions, wanted.replication_factor);
    let mut assignment = None;
    if !wanted.assignments.is_empty() {
        if partitions != -1 || factor != -1 {
            return Err(Refused::new(
                ErrorCode::InvalidRequest,
                "Both replica assignments and a number of partitions or a replication factor are given; use one of them.",
            ));
        }
        let mut assignments: Vec<_> = wanted.assignments.iter().collect();
        assignments.sort_unstable_by_key(|a| a.partition_index);
        let complete = (0..).zip(&assignments).all(|(index, a)| a.partition_index == index);
        if !complete {
            return Err(Refused::new(
                ErrorCode::InvalidReplicaAssignment,
                "Partitions must be numbered from 0 without gaps.",
            ));
        }
        assignment = Some(assigned(broker, assignments.iter().map(|a| a.broker_ids.as_slice()), None)?);
        partitions = i32::try_from(assignments.len()).unwrap_or(i32::MAX);
    }
    if partitions == -1 {
        partitions = broker.options.num_partitions;
    }
    let replication_factor = (factor != -1).then_some(factor);
    Ok(NewTopic { name: wanted.name.to_string(), partitions, replication_factor, configs, assignment })
}

/// The client's replica assignment: registered brokers, live or not, without duplicates, and the same number for each
/// partition.
pub(crate) fn assigned<'a>(
    broker: &Broker,
    assignments: impl Iterator<Item = &'a [i32]>,
    factor: Option<usize>,
) -> Result<Vec<Vec<BrokerId>>, Refused> {
    let me = broker.options.node_id;
    let mut factor = factor;
    let parse_replicas = |brokers: &[i32]| {
        let refuse =
            |why: &str| Err(Refused::new(ErrorCode::InvalidReplicaAssignment, format!("{brokers:?}: {why}")));
        if brokers.is_empty() {
            return refuse("a partition needs a replica.");
        }
        if brokers.iter().enumerate().any(|(at, id)| brokers[..at].contains(id)) {
            return refuse("a broker is named twice.");
        }
        if let Some(unknown) = brokers.iter().find(|id| !broker.brokers.is_registered(me, **id)) {
            return refuse(&format!("no broker {unknown} is registered."));
        }
        if brokers.len() != *factor.get_or_insert(brokers.len()) {
            return refuse("every partition of a topic has the same number of replicas.");
        }
        Ok(brokers.iter().map(|id| BrokerId(*id)).collect())
    };
    assignments.map(parse_replicas).collect()
}
