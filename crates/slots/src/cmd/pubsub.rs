//! Pub/Sub commands: SUBSCRIBE, PUBLISH and their families.

use bytes::BytesMut;
use moim_wire_resp::Encoder;

use super::flag::{FAST, LOADING, MAY_REPLICATE, NOSCRIPT, PUBSUB, STALE};
use super::{Keys, Spec, help};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::pubsub::{Gate, Kind};
use crate::session::{Session, registration_bytes};
use crate::shared::Shared;

const GROUP: &str = "pubsub";
const SUBSCRIBE_FLAGS: u32 = PUBSUB | NOSCRIPT | LOADING | STALE;
const PUBLISH_FLAGS: u32 = PUBSUB | LOADING | STALE | FAST | MAY_REPLICATE;
const INTROSPECTION_FLAGS: u32 = PUBSUB | LOADING | STALE;

/// Command table of this family.
#[rustfmt::skip]
pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("subscribe", -2, SUBSCRIBE_FLAGS, Keys::None, GROUP, "Listens for messages published to channels.", |ctx| subscribe(ctx, Kind::Channel)),
    Spec::new("psubscribe", -2, SUBSCRIBE_FLAGS, Keys::None, GROUP, "Listens for messages published to channels that match one or more patterns.", |ctx| subscribe(ctx, Kind::Pattern)),
    Spec::new("ssubscribe", -2, SUBSCRIBE_FLAGS, Keys::ALL, GROUP, "Listens for messages published to shard channels.", |ctx| subscribe(ctx, Kind::Sharded)),
    Spec::new("unsubscribe", -1, SUBSCRIBE_FLAGS, Keys::None, GROUP, "Stops listening to messages posted to channels.", |ctx| unsubscribe(ctx, Kind::Channel)),
    Spec::new("punsubscribe", -1, SUBSCRIBE_FLAGS, Keys::None, GROUP, "Stops listening to messages published to channels that match one or more patterns.", |ctx| unsubscribe(ctx, Kind::Pattern)),
    Spec::new("sunsubscribe", -1, SUBSCRIBE_FLAGS, Keys::ALL, GROUP, "Stops listening to messages posted to shard channels.", |ctx| unsubscribe(ctx, Kind::Sharded)),
    Spec::new("publish", 3, PUBLISH_FLAGS, Keys::None, GROUP, "Posts a message to a channel.", publish),
    Spec::new("spublish", 3, PUBLISH_FLAGS, Keys::ONE, GROUP, "Post a message to a shard channel", spublish),
    Spec::new("pubsub", -2, 0, Keys::None, GROUP, "A container for Pub/Sub commands.", unknown).with(&[
        Spec::new("pubsub|channels", -2, INTROSPECTION_FLAGS, Keys::None, GROUP, "Returns the active channels.", |ctx| channels(ctx, Kind::Channel)),
        Spec::new("pubsub|shardchannels", -2, INTROSPECTION_FLAGS, Keys::None, GROUP, "Returns the active shard channels.", |ctx| channels(ctx, Kind::Sharded)),
        Spec::new("pubsub|numsub", -2, INTROSPECTION_FLAGS, Keys::None, GROUP, "Returns a count of subscribers to channels.", |ctx| numsub(ctx, Kind::Channel)),
        Spec::new("pubsub|shardnumsub", -2, INTROSPECTION_FLAGS, Keys::None, GROUP, "Returns the count of subscribers of shard channels.", |ctx| numsub(ctx, Kind::Sharded)),
        Spec::new("pubsub|numpat", 2, INTROSPECTION_FLAGS, Keys::None, GROUP, "Returns a count of unique pattern subscriptions.", numpat),
        Spec::new("pubsub|help", 2, LOADING | STALE, Keys::None, GROUP, "Returns helpful text about the different subcommands.", pubsub_help),
    ]),
];

/// The words of the subscribe and unsubscribe confirmations.
fn words(kind: Kind) -> (&'static [u8], &'static [u8]) {
    match kind {
        Kind::Channel => (b"subscribe", b"unsubscribe"),
        Kind::Pattern => (b"psubscribe", b"punsubscribe"),
        Kind::Sharded => (b"ssubscribe", b"sunsubscribe"),
    }
}

/// The subscription count of a confirmation: channels and patterns together, sharded channels separately.
fn count(session: &Session, kind: Kind) -> i64 {
    let of = |kind: Kind| session.subscribed[kind as usize].len() as i64;
    if kind == Kind::Sharded { of(Kind::Sharded) } else { of(Kind::Channel) + of(Kind::Pattern) }
}

fn update(session: &mut Session) {
    session.subscriptions = session.subscribed.iter().map(std::collections::BTreeSet::len).sum();
}

fn subscribe(ctx: &mut Ctx<'_>, kind: Kind) -> Done {
    let names = ctx.args;
    for name in names.iter().skip(1) {
        ctx.shared.pubsub.subscribe(kind, name, ctx.session);
        if ctx.session.subscribed[kind as usize].insert(name.into()) {
            ctx.session.subscriptions_bytes += registration_bytes(name);
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
        1 => ctx.session.subscribed[kind as usize].iter().cloned().collect(),
        _ => ctx.args.iter().skip(1).map(Box::from).collect(),
    };
    for name in &names {
        ctx.shared.pubsub.unsubscribe(kind, name, ctx.session.id);
        if ctx.session.subscribed[kind as usize].remove(name) {
            ctx.session.subscriptions_bytes -= registration_bytes(name);
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

/// Unsubscribes the client from a sharded channel whose slot has left the shard. The client receives `sunsubscribe`,
/// and leaves subscriber mode if it was the last channel.
pub(crate) fn remove_sharded_channel(
    shared: &Shared,
    session: &mut Session,
    channel: &[u8],
    out: &mut BytesMut,
) {
    if shared.pubsub.is_subscribed(Kind::Sharded, channel, session.id) {
        // The slot has come back and the client has subscribed again.
        return;
    }
    if session.subscribed[Kind::Sharded as usize].remove(channel) {
        session.subscriptions_bytes -= registration_bytes(channel);
    }
    update(session);
    let mut to = Encoder::new(out, session.protocol);
    to.push(3);
    to.bulk(words(Kind::Sharded).1);
    to.bulk(channel);
    to.integer(count(session, Kind::Sharded));
}

/// Removes all subscriptions of a client that disconnected or sent RESET.
pub(crate) fn unsubscribe_all(shared: &Shared, session: &mut Session) {
    for kind in [Kind::Channel, Kind::Pattern, Kind::Sharded] {
        for name in std::mem::take(&mut session.subscribed[kind as usize]) {
            shared.pubsub.unsubscribe(kind, &name, session.id);
        }
    }
    (session.subscriptions, session.subscriptions_bytes) = (0, 0);
}

/// The commit gate of a published message: it may reveal writes that the same script or transaction made before it.
fn gate(ctx: &Ctx<'_>) -> Gate {
    let Some(shard) = &ctx.session.shard else { return Gate::OPEN };
    shard.message_gate(if ctx.fx.is_empty() { 0 } else { ctx.events.hazards.batch })
}

fn publish(ctx: &mut Ctx<'_>) -> Done {
    let gate = gate(ctx);
    let reached = ctx.shared.pubsub.publish(ctx.arg(1), ctx.arg(2), &gate);
    ctx.shared.pubsub.forward_to_nodes(false, ctx.arg(1), ctx.arg(2), &gate);
    ctx.out.integer(reached as i64);
    Ok(())
}

fn spublish(ctx: &mut Ctx<'_>) -> Done {
    let gate = gate(ctx);
    let reached = ctx.shared.pubsub.publish_sharded(ctx.arg(1), ctx.arg(2), &gate);
    ctx.shared.pubsub.forward_to_nodes(true, ctx.arg(1), ctx.arg(2), &gate);
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
        ctx.out.integer(ctx.shared.pubsub.subscribers(kind, name) as i64);
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
            "    Return the currently active channels matching a <pattern> (default: '*').",
            "NUMPAT",
            "    Return number of subscriptions to patterns.",
            "NUMSUB [<channel> ...]",
            "    Return the number of subscribers for the specified channels, excluding pattern subscriptions.",
            "SHARDCHANNELS [<pattern>]",
            "    Return the currently active shard level channels matching a <pattern> (default: '*').",
            "SHARDNUMSUB [<shardchannel> ...]",
            "    Return the number of subscribers for the specified shard level channels.",
            "HELP",
            "    Prints this help.",
        ],
    )
}
