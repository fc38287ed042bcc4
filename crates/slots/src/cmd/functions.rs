//! FUNCTION and FCALL: function libraries, which are part of the data set.

use super::flag::{
    ALLOW_BUSY, DENYOOM, LOADING, MAY_REPLICATE, NO_MANDATORY_KEYS, NOSCRIPT, READONLY, SKIP_MONITOR, STALE,
    WRITE,
};
use super::scan::glob;
use super::scripting::{maybe_offload, on_outcome, parts};
use super::{Keys, Spec, help, unknown_subcommand};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::functions::{ALLOW_OOM, FLAGS, Functions, Library, NO_CLUSTER, NO_WRITES};
use crate::rdb;
use crate::script::library;

const GROUP: &str = "scripting";
const KEYS: Keys = Keys::Counted { at: 2, also: 0 };
const RUNS: u32 = NOSCRIPT | SKIP_MONITOR | MAY_REPLICATE | NO_MANDATORY_KEYS | STALE;
const READS: u32 = NOSCRIPT | SKIP_MONITOR | NO_MANDATORY_KEYS | STALE | READONLY;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("fcall", -3, RUNS, KEYS, GROUP, "Invokes a function.", |ctx| fcall(ctx, false)),
    Spec::new("fcall_ro", -3, READS, KEYS, GROUP, "Invokes a read-only function.", |ctx| fcall(ctx, true)),
    Spec::new("function", -2, 0, Keys::None, GROUP, "A container for function commands.", |ctx| Err(unknown_subcommand(&ctx.args))).with(&[
        Spec::new("function|load", -3, NOSCRIPT | WRITE | DENYOOM, Keys::None, GROUP, "Creates a library.", load),
        Spec::new("function|delete", 3, NOSCRIPT | WRITE, Keys::None, GROUP, "Deletes a library and its functions.", delete),
        Spec::new("function|flush", -2, NOSCRIPT | WRITE, Keys::None, GROUP, "Deletes all libraries and functions.", flush),
        Spec::new("function|list", -2, NOSCRIPT, Keys::None, GROUP, "Returns information about all libraries.", list),
        Spec::new("function|dump", 2, NOSCRIPT, Keys::None, GROUP, "Dumps all libraries into a serialized binary payload.", dump),
        Spec::new("function|restore", -3, NOSCRIPT | WRITE | DENYOOM, Keys::None, GROUP, "Restores all libraries from a payload.", restore),
        Spec::new("function|kill", 2, NOSCRIPT | ALLOW_BUSY, Keys::None, GROUP, "Terminates a function during execution.", |_| {
            Err(Error::coded("NOTBUSY No scripts in execution right now."))
        }),
        Spec::new("function|stats", 2, NOSCRIPT | ALLOW_BUSY, Keys::None, GROUP, "Returns information about a function during execution.", stats),
        Spec::new("function|help", 2, LOADING | STALE, Keys::None, GROUP, "Returns helpful text about the different subcommands.", |ctx| help(ctx, HELP)),
    ]),
];

const HELP: &[&str] = &[
    "FUNCTION <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "LOAD [REPLACE] <FUNCTION CODE>",
    "    Create a new library with the given library name and code.",
    "DELETE <LIBRARY NAME>",
    "    Delete the given library.",
    "LIST [LIBRARYNAME PATTERN] [WITHCODE]",
    "    Return general information on all the libraries:",
    "    * Library name",
    "    * The engine used to run the Library",
    "    * Functions list",
    "    * Library code (if WITHCODE is given)",
    "    It also possible to get only function that matches a pattern using LIBRARYNAME argument.",
    "STATS",
    "    Return information about the current function running:",
    "    * Function name",
    "    * Command used to run the function",
    "    * Duration in MS that the function is running",
    "    If no function is running, return nil",
    "    In addition, returns a list of available engines.",
    "KILL",
    "    Kill the current running function.",
    "FLUSH [ASYNC|SYNC]",
    "    Delete all the libraries.",
    "    When called without the optional mode argument, the behavior is determined by the",
    "    lazyfree-lazy-user-flush configuration directive. Valid modes are:",
    "    * ASYNC: Asynchronously flush the libraries.",
    "    * SYNC: Synchronously flush the libraries.",
    "DUMP",
    "    Return a serialized payload representing the current libraries, can be restored using FUNCTION RESTORE command",
    "RESTORE <PAYLOAD> [FLUSH|APPEND|REPLACE]",
    "    Restore the libraries represented by the given payload, it is possible to give a restore policy to",
    "    control how to handle existing libraries (default APPEND):",
    "    * FLUSH: delete all existing libraries.",
    "    * APPEND: appends the restored libraries to the existing libraries. On collision, abort.",
    "    * REPLACE: appends the restored libraries to the existing libraries, On collision, replace the old",
    "      libraries with the new libraries (notice that even on this option there is a chance of failure",
    "      in case of functions name conflict with another library).",
    "HELP",
    "    Prints this help.",
];

fn fcall(ctx: &mut Ctx<'_>, read_only: bool) -> Done {
    let name = String::from_utf8_lossy(ctx.arg(1)).into_owned();
    let found = ctx.db.functions.find(&name).map(|(library, name)| (library.clone(), name.to_owned()));
    let (library, name) = found.ok_or_else(|| Error::err("Function not found"))?;
    let (keys, args) = parts(ctx).map_err(|error| {
        if error == Error::NOT_INTEGER { Error::err("Bad number of keys provided") } else { error }
    })?;
    let flags = library.functions.get(&name).map_or(0, |about| about.flags);
    if flags & NO_CLUSTER != 0 {
        return Err(Error::err("Can not run script on cluster, 'no-cluster' flag is set."));
    }
    if flags & NO_WRITES == 0 {
        if ctx.mode == Mode::Replica {
            return Err(Error::coded("READONLY Can not run script with write flag on readonly replica"));
        }
        if read_only {
            return Err(Error::err("Can not execute a script with write flag using *_ro command."));
        }
        let limit = ctx.shared.settings.max_memory.load(std::sync::atomic::Ordering::Relaxed);
        if flags & ALLOW_OOM == 0 && limit > 0 && ctx.db.memory() as u64 > limit {
            return Err(Error::coded(
                "OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'",
            ));
        }
    }
    if maybe_offload(ctx, &format!("{}:{name}", library.sha)) {
        return Ok(());
    }
    let outcome = library::run(ctx, &library, &name, &keys, &args, read_only || flags & NO_WRITES != 0)?;
    on_outcome(ctx, outcome)
}

/// Signals that the libraries changed; their code is propagated.
fn changed(ctx: &mut Ctx<'_>, record: &[&[u8]]) {
    ctx.dirty += 1;
    ctx.rewrite(record);
}

fn load(ctx: &mut Ctx<'_>) -> Done {
    let (mut replaces, mut at) = (false, 2);
    while at + 1 < ctx.argc() {
        if !ctx.is(at, "REPLACE") {
            let option = String::from_utf8_lossy(ctx.arg(at)).into_owned();
            return Err(Error::err(format_args!("Unknown option given: {option}")));
        }
        replaces = true;
        at += 1;
    }
    if replaces && at == 3 && ctx.argc() == 3 {
        return Err(Error::err("Function code is missing"));
    }
    let code = ctx.arg(at);
    let (name, _) = crate::functions::metadata(code)?;
    if !replaces && ctx.db.functions.libraries().any(|library| library.name == name) {
        return Err(Error::err(format_args!("Library '{name}' already exists")));
    }
    let library = library::load(code, Some(&ctx.shared.clock))?;
    ctx.db.functions.add(library, replaces)?;
    ctx.out.bulk(name.as_bytes());
    changed(ctx, &[b"FUNCTION", b"LOAD", b"REPLACE", code]);
    Ok(())
}

fn delete(ctx: &mut Ctx<'_>) -> Done {
    let name = String::from_utf8_lossy(ctx.arg(2)).into_owned();
    if !ctx.db.functions.remove(&name) {
        return Err(Error::err("Library not found"));
    }
    ctx.out.ok();
    changed(ctx, &[b"FUNCTION", b"DELETE", name.as_bytes()]);
    Ok(())
}

fn flush(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() > 3 {
        return Err(super::stream_groups::bad_subcommand(ctx));
    }
    if ctx.argc() == 3 && !ctx.is(2, "SYNC") && !ctx.is(2, "ASYNC") {
        return Err(Error::err("FUNCTION FLUSH only supports SYNC|ASYNC option"));
    }
    let was_empty = ctx.db.functions.libraries().len() == 0;
    ctx.db.functions = Functions::default();
    ctx.out.ok();
    if !was_empty {
        changed(ctx, &[b"FUNCTION", b"FLUSH"]);
    }
    Ok(())
}

fn list(ctx: &mut Ctx<'_>) -> Done {
    let (mut with_code, mut pattern) = (false, None);
    let mut at = 2;
    while at < ctx.argc() {
        if !with_code && ctx.is(at, "WITHCODE") {
            with_code = true;
        } else if pattern.is_none() && ctx.is(at, "LIBRARYNAME") {
            at += 1;
            if at == ctx.argc() {
                return Err(Error::err("library name argument was not given"));
            }
            pattern = Some(ctx.arg(at));
        } else {
            let word = String::from_utf8_lossy(ctx.arg(at)).into_owned();
            return Err(Error::err(format_args!("Unknown argument {word}")));
        }
        at += 1;
    }
    let fits = |library: &&std::sync::Arc<Library>| {
        pattern.is_none_or(|pattern| glob(pattern, library.name.as_bytes(), true))
    };
    let found: Vec<_> = ctx.db.functions.libraries().filter(fits).cloned().collect();
    ctx.out.array(found.len());
    for library in &found {
        show(ctx, library, with_code);
    }
    Ok(())
}

fn show(ctx: &mut Ctx<'_>, library: &Library, with_code: bool) {
    let out = &mut ctx.out;
    out.map(if with_code { 4 } else { 3 });
    out.bulk(b"library_name");
    out.bulk(library.name.as_bytes());
    out.bulk(b"engine");
    out.bulk(b"LUA");
    out.bulk(b"functions");
    out.array(library.functions.len());
    for (name, about) in &library.functions {
        out.map(3);
        out.bulk(b"name");
        out.bulk(name.as_bytes());
        out.bulk(b"description");
        match &about.description {
            Some(text) => out.bulk(text.as_bytes()),
            None => out.null(),
        }
        out.bulk(b"flags");
        let flags: Vec<_> = FLAGS.iter().filter(|(bit, _)| about.flags & bit != 0).collect();
        out.set(flags.len());
        flags.iter().for_each(|(_, name)| out.bulk(name.as_bytes()));
    }
    if with_code {
        out.bulk(b"library_code");
        out.bulk(&library.code);
    }
}

fn dump(ctx: &mut Ctx<'_>) -> Done {
    let payload = ctx.db.functions.payload();
    ctx.out.bulk(&payload);
    Ok(())
}

fn restore(ctx: &mut Ctx<'_>) -> Done {
    let (flushes, replaces) = match ctx.argc() {
        3 => (false, false),
        4 if ctx.is(3, "APPEND") => (false, false),
        4 if ctx.is(3, "REPLACE") => (false, true),
        4 if ctx.is(3, "FLUSH") => (true, true),
        4 => {
            return Err(Error::err(
                "Wrong restore policy given, value should be either FLUSH, APPEND or REPLACE.",
            ));
        }
        _ => return Err(super::stream_groups::bad_subcommand(ctx)),
    };
    let codes = rdb::restore_functions(ctx.arg(2)).map_err(|error| match error {
        rdb::RestoreError::Footer => Error::err("DUMP payload version or checksum are wrong"),
        rdb::RestoreError::Body => Error::err("failed loading the given functions payload"),
    })?;
    // Atomic: all libraries are restored or none.
    let mut all = if flushes { Functions::default() } else { ctx.db.functions.clone() };
    for code in &codes {
        all.add(library::load(code, Some(&ctx.shared.clock))?, replaces)
            .map_err(|error| Error::coded(error.0.replace('\'', "")))?;
    }
    ctx.db.functions = all;
    ctx.out.ok();
    let payload = ctx.db.functions.payload();
    changed(ctx, &[b"FUNCTION", b"RESTORE", &payload, b"FLUSH"]);
    Ok(())
}

/// Reports no running function: while one runs it holds the shard, and `busy` serves FUNCTION STATS.
fn stats(ctx: &mut Ctx<'_>) -> Done {
    ctx.out.map(2);
    ctx.out.bulk(b"running_script");
    ctx.out.null();
    ctx.out.bulk(b"engines");
    ctx.out.map(1);
    ctx.out.bulk(b"LUA");
    ctx.out.map(2);
    ctx.out.bulk(b"libraries_count");
    ctx.out.integer(ctx.db.functions.libraries().len() as i64);
    ctx.out.bulk(b"functions_count");
    ctx.out.integer(ctx.db.functions.len() as i64);
    Ok(())
}
