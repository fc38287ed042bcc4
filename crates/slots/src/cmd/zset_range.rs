//! ZRANGE and all commands on a range of a sorted set: by rank, by score, by lexicographic order.
//!
//! Every kind of bound is converted to a range of ranks.

use std::ops::Range;

use moim_wire_resp::Protocol;

use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::typed::{self, rank_range};
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::number::parse_f64;
use crate::value::zset::Zset;

const GROUP: &str = "sorted_set";

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("zrange", -4, READONLY, Keys::ONE, GROUP, "Returns members in a sorted set within a range of indexes.", |ctx| show(ctx, Form::ANY)),
    Spec::new("zrevrange", -4, READONLY, Keys::ONE, GROUP, "Returns members in a sorted set within a range of indexes in reverse order.", |ctx| show(ctx, Form::fixed(By::Rank, true))),
    Spec::new("zrangebyscore", -4, READONLY, Keys::ONE, GROUP, "Returns members in a sorted set within a range of scores.", |ctx| show(ctx, Form::fixed(By::Score, false))),
    Spec::new("zrevrangebyscore", -4, READONLY, Keys::ONE, GROUP, "Returns members in a sorted set within a range of scores in reverse order.", |ctx| show(ctx, Form::fixed(By::Score, true))),
    Spec::new("zrangebylex", -4, READONLY, Keys::ONE, GROUP, "Returns members in a sorted set within a lexicographical range.", |ctx| show(ctx, Form::fixed(By::Lex, false))),
    Spec::new("zrevrangebylex", -4, READONLY, Keys::ONE, GROUP, "Returns members in a sorted set within a lexicographical range in reverse order.", |ctx| show(ctx, Form::fixed(By::Lex, true))),
    Spec::new("zrangestore", -5, WRITE | DENYOOM, Keys::TWO, GROUP, "Stores a range of members from sorted set in a key.", zrangestore),
    Spec::new("zcount", 4, READONLY | FAST, Keys::ONE, GROUP, "Returns the count of members in a sorted set that have scores within a range.", |ctx| count(ctx, By::Score)),
    Spec::new("zlexcount", 4, READONLY | FAST, Keys::ONE, GROUP, "Returns the number of members in a sorted set within a lexicographical range.", |ctx| count(ctx, By::Lex)),
    Spec::new("zremrangebyrank", 4, WRITE, Keys::ONE, GROUP, "Removes members in a sorted set within a range of indexes. Deletes the sorted set if all members were removed.", |ctx| remove(ctx, By::Rank, "zremrangebyrank")),
    Spec::new("zremrangebyscore", 4, WRITE, Keys::ONE, GROUP, "Removes members in a sorted set within a range of scores. Deletes the sorted set if all members were removed.", |ctx| remove(ctx, By::Score, "zremrangebyscore")),
    Spec::new("zremrangebylex", 4, WRITE, Keys::ONE, GROUP, "Removes members in a sorted set within a lexicographical range. Deletes the sorted set if all members were removed.", |ctx| remove(ctx, By::Lex, "zremrangebylex")),
];

/// The kind of bounds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Rank,
    Score,
    Lex,
}

/// The properties fixed by the command name; `None` is left to options.
#[derive(Clone, Copy)]
struct Form {
    by: Option<By>,
    reverse: Option<bool>,
}

impl Form {
    const ANY: Form = Form { by: None, reverse: None };

    const fn fixed(by: By, reverse: bool) -> Form {
        Form { by: Some(by), reverse: Some(reverse) }
    }
}

/// A score bound.
#[derive(Clone, Copy)]
struct ScoreBound {
    score: f64,
    open: bool,
}

/// A lexicographic bound.
#[derive(Clone, Copy)]
enum LexBound<'a> {
    Lowest,
    Highest,
    Closed(&'a [u8]),
    Open(&'a [u8]),
}

/// Both bounds, low before high.
#[derive(Clone, Copy)]
enum Bounds<'a> {
    Rank(i64, i64),
    Score(ScoreBound, ScoreBound),
    Lex(LexBound<'a>, LexBound<'a>),
}

impl<'a> Bounds<'a> {
    /// Parses bounds; reversed ones by score or lexicographic order come high before low.
    fn read(ctx: &Ctx<'a>, at: usize, by: By, reverse: bool) -> Result<Bounds<'a>, Error> {
        let (low, high) = match by != By::Rank && reverse {
            true => (at + 1, at),
            false => (at, at + 1),
        };
        Ok(match by {
            By::Rank => Bounds::Rank(ctx.int(low)?, ctx.int(high)?),
            By::Score => {
                let bound = |at| score_bound(ctx.arg(at)).ok_or(Error::err("min or max is not a float"));
                Bounds::Score(bound(low)?, bound(high)?)
            }
            By::Lex => {
                let bound =
                    |at| lex_bound(ctx.arg(at)).ok_or(Error::err("min or max not valid string range item"));
                Bounds::Lex(bound(low)?, bound(high)?)
            }
        })
    }

    /// The ranks inside the bounds, lowest score first.
    fn ranks(&self, zset: &Zset, reverse: bool) -> Range<usize> {
        let (low, high) = match *self {
            Bounds::Rank(start, stop) => {
                let range = rank_range(start, stop, zset.len());
                match reverse {
                    true => (zset.len() - range.end, zset.len() - range.start),
                    false => (range.start, range.end),
                }
            }
            Bounds::Score(low, high) => (
                zset.rank_where(|score, _| score < low.score || (low.open && score == low.score)),
                zset.rank_where(|score, _| score < high.score || (!high.open && score == high.score)),
            ),
            Bounds::Lex(low, high) => (
                zset.rank_where(|_, member| match low {
                    LexBound::Lowest => false,
                    LexBound::Highest => true,
                    LexBound::Closed(bound) => member < bound,
                    LexBound::Open(bound) => member <= bound,
                }),
                zset.rank_where(|_, member| match high {
                    LexBound::Lowest => false,
                    LexBound::Highest => true,
                    LexBound::Closed(bound) => member <= bound,
                    LexBound::Open(bound) => member < bound,
                }),
            ),
        };
        low..high.max(low)
    }
}

fn score_bound(text: &[u8]) -> Option<ScoreBound> {
    let (open, text) = match text.strip_prefix(b"(") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    Some(ScoreBound { score: parse_f64(text)?, open })
}

fn lex_bound(text: &[u8]) -> Option<LexBound<'_>> {
    match text {
        b"-" => Some(LexBound::Lowest),
        b"+" => Some(LexBound::Highest),
        [b'[', bound @ ..] => Some(LexBound::Closed(bound)),
        [b'(', bound @ ..] => Some(LexBound::Open(bound)),
        _ => None,
    }
}

/// The parsed query.
struct Query<'a> {
    bounds: Bounds<'a>,
    reverse: bool,
    offset: i64,
    limit: i64,
    with_scores: bool,
}

impl<'a> Query<'a> {
    /// Parses the bounds at `at` and the options after them.
    fn read(ctx: &Ctx<'a>, at: usize, form: Form, stores: bool) -> Result<Query<'a>, Error> {
        let (mut by, mut reverse) = (form.by, form.reverse);
        let (mut offset, mut limit, mut with_scores) = (0, -1, false);
        let mut option = at + 2;
        while option < ctx.argc() {
            if !stores && ctx.is(option, "WITHSCORES") {
                with_scores = true;
            } else if ctx.is(option, "LIMIT") && option + 2 < ctx.argc() {
                offset = ctx.int(option + 1)?;
                limit = ctx.int(option + 2)?;
                option += 2;
            } else if form.reverse.is_none() && ctx.is(option, "REV") {
                reverse = Some(true);
            } else if form.by.is_none() && ctx.is(option, "BYLEX") {
                by = Some(By::Lex);
            } else if form.by.is_none() && ctx.is(option, "BYSCORE") {
                by = Some(By::Score);
            } else {
                return Err(Error::SYNTAX);
            }
            option += 1;
        }
        let (by, reverse) = (by.unwrap_or(By::Rank), reverse.unwrap_or(false));
        if limit != -1 && by == By::Rank {
            let text = "syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX";
            return Err(Error::err(text));
        }
        if by == By::Rank {
            // `LIMIT n -1` is accepted and ignored.
            offset = 0;
        }
        if with_scores && by == By::Lex {
            return Err(Error::err("syntax error, WITHSCORES not supported in combination with BYLEX"));
        }
        Ok(Query { bounds: Bounds::read(ctx, at, by, reverse)?, reverse, offset, limit, with_scores })
    }

    /// The selected ranks, with offset and limit applied from the side that comes first.
    fn ranks(&self, zset: &Zset) -> Range<usize> {
        let Range { mut start, mut end } = self.bounds.ranks(zset, self.reverse);
        let Ok(offset) = usize::try_from(self.offset) else { return 0..0 };
        let offset = offset.min(end - start);
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX).min(end - start - offset);
        if self.reverse {
            end -= offset;
            start = end - limit;
        } else {
            start += offset;
            end = start + limit;
        }
        start..end
    }
}

/// The members of these ranks, in either direction.
fn members(zset: &Zset, ranks: Range<usize>, reverse: bool) -> impl Iterator<Item = (&[u8], f64)> {
    let mut range = zset.range(ranks.start, ranks.end);
    std::iter::from_fn(move || if reverse { range.next_back() } else { range.next() })
}

fn show(ctx: &mut Ctx<'_>, form: Form) -> Done {
    let query = Query::read(ctx, 2, form, false)?;
    let nested = query.with_scores && ctx.out.protocol() == Protocol::Resp3;
    let key = ctx.arg(1);
    let Some(zset) = typed::get::<Zset>(ctx.db, key)? else {
        ctx.out.array(0);
        return Ok(());
    };
    let ranks = query.ranks(zset);
    ctx.out.array(ranks.len() * if query.with_scores && !nested { 2 } else { 1 });
    for (member, score) in members(zset, ranks, query.reverse) {
        if nested {
            ctx.out.array(2);
        }
        ctx.out.bulk(member);
        if query.with_scores {
            ctx.out.double(score);
        }
    }
    Ok(())
}

fn zrangestore(ctx: &mut Ctx<'_>) -> Done {
    let query = Query::read(ctx, 3, Form::ANY, true)?;
    let (target, source, limits) = (ctx.arg(1), ctx.arg(2), ctx.limits());
    let mut kept = Zset::new();
    if let Some(zset) = typed::get::<Zset>(ctx.db, source)? {
        for (member, score) in members(zset, query.ranks(zset), false) {
            kept.insert(member, score, &limits);
        }
    }
    let len = kept.len();
    if ctx.store(target, kept, class::ZSET, "zrangestore") {
        ctx.ready(target);
    }
    ctx.out.integer(len as i64);
    Ok(())
}

fn count(ctx: &mut Ctx<'_>, by: By) -> Done {
    let bounds = Bounds::read(ctx, 2, by, false)?;
    let key = ctx.arg(1);
    let count = typed::get::<Zset>(ctx.db, key)?.map_or(0, |zset| bounds.ranks(zset, false).len());
    ctx.out.integer(count as i64);
    Ok(())
}

fn remove(ctx: &mut Ctx<'_>, by: By, event: &'static str) -> Done {
    let bounds = Bounds::read(ctx, 2, by, false)?;
    let key = ctx.arg(1);
    let mut removed = 0;
    if let Some(zset) = typed::get_mut::<Zset>(ctx.db, key)? {
        let ranks = bounds.ranks(zset, false);
        removed = ranks.len();
        zset.remove_range(ranks.start, ranks.end);
    }
    if removed > 0 {
        ctx.changed_with(key, class::ZSET, event);
        ctx.drop_if_empty::<Zset>(key);
    }
    ctx.out.integer(removed as i64);
    Ok(())
}
