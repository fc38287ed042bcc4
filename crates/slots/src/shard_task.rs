//! The task of one shard: replays its journal, follows its role, writes and scrubs snapshots, retries appends that a
//! busy log refused, and runs the active expire cycle (`active_expiry.rs`).
//!
//! The keyspace of a primary is ahead of the high watermark; that of a replica follows it. A primary that loses
//! leadership with uncommitted changes discards its keyspace and replays the journal.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::offload;

use crate::active_expiry;
use crate::effects;
use crate::log;
use crate::session::Session;
use crate::shard::{ReplayError, Role, Shard};
use crate::shared::Shared;
use crate::snapshot;

/// The interval while keys have an expiry, or the role is changing.
const ACTIVE_INTERVAL: Duration = Duration::from_millis(50);
/// The interval between retries of an append that a busy log refused.
const APPEND_RETRY: Duration = Duration::from_millis(2);
/// The interval for an idle shard: no key expires and the role is stable.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);
/// Bytes of the journal that are replayed at a time.
const READ_BYTES: usize = 1 << 20;

/// The interval between two scrubs of the newest snapshot, which no client reads.
const SCRUB_INTERVAL: Duration = Duration::from_secs(3_600);

/// Runs until the shard leaves this node.
pub(crate) async fn run(shared: Arc<Shared>, shard: Arc<Shard>) {
    let mut scrubbed = tokio::time::Instant::now();
    loop {
        if let Err(error) = follow_role(&shared, &shard).await {
            tracing::error!(shard = shard.index, %error, "shard replay failed; retried in 1 s");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        while shard.role() == Role::Primary && active_expiry::run_cycle(&shared, &shard) {
            tokio::task::yield_now().await;
        }
        if let Err(error) = maybe_snapshot(&shard).await {
            tracing::error!(shard = shard.index, %error, "snapshot write failed");
        }
        if scrubbed.elapsed() > SCRUB_INTERVAL && shard.role() != Role::Loading {
            scrubbed = tokio::time::Instant::now();
            scrub_snapshot(&shard);
        }
        let pause = next_pause(&shared, &shard);
        tokio::select! {
            biased;
            () = shard.task_wakeup.notified() => {}
            () = rest(pause) => {}
            () = shard.removed.stopped() => return,
        }
        shard.is_task_idle.store(false, Ordering::Relaxed);
    }
}

/// The pause before the next round. Idle: there is nothing to do until the task is notified, and a turn that sets an
/// expiry notifies it.
fn next_pause(shared: &Shared, shard: &Shard) -> Duration {
    let Some(state) = shard.try_lock() else { return ACTIVE_INTERVAL };
    if !state.fx.is_settled() {
        return APPEND_RETRY;
    }
    let is_settled = shard.role() == Role::Primary && shard.log.leader_epoch() == Some(state.epoch);
    let is_quiet = state.db.expiring() == 0 && state.fx.is_settled() && state.events.blocked == 0;
    let limit = shared.settings.max_memory.load(Ordering::Relaxed);
    let has_room = limit == 0 || state.has_room(shared, limit);
    let is_idle = is_settled && is_quiet && has_room;
    // Under the lock: the next turn sees it.
    shard.is_task_idle.store(is_idle, Ordering::Relaxed);
    if is_idle { IDLE_INTERVAL } else { ACTIVE_INTERVAL }
}

/// A snapshot is written if the journal is larger than this, and than this many times the keyspace.
const SNAPSHOT_BYTES: u64 = 64 << 20;
const SNAPSHOT_RATIO: u64 = 2;
/// The same during a slot migration. At the source the keyspace shrinks step by step: every step would trigger a
/// snapshot of keys that leave with the next.
const SNAPSHOT_RATIO_MIGRATING: u64 = 8;
/// The limit of that: a journal grows by no more than this during a migration, which may wait for its target for days.
const MAX_MIGRATION_EXCESS: u64 = 4 << 30;

/// Writes a snapshot in the background if the journal has grown enough.
async fn maybe_snapshot(shard: &Arc<Shard>) -> std::io::Result<()> {
    let size = shard.log.journal().size_bytes();
    if shard.role() == Role::Loading || size < SNAPSHOT_BYTES {
        return Ok(());
    }
    // A script may hold the lock for long.
    let Some((memory, applied)) = shard.try_lock().map(|state| (state.db.memory() as u64, state.applied))
    else {
        return Ok(());
    };
    let is_new = applied > shard.log.journal().start();
    let is_migrating = shard.is_migrating.load(Ordering::Relaxed);
    let has_room = size < (SNAPSHOT_RATIO * memory).saturating_add(MAX_MIGRATION_EXCESS);
    let ratio = if is_migrating && has_room { SNAPSHOT_RATIO_MIGRATING } else { SNAPSHOT_RATIO };
    if !is_new
        || size < ratio * memory.max(SNAPSHOT_BYTES / SNAPSHOT_RATIO)
        || shard.is_snapshotting.swap(true, Ordering::AcqRel)
    {
        return Ok(());
    }
    let snapshotted = Arc::clone(shard);
    // In the background: replay, expiry and failover continue.
    tokio::task::spawn_blocking(move || {
        let taken = snapshot::write_snapshot(&snapshotted);
        snapshotted.is_snapshotting.store(false, Ordering::Release);
        match taken {
            Ok(Some(end)) => tracing::info!(shard = snapshotted.index, end, "snapshot written"),
            Ok(None) => {}
            Err(error) => tracing::error!(shard = snapshotted.index, %error, "snapshot write failed"),
        }
    });
    Ok(())
}

/// Scrubs the newest snapshot in the background.
fn scrub_snapshot(shard: &Arc<Shard>) {
    if shard.is_snapshotting.swap(true, Ordering::AcqRel) {
        return;
    }
    let snapshotted = Arc::clone(shard);
    tokio::task::spawn_blocking(move || {
        let scrubbed = snapshot::scrub(&snapshotted);
        snapshotted.is_snapshotting.store(false, Ordering::Release);
        if let Err(error) = scrubbed {
            tracing::error!(shard = snapshotted.index, %error, "snapshot scrub failed");
        }
    });
}

/// Brings the shard to the role that the log reports.
async fn follow_role(shared: &Arc<Shared>, shard: &Arc<Shard>) -> std::io::Result<()> {
    if shard.is_disabled() {
        return Ok(());
    }
    let leader_epoch = shard.log.leader_epoch();
    let (epoch, applied, is_dirty) = {
        // A script may hold the lock for long: this event loop has other clients to serve.
        let Some(state) = shard.try_lock() else { return Ok(()) };
        (state.epoch, state.applied, !state.fx.is_settled())
    };
    match leader_epoch {
        Some(leader_epoch) if leader_epoch == epoch && shard.role() == Role::Primary => Ok(()),
        Some(leader_epoch) => {
            if epoch != -1 && epoch != leader_epoch {
                // Another node may have led between the two epochs: replies that are still pending may be stale.
                shard.void_pending_replies();
                shard.lock_on_loop().await.epoch = -1;
            }
            let is_ahead = {
                let state = shard.lock_on_loop().await;
                !state.fx.is_settled() || state.applied > shard.log.journal().end()
            };
            if is_ahead {
                // The keyspace contains effects of an earlier epoch that the journal does not have.
                step_down(shard, -1).await;
            }
            // Everything up to the journal end is part of this epoch; it is committed eventually, or leadership ends.
            let until = shard.log.journal().end();
            catch_up(shared, shard, until).await?;
            let mut state = shard.lock_on_loop().await;
            let is_current =
                state.applied == shard.log.journal().end() && shard.log.leader_epoch() == Some(leader_epoch);
            if is_current && !shard.has_read_slot_map(leader_epoch) {
                shared.refresh_wakeup.notify_one();
            } else if is_current && !state.waits_for_clock_majority(shared) {
                state.epoch = leader_epoch;
                state.fx.clear();
                // A group that the previous primary did not complete never happened.
                state.groups.discard();
                // Replayed effects may not be committed yet: no reply may show them before they are.
                state.events.hazards.reset();
                state.events.hazards.batch = state.applied;
                state.events.hazards.mark_all();
                shard.set_role(Role::Primary);
                tracing::info!(
                    shard = shard.index,
                    epoch = leader_epoch,
                    keys = state.db.len(),
                    "became primary of shard"
                );
            }
            Ok(())
        }
        None => {
            let committed = shard.committed();
            // Dirty: the log refused the effects of a turn, so the keyspace shows changes that no journal has.
            if epoch != -1 || applied > committed || is_dirty {
                step_down(shard, committed).await;
            }
            catch_up(shared, shard, committed).await?;
            if shard.role() != Role::Replica && shard.log.is_follower() {
                shard.set_role(Role::Replica);
            }
            Ok(())
        }
    }
}

/// Leadership has ended: uncommitted changes are discarded.
async fn step_down(shard: &Arc<Shard>, committed: i64) {
    shard.set_role(Role::Loading);
    shard.void_pending_replies();
    let mut state = shard.lock_on_loop().await;
    if state.applied > committed || !state.fx.is_settled() {
        tracing::info!(
            shard = shard.index,
            applied = state.applied,
            committed,
            "keyspace discarded; journal replayed"
        );
        state.reset();
    }
    state.epoch = -1;
    state.fx.clear();
    // Another primary may change watched keys, and this node may become primary again later.
    state.events.invalidate_watches(|_| true);
    state.events.hazards.reset();
    state.events.ready.clear();
    state.release_blocked();
}

/// Replays the journal up to `until`.
async fn catch_up(shared: &Arc<Shared>, shard: &Arc<Shard>, until: i64) -> std::io::Result<()> {
    load_snapshot(shard).await?;
    loop {
        let from = shard.lock_on_loop().await.applied;
        if from >= until {
            return Ok(());
        }
        let (shared, shard) = (Arc::clone(shared), Arc::clone(shard));
        offload(move || replay_frames(&shared, &shard, from, until)).await?;
    }
}

/// Loads the newest snapshot, once.
async fn load_snapshot(shard: &Arc<Shard>) -> std::io::Result<()> {
    if shard.lock_on_loop().await.has_loaded_snapshot {
        return Ok(());
    }
    let snapshotted = Arc::clone(shard);
    let loaded = offload(move || snapshot::load(&snapshotted)).await?;
    let mut state = shard.lock_on_loop().await;
    if let Some(loaded) = loaded.filter(|loaded| loaded.end > state.applied) {
        tracing::info!(shard = shard.index, end = loaded.end, keys = loaded.db.len(), "snapshot loaded");
        // A snapshot is committed; otherwise it would count as uncommitted changes of a former primary, and be loaded
        // again.
        shard.on_committed(loaded.end);
        state.install_snapshot(loaded);
    }
    state.has_loaded_snapshot = true;
    Ok(())
}

fn replay_frames(shared: &Shared, shard: &Shard, from: i64, until: i64) -> std::io::Result<()> {
    let frames = log::read(shard.log.journal(), from, until, READ_BYTES).map_err(std::io::Error::other)?;
    if frames.is_empty() {
        return Err(std::io::Error::other(format!(
            "no frame at offset {from} of a journal that ends at {until}"
        )));
    }
    let mut session = Session::internal();
    for (offset, payload) in frames {
        let frame = effects::parse(&payload).map_err(ReplayError::from);
        let mut state = shard.lock();
        if state.applied != offset {
            // The shard stepped down meanwhile; the next round starts again.
            return Ok(());
        }
        if let Err(error) = frame.and_then(|frame| state.replay_frame(shared, &mut session, frame)) {
            drop(state);
            shard.disable(offset, &error);
            return Err(std::io::Error::other(error));
        }
        state.applied = offset + 1;
        shard.log.journal().set_cached_from(offset + 1);
    }
    Ok(())
}
