//! The BUSY state: commands accepted while a script exceeds `lua-time-limit`. A transaction may begin and end, but
//! not execute.
//!
//! Must never take the shard's lock: the running script holds it.

use bytes::BytesMut;
use moim_wire_resp::{Args, Encoder, OwnedArgs};

use crate::cmd::{self, Spec};
use crate::ctx::{Ctx, Mode};
use crate::effects::Effects;
use crate::error::Error;
use crate::events::Events;
use crate::keyspace::Keyspace;
use crate::session::{Multi, Session};
use crate::shard::Shard;
use crate::shared::{Shared, lock};

/// A running script or function.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) command: OwnedArgs,
    /// Start time on the monotonic clock.
    pub(crate) since_ms: u64,
}

impl Running {
    fn is_function(&self) -> bool {
        self.command.args().name().to_ascii_lowercase().starts_with(b"fcall")
    }
}

/// FUNCTION STATS while a function runs. The loaded libraries are omitted: the function holds the lock that protects
/// them.
fn stats(to: &mut Encoder<'_>, running: &Running, now_ms: u64) {
    let args = running.command.args();
    to.map(2);
    to.bulk(b"running_script");
    to.map(3);
    to.bulk(b"name");
    to.bulk(args.get(1).unwrap_or_default());
    to.bulk(b"command");
    to.array(args.len());
    args.iter().for_each(|arg| to.bulk(arg));
    to.bulk(b"duration_ms");
    to.integer(now_ms.saturating_sub(running.since_ms) as i64);
    to.bulk(b"engines");
    to.map(1);
    to.bulk(b"LUA");
    to.map(0);
}

/// True for SHUTDOWN NOSAVE.
fn discards(args: &Args<'_>) -> bool {
    args.name().eq_ignore_ascii_case(b"shutdown")
        && args.from(1).iter().any(|word| word.eq_ignore_ascii_case(b"nosave"))
}

/// Runs a command that needs neither keys nor the shard: QUIT, and AUTH and HELLO, without which no new client could
/// kill the script.
fn run_without_shard(
    shared: &Shared,
    session: &mut Session,
    spec: &'static Spec,
    args: &Args<'_>,
    out: &mut BytesMut,
) {
    let protocol = session.protocol;
    if !spec.takes(args.len()) {
        Encoder::new(out, protocol).error(Error::arity(spec.name).0.as_bytes());
        return;
    }
    let (mut db, mut fx, mut events) = (Keyspace::new(0), Effects::default(), Events::default());
    let mut ctx = Ctx {
        args: *args,
        db: &mut db,
        now: shared.clock.wall_ms(),
        out: Encoder::new(out, protocol),
        fx: &mut fx,
        events: &mut events,
        session,
        shared,
        mode: Mode::Replica,
        nested: false,
        in_script: false,
        dirty: 0,
        rewritten: false,
    };
    ctx.run(spec);
}

/// Executes a command without the shard's lock.
pub(crate) fn execute(
    shard: &Shard,
    shared: &Shared,
    session: &mut Session,
    args: &Args<'_>,
    out: &mut BytesMut,
) {
    let spec = cmd::resolve(args);
    if let Some(spec) = spec.filter(|spec| matches!(spec.name, "auth" | "hello" | "quit")) {
        return run_without_shard(shared, session, spec, args, out);
    }
    let mut to = Encoder::new(out, session.protocol);
    // Checked before the request can change or reveal anything.
    if !session.authenticated {
        return to.error(Error::NO_AUTH.0.as_bytes());
    }
    if discards(args) {
        shard.abandon_script();
        session.closing = true;
        return;
    }
    let sub = args.get(1).unwrap_or_default();
    let is = |name: &str| args.name().eq_ignore_ascii_case(name.as_bytes());
    let running = lock(&shard.running).clone();
    let function = running.as_ref().filter(|running| running.is_function());
    let busy = if function.is_some() { Error::BUSY_FUNCTION } else { Error::BUSY };
    // SCRIPT KILL ends scripts, FUNCTION KILL ends functions.
    let kills = if function.is_some() { is("function") } else { is("script") };
    if kills && sub.eq_ignore_ascii_case(b"kill") {
        match shard.kill_script() {
            Ok(()) => to.ok(),
            Err(error) => to.error(error.0.as_bytes()),
        }
        return;
    }
    if let Some(running) = function.filter(|_| is("function") && sub.eq_ignore_ascii_case(b"stats")) {
        stats(&mut to, running, shared.clock.monotonic_ms());
        return;
    }
    if session.multi.is_some() && is("exec") {
        session.multi = None;
        to.error(format!("EXECABORT Transaction discarded because of: {}", busy.0));
        return;
    }
    if session.multi.is_some() && is("discard") && args.len() == 1 {
        session.multi = None;
        to.ok();
        return;
    }
    if session.multi.is_none() && is("multi") && args.len() == 1 {
        session.multi = Some(Multi::default());
        to.ok();
        return;
    }
    if let Some(multi) = &mut session.multi {
        multi.dirty_exec = true;
    }
    to.error(busy.0.as_bytes());
}
