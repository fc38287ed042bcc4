//! Damage that is found while the node runs, by the scrub or by a read.
//!
//! The mark of a run says which copies of its folder are damaged. When more of them are found, the mark says so too, the
//! driver stops counting on them, and the controller has others lead and takes their places away. Then the driver throws
//! them away and fetches them again. A copy stays on the list until it has everything that is committed: until then it
//! must not be elected, whatever an in-sync set says of it.

use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Scope;
use moim_replica::PartitionId;
use moim_replica::driver::Driver;

use super::presence::Presence;
use crate::journals::{Journals, LOST_DIRECTORY};

/// Between two looks. Damage is as old as the last time its bytes were read, so there is no hurry.
const LOOK: Duration = Duration::from_secs(1);

/// Tells of damage until the node stops.
pub(super) fn watch(
    presence: Arc<Presence>,
    journals: Journals,
    driver: Arc<Driver>,
    scope: &Scope,
) -> impl Future<Output = ()> + Send + 'static {
    let shutdown = scope.shutdown().clone();
    async move {
        let mut told = None;
        loop {
            let found = Some((journals.store.damages(), driver.repairs()));
            if found != told {
                // A vote or an acknowledged entry may be gone: the node must not go on as a voter.
                assert!(!journals.is_raft_damaged(), "Raft log damaged: {LOST_DIRECTORY}");
                let mut damaged = journals.damaged();
                for id in &damaged {
                    driver.on_damaged(*id);
                }
                damaged.extend(driver.repairing());
                damaged.sort();
                damaged.dedup();
                match presence.on_damaged(damaged.iter().map(PartitionId::to_string).collect()).await {
                    Ok(()) => {
                        told = found;
                        driver.on_damage_registered(&damaged);
                    }
                    Err(error) => tracing::debug!(%error, "the cluster was not told of damage; trying again"),
                }
            }
            tokio::select! {
                () = shutdown.stopped() => return,
                () = rest(LOOK) => {}
            }
        }
    }
}
