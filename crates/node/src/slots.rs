//! Starts and stops the store: its shards on the node's journals and the replica driver, its listeners, its event loops.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::task::Shutdown;
use moim_base::{BrokerId, Clock, MemoryBudget};
use moim_cluster::StateRepository;
use moim_replica::{Dialler, Driver};
use moim_slots::effects::FrameLimits;
use moim_slots::server::Server;
use moim_slots::service::{Options, Parts, Service};

use crate::config::{Config, RedisConfig, split_host_port};
use crate::data_dir::DataDir;
use crate::exit::{Failure, Outcome};
use crate::journals::Journals;
use crate::replication::StoreStreams;

/// How often replicas are compared with their primary.
const CHECK_INTERVAL_MS: u64 = 60_000;
/// How long a start waits for its shards to answer.
const SETTLE: Duration = Duration::from_secs(15);

/// What the store is made of.
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
    let made = Service::recover(
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
    let service = made.map_err(|error| Failure::error(format!("cannot recover {data}: {error}")))?;
    service.shared().set_memory_budget(&parts.memory);
    parts.journals.progress.set_slots(service.sink());
    let taker = Arc::clone(&service);
    let _ = parts.store_streams.set(Box::new(move |stream| taker.take_stream(stream)));
    Ok(Slots { service })
}

impl Slots {
    /// For the admin port.
    pub(crate) fn service(&self) -> Arc<Service> {
        Arc::clone(&self.service)
    }

    /// Where clients reach the home shard.
    pub(crate) fn address(&self) -> SocketAddr {
        self.service.address()
    }

    /// What they are told.
    pub(crate) fn advertised(&self) -> String {
        self.service.advertised()
    }

    /// Follows the cluster from now on.
    pub(crate) fn serve(&self) -> Outcome {
        Ok(self.service.serve()?)
    }

    /// Ends the connections and the loops. Blocks.
    pub(crate) fn stop(self) {
        self.service.stop();
    }

    /// Waits until the shards of this node answer.
    pub(crate) async fn settle(&self) {
        self.service.settle(SETTLE).await;
    }
}

fn bind(address: SocketAddr) -> Outcome<TcpListener> {
    match Server::bind(address) {
        Ok(listener) => Ok(listener),
        Err(error)
            if error.kind() == ErrorKind::AddrInUse && address.port() == RedisConfig::default().port =>
        {
            // Nobody asked for this very port: several nodes on one machine, or a Redis beside, are no reason to fail.
            tracing::warn!(%address, "the usual port of the store is in use; taking a free one");
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
