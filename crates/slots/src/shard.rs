//! One shard on this node: its keyspace, the effects that are not appended yet, and the clients that wait for a commit.
//!
//! One lock, taken for a *turn*: all requests that a connection has ready run under it, and their effects are appended
//! as one frame when the turn ends. Appending under the lock keeps the journal in the order of execution.
//!
//! Lock order: the shard's state, then the replica's (inside the log), then leaf locks (`waiters`, mailboxes).
//! Callbacks of the log (commit, role change) use atomics and wake the shard task; they never take the state.
//!
//! Invariants: `applied` is the journal end that the keyspace corresponds to without the effects that wait in `fx`. A
//! reply is sent only when `committed` has reached its commit gate.

mod blocked;
mod script_control;
mod serving_right;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::Guard;
use bytes::BytesMut;
use moim_base::task::Shutdown;
use moim_wire_resp::{Batch, Encoder};
use parking_lot::{Mutex as StateMutex, MutexGuard};
use tokio::sync::Notify;

pub use self::blocked::Blocked;
use self::blocked::BlockedClient;
use crate::busy::Running;
use crate::cluster::View;
use crate::cmd::{self, Spec};
use crate::ctx::{Ctx, Mode};
use crate::deferred::Deferred;
use crate::effects::{Effects, Groups};
use crate::error::Error;
use crate::events::Events;
use crate::evict::Evictor;
use crate::keyspace::{KeyId, Keyspace};
use crate::log::ShardLog;
use crate::memory::ShardMemory;
use crate::migration::state::{HeldConnections, Migrations};
use crate::session::{Block, Mailbox, Session};
use crate::shared::{Shared, lock};
use crate::snapshot::LoadedSnapshot;

use self::keyspace_hash::HashChecks;
pub(crate) use self::replay::ReplayError;
use self::time::{ShardClock, ShardTime};

/// The role of this node in a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// Loading: replays its journal and serves no command.
    Loading = 0,
    /// Primary: the leader; serves every command.
    Primary = 1,
    /// Replica: a follower; serves reads of clients in READONLY mode.
    Replica = 2,
}

/// Stands for "no leader epoch".
const NO_EPOCH: i64 = -1;
/// The longest wait of an event loop for the state, and the pause of a task on an event loop before it tries again.
const LOCK_TIMEOUT: Duration = Duration::from_millis(2);
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// One shard on this node.
pub struct Shard {
    /// The shard number.
    pub index: u16,
    /// The node id of this replica as Redis clients see it: forty hexadecimal digits.
    pub id: String,
    /// The journal of the shard.
    pub log: Arc<dyn ShardLog>,
    /// The snapshot folder; `None` for a shard without snapshots.
    folder: Option<PathBuf>,
    state: StateMutex<State>,
    committed: AtomicI64,
    role: AtomicU8,
    /// Durability `async`: replies are sent before the commit, as in Redis.
    pub is_async: AtomicBool,
    /// How many times all pending replies were voided.
    voided: AtomicU64,
    waiters: Vec<Waiters>,
    /// Messages to clients of other shards, deferred until this journal has committed.
    pub(crate) deferred: Arc<Deferred>,
    /// Scripts that run off the event loops. While there are any, an event loop must not wait for the lock.
    pub offloaded_scripts: AtomicUsize,
    /// A script has run for longer than `busy-reply-threshold`; other clients get BUSY.
    pub busy: AtomicBool,
    /// Set by SCRIPT KILL to end the running script.
    pub script_killed: AtomicBool,
    /// True if the running script has written: SCRIPT KILL is then refused.
    pub script_wrote: AtomicBool,
    /// Set to end the running script although it has written.
    pub script_abandoned: AtomicBool,
    /// The effects of the script that was just stopped must not be appended. Read under the lock.
    pub(crate) discards_effects: AtomicBool,
    /// The script that runs off the event loops and holds the lock. Other clients read it without the lock.
    pub(crate) running: Mutex<Option<Running>>,
    /// The validity interval of the serving right on the monotonic clock; see [`Shard::holds_serving_right`].
    serving_right_until_ms: AtomicU64,
    serving_right_from_ms: AtomicU64,
    /// The newest leader epoch on record, the newest one without an earlier holder of the serving right, and the epoch
    /// in which this node leads. The election can reach the replica driver before the record is read here, so an epoch
    /// that was not read yet counts as contested.
    recorded_epoch: AtomicI64,
    uncontested_epoch: AtomicI64,
    leading_epoch: AtomicI64,
    /// A snapshot is being written.
    pub(crate) is_snapshotting: AtomicBool,
    /// Replay failed: the replica is disabled until its journal is fetched again.
    is_disabled: AtomicBool,
    /// The interval between two keyspace hash checks, in milliseconds.
    check_interval_ms: AtomicU64,
    /// Keyspace hash mismatches of this replica.
    pub(crate) mismatches: AtomicU64,
    /// The ownership flip of imported slots is in progress: commands for them are held although this node's slot map
    /// does not show the new owner yet. Other nodes may read the new map first and redirect their clients here.
    pub(crate) is_flipping: AtomicBool,
    /// The shard is source or target of a slot migration: a snapshot would contain keys that are dropped in a moment.
    pub(crate) is_migrating: AtomicBool,
    /// The journal from this offset on is retained for the target of a slot migration.
    journal_retained_from_offset: AtomicI64,
    /// The leader epoch in which the slot map was read; see [`Shard::on_slot_map_read`].
    slot_map_read_epoch: AtomicI32,
    /// Cancelled when the shard leaves this node; every task and connection of the shard ends.
    pub removed: Shutdown,
    /// Wakes the shard task.
    pub task_wakeup: Notify,
    /// True while the shard task polls rarely because no key has an expiry.
    pub(crate) is_task_idle: AtomicBool,
}

#[derive(Default)]
struct Waiters {
    list: Mutex<Vec<(i64, Arc<Mailbox>)>>,
    any: AtomicBool,
    notify: Notify,
}

/// The state behind the shard lock.
pub struct State {
    /// The keyspace.
    pub db: Keyspace,
    /// Effects that were executed and not appended.
    pub fx: Effects,
    /// The frames replayed so far of a group whose last frame has not arrived.
    pub(crate) groups: Groups,
    /// The state of the keyspace hash check.
    pub(crate) hash_checks: HashChecks,
    /// Notifications, invalidations and wake-ups caused by the current turn.
    pub events: Events,
    /// The journal end that `db` without `fx` corresponds to.
    pub applied: i64,
    /// Shard time when it was last read: the time of the newest batch, or later.
    pub time_ms: i64,
    shard_clock: ShardClock,
    /// Frames from this offset on were received after the shard was opened or last reset: their age is known.
    live_from: i64,
    /// When a new primary began to wait for a majority of clocks.
    unconfirmed_since_ns: Option<u64>,
    /// Clients blocked on keys.
    pub blocked: Blocked,
    /// The leader epoch for which the keyspace is valid; -1 if the keyspace must be brought up to the journal again.
    pub epoch: i32,
    /// The slot migrations in which this shard is source or target.
    pub(crate) migrations: Migrations,
    /// Connections whose command is held: its slot migrates, or too many effects wait for the journal.
    pub(crate) held_connections: HeldConnections,
    settings_version: u64,
    /// The memory use of `db` as reported to the node.
    pub(crate) memory: ShardMemory,
    /// The eviction pool.
    pub(crate) evictor: Evictor,
    /// Buffers of the current turn, kept so that they are not allocated again.
    pub(crate) scratch: Scratch,
    /// True if the newest snapshot was loaded.
    pub(crate) has_loaded_snapshot: bool,
}

/// The requests of a pipeline and the ids of their keys.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) batch: Batch,
    pub(crate) ids: Vec<KeyId>,
}

impl Shard {
    /// A shard whose journal was not replayed yet.
    pub fn new(
        index: u16,
        id: String,
        log: Arc<dyn ShardLog>,
        loops: usize,
        folder: Option<PathBuf>,
    ) -> Arc<Self> {
        let state = State { live_from: log.journal().end(), ..State::empty() };
        Arc::new(Self {
            index,
            id,
            log,
            folder,
            state: StateMutex::new(state),
            committed: AtomicI64::new(0),
            role: AtomicU8::new(Role::Loading as u8),
            is_async: AtomicBool::new(false),
            voided: AtomicU64::new(0),
            waiters: (0..loops).map(|_| Waiters::default()).collect(),
            deferred: Arc::default(),
            offloaded_scripts: AtomicUsize::new(0),
            mismatches: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            is_snapshotting: AtomicBool::new(false),
            is_disabled: AtomicBool::new(false),
            check_interval_ms: AtomicU64::new(60_000),
            is_flipping: AtomicBool::new(false),
            is_migrating: AtomicBool::new(false),
            script_killed: AtomicBool::new(false),
            script_wrote: AtomicBool::new(false),
            script_abandoned: AtomicBool::new(false),
            discards_effects: AtomicBool::new(false),
            running: Mutex::new(None),
            serving_right_until_ms: AtomicU64::new(u64::MAX),
            serving_right_from_ms: AtomicU64::new(0),
            recorded_epoch: AtomicI64::new(NO_EPOCH),
            uncontested_epoch: AtomicI64::new(NO_EPOCH),
            leading_epoch: AtomicI64::new(NO_EPOCH),
            journal_retained_from_offset: AtomicI64::new(i64::MAX),
            slot_map_read_epoch: AtomicI32::new(i32::MAX),
            removed: Shutdown::new(),
            task_wakeup: Notify::new(),
            is_task_idle: AtomicBool::new(false),
        })
    }

    /// The current role of this node.
    pub fn role(&self) -> Role {
        match self.role.load(Ordering::Acquire) {
            1 => Role::Primary,
            2 => Role::Replica,
            _ => Role::Loading,
        }
    }

    pub(crate) fn set_role(&self, role: Role) {
        self.role.store(role as u8, Ordering::Release);
    }

    /// The slot map was read after this node became leader in `epoch`. A new primary waits for that: with an older slot
    /// map it could serve slots that its shard has handed over before.
    pub(crate) fn on_slot_map_read(&self, epoch: i32) {
        if self.slot_map_read_epoch.swap(epoch, Ordering::AcqRel) != epoch {
            self.task_wakeup.notify_one();
        }
    }

    pub(crate) fn has_read_slot_map(&self, epoch: i32) -> bool {
        let slot_map_read_epoch = self.slot_map_read_epoch.load(Ordering::Acquire);
        slot_map_read_epoch == epoch || slot_map_read_epoch == i32::MAX
    }

    /// Retains the journal from this offset on for a slot migration; `i64::MAX` if there is none.
    pub(crate) fn retain_journal_from(&self, position: i64) {
        self.journal_retained_from_offset.store(position, Ordering::Release);
    }

    pub(crate) fn journal_retained_from(&self) -> i64 {
        self.journal_retained_from_offset.load(Ordering::Acquire)
    }

    /// The journal was truncated to `end`, or restarts there: a keyspace beyond it is discarded. May block.
    pub(crate) fn on_truncate(&self, end: i64) {
        self.void_pending_replies();
        let mut state = self.lock();
        if state.applied > end {
            self.set_role(Role::Loading);
            state.reset();
        }
        drop(state);
        self.committed.fetch_min(end, Ordering::AcqRel);
        self.task_wakeup.notify_one();
    }

    /// The snapshot folder.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Sets the interval between two keyspace hash checks.
    pub fn set_check_interval(&self, ms: u64) {
        self.check_interval_ms.store(ms, Ordering::Relaxed);
    }

    /// Replay failed: nothing is served from memory, and this replica must not be elected.
    pub(crate) fn disable(&self, offset: i64, error: &dyn std::fmt::Display) {
        self.is_disabled.store(true, Ordering::Release);
        self.set_role(Role::Loading);
        self.void_pending_replies();
        self.log.journal().mark_damaged();
        tracing::error!(
            shard = self.index,
            offset,
            %error,
            "shard replay failed; replica disabled until it is fetched again, or the program that wrote the journal is back"
        );
    }

    pub(crate) fn is_disabled(&self) -> bool {
        self.is_disabled.load(Ordering::Acquire)
    }

    /// The replica restarts with an empty journal.
    pub(crate) fn enable(&self) {
        self.is_disabled.store(false, Ordering::Release);
    }

    /// Installs a snapshot of the leader in place of the keyspace.
    pub(crate) fn install(&self, loaded: LoadedSnapshot) {
        self.is_disabled.store(false, Ordering::Release);
        self.void_pending_replies();
        self.set_role(Role::Loading);
        let mut state = self.lock();
        state.reset();
        self.committed.store(loaded.end, Ordering::Release);
        state.install_snapshot(loaded);
        drop(state);
        self.task_wakeup.notify_one();
    }

    /// The high watermark: everything below it is committed.
    pub fn committed(&self) -> i64 {
        self.committed.load(Ordering::Acquire)
    }

    /// How many times the pending replies were voided.
    pub fn voided(&self) -> u64 {
        self.voided.load(Ordering::Acquire)
    }

    /// Voids all pending replies: their changes may be lost.
    pub(crate) fn void_pending_replies(&self) {
        self.voided.fetch_add(1, Ordering::AcqRel);
        self.deferred.wakeup.notify_one();
        self.wake_all();
    }

    /// The high watermark has advanced to `end`. Called by the replica driver; takes leaf locks only.
    pub fn on_committed(&self, end: i64) {
        if self.committed.fetch_max(end, Ordering::AcqRel) < end {
            for waiters in &self.waiters {
                if waiters.any.load(Ordering::Acquire) {
                    waiters.notify.notify_one();
                }
            }
            if self.deferred.any() {
                self.deferred.wakeup.notify_one();
            }
            match self.role() {
                Role::Replica => self.task_wakeup.notify_one(),
                Role::Primary | Role::Loading => self.log.journal().set_cached_from(end),
            }
        }
    }

    fn wake_all(&self) {
        for waiters in &self.waiters {
            for (_, mailbox) in lock(&waiters.list).drain(..) {
                mailbox.wake();
            }
        }
    }

    /// Registers a connection to be woken when the journal is committed up to `gate`.
    pub fn wait_for(&self, on_loop: usize, gate: i64, mailbox: &Arc<Mailbox>) {
        let waiters = &self.waiters[on_loop % self.waiters.len()];
        lock(&waiters.list).push((gate, Arc::clone(mailbox)));
        waiters.any.store(true, Ordering::Release);
        if self.committed() >= gate {
            waiters.notify.notify_one();
        }
    }

    /// Wakes the connections of one event loop whose commit gate was reached. One task per loop: the thread that
    /// commits wakes each loop once instead of every connection.
    pub async fn wake_waiters(self: Arc<Self>, on_loop: usize) {
        let waiters = &self.waiters[on_loop % self.waiters.len()];
        let mut woken = Vec::new();
        loop {
            waiters.notify.notified().await;
            let committed = self.committed();
            {
                let mut list = lock(&waiters.list);
                list.retain(|(gate, mailbox)| {
                    let waits = *gate > committed;
                    if !waits {
                        woken.push(Arc::clone(mailbox));
                    }
                    waits
                });
                waiters.any.store(!list.is_empty(), Ordering::Release);
            }
            woken.drain(..).for_each(|mailbox: Arc<Mailbox>| mailbox.wake());
        }
    }

    /// Locks the state, however long that takes. Not on an event loop: a script may hold the lock until it is killed.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Locks the state within [`LOCK_TIMEOUT`]; `None` if a script holds it for longer.
    pub(crate) fn lock_soon(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock_for(LOCK_TIMEOUT)
    }

    /// Locks the state from a task on an event loop: while a script holds it, the loop serves its other clients.
    pub(crate) async fn lock_on_loop(&self) -> MutexGuard<'_, State> {
        loop {
            if let Some(state) = self.lock_soon() {
                return state;
            }
            tokio::time::sleep(LOCK_RETRY).await;
        }
    }

    /// Runs `read` on the state, once a script that may hold it has released it.
    pub(crate) async fn with_state<T>(&self, read: impl FnOnce(&mut State) -> T) -> T {
        read(&mut *self.lock_on_loop().await)
    }

    /// Locks the state if it is not locked.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// True if a script that runs off the event loops holds the state or waits for it, or one has held it for longer
    /// than `busy-reply-threshold`.
    fn is_held_by_script(&self) -> bool {
        self.busy.load(Ordering::Acquire) || self.offloaded_scripts.load(Ordering::Acquire) > 0
    }

    /// Takes the lock for a turn. `None` while a script holds it.
    ///
    /// An event loop never waits for a script. A script can take the lock between the check and the wait (it leaves its
    /// loop and locks again before a waiting thread has woken up), so the wait is bounded and the check repeated: a
    /// loop that kept waiting could not be reached by SCRIPT KILL.
    pub fn turn<'a>(&'a self, shared: &'a Shared) -> Option<Turn<'a>> {
        let state = loop {
            if self.is_held_by_script() {
                break self.state.try_lock()?;
            }
            if let Some(state) = self.state.try_lock_for(LOCK_TIMEOUT) {
                break state;
            }
        };
        Some(self.turn_with(shared, state))
    }

    /// Takes the lock for a turn, however long that takes. Not on an event loop.
    pub(crate) fn turn_blocking<'a>(&'a self, shared: &'a Shared) -> Turn<'a> {
        self.turn_with(shared, self.lock())
    }

    fn turn_with<'a>(&'a self, shared: &'a Shared, mut state: MutexGuard<'a, State>) -> Turn<'a> {
        let now = state.advance_time(shared).time_ms;
        state.follow_settings(shared, now);
        state.events.hazards.batch = state.next_end();
        let view = shared.view.load();
        Turn { shard: self, shared, state, now, admitted: false, view, resolved: None }
    }
}

impl State {
    /// The state before any replay.
    pub(crate) fn empty() -> Self {
        Self {
            db: Keyspace::new(fastrand::u64(..)),
            fx: Effects::default(),
            groups: Groups::default(),
            hash_checks: HashChecks::default(),
            events: Events::default(),
            applied: 0,
            time_ms: 0,
            shard_clock: ShardClock::default(),
            live_from: 0,
            unconfirmed_since_ns: None,
            blocked: Blocked::default(),
            epoch: -1,
            migrations: Migrations::default(),
            held_connections: HeldConnections::default(),
            settings_version: 0,
            memory: ShardMemory::default(),
            evictor: Evictor::default(),
            scratch: Scratch::default(),
            has_loaded_snapshot: false,
        }
    }

    /// Discards the keyspace: snapshot and journal are replayed from the start.
    pub(crate) fn reset(&mut self) {
        self.set_migrations(Migrations::default());
        self.events.invalidate_watches(|_| true);
        self.db = Keyspace::new(fastrand::u64(..));
        self.has_loaded_snapshot = false;
        self.live_from = self.live_from.max(self.applied);
        self.applied = 0;
        self.time_ms = 0;
        self.shard_clock = ShardClock::default();
        self.epoch = -1;
        self.fx.clear();
        self.groups.discard();
        self.hash_checks.reset();
        self.events.hazards.reset();
        self.events.ready.clear();
        self.events.invalidate_all = self.events.tracking_enabled;
        self.evictor = Evictor::default();
        self.release_blocked();
    }

    /// Unblocks clients that wait for keys: this node is not the primary any more.
    pub(crate) fn release_blocked(&mut self) {
        let on_keys = self.blocked.clients.iter().filter(|(_, waiting)| waiting.block.on_keys);
        let clients: Vec<u64> = on_keys.map(|(client, _)| *client).collect();
        for waiting in clients.iter().filter_map(|client| self.unblock(*client)) {
            let mut out = BytesMut::new();
            Encoder::new(&mut out, waiting.protocol).error(
                "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            );
            waiting.mailbox.deliver_reply(out.freeze(), 0);
        }
        self.blocked.by_key.clear();
        self.held_connections.wake();
    }

    /// Removes a client from the blocked clients.
    fn unblock(&mut self, client: u64) -> Option<BlockedClient> {
        let waiting = self.blocked.remove(client)?;
        self.events.blocked -= 1;
        if waiting.block.wake_on_delete {
            waiting.block.keys.iter().for_each(|key| self.events.cancel_wake_on_delete(key));
        }
        Some(waiting)
    }

    /// Answers blocked clients whose slot has migrated with MOVED.
    pub(crate) fn redirect_blocked(&mut self, moved: impl Fn(&[u8]) -> Option<Error>) {
        let of = |(client, waiting): (&u64, &BlockedClient)| {
            let error = waiting.block.keys.iter().find_map(|key| moved(key))?;
            waiting.block.on_keys.then_some((*client, error))
        };
        let clients: Vec<(u64, Error)> = self.blocked.clients.iter().filter_map(of).collect();
        for (client, error) in clients {
            let Some(waiting) = self.unblock(client) else { continue };
            let mut out = BytesMut::new();
            Encoder::new(&mut out, waiting.protocol).error(error.0.as_bytes());
            waiting.mailbox.deliver_reply(out.freeze(), 0);
        }
    }

    /// Replaces the keyspace by a loaded snapshot.
    pub(crate) fn install_snapshot(&mut self, loaded: LoadedSnapshot) {
        self.db = loaded.db;
        self.set_migrations(loaded.migrations);
        self.events.invalidate_watches(|_| true);
        (self.applied, self.time_ms, self.has_loaded_snapshot) = (loaded.end, loaded.time_ms, true);
        self.shard_clock = ShardClock::default();
        self.groups.discard();
    }

    /// LAG: how far shard time was behind the wall clock of the primary.
    pub(crate) fn set_lag_ms(&mut self, lag_ms: i64) {
        self.shard_clock.set_lag_ms(lag_ms);
    }

    /// Advances shard time to now. Where the newest entry is not known yet, or its age, because the journal is being replayed
    /// and another node leads, the reading is not kept: with a wrong wall clock it would be ahead of every later entry.
    fn advance_time(&mut self, shared: &Shared) -> ShardTime {
        let (now_ns, wall_ms) = (shared.clock.monotonic_ns(), shared.clock.wall_ms());
        let is_agreed = shared.is_time_agreed(now_ns, wall_ms);
        #[cfg(feature = "planted")]
        let is_agreed = is_agreed || crate::planted::is_on(crate::planted::Bug::UnconfirmedJump);
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::FrozenTime) && self.time_ms > wall_ms {
            return ShardTime { time_ms: self.time_ms, is_unconfirmed: false };
        }
        let mut shard_clock = self.shard_clock;
        let time = shard_clock.advance(self.time_ms, now_ns, wall_ms, is_agreed);
        if time.is_unconfirmed {
            shared.clock_unconfirmed.notify_one();
        }
        if self.epoch != -1 || self.shard_clock.is_continuous() {
            (self.time_ms, self.shard_clock) = (time.time_ms, shard_clock);
        }
        time
    }

    /// True if a new primary must not serve yet: the wall clock is far ahead of the journal, and no majority of the
    /// nodes' clocks has confirmed it. A TTL that is set before the jump would expire with it.
    pub(crate) fn waits_for_clock_majority(&mut self, shared: &Shared) -> bool {
        const TIMEOUT_NS: u64 = 3_000_000_000;
        if !self.advance_time(shared).is_unconfirmed {
            self.unconfirmed_since_ns = None;
            return false;
        }
        let now_ns = shared.clock.monotonic_ns();
        let since_ns = *self.unconfirmed_since_ns.get_or_insert(now_ns);
        now_ns.saturating_sub(since_ns) < TIMEOUT_NS
    }

    fn follow_settings(&mut self, shared: &Shared, now: i64) {
        let version = shared.settings.version.load(Ordering::Acquire);
        if self.settings_version != version {
            self.settings_version = version;
            self.events.notify = shared.settings.notify.load(Ordering::Relaxed);
            self.db.set_lfu(shared.settings.lfu(self.time_ms as u64));
        }
        self.db.set_access_clock((now / 1_000) as u32);
    }

    /// True if all shards of the node together are within the memory limit.
    pub(crate) fn has_room(&self, shared: &Shared, limit: u64) -> bool {
        self.memory.used_with(&shared.memory, self.db.memory()) <= limit
    }
}

/// A turn: the lock on a shard while the ready requests of one connection run.
pub struct Turn<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) shared: &'a Shared,
    pub(crate) state: MutexGuard<'a, State>,
    /// Shard time of this turn.
    pub now: i64,
    /// The journal accepted writes when this turn checked last.
    pub(crate) admitted: bool,
    /// The slot map view when the turn began.
    pub(crate) view: Guard<Arc<View>>,
    /// The command that ran last, if its name alone identifies it.
    pub(crate) resolved: Option<(&'static Spec, u16)>,
}

impl Turn<'_> {
    /// The journal end that commits everything so far.
    pub(crate) fn end(&self) -> i64 {
        self.state.end()
    }

    /// Blocks a client on keys.
    pub(crate) fn block(&mut self, session: &mut Session, block: Block) {
        let state = &mut *self.state;
        for key in &block.keys {
            if block.wake_on_delete {
                state.events.wake_on_delete(key);
            }
            let line = state.blocked.by_key.entry(key.clone()).or_default();
            if !line.contains(&session.id) {
                line.push_back(session.id);
            }
        }
        state.events.blocked += 1;
        let (mailbox, peer) = (Arc::clone(&session.mailbox), session.peer.clone());
        let waiting = BlockedClient { block, protocol: session.protocol, mailbox, peer };
        state.blocked.clients.insert(session.id, waiting);
    }

    /// Unblocks a client: it was answered, timed out or disconnected. Returns whether it was blocked.
    pub fn unblock(&mut self, client: u64) -> bool {
        self.state.unblock(client).is_some()
    }

    /// Answers a blocked client and unblocks it. Returns whether it was blocked.
    pub(crate) fn answer_blocked(&mut self, client: u64, write: impl FnOnce(&mut Encoder<'_>)) -> bool {
        let Some(waiting) = self.state.blocked.clients.get(&client) else { return false };
        let (protocol, mailbox) = (waiting.protocol, Arc::clone(&waiting.mailbox));
        let mut out = BytesMut::new();
        write(&mut Encoder::new(&mut out, protocol));
        self.unblock(client);
        mailbox.deliver_reply(out.freeze(), 0);
        true
    }

    /// Serves blocked clients whose keys are ready, first come, first served.
    pub(crate) fn serve_blocked(&mut self) {
        while !self.state.events.ready.is_empty() {
            for key in std::mem::take(&mut self.state.events.ready) {
                let line: Vec<u64> = self
                    .state
                    .blocked
                    .by_key
                    .get(&key)
                    .map_or_else(Vec::new, |line| line.iter().copied().collect());
                for client in line {
                    if self.state.db.contains(&key) || self.state.blocked.wakes_on_delete(client) {
                        self.resume(client);
                    }
                }
            }
        }
    }

    /// Executes the command of a blocked client again.
    fn resume(&mut self, client: u64) {
        let voided = self.shard.voided();
        let state = &mut *self.state;
        let Some(waiting) = state.blocked.clients.get(&client) else { return };
        let (command, protocol, mailbox) =
            (waiting.block.command.clone(), waiting.protocol, Arc::clone(&waiting.mailbox));
        let peer = waiting.peer.clone();
        let args = command.args();
        let Some(spec) = cmd::resolve(&args) else { return };
        let mut session = Session { peer, ..Session::internal() };
        (session.protocol, session.resumed, session.id) = (protocol, true, client);
        session.command = cmd::number_of(spec);
        let mut out = BytesMut::new();
        state.events.gate = 0;
        state.fx.mark();
        let mut ctx = Ctx {
            args,
            db: &mut state.db,
            now: self.now,
            out: Encoder::new(&mut out, protocol),
            fx: &mut state.fx,
            events: &mut state.events,
            session: &mut session,
            shared: self.shared,
            mode: Mode::Primary,
            nested: false,
            in_script: false,
            dirty: 0,
            rewritten: false,
        };
        ctx.run(spec);
        self.close_large();
        let gate = self.state.events.gate;
        if session.block.is_none() {
            self.unblock(client);
            mailbox.deliver_reply_under(out.freeze(), self.gate(gate), voided);
        }
    }

    /// The commit gate of a reply: 0 if the shard answers before the commit.
    pub(crate) fn gate(&self, gate: i64) -> i64 {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ReplyBeforeCommit) {
            return 0;
        }
        if self.shard.is_async.load(Ordering::Relaxed) { 0 } else { gate }
    }

    /// Ends the turn: appends its effects and releases the lock.
    pub fn finish(mut self) {
        self.append();
        if self.shard.is_task_idle.load(Ordering::Relaxed) && self.state.db.expiring() > 0 {
            self.shard.is_task_idle.store(false, Ordering::Relaxed);
            self.shard.task_wakeup.notify_one();
        }
        self.state.events.command_stats.counts.report(&self.shared.stats);
        let state = &mut *self.state;
        state.memory.report(&self.shared.memory, state.db.memory());
        let garbage = self.state.db.take_garbage();
        drop(self);
        drop(garbage);
    }
}

mod append;
pub(crate) mod keyspace_hash;
mod replay;
pub(crate) mod time;

#[cfg(test)]
mod tests;
