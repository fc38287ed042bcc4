//! Who must hear of a change: transactions that watch a key, clients that block on one, subscribers of notifications.
//!
//! Commands only say what happened. WATCH is settled at once, because EXEC runs under the same lock; clients that block
//! on keys are served after the command, in the order in which they came; notifications are sent with the command's
//! commit, never before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;

use crate::hazard::Hazards;
use crate::pubsub::Gate;
use crate::shared::Shared;
use crate::slot_set::SlotSet;
use crate::tally::Tallies;

/// Set when a key that a client watches has changed.
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

/// What happened to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Its class.
    pub class: u32,
    /// `set`, `expired` …
    pub event: &'static str,
    /// The key.
    pub key: Box<[u8]>,
}

/// The changes of a shard that others wait for.
#[derive(Default)]
pub struct Events {
    watched: HashMap<Box<[u8]>, Vec<(u64, WatchFlag)>>,
    /// Keys that may serve a blocked client now.
    pub ready: Vec<Box<[u8]>>,
    /// How many clients block; nobody notes ready keys while there is none.
    pub blocked: usize,
    /// Keys that clients wait for who also want to hear that one is gone, with how many those are.
    minded: HashMap<Box<[u8]>, usize>,
    /// Slots on their way, here or away: no command touches them.
    pub(crate) held: Option<SlotSet>,
    /// To be sent when the command commits.
    pub notifications: Vec<Notification>,
    /// Whether clients of this shard keep what they read, and hear of changes.
    pub tracked: bool,
    /// What they hear of when the command commits: keys and who changed them, and whether it is all of them.
    pub invalid: Vec<(Box<[u8]>, u64)>,
    /// See `invalid`.
    pub all_invalid: bool,
    /// Whose command runs.
    pub writer: u64,
    /// Which notifications anybody wants.
    pub notify: u32,
    /// Clients that CLIENT UNBLOCK lets go: id, and whether with an error.
    pub unblocked: Vec<(u64, bool)>,
    /// How often commands ran, and how long they took.
    pub tallies: Tallies,
    /// Which keys have changes that are not committed.
    pub hazards: Hazards,
    /// The journal end that the answer of the running command waits for.
    pub gate: i64,
}

impl Events {
    /// A client watches a key.
    pub fn watch(&mut self, client: u64, key: &[u8], flag: &WatchFlag) {
        let watchers = self.watched.entry(key.into()).or_default();
        if !watchers.iter().any(|(who, _)| *who == client) {
            watchers.push((client, Arc::clone(flag)));
        }
    }

    /// A client watches it no more.
    pub fn unwatch(&mut self, client: u64, key: &[u8]) {
        if let Some(watchers) = self.watched.get_mut(key) {
            watchers.retain(|(who, _)| *who != client);
            if watchers.is_empty() {
                self.watched.remove(key);
            }
        }
    }

    /// A key has changed.
    #[inline]
    pub fn on_changed(&mut self, key: &[u8]) {
        if !self.watched.is_empty()
            && let Some(watchers) = self.watched.get(key)
        {
            watchers.iter().for_each(|(_, flag)| flag.store(true, Ordering::Release));
        }
        if !self.minded.is_empty() && self.minded.contains_key(key) {
            self.on_ready(key);
        }
        if self.tracked {
            self.invalid.push((key.into(), self.writer));
        }
    }

    /// A key is gone by nobody's hand: its time has come, or others needed the room.
    pub fn on_vanished(&mut self, key: &[u8]) {
        let writer = std::mem::take(&mut self.writer);
        self.on_changed(key);
        self.writer = writer;
    }

    /// A client waits for a key and wants to hear that it is gone.
    pub fn mind(&mut self, key: &[u8]) {
        *self.minded.entry(key.into()).or_default() += 1;
    }

    /// It waits no more.
    pub fn unmind(&mut self, key: &[u8]) {
        if let Some(clients) = self.minded.get_mut(key) {
            *clients -= 1;
            if *clients == 0 {
                self.minded.remove(key);
            }
        }
    }

    /// Keys may have changed unseen: they were elsewhere, or the keyspace is another one. Transactions that watch one of them
    /// fail, whether it is there or not.
    pub(crate) fn invalidate_watches(&self, of: impl Fn(&[u8]) -> bool) {
        let watched = self.watched.iter().filter(|(key, _)| of(key));
        watched.flat_map(|(_, watchers)| watchers).for_each(|(_, flag)| flag.store(true, Ordering::Release));
    }

    /// Every key has changed; `was_there` says which count.
    pub fn on_all_changed(&mut self, was_there: impl Fn(&[u8]) -> bool) {
        for (key, watchers) in self.watched.iter().filter(|(key, _)| was_there(key)) {
            let _ = key;
            watchers.iter().for_each(|(_, flag)| flag.store(true, Ordering::Release));
        }
        self.all_invalid = self.tracked;
        let minded: Vec<Box<[u8]>> = self.minded.keys().cloned().collect();
        minded.iter().for_each(|key| self.on_ready(key));
    }

    /// A key holds something that blocked clients may take.
    #[inline]
    pub fn on_ready(&mut self, key: &[u8]) {
        if self.blocked > 0 && !self.ready.iter().any(|ready| **ready == *key) {
            self.ready.push(key.into());
        }
    }

    /// Tells those who keep what they read which of it is old.
    pub fn tell_invalid(&mut self, shared: &Shared, gate: &Gate) {
        if std::mem::take(&mut self.all_invalid) {
            shared.tracking.on_all_changed(gate, &shared.pubsub);
        }
        if !self.invalid.is_empty() {
            let invalid = std::mem::take(&mut self.invalid);
            self.tracked = shared.tracking.on_changed(&invalid, gate, &shared.pubsub);
        }
    }

    /// Something happened that subscribers may want to hear.
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
    fn only_those_who_watch_a_key_hear_of_it() {
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
    fn ready_keys_are_noted_once_and_only_for_somebody() {
        let mut events = Events::default();
        events.on_ready(b"a");
        assert!(events.ready.is_empty());
        events.blocked = 1;
        events.on_ready(b"a");
        events.on_ready(b"a");
        assert_eq!(events.ready.len(), 1);
    }
}
