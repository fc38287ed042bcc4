//! AlterConfigs (the older form): replaces all settings of a resource at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::alter_configs::{
    AlterConfigsRequest, AlterConfigsResource, AlterConfigsResourceResponse, AlterConfigsResponse,
};

use crate::broker::Broker;
use crate::config;
use crate::dispatch::Request;
use crate::handlers::describe_configs::{BROKER, TOPIC};
use crate::partition::Refused;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: AlterConfigsRequest,
    _: Request,
) -> AlterConfigsResponse {
    let mut responses = Vec::with_capacity(request.resources.len());
    for resource in &request.resources {
        let result = alter(&broker, resource, request.validate_only).await;
        responses.push(response(resource.resource_type, &resource.resource_name, result));
    }
    AlterConfigsResponse { responses, ..Default::default() }
}

pub(crate) fn response(
    resource_type: i8,
    name: &str,
    result: Result<(), Refused>,
) -> AlterConfigsResourceResponse {
    let (code, message) = result.err().map_or((ErrorCode::None, None), |r| (r.code, r.message));
    AlterConfigsResourceResponse {
        error_code: code as i16,
        error_message: message.map(Into::into),
        resource_type,
        resource_name: name.into(),
    }
}

async fn alter(broker: &Broker, resource: &AlterConfigsResource, validate_only: bool) -> Result<(), Refused> {
    let mut wanted = BTreeMap::new();
    for setting in &resource.configs {
        let value = setting.value.as_ref().ok_or_else(|| {
            Refused::new(ErrorCode::InvalidConfig, format!("Null value not supported for: {}", setting.name))
        })?;
        wanted.insert(setting.name.to_string(), value.to_string());
    }
    match resource.resource_type {
        TOPIC => {
            broker.topics.catch_up(&resource.resource_name).await?;
            let topic =
                broker.topics.get(&resource.resource_name).ok_or(ErrorCode::UnknownTopicOrPartition)?;
            if validate_only {
                return config::refuse(&wanted)
                    .map_or(Ok(()), |why| Err(Refused::new(ErrorCode::InvalidConfig, why)));
            }
            broker.topics.configure(&topic, |_| Ok(wanted.clone())).await
        }
        BROKER if broker.is_me(&resource.resource_name) => {
            let mut changes: BTreeMap<String, Option<String>> =
                broker.dynamic.load().keys().map(|name| (name.clone(), None)).collect();
            changes.extend(wanted.into_iter().map(|(name, value)| (name, Some(value))));
            broker.change_settings(&changes, validate_only).await
        }
        _ => Err(Refused::new(
            ErrorCode::InvalidRequest,
            "Only settings of topics and of this broker can be changed.",
        )),
    }
}
