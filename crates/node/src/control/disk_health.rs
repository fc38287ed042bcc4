//! No authority without a working disk.
//!
//! A node whose disk hangs or is full leads nothing that another node could lead. What it does, in this order, needs no
//! disk of its own: it tells the nodes that ask ([`DiskHealth`], asked by [`super::pulse`]), so that the controller elects
//! others; it gives its presence lease up, so that no in-sync set waits for it; if it leads the coordination group it
//! steps down; it refuses clients, so that they turn to the others. It comes back by itself as a new run.
//!
//! All of it only while others can go on without it: the lease while most members are well and no partition has its only
//! in-sync replica here, the coordination group while a quorum of other voters is well. Otherwise it keeps its authority
//! and waits: a stall of storage that all nodes share costs no node its leaderships.

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
use super::presence::Presence;
use super::pulse::Pulse;
use super::view::{Partitions, View};
use crate::admin::Readiness;

/// Between two looks at the disk.
const LOOK: Duration = Duration::from_millis(100);
/// The same while no other node could lead: a node at rest is to rest.
const ALONE: Duration = Duration::from_secs(1);
/// A look that comes so late was held up with the whole process.
const LATE_MS: u64 = 500;
/// How long a voter may take to take the coordination group over before heartbeats are withheld.
const STEP_DOWN: Duration = Duration::from_millis(300);
/// How long the lease may take to be given up: the controller may be this node, and the group is led on meanwhile.
const GIVE_UP: Duration = Duration::from_millis(400);
/// How long the controller may take to have others elected before this node steps down, and between two looks.
const ELECTIONS: Duration = Duration::from_millis(300);
const GLANCE: Duration = Duration::from_millis(25);
/// The first byte of an answer.
const FORMAT: u8 = 1;
const IMPAIRED: u8 = 1;
const FULL: u8 = 2;
/// What `/readyz` speaks of.
const DISK: &str = "disk";

/// What a node says of its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct DiskState {
    /// Syncs hang.
    pub(crate) impaired: bool,
    /// There is no room for appends.
    pub(crate) full: bool,
}

impl DiskState {
    /// Whether the node may be counted on.
    pub(crate) fn is_well(self) -> bool {
        !self.impaired && !self.full
    }

    /// What is wrong, in words.
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

    fn of_bits(bits: u8) -> Self {
        Self { impaired: bits & IMPAIRED != 0, full: bits & FULL != 0 }
    }

    /// Reads another node's answer; one of another format says nothing.
    pub(super) fn decode(answer: &[u8]) -> Self {
        match answer {
            [FORMAT, bits, ..] => Self::of_bits(*bits),
            _ => Self::default(),
        }
    }
}

/// The state of this node's disk, for everybody who asks.
#[derive(Default)]
pub(crate) struct DiskHealth {
    bits: AtomicU8,
}

impl DiskHealth {
    pub(crate) fn state(&self) -> DiskState {
        DiskState::of_bits(self.bits.load(Ordering::Relaxed))
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

/// What watching the disk needs.
pub(super) struct DiskParts {
    pub(super) node_id: i32,
    pub(super) health: Arc<DiskHealth>,
    pub(super) presence: Arc<Presence>,
    pub(super) coordinator: Coordinator,
    pub(super) store: Arc<Store>,
    pub(super) pulse: Arc<Pulse>,
    pub(super) events: Arc<EventLog>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) readiness: Readiness,
    pub(super) scope: Scope,
}

impl DiskParts {
    /// Watches until the node stops, or is about to.
    pub(super) async fn watch(self, shutdown: Shutdown) {
        let mut watchdog = Watchdog::new(self.clock.monotonic_ms());
        let probing = Arc::new(AtomicBool::new(false));
        let mut unreliable = 0;
        loop {
            let alone = self.coordinator.group().metrics().voters.len() < 2;
            let (pause, began_ms) = (if alone { ALONE } else { LOOK }, self.clock.monotonic_ms());
            tokio::select! {
                () = shutdown.stopped() => return,
                () = rest(pause) => {}
            }
            if self.presence.has_resigned() {
                return;
            }
            let seen = self.store.sync_report();
            // The process stood still, not the disk: what this report and the next say of syncs is the time of the pause.
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
            self.tell(verdict);
            if self.health.state().is_well() {
                self.come_back();
            } else {
                self.hand_over().await;
            }
        }
    }

    /// Probes the disk on a thread that may hang with it.
    fn probe(&self, probing: &Arc<AtomicBool>) {
        let (store, probing) = (Arc::clone(&self.store), Arc::clone(probing));
        self.scope.spawn("disk-probe", async move {
            // Without room for the probe the disk is full, and that is known.
            if let Err(error) = offload(move || store.probe_disk()).await {
                tracing::debug!(%error, "disk probe failed");
            }
            probing.store(false, Ordering::Relaxed);
        });
    }

    fn tell(&self, verdict: Verdict) {
        let state = DiskState { impaired: verdict.impaired, full: verdict.full };
        if !self.health.set(state) {
            return;
        }
        let id = self.node_id;
        let text = match state.problem() {
            Some(problem) => {
                tracing::warn!(impaired = state.impaired, full = state.full, "disk impaired: {problem}");
                self.readiness.fails(DISK, problem);
                format!("node {id}: {problem}")
            }
            None => {
                tracing::info!("disk works again");
                self.readiness.holds(DISK);
                format!("node {id}: its disk works again")
            }
        };
        self.events.on_disk(self.clock.wall_ms(), text);
    }

    /// Gives up what others can take over.
    async fn hand_over(&self) {
        let view = View::of(&self.coordinator);
        let well: BTreeSet<i32> = self.pulse.well().into_iter().collect();
        let members = view.members.len();
        let others = view.members.iter().filter(|live| well.contains(&live.record.node_id)).count();
        let members_go_on = others * 2 > members && others > 0;
        // Clients of the coordination core go to another node in any case. The controller moves what this node leads and
        // others can lead; the lease is kept for partitions that only this node has.
        self.coordinator.set_withdrawn(members_go_on);
        if members_go_on && !self.presence.has_given_up() && !self.is_last_in_sync() {
            tracing::warn!(others, "presence lease given up: others take over");
            self.presence.give_up(GIVE_UP).await;
        }
        let group = self.coordinator.group();
        let metrics = group.metrics();
        let voter_of = |node: &i32| view.node(*node).map(|record| VoterId(record.voter));
        let voters: BTreeSet<VoterId> = well.iter().filter_map(voter_of).collect();
        let well_voters: Vec<VoterId> = metrics
            .voters
            .iter()
            .map(|voter| voter.id)
            .filter(|voter| *voter != metrics.voter && voters.contains(voter))
            .collect();
        if well_voters.len() * 2 <= metrics.voters.len() {
            // A quorum needs this node: it keeps its vote, and leads if it must.
            group.set_electable(true);
            return;
        }
        if !group.is_leader() {
            group.set_electable(false);
            return;
        }
        let matched =
            |id: &VoterId| metrics.matched.iter().find(|(other, _)| other == id).and_then(|at| at.1);
        if let Some(to) = well_voters.into_iter().max_by_key(matched) {
            // The controller is here, and this node learns of its elections for as long as it leads: a new leader's term
            // needs a sync before anything else is heard from it.
            let _ = tokio::time::timeout(ELECTIONS, self.elections()).await;
            tracing::warn!(%to, "coordination group: stepping down, this node's disk does not work");
            group.step_down(to, STEP_DOWN).await;
        }
    }

    /// Returns when others lead what they can.
    async fn elections(&self) {
        while Partitions::of(&self.coordinator).movable(self.node_id) > 0 {
            tokio::time::sleep(GLANCE).await;
        }
    }

    /// Whether a partition has no other replica that could lead it.
    fn is_last_in_sync(&self) -> bool {
        Partitions::of(&self.coordinator).is_last_in_sync(self.node_id)
    }

    fn come_back(&self) {
        if self.presence.has_given_up() {
            tracing::info!("disk works: this node comes back as a new run");
            self.presence.come_back();
        }
        self.coordinator.set_withdrawn(false);
        self.coordinator.group().set_electable(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_a_disk_is_what_is_heard() {
        for state in [
            DiskState::default(),
            DiskState { impaired: true, full: false },
            DiskState { impaired: false, full: true },
            DiskState { impaired: true, full: true },
        ] {
            let health = DiskHealth::default();
            assert_eq!(health.set(state), !state.is_well());
            let answer = futures_util::FutureExt::now_or_never(health.handle(Bytes::new())).unwrap();
            assert_eq!(DiskState::decode(&answer), state);
        }
        assert!(DiskState::decode(b"").is_well());
        assert!(DiskState::decode(&[9, 255]).is_well(), "of another format");
    }
}
