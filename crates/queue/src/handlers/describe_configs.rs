//! DescribeConfigs: every setting with its value, default and source.

use moim_wire_kafka::messages::describe_configs::{
    DescribeConfigsRequest, DescribeConfigsResource, DescribeConfigsResourceResult, DescribeConfigsResponse,
    DescribeConfigsResult, DescribeConfigsSynonym,
};
use moim_wire_kafka::{ErrorCode, KString};

use moim_replica::controller::min_isr_for;

use crate::broker::Broker;
use crate::config::{self, Setting, TOPIC_SETTINGS};
use crate::partition::Refused;
use crate::topics::Topic;

pub(crate) const TOPIC: i8 = 2;
pub(crate) const BROKER: i8 = 4;

/// Config sources, in the protocol's numbers.
const DYNAMIC_TOPIC: i8 = 1;
const DYNAMIC_DEFAULT_BROKER: i8 = 3;
const STATIC_BROKER: i8 = 4;
const DEFAULT: i8 = 5;

pub(crate) fn handle(
    broker: &Broker,
    request: DescribeConfigsRequest,
    _version: i16,
) -> DescribeConfigsResponse {
    let results = request.resources.iter().map(|resource| {
        let described = describe(broker, resource, request.include_synonyms, request.include_documentation);
        let (code, message, configs) = match described {
            Ok(configs) => (ErrorCode::None, None, configs),
            Err(refused) => (refused.code, refused.message, Vec::new()),
        };
        DescribeConfigsResult {
            error_code: code as i16,
            error_message: message.map(Into::into),
            resource_type: resource.resource_type,
            resource_name: resource.resource_name.clone(),
            configs,
        }
    });
    DescribeConfigsResponse { results: results.collect(), ..Default::default() }
}

fn describe(
    broker: &Broker,
    resource: &DescribeConfigsResource,
    synonyms: bool,
    documentation: bool,
) -> Result<Vec<DescribeConfigsResourceResult>, Refused> {
    let wanted = |name: &str| {
        resource.configuration_keys.as_ref().is_none_or(|keys| keys.iter().any(|k| k.as_str() == name))
    };
    match resource.resource_type {
        TOPIC => {
            let name = resource.resource_name.as_str();
            let topic = broker.topics.get(name).ok_or_else(|| {
                Refused::new(
                    ErrorCode::UnknownTopicOrPartition,
                    format!("The topic '{name}' does not exist."),
                )
            })?;
            let settings = TOPIC_SETTINGS.iter().filter(|s| wanted(s.name));
            Ok(settings.map(|s| topic_setting(broker, &topic, s, synonyms, documentation)).collect())
        }
        BROKER if broker.is_me(&resource.resource_name) => {
            let only_dynamic = resource.resource_name.is_empty();
            let shown =
                broker.settings().into_iter().filter(|s| wanted(&s.name) && (s.dynamic || !only_dynamic));
            Ok(shown
                .map(|s| {
                    let source = if s.dynamic {
                        DYNAMIC_DEFAULT_BROKER
                    } else if s.from_start {
                        STATIC_BROKER
                    } else {
                        DEFAULT
                    };
                    let value: KString = s.value.into();
                    let name: KString = s.name.into();
                    let synonym =
                        DescribeConfigsSynonym { name: name.clone(), value: Some(value.clone()), source };
                    DescribeConfigsResourceResult {
                        name,
                        value: Some(value),
                        read_only: s.read_only,
                        config_source: source,
                        is_sensitive: false,
                        synonyms: if synonyms { vec![synonym] } else { Vec::new() },
                        config_type: s.kind.code(),
                        documentation: documentation.then(|| s.doc.into()),
                    }
                })
                .collect())
        }
        BROKER => Err(Refused::new(
            ErrorCode::InvalidRequest,
            format!(
                "Unexpected broker id, expected {} or empty string, but received {}",
                broker.options.node_id, resource.resource_name
            ),
        )),
        other => Err(Refused::new(ErrorCode::InvalidRequest, format!("Unsupported resource type: {other}"))),
    }
}

/// The default of a topic setting; that of `min.insync.replicas` depends on the replication factor.
fn default_of(topic: &Topic, setting: &Setting) -> &'static str {
    let replicas = topic.entry(0).map_or(0, |entry| entry.registration().replicas().len());
    if setting.name == "min.insync.replicas" && min_isr_for(None, replicas) == 2 {
        "2"
    } else {
        setting.default
    }
}

fn topic_setting(
    broker: &Broker,
    topic: &Topic,
    setting: &Setting,
    synonyms: bool,
    documentation: bool,
) -> DescribeConfigsResourceResult {
    let own = topic.configs.load();
    let defaults = broker.topics.defaults();
    let dynamic = broker.dynamic.load();
    let mut chain = Vec::new();
    if let Some(value) = own.get(setting.name) {
        chain.push((setting.name, value.as_str(), DYNAMIC_TOPIC));
    }
    if let Some(broker_name) = setting.broker_name {
        if let Some(value) = dynamic.get(broker_name) {
            chain.push((broker_name, value.as_str(), DYNAMIC_DEFAULT_BROKER));
        }
        if let Some(value) = broker.options.topic_defaults.get(setting.name) {
            chain.push((broker_name, value.as_str(), STATIC_BROKER));
        }
        chain.push((broker_name, default_of(topic, setting), DEFAULT));
    }
    let source = chain.first().map_or(DEFAULT, |(_, _, source)| *source);
    let value = config::explicit(setting.name, &own, &defaults).unwrap_or(default_of(topic, setting));
    let synonym = |(name, value, source): &(&str, &str, i8)| DescribeConfigsSynonym {
        name: (*name).into(),
        value: Some((*value).into()),
        source: *source,
    };
    DescribeConfigsResourceResult {
        name: setting.name.into(),
        value: Some(value.into()),
        read_only: false,
        config_source: source,
        is_sensitive: false,
        synonyms: if synonyms { chain.iter().map(synonym).collect() } else { Vec::new() },
        config_type: setting.kind.code(),
        documentation: documentation.then(|| setting.doc.into()),
    }
}
