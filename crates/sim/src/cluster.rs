//! Coordination nodes on simulated hosts, and their invariants: one leader per term, no panic, every node opens its
//! disk.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moim_coord::{Coordinator, CoordinatorOptions, SpaceId};
use moim_raft::{GroupId, GroupOptions, Host, Member, VoterId};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::world::{Process, Task, Trace, World};

const GROUP: GroupId = GroupId(1);
const CLUSTER: u64 = 0x51;
/// Tag of the group's journals in the durable sink.
const TAG: u64 = 2;

/// A running node.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) host: usize,
    pub(crate) coordinator: Coordinator,
    /// Runtime of its process.
    pub(crate) handle: Handle,
}

/// State shared by the world, the clients and the nodes.
pub(crate) struct Shared {
    pub(crate) trace: Trace,
    nodes: Mutex<BTreeMap<usize, Node>>,
    /// Client connections in order of their creation, with the host; closed when the node crashes.
    connections: Mutex<BTreeMap<u64, (usize, oneshot::Sender<()>)>>,
    next_connection: AtomicU64,
    /// Leader of each term, as any node reported it.
    leaders: Mutex<BTreeMap<u64, VoterId>>,
    violations: Mutex<Vec<String>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(trace: Trace) -> Arc<Self> {
        Arc::new(Self {
            trace,
            nodes: Mutex::default(),
            connections: Mutex::default(),
            next_connection: AtomicU64::new(0),
            leaders: Mutex::default(),
            violations: Mutex::default(),
        })
    }

    /// Records a violated invariant.
    pub(crate) fn violation(&self, violation: String) {
        self.trace.record(format_args!("VIOLATION {violation}"));
        locked(&self.violations).push(violation);
    }

    pub(crate) fn first_violation(&self) -> Option<String> {
        locked(&self.violations).first().cloned()
    }

    /// The running nodes, by host.
    pub(crate) fn nodes(&self) -> Vec<(usize, Node)> {
        locked(&self.nodes).iter().map(|(number, node)| (*number, node.clone())).collect()
    }

    /// A random running node.
    pub(crate) fn any_node(&self) -> Option<Node> {
        let nodes = locked(&self.nodes);
        if nodes.is_empty() {
            return None;
        }
        nodes.values().nth(fastrand::usize(..nodes.len())).cloned()
    }

    /// Opens a client connection to a node: the receiver completes when the node crashes.
    ///
    /// A runtime that is dropped drops its tasks in an order that depends on every task the process ever had. Clients
    /// that wait for these tasks would be woken in that order, so they are disconnected here first, in a fixed order.
    pub(crate) fn connect(self: &Arc<Self>, node: &Node) -> (ClientConnection, oneshot::Receiver<()>) {
        let number = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let (disconnect, disconnected) = oneshot::channel();
        locked(&self.connections).insert(number, (node.host, disconnect));
        (ClientConnection { shared: Arc::clone(self), number }, disconnected)
    }

    fn on_crash(&self, host: usize) {
        locked(&self.nodes).remove(&host);
        let closed: Vec<_> = locked(&self.connections).extract_if(.., |_, (of, _)| *of == host).collect();
        drop(closed);
    }

    fn on_leader(&self, observer: usize, term: u64, leader: VoterId) {
        self.trace.record(format_args!("host {observer} sees leader {leader} of term {term}"));
        let known = *locked(&self.leaders).entry(term).or_insert(leader);
        if known != leader {
            self.violation(format!("term {term} has two leaders, {known} and {leader}"));
        }
    }

    /// Number of terms with a leader.
    pub(crate) fn terms(&self) -> usize {
        locked(&self.leaders).len()
    }
}

/// A client connection; see [`Shared::connect`].
pub(crate) struct ClientConnection {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        locked(&self.shared.connections).remove(&self.number);
    }
}

/// The cluster under test.
pub(crate) struct Cluster {
    pub(crate) shared: Arc<Shared>,
    founders: usize,
    /// Hosts with a process, or with a pending restart.
    members: Vec<usize>,
    opening: BTreeMap<usize, Task<Result<(), String>>>,
}

pub(crate) fn voter(host: usize) -> VoterId {
    VoterId(host as u64 + 1)
}

impl Cluster {
    /// Founds a cluster of `founders` nodes on the first hosts.
    pub(crate) fn found(world: &mut World, founders: usize) -> Self {
        let shared = Shared::new(world.trace.clone());
        let mut cluster =
            Self { shared, founders, members: (0..founders).collect(), opening: BTreeMap::new() };
        for host in 0..founders {
            cluster.start(world, host);
        }
        cluster
    }

    /// The hosts of the cluster.
    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    /// Adds a host; its node joins with a membership change.
    pub(crate) fn add(&mut self, world: &mut World, host: usize) {
        self.members.push(host);
        self.start(world, host);
    }

    /// Removes a host for good.
    pub(crate) fn retire(&mut self, world: &mut World, host: usize) {
        self.members.retain(|member| *member != host);
        self.crash(world, host, moim_journal::disk::Survival::Nothing);
    }

    /// Starts the node of a host from its disk.
    pub(crate) fn start(&mut self, world: &mut World, host: usize) {
        let founders: Vec<Member> = (0..self.founders)
            .map(|number| Member { id: voter(number), address: world.host(number).address() })
            .collect();
        let founders = if host < self.founders { founders } else { Vec::new() };
        let process = world.host(host).start();
        let Some(handle) = world.host(host).handle() else { return };
        let open = open(Arc::clone(&self.shared), host, process, handle, founders);
        if let Some(task) = world.host(host).spawn(open) {
            self.opening.insert(host, task);
        }
    }

    /// Crashes the process of a host.
    pub(crate) fn crash(&mut self, world: &mut World, host: usize, survival: moim_journal::disk::Survival) {
        let seed = world.random.u64(..);
        self.shared.on_crash(host);
        self.opening.remove(&host);
        world.host(host).crash(survival, seed);
    }

    /// Reports nodes that failed to open or panicked although their disk works.
    pub(crate) fn check_nodes(&mut self, world: &mut World) {
        for host in self.members.clone() {
            let machine = world.host(host);
            if machine.has_failed() {
                continue;
            }
            if machine.has_panicked() {
                self.shared.violation(format!("a task of host {host} panicked"));
            }
            if let Some(Err(why)) = self.opening.get(&host).and_then(Task::take) {
                self.shared.violation(format!("host {host} cannot open its core: {why}"));
            }
        }
    }

    /// The states of all nodes, if every node runs, has a leader and has applied the same index; otherwise `None`.
    pub(crate) fn converged(&self) -> Option<Vec<(usize, Agreement)>> {
        let nodes = self.shared.nodes();
        if nodes.len() != self.members.len() {
            return None;
        }
        let mut all = Vec::new();
        for (host, node) in &nodes {
            let metrics = node.coordinator.group().metrics();
            metrics.leadership.leader?;
            let agreement = Agreement {
                applied: metrics.applied,
                leader: metrics.leadership.leader,
                user: node.coordinator.hash_kv(SpaceId::User, 0).ok()?.hash,
                system: node.coordinator.hash_kv(SpaceId::System, 0).ok()?.hash,
                revision: node.coordinator.read(|state| state.revision(SpaceId::User)),
            };
            all.push((*host, agreement));
        }
        let first = all.first()?.1.clone();
        all.iter().all(|(_, one)| one.applied == first.applied && one.leader == first.leader).then_some(all)
    }
}

/// The state on which converged nodes must agree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Agreement {
    pub(crate) applied: Option<u64>,
    pub(crate) leader: Option<VoterId>,
    pub(crate) user: u32,
    pub(crate) system: u32,
    pub(crate) revision: i64,
}

fn options(host: usize) -> CoordinatorOptions {
    let mut group = GroupOptions::new(GROUP, voter(host), TAG);
    // Small limits, so that snapshots are taken, sent and installed frequently.
    group.snapshot_after = 80;
    group.keep_entries = 20;
    group.proposal_timeout = Duration::from_secs(2);
    let mut options = CoordinatorOptions::new(group, CLUSTER);
    options.compaction_retention_ms = 0;
    options
}

async fn open(
    shared: Arc<Shared>,
    number: usize,
    process: Process,
    handle: Handle,
    founders: Vec<Member>,
) -> Result<(), String> {
    let host = Host {
        store: process.store,
        disk: process.disk,
        root: process.root,
        router: process.router,
        transport: process.transport,
    };
    let opened = Coordinator::open(&host, options(number), process.clock, &process.scope).await;
    let coordinator = opened.map_err(|error| error.to_string())?;
    if !founders.is_empty() && !coordinator.group().is_initialized() {
        let founded = coordinator.group().initialize(&founders).await;
        founded.map_err(|error| error.to_string())?;
    }
    let mut changes = coordinator.leadership();
    let observer = Arc::clone(&shared);
    process.scope.spawn("sim-leadership", async move {
        while let Some(now) = changes.changed().await {
            if let Some(leader) = now.leader {
                observer.on_leader(number, now.term, leader);
            }
        }
    });
    locked(&shared.nodes).insert(number, Node { host: number, coordinator, handle });
    Ok(())
}
