//! Damaged replicas that the scrub or a read finds at runtime.
//!
//! The member record lists the damaged replicas of a node. Newly found ones are added to the list, the replica driver
//! disables them, and the controller elects other leaders and removes them from the in-sync set. Then the driver
//! deletes and refetches them. A replica stays on the list until it holds every committed record: until then it must
//! not be elected, whatever an in-sync set says.

use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Scope;
use moim_replica::PartitionId;
use moim_replica::driver::Driver;

use super::presence::Presence;
use crate::journals::{Journals, LOST_DIRECTORY};

/// Poll interval. Damage may be older than its discovery by any time, so a second more does not matter.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Reports damaged replicas until the node stops.
pub(super) fn watch(
    presence: Arc<Presence>,
    journals: Journals,
    driver: Arc<Driver>,
    scope: &Scope,
) -> impl Future<Output = ()> + Send + 'static {
    let shutdown = scope.shutdown().clone();
    async move {
        let mut reported = None;
        loop {
            let found = Some((journals.store.damages(), driver.repairs()));
            if found != reported {
                // A vote or an acknowledged entry may be lost: the node must not remain a voter.
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
                        reported = found;
                        driver.on_damage_registered(&damaged);
                    }
                    Err(error) => tracing::debug!(%error, "damaged replicas not reported; retrying"),
                }
            }
            tokio::select! {
                () = shutdown.stopped() => return,
                () = rest(POLL_INTERVAL) => {}
            }
        }
    }
}
