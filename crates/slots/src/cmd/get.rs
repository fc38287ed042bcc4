//! String reads: GET, MGET, GETDEL, GETEX, GETSET, STRLEN.

use super::set::{Expiry, expiry_option};
use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::Item;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("get", 2, READONLY | FAST, Keys::ONE, "string", "Returns the string value of a key.", get),
    Spec::new(
        "mget",
        -2,
        READONLY | FAST,
        Keys::ALL,
        "string",
        "Atomically returns the string values of one or more keys.",
        mget,
    ),
    Spec::new(
        "getdel",
        2,
        WRITE | FAST,
        Keys::ONE,
        "string",
        "Returns the string value of a key after deleting the key.",
        getdel,
    ),
    Spec::new(
        "getex",
        -2,
        WRITE | FAST,
        Keys::ONE,
        "string",
        "Returns the string value of a key after setting its expiration time.",
        getex,
    ),
    Spec::new(
        "getset",
        3,
        WRITE | DENYOOM | FAST,
        Keys::ONE,
        "string",
        "Returns the previous string value of a key after setting it to a new value.",
        getset,
    ),
    Spec::new(
        "strlen",
        2,
        READONLY | FAST,
        Keys::ONE,
        "string",
        "Returns the length of a string value.",
        strlen,
    ),
];

/// Replies with the string at a key, or null. Returns whether the key exists.
pub(super) fn reply_string(ctx: &mut Ctx<'_>, key: &[u8]) -> Result<bool, Error> {
    match ctx.db.touch(key) {
        Some(Item::Str(string)) => {
            ctx.out.bulk(string);
            ctx.events.command_stats.counts.hits += 1;
            Ok(true)
        }
        Some(Item::Value(_)) => Err(Error::WRONG_TYPE),
        None => {
            ctx.out.null();
            ctx.events.command_stats.counts.misses += 1;
            ctx.events.notify(class::MISS, "keymiss", key);
            Ok(false)
        }
    }
}

fn get(ctx: &mut Ctx<'_>) -> Done {
    reply_string(ctx, ctx.arg(1)).map(drop)
}

fn mget(ctx: &mut Ctx<'_>) -> Done {
    ctx.out.array(ctx.argc() - 1);
    for key in ctx.args.from(1).iter() {
        match ctx.db.touch(key) {
            Some(Item::Str(string)) => {
                ctx.out.bulk(string);
                ctx.events.command_stats.counts.hits += 1;
            }
            _ => {
                ctx.out.null();
                ctx.events.command_stats.counts.misses += 1;
            }
        }
    }
    Ok(())
}

fn getdel(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    if reply_string(ctx, key)? {
        ctx.delete(key);
        ctx.rewrite(&[b"DEL", key]);
    }
    Ok(())
}

fn getex(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let (mut expiry, mut persist, mut at) = (None, false, 2);
    while at < ctx.argc() {
        if ctx.is(at, "PERSIST") && expiry.is_none() && !persist {
            persist = true;
            at += 1;
        } else if let Some(found) = expiry_option(ctx, at).filter(|_| expiry.is_none() && !persist) {
            expiry = Some(found);
            at += 2;
        } else {
            return Err(Error::SYNTAX);
        }
    }
    // A missing key is reported before the expire time is validated.
    if !reply_string(ctx, key)? {
        return Ok(());
    }
    let expires_at = expiry.map(|expiry: Expiry| expiry.at(ctx, "getex")).transpose()?;
    match expires_at {
        Some(at) if at <= ctx.now => {
            ctx.delete(key);
            ctx.rewrite(&[b"DEL", key]);
        }
        Some(at) => {
            ctx.db.set_expiry(key, Some(at));
            ctx.changed_with(key, class::GENERIC, "expire");
            ctx.rewrite(&[b"PEXPIREAT", key, at.to_string().as_bytes()]);
        }
        None if persist && ctx.db.expiry(key).flatten().is_some() => {
            ctx.db.set_expiry(key, None);
            ctx.changed_with(key, class::GENERIC, "persist");
            ctx.rewrite(&[b"PERSIST", key]);
        }
        None => {}
    }
    Ok(())
}

fn getset(ctx: &mut Ctx<'_>) -> Done {
    let (key, value) = (ctx.arg(1), ctx.arg(2));
    reply_string(ctx, key)?;
    ctx.db.set_str(key, value, None);
    ctx.changed_with(key, class::STRING, "set");
    ctx.rewrite(&[b"SET", key, value]);
    Ok(())
}

fn strlen(ctx: &mut Ctx<'_>) -> Done {
    let len = ctx.string(ctx.arg(1))?.map_or(0, <[u8]>::len);
    ctx.out.integer(len as i64);
    Ok(())
}
