//! Generic key commands: DEL, UNLINK, EXISTS, TOUCH, TYPE, RENAME, RENAMENX, COPY, RANDOMKEY, DBSIZE, FLUSHALL,
//! FLUSHDB, OBJECT.

use super::{Keys, Spec, flag::*};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::{Item, Owned};
use crate::settings::Policy;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("del", -2, WRITE, Keys::ALL, "generic", "Deletes one or more keys.", del),
    Spec::new(
        "unlink",
        -2,
        WRITE | FAST,
        Keys::ALL,
        "generic",
        "Asynchronously deletes one or more keys.",
        del,
    ),
    Spec::new(
        "exists",
        -2,
        READONLY | FAST,
        Keys::ALL,
        "generic",
        "Determines whether one or more keys exist.",
        exists,
    ),
    Spec::new(
        "touch",
        -2,
        READONLY | FAST,
        Keys::ALL,
        "generic",
        "Returns the number of existing keys out of those specified after updating the time they were last accessed.",
        touch,
    ),
    Spec::new(
        "type",
        2,
        READONLY | FAST,
        Keys::ONE,
        "generic",
        "Determines the type of value stored at a key.",
        kind,
    ),
    Spec::new(
        "rename",
        3,
        WRITE,
        Keys::TWO,
        "generic",
        "Renames a key and overwrites the destination.",
        rename,
    ),
    Spec::new(
        "renamenx",
        3,
        WRITE | FAST,
        Keys::TWO,
        "generic",
        "Renames a key only when the target key name doesn't exist.",
        renamenx,
    ),
    Spec::new(
        "copy",
        -3,
        WRITE | DENYOOM,
        Keys::TWO,
        "generic",
        "Copies the value of a key to a new key.",
        copy,
    ),
    Spec::new(
        "move",
        3,
        WRITE | FAST,
        Keys::ONE,
        "generic",
        "Moves a key to another database.",
        one_database,
    ),
    Spec::new(
        "randomkey",
        1,
        READONLY | WHOLE,
        Keys::None,
        "generic",
        "Returns a random key name from the database.",
        randomkey,
    ),
    Spec::new(
        "dbsize",
        1,
        READONLY | FAST | WHOLE,
        Keys::None,
        "server",
        "Returns the number of keys in the database.",
        dbsize,
    ),
    Spec::new("flushall", -1, WRITE, Keys::None, "server", "Removes all keys from all databases.", flush),
    Spec::new(
        "flushdb",
        -1,
        WRITE,
        Keys::None,
        "server",
        "Remove all keys from the current database.",
        flush,
    ),
    Spec::new("swapdb", 3, WRITE | FAST, Keys::None, "server", "Swaps two Redis databases.", one_database),
    Spec::new(
        "object",
        -2,
        0,
        Keys::None,
        "generic",
        "A container for object introspection commands.",
        unknown_object,
    )
    .with(&[
        Spec::new(
            "object|encoding",
            3,
            READONLY,
            OBJECT_KEY,
            "generic",
            "Returns the internal encoding of a Redis object.",
            encoding,
        ),
        Spec::new(
            "object|idletime",
            3,
            READONLY,
            OBJECT_KEY,
            "generic",
            "Returns the time since the last access to a Redis object.",
            idletime,
        ),
        Spec::new(
            "object|freq",
            3,
            READONLY,
            OBJECT_KEY,
            "generic",
            "Returns the logarithmic access frequency counter of a Redis object.",
            freq,
        ),
        Spec::new(
            "object|refcount",
            3,
            READONLY,
            OBJECT_KEY,
            "generic",
            "Returns the reference count of a value of a key.",
            refcount,
        ),
        Spec::new(
            "object|help",
            2,
            LOADING | STALE,
            Keys::None,
            "generic",
            "Returns helpful text about the different subcommands.",
            object_help,
        ),
    ]),
];

const OBJECT_KEY: Keys = Keys::Range { first: 2, last: 2, step: 1 };

fn del(ctx: &mut Ctx<'_>) -> Done {
    let mut gone = 0;
    for key in ctx.args.from(1).iter() {
        gone += i64::from(ctx.delete(key));
    }
    ctx.out.integer(gone);
    Ok(())
}

/// EXISTS does not count as an access.
fn exists(ctx: &mut Ctx<'_>) -> Done {
    let there = ctx.args.from(1).iter().filter(|key| ctx.db.contains(key)).count();
    ctx.out.integer(there as i64);
    Ok(())
}

fn touch(ctx: &mut Ctx<'_>) -> Done {
    let mut there = 0;
    for key in ctx.args.from(1).iter() {
        there += i64::from(ctx.db.touch(key).is_some());
    }
    ctx.out.integer(there);
    Ok(())
}

fn kind(ctx: &mut Ctx<'_>) -> Done {
    let name = match ctx.db.get(ctx.arg(1)) {
        None => "none",
        Some(Item::Str(_)) => "string",
        Some(Item::Value(value)) => value.type_name(),
    };
    ctx.out.simple(name);
    Ok(())
}

/// Renames the first key to the second. Clients may be blocked on the second.
fn move_key(ctx: &mut Ctx<'_>) {
    let (from, to) = (ctx.arg(1), ctx.arg(2));
    let Some((value, expires_at)) = ctx.db.take(from) else { return };
    ctx.db.put_owned(to, value, expires_at);
    ctx.changed_with(from, class::GENERIC, "rename_from");
    ctx.changed_with(to, class::GENERIC, "rename_to");
    ctx.ready(to);
}

fn rename(ctx: &mut Ctx<'_>) -> Done {
    if !ctx.db.contains(ctx.arg(1)) {
        return Err(Error::NO_SUCH_KEY);
    }
    if ctx.arg(1) != ctx.arg(2) {
        move_key(ctx);
    }
    ctx.out.ok();
    Ok(())
}

fn renamenx(ctx: &mut Ctx<'_>) -> Done {
    if !ctx.db.contains(ctx.arg(1)) {
        return Err(Error::NO_SUCH_KEY);
    }
    let free = !ctx.db.contains(ctx.arg(2));
    if free {
        move_key(ctx);
    }
    ctx.out.integer(i64::from(free));
    Ok(())
}

fn copy(ctx: &mut Ctx<'_>) -> Done {
    let (from, to) = (ctx.arg(1), ctx.arg(2));
    let (mut replace, mut at) = (false, 3);
    while at < ctx.argc() {
        if ctx.is(at, "REPLACE") {
            replace = true;
        } else if ctx.is(at, "DB") && at + 1 < ctx.argc() {
            at += 1;
            if ctx.int(at)? != 0 {
                return Err(Error::err("DB index is out of range"));
            }
        } else {
            return Err(Error::SYNTAX);
        }
        at += 1;
    }
    if from == to {
        return Err(Error::err("source and destination objects are the same"));
    }
    let value = match ctx.db.get(from) {
        None => None,
        Some(Item::Str(string)) => Some(Owned::Str(string.to_vec())),
        Some(Item::Value(value)) => Some(Owned::Value(value.clone())),
    };
    let copied = match value {
        Some(value) if replace || !ctx.db.contains(to) => {
            let expires_at = ctx.db.expiry(from).flatten();
            ctx.db.put_owned(to, value, expires_at);
            ctx.changed_with(to, class::GENERIC, "copy_to");
            ctx.ready(to);
            true
        }
        _ => false,
    };
    ctx.out.integer(i64::from(copied));
    Ok(())
}

fn one_database(_: &mut Ctx<'_>) -> Done {
    Err(Error::err("This instance has cluster support enabled, and only database 0"))
}

fn randomkey(ctx: &mut Ctx<'_>) -> Done {
    for _ in 0..100 {
        let Some(key) = ctx.db.random_key(|below| fastrand::usize(..below)) else { break };
        // An expired key is drawn again; the loop ends even if there is no other key.
        if ctx.db.expiry(key).flatten().is_none_or(|at| at > ctx.now) {
            ctx.out.bulk(key);
            return Ok(());
        }
    }
    ctx.out.null();
    Ok(())
}

fn dbsize(ctx: &mut Ctx<'_>) -> Done {
    ctx.out.integer(ctx.db.len() as i64);
    Ok(())
}

fn flush(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() > 2 || ctx.argc() == 2 && !(ctx.is(1, "SYNC") || ctx.is(1, "ASYNC")) {
        return Err(Error::SYNTAX);
    }
    let (db, events) = (&*ctx.db, &mut *ctx.events);
    events.on_all_changed(|key| db.contains(key));
    ctx.db.clear();
    // Flushing an empty keyspace is propagated as well: previous effects must not reappear.
    ctx.dirty += 1;
    ctx.rewrite(&[b"FLUSHALL"]);
    ctx.out.ok();
    Ok(())
}

fn encoding(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(2);
    let name = match ctx.db.get(key) {
        None => {
            ctx.out.null();
            return Ok(());
        }
        Some(Item::Value(value)) => value.encoding(),
        Some(Item::Str(_)) if ctx.db.is_raw(key) => "raw",
        Some(Item::Str(string)) if moim_wire_resp::number::parse_i64(string).is_some() => "int",
        Some(Item::Str(string)) if string.len() <= 44 => "embstr",
        Some(Item::Str(_)) => "raw",
    };
    ctx.out.bulk(name.as_bytes());
    Ok(())
}

fn idletime(ctx: &mut Ctx<'_>) -> Done {
    let counts = matches!(ctx.shared.settings.policy(), Policy::AllKeysLfu | Policy::VolatileLfu);
    if counts && ctx.db.contains(ctx.arg(2)) {
        return Err(Error::err(
            "An LFU maxmemory policy is selected, idle time not tracked. Please note that when switching between policies at runtime LRU and LFU data will take some time to adjust.",
        ));
    }
    match ctx.db.access(ctx.arg(2)) {
        None => ctx.out.null(),
        Some(access) => {
            let now = (ctx.now / 1_000) as u32 & 0xff_ffff;
            ctx.out.integer(i64::from(now.wrapping_sub(access) & 0xff_ffff));
        }
    }
    Ok(())
}

fn freq(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(2);
    match (ctx.db.contains(key), ctx.db.frequency(key)) {
        (false, _) => ctx.out.null(),
        (true, Some(frequency)) => ctx.out.integer(i64::from(frequency)),
        (true, None) => {
            return Err(Error::err(
                "An LFU maxmemory policy is not selected, access frequency not tracked. Please note that when switching between policies at runtime LRU and LFU data will take some time to adjust.",
            ));
        }
    }
    Ok(())
}

fn refcount(ctx: &mut Ctx<'_>) -> Done {
    /// Redis shares one object per small integer, whose reference count is the maximum.
    const SHARED: i64 = i32::MAX as i64;
    match ctx.db.get(ctx.arg(2)) {
        None => ctx.out.null(),
        Some(Item::Str(string)) if matches!(crate::ctx::int(string), Ok(0..10_000)) => {
            ctx.out.integer(SHARED)
        }
        Some(_) => ctx.out.integer(1),
    }
    Ok(())
}

fn object_help(ctx: &mut Ctx<'_>) -> Done {
    let lines = [
        "OBJECT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
        "ENCODING <key>",
        "    Return the kind of internal representation used in order to store the value associated with a <key>.",
        "FREQ <key>",
        "    Return the access frequency index of the <key>.",
        "IDLETIME <key>",
        "    Return the idle time of the <key>.",
        "REFCOUNT <key>",
        "    Return the number of references of the value associated with the specified <key>.",
        "HELP",
        "    Prints this help.",
    ];
    super::help(ctx, &lines)
}

fn unknown_object(ctx: &mut Ctx<'_>) -> Done {
    debug_assert!(ctx.mode != Mode::Replay, "reads are not propagated");
    Err(super::unknown_subcommand(&ctx.args))
}
