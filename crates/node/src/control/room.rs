//! A node without room lets others lead.
//!
//! A leader whose disk is full refuses every append for as long as that lasts, while another copy that is in sync could
//! take them. So the node asks for what a node asks for that is about to stop: that others lead
//! ([`Presence::step_aside`]), for this run at most. It goes on following and answers reads. When there is room again it takes the request back, and the
//! partitions that prefer it come back to it. Where nobody else could lead, it leads on.

use std::sync::Arc;
use std::time::Duration;

use moim_base::rest::rest;
use moim_base::task::Shutdown;
use moim_coord::Coordinator;
use moim_journal::Store;

use super::presence::Presence;
use super::view::View;

/// Between two looks at the disk.
const LOOK: Duration = Duration::from_millis(100);
/// The same while nobody else could lead: a node at rest is to rest.
const ALONE: Duration = Duration::from_secs(1);
/// There is room again when it was seen so many times in a row: a disk on the edge would have leaderships go to and fro.
const LOOKS: u32 = 20;

/// What to do after a look at the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    Aside,
    Stay,
    Back,
}

/// Looks at the disk until the node stops, or is about to.
pub(super) async fn watch(
    presence: Arc<Presence>,
    coordinator: Coordinator,
    store: Arc<Store>,
    shutdown: Shutdown,
) {
    let mut roomy = 0;
    loop {
        let alone = coordinator.group().metrics().voters.len() < 2;
        tokio::select! {
            () = shutdown.stopped() => return,
            () = rest(if alone { ALONE } else { LOOK }) => {}
        }
        if presence.has_resigned() {
            return;
        }
        let done = match step(store.is_full(), presence.is_aside(), &mut roomy) {
            Step::Stay => continue,
            // Nobody else is there to lead.
            Step::Aside if View::of(&coordinator).members.len() < 2 => continue,
            Step::Aside => presence.step_aside().await.map(|()| {
                // Before the node has a mark there is nothing to step aside from.
                if presence.is_aside() {
                    tracing::warn!("no room on the disk: others are asked to lead");
                }
            }),
            Step::Back => presence.step_back().await.map(|()| {
                tracing::info!("there is room again: this node may lead");
            }),
        };
        if let Err(error) = done {
            tracing::debug!(%error, "the cluster was not told about the room on the disk; trying again");
        }
    }
}

fn step(full: bool, aside: bool, roomy: &mut u32) -> Step {
    *roomy = if full { 0 } else { roomy.saturating_add(1) };
    match (full, aside) {
        (true, false) => Step::Aside,
        (false, true) if *roomy >= LOOKS => Step::Back,
        (true, true) | (false, true) | (false, false) => Step::Stay,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_lead_at_once_and_it_leads_again_when_there_is_room_for_good() {
        let mut roomy = 0;
        assert_eq!(step(false, false, &mut roomy), Step::Stay);
        assert_eq!(step(true, false, &mut roomy), Step::Aside);
        assert_eq!(step(true, true, &mut roomy), Step::Stay);
        for _ in 1..LOOKS {
            assert_eq!(step(false, true, &mut roomy), Step::Stay);
        }
        assert_eq!(step(true, true, &mut roomy), Step::Stay, "full once more");
        for _ in 1..LOOKS {
            assert_eq!(step(false, true, &mut roomy), Step::Stay);
        }
        assert_eq!(step(false, true, &mut roomy), Step::Back);
        assert_eq!(step(false, false, &mut roomy), Step::Stay);
    }
}
