//! Consumer group commands: XGROUP, XACK, XPENDING, XCLAIM, XAUTOCLAIM.
//!
//! The pending entries list (owner, delivery time, delivery count) is propagated as XCLAIM with absolute values, so
//! that every replica agrees. A pending entry that is removed because its stream entry was deleted is propagated as
//! XACK.

use std::sync::Arc;

use super::flag::{DENYOOM, FAST, LOADING, READONLY, STALE, WRITE};
use super::stream_read::touch_consumer;
use super::streams::{any_id, range_end, range_start, strict_id, write_entry, write_id};
use super::typed;
use super::{Keys, Spec, help, unknown_subcommand};
use crate::ctx::{Ctx, int};
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::stream::group::Group;
use crate::value::stream::{Id, Stream};

const GROUP: &str = "stream";
const KEY: Keys = Keys::Range { first: 2, last: 2, step: 1 };

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("xgroup", -2, 0, Keys::None, GROUP, "A container for consumer groups commands.", |ctx| Err(unknown_subcommand(&ctx.args))).with(&[
        Spec::new("xgroup|create", -5, WRITE | DENYOOM, KEY, GROUP, "Creates a consumer group.", create),
        Spec::new("xgroup|setid", -5, WRITE, KEY, GROUP, "Sets the last-delivered ID of a consumer group.", setid),
        Spec::new("xgroup|destroy", 4, WRITE, KEY, GROUP, "Destroys a consumer group.", destroy),
        Spec::new("xgroup|createconsumer", 5, WRITE | DENYOOM, KEY, GROUP, "Creates a consumer in a consumer group.", createconsumer),
        Spec::new("xgroup|delconsumer", 5, WRITE, KEY, GROUP, "Deletes a consumer from a consumer group.", delconsumer),
        Spec::new("xgroup|help", 2, LOADING | STALE, Keys::None, GROUP, "Returns helpful text about the different subcommands.", |ctx| help(ctx, HELP)),
    ]),
    Spec::new("xack", -4, WRITE | FAST, Keys::ONE, GROUP, "Returns the number of messages that were successfully acknowledged by the consumer group member of a stream.", xack),
    Spec::new("xpending", -3, READONLY, Keys::ONE, GROUP, "Returns the information and entries from a stream consumer group's pending entries list.", xpending),
    Spec::new("xclaim", -6, WRITE | FAST, Keys::ONE, GROUP, "Changes, or acquires, ownership of a message in a consumer group, as if the message was delivered a consumer group member.", xclaim),
    Spec::new("xautoclaim", -6, WRITE | FAST, Keys::ONE, GROUP, "Changes, or acquires, ownership of messages in a consumer group, as if the messages were delivered to as consumer group member.", xautoclaim),
];

const HELP: &[&str] = &[
    "XGROUP <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "CREATE <key> <groupname> <id|$> [option]",
    "    Create a new consumer group. Options are:",
    "    * MKSTREAM",
    "      Create the empty stream if it does not exist.",
    "    * ENTRIESREAD entries_read",
    "      Set the group's entries_read counter (internal use).",
    "CREATECONSUMER <key> <groupname> <consumer>",
    "    Create a new consumer in the specified group.",
    "DELCONSUMER <key> <groupname> <consumer>",
    "    Remove the specified consumer.",
    "DESTROY <key> <groupname>",
    "    Remove the specified group.",
    "SETID <key> <groupname> <id|$> [ENTRIESREAD entries_read]",
    "    Set the current group ID and entries_read counter.",
    "HELP",
    "    Prints this help.",
];

/// A pending entry assigned to a consumer.
pub(super) struct Claim {
    pub(super) id: Id,
    pub(super) delivered_ms: i64,
    pub(super) deliveries: u64,
}

/// Propagates claims; those with the same time and count in one XCLAIM.
pub(super) fn propagate_claims(
    ctx: &mut Ctx<'_>,
    key: &[u8],
    group: &[u8],
    consumer: &[u8],
    claims: &[Claim],
) {
    let alike = |a: &Claim, b: &Claim| (a.delivered_ms, a.deliveries) == (b.delivered_ms, b.deliveries);
    for run in claims.chunk_by(alike) {
        let ids: Vec<String> = run.iter().map(|claim| claim.id.to_string()).collect();
        let (time, count) = (run[0].delivered_ms.to_string(), run[0].deliveries.to_string());
        let mut words = vec![b"XCLAIM".as_slice(), key, group, consumer, b"0"];
        words.extend(ids.iter().map(String::as_bytes));
        words.extend([
            b"TIME".as_slice(),
            time.as_bytes(),
            b"RETRYCOUNT",
            count.as_bytes(),
            b"FORCE",
            b"JUSTID",
        ]);
        ctx.rewrite(&words);
    }
}

/// Propagates the last delivered id of a group.
pub(super) fn propagate_position(ctx: &mut Ctx<'_>, key: &[u8], group: &[u8], position: (Id, Option<u64>)) {
    let (id, count) = (position.0.to_string(), position.1.map_or("-1".to_owned(), |count| count.to_string()));
    ctx.rewrite(&[b"XGROUP", b"SETID", key, group, id.as_bytes(), b"ENTRIESREAD", count.as_bytes()]);
}

fn propagate_acks(ctx: &mut Ctx<'_>, key: &[u8], group: &[u8], ids: &[Id]) {
    if ids.is_empty() {
        return;
    }
    let ids: Vec<String> = ids.iter().map(Id::to_string).collect();
    let mut words = vec![b"XACK".as_slice(), key, group];
    words.extend(ids.iter().map(String::as_bytes));
    ctx.rewrite(&words);
}

fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn no_key() -> Error {
    Error::err(
        "The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM option to create an empty stream automatically.",
    )
}

pub(super) fn no_group(group: &[u8], key: &[u8]) -> Error {
    Error::coded(format!("NOGROUP No such consumer group '{}' for key name '{}'", text(group), text(key)))
}

fn no_key_or_group(key: &[u8], group: &[u8]) -> Error {
    Error::coded(format!("NOGROUP No such key '{}' or consumer group '{}'", text(key), text(group)))
}

/// The error reply for a subcommand with wrong arguments.
pub(super) fn bad_subcommand(ctx: &Ctx<'_>) -> Error {
    Error::err(format_args!(
        "unknown subcommand or wrong number of arguments for '{}'. Try {} HELP.",
        text(ctx.arg(1)),
        text(ctx.arg(0)).to_uppercase()
    ))
}

/// Parses the options of CREATE and SETID after the id.
fn group_options(ctx: &Ctx<'_>, may_make: bool) -> Result<(bool, Option<u64>), Error> {
    let (mut makes, mut entries_read) = (false, None);
    let mut at = 5;
    while at < ctx.argc() {
        if may_make && ctx.is(at, "MKSTREAM") {
            makes = true;
            at += 1;
        } else if ctx.is(at, "ENTRIESREAD") && at + 1 < ctx.argc() {
            entries_read = match ctx.int(at + 1)? {
                -1 => None,
                count => Some(
                    u64::try_from(count)
                        .map_err(|_| Error::err("value for ENTRIESREAD must be positive or -1"))?,
                ),
            };
            at += 2;
        } else {
            return Err(bad_subcommand(ctx));
        }
    }
    Ok((makes, entries_read))
}

/// The group named by XGROUP.
fn named_group<'d>(ctx: &'d mut Ctx<'_>) -> Result<&'d mut Group, Error> {
    let (key, name) = (ctx.arg(2), ctx.arg(3));
    let stream = typed::get_mut::<Stream>(ctx.db, key)?.ok_or_else(no_key)?;
    stream.groups.get_mut(name).ok_or_else(|| no_group(name, key))
}

fn create(ctx: &mut Ctx<'_>) -> Done {
    let (makes, entries_read) = group_options(ctx, true)?;
    let (key, name) = (ctx.arg(2), ctx.arg(3));
    let found = typed::get::<Stream>(ctx.db, key)?.map(|stream| stream.last_id);
    if found.is_none() && !makes {
        return Err(no_key());
    }
    let id = match ctx.arg(4) {
        b"$" => found.unwrap_or(Id::MIN),
        id => strict_id(id, 0)?,
    };
    let stream = typed::create::<Stream>(ctx.db, key)?;
    if stream.groups.contains_key(name) {
        return Err(Error::coded("BUSYGROUP Consumer Group name already exists"));
    }
    stream.groups.insert(name.into(), Group::new(id, entries_read));
    ctx.out.ok();
    ctx.changed_with(key, class::STREAM, "xgroup-create");
    Ok(())
}

fn setid(ctx: &mut Ctx<'_>) -> Done {
    let (_, entries_read) = group_options(ctx, false)?;
    let (key, id) = (ctx.arg(2), ctx.arg(4));
    named_group(ctx)?;
    let last = typed::peek::<Stream>(ctx.db, key)?.map_or(Id::MIN, |stream| stream.last_id);
    let id = if id == b"$" { last } else { any_id(id, 0)? };
    let group = named_group(ctx)?;
    (group.last_id, group.entries_read) = (id, entries_read);
    ctx.out.ok();
    ctx.changed_with(key, class::STREAM, "xgroup-setid");
    Ok(())
}

fn destroy(ctx: &mut Ctx<'_>) -> Done {
    let (key, name) = (ctx.arg(2), ctx.arg(3));
    let stream = typed::get_mut::<Stream>(ctx.db, key)?.ok_or_else(no_key)?;
    let was_there = stream.groups.remove(name).is_some();
    ctx.out.integer(i64::from(was_there));
    if was_there {
        ctx.changed_with(key, class::STREAM, "xgroup-destroy");
        // Clients blocked in XREADGROUP are woken to receive NOGROUP.
        ctx.ready(key);
    }
    Ok(())
}

fn createconsumer(ctx: &mut Ctx<'_>) -> Done {
    let (key, name, now) = (ctx.arg(2), ctx.arg(4), ctx.now);
    let group = named_group(ctx)?;
    let is_new = group.consumer(name).is_none();
    if is_new {
        group.touch_consumer(name, now);
        ctx.changed_with(key, class::STREAM, "xgroup-createconsumer");
    }
    ctx.out.integer(i64::from(is_new));
    Ok(())
}

fn delconsumer(ctx: &mut Ctx<'_>) -> Done {
    let (key, name) = (ctx.arg(2), ctx.arg(4));
    let removed = named_group(ctx)?.remove_consumer(name);
    if removed.is_some() {
        ctx.changed_with(key, class::STREAM, "xgroup-delconsumer");
    }
    ctx.out.integer(removed.unwrap_or(0) as i64);
    Ok(())
}

fn xack(ctx: &mut Ctx<'_>) -> Done {
    let (key, name) = (ctx.arg(1), ctx.arg(2));
    let there = typed::get::<Stream>(ctx.db, key)?.is_some_and(|stream| stream.groups.contains_key(name));
    if !there {
        ctx.out.integer(0);
        return Ok(());
    }
    let ids = (3..ctx.argc()).map(|at| strict_id(ctx.arg(at), 0)).collect::<Result<Vec<_>, _>>()?;
    let mut done = 0;
    if let Some(group) = typed::get_mut::<Stream>(ctx.db, key)?.and_then(|stream| stream.groups.get_mut(name))
    {
        done = ids.iter().filter(|id| group.release(**id)).count();
    }
    ctx.out.integer(done as i64);
    ctx.dirty += done as u64;
    Ok(())
}

fn xpending(ctx: &mut Ctx<'_>) -> Done {
    let (key, name) = (ctx.arg(1), ctx.arg(2));
    let argc = ctx.argc();
    if argc != 3 && !(6..=9).contains(&argc) {
        return Err(Error::SYNTAX);
    }
    let (mut at, mut idle_ms) = (3, 0);
    if argc > 3 && ctx.is(3, "IDLE") {
        idle_ms = ctx.int(4)?;
        if argc < 8 {
            return Err(Error::SYNTAX);
        }
        at = 5;
    }
    let mut asked = None;
    if argc > 3 {
        let count = ctx.int(at + 2)?.max(0) as usize;
        let (start, end) = (range_start(ctx.arg(at))?, range_end(ctx.arg(at + 1))?);
        asked = Some((start, end, count));
    }
    let consumer = (argc > 3 && at + 3 < argc).then(|| ctx.arg(at + 3));
    let now = ctx.now;
    let group = typed::get::<Stream>(ctx.db, key)?
        .and_then(|stream| stream.groups.get(name))
        .ok_or_else(|| no_key_or_group(key, name))?;
    let out = &mut ctx.out;
    let Some((start, end, count)) = asked else {
        out.array(4);
        out.integer(group.pending_len() as i64);
        let mut all = group.pending_from(Id::MIN);
        let Some((first, _)) = all.next() else {
            out.null();
            out.null();
            out.null_array();
            return Ok(());
        };
        write_id(out, first);
        write_id(out, all.next_back().map_or(first, |(last, _)| last));
        let owners = || group.consumers().filter(|(_, consumer)| consumer.pending_len() > 0);
        out.array(owners().count());
        for (name, consumer) in owners() {
            out.array(2);
            out.bulk(name);
            out.bulk_integer(consumer.pending_len() as i64);
        }
        return Ok(());
    };
    let fits = |(id, pending): &(Id, &crate::value::stream::group::Pending)| {
        *id <= end && (idle_ms == 0 || now - pending.delivered_ms >= idle_ms)
    };
    let found: Vec<_> = match consumer {
        Some(name) => group.consumer(name).map_or_else(Vec::new, |consumer| {
            let ids = consumer.pending_from(start).take_while(|id| *id <= end);
            ids.filter_map(|id| Some((id, group.pending(id)?))).filter(fits).take(count).collect()
        }),
        None => {
            let all = group.pending_from(start).take_while(|(id, _)| *id <= end);
            all.filter(fits).take(count).collect()
        }
    };
    out.array(found.len());
    for (id, pending) in found {
        out.array(4);
        write_id(out, id);
        out.bulk(&pending.consumer);
        out.integer((now - pending.delivered_ms).max(0));
        out.integer(pending.deliveries as i64);
    }
    Ok(())
}

/// The options of XCLAIM after the ids.
#[derive(Default)]
struct ClaimOptions {
    force: bool,
    just_id: bool,
    delivered_ms: Option<i64>,
    deliveries: Option<u64>,
    last_id: Id,
}

fn claim_options(ctx: &Ctx<'_>, from: usize) -> Result<ClaimOptions, Error> {
    let mut options = ClaimOptions::default();
    let number = |at: usize, name: &str| {
        int(ctx.arg(at)).map_err(|_| Error::err(format_args!("Invalid {name} option argument for XCLAIM")))
    };
    let mut at = from;
    while at < ctx.argc() {
        let more = at + 1 < ctx.argc();
        if ctx.is(at, "FORCE") {
            options.force = true;
        } else if ctx.is(at, "JUSTID") {
            options.just_id = true;
        } else if ctx.is(at, "IDLE") && more {
            at += 1;
            options.delivered_ms = Some(ctx.now.saturating_sub(number(at, "IDLE")?));
        } else if ctx.is(at, "TIME") && more {
            at += 1;
            options.delivered_ms = Some(number(at, "TIME")?);
        } else if ctx.is(at, "RETRYCOUNT") && more {
            at += 1;
            options.deliveries = u64::try_from(number(at, "RETRYCOUNT")?).ok();
        } else if ctx.is(at, "LASTID") && more {
            at += 1;
            options.last_id = strict_id(ctx.arg(at), 0)?;
        } else {
            return Err(Error::err(format_args!("Unrecognized XCLAIM option '{}'", text(ctx.arg(at)))));
        }
        at += 1;
    }
    Ok(options)
}

/// The result of a claim.
#[derive(Default)]
struct Claimed {
    claims: Vec<Claim>,
    /// Ids of deleted entries, whose pending entries were removed.
    released: Vec<Id>,
}

fn xclaim(ctx: &mut Ctx<'_>) -> Done {
    let (key, name, consumer) = (ctx.arg(1), ctx.arg(2), ctx.arg(3));
    let there = typed::get::<Stream>(ctx.db, key)?.is_some_and(|stream| stream.groups.contains_key(name));
    if !there {
        return Err(no_key_or_group(key, name));
    }
    let idle_ms = ctx.int(4).map_err(|_| Error::err("Invalid min-idle-time argument for XCLAIM"))?.max(0);
    let ids: Vec<Id> = (5..ctx.argc()).map_while(|at| strict_id(ctx.arg(at), 0).ok()).collect();
    let options = claim_options(ctx, 5 + ids.len())?;
    let now = ctx.now;
    let delivered_ms = options.delivered_ms.filter(|at| (0..=now).contains(at)).unwrap_or(now);
    let (mut position, mut adds_consumer) = (None, false);
    let mut claimed = Claimed::default();
    if let Some(stream) = typed::get_mut::<Stream>(ctx.db, key)?
        && let Some(mut group) = stream.groups.remove(name)
    {
        if options.last_id > group.last_id {
            group.last_id = options.last_id;
            position = Some((group.last_id, group.entries_read));
        }
        for id in ids {
            let pending = group.pending(id).map(|pending| (pending.delivered_ms, pending.deliveries));
            if stream.get(id).is_none() {
                if group.release(id) {
                    claimed.released.push(id);
                }
                continue;
            }
            let deliveries = match pending {
                Some((at, _)) if idle_ms > 0 && now - at < idle_ms => continue,
                Some((_, deliveries)) => deliveries,
                None if options.force => 1,
                None => continue,
            };
            let deliveries = match options.deliveries {
                Some(given) => given,
                None if options.just_id => deliveries,
                None => deliveries + 1,
            };
            let (owner, is_new) = group.touch_consumer(consumer, now);
            adds_consumer |= is_new;
            group.assign(id, &owner, delivered_ms, deliveries);
            claimed.claims.push(Claim { id, delivered_ms, deliveries });
        }
        stream.groups.insert(name.into(), group);
    }
    if adds_consumer {
        // The propagated claim creates the consumer, too.
        ctx.events.notify(class::STREAM, "xgroup-createconsumer", key);
    }
    reply_claims(ctx, key, &claimed.claims, options.just_id)?;
    record(ctx, &claimed);
    if let Some(position) = position {
        propagate_position(ctx, key, name, position);
    }
    Ok(())
}

fn reply_claims(ctx: &mut Ctx<'_>, key: &[u8], claims: &[Claim], just_id: bool) -> Done {
    ctx.out.array(claims.len());
    let stream = typed::peek::<Stream>(ctx.db, key)?;
    for claim in claims {
        match stream.filter(|_| !just_id).and_then(|stream| stream.get(claim.id)) {
            Some(entry) => write_entry(&mut ctx.out, &entry),
            None => write_id(&mut ctx.out, claim.id),
        }
    }
    Ok(())
}

fn record(ctx: &mut Ctx<'_>, claimed: &Claimed) {
    let (key, group, consumer) = (ctx.arg(1), ctx.arg(2), ctx.arg(3));
    ctx.dirty += (claimed.claims.len() + claimed.released.len()) as u64;
    propagate_acks(ctx, key, group, &claimed.released);
    propagate_claims(ctx, key, group, consumer, &claimed.claims);
    ctx.prevent_propagation();
}

fn xautoclaim(ctx: &mut Ctx<'_>) -> Done {
    /// Pending entries scanned per requested entry.
    const TRIES: usize = 10;
    let idle_ms = ctx.int(4).map_err(|_| Error::err("Invalid min-idle-time argument for XAUTOCLAIM"))?.max(0);
    let start = range_start(ctx.arg(5))?;
    let (mut count, mut just_id) = (100, false);
    let mut at = 6;
    while at < ctx.argc() {
        if ctx.is(at, "COUNT") && at + 1 < ctx.argc() {
            let most = i64::MAX / 16;
            let asked = ctx.int(at + 1).ok().filter(|count| (1..=most).contains(count));
            count = asked.ok_or_else(|| Error::err("COUNT must be > 0"))? as usize;
            at += 1;
        } else if ctx.is(at, "JUSTID") {
            just_id = true;
        } else {
            return Err(Error::SYNTAX);
        }
        at += 1;
    }
    let (key, name, now) = (ctx.arg(1), ctx.arg(2), ctx.now);
    let stream = typed::get_mut::<Stream>(ctx.db, key)?;
    let group = stream.as_ref().and_then(|stream| stream.groups.get(name));
    let group = group.ok_or_else(|| no_key_or_group(key, name))?;
    let looked_at = count.saturating_mul(TRIES);
    let mut claimed = Claimed::default();
    let mut cursor = Id::MIN;
    for (seen, (id, pending)) in group.pending_from(start).enumerate() {
        if seen == looked_at || claimed.claims.len() + claimed.released.len() == count {
            cursor = id;
            break;
        }
        if stream.as_ref().is_some_and(|stream| stream.get(id).is_none()) {
            claimed.released.push(id);
        } else if idle_ms == 0 || now - pending.delivered_ms >= idle_ms {
            let deliveries = pending.deliveries + u64::from(!just_id);
            claimed.claims.push(Claim { id, delivered_ms: now, deliveries });
        }
    }
    let owner: Option<Arc<[u8]>> =
        if claimed.claims.is_empty() { None } else { touch_consumer(ctx, key, name, ctx.arg(3)) };
    if let Some(group) = typed::get_mut::<Stream>(ctx.db, key)?.and_then(|stream| stream.groups.get_mut(name))
    {
        for id in &claimed.released {
            group.release(*id);
        }
        if let Some(owner) = owner {
            claimed.claims.iter().for_each(|claim| group.assign(claim.id, &owner, now, claim.deliveries));
        }
    }
    ctx.out.array(3);
    write_id(&mut ctx.out, cursor);
    reply_claims(ctx, key, &claimed.claims, just_id)?;
    ctx.out.array(claimed.released.len());
    claimed.released.iter().for_each(|id| write_id(&mut ctx.out, *id));
    record(ctx, &claimed);
    Ok(())
}
