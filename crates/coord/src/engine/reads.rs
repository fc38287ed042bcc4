//! Reads that see everything acknowledged before they began, on any node.
//!
//! A quorum confirms the leader once for everybody who waits; whoever comes while a round is under way rides the next
//! one, because the round may have begun before their request did. Many readers therefore cost as much as one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_raft::GroupError;
use tokio::sync::Notify;

use super::Inner;
use super::answers::{Bundle, Counter, Waiter};
use super::error::CoordError;
use crate::error::Error;
use crate::reply::RangeReply;
use crate::request::RangeRequest;

/// Before a round that failed is tried again.
const PAUSE: Duration = Duration::from_millis(20);
/// Keys that are read before others have their turn.
const KEYS_PER_LOOK: usize = 2_048;
/// Readers that may wait.
const READERS: usize = 65_536;

type Reader = Waiter<()>;

/// Readers that wait for the next round.
#[derive(Default)]
pub(super) struct Reads {
    waiting: Mutex<Vec<Reader>>,
    wake: Notify,
}

impl Reads {
    fn take(&self) -> Vec<Reader> {
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Inner {
    /// Returns when the state here contains everything that was acknowledged anywhere before the call.
    pub(super) async fn linearizable(&self, through: Option<&Arc<Counter>>) -> Result<(), CoordError> {
        let (reader, done) = Waiter::new(through);
        {
            let mut waiting = self.reads.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // Under the lock: the task that answers takes it once more when it ends.
            if self.shutdown.is_stopped() {
                return Err(CoordError::Stopped);
            }
            if waiting.len() >= READERS {
                return Err(CoordError::TooManyRequests);
            }
            waiting.push(reader);
        }
        self.reads.wake.notify_one();
        done.await.unwrap_or(Err(CoordError::Stopped))
    }

    /// Reads a range in pieces, all of one revision: a large one must not keep the log from being applied.
    pub(super) async fn read_range(&self, request: &RangeRequest) -> Result<RangeReply, CoordError> {
        loop {
            let mut reading = self.shared.state().begin_range(request)?;
            let read = loop {
                match self.shared.state().step_range(&mut reading, KEYS_PER_LOOK) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
                tokio::task::yield_now().await;
            };
            match read {
                Ok(()) => return Ok(reading.finish()),
                // What was "now" has been forgotten while it was read; there is a newer one.
                Err(Error::Compacted) if request.revision <= 0 => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Runs the rounds until the node stops.
    pub(super) async fn confirm_reads(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => break,
                () = self.reads.wake.notified() => {}
            }
            let readers = self.reads.take();
            if readers.is_empty() {
                continue;
            }
            let mut withdrawn = self.withdrawn.subscribe();
            let outcome = tokio::select! {
                biased;
                () = shutdown.stopped() => Err(CoordError::Stopped),
                outcome = self.round() => outcome,
                // A round that waits for this node's disk may take as long as it hangs.
                Ok(()) = withdrawn.changed() => Err(CoordError::NoLeader),
            };
            let mut bundle = Bundle::default();
            for reader in readers {
                bundle.answer(reader, outcome.clone());
            }
        }
        drop(self.reads.take());
    }

    /// One round, repeated while there is hope.
    async fn round(&self) -> Result<(), CoordError> {
        let deadline_ms = self.now_ms() + self.timeout_ms();
        loop {
            let error = match self.group.read_point().await {
                Ok(index) => {
                    let left = Duration::from_millis(deadline_ms.saturating_sub(self.now_ms()).max(1));
                    let applied = tokio::time::timeout(left, self.shared.wait_applied(index)).await;
                    return applied.map_err(|_| CoordError::Timeout);
                }
                Err(GroupError::Stopped(_)) => return Err(CoordError::Stopped),
                Err(GroupError::NotLeader { leader: None }) => CoordError::NoLeader,
                Err(_) => CoordError::Timeout,
            };
            if self.now_ms() >= deadline_ms {
                return Err(error);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
