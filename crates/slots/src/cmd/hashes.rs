//! Hash commands: HSET and its family.

use moim_wire_resp::Protocol;

use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::options::{pick_positions, picks, scan_options, write_scan};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::{Ctx, int};
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::hash::Hash;
use crate::value::number;

const GROUP: &str = "hash";
const WRITES: u32 = WRITE | DENYOOM | FAST;
const READS: u32 = READONLY | FAST;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("hset", -4, WRITES, Keys::ONE, GROUP, "Creates or modifies the value of a field in a hash.", hset),
    Spec::new("hmset", -4, WRITES, Keys::ONE, GROUP, "Sets the values of multiple fields.", hmset),
    Spec::new("hsetnx", 4, WRITES, Keys::ONE, GROUP, "Sets the value of a field in a hash only when the field doesn't exist.", hsetnx),
    Spec::new("hget", 3, READS, Keys::ONE, GROUP, "Returns the value of a field in a hash.", hget),
    Spec::new("hmget", -3, READS, Keys::ONE, GROUP, "Returns the values of all fields in a hash.", hmget),
    Spec::new("hgetall", 2, READONLY, Keys::ONE, GROUP, "Returns all fields and values in a hash.", hgetall),
    Spec::new("hkeys", 2, READONLY, Keys::ONE, GROUP, "Returns all fields in a hash.", hkeys),
    Spec::new("hvals", 2, READONLY, Keys::ONE, GROUP, "Returns all values in a hash.", hvals),
    Spec::new("hlen", 2, READS, Keys::ONE, GROUP, "Returns the number of fields in a hash.", hlen),
    Spec::new("hstrlen", 3, READS, Keys::ONE, GROUP, "Returns the length of the value of a field.", hstrlen),
    Spec::new("hexists", 3, READS, Keys::ONE, GROUP, "Determines whether a field exists in a hash.", hexists),
    Spec::new("hdel", -3, WRITE | FAST, Keys::ONE, GROUP, "Deletes one or more fields and their values from a hash. Deletes the hash if no fields remain.", hdel),
    Spec::new("hincrby", 4, WRITES, Keys::ONE, GROUP, "Increments the integer value of a field in a hash by a number.", hincrby),
    Spec::new("hincrbyfloat", 4, WRITES, Keys::ONE, GROUP, "Increments the floating point value of a field by a number.", hincrbyfloat),
    Spec::new("hrandfield", -2, READONLY, Keys::ONE, GROUP, "Returns one or more random fields from a hash.", hrandfield),
    Spec::new("hscan", -3, READONLY, Keys::ONE, GROUP, "Iterates over fields and values of a hash.", hscan),
];

/// Sets the field-value pairs after the key; returns the number of new fields.
fn set_pairs(ctx: &mut Ctx<'_>) -> Result<usize, Error> {
    if ctx.argc() % 2 == 1 {
        return Err(Error::arity(if ctx.is(0, "HMSET") { "hmset" } else { "hset" }));
    }
    let (key, limits) = (ctx.arg(1), ctx.limits());
    let args = ctx.args;
    let hash: &mut Hash = typed::create(ctx.db, key)?;
    let mut added = 0;
    let mut pairs = args.iter().skip(2);
    while let (Some(field), Some(value)) = (pairs.next(), pairs.next()) {
        added += usize::from(hash.set(field, value, &limits));
    }
    ctx.changed_with(key, class::HASH, "hset");
    Ok(added)
}

fn hset(ctx: &mut Ctx<'_>) -> Done {
    let added = set_pairs(ctx)?;
    ctx.out.integer(added as i64);
    Ok(())
}

fn hmset(ctx: &mut Ctx<'_>) -> Done {
    set_pairs(ctx)?;
    ctx.out.ok();
    Ok(())
}

fn hsetnx(ctx: &mut Ctx<'_>) -> Done {
    let (key, field, value) = (ctx.arg(1), ctx.arg(2), ctx.arg(3));
    if typed::get::<Hash>(ctx.db, key)?.is_some_and(|hash| hash.get(field).is_some()) {
        ctx.out.integer(0);
        return Ok(());
    }
    let limits = ctx.limits();
    typed::create::<Hash>(ctx.db, key)?.set(field, value, &limits);
    ctx.changed_with(key, class::HASH, "hset");
    ctx.out.integer(1);
    Ok(())
}

fn hget(ctx: &mut Ctx<'_>) -> Done {
    let (key, field) = (ctx.arg(1), ctx.arg(2));
    match typed::get::<Hash>(ctx.db, key)?.and_then(|hash| hash.get(field)) {
        Some(value) => ctx.out.bulk(value),
        None => ctx.out.null(),
    }
    Ok(())
}

fn hmget(ctx: &mut Ctx<'_>) -> Done {
    let (key, args) = (ctx.arg(1), ctx.args);
    let hash = typed::get::<Hash>(ctx.db, key)?;
    ctx.out.array(args.len() - 2);
    for field in args.iter().skip(2) {
        match hash.and_then(|hash| hash.get(field)) {
            Some(value) => ctx.out.bulk(value),
            None => ctx.out.null(),
        }
    }
    Ok(())
}

fn hgetall(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let hash = typed::get::<Hash>(ctx.db, key)?;
    ctx.out.map(hash.map_or(0, Hash::len));
    for (field, value) in hash.into_iter().flat_map(Hash::iter) {
        ctx.out.bulk(field);
        ctx.out.bulk(value);
    }
    Ok(())
}

fn hkeys(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let hash = typed::get::<Hash>(ctx.db, key)?;
    ctx.out.array(hash.map_or(0, Hash::len));
    hash.into_iter().flat_map(Hash::iter).for_each(|(field, _)| ctx.out.bulk(field));
    Ok(())
}

fn hvals(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let hash = typed::get::<Hash>(ctx.db, key)?;
    ctx.out.array(hash.map_or(0, Hash::len));
    hash.into_iter().flat_map(Hash::iter).for_each(|(_, value)| ctx.out.bulk(value));
    Ok(())
}

fn hlen(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let len = typed::get::<Hash>(ctx.db, key)?.map_or(0, Hash::len);
    ctx.out.integer(len as i64);
    Ok(())
}

fn hstrlen(ctx: &mut Ctx<'_>) -> Done {
    let (key, field) = (ctx.arg(1), ctx.arg(2));
    let len = typed::get::<Hash>(ctx.db, key)?.and_then(|hash| hash.get(field)).map_or(0, <[u8]>::len);
    ctx.out.integer(len as i64);
    Ok(())
}

fn hexists(ctx: &mut Ctx<'_>) -> Done {
    let (key, field) = (ctx.arg(1), ctx.arg(2));
    let there = typed::get::<Hash>(ctx.db, key)?.is_some_and(|hash| hash.get(field).is_some());
    ctx.out.integer(i64::from(there));
    Ok(())
}

fn hdel(ctx: &mut Ctx<'_>) -> Done {
    let (key, args) = (ctx.arg(1), ctx.args);
    let mut removed = 0;
    if let Some(hash) = typed::get_mut::<Hash>(ctx.db, key)? {
        removed = args.iter().skip(2).filter(|field| hash.remove(field)).count();
    }
    if removed > 0 {
        ctx.changed_with(key, class::HASH, "hdel");
        ctx.drop_if_empty::<Hash>(key);
    }
    ctx.out.integer(removed as i64);
    Ok(())
}

fn hincrby(ctx: &mut Ctx<'_>) -> Done {
    let (key, field, by) = (ctx.arg(1), ctx.arg(2), ctx.int(3)?);
    let old = match typed::get::<Hash>(ctx.db, key)?.and_then(|hash| hash.get(field)) {
        Some(value) => int(value).map_err(|_| Error::err("hash value is not an integer"))?,
        None => 0,
    };
    let new = old.checked_add(by).ok_or(Error::OVERFLOW)?;
    let limits = ctx.limits();
    typed::create::<Hash>(ctx.db, key)?.set(field, &number::from_i64(new), &limits);
    ctx.changed_with(key, class::HASH, "hincrby");
    ctx.out.integer(new);
    Ok(())
}

fn hincrbyfloat(ctx: &mut Ctx<'_>) -> Done {
    let (key, field, by) = (ctx.arg(1), ctx.arg(2), ctx.arg(3));
    if number::is_infinite_long(by).ok_or(Error::NOT_FLOAT)? {
        return Err(Error::err("value is NaN or Infinity"));
    }
    let old = typed::get::<Hash>(ctx.db, key)?.and_then(|hash| hash.get(field)).unwrap_or(b"0");
    let new = match number::add_floats(old, by) {
        None => return Err(Error::err("hash value is not a float")),
        Some(Err(_)) => return Err(Error::NAN),
        Some(Ok(new)) => new,
    };
    let limits = ctx.limits();
    typed::create::<Hash>(ctx.db, key)?.set(field, new.as_bytes(), &limits);
    ctx.changed_with(key, class::HASH, "hincrbyfloat");
    // The sum is propagated as HSET: another machine could round a float differently.
    ctx.rewrite(&[b"HSET", key, field, new.as_bytes()]);
    ctx.out.bulk(new.as_bytes());
    Ok(())
}

fn hrandfield(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    if ctx.argc() == 2 {
        match typed::get::<Hash>(ctx.db, key)?.and_then(|hash| hash.at(fastrand::usize(..hash.len()))) {
            Some((field, _)) => ctx.out.bulk(field),
            None => ctx.out.null(),
        }
        return Ok(());
    }
    let count = picks(ctx.arg(2))?;
    let with_values = ctx.argc() == 4 && ctx.is(3, "WITHVALUES");
    if ctx.argc() > 4 || (ctx.argc() == 4 && !with_values) {
        return Err(Error::SYNTAX);
    }
    let pairs = ctx.out.protocol() == Protocol::Resp3;
    let hash = typed::get::<Hash>(ctx.db, key)?;
    let positions = pick_positions(hash.map_or(0, Hash::len), count);
    ctx.out.array(positions.len() * if with_values && !pairs { 2 } else { 1 });
    let picked = positions.iter().filter_map(|&at| hash?.at(at));
    for (field, value) in picked {
        if with_values && pairs {
            ctx.out.array(2);
        }
        ctx.out.bulk(field);
        if with_values {
            ctx.out.bulk(value);
        }
    }
    Ok(())
}

fn hscan(ctx: &mut Ctx<'_>) -> Done {
    let (cursor, options) = scan_options::<Hash>(ctx)?;
    let key = ctx.arg(1);
    let mut found = Vec::new();
    let mut next = 0;
    if let (Some(hash), Some(options)) = (typed::get::<Hash>(ctx.db, key)?, options) {
        next = hash.scan(cursor, options.count, |field, value| {
            if options.matches(field) {
                found.push(field.to_vec());
                found.push(value.to_vec());
            }
        });
    }
    write_scan(ctx, next, &found);
    Ok(())
}
