//! CLIENT: connected clients, their names and flags.

mod tracking;

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use super::{Keys, Spec, flag::*};
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::session::Replies;
use crate::shared::{About, lock};

const ANY: u32 = NOSCRIPT | LOADING | STALE;

const fn sub(
    name: &'static str,
    arity: i32,
    flags: u32,
    summary: &'static str,
    run: fn(&mut Ctx<'_>) -> Done,
) -> Spec {
    Spec::new(name, arity, ANY | flags, Keys::None, "connection", summary, run)
}

pub(crate) const COMMANDS: &[Spec] = &[Spec::new(
    "client",
    -2,
    0,
    Keys::None,
    "connection",
    "A container for client connection commands.",
    |ctx| Err(super::unknown_subcommand(&ctx.args)),
)
.with(&[
    sub("client|id", 2, 0, "Returns the unique client ID of the connection.", |ctx| {
        ctx.out.integer(ctx.session.id as i64);
        Ok(())
    }),
    sub("client|getname", 2, 0, "Returns the name of the connection.", |ctx| {
        match ctx.session.name.is_empty() {
            true => ctx.out.null(),
            false => ctx.out.bulk(&ctx.session.name),
        }
        Ok(())
    }),
    sub("client|setname", 3, 0, "Sets the connection name.", |ctx| {
        check_name(ctx.arg(2))?;
        set_name(ctx, ctx.arg(2));
        ctx.out.ok();
        Ok(())
    }),
    sub("client|setinfo", 4, 0, "Sets information specific to the client or connection.", set_info),
    sub("client|info", 2, 0, "Returns information about the connection.", info),
    sub("client|list", -2, ADMIN, "Lists open connections.", list),
    sub("client|kill", -3, ADMIN, "Terminates open connections.", kill),
    sub("client|pause", -3, ADMIN, "Suspends commands processing.", pause),
    sub("client|unpause", 2, ADMIN, "Resumes processing commands from paused clients.", |ctx| {
        ctx.shared.paused_ms.iter().for_each(|until| until.store(0, Ordering::Relaxed));
        crate::ctx::ok(ctx)
    }),
    sub("client|reply", 3, 0, "Instructs the server whether to reply to commands.", reply),
    sub(
        "client|unblock",
        -3,
        ADMIN,
        "Unblocks a client blocked by a blocking command from a different connection.",
        unblock,
    ),
    sub("client|no-evict", 3, ADMIN, "Sets the client eviction mode of the connection.", |ctx| {
        ctx.session.no_evict = on_off(ctx, 2)?;
        crate::ctx::ok(ctx)
    }),
    sub(
        "client|no-touch",
        3,
        0,
        "Controls whether commands sent by the client affect the LRU/LFU of accessed keys.",
        |ctx| {
            on_off(ctx, 2)?;
            crate::ctx::ok(ctx)
        },
    ),
    sub(
        "client|getredir",
        2,
        0,
        "Returns the client ID to which the connection's tracking notifications are redirected.",
        |ctx| {
            ctx.out.integer(redirect(ctx));
            Ok(())
        },
    ),
    sub(
        "client|tracking",
        -3,
        0,
        "Controls server-assisted client-side caching for the connection.",
        tracking::tracking,
    ),
    sub(
        "client|caching",
        3,
        0,
        "Instructs the server whether to track the keys in the next request.",
        tracking::caching,
    ),
    sub(
        "client|trackinginfo",
        2,
        0,
        "Returns information about server-assisted client-side caching for the connection.",
        tracking::info,
    ),
    sub("client|help", 2, 0, "Returns helpful text about the different subcommands.", |ctx| {
        super::help(
            ctx,
            &[
                "CLIENT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
                "GETNAME",
                "    Return the name of the current connection.",
                "ID",
                "    Return the ID of the current connection.",
                "INFO",
                "    Return information about the current client connection.",
                "KILL <ip:port>|<option> <value>",
                "    Kill connections.",
                "LIST [options ...]",
                "    Return information about client connections.",
                "CACHING (YES|NO)",
                "    Enable/disable tracking of the keys for next command in OPTIN/OPTOUT modes.",
                "GETREDIR",
                "    Return the client ID we are redirecting to when tracking is enabled.",
                "TRACKING (ON|OFF) [REDIRECT <id>] [BCAST] [PREFIX <prefix> [...]]",
                "         [OPTIN] [OPTOUT] [NOLOOP]",
                "    Control server assisted client side caching.",
                "TRACKINGINFO",
                "    Report tracking status for the current connection.",
                "NO-EVICT (ON|OFF)",
                "    Protect current client connection from eviction.",
                "PAUSE <timeout> [WRITE|ALL]",
                "    Suspend all, or just write, clients for <timeout> milliseconds.",
                "REPLY (ON|OFF|SKIP)",
                "    Control the replies sent to the current connection.",
                "SETNAME <name>",
                "    Assign the name <name> to the current connection.",
                "UNBLOCK <clientid> [TIMEOUT|ERROR]",
                "    Unblock the specified blocked client.",
                "UNPAUSE",
                "    Stop the current client pause, resuming traffic.",
                "HELP",
                "    Prints this help.",
            ],
        )
    }),
])];

/// The REDIRECT target of the tracking client: 0 for the client itself, -1 if tracking is disabled.
fn redirect(ctx: &Ctx<'_>) -> i64 {
    ctx.session.tracking.as_ref().map_or(-1, |options| options.redirect.unwrap_or(0) as i64)
}

/// A client name consists of printable characters without spaces.
pub(super) fn check_name(name: &[u8]) -> Done {
    if name.iter().all(|c| (b'!'..=b'~').contains(c)) {
        return Ok(());
    }
    Err(Error::err("Client names cannot contain spaces, newlines or special characters."))
}

pub(super) fn set_name(ctx: &mut Ctx<'_>, name: &[u8]) {
    ctx.session.name = name.to_vec();
    lock(&ctx.session.about).name = String::from_utf8_lossy(name).into_owned();
}

fn set_info(ctx: &mut Ctx<'_>) -> Done {
    let at = match ctx.arg(2).to_ascii_lowercase().as_slice() {
        b"lib-name" => 0,
        b"lib-ver" => 1,
        _ => {
            let name = String::from_utf8_lossy(ctx.arg(2)).into_owned();
            return Err(Error::err(format_args!("Unrecognized option '{name}'")));
        }
    };
    if !ctx.arg(3).iter().all(|c| (b'!'..=b'~').contains(c)) {
        let name = ["lib-name", "lib-ver"][at];
        return Err(Error::err(format_args!(
            "{name} cannot contain spaces, newlines or special characters."
        )));
    }
    ctx.session.library[at] = ctx.arg(3).to_vec();
    lock(&ctx.session.about).library[at] = String::from_utf8_lossy(ctx.arg(3)).into_owned();
    ctx.out.ok();
    Ok(())
}

fn on_off(ctx: &Ctx<'_>, at: usize) -> Result<bool, Error> {
    match ctx.arg(at).to_ascii_lowercase().as_slice() {
        b"on" => Ok(true),
        b"off" => Ok(false),
        _ => Err(Error::SYNTAX),
    }
}

fn line(about: &About, now: i64) -> String {
    let mut flags = String::new();
    if about.blocked {
        flags.push('b');
    }
    if about.multi >= 0 {
        flags.push('x');
    }
    if about.subscriptions > 0 {
        flags.push('P');
    }
    if about.readonly {
        flags.push('r');
    }
    if about.redirect >= 0 {
        flags.push('t');
    }
    if about.broadcasts {
        flags.push('B');
    }
    if about.monitors {
        flags.push('O');
    }
    if flags.is_empty() {
        flags.push('N');
    }
    let mut text = String::new();
    let _ = write!(
        text,
        "id={} addr={} laddr={} fd=8 name={} age={} idle={} flags={flags} db=0 sub={} psub={} ssub={} multi={} qbuf={} qbuf-free=0 argv-mem=0 multi-mem=0 rbs=1024 rbp=0 obl=0 oll=0 omem=0 tot-mem=0 events=r cmd={} user=default redir={} resp={} lib-name={} lib-ver={}",
        about.id,
        about.peer,
        about.local,
        about.name,
        (now - about.since_ms) / 1_000,
        (now - about.last_ms) / 1_000,
        about.subscribed[0],
        about.subscribed[1],
        about.subscribed[2],
        about.multi,
        about.request_bytes,
        about.last_command,
        about.redirect,
        about.protocol,
        about.library[0],
        about.library[1],
    );
    text
}

fn info(ctx: &mut Ctx<'_>) -> Done {
    let text = {
        update_about(ctx, "client|info");
        line(&lock(&ctx.session.about), ctx.now)
    };
    ctx.out.verbatim(b"txt", format!("{text}\n").as_bytes());
    Ok(())
}

fn list(ctx: &mut Ctx<'_>) -> Done {
    let mut ids: Option<Vec<u64>> = None;
    let mut kind: Option<String> = None;
    if ctx.argc() > 2 {
        if ctx.is(2, "TYPE") && ctx.argc() == 4 {
            let wanted = String::from_utf8_lossy(ctx.arg(3)).to_lowercase();
            if !matches!(wanted.as_str(), "normal" | "master" | "replica" | "slave" | "pubsub") {
                return Err(Error::err(format_args!("Unknown client type '{wanted}'")));
            }
            kind = Some(wanted);
        } else if ctx.is(2, "ID") && ctx.argc() > 3 {
            let read = (3..ctx.argc()).map(|at| ctx.int(at).ok().and_then(|id| u64::try_from(id).ok()));
            ids = Some(read.collect::<Option<_>>().ok_or_else(|| Error::err("Invalid client ID"))?);
        } else {
            return Err(Error::SYNTAX);
        }
    }
    update_about(ctx, "client|list");
    let mut text = String::new();
    for client in ctx.shared.clients().values() {
        let about = lock(&client.about);
        let is_kind = match kind.as_deref() {
            None => true,
            Some("pubsub") => about.subscriptions > 0,
            Some("normal") => about.subscriptions == 0,
            Some(_) => false,
        };
        if is_kind && ids.as_ref().is_none_or(|ids| ids.contains(&about.id)) {
            text.push_str(&line(&about, ctx.now));
            text.push('\n');
        }
    }
    lock(&ctx.session.about).request_bytes = 0;
    ctx.out.verbatim(b"txt", text.as_bytes());
    Ok(())
}

/// Updates the client description with the running command.
fn update_about(ctx: &Ctx<'_>, command: &'static str) {
    let digits = |number: usize| number.max(1).ilog10() as usize + 1;
    let request: usize = ctx.args.iter().map(|arg| arg.len() + digits(arg.len()) + 5).sum();
    let mut about = lock(&ctx.session.about);
    (about.last_command, about.last_ms) = (command, ctx.now);
    about.request_bytes = request + digits(ctx.argc()) + 3;
}

#[derive(Default)]
struct Filter {
    id: Option<u64>,
    peer: Option<String>,
    local: Option<String>,
    user: Option<String>,
    kind: Option<String>,
    with_me: bool,
}

fn kill(ctx: &mut Ctx<'_>) -> Done {
    let is_old = ctx.argc() == 3;
    let mut filter = Filter::default();
    if is_old {
        (filter.peer, filter.with_me) = (Some(String::from_utf8_lossy(ctx.arg(2)).into_owned()), true);
    } else {
        if !ctx.argc().is_multiple_of(2) {
            return Err(Error::SYNTAX);
        }
        for at in (2..ctx.argc()).step_by(2) {
            let value = String::from_utf8_lossy(ctx.arg(at + 1)).into_owned();
            match ctx.arg(at).to_ascii_uppercase().as_slice() {
                b"ID" => {
                    let id = ctx.int(at + 1).ok().and_then(|id| u64::try_from(id).ok()).filter(|id| *id > 0);
                    filter.id = Some(id.ok_or_else(|| Error::err("client-id should be greater than 0"))?);
                }
                b"ADDR" => filter.peer = Some(value),
                b"LADDR" => filter.local = Some(value),
                b"USER" if value == "default" => filter.user = Some(value),
                b"USER" => return Err(Error::err(format_args!("No such user '{value}'"))),
                b"TYPE"
                    if matches!(
                        value.to_lowercase().as_str(),
                        "normal" | "master" | "replica" | "slave" | "pubsub"
                    ) =>
                {
                    filter.kind = Some(value.to_lowercase());
                }
                b"TYPE" => return Err(Error::err(format_args!("Unknown client type '{value}'"))),
                b"SKIPME" => {
                    filter.with_me = match value.to_lowercase().as_str() {
                        "yes" => false,
                        "no" => true,
                        _ => return Err(Error::SYNTAX),
                    }
                }
                _ => return Err(Error::SYNTAX),
            }
        }
    }
    let mut killed = 0;
    for client in ctx.shared.clients().values() {
        let about = lock(&client.about);
        let is_kind = match filter.kind.as_deref() {
            None => true,
            Some("pubsub") => about.subscriptions > 0,
            Some("normal") => about.subscriptions == 0,
            Some(_) => false,
        };
        let is_meant = is_kind
            && filter.id.is_none_or(|id| id == about.id)
            && filter.peer.as_ref().is_none_or(|peer| *peer == about.peer)
            && filter.local.as_ref().is_none_or(|local| *local == about.local)
            && (filter.with_me || about.id != ctx.session.id);
        if is_meant {
            killed += 1;
            if about.id == ctx.session.id {
                ctx.session.closing = true;
            } else {
                client.mailbox.kill();
            }
        }
    }
    match (is_old, killed) {
        (true, 0) => return Err(Error::err("No such client")),
        (true, _) => ctx.out.ok(),
        (false, killed) => ctx.out.integer(killed),
    }
    Ok(())
}

fn pause(ctx: &mut Ctx<'_>) -> Done {
    let writes_only = match ctx.args.get(3) {
        None => false,
        Some(word) if word.eq_ignore_ascii_case(b"ALL") => false,
        Some(word) if word.eq_ignore_ascii_case(b"WRITE") => true,
        Some(_) => return Err(Error::err("CLIENT PAUSE mode must be WRITE or ALL")),
    };
    let ms = ctx.int(2).map_err(|_| Error::err("timeout is not an integer or out of range"))?;
    if ms < 0 {
        return Err(Error::NEGATIVE_TIMEOUT);
    }
    let until = ctx.now.saturating_add(ms);
    ctx.shared.paused_ms[usize::from(writes_only)].fetch_max(until, Ordering::Relaxed);
    ctx.out.ok();
    Ok(())
}

fn reply(ctx: &mut Ctx<'_>) -> Done {
    ctx.session.replies = match ctx.arg(2).to_ascii_lowercase().as_slice() {
        b"on" => {
            ctx.out.ok();
            Replies::On
        }
        b"off" => Replies::Off,
        b"skip" if ctx.session.replies == Replies::On => Replies::SkipNext,
        b"skip" => ctx.session.replies,
        _ => return Err(Error::SYNTAX),
    };
    Ok(())
}

fn unblock(ctx: &mut Ctx<'_>) -> Done {
    let with_error = match ctx.args.get(3) {
        None => false,
        Some(word) if word.eq_ignore_ascii_case(b"TIMEOUT") => false,
        Some(word) if word.eq_ignore_ascii_case(b"ERROR") => true,
        Some(_) => {
            return Err(Error::err("CLIENT UNBLOCK reason should be TIMEOUT or ERROR"));
        }
    };
    let id = ctx.int(2)?;
    let is_blocked = u64::try_from(id)
        .ok()
        .and_then(|id| ctx.shared.clients().get(&id).map(|client| lock(&client.about).blocked))
        .unwrap_or(false);
    if is_blocked {
        ctx.events.unblocked.push((id as u64, with_error));
    }
    ctx.out.integer(i64::from(is_blocked));
    Ok(())
}
