//! Messages about changes of one shard for clients of another shard's port: they wait here until the changes are committed.
//!
//! A client's own answers wait in its connection, for the journal of its shard. A message about another shard cannot wait
//! there: it would leave before its change is safe. Messages leave in the order in which they came, those that wait for nothing
//! included.
//!
//! Bounded: what waits counts towards the output buffer of its client ([`Mailbox::defer`]).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::pubsub::Gate;
use crate::session::Mailbox;
use crate::shard::Shard;
use crate::shared::lock;

/// The messages of one shard that wait.
#[derive(Default)]
pub struct Deferred {
    waiting: Mutex<VecDeque<Waiting>>,
    any: AtomicBool,
    /// Given when something came, or was committed.
    pub(crate) news: Notify,
}

struct Waiting {
    end: i64,
    voided: u64,
    bytes: Bytes,
    mailbox: Arc<Mailbox>,
}

impl Deferred {
    /// Sends a message when the journal is committed up to `end`. `voided` is the shard's count of voided answers.
    pub(crate) fn send(&self, mailbox: &Arc<Mailbox>, bytes: Bytes, end: i64, voided: u64) {
        let mut waiting = lock(&self.waiting);
        if end == 0 && waiting.is_empty() {
            drop(waiting);
            return mailbox.push(bytes);
        }
        if !mailbox.defer(bytes.len()) {
            // It reads too slowly, and is disconnected.
            return mailbox.wake();
        }
        let end = end.max(waiting.back().map_or(0, |last| last.end));
        waiting.push_back(Waiting { end, voided, bytes, mailbox: Arc::clone(mailbox) });
        self.any.store(true, Ordering::Release);
        drop(waiting);
        self.news.notify_one();
    }

    /// Whether anything waits.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Sends what is committed by now. What was made under an earlier count of voided answers is dropped: its change may be lost.
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
    /// What a message waits for that tells of this shard up to `end`.
    pub(crate) fn message_gate(&self, end: i64) -> Gate {
        let (voided, deferred) = (self.voided(), Some(Arc::clone(&self.deferred)));
        Gate { shard: Some(self.index), end, voided, deferred }
    }

    /// Sends messages to clients of other shards as the journal is committed. One task for the shard.
    pub async fn send_deferred(self: Arc<Self>) {
        loop {
            self.deferred.news.notified().await;
            // In this order: the count goes up before a journal that was cut can be committed further.
            let committed = self.committed();
            self.deferred.release(committed, self.voided());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_wait_for_their_commit_in_order_and_void_ones_are_dropped() {
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
        assert!(texts().is_empty() && !deferred.any(), "its change may be lost");
    }
}
