//! Key expiration: EXPIRE, PEXPIRE, EXPIREAT, PEXPIREAT, TTL, PTTL, EXPIRETIME, PEXPIRETIME, PERSIST.

use super::{Keys, Spec, flag::*};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::events::class;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new(
        "expire",
        -3,
        WRITE | FAST,
        Keys::ONE,
        "generic",
        "Sets the expiration time of a key in seconds.",
        |c| expire(c, true, false),
    ),
    Spec::new(
        "pexpire",
        -3,
        WRITE | FAST,
        Keys::ONE,
        "generic",
        "Sets the expiration time of a key in milliseconds.",
        |c| expire(c, false, false),
    ),
    Spec::new(
        "expireat",
        -3,
        WRITE | FAST,
        Keys::ONE,
        "generic",
        "Sets the expiration time of a key to a Unix timestamp.",
        |c| expire(c, true, true),
    ),
    Spec::new(
        "pexpireat",
        -3,
        WRITE | FAST,
        Keys::ONE,
        "generic",
        "Sets the expiration time of a key to a Unix milliseconds timestamp.",
        |c| expire(c, false, true),
    ),
    Spec::new(
        "ttl",
        2,
        READONLY | FAST,
        Keys::ONE,
        "generic",
        "Returns the expiration time in seconds of a key.",
        |c| time(c, |at, now| (at - now + 500) / 1_000),
    ),
    Spec::new(
        "pttl",
        2,
        READONLY | FAST,
        Keys::ONE,
        "generic",
        "Returns the expiration time in milliseconds of a key.",
        |c| time(c, |at, now| at - now),
    ),
    Spec::new(
        "expiretime",
        2,
        READONLY | FAST,
        Keys::ONE,
        "generic",
        "Returns the expiration time of a key as a Unix timestamp.",
        |c| time(c, |at, _| (at + 500) / 1_000),
    ),
    Spec::new(
        "pexpiretime",
        2,
        READONLY | FAST,
        Keys::ONE,
        "generic",
        "Returns the expiration time of a key as a Unix milliseconds timestamp.",
        |c| time(c, |at, _| at),
    ),
    Spec::new(
        "persist",
        2,
        WRITE | FAST,
        Keys::ONE,
        "generic",
        "Removes the expiration time of a key.",
        persist,
    ),
];

#[derive(Default)]
struct Conditions {
    only_without: bool,
    only_with: bool,
    only_later: bool,
    only_earlier: bool,
}

fn conditions(ctx: &Ctx<'_>) -> Result<Conditions, Error> {
    let mut found = Conditions::default();
    for at in 3..ctx.argc() {
        match ctx.arg(at).to_ascii_uppercase().as_slice() {
            b"NX" => found.only_without = true,
            b"XX" => found.only_with = true,
            b"GT" => found.only_later = true,
            b"LT" => found.only_earlier = true,
            _ => {
                let option = String::from_utf8_lossy(ctx.arg(at)).into_owned();
                return Err(Error::err(format_args!("Unsupported option {option}")));
            }
        }
    }
    if found.only_without && (found.only_with || found.only_later || found.only_earlier) {
        return Err(Error::err("NX and XX, GT or LT options at the same time are not compatible"));
    }
    if found.only_later && found.only_earlier {
        return Err(Error::err("GT and LT options at the same time are not compatible"));
    }
    Ok(found)
}

fn expire(ctx: &mut Ctx<'_>, in_seconds: bool, is_moment: bool) -> Done {
    let key = ctx.arg(1);
    let conditions = conditions(ctx)?;
    let wrong = || {
        let name = String::from_utf8_lossy(ctx.args.name()).to_lowercase();
        Error::expire_time(&name)
    };
    let given = ctx.int(2)?;
    let ms = if in_seconds { given.checked_mul(1_000).ok_or_else(wrong)? } else { given };
    let at = if is_moment { ms } else { ms.checked_add(ctx.now).ok_or_else(wrong)? };
    let Some(old) = ctx.db.expiry(key) else {
        ctx.out.integer(0);
        return Ok(());
    };
    let refused = conditions.only_without && old.is_some()
        || conditions.only_with && old.is_none()
        || conditions.only_later && old.is_none_or(|old| at <= old)
        || conditions.only_earlier && old.is_some_and(|old| at >= old);
    if refused {
        ctx.out.integer(0);
        return Ok(());
    }
    if at <= ctx.now && ctx.mode != Mode::Replay {
        ctx.delete(key);
        ctx.rewrite(&[b"DEL", key]);
    } else {
        ctx.db.set_expiry(key, Some(at));
        ctx.changed_with(key, class::GENERIC, "expire");
        ctx.rewrite(&[b"PEXPIREAT", key, at.to_string().as_bytes()]);
    }
    ctx.out.integer(1);
    Ok(())
}

fn time(ctx: &mut Ctx<'_>, show: fn(i64, i64) -> i64) -> Done {
    let reply = match ctx.db.expiry(ctx.arg(1)) {
        None => -2,
        Some(None) => -1,
        Some(Some(at)) => show(at, ctx.now).max(0),
    };
    ctx.out.integer(reply);
    Ok(())
}

fn persist(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let had = ctx.db.expiry(key).flatten().is_some();
    if had {
        ctx.db.set_expiry(key, None);
        ctx.changed_with(key, class::GENERIC, "persist");
    }
    ctx.out.integer(i64::from(had));
    Ok(())
}
