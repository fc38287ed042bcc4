//! From what a turn did to frames of the journal.
//!
//! What the log does not take at once waits in [`crate::effects::Effects`] with its journal positions given, so the gates of
//! answers and the hazards of keys stay right however long that takes. Writes are held back while much waits.

use moim_replica::machine::InstallError;
use moim_wire_resp::OwnedArgs;

use super::{Role, Shard, State, Turn};
use crate::effects::{Effects, FrameLimits};
use crate::error::Error;
use crate::log::LogError;
use crate::moves;

/// Effects of one frame; a turn with more appends in between.
const FRAME_BYTES: usize = 256 << 10;
/// The largest argument of a step: arguments of one command are smaller than 4 GiB together.
const STEP_BYTES: usize = 64 << 20;

impl State {
    /// The journal end that commits everything so far.
    pub(crate) fn end(&self) -> i64 {
        self.applied + self.fx.queued() + i64::from(!self.fx.is_empty())
    }

    /// The journal end that commits the batch in the making, unless it becomes a group.
    pub(super) fn next_end(&self) -> i64 {
        self.applied + self.fx.queued() + 1
    }

    /// Ends the batch in the making. Where it is a group, everything that it changed waits for the last piece.
    fn seal(&mut self, now: i64) {
        if self.fx.seal(now) {
            self.events.hazards.batch = self.end();
            self.events.hazards.mark_all();
            self.events.gate = self.end();
        }
        self.events.hazards.batch = self.next_end();
    }
}

impl Shard {
    /// Frames of other sizes than usual; for tests, before anything is done.
    pub fn set_frame_limits(&self, limits: FrameLimits) {
        self.lock().fx = Effects::with_limits(limits);
    }
}

impl Turn<'_> {
    /// Appends when there is much.
    pub(crate) fn maybe_append(&mut self) {
        if self.state.fx.len() >= FRAME_BYTES {
            self.append();
        }
    }

    /// A command has run. If it recorded more than fits one frame, its answer waits for the whole group.
    #[inline]
    pub(crate) fn close_large(&mut self) {
        if self.state.fx.is_large() {
            let now = self.now;
            self.state.seal(now);
        }
    }

    /// Appends what was done. What the log does not take now stays, and is tried again by the keeper; its answers wait.
    pub(crate) fn append(&mut self) {
        let state = &mut *self.state;
        if state.fx.is_settled() {
            return;
        }
        if state.fx.queued() == 0 && !state.fx.is_large() {
            let (base, epoch, now) = (state.applied, state.epoch, self.now);
            match self.shard.log.append(base, epoch, now, state.fx.payload(now)) {
                Ok(()) => {
                    state.fx.clear_batch();
                    state.applied += 1;
                    state.events.hazards.batch = state.next_end();
                    return;
                }
                Err(LogError::Later) => {}
                Err(LogError::NotLeader) => return self.lose_lead(),
            }
        }
        self.append_queued();
    }

    fn append_queued(&mut self) {
        let now = self.now;
        let state = &mut *self.state;
        let was_congested = state.fx.is_congested();
        state.seal(now);
        while let Some(next) = state.fx.front() {
            match self.shard.log.append(state.applied, state.epoch, next.time_ms(), &next.payload()) {
                Ok(()) => {
                    state.fx.on_taken();
                    state.applied += 1;
                }
                Err(LogError::Later) => break,
                Err(LogError::NotLeader) => return self.lose_lead(),
            }
        }
        state.events.hazards.batch = state.next_end();
        if was_congested && !state.fx.is_congested() {
            state.parked.wake();
        }
        if !state.fx.is_settled() && self.shard.at_rest.load(std::sync::atomic::Ordering::Relaxed) {
            self.shard.news.notify_one();
        }
    }

    /// Memory is ahead of a journal that another primary writes now: it is read anew, and nothing of this leaves.
    fn lose_lead(&mut self) {
        self.state.epoch = -1;
        self.shard.set_role(Role::Loading);
        self.shard.void_answers();
        self.shard.news.notify_one();
    }

    /// Holds a write back while the journal has much to catch up with.
    #[inline]
    pub(crate) fn check_congestion(&self) -> Result<(), Error> {
        if self.state.fx.is_congested() { Err(Error::HELD) } else { Ok(()) }
    }

    /// Records a step of a move and does what it says.
    pub(crate) fn step(&mut self, args: &[&[u8]]) {
        let owned = OwnedArgs::from_slices(args);
        match self.state.apply_step(&owned.args()) {
            Ok(()) => self.state.fx.push_slices(args),
            Err(error) => tracing::error!(%error, "a step of a move was not made"),
        }
    }

    /// Records that these keys of a move have come, and takes them in. The same as steps, without a copy of the keys.
    pub(crate) fn load(&mut self, id: &str, keys: &[u8]) -> Result<(), InstallError> {
        self.state.load(keys)?;
        // In one batch: all of it is replayed, or nothing.
        self.append();
        let mut pieces = keys.chunks(STEP_BYTES);
        let last = pieces.next_back().unwrap_or_default();
        for piece in pieces {
            self.state.fx.push_slices(&[moves::PART, id.as_bytes(), piece]);
        }
        self.state.fx.push_slices(&[moves::LOAD, id.as_bytes(), last]);
        Ok(())
    }
}
