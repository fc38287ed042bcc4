//! Follower progress, as known to the leader.

use moim_base::{BrokerId, Offset};

use super::LeaderTuning;
use crate::message::{Refusal, Sender};
use crate::replica::Effect;

/// One follower.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    pub(super) node: BrokerId,
    /// The mod revision of the record that added this replica, within this leadership.
    since: i64,
    /// The newest run that was heard from.
    pub(super) run: Option<Sender>,
    /// True once a fetch of this leader epoch and this run has shown that its log is a prefix of ours. Its reported
    /// offsets count only then.
    pub(super) matched: bool,
    pub(super) written: Offset,
    pub(super) durable: Offset,
    /// Its log start offset.
    pub(super) log_start: Offset,
    /// The last time at which it had our whole log.
    caught_up_ms: u64,
    /// A past log end of ours and its time: when the follower reaches it, it had caught up with that time. Kept until
    /// reached: under steady load a follower is always slightly behind the newest log end.
    mark: (Offset, u64),
    /// The time at which its connection broke.
    pub(super) disconnected_ms: Option<u64>,
    /// Its log end offset according to its last fetch: what it has received, durable or not.
    received: Offset,
    /// Since when it has received more than commits may count on, without progress.
    stalled_since_ms: Option<u64>,
}

impl Progress {
    pub(super) fn new(node: BrokerId, since: i64, now_ms: u64) -> Self {
        Self {
            node,
            since,
            run: None,
            matched: false,
            written: Offset(0),
            durable: Offset(0),
            log_start: Offset(0),
            caught_up_ms: now_ms,
            mark: (Offset(i64::MAX), now_ms),
            disconnected_ms: None,
            received: Offset(0),
            stalled_since_ms: None,
        }
    }

    /// A newer run starts from nothing: the data of the older run may be gone. An older run is a ghost and is
    /// refused. A replica that was dropped before it was added again had another log.
    pub(super) fn check_run(&mut self, from: Sender, record: i64, now_ms: u64) -> Result<(), Refusal> {
        if record < self.since {
            return Err(Refusal::NotReplica);
        }
        match self.run {
            Some(run) if run.epoch > from.epoch => return Err(Refusal::StaleBroker),
            Some(run) if run == from => {}
            _ => {
                let caught_up_ms = self.caught_up_ms;
                *self = Self::new(self.node, self.since, now_ms);
                // A restart does not reset the lag timeout.
                self.caught_up_ms = caught_up_ms;
                self.run = Some(from);
            }
        }
        Ok(())
    }

    /// The offset that a commit may count on.
    pub(super) fn measure(&self, durable: bool) -> Offset {
        if durable { self.durable } else { self.written }
    }

    /// A fetch states the follower's actual log, which may be shorter than what we knew.
    pub(super) fn on_fetch(
        &mut self,
        (received, written, durable): (Offset, Offset, Offset),
        measure: bool,
        end: Offset,
        now_ms: u64,
    ) {
        let had = self.measure(measure);
        self.matched = true;
        (self.received, self.written, self.durable) = (received, written, durable);
        self.note_progress(had, measure, now_ms);
        self.note_caught_up(measure, end, now_ms);
    }

    /// A report may be overtaken by a fetch: it only adds.
    pub(super) fn on_report(
        &mut self,
        written: Offset,
        durable: Offset,
        measure: bool,
        end: Offset,
        now_ms: u64,
    ) {
        let had = self.measure(measure);
        self.written = self.written.max(written);
        self.durable = self.durable.max(durable);
        self.note_progress(had, measure, now_ms);
        self.note_caught_up(measure, end, now_ms);
    }

    /// Starts, restarts or clears the stall timer for received records that make no progress.
    fn note_progress(&mut self, had: Offset, measure: bool, now_ms: u64) {
        let has = self.measure(measure);
        self.stalled_since_ms = match self.stalled_since_ms {
            _ if has >= self.received => None,
            Some(since_ms) if has <= had => Some(since_ms),
            _ => Some(now_ms),
        };
    }

    /// The leader itself was paused for this long: it missed everything its followers sent in that time.
    pub(super) fn exclude_pause(&mut self, slept_ms: u64, now_ms: u64) {
        if let Some(since_ms) = &mut self.stalled_since_ms {
            *since_ms = (*since_ms + slept_ms).min(now_ms);
        }
    }

    /// How long its disk has made no progress with received records; zero if there is none to make.
    pub(super) fn stalled_ms(&self, now_ms: u64) -> u64 {
        self.stalled_since_ms.map_or(0, |since_ms| now_ms.saturating_sub(since_ms))
    }

    /// Updates its log start offset. It moves back only with another log, which a fetch reports.
    pub(super) fn note_log_start(&mut self, log_start: Offset, effects: &mut Vec<Effect>) {
        if self.log_start != log_start {
            self.log_start = log_start;
            effects.push(Effect::LowWatermark);
        }
    }

    /// It was alive at that time, and has reported nothing new since.
    pub(super) fn on_alive(&mut self, measure: bool, end: Offset, heard_ms: u64) {
        if self.matched && self.measure(measure) >= end {
            self.caught_up_ms = self.caught_up_ms.max(heard_ms);
            self.mark = (end, self.caught_up_ms);
        }
    }

    fn note_caught_up(&mut self, measure: bool, end: Offset, now_ms: u64) {
        let has = self.measure(measure);
        if has >= end {
            self.caught_up_ms = now_ms;
            self.mark = (end, now_ms);
        } else if has >= self.mark.0 || self.mark.0 == Offset(i64::MAX) {
            if has >= self.mark.0 {
                self.caught_up_ms = self.caught_up_ms.max(self.mark.1);
            }
            self.mark = (end, now_ms);
        }
    }

    /// True if the follower should leave the in-sync set.
    pub(super) fn is_too_slow(&self, measure: bool, end: Offset, now_ms: u64, tuning: &LeaderTuning) -> bool {
        let behind = !self.matched || self.measure(measure) < end;
        let lags = now_ms.saturating_sub(self.caught_up_ms) > tuning.lag_ms;
        let gone = self
            .disconnected_ms
            .is_some_and(|since_ms| now_ms.saturating_sub(since_ms) > tuning.disconnect_grace_ms);
        behind && (lags || gone)
    }
}
