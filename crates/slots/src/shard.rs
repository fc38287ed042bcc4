//! A shard on this node: its keyspace, what has been done and not appended yet, and who waits for the journal.
//!
//! One lock, taken for a *turn*: all the requests that a connection has ready run under it, and what they did is appended
//! as one frame when the turn ends. Appending under the lock keeps the journal in the order of execution.
//!
//! Lock order: the shard's state, then the copy's (inside the log), then leaves (`waiters`, mailboxes). Whatever the log
//! tells the shard (committed, role) arrives through atomics and the keeper's mailbox, never by taking the state.
//!
//! Invariants: `applied` is the journal end that the keyspace corresponds to without the effects that wait in `fx`; an answer leaves only when `committed` has reached its gate.

mod blocked;
mod script_control;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::Guard;
use bytes::BytesMut;
use moim_base::Clock;
use moim_base::task::Shutdown;
use moim_wire_resp::{Batch, Encoder};
use parking_lot::{Mutex as StateMutex, MutexGuard};
use tokio::sync::Notify;

pub use self::blocked::Blocked;
use self::blocked::Waiting;
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
use crate::moves::{Moves, Parked};
use crate::session::{Block, Mailbox, Session};
use crate::shared::{Shared, lock};
use crate::snapshot::Loaded;

use self::check::Checks;
pub(crate) use self::replay::ReplayError;
use self::time::{Pace, Told};

/// What this node may do with a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// Reads its journal; answers nothing.
    Loading = 0,
    /// Leads: answers everything.
    Primary = 1,
    /// Follows: answers reads of those who said READONLY.
    Replica = 2,
}

/// No leader epoch.
const NO_EPOCH: i64 = -1;
/// How long a thread that serves others waits for the state, and when a task on its loop tries again.
const LOCK_SOON: Duration = Duration::from_millis(2);
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// One shard on this node.
pub struct Shard {
    /// Its number.
    pub index: u16,
    /// The id of this replica, as clients see it: forty hexadecimal digits.
    pub id: String,
    /// Its journal.
    pub log: Arc<dyn ShardLog>,
    /// Where its snapshots are, if it has any.
    folder: Option<PathBuf>,
    state: StateMutex<State>,
    committed: AtomicI64,
    role: AtomicU8,
    /// Answer before the commit, as Redis does.
    pub is_async: AtomicBool,
    /// Counts the times that answers in waiting became void.
    voided: AtomicU64,
    waiters: Vec<Waiters>,
    /// Messages for clients of other shards that wait for this journal.
    pub(crate) deferred: Arc<Deferred>,
    /// Scripts that run away from the loops: these must not wait for the lock then.
    pub scripts_away: AtomicUsize,
    /// A script has run for long; others hear BUSY.
    pub busy: AtomicBool,
    /// Set to end the running script.
    pub script_killed: AtomicBool,
    /// Whether the running script has written: then it cannot be ended.
    pub script_wrote: AtomicBool,
    /// Set to end the running script although it has written.
    pub script_abandoned: AtomicBool,
    /// The script that was stopped just now left effects that must not be appended. Looked at under the lock.
    pub(crate) discards_effects: AtomicBool,
    /// The script that runs away from the loops and has the lock. Others look here without it.
    pub(crate) running: Mutex<Option<Running>>,
    /// Until when this node may answer for the shard, and from when on, on the monotonic clock; see [`Shard::may_answer`].
    right_until_ms: AtomicU64,
    right_from_ms: AtomicU64,
    /// The newest leader epoch that was seen on record, the one that need not wait, and the one of this node's lead. A record can
    /// reach the driver first, so an epoch that was never looked at waits.
    seen_epoch: AtomicI64,
    free_epoch: AtomicI64,
    lead_epoch: AtomicI64,
    /// A snapshot is being written.
    pub(crate) is_snapshotting: AtomicBool,
    /// The journal could not be replayed: the replica takes no part until it is read anew.
    is_disabled: AtomicBool,
    /// How often the replicas are compared with the primary, in milliseconds.
    check_interval_ms: AtomicU64,
    /// Comparisons in which this replica differed from its primary.
    pub(crate) mismatches: AtomicU64,
    /// Slots that have come are about to be this shard's: whoever asks for them waits, although this node's view of the map
    /// does not say so yet. Others may see the new map before it does, and send their clients here.
    pub(crate) is_flipping: AtomicBool,
    /// Slots come or leave: a snapshot would show what is gone in a moment.
    pub(crate) is_moving: AtomicBool,
    /// Below this the journal is needed by a move that reads it.
    keep_from: AtomicI64,
    /// The lead for which the slot map has been read; see [`Shard::set_viewed`].
    viewed: AtomicI32,
    /// Given when the shard is not here any more: whatever serves it ends.
    pub gone: Shutdown,
    /// Wakes the keeper.
    pub news: Notify,
    /// The keeper looks seldom, because no key expires.
    pub(crate) at_rest: AtomicBool,
}

#[derive(Default)]
struct Waiters {
    list: Mutex<Vec<(i64, Arc<Mailbox>)>>,
    any: AtomicBool,
    notify: Notify,
}

/// What is behind the lock.
pub struct State {
    /// The keys.
    pub db: Keyspace,
    /// Done and not appended.
    pub fx: Effects,
    /// What was replayed of a batch that is not whole yet.
    pub(crate) groups: Groups,
    /// Comparing replicas with their primary.
    pub(crate) checks: Checks,
    /// Whom to tell.
    pub events: Events,
    /// The end of the journal that `db` without `fx` corresponds to.
    pub applied: i64,
    /// Shard time when it was last told: the time of the newest batch, or later.
    pub time_ms: i64,
    pace: Pace,
    /// Frames from this offset on were received since the shard was opened or last read anew: their age is known.
    live_from: i64,
    /// When a new primary began to wait for the other nodes' clocks.
    in_doubt_since_ns: Option<u64>,
    /// Who waits for which key.
    pub blocked: Blocked,
    /// Whose lead the keyspace is valid for; anything else has to be loaded anew.
    pub epoch: i32,
    /// Slots that come or leave.
    pub(crate) moves: Moves,
    /// Who waits for them.
    pub(crate) parked: Parked,
    settings_version: u64,
    /// What `db` takes, as the node knows it.
    pub(crate) memory: ShardMemory,
    /// What eviction remembers.
    pub(crate) evictor: Evictor,
    /// Belongs to whoever has a turn; kept, so that it is not allocated again.
    pub(crate) scratch: Scratch,
    /// Whether the newest snapshot was taken in.
    pub(crate) is_read: bool,
}

/// The requests of a pipeline and where their keys belong.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) batch: Batch,
    pub(crate) ids: Vec<KeyId>,
}

impl Shard {
    /// A shard whose journal has not been read.
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
            scripts_away: AtomicUsize::new(0),
            mismatches: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            is_snapshotting: AtomicBool::new(false),
            is_disabled: AtomicBool::new(false),
            check_interval_ms: AtomicU64::new(60_000),
            is_flipping: AtomicBool::new(false),
            is_moving: AtomicBool::new(false),
            script_killed: AtomicBool::new(false),
            script_wrote: AtomicBool::new(false),
            script_abandoned: AtomicBool::new(false),
            discards_effects: AtomicBool::new(false),
            running: Mutex::new(None),
            right_until_ms: AtomicU64::new(u64::MAX),
            right_from_ms: AtomicU64::new(0),
            seen_epoch: AtomicI64::new(NO_EPOCH),
            free_epoch: AtomicI64::new(NO_EPOCH),
            lead_epoch: AtomicI64::new(NO_EPOCH),
            keep_from: AtomicI64::new(i64::MAX),
            viewed: AtomicI32::new(i32::MAX),
            gone: Shutdown::new(),
            news: Notify::new(),
            at_rest: AtomicBool::new(false),
        })
    }

    /// What this node may do with it.
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

    /// Whether this node may speak for the shard: it holds the serving right, and nobody else can hold one any more.
    pub fn may_answer(&self, clock: &dyn Clock) -> bool {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ServePastRight) {
            return true;
        }
        let until = self.right_until_ms.load(Ordering::Acquire);
        if until == u64::MAX {
            return true;
        }
        let now = clock.monotonic_ms();
        let lead = self.lead_epoch.load(Ordering::Acquire);
        let is_free = lead != NO_EPOCH && lead == self.free_epoch.load(Ordering::Acquire);
        now < until && (is_free || now >= self.right_from_ms.load(Ordering::Acquire))
    }

    /// The right lasts until then.
    pub fn set_right(&self, until_ms: u64) {
        self.right_until_ms.store(until_ms, Ordering::Release);
    }

    /// This node leads in an epoch. Whoever led before may answer until then.
    pub fn set_right_from(&self, epoch: i32, from_ms: u64) {
        self.right_from_ms.store(from_ms, Ordering::Release);
        self.lead_epoch.store(i64::from(epoch), Ordering::Release);
    }

    /// A leader epoch is on record. `is_free`: nobody else can hold a right to answer in it. What was seen first counts: a record
    /// that says so later does so because the others left it, and they may still answer.
    pub fn on_epoch(&self, epoch: i32, is_free: bool) {
        let epoch = i64::from(epoch);
        if self.seen_epoch.swap(epoch, Ordering::AcqRel) != epoch {
            self.free_epoch.store(if is_free { epoch } else { NO_EPOCH }, Ordering::Release);
        }
    }

    /// The slot map was read after this node began to lead in `epoch`. A primary that went by an older map could serve
    /// slots that its shard gave away before; so nobody becomes one before.
    pub(crate) fn set_viewed(&self, epoch: i32) {
        if self.viewed.swap(epoch, Ordering::AcqRel) != epoch {
            self.news.notify_one();
        }
    }

    pub(crate) fn has_viewed(&self, epoch: i32) -> bool {
        let viewed = self.viewed.load(Ordering::Acquire);
        viewed == epoch || viewed == i32::MAX
    }

    /// The journal from here on is needed by a move; `i64::MAX` when none is.
    pub(crate) fn keep_from(&self, position: i64) {
        self.keep_from.store(position, Ordering::Release);
    }

    pub(crate) fn keeps_from(&self) -> i64 {
        self.keep_from.load(Ordering::Acquire)
    }

    /// The journal was cut at `end`, or begins anew there: what memory has beyond it is forgotten. May wait.
    pub(crate) fn on_cut(&self, end: i64) {
        self.void_answers();
        let mut state = self.lock();
        if state.applied > end {
            self.set_role(Role::Loading);
            state.forget();
        }
        drop(state);
        self.committed.fetch_min(end, Ordering::AcqRel);
        self.news.notify_one();
    }

    /// Where its snapshots are.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// How often the replicas are compared with the primary.
    pub fn set_check_interval(&self, ms: u64) {
        self.check_interval_ms.store(ms, Ordering::Relaxed);
    }

    /// The journal cannot be replayed: nothing is answered from memory any more, and this replica is not to lead.
    pub(crate) fn disable(&self, offset: i64, error: &dyn std::fmt::Display) {
        self.is_disabled.store(true, Ordering::Release);
        self.set_role(Role::Loading);
        self.void_answers();
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

    /// The copy begins anew, empty.
    pub(crate) fn enable(&self) {
        self.is_disabled.store(false, Ordering::Release);
    }

    /// A snapshot takes the place of the keyspace.
    pub(crate) fn install(&self, loaded: Loaded) {
        self.is_disabled.store(false, Ordering::Release);
        self.void_answers();
        self.set_role(Role::Loading);
        let mut state = self.lock();
        state.forget();
        self.committed.store(loaded.end, Ordering::Release);
        state.take_in(loaded);
        drop(state);
        self.news.notify_one();
    }

    /// Everything below is committed.
    pub fn committed(&self) -> i64 {
        self.committed.load(Ordering::Acquire)
    }

    /// How often waiting answers became void.
    pub fn voided(&self) -> u64 {
        self.voided.load(Ordering::Acquire)
    }

    /// Answers that wait will never leave: their changes may be lost.
    pub(crate) fn void_answers(&self) {
        self.voided.fetch_add(1, Ordering::AcqRel);
        self.deferred.news.notify_one();
        self.wake_all();
    }

    /// The journal is committed up to here. Called by whoever the log reports to; takes no lock but leaves.
    pub fn on_committed(&self, end: i64) {
        if self.committed.fetch_max(end, Ordering::AcqRel) < end {
            for waiters in &self.waiters {
                if waiters.any.load(Ordering::Acquire) {
                    waiters.notify.notify_one();
                }
            }
            if self.deferred.any() {
                self.deferred.news.notify_one();
            }
            match self.role() {
                Role::Replica => self.news.notify_one(),
                Role::Primary | Role::Loading => self.log.journal().set_wanted_from(end),
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

    /// Has the connection woken when the journal is committed up to `gate`.
    pub fn wait_for(&self, on_loop: usize, gate: i64, mailbox: &Arc<Mailbox>) {
        let waiters = &self.waiters[on_loop % self.waiters.len()];
        lock(&waiters.list).push((gate, Arc::clone(mailbox)));
        waiters.any.store(true, Ordering::Release);
        if self.committed() >= gate {
            waiters.notify.notify_one();
        }
    }

    /// Waits for commits and wakes the connections of a loop that wait for them. One task per loop, so that the thread
    /// that commits wakes each loop once and not every connection.
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

    /// The state, however long that takes. Not on an event loop: a script may hold it until it is killed.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The state, unless a script holds it for longer than a moment.
    pub(crate) fn lock_soon(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock_for(LOCK_SOON)
    }

    /// The state, for a task on an event loop: while a script holds it, the loop serves its other clients.
    pub(crate) async fn lock_on_loop(&self) -> MutexGuard<'_, State> {
        loop {
            if let Some(state) = self.lock_soon() {
                return state;
            }
            tokio::time::sleep(LOCK_RETRY).await;
        }
    }

    /// Runs `look` on the state, once a script that may hold it has released it.
    pub(crate) async fn look<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut *self.lock_on_loop().await)
    }

    /// The state, if it is not locked.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// True if a script that runs off the event loops holds the state or waits for it, or one has held it for longer than
    /// `busy-reply-threshold`.
    fn is_held_by_script(&self) -> bool {
        self.busy.load(Ordering::Acquire) || self.scripts_away.load(Ordering::Acquire) > 0
    }

    /// Takes the lock for a turn. `None` while a script holds it.
    ///
    /// An event loop never waits for a script. A script can take the lock between the check and the wait (it leaves its loop
    /// and locks again before a waiting thread has woken up), so the wait is bounded and the check repeated: a loop that waited
    /// on could not be reached by SCRIPT KILL.
    pub fn turn<'a>(&'a self, shared: &'a Shared) -> Option<Turn<'a>> {
        let state = loop {
            if self.is_held_by_script() {
                break self.state.try_lock()?;
            }
            if let Some(state) = self.state.try_lock_for(LOCK_SOON) {
                break state;
            }
        };
        Some(self.turn_with(shared, state))
    }

    /// Takes the lock for a turn, however long that takes. Not for the loops.
    pub(crate) fn turn_away<'a>(&'a self, shared: &'a Shared) -> Turn<'a> {
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
    /// Nothing has been read.
    pub(crate) fn empty() -> Self {
        Self {
            db: Keyspace::new(fastrand::u64(..)),
            fx: Effects::default(),
            groups: Groups::default(),
            checks: Checks::default(),
            events: Events::default(),
            applied: 0,
            time_ms: 0,
            pace: Pace::default(),
            live_from: 0,
            in_doubt_since_ns: None,
            blocked: Blocked::default(),
            epoch: -1,
            moves: Moves::default(),
            parked: Parked::default(),
            settings_version: 0,
            memory: ShardMemory::default(),
            evictor: Evictor::default(),
            scratch: Scratch::default(),
            is_read: false,
        }
    }

    /// Throws the keyspace away: it is read anew.
    pub(crate) fn forget(&mut self) {
        self.set_moves(Moves::default());
        self.events.invalidate_watches(|_| true);
        self.db = Keyspace::new(fastrand::u64(..));
        self.is_read = false;
        self.live_from = self.live_from.max(self.applied);
        self.applied = 0;
        self.time_ms = 0;
        self.pace = Pace::default();
        self.epoch = -1;
        self.fx.clear();
        self.groups.discard();
        self.checks.forget();
        self.events.hazards.reset();
        self.events.ready.clear();
        self.events.all_invalid = self.events.tracked;
        self.evictor = Evictor::default();
        self.release_blocked();
    }

    /// Clients that wait for keys hear that this node cannot give them any more.
    pub(crate) fn release_blocked(&mut self) {
        let on_keys = self.blocked.clients.iter().filter(|(_, waiting)| waiting.block.on_keys);
        let clients: Vec<u64> = on_keys.map(|(client, _)| *client).collect();
        for waiting in clients.iter().filter_map(|client| self.unblock(*client)) {
            let mut out = BytesMut::new();
            Encoder::new(&mut out, waiting.protocol).error(
                "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
            );
            waiting.mailbox.answer(out.freeze(), 0);
        }
        self.blocked.by_key.clear();
        self.parked.wake();
    }

    /// A client waits no more.
    fn unblock(&mut self, client: u64) -> Option<Waiting> {
        let waiting = self.blocked.remove(client)?;
        self.events.blocked -= 1;
        if waiting.block.on_gone {
            waiting.block.keys.iter().for_each(|key| self.events.unmind(key));
        }
        Some(waiting)
    }

    /// Clients that wait for keys of slots which have left hear where they went.
    pub(crate) fn redirect_blocked(&mut self, moved: impl Fn(&[u8]) -> Option<Error>) {
        let of = |(client, waiting): (&u64, &Waiting)| {
            let error = waiting.block.keys.iter().find_map(|key| moved(key))?;
            waiting.block.on_keys.then_some((*client, error))
        };
        let clients: Vec<(u64, Error)> = self.blocked.clients.iter().filter_map(of).collect();
        for (client, error) in clients {
            let Some(waiting) = self.unblock(client) else { continue };
            let mut out = BytesMut::new();
            Encoder::new(&mut out, waiting.protocol).error(error.0.as_bytes());
            waiting.mailbox.answer(out.freeze(), 0);
        }
    }

    /// The keyspace is what a snapshot says.
    pub(crate) fn take_in(&mut self, loaded: Loaded) {
        self.db = loaded.db;
        self.set_moves(loaded.moves);
        self.events.invalidate_watches(|_| true);
        (self.applied, self.time_ms, self.is_read) = (loaded.end, loaded.time_ms, true);
        self.pace = Pace::default();
        self.groups.discard();
    }

    /// Shard time now.
    fn advance_time(&mut self, shared: &Shared) -> Told {
        let (now_ns, wall_ms) = (shared.clock.monotonic_ns(), shared.clock.wall_ms());
        let is_agreed = shared.is_time_agreed(now_ns, wall_ms);
        #[cfg(feature = "planted")]
        let is_agreed = is_agreed || crate::planted::is_on(crate::planted::Bug::UnconfirmedJump);
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::FrozenTime) && self.time_ms > wall_ms {
            return Told { time_ms: self.time_ms, is_in_doubt: false };
        }
        let told = self.pace.advance(self.time_ms, now_ns, wall_ms, is_agreed);
        if told.is_in_doubt {
            shared.time_doubt.notify_one();
        }
        self.time_ms = told.time_ms;
        told
    }

    /// Whether a new primary waits before it serves: the wall clock is far ahead of the journal, and the other nodes have not
    /// said yet whether it is right. A time to live that is set before the jump would end with it.
    pub(crate) fn waits_for_time(&mut self, shared: &Shared) -> bool {
        const PATIENCE_NS: u64 = 3_000_000_000;
        if !self.advance_time(shared).is_in_doubt {
            self.in_doubt_since_ns = None;
            return false;
        }
        let now_ns = shared.clock.monotonic_ns();
        let since_ns = *self.in_doubt_since_ns.get_or_insert(now_ns);
        now_ns.saturating_sub(since_ns) < PATIENCE_NS
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

    /// Whether all shards of the node together are within a limit.
    pub(crate) fn has_room(&self, shared: &Shared, limit: u64) -> bool {
        self.memory.used_with(&shared.memory, self.db.memory()) <= limit
    }
}

/// The lock on a shard, for the requests that are ready.
pub struct Turn<'a> {
    pub(crate) shard: &'a Shard,
    pub(crate) shared: &'a Shared,
    pub(crate) state: MutexGuard<'a, State>,
    /// The time of this turn.
    pub now: i64,
    /// The journal takes writes, as far as this turn knows.
    pub(crate) admitted: bool,
    /// The slots as they were when the turn began.
    pub(crate) view: Guard<Arc<View>>,
    /// The command that ran last, if a name alone says which it is.
    pub(crate) resolved: Option<(&'static Spec, u16)>,
}

impl Turn<'_> {
    /// The journal end that commits everything so far.
    pub(crate) fn end(&self) -> i64 {
        self.state.end()
    }

    /// Makes a client wait for keys.
    pub(crate) fn block(&mut self, session: &mut Session, block: Block) {
        let state = &mut *self.state;
        for key in &block.keys {
            if block.on_gone {
                state.events.mind(key);
            }
            let line = state.blocked.by_key.entry(key.clone()).or_default();
            if !line.contains(&session.id) {
                line.push_back(session.id);
            }
        }
        state.events.blocked += 1;
        let (mailbox, peer) = (Arc::clone(&session.mailbox), session.peer.clone());
        let waiting = Waiting { block, protocol: session.protocol, mailbox, peer };
        state.blocked.clients.insert(session.id, waiting);
    }

    /// A client waits no more: it was answered, its time ran out, or it is gone. Answers whether it did.
    pub fn unblock(&mut self, client: u64) -> bool {
        self.state.unblock(client).is_some()
    }

    /// Answers a client that waits for keys, and lets it go. Answers whether it waited.
    pub(crate) fn answer_blocked(&mut self, client: u64, write: impl FnOnce(&mut Encoder<'_>)) -> bool {
        let Some(waiting) = self.state.blocked.clients.get(&client) else { return false };
        let (protocol, mailbox) = (waiting.protocol, Arc::clone(&waiting.mailbox));
        let mut out = BytesMut::new();
        write(&mut Encoder::new(&mut out, protocol));
        self.unblock(client);
        mailbox.answer(out.freeze(), 0);
        true
    }

    /// Lets clients that wait for keys have what is ready now, first come, first served.
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
                    if self.state.db.contains(&key) || self.state.blocked.minds_gone(client) {
                        self.resume(client);
                    }
                }
            }
        }
    }

    /// Runs the command of a client that waits once more.
    fn resume(&mut self, client: u64) {
        let voided = self.shard.voided();
        let state = &mut *self.state;
        let Some(waiting) = state.blocked.clients.get(&client) else { return };
        let (command, protocol, mailbox) =
            (waiting.block.command.clone(), waiting.protocol, Arc::clone(&waiting.mailbox));
        let peer = waiting.peer.clone();
        let args = command.args();
        let Some(spec) = cmd::resolve(&args) else { return };
        let mut session = Session { peer, ..Session::nobody() };
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
            mailbox.answer_under(out.freeze(), self.gate(gate), voided);
        }
    }

    /// What an answer waits for: nothing where the shard was told not to wait.
    pub(crate) fn gate(&self, gate: i64) -> i64 {
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ReplyBeforeCommit) {
            return 0;
        }
        if self.shard.is_async.load(Ordering::Relaxed) { 0 } else { gate }
    }

    /// Ends the turn: appends, and gives the lock back.
    pub fn finish(mut self) {
        self.append();
        if self.shard.at_rest.load(Ordering::Relaxed) && self.state.db.expiring() > 0 {
            self.shard.at_rest.store(false, Ordering::Relaxed);
            self.shard.news.notify_one();
        }
        self.state.events.tallies.counts.report(&self.shared.stats);
        let state = &mut *self.state;
        state.memory.report(&self.shared.memory, state.db.memory());
        let garbage = self.state.db.take_garbage();
        drop(self);
        drop(garbage);
    }
}

mod append;
pub(crate) mod check;
mod replay;
pub(crate) mod time;

#[cfg(test)]
mod tests;
