//! String writes: SET with all its options, SETNX, SETEX, PSETEX, MSET, MSETNX.
//!
//! Effects are propagated with an absolute expire time, never a TTL, and without the condition, which was met.

use super::get::reply_string;
use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;

const PAIRS: Keys = Keys::Range { first: 1, last: -1, step: 2 };

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new(
        "set",
        -3,
        WRITE | DENYOOM | BRIEF,
        Keys::ONE,
        "string",
        "Sets the string value of a key, ignoring its type. The key is created if it doesn't exist.",
        set,
    ),
    Spec::new(
        "setnx",
        3,
        WRITE | DENYOOM | FAST,
        Keys::ONE,
        "string",
        "Set the string value of a key only when the key doesn't exist.",
        setnx,
    ),
    Spec::new(
        "setex",
        4,
        WRITE | DENYOOM,
        Keys::ONE,
        "string",
        "Sets the string value and expiration time of a key. Creates the key if it doesn't exist.",
        setex,
    ),
    Spec::new(
        "psetex",
        4,
        WRITE | DENYOOM,
        Keys::ONE,
        "string",
        "Sets both string value and expiration time in milliseconds of a key. The key is created if it doesn't exist.",
        psetex,
    ),
    Spec::new(
        "mset",
        -3,
        WRITE | DENYOOM,
        PAIRS,
        "string",
        "Atomically creates or modifies the string values of one or more keys.",
        mset,
    ),
    Spec::new(
        "msetnx",
        -3,
        WRITE | DENYOOM,
        PAIRS,
        "string",
        "Atomically modifies the string values of one or more keys only when all keys don't exist.",
        msetnx,
    ),
];

/// An expire option: `EX 10`, `PXAT 1700000000000` …
#[derive(Clone, Copy)]
pub(super) struct Expiry {
    pub(super) in_seconds: bool,
    pub(super) is_moment: bool,
    pub(super) index: usize,
}

impl Expiry {
    /// The absolute expire time in milliseconds since 1970.
    pub(super) fn at(&self, ctx: &Ctx<'_>, command: &str) -> Result<i64, Error> {
        let given = ctx.int(self.index)?;
        let wrong = || Error::expire_time(command);
        if given <= 0 {
            return Err(wrong());
        }
        let ms = if self.in_seconds { given.checked_mul(1_000).ok_or_else(wrong)? } else { given };
        if self.is_moment { Ok(ms) } else { ms.checked_add(ctx.now).ok_or_else(wrong) }
    }
}

/// Parses `EX|PX|EXAT|PXAT time` at `at`, if present.
pub(super) fn expiry_option(ctx: &Ctx<'_>, at: usize) -> Option<Expiry> {
    let (in_seconds, is_moment) = match ctx.arg(at).to_ascii_uppercase().as_slice() {
        b"EX" => (true, false),
        b"PX" => (false, false),
        b"EXAT" => (true, true),
        b"PXAT" => (false, true),
        _ => return None,
    };
    (at + 1 < ctx.argc()).then_some(Expiry { in_seconds, is_moment, index: at + 1 })
}

#[derive(Default)]
struct Options {
    expiry: Option<Expiry>,
    keep_ttl: bool,
    only_new: bool,
    only_old: bool,
    get: bool,
}

fn options(ctx: &Ctx<'_>) -> Result<Options, Error> {
    let mut options = Options::default();
    let mut at = 3;
    while at < ctx.argc() {
        let has_time = options.keep_ttl || options.expiry.is_some();
        if ctx.is(at, "NX") && !options.only_old {
            options.only_new = true;
        } else if ctx.is(at, "XX") && !options.only_new {
            options.only_old = true;
        } else if ctx.is(at, "GET") {
            options.get = true;
        } else if ctx.is(at, "KEEPTTL") && options.expiry.is_none() {
            options.keep_ttl = true;
        } else if let Some(expiry) = expiry_option(ctx, at).filter(|_| !has_time) {
            options.expiry = Some(expiry);
            at += 1;
        } else {
            return Err(Error::SYNTAX);
        }
        at += 1;
    }
    Ok(options)
}

fn set(ctx: &mut Ctx<'_>) -> Done {
    let (key, value) = (ctx.arg(1), ctx.arg(2));
    if ctx.argc() == 3 {
        ctx.db.set_str(key, value, None);
        ctx.changed_with(key, class::STRING, "set");
        ctx.out.ok();
        return Ok(());
    }
    let options = options(ctx)?;
    let mut expires_at = options.expiry.map(|expiry| expiry.at(ctx, "set")).transpose()?;
    if options.get {
        reply_string(ctx, key)?;
    }
    if options.only_new || options.only_old {
        let is_there = ctx.db.contains(key);
        if options.only_new && is_there || options.only_old && !is_there {
            if !options.get {
                ctx.out.null();
            }
            return Ok(());
        }
    }
    if options.keep_ttl {
        expires_at = ctx.db.expiry(key).flatten();
    }
    store(ctx, key, value, expires_at);
    if !options.get {
        ctx.out.ok();
    }
    Ok(())
}

/// Sets the string and propagates it with its absolute expire time.
fn store(ctx: &mut Ctx<'_>, key: &[u8], value: &[u8], expires_at: Option<i64>) {
    if let Some(at) = expires_at.filter(|at| *at <= ctx.now) {
        // An expire time in the past: as in Redis the key is set and expires at the next access.
        let _ = at;
        ctx.db.remove(key);
        ctx.changed_with(key, class::STRING, "set");
        ctx.rewrite(&[b"DEL", key]);
        return;
    }
    ctx.db.set_str(key, value, expires_at);
    ctx.changed_with(key, class::STRING, "set");
    match expires_at {
        None => ctx.rewrite(&[b"SET", key, value]),
        Some(at) => {
            ctx.events.notify(class::GENERIC, "expire", key);
            ctx.rewrite(&[b"SET", key, value, b"PXAT", at.to_string().as_bytes()]);
        }
    }
}

fn setnx(ctx: &mut Ctx<'_>) -> Done {
    let (key, value) = (ctx.arg(1), ctx.arg(2));
    let is_new = !ctx.db.contains(key);
    if is_new {
        store(ctx, key, value, None);
    }
    ctx.out.integer(i64::from(is_new));
    Ok(())
}

fn setex(ctx: &mut Ctx<'_>) -> Done {
    let at = Expiry { in_seconds: true, is_moment: false, index: 2 }.at(ctx, "setex")?;
    store(ctx, ctx.arg(1), ctx.arg(3), Some(at));
    ctx.out.ok();
    Ok(())
}

fn psetex(ctx: &mut Ctx<'_>) -> Done {
    let at = Expiry { in_seconds: false, is_moment: false, index: 2 }.at(ctx, "psetex")?;
    store(ctx, ctx.arg(1), ctx.arg(3), Some(at));
    ctx.out.ok();
    Ok(())
}

fn set_pairs(ctx: &mut Ctx<'_>) {
    for at in (1..ctx.argc()).step_by(2) {
        let key = ctx.arg(at);
        ctx.db.set_str(key, ctx.arg(at + 1), None);
        ctx.changed_with(key, class::STRING, "set");
    }
}

fn mset(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc().is_multiple_of(2) {
        return Err(Error::arity("mset"));
    }
    set_pairs(ctx);
    ctx.out.ok();
    Ok(())
}

fn msetnx(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc().is_multiple_of(2) {
        return Err(Error::arity("msetnx"));
    }
    let is_new = (1..ctx.argc()).step_by(2).all(|at| !ctx.db.contains(ctx.arg(at)));
    if is_new {
        set_pairs(ctx);
    }
    ctx.out.integer(i64::from(is_new));
    Ok(())
}
