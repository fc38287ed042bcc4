//! Runs the replicas of a node: carries out the effects of this crate's state machines.
//!
//! One [`Driver`] per node. The owner of a journal attaches it and gets a [`Replicated`]; the watcher of the
//! partition records feeds them in; the node sets its registered run and its peers. The driver keeps one connection
//! to every peer for all partitions that this node follows there, and accepts the peers' connections
//! (docs/decisions/0010-replication-over-fetch.md).
//!
//! | file | owns |
//! |---|---|
//! | `replicated.rs` | one replica: its lock, its state machine, the effects of each call |
//! | `owner.rs` | the callbacks to a journal's owner |
//! | `outbound.rs` | the connection to a leader: fetches, reports, answers |
//! | `inbound.rs` | a follower's connection: its session, parked fetches, zero-replica sends |
//! | `stream.rs` | frames over a socket, both ways, bounded |
//! | `frame.rs` | the encoding of frames |
//! | `propose.rs` | proposals for record changes, and record reads |
//! | `throttle.rs` | the replication throttle of reassignments |
//!
//! Its tasks run on the runtime on which [`Driver::start`] is called. In a node that is a dedicated thread: bulk data
//! must not delay Raft's timers, and a produce that waits for a client's socket must not delay a follower.
//!
//! Everything is bounded: one fetch per replica, a few megabytes unsent per connection, eight log changes at a time.

mod frame;
mod inbound;
mod outbound;
mod owner;
mod propose;
mod replicated;
mod stream;
mod throttle;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use hashbrown::HashMap;
use moim_base::rest::rest;
use moim_base::socket::Socket;
use moim_base::task::{Scope, offload};
use moim_base::{BrokerId, Clock};
use moim_journal::Journal;
use moim_state::{BoxFuture, StateRepository};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

use self::inbound::Inbound;
use self::outbound::Outbound;
pub use self::outbound::Unreachable;
pub use self::owner::Owner;
pub use self::replicated::Replicated;
use self::throttle::Throttle;
use crate::controller::LogEnd;
use crate::follower::{FollowerTuning, ResetPolicy};
use crate::leader::LeaderTuning;
use crate::message::Sender;
use crate::replica::Proposal;
use crate::state::PartitionState;
use crate::types::{BrokerEpoch, Durability, PartitionId, Versioned};

/// Connects to other nodes.
pub trait Dialler: Send + Sync + 'static {
    /// A new connection to that node's replication listener. The driver checks the identity of the peer; the dialler
    /// ensures that it belongs to the cluster.
    fn dial(&self, node: BrokerId) -> BoxFuture<'_, io::Result<Box<dyn Socket>>>;
}

/// The driver's timeouts and sizes.
#[derive(Clone, Copy, Debug)]
pub struct DriverTuning {
    /// The leaders' timeouts.
    pub leader: LeaderTuning,
    /// The followers' timeouts.
    pub follower: FollowerTuning,
    /// The tick interval of replicas with pending timers.
    pub tick_ms: u64,
    /// The heartbeat interval of each side of a connection.
    pub beat_ms: u64,
    /// A connection without traffic for this long is broken.
    pub silence_ms: u64,
    /// The delay with which high watermarks that no answer carries are sent.
    pub rise_ms: u64,
    /// The maximum pause between connection attempts.
    pub redial_ms: u64,
    /// The maximum record bytes per answer, unless a single batch is larger.
    pub answer_bytes: usize,
    /// Above this many unsent bytes, nothing more is read for a connection.
    pub unsent_bytes: usize,
    /// The maximum size of a snapshot chunk.
    pub chunk_bytes: usize,
}

impl Default for DriverTuning {
    fn default() -> Self {
        Self {
            leader: LeaderTuning::default(),
            // A fetch stays parked at the leader while there is nothing to read: the connection's heartbeats detect a
            // dead peer.
            follower: FollowerTuning { timeout_ms: u64::MAX / 4, ..FollowerTuning::default() },
            tick_ms: 100,
            beat_ms: 200,
            silence_ms: 900,
            rise_ms: 20,
            redial_ms: 300,
            answer_bytes: 1 << 20,
            unsent_bytes: 4 << 20,
            chunk_bytes: 1 << 20,
        }
    }
}

/// The dependencies of a driver.
pub struct DriverParts {
    /// This node.
    pub node: BrokerId,
    /// The state repository that holds the partition records.
    pub repository: Arc<dyn StateRepository>,
    /// Connects to other nodes.
    pub dialler: Arc<dyn Dialler>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// The scope whose shutdown ends the driver.
    pub scope: Scope,
    /// Timeouts and sizes.
    pub tuning: DriverTuning,
}

/// The driver of a node's replicas.
pub struct Driver {
    shared: Arc<Shared>,
}

impl Driver {
    /// Starts a driver without replicas. Its tasks run on the caller's runtime.
    pub fn start(parts: DriverParts) -> Arc<Self> {
        let shared = Arc::new(Shared {
            node: parts.node,
            repository: parts.repository,
            dialler: parts.dialler,
            clock: parts.clock,
            scope: parts.scope,
            home: Handle::current(),
            tuning: parts.tuning,
            run: RwLock::default(),
            replicas: RwLock::default(),
            outbound: RwLock::default(),
            inbound: Mutex::default(),
            ticking: Mutex::default(),
            tick_scheduled: Notify::new(),
            advanced: Queue::default(),
            proposals: Queue::default(),
            refreshes: Queue::default(),
            changes: Arc::new(Semaphore::new(CHANGES)),
            sending: Throttle::default(),
            receiving: Throttle::default(),
            low_watermarks: Notify::new(),
            repairs: AtomicU64::new(0),
        });
        propose::start(&shared);
        shared.spawn("replica-ticks", tick(Arc::clone(&shared)));
        shared.spawn("replica-durable", advance(Arc::clone(&shared)));
        Arc::new(Self { shared })
    }

    /// The node is registered in this run: its member key was put, after the key of any former run was deleted. Roles
    /// start anew, from the records that name the run. Before the first call no replica leads or follows.
    pub fn set_run(&self, run: Sender) {
        assert_eq!(run.node, self.shared.node, "a driver is of one node");
        *self.shared.run.write().unwrap_or_else(PoisonError::into_inner) = Some(run);
        self.shared.replicas().iter().for_each(Replicated::on_run);
        // Connections announce their run in the hello.
        self.shared.all_outbound().iter().for_each(|outbound| outbound.reconnect());
    }

    /// Sets the other nodes of the cluster. A connection to each is kept for failure detection.
    pub fn set_peers(&self, nodes: &[BrokerId]) {
        let gone = {
            let mut all = self.shared.outbound.write().unwrap_or_else(PoisonError::into_inner);
            let (kept, gone) = all.drain().partition(|(node, _)| nodes.contains(node));
            *all = kept;
            gone
        };
        gone.values().for_each(|outbound: &Arc<Outbound>| outbound.close());
        for node in nodes.iter().filter(|node| **node != self.shared.node) {
            self.shared.outbound(*node);
        }
    }

    /// Sets the replication throttle for reassignments, in bytes per second: what this node may send to arriving
    /// replicas, and what its own arriving replicas may receive; `None`: unlimited. Takes effect at once, also on
    /// reassignments in progress.
    pub fn set_move_rates(&self, sending: Option<u64>, receiving: Option<u64>) {
        self.shared.sending.set(sending);
        self.shared.receiving.set(receiving);
        // Re-evaluate the answers that are held back.
        lock(&self.shared.inbound).values().for_each(|inbound| inbound.reevaluate_held());
        self.shared.all_outbound().iter().for_each(|outbound| outbound.reevaluate_held());
    }

    /// The nodes without a connection, and since when (the clock's monotonic milliseconds). A suspicion, never a
    /// proof of death.
    pub fn suspects(&self) -> Vec<(BrokerId, u64)> {
        let all = self.shared.all_outbound();
        all.iter().filter_map(|outbound| Some((outbound.node(), outbound.lost_since_ms()?))).collect()
    }

    /// Accepts the connection of a node that follows us.
    pub fn accept(&self, socket: Box<dyn Socket>) {
        let shared = Arc::clone(&self.shared);
        self.shared.spawn("replica-inbound", inbound::serve(shared, socket));
    }

    /// Attaches a journal to the driver. `owner` receives its role changes, from the first record on.
    pub fn attach(
        &self,
        id: PartitionId,
        journal: Arc<Journal>,
        policy: ResetPolicy,
        durability: Durability,
        owner: Arc<dyn Owner>,
    ) -> Arc<Replicated> {
        let replica = Replicated::new(id, journal, policy, durability, owner, Arc::clone(&self.shared));
        let replica = Arc::new(replica);
        let replaced = {
            let mut replicas = self.shared.replicas.write().unwrap_or_else(PoisonError::into_inner);
            replicas.by_tag.insert(replica.journal().tag(), Arc::clone(&replica));
            replicas.by_id.insert(id, Arc::clone(&replica))
        };
        if let Some(replaced) = replaced {
            replaced.detach();
        }
        replica.on_run();
        replica
    }

    /// Detaches a journal. Its owner gets no further callbacks once this returns.
    pub fn detach(&self, id: PartitionId) {
        let replica = {
            let mut replicas = self.shared.replicas.write().unwrap_or_else(PoisonError::into_inner);
            let replica = replicas.by_id.remove(&id);
            // Its tag may belong to another replica by now.
            if let Some(replica) = &replica
                && replicas
                    .by_tag
                    .get(&replica.journal().tag())
                    .is_some_and(|other| Arc::ptr_eq(other, replica))
            {
                replicas.by_tag.remove(&replica.journal().tag());
            }
            replica
        };
        if let Some(replica) = replica {
            replica.detach();
            self.shared.all_outbound().iter().for_each(|outbound| outbound.forget(id));
        }
    }

    /// The replica of a partition was found damaged and no longer counts: the leader it follows learns at once that
    /// no replica follows here. It fetches nothing until it was reset.
    pub fn on_damaged(&self, id: PartitionId) {
        let Some(replica) = self.shared.replica(id) else { return };
        if let Some(leader) = replica.leader() {
            self.shared.outbound(leader).forget(id);
        }
        replica.on_damage_found();
    }

    /// The member record lists these replicas as damaged: each is reset once no partition record counts on it. The
    /// member record must list them until they are repaired: see [`Driver::repairing`].
    pub fn on_damage_registered(&self, damaged: &[PartitionId]) {
        damaged
            .iter()
            .filter_map(|id| self.shared.replica(*id))
            .for_each(|replica| replica.on_damage_registered());
    }

    /// Replicas that were damaged and reset, and do not have every committed record yet: they must not lead.
    pub fn repairing(&self) -> Vec<PartitionId> {
        let mut ids: Vec<_> = self
            .shared
            .replicas()
            .iter()
            .filter(|replica| replica.is_repairing())
            .map(|replica| replica.id())
            .collect();
        ids.sort();
        ids
    }

    /// Changes whenever a repair begins or ends.
    pub fn repairs(&self) -> u64 {
        self.shared.repairs.load(Ordering::Acquire)
    }

    /// The replica of a partition.
    pub fn replica(&self, id: PartitionId) -> Option<Arc<Replicated>> {
        self.shared.replica(id)
    }

    /// A partition record from the repository: from a listing first, then from a watch; never from history.
    pub fn on_record(&self, id: PartitionId, record: Versioned<PartitionState>) {
        if let Some(replica) = self.shared.replica(id) {
            replica.on_record(record);
        }
    }

    /// A partition record was deleted.
    pub fn on_deleted(&self, id: PartitionId) {
        if let Some(replica) = self.shared.replica(id) {
            replica.on_deleted();
        }
    }

    /// Durable ends reported by the journals' sink; tags that belong to no replica are ignored. Cheap enough for the
    /// disk thread: the replicas are processed on the driver's runtime. A caller that wants a leader's commit on its
    /// own thread calls [`Replicated::on_durable`] there instead.
    pub fn on_durable(&self, advanced: &[(u64, i64)]) {
        let replicas = self.shared.replicas.read().unwrap_or_else(PoisonError::into_inner);
        let known = advanced.iter().filter_map(|(tag, _)| replicas.by_tag.get(tag).cloned());
        self.shared.advanced.extend(known.filter(|replica| replica.note_advanced()));
    }

    /// The same for following replicas, which only their leaders wait for; returns the others. A caller that
    /// processes a leader's commit on its own thread takes only those there: a follower's path back to its leader has
    /// one thread hop less.
    pub fn on_durable_following(&self, advanced: &[(u64, i64)]) -> Vec<(u64, i64)> {
        let replicas = self.shared.replicas.read().unwrap_or_else(PoisonError::into_inner);
        let (mut following, mut others) = (Vec::new(), Vec::new());
        for (tag, end) in advanced {
            match replicas.by_tag.get(tag).filter(|replica| replica.leader().is_some()) {
                Some(replica) if replica.note_advanced() => following.push(Arc::clone(replica)),
                Some(_) => {}
                None => others.push((*tag, *end)),
            }
        }
        self.shared.advanced.extend(following);
        others
    }

    /// The log ends of these partitions on another node, and that node's run.
    pub async fn ask_log_ends(
        &self,
        node: BrokerId,
        partitions: Vec<PartitionId>,
    ) -> Result<(BrokerEpoch, Vec<(PartitionId, Option<LogEnd>)>), Unreachable> {
        let run = self.shared.run().ok_or(Unreachable)?;
        if node == self.shared.node {
            return Ok((run.epoch, self.shared.log_ends(&partitions)));
        }
        self.shared.outbound(node).ask_log_ends(partitions).await
    }
}

/// The maximum number of concurrent truncations, resets and snapshot installs.
const CHANGES: usize = 8;
/// The pause after a failed log change.
const CHANGE_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Replicas {
    by_id: HashMap<PartitionId, Arc<Replicated>>,
    by_tag: HashMap<u64, Arc<Replicated>>,
}

/// The state shared by the driver's tasks and replicas.
struct Shared {
    node: BrokerId,
    repository: Arc<dyn StateRepository>,
    dialler: Arc<dyn Dialler>,
    clock: Arc<dyn Clock>,
    scope: Scope,
    home: Handle,
    tuning: DriverTuning,
    run: RwLock<Option<Sender>>,
    replicas: RwLock<Replicas>,
    outbound: RwLock<HashMap<BrokerId, Arc<Outbound>>>,
    /// The newest connection of each follower.
    inbound: Mutex<HashMap<BrokerId, Arc<Inbound>>>,
    /// Invariant: every replica is listed at most once; its own flag says whether it is.
    ticking: Mutex<Vec<Arc<Replicated>>>,
    /// Notified when a replica was added to the tick list.
    tick_scheduled: Notify,
    advanced: Queue<Arc<Replicated>>,
    proposals: Queue<(Arc<Replicated>, Proposal)>,
    refreshes: Queue<Arc<Replicated>>,
    changes: Arc<Semaphore>,
    /// The throttle for records sent to arriving replicas.
    sending: Throttle,
    /// The throttle for records received by arriving replicas.
    receiving: Throttle,
    /// Notifies the waiters for record deletion on the whole in-sync set. One for all: it is rare, and a woken waiter
    /// checks again.
    low_watermarks: Notify,
    /// Counts the beginnings and ends of repairs.
    repairs: AtomicU64,
}

impl Shared {
    fn now_ms(&self) -> u64 {
        self.clock.monotonic_ms()
    }

    fn run(&self) -> Option<Sender> {
        *self.run.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn replica(&self, id: PartitionId) -> Option<Arc<Replicated>> {
        self.replicas.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    fn replicas(&self) -> Vec<Arc<Replicated>> {
        self.replicas.read().unwrap_or_else(PoisonError::into_inner).by_id.values().cloned().collect()
    }

    fn all_outbound(&self) -> Vec<Arc<Outbound>> {
        self.outbound.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The connection to a node, possibly still being established.
    fn outbound(self: &Arc<Self>, node: BrokerId) -> Arc<Outbound> {
        let known = self.outbound.read().unwrap_or_else(PoisonError::into_inner).get(&node).cloned();
        known.unwrap_or_else(|| {
            let mut all = self.outbound.write().unwrap_or_else(PoisonError::into_inner);
            let new = || {
                let outbound = Arc::new(Outbound::new(node, self.now_ms()));
                self.spawn("replica-outbound", outbound::run(Arc::clone(self), Arc::clone(&outbound)));
                outbound
            };
            Arc::clone(all.entry(node).or_insert_with(new))
        })
    }

    fn log_ends(&self, partitions: &[PartitionId]) -> Vec<(PartitionId, Option<LogEnd>)> {
        partitions.iter().map(|id| (*id, self.replica(*id).map(|replica| replica.log_end()))).collect()
    }

    fn propose(&self, replica: Arc<Replicated>, proposal: Proposal) {
        self.proposals.extend([(replica, proposal)]);
    }

    fn refresh(&self, replica: Arc<Replicated>) {
        self.refreshes.extend([replica]);
    }

    fn tick(&self, replica: Arc<Replicated>) {
        lock(&self.ticking).push(replica);
        self.tick_scheduled.notify_one();
    }

    /// Runs a task on the driver's runtime until the shutdown.
    fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let shutdown = self.scope.shutdown().clone();
        let _home = self.home.enter();
        self.scope.spawn(name, async move {
            tokio::select! {
                () = task => {}
                () = shutdown.stopped() => {}
            }
        });
    }

    /// Runs `work`, which blocks on the disk, on a thread where it delays no other task, and `after` when it is done;
    /// after a pause if it failed.
    fn spawn_change(
        &self,
        name: &'static str,
        work: impl FnOnce() -> bool + Send + 'static,
        after: impl FnOnce() + Send + 'static,
    ) {
        let changes = Arc::clone(&self.changes);
        self.spawn(name, async move {
            let Ok(_place) = changes.acquire().await else { return };
            let done = offload(move || Ok(work())).await.expect("changing a log does not panic");
            if !done {
                tokio::time::sleep(CHANGE_PAUSE).await;
            }
            after();
        });
    }
}

/// Ticks the replicas on the tick list.
async fn tick(shared: Arc<Shared>) {
    loop {
        if lock(&shared.ticking).is_empty() {
            shared.tick_scheduled.notified().await;
        }
        rest(Duration::from_millis(shared.tuning.tick_ms)).await;
        let mut replicas = std::mem::take(&mut *lock(&shared.ticking));
        replicas.retain(Replicated::on_tick);
        lock(&shared.ticking).append(&mut replicas);
    }
}

/// Processes the replicas whose durable end has advanced.
async fn advance(shared: Arc<Shared>) {
    loop {
        for replica in shared.advanced.take().await {
            replica.on_advanced();
        }
    }
}

/// Events that wait for a task. Bounded by the number of replicas times the few event kinds.
struct Queue<T> {
    list: Mutex<Vec<T>>,
    notify: Notify,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { list: Mutex::default(), notify: Notify::new() }
    }
}

impl<T> Queue<T> {
    fn extend(&self, items: impl IntoIterator<Item = T>) {
        let mut list = lock(&self.list);
        let before = list.len();
        list.extend(items);
        if list.len() > before {
            drop(list);
            self.notify.notify_one();
        }
    }

    /// All queued events; waits until there is one. Cancel-safe.
    async fn take(&self) -> Vec<T> {
        loop {
            let list = std::mem::take(&mut *lock(&self.list));
            if !list.is_empty() {
                return list;
            }
            self.notify.notified().await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under a lock stops the process through its task scope.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
