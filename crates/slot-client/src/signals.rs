//! Events, counters and refresh triggers of a client.
//!
//! Every part of the client has this and nothing else of the client: a connection reports its failure
//! without a dependency on the refresh task.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use moim_wire_resp::Slot;
use tokio::sync::{Notify, broadcast};

use crate::address::Address;

/// Trigger of a topology refresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Trigger {
    /// MOVED: a slot has another owner.
    MovedRedirect = 1,
    /// ASK: a slot is migrating.
    AskRedirect = 2,
    /// Repeated reconnect failures.
    PersistentReconnects = 4,
    /// A slot has no node.
    UncoveredSlot = 8,
    /// A redirection to an unknown node.
    UnknownNode = 16,
    /// A node with outstanding replies is silent, or a command timed out.
    Timeout = 32,
    /// A node cannot serve (CLUSTERDOWN, READONLY).
    Refused = 64,
    /// The refresh period elapsed.
    Periodic = 128,
    /// The application requested it.
    Requested = 256,
}

impl Trigger {
    const ALL: [Self; 9] = [
        Self::MovedRedirect,
        Self::AskRedirect,
        Self::PersistentReconnects,
        Self::UncoveredSlot,
        Self::UnknownNode,
        Self::Timeout,
        Self::Refused,
        Self::Periodic,
        Self::Requested,
    ];
}

/// A client event, for operators and tests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A connection was established.
    Connected(Address),
    /// A connection was lost; it reconnects.
    Disconnected {
        /// The node.
        node: Address,
        /// The connection error.
        reason: String,
    },
    /// A node with outstanding replies was silent for too long.
    Hung(Address),
    /// A topology refresh started.
    RefreshStarted(Vec<Trigger>),
    /// No node returned the topology.
    RefreshFailed(String),
    /// The topology changed.
    TopologyChanged {
        /// Added nodes.
        added: Vec<Address>,
        /// Removed nodes.
        removed: Vec<Address>,
        /// Number of slots with another primary.
        slots_moved: usize,
    },
    /// A redirection changed the owner of a slot.
    SlotPatched {
        /// The slot.
        slot: Slot,
        /// The new primary.
        to: Address,
    },
}

/// Counters of a client. Monotonic.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Commands started.
    pub commands: AtomicU64,
    /// Failed commands.
    pub failed: AtomicU64,
    /// Retries, without redirections.
    pub retries: AtomicU64,
    /// MOVED replies.
    pub moved: AtomicU64,
    /// ASK replies.
    pub asked: AtomicU64,
    /// Commands that timed out.
    pub timeouts: AtomicU64,
    /// Connections established.
    pub connects: AtomicU64,
    /// Connections lost.
    pub disconnects: AtomicU64,
    /// Connections closed because the node was silent.
    pub hung: AtomicU64,
    /// Topology refreshes.
    pub refreshes: AtomicU64,
    /// Refreshes without a reply.
    pub refreshes_failed: AtomicU64,
}

impl Metrics {
    /// Name and value of every counter.
    pub fn snapshot(&self) -> [(&'static str, u64); 11] {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("commands", read(&self.commands)),
            ("failed", read(&self.failed)),
            ("retries", read(&self.retries)),
            ("moved", read(&self.moved)),
            ("asked", read(&self.asked)),
            ("timeouts", read(&self.timeouts)),
            ("connects", read(&self.connects)),
            ("disconnects", read(&self.disconnects)),
            ("hung", read(&self.hung)),
            ("refreshes", read(&self.refreshes)),
            ("refreshes_failed", read(&self.refreshes_failed)),
        ]
    }
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Signals of a client.
#[derive(Debug)]
pub(crate) struct Signals {
    pub(crate) metrics: Metrics,
    events: broadcast::Sender<Event>,
    /// Triggers since the start of the last refresh, one bit each.
    pending: AtomicU32,
    wanted: Notify,
    /// Notified after every refresh and every patch: commands without a node retry.
    pub(crate) changed: Notify,
}

/// Maximum number of events buffered for a lagging subscriber.
const EVENT_CAPACITY: usize = 1024;

impl Signals {
    pub(crate) fn new() -> Self {
        Self {
            metrics: Metrics::default(),
            events: broadcast::Sender::new(EVENT_CAPACITY),
            pending: AtomicU32::new(0),
            wanted: Notify::new(),
            changed: Notify::new(),
        }
    }

    pub(crate) fn emit(&self, event: Event) {
        // An error means that there are no subscribers.
        let _ = self.events.send(event);
    }

    pub(crate) fn listen(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Triggers a refresh. Cheap when one is pending already.
    pub(crate) fn trigger(&self, reason: Trigger) {
        if self.pending.fetch_or(reason as u32, Ordering::AcqRel) & reason as u32 == 0 {
            self.wanted.notify_one();
        }
    }

    /// Waits for a trigger.
    pub(crate) async fn wanted(&self) {
        while self.pending.load(Ordering::Acquire) == 0 {
            self.wanted.notified().await;
        }
    }

    /// Takes the pending triggers.
    pub(crate) fn take(&self) -> Vec<Trigger> {
        let pending = self.pending.swap(0, Ordering::AcqRel);
        Trigger::ALL.into_iter().filter(|reason| pending & *reason as u32 != 0).collect()
    }
}
