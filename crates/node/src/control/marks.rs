//! How far this node's folder is, recorded in the coordination core: a folder that is found to be behind its mark was put
//! back from an older copy.
//!
//! The mark is the last Raft entry that is committed and on stable storage here. Everything a node writes goes through one
//! commit log, and marks are Raft entries themselves, so a copy of the folder from before a mark lacks entries that a
//! later mark names, whatever else it lacks. A mark is written while the folder changes, and once more when it has stopped
//! changing; an idle cluster writes none.
//!
//! Invariant: what a mark names survives a crash of this node. It must never name what was only received.

use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Shutdown;
use moim_cluster::{StateRepository, Txn};
use moim_coord::Coordinator;
use moim_journal::Store;

use super::records::{self, Mark};

/// Between two marks.
const EVERY: Duration = Duration::from_secs(2);
/// Between two looks for other nodes, while there are none.
const ALONE: Duration = Duration::from_secs(10);

/// Records how far the folder is, until the node stops.
pub(super) async fn run(
    node_id: i32,
    coordinator: Coordinator,
    repository: Arc<dyn StateRepository>,
    store: Arc<Store>,
    shutdown: Shutdown,
) {
    let group = coordinator.group();
    let mut seen = None;
    let (mut is_last_due, mut pause) = (false, EVERY);
    loop {
        tokio::select! {
            () = shutdown.stopped() => return,
            () = rest(pause) => {}
        }
        let metrics = group.metrics();
        // A node without others has only its own folder to remember by.
        let alone = metrics.voters.len() + metrics.learners.len() < 2;
        pause = if alone { ALONE } else { EVERY };
        let Some(index) = group.settled_index().filter(|_| !alone) else { continue };
        // Records apart from Raft's entries: marks must not call for marks.
        let written = store.stats().records.wrapping_sub(index);
        let changed = seen != Some(written);
        if !changed && !is_last_due {
            continue;
        }
        let mark = Mark { voter: metrics.voter.0, index };
        let txn = Txn::new().put(records::mark_key(node_id), mark.to_bytes());
        match repository.txn(txn).await {
            Ok(_) => (seen, is_last_due) = (Some(written), changed),
            Err(error) => tracing::debug!(%error, "the mark of this folder was not written; trying again"),
        }
    }
}
