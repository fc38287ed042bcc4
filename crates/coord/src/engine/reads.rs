//! Linearizable reads on any node, by read index.
//!
//! A quorum confirms the leader once for all waiting reads. A read that arrives during a round joins the next one,
//! because the round may have begun before the read did. Many reads therefore cost as much as one.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_raft::GroupError;
use tokio::sync::Notify;

use super::Inner;
use super::error::CoordError;
use super::replies::{ReplyBatch, ReplyQueue, Waiter};
use crate::error::Error;
use crate::reply::RangeReply;
use crate::request::RangeRequest;

/// Delay before a failed round is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// Keys read before other tasks may run.
const KEYS_PER_STEP: usize = 2_048;
/// Maximum number of waiting reads.
const MAX_READERS: usize = 65_536;

type Reader = Waiter<()>;

/// Reads that wait for the next round.
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
    /// Returns when the applied state here contains every write acknowledged before the call.
    pub(super) async fn linearizable(&self, reply_queue: Option<&Arc<ReplyQueue>>) -> Result<(), CoordError> {
        let (reader, done) = Waiter::new(reply_queue);
        {
            let mut waiting = self.reads.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            // Checked under the lock: the round task takes the lock once more when it ends.
            if self.shutdown.is_stopped() {
                return Err(CoordError::Stopped);
            }
            if waiting.len() >= MAX_READERS {
                return Err(CoordError::TooManyRequests);
            }
            waiting.push(reader);
        }
        self.reads.wake.notify_one();
        done.await.unwrap_or(Err(CoordError::Stopped))
    }

    /// Reads a range in steps, all at one revision: a large range must not delay apply.
    pub(super) async fn read_range(&self, request: &RangeRequest) -> Result<RangeReply, CoordError> {
        loop {
            let mut reading = self.shared.state().begin_range(request)?;
            let read = loop {
                match self.shared.state().step_range(&mut reading, KEYS_PER_STEP) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
                tokio::task::yield_now().await;
            };
            match read {
                Ok(()) => return Ok(reading.finish()),
                // The current revision was compacted during the read: read at the newer one.
                Err(Error::Compacted) if request.revision <= 0 => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Runs read index rounds until the node stops.
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
                // A round that waits for this node's disk may take as long as the disk hangs.
                Ok(()) = withdrawn.changed() => Err(CoordError::NoLeader),
            };
            let mut replies = ReplyBatch::default();
            for reader in readers {
                replies.push(reader, outcome.clone());
            }
        }
        drop(self.reads.take());
    }

    /// One read index round, repeated until the request timeout.
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
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}
