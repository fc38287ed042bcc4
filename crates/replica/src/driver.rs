//! Runs the copies of a node: carries out what the state machines of this crate ask for.
//!
//! One [`Driver`] per node. Whoever owns a journal attaches it and gets a [`Replicated`]; whoever watches the records
//! feeds them in; the node says in which run it is registered and which peers there are. The driver keeps one
//! connection to every peer for everything this node follows there, and takes in theirs
//! (docs/decisions/0010-replication-over-fetch.md).
//!
//! | file | owns |
//! |---|---|
//! | `copy.rs` | one copy: its lock, its state machine, what follows from a call |
//! | `owner.rs` | what a journal's owner is told |
//! | `outbound.rs` | the connection to a leader: fetches, reports, answers |
//! | `inbound.rs` | a follower's connection: its session, fetches that wait, what is sent without a copy |
//! | `stream.rs` | frames over a socket, both ways, bounded |
//! | `frame.rs` | the frames as bytes |
//! | `propose.rs` | changes of records, and reading them again |
//! | `throttle.rs` | how fast replicas that are being moved may be filled |
//!
//! Its tasks live on the runtime [`Driver::start`] is called on. In a node that is a thread of its own: bulk data must
//! not hold up Raft's timers, and a produce that waits for a client's socket must not hold up a follower.
//!
//! Everything is bounded: one fetch per copy, a few megabytes unsent per connection, eight cuts at a time.

mod copy;
mod frame;
mod inbound;
mod outbound;
mod owner;
mod propose;
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
use moim_cluster::{BoxFuture, StateRepository};
use moim_journal::Journal;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

pub use self::copy::Replicated;
use self::inbound::Inbound;
use self::outbound::Outbound;
pub use self::outbound::Unreachable;
pub use self::owner::Owner;
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
    /// A new connection to the place where that node takes followers in. Who is at the other end is checked by the
    /// driver; that it belongs to the cluster is for the dialler to make sure.
    fn dial(&self, node: BrokerId) -> BoxFuture<'_, io::Result<Box<dyn Socket>>>;
}

/// The driver's times and sizes.
#[derive(Clone, Copy, Debug)]
pub struct DriverTuning {
    /// The leaders'.
    pub leader: LeaderTuning,
    /// The followers'.
    pub follower: FollowerTuning,
    /// How often copies that want something are ticked.
    pub tick_ms: u64,
    /// How often each side of a connection says that it is there.
    pub beat_ms: u64,
    /// A connection on which nothing was heard for this long is broken.
    pub silence_ms: u64,
    /// High watermarks that no answer carries are told this late.
    pub rise_ms: u64,
    /// The longest pause between two attempts to connect.
    pub redial_ms: u64,
    /// Most bytes of records in one answer, unless a single batch is larger.
    pub answer_bytes: usize,
    /// Unsent bytes of a connection above which nothing more is read for it.
    pub unsent_bytes: usize,
    /// Most bytes of a snapshot in one part.
    pub chunk_bytes: usize,
}

impl Default for DriverTuning {
    fn default() -> Self {
        Self {
            leader: LeaderTuning::default(),
            // A fetch waits at the leader for as long as there is nothing to read: the connection says who is there.
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

/// What a driver is made of.
pub struct DriverParts {
    /// This node.
    pub node: BrokerId,
    /// Where records are changed and read again.
    pub repository: Arc<dyn StateRepository>,
    /// How other nodes are reached.
    pub dialler: Arc<dyn Dialler>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Whose shutdown ends the driver.
    pub scope: Scope,
    /// Times and sizes.
    pub tuning: DriverTuning,
}

/// The copies of a node, driven.
pub struct Driver {
    shared: Arc<Shared>,
}

impl Driver {
    /// A driver without copies. Its tasks live on the runtime this is called on.
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
            copies: RwLock::default(),
            outbound: RwLock::default(),
            inbound: Mutex::default(),
            restless: Mutex::default(),
            stirred: Notify::new(),
            advanced: Queue::default(),
            proposals: Queue::default(),
            refreshes: Queue::default(),
            changes: Arc::new(Semaphore::new(CHANGES)),
            sending: Throttle::default(),
            taking_in: Throttle::default(),
            low_watermarks: Notify::new(),
            repairs: AtomicU64::new(0),
        });
        propose::start(&shared);
        shared.spawn("replica-ticks", tick(Arc::clone(&shared)));
        shared.spawn("replica-durable", advance(Arc::clone(&shared)));
        Arc::new(Self { shared })
    }

    /// The node is registered in this run: its member key was put, after the key of any former run was deleted. Roles
    /// begin anew, from the records that name the run. Before the first call nothing leads and nothing follows.
    pub fn set_run(&self, run: Sender) {
        assert_eq!(run.node, self.shared.node, "a driver is of one node");
        *self.shared.run.write().unwrap_or_else(PoisonError::into_inner) = Some(run);
        self.shared.copies().iter().for_each(Replicated::on_run);
        // Connections say at their beginning whose they are.
        self.shared.all_outbound().iter().for_each(|outbound| outbound.reconnect());
    }

    /// The other nodes of the cluster. A connection to each is kept, so that it is known who is there.
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

    /// How many bytes a second this node may send to replicas that are being moved, and how many its own replicas that are
    /// being moved may take in; none: as fast as it goes. Acts at once, on moves under way too.
    pub fn set_move_rates(&self, sending: Option<u64>, taking_in: Option<u64>) {
        self.shared.sending.set(sending);
        self.shared.taking_in.set(taking_in);
        // What is held back is looked at again.
        lock(&self.shared.inbound).values().for_each(|inbound| inbound.look_again());
        self.shared.all_outbound().iter().for_each(|outbound| outbound.look_again());
    }

    /// The nodes to which there has been no connection since the time given (the clock's monotonic milliseconds). A
    /// reason to look closer, never a proof of death.
    pub fn suspects(&self) -> Vec<(BrokerId, u64)> {
        let all = self.shared.all_outbound();
        all.iter().filter_map(|outbound| Some((outbound.node(), outbound.lost_since_ms()?))).collect()
    }

    /// Takes in the connection of a node that follows us.
    pub fn accept(&self, socket: Box<dyn Socket>) {
        let shared = Arc::clone(&self.shared);
        self.shared.spawn("replica-inbound", inbound::serve(shared, socket));
    }

    /// Puts a journal under the driver. `owner` is told what becomes of it, from the first record on.
    pub fn attach(
        &self,
        id: PartitionId,
        journal: Arc<Journal>,
        policy: ResetPolicy,
        durability: Durability,
        owner: Arc<dyn Owner>,
    ) -> Arc<Replicated> {
        let copy = Replicated::new(id, journal, policy, durability, owner, Arc::clone(&self.shared));
        let copy = Arc::new(copy);
        let replaced = {
            let mut copies = self.shared.copies.write().unwrap_or_else(PoisonError::into_inner);
            copies.by_tag.insert(copy.journal().tag(), Arc::clone(&copy));
            copies.by_id.insert(id, Arc::clone(&copy))
        };
        if let Some(replaced) = replaced {
            replaced.detach();
        }
        copy.on_run();
        copy
    }

    /// Lets go of a journal. Its owner hears nothing more once this returns.
    pub fn detach(&self, id: PartitionId) {
        let copy = {
            let mut copies = self.shared.copies.write().unwrap_or_else(PoisonError::into_inner);
            let copy = copies.by_id.remove(&id);
            // Its tag may be another copy's by now.
            if let Some(copy) = &copy
                && copies.by_tag.get(&copy.journal().tag()).is_some_and(|other| Arc::ptr_eq(other, copy))
            {
                copies.by_tag.remove(&copy.journal().tag());
            }
            copy
        };
        if let Some(copy) = copy {
            copy.detach();
            self.shared.all_outbound().iter().for_each(|outbound| outbound.forget(id));
        }
    }

    /// The copy of a partition was found damaged. It is not counted on any more: a leader that it follows hears at once that
    /// no replica follows here. It fetches nothing until it has begun anew.
    pub fn on_damaged(&self, id: PartitionId) {
        let Some(copy) = self.shared.copy(id) else { return };
        if let Some(leader) = copy.leader() {
            self.shared.outbound(leader).forget(id);
        }
        copy.on_damage_found();
    }

    /// The member record says that these copies are damaged: once no record of theirs counts on them they begin anew. It has to
    /// say so until they are whole: see [`Driver::repairing`].
    pub fn on_damage_told(&self, damaged: &[PartitionId]) {
        damaged.iter().filter_map(|id| self.shared.copy(*id)).for_each(|copy| copy.on_damage_told());
    }

    /// Copies that were damaged, began anew and do not have everything that is committed yet: they are not to lead.
    pub fn repairing(&self) -> Vec<PartitionId> {
        let mut ids: Vec<_> =
            self.shared.copies().iter().filter(|copy| copy.is_repairing()).map(|copy| copy.id()).collect();
        ids.sort();
        ids
    }

    /// Changes whenever a repair begins or ends.
    pub fn repairs(&self) -> u64 {
        self.shared.repairs.load(Ordering::Acquire)
    }

    /// The copy of a partition.
    pub fn copy(&self, id: PartitionId) -> Option<Arc<Replicated>> {
        self.shared.copy(id)
    }

    /// A record as the repository has it: from a list first, then from a watch; never from history.
    pub fn on_record(&self, id: PartitionId, record: Versioned<PartitionState>) {
        if let Some(copy) = self.shared.copy(id) {
            copy.on_record(record);
        }
    }

    /// A record is gone.
    pub fn on_deleted(&self, id: PartitionId) {
        if let Some(copy) = self.shared.copy(id) {
            copy.on_deleted();
        }
    }

    /// What the journals' sink was told; tags that are not of a copy are left aside. Quick enough for the disk thread: the
    /// copies are looked at on the driver's runtime. Whoever wants a leader's commit on its own thread calls
    /// [`Replicated::on_durable`] there instead.
    pub fn on_durable(&self, advanced: &[(u64, i64)]) {
        let copies = self.shared.copies.read().unwrap_or_else(PoisonError::into_inner);
        let known = advanced.iter().filter_map(|(tag, _)| copies.by_tag.get(tag).cloned());
        self.shared.advanced.extend(known.filter(|copy| copy.note_advanced()));
    }

    /// The same for copies that follow, which nobody but their leaders wait for; answers the others. Whoever wants a leader's
    /// commit on its own thread takes only those there: a follower's way back to its leader has one thread less to wait for.
    pub fn on_durable_following(&self, advanced: &[(u64, i64)]) -> Vec<(u64, i64)> {
        let copies = self.shared.copies.read().unwrap_or_else(PoisonError::into_inner);
        let (mut following, mut others) = (Vec::new(), Vec::new());
        for (tag, end) in advanced {
            match copies.by_tag.get(tag).filter(|copy| copy.leader().is_some()) {
                Some(copy) if copy.note_advanced() => following.push(Arc::clone(copy)),
                Some(_) => {}
                None => others.push((*tag, *end)),
            }
        }
        self.shared.advanced.extend(following);
        others
    }

    /// How far the logs of these partitions go on another node, and in which run that node is.
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

/// Cuts, resets and installs at a time.
const CHANGES: usize = 8;
/// Pause after a log could not be changed.
const CHANGE_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Copies {
    by_id: HashMap<PartitionId, Arc<Replicated>>,
    by_tag: HashMap<u64, Arc<Replicated>>,
}

/// What the driver's tasks and copies share.
struct Shared {
    node: BrokerId,
    repository: Arc<dyn StateRepository>,
    dialler: Arc<dyn Dialler>,
    clock: Arc<dyn Clock>,
    scope: Scope,
    home: Handle,
    tuning: DriverTuning,
    run: RwLock<Option<Sender>>,
    copies: RwLock<Copies>,
    outbound: RwLock<HashMap<BrokerId, Arc<Outbound>>>,
    /// The newest connection of each follower.
    inbound: Mutex<HashMap<BrokerId, Arc<Inbound>>>,
    /// Invariant: every copy is on it at most once; its own flag says whether it is.
    restless: Mutex<Vec<Arc<Replicated>>>,
    /// Somebody became restless.
    stirred: Notify,
    advanced: Queue<Arc<Replicated>>,
    proposals: Queue<(Arc<Replicated>, Proposal)>,
    refreshes: Queue<Arc<Replicated>>,
    changes: Arc<Semaphore>,
    /// For what leaders here send to replicas that are being moved.
    sending: Throttle,
    /// For what replicas that are being moved here take in.
    taking_in: Throttle,
    /// Whoever waits for records to be gone from everybody. One for all: it is rare, and who is woken looks again.
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

    fn copy(&self, id: PartitionId) -> Option<Arc<Replicated>> {
        self.copies.read().unwrap_or_else(PoisonError::into_inner).by_id.get(&id).cloned()
    }

    fn copies(&self) -> Vec<Arc<Replicated>> {
        self.copies.read().unwrap_or_else(PoisonError::into_inner).by_id.values().cloned().collect()
    }

    fn all_outbound(&self) -> Vec<Arc<Outbound>> {
        self.outbound.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The connection to a node, perhaps still being made.
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
        partitions.iter().map(|id| (*id, self.copy(*id).map(|copy| copy.log_end()))).collect()
    }

    fn propose(&self, copy: Arc<Replicated>, proposal: Proposal) {
        self.proposals.extend([(copy, proposal)]);
    }

    fn refresh(&self, copy: Arc<Replicated>) {
        self.refreshes.extend([copy]);
    }

    fn tick(&self, copy: Arc<Replicated>) {
        lock(&self.restless).push(copy);
        self.stirred.notify_one();
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

    /// Runs `work`, which waits for the disk, where that harms nobody, and `after` when it is done; later when it says that
    /// it failed.
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

/// Ticks the copies that want it.
async fn tick(shared: Arc<Shared>) {
    loop {
        if lock(&shared.restless).is_empty() {
            shared.stirred.notified().await;
        }
        rest(Duration::from_millis(shared.tuning.tick_ms)).await;
        let mut copies = std::mem::take(&mut *lock(&shared.restless));
        copies.retain(Replicated::on_tick);
        lock(&shared.restless).append(&mut copies);
    }
}

/// Looks at the copies whose disk got further.
async fn advance(shared: Arc<Shared>) {
    loop {
        for copy in shared.advanced.take().await {
            copy.on_advanced();
        }
    }
}

/// Things that have happened and wait for a task. As long as there are copies at the most, times the few kinds there are.
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

    /// Everything so far; waits until there is something. Cancel-safe.
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
