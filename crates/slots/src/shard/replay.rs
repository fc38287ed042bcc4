//! From frames of the journal to the keyspace.
//!
//! Everything is done at the time that it carries, never at the time of the replay: whether a key had expired is decided
//! once, by the primary.
//!
//! Invariant: an effect that is not known or cannot be done ends the replay. A replica that left it out would differ from its
//! primary without a sign of it.

use bytes::BytesMut;
use moim_wire_resp::{Encoder, OwnedArgs, Protocol};

use super::State;
use crate::cmd;
use crate::ctx::{Ctx, Mode};
use crate::effects::{BadEffects, Frame};
use crate::moves::{self, BadStep};
use crate::pubsub::Gate;
use crate::session::Session;
use crate::shared::Shared;

/// Why a replay ended. The keyspace may show a part of a batch: nothing may be read from it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReplayError {
    /// The frame cannot be read.
    #[error(transparent)]
    Effects(#[from] BadEffects),
    /// A step of a move.
    #[error(transparent)]
    Step(#[from] BadStep),
    /// Written by a newer program.
    #[error("unknown command {0:?} in the journal")]
    Unknown(String),
    /// What the primary could do.
    #[error("command {command:?} of the journal failed: {answer}")]
    Failed {
        /// Its name.
        command: String,
        /// What it said.
        answer: String,
    },
}

impl State {
    /// Replays the next frame of the journal.
    pub(crate) fn replay_frame(
        &mut self,
        shared: &Shared,
        nobody: &mut Session,
        frame: Frame<'_>,
    ) -> Result<(), ReplayError> {
        match self.groups.take(frame)? {
            Some((time_ms, commands)) => self.replay(shared, nobody, time_ms, &commands),
            None => Ok(()),
        }
    }

    /// Runs commands of the journal.
    pub(crate) fn replay(
        &mut self,
        shared: &Shared,
        nobody: &mut Session,
        time_ms: i64,
        commands: &[OwnedArgs],
    ) -> Result<(), ReplayError> {
        // Where it is behind: shard time may have been told to readers of this replica meanwhile.
        if time_ms > self.time_ms {
            self.time_ms = time_ms;
            self.pace.begin(shared.clock.monotonic_ns(), self.applied >= self.live_from);
        }
        self.db.hide_expired(i64::MIN);
        let (mut now, mut out) = (time_ms, BytesMut::new());
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::ReplayAtLocalClock) {
            now = shared.clock.wall_ms();
        }
        for command in commands {
            let args = command.args();
            if let Some(time_ms) = moves::clock(&args) {
                // Of another shard: its time is not ours.
                now = time_ms;
                continue;
            }
            if moves::is_step(args.name()) {
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
                session: nobody,
                shared,
                mode: Mode::Replay,
                nested: false,
                in_script: false,
                dirty: 0,
                rewritten: false,
            };
            ctx.remember_key(spec);
            let fine = ctx.run(spec);
            ctx.db.forget();
            if !fine {
                let answer = String::from_utf8_lossy(&out).trim_end().to_owned();
                return Err(ReplayError::Failed { command: name(), answer });
            }
        }
        self.events.ready.clear();
        self.events.notifications.clear();
        // What is replayed is committed.
        self.events.tell_invalid(shared, &Gate::OPEN);
        self.memory.report(&shared.memory, self.db.memory());
        drop(self.db.take_garbage());
        Ok(())
    }
}
