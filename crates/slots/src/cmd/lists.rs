//! LPUSH and its family: the elements of a list. The commands that wait for elements are in `blocking`.

use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::options::{at_least_one, positive};
use super::typed::{self, rank_range};
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::list::{End, List};

const GROUP: &str = "list";
const PUSHES: u32 = WRITE | DENYOOM | FAST;
const COUNTED: Keys = Keys::Counted { at: 1, also: 0 };

/// The commands of this file.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("lpush", -3, PUSHES, Keys::ONE, GROUP, "Adds elements at the head", |ctx| push(ctx, End::Left, true)),
    Spec::new("rpush", -3, PUSHES, Keys::ONE, GROUP, "Adds elements at the tail", |ctx| push(ctx, End::Right, true)),
    Spec::new("lpushx", -3, PUSHES, Keys::ONE, GROUP, "Adds elements at the head of a list that is there", |ctx| push(ctx, End::Left, false)),
    Spec::new("rpushx", -3, PUSHES, Keys::ONE, GROUP, "Adds elements at the tail of a list that is there", |ctx| push(ctx, End::Right, false)),
    Spec::new("lpop", -2, WRITE | FAST, Keys::ONE, GROUP, "Takes elements from the head", |ctx| pop(ctx, End::Left)),
    Spec::new("rpop", -2, WRITE | FAST, Keys::ONE, GROUP, "Takes elements from the tail", |ctx| pop(ctx, End::Right)),
    Spec::new("llen", 2, READONLY | FAST, Keys::ONE, GROUP, "Counts the elements", llen),
    Spec::new("lindex", 3, READONLY, Keys::ONE, GROUP, "Gives an element by its place", lindex),
    Spec::new("lset", 4, WRITE | DENYOOM, Keys::ONE, GROUP, "Replaces an element by its place", lset),
    Spec::new("linsert", 5, WRITE | DENYOOM, Keys::ONE, GROUP, "Adds an element beside another", linsert),
    Spec::new("lrange", 4, READONLY, Keys::ONE, GROUP, "Gives a part of the list", lrange),
    Spec::new("ltrim", 4, WRITE, Keys::ONE, GROUP, "Keeps a part of the list", ltrim),
    Spec::new("lrem", 4, WRITE, Keys::ONE, GROUP, "Removes elements by their value", lrem),
    Spec::new("lpos", -3, READONLY, Keys::ONE, GROUP, "Finds the places of a value", lpos),
    Spec::new("lmove", 5, WRITE | DENYOOM, Keys::TWO, GROUP, "Moves an element to another list", lmove),
    Spec::new("rpoplpush", 3, WRITE | DENYOOM, Keys::TWO, GROUP, "Moves the last element to the head of another list", rpoplpush),
    Spec::new("lmpop", -4, WRITE, COUNTED, GROUP, "Takes elements from the first list that has some", lmpop),
];

pub(crate) fn pop_event(end: End) -> &'static str {
    if end == End::Left { "lpop" } else { "rpop" }
}

fn push(ctx: &mut Ctx<'_>, end: End, make: bool) -> Done {
    let (key, args, limits) = (ctx.arg(1), ctx.args, ctx.limits());
    if !make && typed::get::<List>(ctx.db, key)?.is_none() {
        ctx.out.integer(0);
        return Ok(());
    }
    let list: &mut List = typed::create(ctx.db, key)?;
    args.iter().skip(2).for_each(|element| list.push(end, element, &limits));
    let len = list.len();
    ctx.changed_with(key, class::LIST, if end == End::Left { "lpush" } else { "rpush" });
    ctx.ready(key);
    ctx.out.integer(len as i64);
    Ok(())
}

fn pop(ctx: &mut Ctx<'_>, end: End) -> Done {
    if ctx.argc() > 3 {
        return Err(Error::arity(pop_event(end)));
    }
    let key = ctx.arg(1);
    let count = if ctx.argc() == 3 { Some(positive(ctx.arg(2))?) } else { None };
    let Some(list) = typed::get_mut::<List>(ctx.db, key)? else {
        if count.is_some() {
            ctx.out.null_array()
        } else {
            ctx.out.null()
        }
        return Ok(());
    };
    match count {
        None => {
            let element = list.pop(end).unwrap_or_default();
            ctx.out.bulk(&element);
        }
        Some(0) => {
            ctx.out.array(0);
            return Ok(());
        }
        Some(count) => write_popped(&mut ctx.out, list, end, count),
    }
    ctx.changed_with(key, class::LIST, pop_event(end));
    ctx.drop_if_empty::<List>(key);
    Ok(())
}

/// Takes up to `count` elements and writes them as an array.
pub(crate) fn write_popped(out: &mut moim_wire_resp::Encoder<'_>, list: &mut List, end: End, count: usize) {
    let count = count.min(list.len());
    out.array(count);
    for _ in 0..count {
        out.bulk(&list.pop(end).unwrap_or_default());
    }
}

fn llen(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let len = typed::get::<List>(ctx.db, key)?.map_or(0, List::len);
    ctx.out.integer(len as i64);
    Ok(())
}

/// A place that may count from the end.
fn place(index: i64, len: usize) -> Option<usize> {
    let index = if index < 0 { (len as i64).checked_add(index)? } else { index };
    usize::try_from(index).ok().filter(|&index| index < len)
}

fn lindex(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let list = typed::get::<List>(ctx.db, key)?;
    // Redis looks at the key before it looks at the index.
    let index = if list.is_some() { crate::ctx::int(ctx.args.get(2).unwrap_or_default())? } else { 0 };
    match list.and_then(|list| list.get(place(index, list.len())?)) {
        Some(element) => ctx.out.bulk(element),
        None => ctx.out.null(),
    }
    Ok(())
}

fn lset(ctx: &mut Ctx<'_>) -> Done {
    let (key, element, limits) = (ctx.arg(1), ctx.arg(3), ctx.limits());
    let index = ctx.int(2);
    let list = typed::get_mut::<List>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    let at = place(index?, list.len()).ok_or(Error::BAD_INDEX)?;
    list.set(at, element, &limits);
    ctx.changed_with(key, class::LIST, "lset");
    ctx.out.ok();
    Ok(())
}

fn linsert(ctx: &mut Ctx<'_>) -> Done {
    let behind = ctx.is(2, "AFTER");
    if !behind && !ctx.is(2, "BEFORE") {
        return Err(Error::SYNTAX);
    }
    let (key, pivot, element, limits) = (ctx.arg(1), ctx.arg(3), ctx.arg(4), ctx.limits());
    let Some(list) = typed::get_mut::<List>(ctx.db, key)? else {
        ctx.out.integer(0);
        return Ok(());
    };
    let Some(at) = list.iter().position(|other| other == pivot) else {
        ctx.out.integer(-1);
        return Ok(());
    };
    list.insert(at + usize::from(behind), element, &limits);
    let len = list.len();
    ctx.changed_with(key, class::LIST, "linsert");
    ctx.out.integer(len as i64);
    Ok(())
}

fn lrange(ctx: &mut Ctx<'_>) -> Done {
    let (key, start, stop) = (ctx.arg(1), ctx.int(2)?, ctx.int(3)?);
    let list = typed::get::<List>(ctx.db, key)?;
    let range = rank_range(start, stop, list.map_or(0, List::len));
    ctx.out.array(range.len());
    if let Some(list) = list {
        list.iter_from(range.start).take(range.len()).for_each(|element| ctx.out.bulk(element));
    }
    Ok(())
}

fn ltrim(ctx: &mut Ctx<'_>) -> Done {
    let (key, start, stop) = (ctx.arg(1), ctx.int(2)?, ctx.int(3)?);
    if let Some(list) = typed::get_mut::<List>(ctx.db, key)? {
        let keep = rank_range(start, stop, list.len());
        list.remove_range(keep.end, usize::MAX);
        list.remove_range(0, keep.start);
        ctx.changed_with(key, class::LIST, "ltrim");
        ctx.drop_if_empty::<List>(key);
    }
    ctx.out.ok();
    Ok(())
}

fn lrem(ctx: &mut Ctx<'_>) -> Done {
    let (key, count, element) = (ctx.arg(1), ctx.int(2)?, ctx.arg(3));
    let from = if count < 0 { End::Right } else { End::Left };
    let most =
        if count == 0 { usize::MAX } else { usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX) };
    let removed =
        typed::get_mut::<List>(ctx.db, key)?.map_or(0, |list| list.remove_equal(element, most, from));
    if removed > 0 {
        ctx.changed_with(key, class::LIST, "lrem");
        ctx.drop_if_empty::<List>(key);
    }
    ctx.out.integer(removed as i64);
    Ok(())
}

/// What LPOS was asked for.
struct Positions {
    from: End,
    /// Matches to pass over.
    skip: u64,
    /// How many to give; `None` for one that is given alone.
    count: Option<usize>,
    /// How many elements to look at.
    look_at: usize,
}

fn lpos_options(ctx: &Ctx<'_>) -> Result<Positions, Error> {
    let mut wanted = Positions { from: End::Left, skip: 0, count: None, look_at: usize::MAX };
    let unlimited = |number: usize| if number == 0 { usize::MAX } else { number };
    let counted = |at: usize, message: &str| {
        let given = ctx.int(at).ok().and_then(|number| usize::try_from(number).ok());
        given.ok_or_else(|| Error::err(message))
    };
    let mut at = 3;
    while at < ctx.argc() {
        if at + 1 == ctx.argc() {
            return Err(Error::SYNTAX);
        }
        if ctx.is(at, "RANK") {
            let rank = ctx.int(at + 1)?;
            if rank == 0 {
                return Err(Error::err(
                    "RANK can't be zero: use 1 to start from the first match, 2 from the second ... \
                     or use negative to start from the end of the list",
                ));
            }
            wanted.from = if rank < 0 { End::Right } else { End::Left };
            wanted.skip = rank.unsigned_abs() - 1;
        } else if ctx.is(at, "COUNT") {
            wanted.count = Some(unlimited(counted(at + 1, "COUNT can't be negative")?));
        } else if ctx.is(at, "MAXLEN") {
            wanted.look_at = unlimited(counted(at + 1, "MAXLEN can't be negative")?);
        } else {
            return Err(Error::SYNTAX);
        }
        at += 2;
    }
    Ok(wanted)
}

fn lpos(ctx: &mut Ctx<'_>) -> Done {
    let (key, element) = (ctx.arg(1), ctx.arg(2));
    let wanted = lpos_options(ctx)?;
    let mut found = Vec::new();
    if let Some(list) = typed::get::<List>(ctx.db, key)? {
        let elements: Box<dyn Iterator<Item = &[u8]>> = match wanted.from {
            End::Left => Box::new(list.iter()),
            End::Right => Box::new(list.iter().rev()),
        };
        let last = list.len().saturating_sub(1);
        found.extend(
            elements
                .take(wanted.look_at)
                .enumerate()
                .filter(|(_, other)| *other == element)
                .skip(usize::try_from(wanted.skip).unwrap_or(usize::MAX))
                .take(wanted.count.unwrap_or(1))
                .map(|(at, _)| if wanted.from == End::Left { at } else { last - at }),
        );
    }
    match (wanted.count, found.first()) {
        (Some(_), _) => {
            ctx.out.array(found.len());
            found.iter().for_each(|&at| ctx.out.integer(at as i64));
        }
        (None, Some(&at)) => ctx.out.integer(at as i64),
        (None, None) => ctx.out.null(),
    }
    Ok(())
}

/// LEFT or RIGHT.
pub(crate) fn end(word: &[u8]) -> Result<End, Error> {
    match word {
        word if word.eq_ignore_ascii_case(b"LEFT") => Ok(End::Left),
        word if word.eq_ignore_ascii_case(b"RIGHT") => Ok(End::Right),
        _ => Err(Error::SYNTAX),
    }
}

fn lmove(ctx: &mut Ctx<'_>) -> Done {
    let (from, to) = (end(ctx.arg(3))?, end(ctx.arg(4))?);
    if !move_element(ctx, from, to)? {
        ctx.out.null();
    }
    Ok(())
}

fn rpoplpush(ctx: &mut Ctx<'_>) -> Done {
    if !move_element(ctx, End::Right, End::Left)? {
        ctx.out.null();
    }
    Ok(())
}

/// Moves an element from the list of the first key to that of the second and answers with it; false when there
/// is none.
pub(crate) fn move_element(ctx: &mut Ctx<'_>, from: End, to: End) -> Result<bool, Error> {
    let (source, target, limits) = (ctx.arg(1), ctx.arg(2), ctx.limits());
    if typed::get::<List>(ctx.db, source)?.is_none() {
        return Ok(false);
    }
    typed::get::<List>(ctx.db, target)?;
    let Some(element) = typed::get_mut::<List>(ctx.db, source)?.and_then(|list| list.pop(from)) else {
        return Ok(false);
    };
    typed::create::<List>(ctx.db, target)?.push(to, &element, &limits);
    ctx.changed_with(target, class::LIST, if to == End::Left { "lpush" } else { "rpush" });
    ctx.changed_with(source, class::LIST, pop_event(from));
    ctx.drop_if_empty::<List>(source);
    ctx.ready(target);
    ctx.out.bulk(&element);
    Ok(true)
}

/// What LMPOP and its like were asked for.
pub(crate) struct Mpop<'a, W> {
    pub(crate) keys: Vec<&'a [u8]>,
    /// From where: an end of a list, or an extreme of scores.
    pub(crate) from: W,
    pub(crate) count: usize,
}

/// Reads the arguments from the number of keys on, which is argument `at`.
pub(crate) fn mpop_options<'a, W>(
    ctx: &Ctx<'a>,
    at: usize,
    read: fn(&[u8]) -> Result<W, Error>,
) -> Result<Mpop<'a, W>, Error> {
    let keys = at_least_one(ctx.arg(at), "numkeys should be greater than 0")?;
    let behind = keys.checked_add(at + 1).filter(|&behind| behind < ctx.argc()).ok_or(Error::SYNTAX)?;
    let from = read(ctx.arg(behind))?;
    let count = match ctx.argc() - behind {
        1 => 1,
        2 => return Err(Error::SYNTAX),
        _ if !ctx.is(behind + 1, "COUNT") => return Err(Error::SYNTAX),
        args => {
            let count = at_least_one(ctx.arg(behind + 2), "count should be greater than 0")?;
            if args > 3 {
                return Err(Error::SYNTAX);
            }
            count
        }
    };
    Ok(Mpop { keys: (at + 1..behind).map(|at| ctx.arg(at)).collect(), from, count })
}

fn lmpop(ctx: &mut Ctx<'_>) -> Done {
    let Mpop { keys, from, count } = mpop_options(ctx, 1, end)?;
    if pop_first(ctx, &keys, from, count)?.is_none() {
        ctx.out.null_array();
    }
    Ok(())
}

/// Takes elements from the first list that has some and answers with its key and them. Gives the key and how
/// many there were.
pub(crate) fn pop_first<'k>(
    ctx: &mut Ctx<'_>,
    keys: &[&'k [u8]],
    from: End,
    count: usize,
) -> Result<Option<(&'k [u8], usize)>, Error> {
    for key in keys {
        let Some(list) = typed::get_mut::<List>(ctx.db, key)? else { continue };
        let taken = count.min(list.len());
        ctx.out.array(2);
        ctx.out.bulk(key);
        write_popped(&mut ctx.out, list, from, count);
        ctx.changed_with(key, class::LIST, pop_event(from));
        ctx.drop_if_empty::<List>(key);
        return Ok(Some((key, taken)));
    }
    Ok(None)
}
