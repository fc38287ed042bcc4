//! Client-side caching: which client has read which key, and who hears that it changed.
//!
//! One table for the node: a key is of one shard, so the readers of all shards share it. What a client read is remembered under the
//! shard's lock, before its answer leaves; what changed is told when the change is committed. A client that hears of a change and reads
//! again waits for that commit, so it never keeps what is old.
//!
//! Invariant: a key in the table has a reader. Lock order: a leaf. Nothing is called under the lock but mailboxes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use hashbrown::HashMap;
use moim_wire_resp::{Encoder, Protocol};

use crate::pubsub::{Gate, Kind, PubSub};
use crate::session::Mailbox;
use crate::shared::lock;

/// The channel of those who hear of changes for somebody else.
const CHANNEL: &[u8] = b"__redis__:invalidate";

/// What CLIENT TRACKING ON asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// Every key with one of the prefixes, read or not.
    pub broadcast: bool,
    /// Only what is read right behind CLIENT CACHING YES.
    pub opt_in: bool,
    /// Not what is read right behind CLIENT CACHING NO.
    pub opt_out: bool,
    /// Not what the client changes itself.
    pub no_loop: bool,
    /// Who hears of it in place of the client.
    pub redirect: Option<u64>,
    /// Of the keys it wants to hear of; none is all.
    pub prefixes: BTreeSet<Box<[u8]>>,
}

/// Where a client is told.
#[derive(Clone)]
pub struct Reached {
    /// Its mailbox.
    pub mailbox: Arc<Mailbox>,
    /// What it speaks.
    pub protocol: Protocol,
    /// The shard whose commits its answers wait for.
    pub shard: Option<u16>,
}

struct Tracker {
    wish: Wish,
    /// The client itself, and who is told: the same if it has named nobody.
    own: Reached,
    reached: Reached,
    /// Whoever was to hear of it is gone.
    broken: bool,
}

#[derive(Default)]
struct Table {
    clients: BTreeMap<u64, Tracker>,
    readers: HashMap<Box<[u8]>, Vec<u64>>,
}

/// See the module.
#[derive(Default)]
pub struct Tracking {
    table: Mutex<Table>,
}

/// What INFO shows.
pub struct Counts {
    /// Clients that track.
    pub clients: usize,
    /// Keys that somebody has read.
    pub keys: usize,
    /// Readers of all of them.
    pub items: usize,
    /// Prefixes that somebody wants to hear of.
    pub prefixes: usize,
}

impl Tracking {
    /// A client tracks from now on, or tracks otherwise.
    pub fn begin(&self, client: u64, wish: Wish, own: Reached, told: Option<Reached>) {
        let reached = told.unwrap_or_else(|| own.clone());
        lock(&self.table).clients.insert(client, Tracker { wish, own, reached, broken: false });
    }

    /// A client tracks no more, or is gone: whoever it was to hear for is told.
    pub fn end(&self, client: u64) {
        let mut table = lock(&self.table);
        if table.clients.remove(&client).is_some() {
            table.readers.retain(|_, readers| {
                readers.retain(|reader| *reader != client);
                !readers.is_empty()
            });
        }
        for (_, tracker) in table.clients.iter_mut() {
            if tracker.wish.redirect == Some(client) && !std::mem::replace(&mut tracker.broken, true) {
                tracker.tell_broken(client);
            }
        }
    }

    /// A client speaks another protocol from now on.
    pub fn speak(&self, client: u64, protocol: Protocol) {
        for (own, tracker) in lock(&self.table).clients.iter_mut() {
            if tracker.wish.redirect.unwrap_or(*own) == client {
                tracker.reached.protocol = protocol;
            }
            if *own == client {
                tracker.own.protocol = protocol;
            }
        }
    }

    /// Whether whoever was to hear for this client is gone.
    pub fn is_broken(&self, client: u64) -> bool {
        lock(&self.table).clients.get(&client).is_some_and(|tracker| tracker.broken)
    }

    /// A client has read a key. When there are more than `most`, some other key is taken to have changed.
    pub fn on_read(&self, client: u64, key: &[u8], most: usize, pubsub: &PubSub) {
        let mut table = lock(&self.table);
        if let Some(readers) = table.readers.get_mut(key) {
            if !readers.contains(&client) {
                readers.push(client);
            }
            return;
        }
        table.readers.insert(key.into(), vec![client]);
        if most > 0 && table.readers.len() > most {
            let other = table.readers.keys().find(|other| ***other != *key).cloned();
            other.into_iter().for_each(|other| table.changed(&other, 0, &Gate::OPEN, pubsub));
        }
    }

    /// Keys have changed, each by somebody's hand or (0) by nobody's, which is known when the gate opens. Answers whether anybody
    /// tracks.
    pub fn on_changed(&self, keys: &[(Box<[u8]>, u64)], gate: &Gate, pubsub: &PubSub) -> bool {
        let mut table = lock(&self.table);
        keys.iter().for_each(|(key, writer)| table.changed(key, *writer, gate, pubsub));
        for (client, tracker) in table.clients.iter().filter(|(_, tracker)| tracker.wish.broadcast) {
            // One message for each prefix; without any the empty one is meant.
            let empty: Box<[u8]> = Box::default();
            let prefixes = &tracker.wish.prefixes;
            let all = prefixes.is_empty().then_some(&empty);
            for prefix in all.into_iter().chain(prefixes) {
                let is_told = |writer: u64| !tracker.wish.no_loop || writer != *client;
                let others = keys.iter().filter(|(key, writer)| key.starts_with(prefix) && is_told(*writer));
                let wanted: BTreeSet<&[u8]> = others.map(|(key, _)| &**key).collect();
                if !wanted.is_empty() {
                    tracker.tell(Some(&wanted.into_iter().collect::<Vec<_>>()), gate, pubsub);
                }
            }
        }
        !table.clients.is_empty()
    }

    /// Everything has changed.
    pub fn on_all_changed(&self, gate: &Gate, pubsub: &PubSub) {
        let mut table = lock(&self.table);
        table.readers.clear();
        table.clients.values().for_each(|tracker| tracker.tell(None, gate, pubsub));
    }

    /// How much there is.
    pub fn counts(&self) -> Counts {
        let table = lock(&self.table);
        let prefixes: BTreeSet<_> =
            table.clients.values().flat_map(|tracker| tracker.wish.prefixes.iter()).collect();
        Counts {
            clients: table.clients.len(),
            keys: table.readers.len(),
            items: table.readers.values().map(Vec::len).sum(),
            prefixes: prefixes.len(),
        }
    }
}

impl Table {
    /// Tells the readers of a key, who have read it no more.
    fn changed(&mut self, key: &[u8], writer: u64, gate: &Gate, pubsub: &PubSub) {
        let Some(readers) = self.readers.remove(key) else { return };
        for reader in readers {
            // One that broadcasts now has the same told to it with the others.
            let Some(tracker) = self.clients.get(&reader).filter(|tracker| !tracker.wish.broadcast) else {
                continue;
            };
            if !tracker.wish.no_loop || reader != writer {
                tracker.tell(Some(&[key]), gate, pubsub);
            }
        }
    }
}

impl Tracker {
    /// Says which keys changed; `None` is all of them.
    fn tell(&self, keys: Option<&[&[u8]]>, gate: &Gate, pubsub: &PubSub) {
        let is_push = self.reached.protocol == Protocol::Resp3;
        // Without pushes only one that listens to the channel for somebody can be told.
        let listens =
            || self.wish.redirect.is_some_and(|client| pubsub.is_listening(Kind::Channel, CHANNEL, client));
        if self.broken || !is_push && !listens() {
            return;
        }
        let mut out = BytesMut::new();
        let mut to = Encoder::new(&mut out, self.reached.protocol);
        if is_push {
            to.push(2);
            to.bulk(b"invalidate");
        } else {
            to.push(3);
            to.bulk(b"message");
            to.bulk(CHANNEL);
        }
        match keys {
            Some(keys) => {
                to.array(keys.len());
                keys.iter().for_each(|key| to.bulk(key));
            }
            None => to.null_array(),
        }
        self.send(out.freeze(), gate);
    }

    /// Says to the client itself that nobody hears for it any more.
    fn tell_broken(&self, client: u64) {
        let mut out = BytesMut::new();
        if self.own.protocol == Protocol::Resp3 {
            let mut to = Encoder::new(&mut out, self.own.protocol);
            to.push(2);
            to.bulk(b"tracking-redir-broken");
            to.integer(client as i64);
            self.own.mailbox.push(out.freeze());
        }
    }

    fn send(&self, message: Bytes, gate: &Gate) {
        gate.send(message, &self.reached.mailbox, self.reached.shard);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Session;

    fn texts(session: &Session) -> Vec<String> {
        let pushes = session.mailbox.take().pushes;
        pushes.iter().map(|push| String::from_utf8_lossy(&push.bytes).replace("\r\n", " ")).collect()
    }

    fn client(id: u64, protocol: Protocol) -> Session {
        Session { protocol, ..Session::new(id, String::new(), String::new(), 0) }
    }

    fn reached(session: &Session) -> Reached {
        Reached { mailbox: Arc::clone(&session.mailbox), protocol: session.protocol, shard: None }
    }

    /// Keys that a client changed.
    fn keys(names: &[&str], writer: u64) -> Vec<(Box<[u8]>, u64)> {
        names.iter().map(|name| (name.as_bytes().into(), writer)).collect()
    }

    #[test]
    fn readers_hear_of_a_change_once() {
        let (tracking, pubsub) = (Tracking::default(), PubSub::default());
        let (one, two) = (client(1, Protocol::Resp3), client(2, Protocol::Resp3));
        tracking.begin(1, Wish::default(), reached(&one), None);
        tracking.begin(2, Wish { no_loop: true, ..Wish::default() }, reached(&two), None);
        for reader in [1, 2, 2] {
            tracking.on_read(reader, b"a", 10, &pubsub);
        }
        tracking.on_changed(&keys(&["a", "b"], 2), &Gate::OPEN, &pubsub);
        tracking.on_changed(&keys(&["a"], 3), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate *1 $1 a "]);
        assert_eq!(texts(&two), [""; 0], "its own change");
        tracking.on_read(2, b"a", 10, &pubsub);
        tracking.on_changed(&keys(&["a"], 0), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&two).len(), 1, "its time had come");
        tracking.on_all_changed(&Gate::OPEN, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate _ "]);
        tracking.on_read(1, b"a", 10, &pubsub);
        tracking.end(1);
        assert_eq!((tracking.counts().clients, tracking.counts().keys), (1, 0));
    }

    #[test]
    fn a_full_table_forgets_a_key_by_saying_that_it_changed() {
        let (tracking, pubsub) = (Tracking::default(), PubSub::default());
        let one = client(1, Protocol::Resp3);
        tracking.begin(1, Wish::default(), reached(&one), None);
        tracking.on_read(1, b"a", 1, &pubsub);
        tracking.on_read(1, b"b", 1, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate *1 $1 a "]);
        assert_eq!(tracking.counts().keys, 1);
    }

    #[test]
    fn prefixes_are_told_together_and_listeners_for_others() {
        let (tracking, pubsub) = (Tracking::default(), PubSub::default());
        let (one, two) = (client(1, Protocol::Resp3), client(2, Protocol::Resp2));
        let prefixes = [b"a".as_slice().into(), b"x".as_slice().into()].into();
        tracking.begin(1, Wish { broadcast: true, prefixes, ..Wish::default() }, reached(&one), None);
        let three = client(3, Protocol::Resp3);
        let wish = Wish { redirect: Some(2), ..Wish::default() };
        tracking.begin(3, wish, reached(&three), Some(reached(&two)));
        tracking.on_read(3, b"b", 10, &pubsub);
        tracking.on_changed(&keys(&["a2", "b", "x", "a1", "a1"], 9), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate *2 $2 a1 $2 a2 ", ">2 $10 invalidate *1 $1 x "]);
        assert_eq!(texts(&two), [""; 0], "it does not listen");
        pubsub.subscribe(Kind::Channel, CHANNEL, &two);
        tracking.on_read(3, b"b", 10, &pubsub);
        tracking.on_changed(&keys(&["b"], 9), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&two), ["*3 $7 message $20 __redis__:invalidate *1 $1 b "]);
        tracking.end(2);
        assert!(tracking.is_broken(3) && !tracking.is_broken(1));
        assert_eq!(texts(&three), [">2 $21 tracking-redir-broken :2 "]);
    }
}
