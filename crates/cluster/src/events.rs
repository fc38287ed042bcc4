//! The event bus of a process: what happened in the cluster, as a stream that says when it has missed something.
//!
//! Events are for sight: every service keeps the truth where it can be read (a view, a record), so a listener that
//! lagged reads it again. The bus never waits for a listener.

use serde::Serialize;
use tokio::sync::broadcast;

use crate::assignment::TopologyEvent;
use crate::membership::MemberEvent;

/// Events a slow listener may be behind.
const ROOM: usize = 4_096;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ClusterEvent {
    /// A member came, went, or fell silent.
    Member(MemberEvent),
    /// This node leads, or another does, or nobody.
    Leader {
        /// What is led.
        name: String,
        /// Who leads, if anybody.
        leader: Option<String>,
        /// The fencing token of the leadership.
        token: i64,
    },
    /// This node's leadership has ended.
    LeadershipLost {
        /// What was led.
        name: String,
        /// Why.
        reason: String,
    },
    /// This node's lock has ended without being released.
    LockLost {
        /// Which.
        name: String,
        /// Why.
        reason: String,
    },
    /// A partition changes hands.
    Topology(TopologyEvent),
    /// A rebalance was decided.
    Rebalanced {
        /// Of which group.
        group: String,
        /// How many partitions move.
        moves: usize,
    },
    /// Recording a hand-off fails again and again: the work's own recovery is needed.
    HandoffFailing {
        /// Of which group.
        group: String,
        /// Of which partition.
        partition: String,
        /// How often in a row.
        failures: u32,
        /// The last failure.
        reason: String,
    },
    /// A node asks to join a Raft group, or the answer to it.
    Join {
        /// Whose group.
        app: String,
        /// Which node.
        node: String,
        /// `requested`, `accepted`, `rejected`, `active`, `expired`.
        step: String,
        /// Why, where there is a reason.
        reason: String,
    },
    /// A new routing table is in force.
    Routing {
        /// Its namespace.
        namespace: String,
        /// Its version.
        version: i64,
    },
    /// What the store holds cannot be read; it is passed over until somebody mends it.
    Malformed {
        /// Which key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The store does not answer, or does again.
    Store {
        /// Whether it answers.
        reachable: bool,
    },
}

/// Where events are published and heard. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EventBus {
    sender: broadcast::Sender<ClusterEvent>,
}

impl EventBus {
    /// A bus without listeners.
    pub fn new() -> Self {
        Self { sender: broadcast::channel(ROOM).0 }
    }

    /// Tells every listener.
    pub fn publish(&self, event: ClusterEvent) {
        // Nobody listening is fine.
        let _ = self.sender.send(event);
    }

    /// Hears everything from now on.
    pub fn subscribe(&self) -> EventStream {
        EventStream { receiver: self.sender.subscribe() }
    }
}

impl Default for EventBus {
    fn default() -> Self {
        Self::new()
    }
}

/// Some events were missed: read the truth again and go on listening.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{missed} events were missed")]
pub struct Lagged {
    /// How many.
    pub missed: u64,
}

/// What a listener hears.
#[derive(Debug)]
pub struct EventStream {
    receiver: broadcast::Receiver<ClusterEvent>,
}

impl EventStream {
    /// The next event, or how many were missed; `None` when the bus is gone. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<ClusterEvent, Lagged>> {
        match self.receiver.recv().await {
            Ok(event) => Some(Ok(event)),
            Err(broadcast::error::RecvError::Lagged(missed)) => Some(Err(Lagged { missed })),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_listener_is_told_what_it_missed() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let bus = EventBus::new();
            let mut slow = bus.subscribe();
            for version in 0..5_000 {
                bus.publish(ClusterEvent::Routing { namespace: "n".into(), version });
            }
            let lagged = slow.next().await.unwrap().unwrap_err();
            assert_eq!(lagged.missed, 5_000 - 4_096);
            let next = slow.next().await.unwrap().unwrap();
            assert_eq!(next, ClusterEvent::Routing { namespace: "n".into(), version: 904 });
        });
    }
}
