//! A follower of one partition: fetches from the leader, and makes its log a beginning of the leader's first.
//!
//! One fetch is out at a time. Every fetch says which leadership it believes in and what its log ends with (offset and
//! epoch of the newest record), so the leader finds out whether the two logs are one. If they are not, the follower
//! cuts its log where the epochs part and asks again, until both agree. It never cuts at its high watermark: what lies
//! past it may be committed without its knowing.
//!
//! Invariants:
//! - within one leader epoch, once an answer brought records or nothing new, the log only grows;
//! - nothing is reported to a leader before that;
//! - the high watermark is never past the log end.
//!
//! It must never append what an answer brings unless [`Follower::accepts`] says that the answer is awaited.

use moim_base::{BrokerId, LeaderEpoch, Offset};

use crate::log::LogView;
use crate::machine::{Chunk, Install, SnapshotFetch};
use crate::message::{Answer, Fetch, Refusal, Report, Sender};
use crate::mutant::{Mutant, Mutants};
use crate::replica::Effect;

/// What to do when the leader no longer has what comes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ResetPolicy {
    /// Begin anew at the leader's log start: the rest is gone for everybody (the queue).
    #[default]
    LogStart,
    /// Take the leader's snapshot and go on from there: the journal is only a tail of the state (shards).
    InstallSnapshot,
}

/// The follower's times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FollowerTuning {
    /// The first pause after a failure; each further one is twice as long.
    pub backoff_ms: u64,
    /// The longest pause.
    pub max_backoff_ms: u64,
    /// A fetch without an answer for this long has failed. Longer than leaders let a fetch wait.
    pub timeout_ms: u64,
    /// A part of a snapshot that has not come for this long is asked for again.
    pub chunk_timeout_ms: u64,
}

impl Default for FollowerTuning {
    fn default() -> Self {
        Self { backoff_ms: 20, max_backoff_ms: 1_000, timeout_ms: 3_000, chunk_timeout_ms: 3_000 }
    }
}

#[derive(Debug)]
enum Phase {
    /// A fetch is out.
    Waiting { id: u64, sent_ms: u64 },
    /// The log is being cut or begun anew.
    Changing,
    /// A snapshot is on its way.
    Installing(Install),
    /// Nothing to do before then.
    Resting { until_ms: u64 },
}

/// One partition, followed.
#[derive(Debug)]
pub struct Follower {
    me: Sender,
    leader: BrokerId,
    epoch: LeaderEpoch,
    /// The revision of the newest record known.
    record: i64,
    phase: Phase,
    next_id: u64,
    /// Whether the leader has agreed in this epoch that our log is a beginning of its own.
    agreed: bool,
    high_watermark: Offset,
    /// What the leader was last told: (written, durable, log start).
    told: (Offset, Offset, Offset),
    /// The least the leader's log is known to reach to, once it has answered in this epoch.
    leader_end: Option<Offset>,
    /// See [`Following::rebuilding`].
    rebuilding: bool,
    failures: u32,
    policy: ResetPolicy,
    tuning: FollowerTuning,
    mutants: Mutants,
}

/// How a replica follows: everything but whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Following {
    pub(crate) me: Sender,
    pub(crate) policy: ResetPolicy,
    pub(crate) tuning: FollowerTuning,
    pub(crate) mutants: Mutants,
    /// The revision of the record that says so.
    pub(crate) record: i64,
    /// The first fetch id to use: ids are not used twice in the life of a replica.
    pub(crate) next_id: u64,
    /// The log was begun anew, in this run, over what compaction elsewhere had removed: it may end below
    /// [`LogView::cleaned_below`]. Any other log that does (a cut, a crash) holds records whose end it will never see.
    pub(crate) rebuilding: bool,
}

impl Follower {
    /// Follows `leader` in its leadership `epoch`.
    pub(crate) fn become_follower(
        how: Following,
        (leader, epoch): (BrokerId, LeaderEpoch),
        log: &dyn LogView,
        high_watermark: Offset,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Self {
        let mut follower = Self {
            me: how.me,
            leader,
            epoch,
            record: how.record,
            phase: Phase::Changing,
            next_id: how.next_id,
            agreed: false,
            high_watermark: high_watermark.min(log.end()),
            told: (Offset(0), Offset(0), Offset(0)),
            leader_end: None,
            rebuilding: how.rebuilding,
            failures: 0,
            policy: how.policy,
            tuning: how.tuning,
            mutants: how.mutants,
        };
        if how.mutants.has(Mutant::TruncateByHighWatermark) && follower.high_watermark < log.end() {
            effects.push(Effect::Truncate { to: follower.high_watermark });
        } else {
            follower.fetch(log, now_ms, effects);
        }
        follower
    }

    /// Whom it follows, in which leadership.
    pub fn leader(&self) -> (BrokerId, LeaderEpoch) {
        (self.leader, self.epoch)
    }

    /// A newer record says the same of us.
    pub(crate) fn on_record(&mut self, revision: i64) {
        self.record = revision;
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next_id
    }

    pub(crate) fn is_rebuilding(&self) -> bool {
        self.rebuilding
    }

    /// How far the leader's log reaches at least; none before it has answered in this epoch.
    pub fn leader_end(&self) -> Option<Offset> {
        self.leader_end
    }

    fn note_leader_end(&mut self, end: Offset) {
        self.leader_end = Some(self.leader_end.map_or(end, |known| known.max(end)));
    }

    /// Everything below is known to be committed.
    pub fn high_watermark(&self) -> Offset {
        self.high_watermark
    }

    /// Whether the fetch with this id is the one it waits for. Ask before appending what the answer brings.
    pub fn accepts(&self, fetch: u64) -> bool {
        matches!(self.phase, Phase::Waiting { id, .. } if id == fetch)
    }

    /// The answer to a fetch. Its records are appended already: `log` is the log with them.
    pub fn on_answer(
        &mut self,
        fetch: u64,
        answer: Answer,
        log: &dyn LogView,
        now_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        if !self.accepts(fetch) {
            return;
        }
        self.failures = 0;
        match answer {
            Answer::Records { high_watermark, log_start, log_end } => {
                self.agreed = true;
                self.note_leader_end(log_end.max(high_watermark));
                let start = log_start.min(log.end());
                // Where the log is a tail of a state, its beginning goes only when our own state is kept.
                if self.policy == ResetPolicy::LogStart && start > log.start() {
                    effects.push(Effect::SetStart { start });
                }
                let known = high_watermark.min(log.end());
                if known > self.high_watermark {
                    self.high_watermark = known;
                    effects.push(Effect::HighWatermark(known));
                }
                self.fetch(log, now_ms, effects);
            }
            Answer::Diverging { epoch, end } => self.cut(epoch, end, log, effects),
            Answer::OutOfRange { log_start } => {
                self.note_leader_end(log_start);
                self.begin_anew(log_start, now_ms, effects);
            }
            Answer::Cleaned { below, log_start } => {
                self.note_leader_end(below);
                self.on_cleaned(below, log_start, log, effects);
            }
        }
    }

    /// The leader refused a fetch.
    pub fn on_refused(&mut self, fetch: u64, refusal: Refusal, now_ms: u64, effects: &mut Vec<Effect>) {
        if !self.accepts(fetch) {
            return;
        }
        self.rest(now_ms);
        match refusal {
            // Somebody knows more than we do.
            Refusal::FencedEpoch(_) | Refusal::NotLeader | Refusal::NotReplica | Refusal::StaleBroker => {
                effects.push(Effect::Refresh);
            }
            // We know more than the leader: it will hear of it.
            Refusal::UnknownEpoch(_) => {}
        }
    }

    /// A fetch got no answer, or its records could not be appended.
    pub fn on_failed(&mut self, fetch: u64, now_ms: u64) {
        if self.accepts(fetch) {
            self.rest(now_ms);
        }
    }

    /// The log is damaged, and the fetch was not sent: nothing may be appended to it. Answers whether it is to begin anew,
    /// empty, followed by `on_changed`; not while a record counts on it.
    pub fn on_damaged(&mut self, fetch: u64, is_counted_on: bool, now_ms: u64) -> bool {
        if !self.accepts(fetch) {
            return false;
        }
        if is_counted_on {
            self.rest(now_ms);
            return false;
        }
        self.agreed = false;
        self.phase = Phase::Changing;
        true
    }

    /// Damage was found in the log: the fetch that is out will get no answer.
    pub fn on_damage_found(&mut self, now_ms: u64) {
        if let Phase::Waiting { id, .. } = self.phase {
            self.on_failed(id, now_ms);
        }
    }

    /// The log was cut or begun anew as asked.
    pub fn on_changed(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        if matches!(self.phase, Phase::Changing) {
            // Past the high watermark unless records that were committed were given up by an unclean election.
            self.high_watermark = self.high_watermark.min(log.end()).max(log.start());
            self.fetch(log, now_ms, effects);
        }
    }

    /// A part of the leader's snapshot.
    pub fn on_chunk(&mut self, chunk: Chunk, now_ms: u64, effects: &mut Vec<Effect>) {
        let Phase::Installing(install) = &mut self.phase else { return };
        self.failures = 0;
        match install.on_chunk(chunk) {
            Some(snapshot) => {
                self.phase = Phase::Changing;
                self.high_watermark = self.high_watermark.max(snapshot.end);
                effects.push(Effect::Install(snapshot));
            }
            None => self.fetch_snapshot(now_ms, effects),
        }
    }

    /// The leader can be reached, perhaps again: what was asked of it before got lost, reports too.
    pub fn on_connected(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        self.failures = 0;
        match &self.phase {
            Phase::Waiting { .. } | Phase::Resting { .. } => self.fetch(log, now_ms, effects),
            Phase::Installing(_) => self.fetch_snapshot(now_ms, effects),
            Phase::Changing => {}
        }
    }

    /// The leader's high watermark, told beside its answers. Counts only once the leader has agreed that our log is a
    /// beginning of its own.
    pub fn on_high_watermark(
        &mut self,
        epoch: LeaderEpoch,
        high_watermark: Offset,
        log: &dyn LogView,
        effects: &mut Vec<Effect>,
    ) {
        if epoch == self.epoch {
            self.note_leader_end(high_watermark);
        }
        let known = high_watermark.min(log.end());
        if self.agreed && epoch == self.epoch && known > self.high_watermark {
            self.high_watermark = known;
            effects.push(Effect::HighWatermark(known));
        }
    }

    /// Whether a fetch is out and time does not matter.
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    /// Our disk has got further, or our log starts later.
    pub fn on_durable(&mut self, log: &dyn LogView, effects: &mut Vec<Effect>) {
        let now = (log.written(), log.durable(), log.start());
        if self.agreed && now != self.told {
            self.told = now;
            let (from, leader_epoch, record) = (self.me, self.epoch, self.record);
            let (written, durable, log_start) = now;
            let report = Report { from, leader_epoch, record, written, durable, log_start };
            effects.push(Effect::Report { to: self.leader, report });
        }
    }

    /// Time passed. To be called a few times a second.
    pub fn on_tick(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        match &self.phase {
            Phase::Resting { until_ms } if now_ms >= *until_ms => self.fetch(log, now_ms, effects),
            Phase::Waiting { sent_ms, .. } if now_ms.saturating_sub(*sent_ms) > self.tuning.timeout_ms => {
                self.rest(now_ms);
            }
            Phase::Installing(install) if install.is_stale(now_ms, self.tuning.chunk_timeout_ms) => {
                self.fetch_snapshot(now_ms, effects);
            }
            _ => {}
        }
    }

    fn fetch(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        let id = self.next_id;
        self.next_id += 1;
        self.phase = Phase::Waiting { id, sent_ms: now_ms };
        self.told = (log.written(), log.durable(), log.start());
        let blind = self.mutants.has(Mutant::TruncateByHighWatermark);
        let fetch = Fetch {
            from: self.me,
            leader_epoch: self.epoch,
            record: self.record,
            offset: log.end(),
            last_epoch: if blind { None } else { log.last_epoch() },
            written: self.told.0,
            durable: self.told.1,
            log_start: self.told.2,
            cleaned_below: self.cleaned_below(log),
        };
        effects.push(Effect::Fetch { to: self.leader, id, fetch });
    }

    /// A log that ends below what compaction elsewhere has removed counts only if it was begun over it.
    fn cleaned_below(&self, log: &dyn LogView) -> Offset {
        let below = log.cleaned_below();
        if log.end() >= below || self.rebuilding { below } else { Offset(0) }
    }

    /// Compaction has removed tombstones and markers below an offset. A log that reaches it has seen them, an empty one
    /// holds nothing that they ended; any other would keep deleted keys and aborted transactions for good.
    fn on_cleaned(&mut self, below: Offset, log_start: Offset, log: &dyn LogView, effects: &mut Vec<Effect>) {
        self.agreed = false;
        self.phase = Phase::Changing;
        let (is_empty, reaches) = (log.start() == log.end(), log.end() >= below);
        self.rebuilding = !reaches;
        effects.push(if reaches || is_empty {
            Effect::NoteCleaned { below }
        } else {
            Effect::Rebuild { below, start: log_start }
        });
    }

    fn rest(&mut self, now_ms: u64) {
        let pause_ms = self.tuning.backoff_ms << self.failures.min(10);
        self.failures += 1;
        self.phase = Phase::Resting { until_ms: now_ms + pause_ms.min(self.tuning.max_backoff_ms) };
    }

    /// The logs part somewhere in the leader's `epoch`, which ends at `end` there: cut to the last offset both may
    /// share. If we do not know that epoch, what we have of the ones before it is asked about next.
    fn cut(&mut self, epoch: Option<LeaderEpoch>, end: Offset, log: &dyn LogView, effects: &mut Vec<Effect>) {
        let ours = match epoch {
            None => end,
            Some(epoch) => log.end_of_epoch(epoch).map_or(log.start(), |(_, ours)| ours),
        };
        let to = ours.min(end);
        self.agreed = false;
        self.rebuilding = false;
        self.phase = Phase::Changing;
        effects.push(if to < log.start() { Effect::Reset { start: to } } else { Effect::Truncate { to } });
    }

    fn begin_anew(&mut self, log_start: Offset, now_ms: u64, effects: &mut Vec<Effect>) {
        self.agreed = false;
        match self.policy {
            ResetPolicy::LogStart => {
                self.phase = Phase::Changing;
                effects.push(Effect::Reset { start: log_start });
            }
            ResetPolicy::InstallSnapshot => {
                self.phase = Phase::Installing(Install::default());
                self.fetch_snapshot(now_ms, effects);
            }
        }
    }

    fn fetch_snapshot(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        let Phase::Installing(install) = &mut self.phase else { return };
        let (snapshot, position) = install.on_ask(now_ms);
        let fetch = SnapshotFetch { from: self.me, leader_epoch: self.epoch, snapshot, position };
        effects.push(Effect::FetchSnapshot { to: self.leader, fetch });
    }
}

#[cfg(test)]
mod tests;
