//! Deferred messages: messages about writes of one shard for clients connected to another shard's port. They wait
//! here for the commit.
//!
//! A client's own replies wait in its connection, for the journal of its shard. A message about another shard cannot
//! wait there: it would be sent before its write is committed. Messages are sent in the order of arrival, including
//! those that need no commit.
//!
//! Bounded: waiting messages count towards the client output buffer ([`Mailbox::defer`]).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::pubsub::Gate;
use crate::session::Mailbox;
use crate::shard::Shard;
use crate::shared::lock;

/// The messages of one shard that wait for a commit.
#[derive(Default)]
pub struct Deferred {
    waiting: Mutex<VecDeque<Waiting>>,
    any: AtomicBool,
    /// Notified when a message is queued or the commit advances.
    pub(crate) wakeup: Notify,
}

struct Waiting {
    end: i64,
    voided: u64,
    bytes: Bytes,
    mailbox: Arc<Mailbox>,
}

impl Deferred {
    /// Sends a message once the journal is committed up to `end`. `voided` is the shard's count of voided replies.
    pub(crate) fn send(&self, mailbox: &Arc<Mailbox>, bytes: Bytes, end: i64, voided: u64) {
        let mut waiting = lock(&self.waiting);
        if end == 0 && waiting.is_empty() {
            drop(waiting);
            return mailbox.push(bytes);
        }
        if !mailbox.defer(bytes.len()) {
            // The client output buffer limit is exceeded: the client is disconnected.
            return mailbox.wake();
        }
        let end = end.max(waiting.back().map_or(0, |last| last.end));
        waiting.push_back(Waiting { end, voided, bytes, mailbox: Arc::clone(mailbox) });
        self.any.store(true, Ordering::Release);
        drop(waiting);
        self.wakeup.notify_one();
    }

    /// True if any message waits.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Sends the messages that are committed. Messages created under an earlier count of voided replies are dropped:
    /// their write may be lost.
    pub(crate) fn release(&self, committed: i64, voided: u64) {
        let mut waiting = lock(&self.waiting);
        while let Some(first) = waiting.front() {
            let is_void = first.voided != voided;
            if first.end > committed && !is_void {
                break;
            }
            let Some(first) = waiting.pop_front() else { break };
            first.mailbox.undefer(first.bytes.len());
            if !is_void {
                first.mailbox.push(first.bytes);
            }
        }
        self.any.store(!waiting.is_empty(), Ordering::Release);
    }
}

impl Shard {
    /// The commit gate of a message about this shard up to the journal end `end`.
    pub(crate) fn message_gate(&self, end: i64) -> Gate {
        let (voided, deferred) = (self.voided(), Some(Arc::clone(&self.deferred)));
        Gate { shard: Some(self.index), end, voided, deferred }
    }

    /// Sends deferred messages to clients of other shards as the commit advances. One task per shard.
    pub async fn send_deferred(self: Arc<Self>) {
        loop {
            self.deferred.wakeup.notified().await;
            // `committed` is read first: the count of voided replies increases before a truncated journal can commit
            // further.
            let committed = self.committed();
            self.deferred.release(committed, self.voided());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deferred_messages_wait_for_commit_in_order_and_void_ones_are_dropped() {
        let (deferred, mailbox) = (Deferred::default(), Arc::new(Mailbox::default()));
        let texts = || -> Vec<Bytes> { mailbox.take().pushes.into_iter().map(|push| push.bytes).collect() };
        let send = |text: &'static str, end, voided| {
            deferred.send(&mailbox, Bytes::from_static(text.as_bytes()), end, voided);
        };
        send("open", 0, 1);
        assert_eq!(texts(), ["open"]);
        send("a", 5, 1);
        send("b", 0, 1);
        send("c", 9, 1);
        assert!(texts().is_empty() && deferred.any());
        deferred.release(4, 1);
        assert!(texts().is_empty());
        deferred.release(5, 1);
        assert_eq!(texts(), ["a", "b"]);
        deferred.release(20, 2);
        assert!(texts().is_empty() && !deferred.any(), "the write may be lost");
    }
}
