//! Log changes of a replica other than its leader's appends: validating and appending fetched records, truncation,
//! reset, snapshot install, advancing the log start.
//!
//! Everything that blocks on the disk runs elsewhere, with the replica *changing* meanwhile. It must never append
//! unvalidated records, nor call the state machine before a change is durable.

use std::sync::Arc;
use std::time::Duration;

use moim_base::{LeaderEpoch, Offset};
use moim_journal::{Append, AppendError, Cleaned, Frame};

use super::{Records, Replicated, State};
use crate::driver::owner::Owner;
use crate::machine::Snapshot;
use crate::message::{Answer, Refusal};
use crate::replica::Replica;

/// The pause before the next fetch after the disk refused to note the compaction boundary.
const NOTE_PAUSE: Duration = Duration::from_millis(500);

/// A log change.
pub(super) enum Change {
    Truncate(Offset),
    Reset(Offset),
    /// Discard a damaged replica: an empty log from 0.
    Repair,
    Install(Snapshot),
    NoteCleaned(Offset),
    Rebuild(Offset, Offset),
}

impl Replicated {
    /// The lower bound of the followed leader's log end; `None` before it has answered.
    pub fn leader_end(&self) -> Option<Offset> {
        self.locked().replica.as_mut()?.follower()?.leader_end()
    }

    /// Compaction may remove tombstones and markers below this offset. A leader waits for its fetching followers; a
    /// follower removes what its leader may have removed.
    pub fn removable_below(&self) -> Offset {
        let mut state = self.locked();
        match state.replica.as_mut().and_then(Replica::leader) {
            Some(leader) => leader.fetched_by_all_followers(),
            None => Offset(self.journal.cleaned_below()),
        }
    }

    /// Validates the frames of an answer, without the lock.
    pub(super) fn check(
        &self,
        epoch: LeaderEpoch,
        answer: &Result<Answer, Refusal>,
        records: &Records,
    ) -> Result<Vec<Frame>, &'static str> {
        if records.bytes.is_empty() {
            return Ok(Vec::new());
        }
        if !matches!(answer, Ok(Answer::Records { .. })) {
            return Err("records in an answer without records");
        }
        let frames = self.journal.split(&records.bytes).ok_or("damaged batch")?;
        // A leader has no batch newer than its own leader epoch: such bytes were written after its leadership ended.
        match frames.iter().all(|frame| frame.epoch <= epoch.0) {
            true => Ok(frames),
            false => Err("batch of a later leader epoch"),
        }
    }

    /// Appends fetched frames. Where the leader's log has a compaction gap, ours gets an empty frame of the same
    /// extent: a journal has no gaps until it is compacted itself.
    pub(super) fn append(
        &self,
        owner: Option<&dyn Owner>,
        frames: &[Frame],
        records: &Records,
    ) -> Result<(), AppendError> {
        let span = &records.span;
        if span.next > span.from && span.from.0 != self.journal.end() {
            return Err(AppendError::NotNext { expected: self.journal.end() });
        }
        let mut rest = records.bytes.clone();
        for frame in frames {
            let body = rest.split_to(frame.len);
            if frame.base < self.journal.end()
                && self.journal.filler(frame.base, frame.last, frame.epoch) == Some(body.clone())
            {
                // The leader filled a larger gap than its predecessor did: the rest of it is filled here.
                self.fill(frame.last + 1, frame.epoch)?;
                continue;
            }
            self.fill(frame.base, frame.epoch)?;
            self.journal.append(Append {
                base: frame.base,
                last: frame.last,
                epoch: frame.epoch,
                max_timestamp_ms: frame.max_timestamp_ms,
                prefix: &[],
                body: &body,
            })?;
            if let Some(owner) = owner {
                owner.on_appended(std::slice::from_ref(frame), &body);
            }
        }
        self.fill(span.next.0, span.next_epoch.0)
    }

    fn fill(&self, until: i64, epoch: i32) -> Result<(), AppendError> {
        while self.journal.end() < until {
            let base = self.journal.end();
            let body = self.journal.filler(base, until - 1, epoch).ok_or(AppendError::Damaged)?;
            let frame = self.journal.split(&body).and_then(|frames| frames.first().copied());
            let frame = frame.ok_or(AppendError::Damaged)?;
            let (last, max_timestamp_ms) = (frame.last, frame.max_timestamp_ms);
            self.journal.append(Append { base, last, epoch, max_timestamp_ms, prefix: &[], body: &body })?;
        }
        Ok(())
    }

    /// Advances the log start, elsewhere: it blocks on the disk.
    pub(super) fn set_start(self: &Arc<Self>, state: &mut State, start: Offset) {
        if state.starting.is_some_and(|under_way| under_way >= start) {
            return;
        }
        state.starting = Some(start);
        let (id, journal, replica) = (self.id, Arc::clone(&self.journal), Arc::clone(self));
        let work = move || {
            if let Err(error) = journal.set_start(start.0) {
                tracing::debug!(partition = %id, %error, "log start not advanced");
            }
            true
        };
        self.shared.spawn_change("replica-start", work, move || {
            let mut state = replica.locked();
            state.starting = state.starting.filter(|newest| *newest > start);
            // Report it to the leader: a DeleteRecords request may wait for it.
            replica.step(&mut state, |replica, log, _, effects| replica.on_durable(log, effects));
        });
    }

    pub(super) fn change(self: &Arc<Self>, state: &mut State, change: Change) {
        state.changing = true;
        let (replica, this, owner) = (Arc::clone(self), Arc::clone(self), state.owner.clone());
        let work = move || match replica.make_change(owner.as_deref(), change) {
            Ok(()) => true,
            Err(error) => {
                tracing::error!(partition = %replica.id, error, "log truncation, reset or snapshot install failed");
                false
            }
        };
        self.shared.spawn_change("replica-change", work, move || this.on_log_changed());
    }

    fn make_change(&self, owner: Option<&dyn Owner>, change: Change) -> Result<(), String> {
        let Some(owner) = owner else { return Ok(()) };
        let result = match change {
            Change::Truncate(to) => {
                tracing::info!(partition = %self.id, from = self.journal.end(), %to, "log truncated to leader epoch");
                self.journal.truncate(to.0)
            }
            Change::Reset(start) => {
                tracing::info!(partition = %self.id, %start, "log reset to leader's log start");
                self.journal.reset(start.0, None)
            }
            Change::NoteCleaned(below) => {
                self.note_cleaned(below, self.journal.cleaned());
                return Ok(());
            }
            Change::Rebuild(below, start) => {
                tracing::warn!(
                    partition = %self.id, end = self.journal.end(), cleaned_below = %below, %start,
                    "replica rebuilt: away for longer than the leader keeps tombstones and markers"
                );
                // First: a crash in between leaves a log that ends below the compaction boundary, and is rebuilt
                // then.
                if !self.note_cleaned(below, Cleaned::default()) {
                    return Ok(());
                }
                self.journal.reset(start.0, None)
            }
            Change::Repair => {
                let emptied = self.journal.reset(0, None);
                if emptied.is_ok() {
                    owner.forget_snapshots().map_err(|error| error.to_string())?;
                }
                emptied
            }
            Change::Install(snapshot) => {
                let (end, epoch) = (snapshot.end, snapshot.last_epoch);
                tracing::info!(partition = %self.id, %end, "leader snapshot installed");
                // The state first: without it a log that begins at its end is meaningless.
                owner.install(snapshot).map_err(|error| error.to_string())?;
                self.journal.reset(end.0, Some(epoch.0))
            }
        };
        result.map_err(|error| error.to_string())?;
        owner.on_cut(Offset(self.journal.end()));
        Ok(())
    }

    /// Returns whether it is noted; if not, the leader repeats it in the answer to the next fetch.
    fn note_cleaned(&self, below: Offset, mut cleaned: Cleaned) -> bool {
        cleaned.below = cleaned.below.max(below.0);
        let noted = self.journal.note_cleaned(cleaned);
        if let Err(error) = &noted {
            tracing::warn!(partition = %self.id, %error, "compaction boundary not noted; retrying");
            std::thread::sleep(NOTE_PAUSE);
        }
        noted.is_ok()
    }

    fn on_log_changed(self: &Arc<Self>) {
        let mut state = self.locked();
        state.changing = false;
        if state.owner.is_none() {
            return;
        }
        self.step(&mut state, |replica, log, now_ms, effects| {
            if let Some(follower) = replica.follower() {
                follower.on_changed(log, now_ms, effects);
            }
        });
        self.start_run(&mut state);
        if let Some(record) = state.record.clone() {
            self.step(&mut state, |replica, log, now_ms, effects| {
                replica.on_record(record, log, now_ms, effects);
            });
        }
    }
}
