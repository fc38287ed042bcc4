//! Counter commands: INCR, DECR, INCRBY, DECRBY, INCRBYFLOAT.

use moim_wire_resp::number::parse_i64;

use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::Item;
use crate::value::number;

const FLAGS: u32 = WRITE | DENYOOM | FAST;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new(
        "incr",
        2,
        FLAGS,
        Keys::ONE,
        "string",
        "Increments the integer value of a key by one. Uses 0 as initial value if the key doesn't exist.",
        |ctx| add(ctx, 1),
    ),
    Spec::new(
        "decr",
        2,
        FLAGS,
        Keys::ONE,
        "string",
        "Decrements the integer value of a key by one. Uses 0 as initial value if the key doesn't exist.",
        |ctx| add(ctx, -1),
    ),
    Spec::new(
        "incrby",
        3,
        FLAGS,
        Keys::ONE,
        "string",
        "Increments the integer value of a key by a number. Uses 0 as initial value if the key doesn't exist.",
        |ctx| add(ctx, ctx.int(2)?),
    ),
    Spec::new(
        "decrby",
        3,
        FLAGS,
        Keys::ONE,
        "string",
        "Decrements a number from the integer value of a key. Uses 0 as initial value if the key doesn't exist.",
        |ctx| {
            let by = ctx.int(2)?.checked_neg().ok_or_else(|| Error::err("decrement would overflow"))?;
            add(ctx, by)
        },
    ),
    Spec::new(
        "incrbyfloat",
        3,
        FLAGS,
        Keys::ONE,
        "string",
        "Increment the floating point value of a key by a number. Uses 0 as initial value if the key doesn't exist.",
        add_float,
    ),
];

fn add(ctx: &mut Ctx<'_>, by: i64) -> Done {
    let key = ctx.arg(1);
    let new = ctx.db.put_number(key, |item| {
        let old = match item {
            None => 0,
            Some(Item::Str(string)) => parse_i64(string).ok_or(Error::NOT_INTEGER)?,
            Some(Item::Value(_)) => return Err(Error::WRONG_TYPE),
        };
        old.checked_add(by).ok_or(Error::OVERFLOW)
    })?;
    ctx.changed_with(key, class::STRING, "incrby");
    ctx.out.integer(new);
    Ok(())
}

fn add_float(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let by = ctx.arg(2);
    let old = ctx.string(key)?.unwrap_or(b"0");
    let text = match number::add_floats(old, by).ok_or(Error::NOT_FLOAT)? {
        Ok(text) => text,
        Err(_) => return Err(Error::NAN),
    };
    let expires_at = ctx.db.expiry(key).flatten();
    ctx.db.set_str(key, text.as_bytes(), expires_at);
    ctx.changed_with(key, class::STRING, "incrbyfloat");
    // The sum is propagated as SET: another machine could round a float differently.
    ctx.rewrite(&[b"SET", key, text.as_bytes(), b"KEEPTTL"]);
    ctx.out.bulk(text.as_bytes());
    Ok(())
}
