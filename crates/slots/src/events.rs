//! Change events of a shard: WATCH invalidation, ready keys for blocked clients, keyspace notifications and tracking
//! invalidations.
//!
//! Commands only report what happened. Watched keys are marked dirty immediately, because EXEC runs under the same
//! lock. Blocked clients are served after the command, in the order in which they blocked. Notifications are sent
//! with the commit of the command, never before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;

use crate::command_stats::CommandStats;
use crate::hazard::Hazards;
use crate::pubsub::Gate;
use crate::shared::Shared;
use crate::slot_set::SlotSet;

/// Set when a key watched by a client is modified.
pub type WatchFlag = Arc<AtomicBool>;

/// Classes of keyspace notifications, as in `notify-keyspace-events`.
#[allow(missing_docs)]
pub mod class {
    pub const KEYSPACE: u32 = 1 << 0;
    pub const KEYEVENT: u32 = 1 << 1;
    pub const GENERIC: u32 = 1 << 2;
    pub const STRING: u32 = 1 << 3;
    pub const LIST: u32 = 1 << 4;
    pub const SET: u32 = 1 << 5;
    pub const HASH: u32 = 1 << 6;
    pub const ZSET: u32 = 1 << 7;
    pub const EXPIRED: u32 = 1 << 8;
    pub const EVICTED: u32 = 1 << 9;
    pub const STREAM: u32 = 1 << 10;
    pub const MISS: u32 = 1 << 11;
    pub const MODULE: u32 = 1 << 12;
    pub const NEW: u32 = 1 << 13;
    pub const ALL: u32 = GENERIC | STRING | LIST | SET | HASH | ZSET | EXPIRED | EVICTED | STREAM | MODULE;
}

/// One keyspace event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Event class, see [`class`].
    pub class: u32,
    /// Event name: `set`, `expired` …
    pub event: &'static str,
    /// The affected key.
    pub key: Box<[u8]>,
}

/// The pending events of a shard.
#[derive(Default)]
pub struct Events {
    watched: HashMap<Box<[u8]>, Vec<(u64, WatchFlag)>>,
    /// Ready keys: they may serve a blocked client now.
    pub ready: Vec<Box<[u8]>>,
    /// Number of blocked clients; ready keys are not collected while it is 0.
    pub blocked: usize,
    /// Keys whose deletion wakes a blocked client (XREADGROUP), with the number of such clients.
    delete_watchers: HashMap<Box<[u8]>, usize>,
    /// Slots in migration, importing or migrating: no command accesses them.
    pub(crate) held: Option<SlotSet>,
    /// Keyspace notifications to send when the command commits.
    pub notifications: Vec<Notification>,
    /// True if a client of this shard has tracking enabled.
    pub tracking_enabled: bool,
    /// Modified keys with the client that wrote them: invalidated in the tracking table when the command commits.
    pub invalidations: Vec<(Box<[u8]>, u64)>,
    /// All keys were modified (FLUSHALL): everything is invalidated.
    pub invalidate_all: bool,
    /// Id of the client whose command runs; 0 for expiry and eviction.
    pub writer: u64,
    /// Notification classes that are enabled.
    pub notify: u32,
    /// Clients to unblock for CLIENT UNBLOCK: id, and whether with an error.
    pub unblocked: Vec<(u64, bool)>,
    /// Command statistics: calls and execution time.
    pub command_stats: CommandStats,
    /// Keys with uncommitted changes.
    pub hazards: Hazards,
    /// The journal end that must be committed before the reply of the running command is sent.
    pub gate: i64,
}

impl Events {
    /// Adds a watched key of a client.
    pub fn watch(&mut self, client: u64, key: &[u8], flag: &WatchFlag) {
        let watchers = self.watched.entry(key.into()).or_default();
        if !watchers.iter().any(|(who, _)| *who == client) {
            watchers.push((client, Arc::clone(flag)));
        }
    }

    /// Removes a watched key of a client.
    pub fn unwatch(&mut self, client: u64, key: &[u8]) {
        if let Some(watchers) = self.watched.get_mut(key) {
            watchers.retain(|(who, _)| *who != client);
            if watchers.is_empty() {
                self.watched.remove(key);
            }
        }
    }

    /// Signals a modified key.
    #[inline]
    pub fn on_changed(&mut self, key: &[u8]) {
        if !self.watched.is_empty()
            && let Some(watchers) = self.watched.get(key)
        {
            watchers.iter().for_each(|(_, flag)| flag.store(true, Ordering::Release));
        }
        if !self.delete_watchers.is_empty() && self.delete_watchers.contains_key(key) {
            self.on_ready(key);
        }
        if self.tracking_enabled {
            self.invalidations.push((key.into(), self.writer));
        }
    }

    /// Signals a key removed by expiry or eviction, not by a client.
    pub fn on_implicit_delete(&mut self, key: &[u8]) {
        let writer = std::mem::take(&mut self.writer);
        self.on_changed(key);
        self.writer = writer;
    }

    /// Registers a blocked client that is woken when the key is deleted.
    pub fn wake_on_delete(&mut self, key: &[u8]) {
        *self.delete_watchers.entry(key.into()).or_default() += 1;
    }

    /// Removes a registration of [`Events::wake_on_delete`].
    pub fn cancel_wake_on_delete(&mut self, key: &[u8]) {
        if let Some(clients) = self.delete_watchers.get_mut(key) {
            *clients -= 1;
            if *clients == 0 {
                self.delete_watchers.remove(key);
            }
        }
    }

    /// Marks the watching transactions dirty for keys that may have changed unobserved, because they were on another
    /// node or the keyspace was replaced. This applies whether the key exists or not.
    pub(crate) fn invalidate_watches(&self, of: impl Fn(&[u8]) -> bool) {
        let watched = self.watched.iter().filter(|(key, _)| of(key));
        watched.flat_map(|(_, watchers)| watchers).for_each(|(_, flag)| flag.store(true, Ordering::Release));
    }

    /// Signals that all keys were modified; `was_there` selects the watched keys that count.
    pub fn on_all_changed(&mut self, was_there: impl Fn(&[u8]) -> bool) {
        for (key, watchers) in self.watched.iter().filter(|(key, _)| was_there(key)) {
            let _ = key;
            watchers.iter().for_each(|(_, flag)| flag.store(true, Ordering::Release));
        }
        self.invalidate_all = self.tracking_enabled;
        let delete_watchers: Vec<Box<[u8]>> = self.delete_watchers.keys().cloned().collect();
        delete_watchers.iter().for_each(|key| self.on_ready(key));
    }

    /// Signals that a key may serve a blocked client.
    #[inline]
    pub fn on_ready(&mut self, key: &[u8]) {
        if self.blocked > 0 && !self.ready.iter().any(|ready| **ready == *key) {
            self.ready.push(key.into());
        }
    }

    /// Sends the collected invalidations to tracking clients.
    pub fn send_invalidations(&mut self, shared: &Shared, gate: &Gate) {
        if std::mem::take(&mut self.invalidate_all) {
            shared.tracking.on_all_changed(gate, &shared.pubsub);
        }
        if !self.invalidations.is_empty() {
            let invalidations = std::mem::take(&mut self.invalidations);
            self.tracking_enabled = shared.tracking.on_changed(&invalidations, gate, &shared.pubsub);
        }
    }

    /// Adds a keyspace notification if its class is enabled.
    #[inline]
    pub fn notify(&mut self, class: u32, event: &'static str, key: &[u8]) {
        if self.notify & class != 0 {
            self.notifications.push(Notification { class, event, key: key.into() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_watchers_of_a_modified_key_are_marked_dirty() {
        let mut events = Events::default();
        let (one, two) = (WatchFlag::default(), WatchFlag::default());
        events.watch(1, b"a", &one);
        events.watch(2, b"b", &two);
        events.on_changed(b"a");
        assert!(one.load(Ordering::Acquire) && !two.load(Ordering::Acquire));
        events.unwatch(2, b"b");
        events.on_changed(b"b");
        assert!(!two.load(Ordering::Acquire));
    }

    #[test]
    fn ready_keys_are_collected_once_and_only_while_clients_block() {
        let mut events = Events::default();
        events.on_ready(b"a");
        assert!(events.ready.is_empty());
        events.blocked = 1;
        events.on_ready(b"a");
        events.on_ready(b"a");
        assert_eq!(events.ready.len(), 1);
    }
}
