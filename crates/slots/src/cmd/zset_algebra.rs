//! ZUNION, ZINTER, ZDIFF, their STORE forms and ZINTERCARD. Plain sets are treated as sorted sets of score 1.

use hashbrown::HashMap;
use moim_wire_resp::Protocol;

use super::flag::{DENYOOM, READONLY, WRITE};
use super::set_algebra::limit_option;
use super::{Keys, Spec};
use crate::ctx::{Ctx, float};
use crate::error::{Done, Error};
use crate::events::class;
use crate::keyspace::{Item, Keyspace};
use crate::value::Value;
use crate::value::limits::Limits;
use crate::value::set::Set;
use crate::value::zset::Zset;

const GROUP: &str = "sorted_set";
const SHOWS: Keys = Keys::Counted { at: 1, also: 0 };
const STORES: Keys = Keys::Counted { at: 2, also: 1 };
const WRITES: u32 = WRITE | DENYOOM;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("zunion", -3, READONLY, SHOWS, GROUP, "Returns the union of multiple sorted sets.", |ctx| show(ctx, Operation::Union, "zunion")),
    Spec::new("zinter", -3, READONLY, SHOWS, GROUP, "Returns the intersect of multiple sorted sets.", |ctx| show(ctx, Operation::Inter, "zinter")),
    Spec::new("zdiff", -3, READONLY, SHOWS, GROUP, "Returns the difference between multiple sorted sets.", |ctx| show(ctx, Operation::Diff, "zdiff")),
    Spec::new("zunionstore", -4, WRITES, STORES, GROUP, "Stores the union of multiple sorted sets in a key.", |ctx| store(ctx, Operation::Union, "zunionstore")),
    Spec::new("zinterstore", -4, WRITES, STORES, GROUP, "Stores the intersect of multiple sorted sets in a key.", |ctx| store(ctx, Operation::Inter, "zinterstore")),
    Spec::new("zdiffstore", -4, WRITES, STORES, GROUP, "Stores the difference of multiple sorted sets in a key.", |ctx| store(ctx, Operation::Diff, "zdiffstore")),
    Spec::new("zintercard", -3, READONLY, SHOWS, GROUP, "Returns the number of members of the intersect of multiple sorted sets.", zintercard),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Union,
    Inter,
    Diff,
}

#[derive(Clone, Copy)]
enum Aggregate {
    Sum,
    Min,
    Max,
}

impl Aggregate {
    fn join(self, left: f64, right: f64) -> f64 {
        match self {
            Aggregate::Sum => {
                let sum = left + right;
                // Infinity minus infinity is 0.
                if sum.is_nan() { 0.0 } else { sum }
            }
            // NaN (0 times infinity) loses every comparison.
            Aggregate::Min => {
                if right < left {
                    right
                } else {
                    left
                }
            }
            Aggregate::Max => {
                if right > left {
                    right
                } else {
                    left
                }
            }
        }
    }
}

/// An input collection.
#[derive(Clone, Copy)]
enum Source<'a> {
    None,
    Set(&'a Set),
    Zset(&'a Zset),
}

impl<'a> Source<'a> {
    fn find(db: &'a Keyspace, key: &[u8]) -> Result<Source<'a>, Error> {
        match db.get(key) {
            None => Ok(Source::None),
            Some(Item::Value(Value::Set(set))) => Ok(Source::Set(set)),
            Some(Item::Value(Value::Zset(zset))) => Ok(Source::Zset(zset)),
            Some(_) => Err(Error::WRONG_TYPE),
        }
    }

    fn len(&self) -> usize {
        match self {
            Source::None => 0,
            Source::Set(set) => set.len(),
            Source::Zset(zset) => zset.len(),
        }
    }

    fn score(&self, member: &[u8]) -> Option<f64> {
        match self {
            Source::None => None,
            Source::Set(set) => set.contains(member).then_some(1.0),
            Source::Zset(zset) => zset.score(member),
        }
    }

    /// Visits every member until `show` returns false.
    fn each(&self, mut show: impl FnMut(&[u8], f64) -> bool) {
        match self {
            Source::None => {}
            Source::Set(set) => drop(set.iter().all(|member| show(&member, 1.0))),
            Source::Zset(zset) => drop(zset.iter().all(|(member, score)| show(member, score))),
        }
    }
}

/// An input with its weight.
struct Input<'a> {
    source: Source<'a>,
    weight: f64,
}

impl Input<'_> {
    fn weigh(&self, score: f64) -> f64 {
        let weighed = self.weight * score;
        if weighed.is_nan() { 0.0 } else { weighed }
    }
}

/// The parsed query.
struct Query<'a> {
    inputs: Vec<Input<'a>>,
    aggregate: Aggregate,
    with_scores: bool,
}

/// Parses argument `at` as the number of keys.
fn number_of_keys(ctx: &Ctx<'_>, at: usize, name: &str) -> Result<usize, Error> {
    let keys = usize::try_from(ctx.int(at)?).unwrap_or(0);
    if keys == 0 {
        return Err(Error::err(format_args!("at least 1 input key is needed for '{name}' command")));
    }
    if keys > ctx.argc() - at - 1 { Err(Error::SYNTAX) } else { Ok(keys) }
}

fn read<'d>(
    ctx: &'d Ctx<'_>,
    at: usize,
    operation: Operation,
    name: &str,
    stores: bool,
) -> Result<Query<'d>, Error> {
    let keys = number_of_keys(ctx, at, name)?;
    let mut inputs = Vec::with_capacity(keys);
    for key in at + 1..=at + keys {
        inputs.push(Input { source: Source::find(ctx.db, ctx.arg(key))?, weight: 1.0 });
    }
    let mut query = Query { inputs, aggregate: Aggregate::Sum, with_scores: false };
    let mut option = at + 1 + keys;
    while option < ctx.argc() {
        let left = ctx.argc() - option - 1;
        if operation != Operation::Diff && ctx.is(option, "WEIGHTS") && left >= keys {
            for (input, weight) in query.inputs.iter_mut().zip(option + 1..) {
                input.weight =
                    float(ctx.arg(weight)).map_err(|_| Error::err("weight value is not a float"))?;
            }
            option += keys;
        } else if operation != Operation::Diff && ctx.is(option, "AGGREGATE") && left >= 1 {
            query.aggregate = match ctx.arg(option + 1).to_ascii_lowercase().as_slice() {
                b"sum" => Aggregate::Sum,
                b"min" => Aggregate::Min,
                b"max" => Aggregate::Max,
                _ => return Err(Error::SYNTAX),
            };
            option += 1;
        } else if !stores && ctx.is(option, "WITHSCORES") {
            query.with_scores = true;
        } else {
            return Err(Error::SYNTAX);
        }
        option += 1;
    }
    Ok(query)
}

impl Query<'_> {
    fn run(mut self, operation: Operation, limits: &Limits) -> Zset {
        let mut result = Zset::new();
        match operation {
            Operation::Union => self.union(&mut result, limits),
            Operation::Inter => {
                self.inputs.sort_by_key(|input| input.source.len());
                self.intersect(|member, score| {
                    result.insert(member, score, limits);
                    true
                });
            }
            Operation::Diff => {
                let Some((first, others)) = self.inputs.split_first() else { return result };
                first.source.each(|member, score| {
                    if others.iter().all(|other| other.source.score(member).is_none()) {
                        result.insert(member, score, limits);
                    }
                    true
                });
            }
        }
        result
    }

    fn union(&mut self, result: &mut Zset, limits: &Limits) {
        self.inputs.sort_by_key(|input| input.source.len());
        let mut scores: HashMap<Vec<u8>, f64> = HashMap::new();
        for input in &self.inputs {
            input.source.each(|member, score| {
                let score = input.weigh(score);
                let aggregate = self.aggregate;
                scores
                    .entry_ref(member)
                    .and_modify(|old| *old = aggregate.join(*old, score))
                    .or_insert(score);
                true
            });
        }
        for (member, score) in scores {
            result.insert(&member, score, limits);
        }
    }

    /// Visits the intersection until `show` returns false. The smallest input comes first.
    fn intersect(&self, mut show: impl FnMut(&[u8], f64) -> bool) {
        let Some((first, others)) = self.inputs.split_first() else { return };
        first.source.each(|member, score| {
            let mut sum = first.weigh(score);
            for other in others {
                let Some(score) = other.source.score(member) else { return true };
                sum = self.aggregate.join(sum, other.weight * score);
            }
            show(member, sum)
        });
    }
}

fn show(ctx: &mut Ctx<'_>, operation: Operation, name: &str) -> Done {
    let limits = ctx.limits();
    let query = read(ctx, 1, operation, name, false)?;
    let with_scores = query.with_scores;
    let result = query.run(operation, &limits);
    let nested = with_scores && ctx.out.protocol() == Protocol::Resp3;
    ctx.out.array(result.len() * if with_scores && !nested { 2 } else { 1 });
    for (member, score) in result.iter() {
        if nested {
            ctx.out.array(2);
        }
        ctx.out.bulk(member);
        if with_scores {
            ctx.out.double(score);
        }
    }
    Ok(())
}

fn store(ctx: &mut Ctx<'_>, operation: Operation, name: &'static str) -> Done {
    let (target, limits) = (ctx.arg(1), ctx.limits());
    let result = read(ctx, 2, operation, name, true)?.run(operation, &limits);
    let len = result.len();
    if ctx.store(target, result, class::ZSET, name) {
        ctx.ready(target);
    }
    ctx.out.integer(len as i64);
    Ok(())
}

fn zintercard(ctx: &mut Ctx<'_>) -> Done {
    let keys = number_of_keys(ctx, 1, "zintercard")?;
    let mut inputs = Vec::with_capacity(keys);
    for key in 2..2 + keys {
        inputs.push(Input { source: Source::find(ctx.db, ctx.arg(key))?, weight: 1.0 });
    }
    let limit = limit_option(ctx, 2 + keys)?;
    inputs.sort_by_key(|input| input.source.len());
    let query = Query { inputs, aggregate: Aggregate::Sum, with_scores: false };
    let mut count = 0;
    query.intersect(|_, _| {
        count += 1;
        count != limit
    });
    ctx.out.integer(count as i64);
    Ok(())
}
