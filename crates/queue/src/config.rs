//! Topic and broker settings: the name, type, default and validation of every setting.
//!
//! [`TopicConfig`] is the parsed form that the broker acts on; the text form is stored and described. A setting that
//! is accepted without effect is listed in docs/compatibility.md.

use std::collections::BTreeMap;

/// The config type in DescribeConfigs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Boolean,
    String,
    Int,
    Long,
    Double,
    List,
}

impl Kind {
    /// The type's number in DescribeConfigs.
    pub(crate) fn code(self) -> i8 {
        match self {
            Self::Boolean => 1,
            Self::String => 2,
            Self::Int => 3,
            Self::Long => 5,
            Self::Double => 6,
            Self::List => 7,
        }
    }
}

/// One setting of a topic or of the broker.
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) default: &'static str,
    /// The broker-wide default of a topic setting, if Kafka has one.
    pub(crate) broker_name: Option<&'static str>,
    check: Check,
    pub(crate) doc: &'static str,
}

enum Check {
    Any,
    AtLeast(i64),
    Between(i64, i64),
    Ratio,
    OneOf(&'static [&'static str]),
    ListOf(&'static [&'static str]),
}

const fn setting(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    broker_name: Option<&'static str>,
    check: Check,
    doc: &'static str,
) -> Setting {
    Setting { name, kind, default, broker_name, check, doc }
}

const MAX: &str = "9223372036854775807";

/// Dynamic broker settings without a topic setting.
pub(crate) static BROKER_SETTINGS: &[Setting] = &[
    setting(
        FOLLOWER_RATE,
        Kind::Long,
        MAX,
        Some(FOLLOWER_RATE),
        Check::AtLeast(0),
        "Bytes a second that a broker takes in for replicas that are being moved to it. Holds for every broker.",
    ),
    setting(
        LEADER_RATE,
        Kind::Long,
        MAX,
        Some(LEADER_RATE),
        Check::AtLeast(0),
        "Bytes a second that a broker sends to replicas that are being moved. Holds for every broker.",
    ),
    setting(
        LOG_DIRS_RATE,
        Kind::Long,
        MAX,
        Some(LOG_DIRS_RATE),
        Check::AtLeast(0),
        "Accepted for compatibility: a node has one data directory, and moves nothing between several.",
    ),
];

/// The reassignment throttle of the sending replica (leader).
pub(crate) const LEADER_RATE: &str = "leader.replication.throttled.rate";
/// Set and reverted by `kafka-reassign-partitions` together with the other two.
const LOG_DIRS_RATE: &str = "replica.alter.log.dirs.io.max.bytes.per.second";
/// The reassignment throttle of the receiving replica (follower).
pub(crate) const FOLLOWER_RATE: &str = "follower.replication.throttled.rate";

/// All topic settings, in alphabetical order.
pub(crate) static TOPIC_SETTINGS: &[Setting] = &[
    setting(
        "cleanup.policy",
        Kind::List,
        "delete",
        Some("log.cleanup.policy"),
        Check::ListOf(&["compact", "delete"]),
        "What happens to old records: `delete` drops them by age and size, `compact` keeps the newest of each key.",
    ),
    setting(
        "compression.type",
        Kind::String,
        "producer",
        Some("compression.type"),
        Check::OneOf(&["uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"]),
        "How records are compressed on disk; `producer` keeps what the producer chose.",
    ),
    setting(
        "delete.retention.ms",
        Kind::Long,
        "86400000",
        Some("log.cleaner.delete.retention.ms"),
        Check::AtLeast(0),
        "How long a tombstone stays readable in a compacted topic.",
    ),
    setting(
        "durability",
        Kind::String,
        "fsync",
        Some("log.durability"),
        Check::OneOf(&["fsync", "replicated"]),
        "When a write counts as stored: on stable storage of the in-sync set, or written by all of it.",
    ),
    setting(
        "file.delete.delay.ms",
        Kind::Long,
        "60000",
        Some("log.segment.delete.delay.ms"),
        Check::AtLeast(0),
        "Accepted for compatibility: files of deleted segments go as soon as no reader has them open.",
    ),
    setting(
        "flush.messages",
        Kind::Long,
        MAX,
        Some("log.flush.interval.messages"),
        Check::AtLeast(1),
        "Accepted for compatibility: see `durability`.",
    ),
    setting(
        "flush.ms",
        Kind::Long,
        MAX,
        Some("log.flush.interval.ms"),
        Check::AtLeast(0),
        "Accepted for compatibility: see `durability`.",
    ),
    setting(
        "follower.replication.throttled.replicas",
        Kind::List,
        "",
        None,
        Check::Any,
        "Accepted for compatibility: a rate holds for all replicas that are being moved.",
    ),
    setting(
        "index.interval.bytes",
        Kind::Int,
        "4096",
        Some("log.index.interval.bytes"),
        Check::AtLeast(0),
        "Accepted for compatibility: the index has a fixed grain.",
    ),
    setting(
        "leader.replication.throttled.replicas",
        Kind::List,
        "",
        None,
        Check::Any,
        "Accepted for compatibility: a rate holds for all replicas that are being moved.",
    ),
    setting(
        "local.retention.bytes",
        Kind::Long,
        "-2",
        Some("log.local.retention.bytes"),
        Check::AtLeast(-2),
        "Accepted for compatibility: there is no tiered storage.",
    ),
    setting(
        "local.retention.ms",
        Kind::Long,
        "-2",
        Some("log.local.retention.ms"),
        Check::AtLeast(-2),
        "Accepted for compatibility: there is no tiered storage.",
    ),
    setting(
        "max.compaction.lag.ms",
        Kind::Long,
        MAX,
        Some("log.cleaner.max.compaction.lag.ms"),
        Check::AtLeast(1),
        "How long a record may stay uncompacted.",
    ),
    setting(
        "max.message.bytes",
        Kind::Int,
        "1048588",
        Some("message.max.bytes"),
        Check::Between(0, i32::MAX as i64),
        "The largest record batch the topic takes.",
    ),
    setting(
        "message.timestamp.after.max.ms",
        Kind::Long,
        "3600000",
        Some("log.message.timestamp.after.max.ms"),
        Check::AtLeast(0),
        "How far in the future a producer's timestamp may lie.",
    ),
    setting(
        "message.timestamp.before.max.ms",
        Kind::Long,
        MAX,
        Some("log.message.timestamp.before.max.ms"),
        Check::AtLeast(0),
        "How far in the past a producer's timestamp may lie.",
    ),
    setting(
        "message.timestamp.type",
        Kind::String,
        "CreateTime",
        Some("log.message.timestamp.type"),
        Check::OneOf(&["CreateTime", "LogAppendTime"]),
        "Whose clock a record carries: the producer's or the broker's.",
    ),
    setting(
        "min.cleanable.dirty.ratio",
        Kind::Double,
        "0.5",
        Some("log.cleaner.min.cleanable.ratio"),
        Check::Ratio,
        "How large the uncompacted part must be before compaction runs.",
    ),
    setting(
        "min.compaction.lag.ms",
        Kind::Long,
        "0",
        Some("log.cleaner.min.compaction.lag.ms"),
        Check::AtLeast(0),
        "How long a record stays safe from compaction.",
    ),
    setting(
        "min.insync.replicas",
        Kind::Int,
        "1",
        Some("min.insync.replicas"),
        Check::AtLeast(1),
        "How many replicas must have a record before `acks=all` is answered.",
    ),
    setting(
        "preallocate",
        Kind::Boolean,
        "false",
        Some("log.preallocate"),
        Check::OneOf(&["true", "false"]),
        "Accepted for compatibility: the active segment is always preallocated in steps.",
    ),
    setting(
        "remote.storage.enable",
        Kind::Boolean,
        "false",
        None,
        Check::OneOf(&["false"]),
        "There is no tiered storage.",
    ),
    setting(
        "retention.bytes",
        Kind::Long,
        "-1",
        Some("log.retention.bytes"),
        Check::AtLeast(-1),
        "How large a partition may grow before its oldest segments go; -1 is without limit.",
    ),
    setting(
        "retention.ms",
        Kind::Long,
        "604800000",
        Some("log.retention.ms"),
        Check::AtLeast(-1),
        "How long records are kept; -1 is for ever.",
    ),
    setting(
        "segment.bytes",
        Kind::Int,
        "1073741824",
        Some("log.segment.bytes"),
        Check::Between(14, i32::MAX as i64),
        "How large a segment grows before the next one begins.",
    ),
    setting(
        "segment.index.bytes",
        Kind::Int,
        "10485760",
        Some("log.index.size.max.bytes"),
        Check::AtLeast(4),
        "Accepted for compatibility: indexes are sized by the segment.",
    ),
    setting(
        "segment.jitter.ms",
        Kind::Long,
        "0",
        Some("log.roll.jitter.ms"),
        Check::AtLeast(0),
        "Accepted for compatibility.",
    ),
    setting(
        "segment.ms",
        Kind::Long,
        "604800000",
        Some("log.roll.ms"),
        Check::AtLeast(1),
        "How long a segment is written before the next one begins.",
    ),
    setting(
        "unclean.leader.election.enable",
        Kind::Boolean,
        "false",
        Some("unclean.leader.election.enable"),
        Check::OneOf(&["true", "false"]),
        "Whether a replica that may lack records may lead when no other is left.",
    ),
];

impl Setting {
    /// Returns the validation error of `value`, if it is invalid.
    pub(crate) fn refuse(&self, value: &str) -> Option<String> {
        let number = || value.trim().parse::<i64>().ok();
        let wrong =
            |what: String| Some(format!("Invalid value {value} for configuration {}: {what}", self.name));
        match (&self.check, self.kind) {
            (Check::Any, _) => None,
            (Check::Ratio, _) => match value.trim().parse::<f64>() {
                Ok(v) if (0.0..=1.0).contains(&v) => None,
                _ => wrong("must be between 0 and 1".into()),
            },
            (Check::AtLeast(min), kind) => match number() {
                Some(v) if v < *min => wrong(format!("Value must be at least {min}")),
                Some(v) if kind == Kind::Int && i32::try_from(v).is_err() => {
                    wrong("Not a number of type INT".into())
                }
                Some(_) => None,
                None => wrong("Not a number".into()),
            },
            (Check::Between(min, max), _) => match number() {
                Some(v) if (*min..=*max).contains(&v) => None,
                Some(_) => wrong(format!("Value must be between {min} and {max}")),
                None => wrong("Not a number".into()),
            },
            (Check::OneOf(names), _) => (!names.contains(&value)).then(|| {
                format!(
                    "Invalid value {value} for configuration {}: String must be one of: {}",
                    self.name,
                    names.join(", ")
                )
            }),
            // The empty list is valid: no deletion and no compaction.
            (Check::ListOf(_), _) if value.trim().is_empty() => None,
            (Check::ListOf(names), _) => {
                let bad = value.split(',').map(str::trim).find(|v| !names.contains(v));
                bad.map(|v| {
                    format!(
                        "Invalid value {v} for configuration {}: String must be one of: {}",
                        self.name,
                        names.join(", ")
                    )
                })
            }
        }
    }
}

/// The topic setting of this name.
pub(crate) fn topic_setting(name: &str) -> Option<&'static Setting> {
    TOPIC_SETTINGS.iter().find(|s| s.name == name)
}

/// Returns the first validation error of these topic settings, if any.
pub(crate) fn refuse(settings: &BTreeMap<String, String>) -> Option<String> {
    settings.iter().find_map(|(name, value)| match topic_setting(name) {
        None => Some(format!("Unknown topic config name: {name}")),
        Some(setting) => setting.refuse(value),
    })
}

/// Broker defaults of topic settings.
pub type Defaults = BTreeMap<String, String>;

/// A topic's parsed settings.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TopicConfig {
    pub(crate) compact: bool,
    pub(crate) delete: bool,
    pub(crate) compression: Option<moim_wire_kafka::compression::Compression>,
    pub(crate) delete_retention_ms: i64,
    pub(crate) replicated_durability: bool,
    pub(crate) max_message_bytes: usize,
    pub(crate) timestamp_after_max_ms: i64,
    pub(crate) timestamp_before_max_ms: i64,
    pub(crate) log_append_time: bool,
    pub(crate) min_cleanable_ratio: f64,
    pub(crate) min_compaction_lag_ms: i64,
    pub(crate) max_compaction_lag_ms: i64,
    pub(crate) min_insync_replicas: i32,
    pub(crate) retention_bytes: Option<u64>,
    pub(crate) retention_ms: Option<i64>,
    pub(crate) segment_bytes: u64,
    pub(crate) segment_ms: i64,
}

impl TopicConfig {
    /// Parses the effective settings: topic override, then broker default, then built-in default.
    pub(crate) fn new(own: &BTreeMap<String, String>, defaults: &Defaults) -> Self {
        let text = |name: &str| effective(name, own, defaults);
        let long = |name: &str| text(name).trim().parse::<i64>().unwrap_or(i64::MAX);
        let policy = text("cleanup.policy");
        let has = |p: &str| policy.split(',').any(|v| v.trim() == p);
        Self {
            compact: has("compact"),
            delete: has("delete"),
            compression: match text("compression.type") {
                "producer" => None,
                "uncompressed" => Some(moim_wire_kafka::compression::Compression::None),
                other => moim_wire_kafka::compression::Compression::parse(other),
            },
            delete_retention_ms: long("delete.retention.ms"),
            replicated_durability: text("durability") == "replicated",
            max_message_bytes: usize::try_from(long("max.message.bytes")).unwrap_or(0),
            timestamp_after_max_ms: long("message.timestamp.after.max.ms"),
            timestamp_before_max_ms: long("message.timestamp.before.max.ms"),
            log_append_time: text("message.timestamp.type") == "LogAppendTime",
            min_cleanable_ratio: text("min.cleanable.dirty.ratio").trim().parse().unwrap_or(0.5),
            min_compaction_lag_ms: long("min.compaction.lag.ms"),
            max_compaction_lag_ms: long("max.compaction.lag.ms"),
            min_insync_replicas: i32::try_from(long("min.insync.replicas")).unwrap_or(1),
            retention_bytes: u64::try_from(long("retention.bytes")).ok(),
            retention_ms: Some(long("retention.ms")).filter(|v| *v >= 0),
            segment_bytes: u64::try_from(long("segment.bytes")).unwrap_or(1 << 30),
            segment_ms: long("segment.ms"),
        }
    }
}

/// The effective value of a topic setting.
pub(crate) fn effective<'a>(
    name: &str,
    own: &'a BTreeMap<String, String>,
    defaults: &'a Defaults,
) -> &'a str {
    own.get(name)
        .or_else(|| defaults.get(name))
        .map(String::as_str)
        .or_else(|| topic_setting(name).map(|s| s.default))
        .unwrap_or("")
}

/// The value of a setting that is set explicitly, on the topic or the broker.
pub(crate) fn explicit<'a>(
    name: &str,
    own: &'a BTreeMap<String, String>,
    defaults: &'a Defaults,
) -> Option<&'a str> {
    own.get(name).or_else(|| defaults.get(name)).map(String::as_str)
}

/// The config source of a topic setting, as a DescribeConfigs number.
pub(crate) fn source(name: &str, own: &BTreeMap<String, String>, defaults: &Defaults) -> i8 {
    if own.contains_key(name) {
        1
    } else if defaults.contains_key(name) {
        4
    } else {
        5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn every_default_is_valid() {
        for setting in TOPIC_SETTINGS {
            assert_eq!(setting.refuse(setting.default), None, "{}", setting.name);
        }
        assert!(TOPIC_SETTINGS.is_sorted_by_key(|s| s.name));
    }

    #[test]
    fn invalid_values_are_rejected() {
        for (name, value) in [
            ("retention.ms", "soon"),
            ("retention.ms", "-2"),
            ("cleanup.policy", "compact,burn"),
            ("compression.type", "rar"),
            ("max.message.bytes", "3000000000"),
            ("no.such.thing", "1"),
            ("min.cleanable.dirty.ratio", "1.5"),
            ("min.insync.replicas", "0"),
        ] {
            assert!(refuse(&own(&[(name, value)])).is_some(), "{name}={value}");
        }
    }

    #[test]
    fn topic_override_precedes_broker_default_and_built_in_default() {
        let defaults = own(&[("retention.ms", "5"), ("segment.bytes", "100")]);
        let config = TopicConfig::new(
            &own(&[("retention.ms", "7"), ("cleanup.policy", "compact, delete")]),
            &defaults,
        );
        assert_eq!(
            (config.retention_ms, config.segment_bytes, config.max_message_bytes),
            (Some(7), 100, 1_048_588)
        );
        assert!(config.compact && config.delete);
        let none = own(&[("cleanup.policy", "")]);
        assert_eq!(refuse(&none), None, "an empty list is valid");
        let config = TopicConfig::new(&none, &defaults);
        assert!(!config.compact && !config.delete, "and disables deletion and compaction");
        assert_eq!(config.retention_bytes, None);
    }
}
