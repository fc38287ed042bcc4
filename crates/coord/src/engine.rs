//! The running coordination service: the state machine on a Raft group, on every node.
//!
//! A [`Coordinator`] is a handle for any thread. Its tasks run on the runtime where it was opened (the node's control
//! thread), so client load cannot delay Raft's timers. Requests and replies cross between the two threads in batches.
//!
//! ```text
//!  etcd API, repository ──▶ Coordinator
//!     writes   propose.rs   commands batched into proposals; followers forward to the leader
//!     reads    reads.rs     one confirmed read index for all waiting reads, then State behind a short lock
//!     leases   leases.rs    the leader's lease clock; keepalives in rounds
//!     watches  watches.rs   positions in history, advanced after each apply
//!     members  members.rs   the group's members and their node records
//!     peers    peer.rs      requests from other nodes to the leader
//!     replies  replies.rs   from the control thread to many waiters with one wake-up
//!     apply    shared.rs    the state machine: State, waiters, watchers, lease clock
//! ```
//!
//! Must never: hold a lock across an await, propose a command twice while its outcome is unknown, or serve a
//! linearizable read from a state older than the last acknowledged write.

mod alarms;
mod entry;
mod error;
mod leases;
mod members;
mod peer;
mod propose;
mod reads;
mod replies;
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

pub use self::error::CoordError;
pub use self::leases::LeaseInfo;
use self::leases::{Renewals, TermLeaseClock};
pub use self::members::MemberInfo;
use self::peer::{MemberChange, PeerService};
use self::propose::Queue;
use self::reads::Reads;
use self::replies::ReplyQueue;
use self::shared::{Machine, Shared};
pub use self::watches::{WatchItem, WatchStream};
use crate::bolt::{BoltCursor, Step};
use crate::lease::LeaseId;
use crate::lease_clock::LeaseClockConfig;
use crate::range::SpaceId;
use crate::reply::{HashReply, RangeReply, Reply, TxnReply};
use crate::request::{Alarm, Command, Op, Origin, RangeRequest, TxnRequest};
use crate::snapshot::SnapshotError;
use crate::spill::SpillFile;
use crate::state::State;

/// Bytes of log after which a snapshot is due, whatever the number of entries.
const SNAPSHOT_BYTES: u64 = 256 << 20;

/// Delay before a failed snapshot write is retried, so that a full disk gets no extra load.
const SNAPSHOT_RETRY_MS: u64 = 5_000;

/// Settings of a node's coordination service.
#[derive(Clone)]
pub struct CoordinatorOptions {
    /// Settings of the Raft group.
    pub group: GroupOptions,
    /// The cluster id in every response header.
    pub cluster_id: u64,
    /// Bytes of keys and history above which puts are refused.
    pub quota_bytes: u64,
    /// How long history is kept before automatic compaction; 0 disables it.
    pub compaction_retention_ms: u64,
    /// Interval of progress notifications for watchers created with `progress_notify`.
    pub progress_interval: Duration,
    /// Settings of the lease clock.
    pub lease_clock: LeaseClockConfig,
    /// The runtime that notifies watchers: the one that serves them, so that waking thousands of watchers crosses no
    /// thread. `None` is the runtime the coordinator is opened on.
    pub watch_runtime: Option<Handle>,
    /// The spill file for superseded values; `None` keeps them in memory.
    pub spill: Option<SpillFile>,
    /// Called when memory of compacted history was freed, on the thread that freed it.
    pub on_reclaimed: Option<fn()>,
}

impl CoordinatorOptions {
    /// Default settings for `group`.
    pub fn new(group: GroupOptions, cluster_id: u64) -> Self {
        Self {
            group,
            cluster_id,
            quota_bytes: 2 << 30,
            compaction_retention_ms: 60 * 60 * 1_000,
            progress_interval: Duration::from_secs(600),
            lease_clock: LeaseClockConfig::default(),
            watch_runtime: None,
            spill: None,
            on_reclaimed: None,
        }
    }
}

/// The header of every response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// The cluster id.
    pub cluster_id: u64,
    /// The member that sends the response.
    pub member_id: u64,
    /// The revision of the key space the request was for.
    pub revision: i64,
    /// The Raft term of the member.
    pub raft_term: u64,
}

/// Status of a member, as in etcd's `Maintenance.Status`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Status {
    /// The leader known to this member.
    pub leader: Option<VoterId>,
    /// The Raft term of this member.
    pub term: u64,
    /// Index of the last entry known to be committed.
    pub raft_index: u64,
    /// Index of the last entry applied on this member.
    pub applied: u64,
    /// Bytes of keys and history, including compacted history that is not reclaimed yet.
    pub db_size: u64,
    /// The same as `db_size`: there is nothing to defragment.
    pub db_size_in_use: u64,
    /// True if this member is a learner.
    pub is_learner: bool,
    /// Active alarms and other problems, as text.
    pub errors: Vec<String>,
}

/// A handle to this node's coordination service.
#[derive(Clone)]
pub struct Coordinator {
    inner: Arc<Inner>,
    /// Queue for the replies to this handle's requests; `None` wakes each waiter directly.
    reply_queue: Option<Arc<ReplyQueue>>,
}

/// State shared by the handle and its tasks.
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
    /// When this node last proposed the NOSPACE alarm; 0 is never.
    last_alarm_ms: AtomicU64,
    /// Since when this node's disk is full; 0 while it is not.
    full_since_ms: AtomicU64,
    /// True while other nodes serve in place of this one, see [`Coordinator::set_withdrawn`].
    withdrawn: watch::Sender<bool>,
    /// See [`Coordinator::set_isolated`].
    isolated: AtomicBool,
    /// Wakes the task that times out pending proposals.
    proposal_added: Notify,
    /// Wakes requests that wait for a leader.
    leader_changed: Notify,
}

impl Inner {
    fn now_ms(&self) -> u64 {
        self.shared.clock.monotonic_ms()
    }

    /// Request timeout: the proposal timeout plus two election timeouts, which covers an election and a slow disk.
    fn timeout_ms(&self) -> u64 {
        let proposal_ms = u64::try_from(self.options.group.proposal_timeout.as_millis()).unwrap_or(u64::MAX);
        proposal_ms.saturating_add(2 * self.options.group.timers.election_max_ms)
    }

    fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::Relaxed)
    }

    fn on_leadership(&self, now: &Leadership) {
        self.term.store(now.term, Ordering::Relaxed);
        self.leader_changed.notify_waiters();
    }

    /// Waits until a leader is known, or until the deadline.
    async fn wait_leader(&self, deadline_ms: u64) {
        let left = Duration::from_millis(deadline_ms.saturating_sub(self.now_ms()));
        let leader_changed = async {
            loop {
                let notified = self.leader_changed.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if self.group.leader().is_some() {
                    return;
                }
                notified.await;
            }
        };
        // The leader id may be known before its address: wait in slices of 100 ms.
        let slice = left.min(Duration::from_millis(100));
        let _ = tokio::time::timeout(slice, leader_changed).await;
    }

    /// Waits until a leader of a term other than `term` is known.
    async fn wait_term_over(&self, term: u64) {
        loop {
            let notified = self.leader_changed.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.group.leader_in_term().is_some_and(|(now, _)| now != term) {
                return;
            }
            notified.await;
        }
    }

    /// Notifies watchers of applied changes, until the node stops.
    async fn notify_watchers(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        let mut next_progress_ms = self.now_ms();
        let interval_ms = u64::try_from(self.options.progress_interval.as_millis()).unwrap_or(u64::MAX);
        loop {
            let sleep = Duration::from_millis(next_progress_ms.saturating_sub(self.now_ms()).max(1));
            tokio::select! {
                biased;
                () = shutdown.stopped() => break,
                () = self.shared.watch_wake.notified() => {}
                () = tokio::time::sleep(sleep) => {}
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

    /// Reclaims compacted history in small steps, and takes a snapshot when the log has grown large.
    async fn run_maintenance(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        let (mut retry_ms, mut free_again_ms) = (0, 0);
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => return,
                () = self.shared.compacted.notified() => {}
                () = rest(Duration::from_secs(1)) => {}
            }
            let mut reclaimed = false;
            while self.shared.reclaim() && !shutdown.is_stopped() {
                reclaimed = true;
                tokio::task::yield_now().await;
            }
            if let Some(on_reclaimed) = self.options.on_reclaimed.filter(|_| reclaimed) {
                on_reclaimed();
            }
            self.maybe_raise_disk_alarm();
            self.maybe_free_log(&mut free_again_ms).await;
            let large = SNAPSHOT_BYTES.max(self.shared.size_bytes());
            let log_is_large = self.shared.bytes_since_snapshot.load(Ordering::Relaxed) > large;
            let retry_failed = self.group.snapshot_failed() && self.now_ms() >= retry_ms;
            if log_is_large || retry_failed {
                self.shared.bytes_since_snapshot.store(0, Ordering::Relaxed);
                retry_ms = self.now_ms() + SNAPSHOT_RETRY_MS;
                if let Err(error) = self.group.snapshot().await {
                    tracing::debug!(%error, "snapshot not taken");
                }
            }
        }
    }

    /// Stops the process when the Raft group stops by itself: its disk failed, or a Raft invariant is broken.
    async fn stop_on_group_failure(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        tokio::select! {
            biased;
            () = shutdown.stopped() => {}
            why = self.group.stopped() => {
                let is_requested = shutdown.is_stopped() || self.is_stopping();
                self.queue.close();
                assert!(
                    is_requested,
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
    /// Opens the service from the data on disk, or empty, and starts its tasks on the current runtime.
    pub async fn open(
        host: &Host,
        options: CoordinatorOptions,
        clock: Arc<dyn Clock>,
        scope: &Scope,
    ) -> Result<Self, OpenError> {
        let shared =
            Arc::new(Shared::new(clock, TermLeaseClock::new(options.lease_clock), options.spill.clone()));
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
            last_alarm_ms: AtomicU64::new(0),
            full_since_ms: AtomicU64::new(0),
            withdrawn: watch::Sender::new(false),
            isolated: AtomicBool::new(false),
            proposal_added: Notify::new(),
            leader_changed: Notify::new(),
            options,
        });
        host.router.serve(ServiceId::COORDINATOR, Arc::new(PeerService(Arc::downgrade(&inner))));
        scope.spawn("coord-propose", Arc::clone(&inner).run_proposals());
        scope.spawn("coord-sweep", Arc::clone(&inner).expire_proposals());
        scope.spawn("coord-reads", Arc::clone(&inner).confirm_reads());
        scope.spawn("coord-renewals", Arc::clone(&inner).run_renewals());
        scope.spawn("coord-time", Arc::clone(&inner).run_lease_clock());
        scope.spawn("coord-housekeeping", Arc::clone(&inner).run_maintenance());
        scope.spawn("coord-stop_on_group_failure", Arc::clone(&inner).stop_on_group_failure());
        let group = inner.group.clone();
        scope.spawn("coord-rest", async move { group.rest_while_alone().await });
        let group = inner.group.clone();
        scope.spawn("coord-quorum", async move { group.yield_without_quorum().await });
        {
            let _guard = inner.options.watch_runtime.as_ref().map(Handle::enter);
            scope.spawn("coord-watches", Arc::clone(&inner).notify_watchers());
        }
        Ok(Self { inner, reply_queue: None })
    }

    /// Marks this node as withdrawn (its disk does not work and other nodes serve in its place) or as serving again.
    /// While withdrawn, requests from the etcd port fail at once, so that clients turn to another node: a request here
    /// might wait for the disk. The node's own requests are still served.
    pub fn set_withdrawn(&self, withdrawn: bool) {
        self.inner.withdrawn.send_if_modified(|known| std::mem::replace(known, withdrawn) != withdrawn);
    }

    /// Marks this node as isolated (it has reached no quorum for seconds) or as connected again. While isolated,
    /// requests from the etcd port fail at once with `no leader`, so that client balancers choose another member.
    pub fn set_isolated(&self, isolated: bool) {
        self.inner.isolated.store(isolated, Ordering::Release);
    }

    fn check_serves(&self) -> Result<(), CoordError> {
        let refuses = || *self.inner.withdrawn.borrow() || self.inner.isolated.load(Ordering::Acquire);
        if self.reply_queue.is_some() && refuses() { Err(CoordError::NoLeader) } else { Ok(()) }
    }

    /// A handle for a thread with many callers; create it on that thread. Replies arrive there in batches, and a task
    /// of its runtime distributes them.
    pub fn for_many_callers(&self, scope: &Scope) -> Self {
        let reply_queue = Arc::new(ReplyQueue::default());
        let (task_queue, shutdown) = (Arc::clone(&reply_queue), scope.shutdown().clone());
        let task = scope.spawn("coord-answers", async move {
            tokio::select! {
                () = shutdown.stopped() => {}
                () = task_queue.run() => {}
            }
            task_queue.close();
        });
        drop(task);
        Self { inner: Arc::clone(&self.inner), reply_queue: Some(reply_queue) }
    }

    /// Proposes a command and waits until it is applied on this node. Works on any node.
    ///
    /// Dropping the future does not cancel the command: it may or may not be applied.
    pub async fn execute(&self, command: Command) -> Result<Reply, CoordError> {
        command.check()?;
        self.check_serves()?;
        self.inner.check_quota(&command)?;
        self.inner.submit(&command, self.reply_queue.as_ref()).await
    }

    /// Reads a key range: linearizable, or with `serializable` from this node's applied state.
    pub async fn range(&self, request: RangeRequest, serializable: bool) -> Result<RangeReply, CoordError> {
        request.check()?;
        if !serializable {
            self.linearizable().await?;
        }
        self.inner.read_range(&request).await
    }

    /// Runs a transaction. A read-only transaction creates no log entry; it may be `serializable` like a range read.
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
            other => unreachable!("txn replied with {other:?}"),
        }
    }

    /// Grants a lease; for id 0 the service chooses an id. Returns the lease id and the granted TTL.
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
                Ok(other) => unreachable!("lease grant replied with {other:?}"),
                Err(CoordError::Refused(crate::Error::LeaseExists)) if chosen => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Revokes a lease and deletes its keys.
    pub async fn lease_revoke(&self, origin: Origin, id: LeaseId) -> Result<(), CoordError> {
        self.execute(Command { origin, op: Op::LeaseRevoke { id } }).await.map(|_| ())
    }

    /// Renews a lease to its full TTL. Returns the TTL in milliseconds, or 0 if the lease does not exist.
    ///
    /// Only nodes may renew a lease that was granted to a node.
    pub async fn lease_keep_alive(&self, origin: Origin, id: LeaseId) -> Result<i64, CoordError> {
        self.check_serves()?;
        self.inner.keep_alive(origin, id, self.reply_queue.as_ref()).await
    }

    /// Granted and remaining TTL of a lease.
    pub async fn lease_time_to_live(&self, id: LeaseId, with_keys: bool) -> Result<LeaseInfo, CoordError> {
        self.inner.time_to_live(id, with_keys).await
    }

    /// All live leases of clients, by id. Leases of nodes are internal, like the keys attached to them.
    pub async fn leases(&self) -> Result<Vec<LeaseId>, CoordError> {
        self.linearizable().await?;
        let state = self.inner.shared.state();
        let client_leases = state.leases().filter(|(_, lease)| lease.origin == Origin::Client);
        Ok(client_leases.map(|(id, _)| id).collect())
    }

    /// A watch stream without watchers.
    pub fn watcher(&self) -> WatchStream {
        WatchStream::new(Arc::clone(&self.inner.shared))
    }

    /// Reads this node's applied state. Holds the state lock: `read` must be short.
    pub fn read<R>(&self, read: impl FnOnce(&State) -> R) -> R {
        read(&self.inner.shared.state())
    }

    /// Read index barrier: returns when the applied state here contains every write acknowledged before the call.
    pub async fn linearizable(&self) -> Result<(), CoordError> {
        self.check_serves()?;
        self.inner.linearizable(self.reply_queue.as_ref()).await
    }

    /// Response header with the current revision of `space`.
    pub fn header(&self, space: SpaceId) -> Header {
        let revision = self.inner.shared.state().revision(space);
        self.header_at(revision)
    }

    /// Response header for a known revision. Takes no lock.
    pub fn header_at(&self, revision: i64) -> Header {
        Header {
            cluster_id: self.inner.options.cluster_id,
            member_id: self.inner.group.voter().0,
            revision,
            raft_term: self.inner.term.load(Ordering::Relaxed),
        }
    }

    /// Status of this member.
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

    /// The current user keys as a bbolt database file of etcd ([`crate::bolt`]), in chunks, while writes continue.
    pub fn database(&self) -> Database {
        let cursor = self.inner.shared.state().begin_bolt();
        Database { shared: Arc::clone(&self.inner.shared), cursor }
    }

    /// Checksum of a key space at a revision; 0 is the current revision.
    pub fn hash_kv(&self, space: SpaceId, revision: i64) -> Result<HashReply, CoordError> {
        Ok(self.inner.shared.state().hash_kv(space, revision)?)
    }

    /// Compacts history before `revision`; with `physical` it returns after the memory is reclaimed. Returns the
    /// current revision of the key space.
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
            other => unreachable!("compaction replied with {other:?}"),
        }
    }

    /// Raises an alarm; returns the alarms that changed.
    pub async fn alarm_on(&self, alarm: Alarm) -> Result<Vec<Alarm>, CoordError> {
        self.inner.alarm(Op::AlarmOn(alarm)).await
    }

    /// Disarms an alarm; returns the alarms that changed.
    pub async fn alarm_off(&self, alarm: Alarm) -> Result<Vec<Alarm>, CoordError> {
        self.inner.alarm(Op::AlarmOff(alarm)).await
    }

    /// The active alarms.
    pub async fn alarms(&self) -> Result<Vec<Alarm>, CoordError> {
        self.linearizable().await?;
        Ok(self.inner.shared.state().alarms().collect())
    }

    /// The members known to this node.
    pub fn members(&self) -> Vec<MemberInfo> {
        self.inner.members()
    }

    /// Adds a learner. Adding the same member again succeeds.
    pub async fn add_learner(&self, member: Member) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::AddLearner(member)).await
    }

    /// Promotes a learner that has caught up to a voter.
    pub async fn promote_member(&self, id: VoterId) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::Promote(id)).await
    }

    /// Removes a member. It has no vote when this returns, and its id is never reused. If it is a node of the cluster,
    /// the node is drained afterwards and then stops.
    pub async fn remove_member(&self, id: VoterId) -> Result<(), CoordError> {
        self.inner.remove_member(id).await
    }

    /// Updates the peer address of a member.
    pub async fn update_member(&self, member: Member) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::UpdateAddress(member)).await
    }

    /// Transfers leadership to a voter and returns when it leads.
    pub async fn move_leader(&self, to: VoterId) -> Result<(), CoordError> {
        self.inner.change_members(MemberChange::Transfer(to)).await
    }

    /// The Raft group of the coordination service.
    pub fn group(&self) -> &Group {
        &self.inner.group
    }

    /// Leadership changes from now on.
    pub fn leadership(&self) -> LeaderWatch {
        self.inner.group.leader_changes()
    }

    /// True if this node is the leader and a lease is past its deadline; wakes the lease clock.
    #[cfg(any(test, feature = "testing"))]
    pub fn is_lease_overdue(&self) -> bool {
        self.inner.shared.lease_changed.notify_one();
        self.inner.shared.leases().is_overdue(self.inner.now_ms())
    }

    /// Stops this member; durable data stays. Waiting requests fail.
    pub async fn stop(&self) {
        self.inner.queue.close();
        self.inner.host.router.unserve(ServiceId::COORDINATOR);
        self.inner.group.stop().await;
        self.inner.shared.fail_all_proposals(&CoordError::Timeout);
        self.inner.shared.watches().close();
    }
}

/// A bbolt database file that is being streamed.
pub struct Database {
    shared: Arc<Shared>,
    cursor: BoltCursor,
}

impl Database {
    /// Size of the whole file in bytes; 0 until it is known.
    pub fn total_bytes(&self) -> u64 {
        self.cursor.total_bytes()
    }
}

impl Iterator for Database {
    type Item = Result<Bytes, SnapshotError>;

    /// The next chunk of about 64 KiB. It is empty while the file is being measured, so that other work can run in
    /// between. An error ends the stream: the state was replaced by a snapshot from another node.
    fn next(&mut self) -> Option<Self::Item> {
        match self.cursor.step(&self.shared.state()) {
            Ok(Step::Measuring) => Some(Ok(Bytes::new())),
            Ok(Step::Chunk(bytes)) => Some(Ok(bytes)),
            Ok(Step::Done) => None,
            Err(error) => Some(Err(error)),
        }
    }
}
