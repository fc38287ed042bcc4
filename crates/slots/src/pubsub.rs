//! Who listens to which channel, and how a message reaches them.
//!
//! One table for the node: the listeners of all its shards share it. Messages go through the mailboxes of the
//! connections, which bound what piles up for a client that does not read.
//!
//! Lock order: a leaf. Nothing is called under the lock but mailboxes.

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

/// What can be listened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A channel of the whole cluster.
    Channel,
    /// All channels whose name fits.
    Pattern,
    /// A channel that lives with its slot.
    Sharded,
}

/// Names and who listens to them.
type Table = HashMap<Box<[u8]>, BTreeMap<u64, Listener>>;

#[derive(Clone)]
struct Listener {
    mailbox: Arc<Mailbox>,
    protocol: Protocol,
    /// The shard whose commits its answers wait for.
    shard: Option<u16>,
}

/// See the module.
#[derive(Default)]
pub struct PubSub {
    tables: Mutex<[Table; 3]>,
    /// Where messages for other nodes go, once somebody takes them.
    pub told: OnceLock<mpsc::Sender<Told>>,
}

/// A message for the subscribers of other nodes.
#[derive(Clone, Debug)]
pub struct Told {
    /// Whether its channel lives with its slot.
    pub sharded: bool,
    /// The channel.
    pub channel: Box<[u8]>,
    /// The message.
    pub message: Box<[u8]>,
    /// What has to be committed first.
    pub gate: Gate,
}

/// What a message waits for: nothing, or that a shard has committed what it tells of.
#[derive(Clone, Default)]
pub struct Gate {
    /// The shard; none where the message comes from no shard of this node.
    pub shard: Option<u16>,
    /// The end of its journal; 0 is nothing.
    pub end: i64,
    /// The shard's count of voided answers.
    pub voided: u64,
    /// Where messages for clients of other shards wait.
    pub deferred: Option<Arc<Deferred>>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "Gate({:?}, {})", self.shard, self.end)
    }
}

impl Gate {
    /// Nothing to wait for.
    pub const OPEN: Gate = Gate { shard: None, end: 0, voided: 0, deferred: None };

    /// Sends a message to a client of the shard `of`, once it may leave.
    pub(crate) fn send(&self, bytes: Bytes, mailbox: &Arc<Mailbox>, of: Option<u16>) {
        match &self.deferred {
            Some(deferred) if of != self.shard => deferred.send(mailbox, bytes, self.end, self.voided),
            _ => mailbox.push_gated(Push { bytes, gate: self.end, voided: self.voided }),
        }
    }
}

/// The same message for both protocols, written when somebody needs it.
struct Message<'a> {
    parts: Vec<&'a [u8]>,
    written: [Option<Bytes>; 2],
}

impl<'a> Message<'a> {
    fn new(parts: Vec<&'a [u8]>) -> Message<'a> {
        Message { parts, written: [None, None] }
    }

    fn send(&mut self, listener: &Listener, gate: &Gate) {
        let slot = &mut self.written[usize::from(listener.protocol == Protocol::Resp3)];
        let bytes = slot.get_or_insert_with(|| {
            let mut out = BytesMut::new();
            let mut to = Encoder::new(&mut out, listener.protocol);
            to.push(self.parts.len());
            self.parts.iter().for_each(|part| to.bulk(part));
            out.freeze()
        });
        gate.send(bytes.clone(), &listener.mailbox, listener.shard);
    }
}

impl PubSub {
    fn tables(&self) -> MutexGuard<'_, [Table; 3]> {
        lock(&self.tables)
    }

    /// A client listens; says whether it did not before.
    pub fn subscribe(&self, kind: Kind, name: &[u8], session: &Session) -> bool {
        let listener = Listener {
            mailbox: Arc::clone(&session.mailbox),
            protocol: session.protocol,
            shard: session.shard.as_ref().map(|shard| shard.index),
        };
        let mut tables = self.tables();
        let table = &mut tables[kind as usize];
        if !table.contains_key(name) {
            table.insert(name.into(), BTreeMap::new());
        }
        table.get_mut(name).is_some_and(|listeners| listeners.insert(session.id, listener).is_none())
    }

    /// A client listens no more; says whether it did.
    pub fn unsubscribe(&self, kind: Kind, name: &[u8], client: u64) -> bool {
        let mut tables = self.tables();
        let table = &mut tables[kind as usize];
        let Some(listeners) = table.get_mut(name) else { return false };
        let did = listeners.remove(&client).is_some();
        if listeners.is_empty() {
            table.remove(name);
        }
        did
    }

    /// Whether a client listens to a name.
    pub fn is_listening(&self, kind: Kind, name: &[u8], client: u64) -> bool {
        self.tables()[kind as usize].get(name).is_some_and(|listeners| listeners.contains_key(&client))
    }

    /// Sends a message to everybody on this node who listens; says how many there are.
    pub fn publish(&self, channel: &[u8], message: &[u8], gate: &Gate) -> usize {
        let tables = self.tables();
        let mut reached = 0;
        if let Some(listeners) = tables[Kind::Channel as usize].get(channel) {
            let mut message = Message::new(vec![b"message", channel, message]);
            listeners.values().for_each(|listener| message.send(listener, gate));
            reached += listeners.len();
        }
        for (pattern, listeners) in &tables[Kind::Pattern as usize] {
            if glob(pattern, channel, false) {
                let mut message = Message::new(vec![b"pmessage", pattern, channel, message]);
                listeners.values().for_each(|listener| message.send(listener, gate));
                reached += listeners.len();
            }
        }
        reached
    }

    /// The same for a channel that lives with its slot.
    pub fn publish_sharded(&self, channel: &[u8], message: &[u8], gate: &Gate) -> usize {
        let tables = self.tables();
        let Some(listeners) = tables[Kind::Sharded as usize].get(channel) else { return 0 };
        let mut message = Message::new(vec![b"smessage", channel, message]);
        listeners.values().for_each(|listener| message.send(listener, gate));
        listeners.len()
    }

    /// Sends a message on to the other nodes; one that they cannot keep up with is lost, as anywhere between nodes.
    pub fn tell_others(&self, sharded: bool, channel: &[u8], message: &[u8], gate: &Gate) {
        if let Some(told) = self.told.get() {
            let told_now = told.try_send(Told {
                sharded,
                channel: channel.into(),
                message: message.into(),
                gate: gate.clone(),
            });
            if told_now.is_err() {
                tracing::debug!("a message did not reach the other nodes");
            }
        }
    }

    /// Unsubscribes the clients of a shard from channels of slots that have left it. Their connections tell them, and count what
    /// they still listen to.
    pub fn leave_slots(&self, shard: u16, has_left: impl Fn(&[u8]) -> bool) {
        let mut tables = self.tables();
        let table = &mut tables[Kind::Sharded as usize];
        if table.is_empty() {
            return;
        }
        for (channel, listeners) in table.iter_mut().filter(|(channel, _)| has_left(channel)) {
            listeners.retain(|_, listener| {
                let stays = listener.shard != Some(shard);
                if !stays {
                    listener.mailbox.leave_channel(channel);
                }
                stays
            });
        }
        table.retain(|_, listeners| !listeners.is_empty());
    }

    /// Tells what happened to keys, as `notify-keyspace-events` wants it.
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

    /// The names that somebody listens to and that fit.
    pub fn names(&self, kind: Kind, pattern: Option<&[u8]>) -> Vec<Vec<u8>> {
        let fits = |name: &[u8]| pattern.is_none_or(|pattern| glob(pattern, name, false));
        self.tables()[kind as usize].keys().filter(|name| fits(name)).map(|name| name.to_vec()).collect()
    }

    /// How many listen to a name.
    pub fn listeners(&self, kind: Kind, name: &[u8]) -> usize {
        self.tables()[kind as usize].get(name).map_or(0, BTreeMap::len)
    }

    /// How many names somebody listens to.
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
    fn messages_reach_channels_and_patterns() {
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
    fn a_message_for_a_client_of_another_shard_waits_for_the_shard_it_tells_of() {
        let (pubsub, one) = (PubSub::default(), Session::new(1, String::new(), String::new(), 0));
        pubsub.subscribe(Kind::Channel, b"c", &one);
        let deferred = Arc::new(Deferred::default());
        let gate = Gate { shard: Some(3), end: 9, voided: 2, deferred: Some(Arc::clone(&deferred)) };
        pubsub.publish(b"c", b"m", &gate);
        assert!(one.mailbox.take().pushes.is_empty(), "its change is not committed");
        deferred.release(9, 2);
        assert_eq!(one.mailbox.take().pushes[0].gate, 0);
        pubsub.publish(b"c", b"m", &Gate { shard: None, ..gate });
        let push = &one.mailbox.take().pushes[0];
        assert_eq!((push.gate, push.voided), (9, 2), "the connection waits for its own shard");
    }

    #[test]
    fn notifications_name_the_key_and_the_event() {
        let (pubsub, one) = (PubSub::default(), Session::new(1, String::new(), String::new(), 0));
        pubsub.subscribe(Kind::Pattern, b"__key*", &one);
        let happened = [Notification { class: class::STRING, event: "set", key: b"k"[..].into() }];
        pubsub.notify(&happened, class::KEYSPACE, &Gate::OPEN);
        assert_eq!(texts(&one), ["*4 $8 pmessage $6 __key* $16 __keyspace@0__:k $3 set "]);
        pubsub.notify(&happened, class::KEYEVENT, &Gate::OPEN);
        assert_eq!(texts(&one), ["*4 $8 pmessage $6 __key* $18 __keyevent@0__:set $1 k "]);
    }
}
