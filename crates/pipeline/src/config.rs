//! Configuration of a pipeline: every key has a default, an unknown key is an error.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::gateway::{Faults, GatewayOptions};
use crate::queue::QueueOptions;
use crate::tls::{ServerTls, TlsError};

/// Configuration of a pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PipelineConfig {
    /// Prefix of group names and transactional ids, so that several pipelines can share a queue.
    pub name: String,
    /// Kafka's `bootstrap.servers`.
    pub kafka: String,
    /// Addresses of Redis Cluster nodes.
    pub redis: String,
    /// File of the secret shared by clients and gateways; created if it does not exist.
    pub token_file: PathBuf,
    /// Partition count of the topics, when they are created.
    pub partitions: i32,
    /// Replication factor of the topics, when they are created; 0 is the cluster's default.
    pub replication_factor: i32,
    /// Gateway settings.
    pub gateway: GatewayConfig,
    /// Counter settings.
    pub counter: CounterConfig,
    /// Aggregator settings.
    pub aggregator: AggregatorConfig,
}

/// Gateway settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Instances per process.
    pub instances: usize,
    /// Listen address of the first instance; the others use the following ports. Port 0 picks free ones.
    pub listen: SocketAddr,
    /// Maximum number of unacknowledged messages per client.
    pub window: u32,
    /// Memory limit for one client's messages on their way to the queue.
    pub client_bytes: usize,
    /// Maximum number of connections.
    pub max_connections: usize,
    /// A message without a delivery report for this long is resent.
    pub report_timeout_ms: u64,
    /// Acknowledge messages once they are in the queue instead of the store: for a store that can lose acknowledged
    /// writes, as a Redis Cluster can in a failover.
    pub ack_after_queue: bool,
    /// Clients that no gateway has served for this long are adopted by another.
    pub adopt_after_ms: u64,
    /// The gateways' certificate chain, PEM; without it connections are not encrypted.
    pub tls_cert_file: Option<PathBuf>,
    /// The private key, PEM.
    pub tls_key_file: Option<PathBuf>,
}

/// Counter settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CounterConfig {
    /// Instances per process.
    pub instances: usize,
    /// Maximum number of messages per transaction.
    pub transaction_size: usize,
}

/// Aggregator settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AggregatorConfig {
    /// Instances per process.
    pub instances: usize,
    /// Maximum number of messages between two commits.
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
    /// Options of the queue.
    pub fn queue(&self) -> QueueOptions {
        QueueOptions {
            brokers: self.kafka.clone(),
            partitions: self.partitions,
            factor: Some(self.replication_factor).filter(|factor| *factor > 0),
            name: self.name.clone(),
        }
    }

    /// Options of the gateway with this instance number, from 0.
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
