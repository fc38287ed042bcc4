//! Coordination nodes on machines, and what must hold among them whatever happens.

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
/// The durable sink's name for the group's journals.
const TAG: u64 = 2;

/// A node that can be asked.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) host: usize,
    pub(crate) coordinator: Coordinator,
    /// Where its code runs.
    pub(crate) handle: Handle,
}

/// What the world, the clients and the nodes know together.
pub(crate) struct Shared {
    pub(crate) trace: Trace,
    nodes: Mutex<BTreeMap<usize, Node>>,
    /// Who waits for a node, by the order in which they came: told when it dies.
    lines: Mutex<BTreeMap<u64, (usize, oneshot::Sender<()>)>>,
    next_line: AtomicU64,
    /// Who led each term, as anybody heard.
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
            lines: Mutex::default(),
            next_line: AtomicU64::new(0),
            leaders: Mutex::default(),
            violations: Mutex::default(),
        })
    }

    /// Something happened that must not.
    pub(crate) fn violation(&self, what: String) {
        self.trace.note(format_args!("VIOLATION {what}"));
        locked(&self.violations).push(what);
    }

    pub(crate) fn first_violation(&self) -> Option<String> {
        locked(&self.violations).first().cloned()
    }

    /// The nodes that can be asked, by number.
    pub(crate) fn nodes(&self) -> Vec<(usize, Node)> {
        locked(&self.nodes).iter().map(|(number, node)| (*number, node.clone())).collect()
    }

    /// Any node that can be asked.
    pub(crate) fn any_node(&self) -> Option<Node> {
        let nodes = locked(&self.nodes);
        if nodes.is_empty() {
            return None;
        }
        nodes.values().nth(fastrand::usize(..nodes.len())).cloned()
    }

    /// A client's connection to a node: the receiver ends when the node dies, the line when it is dropped.
    ///
    /// A dying runtime drops its tasks in an order that hangs on every task the process ever had. Those who wait for
    /// them would be woken in that order, so they are told here first.
    pub(crate) fn connect(self: &Arc<Self>, node: &Node) -> (Line, oneshot::Receiver<()>) {
        let number = self.next_line.fetch_add(1, Ordering::Relaxed);
        let (hang_up, hung_up) = oneshot::channel();
        locked(&self.lines).insert(number, (node.host, hang_up));
        (Line { shared: Arc::clone(self), number }, hung_up)
    }

    fn on_death(&self, host: usize) {
        locked(&self.nodes).remove(&host);
        let dead: Vec<_> = locked(&self.lines).extract_if(.., |_, (of, _)| *of == host).collect();
        drop(dead);
    }

    fn led(&self, by: usize, term: u64, leader: VoterId) {
        self.trace.note(format_args!("host {by} hears that {leader} leads term {term}"));
        let known = *locked(&self.leaders).entry(term).or_insert(leader);
        if known != leader {
            self.violation(format!("term {term} has two leaders, {known} and {leader}"));
        }
    }

    /// How many terms had a leader.
    pub(crate) fn terms(&self) -> usize {
        locked(&self.leaders).len()
    }
}

/// See [`Shared::connect`].
pub(crate) struct Line {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Line {
    fn drop(&mut self) {
        locked(&self.shared.lines).remove(&self.number);
    }
}

/// The cluster as the world drives it.
pub(crate) struct Cluster {
    pub(crate) shared: Arc<Shared>,
    founders: usize,
    /// Machines that have a process, or are to get one again.
    members: Vec<usize>,
    opening: BTreeMap<usize, Task<Result<(), String>>>,
}

pub(crate) fn voter(host: usize) -> VoterId {
    VoterId(host as u64 + 1)
}

impl Cluster {
    /// Starts `founders` nodes on the first machines.
    pub(crate) fn found(world: &mut World, founders: usize) -> Self {
        let shared = Shared::new(world.trace.clone());
        let mut cluster =
            Self { shared, founders, members: (0..founders).collect(), opening: BTreeMap::new() };
        for host in 0..founders {
            cluster.start(world, host);
        }
        cluster
    }

    /// The machines of the cluster.
    pub(crate) fn members(&self) -> &[usize] {
        &self.members
    }

    /// Adds a machine; its node joins when somebody makes it a member.
    pub(crate) fn add(&mut self, world: &mut World, host: usize) {
        self.members.push(host);
        self.start(world, host);
    }

    /// Takes a machine away for ever.
    pub(crate) fn retire(&mut self, world: &mut World, host: usize) {
        self.members.retain(|member| *member != host);
        self.crash(world, host, moim_journal::disk::Survival::Nothing);
    }

    /// Starts the node of a machine on what its disk holds.
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

    /// Ends the process of a machine.
    pub(crate) fn crash(&mut self, world: &mut World, host: usize, survival: moim_journal::disk::Survival) {
        let seed = world.random.u64(..);
        self.shared.on_death(host);
        self.opening.remove(&host);
        world.host(host).crash(survival, seed);
    }

    /// Looks for nodes that could not open or panicked, though their disk is fine.
    pub(crate) fn look(&mut self, world: &mut World) {
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

    /// Whether every node runs, has a leader and has applied as much as every other; then the state they all have.
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

/// What converged nodes must agree on.
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
    // Snapshots are taken, sent and installed all the time.
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
    let listener = Arc::clone(&shared);
    process.scope.spawn("sim-leadership", async move {
        while let Some(now) = changes.changed().await {
            if let Some(leader) = now.leader {
                listener.led(number, now.term, leader);
            }
        }
    });
    locked(&shared.nodes).insert(number, Node { host: number, coordinator, handle });
    Ok(())
}
