//! Appending: turns the effects of a turn into frames of the journal.
//!
//! Effects that a busy log does not accept are queued in [`crate::effects::Effects`] with their journal offsets
//! assigned, so commit gates and hazards stay valid however long that takes. Writes are held while the queue is long.

use moim_replica::machine::InstallError;
use moim_wire_resp::OwnedArgs;

use super::time::LAG;
use super::{Role, Shard, State, Turn};
use crate::effects::{Effects, FrameLimits};
use crate::error::Error;
use crate::log::LogError;
use crate::migration::state::{LOAD, PART};

/// Effects of one frame; a turn with more appends in between.
const FRAME_BYTES: usize = 256 << 10;
/// The largest argument of a migration step: the arguments of one command are smaller than 4 GiB together.
const STEP_BYTES: usize = 64 << 20;

impl State {
    /// The journal end that commits everything so far.
    pub(crate) fn end(&self) -> i64 {
        self.applied + self.fx.queued() + i64::from(!self.fx.is_empty())
    }

    /// The journal end that commits the open batch, unless it becomes a group.
    pub(super) fn next_end(&self) -> i64 {
        self.applied + self.fx.queued() + 1
    }

    /// Closes the open batch. If it is a group, the commit gate of everything that it changed is its last frame.
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
    /// Sets the frame limits; for tests, before the first command.
    pub fn set_frame_limits(&self, limits: FrameLimits) {
        self.lock().fx = Effects::with_limits(limits);
    }
}

impl Turn<'_> {
    /// Appends if the open batch is large.
    pub(crate) fn maybe_append(&mut self) {
        if self.state.fx.len() >= FRAME_BYTES {
            self.append();
        }
    }

    /// Called after a command. If it recorded more than one frame can hold, its reply waits for the whole group.
    #[inline]
    pub(crate) fn close_large(&mut self) {
        if self.state.fx.is_large() {
            let now = self.now;
            self.state.seal(now);
        }
    }

    /// Appends the effects of the turn. Effects that a busy log does not accept stay queued and the shard task retries
    /// them; their replies wait.
    pub(crate) fn append(&mut self) {
        let state = &mut *self.state;
        if state.fx.is_settled() {
            return;
        }
        if let Some(lag_ms) = state.shard_clock.recorded_lag_ms().filter(|_| !state.fx.is_empty()) {
            state.fx.push_slices(&[LAG, lag_ms.to_string().as_bytes()]);
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
                Err(LogError::Busy) => {}
                Err(LogError::NotLeader) => return self.lose_leadership(),
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
                    state.fx.on_appended();
                    state.applied += 1;
                }
                Err(LogError::Busy) => break,
                Err(LogError::NotLeader) => return self.lose_leadership(),
            }
        }
        state.events.hazards.batch = state.next_end();
        if was_congested && !state.fx.is_congested() {
            state.held_connections.wake();
        }
        if !state.fx.is_settled() && self.shard.is_task_idle.load(std::sync::atomic::Ordering::Relaxed) {
            self.shard.task_wakeup.notify_one();
        }
    }

    /// Leadership is lost: the keyspace is ahead of a journal that another primary writes. It is replayed from the
    /// start, and the pending replies are voided.
    fn lose_leadership(&mut self) {
        self.state.epoch = -1;
        self.shard.set_role(Role::Loading);
        self.shard.void_pending_replies();
        self.shard.task_wakeup.notify_one();
    }

    /// Holds a write while the append queue is long.
    #[inline]
    pub(crate) fn check_congestion(&self) -> Result<(), Error> {
        if self.state.fx.is_congested() { Err(Error::HELD) } else { Ok(()) }
    }

    /// Records an internal effect (a migration step or a keyspace hash check) and applies it.
    pub(crate) fn step(&mut self, args: &[&[u8]]) {
        let owned = OwnedArgs::from_slices(args);
        match self.state.apply_step(&owned.args()) {
            Ok(()) => self.state.fx.push_slices(args),
            Err(error) => tracing::error!(%error, "slot migration: invalid step not recorded"),
        }
    }

    /// Records imported keys of a slot migration and loads them. Same effect as [`Turn::step`], without a copy of the
    /// keys.
    pub(crate) fn load(&mut self, id: &str, keys: &[u8]) -> Result<(), InstallError> {
        self.state.load(keys)?;
        // In one batch: replay applies all of it or nothing.
        self.append();
        let mut pieces = keys.chunks(STEP_BYTES);
        let last = pieces.next_back().unwrap_or_default();
        for piece in pieces {
            self.state.fx.push_slices(&[PART, id.as_bytes(), piece]);
        }
        self.state.fx.push_slices(&[LOAD, id.as_bytes(), last]);
        Ok(())
    }
}
