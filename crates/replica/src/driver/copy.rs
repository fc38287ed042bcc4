//! One copy of a partition on this node: the state machine, its journal, its owner, and who fetches from it.
//!
//! Every call of one copy happens under its lock, and what follows from it is done before the next one. Cutting the log
//! and installing a snapshot wait for the disk, so they happen elsewhere: the copy is *changing* meanwhile, and whatever
//! arrives waits (records) or is refused (fetches, appends).
//!
//! Invariants:
//! - `leads` says otherwise before a log that was led is cut: who reads for a follower looks at it after reading;
//! - nothing is appended unless the copy leads, in a call of [`Replicated::lead`], or follows and the answer is awaited.
//!
//! Lock order: the copy, then its owner's own lock, then the lists of connections. Never the other way round.

mod log;
mod repair;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use moim_base::{BrokerId, LeaderEpoch, Offset};
use moim_journal::{AppendError, Journal};

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

/// One copy of a partition.
pub struct Replicated {
    id: PartitionId,
    journal: Arc<Journal>,
    policy: ResetPolicy,
    shared: Arc<Shared>,
    /// The leadership while it leads, -1 otherwise.
    leads: AtomicI32,
    /// The leader it follows, -1 otherwise.
    follows: AtomicI32,
    knows_the_end: AtomicBool,
    high_watermark: AtomicI64,
    /// On the list of those whose disk got further.
    advanced: AtomicBool,
    /// A reassignment brings this copy in, and it is not in sync yet.
    arriving: AtomicBool,
    /// The member record says that it is damaged.
    damage_told: AtomicBool,
    /// It was damaged, began anew and has not reached the leader's high watermark yet.
    repairing: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// None once the copy is detached.
    owner: Option<Arc<dyn Owner>>,
    /// None before the node has a run.
    replica: Option<Replica>,
    /// The newest record seen.
    record: Option<Versioned<PartitionState>>,
    durability: Durability,
    /// The log is being cut or begun anew.
    changing: bool,
    /// On the list of those that are ticked.
    restless: bool,
    /// The log start a task is moving to.
    starting: Option<Offset>,
    subscribers: Vec<Subscriber>,
    /// What followers that begin anew are given, and when it was last asked for.
    snapshot: Option<(Snapshot, u64)>,
}

/// A follower's connection that has this partition in its session.
struct Subscriber {
    inbound: Arc<Inbound>,
    slot: u32,
    /// The fetch that waits for something to read.
    parked: Option<Parked>,
    /// The log start that the last answer carried: a fetch that could carry a newer one does not wait.
    told_start: Option<Offset>,
    /// On the connection's list of slots to be served.
    queued: bool,
    /// On the connection's list of high watermarks to be told.
    risen: bool,
}

impl Subscriber {
    /// Whether an answer says anything that this follower has not heard; then it is heard with it.
    fn has_news(&mut self, answer: &Answer, offset: Offset) -> bool {
        let Answer::Records { log_end, log_start, .. } = answer else { return true };
        let begins_elsewhere = self.told_start.replace(*log_start) != Some(*log_start);
        *log_end > offset || begins_elsewhere
    }
}

#[derive(Clone, Copy)]
struct Parked {
    id: u64,
    epoch: LeaderEpoch,
    offset: Offset,
}

/// What a fetch is to be answered with, the records not yet read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reply {
    pub(super) id: u64,
    pub(super) epoch: LeaderEpoch,
    pub(super) offset: Offset,
    pub(super) answer: Result<Answer, Refusal>,
}

/// What a copy is, for comparison.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Idle,
    Leads(LeaderEpoch),
    Follows(BrokerId, LeaderEpoch),
}

impl Standing {
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

/// How long a snapshot is kept for the next part of it.
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
            knows_the_end: AtomicBool::new(false),
            advanced: AtomicBool::new(false),
            arriving: AtomicBool::new(false),
            damage_told: AtomicBool::new(false),
            repairing: AtomicBool::new(false),
            state: Mutex::new(State {
                owner: Some(owner),
                replica: None,
                record: None,
                durability,
                changing: false,
                restless: false,
                starting: None,
                subscribers: Vec::new(),
                snapshot: None,
            }),
        }
    }

    /// Which partition.
    pub fn id(&self) -> PartitionId {
        self.id
    }

    /// Its journal.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Everything below is committed. Does not lock.
    pub fn high_watermark(&self) -> Offset {
        Offset(self.high_watermark.load(Ordering::Acquire))
    }

    /// The leadership, while this copy leads. Does not lock.
    pub fn leader_epoch(&self) -> Option<LeaderEpoch> {
        Some(LeaderEpoch(self.leads.load(Ordering::Acquire))).filter(|epoch| epoch.0 >= 0)
    }

    /// The leader, while this copy follows one. Does not lock.
    pub fn leader(&self) -> Option<BrokerId> {
        Some(BrokerId(self.follows.load(Ordering::Acquire))).filter(|node| node.0 >= 0)
    }

    /// Whether it leads and its high watermark has reached the start of its leadership: before that it must not say
    /// where the end is (OFFSET_NOT_AVAILABLE). Does not lock.
    pub fn knows_the_end(&self) -> bool {
        self.knows_the_end.load(Ordering::Acquire)
    }

    /// The newest record seen.
    pub fn record(&self) -> Option<Versioned<PartitionState>> {
        self.locked().record.clone()
    }

    /// What a follower is known to have, while this copy leads: (written, durable).
    pub fn progress_of(&self, node: BrokerId) -> Option<(Offset, Offset)> {
        let mut state = self.locked();
        state.replica.as_mut()?.leader()?.progress_of(node)
    }

    /// Appends as the leader. `append` runs under the copy's lock, so that no role changes under it; it appends to the
    /// journal with the epoch it is given, and may take the owner's lock. Followers that wait are told.
    ///
    /// `acks_all`: refused when fewer are in sync than the topic wants.
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

    /// Whether an append that waits for the in-sync set would be taken now.
    pub fn admit(&self) -> Result<(), AckError> {
        let mut state = self.locked();
        state.replica.as_mut().and_then(Replica::leader).ok_or(AckError::NotLeader)?.admit()
    }

    /// The journal's durable end has moved. May be called from any thread, more often than needed too.
    pub fn on_durable(self: &Arc<Self>) {
        let mut state = self.locked();
        self.step(&mut state, |replica, log, _, effects| replica.on_durable(log, effects));
    }

    /// The log start has moved on request: followers are to hear of it now and not with the next record.
    pub fn on_log_start(&self) {
        wake(&mut self.locked().subscribers);
    }

    /// Waits until the logs of everybody in sync start at `start` or later, and answers where they do. An error when this
    /// copy does not lead, or no longer does.
    pub async fn gone_everywhere(&self, start: Offset) -> Result<Offset, AckError> {
        loop {
            // Before the look, so that nothing is missed between the two.
            let mut moved = std::pin::pin!(self.shared.low_watermarks.notified());
            moved.as_mut().enable();
            let low = self.low_watermark().ok_or(AckError::NotLeader)?;
            if low >= start {
                return Ok(low);
            }
            moved.await;
        }
    }

    /// Where the logs of everybody in sync start at the latest, while this copy leads.
    pub fn low_watermark(&self) -> Option<Offset> {
        let mut state = self.locked();
        let leader = state.replica.as_mut()?.leader()?;
        Some(leader.low_watermark(Offset(self.journal.start())))
    }

    /// Whether a reassignment brings this copy in and it is not in sync yet. Does not lock.
    pub(super) fn is_arriving(&self) -> bool {
        self.arriving.load(Ordering::Acquire)
    }

    /// The same of another node's copy, as far as the newest record here says.
    pub(super) fn is_arriving_at(&self, node: BrokerId) -> bool {
        self.locked().record.as_ref().is_some_and(|record| record.value.is_arriving(node))
    }

    /// Answers whether it is new on the list of those whose disk got further.
    pub(super) fn note_advanced(&self) -> bool {
        !self.advanced.swap(true, Ordering::AcqRel)
    }

    /// Off that list.
    pub(super) fn on_advanced(self: &Arc<Self>) {
        self.advanced.store(false, Ordering::Release);
        self.on_durable();
    }

    /// The topic's durability is another from now on, and the journal's options were changed to it. Takes effect on
    /// record when it is safe.
    pub fn set_durability(self: &Arc<Self>, durability: Durability) {
        let mut state = self.locked();
        state.durability = durability;
        self.step(&mut state, |replica, _, now_ms, effects| {
            if let Some(leader) = replica.leader() {
                leader.want_durability(durability, now_ms, effects);
            }
        });
    }

    /// How far the log goes, for a controller that has nobody in sync to elect.
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
                // Its fetch waited for this very append: until the connection was last heard it had all there was.
                leader.on_alive(subscriber.inbound.from().node, subscriber.inbound.heard_ms());
            }
            leader.on_append(end);
        }
        wake(&mut state.subscribers);
        if self.journal.durable_end() >= end.0 {
            self.step(state, |replica, log, _, effects| replica.on_durable(log, effects));
        } else {
            self.note_restless(state);
        }
    }

    // What the driver hears, for this copy.

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

    /// The node registered: roles begin anew, from the records that name this run.
    pub(super) fn on_run(self: &Arc<Self>) {
        let mut state = self.locked();
        self.take_up_run(&mut state);
    }

    fn take_up_run(self: &Arc<Self>, state: &mut State) {
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

    /// Answers whether it wants to be ticked again.
    pub(super) fn on_tick(self: &Arc<Self>) -> bool {
        let mut state = self.locked();
        if state.snapshot.as_ref().is_some_and(|(_, used)| self.shared.now_ms() > used + SNAPSHOT_KEPT_MS) {
            state.snapshot = None;
        }
        // Still on the list while it is stepped, so that it is not put there a second time.
        self.step(&mut state, |replica, log, now_ms, effects| replica.on_tick(log, now_ms, effects));
        state.restless = is_restless(&state);
        state.restless
    }

    pub(super) fn on_outcome(self: &Arc<Self>, proposal: u64, outcome: Outcome) {
        let mut state = self.locked();
        self.step(&mut state, |replica, _, now_ms, effects| {
            replica.on_outcome(proposal, outcome, now_ms, effects);
        });
    }

    // As a follower.

    /// The leader can be reached, perhaps again: whatever was asked of it before is void.
    pub(super) fn on_connected(self: &Arc<Self>) {
        let mut state = self.locked();
        self.step(&mut state, |replica, log, now_ms, effects| {
            if let Some(follower) = replica.follower() {
                follower.on_connected(log, now_ms, effects);
            }
        });
    }

    /// The answer to a fetch, with the records it brought.
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
                tracing::warn!(partition = %self.id, why, "what a leader sent cannot be appended");
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
            tracing::debug!(partition = %self.id, %error, "what a leader sent was not taken");
            if matches!(error, AppendError::Full) {
                // Commits are not to wait for a disk without room: the leader hears that nobody follows here for now.
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

    /// The leader's high watermark, beside its answers.
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

    // As a leader.

    /// A follower's fetch. None when it waits here for something to read.
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
                let new =
                    Subscriber { inbound, slot, parked: None, told_start: None, queued: false, risen: false };
                state.subscribers.push(new);
                state.subscribers.last_mut()?
            }
        };
        match answer {
            Ok(answer) if !subscriber.has_news(&answer, fetch.offset) => {
                subscriber.parked = Some(Parked { id, epoch: fetch.leader_epoch, offset: fetch.offset });
                None
            }
            _ => {
                subscriber.parked = None;
                Some(reply)
            }
        }
    }

    /// Something has come for a fetch that waited here.
    pub(super) fn on_ready(self: &Arc<Self>, inbound: &Inbound, slot: u32) -> Option<Reply> {
        let mut state = self.locked();
        let state = &mut *state;
        let subscriber =
            state.subscribers.iter_mut().find(|one| one.slot == slot && one.inbound.is(inbound))?;
        subscriber.queued = false;
        let parked = subscriber.parked.take()?;
        let view = JournalView { journal: &self.journal, durability: state.durability };
        let answer = match state.replica.as_mut().and_then(Replica::leader) {
            Some(leader) => leader.on_wake(parked.epoch, &view),
            None => Err(Refusal::NotLeader),
        };
        if matches!(&answer, Ok(answer) if !subscriber.has_news(answer, parked.offset)) {
            subscriber.parked = Some(parked);
            return None;
        }
        Some(Reply { id: parked.id, epoch: parked.epoch, offset: parked.offset, answer })
    }

    /// The high watermark to tell a follower, and in which leadership.
    pub(super) fn on_risen(&self, inbound: &Inbound, slot: u32) -> Option<(LeaderEpoch, Offset)> {
        let mut state = self.locked();
        let subscriber =
            state.subscribers.iter_mut().find(|one| one.slot == slot && one.inbound.is(inbound))?;
        subscriber.risen = false;
        let leader = state.replica.as_mut()?.leader()?;
        Some((leader.epoch(), leader.high_watermark()))
    }

    pub(super) fn on_report(self: &Arc<Self>, report: &Report) {
        let mut state = self.locked();
        self.step(&mut state, |replica, _, now_ms, effects| {
            // A refused report is as good as a lost one: the next fetch says the same.
            let _ = replica.on_report(report, now_ms, effects);
        });
    }

    /// A follower's connection is no more. `gone`: and there is no newer one.
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

    /// The next part of a snapshot. `fresh` is one that was just taken. The answer says whether one is to be taken first.
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
            self.note_restless(&mut state);
        }
        let Some((snapshot, used_ms)) = &mut state.snapshot else { return ChunkAnswer::Take };
        let begun = fetch.snapshot == Some(snapshot.end);
        if snapshot.end.0 < self.journal.start() && !taken {
            // What follows it is gone. Otherwise whoever begins gets the one that others may be in the middle of: one that
            // is newer for each would let nobody get to the end.
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

    // Carrying out what follows.

    /// Makes one call of the state machine and does what follows from it.
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
        let before = Standing::of(replica);
        call(replica, &view, self.shared.now_ms(), &mut effects);
        let after = Standing::of(replica);
        if before != after {
            self.leads
                .store(if let Standing::Leads(epoch) = after { epoch.0 } else { -1 }, Ordering::Release);
            let follows = if let Standing::Follows(leader, _) = after { leader.0 } else { -1 };
            self.follows.store(follows, Ordering::Release);
            self.on_changed_role(state, after, &effects);
        }
        self.publish(state);
        for effect in effects {
            self.carry_out(state, effect);
        }
        self.note_restless(state);
    }

    fn on_changed_role(&self, state: &mut State, after: Standing, effects: &[Effect]) {
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
                Standing::Idle => owner.on_idle(),
                Standing::Leads(epoch) => {
                    let hw = state.replica.as_ref().map_or(self.high_watermark(), Replica::high_watermark);
                    owner.on_lead(epoch, hw);
                }
                Standing::Follows(leader, epoch) => owner.on_follow(leader, epoch),
            }
        }
        // Whoever waits here is told that somebody else leads, or that this is another leadership.
        wake(&mut state.subscribers);
    }

    /// Makes known how far the high watermark is.
    fn publish(&self, state: &mut State) {
        let Some(replica) = &mut state.replica else { return };
        let high_watermark = replica.high_watermark();
        let knows = replica.leader().is_some_and(|leader| leader.knows_the_end());
        self.knows_the_end.store(knows, Ordering::Release);
        if self.high_watermark.swap(high_watermark.0, Ordering::AcqRel) != high_watermark.0 {
            if let Some(owner) = &state.owner {
                owner.on_high_watermark(high_watermark);
            }
            for subscriber in state.subscribers.iter_mut().filter(|subscriber| !subscriber.risen) {
                subscriber.risen = true;
                subscriber.inbound.note_risen(subscriber.slot);
            }
        }
    }

    fn carry_out(self: &Arc<Self>, state: &mut State, effect: Effect) {
        match effect {
            // Done with the change of role, or by `publish`.
            Effect::NoteEpoch { .. } | Effect::HighWatermark(_) => {}
            Effect::LowWatermark | Effect::LeadershipEnded => self.shared.low_watermarks.notify_waiters(),
            Effect::UnderMinIsr => {
                if let Some(owner) = &state.owner {
                    owner.on_under_min_isr();
                }
            }
            Effect::Propose(proposal) => self.shared.propose(Arc::clone(self), *proposal),
            Effect::Refresh => self.shared.refresh(Arc::clone(self)),
            Effect::Fetch { to, id, .. } if self.journal.is_damaged() => self.hold_off(state, to, id),
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

    fn note_restless(self: &Arc<Self>, state: &mut State) {
        if !state.restless && is_restless(state) {
            state.restless = true;
            self.shared.tick(Arc::clone(self));
        }
    }
}

/// What an answer brought beside its words.
#[derive(Clone, Debug)]
pub(super) struct Records {
    pub(super) bytes: Bytes,
    pub(super) span: Span,
}

/// The part of the leader's log that an answer stands for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// What was asked for.
    pub(super) from: Offset,
    /// Everything from there up to here is either in the bytes or gone from the leader's log.
    pub(super) next: Offset,
    /// The epoch in force before `next`.
    pub(super) next_epoch: LeaderEpoch,
}

/// What a leader has for a follower that wants a snapshot.
pub(super) enum ChunkAnswer {
    /// A part of it.
    Part(Chunk),
    /// Nothing yet: take one and ask again.
    Take,
    /// Nothing, and no reason to take one.
    None,
}

fn wake(subscribers: &mut [Subscriber]) {
    for subscriber in subscribers.iter_mut().filter(|one| one.parked.is_some() && !one.queued) {
        subscriber.queued = true;
        subscriber.inbound.note_ready(subscriber.slot);
    }
}

fn is_restless(state: &State) -> bool {
    let restless = match state.replica.as_ref().map(Replica::role) {
        None | Some(Role::Idle) => false,
        Some(Role::Leader(leader)) => !leader.is_settled(),
        Some(Role::Follower(follower)) => !follower.is_waiting(),
    };
    (restless && !state.changing) || state.snapshot.is_some()
}
