//! The leader of one partition: follower progress, high watermark, in-sync set.
//!
//! Owns the high watermark and proposes in-sync set changes. It never reads records and never writes to the state
//! repository itself.
//!
//! Invariants:
//! - the high watermark never moves back, and advances only over records that every member of the *maximal* in-sync
//!   set has: the set on record and every replica whose addition was proposed and is not known to have failed;
//! - it stands still while the record has fewer in-sync replicas than the effective minimum (see
//!   [`crate::transition`]);
//! - a follower counts only after a fetch in this leader epoch showed that its log is a prefix of ours;
//! - proposals are based on the newest known record. One with an unknown outcome may still take effect, even after a
//!   later read: its additions count until the record has another revision. If no other change is due, the record is
//!   rewritten for that purpose alone.

mod progress;

use moim_base::{BrokerId, LeaderEpoch, Offset};

use self::progress::Progress;
use crate::acks::AckError;
use crate::log::LogView;
use crate::message::{Answer, Fetch, Refusal, Report};
use crate::mutant::{Mutant, Mutants};
use crate::replica::{Effect, Proposal};
use crate::state::{InSync, PartitionState};
use crate::transition::Draft;
use crate::types::{Durability, PartitionId, Versioned};

/// The leader's timeouts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaderTuning {
    /// A follower that has not caught up for this long leaves the in-sync set (`replica.lag.time.max.ms`).
    pub lag_ms: u64,
    /// A follower whose connection broke this long ago leaves the in-sync set. A broken connection proves nothing,
    /// but an in-sync set shrink is always safe, and the follower returns within one fetch.
    pub disconnect_grace_ms: u64,
    /// A follower that has received records, but whose disk makes no progress with them for this long, leaves the
    /// in-sync set, if enough other replicas are in sync.
    pub stall_ms: u64,
    /// The pause after a refused proposal.
    pub retry_ms: u64,
}

/// A gap between ticks longer than this means that the leader itself was paused.
const TICK_GAP_MS: u64 = 400;

impl Default for LeaderTuning {
    fn default() -> Self {
        Self { lag_ms: 10_000, disconnect_grace_ms: 500, stall_ms: 1_500, retry_ms: 200 }
    }
}

/// The outcome of a proposal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The record was changed at this revision.
    Done {
        /// The repository revision after the change.
        revision: i64,
    },
    /// A comparison failed: the change did not happen and never will.
    Conflict,
    /// The repository refused the change definitively.
    Refused,
    /// The outcome is unknown; the change may still happen.
    Unknown,
}

/// A proposal that may still take effect.
#[derive(Debug)]
struct Pending {
    id: u64,
    next: PartitionState,
    adds: Vec<BrokerId>,
    /// True while an answer is expected.
    in_flight: bool,
}

/// The leader state of one partition.
#[derive(Debug)]
pub struct Leader {
    me: BrokerId,
    partition: PartitionId,
    /// The newest known record and its mod revision.
    record: Versioned<PartitionState>,
    /// Invariant: all were proposed on `record.revision`.
    pending: Vec<Pending>,
    next_id: u64,
    retry_at_ms: u64,
    /// The log end at the start of this leadership.
    epoch_start: Offset,
    high_watermark: Offset,
    end: Offset,
    written: Offset,
    durable: Offset,
    followers: Vec<Progress>,
    ticked_ms: u64,
    wanted_durability: Durability,
    tuning: LeaderTuning,
    mutants: Mutants,
}

impl Leader {
    /// Becomes the leader that `record` names. The first effect notes the new epoch in the log; it must be carried
    /// out before any append. `high_watermark` is the last value known on this node.
    pub fn become_leader(
        me: BrokerId,
        partition: PartitionId,
        record: Versioned<PartitionState>,
        log: &dyn LogView,
        high_watermark: Offset,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Self {
        let mut leader = Self {
            me,
            partition,
            pending: Vec::new(),
            next_id: 1,
            retry_at_ms: 0,
            epoch_start: log.end(),
            high_watermark: high_watermark.clamp(log.start(), log.end()),
            end: log.end(),
            written: log.written(),
            durable: log.durable(),
            followers: Vec::new(),
            ticked_ms: now_ms,
            wanted_durability: record.value.durability,
            record,
            tuning: LeaderTuning::default(),
            mutants: Mutants::default(),
        };
        let epoch = leader.record.value.leader_epoch;
        effects.push(Effect::NoteEpoch { epoch, start: leader.epoch_start });
        leader.update_followers(now_ms);
        leader.maybe_advance(effects);
        leader
    }

    pub(crate) fn set_tuning(&mut self, tuning: LeaderTuning, mutants: Mutants) {
        self.tuning = tuning;
        self.mutants = mutants;
    }

    /// The partition record that this leader acts on.
    pub fn record(&self) -> &Versioned<PartitionState> {
        &self.record
    }

    /// The leader epoch.
    pub fn epoch(&self) -> LeaderEpoch {
        self.record.value.leader_epoch
    }

    /// The high watermark: everything below is committed.
    pub fn high_watermark(&self) -> Offset {
        self.high_watermark
    }

    /// True once the high watermark has reached the start of this leader epoch. A new leader may know a lower high
    /// watermark than its predecessor announced, and must not report the committed end before then.
    pub fn has_committed_in_epoch(&self) -> bool {
        self.high_watermark >= self.epoch_start
    }

    /// Admits an append with acks=all, or returns NOT_ENOUGH_REPLICAS.
    pub fn admit(&self) -> Result<(), AckError> {
        match self.is_under_min() {
            true => Err(AckError::NotEnoughReplicas),
            false => Ok(()),
        }
    }

    /// A follower's known (written, durable) offsets, for the progress of reassignments.
    pub fn progress_of(&self, node: BrokerId) -> Option<(Offset, Offset)> {
        let follower = self.followers.iter().find(|follower| follower.node == node)?;
        follower.matched.then_some((follower.written, follower.durable))
    }

    /// Compaction may remove tombstones and markers below this offset: every follower that is fetching has them. An
    /// absent follower is rebuilt when it returns ([`Answer::Cleaned`]).
    pub fn fetched_by_all_followers(&self) -> Offset {
        let fetching = self
            .followers
            .iter()
            .filter(|follower| follower.run.is_some() && follower.disconnected_ms.is_none());
        let has = fetching.map(|follower| if follower.matched { follower.written } else { Offset(0) });
        has.fold(self.end, Offset::min)
    }

    /// The low watermark: the least log start offset of the in-sync set. Every record below it is deleted on all
    /// in-sync replicas. `log_start` is our own.
    pub fn low_watermark(&self, log_start: Offset) -> Offset {
        let of = |node: BrokerId| {
            let follower = self.followers.iter().find(|follower| follower.node == node);
            follower.map_or(log_start, |follower| follower.log_start)
        };
        self.record.value.isr.iter().map(|member| of(member.node)).fold(log_start, Offset::min)
    }

    /// The topic's durability setting changed. It is written to the record when that is safe.
    pub fn want_durability(&mut self, durability: Durability, now_ms: u64, effects: &mut Vec<Effect>) {
        self.wanted_durability = durability;
        self.maybe_propose(now_ms, effects);
    }

    /// Records were appended; `end` is the new log end.
    pub fn on_append(&mut self, end: Offset) {
        self.end = self.end.max(end);
    }

    /// The local disk has progressed.
    pub fn on_durable(&mut self, written: Offset, durable: Offset, effects: &mut Vec<Effect>) {
        self.written = self.written.max(written);
        self.durable = self.durable.max(durable);
        self.maybe_advance(effects);
    }

    /// A follower fetches. The answer states what to read for it.
    pub fn on_fetch(
        &mut self,
        fetch: &Fetch,
        log: &dyn LogView,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<Answer, Refusal> {
        let blind = self.mutants.has(Mutant::IgnoreEpoch);
        if !blind {
            self.check_epoch(fetch.leader_epoch, effects)?;
        }
        let follower = Self::follower(&mut self.followers, fetch.from.node)?;
        follower.check_run(fetch.from, fetch.record, now_ms)?;
        follower.disconnected_ms = None;
        if let Some(begin) = restart_offset(fetch, log) {
            follower.matched = false;
            return Ok(Answer::OutOfRange { log_start: begin });
        }
        if !blind && let Some(parts) = divergence(fetch, log) {
            follower.matched = false;
            return Ok(parts);
        }
        let below = log.cleaned_below();
        if fetch.cleaned_below < below {
            follower.matched = false;
            return Ok(Answer::Cleaned { below, log_start: log.base_of(log.start()) });
        }
        self.end = log.end();
        let measure = self.measures_durable();
        let (written, durable) = (fetch.written.min(self.end), fetch.durable.min(self.end));
        let follower = Self::follower(&mut self.followers, fetch.from.node)?;
        let has = (fetch.offset.min(self.end), written, durable);
        follower.on_fetch(has, measure, self.end, now_ms);
        follower.note_log_start(fetch.log_start, effects);
        self.maybe_advance(effects);
        self.maybe_propose(now_ms, effects);
        Ok(Answer::Records { high_watermark: self.high_watermark, log_start: log.start(), log_end: self.end })
    }

    /// The answer to a parked fetch, now that there is something to read. It brings no new information about the
    /// follower: that was recorded when the fetch arrived.
    pub fn answer_parked(&self, epoch: LeaderEpoch, log: &dyn LogView) -> Result<Answer, Refusal> {
        if epoch != self.epoch() {
            return Err(Refusal::FencedEpoch(self.epoch()));
        }
        Ok(Answer::Records {
            high_watermark: self.high_watermark,
            log_start: log.start(),
            log_end: log.end(),
        })
    }

    /// A follower's disk has progressed.
    pub fn on_report(
        &mut self,
        report: &Report,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        self.check_epoch(report.leader_epoch, effects)?;
        let measure = self.measures_durable();
        let follower = Self::follower(&mut self.followers, report.from.node)?;
        follower.check_run(report.from, report.record, now_ms)?;
        if !follower.matched {
            return Ok(()); // from before it was asked to truncate
        }
        let (written, durable) = (report.written.min(self.end), report.durable.min(self.end));
        follower.on_report(written, durable, measure, self.end, now_ms);
        follower.note_log_start(report.log_start, effects);
        self.maybe_advance(effects);
        self.maybe_propose(now_ms, effects);
        Ok(())
    }

    /// A follower was alive at `heard_ms` with a parked fetch. If it has our whole log, it was caught up at that
    /// time.
    pub fn on_alive(&mut self, node: BrokerId, heard_ms: u64) {
        let (measure, end) = (self.measures_durable(), self.end);
        if let Ok(follower) = Self::follower(&mut self.followers, node) {
            follower.on_alive(measure, end, heard_ms);
        }
    }

    /// True if no timeout can change anything: every replica is in sync and has the whole log.
    pub fn is_settled(&self) -> bool {
        let (state, measure) = (&self.record.value, self.measures_durable());
        let settled = |follower: &Progress| {
            follower.matched
                && follower.disconnected_ms.is_none()
                && follower.measure(measure) >= self.end
                && state
                    .in_sync(follower.node)
                    .is_some_and(|entry| follower.run.is_some_and(|run| entry.epoch == run.epoch))
        };
        self.pending.is_empty()
            && self.wanted_durability == state.durability
            && self.followers.iter().all(settled)
    }

    /// The connection to a follower broke.
    pub fn on_disconnected(&mut self, node: BrokerId, now_ms: u64) {
        if let Ok(follower) = Self::follower(&mut self.followers, node) {
            follower.disconnected_ms.get_or_insert(now_ms);
        }
    }

    /// A partition record from the repository that still names this leadership.
    pub fn on_record(&mut self, record: Versioned<PartitionState>, now_ms: u64, effects: &mut Vec<Effect>) {
        if record.revision > self.record.revision {
            self.adopt(record, now_ms, effects);
        }
    }

    /// The outcome of a proposal arrived.
    pub fn on_outcome(&mut self, id: u64, outcome: Outcome, now_ms: u64, effects: &mut Vec<Effect>) {
        let Some(at) = self.pending.iter().position(|pending| pending.id == id) else { return };
        match outcome {
            Outcome::Done { revision } => {
                let next = self.pending.swap_remove(at).next;
                self.on_record(Versioned { revision, value: next }, now_ms, effects);
            }
            Outcome::Conflict | Outcome::Refused => {
                self.pending.swap_remove(at);
                self.retry_at_ms = now_ms + self.tuning.retry_ms;
                effects.push(Effect::Refresh);
                // Commits no longer wait for a replica whose proposed addition failed.
                self.maybe_advance(effects);
            }
            Outcome::Unknown => {
                self.pending[at].in_flight = false;
                self.retry_at_ms = now_ms + self.tuning.retry_ms;
                effects.push(Effect::Refresh);
                if self.mutants.has(Mutant::ForgetPendingIsr) {
                    self.pending.swap_remove(at);
                    self.maybe_advance(effects);
                }
            }
        }
    }

    /// Time passed. Called a few times a second.
    pub fn on_tick(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        let slept_ms = now_ms.saturating_sub(self.ticked_ms + TICK_GAP_MS);
        self.ticked_ms = now_ms;
        if slept_ms > 0 {
            self.followers.iter_mut().for_each(|follower| follower.exclude_pause(slept_ms, now_ms));
        }
        self.maybe_propose(now_ms, effects);
    }

    fn adopt(&mut self, record: Versioned<PartitionState>, now_ms: u64, effects: &mut Vec<Effect>) {
        let was_under = self.is_under_min();
        self.record = record;
        // Every proposal on the older record has either taken effect by now or never will.
        self.pending.clear();
        self.update_followers(now_ms);
        if self.is_under_min() && !was_under {
            effects.push(Effect::UnderMinIsr);
        }
        effects.push(Effect::LowWatermark);
        self.maybe_advance(effects);
        self.maybe_propose(now_ms, effects);
    }

    fn update_followers(&mut self, now_ms: u64) {
        let state = &self.record.value;
        self.followers.retain(|follower| state.replicas.contains(&follower.node));
        for node in state.replicas.iter().copied().filter(|node| *node != self.me) {
            if !self.followers.iter().any(|follower| follower.node == node) {
                self.followers.push(Progress::new(node, self.record.revision, now_ms));
            }
        }
    }

    fn check_epoch(&self, epoch: LeaderEpoch, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        match epoch.cmp(&self.epoch()) {
            std::cmp::Ordering::Less => Err(Refusal::FencedEpoch(self.epoch())),
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Greater => {
                effects.push(Effect::Refresh);
                Err(Refusal::UnknownEpoch(self.epoch()))
            }
        }
    }

    fn follower(followers: &mut [Progress], node: BrokerId) -> Result<&mut Progress, Refusal> {
        followers.iter_mut().find(|follower| follower.node == node).ok_or(Refusal::NotReplica)
    }

    fn is_under_min(&self) -> bool {
        self.record.value.isr.len() < self.record.value.min_isr as usize
    }

    /// Commits wait for stable storage if the record says so, and also if a pending proposal may make it say so.
    fn measures_durable(&self) -> bool {
        self.record.value.durability == Durability::Fsync
            || self.wanted_durability == Durability::Fsync
            || self.pending.iter().any(|pending| pending.next.durability == Durability::Fsync)
    }

    /// The maximal in-sync set, without this node: the members on record and the proposed ones.
    fn maximal(&self) -> impl Iterator<Item = BrokerId> {
        let recorded = self.record.value.isr.iter().map(|member| member.node);
        let proposed = self.pending.iter().flat_map(|pending| pending.adds.iter().copied());
        recorded.chain(proposed).filter(|node| *node != self.me)
    }

    fn maybe_advance(&mut self, effects: &mut Vec<Effect>) {
        let state = &self.record.value;
        if state.isr.len() < state.effective_min() && !self.mutants.has(Mutant::CommitUnderMinIsr) {
            return;
        }
        let measure = self.measures_durable();
        let mut low = if measure { self.durable } else { self.written };
        if !self.mutants.has(Mutant::AckBeforeIsr) {
            for node in self.maximal() {
                match self.followers.iter().find(|follower| follower.node == node) {
                    Some(follower) if follower.matched => low = low.min(follower.measure(measure)),
                    _ => return,
                }
            }
        }
        if low > self.high_watermark {
            self.high_watermark = low;
            effects.push(Effect::HighWatermark(low));
        }
    }

    fn maybe_propose(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        if now_ms < self.retry_at_ms || self.pending.iter().any(|pending| pending.in_flight) {
            return;
        }
        let measure = self.measures_durable();
        let state = &self.record.value;
        let stalled = self.stalled(now_ms);
        let leaving = |node: BrokerId| {
            let follower = self.followers.iter().find(|follower| follower.node == node);
            let slow = follower.is_some_and(|follower| {
                follower.is_too_slow(measure, self.end, now_ms, &self.tuning) && node != self.me
            });
            slow || stalled == Some(node)
        };
        let joining = |follower: &&Progress| {
            let entry = state.in_sync(follower.node);
            let known = follower.run.is_some_and(|run| entry.is_some_and(|e| e.epoch == run.epoch));
            let reached = follower.measure(measure) >= self.high_watermark.max(self.epoch_start);
            // A follower that left because its disk hangs returns when its disk works, not when it has little to
            // catch up.
            let syncs = follower.stalled_ms(now_ms) <= self.tuning.stall_ms;
            !known && follower.matched && reached && syncs && follower.disconnected_ms.is_none()
        };
        let hardens = self.wanted_durability != state.durability && self.may_change_durability();
        let settles = !self.pending.is_empty();
        let idle = !hardens
            && !settles
            && !state.isr.iter().any(|member| leaving(member.node))
            && !self.followers.iter().any(|follower| joining(&follower));
        if idle {
            return;
        }
        let mut draft = Draft::new(&self.record);
        for member in state.isr.iter().filter(|member| leaving(member.node)) {
            draft.lose(member.node);
        }
        let mut adds = Vec::new();
        for follower in self.followers.iter().filter(joining) {
            let Some(run) = follower.run else { continue };
            draft.join(InSync { node: run.node, epoch: run.epoch, directory: run.directory });
            adds.push(run.node);
        }
        if hardens {
            draft.set_durability(self.wanted_durability);
        }
        if settles {
            draft.touch();
        }
        let Some(change) = draft.finish(self.partition) else { return };
        let id = self.next_id;
        self.next_id += 1;
        let next = change.next.clone().expect("a leader deletes nothing");
        // One repeat of the same proposal replaces both: without a quorum this would repeat for as long as there is
        // none.
        self.pending.retain(|pending| pending.in_flight || pending.next != next);
        self.pending.push(Pending { id, next, adds, in_flight: true });
        effects.push(Effect::Propose(Box::new(Proposal { id, change })));
    }

    /// The in-sync follower whose disk has made no progress for the longest time, if it exceeds the limit. At most
    /// one at a time, and never below the minimum: a storage stall that all replicas share must not empty the in-sync
    /// set.
    fn stalled(&self, now_ms: u64) -> Option<BrokerId> {
        let state = &self.record.value;
        if state.isr.len() <= state.effective_min() || self.mutants.has(Mutant::KeepStalledFollower) {
            return None;
        }
        let in_sync = self.followers.iter().filter(|follower| state.in_sync(follower.node).is_some());
        let slowest = in_sync.max_by_key(|follower| follower.stalled_ms(now_ms))?;
        (slowest.stalled_ms(now_ms) > self.tuning.stall_ms).then_some(slowest.node)
    }

    /// Commits may start to wait for less at any time. They may start to wait for stable storage only once every
    /// committed record is durable on every replica that could be elected.
    fn may_change_durability(&self) -> bool {
        if self.wanted_durability == Durability::Replicated {
            return true;
        }
        let state = &self.record.value;
        let hardened = |node: BrokerId| {
            let follower = self.followers.iter().find(|follower| follower.node == node);
            follower.is_some_and(|f| f.matched && f.durable >= self.high_watermark)
        };
        state.isr.len() >= state.effective_min()
            && self.durable >= self.high_watermark
            && self.maximal().all(hardened)
    }
}

/// The offset at which a follower must restart if it cannot continue from its log end: it ends below our log start,
/// or is empty and starts inside one of our batches (records are deleted one by one, and a truncation may have
/// removed the batch that contained the log start).
fn restart_offset(fetch: &Fetch, log: &dyn LogView) -> Option<Offset> {
    let is_empty = fetch.log_start == fetch.offset;
    if fetch.offset >= log.start() && !is_empty {
        return None;
    }
    let begin = log.base_of(fetch.offset.max(log.start()));
    (begin != fetch.offset).then_some(begin)
}

/// The divergence of the follower's log from ours, if it is not a prefix, with an upper bound for the common offset.
fn divergence(fetch: &Fetch, log: &dyn LogView) -> Option<Answer> {
    let Some(last_epoch) = fetch.last_epoch else {
        // An empty log that never had a record cannot diverge, but it cannot be ahead either.
        return (fetch.offset > log.end()).then(|| Answer::Diverging { epoch: None, end: log.start() });
    };
    match log.end_of_epoch(last_epoch) {
        // Every epoch we have is newer, so the follower's records cannot be distinguished from those we have dropped.
        // It must reset: its records below our log start may never have been committed.
        None if fetch.offset <= log.start() => {
            Some(Answer::OutOfRange { log_start: log.base_of(log.start()) })
        }
        None => Some(Answer::Diverging { epoch: None, end: log.start() }),
        Some((epoch, end)) if epoch < last_epoch || end < fetch.offset => {
            Some(Answer::Diverging { epoch: Some(epoch), end })
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests;
