//! Durability marks, for rollback detection: the durable Raft index of this node's data directory, recorded in the
//! coordination core. A data directory whose Raft log ends before its mark was restored from an older copy.
//!
//! The mark is the index of the last Raft entry that is committed and on stable storage here. All writes of a node go
//! through one commit log, and marks are Raft entries themselves, so a copy of the data directory from before a mark
//! lacks entries that a later mark names, whatever else it lacks. A mark is written while the data directory changes,
//! and once more after the last change; an idle cluster writes none.
//!
//! Invariant: an entry that a mark names survives a crash of this node. A mark never names an entry that was only
//! received and not synced.

use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Shutdown;
use moim_coord::Coordinator;
use moim_journal::Store;
use moim_state::{StateRepository, Txn};

use super::records::{self, Mark};

/// Interval of the marks.
const MARK_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of the check for other members, while there are none.
const ALONE_INTERVAL: Duration = Duration::from_secs(10);

/// Records the durable Raft index until the node stops.
pub(super) async fn run(
    node_id: i32,
    coordinator: Coordinator,
    repository: Arc<dyn StateRepository>,
    store: Arc<Store>,
    shutdown: Shutdown,
) {
    let group = coordinator.group();
    let mut seen = None;
    let (mut is_last_due, mut pause) = (false, MARK_INTERVAL);
    loop {
        tokio::select! {
            () = shutdown.stopped() => return,
            () = rest(pause) => {}
        }
        let metrics = group.metrics();
        // A single-node cluster has no other data directory to record the mark in.
        let alone = metrics.voters.len() + metrics.learners.len() < 2;
        pause = if alone { ALONE_INTERVAL } else { MARK_INTERVAL };
        let Some(index) = group.settled_index().filter(|_| !alone) else { continue };
        // Commit log records other than Raft entries: a mark is a Raft entry and must not cause another mark.
        let written = store.stats().records.wrapping_sub(index);
        let changed = seen != Some(written);
        if !changed && !is_last_due {
            continue;
        }
        let mark = Mark { voter: metrics.voter.0, index };
        let txn = Txn::new().put(records::mark_key(node_id), mark.to_bytes());
        match repository.txn(txn).await {
            Ok(_) => (seen, is_last_due) = (Some(written), changed),
            Err(error) => tracing::debug!(%error, "durability mark write failed; retrying"),
        }
    }
}
