//! A node of the store on a simulated host: the shipped driver and service, and the parts of a node that they need.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::socket::Socket;
use moim_base::task::Scope;
use moim_base::{BrokerId, Clock};
use moim_journal::DurableSink;
use moim_replica::controller::ControllerTuning;
use moim_replica::controller::term::{self as controller_term, ControllerTermParts, LogEnds, Peers};
use moim_replica::driver::{Dialler, Driver, DriverParts, DriverTuning};
use moim_replica::{PartitionId, keys};
use moim_slots::service::{Options, Parts, Service};
use moim_state::{BoxFuture, StateRepository, Txn};
use tokio::runtime::Handle;

use super::Shared;
use super::links::Remote;
use crate::testbed::Presence;
use crate::world::Process;

/// A running node.
#[derive(Clone)]
pub(super) struct Node {
    pub(super) service: Arc<Service>,
    pub(super) driver: Arc<Driver>,
    /// Runtime of its process.
    pub(super) handle: Handle,
    scope: Scope,
}

pub(super) fn broker(host: usize) -> BrokerId {
    BrokerId(i32::try_from(host).unwrap_or(0) + 1)
}

pub(super) fn host_of(node: BrokerId) -> usize {
    usize::try_from(node.0 - 1).unwrap_or(0)
}

/// The service at the other end of a peer connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PeerService {
    Driver,
    Store,
}

/// Connects to other nodes.
struct PeerDialler {
    shared: Arc<Shared>,
    from: usize,
    target: PeerService,
}

impl Dialler for PeerDialler {
    fn dial(&self, node: BrokerId) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        Box::pin(async move {
            let to = host_of(node);
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..5))).await;
            if self.shared.links.is_cut(self.from, to) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let node = self.shared.node(to).ok_or(io::ErrorKind::ConnectionRefused)?;
            let (mine, theirs) = self.shared.links.stream(self.from, to);
            let _context = node.handle.enter();
            match self.target {
                PeerService::Driver => node.driver.accept(theirs),
                PeerService::Store => {
                    let service = Arc::clone(&node.service);
                    node.scope.spawn("sim-peer", async move {
                        let _ = service.serve_peer(theirs).await; // the peer sees the error
                    });
                }
            }
            Ok(mine)
        })
    }
}

/// Passes durability notifications to the driver.
struct Sink(Arc<Driver>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        self.0.on_durable(advanced);
    }
}

/// Starts the node of a host from its disk.
pub(super) async fn open(
    shared: Arc<Shared>,
    host: usize,
    process: Process,
    handle: Handle,
) -> io::Result<()> {
    let remote = Remote {
        core: Arc::clone(&shared.core),
        links: Arc::clone(&shared.links),
        ends: (host, shared.core_host),
    };
    let repository: Arc<dyn StateRepository> = Arc::new(remote);
    let dialler = |target| Arc::new(PeerDialler { shared: Arc::clone(&shared), from: host, target });
    let driver = Driver::start(DriverParts {
        node: broker(host),
        repository: Arc::clone(&repository),
        dialler: dialler(PeerService::Driver),
        clock: Arc::clone(&process.clock),
        scope: process.scope.clone(),
        tuning: DriverTuning::default(),
    });
    let parts = Parts {
        store: Arc::new(process.store.clone()),
        repository: Arc::clone(&repository),
        driver: Arc::clone(&driver),
        dialler: dialler(PeerService::Store),
        clock: Arc::clone(&process.clock),
        metrics: Arc::new(Metrics::new()),
        shutdown: process.scope.shutdown().clone(),
    };
    let options = Options {
        node: broker(host),
        cluster_id: "sim".to_owned(),
        host: IpAddr::V4(Ipv4Addr::LOCALHOST),
        replica_ports: 0..=0,
        advertise_host: format!("host-{host}"),
        advertise_port: 0,
        loops: 1,
        founders: shared.shards,
        // Snapshots would go to a real disk; no journal here grows large enough for one.
        data: PathBuf::from("/nowhere"),
        max_memory: 0,
        frames: shared.frames,
        check_interval_ms: 500,
    };
    let service = Service::recover_here(options, parts, process.scope.clone())?;
    process.store.set_sink(Arc::new(Sink(Arc::clone(&driver))));
    let others: Vec<BrokerId> = (0..shared.nodes).filter(|other| *other != host).map(broker).collect();
    driver.set_peers(&others);
    let presence = Presence {
        repository: Arc::clone(&repository),
        driver: Arc::clone(&driver),
        store: process.store.clone(),
        host,
        voter: shared.directories.voter(host),
    };
    process.scope.spawn("sim-presence", presence.run());
    process.scope.spawn("sim-service", Arc::clone(&service).run());
    shared.add_node(host, Node { service, driver, handle, scope: process.scope });
    Ok(())
}

/// Failure detector of the controller: silent nodes and hung disks, as seen from its host.
pub(super) struct FailureDetector {
    pub(super) shared: Arc<Shared>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) silent_since: Mutex<Vec<Option<u64>>>,
    pub(super) hung_since: Mutex<Vec<Option<u64>>>,
}

impl FailureDetector {
    /// Checks every node periodically.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let now = self.clock.monotonic_ms();
            let mut silent = self.silent_since.lock().unwrap_or_else(PoisonError::into_inner);
            for (host, since) in silent.iter_mut().enumerate() {
                let responds = self.shared.node(host).is_some()
                    && !self.shared.links.is_unresponsive(host)
                    && !self.shared.links.is_cut(host, self.shared.core_host);
                *since = if responds { None } else { Some(since.unwrap_or(now)) };
            }
            let mut hung = self.hung_since.lock().unwrap_or_else(PoisonError::into_inner);
            for (host, since) in hung.iter_mut().enumerate() {
                *since = self.shared.links.is_hung(host).then_some(since.unwrap_or(now));
            }
        }
    }
}

impl Peers for FailureDetector {
    fn suspects(&self) -> Vec<(BrokerId, u64)> {
        let silent = self.silent_since.lock().unwrap_or_else(PoisonError::into_inner);
        silent.iter().enumerate().filter_map(|(host, since)| Some((broker(host), (*since)?))).collect()
    }

    /// Nodes with a sync of more than a second, like the disk watchdog of a real node.
    fn impaired(&self) -> Vec<BrokerId> {
        let now = self.clock.monotonic_ms();
        let hung = self.hung_since.lock().unwrap_or_else(PoisonError::into_inner);
        let is_impaired = |since: &Option<u64>| since.is_some_and(|since| now >= since + 1_000);
        hung.iter()
            .enumerate()
            .filter(|(_, since)| is_impaired(since))
            .map(|(host, _)| broker(host))
            .collect()
    }

    fn log_ends(&self, node: BrokerId, partitions: Vec<PartitionId>) -> BoxFuture<'static, Option<LogEnds>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let host = host_of(node);
            if shared.links.is_cut(host, shared.core_host) || shared.links.is_unresponsive(host) {
                return None;
            }
            let driver = shared.node(host)?.driver;
            let (run, ends) = driver.ask_log_ends(node, partitions).await.ok()?;
            let ends = ends.into_iter().filter_map(|(id, end)| Some((id, end?))).collect();
            Some(LogEnds { run, ends })
        })
    }
}

/// Runs the controller, on the host of the coordination core: it never fails and never changes.
pub(super) async fn control(shared: Arc<Shared>, clock: Arc<dyn Clock>) {
    let detector = Arc::new(FailureDetector {
        silent_since: Mutex::new(vec![None; shared.nodes]),
        hung_since: Mutex::new(vec![None; shared.nodes]),
        shared,
        clock,
    });
    let core: Arc<dyn StateRepository> = Arc::clone(&detector.shared.core) as _;
    let put = core.txn(Txn::new().put(keys::CONTROLLER, "sim")).await;
    let Ok(moim_state::TxnOutcome::Done { revision }) = put else { return };
    let parts = ControllerTermParts {
        repository: core,
        clock: Arc::clone(&detector.clock),
        peers: Arc::clone(&detector) as Arc<dyn Peers>,
        tuning: ControllerTuning::default(),
        settings: Default::default(),
    };
    futures_util::future::join(detector.run(), controller_term::serve(&parts, revision)).await;
}
