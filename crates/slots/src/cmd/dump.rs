//! DUMP and RESTORE: a value as a payload that any Redis reads.

use super::flag::{ASKING, DENYOOM, READONLY, WRITE};
use super::{Keys, Spec};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::Item;
use crate::rdb::{self, Object, ObjectRef};
use crate::value::Value;

/// The commands of this file.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("dump", 2, READONLY, Keys::ONE, "generic", "Gives a value as a payload", dump),
    Spec::new("restore", -4, WRITE | DENYOOM, Keys::ONE, "generic", "Makes a key from a payload", restore),
    Spec::new("restore-asking", -4, WRITE | DENYOOM | ASKING, Keys::ONE, "server", "Makes a key from a payload while its slot moves here", restore),
];

/// The payload of what a key holds.
pub(crate) fn payload(item: Item<'_>) -> Vec<u8> {
    rdb::dump(match item {
        Item::Str(string) => ObjectRef::String(string),
        Item::Value(value) => match value {
            Value::Str(string) => ObjectRef::String(string),
            Value::List(list) => ObjectRef::List(list),
            Value::Hash(hash) => ObjectRef::Hash(hash),
            Value::Set(set) => ObjectRef::Set(set),
            Value::Zset(zset) => ObjectRef::Zset(zset),
            Value::Stream(stream) => ObjectRef::Stream(stream),
        },
    })
}

fn dump(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    match ctx.db.get(key) {
        Some(item) => ctx.out.bulk(&payload(item)),
        None => ctx.out.null(),
    }
    Ok(())
}

#[derive(Default)]
struct Options {
    replace: bool,
    absolute: bool,
}

/// IDLETIME and FREQ are checked and let go: they are hints for eviction.
fn options(ctx: &Ctx<'_>) -> Result<Options, Error> {
    let mut options = Options::default();
    let (mut idle, mut frequency) = (false, false);
    let mut at = 4;
    while at < ctx.argc() {
        let more = at + 1 < ctx.argc();
        if ctx.is(at, "REPLACE") {
            options.replace = true;
        } else if ctx.is(at, "ABSTTL") {
            options.absolute = true;
        } else if ctx.is(at, "IDLETIME") && more && !frequency {
            if ctx.int(at + 1)? < 0 {
                return Err(Error::err("Invalid IDLETIME value, must be >= 0"));
            }
            idle = true;
            at += 1;
        } else if ctx.is(at, "FREQ") && more && !idle {
            if !(0..=255).contains(&ctx.int(at + 1)?) {
                return Err(Error::err("Invalid FREQ value, must be >= 0 and <= 255"));
            }
            frequency = true;
            at += 1;
        } else {
            return Err(Error::SYNTAX);
        }
        at += 1;
    }
    Ok(options)
}

fn restore(ctx: &mut Ctx<'_>) -> Done {
    let options = options(ctx)?;
    let (key, payload, limits) = (ctx.arg(1), ctx.arg(3), ctx.limits());
    if !options.replace && ctx.db.contains(key) {
        return Err(Error::coded("BUSYKEY Target key name already exists."));
    }
    let ttl = ctx.int(2)?;
    if ttl < 0 {
        return Err(Error::err("Invalid TTL value, must be >= 0"));
    }
    let object = rdb::restore(payload, &limits).map_err(|error| Error::coded(error.to_string()))?;
    let expires_at = match ttl {
        0 => None,
        ttl if options.absolute => Some(ttl),
        ttl => Some(ctx.now.saturating_add(ttl)),
    };
    ctx.out.ok();
    if expires_at.is_some_and(|at| at <= ctx.now) && ctx.mode != Mode::Replay {
        if ctx.delete(key) {
            ctx.rewrite(&[b"DEL", key]);
        }
        return Ok(());
    }
    match object {
        Object::String(string) => ctx.db.set_str(key, &string, expires_at),
        Object::List(list) => ctx.db.put(key, Value::List(list), expires_at),
        Object::Set(set) => ctx.db.put(key, Value::Set(set), expires_at),
        Object::Hash(hash) => ctx.db.put(key, Value::Hash(hash), expires_at),
        Object::Zset(zset) => ctx.db.put(key, Value::Zset(zset), expires_at),
        Object::Stream(stream) => ctx.db.put(key, Value::Stream(stream), expires_at),
    }
    ctx.changed_with(key, class::GENERIC, "restore");
    ctx.ready(key);
    let at = expires_at.unwrap_or(0).to_string();
    ctx.rewrite(&[b"RESTORE", key, at.as_bytes(), payload, b"REPLACE", b"ABSTTL"]);
    Ok(())
}
