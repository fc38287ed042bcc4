//! The testbed of a replicated service: three hosts, the controller, and a coordination core that is always correct
//! but not always reachable.
//!
//! Owns the starts and crashes of hosts, their member records, the streams between them, and the faults. It never
//! interprets the service that runs on it.

mod faults;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moim_base::socket::Socket;
use moim_base::{BrokerId, Clock, TopicId};
use moim_journal::disk::Survival;
use moim_journal::{JournalId, Store};
use moim_replica::controller::ControllerTuning;
use moim_replica::controller::term::{self as controller_term, ControllerTermParts, LogEnds, Peers};
use moim_replica::driver::{Dialler, Driver, DriverParts, DriverTuning};
use moim_replica::message::Sender;
use moim_replica::{BrokerEpoch, DirectoryId, PartitionId, keys};
use moim_state::nodes::{self, MemberRecord, NodeRecord};
use moim_state::{BoxFuture, MemoryRepository, RepositoryError, StateRepository, Txn};
use tokio::runtime::Handle;

use self::faults::Faults;
use crate::bit_rot::{self, BitRot, Directories};
use crate::store::links::{Links, Remote};
use crate::world::{Process, Task, World};

/// Number of hosts with a node.
pub(crate) const NODES: usize = 3;
/// Port of the advertised Kafka address; the host name identifies the host.
pub(crate) const KAFKA_PORT: u16 = 9092;
/// TTL of the presence lease.
const TTL: Duration = Duration::from_millis(1_000);

/// Handle to the service of a node, for clients and other nodes.
pub(crate) trait Service: Clone + Send + 'static {}

impl<S: Clone + Send + 'static> Service for S {}

/// A running node.
#[derive(Clone)]
pub(crate) struct Node<S> {
    pub(crate) service: S,
    pub(crate) driver: Arc<Driver>,
    /// Runtime of its process.
    pub(crate) handle: Handle,
}

pub(crate) fn broker(host: usize) -> BrokerId {
    BrokerId(i32::try_from(host).unwrap_or(0) + 1)
}

pub(crate) fn host_of(node: BrokerId) -> usize {
    usize::try_from(node.0 - 1).unwrap_or(0)
}

/// Name of a host.
pub(crate) fn name(host: usize) -> String {
    format!("host-{host}")
}

/// Parses the name of a host.
pub(crate) fn host_named(name: &str) -> Option<usize> {
    name.strip_prefix("host-")?.parse().ok()
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State shared by the world, the clients and the nodes.
pub(crate) struct Shared<S> {
    pub(crate) links: Arc<Links>,
    pub(crate) core: Arc<MemoryRepository>,
    pub(crate) core_host: usize,
    pub(crate) directories: Directories,
    running: Mutex<BTreeMap<usize, Node<S>>>,
}

impl<S: Service> Shared<S> {
    pub(crate) fn node(&self, host: usize) -> Option<Node<S>> {
        locked(&self.running).get(&host).cloned()
    }

    pub(crate) fn add_node(&self, host: usize, node: Node<S>) {
        locked(&self.running).insert(host, node);
    }

    fn remove_node(&self, host: usize) {
        // Dropped outside of the lock.
        let removed = locked(&self.running).remove(&host);
        drop(removed);
    }
}

/// The parts of a node below its service: the repository client and the replication driver.
pub(crate) struct NodeParts {
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) driver: Arc<Driver>,
    voter: u64,
}

impl NodeParts {
    pub(crate) fn new<S: Service>(shared: &Arc<Shared<S>>, host: usize, process: &Process) -> Self {
        let remote = Remote {
            core: Arc::clone(&shared.core),
            links: Arc::clone(&shared.links),
            ends: (host, shared.core_host),
        };
        let repository: Arc<dyn StateRepository> = Arc::new(remote);
        let dialler: Arc<dyn Dialler> = Arc::new(PeerDialler { shared: Arc::clone(shared), from: host });
        let driver = Driver::start(DriverParts {
            node: broker(host),
            repository: Arc::clone(&repository),
            dialler,
            clock: Arc::clone(&process.clock),
            scope: process.scope.clone(),
            tuning: DriverTuning::default(),
        });
        Self { repository, driver, voter: shared.directories.voter(host) }
    }

    /// Starts the registration of the node as a member, after recovery.
    pub(crate) fn register(&self, host: usize, process: &Process) {
        let others: Vec<BrokerId> = (0..NODES).filter(|other| *other != host).map(broker).collect();
        self.driver.set_peers(&others);
        let presence = Presence {
            repository: Arc::clone(&self.repository),
            driver: Arc::clone(&self.driver),
            store: process.store.clone(),
            host,
            voter: self.voter,
        };
        process.scope.spawn("sim-presence", presence.run());
    }
}

/// Connects to other nodes.
struct PeerDialler<S> {
    shared: Arc<Shared<S>>,
    from: usize,
}

impl<S: Service> Dialler for PeerDialler<S> {
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
            node.driver.accept(theirs);
            Ok(mine)
        })
    }
}

/// Presence of a node: its member key under a lease, with the list of damaged replicas.
pub(crate) struct Presence {
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) store: Store,
    pub(crate) host: usize,
    /// Voter id of its directory.
    pub(crate) voter: u64,
}

impl Presence {
    /// Registers the node, and again whenever its lease expired.
    pub(crate) async fn run(self) {
        loop {
            let _ = self.register().await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn register(&self) -> Result<(), RepositoryError> {
        let node = broker(self.host);
        let record = NodeRecord {
            node_id: node.0,
            voter: self.voter,
            incarnation: self.voter,
            directory_id: format!("disk-{}", self.voter),
            peer: name(self.host),
            kafka: format!("{}:{KAFKA_PORT}", name(self.host)),
            ..NodeRecord::default()
        };
        let key = keys::member(node);
        let unregister = Txn::new().delete(key.as_str()).put(nodes::node_key(node.0), record.to_bytes());
        self.repository.txn(unregister).await?;
        let lease = self.repository.grant(TTL).await?;
        let mut known = self.damage_version();
        let mut damaged = self.damaged();
        let put = Txn::new().put_leased(key.as_str(), self.member(&damaged).to_bytes(), lease.id);
        self.repository.txn(put).await?;
        let entry = self.repository.get(&key).await?.filter(|entry| entry.lease == Some(lease.id));
        let Some(entry) = entry else { return Ok(()) };
        let epoch = BrokerEpoch(entry.create_revision);
        self.driver.set_run(Sender { node, epoch, directory: DirectoryId(self.voter) });
        self.driver.on_damage_registered(&damaged);
        loop {
            tokio::time::sleep(TTL / 4).await;
            match self.repository.keep_alive(lease.id).await {
                Ok(_) => {}
                Err(error) if error.is_retryable() => {}
                Err(error) => return Err(error),
            }
            if known != self.damage_version() {
                let version = self.damage_version();
                damaged = self.damaged();
                let put = Txn::new().put_leased(key.as_str(), self.member(&damaged).to_bytes(), lease.id);
                // Retried after a failed write.
                if self.repository.txn(put).await.is_ok() {
                    known = version;
                    self.driver.on_damage_registered(&damaged);
                }
            }
        }
    }

    /// Changes whenever damage is detected or repaired.
    fn damage_version(&self) -> (u64, u64) {
        (self.store.damages(), self.driver.repairs())
    }

    /// Replicas that are damaged or under repair.
    fn damaged(&self) -> Vec<PartitionId> {
        let partition = |id: JournalId| PartitionId { topic: TopicId(id.incarnation), index: id.part };
        let mut damaged: Vec<_> = self.store.damaged().into_iter().map(partition).collect();
        damaged.iter().for_each(|id| self.driver.on_damaged(*id));
        damaged.extend(self.driver.repairing());
        damaged.sort();
        damaged.dedup();
        damaged
    }

    fn member(&self, damaged: &[PartitionId]) -> MemberRecord {
        MemberRecord {
            node_id: broker(self.host).0,
            incarnation: self.voter,
            voter: self.voter,
            damaged: damaged.iter().map(PartitionId::to_string).collect(),
            ..MemberRecord::default()
        }
    }
}

/// Failure detector of the controller: silent nodes and hung disks, as seen from its host.
struct FailureDetector<S> {
    shared: Arc<Shared<S>>,
    clock: Arc<dyn Clock>,
    silent_since: Mutex<Vec<Option<u64>>>,
    hung_since: Mutex<Vec<Option<u64>>>,
}

impl<S: Service> FailureDetector<S> {
    /// Checks every node periodically.
    async fn run(self: Arc<Self>) {
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

impl<S: Service> Peers for FailureDetector<S> {
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
async fn control<S: Service>(shared: Arc<Shared<S>>, clock: Arc<dyn Clock>) {
    let detector = Arc::new(FailureDetector {
        silent_since: Mutex::new(vec![None; NODES]),
        hung_since: Mutex::new(vec![None; NODES]),
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

/// World time, for parts that belong to no host.
struct WorldClock(Arc<AtomicU64>);

impl Clock for WorldClock {
    fn wall_ms(&self) -> i64 {
        1_700_000_000_000 + i64::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn monotonic_ns(&self) -> u64 {
        (1 << 40) + self.0.load(Ordering::Relaxed) * 1_000_000
    }
}

/// Starts the node of a host from its disk.
pub(crate) type Open<S> = fn(Arc<Shared<S>>, usize, Process, Handle) -> BoxFuture<'static, io::Result<()>>;

/// The hosts of a run, with their faults.
pub(crate) struct Testbed<S> {
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) client_host: usize,
    open: Open<S>,
    faults: Faults,
    now_ms: Arc<AtomicU64>,
    opening: BTreeMap<usize, Task<io::Result<()>>>,
    is_healed: bool,
    violation: Option<String>,
    /// Directories that failed to open and were replaced.
    replaced: u64,
}

impl<S: Service> Testbed<S> {
    /// Starts every host and the controller.
    pub(crate) fn new(world: &mut World, open: Open<S>, rot: Option<BitRot>) -> Self {
        for _ in 0..NODES + 2 {
            world.add_host();
        }
        let (core_host, client_host) = (NODES, NODES + 1);
        let now_ms = Arc::new(AtomicU64::new(0));
        let core = Arc::new(MemoryRepository::new(Arc::new(WorldClock(Arc::clone(&now_ms)))));
        let (links, directories, running) = (Arc::default(), Directories::default(), Mutex::default());
        let shared = Arc::new(Shared { links, core, core_host, directories, running });
        let clock = world.host(core_host).start().clock;
        let controller = world.host(core_host).spawn(control(Arc::clone(&shared), clock));
        let leases = Arc::clone(&shared.core);
        let lease_ticks = world.host(core_host).spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let _ = leases.tick(); // cannot fail without a log
            }
        });
        drop((controller, lease_ticks));
        world.host(client_host).start();
        [core_host, client_host].iter().for_each(|host| world.host(*host).set_disk_ms(1_000));
        let disk_ms = [2, 6, 20][world.random.usize(..3)];
        (0..NODES).for_each(|host| world.host(host).set_disk_ms(disk_ms));
        let (opening, faults) = (BTreeMap::new(), Faults::new(disk_ms, rot));
        let (is_healed, violation) = (false, None);
        let mut testbed =
            Self { shared, client_host, open, faults, now_ms, opening, is_healed, violation, replaced: 0 };
        (0..NODES).for_each(|host| testbed.start(world, host));
        testbed
    }

    /// Number of injected faults.
    pub(crate) fn fault_count(&self) -> u64 {
        self.faults.count
    }

    /// Flipped bits, and directories that were replaced because of them.
    pub(crate) fn rotted(&self) -> (u64, u64) {
        (self.faults.rot.as_ref().map_or(0, |rot| rot.flips), self.replaced)
    }

    /// Replaces a directory that the node refuses to open, as an operator would.
    fn replace(&mut self, world: &mut World, host: usize, why: &str) {
        world.trace.record(format_args!("directory of host {host} replaced: {why}"));
        self.replaced += 1;
        self.crash(world, host, Survival::Everything);
        world.host(host).wipe();
        self.shared.directories.replace(host);
        self.start(world, host);
    }

    /// Starts the node of a host.
    fn start(&mut self, world: &mut World, host: usize) {
        let process = match world.host(host).try_start() {
            Ok(process) => process,
            Err(error) if world.host(host).has_bit_rot() => {
                return self.replace(world, host, &error.to_string());
            }
            Err(error) => {
                self.violation.get_or_insert(format!("host {host} cannot open its store: {error}"));
                return;
            }
        };
        let Some(handle) = world.host(host).handle() else { return };
        let opened = world.host(host).spawn((self.open)(Arc::clone(&self.shared), host, process, handle));
        self.opening.extend(opened.map(|task| (host, task)));
        self.shared.links.set_unresponsive(host, false);
    }

    /// Crashes the process of a host.
    fn crash(&mut self, world: &mut World, host: usize, survival: Survival) {
        self.shared.remove_node(host);
        self.opening.remove(&host);
        let seed = world.random.u64(..);
        world.host(host).crash(survival, seed);
    }

    /// Advances the world by one tick and checks the hosts.
    fn step(&mut self, world: &mut World) -> Result<(), String> {
        world.step();
        self.now_ms.store(world.now_ms(), Ordering::Relaxed);
        for host in 0..NODES {
            if world.host(host).has_failed() {
                // During fault injection the host stays down for a while.
                if self.is_healed {
                    self.crash(world, host, Survival::Random);
                    self.start(world, host);
                }
                continue;
            }
            if world.host(host).has_panicked() {
                return Err(format!("a task of host {host} panicked"));
            }
            match self.opening.get(&host).and_then(Task::take) {
                Some(Ok(())) => world.host(host).check_recovered()?,
                Some(Err(why)) if world.host(host).has_bit_rot() => {
                    self.replace(world, host, &why.to_string())
                }
                Some(Err(why)) => return Err(format!("host {host} failed to open its service: {why}")),
                None => {}
            }
        }
        self.violation.take().map_or(Ok(()), Err)
    }

    fn is_all_in_sync(&self) -> bool {
        (0..NODES).all(|host| self.shared.node(host).is_some()) && bit_rot::is_all_in_sync(&self.shared.core)
    }

    /// Steps without new faults until `done` returns true. `done` may also report a violation.
    pub(crate) fn wait_until(
        &mut self,
        world: &mut World,
        timeout_ms: u64,
        what: &str,
        mut done: impl FnMut() -> Result<bool, String>,
    ) -> Result<(), String> {
        let deadline_ms = world.now_ms() + timeout_ms;
        while world.now_ms() < deadline_ms {
            self.step(world)?;
            if done()? {
                return Ok(());
            }
        }
        Err(format!("timed out after {timeout_ms} ms waiting for {what}"))
    }

    /// Injects faults for a while, then heals all of them. `violation` reports a violation, if any.
    pub(crate) fn run_faults(
        &mut self,
        world: &mut World,
        faults_ms: u64,
        mut violation: impl FnMut() -> Option<String>,
    ) -> Result<(), String> {
        let end_ms = world.now_ms() + faults_ms;
        while world.now_ms() < end_ms {
            self.step(world)?;
            violation().map_or(Ok(()), Err)?;
            self.step_faults(world, false);
        }
        self.step_faults(world, true);
        self.is_healed = true;
        Ok(())
    }

    /// Ends expired faults and may start a new one; with `heal` all faults end.
    fn step_faults(&mut self, world: &mut World, heal: bool) {
        let mut faults = std::mem::replace(&mut self.faults, Faults::new(0, None));
        faults.step(world, self, heal);
        self.faults = faults;
    }
}

/// Tells tasks of a run to stop.
#[derive(Default)]
pub(crate) struct StopFlag(AtomicBool);

impl StopFlag {
    pub(crate) fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
