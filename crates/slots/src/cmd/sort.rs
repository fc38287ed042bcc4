//! SORT and SORT_RO.
//!
//! As in every Redis Cluster, BY with a pattern and GET are rejected: they would read keys of other slots.

use moim_wire_resp::Args;

use super::flag::{DENYOOM, MOVABLEKEYS, READONLY, WRITE};
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::Item;
use crate::value::Value;
use crate::value::list::{End, List};
use crate::value::number::parse_f64;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("sort", -2, WRITE | DENYOOM | MOVABLEKEYS, Keys::Found { first: 1, find: sort_keys }, "generic", "Sorts the elements in a list, a set, or a sorted set, optionally storing the result.", |ctx| sort(ctx, true)),
    Spec::new("sort_ro", -2, READONLY | MOVABLEKEYS, Keys::ONE, "generic", "Returns the sorted elements of a list, a set, or a sorted set.", |ctx| sort(ctx, false)),
];

/// The source key and the last STORE key.
fn sort_keys(args: &Args<'_>, into: &mut Vec<usize>) {
    into.push(1);
    let stores = |at: &usize| args.get(*at).is_some_and(|word| word.eq_ignore_ascii_case(b"STORE"));
    if let Some(at) = (2..args.len().saturating_sub(1)).rev().find(stores) {
        into.push(at + 1);
    }
}

#[derive(Default)]
struct Options<'a> {
    descending: bool,
    by_bytes: bool,
    unsorted: bool,
    limit: Option<(i64, i64)>,
    store: Option<&'a [u8]>,
}

impl<'a> Options<'a> {
    fn read(ctx: &Ctx<'a>, may_store: bool) -> Result<Options<'a>, Error> {
        let mut options = Options::default();
        let mut at = 2;
        while at < ctx.argc() {
            let left = ctx.argc() - at - 1;
            if ctx.is(at, "ASC") {
                options.descending = false;
            } else if ctx.is(at, "DESC") {
                options.descending = true;
            } else if ctx.is(at, "ALPHA") {
                options.by_bytes = true;
            } else if ctx.is(at, "LIMIT") && left >= 2 {
                options.limit = Some((ctx.int(at + 1)?, ctx.int(at + 2)?));
                at += 2;
            } else if may_store && ctx.is(at, "STORE") && left >= 1 {
                options.store = Some(ctx.arg(at + 1));
                at += 1;
            } else if ctx.is(at, "BY") && left >= 1 {
                if ctx.arg(at + 1).contains(&b'*') {
                    return Err(Error::err("BY option of SORT denied in Cluster mode."));
                }
                options.unsorted = true;
                at += 1;
            } else if ctx.is(at, "GET") && left >= 1 {
                return Err(Error::err("GET option of SORT denied in Cluster mode."));
            } else {
                return Err(Error::SYNTAX);
            }
            at += 1;
        }
        Ok(options)
    }
}

fn sort(ctx: &mut Ctx<'_>, may_store: bool) -> Done {
    let mut options = Options::read(ctx, may_store)?;
    let key = ctx.arg(1);
    let mut elements: Vec<Vec<u8>> = match ctx.db.touch(key) {
        None => Vec::new(),
        Some(Item::Value(Value::List(list))) => list.iter().map(<[u8]>::to_vec).collect(),
        Some(Item::Value(Value::Zset(zset))) => zset.iter().map(|(member, _)| member.to_vec()).collect(),
        Some(Item::Value(Value::Set(set))) => {
            // A set has no defined order, but a stored result or one returned to a script must be deterministic.
            if options.unsorted && (options.store.is_some() || ctx.nested) {
                (options.unsorted, options.by_bytes) = (false, true);
            }
            set.iter().map(|member| member.into_owned()).collect()
        }
        Some(_) => return Err(Error::WRONG_TYPE),
    };
    order(&mut elements, &options)?;
    let len = elements.len();
    let (start, count) = options.limit.unwrap_or((0, -1));
    let start = usize::try_from(start).unwrap_or(0).min(len);
    let end = usize::try_from(count).map_or(len, |count| start.saturating_add(count).min(len));
    let shown = &elements[start..end];
    let Some(target) = options.store else {
        ctx.out.array(shown.len());
        shown.iter().for_each(|element| ctx.out.bulk(element));
        return Ok(());
    };
    let (mut list, limits) = (List::new(), ctx.limits());
    shown.iter().for_each(|element| list.push(End::Right, element, &limits));
    if ctx.store(target, list, class::LIST, "sortstore") {
        ctx.ready(target);
    }
    ctx.out.integer(shown.len() as i64);
    Ok(())
}

fn order(elements: &mut Vec<Vec<u8>>, options: &Options<'_>) -> Result<(), Error> {
    if options.unsorted {
        if options.descending {
            elements.reverse();
        }
        return Ok(());
    }
    if options.by_bytes {
        elements.sort_unstable();
    } else {
        let mut weighed = Vec::with_capacity(elements.len());
        for element in elements.drain(..) {
            let weight = match element.as_slice() {
                b"" => 0.0,
                text => parse_f64(text)
                    .ok_or_else(|| Error::err("One or more scores can't be converted into double"))?,
            };
            weighed.push((weight, element));
        }
        weighed.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
        elements.extend(weighed.into_iter().map(|(_, element)| element));
    }
    if options.descending {
        elements.reverse();
    }
    Ok(())
}
