//! The right of a primary to answer from memory, for journals whose readers must never see an old state (shards).
//!
//! A leader epoch fences writes: what a deposed leader appends is never committed. It does not fence reads: a deposed
//! primary that does not know it yet would answer with what was true before. So a primary answers only while it holds a
//! *serving right*, and a new one waits until every right that was held against it has run out.
//!
//! The argument, in real time. Let `L` be the length, and let clocks that run be within 10% of each other in rate.
//! 1. The old primary sent its last good read of its fence key at `Ts`. The read was linearizable and returned the value
//!    it knew, so the election that takes its leadership away, which changes that key in the same transaction, happened
//!    at some `Te >= Ts`.
//! 2. It answers while its own clock says less than 0.9 `L` since it sent: in real time that ends before `Ts + L'`,
//!    where `L'` is the length as the faster of the two clocks measures it.
//! 3. The new primary saw its election at `Tn >= Te`, and waits the whole `L` by its own clock.
//!
//! Hence the last answer of the old one is before the first of the new one. The check comes after a command was executed
//! and before its reply leaves: a process that was paused in between must not send what it computed before. Clocks must
//! count time spent suspended (boot time).
//!
//! *Limits:* a clock that is wrong by more than 10% over 600 ms breaks it. Queue partitions do not use it: their readers
//! are fenced by the high watermark and by epochs they carry.

/// Lengths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FenceTuning {
    /// How long a right lasts, and how long a new primary waits.
    pub length_ms: u64,
    /// How much earlier the holder stops.
    pub margin_percent: u64,
}

impl Default for FenceTuning {
    fn default() -> Self {
        Self { length_ms: 600, margin_percent: 10 }
    }
}

/// What a read of the fence key meant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceNews {
    /// Nothing was taken away: the right lasts longer.
    Extended,
    /// Something was taken away: the records up to this revision must be acted on, and then
    /// [`ServingRight::on_applied`] called.
    Changed {
        /// The revision of the change.
        revision: i64,
    },
}

/// The right of one node: one key stands for all its shards.
#[derive(Debug)]
pub struct ServingRight {
    tuning: FenceTuning,
    /// The fence key's revision whose consequences this node has drawn.
    applied: i64,
    /// A read that told of a change: (its revision, when it was sent).
    waiting: Option<(i64, u64)>,
    until_ms: u64,
}

impl ServingRight {
    /// No right yet.
    pub fn new(tuning: FenceTuning) -> Self {
        Self { tuning, applied: 0, waiting: None, until_ms: 0 }
    }

    /// A linearizable read of the fence key, sent at `sent_ms`, found this revision (0: no such key).
    pub fn on_read(&mut self, sent_ms: u64, revision: i64) -> FenceNews {
        if revision > self.applied {
            self.waiting = Some((revision, sent_ms));
            return FenceNews::Changed { revision };
        }
        self.extend(sent_ms);
        FenceNews::Extended
    }

    /// Every record up to this revision was acted on: what was taken away is no longer served.
    pub fn on_applied(&mut self, revision: i64) {
        self.applied = self.applied.max(revision);
        if let Some((_, sent_ms)) = self.waiting.take_if(|(wanted, _)| *wanted <= self.applied) {
            self.extend(sent_ms);
        }
    }

    /// Whether a reply may leave. Ask after executing.
    pub fn may_answer(&self, now_ms: u64) -> bool {
        now_ms < self.until_ms
    }

    /// Until when replies may leave.
    pub fn until_ms(&self) -> u64 {
        self.until_ms
    }

    fn extend(&mut self, sent_ms: u64) {
        let usable_ms = self.tuning.length_ms * (100 - self.tuning.margin_percent) / 100;
        self.until_ms = self.until_ms.max(sent_ms + usable_ms);
    }
}

/// A new primary's wait, per shard.
#[derive(Clone, Copy, Debug)]
pub struct Takeover {
    answers_from_ms: u64,
}

impl Takeover {
    /// The election was seen now. `released` says that the former primary put on record that it had stopped.
    pub fn new(tuning: FenceTuning, now_ms: u64, released: bool) -> Self {
        Self { answers_from_ms: if released { now_ms } else { now_ms + tuning.length_ms } }
    }

    /// Whether the wait is over.
    pub fn may_answer(&self, now_ms: u64) -> bool {
        now_ms >= self.answers_from_ms
    }
}

#[cfg(test)]
mod tests;
