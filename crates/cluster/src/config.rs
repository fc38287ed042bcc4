//! The configuration of the library: from a file, from the environment, or from code.
//!
//! Names: `heartbeat.interval`, `heartbeat.timeout`, `lease.duration`, `roles`, `zone`,
//! `assignments.rebalance-interval`, and per application its mode and the settings of that mode. A file is
//! JSON; the environment is `EES_CLUSTER__HEARTBEAT__INTERVAL=300ms` and so on: a double underscore is a
//! dot, a single one a dash. Later sources win: file, environment, code. An unknown name is an error that
//! names the nearest known one.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::assignment::{HandoffOptions, PartitionSpec};

/// Prefix of the environment variables.
pub const ENVIRONMENT: &str = "EES_CLUSTER__";

/// Invalid configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{0}")]
    File(String),
    /// An unknown name or an invalid value.
    #[error("{0}")]
    Wrong(String),
}

/// A duration as text: `300ms`, `3s`, `5m`, `1h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time(pub Duration);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{}ms", self.0.as_millis()))
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let text = match &value {
            Value::String(text) => text.trim().to_owned(),
            Value::Number(number) => format!("{number}ms"),
            _ => return Err(serde::de::Error::custom("a time is text such as 300ms, or a number of ms")),
        };
        let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number: u64 =
            text[..at].parse().map_err(|_| serde::de::Error::custom(format!("{text:?} is no time")))?;
        let unit = match text[at..].trim() {
            "ms" | "" => 1,
            "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            other => return Err(serde::de::Error::custom(format!("{other:?} is no unit of time"))),
        };
        Ok(Self(Duration::from_millis(number.saturating_mul(unit))))
    }
}

/// The state store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct StoreConfig {
    /// `memory` or `etcd`. An embedded Raft group is configured in code.
    pub kind: String,
    /// `HOST:PORT` of each etcd server.
    pub endpoints: Vec<String>,
    /// Prefix of every key, so that several clusters can share one store.
    pub prefix: String,
}

impl Default for StoreConfig {
    fn default() -> Self {
        let endpoints = vec!["127.0.0.1:2379".to_owned()];
        Self { kind: "memory".to_owned(), endpoints, prefix: String::new() }
    }
}

/// Heartbeats of members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct HeartbeatConfig {
    /// Interval between two heartbeats.
    pub interval: Time,
    /// Silence after which a member is suspect.
    pub timeout: Time,
}

impl Default for HeartbeatConfig {
    fn default() -> Self {
        let options = crate::membership::HeartbeatOptions::default();
        Self { interval: Time(options.interval), timeout: Time(options.timeout) }
    }
}

/// Leases of elections and locks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct LeaseConfig {
    /// Lease TTL: the time until a failed holder is replaced.
    pub duration: Time,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self { duration: Time(Duration::from_secs(3)) }
    }
}

/// Partition assignment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AssignmentsConfig {
    /// Maximum interval between two rebalances.
    pub rebalance_interval: Time,
}

impl Default for AssignmentsConfig {
    fn default() -> Self {
        Self { rebalance_interval: Time(Duration::from_secs(10)) }
    }
}

/// Authority over an application's partition assignment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// A leader elected in the store, or in the application's Raft group.
    #[default]
    Raft,
    /// The group coordinator of a Kafka consumer group.
    Kafka,
}

/// The Raft groups of this process: one port and one data folder for all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct RaftConfig {
    /// Listen address for group members; port 0 picks a free port.
    pub listen: String,
    /// Advertised address; the listen address if empty.
    pub advertise: String,
    /// Folder of logs and snapshots, with one folder for each application.
    pub data: String,
}

impl Default for RaftConfig {
    fn default() -> Self {
        Self { listen: "127.0.0.1:0".to_owned(), advertise: String::new(), data: String::new() }
    }
}

/// Size thresholds and expiry of hand-offs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct HandoffConfig {
    /// Compress above this size, in bytes.
    pub compress_over: usize,
    /// Store by reference above this size, in bytes.
    pub refer_over: usize,
    /// Reject above this size, in bytes.
    pub max_bytes: usize,
    /// Maximum age, by wall clocks; 0 for no expiry. Must be longer than the retention of the topics.
    pub ttl: Time,
}

impl Default for HandoffConfig {
    fn default() -> Self {
        let options = HandoffOptions::default();
        Self {
            compress_over: options.compress_over,
            refer_over: options.refer_over,
            max_bytes: options.max_bytes,
            ttl: Time(Duration::ZERO),
        }
    }
}

impl HandoffConfig {
    /// Converts to the options of the hand-off store.
    pub fn options(&self) -> HandoffOptions {
        HandoffOptions {
            compress_over: self.compress_over,
            refer_over: self.refer_over,
            max_bytes: self.max_bytes,
            ttl: (!self.ttl.0.is_zero()).then_some(self.ttl.0),
        }
    }
}

/// One application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct AppConfig {
    /// Assignment mode.
    pub mode: Mode,
    /// Raft mode: the partitions.
    pub partitions: Vec<PartitionSpec>,
    /// Raft mode: only members with this role get partitions; empty for all members.
    pub role: String,
    /// Kafka mode: the bootstrap servers.
    pub bootstrap: String,
    /// Kafka mode: the consumer group; the application's name if empty.
    pub group: String,
    /// Kafka mode: the topics.
    pub topics: Vec<String>,
    /// Kafka mode: the equipment of a partition, keyed by `topic/partition`.
    pub equipment: BTreeMap<String, Vec<String>>,
    /// Kafka mode: additional client settings.
    pub settings: BTreeMap<String, String>,
    /// Raft mode: the initial members of the application's Raft group, as `node=host:port`; or the single
    /// word `store`, for a group whose members are recorded in the store. Empty for an application whose
    /// leader is elected in the store.
    pub peers: Vec<String>,
    /// Raft mode: the resources that the group serves.
    pub equipment_group: String,
    /// Raft mode: true if a join request to the group requires an operator's approval.
    pub manual_approval: bool,
    /// Raft mode: join timeout.
    pub join_timeout: Time,
}

impl Default for AppConfig {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            partitions: Vec::new(),
            role: String::new(),
            bootstrap: String::new(),
            group: String::new(),
            topics: Vec::new(),
            equipment: BTreeMap::new(),
            settings: BTreeMap::new(),
            peers: Vec::new(),
            equipment_group: String::new(),
            manual_approval: false,
            join_timeout: Time(Duration::from_secs(30)),
        }
    }
}

/// Source of the members of an application's Raft group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peers {
    /// The application has no Raft group.
    None,
    /// Recorded in the store.
    Store,
    /// Configured: node ids and addresses.
    Listed(Vec<(String, String)>),
}

impl AppConfig {
    /// Parses `peers`; the error names the malformed entry.
    pub fn members(&self) -> Result<Peers, String> {
        match self.peers.as_slice() {
            [] => Ok(Peers::None),
            [one] if one == "store" => Ok(Peers::Store),
            peers => {
                let pair = |peer: &String| match peer.split_once('=') {
                    Some((node, address)) if !node.is_empty() && address.contains(':') => {
                        Ok((node.to_owned(), address.to_owned()))
                    }
                    _ => Err(format!("{peer:?} is no peer: it is written as node=host:port")),
                };
                peers.iter().map(pair).collect::<Result<_, _>>().map(Peers::Listed)
            }
        }
    }
}

/// The complete configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ClusterConfig {
    /// Node id; derived from the host name and the process id if empty.
    pub node_id: String,
    /// Advertised host of this node.
    pub host: String,
    /// Advertised port of this node.
    pub port: u16,
    /// Roles of this node.
    pub roles: Vec<String>,
    /// Zone (failure domain) of this node.
    pub zone: String,
    /// Region of this node.
    pub region: String,
    /// Software version of this node.
    pub version: String,
    /// Additional metadata of this node.
    pub metadata: BTreeMap<String, String>,
    /// The state store.
    pub store: StoreConfig,
    /// Heartbeats.
    pub heartbeat: HeartbeatConfig,
    /// Leases.
    pub lease: LeaseConfig,
    /// Assignments.
    pub assignments: AssignmentsConfig,
    /// Hand-offs.
    pub handoff: HandoffConfig,
    /// Raft groups.
    pub raft: RaftConfig,
    /// The applications of this node, each with its mode.
    pub apps: BTreeMap<String, AppConfig>,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            node_id: String::new(),
            host: "127.0.0.1".to_owned(),
            port: 0,
            roles: Vec::new(),
            zone: String::new(),
            region: String::new(),
            version: String::new(),
            metadata: BTreeMap::new(),
            store: StoreConfig::default(),
            heartbeat: HeartbeatConfig::default(),
            lease: LeaseConfig::default(),
            assignments: AssignmentsConfig::default(),
            handoff: HandoffConfig::default(),
            raft: RaftConfig::default(),
            apps: BTreeMap::new(),
        }
    }
}

impl ClusterConfig {
    /// Loads the configuration from a file and from the environment; both are optional.
    pub fn load(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let mut tree = Value::Object(Map::new());
        if let Some(file) = file {
            let text = std::fs::read_to_string(file)
                .map_err(|error| ConfigError::File(format!("{}: {error}", file.display())))?;
            tree = serde_json::from_str(&text)
                .map_err(|error| ConfigError::File(format!("{}: {error}", file.display())))?;
        }
        for (name, value) in environment {
            let Some(path) = name.strip_prefix(ENVIRONMENT) else { continue };
            let path: Vec<String> =
                path.split("__").map(|part| part.to_ascii_lowercase().replace('_', "-")).collect();
            set(&mut tree, &path, &value).map_err(|error| ConfigError::Wrong(format!("{name}: {error}")))?;
        }
        let config: Self =
            serde_json::from_value(tree).map_err(|error| ConfigError::Wrong(suggest(&error.to_string())))?;
        config.check()?;
        Ok(config)
    }

    /// Validates the values and their combinations.
    pub fn check(&self) -> Result<(), ConfigError> {
        let wrong = |text: &str| Err(ConfigError::Wrong(text.to_owned()));
        if self.heartbeat.interval.0.is_zero() || self.heartbeat.interval.0 * 2 > self.heartbeat.timeout.0 {
            return wrong("heartbeat.timeout: at least two heartbeats must fit into it");
        }
        if self.lease.duration.0 < Duration::from_millis(100) {
            return wrong("lease.duration: below 100ms a busy machine loses leases it renews");
        }
        if self.node_id.contains('/') {
            return wrong("node-id: a slash cannot be in it");
        }
        if self.raft.listen.parse::<std::net::SocketAddr>().is_err() {
            return wrong("raft.listen: it is an address and a port");
        }
        if self.handoff.refer_over > self.handoff.max_bytes {
            return wrong("handoff.refer-over: it is over handoff.max-bytes");
        }
        if !["memory", "etcd"].contains(&self.store.kind.as_str()) {
            return wrong("store.kind: it is `memory` or `etcd`");
        }
        for (name, app) in &self.apps {
            self.check_app(app).map_err(|text| ConfigError::Wrong(format!("apps.{name}: {text}")))?;
        }
        Ok(())
    }

    fn check_app(&self, app: &AppConfig) -> Result<(), String> {
        let peers = app.members().map_err(|text| format!("peers: {text}"))?;
        match app.mode {
            Mode::Kafka if app.bootstrap.is_empty() || app.topics.is_empty() => {
                return Err("Kafka mode needs `bootstrap` and `topics`".to_owned());
            }
            Mode::Kafka if peers != Peers::None || !app.partitions.is_empty() || !app.role.is_empty() => {
                return Err("`peers`, `partitions` and `role` are for Raft mode".to_owned());
            }
            Mode::Raft if !app.bootstrap.is_empty() || !app.topics.is_empty() => {
                return Err("`bootstrap` and `topics` are for Kafka mode".to_owned());
            }
            Mode::Kafka | Mode::Raft => {}
        }
        if peers != Peers::None && self.raft.data.is_empty() {
            return Err("a Raft group needs a folder: set raft.data".to_owned());
        }
        for partition in app.equipment.keys() {
            let number = partition.rsplit_once('/').and_then(|(_, number)| number.parse::<u32>().ok());
            if number.is_none() {
                return Err(format!(
                    "equipment: {partition:?} is no partition: it is written as topic/number"
                ));
            }
        }
        Ok(())
    }
}

/// Sets an environment value at its path. A value in JSON syntax is parsed as JSON; lists may be
/// comma-separated.
fn set(tree: &mut Value, path: &[String], text: &str) -> Result<(), String> {
    const LISTS: [&str; 5] = ["roles", "endpoints", "topics", "peers", "equipment-ids"];
    const PLAIN: [&str; 5] = ["port", "compress-over", "refer-over", "max-bytes", "manual-approval"];
    let mut at = tree;
    let Some((last, folders)) = path.split_last() else { return Err("a name is missing".to_owned()) };
    for part in folders {
        let object =
            at.as_object_mut().ok_or_else(|| format!("{part} is below something that is a value"))?;
        at = object.entry(part.clone()).or_insert_with(|| Value::Object(Map::new()));
    }
    let object = at.as_object_mut().ok_or_else(|| format!("{last} is below something that is a value"))?;
    let value = if LISTS.contains(&last.as_str()) && !text.trim_start().starts_with('[') {
        let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
        Value::Array(items.map(|item| Value::String(item.to_owned())).collect())
    } else if PLAIN.contains(&last.as_str()) || text.trim_start().starts_with(['{', '[']) {
        serde_json::from_str(text).map_err(|error| error.to_string())?
    } else {
        Value::String(text.to_owned())
    };
    object.insert(last.clone(), value);
    Ok(())
}

/// Adds the nearest known name to serde's error about an unknown field.
fn suggest(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let (Some(unknown), true) = (quoted.next(), message.starts_with("unknown field")) else {
        return message.to_owned();
    };
    let nearest = quoted.min_by_key(|known| distance(unknown, known));
    match nearest {
        Some(nearest) => format!("there is no setting {unknown:?}; did you mean {nearest:?}?"),
        None => format!("there is no setting {unknown:?}"),
    }
}

/// Edit distance between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(before + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn file_and_environment_are_merged() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cluster.json");
        let text = r#"{"zone": "z1", "heartbeat": {"interval": "1s", "timeout": "4s"},
            "apps": {"press": {"mode": "kafka", "bootstrap": "a:1", "topics": ["t"]}}}"#;
        std::fs::write(&file, text).unwrap();
        let variables = env(&[
            ("EES_CLUSTER__ZONE", "z2"),
            ("EES_CLUSTER__ROLES", "source, sink"),
            ("EES_CLUSTER__HEARTBEAT__TIMEOUT", "5000"),
            ("EES_CLUSTER__ASSIGNMENTS__REBALANCE_INTERVAL", "1m"),
            ("EES_CLUSTER__APPS__PRESS__GROUP", "g"),
            ("EES_CLUSTER__PORT", "7"),
            ("SOMETHING_ELSE", "x"),
        ]);
        let config = ClusterConfig::load(Some(&file), variables).unwrap();
        assert_eq!((config.zone.as_str(), config.port), ("z2", 7));
        assert_eq!(config.roles, ["source", "sink"]);
        assert_eq!(config.heartbeat.interval.0, Duration::from_secs(1));
        assert_eq!(config.heartbeat.timeout.0, Duration::from_secs(5));
        assert_eq!(config.assignments.rebalance_interval.0, Duration::from_secs(60));
        let app = &config.apps["press"];
        assert_eq!((app.mode, app.group.as_str()), (Mode::Kafka, "g"));
        let again: ClusterConfig = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn invalid_settings_are_named_in_the_error() {
        let cases = [
            (vec![("EES_CLUSTER__HEARTBEET__TIMEOUT", "1s")], "did you mean \"heartbeat\"?"),
            (vec![("EES_CLUSTER__HEARTBEAT__TIMEOUT", "soon")], "is no time"),
            (vec![("EES_CLUSTER__HEARTBEAT__TIMEOUT", "10ms")], "at least two heartbeats"),
            (vec![("EES_CLUSTER__LEASE__DURATION", "5ms")], "lease.duration"),
            (vec![("EES_CLUSTER__STORE__KIND", "paper")], "store.kind"),
            (vec![("EES_CLUSTER__NODE_ID", "a/b")], "node-id"),
            (vec![("EES_CLUSTER__APPS__X__MODE", "kafka")], "needs `bootstrap`"),
            (vec![("EES_CLUSTER__APPS__X__TOPICS", "t")], "for Kafka mode"),
            (vec![("EES_CLUSTER__APPS__X__PEERS", "a=h:1")], "set raft.data"),
            (vec![("EES_CLUSTER__APPS__X__PEERS", "a")], "node=host:port"),
            (vec![("EES_CLUSTER__APPS__X__EQUIPMENT", r#"{"t": ["e"]}"#)], "topic/number"),
            (vec![("EES_CLUSTER__RAFT__LISTEN", "here")], "raft.listen"),
            (vec![("EES_CLUSTER__HANDOFF__MAX_BYTES", "1")], "handoff.refer-over"),
        ];
        for (variables, text) in cases {
            let error = ClusterConfig::load(None, env(&variables)).unwrap_err().to_string();
            assert!(error.contains(text), "{error:?} contains {text:?}");
        }
        assert!(ClusterConfig::load(Some(Path::new("/nowhere.json")), env(&[])).is_err());
        assert_eq!(ClusterConfig::load(None, env(&[])).unwrap(), ClusterConfig::default());
    }
}
