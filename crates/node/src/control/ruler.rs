//! Who rules: this node's part in electing the controller, and its terms of office.
//!
//! The controller belongs where the coordination group is led: it writes to that group alone, it hears of everything
//! there first, and a failure of both is one failover instead of two. So whoever leads the group takes the key
//! `/moim/controller` over, and gives it back when it leads the group no more. Which of two takes it does not matter for
//! safety: every write of a controller compares the key's create revision.

use std::sync::Arc;
use std::time::Duration;

use moim_base::Clock;
use moim_base::task::Shutdown;
use moim_cluster::{Election, StateRepository};
use moim_coord::Coordinator;
use moim_replica::controller::term::{self as controller_term, ControllerTermParts, Peers};
use moim_replica::controller::{ControllerTuning, Settings};
use moim_replica::keys;
use tokio::sync::watch;

/// A controller that is silent for so long can be replaced by anybody.
const TTL: Duration = Duration::from_secs(2);
/// Before standing again after a term that ended.
const PAUSE: Duration = Duration::from_millis(20);
/// For giving the key back.
const RESIGN: Duration = Duration::from_millis(500);

/// What ruling needs.
pub(super) struct Ruler {
    pub(super) node_id: i32,
    pub(super) coordinator: Coordinator,
    pub(super) repository: Arc<dyn StateRepository>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) peers: Arc<dyn Peers>,
    pub(super) settings: Settings,
}

impl Ruler {
    /// Rules whenever it is this node's turn, until the node stops.
    pub(super) async fn run(self, shutdown: Shutdown) {
        let leads = watch::Sender::new(false);
        let value = format!(r#"{{"node_id":{}}}"#, self.node_id);
        let election = Election::new(
            Arc::clone(&self.repository),
            Arc::clone(&self.clock),
            keys::CONTROLLER,
            value,
            TTL,
        );
        let parts = ControllerTermParts {
            repository: self.repository,
            clock: self.clock,
            peers: self.peers,
            tuning: ControllerTuning::default(),
            settings: self.settings,
        };
        let turns = leads.subscribe();
        tokio::select! {
            () = shutdown.stopped() => {}
            () = follow(&self.coordinator, &leads) => {}
            () = rule(&election, &parts, turns) => {}
        }
    }
}

/// Keeps `leads` true while this node leads the group.
async fn follow(coordinator: &Coordinator, leads: &watch::Sender<bool>) {
    let mut changes = coordinator.leadership();
    let me = coordinator.group().voter();
    while let Some(leadership) = changes.changed().await {
        leads.send_replace(leadership.leader == Some(me));
    }
}

async fn rule(election: &Election, parts: &ControllerTermParts, mut turns: watch::Receiver<bool>) {
    loop {
        // The other end lives as long as this: it does not end before.
        if turns.wait_for(|leads| *leads).await.is_err() {
            return;
        }
        let mut ended = turns.clone();
        let ended = async { drop(ended.wait_for(|leads| !*leads).await) };
        tokio::pin!(ended);
        let leadership = tokio::select! {
            leadership = election.take_over() => leadership,
            () = &mut ended => continue,
        };
        tokio::select! {
            () = controller_term::serve(parts, leadership.token()) => tracing::info!("another controller has taken over"),
            () = leadership.keep() => tracing::warn!("this node cannot be sure to be the controller any more"),
            () = &mut ended => {
                let _ = tokio::time::timeout(RESIGN, leadership.resign()).await;
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
