//! Sorted set commands: ZADD and its family. Ranges are in `zset_range`, unions and intersections in `zset_algebra`,
//! the blocking commands in `blocking`.

use moim_wire_resp::{Encoder, Protocol};

use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::lists::{Mpop, mpop_options};
use super::options::{pick_positions, picks, positive, scan_options, write_scan};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::number::format_f64;
use crate::value::zset::{Inserted, Zset};

const GROUP: &str = "sorted_set";
const READS: u32 = READONLY | FAST;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("zadd", -4, WRITE | DENYOOM | FAST, Keys::ONE, GROUP, "Adds one or more members to a sorted set, or updates their scores.", zadd),
    Spec::new("zincrby", 4, WRITE | DENYOOM | FAST, Keys::ONE, GROUP, "Increments the score of a member in a sorted set.", zincrby),
    Spec::new("zrem", -3, WRITE | FAST, Keys::ONE, GROUP, "Removes one or more members from a sorted set. Deletes the sorted set if all members were removed.", zrem),
    Spec::new("zcard", 2, READS, Keys::ONE, GROUP, "Returns the number of members in a sorted set.", zcard),
    Spec::new("zscore", 3, READS, Keys::ONE, GROUP, "Returns the score of a member in a sorted set.", zscore),
    Spec::new("zmscore", -3, READS, Keys::ONE, GROUP, "Returns the score of one or more members in a sorted set.", zmscore),
    Spec::new("zrank", 3, READS, Keys::ONE, GROUP, "Returns the index of a member in a sorted set ordered by ascending scores.", |ctx| rank(ctx, false)),
    Spec::new("zrevrank", 3, READS, Keys::ONE, GROUP, "Returns the index of a member in a sorted set ordered by descending scores.", |ctx| rank(ctx, true)),
    Spec::new("zpopmin", -2, WRITE | FAST, Keys::ONE, GROUP, "Returns the lowest-scoring members from a sorted set after removing them. Deletes the sorted set if the last member was popped.", |ctx| pop(ctx, Extreme::Min)),
    Spec::new("zpopmax", -2, WRITE | FAST, Keys::ONE, GROUP, "Returns the highest-scoring members from a sorted set after removing them. Deletes the sorted set if the last member was popped.", |ctx| pop(ctx, Extreme::Max)),
    Spec::new("zmpop", -4, WRITE, Keys::Counted { at: 1, also: 0 }, GROUP, "Returns the highest- or lowest-scoring members from one or more sorted sets after removing them. Deletes the sorted set if the last member was popped.", zmpop),
    Spec::new("zrandmember", -2, READONLY, Keys::ONE, GROUP, "Returns one or more random members from a sorted set.", zrandmember),
    Spec::new("zscan", -3, READONLY, Keys::ONE, GROUP, "Iterates over members and scores of a sorted set.", zscan),
];

/// The options of ZADD.
#[derive(Default)]
struct Add {
    nx: bool,
    xx: bool,
    gt: bool,
    lt: bool,
    ch: bool,
    incr: bool,
}

impl Add {
    /// Parses the options; returns them and the position of the first score.
    fn read(ctx: &Ctx<'_>) -> Result<(Add, usize), Error> {
        let mut add = Add::default();
        let mut at = 2;
        while at < ctx.argc() {
            let option = match ctx.arg(at).to_ascii_lowercase().as_slice() {
                b"nx" => &mut add.nx,
                b"xx" => &mut add.xx,
                b"gt" => &mut add.gt,
                b"lt" => &mut add.lt,
                b"ch" => &mut add.ch,
                b"incr" => &mut add.incr,
                _ => break,
            };
            *option = true;
            at += 1;
        }
        let rest = ctx.argc() - at;
        if rest == 0 || !rest.is_multiple_of(2) {
            return Err(Error::SYNTAX);
        }
        if add.nx && add.xx {
            return Err(Error::err("XX and NX options at the same time are not compatible"));
        }
        if (add.nx && (add.gt || add.lt)) || (add.gt && add.lt) {
            return Err(Error::err("GT, LT, and/or NX options at the same time are not compatible"));
        }
        if add.incr && rest > 2 {
            return Err(Error::err("INCR option supports a single increment-element pair"));
        }
        Ok((add, at))
    }

    /// The new score of a member, given its current one; `None` if it stays unchanged.
    fn score(&self, old: Option<f64>, given: f64) -> Result<Option<f64>, Error> {
        let Some(old) = old else { return Ok((!self.xx).then_some(given)) };
        if self.nx {
            return Ok(None);
        }
        let new = if self.incr { old + given } else { given };
        if new.is_nan() {
            return Err(Error::err("resulting score is not a number (NaN)"));
        }
        let refused = (self.gt && new <= old) || (self.lt && new >= old);
        Ok((!refused).then_some(new))
    }
}

fn zadd(ctx: &mut Ctx<'_>) -> Done {
    let (add, first) = Add::read(ctx)?;
    add_members(ctx, &add, first)
}

fn zincrby(ctx: &mut Ctx<'_>) -> Done {
    add_members(ctx, &Add { incr: true, ..Add::default() }, 2)
}

fn add_members(ctx: &mut Ctx<'_>, add: &Add, first: usize) -> Done {
    let (key, limits) = (ctx.arg(1), ctx.limits());
    let mut pairs = Vec::with_capacity((ctx.argc() - first) / 2);
    for at in (first..ctx.argc()).step_by(2) {
        pairs.push((ctx.float(at)?, ctx.arg(at + 1)));
    }
    let (mut added, mut updated, mut result) = (0, 0, None);
    // One lookup for all members. A missing set is created by the first insertion, unless XX forbids it.
    let is_none = add.xx && typed::get::<Zset>(ctx.db, key)?.is_none();
    let zset = if is_none { None } else { Some(typed::create::<Zset>(ctx.db, key)?) };
    if let Some(zset) = zset {
        for (given, member) in pairs {
            let Some(score) = add.score(zset.score(member), given)? else { continue };
            result = Some(score);
            match zset.insert(member, score, &limits) {
                Inserted::New => added += 1,
                Inserted::Moved => updated += 1,
                Inserted::Same => {}
            }
        }
    }
    if added + updated > 0 {
        ctx.changed_with(key, class::ZSET, if add.incr { "zincr" } else { "zadd" });
        if added > 0 {
            ctx.ready(key);
        }
    }
    match (add.incr, result) {
        (true, Some(score)) => ctx.out.double(score),
        (true, None) => ctx.out.null(),
        (false, _) => ctx.out.integer(added + if add.ch { updated } else { 0 }),
    }
    Ok(())
}

fn zrem(ctx: &mut Ctx<'_>) -> Done {
    let (key, args) = (ctx.arg(1), ctx.args);
    let removed = match typed::get_mut::<Zset>(ctx.db, key)? {
        Some(zset) => args.iter().skip(2).filter(|member| zset.remove(member)).count(),
        None => 0,
    };
    if removed > 0 {
        ctx.changed_with(key, class::ZSET, "zrem");
        ctx.drop_if_empty::<Zset>(key);
    }
    ctx.out.integer(removed as i64);
    Ok(())
}

fn zcard(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let len = typed::get::<Zset>(ctx.db, key)?.map_or(0, Zset::len);
    ctx.out.integer(len as i64);
    Ok(())
}

fn zscore(ctx: &mut Ctx<'_>) -> Done {
    let (key, member) = (ctx.arg(1), ctx.arg(2));
    match typed::get::<Zset>(ctx.db, key)?.and_then(|zset| zset.score(member)) {
        Some(score) => ctx.out.double(score),
        None => ctx.out.null(),
    }
    Ok(())
}

fn zmscore(ctx: &mut Ctx<'_>) -> Done {
    let (key, args) = (ctx.arg(1), ctx.args);
    let zset = typed::get::<Zset>(ctx.db, key)?;
    ctx.out.array(args.len() - 2);
    for member in args.iter().skip(2) {
        match zset.and_then(|zset| zset.score(member)) {
            Some(score) => ctx.out.double(score),
            None => ctx.out.null(),
        }
    }
    Ok(())
}

fn rank(ctx: &mut Ctx<'_>, reverse: bool) -> Done {
    let (key, member) = (ctx.arg(1), ctx.arg(2));
    let zset = typed::get::<Zset>(ctx.db, key)?;
    match zset.and_then(|zset| Some((zset.rank(member)?, zset.len()))) {
        Some((rank, len)) => ctx.out.integer(if reverse { len - 1 - rank } else { rank } as i64),
        None => ctx.out.null(),
    }
    Ok(())
}

/// The lowest or the highest scores.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extreme {
    Min,
    Max,
}

impl Extreme {
    /// Parses MIN or MAX.
    pub(crate) fn read(word: &[u8]) -> Result<Extreme, Error> {
        match word {
            word if word.eq_ignore_ascii_case(b"MIN") => Ok(Extreme::Min),
            word if word.eq_ignore_ascii_case(b"MAX") => Ok(Extreme::Max),
            _ => Err(Error::SYNTAX),
        }
    }

    /// The pop command, which is also the event name.
    pub(crate) fn pop_name(self) -> &'static str {
        if self == Extreme::Min { "zpopmin" } else { "zpopmax" }
    }
}

/// Pops up to `count` members with their scores.
fn take(zset: &mut Zset, extreme: Extreme, count: usize) -> Vec<(Vec<u8>, f64)> {
    let len = zset.len();
    let count = count.min(len);
    let owned = |(member, score): (&[u8], f64)| (member.to_vec(), score);
    match extreme {
        Extreme::Min => {
            let taken = zset.range(0, count).map(owned).collect();
            zset.remove_range(0, count);
            taken
        }
        Extreme::Max => {
            let taken = zset.range(len - count, len).rev().map(owned).collect();
            zset.remove_range(len - count, len);
            taken
        }
    }
}

fn pop(ctx: &mut Ctx<'_>, extreme: Extreme) -> Done {
    if ctx.argc() > 3 {
        return Err(Error::SYNTAX);
    }
    let count = if ctx.argc() == 3 { positive(ctx.arg(2))? } else { 1 };
    let nested = ctx.argc() == 3 && ctx.out.protocol() == Protocol::Resp3;
    let key = ctx.arg(1);
    let taken = match typed::get_mut::<Zset>(ctx.db, key)? {
        Some(zset) => take(zset, extreme, count),
        None => Vec::new(),
    };
    write_scored(&mut ctx.out, &taken, nested);
    after_pop(ctx, key, extreme, taken.len());
    Ok(())
}

fn after_pop(ctx: &mut Ctx<'_>, key: &[u8], extreme: Extreme, taken: usize) {
    if taken > 0 {
        ctx.changed_with(key, class::ZSET, extreme.pop_name());
        ctx.drop_if_empty::<Zset>(key);
    }
}

fn write_scored(out: &mut Encoder<'_>, members: &[(Vec<u8>, f64)], nested: bool) {
    out.array(members.len() * if nested { 1 } else { 2 });
    for (member, score) in members {
        if nested {
            out.array(2);
        }
        out.bulk(member);
        out.double(*score);
    }
}

fn zmpop(ctx: &mut Ctx<'_>) -> Done {
    let Mpop { keys, from, count } = mpop_options(ctx, 1, Extreme::read)?;
    if pop_first(ctx, &keys, from, count)?.is_none() {
        ctx.out.null_array();
    }
    Ok(())
}

/// Pops members from the first non-empty sorted set and replies with its key and the members. Returns the key and
/// their number.
pub(crate) fn pop_first<'k>(
    ctx: &mut Ctx<'_>,
    keys: &[&'k [u8]],
    extreme: Extreme,
    count: usize,
) -> Result<Option<(&'k [u8], usize)>, Error> {
    for key in keys {
        let Some(zset) = typed::get_mut::<Zset>(ctx.db, key)? else { continue };
        let taken = take(zset, extreme, count);
        ctx.out.array(2);
        ctx.out.bulk(key);
        write_scored(&mut ctx.out, &taken, true);
        after_pop(ctx, key, extreme, taken.len());
        return Ok(Some((key, taken.len())));
    }
    Ok(None)
}

/// Pops one member from the first non-empty sorted set and replies with key, member and score.
pub(crate) fn pop_one<'k>(
    ctx: &mut Ctx<'_>,
    keys: &[&'k [u8]],
    extreme: Extreme,
) -> Result<Option<&'k [u8]>, Error> {
    for key in keys {
        let Some(zset) = typed::get_mut::<Zset>(ctx.db, key)? else { continue };
        for (member, score) in take(zset, extreme, 1) {
            ctx.out.array(3);
            ctx.out.bulk(key);
            ctx.out.bulk(&member);
            ctx.out.double(score);
        }
        after_pop(ctx, key, extreme, 1);
        return Ok(Some(key));
    }
    Ok(None)
}

fn zrandmember(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    if ctx.argc() == 2 {
        match typed::get::<Zset>(ctx.db, key)?.and_then(|zset| zset.at(fastrand::usize(..zset.len()))) {
            Some((member, _)) => ctx.out.bulk(member),
            None => ctx.out.null(),
        }
        return Ok(());
    }
    let count = picks(ctx.arg(2))?;
    let with_scores = ctx.argc() == 4 && ctx.is(3, "WITHSCORES");
    if ctx.argc() > 4 || (ctx.argc() == 4 && !with_scores) {
        return Err(Error::SYNTAX);
    }
    let nested = ctx.out.protocol() == Protocol::Resp3;
    let zset = typed::get::<Zset>(ctx.db, key)?;
    let positions = pick_positions(zset.map_or(0, Zset::len), count);
    ctx.out.array(positions.len() * if with_scores && !nested { 2 } else { 1 });
    for (member, score) in positions.iter().filter_map(|&at| zset?.at(at)) {
        if with_scores && nested {
            ctx.out.array(2);
        }
        ctx.out.bulk(member);
        if with_scores {
            ctx.out.double(score);
        }
    }
    Ok(())
}

fn zscan(ctx: &mut Ctx<'_>) -> Done {
    let (cursor, options) = scan_options::<Zset>(ctx)?;
    let key = ctx.arg(1);
    let mut found = Vec::new();
    let mut next = 0;
    if let (Some(zset), Some(options)) = (typed::get::<Zset>(ctx.db, key)?, options) {
        next = zset.scan(cursor, options.count, |member, score| {
            if options.matches(member) {
                found.push(member.to_vec());
                found.push(format_f64(score).into_bytes());
            }
        });
    }
    write_scan(ctx, next, &found);
    Ok(())
}
