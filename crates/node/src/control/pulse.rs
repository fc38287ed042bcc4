//! Whether the other nodes answer: what the controller's suspicion is made of.
//!
//! A lease of three seconds tells who is dead for sure, and late. So every node that may become the controller asks the others a
//! small question several times a second, over the connections of the peer port. No answer is a reason to act, never a
//! proof of death: all that comes of it is fenced by epochs.
//!
//! Invariant: silence counts from a question that was asked and waited for, so a node that was paused itself suspects
//! nobody for what it slept through.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use moim_base::rest::rest_end;
use moim_base::task::Shutdown;
use moim_base::{BrokerId, Clock};
use moim_cluster::BoxFuture;
use moim_coord::Coordinator;
use moim_raft::{Member, ServiceError, ServiceId, TcpTransport, Transport as _, TransportError, VoterId};
use moim_replica::PartitionId;
use moim_replica::controller::term::{LogEnds, Peers};
use moim_replica::driver::Driver;

use super::disk_health::{DiskHealth, DiskState};
use super::events::EventLog;
use super::view::View;

/// Between questions to a node.
const EVERY: Duration = Duration::from_millis(150);
/// Between looks for others, while there are none.
const ALONE: Duration = Duration::from_secs(1);
/// An answer that takes longer is silence.
const PATIENCE: Duration = Duration::from_millis(500);
/// For a question about logs.
const LOG_ENDS: Duration = Duration::from_secs(2);
/// Between two attempts to ask.
const RETRY: Duration = Duration::from_millis(5);
/// Nobody listens where a node was: that is more than silence, and less has to be waited for.
const REFUSED_MS: u64 = 400;

/// Another node, as far as it answers.
#[derive(Clone, Debug)]
struct Peer {
    member: Member,
    /// Its run: what an earlier one did not answer is of no interest.
    run: i64,
    silent_since_ms: Option<u64>,
    asked: bool,
    /// Whether this run has answered yet.
    answered: bool,
}

/// Asks the other nodes, and knows who does not answer.
pub(crate) struct Pulse {
    me: i32,
    transport: Arc<TcpTransport>,
    clock: Arc<dyn Clock>,
    peers: Mutex<BTreeMap<i32, Peer>>,
    /// The state of this node's disk.
    disk: Arc<DiskHealth>,
    /// What the others last said of theirs, if it was not well. Remembered after such a node has given its lease up.
    disks: Mutex<BTreeMap<i32, DiskState>>,
    events: Arc<EventLog>,
    /// Who knows how far logs go, once there is one.
    driver: OnceLock<Arc<Driver>>,
}

impl Pulse {
    pub(crate) fn new(
        me: i32,
        transport: Arc<TcpTransport>,
        clock: Arc<dyn Clock>,
        disk: Arc<DiskHealth>,
        events: Arc<EventLog>,
    ) -> Self {
        let (peers, disks) = (Mutex::default(), Mutex::default());
        Self { me, transport, clock, peers, disk, disks, events, driver: OnceLock::new() }
    }

    /// The other members that answer and whose disks work.
    pub(crate) fn well(&self) -> Vec<i32> {
        let (peers, disks) = (self.peers(), self.disks());
        let is_well = |(id, peer): &(&i32, &Peer)| {
            peer.answered && peer.silent_since_ms.is_none() && !disks.contains_key(*id)
        };
        peers.iter().filter(is_well).map(|(id, _)| *id).collect()
    }

    /// Nodes whose disk does not work, as far as this node knows, itself included.
    pub(crate) fn impaired_disks(&self) -> BTreeMap<i32, DiskState> {
        let mut disks = self.disks().clone();
        let own = self.disk.state();
        if !own.is_well() {
            disks.insert(self.me, own);
        }
        disks
    }

    fn disks(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, DiskState>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_disk(&self, node: i32, state: DiskState) {
        let before = {
            let mut disks = self.disks();
            if state.is_well() { disks.remove(&node) } else { disks.insert(node, state) }
        };
        if before.unwrap_or_default() == state {
            return;
        }
        let text = match state.problem() {
            Some(problem) => format!("node {node}: {problem}"),
            None => format!("node {node}: its disk works again"),
        };
        tracing::info!(
            node,
            impaired = state.impaired,
            full = state.full,
            "disk state of another node changed"
        );
        self.events.on_disk(self.clock.wall_ms(), text);
    }

    /// Copies are driven from now on.
    pub(crate) fn set_driver(&self, driver: Arc<Driver>) {
        let _ = self.driver.set(driver);
    }

    fn peers(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks until the node stops. Voters do, because one of them is the controller, and a node whose disk does not work,
    /// because it must know who could take over.
    pub(crate) async fn run(self: Arc<Self>, coordinator: Coordinator, shutdown: Shutdown) {
        let mut answers = FuturesUnordered::new();
        let mut next = std::pin::pin!(tokio::time::sleep(EVERY));
        loop {
            tokio::select! {
                () = shutdown.stopped() => return,
                Some((node, run, answer)) = answers.next() => self.on_answer(node, run, answer),
                () = &mut next => {
                    let metrics = coordinator.group().metrics();
                    let votes = metrics.voters.iter().any(|voter| voter.id == metrics.voter);
                    let asks = votes || !self.disk.state().is_well();
                    let view = if asks { View::of(&coordinator) } else { View::default() };
                    answers.extend(self.due(&view).into_iter().map(|(node, peer)| self.ask(node, peer)));
                    let pause = if self.peers().is_empty() { ALONE } else { EVERY };
                    next.as_mut().reset(rest_end(pause));
                }
            }
        }
    }

    /// Whom to ask now. Who is no member any more is forgotten.
    fn due(&self, view: &View) -> Vec<(i32, Peer)> {
        let mut peers = self.peers();
        let mut due = Vec::new();
        let known = std::mem::take(&mut *peers);
        for live in view.members.iter().filter(|live| live.record.node_id != self.me) {
            let id = live.record.node_id;
            let Some(node) = view.node(id).filter(|node| !node.peer.is_empty()) else { continue };
            let member = Member { id: VoterId(live.record.voter), address: node.peer.clone() };
            let mut peer = match known.get(&id).filter(|peer| peer.run == live.broker_epoch) {
                Some(peer) => Peer { member, ..peer.clone() },
                None => Peer {
                    member,
                    run: live.broker_epoch,
                    silent_since_ms: None,
                    asked: false,
                    answered: false,
                },
            };
            if !peer.asked {
                peer.asked = true;
                due.push((id, peer.clone()));
            }
            peers.insert(id, peer);
        }
        due
    }

    async fn ask(&self, node: i32, peer: Peer) -> (i32, i64, Result<Bytes, ServiceError>) {
        let question = Bytes::new();
        let answer = self.transport.ask(&peer.member, ServiceId::HEALTH, question, PATIENCE).await;
        (node, peer.run, answer)
    }

    fn on_answer(&self, node: i32, run: i64, answer: Result<Bytes, ServiceError>) {
        if let Ok(said) = &answer {
            self.on_disk(node, DiskState::decode(said));
        }
        let now_ms = self.clock.monotonic_ms();
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(&node).filter(|peer| peer.run == run) else { return };
        peer.asked = false;
        peer.answered |= answer.is_ok();
        let since_ms = match answer {
            // Whatever it says, it speaks.
            Ok(_) | Err(ServiceError::NotHere | ServiceError::Busy) => None,
            Err(ServiceError::Transport(TransportError::Unreachable(_))) => {
                Some(now_ms.saturating_sub(REFUSED_MS))
            }
            Err(ServiceError::Transport(TransportError::Broken(_) | TransportError::TimedOut)) => {
                Some(now_ms)
            }
        };
        if since_ms.is_some() != peer.silent_since_ms.is_some() {
            tracing::debug!(node, silent = since_ms.is_some(), "a node's pulse changed");
        }
        peer.silent_since_ms =
            since_ms.map(|since| peer.silent_since_ms.map_or(since, |known| known.min(since)));
    }
}

impl Peers for Pulse {
    fn suspects(&self) -> Vec<(BrokerId, u64)> {
        let peers = self.peers();
        peers.iter().filter_map(|(id, peer)| Some((BrokerId(*id), peer.silent_since_ms?))).collect()
    }

    fn impaired(&self) -> Vec<BrokerId> {
        self.impaired_disks().into_keys().map(BrokerId).collect()
    }

    fn log_ends(&self, node: BrokerId, partitions: Vec<PartitionId>) -> BoxFuture<'static, Option<LogEnds>> {
        let driver = self.driver.get().cloned();
        Box::pin(async move {
            let driver = driver?;
            let asked = async {
                loop {
                    match driver.ask_log_ends(node, partitions.clone()).await {
                        Ok(answer) => return answer,
                        // A node that is only starting has no run to answer for: often this very one.
                        Err(_) => tokio::time::sleep(RETRY).await,
                    }
                }
            };
            let (run, ends) = tokio::time::timeout(LOG_ENDS, asked).await.ok()?;
            let ends = ends.into_iter().filter_map(|(id, end)| Some((id, end?))).collect();
            Some(LogEnds { run, ends })
        })
    }
}
