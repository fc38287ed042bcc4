//! Damage that is found while the node runs, by the scrub or by a read.
//!
//! The mark of a run says which copies of its folder are damaged. When more of them are found, the mark says so too, the
//! driver stops counting on them, and the controller has others lead and takes their places away. They are thrown away
//! and fetched again in the node's next run: within a run a log never gets shorter of its own accord.

use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Scope;
use moim_replica::PartitionId;
use moim_replica::driver::Driver;

use super::presence::Presence;
use crate::journals::Journals;

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
        let mut told = 0;
        loop {
            let found = journals.store.damages();
            if found != told {
                let damaged = journals.damaged();
                for id in &damaged {
                    driver.on_damaged(*id);
                }
                match presence.on_damaged(damaged.iter().map(PartitionId::to_string).collect()).await {
                    Ok(()) => told = found,
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
