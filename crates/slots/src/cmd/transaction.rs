//! Transactions: MULTI, EXEC, DISCARD, WATCH, UNWATCH.
//!
//! EXEC runs its commands under one lock and propagates them as one batch: other clients see all of them or none,
//! also after a crash. As in Redis, a command that fails does not roll back the others.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use super::{Keys, Spec, flag::*};
use crate::cluster::{RouteRequest, route};
use crate::ctx::{Ctx, Mode};
use crate::error::{Done, Error};
use crate::session::{Multi, Session, registration_bytes};
use crate::shard::Role;

const FLAGS: u32 = NOSCRIPT | LOADING | STALE | FAST | ALLOW_BUSY;

pub(crate) const COMMANDS: &[Spec] = &[
    Spec::new("multi", 1, FLAGS, Keys::None, "transactions", "Starts a transaction.", multi),
    Spec::new(
        "exec",
        1,
        NOSCRIPT | LOADING | STALE | SKIP_SLOWLOG | CONTAINER,
        Keys::None,
        "transactions",
        "Executes all commands in a transaction.",
        exec,
    ),
    Spec::new("discard", 1, FLAGS, Keys::None, "transactions", "Discards a transaction.", discard),
    Spec::new(
        "watch",
        -2,
        FLAGS,
        Keys::ALL,
        "transactions",
        "Monitors changes to keys to determine the execution of a transaction.",
        watch,
    ),
    Spec::new(
        "unwatch",
        1,
        FLAGS,
        Keys::None,
        "transactions",
        "Forgets about watched keys of a transaction.",
        |ctx| {
            unwatch_all(ctx);
            crate::ctx::ok(ctx)
        },
    ),
];

fn multi(ctx: &mut Ctx<'_>) -> Done {
    if ctx.session.multi.is_some() {
        return Err(Error::err("MULTI calls can not be nested"));
    }
    ctx.session.multi = Some(Multi::default());
    ctx.out.ok();
    Ok(())
}

fn discard(ctx: &mut Ctx<'_>) -> Done {
    if ctx.session.multi.is_none() {
        return Err(Error::err("DISCARD without MULTI"));
    }
    discard_all(ctx);
    ctx.out.ok();
    Ok(())
}

/// Discards the MULTI state and the watched keys.
pub(super) fn discard_all(ctx: &mut Ctx<'_>) {
    ctx.session.multi = None;
    unwatch_all(ctx);
}

fn unwatch_all(ctx: &mut Ctx<'_>) {
    for key in std::mem::take(&mut ctx.session.watched) {
        ctx.events.unwatch(ctx.session.id, &key);
    }
    ctx.session.watched_bytes = 0;
    ctx.session.watch_flag.store(false, Ordering::Release);
}

fn watch(ctx: &mut Ctx<'_>) -> Done {
    if ctx.session.multi.is_some() {
        return Err(Error::err("WATCH inside MULTI is not allowed"));
    }
    let Session { watched, watched_bytes, watch_flag, id, .. } = &mut *ctx.session;
    for key in ctx.args.from(1).iter() {
        if !watched.iter().any(|known| **known == *key) {
            watched.push(key.into());
            *watched_bytes += registration_bytes(key);
            ctx.events.watch(*id, key, watch_flag);
        }
    }
    ctx.out.ok();
    Ok(())
}

fn exec(ctx: &mut Ctx<'_>) -> Done {
    let Some(multi) = ctx.session.multi.take() else {
        return Err(Error::err("EXEC without MULTI"));
    };
    let now = ctx.now;
    let has_expired = |key: &[u8]| ctx.db.expiry(key).flatten().is_some_and(|at| at <= now);
    let is_dirty = ctx.session.is_dirty() || ctx.session.watched.iter().any(|key| has_expired(key));
    // EXEC failing because of a watched key reveals its change, so the reply waits for that commit.
    for key in &ctx.session.watched {
        let hash = ctx.db.id_of(key).hash;
        ctx.events.gate = ctx.events.gate.max(ctx.events.hazards.of(hash));
    }
    unwatch_all(ctx);
    if multi.dirty_exec {
        return Err(Error::EXEC_ABORT);
    }
    if let Some(why) = &multi.refused {
        return Err(Error::coded(format!("EXECABORT Transaction discarded because of: {}", why.0)));
    }
    check_slots(ctx, &multi)?;
    if is_dirty {
        ctx.out.null_array();
        return Ok(());
    }
    if crate::ops::is_cluster_transaction(&multi.commands) {
        return crate::ops::submit_transaction(ctx, &multi.commands);
    }
    ctx.out.array(multi.commands.len());
    for (spec, command) in &multi.commands {
        ctx.call(spec, command);
    }
    // The commands have propagated their own effects.
    ctx.prevent_propagation();
    Ok(())
}

/// Checks that the keys of all commands belong to one slot that is still served here.
fn check_slots(ctx: &Ctx<'_>, multi: &Multi) -> Done {
    let (mut slot, mut keys, mut places) = (None, BTreeSet::new(), Vec::new());
    for (spec, command) in &multi.commands {
        let args = command.args();
        places.clear();
        spec.keys.positions(&args, &mut places);
        for at in &places {
            let key = command.args().get(*at).unwrap_or_default();
            let found = crate::slot_of(key);
            if slot.is_some_and(|slot| slot != found) {
                return Err(Error::CROSS_SLOT);
            }
            slot = Some(found);
            keys.insert(key);
        }
    }
    let Some(shard) = &ctx.session.shard else { return Ok(()) };
    // The commands may have been queued while this node was primary, and it no longer is.
    if shard.role() == Role::Loading && !multi.commands.is_empty() {
        return Err(Error::LOADING);
    }
    let writes = multi.commands.iter().any(|(spec, _)| spec.has(WRITE));
    let may_run = ctx.mode != Mode::Replica || ctx.session.readonly && !writes;
    let Some(slot) = slot else {
        return if writes && !may_run { Err(Error::READ_ONLY) } else { Ok(()) };
    };
    if ctx.shared.isolated.load(Ordering::Relaxed) {
        return Err(Error::CLUSTER_DOWN);
    }
    let view = ctx.shared.view.load();
    let is_moving = view.moving.iter().any(|(moving, ..)| *moving == slot);
    // Keys may have migrated since the commands were queued.
    let missing = keys.iter().filter(|key| is_moving && !ctx.db.contains(key)).count();
    let asked = RouteRequest {
        slot,
        shard: shard.index,
        is_primary: ctx.mode == Mode::Primary,
        asking: ctx.session.asking,
        reads_replica: ctx.session.readonly && !writes,
        keys: keys.len(),
        missing,
    };
    route(&view, asked).check()
}
