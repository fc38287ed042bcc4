//! Client-side caching (CLIENT TRACKING): the tracking table of keys and the clients that read them, and the
//! invalidation messages.
//!
//! One tracking table per node: a key belongs to one shard, so clients of all shards share it. A read is registered
//! under the shard's lock, before its reply is sent; an invalidation is sent when the write is committed. A client
//! that receives an invalidation and reads again waits for that commit, so it never caches a stale value.
//!
//! Invariant: every key in the table has at least one reader. Lock order: a leaf. Only mailboxes are called under the
//! lock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use hashbrown::HashMap;
use moim_wire_resp::{Encoder, Protocol};

use crate::pubsub::{Gate, Kind, PubSub};
use crate::session::Mailbox;
use crate::shared::lock;

/// The Pub/Sub channel for invalidations that are redirected to another client (RESP2).
const CHANNEL: &[u8] = b"__redis__:invalidate";

/// Options of CLIENT TRACKING ON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrackingOptions {
    /// BCAST: invalidate every key with one of the prefixes, read or not.
    pub broadcast: bool,
    /// OPTIN: track only the reads that directly follow CLIENT CACHING YES.
    pub opt_in: bool,
    /// OPTOUT: do not track the reads that directly follow CLIENT CACHING NO.
    pub opt_out: bool,
    /// NOLOOP: no invalidations for the client's own writes.
    pub no_loop: bool,
    /// REDIRECT: the client that receives the invalidations instead of this one.
    pub redirect: Option<u64>,
    /// PREFIX: key prefixes in broadcasting mode; empty means all keys.
    pub prefixes: BTreeSet<Box<[u8]>>,
}

/// The connection that receives invalidation messages.
#[derive(Clone)]
pub struct PushTarget {
    /// The connection's mailbox.
    pub mailbox: Arc<Mailbox>,
    /// RESP version of the connection.
    pub protocol: Protocol,
    /// The shard whose commits the connection's replies wait for.
    pub shard: Option<u16>,
}

struct Tracker {
    options: TrackingOptions,
    /// The tracking client itself, and the receiver of its invalidations: the same client unless REDIRECT names
    /// another.
    own: PushTarget,
    target: PushTarget,
    /// The REDIRECT target has disconnected.
    is_redirect_broken: bool,
}

#[derive(Default)]
struct Table {
    clients: BTreeMap<u64, Tracker>,
    readers: HashMap<Box<[u8]>, Vec<u64>>,
}

/// The tracking table, see the module documentation.
#[derive(Default)]
pub struct Tracking {
    table: Mutex<Table>,
}

/// Tracking statistics for INFO.
pub struct Counts {
    /// Clients with tracking enabled.
    pub clients: usize,
    /// Keys in the tracking table (`tracking_total_keys`).
    pub keys: usize,
    /// Client registrations over all keys (`tracking_total_items`).
    pub items: usize,
    /// Distinct prefixes in broadcasting mode (`tracking_total_prefixes`).
    pub prefixes: usize,
}

impl Tracking {
    /// Enables tracking for a client, or replaces its options.
    pub fn enable(
        &self,
        client: u64,
        options: TrackingOptions,
        own: PushTarget,
        redirect_target: Option<PushTarget>,
    ) {
        let target = redirect_target.unwrap_or_else(|| own.clone());
        lock(&self.table).clients.insert(client, Tracker { options, own, target, is_redirect_broken: false });
    }

    /// Disables tracking for a client, or removes a disconnected client. Clients that redirect to it are sent
    /// `tracking-redir-broken`.
    pub fn disable(&self, client: u64) {
        let mut table = lock(&self.table);
        if table.clients.remove(&client).is_some() {
            table.readers.retain(|_, readers| {
                readers.retain(|reader| *reader != client);
                !readers.is_empty()
            });
        }
        for (_, tracker) in table.clients.iter_mut() {
            if tracker.options.redirect == Some(client)
                && !std::mem::replace(&mut tracker.is_redirect_broken, true)
            {
                tracker.send_redirect_broken(client);
            }
        }
    }

    /// Records that a client switched to another RESP version (HELLO).
    pub fn set_protocol(&self, client: u64, protocol: Protocol) {
        for (own, tracker) in lock(&self.table).clients.iter_mut() {
            if tracker.options.redirect.unwrap_or(*own) == client {
                tracker.target.protocol = protocol;
            }
            if *own == client {
                tracker.own.protocol = protocol;
            }
        }
    }

    /// True if the REDIRECT target of this client has disconnected.
    pub fn is_redirect_broken(&self, client: u64) -> bool {
        lock(&self.table).clients.get(&client).is_some_and(|tracker| tracker.is_redirect_broken)
    }

    /// Registers a read. Above `max_keys` keys another key is invalidated and removed, as with
    /// `tracking-table-max-keys`.
    pub fn on_read(&self, client: u64, key: &[u8], max_keys: usize, pubsub: &PubSub) {
        let mut table = lock(&self.table);
        if let Some(readers) = table.readers.get_mut(key) {
            if !readers.contains(&client) {
                readers.push(client);
            }
            return;
        }
        table.readers.insert(key.into(), vec![client]);
        if max_keys > 0 && table.readers.len() > max_keys {
            let other = table.readers.keys().find(|other| ***other != *key).cloned();
            other.into_iter().for_each(|other| table.invalidate(&other, 0, &Gate::OPEN, pubsub));
        }
    }

    /// Sends invalidations for modified keys, each with the id of the client that wrote it (0 for expiry and
    /// eviction), once the gate is committed. Returns whether any client tracks.
    pub fn on_changed(&self, keys: &[(Box<[u8]>, u64)], gate: &Gate, pubsub: &PubSub) -> bool {
        let mut table = lock(&self.table);
        keys.iter().for_each(|(key, writer)| table.invalidate(key, *writer, gate, pubsub));
        for (client, tracker) in table.clients.iter().filter(|(_, tracker)| tracker.options.broadcast) {
            // One message per prefix; no prefix means the empty prefix.
            let empty: Box<[u8]> = Box::default();
            let prefixes = &tracker.options.prefixes;
            let all = prefixes.is_empty().then_some(&empty);
            for prefix in all.into_iter().chain(prefixes) {
                let is_notified = |writer: u64| !tracker.options.no_loop || writer != *client;
                let others =
                    keys.iter().filter(|(key, writer)| key.starts_with(prefix) && is_notified(*writer));
                let wanted: BTreeSet<&[u8]> = others.map(|(key, _)| &**key).collect();
                if !wanted.is_empty() {
                    tracker.send_invalidation(Some(&wanted.into_iter().collect::<Vec<_>>()), gate, pubsub);
                }
            }
        }
        !table.clients.is_empty()
    }

    /// Invalidates all keys (FLUSHALL).
    pub fn on_all_changed(&self, gate: &Gate, pubsub: &PubSub) {
        let mut table = lock(&self.table);
        table.readers.clear();
        table.clients.values().for_each(|tracker| tracker.send_invalidation(None, gate, pubsub));
    }

    /// The statistics for INFO.
    pub fn counts(&self) -> Counts {
        let table = lock(&self.table);
        let prefixes: BTreeSet<_> =
            table.clients.values().flat_map(|tracker| tracker.options.prefixes.iter()).collect();
        Counts {
            clients: table.clients.len(),
            keys: table.readers.len(),
            items: table.readers.values().map(Vec::len).sum(),
            prefixes: prefixes.len(),
        }
    }
}

impl Table {
    /// Sends invalidations to the readers of a key and removes the key from the table.
    fn invalidate(&mut self, key: &[u8], writer: u64, gate: &Gate, pubsub: &PubSub) {
        let Some(readers) = self.readers.remove(key) else { return };
        for reader in readers {
            // A client that has switched to broadcasting mode receives the same key with its prefixes.
            let Some(tracker) = self.clients.get(&reader).filter(|tracker| !tracker.options.broadcast) else {
                continue;
            };
            if !tracker.options.no_loop || reader != writer {
                tracker.send_invalidation(Some(&[key]), gate, pubsub);
            }
        }
    }
}

impl Tracker {
    /// Sends an invalidation message; `None` invalidates all keys.
    fn send_invalidation(&self, keys: Option<&[&[u8]]>, gate: &Gate, pubsub: &PubSub) {
        let is_push = self.target.protocol == Protocol::Resp3;
        // RESP2 has no push messages: only a REDIRECT target that is subscribed to the channel can receive it.
        let is_subscribed = || {
            self.options.redirect.is_some_and(|client| pubsub.is_subscribed(Kind::Channel, CHANNEL, client))
        };
        if self.is_redirect_broken || !is_push && !is_subscribed() {
            return;
        }
        let mut out = BytesMut::new();
        let mut to = Encoder::new(&mut out, self.target.protocol);
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

    /// Notifies the tracking client that its REDIRECT target has disconnected.
    fn send_redirect_broken(&self, client: u64) {
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
        gate.send(message, &self.target.mailbox, self.target.shard);
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

    fn target(session: &Session) -> PushTarget {
        PushTarget { mailbox: Arc::clone(&session.mailbox), protocol: session.protocol, shard: None }
    }

    /// Keys written by a client.
    fn keys(names: &[&str], writer: u64) -> Vec<(Box<[u8]>, u64)> {
        names.iter().map(|name| (name.as_bytes().into(), writer)).collect()
    }

    #[test]
    fn readers_receive_one_invalidation_per_read() {
        let (tracking, pubsub) = (Tracking::default(), PubSub::default());
        let (one, two) = (client(1, Protocol::Resp3), client(2, Protocol::Resp3));
        tracking.enable(1, TrackingOptions::default(), target(&one), None);
        tracking.enable(
            2,
            TrackingOptions { no_loop: true, ..TrackingOptions::default() },
            target(&two),
            None,
        );
        for reader in [1, 2, 2] {
            tracking.on_read(reader, b"a", 10, &pubsub);
        }
        tracking.on_changed(&keys(&["a", "b"], 2), &Gate::OPEN, &pubsub);
        tracking.on_changed(&keys(&["a"], 3), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate *1 $1 a "]);
        assert_eq!(texts(&two), [""; 0], "NOLOOP: own write");
        tracking.on_read(2, b"a", 10, &pubsub);
        tracking.on_changed(&keys(&["a"], 0), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&two).len(), 1, "the key expired");
        tracking.on_all_changed(&Gate::OPEN, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate _ "]);
        tracking.on_read(1, b"a", 10, &pubsub);
        tracking.disable(1);
        assert_eq!((tracking.counts().clients, tracking.counts().keys), (1, 0));
    }

    #[test]
    fn full_tracking_table_invalidates_another_key() {
        let (tracking, pubsub) = (Tracking::default(), PubSub::default());
        let one = client(1, Protocol::Resp3);
        tracking.enable(1, TrackingOptions::default(), target(&one), None);
        tracking.on_read(1, b"a", 1, &pubsub);
        tracking.on_read(1, b"b", 1, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate *1 $1 a "]);
        assert_eq!(tracking.counts().keys, 1);
    }

    #[test]
    fn broadcast_prefixes_and_redirected_invalidations() {
        let (tracking, pubsub) = (Tracking::default(), PubSub::default());
        let (one, two) = (client(1, Protocol::Resp3), client(2, Protocol::Resp2));
        let prefixes = [b"a".as_slice().into(), b"x".as_slice().into()].into();
        tracking.enable(
            1,
            TrackingOptions { broadcast: true, prefixes, ..TrackingOptions::default() },
            target(&one),
            None,
        );
        let three = client(3, Protocol::Resp3);
        let options = TrackingOptions { redirect: Some(2), ..TrackingOptions::default() };
        tracking.enable(3, options, target(&three), Some(target(&two)));
        tracking.on_read(3, b"b", 10, &pubsub);
        tracking.on_changed(&keys(&["a2", "b", "x", "a1", "a1"], 9), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&one), [">2 $10 invalidate *2 $2 a1 $2 a2 ", ">2 $10 invalidate *1 $1 x "]);
        assert_eq!(texts(&two), [""; 0], "not subscribed");
        pubsub.subscribe(Kind::Channel, CHANNEL, &two);
        tracking.on_read(3, b"b", 10, &pubsub);
        tracking.on_changed(&keys(&["b"], 9), &Gate::OPEN, &pubsub);
        assert_eq!(texts(&two), ["*3 $7 message $20 __redis__:invalidate *1 $1 b "]);
        tracking.disable(2);
        assert!(tracking.is_redirect_broken(3) && !tracking.is_redirect_broken(1));
        assert_eq!(texts(&three), [">2 $21 tracking-redir-broken :2 "]);
    }
}
