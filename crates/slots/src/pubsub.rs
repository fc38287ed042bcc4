//! Pub/Sub: the subscribers of channels, patterns and sharded channels, and message delivery.
//!
//! One table per node: the subscribers of all its shards share it. Messages go through the mailboxes of the
//! connections, which bound the client output buffer of a slow reader.
//!
//! Lock order: a leaf. Only mailboxes are called under the lock.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use bytes::{Bytes, BytesMut};
use hashbrown::HashMap;
use moim_wire_resp::{Encoder, Protocol};
use tokio::sync::mpsc;

use crate::cmd::scan::glob;
use crate::deferred::Deferred;
use crate::events::{Notification, class};
use crate::session::{Mailbox, Push, Session};
use crate::shared::lock;

/// The kinds of subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A cluster-wide channel (SUBSCRIBE).
    Channel,
    /// All channels that match a pattern (PSUBSCRIBE).
    Pattern,
    /// A sharded channel, bound to its hash slot (SSUBSCRIBE).
    Sharded,
}

/// Channel or pattern names with their subscribers.
type Table = HashMap<Box<[u8]>, BTreeMap<u64, Subscriber>>;

#[derive(Clone)]
struct Subscriber {
    mailbox: Arc<Mailbox>,
    protocol: Protocol,
    /// The shard whose commits the subscriber's replies wait for.
    shard: Option<u16>,
}

/// The Pub/Sub registry of a node, see the module documentation.
#[derive(Default)]
pub struct PubSub {
    tables: Mutex<[Table; 3]>,
    /// Queue of messages for the other nodes, set once the forwarding task runs.
    pub cluster_sender: OnceLock<mpsc::Sender<ClusterMessage>>,
}

/// A published message for the subscribers of other nodes.
#[derive(Clone, Debug)]
pub struct ClusterMessage {
    /// True for a sharded channel (SPUBLISH).
    pub sharded: bool,
    /// Name of the channel.
    pub channel: Box<[u8]>,
    /// Payload of the message.
    pub message: Box<[u8]>,
    /// The commit that must precede delivery.
    pub gate: Gate,
}

/// The commit gate of a message: none, or the journal end of a shard that must be committed first.
#[derive(Clone, Default)]
pub struct Gate {
    /// The shard; `None` if the message comes from no shard of this node.
    pub shard: Option<u16>,
    /// The journal end to be committed; 0 for none.
    pub end: i64,
    /// The shard's count of voided replies when the message was created.
    pub voided: u64,
    /// Queue for messages to clients of other shards.
    pub deferred: Option<Arc<Deferred>>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "Gate({:?}, {})", self.shard, self.end)
    }
}

impl Gate {
    /// An open gate: the message does not wait.
    pub const OPEN: Gate = Gate { shard: None, end: 0, voided: 0, deferred: None };

    /// Sends a message to a client of the shard `of` once the gate is committed.
    pub(crate) fn send(&self, bytes: Bytes, mailbox: &Arc<Mailbox>, of: Option<u16>) {
        match &self.deferred {
            Some(deferred) if of != self.shard => deferred.send(mailbox, bytes, self.end, self.voided),
            _ => mailbox.push_gated(Push { bytes, gate: self.end, voided: self.voided }),
        }
    }
}

/// One message in both RESP versions, each encoded on first use.
struct Message<'a> {
    parts: Vec<&'a [u8]>,
    written: [Option<Bytes>; 2],
}

impl<'a> Message<'a> {
    fn new(parts: Vec<&'a [u8]>) -> Message<'a> {
        Message { parts, written: [None, None] }
    }

    fn send(&mut self, subscriber: &Subscriber, gate: &Gate) {
        let slot = &mut self.written[usize::from(subscriber.protocol == Protocol::Resp3)];
        let bytes = slot.get_or_insert_with(|| {
            let mut out = BytesMut::new();
            let mut to = Encoder::new(&mut out, subscriber.protocol);
            to.push(self.parts.len());
            self.parts.iter().for_each(|part| to.bulk(part));
            out.freeze()
        });
        gate.send(bytes.clone(), &subscriber.mailbox, subscriber.shard);
    }
}

impl PubSub {
    fn tables(&self) -> MutexGuard<'_, [Table; 3]> {
        lock(&self.tables)
    }

    /// Subscribes a client; returns false if it was already subscribed.
    pub fn subscribe(&self, kind: Kind, name: &[u8], session: &Session) -> bool {
        let subscriber = Subscriber {
            mailbox: Arc::clone(&session.mailbox),
            protocol: session.protocol,
            shard: session.shard.as_ref().map(|shard| shard.index),
        };
        let mut tables = self.tables();
        let table = &mut tables[kind as usize];
        if !table.contains_key(name) {
            table.insert(name.into(), BTreeMap::new());
        }
        table.get_mut(name).is_some_and(|subscribers| subscribers.insert(session.id, subscriber).is_none())
    }

    /// Unsubscribes a client; returns whether it was subscribed.
    pub fn unsubscribe(&self, kind: Kind, name: &[u8], client: u64) -> bool {
        let mut tables = self.tables();
        let table = &mut tables[kind as usize];
        let Some(subscribers) = table.get_mut(name) else { return false };
        let did = subscribers.remove(&client).is_some();
        if subscribers.is_empty() {
            table.remove(name);
        }
        did
    }

    /// True if the client is subscribed to this name.
    pub fn is_subscribed(&self, kind: Kind, name: &[u8], client: u64) -> bool {
        self.tables()[kind as usize].get(name).is_some_and(|subscribers| subscribers.contains_key(&client))
    }

    /// Delivers a message to the subscribers on this node; returns how many there are.
    pub fn publish(&self, channel: &[u8], message: &[u8], gate: &Gate) -> usize {
        let tables = self.tables();
        let mut receivers = 0;
        if let Some(subscribers) = tables[Kind::Channel as usize].get(channel) {
            let mut message = Message::new(vec![b"message", channel, message]);
            subscribers.values().for_each(|subscriber| message.send(subscriber, gate));
            receivers += subscribers.len();
        }
        for (pattern, subscribers) in &tables[Kind::Pattern as usize] {
            if glob(pattern, channel, false) {
                let mut message = Message::new(vec![b"pmessage", pattern, channel, message]);
                subscribers.values().for_each(|subscriber| message.send(subscriber, gate));
                receivers += subscribers.len();
            }
        }
        receivers
    }

    /// Delivers a sharded message to the subscribers on this node; returns how many there are.
    pub fn publish_sharded(&self, channel: &[u8], message: &[u8], gate: &Gate) -> usize {
        let tables = self.tables();
        let Some(subscribers) = tables[Kind::Sharded as usize].get(channel) else { return 0 };
        let mut message = Message::new(vec![b"smessage", channel, message]);
        subscribers.values().for_each(|subscriber| message.send(subscriber, gate));
        subscribers.len()
    }

    /// Forwards a message to the other nodes. A message that exceeds their queue is dropped, as on the Redis cluster
    /// bus.
    pub fn forward_to_nodes(&self, sharded: bool, channel: &[u8], message: &[u8], gate: &Gate) {
        if let Some(cluster_sender) = self.cluster_sender.get() {
            let sent = cluster_sender.try_send(ClusterMessage {
                sharded,
                channel: channel.into(),
                message: message.into(),
                gate: gate.clone(),
            });
            if sent.is_err() {
                tracing::debug!("cluster message dropped");
            }
        }
    }

    /// Unsubscribes the clients of a shard from sharded channels whose slots have left it. Their connections send
    /// `sunsubscribe` and update their subscription count.
    pub fn unsubscribe_slots(&self, shard: u16, has_left: impl Fn(&[u8]) -> bool) {
        let mut tables = self.tables();
        let table = &mut tables[Kind::Sharded as usize];
        if table.is_empty() {
            return;
        }
        for (channel, subscribers) in table.iter_mut().filter(|(channel, _)| has_left(channel)) {
            subscribers.retain(|_, subscriber| {
                let stays = subscriber.shard != Some(shard);
                if !stays {
                    subscriber.mailbox.remove_sharded_channel(channel);
                }
                stays
            });
        }
        table.retain(|_, subscribers| !subscribers.is_empty());
    }

    /// Publishes keyspace notifications as configured by `notify-keyspace-events`.
    pub fn notify(&self, notifications: &[Notification], wanted: u32, gate: &Gate) {
        for Notification { event, key, .. } in notifications {
            if wanted & class::KEYSPACE != 0 {
                self.publish(&[b"__keyspace@0__:", &key[..]].concat(), event.as_bytes(), gate);
            }
            if wanted & class::KEYEVENT != 0 {
                self.publish(format!("__keyevent@0__:{event}").as_bytes(), key, gate);
            }
        }
    }

    /// Active channel or pattern names that match a pattern.
    pub fn names(&self, kind: Kind, pattern: Option<&[u8]>) -> Vec<Vec<u8>> {
        let fits = |name: &[u8]| pattern.is_none_or(|pattern| glob(pattern, name, false));
        self.tables()[kind as usize].keys().filter(|name| fits(name)).map(|name| name.to_vec()).collect()
    }

    /// Number of subscribers of a name.
    pub fn subscribers(&self, kind: Kind, name: &[u8]) -> usize {
        self.tables()[kind as usize].get(name).map_or(0, BTreeMap::len)
    }

    /// Number of active names.
    pub fn count(&self, kind: Kind) -> usize {
        self.tables()[kind as usize].len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(session: &Session) -> Vec<String> {
        let pushes = session.mailbox.take().pushes;
        pushes.iter().map(|push| String::from_utf8_lossy(&push.bytes).replace("\r\n", " ")).collect()
    }

    #[test]
    fn messages_are_delivered_to_channels_and_patterns() {
        let pubsub = PubSub::default();
        let (one, mut two) = (
            Session::new(1, String::new(), String::new(), 0),
            Session::new(2, String::new(), String::new(), 0),
        );
        two.protocol = Protocol::Resp3;
        assert!(pubsub.subscribe(Kind::Channel, b"news", &one));
        assert!(!pubsub.subscribe(Kind::Channel, b"news", &one));
        assert!(pubsub.subscribe(Kind::Pattern, b"n*", &two));
        assert_eq!(pubsub.publish(b"news", b"hi", &Gate::OPEN), 2);
        assert_eq!(texts(&one), ["*3 $7 message $4 news $2 hi "]);
        assert_eq!(texts(&two), [">4 $8 pmessage $2 n* $4 news $2 hi "]);
        assert_eq!(pubsub.publish_sharded(b"news", b"hi", &Gate::OPEN), 0);
        assert!(pubsub.unsubscribe(Kind::Channel, b"news", 1));
        assert_eq!(pubsub.count(Kind::Channel), 0);
        assert_eq!(pubsub.publish(b"other", b"hi", &Gate::OPEN), 0);
    }

    #[test]
    fn message_to_client_of_another_shard_waits_for_the_commit() {
        let (pubsub, one) = (PubSub::default(), Session::new(1, String::new(), String::new(), 0));
        pubsub.subscribe(Kind::Channel, b"c", &one);
        let deferred = Arc::new(Deferred::default());
        let gate = Gate { shard: Some(3), end: 9, voided: 2, deferred: Some(Arc::clone(&deferred)) };
        pubsub.publish(b"c", b"m", &gate);
        assert!(one.mailbox.take().pushes.is_empty(), "the write is not committed");
        deferred.release(9, 2);
        assert_eq!(one.mailbox.take().pushes[0].gate, 0);
        pubsub.publish(b"c", b"m", &Gate { shard: None, ..gate });
        let push = &one.mailbox.take().pushes[0];
        assert_eq!((push.gate, push.voided), (9, 2), "the connection waits for its own shard");
    }

    #[test]
    fn keyspace_notifications_contain_key_and_event() {
        let (pubsub, one) = (PubSub::default(), Session::new(1, String::new(), String::new(), 0));
        pubsub.subscribe(Kind::Pattern, b"__key*", &one);
        let happened = [Notification { class: class::STRING, event: "set", key: b"k"[..].into() }];
        pubsub.notify(&happened, class::KEYSPACE, &Gate::OPEN);
        assert_eq!(texts(&one), ["*4 $8 pmessage $6 __key* $16 __keyspace@0__:k $3 set "]);
        pubsub.notify(&happened, class::KEYEVENT, &Gate::OPEN);
        assert_eq!(texts(&one), ["*4 $8 pmessage $6 __key* $18 __keyevent@0__:set $1 k "]);
    }
}
