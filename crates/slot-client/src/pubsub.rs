//! Subscriptions: a dedicated connection that reconnects automatically.
//!
//! Messages wait in a bounded queue; when it is full, the socket is not read, and the server applies its
//! policy for slow subscribers. Pub/sub does not store messages: messages published during a disconnect are
//! lost, and [`Subscription::interruptions`] counts the reconnects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use moim_wire_resp::{Slot, Value, command};
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use crate::address::Address;
use crate::client::{Client, Core, backoff};
use crate::connection::{Kind, Wire, open};
use crate::error::Error;
use crate::redirect::{Decision, classify};
use crate::signals::{Event, Trigger};

/// Maximum number of buffered messages of a lagging reader.
const QUEUE: usize = 4096;

/// A published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The channel it was published to.
    pub channel: Bytes,
    /// The pattern that matched, for pattern subscriptions.
    pub pattern: Option<Bytes>,
    /// The payload.
    pub payload: Bytes,
}

/// A subscription; dropping it unsubscribes.
#[derive(Debug)]
pub struct Subscription {
    messages: mpsc::Receiver<Message>,
    interruptions: Arc<AtomicU64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubscriptionKind {
    Channels,
    Patterns,
    Shard,
}

impl Client {
    /// Subscribes to channels. Returns when the server has confirmed.
    pub async fn subscribe<C: AsRef<[u8]>>(
        &self,
        channels: impl IntoIterator<Item = C>,
    ) -> Result<Subscription, Error> {
        self.open_subscription(SubscriptionKind::Channels, channels).await
    }

    /// Subscribes to patterns (`news.*`).
    pub async fn psubscribe<C: AsRef<[u8]>>(
        &self,
        patterns: impl IntoIterator<Item = C>,
    ) -> Result<Subscription, Error> {
        self.open_subscription(SubscriptionKind::Patterns, patterns).await
    }

    /// Subscribes to sharded channels, which must be in one slot.
    pub async fn ssubscribe<C: AsRef<[u8]>>(
        &self,
        channels: impl IntoIterator<Item = C>,
    ) -> Result<Subscription, Error> {
        self.open_subscription(SubscriptionKind::Shard, channels).await
    }

    async fn open_subscription<C: AsRef<[u8]>>(
        &self,
        kind: SubscriptionKind,
        names: impl IntoIterator<Item = C>,
    ) -> Result<Subscription, Error> {
        let names: Vec<Bytes> = names.into_iter().map(|name| Bytes::copy_from_slice(name.as_ref())).collect();
        let mut slots = names.iter().map(|name| Slot::of(name));
        let first = slots.next().ok_or_else(|| Error::Config("no channel to subscribe to".to_owned()))?;
        if kind == SubscriptionKind::Shard && slots.any(|slot| slot != first) {
            return Err(Error::CrossSlot);
        }
        let (sender, messages) = mpsc::channel(QUEUE);
        let (ready, confirmed) = tokio::sync::oneshot::channel();
        let interruptions = Arc::new(AtomicU64::new(0));
        let task =
            Task { core: self.core.clone(), kind, names, sender, interruptions: interruptions.clone() };
        self.core.nodes.factory().scope.spawn("slot-client subscription", task.run(ready));
        match tokio::time::timeout(self.call.timeout, confirmed).await {
            Ok(Ok(())) => Ok(Subscription { messages, interruptions }),
            Ok(Err(_)) => Err(Error::Closed),
            Err(_) => {
                let reason = "no node confirmed the subscription".to_owned();
                Err(Error::Unavailable { reason, after: self.call.timeout })
            }
        }
    }
}

impl Subscription {
    /// The next message. Cancel-safe. `None` only after a shutdown.
    pub async fn next(&mut self) -> Option<Message> {
        self.messages.recv().await
    }

    /// Number of reconnects: messages may have been missed on each.
    pub fn interruptions(&self) -> u64 {
        self.interruptions.load(Ordering::Relaxed)
    }
}

struct Task {
    core: Arc<Core>,
    kind: SubscriptionKind,
    names: Vec<Bytes>,
    sender: mpsc::Sender<Message>,
    interruptions: Arc<AtomicU64>,
}

impl Task {
    /// Subscribes, and reconnects until the subscription is dropped.
    async fn run(self, ready: tokio::sync::oneshot::Sender<()>) {
        let mut ready = Some(ready);
        let mut tries = 0;
        while !self.sender.is_closed() {
            let Some(node) = self.node(tries) else {
                self.core.signals.trigger(Trigger::UncoveredSlot);
                tries += 1;
                tokio::time::sleep(backoff(tries)).await;
                continue;
            };
            let ended = tokio::select! {
                ended = self.serve(&node, &mut ready, &mut tries) => ended,
                () = self.sender.closed() => return,
            };
            if let Err(reason) = ended {
                self.core.signals.emit(Event::Disconnected { node, reason });
            }
            tries += 1;
            if tries % self.core.options.reconnects_until_refresh == 0 {
                self.core.signals.trigger(Trigger::PersistentReconnects);
            }
            tokio::time::sleep(backoff(tries)).await;
        }
    }

    /// The owner of the slot for sharded channels, any node for others.
    fn node(&self, tries: u32) -> Option<Address> {
        let topology = self.core.topology.load();
        if self.kind == SubscriptionKind::Shard {
            return topology.primary(Slot::of(&self.names[0])).map(|node| node.address.clone());
        }
        let nodes = topology.members(true);
        let slot = usize::from(Slot::of(&self.names[0]).get());
        (!nodes.is_empty()).then(|| nodes[(slot + tries as usize) % nodes.len()].address.clone())
    }

    /// Subscribes at `node` and forwards its messages, until the connection or the subscription ends.
    async fn serve(
        &self,
        node: &Address,
        ready: &mut Option<tokio::sync::oneshot::Sender<()>>,
        tries: &mut u32,
    ) -> Result<(), String> {
        let options = &self.core.options;
        let opened =
            tokio::time::timeout(options.connect_timeout, open(node, Kind::Exclusive, options)).await;
        let mut wire = opened.map_err(|_| "no connection in time".to_owned())??;
        self.subscribe(&mut wire).await?;
        let mut missing = self.names.len();
        let mut silent = false;
        loop {
            let value = match tokio::time::timeout(options.hung_after, wire.next()).await {
                Ok(value) => value?,
                Err(_) if silent => return Err("silent".to_owned()),
                Err(_) => {
                    silent = true;
                    let mut ping = BytesMut::new();
                    command::encode(&mut ping, &["PING"]);
                    wire.stream.write_all(&ping).await.map_err(|error| error.to_string())?;
                    continue;
                }
            };
            silent = false;
            if let Decision::Moved(slot, to) = classify(&value, &node.host) {
                self.core.topology.load().patch(slot, &to);
                self.core.signals.trigger(Trigger::MovedRedirect);
                return Err(format!("slot {slot} moved to {to}"));
            }
            match read(value)? {
                PushEvent::Message(message) => {
                    if self.sender.send(message).await.is_err() {
                        return Ok(());
                    }
                }
                PushEvent::Subscribed => {
                    missing = missing.saturating_sub(1);
                    if missing == 0 {
                        *tries = 0;
                        match ready.take() {
                            Some(ready) => drop(ready.send(())),
                            None => drop(self.interruptions.fetch_add(1, Ordering::Relaxed)),
                        }
                    }
                }
                PushEvent::Unsubscribed => return Err("the server ended the subscription".to_owned()),
                PushEvent::Other => {}
            }
        }
    }

    async fn subscribe(&self, wire: &mut Wire) -> Result<(), String> {
        let name = match self.kind {
            SubscriptionKind::Channels => "SUBSCRIBE",
            SubscriptionKind::Patterns => "PSUBSCRIBE",
            SubscriptionKind::Shard => "SSUBSCRIBE",
        };
        let mut frame = BytesMut::new();
        command::header(&mut frame, self.names.len() + 1);
        command::argument(&mut frame, name.as_bytes());
        self.names.iter().for_each(|name| command::argument(&mut frame, name));
        wire.stream.write_all(&frame).await.map_err(|error| error.to_string())
    }
}

#[derive(Debug, PartialEq, Eq)]
enum PushEvent {
    Message(Message),
    Subscribed,
    Unsubscribed,
    Other,
}

/// Decodes a RESP3 push, or the equivalent RESP2 array.
fn read(value: Value) -> Result<PushEvent, String> {
    let values = match value {
        Value::Push(values) | Value::Array(values) => values,
        Value::Error(text) => return Err(String::from_utf8_lossy(&text).into_owned()),
        _ => return Ok(PushEvent::Other),
    };
    let text = |index: usize| values.get(index).and_then(Value::as_bytes).cloned().unwrap_or_default();
    Ok(match &text(0)[..] {
        b"message" | b"smessage" => {
            PushEvent::Message(Message { channel: text(1), pattern: None, payload: text(2) })
        }
        b"pmessage" => {
            PushEvent::Message(Message { channel: text(2), pattern: Some(text(1)), payload: text(3) })
        }
        b"subscribe" | b"psubscribe" | b"ssubscribe" => PushEvent::Subscribed,
        b"unsubscribe" | b"punsubscribe" | b"sunsubscribe" => PushEvent::Unsubscribed,
        _ => PushEvent::Other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushes_of_resp2_and_resp3_are_decoded() {
        let bulk = |text: &'static str| Value::bulk(text);
        let message = PushEvent::Message(Message { channel: "c".into(), pattern: None, payload: "p".into() });
        for shape in [Value::Push, Value::Array] {
            assert_eq!(read(shape(vec![bulk("message"), bulk("c"), bulk("p")])).unwrap(), message);
            assert_eq!(
                read(shape(vec![bulk("subscribe"), bulk("c"), Value::Integer(1)])).unwrap(),
                PushEvent::Subscribed
            );
        }
        let pattern = read(Value::Push(vec![bulk("pmessage"), bulk("*"), bulk("c"), bulk("p")])).unwrap();
        assert_eq!(
            pattern,
            PushEvent::Message(Message {
                channel: "c".into(),
                pattern: Some("*".into()),
                payload: "p".into()
            })
        );
        assert_eq!(read(Value::ok()), Ok(PushEvent::Other));
        assert!(read(Value::Error("NOPERM".into())).is_err());
    }
}
