//! Blocking commands: BLPOP and the others that wait for an element or a member.
//!
//! A command that finds nothing blocks its client; it is executed again from the start when one of its keys is ready.
//! Its effect is propagated as the equivalent non-blocking command.

use super::flag::{BLOCKING, DENYOOM, FAST, NOSCRIPT, WRITE};
use super::lists::{self, Mpop, mpop_options, pop_event};
use super::typed::{self, Typed};
use super::zsets::{self, Extreme};
use super::{Keys, Spec};
use crate::ctx::{Ctx, OnTimeout, timeout_ms};
use crate::error::Done;
use crate::events::class;
use crate::value::list::{End, List};
use crate::value::zset::Zset;

const LIST: &str = "list";
const ZSET: &str = "sorted_set";
const POPS: u32 = WRITE | NOSCRIPT | BLOCKING;
const MOVES: u32 = WRITE | DENYOOM | NOSCRIPT | BLOCKING;
const BUT_LAST: Keys = Keys::Range { first: 1, last: -2, step: 1 };
const COUNTED: Keys = Keys::Counted { at: 2, also: 0 };

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("blpop", -3, POPS, BUT_LAST, LIST, "Removes and returns the first element in a list. Blocks until an element is available otherwise. Deletes the list if the last element was popped.", |ctx| bpop(ctx, End::Left)),
    Spec::new("brpop", -3, POPS, BUT_LAST, LIST, "Removes and returns the last element in a list. Blocks until an element is available otherwise. Deletes the list if the last element was popped.", |ctx| bpop(ctx, End::Right)),
    Spec::new("blmove", 6, MOVES, Keys::TWO, LIST, "Pops an element from a list, pushes it to another list and returns it. Blocks until an element is available otherwise. Deletes the list if the last element was moved.", blmove),
    Spec::new("brpoplpush", 4, MOVES, Keys::TWO, LIST, "Pops an element from a list, pushes it to another list and returns it. Block until an element is available otherwise. Deletes the list if the last element was popped.", brpoplpush),
    Spec::new("blmpop", -5, WRITE | BLOCKING, COUNTED, LIST, "Pops the first element from one of multiple lists. Blocks until an element is available otherwise. Deletes the list if the last element was popped.", blmpop),
    Spec::new("bzpopmin", -3, POPS | FAST, BUT_LAST, ZSET, "Removes and returns the member with the lowest score from one or more sorted sets. Blocks until a member is available otherwise. Deletes the sorted set if the last element was popped.", |ctx| bzpop(ctx, Extreme::Min)),
    Spec::new("bzpopmax", -3, POPS | FAST, BUT_LAST, ZSET, "Removes and returns the member with the highest score from one or more sorted sets. Blocks until a member available otherwise.  Deletes the sorted set if the last element was popped.", |ctx| bzpop(ctx, Extreme::Max)),
    Spec::new("bzmpop", -5, WRITE | BLOCKING, COUNTED, ZSET, "Removes and returns a member by score from one or more sorted sets. Blocks until a member is available otherwise. Deletes the sorted set if the last element was popped.", bzmpop),
];

/// Blocks on the keys; returns false where blocking is not allowed, inside EXEC or a script.
fn wait(ctx: &mut Ctx<'_>, keys: &[&[u8]], timeout_ms: i64) -> bool {
    let may_block = ctx.may_block();
    if may_block {
        // Every blocking command replies with a null array on timeout, BLMOVE included.
        ctx.block(keys.iter().map(|&key| key.into()).collect(), timeout_ms, OnTimeout::NullArray);
    }
    may_block
}

/// Blocks on the keys, or replies with a null array immediately where blocking is not allowed.
fn wait_or_null_array(ctx: &mut Ctx<'_>, keys: &[&[u8]], timeout_ms: i64) {
    if !wait(ctx, keys, timeout_ms) {
        ctx.out.null_array();
    }
}

/// The keys between the command name and the last argument.
fn keys_but_last<'a>(ctx: &Ctx<'a>) -> Vec<&'a [u8]> {
    (1..ctx.argc() - 1).map(|at| ctx.arg(at)).collect()
}

/// The keys to inspect. A blocked client stays blocked when a key has become another type.
fn keys_to_check<'k, T: Typed>(ctx: &Ctx<'_>, keys: &[&'k [u8]]) -> Vec<&'k [u8]> {
    let fits = |key: &&[u8]| !ctx.session.resumed || typed::peek::<T>(ctx.db, key).is_ok();
    keys.iter().copied().filter(fits).collect()
}

fn bpop(ctx: &mut Ctx<'_>, end: End) -> Done {
    let timeout = timeout_ms(ctx.arg(ctx.argc() - 1))?;
    let keys = keys_but_last(ctx);
    for key in keys_to_check::<List>(ctx, &keys) {
        let Some(list) = typed::get_mut::<List>(ctx.db, key)? else { continue };
        let element = list.pop(end).unwrap_or_default();
        ctx.out.array(2);
        ctx.out.bulk(key);
        ctx.out.bulk(&element);
        ctx.changed_with(key, class::LIST, pop_event(end));
        ctx.drop_if_empty::<List>(key);
        ctx.rewrite(&[pop_event(end).as_bytes(), key]);
        return Ok(());
    }
    wait_or_null_array(ctx, &keys, timeout);
    Ok(())
}

fn blmove(ctx: &mut Ctx<'_>) -> Done {
    let (from, to) = (lists::end(ctx.arg(3))?, lists::end(ctx.arg(4))?);
    let timeout = timeout_ms(ctx.arg(5))?;
    move_or_wait(ctx, from, to, timeout)
}

fn brpoplpush(ctx: &mut Ctx<'_>) -> Done {
    let timeout = timeout_ms(ctx.arg(3))?;
    move_or_wait(ctx, End::Right, End::Left, timeout)
}

fn move_or_wait(ctx: &mut Ctx<'_>, from: End, to: End, timeout: i64) -> Done {
    let word = |end| if end == End::Left { b"LEFT".as_slice() } else { b"RIGHT" };
    let (source, target) = (ctx.arg(1), ctx.arg(2));
    if !keys_to_check::<List>(ctx, &[source]).is_empty() && lists::move_element(ctx, from, to)? {
        ctx.rewrite(&[b"LMOVE", source, target, word(from), word(to)]);
    } else if !wait(ctx, &[source], timeout) {
        ctx.out.null();
    }
    Ok(())
}

fn blmpop(ctx: &mut Ctx<'_>) -> Done {
    let timeout = timeout_ms(ctx.arg(1))?;
    let Mpop { keys, from, count } = mpop_options(ctx, 2, lists::end)?;
    let lists = keys_to_check::<List>(ctx, &keys);
    match lists::pop_first(ctx, &lists, from, count)? {
        Some((key, taken)) => {
            ctx.rewrite(&[pop_event(from).as_bytes(), key, taken.to_string().as_bytes()]);
        }
        None => wait_or_null_array(ctx, &keys, timeout),
    }
    Ok(())
}

fn bzpop(ctx: &mut Ctx<'_>, extreme: Extreme) -> Done {
    let timeout = timeout_ms(ctx.arg(ctx.argc() - 1))?;
    let keys = keys_but_last(ctx);
    let zsets = keys_to_check::<Zset>(ctx, &keys);
    match zsets::pop_one(ctx, &zsets, extreme)? {
        Some(key) => ctx.rewrite(&[extreme.pop_name().as_bytes(), key]),
        None => wait_or_null_array(ctx, &keys, timeout),
    }
    Ok(())
}

fn bzmpop(ctx: &mut Ctx<'_>) -> Done {
    let timeout = timeout_ms(ctx.arg(1))?;
    let Mpop { keys, from, count } = mpop_options(ctx, 2, Extreme::read)?;
    let zsets = keys_to_check::<Zset>(ctx, &keys);
    match zsets::pop_first(ctx, &zsets, from, count)? {
        Some((key, taken)) => {
            ctx.rewrite(&[from.pop_name().as_bytes(), key, taken.to_string().as_bytes()]);
        }
        None => wait_or_null_array(ctx, &keys, timeout),
    }
    Ok(())
}
