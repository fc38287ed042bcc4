//! SUBSCRIBE, PUBLISH and their families.

use bytes::BytesMut;
use moim_wire_resp::Encoder;

use super::flag::{FAST, LOADING, MAY_REPLICATE, NOSCRIPT, PUBSUB, STALE};
use super::{Keys, Spec, help};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::pubsub::{Gate, Kind};
use crate::session::{Session, kept_bytes};
use crate::shared::Shared;

const GROUP: &str = "pubsub";
const LISTENS: u32 = PUBSUB | NOSCRIPT | LOADING | STALE;
const SAYS: u32 = PUBSUB | LOADING | STALE | FAST | MAY_REPLICATE;
const ASKS: u32 = PUBSUB | LOADING | STALE;

/// The commands of this file.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("subscribe", -2, LISTENS, Keys::None, GROUP, "Listens to channels", |ctx| subscribe(ctx, Kind::Channel)),
    Spec::new("psubscribe", -2, LISTENS, Keys::None, GROUP, "Listens to channels by pattern", |ctx| subscribe(ctx, Kind::Pattern)),
    Spec::new("ssubscribe", -2, LISTENS, Keys::ALL, GROUP, "Listens to channels of a slot", |ctx| subscribe(ctx, Kind::Sharded)),
    Spec::new("unsubscribe", -1, LISTENS, Keys::None, GROUP, "Listens to channels no more", |ctx| unsubscribe(ctx, Kind::Channel)),
    Spec::new("punsubscribe", -1, LISTENS, Keys::None, GROUP, "Listens to patterns no more", |ctx| unsubscribe(ctx, Kind::Pattern)),
    Spec::new("sunsubscribe", -1, LISTENS, Keys::ALL, GROUP, "Listens to channels of a slot no more", |ctx| unsubscribe(ctx, Kind::Sharded)),
    Spec::new("publish", 3, SAYS, Keys::None, GROUP, "Sends a message to a channel", publish),
    Spec::new("spublish", 3, SAYS, Keys::ONE, GROUP, "Sends a message to a channel of a slot", spublish),
    Spec::new("pubsub", -2, 0, Keys::None, GROUP, "Says who listens", unknown).with(&[
        Spec::new("pubsub|channels", -2, ASKS, Keys::None, GROUP, "Lists channels", |ctx| channels(ctx, Kind::Channel)),
        Spec::new("pubsub|shardchannels", -2, ASKS, Keys::None, GROUP, "Lists channels of slots", |ctx| channels(ctx, Kind::Sharded)),
        Spec::new("pubsub|numsub", -2, ASKS, Keys::None, GROUP, "Counts who listens to channels", |ctx| numsub(ctx, Kind::Channel)),
        Spec::new("pubsub|shardnumsub", -2, ASKS, Keys::None, GROUP, "Counts who listens to channels of slots", |ctx| numsub(ctx, Kind::Sharded)),
        Spec::new("pubsub|numpat", 2, ASKS, Keys::None, GROUP, "Counts patterns", numpat),
        Spec::new("pubsub|help", 2, LOADING | STALE, Keys::None, GROUP, "Explains the subcommands", pubsub_help),
    ]),
];

/// How a client is told: the word, and what its count is about.
fn words(kind: Kind) -> (&'static [u8], &'static [u8]) {
    match kind {
        Kind::Channel => (b"subscribe", b"unsubscribe"),
        Kind::Pattern => (b"psubscribe", b"punsubscribe"),
        Kind::Sharded => (b"ssubscribe", b"sunsubscribe"),
    }
}

/// Channels and patterns count together, channels of slots by themselves.
fn count(session: &Session, kind: Kind) -> i64 {
    let of = |kind: Kind| session.listens[kind as usize].len() as i64;
    if kind == Kind::Sharded { of(Kind::Sharded) } else { of(Kind::Channel) + of(Kind::Pattern) }
}

fn update(session: &mut Session) {
    session.subscriptions = session.listens.iter().map(std::collections::BTreeSet::len).sum();
}

fn subscribe(ctx: &mut Ctx<'_>, kind: Kind) -> Done {
    let names = ctx.args;
    for name in names.iter().skip(1) {
        ctx.shared.pubsub.subscribe(kind, name, ctx.session);
        if ctx.session.listens[kind as usize].insert(name.into()) {
            ctx.session.listens_bytes += kept_bytes(name);
        }
        ctx.out.push(3);
        ctx.out.bulk(words(kind).0);
        ctx.out.bulk(name);
        ctx.out.integer(count(ctx.session, kind));
    }
    update(ctx.session);
    Ok(())
}

fn unsubscribe(ctx: &mut Ctx<'_>, kind: Kind) -> Done {
    let names: Vec<Box<[u8]>> = match ctx.argc() {
        1 => ctx.session.listens[kind as usize].iter().cloned().collect(),
        _ => ctx.args.iter().skip(1).map(Box::from).collect(),
    };
    for name in &names {
        ctx.shared.pubsub.unsubscribe(kind, name, ctx.session.id);
        if ctx.session.listens[kind as usize].remove(name) {
            ctx.session.listens_bytes -= kept_bytes(name);
        }
        ctx.out.push(3);
        ctx.out.bulk(words(kind).1);
        ctx.out.bulk(name);
        ctx.out.integer(count(ctx.session, kind));
    }
    if names.is_empty() {
        ctx.out.push(3);
        ctx.out.bulk(words(kind).1);
        ctx.out.null();
        ctx.out.integer(count(ctx.session, kind));
    }
    update(ctx.session);
    Ok(())
}

/// The slot of a sharded channel has left: the client is told, and leaves subscriber mode if it was the last channel.
pub(crate) fn leave_channel(shared: &Shared, session: &mut Session, channel: &[u8], out: &mut BytesMut) {
    if shared.pubsub.is_listening(Kind::Sharded, channel, session.id) {
        // The slot has come back and the client has subscribed again.
        return;
    }
    if session.listens[Kind::Sharded as usize].remove(channel) {
        session.listens_bytes -= kept_bytes(channel);
    }
    update(session);
    let mut to = Encoder::new(out, session.protocol);
    to.push(3);
    to.bulk(words(Kind::Sharded).1);
    to.bulk(channel);
    to.integer(count(session, Kind::Sharded));
}

/// Everything that a client listened to is let go: it left, or said RESET.
pub(crate) fn leave(shared: &Shared, session: &mut Session) {
    for kind in [Kind::Channel, Kind::Pattern, Kind::Sharded] {
        for name in std::mem::take(&mut session.listens[kind as usize]) {
            shared.pubsub.unsubscribe(kind, &name, session.id);
        }
    }
    (session.subscriptions, session.listens_bytes) = (0, 0);
}

/// A message may tell of changes that the command, a script or a transaction, made just before.
fn gate(ctx: &Ctx<'_>) -> Gate {
    let Some(shard) = &ctx.session.shard else { return Gate::OPEN };
    shard.message_gate(if ctx.fx.is_empty() { 0 } else { ctx.events.hazards.batch })
}

fn publish(ctx: &mut Ctx<'_>) -> Done {
    let gate = gate(ctx);
    let reached = ctx.shared.pubsub.publish(ctx.arg(1), ctx.arg(2), &gate);
    ctx.shared.pubsub.tell_others(false, ctx.arg(1), ctx.arg(2), &gate);
    ctx.out.integer(reached as i64);
    Ok(())
}

fn spublish(ctx: &mut Ctx<'_>) -> Done {
    let gate = gate(ctx);
    let reached = ctx.shared.pubsub.publish_sharded(ctx.arg(1), ctx.arg(2), &gate);
    ctx.shared.pubsub.tell_others(true, ctx.arg(1), ctx.arg(2), &gate);
    ctx.out.integer(reached as i64);
    Ok(())
}

fn unknown(ctx: &mut Ctx<'_>) -> Done {
    let sub = String::from_utf8_lossy(ctx.arg(1)).into_owned();
    Err(Error::err(format_args!("unknown subcommand '{sub}'. Try PUBSUB HELP.")))
}

fn channels(ctx: &mut Ctx<'_>, kind: Kind) -> Done {
    if ctx.argc() > 3 {
        return Err(super::stream_groups::bad_subcommand(ctx));
    }
    let names = ctx.shared.pubsub.names(kind, ctx.args.get(2));
    ctx.out.array(names.len());
    names.iter().for_each(|name| ctx.out.bulk(name));
    Ok(())
}

fn numsub(ctx: &mut Ctx<'_>, kind: Kind) -> Done {
    let names = ctx.args;
    ctx.out.array((names.len() - 2) * 2);
    for name in names.iter().skip(2) {
        ctx.out.bulk(name);
        ctx.out.integer(ctx.shared.pubsub.listeners(kind, name) as i64);
    }
    Ok(())
}

fn numpat(ctx: &mut Ctx<'_>) -> Done {
    ctx.out.integer(ctx.shared.pubsub.count(Kind::Pattern) as i64);
    Ok(())
}

fn pubsub_help(ctx: &mut Ctx<'_>) -> Done {
    help(
        ctx,
        &[
            "PUBSUB <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
            "CHANNELS [<pattern>]",
            "    List the channels that somebody listens to.",
            "NUMPAT",
            "    Count the patterns that somebody listens to.",
            "NUMSUB [<channel> ...]",
            "    Count who listens to channels.",
            "SHARDCHANNELS [<pattern>]",
            "    List the channels of slots that somebody listens to.",
            "SHARDNUMSUB [<shardchannel> ...]",
            "    Count who listens to channels of slots.",
            "HELP",
            "    Prints this help.",
        ],
    )
}
