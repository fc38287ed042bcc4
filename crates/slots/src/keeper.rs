//! Keeps a shard: brings its keyspace up to its journal, follows its role, expires keys, tries again what the log did not
//! take.
//!
//! A primary's keyspace runs ahead of what is committed; a replica's follows it. A primary that lost its lead with
//! changes that were not committed throws its memory away and reads the journal anew.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::offload;

use crate::ctx::expire;
use crate::effects;
use crate::log;
use crate::session::Session;
use crate::shard::{ReplayError, Role, Shard};
use crate::shared::Shared;
use crate::snapshot;

/// Between looks while keys expire, or the role is not settled.
const TICK: Duration = Duration::from_millis(50);
/// Between tries to append what a busy log did not take.
const RETRY: Duration = Duration::from_millis(2);
/// Between looks at a shard in which nothing passes by itself.
const REST: Duration = Duration::from_millis(500);
/// What is read of a journal at a time.
const READ_BYTES: usize = 1 << 20;
/// Keys that expire in one turn.
const EXPIRE_AT_ONCE: usize = 200;

/// Between two looks at a snapshot that no client reads.
const SCRUB: Duration = Duration::from_secs(3_600);

/// Runs until the loop ends.
pub(crate) async fn run(shared: Arc<Shared>, shard: Arc<Shard>) {
    let mut scrubbed = tokio::time::Instant::now();
    loop {
        if let Err(error) = follow_role(&shared, &shard).await {
            tracing::error!(shard = shard.index, %error, "a shard cannot read its journal");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        while shard.role() == Role::Primary && tick(&shared, &shard) {
            tokio::task::yield_now().await;
        }
        if let Err(error) = maybe_snapshot(&shard).await {
            tracing::error!(shard = shard.index, %error, "a snapshot could not be written");
        }
        if scrubbed.elapsed() > SCRUB && shard.role() != Role::Loading {
            scrubbed = tokio::time::Instant::now();
            scrub_snapshot(&shard);
        }
        let pause = pause(&shared, &shard);
        tokio::select! {
            biased;
            () = shard.news.notified() => {}
            () = rest(pause) => {}
            () = shard.gone.stopped() => return,
        }
        shard.at_rest.store(false, Ordering::Relaxed);
    }
}

/// How long until the next look. At rest: nothing is to do before there is news, and a turn that sets a time to live gives
/// some.
fn pause(shared: &Shared, shard: &Shard) -> Duration {
    let Some(state) = shard.try_lock() else { return TICK };
    if !state.fx.is_settled() {
        return RETRY;
    }
    let is_settled = shard.role() == Role::Primary && shard.log.leads() == Some(state.epoch);
    let is_still = state.db.expiring() == 0 && state.fx.is_settled() && state.events.blocked == 0;
    let limit = shared.settings.max_memory.load(Ordering::Relaxed);
    let has_room = limit == 0 || state.has_room(shared, limit);
    let at_rest = is_settled && is_still && has_room;
    // Under the lock: a turn that comes next sees it.
    shard.at_rest.store(at_rest, Ordering::Relaxed);
    if at_rest { REST } else { TICK }
}

/// A snapshot is worth writing when the journal is larger than this, and than so many times the keyspace.
const SNAPSHOT_BYTES: u64 = 64 << 20;
const SNAPSHOT_TIMES: u64 = 2;
/// The same while slots come or leave. Those that leave make the keyspace smaller step by step: every step would be worth a
/// snapshot of what leaves with the next.
const SNAPSHOT_TIMES_MOVING: u64 = 8;
/// But no journal grows by more than this for a move: one may wait for its target for days.
const MOVING_EXCESS: u64 = 4 << 30;

/// Writes a snapshot when the journal has grown enough; the shard goes on meanwhile.
async fn maybe_snapshot(shard: &Arc<Shard>) -> std::io::Result<()> {
    let size = shard.log.journal().size_bytes();
    if shard.role() == Role::Loading || size < SNAPSHOT_BYTES {
        return Ok(());
    }
    // A script may have the shard for long.
    let Some((memory, applied)) = shard.try_lock().map(|state| (state.db.memory() as u64, state.applied))
    else {
        return Ok(());
    };
    let is_new = applied > shard.log.journal().start();
    let is_moving = shard.is_moving.load(Ordering::Relaxed);
    let has_room = size < (SNAPSHOT_TIMES * memory).saturating_add(MOVING_EXCESS);
    let times = if is_moving && has_room { SNAPSHOT_TIMES_MOVING } else { SNAPSHOT_TIMES };
    if !is_new
        || size < times * memory.max(SNAPSHOT_BYTES / SNAPSHOT_TIMES)
        || shard.is_snapshotting.swap(true, Ordering::AcqRel)
    {
        return Ok(());
    }
    let whose = Arc::clone(shard);
    // Nobody waits for it: replay, expiry and failover go on.
    tokio::task::spawn_blocking(move || {
        let taken = snapshot::take(&whose);
        whose.is_snapshotting.store(false, Ordering::Release);
        match taken {
            Ok(Some(end)) => tracing::info!(shard = whose.index, end, "wrote a snapshot"),
            Ok(None) => {}
            Err(error) => tracing::error!(shard = whose.index, %error, "a snapshot could not be written"),
        }
    });
    Ok(())
}

/// Has the newest snapshot read again; the shard goes on meanwhile.
fn scrub_snapshot(shard: &Arc<Shard>) {
    if shard.is_snapshotting.swap(true, Ordering::AcqRel) {
        return;
    }
    let whose = Arc::clone(shard);
    tokio::task::spawn_blocking(move || {
        let scrubbed = snapshot::scrub(&whose);
        whose.is_snapshotting.store(false, Ordering::Release);
        if let Err(error) = scrubbed {
            tracing::error!(shard = whose.index, %error, "snapshot scrub failed");
        }
    });
}

/// Brings the shard to the role that the log says.
async fn follow_role(shared: &Arc<Shared>, shard: &Arc<Shard>) -> std::io::Result<()> {
    if shard.is_disabled() {
        return Ok(());
    }
    let leads = shard.log.leads();
    let (epoch, applied, is_dirty) = {
        // A script may have the shard for long: this loop has others to serve.
        let Some(state) = shard.try_lock() else { return Ok(()) };
        (state.epoch, state.applied, !state.fx.is_settled())
    };
    match leads {
        Some(lead) if lead == epoch && shard.role() == Role::Primary => Ok(()),
        Some(lead) => {
            if epoch != -1 && epoch != lead {
                // Another node may have led between the two: answers that were made before may be old by now.
                shard.void_answers();
                shard.lock_on_loop().await.epoch = -1;
            }
            let is_ahead = {
                let state = shard.lock_on_loop().await;
                !state.fx.is_settled() || state.applied > shard.log.journal().end()
            };
            if is_ahead {
                // Memory shows what a former lead did and the journal does not have.
                step_down(shard, -1).await;
            }
            // Everything up to the end is ours to lead; what is not committed yet will be, or the lead ends.
            let until = shard.log.journal().end();
            catch_up(shared, shard, until).await?;
            let mut state = shard.lock_on_loop().await;
            let is_current = state.applied == shard.log.journal().end() && shard.log.leads() == Some(lead);
            if is_current && !shard.has_viewed(lead) {
                shared.look.notify_one();
            } else if is_current && !state.waits_for_time(shared) {
                state.epoch = lead;
                state.fx.clear();
                // What the former primary began and did not end never happened.
                state.groups.discard();
                // What came from the leader before may not be committed yet: nothing is said about it before.
                state.events.hazards.reset();
                state.events.hazards.batch = state.applied;
                state.events.hazards.mark_all();
                shard.set_role(Role::Primary);
                tracing::info!(shard = shard.index, epoch = lead, keys = state.db.len(), "leads a shard");
            }
            Ok(())
        }
        None => {
            let committed = shard.committed();
            // Dirty: the log refused what a turn did, so memory shows what no journal has.
            if epoch != -1 || applied > committed || is_dirty {
                step_down(shard, committed).await;
            }
            catch_up(shared, shard, committed).await?;
            if shard.role() != Role::Replica && shard.log.follows() {
                shard.set_role(Role::Replica);
            }
            Ok(())
        }
    }
}

/// The lead is over: what was not committed is forgotten.
async fn step_down(shard: &Arc<Shard>, committed: i64) {
    shard.set_role(Role::Loading);
    shard.void_answers();
    let mut state = shard.lock_on_loop().await;
    if state.applied > committed || !state.fx.is_settled() {
        tracing::info!(shard = shard.index, applied = state.applied, committed, "a shard is read anew");
        state.forget();
    }
    state.epoch = -1;
    state.fx.clear();
    // Another primary may change what this one's clients watch, and be followed by this one again.
    state.events.invalidate_watches(|_| true);
    state.events.hazards.reset();
    state.events.ready.clear();
    state.release_blocked();
}

/// Replays the journal up to `until`.
async fn catch_up(shared: &Arc<Shared>, shard: &Arc<Shard>, until: i64) -> std::io::Result<()> {
    read_snapshot(shard).await?;
    loop {
        let from = shard.lock_on_loop().await.applied;
        if from >= until {
            return Ok(());
        }
        let (shared, shard) = (Arc::clone(shared), Arc::clone(shard));
        offload(move || replay_some(&shared, &shard, from, until)).await?;
    }
}

/// Takes in the newest snapshot, once.
async fn read_snapshot(shard: &Arc<Shard>) -> std::io::Result<()> {
    if shard.lock_on_loop().await.is_read {
        return Ok(());
    }
    let whose = Arc::clone(shard);
    let loaded = offload(move || snapshot::load(&whose)).await?;
    let mut state = shard.lock_on_loop().await;
    if let Some(loaded) = loaded.filter(|loaded| loaded.end > state.applied) {
        tracing::info!(shard = shard.index, end = loaded.end, keys = loaded.db.len(), "read a snapshot");
        // Only what is committed becomes a snapshot; otherwise it would be taken for a lead's leftovers, and read again.
        shard.on_committed(loaded.end);
        state.take_in(loaded);
    }
    state.is_read = true;
    Ok(())
}

fn replay_some(shared: &Shared, shard: &Shard, from: i64, until: i64) -> std::io::Result<()> {
    let frames = log::read(shard.log.journal(), from, until, READ_BYTES).map_err(std::io::Error::other)?;
    if frames.is_empty() {
        return Err(std::io::Error::other(format!(
            "nothing to read at {from} of a journal that ends at {until}"
        )));
    }
    let mut nobody = Session::nobody();
    for (offset, payload) in frames {
        let frame = effects::parse(&payload).map_err(ReplayError::from);
        let mut state = shard.lock();
        if state.applied != offset {
            // Somebody stepped down meanwhile; the next look begins anew.
            return Ok(());
        }
        if let Err(error) = frame.and_then(|frame| state.replay_frame(shared, &mut nobody, frame)) {
            drop(state);
            shard.disable(offset, &error);
            return Err(std::io::Error::other(error));
        }
        state.applied = offset + 1;
        shard.log.journal().set_wanted_from(offset + 1);
    }
    Ok(())
}

/// What a primary does now and then. Answers whether there is more to do at once.
fn tick(shared: &Shared, shard: &Shard) -> bool {
    let Some(mut turn) = shard.turn(shared) else { return false };
    if turn.state.moves.has_frozen() {
        // Slots that leave do not change any more; this lasts for moments.
        turn.finish();
        return false;
    }
    let now = turn.now;
    let mut expired = 0;
    let is_paused = shared.is_paused(true, now);
    while expired < EXPIRE_AT_ONCE && !is_paused {
        let Some(key) = turn.state.db.first_expired(now).map(<[u8]>::to_vec) else { break };
        let state = &mut *turn.state;
        state.fx.mark();
        expire(&mut state.db, &mut state.fx, &mut state.events, shared, &key);
        expired += 1;
        turn.maybe_append();
    }
    if !is_paused {
        // A limit that was lowered takes effect without a write. That nothing more can go is told to writers.
        let _ = turn.make_room();
    }
    turn.serve_blocked();
    turn.send_notifications();
    turn.finish();
    expired == EXPIRE_AT_ONCE
}
