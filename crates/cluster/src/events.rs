//! The event bus of a process: cluster events as a stream that reports missed events.
//!
//! Events are notifications only: every service keeps its authoritative state where it can be read (a view,
//! a record), so a lagging subscriber reads that again. The bus never waits for a subscriber.

use serde::Serialize;
use tokio::sync::broadcast;

use crate::assignment::TopologyEvent;
use crate::membership::MemberEvent;

/// Maximum lag of a subscriber, in events.
const CAPACITY: usize = 4_096;

/// A cluster event.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ClusterEvent {
    /// A member joined, left, or missed its heartbeats.
    Member(MemberEvent),
    /// The leader of an election changed, or there is none.
    Leader {
        /// Name of the election.
        name: String,
        /// Current leader, if any.
        leader: Option<String>,
        /// Fencing token of the leadership.
        token: i64,
    },
    /// This node lost its leadership.
    LeadershipLost {
        /// Name of the election.
        name: String,
        /// Reason of the loss.
        reason: String,
    },
    /// This node lost a lock without releasing it.
    LockLost {
        /// Name of the lock.
        name: String,
        /// Reason of the loss.
        reason: String,
    },
    /// Ownership of a partition changed.
    Topology(TopologyEvent),
    /// A rebalance was committed.
    Rebalanced {
        /// Assignment group.
        group: String,
        /// Number of partitions that move.
        moves: usize,
    },
    /// Recording a hand-off failed repeatedly: the application's own recovery is needed.
    HandoffFailing {
        /// Assignment group.
        group: String,
        /// Partition id.
        partition: String,
        /// Consecutive failures.
        failures: u32,
        /// The last failure.
        reason: String,
    },
    /// A step of a node's join to a Raft group.
    Join {
        /// Application of the group.
        app: String,
        /// Joining node.
        node: String,
        /// `requested`, `accepted`, `rejected`, `active`, `expired`.
        step: String,
        /// Reason, for a rejection or expiry.
        reason: String,
    },
    /// A new routing table is in force.
    Routing {
        /// Namespace of the table.
        namespace: String,
        /// Version of the table.
        version: i64,
    },
    /// A record in the store cannot be decoded; it is skipped until it is repaired.
    Malformed {
        /// Key of the record.
        key: String,
        /// Decoding error.
        reason: String,
    },
    /// The store became unreachable, or reachable again.
    Store {
        /// True if the store responds.
        reachable: bool,
    },
}

/// Publisher and source of subscriptions. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EventBus {
    sender: broadcast::Sender<ClusterEvent>,
}

impl EventBus {
    /// A bus without subscribers.
    pub fn new() -> Self {
        Self { sender: broadcast::channel(CAPACITY).0 }
    }

    /// Delivers an event to every subscriber.
    pub fn publish(&self, event: ClusterEvent) {
        // An error means that there are no subscribers.
        let _ = self.sender.send(event);
    }

    /// Subscribes to all events from now on.
    pub fn subscribe(&self) -> EventStream {
        EventStream { receiver: self.sender.subscribe() }
    }
}

impl Default for EventBus {
    fn default() -> Self {
        Self::new()
    }
}

/// Events were missed: read the authoritative state again and continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{missed} events were missed")]
pub struct Lagged {
    /// Number of missed events.
    pub missed: u64,
}

/// A subscription.
#[derive(Debug)]
pub struct EventStream {
    receiver: broadcast::Receiver<ClusterEvent>,
}

impl EventStream {
    /// The next event, or the number of missed events; `None` when the bus is closed. Cancel-safe.
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
    fn lagging_subscriber_gets_the_number_of_missed_events() {
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
