//! Proposals: commands that wait together are proposed as one Raft entry.
//!
//! ```text
//!  callers ──▶ queue: batches, encoded in place ──▶ run_proposals(): up to MAX_INFLIGHT entries
//!                                                     ├─ this node leads:  Group::propose_in_term
//!                                                     └─ another leads:    forwarded over the peer connection, once
//!  Machine::apply on this node ──▶ the waiters of the batch
//! ```
//!
//! While entries are in flight, new commands collect in the next batch, so entries grow with the load and a lone
//! command is proposed without delay. Waiters are answered when the entry is applied on this node, whichever node
//! leads.
//!
//! Invariant: an entry is proposed again only when it is certain that it is in no log that can be committed: no leader
//! accepted it, or the term it was sent in has passed without it (see `shared.rs`). Otherwise its waiters wait, and
//! finally get [`CoordError::Timeout`].

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use moim_raft::{GroupError, Member, ServiceError, ServiceId, TransportError};
use tokio::sync::{Notify, oneshot};

use super::Inner;
use super::entry::{BatchBuilder, BatchId};
use super::error::CoordError;
use super::peer::{PeerReply, PeerRequest};
use super::replies::{ReplyBatch, ReplyQueue, Waiter};
use super::shared::{NeverApplied, PendingProposal, SendDecision};
use crate::reply::Reply;
use crate::request::Command;

/// Maximum number of entries in flight.
const MAX_INFLIGHT: usize = 4;
/// A batch is closed at this many commands: a reader may have to wait while it is applied.
const BATCH_COMMANDS: usize = 512;
/// A batch is closed at this many bytes.
const BATCH_BYTES: usize = 1 << 20;
/// Maximum number of queued commands.
const QUEUE_COMMANDS: usize = 32_768;
/// Maximum bytes of queued commands.
const QUEUE_BYTES: usize = 64 << 20;
/// Interval between checks for timed-out proposals.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(250);
/// Timeout of a command while this node is withdrawn.
const WITHDRAWN_TIMEOUT_MS: u64 = 500;
/// Delay before a leader that was not ready is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(20);

/// Commands that wait to be proposed.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<QueueState>,
    wake: Notify,
}

#[derive(Default)]
struct QueueState {
    batches: VecDeque<QueuedBatch>,
    /// Invariant: the sums over all batches.
    commands: usize,
    bytes: usize,
    closed: bool,
}

struct QueuedBatch {
    builder: BatchBuilder,
    waiters: Vec<Waiter<Reply>>,
    since_ms: u64,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, QueueState> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a command; its reply arrives through the receiver.
    pub(super) fn push(
        &self,
        command: &Command,
        reply_queue: Option<&Arc<ReplyQueue>>,
        now_ms: u64,
    ) -> Result<oneshot::Receiver<Result<Reply, CoordError>>, CoordError> {
        let (waiter, reply) = Waiter::new(reply_queue);
        {
            let mut waiting = self.waiting();
            if waiting.closed {
                return Err(CoordError::Stopped);
            }
            if waiting.commands >= QUEUE_COMMANDS || waiting.bytes >= QUEUE_BYTES {
                return Err(CoordError::TooManyRequests);
            }
            let fits_last = waiting
                .batches
                .back()
                .is_some_and(|last| last.builder.len() < BATCH_BYTES && last.waiters.len() < BATCH_COMMANDS);
            if !fits_last {
                let queued =
                    QueuedBatch { builder: BatchBuilder::new(), waiters: Vec::new(), since_ms: now_ms };
                waiting.batches.push_back(queued);
            }
            let Some(last) = waiting.batches.back_mut() else { return Err(CoordError::Stopped) };
            let before = if fits_last { last.builder.len() } else { 0 };
            if let Err(error) = last.builder.push(command) {
                if last.waiters.is_empty() {
                    waiting.batches.pop_back();
                }
                return Err(error.into());
            }
            last.waiters.push(waiter);
            let added = last.builder.len() - before;
            waiting.bytes += added;
            waiting.commands += 1;
        }
        self.wake.notify_one();
        Ok(reply)
    }

    fn pop(&self) -> Option<QueuedBatch> {
        let mut waiting = self.waiting();
        let first = waiting.batches.pop_front()?;
        waiting.commands -= first.waiters.len();
        waiting.bytes -= first.builder.len();
        Some(first)
    }

    async fn next(&self) -> QueuedBatch {
        loop {
            if let Some(first) = self.pop() {
                return first;
            }
            self.wake.notified().await;
        }
    }

    /// Refuses further commands and fails the queued ones.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        while let Some(queued) = self.pop() {
            fail(queued, &CoordError::Stopped);
        }
    }

    fn fail_older_than(&self, since_ms: u64) {
        while self.waiting().batches.front().is_some_and(|first| first.since_ms < since_ms) {
            if let Some(queued) = self.pop() {
                fail(queued, &CoordError::NoLeader);
            }
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.waiting().closed
    }

    fn is_empty(&self) -> bool {
        self.waiting().batches.is_empty()
    }
}

fn fail(queued: QueuedBatch, error: &CoordError) {
    let mut replies = ReplyBatch::default();
    for waiter in queued.waiters {
        replies.push(waiter, Err(error.clone()));
    }
}

/// Outcome of one attempt to propose a batch.
enum ProposeOutcome {
    /// The waiters have been answered.
    Answered,
    /// No leader accepted the batch, or it can no longer be applied.
    Retry,
    /// The batch was refused for good.
    Refused(CoordError),
}

/// What is known of an entry after it was sent.
enum SendOutcome {
    /// It is in the log, or may be: the outcome is known when it is applied.
    MaybeAccepted,
    /// No leader accepted it.
    NotAccepted,
    /// It was refused for good.
    Refused(CoordError),
}

impl Inner {
    /// Queues a command and waits for its reply.
    pub(super) async fn submit(
        &self,
        command: &Command,
        reply_queue: Option<&Arc<ReplyQueue>>,
    ) -> Result<Reply, CoordError> {
        command.check()?;
        let reply = self.queue.push(command, reply_queue, self.now_ms())?;
        // A waiter is dropped unanswered only when the node stops, and then the outcome is unknown.
        reply.await.unwrap_or(Err(CoordError::Timeout))
    }

    /// Proposes queued batches until the node stops.
    pub(super) async fn run_proposals(self: Arc<Self>) {
        let mut inflight = FuturesUnordered::new();
        let shutdown = self.shutdown.clone();
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => break,
                Some(()) = inflight.next(), if !inflight.is_empty() => {}
                queued = self.queue.next(), if inflight.len() < MAX_INFLIGHT => {
                    inflight.push(self.propose_batch(queued));
                }
            }
        }
    }

    async fn propose_batch(&self, queued: QueuedBatch) {
        let number = self.next_batch();
        let id = BatchId { nonce: self.shared.nonce, number };
        let deadline_ms = queued.since_ms + self.timeout_ms();
        let entry = queued.builder.finish(id);
        self.shared.proposals().by_number.insert(number, PendingProposal::new(queued.waiters, deadline_ms));
        self.proposal_added.notify_one();
        loop {
            match self.propose_once(number, &entry, deadline_ms).await {
                ProposeOutcome::Answered => return,
                ProposeOutcome::Refused(error) => return self.shared.fail_proposal(number, &error),
                ProposeOutcome::Retry if self.now_ms() >= deadline_ms => {
                    return self.shared.fail_proposal(number, &CoordError::NoLeader);
                }
                ProposeOutcome::Retry => {}
            }
        }
    }

    /// Sends an entry to the current leader, for that term only, and waits for its outcome.
    async fn propose_once(&self, number: u64, entry: &Bytes, deadline_ms: u64) -> ProposeOutcome {
        let Some((term, leader)) = self.group.leader_in_term() else {
            self.wait_leader(deadline_ms).await;
            return ProposeOutcome::Retry;
        };
        let mut never_applied = match self.shared.mark_sent(number, term) {
            SendDecision::Send(never_applied) => never_applied,
            SendDecision::AlreadyAnswered => return ProposeOutcome::Answered,
            SendDecision::TermPassed => {
                tokio::time::sleep(RETRY_DELAY).await;
                return ProposeOutcome::Retry;
            }
        };
        let resolve = |notice: Result<NeverApplied, _>| {
            if notice.is_ok() { ProposeOutcome::Retry } else { ProposeOutcome::Answered }
        };
        let sent = tokio::select! {
            biased;
            notice = &mut never_applied => return resolve(notice),
            sent = self.send(term, &leader, entry, deadline_ms) => sent,
        };
        match sent {
            #[cfg(feature = "planted")]
            SendOutcome::MaybeAccepted if moim_raft::planted::is_on(moim_raft::planted::Bug::SendTwice) => {
                self.shared.mark_not_sent(number);
                ProposeOutcome::Retry
            }
            SendOutcome::MaybeAccepted => resolve(never_applied.await),
            SendOutcome::Refused(error) => ProposeOutcome::Refused(error),
            SendOutcome::NotAccepted => {
                self.shared.mark_not_sent(number);
                tokio::time::sleep(RETRY_DELAY).await;
                ProposeOutcome::Retry
            }
        }
    }

    async fn send(&self, term: u64, leader: &Member, entry: &Bytes, deadline_ms: u64) -> SendOutcome {
        if leader.id == self.group.voter() {
            return match self.group.propose_in_term(term, entry.clone()).await {
                Ok(_) | Err(GroupError::Unknown) => SendOutcome::MaybeAccepted,
                Err(GroupError::NotLeader { .. }) => SendOutcome::NotAccepted,
                Err(error) => SendOutcome::Refused(CoordError::of_group(error)),
            };
        }
        let left = Duration::from_millis(deadline_ms.saturating_sub(self.now_ms()).max(1));
        let request = PeerRequest::Propose { term, entry: entry.clone() }.encode();
        let reply = self.transport.ask(leader, ServiceId::COORDINATOR, request, left).await;
        match reply.map(PeerReply::decode) {
            Ok(Ok(PeerReply::Refused(CoordError::NotLeader)))
            | Err(
                ServiceError::NotHere
                | ServiceError::Busy
                | ServiceError::Transport(TransportError::Unreachable(_)),
            ) => SendOutcome::NotAccepted,
            Ok(Ok(PeerReply::Refused(error))) if !error.is_unknown() => SendOutcome::Refused(error),
            // Committed, lost on the way, or an undecodable reply: only the log tells the outcome.
            Ok(_) | Err(ServiceError::Transport(TransportError::Broken(_) | TransportError::TimedOut)) => {
                SendOutcome::MaybeAccepted
            }
        }
    }

    /// Fails proposals that have waited too long, while any are pending.
    pub(super) async fn expire_proposals(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => return,
                () = self.proposal_added.notified() => {}
            }
            while !self.shared.proposals().by_number.is_empty() || !self.queue.is_empty() {
                tokio::select! {
                    biased;
                    () = shutdown.stopped() => return,
                    () = tokio::time::sleep(EXPIRY_INTERVAL) => {}
                }
                let now_ms = self.now_ms();
                // Proposals sent before this node was withdrawn may wait for its disk.
                let timeout_ms =
                    if *self.withdrawn.borrow() { WITHDRAWN_TIMEOUT_MS } else { self.timeout_ms() };
                self.queue.fail_older_than(now_ms.saturating_sub(timeout_ms));
                let sooner_ms = self.timeout_ms() - timeout_ms;
                let mut late: Vec<u64> = {
                    let inflight = self.shared.proposals();
                    let is_late =
                        |proposal: &PendingProposal| proposal.deadline_ms.saturating_sub(sooner_ms) <= now_ms;
                    let late = inflight.by_number.iter().filter(|(_, proposal)| is_late(proposal));
                    late.map(|(number, _)| *number).collect()
                };
                late.sort_unstable();
                for number in late {
                    self.shared.fail_proposal(number, &CoordError::Timeout);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Op, PutRequest};

    fn put(bytes: usize) -> Command {
        Command::client(Op::Put(PutRequest::new("k", vec![7; bytes])))
    }

    /// Fills a queue until it refuses, and empties it again.
    fn check(bytes: usize, most_commands: usize, most_bytes: usize) {
        let queue = Queue::default();
        let mut replies = Vec::new();
        let refused = loop {
            match queue.push(&put(bytes), None, 0) {
                Ok(reply) => replies.push(reply),
                Err(error) => break error,
            }
        };
        assert_eq!(refused, CoordError::TooManyRequests);
        assert!(replies.len() <= most_commands && replies.len() * bytes <= most_bytes, "{}", replies.len());
        let too_large = queue.push(&put(crate::request::MAX_REQUEST_BYTES), None, 0);
        assert!(matches!(too_large, Err(CoordError::TooManyRequests)));
        let mut taken = 0;
        while let Some(queued) = queue.pop() {
            assert!(queued.waiters.len() <= BATCH_COMMANDS);
            assert!(queued.builder.len() <= BATCH_BYTES + bytes + 64);
            taken += queued.waiters.len();
        }
        assert_eq!(taken, replies.len());
        let left = queue.waiting();
        assert_eq!((left.commands, left.bytes), (0, 0));
        drop(left);
        let too_large = queue.push(&put(crate::request::MAX_REQUEST_BYTES), None, 0);
        assert!(matches!(too_large, Err(CoordError::Refused(crate::Error::RequestTooLarge))));
        assert!(queue.is_empty(), "a refused command leaves no batch behind");
        queue.close();
        assert!(matches!(queue.push(&put(1), None, 0), Err(CoordError::Stopped)));
    }

    #[test]
    fn queue_is_bounded_in_commands_and_in_bytes() {
        check(10, QUEUE_COMMANDS, QUEUE_BYTES);
        check(100_000, QUEUE_BYTES / 100_000 + 1, QUEUE_BYTES + 100_000);
    }
}
