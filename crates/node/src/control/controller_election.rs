//! Controller election: the leader of the coordination group is the controller.
//!
//! The controller writes only to the coordination group and receives its changes first on the leader, and one failure
//! of that node is one failover instead of two. So the group leader takes over the key `/moim/controller`, and resigns
//! the key when it loses the group leadership. Safety does not depend on this: every write of a controller compares the
//! key's create revision, so a fenced controller changes nothing.

use std::sync::Arc;
use std::time::Duration;

use moim_base::Clock;
use moim_base::task::Shutdown;
use moim_coord::Coordinator;
use moim_replica::controller::term::{self as controller_term, ControllerTermParts, Peers};
use moim_replica::controller::{ControllerTuning, Settings};
use moim_replica::keys;
use moim_state::{Election, StateRepository};
use tokio::sync::watch;

/// Lease TTL of the controller key: after it, any node can become the controller.
const CONTROLLER_TTL: Duration = Duration::from_secs(2);
/// Pause after the end of a controller term, before the next candidacy.
const TERM_PAUSE: Duration = Duration::from_millis(20);
/// Timeout of the resignation of the controller key.
const RESIGN_TIMEOUT: Duration = Duration::from_millis(500);

/// Candidacy of this node and its controller terms.
pub(super) struct ControllerElection {
    pub(super) node_id: i32,
    pub(super) coordinator: Coordinator,
    pub(super) repository: Arc<dyn StateRepository>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) peers: Arc<dyn Peers>,
    pub(super) settings: Settings,
}

impl ControllerElection {
    /// Serves as controller whenever this node leads the coordination group, until the node stops.
    pub(super) async fn run(self, shutdown: Shutdown) {
        let leads = watch::Sender::new(false);
        let value = format!(r#"{{"node_id":{}}}"#, self.node_id);
        let election = Election::new(
            Arc::clone(&self.repository),
            Arc::clone(&self.clock),
            keys::CONTROLLER,
            value,
            CONTROLLER_TTL,
        );
        let parts = ControllerTermParts {
            repository: self.repository,
            clock: self.clock,
            peers: self.peers,
            tuning: ControllerTuning::default(),
            settings: self.settings,
        };
        let group_leadership = leads.subscribe();
        tokio::select! {
            () = shutdown.stopped() => {}
            () = follow_group_leadership(&self.coordinator, &leads) => {}
            () = serve_terms(&election, &parts, group_leadership) => {}
        }
    }
}

/// Sets `leads` to whether this node leads the coordination group.
async fn follow_group_leadership(coordinator: &Coordinator, leads: &watch::Sender<bool>) {
    let mut changes = coordinator.leadership();
    let me = coordinator.group().voter();
    while let Some(leadership) = changes.changed().await {
        leads.send_replace(leadership.leader == Some(me));
    }
}

/// Serves one controller term after the other while this node leads the coordination group.
async fn serve_terms(
    election: &Election,
    parts: &ControllerTermParts,
    mut group_leadership: watch::Receiver<bool>,
) {
    loop {
        // The sender outlives this loop.
        if group_leadership.wait_for(|leads| *leads).await.is_err() {
            return;
        }
        let mut ended = group_leadership.clone();
        let ended = async { drop(ended.wait_for(|leads| !*leads).await) };
        tokio::pin!(ended);
        let leadership = tokio::select! {
            leadership = election.take_over() => leadership,
            () = &mut ended => continue,
        };
        tokio::select! {
            () = controller_term::serve(parts, leadership.token()) => {
                tracing::info!("controller term ended: another controller was elected");
            }
            () = leadership.keep() => tracing::warn!("controller term ended: lease lost or not renewed in time"),
            () = &mut ended => {
                let _ = tokio::time::timeout(RESIGN_TIMEOUT, leadership.resign()).await;
            }
        }
        tokio::time::sleep(TERM_PAUSE).await;
    }
}
