//! Connection commands: PING, ECHO, HELLO, AUTH, SELECT, QUIT, RESET, ASKING, READONLY, READWRITE.

use moim_wire_resp::Protocol;

use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::session::Replies;
use crate::shard::Role;
use crate::shared::lock;

const FREE: u32 = NOSCRIPT | LOADING | STALE | FAST | NO_AUTH | ALLOW_BUSY;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("ping", -1, FAST, Keys::None, "connection", "Returns the server's liveliness response.", ping),
    Spec::new(
        "echo",
        2,
        LOADING | STALE | FAST,
        Keys::None,
        "connection",
        "Returns the given string.",
        |ctx| {
            ctx.out.bulk(ctx.arg(1));
            Ok(())
        },
    ),
    Spec::new("hello", -1, FREE, Keys::None, "connection", "Handshakes with the Redis server.", hello),
    Spec::new("auth", -2, FREE, Keys::None, "connection", "Authenticates the connection.", auth),
    Spec::new(
        "select",
        2,
        LOADING | STALE | FAST,
        Keys::None,
        "connection",
        "Changes the selected database.",
        select,
    ),
    Spec::new("quit", -1, FREE, Keys::None, "connection", "Closes the connection.", quit),
    Spec::new("reset", 1, FREE, Keys::None, "connection", "Resets the connection.", reset),
    Spec::new(
        "asking",
        1,
        FAST,
        Keys::None,
        "cluster",
        "Signals that a cluster client is following an -ASK redirect.",
        |ctx| {
            ctx.session.asking = true;
            crate::ctx::ok(ctx)
        },
    ),
    Spec::new(
        "readonly",
        1,
        LOADING | STALE | FAST,
        Keys::None,
        "cluster",
        "Enables read-only queries for a connection to a Redis Cluster replica node.",
        |ctx| {
            ctx.session.readonly = true;
            crate::ctx::ok(ctx)
        },
    ),
    Spec::new(
        "readwrite",
        1,
        LOADING | STALE | FAST,
        Keys::None,
        "cluster",
        "Enables read-write queries for a connection to a Reids Cluster replica node.",
        |ctx| {
            ctx.session.readonly = false;
            crate::ctx::ok(ctx)
        },
    ),
];

fn ping(ctx: &mut Ctx<'_>) -> Done {
    let is_subscriber = ctx.session.subscriptions > 0 && ctx.session.protocol == Protocol::Resp2;
    match (ctx.argc(), is_subscriber) {
        (1, false) => ctx.out.simple("PONG"),
        (2, false) => ctx.out.bulk(ctx.arg(1)),
        (1 | 2, true) => {
            ctx.out.array(2);
            ctx.out.bulk(b"pong");
            ctx.out.bulk(ctx.arg(1));
        }
        _ => return Err(Error::arity("ping")),
    }
    Ok(())
}

/// Checks the user name and the password. The only user is `default`.
fn check_credentials(ctx: &mut Ctx<'_>, user: &[u8], password: &[u8]) -> Done {
    let wanted = ctx.shared.settings.get("requirepass").unwrap_or_default();
    let right = user == b"default" && (wanted.is_empty() || wanted.as_bytes() == password);
    if !right {
        return Err(Error::coded("WRONGPASS invalid username-password pair or user is disabled."));
    }
    ctx.session.authenticated = true;
    Ok(())
}

fn auth(ctx: &mut Ctx<'_>) -> Done {
    if ctx.argc() > 3 {
        return Err(Error::SYNTAX);
    }
    let is_open = ctx.shared.settings.get("requirepass").is_none_or(|password| password.is_empty());
    if ctx.argc() == 2 && is_open {
        return Err(Error::err(
            "AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?",
        ));
    }
    if ctx.argc() == 2 {
        check_credentials(ctx, b"default", ctx.arg(1))?
    } else {
        check_credentials(ctx, ctx.arg(1), ctx.arg(2))?
    }
    ctx.out.ok();
    Ok(())
}

fn hello(ctx: &mut Ctx<'_>) -> Done {
    let mut protocol = ctx.session.protocol;
    let mut at = 1;
    if ctx.argc() > 1 {
        let version =
            ctx.int(1).map_err(|_| Error::err("Protocol version is not an integer or out of range"))?;
        protocol = match version {
            2 => Protocol::Resp2,
            3 => Protocol::Resp3,
            _ => return Err(Error::coded("NOPROTO unsupported protocol version")),
        };
        at = 2;
    }
    let mut name = None;
    while at < ctx.argc() {
        if ctx.is(at, "AUTH") && at + 2 < ctx.argc() {
            check_credentials(ctx, ctx.arg(at + 1), ctx.arg(at + 2))?;
            at += 3;
        } else if ctx.is(at, "SETNAME") && at + 1 < ctx.argc() {
            super::client::check_name(ctx.arg(at + 1))?;
            name = Some(ctx.arg(at + 1));
            at += 2;
        } else {
            let option = String::from_utf8_lossy(ctx.arg(at)).into_owned();
            return Err(Error::err(format_args!("Syntax error in HELLO option '{option}'")));
        }
    }
    if !ctx.session.authenticated {
        return Err(Error::coded(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time",
        ));
    }
    if let Some(name) = name {
        super::client::set_name(ctx, name);
    }
    ctx.session.protocol = protocol;
    ctx.shared.tracking.set_protocol(ctx.session.id, protocol);
    lock(&ctx.session.about).protocol = if protocol == Protocol::Resp3 { 3 } else { 2 };
    ctx.out.set_protocol(protocol);
    ctx.out.map(7);
    ctx.out.bulk(b"server");
    ctx.out.bulk(b"redis");
    ctx.out.bulk(b"version");
    ctx.out.bulk(super::REDIS_VERSION.as_bytes());
    ctx.out.bulk(b"proto");
    ctx.out.integer(if protocol == Protocol::Resp3 { 3 } else { 2 });
    ctx.out.bulk(b"id");
    ctx.out.integer(ctx.session.id as i64);
    ctx.out.bulk(b"mode");
    ctx.out.bulk(b"cluster");
    ctx.out.bulk(b"role");
    let is_replica = ctx.session.shard.as_ref().is_some_and(|shard| shard.role() == Role::Replica);
    ctx.out.bulk(if is_replica { b"replica" } else { b"master" });
    ctx.out.bulk(b"modules");
    ctx.out.array(0);
    Ok(())
}

fn select(ctx: &mut Ctx<'_>) -> Done {
    let index = ctx.int(1)?;
    if !(0..16).contains(&index) {
        return Err(Error::err("DB index is out of range"));
    }
    if index != 0 {
        return Err(Error::err("SELECT is not allowed in cluster mode"));
    }
    ctx.out.ok();
    Ok(())
}

fn quit(ctx: &mut Ctx<'_>) -> Done {
    ctx.session.closing = true;
    ctx.out.ok();
    Ok(())
}

fn reset(ctx: &mut Ctx<'_>) -> Done {
    super::transaction::discard_all(ctx);
    super::on_disconnect(ctx.shared, ctx.session);
    let session = &mut *ctx.session;
    session.protocol = Protocol::Resp2;
    session.readonly = false;
    session.asking = false;
    session.replies = Replies::On;
    session.name.clear();
    session.authenticated = ctx.shared.settings.get("requirepass").is_none_or(|password| password.is_empty());
    lock(&session.about).name.clear();
    ctx.out.simple("RESET");
    Ok(())
}
