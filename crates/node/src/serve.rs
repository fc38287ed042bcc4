//! `moim serve`: starts the parts of a node, prints the ready line, and shuts the node down gracefully.
//!
//! Startup order: safety checks, data directory, admin port (so that liveness and the readiness reason are visible
//! during recovery and cluster formation), journals, control thread with Raft and the coordination core, the journals
//! of the queue and the store, member registration, store, queue, ready line. Shutdown order: readiness off, leadership
//! hand-off, then the reverse. The main thread serves the admin port and never waits for a disk. The ready line is the
//! only line on stdout.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown};
use moim_base::{Clock, MemoryBudget, SystemClock};
use tokio::net::TcpListener;

use crate::admin::{self, Admin, Listeners, NodeFacts, Readiness};
use crate::config::{Config, split_host_port};
use crate::control::report::ClusterApi;
use crate::control::{self, Control, ControlParts};
use crate::data_dir::DataDir;
use crate::etcd::Etcd;
use crate::exit::{Failure, Outcome, Status};
use crate::formation;
use crate::journals::Journals;
use crate::queue::{self, Queue, QueueParts};
use crate::replication::Replication;
use crate::signals::Signals;
use crate::slots::{self, Slots, SlotsParts};
use crate::text::styled;

/// Runs a node until it is told to stop.
pub fn run(config: &Config) -> Outcome {
    start_logs(&config.node.log_level);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let host = check_host(config)?;
    let data = DataDir::open(Path::new(&config.node.data), config.node.id, clock.as_ref())?;
    use_small_pages();
    let connections = u64::from(config.kafka.max_connections) + u64::from(config.etcd.max_connections);
    raise_file_limit(connections + 10_000);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::error(format!("cannot start the event loop: {error}")))?;
    let data = Arc::new(data);
    let outcome = runtime.block_on(serve(config, host, Arc::clone(&data), clock));
    match outcome {
        Err(failure) if data.identity().aside.is_some() => Err(restart_process(failure)),
        outcome => outcome,
    }
}

/// Restarts this process in place (`exec`) after its data directory was found rolled back or damaged. Returns only on
/// failure.
fn restart_process(failure: Failure) -> Failure {
    use std::os::unix::process::CommandExt as _;
    tracing::warn!(%failure, "process restart: data directory is set aside");
    match std::env::current_exe() {
        Ok(program) => {
            let error = std::process::Command::new(program).args(std::env::args_os().skip(1)).exec();
            tracing::error!(%error, "process restart failed");
            failure
        }
        Err(error) => {
            tracing::error!(%error, "process restart failed");
            failure
        }
    }
}

/// The parts of a running node.
struct Node {
    journals: Journals,
    control: Control,
    queue: Queue,
    slots: Slots,
    etcd: Etcd,
    replication: Replication,
}

async fn serve(config: &Config, host: IpAddr, data: Arc<DataDir>, clock: Arc<dyn Clock>) -> Outcome {
    let mut signals = Signals::listen()?;
    let shutdown = Shutdown::new();
    let scope = Scope::new(shutdown.clone());
    let metrics = Arc::new(Metrics::new());

    let admin = Arc::new(Admin {
        readiness: Readiness::not_ready_because("recovering"),
        metrics: metrics.clone(),
        facts: Mutex::new(node_facts(config, &data, clock.as_ref())),
        cluster: OnceLock::new(),
        slots: OnceLock::new(),
        listeners: Mutex::new(Listeners::default()),
    });
    let listener = bind(SocketAddr::new(host, config.admin.port), "--admin-port")?;
    let admin_addr = listener.local_addr()?;
    admin::serve(listener, admin.clone(), config.admin.max_connections, &scope);

    let start =
        Start { config, host, data: &data, clock, metrics, admin: &admin, admin_addr, shutdown: &shutdown };
    let node = tokio::select! {
        started = start.node() => started?,
        name = signals.next() => {
            // Recovery truncates only unacknowledged data, and every step of the cluster formation is recorded before
            // it takes effect: an exit in between is as safe as kill -9.
            tracing::info!(signal = name, "node stopped during startup");
            std::process::exit(0);
        }
    };
    let identity = data.identity();
    let listeners = Listeners {
        kafka: Some(node.queue.kafka_addr()),
        redis: Some(node.slots.address()),
        etcd: Some(node.etcd.address),
        admin: Some(admin_addr),
        peer: Some(node.control.peer),
    };
    print_ready(identity.node_id, &identity.cluster_id, &listeners);
    *admin.listeners.lock().unwrap_or_else(PoisonError::into_inner) = listeners;
    admin.readiness.ready();

    tokio::select! {
        name = signals.next() => tracing::info!(signal = name, "node stopping; a second signal stops it at once"),
        () = node.control.removed.stopped() => {
            tracing::warn!("node stopping: removed from the cluster or replaced; its data directory is obsolete");
        }
        () = shutdown.stopped() => tracing::error!("node stopping: fatal failure"),
        () = node.control.failed.stopped() => tracing::error!("node stopping: coordination core failed"),
        () = node.replication.failed.stopped() => tracing::error!("node stopping: replication failed"),
        () = node.etcd.failed.stopped() => tracing::error!("node stopping: etcd port failed"),
    }
    admin.readiness.not_ready("stopping");
    let panicked = [
        shutdown.clone(),
        node.control.failed.clone(),
        node.replication.failed.clone(),
        node.etcd.failed.clone(),
    ];
    let timeout = Duration::from_millis(config.node.shutdown_timeout_ms);
    tokio::select! {
        stopped = tokio::time::timeout(timeout, node.stop()) => {
            if stopped.is_err() {
                tracing::warn!(timeout_ms = config.node.shutdown_timeout_ms, "graceful shutdown timed out");
            }
        }
        name = signals.next() => {
            tracing::warn!(signal = name, "node stopped at once by a second signal");
            std::process::exit(1);
        }
    }
    shutdown.stop();
    if panicked.iter().any(Shutdown::has_panicked) {
        return Err(Failure::error("a task panicked; see the log"));
    }
    tracing::info!("node stopped");
    Ok(())
}

/// Dependencies of the startup.
struct Start<'a> {
    config: &'a Config,
    host: IpAddr,
    data: &'a Arc<DataDir>,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
    admin: &'a Arc<Admin>,
    admin_addr: SocketAddr,
    shutdown: &'a Shutdown,
}

impl Start<'_> {
    async fn node(&self) -> Outcome<Node> {
        let (config, host) = (self.config, self.host);
        // One memory budget for the clients of all protocols.
        let memory = MemoryBudget::new(config.memory_budget_bytes());
        let etcd_address = SocketAddr::new(host, config.etcd.port);
        let mut etcd = Etcd::bind(etcd_address, &config.etcd, Arc::clone(&self.metrics), memory.clone())?;
        let (path, open, clock, metrics) =
            (self.data.path.clone(), config.clone(), Arc::clone(&self.clock), Arc::clone(&self.metrics));
        // Recovery reads the disk off the main thread, which serves the admin port meanwhile.
        let opened = off_thread(move || Ok(Journals::open(&path, &open, clock, &metrics))).await?;
        let journals = match opened {
            Ok(journals) => journals,
            Err(recovery) => {
                let failure = recovery.failure;
                if recovery.is_damage && formation::maybe_set_aside(self.data, &failure.message).await? {
                    tracing::error!(%failure, "data directory damaged; refetching from the other nodes");
                }
                return Err(failure);
            }
        };
        if !journals.store.was_clean() {
            // After an unclean shutdown, before the registration: written bytes that were not synced may be lost.
            self.data.set_intact_since(None)?;
        }
        let control = control::start(ControlParts {
            config: config.clone(),
            host,
            data: Arc::clone(self.data),
            store: Arc::clone(&journals.store),
            router: journals.router.clone(),
            clock: Arc::clone(&self.clock),
            metrics: Arc::clone(&self.metrics),
            readiness: self.admin.readiness.clone(),
            topic_defaults: queue::topic_defaults(config),
            etcd_runtime: etcd.runtime.clone(),
            etcd: etcd.address,
            admin: self.admin_addr,
        })
        .await?;
        let identity = self.data.identity();
        self.admin.set_identity(&identity.cluster_id, identity.incarnation);
        let _ = self.admin.cluster.set(ClusterApi {
            cluster_id: identity.cluster_id,
            node_id: identity.node_id,
            coordinator: control.coordinator.clone(),
            repository: Arc::clone(&control.repository),
            events: Arc::clone(&control.events),
            failure_detector: Arc::clone(&control.failure_detector),
        });
        etcd.serve(control.coordinator.clone());
        let replication =
            Replication::start(&control, &self.data.identity(), &journals.router, Arc::clone(&self.clock))?;
        control.failure_detector.set_driver(Arc::clone(&replication.driver));
        journals.progress.set_driver(Arc::clone(&replication.driver));
        self.admin.readiness.set_waiting("opening the queue");
        let parts = QueueParts {
            config: config.clone(),
            host,
            data: Arc::clone(self.data),
            journals: journals.clone(),
            memory: memory.clone(),
            repository: Arc::clone(&control.repository),
            driver: Arc::clone(&replication.driver),
            clock: Arc::clone(&self.clock),
            metrics: Arc::clone(&self.metrics),
            shutdown: self.shutdown.clone(),
        };
        let queue = off_thread(move || queue::recover(parts)).await?;
        let parts = SlotsParts {
            config: config.clone(),
            host,
            data: Arc::clone(self.data),
            journals: journals.clone(),
            memory,
            repository: Arc::clone(&control.repository),
            driver: Arc::clone(&replication.driver),
            dialler: Arc::clone(&replication.dialler),
            store_streams: Arc::clone(&replication.store_streams),
            clock: Arc::clone(&self.clock),
            metrics: Arc::clone(&self.metrics),
            shutdown: self.shutdown.clone(),
        };
        let slots = off_thread(move || slots::recover(parts)).await?;
        self.admin.readiness.set_waiting("registering with the cluster");
        control.register(&journals.damaged()).await;
        slots.serve()?;
        let _ = self.admin.slots.set(slots.service());
        let queue = off_thread(move || queue.serve()).await?;
        let scope = Scope::new(self.shutdown.clone());
        control.follow_quorum_contact(queue.broker(), &scope);
        control.follow_withdrawal(slots.service(), &scope);
        let (readiness, clock) = (self.admin.readiness.clone(), Arc::clone(&self.clock));
        control.report_findings(queue.broker(), slots.service(), readiness, clock, &scope);
        scope.spawn("queue-loops", queue.broker().watch_loops());
        control.report_damage(&journals, &replication.driver, &scope);
        control.publish_kafka(advertised(config, &config.kafka.advertise, queue.kafka_addr())).await?;
        control.publish_redis(slots.advertised()).await?;
        self.admin.readiness.set_waiting("waiting to lead its partitions");
        queue.settle().await;
        self.admin.readiness.set_waiting("waiting for its shards");
        slots.settle().await;
        Ok(Node { journals, control, queue, slots, etcd, replication })
    }
}

impl Node {
    /// Graceful shutdown: hands leadership over first, then stops all parts and closes the journals.
    async fn stop(self) {
        let Self { journals, control, queue, slots, etcd, replication } = self;
        control.hand_over().await;
        let stop_parts = move || {
            queue.stop();
            slots.stop();
            replication.stop();
            etcd.stop();
            control.stop();
            journals.close();
            Ok(())
        };
        if let Err(failure) = off_thread(stop_parts).await {
            tracing::error!(%failure, "graceful shutdown failed");
        }
    }
}

/// Runs blocking work on a thread of the blocking pool.
async fn off_thread<T: Send + 'static>(work: impl FnOnce() -> Outcome<T> + Send + 'static) -> Outcome<T> {
    // Recovery allocates much that it frees again, on a thread that is idle afterwards.
    let done = tokio::task::spawn_blocking(|| {
        let done = work();
        crate::allocator::release_freed_memory();
        done
    });
    let done = done.await;
    done.map_err(|error| Failure::error(format!("startup task failed: {error}")))?
}

/// Advertised address of a listener: the configured one, or the listener's own address. A listener on the unspecified
/// address advertises the host of the advertised Kafka address.
pub(crate) fn advertised(config: &Config, advertise: &str, bound: SocketAddr) -> String {
    if !advertise.is_empty() {
        return advertise.to_owned();
    }
    if !bound.ip().is_unspecified() {
        return bound.to_string();
    }
    match split_host_port(&config.kafka.advertise) {
        Some((host, _)) if host.contains(':') => format!("[{host}]:{}", bound.port()),
        Some((host, _)) => format!("{host}:{}", bound.port()),
        None => bound.to_string(),
    }
}

fn node_facts(config: &Config, data: &DataDir, clock: &dyn Clock) -> NodeFacts {
    let identity = data.identity();
    NodeFacts {
        node_id: identity.node_id,
        cluster_id: identity.cluster_id,
        incarnation: identity.incarnation,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        zone: Some(config.node.zone.clone()).filter(|zone| !zone.is_empty()),
        pid: std::process::id(),
        started_at_ms: clock.wall_ms(),
    }
}

/// Resolves the address to bind. Rejects a non-loopback address without `--insecure`.
fn check_host(config: &Config) -> Outcome<IpAddr> {
    let host = config.node.host.as_str();
    let resolved = (host, 0).to_socket_addrs().map(|mut all| all.next().map(|address| address.ip()));
    let ip = match resolved {
        Ok(Some(ip)) => ip,
        Ok(None) => return Err(Failure::usage(format!("`node.host` {host} has no address"))),
        Err(error) => return Err(Failure::usage(format!("`node.host` {host}: {error}"))),
    };
    if ip.is_loopback() {
        return Ok(ip);
    }
    if !config.node.insecure {
        let message = format!(
            "{host} can be reached from other machines, and this build has no TLS and no authentication"
        );
        return Err(Failure::new(Status::NotAllowed, message)
            .hint("listen on 127.0.0.1, or pass --insecure if the network itself keeps strangers out"));
    }
    if ip.is_unspecified() && config.kafka.advertise.is_empty() {
        return Err(Failure::usage(format!("{host} cannot be advertised to clients"))
            .hint("pass --advertise-kafka HOST:PORT with the address they reach this machine by"));
    }
    tracing::warn!(%host, "listening without TLS and authentication (--insecure)");
    Ok(ip)
}

fn bind(address: SocketAddr, flag: &str) -> Outcome<TcpListener> {
    let listener = moim_base::socket::listen(address).and_then(TcpListener::from_std);
    listener.map_err(|error| cannot_listen(address, &error, flag))
}

/// Why a listener could not be opened, and what to do about it.
pub fn cannot_listen(address: SocketAddr, error: &std::io::Error, flag: &str) -> Failure {
    let status = match error.kind() {
        std::io::ErrorKind::AddrInUse => Status::Conflict,
        std::io::ErrorKind::PermissionDenied => Status::NotAllowed,
        _ => Status::Error,
    };
    Failure::new(status, format!("cannot listen on {address}: {error}"))
        .hint(format!("choose another port with {flag}; 0 picks a free one"))
}

fn print_ready(node_id: i32, cluster_id: &str, listeners: &Listeners) {
    let mut line = format!("ready node={node_id} cluster={cluster_id}");
    let all = [
        ("kafka", listeners.kafka),
        ("redis", listeners.redis),
        ("etcd", listeners.etcd),
        ("admin", listeners.admin),
        ("peer", listeners.peer),
    ];
    for (name, address) in all {
        if let Some(address) = address {
            line.push_str(&format!(" {name}={address}"));
        }
    }
    // A closed stdout does not stop the node.
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
        tracing::warn!(%error, "ready line not written to stdout");
    }
}

/// Starts the log on stderr. `RUST_LOG` is preferred to `level`, a level or a filter.
pub fn start_logs(level: &str) {
    use std::io::IsTerminal as _;
    use tracing_subscriber::EnvFilter;
    // The Raft library logs every vote, so it is limited to errors unless RUST_LOG names it.
    let level = format!("openraft=error,{level}");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(styled(std::io::stderr().is_terminal()))
        .finish();
    // Fails only if a subscriber is installed already.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// The allocator asks for huge pages; a node at rest would hold three times the memory it uses, because every thread
/// touches a little of many of them. The journals' own buffers are long-lived and warm, so the load does not miss them.
pub fn use_small_pages() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(%error, "transparent huge pages not disabled");
    }
}

/// Each connection and each open segment is a file; the soft limit of most shells is 1024.
pub fn raise_file_limit(connections: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "limit of open files not raised");
    }
    if let Some(files) = getrlimit(Resource::Nofile).current.filter(|files| *files < connections) {
        tracing::warn!(files, connections, "limit of open files is below the connection limits");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_loopback_address_requires_insecure() {
        for (host, insecure, advertise, wanted) in [
            ("127.0.0.1", false, "", None),
            ("::1", false, "", None),
            ("localhost", false, "", None),
            ("0.0.0.0", false, "", Some(Status::NotAllowed)),
            ("0.0.0.0", true, "", Some(Status::Usage)),
            ("0.0.0.0", true, "broker:9092", None),
            ("192.0.2.1", false, "broker:9092", Some(Status::NotAllowed)),
            ("192.0.2.1", true, "", None),
            ("not an address", true, "", Some(Status::Usage)),
        ] {
            let mut config = Config::default();
            config.node.host = host.to_owned();
            config.node.insecure = insecure;
            config.kafka.advertise = advertise.to_owned();
            let got = check_host(&config).err().map(|failure| failure.status);
            assert_eq!(got, wanted, "{host} insecure={insecure} advertise={advertise}");
        }
    }
}
