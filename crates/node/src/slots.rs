//! Startup and shutdown of the store: shards on the node's journals and the replica driver, listeners, event loops.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::task::Shutdown;
use moim_base::{BrokerId, Clock, MemoryBudget};
use moim_replica::{Dialler, Driver};
use moim_slots::effects::FrameLimits;
use moim_slots::server::Server;
use moim_slots::service::{Options, Parts, Service};
use moim_state::StateRepository;

use crate::config::{Config, RedisConfig, split_host_port};
use crate::data_dir::DataDir;
use crate::exit::{Failure, Outcome};
use crate::journals::Journals;
use crate::replication::StoreStreams;

/// Interval of the comparison of replicas with their primary.
const CHECK_INTERVAL_MS: u64 = 60_000;
/// Maximum wait of the startup for the shards to serve.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(15);

/// Dependencies of the store.
pub(crate) struct SlotsParts {
    pub(crate) config: Config,
    pub(crate) host: IpAddr,
    pub(crate) data: Arc<DataDir>,
    pub(crate) journals: Journals,
    pub(crate) memory: MemoryBudget,
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) dialler: Arc<dyn Dialler>,
    pub(crate) store_streams: StoreStreams,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) shutdown: Shutdown,
}

/// The running store.
pub(crate) struct Slots {
    service: Arc<Service>,
}

/// Opens the shards that are on disk and the listener of the home shard. Blocks.
pub(crate) fn recover(parts: SlotsParts) -> Outcome<Slots> {
    let listener = bind(SocketAddr::new(parts.host, parts.config.redis.port))?;
    let (options, data) = (options(&parts), parts.data.path.display().to_string());
    let recovered = Service::recover(
        options,
        Parts {
            store: Arc::clone(&parts.journals.store),
            repository: Arc::clone(&parts.repository),
            driver: Arc::clone(&parts.driver),
            dialler: Arc::clone(&parts.dialler),
            clock: Arc::clone(&parts.clock),
            metrics: Arc::clone(&parts.metrics),
            shutdown: parts.shutdown.clone(),
        },
        listener,
    );
    let service = recovered.map_err(|error| Failure::error(format!("cannot recover {data}: {error}")))?;
    service.shared().set_memory_budget(&parts.memory);
    parts.journals.progress.set_slots(service.sink());
    let acceptor = Arc::clone(&service);
    let _ = parts.store_streams.set(Box::new(move |stream| acceptor.take_stream(stream)));
    Ok(Slots { service })
}

impl Slots {
    /// The store service.
    pub(crate) fn service(&self) -> Arc<Service> {
        Arc::clone(&self.service)
    }

    /// Listener address of the home shard.
    pub(crate) fn address(&self) -> SocketAddr {
        self.service.address()
    }

    /// Advertised address of the home shard.
    pub(crate) fn advertised(&self) -> String {
        self.service.advertised()
    }

    /// Starts to follow the cluster's records and to serve.
    pub(crate) fn serve(&self) -> Outcome {
        Ok(self.service.serve()?)
    }

    /// Closes the connections and ends the event loops. Blocks.
    pub(crate) fn stop(self) {
        self.service.stop();
    }

    /// Waits until the shards of this node serve, or until the timeout.
    pub(crate) async fn settle(&self) {
        self.service.settle(SETTLE_TIMEOUT).await;
    }
}

fn bind(address: SocketAddr) -> Outcome<TcpListener> {
    match Server::bind(address) {
        Ok(listener) => Ok(listener),
        Err(error)
            if error.kind() == ErrorKind::AddrInUse && address.port() == RedisConfig::default().port =>
        {
            // The default port was not configured explicitly: several nodes, or a Redis, on one machine must not fail
            // the start.
            tracing::warn!(%address, "default Redis port in use; binding a free port");
            let free = SocketAddr::new(address.ip(), 0);
            Server::bind(free).map_err(|error| crate::serve::cannot_listen(free, &error, "--redis-port"))
        }
        Err(error) => Err(crate::serve::cannot_listen(address, &error, "--redis-port")),
    }
}

fn options(parts: &SlotsParts) -> Options {
    let (config, identity) = (&parts.config, parts.data.identity());
    let redis = &config.redis;
    let advertised = split_host_port(&redis.advertise);
    let fallback = || split_host_port(&config.kafka.advertise).filter(|_| parts.host.is_unspecified());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let loops =
        if config.node.threads > 0 { config.node.threads as usize } else { cores.saturating_sub(1).max(1) };
    Options {
        node: BrokerId(config.node.id),
        cluster_id: identity.cluster_id,
        host: parts.host,
        replica_ports: redis.ports().unwrap_or(0..=0),
        advertise_host: advertised.clone().or_else(fallback).map(|(host, _)| host).unwrap_or_default(),
        advertise_port: advertised.map_or(0, |(_, port)| port),
        loops,
        founders: config.cluster.founders().map_or(1, |founders| founders.len().max(1)),
        data: parts.data.path.clone(),
        max_memory: redis.max_memory_bytes(),
        frames: FrameLimits::default(),
        check_interval_ms: CHECK_INTERVAL_MS,
    }
}
