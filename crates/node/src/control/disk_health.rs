//! Hand-off of leadership while the disk is impaired or full.
//!
//! A node whose disk hangs or is full leads nothing that another node can lead. Its steps, in this order, need no disk
//! of its own: it reports its disk state to health probes ([`DiskHealth`], probed by [`super::failure_detector`]), so
//! that the controller elects other leaders; it withdraws its member lease, so that no in-sync set waits for it; it
//! steps down as leader of the coordination group; it rejects clients, so that they use the other nodes. It returns
//! without operator action, with a new broker epoch.
//!
//! Each step requires that the other nodes can continue without this node: the lease is withdrawn only while most
//! members are healthy and no partition has its only in-sync replica here, and the coordination leadership only while a
//! quorum of other voters is healthy. Otherwise the node keeps its leaderships and waits: a stall of shared storage
//! costs no node its leaderships.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use bytes::Bytes;
use moim_base::Clock;
use moim_base::rest::rest;
use moim_base::task::{Scope, Shutdown, offload};
use moim_coord::Coordinator;
use moim_journal::Store;
use moim_raft::{BoxFuture, Service, VoterId};

use super::disk_watchdog::{Verdict, Watchdog};
use super::events::EventLog;
use super::failure_detector::FailureDetector;
use super::presence::Presence;
use super::view::{Partitions, View};
use crate::admin::Readiness;

/// Poll interval of the disk state.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Poll interval while no other node could lead, so that an idle node stays idle.
const ALONE_INTERVAL: Duration = Duration::from_secs(1);
/// A poll that is this late is ignored: the whole process was paused.
const LATE_MS: u64 = 500;
/// Timeout of the coordination leadership transfer; after it, heartbeats are withheld.
const STEP_DOWN_TIMEOUT: Duration = Duration::from_millis(300);
/// Timeout of the lease withdrawal: the controller may be this node, and it still leads the group meanwhile.
const WITHDRAW_TIMEOUT: Duration = Duration::from_millis(400);
/// Timeout of the partition leader elections before this node steps down.
const ELECTIONS_TIMEOUT: Duration = Duration::from_millis(300);
/// Poll interval of those elections.
const ELECTIONS_POLL: Duration = Duration::from_millis(25);
/// Format byte of a probe response.
const FORMAT: u8 = 1;
const IMPAIRED: u8 = 1;
const FULL: u8 = 2;
/// Readiness condition: the disk is healthy.
const DISK: &str = "disk";

/// Disk state of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DiskState {
    /// A sync hangs, or did recently.
    pub(crate) impaired: bool,
    /// No free space for appends.
    pub(crate) full: bool,
}

impl DiskState {
    /// True if the disk is neither impaired nor full.
    pub(crate) fn is_healthy(self) -> bool {
        !self.impaired && !self.full
    }

    /// Description of the problem.
    pub(crate) fn problem(self) -> Option<&'static str> {
        match self {
            Self { impaired: true, .. } => Some("its disk is impaired: syncs hang, or did lately"),
            Self { full: true, .. } => Some("its disk is full"),
            Self { .. } => None,
        }
    }

    fn to_bits(self) -> u8 {
        u8::from(self.impaired) * IMPAIRED + u8::from(self.full) * FULL
    }

    fn from_bits(bits: u8) -> Self {
        Self { impaired: bits & IMPAIRED != 0, full: bits & FULL != 0 }
    }

    /// Decodes a probe response; an unknown format counts as healthy.
    pub(super) fn decode(answer: &[u8]) -> Self {
        match answer {
            [FORMAT, bits, ..] => Self::from_bits(*bits),
            _ => Self::default(),
        }
    }
}

/// Disk state of this node: the response to health probes.
#[derive(Default)]
pub(crate) struct DiskHealth {
    bits: AtomicU8,
}

impl DiskHealth {
    pub(crate) fn state(&self) -> DiskState {
        DiskState::from_bits(self.bits.load(Ordering::Relaxed))
    }

    fn set(&self, state: DiskState) -> bool {
        self.bits.swap(state.to_bits(), Ordering::Relaxed) != state.to_bits()
    }
}

impl Service for DiskHealth {
    fn handle(&self, _request: Bytes) -> BoxFuture<'_, Bytes> {
        let answer = Bytes::copy_from_slice(&[FORMAT, self.state().to_bits()]);
        Box::pin(std::future::ready(answer))
    }
}

/// Dependencies of the disk watch.
pub(super) struct DiskParts {
    pub(super) node_id: i32,
    pub(super) health: Arc<DiskHealth>,
    pub(super) presence: Arc<Presence>,
    pub(super) coordinator: Coordinator,
    pub(super) store: Arc<Store>,
    pub(super) failure_detector: Arc<FailureDetector>,
    pub(super) events: Arc<EventLog>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) readiness: Readiness,
    pub(super) scope: Scope,
}

impl DiskParts {
    /// Watches the disk until the node stops or resigns.
    pub(super) async fn watch(self, shutdown: Shutdown) {
        let mut watchdog = Watchdog::new(self.clock.monotonic_ms());
        let probing = Arc::new(AtomicBool::new(false));
        let mut unreliable = 0;
        loop {
            let alone = self.coordinator.group().metrics().voters.len() < 2;
            let (pause, began_ms) =
                (if alone { ALONE_INTERVAL } else { POLL_INTERVAL }, self.clock.monotonic_ms());
            tokio::select! {
                () = shutdown.stopped() => return,
                () = rest(pause) => {}
            }
            if self.presence.has_resigned() {
                return;
            }
            let seen = self.store.sync_report();
            // The process was paused, not the disk: the sync times of this report and the next include the pause.
            if self.clock.monotonic_ms() > began_ms + pause.as_millis() as u64 + LATE_MS {
                unreliable = 2;
            }
            if unreliable > 0 {
                unreliable -= 1;
                continue;
            }
            let verdict = watchdog.on_report(self.clock.monotonic_ms(), &seen, self.store.is_full());
            if verdict.probe && !alone && !probing.swap(true, Ordering::Relaxed) {
                self.probe(&probing);
            }
            self.publish(verdict);
            if self.health.state().is_healthy() {
                self.reinstate();
            } else {
                self.hand_over().await;
            }
        }
    }

    /// Probes the disk on a blocking thread, which may hang with it.
    fn probe(&self, probing: &Arc<AtomicBool>) {
        let (store, probing) = (Arc::clone(&self.store), Arc::clone(probing));
        self.scope.spawn("disk-probe", async move {
            // A probe that fails for lack of space tells nothing new: a full disk is detected elsewhere.
            if let Err(error) = offload(move || store.probe_disk()).await {
                tracing::debug!(%error, "disk probe failed");
            }
            probing.store(false, Ordering::Relaxed);
        });
    }

    fn publish(&self, verdict: Verdict) {
        let state = DiskState { impaired: verdict.impaired, full: verdict.full };
        if !self.health.set(state) {
            return;
        }
        let id = self.node_id;
        let text = match state.problem() {
            Some(problem) => {
                tracing::warn!(
                    impaired = state.impaired,
                    full = state.full,
                    problem,
                    "disk impaired or full"
                );
                self.readiness.set_failing(DISK, problem);
                format!("node {id}: {problem}")
            }
            None => {
                tracing::info!("disk recovered");
                self.readiness.clear_failing(DISK);
                format!("node {id}: its disk works again")
            }
        };
        self.events.on_disk(self.clock.wall_ms(), text);
    }

    /// Hands off the leaderships that other nodes can take over.
    async fn hand_over(&self) {
        let view = View::of(&self.coordinator);
        let healthy: BTreeSet<i32> = self.failure_detector.healthy_members().into_iter().collect();
        let members = view.members.len();
        let others = view.members.iter().filter(|live| healthy.contains(&live.record.node_id)).count();
        let members_go_on = others * 2 > members && others > 0;
        // Clients of the coordination core use another node in any case. The controller moves the leaderships that
        // other in-sync replicas can take; the lease is kept for partitions whose only in-sync replica is here.
        self.coordinator.set_withdrawn(members_go_on);
        if members_go_on && !self.presence.is_withdrawn() && !self.is_last_in_sync() {
            tracing::warn!(others, "member lease withdrawn: disk impaired or full");
            self.presence.withdraw(WITHDRAW_TIMEOUT).await;
        }
        let group = self.coordinator.group();
        let metrics = group.metrics();
        let voter_of = |node: &i32| view.node(*node).map(|record| VoterId(record.voter));
        let voters: BTreeSet<VoterId> = healthy.iter().filter_map(voter_of).collect();
        let healthy_voters: Vec<VoterId> = metrics
            .voters
            .iter()
            .map(|voter| voter.id)
            .filter(|voter| *voter != metrics.voter && voters.contains(voter))
            .collect();
        if healthy_voters.len() * 2 <= metrics.voters.len() {
            // The quorum needs this node: it keeps its vote, and leads if elected.
            group.set_electable(true);
            return;
        }
        if !group.is_leader() {
            group.set_electable(false);
            return;
        }
        let matched =
            |id: &VoterId| metrics.matched.iter().find(|(other, _)| other == id).and_then(|at| at.1);
        if let Some(to) = healthy_voters.into_iter().max_by_key(matched) {
            // The controller runs here, and this node observes its elections while it leads the group. Under a new
            // leader it would first have to sync the new term, which a hung disk prevents.
            let _ = tokio::time::timeout(ELECTIONS_TIMEOUT, self.wait_for_elections()).await;
            tracing::warn!(%to, "coordination leadership handed off: disk impaired or full");
            group.step_down(to, STEP_DOWN_TIMEOUT).await;
        }
    }

    /// Waits until this node leads no partition that has another in-sync replica.
    async fn wait_for_elections(&self) {
        while Partitions::of(&self.coordinator).movable(self.node_id) > 0 {
            tokio::time::sleep(ELECTIONS_POLL).await;
        }
    }

    /// True if this node is the only in-sync replica of a partition.
    fn is_last_in_sync(&self) -> bool {
        Partitions::of(&self.coordinator).is_last_in_sync(self.node_id)
    }

    fn reinstate(&self) {
        if self.presence.is_withdrawn() {
            tracing::info!("member lease reinstated: disk recovered");
            self.presence.reinstate();
        }
        self.coordinator.set_withdrawn(false);
        self.coordinator.group().set_electable(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_state_survives_the_probe_encoding() {
        for state in [
            DiskState::default(),
            DiskState { impaired: true, full: false },
            DiskState { impaired: false, full: true },
            DiskState { impaired: true, full: true },
        ] {
            let health = DiskHealth::default();
            assert_eq!(health.set(state), !state.is_healthy());
            let answer = futures_util::FutureExt::now_or_never(health.handle(Bytes::new())).unwrap();
            assert_eq!(DiskState::decode(&answer), state);
        }
        assert!(DiskState::decode(b"").is_healthy());
        assert!(DiskState::decode(&[9, 255]).is_healthy(), "unknown format");
    }
}
