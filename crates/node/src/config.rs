//! The configuration of a node: every key of `moim.toml`, its default, and the rules between keys.
//!
//! Every key has a default, so an empty file is a complete one. The structs below are the only list of
//! keys: layering, `moim config show` and the suggestions for misspelt keys walk their serialized form.
//! Adding a key is adding a field. Nothing here reads a file or the environment; the command line does.

mod cluster;

use serde::{Deserialize, Serialize};

pub use self::cluster::{ClusterConfig, EtcdConfig, PeerConfig};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MINUTE_MS: u64 = 60_000;
const DAY_MS: u64 = 24 * 60 * MINUTE_MS;

/// All of `moim.toml`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Who this node is and where it lives.
    pub node: NodeConfig,
    /// The Kafka listener and the broker behind it.
    pub kafka: KafkaConfig,
    /// Defaults of topics.
    pub log: LogConfig,
    /// The store.
    pub redis: RedisConfig,
    /// The HTTP listener.
    pub admin: AdminConfig,
    /// The etcd listener and the store behind it.
    pub etcd: EtcdConfig,
    /// The listener for other nodes.
    pub peer: PeerConfig,
    /// How this node finds the others.
    pub cluster: ClusterConfig,
    /// The storage engine.
    pub journal: JournalConfig,
    /// Caps that keep one client from hurting the others.
    pub limits: LimitsConfig,
}

/// `[node]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeConfig {
    /// The stable number of the node; Kafka clients know it as the broker id.
    pub id: i32,
    /// The data folder.
    pub data: String,
    /// The address all listeners bind to.
    pub host: String,
    /// The failure domain, for placement; empty when there is none.
    pub zone: String,
    /// Allows a host that other machines can reach although nothing is encrypted or authenticated.
    pub insecure: bool,
    /// Event loops; 0 means one less than the cores, at least one.
    pub threads: u32,
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter such as `info,moim_queue=debug`.
    pub log_level: String,
    /// How long a graceful stop may take before the process ends anyway.
    pub shutdown_timeout_ms: u64,
}

/// `[kafka]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KafkaConfig {
    /// Port of the Kafka listener; 0 picks a free one.
    pub port: u16,
    /// `HOST:PORT` told to clients; empty means the listener's own address.
    pub advertise: String,
    /// A file with a `name:password` line for each user; with it clients must authenticate (SASL PLAIN).
    /// Empty: no password is required.
    pub users_file: String,
    /// Connections served at a time; further ones are closed at once.
    pub max_connections: u32,
    /// A connection without a request for this long is closed.
    pub idle_connection_ms: u64,
    /// The largest request frame.
    pub max_request_bytes: u64,
    /// Memory that all requests in flight may hold together; readers wait when it is used up.
    pub request_memory_bytes: u64,
    /// Memory for records in responses that clients have not read yet; fetches wait when it is used up, and clients that
    /// read nothing for 5 s are closed when half of it is.
    pub response_memory_bytes: u64,
    /// Whether naming an unknown topic creates it.
    pub auto_create_topics: bool,
    /// Partitions of a topic that does not say.
    pub num_partitions: i32,
    /// How long the first join of an empty group waits for more members. Kafka waits 3 s; less lets the
    /// first consumer start sooner and costs at most one more rebalance.
    pub group_initial_rebalance_delay_ms: u64,
    /// The shortest session timeout a group member may ask for.
    pub group_min_session_timeout_ms: u64,
    /// The longest session timeout a group member may ask for.
    pub group_max_session_timeout_ms: u64,
    /// How long the offsets of a group without members are kept.
    pub offsets_retention_ms: u64,
    /// Partitions of `__consumer_offsets`.
    pub offsets_topic_partitions: i32,
    /// The longest timeout a transactional producer may ask for.
    pub transaction_max_timeout_ms: u64,
    /// How long an unused transactional id is remembered.
    pub transactional_id_expiration_ms: u64,
    /// Partitions of `__transaction_state`.
    pub transaction_topic_partitions: i32,
    /// How long the sequence numbers of a silent idempotent producer are remembered.
    pub producer_id_expiration_ms: u64,
}

/// When a write counts as acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// When it is on stable storage.
    Fsync,
    /// When every in-sync replica has written it; the disk follows later.
    Replicated,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogConfig {
    /// How long messages are kept; -1 for ever. A topic's `retention.ms` wins.
    pub retention_ms: i64,
    /// How much of a partition is kept; -1 without bound. A topic's `retention.bytes` wins.
    pub retention_bytes: i64,
    /// Size at which a segment is closed. A topic's `segment.bytes` wins.
    pub segment_bytes: u64,
    /// The largest record batch. A topic's `max.message.bytes` wins.
    pub max_message_bytes: u64,
    /// How often retention and compaction look for work.
    pub retention_check_interval_ms: u64,
    /// When a write counts as acknowledged.
    pub durability: Durability,
}

/// `[redis]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RedisConfig {
    /// Port of this node's home shard; 0 picks a free one.
    pub port: u16,
    /// Ports of the replicas of other shards, `FIRST-LAST`: shard n takes the n-th. `0` picks free ones.
    pub replica_ports: String,
    /// `HOST:PORT` told to clients; empty means the listener's own address.
    pub advertise: String,
    /// Memory for keys and values before the eviction policy acts; 0 means 40% of the machine's.
    pub max_memory: u64,
}

impl RedisConfig {
    /// The range of `replica_ports`.
    pub(crate) fn ports(&self) -> Option<std::ops::RangeInclusive<u16>> {
        let (first, last) =
            self.replica_ports.split_once('-').unwrap_or((&self.replica_ports, &self.replica_ports));
        let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first <= last).then_some(first..=last)
    }

    /// The limit of the store's memory.
    pub(crate) fn max_memory_bytes(&self) -> u64 {
        if self.max_memory > 0 {
            return self.max_memory;
        }
        machine_memory_bytes() * 2 / 5
    }
}

fn machine_memory_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = total.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    kib * KIB
}

impl Config {
    /// The memory budget of the node for what clients of any protocol make it hold (requests, responses, buffers,
    /// decompression, scripts): a quarter of the machine's memory, and not less than what the layers reserve.
    pub(crate) fn memory_budget_bytes(&self) -> usize {
        let store = (moim_slots::shared::BUFFER_RESERVE + moim_slots::shared::SCRIPT_RESERVE) as u64;
        let queue = 2 * self.kafka.request_memory_bytes
            + self.kafka.response_memory_bytes
            + moim_queue::DECOMPRESSION_RESERVE as u64;
        let reserved = queue + store + moim_coord::api::MEMORY_RESERVE as u64;
        usize::try_from((machine_memory_bytes() / 4).max(reserved)).unwrap_or(usize::MAX)
    }
}

impl Default for RedisConfig {
    fn default() -> Self {
        Self { port: 6379, replica_ports: "6380-6389".to_owned(), advertise: String::new(), max_memory: 0 }
    }
}

/// `[admin]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdminConfig {
    /// Port of the HTTP listener; 0 picks a free one.
    pub port: u16,
    /// HTTP connections served at a time.
    pub max_connections: u32,
}

/// `[journal]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JournalConfig {
    /// Size of one file of the commit log.
    pub commit_file_bytes: u64,
    /// Memory for batches that were just written, shared by all partitions.
    pub recent_bytes: u64,
    /// Batches of this size and more go straight to their segment.
    pub bypass_bytes: u64,
    /// With less free space than this on the disk, appends are refused until space returns.
    pub min_free_bytes: u64,
}

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitsConfig {
    /// Partitions on this node.
    pub partitions: u32,
    /// Partitions of one topic.
    pub partitions_per_topic: u32,
    /// Members of one consumer group.
    pub group_members: u32,
    /// Fetch sessions kept for consumers.
    pub fetch_sessions: u32,
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self {
            id: 1,
            data: ".moim/data".to_owned(),
            host: "127.0.0.1".to_owned(),
            zone: String::new(),
            insecure: false,
            threads: 0,
            log_level: "info".to_owned(),
            shutdown_timeout_ms: 30_000,
        }
    }
}

impl Default for KafkaConfig {
    fn default() -> Self {
        Self {
            port: 9092,
            advertise: String::new(),
            users_file: String::new(),
            max_connections: 10_000,
            idle_connection_ms: 10 * MINUTE_MS,
            max_request_bytes: 100 * MIB,
            request_memory_bytes: 512 * MIB,
            response_memory_bytes: 256 * MIB,
            auto_create_topics: true,
            num_partitions: 1,
            group_initial_rebalance_delay_ms: 500,
            group_min_session_timeout_ms: 6_000,
            group_max_session_timeout_ms: 30 * MINUTE_MS,
            offsets_retention_ms: 7 * DAY_MS,
            offsets_topic_partitions: 50,
            transaction_max_timeout_ms: 15 * MINUTE_MS,
            transactional_id_expiration_ms: 7 * DAY_MS,
            transaction_topic_partitions: 50,
            producer_id_expiration_ms: DAY_MS,
        }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            retention_ms: 7 * 24 * 60 * 60 * 1000,
            retention_bytes: -1,
            segment_bytes: GIB,
            // As Kafka: a mebibyte of records and the twelve bytes in front of a batch.
            max_message_bytes: MIB + 12,
            retention_check_interval_ms: 5 * MINUTE_MS,
            durability: Durability::Fsync,
        }
    }
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self { port: 9644, max_connections: 64 }
    }
}

impl Default for JournalConfig {
    fn default() -> Self {
        Self {
            commit_file_bytes: 64 * MIB,
            recent_bytes: 64 * MIB,
            bypass_bytes: 256 * KIB,
            min_free_bytes: 256 * MIB,
        }
    }
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            partitions: 200_000,
            partitions_per_topic: 10_000,
            group_members: 10_000,
            fetch_sessions: 10_000,
        }
    }
}

impl Config {
    /// The rules a single type cannot say. Gives the first key that breaks one, and why.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let k = &self.kafka;
        rule(self.node.id >= 0, "node.id", "must not be negative")?;
        rule(!self.node.data.is_empty(), "node.data", "must name a folder")?;
        rule(!self.node.host.is_empty(), "node.host", "must be an address of this machine")?;
        rule(
            self.node.log_level.parse::<tracing_subscriber::EnvFilter>().is_ok(),
            "node.log_level",
            "must be error, warn, info, debug, trace or a filter such as info,moim_queue=debug",
        )?;
        rule(self.node.shutdown_timeout_ms > 0, "node.shutdown_timeout_ms", "must be more than 0")?;
        rule(
            k.advertise.is_empty() || split_host_port(&k.advertise).is_some(),
            "kafka.advertise",
            "must be HOST:PORT",
        )?;
        rule(k.max_connections > 0, "kafka.max_connections", "must be more than 0")?;
        rule(
            (KIB..=i32::MAX as u64).contains(&k.max_request_bytes),
            "kafka.max_request_bytes",
            "must be between 1 KiB and 2 GiB",
        )?;
        rule(
            k.request_memory_bytes >= k.max_request_bytes,
            "kafka.request_memory_bytes",
            "must hold at least one request of kafka.max_request_bytes",
        )?;
        rule(
            k.response_memory_bytes >= k.max_request_bytes,
            "kafka.response_memory_bytes",
            "must hold at least one batch of kafka.max_request_bytes",
        )?;
        rule(
            in_limit(k.num_partitions, self.limits.partitions_per_topic),
            "kafka.num_partitions",
            "must be between 1 and limits.partitions_per_topic",
        )?;
        rule(
            in_limit(k.offsets_topic_partitions, self.limits.partitions_per_topic),
            "kafka.offsets_topic_partitions",
            "must be between 1 and limits.partitions_per_topic",
        )?;
        rule(
            in_limit(k.transaction_topic_partitions, self.limits.partitions_per_topic),
            "kafka.transaction_topic_partitions",
            "must be between 1 and limits.partitions_per_topic",
        )?;
        rule(
            k.group_min_session_timeout_ms <= k.group_max_session_timeout_ms,
            "kafka.group_min_session_timeout_ms",
            "must not be above kafka.group_max_session_timeout_ms",
        )?;
        rule(
            (1..=i32::MAX as u64).contains(&k.transaction_max_timeout_ms),
            "kafka.transaction_max_timeout_ms",
            "must be between 1 ms and 24 days",
        )?;
        rule(self.log.retention_ms >= -1, "log.retention_ms", "must be -1 (for ever) or more")?;
        rule(self.log.retention_bytes >= -1, "log.retention_bytes", "must be -1 (no bound) or more")?;
        rule(
            (4 * KIB..=i32::MAX as u64).contains(&self.log.segment_bytes),
            "log.segment_bytes",
            "must be between 4 KiB and 2 GiB",
        )?;
        rule(
            (1..=k.max_request_bytes).contains(&self.log.max_message_bytes),
            "log.max_message_bytes",
            "must be between 1 and kafka.max_request_bytes",
        )?;
        rule(
            self.log.retention_check_interval_ms > 0,
            "log.retention_check_interval_ms",
            "must be more than 0",
        )?;
        rule(self.admin.max_connections > 0, "admin.max_connections", "must be more than 0")?;
        rule(self.redis.ports().is_some(), "redis.replica_ports", "must be FIRST-LAST, or 0")?;
        rule(
            self.redis.advertise.is_empty() || split_host_port(&self.redis.advertise).is_some(),
            "redis.advertise",
            "must be HOST:PORT",
        )?;
        rule(
            (MIB..=4 * GIB).contains(&self.journal.commit_file_bytes),
            "journal.commit_file_bytes",
            "must be between 1 MiB and 4 GiB",
        )?;
        rule(self.journal.recent_bytes >= MIB, "journal.recent_bytes", "must be 1 MiB or more")?;
        rule(
            (4 * KIB..=self.journal.commit_file_bytes / 4).contains(&self.journal.bypass_bytes),
            "journal.bypass_bytes",
            "must be between 4 KiB and a quarter of journal.commit_file_bytes",
        )?;
        cluster::check(&self.etcd, &self.peer, &self.cluster, self.node.id)
    }
}

fn rule(holds: bool, key: &'static str, why: &str) -> Result<(), (&'static str, String)> {
    if holds { Ok(()) } else { Err((key, why.to_owned())) }
}

fn in_limit(partitions: i32, limit: u32) -> bool {
    u32::try_from(partitions).is_ok_and(|n| (1..=limit).contains(&n))
}

/// Splits `HOST:PORT`; an IPv6 host stands in brackets.
pub fn split_host_port(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok()?;
    (!host.is_empty() && !host.contains(char::is_whitespace)).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_port() {
        for (text, wanted) in [
            ("a:1", Some(("a", 1))),
            ("[::1]:9092", Some(("::1", 9092))),
            ("a", None),
            (":1", None),
            ("a:x", None),
            ("a b:1", None),
        ] {
            assert_eq!(split_host_port(text), wanted.map(|(host, port)| (host.to_owned(), port)), "{text}");
        }
    }
}
