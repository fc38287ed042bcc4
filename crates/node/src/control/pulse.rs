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
use moim_replica::controller::office::{LogEnds, Peers};
use moim_replica::driver::Driver;

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
}

/// Asks the other nodes, and knows who does not answer.
pub(crate) struct Pulse {
    me: i32,
    transport: Arc<TcpTransport>,
    clock: Arc<dyn Clock>,
    peers: Mutex<BTreeMap<i32, Peer>>,
    /// Who knows how far logs go, once there is one.
    driver: OnceLock<Arc<Driver>>,
}

impl Pulse {
    pub(crate) fn new(me: i32, transport: Arc<TcpTransport>, clock: Arc<dyn Clock>) -> Self {
        Self { me, transport, clock, peers: Mutex::default(), driver: OnceLock::new() }
    }

    /// Copies are driven from now on.
    pub(crate) fn set_driver(&self, driver: Arc<Driver>) {
        let _ = self.driver.set(driver);
    }

    fn peers(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks until the node stops. Only voters do: nobody else becomes the controller.
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
                    let view = if votes { View::of(&coordinator) } else { View::default() };
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
                None => Peer { member, run: live.broker_epoch, silent_since_ms: None, asked: false },
            };
            if !peer.asked {
                peer.asked = true;
                due.push((id, peer.clone()));
            }
            peers.insert(id, peer);
        }
        due
    }

    async fn ask(&self, node: i32, peer: Peer) -> (i32, i64, Result<(), ServiceError>) {
        // Nobody serves it, and that nobody does is said by whoever is there.
        let question = Bytes::new();
        let answer = self.transport.ask(&peer.member, ServiceId::REPLICATION, question, PATIENCE).await;
        (node, peer.run, answer.map(drop))
    }

    fn on_answer(&self, node: i32, run: i64, answer: Result<(), ServiceError>) {
        let now_ms = self.clock.monotonic_ms();
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(&node).filter(|peer| peer.run == run) else { return };
        peer.asked = false;
        let since_ms = match answer {
            // Whatever it says, it speaks.
            Ok(()) | Err(ServiceError::NotHere | ServiceError::Busy) => None,
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
