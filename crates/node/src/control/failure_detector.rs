//! Failure detector: health probes of the other nodes, the source of the controller's suspicion.
//!
//! The expiry of a member lease (three seconds) detects a dead node reliably, but late. So every node that may become
//! the controller probes the other nodes several times a second over the peer connections. A missing answer is a reason
//! to act, never a proof of death: all consequences are fenced by epochs.
//!
//! Invariant: silence counts from a probe that was sent and awaited, so a node that was paused itself suspects no other
//! node because of its own pause.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use moim_base::rest::rest_end;
use moim_base::task::Shutdown;
use moim_base::{BrokerId, Clock};
use moim_coord::Coordinator;
use moim_raft::{Member, ServiceError, ServiceId, TcpTransport, Transport as _, TransportError, VoterId};
use moim_replica::PartitionId;
use moim_replica::controller::term::{LogEnds, Peers};
use moim_replica::driver::Driver;
use moim_state::BoxFuture;

use super::disk_health::{DiskHealth, DiskState};
use super::events::EventLog;
use super::view::View;

/// Interval of the probes to a node.
const PROBE_INTERVAL: Duration = Duration::from_millis(150);
/// Interval of the check for other members, while there are none.
const ALONE_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of a probe.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout of a log end query, with its retries.
const LOG_ENDS_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between attempts of a log end query.
const RETRY: Duration = Duration::from_millis(5);
/// Head start of the silence after a refused connection: no process listens at the address, a stronger sign than a
/// timeout.
const REFUSED_MS: u64 = 400;

/// Probe state of another member.
#[derive(Clone, Debug)]
struct Peer {
    member: Member,
    /// Broker epoch; answers of an earlier one are ignored.
    broker_epoch: i64,
    silent_since_ms: Option<u64>,
    /// True while a probe waits for its answer.
    in_flight: bool,
    /// True if this broker epoch has answered a probe.
    answered: bool,
}

/// Probes the other members and records silence and disk state.
pub(crate) struct FailureDetector {
    me: i32,
    transport: Arc<TcpTransport>,
    clock: Arc<dyn Clock>,
    peers: Mutex<BTreeMap<i32, Peer>>,
    /// The state of this node's disk.
    disk: Arc<DiskHealth>,
    /// Last reported disk state of the other nodes, if impaired or full. Kept after such a node withdrew its lease.
    disks: Mutex<BTreeMap<i32, DiskState>>,
    events: Arc<EventLog>,
    /// Answers log end queries; set once replication has started.
    driver: OnceLock<Arc<Driver>>,
}

impl FailureDetector {
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

    /// The other members that answer probes and whose disks are healthy.
    pub(crate) fn healthy_members(&self) -> Vec<i32> {
        let (peers, disks) = (self.peers(), self.disks());
        let is_healthy = |(id, peer): &(&i32, &Peer)| {
            peer.answered && peer.silent_since_ms.is_none() && !disks.contains_key(*id)
        };
        peers.iter().filter(is_healthy).map(|(id, _)| *id).collect()
    }

    /// Nodes with an impaired or full disk as far as this node knows, itself included.
    pub(crate) fn impaired_disks(&self) -> BTreeMap<i32, DiskState> {
        let mut disks = self.disks().clone();
        let own = self.disk.state();
        if !own.is_healthy() {
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
            if state.is_healthy() { disks.remove(&node) } else { disks.insert(node, state) }
        };
        if before.unwrap_or_default() == state {
            return;
        }
        let text = match state.problem() {
            Some(problem) => format!("node {node}: {problem}"),
            None => format!("node {node}: its disk works again"),
        };
        tracing::info!(node, impaired = state.impaired, full = state.full, "disk state of node changed");
        self.events.on_disk(self.clock.wall_ms(), text);
    }

    /// Enables log end queries.
    pub(crate) fn set_driver(&self, driver: Arc<Driver>) {
        let _ = self.driver.set(driver);
    }

    fn peers(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Probes until the node stops. Voters probe because one of them is the controller; a node with an impaired or full
    /// disk probes because it must know which nodes could take over.
    pub(crate) async fn run(self: Arc<Self>, coordinator: Coordinator, shutdown: Shutdown) {
        let mut answers = FuturesUnordered::new();
        let mut next = std::pin::pin!(tokio::time::sleep(PROBE_INTERVAL));
        loop {
            tokio::select! {
                () = shutdown.stopped() => return,
                Some((node, broker_epoch, answer)) = answers.next() => self.on_answer(node, broker_epoch, answer),
                () = &mut next => {
                    let metrics = coordinator.group().metrics();
                    let votes = metrics.voters.iter().any(|voter| voter.id == metrics.voter);
                    let probes = votes || !self.disk.state().is_healthy();
                    let view = if probes { View::of(&coordinator) } else { View::default() };
                    answers.extend(self.due(&view).into_iter().map(|(node, peer)| self.probe(node, peer)));
                    let pause = if self.peers().is_empty() { ALONE_INTERVAL } else { PROBE_INTERVAL };
                    next.as_mut().reset(rest_end(pause));
                }
            }
        }
    }

    /// The members to probe now. Former members are dropped.
    fn due(&self, view: &View) -> Vec<(i32, Peer)> {
        let mut peers = self.peers();
        let mut due = Vec::new();
        let known = std::mem::take(&mut *peers);
        for live in view.members.iter().filter(|live| live.record.node_id != self.me) {
            let id = live.record.node_id;
            let Some(node) = view.node(id).filter(|node| !node.peer.is_empty()) else { continue };
            let member = Member { id: VoterId(live.record.voter), address: node.peer.clone() };
            let mut peer = match known.get(&id).filter(|peer| peer.broker_epoch == live.broker_epoch) {
                Some(peer) => Peer { member, ..peer.clone() },
                None => Peer {
                    member,
                    broker_epoch: live.broker_epoch,
                    silent_since_ms: None,
                    in_flight: false,
                    answered: false,
                },
            };
            if !peer.in_flight {
                peer.in_flight = true;
                due.push((id, peer.clone()));
            }
            peers.insert(id, peer);
        }
        due
    }

    async fn probe(&self, node: i32, peer: Peer) -> (i32, i64, Result<Bytes, ServiceError>) {
        let request = Bytes::new();
        let answer = self.transport.ask(&peer.member, ServiceId::HEALTH, request, PROBE_TIMEOUT).await;
        (node, peer.broker_epoch, answer)
    }

    fn on_answer(&self, node: i32, broker_epoch: i64, answer: Result<Bytes, ServiceError>) {
        if let Ok(response) = &answer {
            self.on_disk(node, DiskState::decode(response));
        }
        let now_ms = self.clock.monotonic_ms();
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(&node).filter(|peer| peer.broker_epoch == broker_epoch) else {
            return;
        };
        peer.in_flight = false;
        peer.answered |= answer.is_ok();
        let since_ms = match answer {
            // Any answer, also an error, proves that the process runs.
            Ok(_) | Err(ServiceError::NotHere | ServiceError::Busy) => None,
            Err(ServiceError::Transport(TransportError::Unreachable(_))) => {
                Some(now_ms.saturating_sub(REFUSED_MS))
            }
            Err(ServiceError::Transport(TransportError::Broken(_) | TransportError::TimedOut)) => {
                Some(now_ms)
            }
        };
        if since_ms.is_some() != peer.silent_since_ms.is_some() {
            tracing::debug!(node, silent = since_ms.is_some(), "failure detector state of node changed");
        }
        peer.silent_since_ms =
            since_ms.map(|since| peer.silent_since_ms.map_or(since, |known| known.min(since)));
    }
}

impl Peers for FailureDetector {
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
            let query = async {
                loop {
                    match driver.ask_log_ends(node, partitions.clone()).await {
                        Ok(answer) => return answer,
                        // A starting node, often this one, has no broker epoch to answer for.
                        Err(_) => tokio::time::sleep(RETRY).await,
                    }
                }
            };
            let (run, ends) = tokio::time::timeout(LOG_ENDS_TIMEOUT, query).await.ok()?;
            let ends = ends.into_iter().filter_map(|(id, end)| Some((id, end?))).collect();
            Some(LogEnds { run, ends })
        })
    }
}
