//! Quorum detection: whether this node can reach a majority.
//!
//! An isolated follower still believes in its old leader, so the node probes: while there is a subscriber, it performs
//! a linearizable read once a second, and three failures in a row mean that the quorum is lost. As in etcd, streams are
//! ended late and new calls are refused early, because ending a stream costs its client much more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::engine::Coordinator;

/// Interval between two probes, and the timeout of each: an election timeout of etcd.
const INTERVAL: Duration = Duration::from_secs(1);
/// Failures in a row after which the quorum counts as lost.
const MAX_FAILURES: u32 = 3;

/// See the module comment.
pub(super) struct Quorum {
    lost: watch::Sender<bool>,
    subscribers: AtomicUsize,
    wake: Notify,
}

/// A subscription; the node probes as long as one exists.
pub(super) struct QuorumSubscription<'a> {
    quorum: &'a Quorum,
    lost: watch::Receiver<bool>,
}

impl Quorum {
    pub(super) fn new() -> Self {
        Self { lost: watch::Sender::new(false), subscribers: AtomicUsize::new(0), wake: Notify::new() }
    }

    /// True if the quorum was lost at the last probe.
    pub(super) fn is_lost(&self) -> bool {
        *self.lost.borrow()
    }

    /// Starts probing, as long as the subscription exists.
    pub(super) fn subscribe(&self) -> QuorumSubscription<'_> {
        self.subscribers.fetch_add(1, Ordering::Relaxed);
        self.wake.notify_one();
        QuorumSubscription { quorum: self, lost: self.lost.subscribe() }
    }

    /// Probes while there are subscribers. Never returns.
    pub(super) async fn run(&self, coordinator: &Coordinator) {
        let mut failures = 0;
        loop {
            while self.subscribers.load(Ordering::Relaxed) == 0 {
                failures = 0;
                self.lost.send_if_modified(std::mem::take);
                self.wake.notified().await;
            }
            let probed = tokio::time::timeout(INTERVAL, coordinator.linearizable()).await;
            let has_quorum = matches!(probed, Ok(Ok(())));
            failures = if has_quorum { 0 } else { failures + 1 };
            let is_lost = failures >= MAX_FAILURES;
            self.lost.send_if_modified(|lost| std::mem::replace(lost, is_lost) != is_lost);
            // A failed probe took its whole timeout, unless it was refused at once.
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

impl QuorumSubscription<'_> {
    /// Waits until the quorum is lost.
    pub(super) async fn lost(&mut self) {
        if self.lost.wait_for(|lost| *lost).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the quorum is lost or regained; true if it is lost.
    pub(super) async fn changed(&mut self) -> bool {
        if self.lost.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        *self.lost.borrow_and_update()
    }
}

impl Drop for QuorumSubscription<'_> {
    fn drop(&mut self) {
        self.quorum.subscribers.fetch_sub(1, Ordering::Relaxed);
    }
}
