//! The cluster bus: PUBLISH to the subscribers of other nodes, and the server side of connections between stores.
//!
//! Global channels belong to the cluster, sharded channels to their shard: a message goes to the subscribers of this
//! node at once (`pubsub.rs`) and from here to every other node, in order. As in Redis, delivery is at most once: a
//! node that is unreachable or too slow misses the message. A message is sent only after its commit gate.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use moim_base::BrokerId;
use moim_base::socket::Socket;
use moim_base::task::Scope;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::Service;
use crate::peer::{PeerConnection, PeerRequest, PeerResponse};
use crate::pubsub::{ClusterMessage, Gate};
use crate::shared::lock;

/// Messages that may be queued for one node.
const BACKLOG: usize = 4_096;
/// The timeout for sending one message.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed send.
const PAUSE: Duration = Duration::from_millis(200);

/// Receives published messages and hands them to the task of each other node.
pub(super) async fn run(service: Arc<Service>, mut messages: mpsc::Receiver<ClusterMessage>, scope: Scope) {
    let mut nodes: BTreeMap<i32, mpsc::Sender<Arc<ClusterMessage>>> = BTreeMap::new();
    while let Some(message) = messages.recv().await {
        if !service.is_committed(&message.gate).await {
            continue;
        }
        let up = lock(&service.live_peers).clone();
        nodes.retain(|node, _| up.contains(node));
        let message = Arc::new(message);
        for node in up {
            let sender = nodes.entry(node).or_insert_with(|| {
                let (sender, receiver) = mpsc::channel(BACKLOG);
                scope.spawn(
                    "slots-publish-to-node",
                    send_messages(Arc::clone(&service), BrokerId(node), receiver),
                );
                sender
            });
            // A slow node misses messages; the other nodes do not wait for it.
            let _ = sender.try_send(Arc::clone(&message));
        }
    }
}

async fn send_messages(
    service: Arc<Service>,
    node: BrokerId,
    mut messages: mpsc::Receiver<Arc<ClusterMessage>>,
) {
    let mut connection = None;
    while let Some(message) = messages.recv().await {
        let sent = tokio::time::timeout(SEND_TIMEOUT, send(&service, node, &mut connection, &message)).await;
        if !matches!(sent, Ok(Ok(()))) {
            connection = None;
            tokio::time::sleep(PAUSE).await;
            while messages.try_recv().is_ok() {}
        }
    }
}

async fn send(
    service: &Service,
    node: BrokerId,
    connection: &mut Option<PeerConnection>,
    message: &ClusterMessage,
) -> io::Result<()> {
    let connection = match connection {
        Some(connection) => connection,
        none => none.insert(PeerConnection::open(service.parts.dialler.dial(node).await?).await?),
    };
    let head = PeerRequest::Publish { sharded: message.sharded, channel: message.channel.len() };
    connection.send(&head, &[&message.channel[..], &message.message[..]].concat()).await
}

/// Accepts connections of other nodes.
pub(super) async fn accept(
    service: Arc<Service>,
    mut streams: mpsc::Receiver<std::net::TcpStream>,
    scope: Scope,
) {
    while let Some(stream) = streams.recv().await {
        match TcpStream::from_std(stream) {
            Ok(stream) => {
                let service = Arc::clone(&service);
                scope.spawn("slots-peer", async move {
                    if let Err(error) = service.serve_peer(Box::new(stream)).await {
                        tracing::debug!(%error, "peer connection ended");
                    }
                });
            }
            Err(error) => tracing::warn!(%error, "peer connection not accepted"),
        }
    }
}

impl Service {
    /// Serves a connection of another node's store from [`crate::peer::MAGIC`] to its end.
    pub async fn serve_peer(&self, stream: Box<dyn Socket>) -> io::Result<()> {
        let mut connection = PeerConnection::accept(stream).await?;
        while let Some((request, bytes)) = connection.receive::<PeerRequest>().await? {
            let (response, bytes) = match request {
                PeerRequest::Publish { sharded, channel } => {
                    let Some((channel, message)) = bytes.split_at_checked(channel) else {
                        return Err(io::ErrorKind::InvalidData.into());
                    };
                    match sharded {
                        true => self.shared.pubsub.publish_sharded(channel, message, &Gate::OPEN),
                        false => self.shared.pubsub.publish(channel, message, &Gate::OPEN),
                    };
                    continue;
                }
                PeerRequest::Clock => {
                    (PeerResponse::Clock { wall_ms: self.parts.clock.wall_ms() }, Bytes::new())
                }
                PeerRequest::CountKeys { shard, slot, map_epoch } => {
                    (self.count_keys(shard, slot, map_epoch).await, Bytes::new())
                }
                PeerRequest::Migration(request) => {
                    let (response, bytes) = self.export(request).await?;
                    (PeerResponse::Migration(response), bytes)
                }
            };
            connection.send(&response, &bytes).await?;
        }
        Ok(())
    }

    /// Waits for the commit gate of a message; false if leadership has ended, so that it is never committed.
    async fn is_committed(&self, gate: &Gate) -> bool {
        let Some(index) = gate.shard.filter(|_| gate.end > 0) else { return true };
        let Some(shard) = lock(&self.locals).get(&index).map(|local| Arc::clone(&local.shard)) else {
            return false;
        };
        self.wait_committed(&shard, gate.end, gate.voided).await
    }

    /// The number of keys that a shard led by this node has in a slot, by a slot map of at least `map_epoch`.
    async fn count_keys(&self, shard: u16, slot: u16, map_epoch: u64) -> PeerResponse {
        if self.map().epoch < map_epoch && self.refresh(0).await.is_err() || self.map().epoch < map_epoch {
            return PeerResponse::NotPrimary;
        }
        match self.local_primary(shard) {
            Some(shard) => {
                PeerResponse::Count { keys: shard.with_state(|state| state.db.slot_len(slot) as u64).await }
            }
            None => PeerResponse::NotPrimary,
        }
    }
}
