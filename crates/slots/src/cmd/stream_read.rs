//! XREAD and XREADGROUP: entries after an id, in one or several streams, with blocking.
//!
//! XREADGROUP modifies the group. The changes are propagated exactly: the consumer, its pending entries (XCLAIM with
//! time and count), and the last delivered id (XGROUP SETID).

use std::sync::Arc;

use moim_wire_resp::encode::Kind;
use moim_wire_resp::{Args, OwnedArgs, Protocol};

use super::flag::{BLOCKING, READONLY, WRITE};
use super::stream_groups::{Claim, propagate_claims, propagate_position};
use super::streams::{strict_id, write_entry, write_id};
use super::typed;
use super::{Keys, Spec};
use crate::ctx::{Ctx, OnTimeout, int};
use crate::error::{Done, Error};
use crate::events::class;
use crate::value::stream::{Id, Stream};

const GROUP: &str = "stream";
/// COUNT default for a client that was blocked.
const MAX_AFTER_BLOCKING: usize = 1000;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("xread", -4, READONLY | BLOCKING, Keys::Found { first: 0, find: keys }, GROUP, "Returns messages from multiple streams with IDs greater than the ones requested. Blocks until a message is available otherwise.", |ctx| xread(ctx, false)),
    Spec::new("xreadgroup", -7, WRITE | BLOCKING, Keys::Found { first: 0, find: keys }, GROUP, "Returns new or historical messages from a stream for a consumer in a group. Blocks until a message is available otherwise.", |ctx| xread(ctx, true)),
];

/// The keys are the first half of the arguments after STREAMS.
fn keys(args: &Args<'_>, into: &mut Vec<usize>) {
    let mut at = 1;
    while at < args.len() {
        let word = &args[at];
        if word.eq_ignore_ascii_case(b"STREAMS") {
            let first = at + 1;
            into.extend(first..first + (args.len() - first) / 2);
            return;
        }
        at += match () {
            () if word.eq_ignore_ascii_case(b"BLOCK") || word.eq_ignore_ascii_case(b"COUNT") => 2,
            () if word.eq_ignore_ascii_case(b"GROUP") => 3,
            () => 1,
        };
    }
}

struct Options<'a> {
    timeout_ms: Option<i64>,
    count: usize,
    /// Group and consumer (XREADGROUP).
    group: Option<(&'a [u8], &'a [u8])>,
    no_ack: bool,
    keys: Vec<&'a [u8]>,
    /// Position of the first id.
    ids_at: usize,
}

/// The start position of a read.
#[derive(Clone, Copy)]
enum From {
    /// After this id; in a group, the consumer's own pending entries after it.
    After(Id),
    /// `>`: entries never delivered to the group.
    New,
}

fn options<'a>(ctx: &Ctx<'a>, in_group: bool) -> Result<Options<'a>, Error> {
    let mut options = Options {
        timeout_ms: None,
        count: usize::MAX,
        group: None,
        no_ack: false,
        keys: Vec::new(),
        ids_at: 0,
    };
    let mut at = 1;
    while at < ctx.argc() {
        let more = ctx.argc() - at - 1;
        if ctx.is(at, "BLOCK") && more > 0 {
            at += 1;
            options.timeout_ms = Some(timeout(ctx.arg(at))?);
        } else if ctx.is(at, "COUNT") && more > 0 {
            at += 1;
            options.count = match int(ctx.arg(at))? {
                count @ 1.. => count as usize,
                _ => usize::MAX,
            };
        } else if ctx.is(at, "STREAMS") && more > 0 {
            if !more.is_multiple_of(2) {
                return Err(Error::err(
                    "Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified.",
                ));
            }
            options.ids_at = at + 1 + more / 2;
            options.keys = (at + 1..options.ids_at).map(|at| ctx.arg(at)).collect();
            break;
        } else if ctx.is(at, "GROUP") && more >= 2 {
            if !in_group {
                return Err(Error::err(
                    "The GROUP option is only supported by XREADGROUP. You called XREAD instead.",
                ));
            }
            options.group = Some((ctx.arg(at + 1), ctx.arg(at + 2)));
            at += 2;
        } else if ctx.is(at, "NOACK") {
            if !in_group {
                return Err(Error::err(
                    "The NOACK option is only supported by XREADGROUP. You called XREAD instead.",
                ));
            }
            options.no_ack = true;
        } else {
            return Err(Error::SYNTAX);
        }
        at += 1;
    }
    if options.ids_at == 0 {
        return Err(Error::SYNTAX);
    }
    if in_group && options.group.is_none() {
        return Err(Error::err("Missing GROUP option for XREADGROUP"));
    }
    Ok(options)
}

fn timeout(text: &[u8]) -> Result<i64, Error> {
    match int(text).map_err(|_| Error::err("timeout is not an integer or out of range"))? {
        ..0 => Err(Error::NEGATIVE_TIMEOUT),
        ms => Ok(ms),
    }
}

/// Resolves the start position of each stream.
fn starts(ctx: &mut Ctx<'_>, options: &Options<'_>) -> Result<Vec<From>, Error> {
    let mut starts = Vec::with_capacity(options.keys.len());
    for (at, key) in options.keys.iter().enumerate() {
        let (resumed, id) = (ctx.session.resumed, ctx.arg(options.ids_at + at));
        let stream = match (typed::get::<Stream>(ctx.db, key), options.group) {
            (Err(_), None) if resumed => None,
            (Err(_) | Ok(None), Some(_)) if resumed => {
                return Err(Error::coded("UNBLOCKED the stream key no longer exists"));
            }
            (stream, _) => stream?,
        };
        if let Some((group, _)) = options.group
            && stream.is_none_or(|stream| !stream.groups.contains_key(group))
        {
            return Err(if resumed {
                Error::coded("NOGROUP the consumer group this client was blocked on no longer exists")
            } else {
                Error::coded(format!(
                    "NOGROUP No such key '{}' or consumer group '{}' in XREADGROUP with GROUP option",
                    String::from_utf8_lossy(key),
                    String::from_utf8_lossy(group)
                ))
            });
        }
        starts.push(match (id, options.group.is_some()) {
            (b"$", true) => {
                return Err(Error::err(
                    "The $ ID is meaningless in the context of XREADGROUP: you want to read the history of this consumer by specifying a proper ID, or use the > ID to get new messages. The $ ID would just return an empty result set.",
                ));
            }
            (b"$", false) => From::After(stream.map_or(Id::MIN, |stream| stream.last_id)),
            (b">", true) => From::New,
            (b">", false) => {
                return Err(Error::err(
                    "The > ID can be specified only when calling XREADGROUP using the GROUP <group> <consumer> option.",
                ));
            }
            (id, _) => From::After(strict_id(id, 0)?),
        });
    }
    Ok(starts)
}

fn xread(ctx: &mut Ctx<'_>, in_group: bool) -> Done {
    let options = options(ctx, in_group)?;
    let starts = starts(ctx, &options)?;
    let resp2 = ctx.out.protocol() == Protocol::Resp2;
    let start = ctx.out.buffer().len();
    let deferred = ctx.out.defer(if resp2 { Kind::Array } else { Kind::Map });
    let mut answered = 0;
    for (key, from) in options.keys.iter().zip(&starts) {
        if !has_some(ctx, key, *from, &options) {
            continue;
        }
        answered += 1;
        if resp2 {
            ctx.out.array(2);
        }
        ctx.out.bulk(key);
        match (options.group, *from) {
            (None, From::After(id)) => read(ctx, key, id, &options)?,
            (None, From::New) => return Err(Error::SYNTAX),
            (Some((group, consumer)), From::New) => read_new(ctx, key, group, consumer, &options)?,
            (Some((group, consumer)), From::After(id)) => {
                read_pending(ctx, key, group, consumer, id, options.count)?;
            }
        }
    }
    if answered > 0 {
        ctx.out.finish(deferred, answered);
        return Ok(());
    }
    ctx.out.buffer().truncate(start);
    match options.timeout_ms {
        Some(timeout_ms) if ctx.may_block() => wait(ctx, &options, &starts, timeout_ms),
        _ => ctx.out.null_array(),
    }
    Ok(())
}

/// True if a stream has entries to return now.
fn has_some(ctx: &Ctx<'_>, key: &[u8], from: From, options: &Options<'_>) -> bool {
    let Ok(Some(stream)) = typed::peek::<Stream>(ctx.db, key) else { return false };
    let after = match (from, options.group) {
        (From::After(_), Some(_)) => return true,
        (From::After(id), None) => id,
        (From::New, Some((group, _))) => stream.groups.get(group).map_or(Id::MAX, |group| group.last_id),
        (From::New, None) => return false,
    };
    stream.last_entry_id().is_some_and(|last| last > after)
}

/// Blocks the client. `$` is replaced by the last id at the time of the call, so that it keeps its meaning when the
/// command is executed again.
fn wait(ctx: &mut Ctx<'_>, options: &Options<'_>, starts: &[From], timeout_ms: i64) {
    let keys = options.keys.iter().map(|&key| key.into()).collect();
    ctx.block(keys, timeout_ms, OnTimeout::NullArray);
    let Some(block) = &mut ctx.session.block else { return };
    block.wake_on_delete = options.group.is_some();
    let mut words: Vec<Vec<u8>> = ctx.args.iter().map(<[u8]>::to_vec).collect();
    for (word, from) in words[options.ids_at..].iter_mut().zip(starts) {
        if let From::After(id) = from {
            *word = id.to_string().into_bytes();
        }
    }
    block.command = OwnedArgs::from_slices(&words);
}

fn most(ctx: &Ctx<'_>, count: usize) -> usize {
    if ctx.session.resumed && count == usize::MAX { MAX_AFTER_BLOCKING } else { count }
}

fn read(ctx: &mut Ctx<'_>, key: &[u8], after: Id, options: &Options<'_>) -> Done {
    let most = most(ctx, options.count);
    let entries = ctx.out.defer(Kind::Array);
    let mut written = 0;
    if let (Some(stream), Some(start)) = (typed::peek::<Stream>(ctx.db, key)?, after.next()) {
        for entry in stream.range(start, Id::MAX).take(most) {
            write_entry(&mut ctx.out, &entry);
            written += 1;
        }
    }
    ctx.out.finish(entries, written);
    Ok(())
}

/// Updates the consumer's seen time. A new consumer is created, which is propagated.
pub(super) fn touch_consumer(ctx: &mut Ctx<'_>, key: &[u8], group: &[u8], name: &[u8]) -> Option<Arc<[u8]>> {
    let now = ctx.now;
    let stream = typed::get_mut::<Stream>(ctx.db, key).ok()??;
    let (name, is_new) = stream.groups.get_mut(group)?.touch_consumer(name, now);
    if is_new {
        ctx.changed_with(key, class::STREAM, "xgroup-createconsumer");
        ctx.rewrite(&[b"XGROUP", b"CREATECONSUMER", key, group, &name]);
    }
    Some(name)
}

/// Delivers entries never delivered to the group.
fn read_new(ctx: &mut Ctx<'_>, key: &[u8], group: &[u8], name: &[u8], options: &Options<'_>) -> Done {
    let most = most(ctx, options.count);
    let now = ctx.now;
    let Some(consumer) = touch_consumer(ctx, key, group, name) else { return Err(Error::NO_SUCH_KEY) };
    let stream = typed::get_mut::<Stream>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    let mut read = stream.groups.remove(group).ok_or(Error::NO_SUCH_KEY)?;
    let entries = ctx.out.defer(Kind::Array);
    let mut claims = Vec::new();
    if let Some(start) = read.last_id.next() {
        for entry in stream.range(start, Id::MAX).take(most) {
            write_entry(&mut ctx.out, &entry);
            claims.push(Claim { id: entry.id, delivered_ms: now, deliveries: 1 });
        }
    }
    for claim in &claims {
        // A deletion ahead invalidates the read counter; at the end of the stream it is known again.
        read.entries_read = match read.entries_read {
            Some(count) if !stream.has_gaps_from(claim.id) => Some(count + 1),
            known if stream.added == 0 => known,
            _ => stream.count_up_to(claim.id),
        };
        read.last_id = claim.id;
        if !options.no_ack {
            read.assign(claim.id, &consumer, now, 1);
        }
    }
    ctx.out.finish(entries, claims.len());
    let position = (read.last_id, read.entries_read);
    stream.groups.insert(group.into(), read);
    ctx.dirty += 1;
    if !options.no_ack {
        propagate_claims(ctx, key, group, &consumer, &claims);
    }
    propagate_position(ctx, key, group, position);
    Ok(())
}

/// Delivers the consumer's own pending entries again.
fn read_pending(ctx: &mut Ctx<'_>, key: &[u8], group: &[u8], name: &[u8], after: Id, count: usize) -> Done {
    let now = ctx.now;
    let Some(consumer) = touch_consumer(ctx, key, group, name) else { return Err(Error::NO_SUCH_KEY) };
    let stream = typed::get_mut::<Stream>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    let mut read = stream.groups.remove(group).ok_or(Error::NO_SUCH_KEY)?;
    let from = after.next().and_then(|start| read.consumer(name).map(|consumer| (start, consumer)));
    let ids: Vec<Id> =
        from.map_or_else(Vec::new, |(start, consumer)| consumer.pending_from(start).take(count).collect());
    let mut claims = Vec::new();
    ctx.out.array(ids.len());
    for id in ids {
        match stream.get(id) {
            Some(entry) => {
                write_entry(&mut ctx.out, &entry);
                let deliveries = read.pending(id).map_or(0, |pending| pending.deliveries) + 1;
                read.assign(id, &consumer, now, deliveries);
                claims.push(Claim { id, delivered_ms: now, deliveries });
            }
            None => {
                ctx.out.array(2);
                write_id(&mut ctx.out, id);
                ctx.out.null_array();
            }
        }
    }
    stream.groups.insert(group.into(), read);
    propagate_claims(ctx, key, group, &consumer, &claims);
    Ok(())
}
