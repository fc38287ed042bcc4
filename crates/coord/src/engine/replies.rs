//! Delivery of replies from the control thread to waiting callers.
//!
//! A reply that wakes its waiter on another thread costs a system call, and many such replies wake the waiting thread
//! again and again. A thread with many waiters therefore has a [`ReplyQueue`]: the replies of a whole batch are queued
//! there with one wake-up, and a task of that thread sends them to their waiters. Waiters without a queue are woken
//! directly, so that the node's own requests do not depend on a thread that clients keep busy.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use super::error::CoordError;
use super::leases::KeepAliveOutcome;
use crate::reply::Reply;

type Sender<T> = oneshot::Sender<Result<T, CoordError>>;
type PendingReply<T> = (Sender<T>, Result<T, CoordError>);

/// The reply queue of one thread.
#[derive(Default)]
pub(super) struct ReplyQueue {
    replies: Mutex<PendingReplies>,
    wake: Notify,
}

/// Undelivered replies, by kind.
#[derive(Default)]
pub(super) struct PendingReplies {
    commands: Vec<PendingReply<Reply>>,
    reads: Vec<PendingReply<()>>,
    renewals: Vec<PendingReply<KeepAliveOutcome>>,
    /// The delivering task has ended: replies are sent directly.
    closed: bool,
}

impl PendingReplies {
    fn is_empty(&self) -> bool {
        self.commands.is_empty() && self.reads.is_empty() && self.renewals.is_empty()
    }

    fn append(&mut self, other: &mut Self) {
        self.commands.append(&mut other.commands);
        self.reads.append(&mut other.reads);
        self.renewals.append(&mut other.renewals);
    }

    fn send_all(&mut self) {
        // A waiter may have been dropped.
        self.commands.drain(..).for_each(|(to, reply)| drop(to.send(reply)));
        self.reads.drain(..).for_each(|(to, reply)| drop(to.send(reply)));
        self.renewals.drain(..).for_each(|(to, reply)| drop(to.send(reply)));
    }
}

impl ReplyQueue {
    fn replies(&self) -> MutexGuard<'_, PendingReplies> {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers queued replies until cancelled.
    pub(super) async fn run(&self) {
        let mut replies = PendingReplies::default();
        loop {
            self.wake.notified().await;
            std::mem::swap(&mut *self.replies(), &mut replies);
            replies.send_all();
        }
    }

    /// Ends the queue: delivers the remaining replies, and later replies are sent directly.
    pub(super) fn close(&self) {
        let mut replies = std::mem::replace(
            &mut *self.replies(),
            PendingReplies { closed: true, ..PendingReplies::default() },
        );
        replies.send_all();
    }
}

/// A reply type, and its list in [`PendingReplies`].
pub(super) trait ReplyKind: Sized {
    fn of(replies: &mut PendingReplies) -> &mut Vec<PendingReply<Self>>;
}

impl ReplyKind for Reply {
    fn of(replies: &mut PendingReplies) -> &mut Vec<PendingReply<Self>> {
        &mut replies.commands
    }
}

impl ReplyKind for () {
    fn of(replies: &mut PendingReplies) -> &mut Vec<PendingReply<Self>> {
        &mut replies.reads
    }
}

impl ReplyKind for KeepAliveOutcome {
    fn of(replies: &mut PendingReplies) -> &mut Vec<PendingReply<Self>> {
        &mut replies.renewals
    }
}

/// A caller that waits for a reply.
pub(super) struct Waiter<T> {
    to: Sender<T>,
    queue: Option<Arc<ReplyQueue>>,
}

impl<T: ReplyKind> Waiter<T> {
    /// A waiter, and the receiver of its reply.
    pub(super) fn new(queue: Option<&Arc<ReplyQueue>>) -> (Self, oneshot::Receiver<Result<T, CoordError>>) {
        let (to, reply) = oneshot::channel();
        (Self { to, queue: queue.cloned() }, reply)
    }
}

/// Replies that are delivered together.
#[derive(Default)]
pub(super) struct ReplyBatch {
    queue: Option<Arc<ReplyQueue>>,
    replies: PendingReplies,
}

impl ReplyBatch {
    /// Adds a reply; it is delivered when the batch is dropped at the latest.
    pub(super) fn push<T: ReplyKind>(&mut self, waiter: Waiter<T>, reply: Result<T, CoordError>) {
        let Some(queue) = waiter.queue else {
            let _ = waiter.to.send(reply);
            return;
        };
        if self.queue.as_ref().is_some_and(|other| !Arc::ptr_eq(other, &queue)) {
            self.deliver();
        }
        self.queue = Some(queue);
        T::of(&mut self.replies).push((waiter.to, reply));
    }

    fn deliver(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        if self.replies.is_empty() {
            return;
        }
        let mut replies = queue.replies();
        if replies.closed {
            drop(replies);
            self.replies.send_all();
            return;
        }
        replies.append(&mut self.replies);
        drop(replies);
        queue.wake.notify_one();
    }
}

impl Drop for ReplyBatch {
    fn drop(&mut self) {
        self.deliver();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_of_a_batch_reach_their_own_queues() {
        let (here, there) = (Arc::new(ReplyQueue::default()), Arc::new(ReplyQueue::default()));
        let mut batch = ReplyBatch::default();
        let mut receivers = Vec::new();
        for queue in [Some(&here), Some(&there), None, Some(&here)] {
            let (waiter, receiver) = Waiter::<()>::new(queue);
            batch.push(waiter, Err(CoordError::NoLeader));
            receivers.push(receiver);
        }
        drop(batch);
        assert_eq!(receivers[2].try_recv(), Ok(Err(CoordError::NoLeader)), "answered directly");
        assert!(receivers[0].try_recv().is_err(), "it is queued");
        here.close();
        assert_eq!(receivers[0].try_recv(), Ok(Err(CoordError::NoLeader)));
        assert_eq!(receivers[3].try_recv(), Ok(Err(CoordError::NoLeader)));
        assert!(receivers[1].try_recv().is_err());
        there.close();
        assert_eq!(receivers[1].try_recv(), Ok(Err(CoordError::NoLeader)));

        let (waiter, mut receiver) = Waiter::<()>::new(Some(&here));
        ReplyBatch::default().push(waiter, Ok(()));
        assert_eq!(receiver.try_recv(), Ok(Ok(())), "a closed queue keeps nothing");
    }
}
