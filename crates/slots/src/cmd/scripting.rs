//! EVAL and its family: scripts, by text or by name.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::BytesMut;
use moim_wire_resp::{Encoder, OwnedArgs};

use super::flag::{
    ALLOW_BUSY, LOADING, MAY_REPLICATE, NO_MANDATORY_KEYS, NOSCRIPT, READONLY, SKIP_MONITOR, STALE,
};
use super::{Keys, Spec, help};
use crate::away;
use crate::busy::Running;
use crate::ctx::{Ctx, int};
use crate::error::{Done, Error};
use crate::script::{self, Ran, Script, sha1};
use crate::shared::lock;

const GROUP: &str = "scripting";
const KEYS: Keys = Keys::Counted { at: 2, also: 0 };
const RUNS: u32 = NOSCRIPT | SKIP_MONITOR | MAY_REPLICATE | NO_MANDATORY_KEYS | STALE;
const READS: u32 = NOSCRIPT | SKIP_MONITOR | NO_MANDATORY_KEYS | STALE | READONLY;

/// The commands of this file.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("eval", -3, RUNS, KEYS, GROUP, "Runs a script", |ctx| eval(ctx, false)),
    Spec::new("eval_ro", -3, READS, KEYS, GROUP, "Runs a script that does not write", |ctx| eval(ctx, true)),
    Spec::new("evalsha", -3, RUNS, KEYS, GROUP, "Runs a script by its name", |ctx| evalsha(ctx, false)),
    Spec::new("evalsha_ro", -3, READS, KEYS, GROUP, "Runs a script that does not write by its name", |ctx| evalsha(ctx, true)),
    Spec::new("script", -2, 0, Keys::None, GROUP, "Manages scripts", unknown).with(&[
        Spec::new("script|load", 3, NOSCRIPT | STALE, Keys::None, GROUP, "Keeps a script", load),
        Spec::new("script|exists", -3, NOSCRIPT, Keys::None, GROUP, "Says which scripts are known", exists),
        Spec::new("script|flush", -2, NOSCRIPT, Keys::None, GROUP, "Forgets all scripts", flush),
        Spec::new("script|kill", 2, NOSCRIPT | ALLOW_BUSY, Keys::None, GROUP, "Ends the script that runs", kill),
        Spec::new("script|debug", 3, NOSCRIPT, Keys::None, GROUP, "Refuses to debug", debug),
        Spec::new("script|help", 2, LOADING | STALE, Keys::None, GROUP, "Explains the subcommands", script_help),
    ]),
];

/// To hash and to compile a longer script takes more than a millisecond: that is not for an event loop.
const LARGE: usize = 64 << 10;

pub(super) type Words<'a> = Vec<&'a [u8]>;

/// Splits the arguments behind the script into keys and others.
pub(super) fn parts<'a>(ctx: &Ctx<'a>) -> Result<(Words<'a>, Words<'a>), Error> {
    let count = int(ctx.arg(2))?;
    if count > ctx.argc() as i64 - 3 {
        return Err(Error::err("Number of keys can't be greater than number of args"));
    }
    let count = usize::try_from(count).map_err(|_| Error::err("Number of keys can't be negative"))?;
    let keys = ctx.args.iter().skip(3).take(count).collect();
    Ok((keys, ctx.args.iter().skip(3 + count).collect()))
}

/// Runs the command away from the loops, unless its script has proved to be quick.
pub(super) fn leaves(ctx: &mut Ctx<'_>, sha: &str) -> bool {
    if ctx.shared.monitors.any() && !ctx.session.away {
        // Before its commands, as in Redis.
        ctx.show_to_monitors();
    }
    !ctx.shared.scripts.is_quick(sha) && leave(ctx)
}

/// A script that was thought to be quick is not.
pub(super) fn left(ctx: &mut Ctx<'_>, ran: Ran) -> Done {
    match ran {
        Ran::Left if !leave(ctx) => Err(Error::err("Script stopped: it took too long")),
        Ran::Left | Ran::Done => Ok(()),
    }
}

/// Whether a command names keys, so that a node that does not own them refuses it.
fn names_keys(command: &OwnedArgs) -> bool {
    let (args, mut keys) = (command.args(), Vec::new());
    if let Some(spec) = super::resolve(&args) {
        spec.keys.positions(&args, &mut keys);
    }
    !keys.is_empty()
}

/// Runs the command away from the loops; false where that cannot be.
fn leave(ctx: &mut Ctx<'_>) -> bool {
    let command = ctx.args.to_owned();
    away::run(ctx, move |mut away| {
        let (mut session, mut out) = (away.session(), BytesMut::new());
        let (shard, since_ms) = (Arc::clone(&away.shard), away.shared.clock.monotonic_ms());
        let gate = loop {
            shard.scripts_away.fetch_add(1, Ordering::AcqRel);
            let (mut turn, is_primary) = away.begin();
            session.asking = is_primary;
            let gate = if is_primary || names_keys(&command) {
                // Where the lead ended before it ran, keys lead to an error that says where they are.
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
            shard.scripts_away.fetch_sub(1, Ordering::AcqRel);
            if !session.held {
                break gate;
            }
            // Its slot is on the way to another shard; in a moment it is clear whose it is.
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
            ctx.show_to_monitors();
        }
        if leave(ctx) {
            return Ok(());
        }
    }
    let sha = sha1::hex(source);
    if leaves(ctx, &sha) {
        return Ok(());
    }
    let ran = script::run(ctx, &Script { sha: &sha, source, keys, args, read_only })?;
    ctx.shared.scripts.add(&sha, source, false);
    left(ctx, ran)
}

fn evalsha(ctx: &mut Ctx<'_>, read_only: bool) -> Done {
    let sha = String::from_utf8_lossy(ctx.arg(1)).to_lowercase();
    let source = ctx.shared.scripts.get(&sha);
    let source = source.ok_or_else(|| Error::coded("NOSCRIPT No matching script. Please use EVAL."))?;
    let (keys, args) = parts(ctx)?;
    if leaves(ctx, &sha) {
        return Ok(());
    }
    let ran = script::run(ctx, &Script { sha: &sha, source: &source, keys, args, read_only })?;
    left(ctx, ran)
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
    if source.len() > LARGE && !ctx.session.away && leave(ctx) {
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

/// Reached only when no script runs: one that does holds the shard.
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
