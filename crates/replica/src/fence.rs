//! The serving right of a primary: its permission to answer from memory, for journals whose readers must never see a
//! stale state (shards).
//!
//! A leader epoch fences writes: the appends of a deposed leader are never committed. It does not fence reads: a
//! deposed primary that is not yet aware of it would return stale state. Therefore a primary answers only while it
//! holds a *serving right*, and a new primary waits until every serving right of its predecessors has expired.
//!
//! The argument, in real time. Let `L` be the length, and let clocks that run be within 10% of each other in rate.
//! 1. The old primary sent its last good read of its fence key at `Ts`. The read was linearizable and returned the value
//!    it knew, so the election that takes its leadership away, which changes that key in the same transaction, happened
//!    at some `Te >= Ts`.
//! 2. It answers while its own clock says less than 0.9 `L` since it sent: in real time that ends before `Ts + L'`,
//!    where `L'` is the length as the faster of the two clocks measures it.
//! 3. The new primary saw its election at `Tn >= Te`, and waits the whole `L` on its own clock.
//!
//! Hence the last answer of the old primary precedes the first answer of the new one. The check runs after a command
//! was executed and before its reply is sent: a process that was paused in between must not send a stale result.
//! Clocks must count time spent suspended (boot time).
//!
//! *Limits:* a clock that is off by more than 10% over 600 ms breaks it. Queue partitions do not use it: their
//! readers are fenced by the high watermark and by the epochs they carry.

/// The durations of serving rights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FenceTuning {
    /// The duration of a serving right, and of a new primary's wait.
    pub length_ms: u64,
    /// How much earlier the holder stops, in percent.
    pub margin_percent: u64,
}

impl Default for FenceTuning {
    fn default() -> Self {
        Self { length_ms: 600, margin_percent: 10 }
    }
}

/// The meaning of a read of the fence key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceNews {
    /// The key is unchanged: the serving right is extended.
    Extended,
    /// A leadership was taken away: the records up to this revision must be applied, then
    /// [`ServingRight::on_applied`] called.
    Changed {
        /// The revision of the change.
        revision: i64,
    },
}

/// The serving right of one node: one key covers all its shards.
#[derive(Debug)]
pub struct ServingRight {
    tuning: FenceTuning,
    /// The fence key revision that this node has applied.
    applied: i64,
    /// A read that reported a change: (its revision, its send time).
    waiting: Option<(i64, u64)>,
    until_ms: u64,
}

impl ServingRight {
    /// Starts without a serving right.
    pub fn new(tuning: FenceTuning) -> Self {
        Self { tuning, applied: 0, waiting: None, until_ms: 0 }
    }

    /// A linearizable read of the fence key, sent at `sent_ms`, returned this revision (0: the key does not exist).
    pub fn on_read(&mut self, sent_ms: u64, revision: i64) -> FenceNews {
        if revision > self.applied {
            self.waiting = Some((revision, sent_ms));
            return FenceNews::Changed { revision };
        }
        self.extend(sent_ms);
        FenceNews::Extended
    }

    /// Every record up to this revision was applied: leaderships that were taken away are no longer served.
    pub fn on_applied(&mut self, revision: i64) {
        self.applied = self.applied.max(revision);
        if let Some((_, sent_ms)) = self.waiting.take_if(|(wanted, _)| *wanted <= self.applied) {
            self.extend(sent_ms);
        }
    }

    /// True if a reply may be sent. Check after executing the command.
    pub fn may_answer(&self, now_ms: u64) -> bool {
        now_ms < self.until_ms
    }

    /// The expiry of the serving right.
    pub fn until_ms(&self) -> u64 {
        self.until_ms
    }

    fn extend(&mut self, sent_ms: u64) {
        let usable_ms = self.tuning.length_ms * (100 - self.tuning.margin_percent) / 100;
        self.until_ms = self.until_ms.max(sent_ms + usable_ms);
    }
}

/// A new primary's wait for the former serving right, per shard.
#[derive(Clone, Copy, Debug)]
pub struct Takeover {
    answers_from_ms: u64,
}

impl Takeover {
    /// The election was seen now. `released` states that the former primary recorded that it had stopped answering.
    pub fn new(tuning: FenceTuning, now_ms: u64, released: bool) -> Self {
        Self { answers_from_ms: if released { now_ms } else { now_ms + tuning.length_ms } }
    }

    /// True once the wait is over.
    pub fn may_answer(&self, now_ms: u64) -> bool {
        now_ms >= self.answers_from_ms
    }
}

#[cfg(test)]
mod tests;
