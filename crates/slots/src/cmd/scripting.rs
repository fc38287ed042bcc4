//! Script commands: EVAL, EVALSHA and SCRIPT.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::BytesMut;
use moim_wire_resp::{Encoder, OwnedArgs};

use super::flag::{
    ALLOW_BUSY, LOADING, MAY_REPLICATE, NO_MANDATORY_KEYS, NOSCRIPT, READONLY, SKIP_MONITOR, STALE,
};
use super::{Keys, Spec, help};
use crate::busy::Running;
use crate::ctx::{Ctx, int};
use crate::error::{Done, Error};
use crate::offloaded;
use crate::script::{self, RunOutcome, Script, sha1};
use crate::shared::lock;

const GROUP: &str = "scripting";
const KEYS: Keys = Keys::Counted { at: 2, also: 0 };
const RUNS: u32 = NOSCRIPT | SKIP_MONITOR | MAY_REPLICATE | NO_MANDATORY_KEYS | STALE;
const READS: u32 = NOSCRIPT | SKIP_MONITOR | NO_MANDATORY_KEYS | STALE | READONLY;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("eval", -3, RUNS, KEYS, GROUP, "Executes a server-side Lua script.", |ctx| eval(ctx, false)),
    Spec::new("eval_ro", -3, READS, KEYS, GROUP, "Executes a read-only server-side Lua script.", |ctx| eval(ctx, true)),
    Spec::new("evalsha", -3, RUNS, KEYS, GROUP, "Executes a server-side Lua script by SHA1 digest.", |ctx| evalsha(ctx, false)),
    Spec::new("evalsha_ro", -3, READS, KEYS, GROUP, "Executes a read-only server-side Lua script by SHA1 digest.", |ctx| evalsha(ctx, true)),
    Spec::new("script", -2, 0, Keys::None, GROUP, "A container for Lua scripts management commands.", unknown).with(&[
        Spec::new("script|load", 3, NOSCRIPT | STALE, Keys::None, GROUP, "Loads a server-side Lua script to the script cache.", load),
        Spec::new("script|exists", -3, NOSCRIPT, Keys::None, GROUP, "Determines whether server-side Lua scripts exist in the script cache.", exists),
        Spec::new("script|flush", -2, NOSCRIPT, Keys::None, GROUP, "Removes all server-side Lua scripts from the script cache.", flush),
        Spec::new("script|kill", 2, NOSCRIPT | ALLOW_BUSY, Keys::None, GROUP, "Terminates a server-side Lua script during execution.", kill),
        Spec::new("script|debug", 3, NOSCRIPT, Keys::None, GROUP, "Sets the debug mode of server-side Lua scripts.", debug),
        Spec::new("script|help", 2, LOADING | STALE, Keys::None, GROUP, "Returns helpful text about the different subcommands.", script_help),
    ]),
];

/// Hashing and compiling a longer script takes more than a millisecond, which is too long for an event loop.
const LARGE: usize = 64 << 10;

pub(super) type Words<'a> = Vec<&'a [u8]>;

/// Splits the arguments after the script into KEYS and ARGV.
pub(super) fn parts<'a>(ctx: &Ctx<'a>) -> Result<(Words<'a>, Words<'a>), Error> {
    let count = int(ctx.arg(2))?;
    if count > ctx.argc() as i64 - 3 {
        return Err(Error::err("Number of keys can't be greater than number of args"));
    }
    let count = usize::try_from(count).map_err(|_| Error::err("Number of keys can't be negative"))?;
    let keys = ctx.args.iter().skip(3).take(count).collect();
    Ok((keys, ctx.args.iter().skip(3 + count).collect()))
}

/// Offloads the command from the event loops, unless its script is known to be quick.
pub(super) fn maybe_offload(ctx: &mut Ctx<'_>, sha: &str) -> bool {
    if ctx.shared.monitors.any() && !ctx.session.away {
        // MONITOR shows EVAL before the commands of the script, as in Redis.
        ctx.send_to_monitors();
    }
    !ctx.shared.scripts.is_quick(sha) && offload(ctx)
}

/// Offloads a script that was expected to be quick and is not.
pub(super) fn on_outcome(ctx: &mut Ctx<'_>, outcome: RunOutcome) -> Done {
    match outcome {
        RunOutcome::Offload if !offload(ctx) => Err(Error::err("Script stopped: it took too long")),
        RunOutcome::Offload | RunOutcome::Completed => Ok(()),
    }
}

/// True if the command names keys, so that a node that does not own them redirects it.
fn names_keys(command: &OwnedArgs) -> bool {
    let (args, mut keys) = (command.args(), Vec::new());
    if let Some(spec) = super::resolve(&args) {
        spec.keys.positions(&args, &mut keys);
    }
    !keys.is_empty()
}

/// Offloads the command to a blocking thread; false where that is not possible.
fn offload(ctx: &mut Ctx<'_>) -> bool {
    let command = ctx.args.to_owned();
    offloaded::run(ctx, move |mut away| {
        let (mut session, mut out) = (away.session(), BytesMut::new());
        let (shard, since_ms) = (Arc::clone(&away.shard), away.shared.clock.monotonic_ms());
        let gate = loop {
            shard.offloaded_scripts.fetch_add(1, Ordering::AcqRel);
            let (mut turn, is_primary) = away.begin();
            session.asking = is_primary;
            let gate = if is_primary || names_keys(&command) {
                // If leadership is lost before the script runs, its keys lead to an error that redirects the client.
                *lock(&shard.running) = Some(Running { command: command.clone(), since_ms });
                let gate = turn.execute(&mut session, &command.args(), &mut out);
                *lock(&shard.running) = None;
                gate
            } else {
                session.held = false;
                Encoder::new(&mut out, session.protocol).error(Error::UNBLOCKED.0.as_bytes());
                0
            };
            turn.finish();
            shard.offloaded_scripts.fetch_sub(1, Ordering::AcqRel);
            if !session.held {
                break gate;
            }
            // The slot is in migration; its owner is decided within moments.
            std::thread::sleep(std::time::Duration::from_millis(2));
        };
        away.answer(out.freeze(), gate);
    })
}

fn eval(ctx: &mut Ctx<'_>, read_only: bool) -> Done {
    let (keys, args) = parts(ctx)?;
    let source = ctx.arg(1);
    if source.len() > LARGE && !ctx.session.away {
        if ctx.shared.monitors.any() && ctx.may_block() {
            ctx.send_to_monitors();
        }
        if offload(ctx) {
            return Ok(());
        }
    }
    let sha = sha1::hex(source);
    if maybe_offload(ctx, &sha) {
        return Ok(());
    }
    let outcome = script::run(ctx, &Script { sha: &sha, source, keys, args, read_only })?;
    ctx.shared.scripts.add(&sha, source, false);
    on_outcome(ctx, outcome)
}

fn evalsha(ctx: &mut Ctx<'_>, read_only: bool) -> Done {
    let sha = String::from_utf8_lossy(ctx.arg(1)).to_lowercase();
    let source = ctx.shared.scripts.get(&sha);
    let source = source.ok_or_else(|| Error::coded("NOSCRIPT No matching script. Please use EVAL."))?;
    let (keys, args) = parts(ctx)?;
    if maybe_offload(ctx, &sha) {
        return Ok(());
    }
    let outcome = script::run(ctx, &Script { sha: &sha, source: &source, keys, args, read_only })?;
    on_outcome(ctx, outcome)
}

fn unknown(ctx: &mut Ctx<'_>) -> Done {
    let (name, sub) = (
        String::from_utf8_lossy(ctx.arg(0)).to_uppercase(),
        String::from_utf8_lossy(ctx.arg(1)).into_owned(),
    );
    Err(Error::err(format_args!("unknown subcommand '{sub}'. Try {name} HELP.")))
}

fn load(ctx: &mut Ctx<'_>) -> Done {
    let source = ctx.arg(2);
    if source.len() > LARGE && !ctx.session.away && offload(ctx) {
        return Ok(());
    }
    script::check(source)?;
    let sha = sha1::hex(source);
    ctx.shared.scripts.add(&sha, source, true);
    ctx.out.bulk(sha.as_bytes());
    Ok(())
}

fn exists(ctx: &mut Ctx<'_>) -> Done {
    let names = ctx.args;
    ctx.out.array(names.len() - 2);
    for name in names.iter().skip(2) {
        let known = ctx.shared.scripts.get(&String::from_utf8_lossy(name).to_lowercase()).is_some();
        ctx.out.integer(i64::from(known));
    }
    Ok(())
}

fn flush(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() > 3 || ctx.argc() == 3 && !ctx.is(2, "SYNC") && !ctx.is(2, "ASYNC") {
        return Err(Error::err("SCRIPT FLUSH only support SYNC|ASYNC option"));
    }
    ctx.shared.scripts.clear();
    script::flush();
    ctx.out.ok();
    Ok(())
}

/// Reached only while no script runs: a running script holds the shard, and `busy` serves SCRIPT KILL.
fn kill(_: &mut Ctx<'_>) -> Done {
    Err(Error::coded("NOTBUSY No scripts in execution right now."))
}

fn debug(ctx: &mut Ctx<'_>) -> Done {
    if ctx.is(2, "NO") {
        ctx.out.ok();
        return Ok(());
    }
    Err(Error::err("SCRIPT DEBUG is not supported"))
}

fn script_help(ctx: &mut Ctx<'_>) -> Done {
    help(
        ctx,
        &[
            "SCRIPT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
            "EXISTS <sha1> [<sha1> ...]",
            "    Say which of these scripts are known.",
            "FLUSH [ASYNC|SYNC]",
            "    Forget all scripts.",
            "KILL",
            "    End the script that runs, unless it has written.",
            "LOAD <script>",
            "    Keep a script without running it.",
            "HELP",
            "    Prints this help.",
        ],
    )
}
