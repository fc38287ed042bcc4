//! Whole clusters in one process, for tests: coordinators over the in-memory network, on real journals.
//!
//! Every node has its own runtime, store and folder, and dies with all of its threads, as `kill -9` does it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moim_base::clock::{Clock, SystemClock};
use moim_base::task::{Scope, Shutdown};
use moim_journal::{Disk, DurableSink, OpenError as StoreError, RealDisk, Store, StoreOptions};
use moim_raft::{GroupId, GroupOptions, Host, Member, MemoryNetwork, Router, VoterId};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::engine::{CoordError, Coordinator, CoordinatorOptions};

/// How long anything is waited for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Changes the settings of every node.
pub type Tune = fn(&mut CoordinatorOptions);

struct Sink(Router);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        self.0.on_durable(advanced);
    }
}

struct Running {
    runtime: Runtime,
    coordinator: Coordinator,
    store: Store,
}

struct Node {
    member: Member,
    dir: PathBuf,
    running: Option<Running>,
}

/// A cluster.
pub struct TestCluster {
    nodes: Vec<Node>,
    /// Its wires.
    pub network: MemoryNetwork,
    driver: Runtime,
    tune: Tune,
    /// Of leases and requests; Raft's own timers are real.
    clock: Arc<dyn Clock>,
    min_free_bytes: u64,
    /// Last: the folders go after everything in them.
    _dir: TempDir,
}

/// Looks again and again until there is something.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    #[allow(clippy::disallowed_methods)] // a test's patience
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl TestCluster {
    /// A cluster of `count` nodes that all found it.
    pub fn start(count: usize, tune: Tune) -> Self {
        Self::start_at(count, tune, Arc::new(SystemClock::new()))
    }

    /// The same, with leases that end by this clock.
    pub fn start_at(count: usize, tune: Tune, clock: Arc<dyn Clock>) -> Self {
        let mut cluster = Self::without_founders(count, tune);
        cluster.clock = clock;
        cluster.found(count);
        cluster
    }

    /// Nodes that do not run yet.
    pub fn without_founders(count: usize, tune: Tune) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let nodes = (1..=count as u64).map(|id| Node {
            member: Member { id: VoterId(id), address: format!("node-{id}") },
            dir: dir.path().join(id.to_string()),
            running: None,
        });
        let driver = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let nodes = nodes.collect();
        let clock = Arc::new(SystemClock::new());
        Self { nodes, network: MemoryNetwork::new(), driver, tune, clock, min_free_bytes: 0, _dir: dir }
    }

    /// Starts the first `founders` nodes as a new cluster.
    pub fn found(&mut self, founders: usize) {
        (0..founders).for_each(|at| self.start_node(at));
        let members: Vec<_> = self.nodes[..founders].iter().map(|node| node.member.clone()).collect();
        for at in 0..founders {
            let group = self.node(at).group().clone();
            self.driver.block_on(group.initialize(&members)).expect("an empty member");
        }
    }

    /// Starts a node on what its folder holds.
    pub fn start_node(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        std::fs::create_dir_all(&node.dir).expect("a folder");
        let store = until("the folder is free", || {
            let options = StoreOptions { min_free_bytes: self.min_free_bytes, ..StoreOptions::default() };
            match Store::open(&node.dir, Arc::new(RealDisk), Arc::new(SystemClock::new()), options) {
                Ok(store) => Some(store),
                Err(StoreError::Locked) => None,
                Err(error) => panic!("{error}"),
            }
        });
        let router = Router::new();
        store.set_sink(Arc::new(Sink(router.clone())));
        store.start();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let transport = self.network.join(&node.member.address, router.clone());
        let host = Host {
            store: store.clone(),
            disk: Arc::new(RealDisk),
            root: node.dir.clone(),
            router,
            transport,
        };
        let mut group = GroupOptions::new(GroupId(1), node.member.id, 2);
        group.proposal_timeout = Duration::from_secs(2);
        let mut options = CoordinatorOptions::new(group, 0xC1);
        (self.tune)(&mut options);
        let scope = Scope::new(Shutdown::new());
        let open = Coordinator::open(&host, options, Arc::clone(&self.clock), &scope);
        let coordinator = runtime.block_on(open).expect("it opens");
        node.running = Some(Running { runtime, coordinator, store });
    }

    /// Nodes started from now on want this many times as much free space as there is.
    pub fn want_free_space(&mut self, times: u64) {
        let dir = self.nodes[0].dir.parent().expect("folders have a parent").to_path_buf();
        let free = RealDisk.free_bytes(&dir).expect("a disk that can be asked");
        self.min_free_bytes = free * times;
    }

    /// As `kill -9` does it: nothing is flushed, nobody is told.
    pub fn kill(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        self.network.leave(&node.member.address);
        let running = node.running.take().expect("it runs");
        running.runtime.shutdown_timeout(PATIENCE);
    }

    fn running(&self, at: usize) -> &Running {
        self.nodes[at].running.as_ref().expect("it runs")
    }

    /// The coordinator of a node that runs.
    pub fn node(&self, at: usize) -> Coordinator {
        self.running(at).coordinator.clone()
    }

    /// The store of a node that runs.
    pub fn store(&self, at: usize) -> Store {
        self.running(at).store.clone()
    }

    /// A node's folder.
    pub fn folder(&self, at: usize) -> &std::path::Path {
        &self.nodes[at].dir
    }

    /// A node's member of the group.
    pub fn member(&self, at: usize) -> Member {
        self.nodes[at].member.clone()
    }

    /// The runtime of a node that runs.
    pub fn runtime(&self, at: usize) -> &Runtime {
        &self.running(at).runtime
    }

    /// Cuts a node off from the others.
    pub fn isolate(&self, at: usize) {
        self.network.isolate(&self.nodes[at].member.address);
    }

    /// Which nodes run.
    pub fn alive(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|at| self.nodes[*at].running.is_some()).collect()
    }

    /// Runs a future of the test, for a minute at most.
    pub fn wait<F: Future>(&self, future: F) -> F::Output {
        self.driver
            .block_on(async { tokio::time::timeout(PATIENCE, future).await })
            .expect("an answer in time")
    }

    /// The node among these that a quorum confirms as leader.
    pub fn leader_among(&self, some: &[usize]) -> usize {
        until("a leader", || {
            some.iter().copied().find(|at| self.wait(self.node(*at).group().read_index()).is_ok())
        })
    }

    /// The node that leads.
    pub fn leader(&self) -> usize {
        self.leader_among(&self.alive())
    }

    /// A node that runs and does not lead.
    pub fn follower(&self) -> usize {
        let leader = self.leader();
        self.alive().into_iter().find(|at| *at != leader).expect("there is a follower")
    }

    /// Waits until every node that runs answers linearizable reads.
    pub fn settle(&self) {
        for at in self.alive() {
            until("the cluster settles", || self.wait(self.node(at).linearizable()).ok());
        }
    }

    /// Waits until no lease lives that is over by the clock.
    pub fn wait_leases_ended(&self) {
        until("leases end", || {
            (!self.alive().into_iter().any(|at| self.node(at).is_lease_overdue())).then_some(())
        });
        self.settle();
    }

    /// Does something on a node again and again until it succeeds.
    pub fn insist<T, F>(&self, at: usize, mut ask: impl FnMut(Coordinator) -> F) -> T
    where
        F: Future<Output = Result<T, CoordError>>,
    {
        until("it succeeds", || self.wait(ask(self.node(at))).ok())
    }
}
