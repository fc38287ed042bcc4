//! SINTER, SUNION, SDIFF, their STORE forms and SINTERCARD.

use super::flag::{DENYOOM, READONLY, WRITE};
use super::options::at_least_one;
use super::typed;
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::Keyspace;
use crate::value::limits::Limits;
use crate::value::set::Set;

const GROUP: &str = "set";
const STORES: u32 = WRITE | DENYOOM;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("sinter", -2, READONLY, Keys::ALL, GROUP, "Returns the intersect of multiple sets.", |ctx| show(ctx, intersection)),
    Spec::new("sunion", -2, READONLY, Keys::ALL, GROUP, "Returns the union of multiple sets.", |ctx| show(ctx, union)),
    Spec::new("sdiff", -2, READONLY, Keys::ALL, GROUP, "Returns the difference of multiple sets.", |ctx| show(ctx, difference)),
    Spec::new("sinterstore", -3, STORES, Keys::ALL, GROUP, "Stores the intersect of multiple sets in a key.", |ctx| store(ctx, intersection, "sinterstore")),
    Spec::new("sunionstore", -3, STORES, Keys::ALL, GROUP, "Stores the union of multiple sets in a key.", |ctx| store(ctx, union, "sunionstore")),
    Spec::new("sdiffstore", -3, STORES, Keys::ALL, GROUP, "Stores the difference of multiple sets in a key.", |ctx| store(ctx, difference, "sdiffstore")),
    Spec::new("sintercard", -3, READONLY, Keys::Counted { at: 1, also: 0 }, GROUP, "Returns the number of members of the intersect of multiple sets.", sintercard),
];

type Operation = fn(&[Option<&Set>], &Limits) -> Set;

/// The sets at the keys; `None` for missing ones.
fn sets<'d>(db: &'d Keyspace, keys: impl Iterator<Item = &'d [u8]>) -> Result<Vec<Option<&'d Set>>, Error> {
    keys.map(|key| typed::peek::<Set>(db, key)).collect()
}

fn show(ctx: &mut Ctx<'_>, operation: Operation) -> Done {
    let limits = ctx.limits();
    let result = operation(&sets(ctx.db, ctx.args.iter().skip(1))?, &limits);
    ctx.out.set(result.len());
    result.iter().for_each(|member| ctx.out.bulk(&member));
    Ok(())
}

fn store(ctx: &mut Ctx<'_>, operation: Operation, event: &'static str) -> Done {
    let (target, limits) = (ctx.arg(1), ctx.limits());
    let result = operation(&sets(ctx.db, ctx.args.iter().skip(2))?, &limits);
    let len = result.len();
    ctx.store(target, result, class::SET, event);
    ctx.out.integer(len as i64);
    Ok(())
}

fn intersection(sets: &[Option<&Set>], limits: &Limits) -> Set {
    let mut result = Set::new();
    common(sets, |member| {
        result.insert(member, limits);
        true
    });
    result
}

/// Visits the intersection until `show` returns false.
fn common(sets: &[Option<&Set>], mut show: impl FnMut(&[u8]) -> bool) {
    let Some(mut sets) = sets.iter().copied().collect::<Option<Vec<&Set>>>() else { return };
    // The smallest set bounds the number of lookups.
    sets.sort_by_key(|set| set.len());
    let Some((smallest, others)) = sets.split_first() else { return };
    for member in smallest.iter() {
        if others.iter().all(|set| set.contains(&member)) && !show(&member) {
            return;
        }
    }
}

fn union(sets: &[Option<&Set>], limits: &Limits) -> Set {
    let mut result = Set::new();
    for member in sets.iter().flatten().flat_map(|set| set.iter()) {
        result.insert(&member, limits);
    }
    result
}

fn difference(sets: &[Option<&Set>], limits: &Limits) -> Set {
    let mut result = Set::new();
    let Some((Some(first), others)) = sets.split_first() else { return result };
    for member in first.iter() {
        if !others.iter().flatten().any(|set| set.contains(&member)) {
            result.insert(&member, limits);
        }
    }
    result
}

fn sintercard(ctx: &mut Ctx<'_>) -> Done {
    let keys = at_least_one(ctx.arg(1), "numkeys should be greater than 0")?;
    if keys > ctx.argc() - 2 {
        return Err(Error::err("Number of keys can't be greater than number of args"));
    }
    let limit = limit_option(ctx, 2 + keys)?;
    let mut count = 0;
    common(&sets(ctx.db, ctx.args.iter().skip(2).take(keys))?, |_| {
        count += 1;
        count != limit
    });
    ctx.out.integer(count as i64);
    Ok(())
}

/// Parses `LIMIT n` after the keys; 0 means no limit.
pub(crate) fn limit_option(ctx: &Ctx<'_>, mut at: usize) -> Result<usize, Error> {
    let mut limit = 0;
    while at < ctx.argc() {
        if !ctx.is(at, "LIMIT") || at + 1 == ctx.argc() {
            return Err(Error::SYNTAX);
        }
        let given = ctx.int(at + 1).ok().and_then(|limit| usize::try_from(limit).ok());
        limit = given.ok_or(Error::err("LIMIT can't be negative"))?;
        at += 2;
    }
    Ok(limit)
}
