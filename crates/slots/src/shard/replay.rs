//! Replay: applies frames of the journal to the keyspace.
//!
//! An effect is applied at the time that it carries, never at the time of the replay: the primary alone decides whether
//! a key had expired.
//!
//! Invariant: an effect that is unknown or fails ends the replay. A replica that skipped it would diverge from its
//! primary unnoticed.

use bytes::BytesMut;
use moim_wire_resp::{Encoder, OwnedArgs, Protocol};

use super::State;
use crate::cmd;
use crate::ctx::{Ctx, Mode};
use crate::effects::{BadEffects, Frame};
use crate::migration::state::{self, InvalidStep};
use crate::pubsub::Gate;
use crate::session::Session;
use crate::shared::Shared;

/// Why replay ended. The keyspace may contain a part of a batch: nothing may be served from it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    /// The frame cannot be decoded.
    #[error(transparent)]
    Effects(#[from] BadEffects),
    /// An invalid step of a slot migration.
    #[error(transparent)]
    Step(#[from] InvalidStep),
    /// A command that only a newer version knows.
    #[error("unknown command {0:?} in the journal")]
    Unknown(String),
    /// A command that the primary executed fails here.
    #[error("command {command:?} of the journal failed: {answer}")]
    Failed {
        /// The name of the command.
        command: String,
        /// The error reply.
        answer: String,
    },
}

impl State {
    /// Replays the next frame of the journal.
    pub(crate) fn replay_frame(
        &mut self,
        shared: &Shared,
        session: &mut Session,
        frame: Frame<'_>,
    ) -> Result<(), ReplayError> {
        match self.groups.take(frame)? {
            Some((time_ms, commands)) => self.replay(shared, session, time_ms, &commands),
            None => Ok(()),
        }
    }

    /// Executes the commands of one batch of the journal at `time_ms`.
    pub(crate) fn replay(
        &mut self,
        shared: &Shared,
        session: &mut Session,
        time_ms: i64,
        commands: &[OwnedArgs],
    ) -> Result<(), ReplayError> {
        // Only forwards: readers of this replica may have seen a later shard time meanwhile.
        if time_ms > self.time_ms {
            self.time_ms = time_ms;
            self.shard_clock.begin(shared.clock.monotonic_ns(), self.applied >= self.live_from);
        }
        self.db.hide_expired(i64::MIN);
        let (mut now, mut out) = (time_ms, BytesMut::new());
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ReplayAtLocalClock) {
            now = shared.clock.wall_ms();
        }
        for command in commands {
            let args = command.args();
            if let Some(time_ms) = state::effect_time(&args) {
                // The time of the source shard; shard time here does not change.
                now = time_ms;
                continue;
            }
            if state::is_internal_effect(args.name()) {
                self.apply_step(&args)?;
                continue;
            }
            let name = || String::from_utf8_lossy(args.name()).into_owned();
            let spec = cmd::resolve(&args).ok_or_else(|| ReplayError::Unknown(name()))?;
            out.clear();
            let mut ctx = Ctx {
                args,
                db: &mut self.db,
                now,
                out: Encoder::new(&mut out, Protocol::Resp2),
                fx: &mut self.fx,
                events: &mut self.events,
                session,
                shared,
                mode: Mode::Replay,
                nested: false,
                in_script: false,
                dirty: 0,
                rewritten: false,
            };
            ctx.cache_key_lookup(spec);
            let fine = ctx.run(spec);
            ctx.db.clear_cached_id();
            if !fine {
                let answer = String::from_utf8_lossy(&out).trim_end().to_owned();
                return Err(ReplayError::Failed { command: name(), answer });
            }
        }
        self.events.ready.clear();
        self.events.notifications.clear();
        // Replayed effects are committed.
        self.events.send_invalidations(shared, &Gate::OPEN);
        self.memory.report(&shared.memory, self.db.memory());
        drop(self.db.take_garbage());
        Ok(())
    }
}
