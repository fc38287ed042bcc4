//! Broker configuration. Static settings are read-only; dynamic settings are the broker defaults of topic settings
//! and [`BROKER_SETTINGS`]. Dynamic changes are stored in the state repository and take effect at once, on every
//! broker.

use std::collections::BTreeMap;

use bytes::Bytes;

use moim_replica::LeaderTuning;
use moim_state::{Entry, Expect, Swap};
use moim_wire_kafka::ErrorCode;

use crate::broker::Broker;
use crate::config::{BROKER_SETTINGS, Defaults, FOLLOWER_RATE, Kind, LEADER_RATE, Setting, TOPIC_SETTINGS};
use crate::partition::Refused;
use crate::topics::refuse_repository;

pub(crate) const KEY: &str = "/moim/configs/brokers";

/// A broker setting in DescribeConfigs.
pub(crate) struct DescribedSetting {
    pub(crate) name: String,
    pub(crate) value: String,
    pub(crate) kind: Kind,
    pub(crate) read_only: bool,
    /// True if set at run time, cluster-wide.
    pub(crate) dynamic: bool,
    /// True if set by the configuration file and not by the table of defaults.
    pub(crate) from_start: bool,
    pub(crate) doc: &'static str,
}

/// All dynamic settings, under their broker names.
fn all_changeable() -> impl Iterator<Item = &'static Setting> {
    TOPIC_SETTINGS.iter().chain(BROKER_SETTINGS).filter(|s| s.broker_name.is_some())
}

/// The dynamic setting of this name: the broker default of a topic setting, or one of the broker's own.
pub(crate) fn changeable(name: &str) -> Option<&'static Setting> {
    all_changeable().find(|s| s.broker_name == Some(name))
}

/// A rate in bytes per second; `None` if it is the maximum, which means no throttle.
fn rate(settings: &Defaults, name: &str) -> Option<u64> {
    let rate: u64 = settings.get(name)?.trim().parse().ok()?;
    (rate < i64::MAX as u64).then_some(rate)
}

impl Broker {
    /// Applies dynamic settings that were changed here or through another broker.
    pub(crate) fn on_settings(&self, entry: &Entry) -> Result<(), Refused> {
        let settings: Defaults = serde_json::from_slice(&entry.value).map_err(|e| {
            Refused::new(
                ErrorCode::UnknownServerError,
                format!("broker configuration record cannot be decoded: {e}"),
            )
        })?;
        if **self.dynamic.load() != settings {
            self.apply_dynamic(settings);
        }
        Ok(())
    }

    /// Changes dynamic settings; `None` reverts a setting to its default.
    pub(crate) async fn change_settings(
        &self,
        changes: &BTreeMap<String, Option<String>>,
        validate_only: bool,
    ) -> Result<(), Refused> {
        for (name, value) in changes {
            let setting = changeable(name).ok_or_else(|| {
                Refused::new(
                    ErrorCode::InvalidRequest,
                    format!("Cannot update these configs dynamically: {name}"),
                )
            })?;
            if let Some(why) = value.as_deref().and_then(|v| setting.refuse(v)) {
                return Err(Refused::new(ErrorCode::InvalidConfig, why));
            }
        }
        if validate_only {
            return Ok(());
        }
        loop {
            let entry = self.repository.get(KEY).await.map_err(refuse_repository)?;
            let mut settings: Defaults =
                entry.as_ref().and_then(|e| serde_json::from_slice(&e.value).ok()).unwrap_or_default();
            for (name, value) in changes {
                match value {
                    Some(value) => settings.insert(name.clone(), value.clone()),
                    None => settings.remove(name),
                };
            }
            let expected = entry.map_or(Expect::Absent, |e| Expect::Revision(e.mod_revision));
            let text = Bytes::from(serde_json::to_vec(&settings).expect("plain data encodes as JSON"));
            let swap = self.repository.compare_and_swap(KEY, expected, Some(text), None);
            if let Swap::Done { .. } = swap.await.map_err(refuse_repository)? {
                self.apply_dynamic(settings);
                return Ok(());
            }
        }
    }

    fn apply_dynamic(&self, settings: Defaults) {
        let mut defaults = self.options.topic_defaults.clone();
        for (name, value) in &settings {
            if let Some(setting) = TOPIC_SETTINGS.iter().find(|s| s.broker_name == Some(name)) {
                defaults.insert(setting.name.to_owned(), value.clone());
            }
        }
        self.driver.set_move_rates(rate(&settings, LEADER_RATE), rate(&settings, FOLLOWER_RATE));
        self.dynamic.store(std::sync::Arc::new(settings));
        self.topics.set_defaults(defaults);
    }

    /// All broker settings.
    pub(crate) fn settings(&self) -> Vec<DescribedSetting> {
        let dynamic = self.dynamic.load();
        let o = &self.options;
        let mut shown: Vec<DescribedSetting> = all_changeable()
            .filter_map(|setting| {
                let name = setting.broker_name?;
                let start = o.topic_defaults.get(setting.name);
                let value = dynamic.get(name).or(start).map_or(setting.default, String::as_str);
                Some(DescribedSetting {
                    name: name.to_owned(),
                    value: value.to_owned(),
                    kind: setting.kind,
                    read_only: false,
                    dynamic: dynamic.contains_key(name),
                    from_start: start.is_some(),
                    doc: setting.doc,
                })
            })
            .collect();
        let (host, port) = self.advertised();
        let factor = self.maker().default_factor().to_string();
        let fixed = [
            ("advertised.listeners", format!("PLAINTEXT://{host}:{port}"), Kind::String),
            ("auto.create.topics.enable", o.auto_create_topics.to_string(), Kind::Boolean),
            ("broker.id", o.node_id.to_string(), Kind::Int),
            ("broker.rack", o.rack.clone().unwrap_or_default(), Kind::String),
            ("connections.max.idle.ms", o.idle_connection_ms.to_string(), Kind::Long),
            ("default.replication.factor", factor.clone(), Kind::Int),
            ("delete.topic.enable", "true".into(), Kind::Boolean),
            ("fetch.max.bytes", o.max_fetch_bytes.to_string(), Kind::Int),
            ("group.initial.rebalance.delay.ms", o.group_initial_rebalance_delay_ms.to_string(), Kind::Int),
            ("group.max.session.timeout.ms", o.group_max_session_timeout_ms.to_string(), Kind::Int),
            ("group.max.size", o.group_max_size.to_string(), Kind::Int),
            ("group.min.session.timeout.ms", o.group_min_session_timeout_ms.to_string(), Kind::Int),
            ("inter.broker.listener.name", "PLAINTEXT".into(), Kind::String),
            ("listeners", format!("PLAINTEXT://{}", o.listen), Kind::String),
            ("log.cleaner.backoff.ms", o.compaction_check_ms.to_string(), Kind::Long),
            ("log.cleaner.enable", "true".into(), Kind::Boolean),
            ("log.dir", o.data_dir.clone(), Kind::String),
            ("log.dirs", o.data_dir.clone(), Kind::String),
            ("log.retention.check.interval.ms", o.retention_check_ms.to_string(), Kind::Long),
            ("max.connections", o.max_connections.to_string(), Kind::Int),
            ("node.id", o.node_id.to_string(), Kind::Int),
            ("num.network.threads", o.event_loops.to_string(), Kind::Int),
            ("num.io.threads", o.event_loops.to_string(), Kind::Int),
            ("num.partitions", o.num_partitions.to_string(), Kind::Int),
            ("offset.metadata.max.bytes", o.offset_metadata_max_bytes.to_string(), Kind::Int),
            ("offsets.retention.minutes", (o.offsets_retention_ms / 60_000).to_string(), Kind::Int),
            ("offsets.topic.num.partitions", o.offsets_partitions.to_string(), Kind::Int),
            ("offsets.topic.replication.factor", factor.clone(), Kind::Int),
            ("process.roles", "broker,controller".into(), Kind::List),
            ("producer.id.expiration.ms", o.producer_id_expiration_ms.to_string(), Kind::Int),
            ("queued.max.request.bytes", o.request_memory_bytes.to_string(), Kind::Long),
            ("replica.lag.time.max.ms", LeaderTuning::default().lag_ms.to_string(), Kind::Long),
            ("socket.request.max.bytes", o.max_request_bytes.to_string(), Kind::Int),
            ("sasl.enabled.mechanisms", "PLAIN".into(), Kind::List),
            ("transaction.max.timeout.ms", o.transaction_max_timeout_ms.to_string(), Kind::Int),
            ("transaction.state.log.num.partitions", o.transaction_partitions.to_string(), Kind::Int),
            ("transaction.state.log.replication.factor", factor, Kind::Int),
            ("transactional.id.expiration.ms", o.transactional_id_expiration_ms.to_string(), Kind::Int),
        ];
        shown.extend(fixed.into_iter().map(|(name, value, kind)| DescribedSetting {
            name: name.to_owned(),
            value,
            kind,
            read_only: true,
            dynamic: false,
            from_start: true,
            doc: "Set when the node starts.",
        }));
        shown.sort_by(|a, b| a.name.cmp(&b.name));
        shown.dedup_by(|a, b| a.name == b.name);
        shown
    }

    /// True if a broker resource name means this broker, or the cluster-wide default.
    pub(crate) fn is_me(&self, resource_name: &str) -> bool {
        resource_name.is_empty() || resource_name == self.options.node_id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_rate_below_the_maximum_is_a_limit() {
        let settings = |value: &str| Defaults::from([(LEADER_RATE.to_owned(), value.to_owned())]);
        let check = |value: &str, expected: Option<u64>| {
            assert_eq!(rate(&settings(value), LEADER_RATE), expected, "{value}");
            assert_eq!(rate(&settings(value), FOLLOWER_RATE), None);
        };
        check("1000", Some(1000));
        check("0", Some(0));
        check("9223372036854775807", None);
    }

    #[test]
    fn throttle_rates_are_dynamic_broker_settings() {
        for name in [LEADER_RATE, FOLLOWER_RATE, "replica.alter.log.dirs.io.max.bytes.per.second"] {
            let setting = changeable(name).unwrap();
            assert!(setting.refuse("-1").is_some() && setting.refuse("5000000").is_none());
        }
        assert!(changeable("log.retention.ms").is_some() && changeable("retention.ms").is_none());
    }
}
