//! Startup and shutdown of the queue: broker and event loops, on the node's journals and the cluster's metadata.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use moim_base::metrics::{Gauge, Metrics};
use moim_base::task::Shutdown;
use moim_base::{BrokerId, Clock, MemoryBudget};
use moim_queue::{Broker, BrokerOptions, BrokerParts, Defaults, Server, Users};
use moim_replica::Driver;
use moim_state::StateRepository;

use crate::config::{Config, Durability};
use crate::data_dir::DataDir;
use crate::exit::{Failure, Outcome};
use crate::journals::Journals;

/// Maximum wait of the startup for this node's partition leaderships.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Poll interval of that wait.
const SETTLE_POLL: Duration = Duration::from_millis(5);

/// Dependencies of the queue.
pub(crate) struct QueueParts {
    pub(crate) config: Config,
    pub(crate) host: IpAddr,
    pub(crate) data: Arc<DataDir>,
    pub(crate) journals: Journals,
    /// The node's memory budget.
    pub(crate) memory: MemoryBudget,
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) shutdown: Shutdown,
}

/// The queue after recovery, before its listener is open.
pub(crate) struct RecoveredQueue {
    broker: Arc<Broker>,
    parts: QueueParts,
}

/// The running queue.
pub(crate) struct Queue {
    broker: Arc<Broker>,
    server: Server,
    shutdown: Shutdown,
}

/// Recovers topics, groups and transactions. Blocks; runs off the control thread.
pub(crate) fn recover(parts: QueueParts) -> Outcome<RecoveredQueue> {
    let storage = |error: &dyn std::fmt::Display| {
        Failure::error(format!("cannot recover {}: {error}", parts.data.path.display()))
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::error(format!("cannot start a runtime: {e}")))?;
    let broker_parts = BrokerParts {
        store: Arc::clone(&parts.journals.store),
        repository: Arc::clone(&parts.repository),
        driver: Arc::clone(&parts.driver),
        clock: Arc::clone(&parts.clock),
        metrics: Arc::clone(&parts.metrics),
        shutdown: parts.shutdown.clone(),
    };
    let broker =
        runtime.block_on(Broker::open(broker_options(&parts)?, broker_parts)).map_err(|e| storage(&e))?;
    parts.journals.progress.set_broker(broker.sink());
    register_metrics(&parts.metrics, &broker);
    Ok(RecoveredQueue { broker, parts })
}

impl RecoveredQueue {
    /// Opens the Kafka listener.
    pub(crate) fn serve(self) -> Outcome<Queue> {
        let Self { broker, parts } = self;
        let server = Server::start(Arc::clone(&broker)).map_err(|error| {
            let address = SocketAddr::new(parts.host, parts.config.kafka.port);
            crate::serve::cannot_listen(address, &error, "--kafka-port")
        })?;
        Ok(Queue { broker, server, shutdown: parts.shutdown })
    }
}

impl Queue {
    pub(crate) fn broker(&self) -> Arc<Broker> {
        Arc::clone(&self.broker)
    }

    pub(crate) fn kafka_addr(&self) -> SocketAddr {
        self.server.address()
    }

    /// Waits until this node leads the partitions whose elected leader it is. With a timeout: one partition that cannot
    /// be led must not delay the others.
    pub(crate) async fn settle(&self) {
        let settled = async {
            while !self.broker.is_settled() {
                tokio::time::sleep(SETTLE_POLL).await;
            }
        };
        if tokio::time::timeout(SETTLE_TIMEOUT, settled).await.is_err() {
            tracing::warn!("partition leadership not complete at startup");
        }
    }

    /// Stops accepting requests and completes those in flight. Blocks.
    pub(crate) fn stop(self) {
        self.shutdown.stop();
        self.server.join();
    }
}

fn broker_options(parts: &QueueParts) -> Outcome<BrokerOptions> {
    let config = &parts.config;
    let kafka = &config.kafka;
    let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let ms = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let mut options = BrokerOptions {
        node_id: BrokerId(config.node.id),
        cluster_id: parts.data.identity().cluster_id,
        data_dir: parts.data.path.display().to_string(),
        listen: SocketAddr::new(parts.host, kafka.port),
        advertise: advertised(&kafka.advertise)?,
        users: users(&kafka.users_file)?,
        rack: Some(config.node.zone.clone()).filter(|zone| !zone.is_empty()),
        max_connections: kafka.max_connections as usize,
        max_request_bytes: size(kafka.max_request_bytes),
        request_memory_bytes: size(kafka.request_memory_bytes),
        response_memory_bytes: size(kafka.response_memory_bytes),
        memory: Some(parts.memory.clone()),
        idle_connection_ms: kafka.idle_connection_ms,
        auto_create_topics: kafka.auto_create_topics,
        num_partitions: kafka.num_partitions,
        topic_defaults: topic_defaults(config),
        offsets_partitions: kafka.offsets_topic_partitions,
        transaction_partitions: kafka.transaction_topic_partitions,
        group_initial_rebalance_delay_ms: kafka.group_initial_rebalance_delay_ms,
        group_min_session_timeout_ms: kafka.group_min_session_timeout_ms,
        group_max_session_timeout_ms: kafka.group_max_session_timeout_ms,
        group_max_size: config.limits.group_members as usize,
        offsets_retention_ms: ms(kafka.offsets_retention_ms),
        transaction_max_timeout_ms: i32::try_from(kafka.transaction_max_timeout_ms).unwrap_or(i32::MAX),
        transactional_id_expiration_ms: kafka.transactional_id_expiration_ms,
        producer_id_expiration_ms: ms(kafka.producer_id_expiration_ms),
        retention_check_ms: config.log.retention_check_interval_ms,
        compaction_check_ms: config.log.retention_check_interval_ms,
        max_partitions: config.limits.partitions as usize,
        max_partitions_per_topic: i32::try_from(config.limits.partitions_per_topic).unwrap_or(i32::MAX),
        max_fetch_sessions: config.limits.fetch_sessions as usize,
        ..BrokerOptions::default()
    };
    if config.node.threads > 0 {
        options.event_loops = config.node.threads as usize;
    }
    Ok(options)
}

fn users(file: &str) -> Outcome<Users> {
    if file.is_empty() {
        return Ok(Users::default());
    }
    let wrong = |why: &dyn std::fmt::Display| Failure::usage(format!("`kafka.users_file` {file}: {why}"));
    let text = std::fs::read_to_string(file).map_err(|e| wrong(&e))?;
    Users::parse(&text).map_err(|e| wrong(&e))
}

fn advertised(text: &str) -> Outcome<Option<(String, u16)>> {
    if text.is_empty() {
        return Ok(None);
    }
    let (host, port) = text
        .rsplit_once(':')
        .and_then(|(host, port)| port.parse().ok().map(|port| (host.to_owned(), port)))
        .ok_or_else(|| Failure::usage(format!("`kafka.advertise` {text} is not HOST:PORT")))?;
    Ok(Some((host.trim_matches(['[', ']']).to_owned(), port)))
}

/// Default topic settings, by setting name. Contains only values that differ from the built-in defaults.
pub(crate) fn topic_defaults(config: &Config) -> Defaults {
    let log = &config.log;
    let durability = match log.durability {
        Durability::Fsync => "fsync",
        Durability::Replicated => "replicated",
    };
    let standard = crate::config::Config::default().log;
    let mut defaults = Defaults::new();
    let mut set = |name: &str, differs: bool, value: String| {
        if differs {
            defaults.insert(name.to_owned(), value);
        }
    };
    set("retention.ms", log.retention_ms != standard.retention_ms, log.retention_ms.to_string());
    set("retention.bytes", log.retention_bytes != standard.retention_bytes, log.retention_bytes.to_string());
    set("segment.bytes", log.segment_bytes != standard.segment_bytes, log.segment_bytes.to_string());
    set(
        "max.message.bytes",
        log.max_message_bytes != standard.max_message_bytes,
        log.max_message_bytes.to_string(),
    );
    set("durability", log.durability != standard.durability, durability.to_owned());
    defaults
}

/// Registers gauges that are sampled at scrape time.
fn register_metrics(metrics: &Metrics, broker: &Arc<Broker>) {
    let gauge = |name: &str, help: &str| {
        let gauge: Gauge = Gauge::default();
        metrics.register(name, help, gauge.clone());
        gauge
    };
    let topics = gauge("queue_topics", "Topics, internal ones included");
    let partitions = gauge("queue_partitions", "Partitions, internal ones included");
    let connections = gauge("queue_connections", "Open connections");
    let groups = gauge("queue_groups", "Consumer groups");
    let broker = Arc::clone(broker);
    metrics.before_render(move || {
        let summary = broker.summary();
        topics.set(summary.topics as i64);
        partitions.set(summary.partitions as i64);
        connections.set(summary.connections as i64);
        groups.set(summary.groups as i64);
    });
}
