//! The settings of a pipeline: every one has a default, an unknown one is an error.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gateway::{Faults, GatewayOptions};
use crate::queue::QueueOptions;
use crate::tls::{ServerTls, TlsError};

/// A pipeline, as its file has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PipelineConfig {
    /// Put before the names of groups and transactional ids, so that several pipelines can share a queue.
    pub name: String,
    /// Kafka's `bootstrap.servers`.
    pub kafka: String,
    /// Nodes of the Redis Cluster.
    pub redis: String,
    /// The secret that clients and gateways share; made when it is not there.
    pub token_file: PathBuf,
    /// Partitions of the topics, when they are made.
    pub partitions: i32,
    /// Copies of the topics, when they are made; 0 is the cluster's default.
    pub replication_factor: i32,
    /// The gateways.
    pub gateway: GatewayConfig,
    /// The counters.
    pub counter: CounterConfig,
    /// The aggregators.
    pub aggregator: AggregatorConfig,
}

/// The gateways.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// How many run in one process.
    pub instances: usize,
    /// Where the first listens; the others take the ports after it. Port 0 picks free ones.
    pub listen: SocketAddr,
    /// Messages a client may have under way that are not acknowledged.
    pub window: u32,
    /// Memory for one client's messages on their way into the queue.
    pub client_bytes: usize,
    /// Connections at a time.
    pub max_connections: usize,
    /// A message that the queue does not report on for so long goes out again.
    pub report_timeout_ms: u64,
    /// Acknowledge what is in the queue, not what is in the store: for a store that can lose what it acknowledged, as a
    /// Redis Cluster can in a failover.
    pub ack_after_queue: bool,
    /// Clients that no gateway has served for so long are adopted by another.
    pub adopt_after_ms: u64,
    /// The certificate gateways show, PEM, with those that lead to its authority; without it nothing is encrypted.
    pub tls_cert_file: Option<PathBuf>,
    /// Its key, PEM.
    pub tls_key_file: Option<PathBuf>,
}

/// The counters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CounterConfig {
    /// How many run in one process.
    pub instances: usize,
    /// At most so many messages in one transaction.
    pub transaction_size: usize,
}

/// The aggregators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AggregatorConfig {
    /// How many run in one process.
    pub instances: usize,
    /// At most so many messages between two commits.
    pub batch: usize,
}

impl Default for PipelineConfig {
    fn default() -> Self {
        Self {
            name: "pipeline".into(),
            kafka: "127.0.0.1:9092".into(),
            redis: "127.0.0.1:6379".into(),
            token_file: ".moim/pipeline.token".into(),
            partitions: 10,
            replication_factor: 0,
            gateway: GatewayConfig::default(),
            counter: CounterConfig::default(),
            aggregator: AggregatorConfig::default(),
        }
    }
}

impl Default for GatewayConfig {
    fn default() -> Self {
        let options = GatewayOptions::default();
        Self {
            instances: 1,
            listen: SocketAddr::from(([127, 0, 0, 1], 9700)),
            window: options.window,
            client_bytes: options.client_bytes,
            max_connections: options.max_connections,
            report_timeout_ms: options.report_timeout.as_millis() as u64,
            ack_after_queue: options.ack_after_queue,
            adopt_after_ms: options.adopt_after.as_millis() as u64,
            tls_cert_file: None,
            tls_key_file: None,
        }
    }
}

impl Default for CounterConfig {
    fn default() -> Self {
        Self { instances: 3, transaction_size: 20_000 }
    }
}

impl Default for AggregatorConfig {
    fn default() -> Self {
        Self { instances: 3, batch: 20_000 }
    }
}

impl PipelineConfig {
    /// The queue.
    pub fn queue(&self) -> QueueOptions {
        QueueOptions {
            brokers: self.kafka.clone(),
            partitions: self.partitions,
            factor: Some(self.replication_factor).filter(|factor| *factor > 0),
            name: self.name.clone(),
        }
    }

    /// The gateway with this number, from 0.
    pub fn gateway(&self, instance: usize, faults: Faults) -> Result<GatewayOptions, TlsError> {
        let gateway = &self.gateway;
        let tls = match (&gateway.tls_cert_file, &gateway.tls_key_file) {
            (None, None) => None,
            (Some(certificates), Some(key)) => Some(ServerTls::load(certificates, key)?),
            (Some(_), None) | (None, Some(_)) => return Err(TlsError::Half),
        };
        let mut listen = gateway.listen;
        if listen.port() != 0 {
            listen.set_port(listen.port().saturating_add(instance as u16));
        }
        Ok(GatewayOptions {
            listen,
            window: gateway.window.max(1),
            client_bytes: gateway.client_bytes,
            max_connections: gateway.max_connections,
            report_timeout: Duration::from_millis(gateway.report_timeout_ms.max(100)),
            ack_after_queue: gateway.ack_after_queue,
            adopt_after: Duration::from_millis(gateway.adopt_after_ms.max(100)),
            tls,
            faults,
        })
    }
}
