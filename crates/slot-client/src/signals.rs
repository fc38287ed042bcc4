//! What happens inside a client, told to whoever wants to know: events, counters, and reasons to refresh the topology.
//!
//! Every part of the client has this and nothing else of the client: a connection can say that it broke without knowing
//! who will act on it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use moim_wire_resp::Slot;
use tokio::sync::{Notify, broadcast};

use crate::address::Address;

/// Why the topology is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Trigger {
    /// A slot is somewhere else.
    MovedRedirect = 1,
    /// A slot is on its way.
    AskRedirect = 2,
    /// A connection cannot be made again and again.
    PersistentReconnects = 4,
    /// A slot has no node.
    UncoveredSlot = 8,
    /// A redirection to a node nobody told us about.
    UnknownNode = 16,
    /// A node that owes answers is silent, or a command timed out.
    Timeout = 32,
    /// A node says that it cannot serve (CLUSTERDOWN, READONLY).
    Refused = 64,
    /// The period is over.
    Periodic = 128,
    /// The application asked.
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

/// Something an operator or a test may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A connection is up.
    Connected(Address),
    /// A connection is gone; it is being made again.
    Disconnected {
        /// Its other end.
        node: Address,
        /// What happened.
        reason: String,
    },
    /// A node that owed answers was silent for too long.
    Hung(Address),
    /// The topology is asked for.
    RefreshStarted(Vec<Trigger>),
    /// Nobody could tell the topology.
    RefreshFailed(String),
    /// The topology is not what it was.
    TopologyChanged {
        /// New nodes.
        added: Vec<Address>,
        /// Nodes that are gone.
        removed: Vec<Address>,
        /// How many slots have another primary.
        slots_moved: usize,
    },
    /// A redirection showed where a slot is.
    SlotPatched {
        /// The slot.
        slot: Slot,
        /// Its primary.
        to: Address,
    },
}

/// Counters of a client. All only grow.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Commands asked for.
    pub commands: AtomicU64,
    /// Commands that ended with an error.
    pub failed: AtomicU64,
    /// Attempts after the first, redirections apart.
    pub retries: AtomicU64,
    /// MOVED answers.
    pub moved: AtomicU64,
    /// ASK answers.
    pub asked: AtomicU64,
    /// Commands that ran out of time.
    pub timeouts: AtomicU64,
    /// Connections made.
    pub connects: AtomicU64,
    /// Connections lost.
    pub disconnects: AtomicU64,
    /// Connections broken off because the node was silent.
    pub hung: AtomicU64,
    /// Topology refreshes.
    pub refreshes: AtomicU64,
    /// Refreshes nobody answered.
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

/// The ears of a client.
#[derive(Debug)]
pub(crate) struct Signals {
    pub(crate) metrics: Metrics,
    events: broadcast::Sender<Event>,
    /// Reasons since the last refresh began, one bit each.
    pending: AtomicU32,
    wanted: Notify,
    /// Told after every refresh and every patch: commands without a place to go look again.
    pub(crate) changed: Notify,
}

/// Events kept for a listener that is behind.
const EVENTS: usize = 1024;

impl Signals {
    pub(crate) fn new() -> Self {
        Self {
            metrics: Metrics::default(),
            events: broadcast::Sender::new(EVENTS),
            pending: AtomicU32::new(0),
            wanted: Notify::new(),
            changed: Notify::new(),
        }
    }

    pub(crate) fn emit(&self, event: Event) {
        // Nobody listening is fine.
        let _ = self.events.send(event);
    }

    pub(crate) fn listen(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// A reason to refresh. Costs little when there is one already.
    pub(crate) fn trigger(&self, reason: Trigger) {
        if self.pending.fetch_or(reason as u32, Ordering::AcqRel) & reason as u32 == 0 {
            self.wanted.notify_one();
        }
    }

    /// Waits for a reason.
    pub(crate) async fn wanted(&self) {
        while self.pending.load(Ordering::Acquire) == 0 {
            self.wanted.notified().await;
        }
    }

    /// Takes the reasons there are.
    pub(crate) fn take(&self) -> Vec<Trigger> {
        let pending = self.pending.swap(0, Ordering::AcqRel);
        Trigger::ALL.into_iter().filter(|reason| pending & *reason as u32 != 0).collect()
    }
}
