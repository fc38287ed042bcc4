//! XINFO: information about a stream, its groups and consumers.

use moim_wire_resp::Encoder;

use super::flag::{LOADING, READONLY, STALE};
use super::stream_groups::{bad_subcommand, no_group};
use super::streams::{write_entry, write_id};
use super::typed;
use super::{Keys, Spec, help, unknown_subcommand};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::value::stream::group::Group;
use crate::value::stream::{Id, Stream};

const GROUP: &str = "stream";
const KEY: Keys = Keys::Range { first: 2, last: 2, step: 1 };

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("xinfo", -2, 0, Keys::None, GROUP, "A container for stream introspection commands.", |ctx| Err(unknown_subcommand(&ctx.args))).with(&[
        Spec::new("xinfo|stream", -3, READONLY, KEY, GROUP, "Returns information about a stream.", stream),
        Spec::new("xinfo|groups", 3, READONLY, KEY, GROUP, "Returns a list of the consumer groups of a stream.", groups),
        Spec::new("xinfo|consumers", 4, READONLY, KEY, GROUP, "Returns a list of the consumers in a consumer group.", consumers),
        Spec::new("xinfo|help", 2, LOADING | STALE, Keys::None, GROUP, "Returns helpful text about the different subcommands.", |ctx| help(ctx, HELP)),
    ]),
];

const HELP: &[&str] = &[
    "XINFO <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "CONSUMERS <key> <groupname>",
    "    Show consumers of <groupname>.",
    "GROUPS <key>",
    "    Show the stream consumer groups.",
    "STREAM <key> [FULL [COUNT <count>]",
    "    Show information about the stream.",
    "HELP",
    "    Prints this help.",
];

fn number_or_null(out: &mut Encoder<'_>, number: Option<i64>) {
    match number {
        Some(number) => out.integer(number),
        None => out.null(),
    }
}

fn stream(ctx: &mut Ctx<'_>) -> Done {
    let full = match ctx.argc() {
        3 => None,
        4 if ctx.is(3, "FULL") => Some(10),
        6 if ctx.is(3, "FULL") && ctx.is(4, "COUNT") => match ctx.int(5)? {
            ..0 => Some(10),
            0 => Some(usize::MAX),
            count => Some(count as usize),
        },
        _ => {
            typed::get::<Stream>(ctx.db, ctx.arg(2))?.ok_or(Error::NO_SUCH_KEY)?;
            return Err(bad_subcommand(ctx));
        }
    };
    let key = ctx.arg(2);
    let stream = typed::get::<Stream>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    let out = &mut ctx.out;
    out.map(if full.is_some() { 9 } else { 10 });
    out.bulk(b"length");
    out.integer(stream.len() as i64);
    out.bulk(b"radix-tree-keys");
    out.integer(stream.blocks().len() as i64);
    out.bulk(b"radix-tree-nodes");
    // There is no radix tree here; this approximates the number of nodes in Redis.
    out.integer(stream.blocks().len() as i64 + 1);
    out.bulk(b"last-generated-id");
    write_id(out, stream.last_id);
    out.bulk(b"max-deleted-entry-id");
    write_id(out, stream.max_deleted);
    out.bulk(b"entries-added");
    out.integer(stream.added as i64);
    out.bulk(b"recorded-first-entry-id");
    write_id(out, stream.first_id());
    match full {
        None => ends(out, stream),
        Some(most) => everything(out, stream, most),
    }
    Ok(())
}

fn ends(out: &mut Encoder<'_>, stream: &Stream) {
    out.bulk(b"groups");
    out.integer(stream.groups.len() as i64);
    let first = stream.range(Id::MIN, Id::MAX).next();
    let last = stream.range_back(Id::MIN, Id::MAX).next();
    for (name, entry) in [("first-entry", first), ("last-entry", last)] {
        out.bulk(name.as_bytes());
        match entry {
            Some(entry) => write_entry(out, &entry),
            None => out.null(),
        }
    }
}

fn everything(out: &mut Encoder<'_>, stream: &Stream, most: usize) {
    out.bulk(b"entries");
    let entries: Vec<_> = stream.range(Id::MIN, Id::MAX).take(most).collect();
    out.array(entries.len());
    entries.iter().for_each(|entry| write_entry(out, entry));
    out.bulk(b"groups");
    out.array(stream.groups.len());
    for (name, group) in &stream.groups {
        out.map(7);
        position(out, name, stream, group);
        out.bulk(b"pel-count");
        out.integer(group.pending_len() as i64);
        out.bulk(b"pending");
        out.array(group.pending_len().min(most));
        for (id, pending) in group.pending_from(Id::MIN).take(most) {
            out.array(4);
            write_id(out, id);
            out.bulk(&pending.consumer);
            out.integer(pending.delivered_ms);
            out.integer(pending.deliveries as i64);
        }
        out.bulk(b"consumers");
        out.array(group.consumers().len());
        for (name, consumer) in group.consumers() {
            out.map(4);
            out.bulk(b"name");
            out.bulk(name);
            out.bulk(b"seen-time");
            out.integer(consumer.seen_ms);
            out.bulk(b"pel-count");
            out.integer(consumer.pending_len() as i64);
            out.bulk(b"pending");
            out.array(consumer.pending_len().min(most));
            for id in consumer.pending_from(Id::MIN).take(most) {
                let pending = group.pending(id);
                out.array(3);
                write_id(out, id);
                out.integer(pending.map_or(0, |pending| pending.delivered_ms));
                out.integer(pending.map_or(0, |pending| pending.deliveries as i64));
            }
        }
    }
}

/// Writes name, last delivered id, read count and lag.
fn position(out: &mut Encoder<'_>, name: &[u8], stream: &Stream, group: &Group) {
    out.bulk(b"name");
    out.bulk(name);
    out.bulk(b"last-delivered-id");
    write_id(out, group.last_id);
    counts(out, stream, group);
}

fn counts(out: &mut Encoder<'_>, stream: &Stream, group: &Group) {
    out.bulk(b"entries-read");
    number_or_null(out, group.entries_read.map(|read| read as i64));
    out.bulk(b"lag");
    number_or_null(out, stream.lag(group));
}

fn groups(ctx: &mut Ctx<'_>) -> Done {
    let key = ctx.arg(2);
    let stream = typed::get::<Stream>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    let out = &mut ctx.out;
    out.array(stream.groups.len());
    for (name, group) in &stream.groups {
        out.map(6);
        out.bulk(b"name");
        out.bulk(name);
        out.bulk(b"consumers");
        out.integer(group.consumers().len() as i64);
        out.bulk(b"pending");
        out.integer(group.pending_len() as i64);
        out.bulk(b"last-delivered-id");
        write_id(out, group.last_id);
        counts(out, stream, group);
    }
    Ok(())
}

fn consumers(ctx: &mut Ctx<'_>) -> Done {
    let (key, name, now) = (ctx.arg(2), ctx.arg(3), ctx.now);
    let stream = typed::get::<Stream>(ctx.db, key)?.ok_or(Error::NO_SUCH_KEY)?;
    let group = stream.groups.get(name).ok_or_else(|| no_group(name, key))?;
    let out = &mut ctx.out;
    out.array(group.consumers().len());
    for (name, consumer) in group.consumers() {
        out.map(3);
        out.bulk(b"name");
        out.bulk(name);
        out.bulk(b"pending");
        out.integer(consumer.pending_len() as i64);
        out.bulk(b"idle");
        out.integer((now - consumer.seen_ms).max(0));
    }
    Ok(())
}
