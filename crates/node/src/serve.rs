//! `moim serve`: wires a node together, says when it is ready, and takes it down in order.
//!
//! Order matters. Up: safety checks, data folder, admin port (so that liveness and the reason of "not ready"
//! show during recovery), queue, ready line. Down: readiness off, queue, admin. The main thread is the
//! control thread; it never waits for a disk. The one line on stdout is the ready line.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown};
use moim_base::{Clock, SystemClock};
use moim_cluster::LocalRepository;
use tokio::net::TcpListener;

use crate::admin::{self, Admin, Listeners, NodeFacts, Readiness};
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::exit::{Failure, Outcome, Status};
use crate::output::styled;
use crate::queue::{self, QueueParts};
use crate::signals::Signals;

/// How often ended leases are looked for.
const LEASE_TICK: Duration = Duration::from_millis(250);

/// Runs a node until it is told to stop.
pub(crate) fn run(config: &Config) -> Outcome {
    start_logs(&config.node.log_level);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let host = check_host(config)?;
    let data = DataDir::open(Path::new(&config.node.data), config.node.id, clock.as_ref())?;
    raise_file_limit(u64::from(config.kafka.max_connections));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::error(format!("cannot start the event loop: {error}")))?;
    runtime.block_on(serve(config, host, data, clock))
}

async fn serve(config: &Config, host: IpAddr, data: DataDir, clock: Arc<dyn Clock>) -> Outcome {
    let mut signals = Signals::listen()?;
    let shutdown = Shutdown::new();
    let scope = Scope::new(shutdown.clone());
    let metrics = Arc::new(Metrics::new());

    let admin = Arc::new(Admin {
        readiness: Readiness::not_yet("recovering"),
        metrics: metrics.clone(),
        facts: facts(config, &data, clock.as_ref()),
        listeners: Mutex::new(Listeners::default()),
    });
    let listener = bind(SocketAddr::new(host, config.admin.port), "--admin-port").await?;
    let admin_addr = listener.local_addr()?;
    admin::serve(listener, admin.clone(), config.admin.max_connections, &scope);

    let parts = QueueParts {
        config: config.clone(),
        host,
        data: Arc::new(data),
        clock,
        metrics,
        shutdown: shutdown.clone(),
    };
    let identity = parts.data.identity.clone();
    // Recovery reads the disk; the control thread goes on answering meanwhile.
    let starting = tokio::task::spawn_blocking(move || queue::start(parts));
    let queue = tokio::select! {
        started = starting => started.map_err(|error| Failure::error(format!("the queue failed to start: {error}")))??,
        name = signals.next() => {
            // Recovery only reads and truncates what was never acknowledged: leaving it midway is as safe as kill -9.
            tracing::info!(signal = name, "stopped before the node was ready");
            std::process::exit(0);
        }
    };

    let listeners = Listeners { kafka: queue.kafka_addr(), admin: Some(admin_addr) };
    print_ready(identity.node_id, &identity.cluster_id, &listeners);
    *admin.listeners.lock().unwrap_or_else(PoisonError::into_inner) = listeners;
    admin.readiness.ready();
    scope.spawn("leases", end_leases(queue.repository(), shutdown.clone()));

    tokio::select! {
        name = signals.next() => tracing::info!(signal = name, "stopping; a second signal stops at once"),
        () = shutdown.stopped() => tracing::error!("stopping: the node cannot go on"),
    }
    admin.readiness.not_ready("stopping");
    let patience = Duration::from_millis(config.node.shutdown_timeout_ms);
    tokio::select! {
        stopped = tokio::time::timeout(patience, tokio::task::spawn_blocking(move || queue.stop())) => {
            if stopped.is_err() {
                tracing::warn!(timeout_ms = config.node.shutdown_timeout_ms, "the graceful stop took too long");
            }
        }
        name = signals.next() => {
            tracing::warn!(signal = name, "stopping at once");
            std::process::exit(1);
        }
    }
    shutdown.stop();
    if shutdown.has_panicked() {
        return Err(Failure::error("a task panicked; see the log"));
    }
    tracing::info!("stopped");
    Ok(())
}

/// Lets time pass for the state repository: leases that nobody keeps alive end.
async fn end_leases(repository: Arc<LocalRepository>, shutdown: Shutdown) {
    while !shutdown.is_stopped() {
        tokio::time::sleep(LEASE_TICK).await;
        if let Err(error) = repository.tick() {
            tracing::warn!(%error, "a lease could not be ended; it is tried again");
        }
    }
}

fn facts(config: &Config, data: &DataDir, clock: &dyn Clock) -> NodeFacts {
    NodeFacts {
        node_id: data.identity.node_id,
        cluster_id: data.identity.cluster_id.clone(),
        incarnation: data.identity.incarnation,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        zone: Some(config.node.zone.clone()).filter(|zone| !zone.is_empty()),
        pid: std::process::id(),
        started_at_ms: clock.wall_ms(),
    }
}

/// The address to bind, unless it would expose an open broker to other machines unasked.
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
        return Err(Failure::usage(format!("clients cannot be told to connect to {host}"))
            .hint("pass --advertise-kafka HOST:PORT with the address they reach this machine by"));
    }
    tracing::warn!(%host, "listening for other machines without TLS and authentication, as --insecure asked");
    Ok(ip)
}

async fn bind(address: SocketAddr, flag: &str) -> Outcome<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let status = match error.kind() {
            std::io::ErrorKind::AddrInUse => Status::Conflict,
            std::io::ErrorKind::PermissionDenied => Status::NotAllowed,
            _ => Status::Error,
        };
        Failure::new(status, format!("cannot listen on {address}: {error}"))
            .hint(format!("choose another port with {flag}; 0 picks a free one"))
    })
}

fn print_ready(node_id: i32, cluster_id: &str, listeners: &Listeners) {
    let mut line = format!("ready node={node_id} cluster={cluster_id}");
    for (name, address) in [("kafka", listeners.kafka), ("admin", listeners.admin)] {
        if let Some(address) = address {
            line.push_str(&format!(" {name}={address}"));
        }
    }
    // A supervisor that does not read stdout is no reason to stop serving.
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
        tracing::warn!(%error, "nobody reads the ready line");
    }
}

fn start_logs(level: &str) {
    use std::io::IsTerminal as _;
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(styled(std::io::stderr().is_terminal()))
        .finish();
    // Fails only when a subscriber is there already, and then there are logs.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Each connection and each open segment is a file; the soft limit of most shells is 1024.
fn raise_file_limit(connections: u64) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    if let Some(files) = getrlimit(Resource::Nofile).current.filter(|files| *files < connections) {
        tracing::warn!(files, connections, "the limit of open files is below kafka.max_connections");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machines_are_let_in_only_on_purpose() {
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
