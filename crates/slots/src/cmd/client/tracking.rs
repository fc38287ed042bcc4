//! CLIENT TRACKING, CLIENT CACHING and CLIENT TRACKINGINFO: client-side caching.

use std::sync::Arc;

use moim_wire_resp::Protocol;

use super::on_off;
use crate::ctx::Ctx;
use crate::error::{Done, Error};
use crate::shared::lock;
use crate::tracking::{PushTarget, TrackingOptions};

pub(super) fn tracking(ctx: &mut Ctx<'_>) -> Done {
    let mut options = TrackingOptions::default();
    let mut at = 3;
    while at < ctx.argc() {
        let has_more = at + 1 < ctx.argc();
        match ctx.arg(at).to_ascii_uppercase().as_slice() {
            b"REDIRECT" if has_more => {
                at += 1;
                if options.redirect.is_some() {
                    return Err(Error::err("A client can only redirect to a single other client"));
                }
                let id = ctx.int(at).ok().and_then(|id| u64::try_from(id).ok());
                let id = id.ok_or_else(|| Error::err("Invalid client ID"))?;
                if !ctx.shared.clients().contains_key(&id) {
                    return Err(Error::err("The client ID you want redirect to does not exist"));
                }
                options.redirect = Some(id);
            }
            b"PREFIX" if has_more => {
                at += 1;
                options.prefixes.insert(ctx.arg(at).into());
            }
            b"BCAST" => options.broadcast = true,
            b"OPTIN" => options.opt_in = true,
            b"OPTOUT" => options.opt_out = true,
            b"NOLOOP" => options.no_loop = true,
            _ => return Err(Error::SYNTAX),
        }
        at += 1;
    }
    if on_off(ctx, 2)? {
        enable(ctx, options)?;
    } else {
        ctx.shared.tracking.disable(ctx.session.id);
        ctx.session.tracking = None;
    }
    let (redirect, broadcasts) =
        (super::redirect(ctx), ctx.session.tracking.as_ref().is_some_and(|options| options.broadcast));
    let mut about = lock(&ctx.session.about);
    (about.redirect, about.broadcasts) = (redirect, broadcasts);
    drop(about);
    crate::ctx::ok(ctx)
}

fn enable(ctx: &mut Ctx<'_>, mut options: TrackingOptions) -> Done {
    if !options.broadcast && !options.prefixes.is_empty() {
        return Err(Error::err("PREFIX option requires BCAST mode to be enabled"));
    }
    if let Some(before) = &ctx.session.tracking {
        if before.broadcast != options.broadcast {
            return Err(Error::err(
                "You can't switch BCAST mode on/off before disabling tracking for this client, and then re-enabling it with a different mode.",
            ));
        }
        if before.opt_in && options.opt_out || before.opt_out && options.opt_in {
            return Err(Error::err(
                "You can't switch OPTIN/OPTOUT mode before disabling tracking for this client, and then re-enabling it with a different mode.",
            ));
        }
    }
    if options.broadcast && (options.opt_in || options.opt_out) {
        return Err(Error::err("OPTIN and OPTOUT are not compatible with BCAST"));
    }
    if options.opt_in && options.opt_out {
        return Err(Error::err("You can't specify both OPTIN mode and OPTOUT mode"));
    }
    check_prefixes(ctx, &options)?;
    if let Some(before) = &ctx.session.tracking {
        options.prefixes.extend(before.prefixes.iter().cloned());
    }
    let session = &*ctx.session;
    let own_shard = session.shard.as_ref().map(|shard| shard.index);
    let own =
        PushTarget { mailbox: Arc::clone(&session.mailbox), protocol: session.protocol, shard: own_shard };
    let target = options.redirect.and_then(|id| ctx.shared.clients().get(&id).cloned());
    let redirect_target = target.map(|client| {
        let about = lock(&client.about);
        let protocol = if about.protocol == 3 { Protocol::Resp3 } else { Protocol::Resp2 };
        // A client connected to another port waits for the commits of another shard.
        let shard = own_shard.filter(|_| about.local == session.local);
        drop(about);
        PushTarget { mailbox: client.mailbox, protocol, shard }
    });
    ctx.shared.tracking.enable(session.id, options.clone(), own, redirect_target);
    ctx.session.tracking = Some(Arc::new(options));
    ctx.events.tracking_enabled = true;
    Ok(())
}

/// Rejects overlapping prefixes: each key is invalidated once.
fn check_prefixes(ctx: &Ctx<'_>, options: &TrackingOptions) -> Done {
    let before = ctx.session.tracking.as_ref().map(|before| before.prefixes.clone()).unwrap_or_default();
    for (at, prefix) in options.prefixes.iter().enumerate() {
        let others = options.prefixes.iter().skip(at + 1);
        let known = before.iter().filter(|known| *known != prefix);
        let overlaps = |other: &&[u8]| other.starts_with(prefix) || prefix.starts_with(other);
        if let Some(other) = known.chain(others).map(|other| &**other).find(overlaps) {
            let [prefix, other] = [prefix, other].map(|text| String::from_utf8_lossy(text).into_owned());
            return Err(Error::err(format_args!(
                "Prefix '{prefix}' overlaps with an existing prefix '{other}'. Prefixes for a single client must not overlap."
            )));
        }
    }
    Ok(())
}

pub(super) fn caching(ctx: &mut Ctx<'_>) -> Done {
    let Some(options) = ctx.session.tracking.clone().filter(|options| options.opt_in || options.opt_out)
    else {
        return Err(Error::err(
            "CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode enabled",
        ));
    };
    ctx.session.caching = Some(match ctx.arg(2).to_ascii_lowercase().as_slice() {
        b"yes" if options.opt_in => true,
        b"no" if options.opt_out => false,
        b"yes" => {
            return Err(Error::err(
                "CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.",
            ));
        }
        b"no" => {
            return Err(Error::err(
                "CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.",
            ));
        }
        _ => return Err(Error::SYNTAX),
    });
    crate::ctx::ok(ctx)
}

pub(super) fn info(ctx: &mut Ctx<'_>) -> Done {
    let options = ctx.session.tracking.clone();
    let mut flags = vec![if options.is_some() { "on" } else { "off" }];
    if let Some(options) = &options {
        let is_redirect_broken = ctx.shared.tracking.is_redirect_broken(ctx.session.id);
        let caching = ctx.session.caching;
        let all = [
            (options.broadcast, "bcast"),
            (options.opt_in, "optin"),
            (options.opt_in && caching == Some(true), "caching-yes"),
            (options.opt_out, "optout"),
            (options.opt_out && caching == Some(false), "caching-no"),
            (options.no_loop, "noloop"),
            (is_redirect_broken, "broken_redirect"),
        ];
        flags.extend(all.into_iter().filter_map(|(is_on, name)| is_on.then_some(name)));
    }
    ctx.out.map(3);
    ctx.out.bulk(b"flags");
    ctx.out.set(flags.len());
    flags.iter().for_each(|flag| ctx.out.bulk(flag.as_bytes()));
    ctx.out.bulk(b"redirect");
    ctx.out.integer(super::redirect(ctx));
    ctx.out.bulk(b"prefixes");
    let prefixes = options.map(|options| options.prefixes.clone()).unwrap_or_default();
    ctx.out.array(prefixes.len());
    prefixes.iter().for_each(|prefix| ctx.out.bulk(prefix));
    Ok(())
}
