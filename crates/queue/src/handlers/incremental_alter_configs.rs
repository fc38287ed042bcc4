//! IncrementalAlterConfigs: changes single settings of a resource.

use std::collections::BTreeMap;
use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::incremental_alter_configs::{
    AlterConfigsResource, AlterableConfig, IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse,
};

use crate::broker::Broker;
use crate::broker_config;
use crate::config::{self, Kind, Setting};
use crate::dispatch::Request;
use crate::handlers::alter_configs::response;
use crate::handlers::describe_configs::{BROKER, TOPIC};
use crate::handlers::repeated;
use crate::partition::Refused;

const SET: i8 = 0;
const DELETE: i8 = 1;
const APPEND: i8 = 2;
const SUBTRACT: i8 = 3;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: IncrementalAlterConfigsRequest,
    _: Request,
) -> IncrementalAlterConfigsResponse {
    let mut responses = Vec::with_capacity(request.resources.len());
    for resource in &request.resources {
        let result = alter(&broker, resource, request.validate_only).await;
        responses.push(response(resource.resource_type, &resource.resource_name, result));
    }
    IncrementalAlterConfigsResponse { responses, ..Default::default() }
}

async fn alter(broker: &Broker, resource: &AlterConfigsResource, validate_only: bool) -> Result<(), Refused> {
    if let Some(name) = repeated(resource.configs.iter().map(|c| c.name.as_str())).into_iter().next() {
        return Err(Refused::new(
            ErrorCode::InvalidRequest,
            format!("Error due to duplicate config keys: {name}"),
        ));
    }
    match resource.resource_type {
        TOPIC => {
            broker.topics.catch_up(&resource.resource_name).await?;
            let topic =
                broker.topics.get(&resource.resource_name).ok_or(ErrorCode::UnknownTopicOrPartition)?;
            let change = |current: &_| change_all(broker, current, &resource.configs);
            if validate_only {
                return change(&topic.configs.load()).map(|_| ());
            }
            broker.topics.configure(&topic, change).await
        }
        BROKER if broker.is_me(&resource.resource_name) => {
            let dynamic = broker.dynamic.load();
            let mut changes = BTreeMap::new();
            for change in &resource.configs {
                let name = change.name.as_str();
                let setting = broker_config::changeable(name).ok_or_else(|| {
                    Refused::new(
                        ErrorCode::InvalidRequest,
                        format!("Cannot update these configs dynamically: {name}"),
                    )
                })?;
                let current = dynamic.get(name).map_or(setting.default, String::as_str);
                changes.insert(name.to_owned(), changed(change, setting, current)?);
            }
            broker.change_settings(&changes, validate_only).await
        }
        _ => Err(Refused::new(
            ErrorCode::InvalidRequest,
            "Only settings of topics and of this broker can be changed.",
        )),
    }
}

/// The topic's settings after the changes.
fn change_all(
    broker: &Broker,
    current: &BTreeMap<String, String>,
    changes: &[AlterableConfig],
) -> Result<BTreeMap<String, String>, Refused> {
    let defaults = broker.topics.defaults();
    let mut configs = current.clone();
    for change in changes {
        let setting = config::topic_setting(&change.name).ok_or_else(|| unknown(&change.name))?;
        let current = config::effective(setting.name, &configs, &defaults).to_owned();
        match changed(change, setting, &current)? {
            Some(value) => configs.insert(setting.name.to_owned(), value),
            None => configs.remove(setting.name),
        };
    }
    match config::refuse(&configs) {
        Some(why) => Err(Refused::new(ErrorCode::InvalidConfig, why)),
        None => Ok(configs),
    }
}

fn unknown(name: &str) -> Refused {
    Refused::new(ErrorCode::InvalidConfig, format!("Unknown topic config name: {name}"))
}

/// The value after the change; `None` reverts to the default.
fn changed(change: &AlterableConfig, setting: &Setting, current: &str) -> Result<Option<String>, Refused> {
    let given = || {
        change.value.as_deref().map(str::to_owned).ok_or_else(|| {
            Refused::new(ErrorCode::InvalidConfig, format!("Null value not supported for: {}", change.name))
        })
    };
    let list = || {
        if setting.kind == Kind::List {
            Ok(current
                .split(',')
                .map(str::trim)
                .filter(|v| !v.is_empty())
                .map(str::to_owned)
                .collect::<Vec<_>>())
        } else {
            Err(Refused::new(
                ErrorCode::InvalidConfig,
                format!("Can't append or subtract: {} is not a list", change.name),
            ))
        }
    };
    match change.config_operation {
        SET => Ok(Some(given()?)),
        DELETE => Ok(None),
        APPEND => {
            let mut values = list()?;
            for value in given()?.split(',') {
                if !values.iter().any(|v| v == value) {
                    values.push(value.to_owned());
                }
            }
            Ok(Some(values.join(",")))
        }
        SUBTRACT => {
            let gone = given()?;
            let values: Vec<String> =
                list()?.into_iter().filter(|v| !gone.split(',').any(|g| g == v)).collect();
            Ok(Some(values.join(",")))
        }
        other => Err(Refused::new(ErrorCode::InvalidRequest, format!("Unknown operation {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(operation: i8, value: &str, current: &str, expected: Option<&str>) {
        let setting = config::topic_setting("cleanup.policy").unwrap();
        let change = AlterableConfig {
            name: "cleanup.policy".into(),
            config_operation: operation,
            value: Some(value.into()),
        };
        assert_eq!(changed(&change, setting, current).unwrap().as_deref(), expected);
    }

    #[test]
    fn lists_grow_and_shrink() {
        check(APPEND, "compact", "delete", Some("delete,compact"));
        check(APPEND, "delete", "delete", Some("delete"));
        check(SUBTRACT, "delete", "delete,compact", Some("compact"));
        check(SET, "compact", "delete", Some("compact"));
        check(DELETE, "", "delete", None);
    }

    #[test]
    fn append_to_a_non_list_setting_is_rejected() {
        let setting = config::topic_setting("retention.ms").unwrap();
        let change = AlterableConfig {
            name: "retention.ms".into(),
            config_operation: APPEND,
            value: Some("1".into()),
        };
        assert_eq!(changed(&change, setting, "1").unwrap_err().code, ErrorCode::InvalidConfig);
    }
}
