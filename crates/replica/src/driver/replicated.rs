//! One replica of a partition on this node: the state machine, its journal, its owner, and the followers that fetch
//! from it.
//!
//! Every call of one replica happens under its lock, and its effects are carried out before the next call. Truncation
//! and snapshot install block on the disk, so they run elsewhere: the replica is *changing* meanwhile, and inputs
//! wait (records) or are refused (fetches, appends).
//!
//! Invariants:
//! - `leads` is cleared before a formerly led log is truncated: a reader for a follower checks it after the read;
//! - nothing is appended unless the replica leads, in a call of [`Replicated::lead`], or follows and expects the
//!   answer.
//!
//! Lock order: the replica, then its owner's own lock, then the lists of connections. Never the other way round.

mod answer;
mod log;
mod repair;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use moim_base::{BrokerId, LeaderEpoch, Offset};
use moim_journal::{AppendError, Journal};

pub(super) use self::answer::{ChunkAnswer, Records, Span};
use self::log::Change;
use super::inbound::Inbound;
use super::owner::Owner;
use super::{Shared, lock};
use crate::acks::AckError;
use crate::controller::LogEnd;
use crate::follower::{Follower, ResetPolicy};
use crate::leader::Outcome;
use crate::log::{JournalView, LogView};
use crate::machine::{Chunk, Snapshot, SnapshotFetch};
use crate::message::{Answer, Fetch, Refusal, Report};
use crate::replica::{Effect, Replica, Role};
use crate::state::PartitionState;
use crate::types::{Durability, PartitionId, Versioned};

/// One replica of a partition.
pub struct Replicated {
    id: PartitionId,
    journal: Arc<Journal>,
    policy: ResetPolicy,
    shared: Arc<Shared>,
    /// The leader epoch while it leads, -1 otherwise.
    leads: AtomicI32,
    /// The leader that it follows, -1 otherwise.
    follows: AtomicI32,
    has_committed_in_epoch: AtomicBool,
    high_watermark: AtomicI64,
    /// On the list of replicas whose durable end has advanced.
    advanced: AtomicBool,
    /// A reassignment adds this replica, and it is not in sync yet.
    arriving: AtomicBool,
    /// The member record lists it as damaged.
    damage_registered: AtomicBool,
    /// It was damaged and reset, and has not reached the leader's high watermark yet.
    repairing: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// `None` once the replica is detached.
    owner: Option<Arc<dyn Owner>>,
    /// `None` before the node has a run.
    replica: Option<Replica>,
    /// The newest record seen.
    record: Option<Versioned<PartitionState>>,
    durability: Durability,
    /// The log is being truncated or reset.
    changing: bool,
    /// On the tick list.
    ticking: bool,
    /// The log start that a task is moving to.
    starting: Option<Offset>,
    subscribers: Vec<Subscriber>,
    /// The snapshot sent to reset followers, and the time of its last request.
    snapshot: Option<(Snapshot, u64)>,
}

/// A follower's connection that has this partition in its session.
struct Subscriber {
    inbound: Arc<Inbound>,
    slot: u32,
    /// The fetch that waits for something to read.
    parked: Option<Parked>,
    /// The log start that the last answer carried: a fetch that could carry a newer one is not parked.
    sent_log_start: Option<Offset>,
    /// On the connection's list of slots to serve.
    queued: bool,
    /// On the connection's list of high watermarks to send.
    advanced_watermark: bool,
}

impl Subscriber {
    /// True if an answer contains anything new for this follower; records it as sent.
    fn has_new_data(&mut self, answer: &Answer, offset: Offset) -> bool {
        let Answer::Records { log_end, log_start, .. } = answer else { return true };
        let log_start_changed = self.sent_log_start.replace(*log_start) != Some(*log_start);
        *log_end > offset || log_start_changed
    }
}

#[derive(Clone, Copy)]
struct Parked {
    id: u64,
    epoch: LeaderEpoch,
    offset: Offset,
}

/// The answer to a fetch, before its records are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    pub(super) id: u64,
    pub(super) epoch: LeaderEpoch,
    pub(super) offset: Offset,
    pub(super) answer: Result<Answer, Refusal>,
}

/// The role of a replica, for comparison.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RoleView {
    Idle,
    Leads(LeaderEpoch),
    Follows(BrokerId, LeaderEpoch),
}

impl RoleView {
    fn of(replica: &Replica) -> Self {
        match replica.role() {
            Role::Idle => Self::Idle,
            Role::Leader(leader) => Self::Leads(leader.epoch()),
            Role::Follower(follower) => {
                let (leader, epoch) = follower.leader();
                Self::Follows(leader, epoch)
            }
        }
    }
}

/// How long a snapshot is kept for its next chunk.
const SNAPSHOT_KEPT_MS: u64 = 30_000;

impl Replicated {
    pub(super) fn new(
        id: PartitionId,
        journal: Arc<Journal>,
        policy: ResetPolicy,
        durability: Durability,
        owner: Arc<dyn Owner>,
        shared: Arc<Shared>,
    ) -> Self {
        Self {
            id,
            high_watermark: AtomicI64::new(journal.start()),
            journal,
            policy,
            shared,
            leads: AtomicI32::new(-1),
            follows: AtomicI32::new(-1),
            has_committed_in_epoch: AtomicBool::new(false),
            advanced: AtomicBool::new(false),
            arriving: AtomicBool::new(false),
            damage_registered: AtomicBool::new(false),
            repairing: AtomicBool::new(false),
            state: Mutex::new(State {
                owner: Some(owner),
                replica: None,
                record: None,
                durability,
                changing: false,
                ticking: false,
                starting: None,
                subscribers: Vec::new(),
                snapshot: None,
            }),
        }
    }

    /// The partition id.
    pub fn id(&self) -> PartitionId {
        self.id
    }

    /// Its journal.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// The high watermark: everything below is committed. Does not lock.
    pub fn high_watermark(&self) -> Offset {
        Offset(self.high_watermark.load(Ordering::Acquire))
    }

    /// The leader epoch, while this replica leads. Does not lock.
    pub fn leader_epoch(&self) -> Option<LeaderEpoch> {
        Some(LeaderEpoch(self.leads.load(Ordering::Acquire))).filter(|epoch| epoch.0 >= 0)
    }

    /// The leader, while this replica follows one. Does not lock.
    pub fn leader(&self) -> Option<BrokerId> {
        Some(BrokerId(self.follows.load(Ordering::Acquire))).filter(|node| node.0 >= 0)
    }

    /// True if it leads and its high watermark has reached the start of its leader epoch: before that it must not
    /// report the committed end (OFFSET_NOT_AVAILABLE). Does not lock.
    pub fn has_committed_in_epoch(&self) -> bool {
        self.has_committed_in_epoch.load(Ordering::Acquire)
    }

    /// The newest record seen.
    pub fn record(&self) -> Option<Versioned<PartitionState>> {
        self.locked().record.clone()
    }

    /// A follower's known (written, durable) offsets, while this replica leads.
    pub fn progress_of(&self, node: BrokerId) -> Option<(Offset, Offset)> {
        let mut state = self.locked();
        state.replica.as_mut()?.leader()?.progress_of(node)
    }

    /// Appends as the leader. `append` runs under the replica's lock, so that its role cannot change meanwhile; it
    /// appends to the journal with the given epoch, and may take the owner's lock. Parked fetches are woken.
    ///
    /// `acks_all`: refused if the in-sync set is below the topic's minimum.
    pub fn lead<T>(
        self: &Arc<Self>,
        acks_all: bool,
        append: impl FnOnce(LeaderEpoch) -> T,
    ) -> Result<T, AckError> {
        if self.leader_epoch().is_none() {
            return Err(AckError::NotLeader);
        }
        let mut state = self.locked();
        let state = &mut *state;
        let leader = state.replica.as_mut().and_then(Replica::leader).ok_or(AckError::NotLeader)?;
        if acks_all {
            leader.admit()?;
        }
        let (epoch, before) = (leader.epoch(), self.journal.end());
        let appended = append(epoch);
        if self.journal.end() > before {
            self.on_appended(state);
        }
        Ok(appended)
    }

    /// Admits an append with acks=all, or returns the error it would get.
    pub fn admit(&self) -> Result<(), AckError> {
        let mut state = self.locked();
        state.replica.as_mut().and_then(Replica::leader).ok_or(AckError::NotLeader)?.admit()
    }

    /// The journal's durable end has advanced. May be called from any thread, also redundantly.
    pub fn on_durable(self: &Arc<Self>) {
        let mut state = self.locked();
        self.step(&mut state, |replica, log, _, effects| replica.on_durable(log, effects));
    }

    /// The log start was advanced on request: followers must learn of it now and not with the next record.
    pub fn on_log_start(&self) {
        wake(&mut self.locked().subscribers);
    }

    /// Waits until the low watermark reaches `start`, and returns it. An error if this replica does not lead, or no
    /// longer does.
    pub async fn gone_everywhere(&self, start: Offset) -> Result<Offset, AckError> {
        loop {
            // Registered before the check, so that no notification is missed between the two.
            let mut moved = std::pin::pin!(self.shared.low_watermarks.notified());
            moved.as_mut().enable();
            let low = self.low_watermark().ok_or(AckError::NotLeader)?;
            if low >= start {
                return Ok(low);
            }
            moved.await;
        }
    }

    /// The low watermark (the least log start of the in-sync set), while this replica leads.
    pub fn low_watermark(&self) -> Option<Offset> {
        let mut state = self.locked();
        let leader = state.replica.as_mut()?.leader()?;
        Some(leader.low_watermark(Offset(self.journal.start())))
    }

    /// True if a reassignment adds this replica and it is not in sync yet. Does not lock.
    pub(super) fn is_arriving(&self) -> bool {
        self.arriving.load(Ordering::Acquire)
    }

    /// The same for another node's replica, according to the newest record here.
    pub(super) fn is_arriving_at(&self, node: BrokerId) -> bool {
        self.locked().record.as_ref().is_some_and(|record| record.value.is_arriving(node))
    }

    /// Returns whether it is new on the list of replicas whose durable end has advanced.
    pub(super) fn note_advanced(&self) -> bool {
        !self.advanced.swap(true, Ordering::AcqRel)
    }

    /// Removes it from that list and processes the advance.
    pub(super) fn on_advanced(self: &Arc<Self>) {
        self.advanced.store(false, Ordering::Release);
        self.on_durable();
    }

    /// The topic's durability has changed, and the journal's options with it. Written to the record when that is
    /// safe.
    pub fn set_durability(self: &Arc<Self>, durability: Durability) {
        let mut state = self.locked();
        state.durability = durability;
        self.step(&mut state, |replica, _, now_ms, effects| {
            if let Some(leader) = replica.leader() {
                leader.want_durability(durability, now_ms, effects);
            }
        });
    }

    /// The log end, for a controller that must compare logs for an election.
    pub fn log_end(&self) -> LogEnd {
        let view = JournalView { journal: &self.journal, durability: Durability::Fsync };
        LogEnd { epoch: view.last_epoch().unwrap_or_default(), end: view.end() }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn on_appended(self: &Arc<Self>, state: &mut State) {
        let end = Offset(self.journal.end());
        if let Some(leader) = state.replica.as_mut().and_then(Replica::leader) {
            for subscriber in state.subscribers.iter().filter(|subscriber| subscriber.parked.is_some()) {
                // Its fetch was parked for exactly this append: until the connection was last heard it had the whole
                // log.
                leader.on_alive(subscriber.inbound.from().node, subscriber.inbound.heard_ms());
            }
            leader.on_append(end);
        }
        wake(&mut state.subscribers);
        if self.journal.durable_end() >= end.0 {
            self.step(state, |replica, log, _, effects| replica.on_durable(log, effects));
        } else {
            self.maybe_schedule_tick(state);
        }
    }

    // Inputs from the driver for this replica.

    pub(super) fn on_record(self: &Arc<Self>, record: Versioned<PartitionState>) {
        let mut state = self.locked();
        if state.record.as_ref().is_some_and(|known| known.revision >= record.revision) {
            return;
        }
        self.arriving.store(record.value.is_arriving(self.shared.node), Ordering::Release);
        state.record = Some(record.clone());
        self.step(&mut state, |replica, log, now_ms, effects| {
            replica.on_record(record, log, now_ms, effects);
        });
    }

    pub(super) fn on_deleted(self: &Arc<Self>) {
        let mut state = self.locked();
        state.record = None;
        self.step(&mut state, |replica, _, _, effects| replica.become_idle(effects));
    }

    /// The node registered: roles start anew, from the records that name this run.
    pub(super) fn on_run(self: &Arc<Self>) {
        let mut state = self.locked();
        self.start_run(&mut state);
    }

    fn start_run(self: &Arc<Self>, state: &mut State) {
        let Some(run) = self.shared.run() else { return };
        if state.changing || state.replica.as_ref().is_some_and(|replica| replica.me() == run) {
            return;
        }
        self.step(state, |replica, _, _, effects| replica.become_idle(effects));
        let replica = Replica::new(run, self.id, self.policy, self.high_watermark());
        state.replica = Some(replica.tuned(self.shared.tuning.leader, self.shared.tuning.follower));
        if let Some(record) = state.record.clone() {
            self.step(state, |replica, log, now_ms, effects| {
                replica.on_record(record, log, now_ms, effects);
            });
        }
    }

    pub(super) fn detach(self: &Arc<Self>) {
        let mut state = self.locked();
        state.owner = None;
        self.step(&mut state, |replica, _, _, effects| replica.become_idle(effects));
        state.replica = None;
        state.record = None;
        state.snapshot = None;
        wake(&mut state.subscribers);
    }

    /// Returns whether it must be ticked again.
    pub(super) fn on_tick(self: &Arc<Self>) -> bool {
        let mut state = self.locked();
        if state.snapshot.as_ref().is_some_and(|(_, used)| self.shared.now_ms() > used + SNAPSHOT_KEPT_MS) {
            state.snapshot = None;
        }
        // Still on the list while it is stepped, so that it is not added a second time.
        self.step(&mut state, |replica, log, now_ms, effects| replica.on_tick(log, now_ms, effects));
        state.ticking = needs_tick(&state);
        state.ticking
    }

    pub(super) fn on_outcome(self: &Arc<Self>, proposal: u64, outcome: Outcome) {
        let mut state = self.locked();
        self.step(&mut state, |replica, _, now_ms, effects| {
            replica.on_outcome(proposal, outcome, now_ms, effects);
        });
    }

    // Follower side.

    /// The leader is reachable, perhaps again: every earlier request to it is void.
    pub(super) fn on_connected(self: &Arc<Self>) {
        let mut state = self.locked();
        self.step(&mut state, |replica, log, now_ms, effects| {
            if let Some(follower) = replica.follower() {
                follower.on_connected(log, now_ms, effects);
            }
        });
    }

    /// The answer to a fetch, with its records.
    pub(super) fn on_answer(
        self: &Arc<Self>,
        fetch: u64,
        epoch: LeaderEpoch,
        answer: Result<Answer, Refusal>,
        records: &Records,
    ) {
        let frames = match self.check(epoch, &answer, records) {
            Ok(frames) => frames,
            Err(why) => {
                tracing::warn!(partition = %self.id, why, "invalid fetch response from leader");
                return self.on_failed(fetch);
            }
        };
        let mut state = self.locked();
        let state = &mut *state;
        if state.changing {
            return;
        }
        let follower = state.replica.as_mut().and_then(Replica::follower);
        let awaits = |follower: &&mut Follower| follower.leader().1 == epoch && follower.accepts(fetch);
        let Some(leader) = follower.filter(awaits).map(|follower| follower.leader().0) else { return };
        if answer.is_ok()
            && let Err(error) = self.append(state.owner.as_deref(), &frames, records)
        {
            tracing::debug!(partition = %self.id, %error, "append of fetched records failed");
            if matches!(error, AppendError::Full) {
                // Commits must not wait for a full disk: the leader learns that no replica follows here for now.
                self.shared.outbound(leader).forget(self.id);
            }
            self.step(state, |replica, _, now_ms, _| {
                if let Some(follower) = replica.follower() {
                    follower.on_failed(fetch, now_ms);
                }
            });
            return;
        }
        if let Ok(answer) = &answer {
            self.maybe_end_repair(answer);
        }
        self.step(state, |replica, log, now_ms, effects| {
            let Some(follower) = replica.follower() else { return };
            match answer {
                Ok(answer) => follower.on_answer(fetch, answer, log, now_ms, effects),
                Err(refusal) => follower.on_refused(fetch, refusal, now_ms, effects),
            }
        });
    }

    pub(super) fn on_failed(self: &Arc<Self>, fetch: u64) {
        let mut state = self.locked();
        self.step(&mut state, |replica, _, now_ms, _| {
            if let Some(follower) = replica.follower() {
                follower.on_failed(fetch, now_ms);
            }
        });
    }

    /// The leader's high watermark, sent beside its answers.
    pub(super) fn on_leader_high_watermark(self: &Arc<Self>, epoch: LeaderEpoch, high_watermark: Offset) {
        let mut state = self.locked();
        self.step(&mut state, |replica, log, _, effects| {
            if let Some(follower) = replica.follower() {
                follower.on_high_watermark(epoch, high_watermark, log, effects);
            }
        });
    }

    pub(super) fn on_chunk(self: &Arc<Self>, epoch: LeaderEpoch, chunk: Option<Chunk>) {
        let mut state = self.locked();
        self.step(&mut state, |replica, _, now_ms, effects| {
            let Some(follower) = replica.follower().filter(|follower| follower.leader().1 == epoch) else {
                return;
            };
            // Without one, the next tick asks again.
            if let Some(chunk) = chunk {
                follower.on_chunk(chunk, now_ms, effects);
            }
        });
    }

    // Leader side.

    /// A follower's fetch. `None` if it is parked here until there is something to read.
    pub(super) fn on_fetch(
        self: &Arc<Self>,
        inbound: &Arc<Inbound>,
        slot: u32,
        id: u64,
        fetch: &Fetch,
    ) -> Option<Reply> {
        let mut state = self.locked();
        let state = &mut *state;
        let mut answer = Err(Refusal::NotLeader);
        self.step(state, |replica, log, now_ms, effects| {
            answer = replica.on_fetch(fetch, log, now_ms, effects);
        });
        let reply = Reply { id, epoch: fetch.leader_epoch, offset: fetch.offset, answer };
        let known = state.subscribers.iter_mut().find(|one| one.slot == slot && one.inbound.is(inbound));
        let subscriber = match (known, answer.is_ok()) {
            (Some(known), _) => known,
            (None, false) => return Some(reply),
            (None, true) => {
                let inbound = Arc::clone(inbound);
                let new = Subscriber {
                    inbound,
                    slot,
                    parked: None,
                    sent_log_start: None,
                    queued: false,
                    advanced_watermark: false,
                };
                state.subscribers.push(new);
                state.subscribers.last_mut()?
            }
        };
        match answer {
            Ok(answer) if !subscriber.has_new_data(&answer, fetch.offset) => {
                subscriber.parked = Some(Parked { id, epoch: fetch.leader_epoch, offset: fetch.offset });
                None
            }
            _ => {
                subscriber.parked = None;
                Some(reply)
            }
        }
    }

    /// A parked fetch has something to read.
    pub(super) fn on_ready(self: &Arc<Self>, inbound: &Inbound, slot: u32) -> Option<Reply> {
        let mut state = self.locked();
        let state = &mut *state;
        let subscriber =
            state.subscribers.iter_mut().find(|one| one.slot == slot && one.inbound.is(inbound))?;
        subscriber.queued = false;
        let parked = subscriber.parked.take()?;
        let view = JournalView { journal: &self.journal, durability: state.durability };
        let answer = match state.replica.as_mut().and_then(Replica::leader) {
            Some(leader) => leader.answer_parked(parked.epoch, &view),
            None => Err(Refusal::NotLeader),
        };
        if matches!(&answer, Ok(answer) if !subscriber.has_new_data(answer, parked.offset)) {
            subscriber.parked = Some(parked);
            return None;
        }
        Some(Reply { id: parked.id, epoch: parked.epoch, offset: parked.offset, answer })
    }

    /// The high watermark to send to a follower, and its leader epoch.
    pub(super) fn pending_high_watermark(
        &self,
        inbound: &Inbound,
        slot: u32,
    ) -> Option<(LeaderEpoch, Offset)> {
        let mut state = self.locked();
        let subscriber =
            state.subscribers.iter_mut().find(|one| one.slot == slot && one.inbound.is(inbound))?;
        subscriber.advanced_watermark = false;
        let leader = state.replica.as_mut()?.leader()?;
        Some((leader.epoch(), leader.high_watermark()))
    }

    pub(super) fn on_report(self: &Arc<Self>, report: &Report) {
        let mut state = self.locked();
        self.step(&mut state, |replica, _, now_ms, effects| {
            // A refused report is equivalent to a lost one: the next fetch carries the same offsets.
            let _ = replica.on_report(report, now_ms, effects);
        });
    }

    /// A follower's connection has ended. `gone`: and there is no newer one.
    pub(super) fn on_unsubscribed(self: &Arc<Self>, inbound: &Inbound, gone: bool) {
        let mut state = self.locked();
        state.subscribers.retain(|subscriber| !subscriber.inbound.is(inbound));
        if gone {
            self.step(&mut state, |replica, _, now_ms, _| {
                if let Some(leader) = replica.leader() {
                    leader.on_disconnected(inbound.from().node, now_ms);
                }
            });
        }
    }

    /// The next snapshot chunk. `fresh` is a snapshot that was just taken. The answer says whether one must be taken
    /// first.
    pub(super) fn chunk(
        self: &Arc<Self>,
        fetch: &SnapshotFetch,
        fresh: Option<Snapshot>,
        max_bytes: usize,
    ) -> ChunkAnswer {
        let mut state = self.locked();
        let now_ms = self.shared.now_ms();
        let leads = state.replica.as_mut().and_then(Replica::leader).map(|leader| leader.epoch());
        if leads != Some(fetch.leader_epoch) {
            return ChunkAnswer::None;
        }
        let taken = fresh.is_some();
        if let Some(snapshot) = fresh {
            state.snapshot = Some((snapshot, now_ms));
            self.maybe_schedule_tick(&mut state);
        }
        let Some((snapshot, used_ms)) = &mut state.snapshot else { return ChunkAnswer::Take };
        let begun = fetch.snapshot == Some(snapshot.end);
        if snapshot.end.0 < self.journal.start() && !taken {
            // The log directly after this snapshot is gone. Otherwise a new transfer shares the snapshot that others
            // may be in the middle of: a newer one for each would let no transfer complete.
            return ChunkAnswer::Take;
        }
        *used_ms = now_ms;
        let position = if begun { fetch.position } else { 0 };
        let from = usize::try_from(position).unwrap_or(usize::MAX).min(snapshot.bytes.len());
        let until = snapshot.bytes.len().min(from.saturating_add(max_bytes));
        ChunkAnswer::Part(Chunk {
            end: snapshot.end,
            last_epoch: snapshot.last_epoch,
            total: snapshot.bytes.len() as u64,
            position: from as u64,
            bytes: snapshot.bytes.slice(from..until),
        })
    }

    pub(super) fn owner(&self) -> Option<Arc<dyn Owner>> {
        self.locked().owner.clone()
    }

    // Carrying out effects.

    /// Makes one call of the state machine and carries out its effects.
    fn step(
        self: &Arc<Self>,
        state: &mut State,
        call: impl FnOnce(&mut Replica, &JournalView<'_>, u64, &mut Vec<Effect>),
    ) {
        if state.changing {
            return;
        }
        let Some(replica) = &mut state.replica else { return };
        let view = JournalView { journal: &self.journal, durability: state.durability };
        let mut effects = Vec::new();
        let before = RoleView::of(replica);
        call(replica, &view, self.shared.now_ms(), &mut effects);
        let after = RoleView::of(replica);
        if before != after {
            self.leads
                .store(if let RoleView::Leads(epoch) = after { epoch.0 } else { -1 }, Ordering::Release);
            let follows = if let RoleView::Follows(leader, _) = after { leader.0 } else { -1 };
            self.follows.store(follows, Ordering::Release);
            self.on_changed_role(state, after, &effects);
        }
        self.publish(state);
        for effect in effects {
            self.carry_out(state, effect);
        }
        self.maybe_schedule_tick(state);
    }

    fn on_changed_role(&self, state: &mut State, after: RoleView, effects: &[Effect]) {
        let owner = state.owner.as_deref();
        if effects.contains(&Effect::LeadershipEnded)
            && let Some(owner) = owner
        {
            owner.on_leadership_ended();
        }
        for effect in effects {
            if let Effect::NoteEpoch { epoch, start } = effect {
                self.journal.note_epoch(epoch.0, start.0);
            }
        }
        if let Some(owner) = owner {
            match after {
                RoleView::Idle => owner.on_idle(),
                RoleView::Leads(epoch) => {
                    let hw = state.replica.as_ref().map_or(self.high_watermark(), Replica::high_watermark);
                    owner.on_lead(epoch, hw);
                }
                RoleView::Follows(leader, epoch) => owner.on_follow(leader, epoch),
            }
        }
        // Parked fetches are refused: another replica leads, or this is another leader epoch.
        wake(&mut state.subscribers);
    }

    /// Publishes the high watermark.
    fn publish(&self, state: &mut State) {
        let Some(replica) = &mut state.replica else { return };
        let high_watermark = replica.high_watermark();
        let knows = replica.leader().is_some_and(|leader| leader.has_committed_in_epoch());
        self.has_committed_in_epoch.store(knows, Ordering::Release);
        if self.high_watermark.swap(high_watermark.0, Ordering::AcqRel) != high_watermark.0 {
            if let Some(owner) = &state.owner {
                owner.on_high_watermark(high_watermark);
            }
            for subscriber in state.subscribers.iter_mut().filter(|subscriber| !subscriber.advanced_watermark)
            {
                subscriber.advanced_watermark = true;
                subscriber.inbound.note_high_watermark(subscriber.slot);
            }
        }
    }

    fn carry_out(self: &Arc<Self>, state: &mut State, effect: Effect) {
        match effect {
            // Carried out with the role change, or by `publish`.
            Effect::NoteEpoch { .. } | Effect::HighWatermark(_) => {}
            Effect::LowWatermark | Effect::LeadershipEnded => self.shared.low_watermarks.notify_waiters(),
            Effect::UnderMinIsr => {
                if let Some(owner) = &state.owner {
                    owner.on_under_min_isr();
                }
            }
            Effect::Propose(proposal) => self.shared.propose(Arc::clone(self), *proposal),
            Effect::Refresh => self.shared.refresh(Arc::clone(self)),
            Effect::Fetch { to, id, .. } if self.journal.is_damaged() => {
                self.set_aside_damaged(state, to, id)
            }
            Effect::Report { .. } if self.journal.is_damaged() => {}
            Effect::Fetch { to, id, fetch } => self.shared.outbound(to).fetch(self, id, fetch),
            Effect::Report { to, report } => self.shared.outbound(to).report(self, report),
            Effect::FetchSnapshot { to, fetch } => self.shared.outbound(to).fetch_snapshot(self, fetch),
            Effect::Truncate { to } => self.change(state, Change::Truncate(to)),
            Effect::Reset { start } => self.change(state, Change::Reset(start)),
            Effect::Install(snapshot) => self.change(state, Change::Install(snapshot)),
            Effect::NoteCleaned { below } => self.change(state, Change::NoteCleaned(below)),
            Effect::Rebuild { below, start } => self.change(state, Change::Rebuild(below, start)),
            Effect::SetStart { start } => self.set_start(state, start),
            Effect::Drop => {
                if let Some(owner) = &state.owner {
                    owner.on_drop();
                }
            }
        }
    }

    fn maybe_schedule_tick(self: &Arc<Self>, state: &mut State) {
        if !state.ticking && needs_tick(state) {
            state.ticking = true;
            self.shared.tick(Arc::clone(self));
        }
    }
}

fn wake(subscribers: &mut [Subscriber]) {
    for subscriber in subscribers.iter_mut().filter(|one| one.parked.is_some() && !one.queued) {
        subscriber.queued = true;
        subscriber.inbound.note_ready(subscriber.slot);
    }
}

fn needs_tick(state: &State) -> bool {
    let ticking = match state.replica.as_ref().map(Replica::role) {
        None | Some(Role::Idle) => false,
        Some(Role::Leader(leader)) => !leader.is_settled(),
        Some(Role::Follower(follower)) => !follower.is_waiting(),
    };
    (ticking && !state.changing) || state.snapshot.is_some()
}
