//! The active expire cycle: a primary deletes expired keys that no command touches, evicts keys after `maxmemory` was
//! lowered, and serves blocked clients.
//!
//! Expiry is a change, and only a primary makes changes: a replica hides expired keys until the deletion is replayed.

use crate::ctx::expire;
use crate::shard::Shard;
use crate::shared::Shared;

/// Keys that expire in one turn.
const KEYS_PER_CYCLE: usize = 200;

/// Runs one cycle on a primary. Returns true if more keys may be expired already.
pub(crate) fn run_cycle(shared: &Shared, shard: &Shard) -> bool {
    let Some(mut turn) = shard.turn(shared) else { return false };
    if turn.state.migrations.has_frozen() {
        // Frozen slots must not change; the freeze lasts for moments.
        turn.finish();
        return false;
    }
    let now = turn.now;
    let mut expired = 0;
    let is_paused = shared.is_paused(true, now);
    while expired < KEYS_PER_CYCLE && !is_paused {
        let Some(key) = turn.state.db.first_expired(now).map(<[u8]>::to_vec) else { break };
        let state = &mut *turn.state;
        state.fx.mark();
        expire(&mut state.db, &mut state.fx, &mut state.events, shared, &key);
        expired += 1;
        turn.maybe_append();
    }
    if !is_paused {
        // A lowered limit takes effect without a write. If no more keys can be evicted, writers get OOM.
        let _ = turn.maybe_evict();
    }
    turn.serve_blocked();
    turn.send_notifications();
    turn.finish();
    expired == KEYS_PER_CYCLE
}
