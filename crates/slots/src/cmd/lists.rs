//! List commands: LPUSH and its family. The blocking commands are in `blocking`.

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

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("lpush", -3, PUSHES, Keys::ONE, GROUP, "Prepends one or more elements to a list.", |ctx| push(ctx, End::Left, true)),
    Spec::new("rpush", -3, PUSHES, Keys::ONE, GROUP, "Appends one or more elements to a list.", |ctx| push(ctx, End::Right, true)),
    Spec::new("lpushx", -3, PUSHES, Keys::ONE, GROUP, "Prepends one or more elements to a list only when the list exists.", |ctx| push(ctx, End::Left, false)),
    Spec::new("rpushx", -3, PUSHES, Keys::ONE, GROUP, "Appends an element to a list only when the list exists.", |ctx| push(ctx, End::Right, false)),
    Spec::new("lpop", -2, WRITE | FAST, Keys::ONE, GROUP, "Returns the first elements in a list after removing it. Deletes the list if the last element was popped.", |ctx| pop(ctx, End::Left)),
    Spec::new("rpop", -2, WRITE | FAST, Keys::ONE, GROUP, "Returns and removes the last elements of a list. Deletes the list if the last element was popped.", |ctx| pop(ctx, End::Right)),
    Spec::new("llen", 2, READONLY | FAST, Keys::ONE, GROUP, "Returns the length of a list.", llen),
    Spec::new("lindex", 3, READONLY, Keys::ONE, GROUP, "Returns an element from a list by its index.", lindex),
    Spec::new("lset", 4, WRITE | DENYOOM, Keys::ONE, GROUP, "Sets the value of an element in a list by its index.", lset),
    Spec::new("linsert", 5, WRITE | DENYOOM, Keys::ONE, GROUP, "Inserts an element before or after another element in a list.", linsert),
    Spec::new("lrange", 4, READONLY, Keys::ONE, GROUP, "Returns a range of elements from a list.", lrange),
    Spec::new("ltrim", 4, WRITE, Keys::ONE, GROUP, "Removes elements from both ends of a list. Deletes the list if all elements were trimmed.", ltrim),
    Spec::new("lrem", 4, WRITE, Keys::ONE, GROUP, "Removes elements from a list. Deletes the list if the last element was removed.", lrem),
    Spec::new("lpos", -3, READONLY, Keys::ONE, GROUP, "Returns the index of matching elements in a list.", lpos),
    Spec::new("lmove", 5, WRITE | DENYOOM, Keys::TWO, GROUP, "Returns an element after popping it from one list and pushing it to another. Deletes the list if the last element was moved.", lmove),
    Spec::new("rpoplpush", 3, WRITE | DENYOOM, Keys::TWO, GROUP, "Returns the last element of a list after removing and pushing it to another list. Deletes the list if the last element was popped.", rpoplpush),
    Spec::new("lmpop", -4, WRITE, COUNTED, GROUP, "Returns multiple elements from a list after removing them. Deletes the list if the last element was popped.", lmpop),
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

/// Pops up to `count` elements and writes them as an array.
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

/// Resolves an index, which may be negative, to a position.
fn resolve_index(index: i64, len: usize) -> Option<usize> {
    let index = if index < 0 { (len as i64).checked_add(index)? } else { index };
    usize::try_from(index).ok().filter(|&index| index < len)
}

fn lindex(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let list = typed::get::<List>(ctx.db, key)?;
    // Redis checks the key before it parses the index.
    let index = if list.is_some() { crate::ctx::int(ctx.args.get(2).unwrap_or_default())? } else { 0 };
    match list.and_then(|list| list.get(resolve_index(index, list.len())?)) {
        Some(element) => ctx.out.bulk(element),
        None => ctx.out.null(),
    }
    Ok(())
}

fn lset(ctx: &mut Ctx<'_>) -> Done {
    let (key, element, limits) = (ctx.arg(1), ctx.arg(3), ctx.limits());
    let index = ctx.int(2);
    let list = typed::get_mut::<List>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    let at = resolve_index(index?, list.len()).ok_or(Error::BAD_INDEX)?;
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

/// The parsed options of LPOS.
struct Positions {
    from: End,
    /// Matches to skip (RANK).
    skip: u64,
    /// Maximum number of matches (COUNT); `None` for a single reply.
    count: Option<usize>,
    /// Maximum number of elements to compare (MAXLEN).
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

/// Parses LEFT or RIGHT.
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

/// Moves an element from the list at the first key to that at the second and replies with it; false if the source is
/// empty.
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

/// The parsed arguments of LMPOP, ZMPOP and their blocking forms.
pub(crate) struct Mpop<'a, W> {
    pub(crate) keys: Vec<&'a [u8]>,
    /// From where: an end of a list, or the lowest or highest scores.
    pub(crate) from: W,
    pub(crate) count: usize,
}

/// Parses the arguments from the number of keys on, which is argument `at`.
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

/// Pops elements from the first non-empty list and replies with its key and the elements. Returns the key and their
/// number.
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
