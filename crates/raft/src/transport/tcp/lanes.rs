//! The connection limits of a peer port: unproven connections cost members nothing.
//!
//! A connection starts in the *lobby* until its handshake is complete, for two seconds at most. A visitor then has a
//! slot among the visitors, for one exchange. Both lanes are small, and a connection to a full lane evicts the
//! oldest: a stranger that opens thousands of connections only evicts its own. Proven members have a separate lane,
//! which strangers cannot fill.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

/// Connections with an incomplete handshake. A member's handshake takes one round trip, far less time than a stranger
/// needs to open that many connections.
const LOBBY: usize = 256;
/// The maximum number of visitors.
const VISITORS: usize = 64;
/// The maximum number of member connections: many times the nodes of a cluster.
const MEMBERS: usize = 1024;
/// The maximum duration of a visit: longer than the longest request.
pub(super) const VISIT: Duration = Duration::from_secs(10);

/// The lanes of one port.
pub(super) struct Lanes {
    pub(super) lobby: Arc<Lane>,
    pub(super) visitors: Arc<Lane>,
    pub(super) members: Arc<Semaphore>,
}

impl Default for Lanes {
    fn default() -> Self {
        let lane = |places| Arc::new(Lane { places, inner: Mutex::default() });
        Self { lobby: lane(LOBBY), visitors: lane(VISITORS), members: Arc::new(Semaphore::new(MEMBERS)) }
    }
}

/// A bounded number of connections; a new one evicts the oldest.
pub(super) struct Lane {
    places: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    next: u64,
    /// Oldest first. Dropping the sender closes the connection.
    waiting: VecDeque<(u64, oneshot::Sender<()>)>,
}

/// A slot in a lane, until it is dropped.
pub(super) struct Place {
    lane: Arc<Lane>,
    number: u64,
    evicted: oneshot::Receiver<()>,
}

impl Lane {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot, evicting the oldest connection if the lane is full.
    pub(super) fn enter(self: &Arc<Self>) -> Place {
        let (sender, evicted) = oneshot::channel();
        let mut inner = self.inner();
        while inner.waiting.len() >= self.places {
            inner.waiting.pop_front();
        }
        let number = inner.next;
        inner.next += 1;
        inner.waiting.push_back((number, sender));
        Place { lane: Arc::clone(self), number, evicted }
    }
}

impl Place {
    /// Returns when a newer connection has taken the slot.
    pub(super) async fn evicted(&mut self) {
        let _ = (&mut self.evicted).await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.lane.inner();
        inner.waiting.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_lane_evicts_its_oldest_connection() {
        let lane = Arc::new(Lane { places: 2, inner: Mutex::default() });
        let (mut first, mut second) = (lane.enter(), lane.enter());
        assert!(first.evicted.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        let mut third = lane.enter();
        let closed = Err(oneshot::error::TryRecvError::Closed);
        assert_eq!(first.evicted.try_recv(), closed);
        assert_ne!(second.evicted.try_recv(), closed);
        drop(first);
        drop(second);
        let _fourth = lane.enter();
        assert_ne!(third.evicted.try_recv(), closed, "a place that was given back is used first");
    }
}
