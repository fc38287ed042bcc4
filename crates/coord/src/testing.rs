//! Whole clusters in one process, for tests: coordinators over the in-memory network, on real journals.
//!
//! Every node has its own runtime, store and folder, and `kill` stops it with all of its threads, like `kill -9`.

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

/// Timeout of every wait.
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

/// A cluster of coordinators in one process.
pub struct TestCluster {
    nodes: Vec<Node>,
    /// The in-memory network between the nodes.
    pub network: MemoryNetwork,
    driver: Runtime,
    tune: Tune,
    /// The clock of leases and requests; Raft's own timers are real.
    clock: Arc<dyn Clock>,
    min_free_bytes: u64,
    /// Dropped last: the folders are removed after everything in them.
    _dir: TempDir,
}

/// Polls until `poll` returns a value.
pub fn until<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    #[allow(clippy::disallowed_methods)] // a test timeout
    let start = Instant::now();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl TestCluster {
    /// A new cluster of `count` voters.
    pub fn start(count: usize, tune: Tune) -> Self {
        Self::start_at(count, tune, Arc::new(SystemClock::new()))
    }

    /// A new cluster whose leases expire by this clock.
    pub fn start_at(count: usize, tune: Tune, clock: Arc<dyn Clock>) -> Self {
        let mut cluster = Self::without_founders(count, tune);
        cluster.clock = clock;
        cluster.found(count);
        cluster
    }

    /// Nodes that are not started yet.
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

    /// Starts a node from its folder.
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
        let coordinator = runtime.block_on(open).expect("the coordinator opens");
        node.running = Some(Running { runtime, coordinator, store });
    }

    /// Nodes started from now on require this many times as much free space as there is.
    pub fn want_free_space(&mut self, times: u64) {
        let dir = self.nodes[0].dir.parent().expect("folders have a parent").to_path_buf();
        let free = RealDisk.free_bytes(&dir).expect("a disk that can be asked");
        self.min_free_bytes = free * times;
    }

    /// Stops a node like `kill -9`: nothing is flushed, no peer is notified.
    pub fn kill(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        self.network.leave(&node.member.address);
        let running = node.running.take().expect("the node is running");
        running.runtime.shutdown_timeout(PATIENCE);
    }

    fn running(&self, at: usize) -> &Running {
        self.nodes[at].running.as_ref().expect("the node is running")
    }

    /// The coordinator of a running node.
    pub fn node(&self, at: usize) -> Coordinator {
        self.running(at).coordinator.clone()
    }

    /// The store of a running node.
    pub fn store(&self, at: usize) -> Store {
        self.running(at).store.clone()
    }

    /// A node's folder.
    pub fn folder(&self, at: usize) -> &std::path::Path {
        &self.nodes[at].dir
    }

    /// A node's Raft member.
    pub fn member(&self, at: usize) -> Member {
        self.nodes[at].member.clone()
    }

    /// The runtime of a running node.
    pub fn runtime(&self, at: usize) -> &Runtime {
        &self.running(at).runtime
    }

    /// Isolates a node from the others.
    pub fn isolate(&self, at: usize) {
        self.network.isolate(&self.nodes[at].member.address);
    }

    /// The running nodes.
    pub fn alive(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|at| self.nodes[*at].running.is_some()).collect()
    }

    /// Runs a future of the test, for at most a minute.
    pub fn wait<F: Future>(&self, future: F) -> F::Output {
        self.driver
            .block_on(async { tokio::time::timeout(PATIENCE, future).await })
            .expect("a reply before the timeout")
    }

    /// The node among these that a quorum confirms as leader.
    pub fn leader_among(&self, some: &[usize]) -> usize {
        until("a leader", || {
            some.iter().copied().find(|at| self.wait(self.node(*at).group().read_index()).is_ok())
        })
    }

    /// The leader node.
    pub fn leader(&self) -> usize {
        self.leader_among(&self.alive())
    }

    /// A running node that does not lead.
    pub fn follower(&self) -> usize {
        let leader = self.leader();
        self.alive().into_iter().find(|at| *at != leader).expect("there is a follower")
    }

    /// Waits until every running node serves linearizable reads.
    pub fn settle(&self) {
        for at in self.alive() {
            until("the cluster settles", || self.wait(self.node(at).linearizable()).ok());
        }
    }

    /// Waits until no lease is past its deadline.
    pub fn wait_leases_ended(&self) {
        until("leases end", || {
            (!self.alive().into_iter().any(|at| self.node(at).is_lease_overdue())).then_some(())
        });
        self.settle();
    }

    /// Repeats a request on a node until it succeeds.
    pub fn insist<T, F>(&self, at: usize, mut ask: impl FnMut(Coordinator) -> F) -> T
    where
        F: Future<Output = Result<T, CoordError>>,
    {
        until("it succeeds", || self.wait(ask(self.node(at))).ok())
    }
}
