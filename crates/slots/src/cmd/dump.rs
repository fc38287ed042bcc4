//! DUMP and RESTORE: a value as an RDB payload that any Redis can read.

use super::flag::{ASKING, DENYOOM, READONLY, WRITE};
use super::{Keys, Spec};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::Item;
use crate::rdb::{self, Object, ObjectRef};
use crate::value::Value;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("dump", 2, READONLY, Keys::ONE, "generic", "Returns a serialized representation of the value stored at a key.", dump),
    Spec::new("restore", -4, WRITE | DENYOOM, Keys::ONE, "generic", "Creates a key from the serialized representation of a value.", restore),
    Spec::new("restore-asking", -4, WRITE | DENYOOM | ASKING, Keys::ONE, "server", "An internal command for migrating keys in a cluster.", restore),
];

/// The DUMP payload of a value.
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
    idle_s: Option<i64>,
    frequency: Option<u8>,
}

fn options(ctx: &Ctx<'_>) -> Result<Options, Error> {
    let mut options = Options::default();
    let mut at = 4;
    while at < ctx.argc() {
        let more = at + 1 < ctx.argc();
        if ctx.is(at, "REPLACE") {
            options.replace = true;
        } else if ctx.is(at, "ABSTTL") {
            options.absolute = true;
        } else if ctx.is(at, "IDLETIME") && more && options.frequency.is_none() {
            let idle_s = Some(ctx.int(at + 1)?).filter(|idle_s| *idle_s >= 0);
            options.idle_s = Some(idle_s.ok_or_else(|| Error::err("Invalid IDLETIME value, must be >= 0"))?);
            at += 1;
        } else if ctx.is(at, "FREQ") && more && options.idle_s.is_none() {
            let frequency = u8::try_from(ctx.int(at + 1)?);
            options.frequency =
                Some(frequency.map_err(|_| Error::err("Invalid FREQ value, must be >= 0 and <= 255"))?);
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
    set_access_hint(ctx, key, &options);
    ctx.changed_with(key, class::GENERIC, "restore");
    ctx.ready(key);
    let at = expires_at.unwrap_or(0).to_string();
    ctx.rewrite(&[b"RESTORE", key, at.as_bytes(), payload, b"REPLACE", b"ABSTTL"]);
    Ok(())
}

/// Applies IDLETIME or FREQ, a hint for eviction that is not propagated.
fn set_access_hint(ctx: &mut Ctx<'_>, key: &[u8], options: &Options) {
    if let Some(frequency) = options.frequency {
        ctx.db.set_frequency(key, frequency);
    }
    if let (Some(idle_s), None) = (options.idle_s, ctx.db.frequency(key)) {
        ctx.db.set_access(key, (ctx.now / 1_000).saturating_sub(idle_s) as u32 & 0xff_ffff);
    }
}
