//! Messages of PUBLISH for the subscribers of other nodes, and the connections that other nodes make to this store.
//!
//! Classic channels are the cluster's, and channels of slots are their shard's: a message goes to the subscribers of this node at
//! once (`pubsub.rs`) and from here to every other node, in the order in which it came. As in Redis, a message is sent at
//! most once: a node that cannot be reached, or does not keep up, misses it. Nothing is told before it is committed.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use moim_base::BrokerId;
use moim_base::socket::Socket;
use moim_base::task::Scope;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::Service;
use super::give::Ask;
use crate::peer::Wire;
use crate::pubsub::{Gate, Told};
use crate::shared::lock;

/// Messages that wait for one node.
const BACKLOG: usize = 4_096;
/// For one message to leave.
const PATIENCE: Duration = Duration::from_secs(5);
/// After a node could not be reached.
const PAUSE: Duration = Duration::from_millis(200);

/// Takes messages and hands them to the tasks of the other nodes.
pub(super) async fn run(service: Arc<Service>, mut told: mpsc::Receiver<Told>, scope: Scope) {
    let mut nodes: BTreeMap<i32, mpsc::Sender<Arc<Told>>> = BTreeMap::new();
    while let Some(message) = told.recv().await {
        if !service.is_committed(&message.gate).await {
            continue;
        }
        let up = lock(&service.others).clone();
        nodes.retain(|node, _| up.contains(node));
        let message = Arc::new(message);
        for node in up {
            let sender = nodes.entry(node).or_insert_with(|| {
                let (sender, receiver) = mpsc::channel(BACKLOG);
                scope.spawn("slots-tell", tell(Arc::clone(&service), BrokerId(node), receiver));
                sender
            });
            // A node that does not keep up misses messages; the others do not wait for it.
            let _ = sender.try_send(Arc::clone(&message));
        }
    }
}

async fn tell(service: Arc<Service>, node: BrokerId, mut messages: mpsc::Receiver<Arc<Told>>) {
    let mut wire = None;
    while let Some(message) = messages.recv().await {
        let sent = tokio::time::timeout(PATIENCE, send(&service, node, &mut wire, &message)).await;
        if !matches!(sent, Ok(Ok(()))) {
            wire = None;
            tokio::time::sleep(PAUSE).await;
            while messages.try_recv().is_ok() {}
        }
    }
}

async fn send(service: &Service, node: BrokerId, wire: &mut Option<Wire>, message: &Told) -> io::Result<()> {
    let wire = match wire {
        Some(wire) => wire,
        none => none.insert(Wire::open(service.parts.dialler.dial(node).await?).await?),
    };
    let head = Ask::Publish { sharded: message.sharded, channel: message.channel.len() };
    wire.send(&head, &[&message.channel[..], &message.message[..]].concat()).await
}

/// Takes the connections that other nodes make.
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
                        tracing::debug!(%error, "a connection of another store ended");
                    }
                });
            }
            Err(error) => tracing::warn!(%error, "another store could not be taken in"),
        }
    }
}

impl Service {
    /// Serves a connection of another node's store, from its very beginning to its end.
    pub async fn serve_peer(&self, stream: Box<dyn Socket>) -> io::Result<()> {
        let mut wire = Wire::accept(stream).await?;
        while let Some((ask, bytes)) = wire.receive::<Ask>().await? {
            if let Ask::Publish { sharded, channel } = ask {
                let Some((channel, message)) = bytes.split_at_checked(channel) else {
                    return Err(io::ErrorKind::InvalidData.into());
                };
                match sharded {
                    true => self.shared.pubsub.publish_sharded(channel, message, &Gate::OPEN),
                    false => self.shared.pubsub.publish(channel, message, &Gate::OPEN),
                };
                continue;
            }
            let (said, bytes) = self.give(ask).await?;
            wire.send(&said, &bytes).await?;
        }
        Ok(())
    }

    /// Waits until what a message tells of is committed; false when it never will be.
    async fn is_committed(&self, gate: &Gate) -> bool {
        let Some(index) = gate.shard.filter(|_| gate.end > 0) else { return true };
        let Some(shard) = lock(&self.locals).get(&index).map(|local| Arc::clone(&local.shard)) else {
            return false;
        };
        self.commits(&shard, gate.end, gate.voided).await
    }
}
