//! A follower of one partition: fetches from the leader, after making its log a prefix of the leader's.
//!
//! One fetch is in flight at a time. Every fetch carries the believed leader epoch and the end of the log (offset and
//! epoch of the newest record), so the leader can detect divergence. If the logs diverge, the follower truncates its
//! log at the epoch boundary and fetches again, until both agree. It never truncates at its high watermark: records
//! past it may be committed without the follower's knowledge.
//!
//! Invariants:
//! - within one leader epoch, once an answer brought records or nothing new, the log only grows;
//! - nothing is reported to a leader before that;
//! - the high watermark is never past the log end.
//!
//! It must never append the records of an answer unless [`Follower::accepts`] confirms that the answer is expected.

use moim_base::{BrokerId, LeaderEpoch, Offset};

use crate::log::LogView;
use crate::machine::{Chunk, SnapshotFetch, SnapshotTransfer};
use crate::message::{Answer, Fetch, Refusal, Report, Sender};
use crate::mutant::{Mutant, Mutants};
use crate::replica::Effect;

/// The reaction to an out-of-range fetch: the leader no longer has the next records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ResetPolicy {
    /// Reset the log to the leader's log start: the older records are deleted cluster-wide (the queue).
    #[default]
    LogStart,
    /// SnapshotTransfer the leader's snapshot and continue from its end: the journal is only the tail of the state (shards).
    InstallSnapshot,
}

/// The follower's timeouts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FollowerTuning {
    /// The first retry backoff; it doubles with each failure.
    pub backoff_ms: u64,
    /// The maximum backoff.
    pub max_backoff_ms: u64,
    /// A fetch without an answer for this long has failed. Longer than a leader parks a fetch.
    pub timeout_ms: u64,
    /// A snapshot chunk that has not arrived for this long is requested again.
    pub chunk_timeout_ms: u64,
}

impl Default for FollowerTuning {
    fn default() -> Self {
        Self { backoff_ms: 20, max_backoff_ms: 1_000, timeout_ms: 3_000, chunk_timeout_ms: 3_000 }
    }
}

#[derive(Debug)]
enum Phase {
    /// A fetch is in flight.
    Waiting { id: u64, sent_ms: u64 },
    /// The log is being truncated or reset.
    Changing,
    /// A snapshot transfer is in progress.
    Installing(SnapshotTransfer),
    /// Idle until then.
    BackingOff { until_ms: u64 },
}

/// The follower state of one partition.
#[derive(Debug)]
pub struct Follower {
    me: Sender,
    leader: BrokerId,
    epoch: LeaderEpoch,
    /// The mod revision of the newest known record.
    record: i64,
    phase: Phase,
    next_id: u64,
    /// True once the leader has confirmed in this epoch that our log is a prefix of its own.
    matched: bool,
    high_watermark: Offset,
    /// The offsets last reported to the leader: (written, durable, log start).
    reported: (Offset, Offset, Offset),
    /// The lower bound of the leader's log end, once it has answered in this epoch.
    leader_end: Option<Offset>,
    /// See [`FollowerParams::rebuilding`].
    rebuilding: bool,
    failures: u32,
    policy: ResetPolicy,
    tuning: FollowerTuning,
    mutants: Mutants,
}

/// The parameters of following, except for the leader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FollowerParams {
    pub(crate) me: Sender,
    pub(crate) policy: ResetPolicy,
    pub(crate) tuning: FollowerTuning,
    pub(crate) mutants: Mutants,
    /// The mod revision of the record that makes this replica a follower.
    pub(crate) record: i64,
    /// The first fetch id to use: ids are never reused during the life of a replica.
    pub(crate) next_id: u64,
    /// The log was reset, in this run, because of compaction elsewhere: it may end below [`LogView::cleaned_below`].
    /// Any other log that ends below it (truncation, crash) contains records whose tombstones or markers it will
    /// never see.
    pub(crate) rebuilding: bool,
}

impl Follower {
    /// Follows `leader` in leader epoch `epoch`.
    pub(crate) fn become_follower(
        how: FollowerParams,
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
            matched: false,
            high_watermark: high_watermark.min(log.end()),
            reported: (Offset(0), Offset(0), Offset(0)),
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

    /// The leader and its leader epoch.
    pub fn leader(&self) -> (BrokerId, LeaderEpoch) {
        (self.leader, self.epoch)
    }

    /// A newer record confirms the same role.
    pub(crate) fn on_record(&mut self, revision: i64) {
        self.record = revision;
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next_id
    }

    pub(crate) fn is_rebuilding(&self) -> bool {
        self.rebuilding
    }

    /// The lower bound of the leader's log end; `None` before it has answered in this epoch.
    pub fn leader_end(&self) -> Option<Offset> {
        self.leader_end
    }

    fn note_leader_end(&mut self, end: Offset) {
        self.leader_end = Some(self.leader_end.map_or(end, |known| known.max(end)));
    }

    /// The known high watermark: everything below is committed.
    pub fn high_watermark(&self) -> Offset {
        self.high_watermark
    }

    /// True if the fetch with this id is the one in flight. Check before appending the records of its answer.
    pub fn accepts(&self, fetch: u64) -> bool {
        matches!(self.phase, Phase::Waiting { id, .. } if id == fetch)
    }

    /// The answer to a fetch. Its records are already appended: `log` includes them.
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
                self.matched = true;
                self.note_leader_end(log_end.max(high_watermark));
                let start = log_start.min(log.end());
                // Where the log is the tail of a state, its start advances only when our own snapshot is kept.
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
            Answer::Diverging { epoch, end } => self.truncate(epoch, end, log, effects),
            Answer::OutOfRange { log_start } => {
                self.note_leader_end(log_start);
                self.reset(log_start, now_ms, effects);
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
        self.back_off(now_ms);
        match refusal {
            // The leader knows a newer record than we do.
            Refusal::FencedEpoch(_) | Refusal::NotLeader | Refusal::NotReplica | Refusal::StaleBroker => {
                effects.push(Effect::Refresh);
            }
            // We know a newer record than the leader: it will receive it.
            Refusal::UnknownEpoch(_) => {}
        }
    }

    /// A fetch got no answer, or its records could not be appended.
    pub fn on_failed(&mut self, fetch: u64, now_ms: u64) {
        if self.accepts(fetch) {
            self.back_off(now_ms);
        }
    }

    /// The log is damaged, and the fetch was not sent: nothing may be appended. Returns true if the log must be reset
    /// to empty, followed by `on_changed`; never while a partition record counts on the replica.
    pub fn on_damaged(&mut self, fetch: u64, is_counted_on: bool, now_ms: u64) -> bool {
        if !self.accepts(fetch) {
            return false;
        }
        if is_counted_on {
            self.back_off(now_ms);
            return false;
        }
        self.matched = false;
        self.phase = Phase::Changing;
        true
    }

    /// Damage was found in the log: the fetch in flight will get no answer.
    pub fn on_damage_found(&mut self, now_ms: u64) {
        if let Phase::Waiting { id, .. } = self.phase {
            self.on_failed(id, now_ms);
        }
    }

    /// The log was truncated or reset as requested.
    pub fn on_changed(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        if matches!(self.phase, Phase::Changing) {
            // Below the high watermark only if an unclean election gave up committed records.
            self.high_watermark = self.high_watermark.min(log.end()).max(log.start());
            self.fetch(log, now_ms, effects);
        }
    }

    /// A chunk of the leader's snapshot arrived.
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

    /// The leader is reachable, perhaps again: earlier requests and reports were lost.
    pub fn on_connected(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        self.failures = 0;
        match &self.phase {
            Phase::Waiting { .. } | Phase::BackingOff { .. } => self.fetch(log, now_ms, effects),
            Phase::Installing(_) => self.fetch_snapshot(now_ms, effects),
            Phase::Changing => {}
        }
    }

    /// The leader's high watermark, sent beside its answers. Counts only once the leader has confirmed that our log
    /// is a prefix of its own.
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
        if self.matched && epoch == self.epoch && known > self.high_watermark {
            self.high_watermark = known;
            effects.push(Effect::HighWatermark(known));
        }
    }

    /// True if a fetch is in flight and no timeout matters.
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    /// The local disk has progressed, or the log start has advanced.
    pub fn on_durable(&mut self, log: &dyn LogView, effects: &mut Vec<Effect>) {
        let now = (log.written(), log.durable(), log.start());
        if self.matched && now != self.reported {
            self.reported = now;
            let (from, leader_epoch, record) = (self.me, self.epoch, self.record);
            let (written, durable, log_start) = now;
            let report = Report { from, leader_epoch, record, written, durable, log_start };
            effects.push(Effect::Report { to: self.leader, report });
        }
    }

    /// Time passed. Called a few times a second.
    pub fn on_tick(&mut self, log: &dyn LogView, now_ms: u64, effects: &mut Vec<Effect>) {
        match &self.phase {
            Phase::BackingOff { until_ms } if now_ms >= *until_ms => self.fetch(log, now_ms, effects),
            Phase::Waiting { sent_ms, .. } if now_ms.saturating_sub(*sent_ms) > self.tuning.timeout_ms => {
                self.back_off(now_ms);
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
        self.reported = (log.written(), log.durable(), log.start());
        let blind = self.mutants.has(Mutant::TruncateByHighWatermark);
        let fetch = Fetch {
            from: self.me,
            leader_epoch: self.epoch,
            record: self.record,
            offset: log.end(),
            last_epoch: if blind { None } else { log.last_epoch() },
            written: self.reported.0,
            durable: self.reported.1,
            log_start: self.reported.2,
            cleaned_below: self.cleaned_below(log),
        };
        effects.push(Effect::Fetch { to: self.leader, id, fetch });
    }

    /// A log that ends below the compaction boundary counts only if it was rebuilt since.
    fn cleaned_below(&self, log: &dyn LogView) -> Offset {
        let below = log.cleaned_below();
        if log.end() >= below || self.rebuilding { below } else { Offset(0) }
    }

    /// Compaction has removed tombstones and markers below an offset. A log that reaches it has seen them, and an
    /// empty log contains nothing that they ended; any other log would keep deleted keys and aborted transactions
    /// forever.
    fn on_cleaned(&mut self, below: Offset, log_start: Offset, log: &dyn LogView, effects: &mut Vec<Effect>) {
        self.matched = false;
        self.phase = Phase::Changing;
        let (is_empty, reaches) = (log.start() == log.end(), log.end() >= below);
        self.rebuilding = !reaches;
        effects.push(if reaches || is_empty {
            Effect::NoteCleaned { below }
        } else {
            Effect::Rebuild { below, start: log_start }
        });
    }

    fn back_off(&mut self, now_ms: u64) {
        let pause_ms = self.tuning.backoff_ms << self.failures.min(10);
        self.failures += 1;
        self.phase = Phase::BackingOff { until_ms: now_ms + pause_ms.min(self.tuning.max_backoff_ms) };
    }

    /// The logs diverge within the leader's `epoch`, which ends at `end` there: truncate to the last offset that both
    /// may share. If we do not know that epoch, the next fetch asks about our epochs before it.
    fn truncate(
        &mut self,
        epoch: Option<LeaderEpoch>,
        end: Offset,
        log: &dyn LogView,
        effects: &mut Vec<Effect>,
    ) {
        let ours = match epoch {
            None => end,
            Some(epoch) => log.end_of_epoch(epoch).map_or(log.start(), |(_, ours)| ours),
        };
        let to = ours.min(end);
        self.matched = false;
        self.rebuilding = false;
        self.phase = Phase::Changing;
        effects.push(if to < log.start() { Effect::Reset { start: to } } else { Effect::Truncate { to } });
    }

    fn reset(&mut self, log_start: Offset, now_ms: u64, effects: &mut Vec<Effect>) {
        self.matched = false;
        match self.policy {
            ResetPolicy::LogStart => {
                self.phase = Phase::Changing;
                effects.push(Effect::Reset { start: log_start });
            }
            ResetPolicy::InstallSnapshot => {
                self.phase = Phase::Installing(SnapshotTransfer::default());
                self.fetch_snapshot(now_ms, effects);
            }
        }
    }

    fn fetch_snapshot(&mut self, now_ms: u64, effects: &mut Vec<Effect>) {
        let Phase::Installing(install) = &mut self.phase else { return };
        let (snapshot, position) = install.next_chunk(now_ms);
        let fetch = SnapshotFetch { from: self.me, leader_epoch: self.epoch, snapshot, position };
        effects.push(Effect::FetchSnapshot { to: self.leader, fetch });
    }
}

#[cfg(test)]
mod tests;
