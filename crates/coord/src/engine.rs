//! The running coordination core: the state machine on a Raft group, on every node.
//!
//! A [`Coordinator`] is a handle for any thread. Its tasks run where it was opened (the node's control thread), so that
//! a crowd of clients cannot keep Raft from its timers; what clients wait for travels in batches between the two.
//!
//! ```text
//!  etcd API, repository ──▶ Coordinator
//!     writes   propose.rs   batches into the log; followers ask the leader
//!     reads    reads.rs     one confirmed read index for all who wait, then State behind a short lock
//!     leases   leases.rs    the leader's clock; renewals in rounds
//!     watches  watches.rs   positions in history, told after each apply
//!     members  members.rs   the group's members and what nodes say of themselves
//!     peers    peer.rs      what nodes ask of the leader
//!     answers  answers.rs   from the control thread to many waiters with one wake-up
//!     applying shared.rs    the state machine: State, waiters, watchers, lease clock
//! ```
//!
//! Must never: hold a lock across an await, send a command twice whose outcome is unknown, or answer with a state
//! that is older than what was acknowledged.

mod alarms;
mod answers;
mod entry;
mod error;
mod leases;
mod members;
mod peer;
mod propose;
mod reads;
mod shared;
#[cfg(test)]
mod tests;
mod watches;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use moim_base::clock::Clock;
use moim_base::rest::rest;
use moim_base::task::{Scope, Shutdown};
use moim_raft::{
    Group, GroupOptions, Host, LeaderWatch, Leadership, Member, OpenError, Role, ServiceId, Transport,
    VoterId,
};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use self::answers::Counter;
pub use self::error::CoordError;
pub use self::leases::LeaseInfo;
use self::leases::{Renewals, Timekeeper};
pub use self::members::MemberInfo;
use self::peer::{MemberChange, PeerService};
use self::propose::Queue;
use self::reads::Reads;
use self::shared::{Machine, Shared};
pub use self::watches::{WatchItem, WatchStream};
use crate::bolt::{BoltCursor, Step};
use crate::lease::LeaseId;
use crate::lease_clock::LeaseClockConfig;
use crate::range::SpaceId;
use crate::reply::{HashReply, RangeReply, Reply, TxnReply};
use crate::request::{Alarm, Command, Op, Origin, RangeRequest, TxnRequest};
use crate::shelf::Shelf;
use crate::snapshot::SnapshotError;
use crate::state::State;

/// Bytes of log after which a snapshot is due, whatever the number of entries.
const SNAPSHOT_BYTES: u64 = 256 << 20;

/// Between tries to write a snapshot that could not be written: a full disk is not made busier.
const SNAPSHOT_RETRY_MS: u64 = 5_000;

/// How a node's coordination core is set up.
#[derive(Clone)]
pub struct CoordinatorOptions {
    /// The Raft group.
    pub group: GroupOptions,
    /// What clients see as the cluster's id.
    pub cluster_id: u64,
    /// Bytes of keys and history above which puts are refused.
    pub quota_bytes: u64,
    /// How long history is kept; 0 is for ever.
    pub compaction_retention_ms: u64,
    /// How often watchers that asked for it hear how far they are.
    pub progress_interval: Duration,
    /// The lease clock's settings.
    pub lease_clock: LeaseClockConfig,
    /// Where watchers are woken from: the runtime that serves them, so that waking thousands crosses no thread.
    /// `None` is the runtime the coordinator is opened on.
    pub watch_runtime: Option<Handle>,
    /// Where old values go; `None` keeps them in memory.
    pub shelf: Option<Shelf>,
    /// Called when memory of forgotten history was freed, on the thread that freed it.
    pub on_reclaimed: Option<fn()>,
}

impl CoordinatorOptions {
    /// The usual settings.
    pub fn new(group: GroupOptions, cluster_id: u64) -> Self {
        Self {
            group,
            cluster_id,
            quota_bytes: 2 << 30,
            compaction_retention_ms: 60 * 60 * 1_000,
            progress_interval: Duration::from_secs(600),
            lease_clock: LeaseClockConfig::default(),
            watch_runtime: None,
            shelf: None,
            on_reclaimed: None,
        }
    }
}

/// What every answer begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The cluster.
    pub cluster_id: u64,
    /// The member that answers.
    pub member_id: u64,
    /// The revision of the space that was asked.
    pub revision: i64,
    /// The member's term.
    pub raft_term: u64,
}

/// How a member is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    /// Who leads, as far as this member knows.
    pub leader: Option<VoterId>,
    /// The term.
    pub term: u64,
    /// The last entry known to be committed.
    pub raft_index: u64,
    /// The last entry applied here.
    pub applied: u64,
    /// Bytes of keys and history, those that are about to be given back included.
    pub db_size: u64,
    /// The same; nothing is ever left over to defragment.
    pub db_size_in_use: u64,
    /// Whether this member has no vote.
    pub is_learner: bool,
    /// What is wrong, in words.
    pub errors: Vec<String>,
}

/// A handle to this node's coordination core.
#[derive(Clone)]
pub struct Coordinator {
    inner: Arc<Inner>,
    /// Where this handle's answers are laid down; `None`: each wakes its waiter by itself.
    counter: Option<Arc<Counter>>,
}

/// What the handle and its tasks share.
pub(crate) struct Inner {
    options: CoordinatorOptions,
    group: Group,
    shared: Arc<Shared>,
    queue: Queue,
    reads: Reads,
    renewals: Renewals,
    host: Host,
    transport: Arc<dyn Transport>,
    shutdown: Shutdown,
    batches: AtomicU64,
    term: AtomicU64,
    /// When this node last raised an alarm for its lack of room; 0 is never.
    alarmed_ms: AtomicU64,
    /// Since when this node's disk is full; 0 while it is not.
    full_since_ms: AtomicU64,
    /// Whether others serve in this node's place, see [`Coordinator::set_withdrawn`].
    withdrawn: watch::Sender<bool>,
    /// See [`Coordinator::set_isolated`].
    isolated: AtomicBool,
    /// Wakes the one who looks for flights that are late.
    took_off: Notify,
    /// Wakes whoever waits for a leader.
    led: Notify,
}

impl Inner {
    fn now_ms(&self) -> u64 {
        self.shared.clock.monotonic_ms()
    }

    /// How long a request is waited for: what an election and a slow disk may take, and then some.
    fn timeout_ms(&self) -> u64 {
        let proposal_ms = u64::try_from(self.options.group.proposal_timeout.as_millis()).unwrap_or(u64::MAX);
        proposal_ms.saturating_add(2 * self.options.group.timers.election_max_ms)
    }

    fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::Relaxed)
    }

    fn on_leadership(&self, now: &Leadership) {
        self.term.store(now.term, Ordering::Relaxed);
        self.led.notify_waiters();
    }

    /// Returns when somebody leads, or at the deadline.
    async fn wait_leader(&self, deadline_ms: u64) {
        let left = Duration::from_millis(deadline_ms.saturating_sub(self.now_ms()));
        let led = async {
            loop {
                let notified = self.led.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if self.group.leader().is_some() {
                    return;
                }
                notified.await;
            }
        };
        // A leader may be known a moment before its address is: the wait is cut in slices.
        let slice = left.min(Duration::from_millis(100));
        let _ = tokio::time::timeout(slice, led).await;
    }

    /// Returns when a leader of another term is known.
    async fn wait_term_over(&self, term: u64) {
        loop {
            let notified = self.led.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.group.leader_in_term().is_some_and(|(now, _)| now != term) {
                return;
            }
            notified.await;
        }
    }

    /// Tells watchers what was applied, until the node stops.
    async fn tell_watchers(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        let mut next_progress_ms = self.now_ms();
        let interval_ms = u64::try_from(self.options.progress_interval.as_millis()).unwrap_or(u64::MAX);
        loop {
            let nap = Duration::from_millis(next_progress_ms.saturating_sub(self.now_ms()).max(1));
            tokio::select! {
                biased;
                () = shutdown.stopped() => break,
                () = self.shared.news.notified() => {}
                () = tokio::time::sleep(nap) => {}
            }
            let mut watches = self.shared.watches();
            let state = self.shared.state();
            watches.on_applied(&state);
            if self.now_ms() >= next_progress_ms {
                watches.on_progress_time(&state);
                next_progress_ms = self.now_ms().saturating_add(interval_ms);
            }
        }
        self.shared.watches().close();
    }

    /// Gives back what compaction forgot, in small steps, and takes snapshots of a log that grows large.
    async fn housekeep(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        let (mut retry_ms, mut free_again_ms) = (0, 0);
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => return,
                () = self.shared.forgotten.notified() => {}
                () = rest(Duration::from_secs(1)) => {}
            }
            let mut reclaimed = false;
            while self.shared.reclaim() && !shutdown.is_stopped() {
                reclaimed = true;
                tokio::task::yield_now().await;
            }
            if let Some(told) = self.options.on_reclaimed.filter(|_| reclaimed) {
                told();
            }
            self.maybe_raise_disk_alarm();
            self.maybe_free_log(&mut free_again_ms).await;
            let large = SNAPSHOT_BYTES.max(self.shared.size_bytes());
            let grown = self.shared.unsnapped.load(Ordering::Relaxed) > large;
            let again = self.group.snapshot_failed() && self.now_ms() >= retry_ms;
            if grown || again {
                self.shared.unsnapped.store(0, Ordering::Relaxed);
                retry_ms = self.now_ms() + SNAPSHOT_RETRY_MS;
                if let Err(error) = self.group.snapshot().await {
                    tracing::debug!(%error, "no snapshot was taken");
                }
            }
        }
    }

    /// A group that stops by itself takes the process with it: its disk failed, or an invariant of Raft is broken.
    async fn guard(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        tokio::select! {
            biased;
            () = shutdown.stopped() => {}
            why = self.group.stopped() => {
                self.queue.close();
                assert!(
                    shutdown.is_stopped() || self.is_stopping(),
                    "the coordination group stopped: {why}; if its log is damaged, move the data directory away, run \
                     `moim cluster replace` for this node and start it with an empty directory"
                );
            }
        }
    }

    fn is_stopping(&self) -> bool {
        self.queue.is_closed()
    }
}

impl Coordinator {
    /// Opens the core from what is on disk, or as an empty one, and starts its tasks on the current runtime.
    pub async fn open(
        host: &Host,
        options: CoordinatorOptions,
        clock: Arc<dyn Clock>,
        scope: &Scope,
    ) -> Result<Self, OpenError> {
        let shared =
            Arc::new(Shared::new(clock, Timekeeper::new(options.lease_clock), options.shelf.clone()));
        let machine = Box::new(Machine { shared: Arc::clone(&shared) });
        let group = Group::open(host, options.group.clone(), machine).await?;
        let inner = Arc::new(Inner {
            group,
            shared,
            queue: Queue::default(),
            reads: Reads::default(),
            renewals: Renewals::default(),
            host: host.clone(),
            transport: Arc::clone(&host.transport),
            shutdown: scope.shutdown().clone(),
            batches: AtomicU64::new(1),
            term: AtomicU64::new(0),
            alarmed_ms: AtomicU64::new(0),
            full_since_ms: AtomicU64::new(0),
            withdrawn: watch::Sender::new(false),
            isolated: AtomicBool::new(false),
            took_off: Notify::new(),
            led: Notify::new(),
            options,
        });
        host.router.serve(ServiceId::COORDINATOR, Arc::new(PeerService(Arc::downgrade(&inner))));
        scope.spawn("coord-propose", Arc::clone(&inner).carry_proposals());
        scope.spawn("coord-sweep", Arc::clone(&inner).sweep_flights());
        scope.spawn("coord-reads", Arc::clone(&inner).confirm_reads());
        scope.spawn("coord-renewals", Arc::clone(&inner).carry_renewals());
        scope.spawn("coord-time", Arc::clone(&inner).keep_time());
        scope.spawn("coord-housekeeping", Arc::clone(&inner).housekeep());
        scope.spawn("coord-guard", Arc::clone(&inner).guard());
        let group = inner.group.clone();
        scope.spawn("coord-rest", async move { group.rest_while_alone().await });
        let group = inner.group.clone();
        scope.spawn("coord-quorum", async move { group.yield_without_quorum().await });
        {
            let _there = inner.options.watch_runtime.as_ref().map(Handle::enter);
            scope.spawn("coord-watches", Arc::clone(&inner).tell_watchers());
        }
        Ok(Self { inner, counter: None })
    }

    /// This node's disk does not work and others serve in its place, or it works again. Meanwhile callers of the etcd
    /// port are refused at once, so that they turn to another node: what is asked here might wait for the disk. The
    /// node's own calls go on.
    pub fn set_withdrawn(&self, withdrawn: bool) {
        self.inner.withdrawn.send_if_modified(|known| std::mem::replace(known, withdrawn) != withdrawn);
    }

    /// This node has reached no quorum for seconds, or reaches one again. Meanwhile callers of the etcd port hear at once that
    /// there is no leader, so that their balancers choose another member instead of waiting here.
    pub fn set_isolated(&self, isolated: bool) {
        self.inner.isolated.store(isolated, Ordering::Release);
    }

    fn check_serves(&self) -> Result<(), CoordError> {
        let refuses = || *self.inner.withdrawn.borrow() || self.inner.isolated.load(Ordering::Acquire);
        if self.counter.is_some() && refuses() { Err(CoordError::NoLeader) } else { Ok(()) }
    }

    /// A handle for a thread with many callers, to be made on it: answers come to it together, and a task of its
    /// runtime hands them out.
    pub fn for_many_callers(&self, scope: &Scope) -> Self {
        let counter = Arc::new(Counter::default());
        let (attended, shutdown) = (Arc::clone(&counter), scope.shutdown().clone());
        let task = scope.spawn("coord-answers", async move {
            tokio::select! {
                () = shutdown.stopped() => {}
                () = attended.attend() => {}
            }
            attended.close();
        });
        drop(task);
        Self { inner: Arc::clone(&self.inner), counter: Some(counter) }
    }

    /// Makes a change and waits until it is applied here. On any node.
    ///
    /// Dropping the future does not take the change back: it may happen or not.
    pub async fn execute(&self, command: Command) -> Result<Reply, CoordError> {
        command.check()?;
        self.check_serves()?;
        self.inner.check_room(&command)?;
        self.inner.submit(&command, self.counter.as_ref()).await
    }

    /// Reads keys: as of now, or (`serializable`) as this node knows them.
    pub async fn range(&self, request: RangeRequest, serializable: bool) -> Result<RangeReply, CoordError> {
        request.check()?;
        if !serializable {
            self.linearizable().await?;
        }
        self.inner.read_range(&request).await
    }

    /// Runs a transaction. One that can change nothing makes no log entry; it may be `serializable` as a read may.
    pub async fn txn(
        &self,
        origin: Origin,
        txn: TxnRequest,
        serializable: bool,
    ) -> Result<TxnReply, CoordError> {
        if txn.is_read_only() {
            txn.check()?;
            if !serializable {
                self.linearizable().await?;
            }
            return Ok(self.inner.shared.state().read_txn(&txn)?);
        }
        match self.execute(Command { origin, op: Op::Txn(txn) }).await? {
            Reply::Txn(reply) => Ok(reply),
            other => unreachable!("a transaction is answered as one, not with {other:?}"),
        }
    }

    /// Makes a lease; id 0 lets the core choose. Answers its name and the time it was granted for.
    pub async fn lease_grant(
        &self,
        origin: Origin,
        id: LeaseId,
        ttl_ms: i64,
    ) -> Result<(LeaseId, i64), CoordError> {
        let chosen = id.is_none();
        loop {
            let id = if chosen { LeaseId(fastrand::i64(1..i64::MAX)) } else { id };
            match self.execute(Command { origin, op: Op::LeaseGrant { id, ttl_ms } }).await {
                Ok(Reply::LeaseGranted { id, ttl_ms, .. }) => return Ok((id, ttl_ms)),
                Ok(other) => unreachable!("a grant is answered as one, not with {other:?}"),
                Err(CoordError::Refused(crate::Error::LeaseExists)) if chosen => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Ends a lease and deletes its keys.
    pub async fn lease_revoke(&self, origin: Origin, id: LeaseId) -> Result<(), CoordError> {
        self.execute(Command { origin, op: Op::LeaseRevoke { id } }).await.map(|_| ())
    }

    /// Gives a lease its whole time again: answers that in milliseconds, 0 when there is no such lease.
    ///
    /// The lease of a node is kept by nodes alone.
    pub async fn lease_keep_alive(&self, origin: Origin, id: LeaseId) -> Result<i64, CoordError> {
        self.check_serves()?;
        self.inner.keep_alive(origin, id, self.counter.as_ref()).await
    }

    /// What a lease was granted for and has left.
    pub async fn lease_time_to_live(&self, id: LeaseId, with_keys: bool) -> Result<LeaseInfo, CoordError> {
        self.inner.time_to_live(id, with_keys).await
    }

    /// Every lease of a client that lives, by id. Those of nodes are the cluster's own, like the keys on them.
    pub async fn leases(&self) -> Result<Vec<LeaseId>, CoordError> {
        self.linearizable().await?;
        let state = self.inner.shared.state();
        let theirs = state.leases().filter(|(_, lease)| lease.origin == Origin::Client);
        Ok(theirs.map(|(id, _)| id).collect())
    }

    /// A stream of watches, without any yet.
    pub fn watcher(&self) -> WatchStream {
        WatchStream::new(Arc::clone(&self.inner.shared))
    }

    /// Looks at the state as this node has it. Everybody waits meanwhile: be quick.
    pub fn read<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.inner.shared.state())
    }

    /// Returns when the state here contains everything that was acknowledged anywhere before the call.
    pub async fn linearizable(&self) -> Result<(), CoordError> {
        self.check_serves()?;
        self.inner.linearizable(self.counter.as_ref()).await
    }

    /// The beginning of an answer about `space`.
    pub fn header(&self, space: SpaceId) -> Header {
        let revision = self.inner.shared.state().revision(space);
        self.stamp(revision)
    }

    /// The beginning of an answer whose revision is known. Takes no lock.
    pub fn stamp(&self, revision: i64) -> Header {
        Header {
            cluster_id: self.inner.options.cluster_id,
            member_id: self.inner.group.voter().0,
            revision,
            raft_term: self.inner.term.load(Ordering::Relaxed),
        }
    }

    /// How this member is.
    pub fn status(&self) -> Status {
        let metrics = self.inner.group.metrics();
        let size = self.inner.shared.size_bytes();
        let alarms: Vec<Alarm> = self.read(|state| state.alarms().collect());
        let mut errors: Vec<String> = alarms.iter().map(|alarm| self.inner.describe(*alarm)).collect();
        if metrics.leadership.leader.is_none() {
            errors.push(CoordError::NoLeader.message());
        }
        Status {
            leader: metrics.leadership.leader,
            term: metrics.leadership.term,
            raft_index: metrics.committed.unwrap_or(0),
            applied: self.inner.shared.applied(),
            db_size: size,
            db_size_in_use: size,
            is_learner: metrics.role == Role::Learner,
            errors,
        }
    }

    /// The user's keys as they are now, as a database file of etcd ([`crate::bolt`]), in pieces, while changes go on.
    pub fn database(&self) -> Database {
        let cursor = self.inner.shared.state().begin_bolt();
        Database { shared: Arc::clone(&self.inner.shared), cursor }
    }

    /// The checksum of a space at a revision; 0 is now.
    pub fn hash_kv(&self, space: SpaceId, revision: i64) -> Result<HashReply, CoordError> {
        Ok(self.inner.shared.state().hash_kv(space, revision)?)
    }

    /// Forgets history before a revision; `physical` returns when the memory is back, too. Answers the revision of
    /// the space.
    pub async fn compact(
        &self,
        origin: Origin,
        space: SpaceId,
        revision: i64,
        physical: bool,
    ) -> Result<i64, CoordError> {
        let command = Command { origin, op: Op::Compact { space, revision } };
        let reply = self.execute(command).await?;
        while physical && self.inner.shared.reclaim() {
            tokio::task::yield_now().await;
        }
        match reply {
            Reply::Compacted { revision } => Ok(revision),
            other => unreachable!("a compaction is answered as one, not with {other:?}"),
        }
    }

    /// Raises an alarm; answers those that it changed.
    pub async fn alarm_on(&self, alarm: Alarm) -> Result<Vec<Alarm>, CoordError> {
        self.inner.alarm(Op::AlarmOn(alarm)).await
    }

    /// Takes an alarm back; answers those that it changed.
    pub async fn alarm_off(&self, alarm: Alarm) -> Result<Vec<Alarm>, CoordError> {
        self.inner.alarm(Op::AlarmOff(alarm)).await
    }

    /// The alarms that are on.
    pub async fn alarms(&self) -> Result<Vec<Alarm>, CoordError> {
        self.linearizable().await?;
        Ok(self.inner.shared.state().alarms().collect())
    }

    /// The members as this node knows them.
    pub fn members(&self) -> Vec<MemberInfo> {
        self.inner.members()
    }

    /// Adds a member without a vote. Adding it again is fine.
    pub async fn add_learner(&self, member: Member) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::AddLearner(member)).await
    }

    /// Gives a learner that has caught up a vote.
    pub async fn promote_member(&self, id: VoterId) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::Promote(id)).await
    }

    /// Removes a member. It votes no more when this returns, and its id is never used again. A node of the cluster is
    /// emptied afterwards and then stops.
    pub async fn remove_member(&self, id: VoterId) -> Result<(), CoordError> {
        self.inner.remove_member(id).await
    }

    /// Tells the members that one of them is reached elsewhere now.
    pub async fn update_member(&self, member: Member) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::Move(member)).await
    }

    /// Hands the leadership to a voter and returns when it leads.
    pub async fn move_leader(&self, to: VoterId) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::Transfer(to)).await
    }

    /// The Raft group.
    pub fn group(&self) -> &Group {
        &self.inner.group
    }

    /// Changes of leadership, from now on.
    pub fn leadership(&self) -> LeaderWatch {
        self.inner.group.leader_changes()
    }

    /// Whether this node, as the leader, has a lease to end; makes it look at once.
    #[cfg(any(test, feature = "testing"))]
    pub fn is_lease_overdue(&self) -> bool {
        self.inner.shared.lease_news.notify_one();
        self.inner.shared.leases().is_overdue(self.inner.now_ms())
    }

    /// Stops this member; what is durable stays. Whoever waits is told.
    pub async fn stop(&self) {
        self.inner.queue.close();
        self.inner.host.router.unserve(ServiceId::COORDINATOR);
        self.inner.group.stop().await;
        self.inner.shared.land_all(&CoordError::Timeout);
        self.inner.shared.watches().close();
    }
}

/// A database file on its way out.
pub struct Database {
    shared: Arc<Shared>,
    cursor: BoltCursor,
}

impl Database {
    /// Bytes of the whole file; 0 until it is known.
    pub fn total_bytes(&self) -> u64 {
        self.cursor.total_bytes()
    }
}

impl Iterator for Database {
    type Item = Result<Bytes, SnapshotError>;

    /// The next piece, of about 64 KiB; an empty one while the file is being measured, so that others have their turn.
    /// An error is the last: another node's state took this one's place.
    fn next(&mut self) -> Option<Self::Item> {
        match self.cursor.step(&self.shared.state()) {
            Ok(Step::Measuring) => Some(Ok(Bytes::new())),
            Ok(Step::Piece(bytes)) => Some(Ok(bytes)),
            Ok(Step::Done) => None,
            Err(error) => Some(Err(error)),
        }
    }
}
