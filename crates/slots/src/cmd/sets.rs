//! Set commands: SADD and its family. Unions, intersections and differences are in `set_algebra`.

use super::flag::{DENYOOM, FAST, READONLY, WRITE};
use super::options::{pick_positions, picks, positive, sample, scan_options, write_scan};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::set::Set;

const GROUP: &str = "set";

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("sadd", -3, WRITE | DENYOOM | FAST, Keys::ONE, GROUP, "Adds one or more members to a set.", sadd),
    Spec::new("srem", -3, WRITE | FAST, Keys::ONE, GROUP, "Removes one or more members from a set. Deletes the set if the last member was removed.", srem),
    Spec::new("smove", 4, WRITE | FAST, Keys::TWO, GROUP, "Moves a member from one set to another.", smove),
    Spec::new("spop", -2, WRITE | FAST, Keys::ONE, GROUP, "Returns one or more random members from a set after removing them. Deletes the set if the last member was popped.", spop),
    Spec::new("scard", 2, READONLY | FAST, Keys::ONE, GROUP, "Returns the number of members in a set.", scard),
    Spec::new("sismember", 3, READONLY | FAST, Keys::ONE, GROUP, "Determines whether a member belongs to a set.", sismember),
    Spec::new("smismember", -3, READONLY | FAST, Keys::ONE, GROUP, "Determines whether multiple members belong to a set.", smismember),
    Spec::new("smembers", 2, READONLY, Keys::ONE, GROUP, "Returns all members of a set.", smembers),
    Spec::new("srandmember", -2, READONLY, Keys::ONE, GROUP, "Get one or multiple random members from a set.", srandmember),
    Spec::new("sscan", -3, READONLY, Keys::ONE, GROUP, "Iterates over members of a set.", sscan),
];

fn sadd(ctx: &mut Ctx<'_>) -> Done {
    let (key, args, limits) = (ctx.arg(1), ctx.args, ctx.limits());
    let set: &mut Set = typed::create(ctx.db, key)?;
    let added = args.iter().skip(2).filter(|member| set.insert(member, &limits)).count();
    if added > 0 {
        ctx.changed_with(key, class::SET, "sadd");
    }
    ctx.out.integer(added as i64);
    Ok(())
}

fn srem(ctx: &mut Ctx<'_>) -> Done {
    let (key, args) = (ctx.arg(1), ctx.args);
    let removed = match typed::get_mut::<Set>(ctx.db, key)? {
        Some(set) => args.iter().skip(2).filter(|member| set.remove(member)).count(),
        None => 0,
    };
    if removed > 0 {
        ctx.changed_with(key, class::SET, "srem");
        ctx.drop_if_empty::<Set>(key);
    }
    ctx.out.integer(removed as i64);
    Ok(())
}

fn smove(ctx: &mut Ctx<'_>) -> Done {
    let (source, target, member, limits) = (ctx.arg(1), ctx.arg(2), ctx.arg(3), ctx.limits());
    let here = match typed::get::<Set>(ctx.db, source)? {
        Some(set) => set.contains(member),
        None => {
            ctx.out.integer(0);
            return Ok(());
        }
    };
    typed::get::<Set>(ctx.db, target)?;
    if !here || source == target {
        ctx.out.integer(i64::from(here));
        return Ok(());
    }
    if let Some(set) = typed::get_mut::<Set>(ctx.db, source)? {
        set.remove(member);
    }
    ctx.changed_with(source, class::SET, "srem");
    ctx.drop_if_empty::<Set>(source);
    let added = typed::create::<Set>(ctx.db, target)?.insert(member, &limits);
    if added {
        ctx.changed_with(target, class::SET, "sadd");
    }
    ctx.out.integer(1);
    Ok(())
}

fn spop(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() > 3 {
        return Err(Error::SYNTAX);
    }
    let key = ctx.arg(1);
    let count = if ctx.argc() == 3 { Some(positive(ctx.arg(2))?) } else { None };
    let Some(set) = typed::get_mut::<Set>(ctx.db, key)? else {
        if count.is_some() {
            ctx.out.set(0)
        } else {
            ctx.out.null()
        }
        return Ok(());
    };
    let drawn: Vec<Vec<u8>> = match count {
        Some(count) => sample(set.len(), count),
        None => vec![fastrand::usize(..set.len())],
    }
    .into_iter()
    .filter_map(|at| set.at(at).map(|member| member.into_owned()))
    .collect();
    for member in &drawn {
        set.remove(member);
    }
    match count {
        Some(_) => {
            ctx.out.set(drawn.len());
            drawn.iter().for_each(|member| ctx.out.bulk(member));
        }
        None => ctx.out.bulk(drawn.first().map_or(&[], Vec::as_slice)),
    }
    if drawn.is_empty() {
        return Ok(());
    }
    ctx.changed_with(key, class::SET, "spop");
    if ctx.drop_if_empty::<Set>(key) {
        ctx.rewrite(&[b"DEL", key]);
    } else {
        // Random choices are not repeated on replay: the drawn members are propagated as SREM.
        let mut record: Vec<&[u8]> = vec![b"SREM", key];
        record.extend(drawn.iter().map(Vec::as_slice));
        ctx.rewrite(&record);
    }
    Ok(())
}

fn scard(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let len = typed::get::<Set>(ctx.db, key)?.map_or(0, Set::len);
    ctx.out.integer(len as i64);
    Ok(())
}

fn sismember(ctx: &mut Ctx<'_>) -> Done {
    let (key, member) = (ctx.arg(1), ctx.arg(2));
    let there = typed::get::<Set>(ctx.db, key)?.is_some_and(|set| set.contains(member));
    ctx.out.integer(i64::from(there));
    Ok(())
}

fn smismember(ctx: &mut Ctx<'_>) -> Done {
    let (key, args) = (ctx.arg(1), ctx.args);
    let set = typed::get::<Set>(ctx.db, key)?;
    ctx.out.array(args.len() - 2);
    for member in args.iter().skip(2) {
        ctx.out.integer(i64::from(set.is_some_and(|set| set.contains(member))));
    }
    Ok(())
}

fn smembers(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(1);
    let set = typed::get::<Set>(ctx.db, key)?;
    ctx.out.set(set.map_or(0, Set::len));
    set.into_iter().flat_map(Set::iter).for_each(|member| ctx.out.bulk(&member));
    Ok(())
}

fn srandmember(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() > 3 {
        return Err(Error::SYNTAX);
    }
    let key = ctx.arg(1);
    if ctx.argc() == 2 {
        match typed::get::<Set>(ctx.db, key)?.and_then(|set| set.at(fastrand::usize(..set.len()))) {
            Some(member) => ctx.out.bulk(&member),
            None => ctx.out.null(),
        }
        return Ok(());
    }
    let count = picks(ctx.arg(2))?;
    let set = typed::get::<Set>(ctx.db, key)?;
    let positions = pick_positions(set.map_or(0, Set::len), count);
    ctx.out.array(positions.len());
    positions.iter().filter_map(|&at| set?.at(at)).for_each(|member| ctx.out.bulk(&member));
    Ok(())
}

fn sscan(ctx: &mut Ctx<'_>) -> Done {
    let (cursor, options) = scan_options::<Set>(ctx)?;
    let key = ctx.arg(1);
    let mut found = Vec::new();
    let mut next = 0;
    if let (Some(set), Some(options)) = (typed::get::<Set>(ctx.db, key)?, options) {
        next = set.scan(cursor, options.count, |member| {
            if options.matches(member) {
                found.push(member.to_vec());
            }
        });
    }
    write_scan(ctx, next, &found);
    Ok(())
}
