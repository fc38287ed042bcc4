//! Whether this node can reach a majority.
//!
//! A follower that is cut off still believes in its old leader, so the question is put to the test: as long as somebody
//! wants to know, the node asks for a linearizable read once a second, and three failures in a row mean that the
//! majority is lost. As in etcd, streams are ended late and new calls are refused early, because ending a stream costs
//! its client a lot more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::engine::Coordinator;

/// Time between two tests, and the time that each may take: an election timeout of etcd.
const INTERVAL: Duration = Duration::from_secs(1);
/// Failures in a row that mean it.
const MISSES: u32 = 3;

/// See the top of the file.
pub(super) struct Quorum {
    lost: watch::Sender<bool>,
    interested: AtomicUsize,
    wake: Notify,
}

/// As long as it exists, the question is asked.
pub(super) struct Interest<'a> {
    quorum: &'a Quorum,
    lost: watch::Receiver<bool>,
}

impl Quorum {
    pub(super) fn new() -> Self {
        Self { lost: watch::Sender::new(false), interested: AtomicUsize::new(0), wake: Notify::new() }
    }

    /// Whether the majority was lost when last looked.
    pub(super) fn is_lost(&self) -> bool {
        *self.lost.borrow()
    }

    /// Has the question asked from now on.
    pub(super) fn interest(&self) -> Interest<'_> {
        self.interested.fetch_add(1, Ordering::Relaxed);
        self.wake.notify_one();
        Interest { quorum: self, lost: self.lost.subscribe() }
    }

    /// Asks as long as anybody is interested. Never returns.
    pub(super) async fn watch_over(&self, coordinator: &Coordinator) {
        let mut misses = 0;
        loop {
            while self.interested.load(Ordering::Relaxed) == 0 {
                misses = 0;
                self.lost.send_if_modified(std::mem::take);
                self.wake.notified().await;
            }
            let answered = tokio::time::timeout(INTERVAL, coordinator.linearizable()).await;
            let is_well = matches!(answered, Ok(Ok(())));
            misses = if is_well { 0 } else { misses + 1 };
            let is_lost = misses >= MISSES;
            self.lost.send_if_modified(|lost| std::mem::replace(lost, is_lost) != is_lost);
            // A test that failed has taken its time, unless it was refused at once.
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

impl Interest<'_> {
    /// Returns when the majority is lost.
    pub(super) async fn lost(&mut self) {
        if self.lost.wait_for(|lost| *lost).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns whether it is lost when that has changed.
    pub(super) async fn changed(&mut self) -> bool {
        if self.lost.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        *self.lost.borrow_and_update()
    }
}

impl Drop for Interest<'_> {
    fn drop(&mut self) {
        self.quorum.interested.fetch_sub(1, Ordering::Relaxed);
    }
}
