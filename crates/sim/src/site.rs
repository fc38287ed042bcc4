//! A site: three machines that serve something replicated, the controller, and a coordination core that is always right but
//! not always reached.
//!
//! Machines that come and go, their member records, the streams between them, what goes wrong. Never what is served.

mod trouble;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moim_base::socket::Socket;
use moim_base::{BrokerId, Clock, TopicId};
use moim_cluster::nodes::{self, MemberRecord, NodeRecord};
use moim_cluster::{BoxFuture, MemoryRepository, RepositoryError, StateRepository, Txn};
use moim_journal::disk::Survival;
use moim_journal::{JournalId, Store};
use moim_replica::controller::ControllerTuning;
use moim_replica::controller::term::{self as controller_term, ControllerTermParts, LogEnds, Peers};
use moim_replica::driver::{Dialler, Driver, DriverParts, DriverTuning};
use moim_replica::message::Sender;
use moim_replica::{BrokerEpoch, DirectoryId, PartitionId, keys};
use tokio::runtime::Handle;

use self::trouble::Trouble;
use crate::rot::{self, Directories, Rot};
use crate::store::wires::{Remote, Wires};
use crate::world::{Process, Task, World};

/// Machines that serve.
pub(crate) const NODES: usize = 3;
/// The port in the address Kafka clients are told; the name says which machine.
pub(crate) const KAFKA_PORT: u16 = 9092;
/// How long a node that says nothing is taken for one that is there.
const TTL: Duration = Duration::from_millis(1_000);

/// What a node serves, as clients and other nodes get at it.
pub(crate) trait Served: Clone + Send + 'static {}

impl<S: Clone + Send + 'static> Served for S {}

/// A node that can be asked.
#[derive(Clone)]
pub(crate) struct Node<S> {
    pub(crate) serves: S,
    pub(crate) driver: Arc<Driver>,
    /// Where its code runs.
    pub(crate) handle: Handle,
}

pub(crate) fn broker(host: usize) -> BrokerId {
    BrokerId(i32::try_from(host).unwrap_or(0) + 1)
}

pub(crate) fn host_of(node: BrokerId) -> usize {
    usize::try_from(node.0 - 1).unwrap_or(0)
}

/// What a machine is called.
pub(crate) fn name(host: usize) -> String {
    format!("host-{host}")
}

/// Which machine is called so.
pub(crate) fn host_named(name: &str) -> Option<usize> {
    name.strip_prefix("host-")?.parse().ok()
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the world, the clients and the nodes know together.
pub(crate) struct Shared<S> {
    pub(crate) wires: Arc<Wires>,
    pub(crate) core: Arc<MemoryRepository>,
    pub(crate) core_host: usize,
    pub(crate) directories: Directories,
    present: Mutex<BTreeMap<usize, Node<S>>>,
}

impl<S: Served> Shared<S> {
    pub(crate) fn node(&self, host: usize) -> Option<Node<S>> {
        locked(&self.present).get(&host).cloned()
    }

    pub(crate) fn arrive(&self, host: usize, node: Node<S>) {
        locked(&self.present).insert(host, node);
    }

    fn leave(&self, host: usize) {
        // Dropped outside the lock.
        let gone = locked(&self.present).remove(&host);
        drop(gone);
    }
}

/// What a node stands on: the core as it reaches it, and the driver, which reaches the others.
pub(crate) struct Ground {
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) driver: Arc<Driver>,
    voter: u64,
}

impl Ground {
    pub(crate) fn new<S: Served>(shared: &Arc<Shared<S>>, host: usize, process: &Process) -> Self {
        let remote = Remote {
            core: Arc::clone(&shared.core),
            wires: Arc::clone(&shared.wires),
            ends: (host, shared.core_host),
        };
        let repository: Arc<dyn StateRepository> = Arc::new(remote);
        let dialler: Arc<dyn Dialler> = Arc::new(Dial { shared: Arc::clone(shared), from: host });
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

    /// Everything is recovered: from now on the node is a member.
    pub(crate) fn enlist(&self, host: usize, process: &Process) {
        let others: Vec<BrokerId> = (0..NODES).filter(|other| *other != host).map(broker).collect();
        self.driver.set_peers(&others);
        let present = Present {
            repository: Arc::clone(&self.repository),
            driver: Arc::clone(&self.driver),
            store: process.store.clone(),
            host,
            voter: self.voter,
        };
        process.scope.spawn("sim-presence", present.run());
    }
}

/// Reaches the other nodes.
struct Dial<S> {
    shared: Arc<Shared<S>>,
    from: usize,
}

impl<S: Served> Dialler for Dial<S> {
    fn dial(&self, node: BrokerId) -> BoxFuture<'_, io::Result<Box<dyn Socket>>> {
        Box::pin(async move {
            let to = host_of(node);
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..5))).await;
            if self.shared.wires.is_cut(self.from, to) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let node = self.shared.node(to).ok_or(io::ErrorKind::ConnectionRefused)?;
            let (mine, theirs) = self.shared.wires.stream(self.from, to);
            let _there = node.handle.enter();
            node.driver.accept(theirs);
            Ok(mine)
        })
    }
}

/// The member record of a node: that it is there, and which of its replicas are damaged.
pub(crate) struct Present {
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) store: Store,
    pub(crate) host: usize,
    /// The voter id of its directory.
    pub(crate) voter: u64,
}

impl Present {
    /// Says that the node is there, for as long as it can.
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
        let before = Txn::new().delete(key.as_str()).put(nodes::node_key(node.0), record.to_bytes());
        self.repository.txn(before).await?;
        let lease = self.repository.grant(TTL).await?;
        let mut found = self.found();
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
            if found != self.found() {
                let now = self.found();
                damaged = self.damaged();
                let put = Txn::new().put_leased(key.as_str(), self.member(&damaged).to_bytes(), lease.id);
                // Told again where it was not heard.
                if self.repository.txn(put).await.is_ok() {
                    found = now;
                    self.driver.on_damage_registered(&damaged);
                }
            }
        }
    }

    /// Changes with what is known of damage.
    fn found(&self) -> (u64, u64) {
        (self.store.damages(), self.driver.repairs())
    }

    /// Replicas that are damaged, or not whole again yet.
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

/// Who is silent, as the controller's machine sees it.
struct Pulse<S> {
    shared: Arc<Shared<S>>,
    clock: Arc<dyn Clock>,
    silent: Mutex<Vec<Option<u64>>>,
    hung: Mutex<Vec<Option<u64>>>,
}

impl<S: Served> Pulse<S> {
    /// Looks at everybody, again and again.
    async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let now = self.clock.monotonic_ms();
            let mut silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
            for (host, since) in silent.iter_mut().enumerate() {
                let hears = self.shared.node(host).is_some()
                    && !self.shared.wires.is_deaf(host)
                    && !self.shared.wires.is_cut(host, self.shared.core_host);
                *since = if hears { None } else { Some(since.unwrap_or(now)) };
            }
            let mut hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
            for (host, since) in hung.iter_mut().enumerate() {
                *since = self.shared.wires.is_hung(host).then_some(since.unwrap_or(now));
            }
        }
    }
}

impl<S: Served> Peers for Pulse<S> {
    fn suspects(&self) -> Vec<(BrokerId, u64)> {
        let silent = self.silent.lock().unwrap_or_else(PoisonError::into_inner);
        silent.iter().enumerate().filter_map(|(host, since)| Some((broker(host), (*since)?))).collect()
    }

    /// Those whose sync is older than a second, as the disk watch of a node has it.
    fn impaired(&self) -> Vec<BrokerId> {
        let now = self.clock.monotonic_ms();
        let hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        let old = |since: &Option<u64>| since.is_some_and(|since| now >= since + 1_000);
        hung.iter().enumerate().filter(|(_, since)| old(since)).map(|(host, _)| broker(host)).collect()
    }

    fn log_ends(&self, node: BrokerId, partitions: Vec<PartitionId>) -> BoxFuture<'static, Option<LogEnds>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let host = host_of(node);
            if shared.wires.is_cut(host, shared.core_host) || shared.wires.is_deaf(host) {
                return None;
            }
            let driver = shared.node(host)?.driver;
            let (run, ends) = driver.ask_log_ends(node, partitions).await.ok()?;
            let ends = ends.into_iter().filter_map(|(id, end)| Some((id, end?))).collect();
            Some(LogEnds { run, ends })
        })
    }
}

/// The controller, on the machine of the core: it is always there, and always the same.
async fn control<S: Served>(shared: Arc<Shared<S>>, clock: Arc<dyn Clock>) {
    let pulse =
        Pulse { silent: Mutex::new(vec![None; NODES]), hung: Mutex::new(vec![None; NODES]), shared, clock };
    let pulse = Arc::new(pulse);
    let core: Arc<dyn StateRepository> = Arc::clone(&pulse.shared.core) as _;
    let put = core.txn(Txn::new().put(keys::CONTROLLER, "sim")).await;
    let Ok(moim_cluster::TxnOutcome::Done { revision }) = put else { return };
    let parts = ControllerTermParts {
        repository: core,
        clock: Arc::clone(&pulse.clock),
        peers: Arc::clone(&pulse) as Arc<dyn Peers>,
        tuning: ControllerTuning::default(),
        settings: Default::default(),
    };
    futures_util::future::join(pulse.run(), controller_term::serve(&parts, revision)).await;
}

/// The time of the world, for what belongs to no machine.
struct WorldClock(Arc<AtomicU64>);

impl Clock for WorldClock {
    fn wall_ms(&self) -> i64 {
        1_700_000_000_000 + i64::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn monotonic_ns(&self) -> u64 {
        (1 << 40) + self.0.load(Ordering::Relaxed) * 1_000_000
    }
}

/// Starts the node of a machine on what its disk holds.
pub(crate) type Open<S> = fn(Arc<Shared<S>>, usize, Process, Handle) -> BoxFuture<'static, io::Result<()>>;

/// The machines, and what becomes of them.
pub(crate) struct Site<S> {
    pub(crate) shared: Arc<Shared<S>>,
    pub(crate) client_host: usize,
    open: Open<S>,
    trouble: Trouble,
    now_ms: Arc<AtomicU64>,
    opening: BTreeMap<usize, Task<io::Result<()>>>,
    is_healed: bool,
    violation: Option<String>,
    /// Directories that were refused and replaced.
    replaced: u64,
}

impl<S: Served> Site<S> {
    /// Every machine runs, and so does the controller.
    pub(crate) fn new(world: &mut World, open: Open<S>, rot: Option<Rot>) -> Self {
        for _ in 0..NODES + 2 {
            world.add_host();
        }
        let (core_host, client_host) = (NODES, NODES + 1);
        let now_ms = Arc::new(AtomicU64::new(0));
        let core = Arc::new(MemoryRepository::new(Arc::new(WorldClock(Arc::clone(&now_ms)))));
        let (wires, directories, present) = (Arc::default(), Directories::default(), Mutex::default());
        let shared = Arc::new(Shared { wires, core, core_host, directories, present });
        let clock = world.host(core_host).start().clock;
        let controlled = world.host(core_host).spawn(control(Arc::clone(&shared), clock));
        let leases = Arc::clone(&shared.core);
        let ticked = world.host(core_host).spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let _ = leases.tick(); // nothing can fail without a log
            }
        });
        drop((controlled, ticked));
        world.host(client_host).start();
        [core_host, client_host].iter().for_each(|host| world.host(*host).set_disk_ms(1_000));
        let disk_ms = [2, 6, 20][world.random.usize(..3)];
        (0..NODES).for_each(|host| world.host(host).set_disk_ms(disk_ms));
        let (opening, trouble) = (BTreeMap::new(), Trouble::new(disk_ms, rot));
        let (is_healed, violation) = (false, None);
        let mut site =
            Self { shared, client_host, open, trouble, now_ms, opening, is_healed, violation, replaced: 0 };
        (0..NODES).for_each(|host| site.start(world, host));
        site
    }

    /// How many faults there were.
    pub(crate) fn faults(&self) -> u64 {
        self.trouble.count
    }

    /// Bits that flipped, and directories that were refused for it.
    pub(crate) fn rotted(&self) -> (u64, u64) {
        (self.trouble.rot.as_ref().map_or(0, |rot| rot.flips), self.replaced)
    }

    /// An operator replaces a directory that the node refuses.
    fn replace(&mut self, world: &mut World, host: usize, why: &str) {
        world.trace.note(format_args!("host {host} is replaced: {why}"));
        self.replaced += 1;
        self.crash(world, host, Survival::Everything);
        world.host(host).wipe();
        self.shared.directories.replace(host);
        self.start(world, host);
    }

    /// Starts the node of a machine.
    fn start(&mut self, world: &mut World, host: usize) {
        let process = match world.host(host).try_start() {
            Ok(process) => process,
            Err(error) if world.host(host).is_rotten() => {
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
        self.shared.wires.set_deaf(host, false);
    }

    /// Ends the process of a machine.
    fn crash(&mut self, world: &mut World, host: usize, survival: Survival) {
        self.shared.leave(host);
        self.opening.remove(&host);
        let seed = world.random.u64(..);
        world.host(host).crash(survival, seed);
    }

    /// Lets a little time pass.
    fn step(&mut self, world: &mut World) -> Result<(), String> {
        world.step();
        self.now_ms.store(world.now_ms(), Ordering::Relaxed);
        for host in 0..NODES {
            if world.host(host).has_failed() {
                // While faults go on it stays down for a while.
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
                Some(Err(why)) if world.host(host).is_rotten() => self.replace(world, host, &why.to_string()),
                Some(Err(why)) => return Err(format!("host {host} cannot open what it had: {why}")),
                None => {}
            }
        }
        self.violation.take().map_or(Ok(()), Err)
    }

    fn is_all_in_sync(&self) -> bool {
        (0..NODES).all(|host| self.shared.node(host).is_some()) && rot::is_all_in_sync(&self.shared.core)
    }

    /// Lets time pass without new faults until something is so. `done` also says what is wrong, if something is.
    pub(crate) fn quiet(
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
        Err(format!("waited {timeout_ms} ms in vain for {what}"))
    }

    /// Lets things go wrong for a while, and heals everything. `wrong` says what is wrong, if something is.
    pub(crate) fn suffer(
        &mut self,
        world: &mut World,
        faults_ms: u64,
        mut wrong: impl FnMut() -> Option<String>,
    ) -> Result<(), String> {
        let end_ms = world.now_ms() + faults_ms;
        while world.now_ms() < end_ms {
            self.step(world)?;
            wrong().map_or(Ok(()), Err)?;
            self.disturb(world, false);
        }
        self.disturb(world, true);
        self.is_healed = true;
        Ok(())
    }

    /// Ends what is over and maybe begins something; with `heal` everything ends.
    fn disturb(&mut self, world: &mut World, heal: bool) {
        let mut trouble = std::mem::replace(&mut self.trouble, Trouble::new(0, None));
        trouble.step(world, self, heal);
        self.trouble = trouble;
    }
}

/// Whether a run goes on.
#[derive(Default)]
pub(crate) struct Switch(AtomicBool);

impl Switch {
    pub(crate) fn off(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_off(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
