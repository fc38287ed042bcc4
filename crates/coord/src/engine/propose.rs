//! How a command gets into the log: commands that wait together travel as one entry.
//!
//! ```text
//!  callers ──▶ queue: drafts, filled in place ──▶ run(): up to FLIGHTS entries under way
//!                                                   ├─ leader here:  Group::propose
//!                                                   └─ elsewhere:    asked over the peer connection, once
//!  Machine::apply here ──▶ the waiters of the flight
//! ```
//!
//! While entries are under way, new commands gather in the next draft, so entries grow with the load and a lone
//! command waits for nobody. Waiters are answered where the entry is applied on this node, whoever led.
//!
//! Invariant: an entry is sent again only when it is certain that it is in no log that counts: nobody took it, or the
//! term it was sent for has passed without it (see `shared.rs`). Otherwise it is waited for, and its waiters get
//! [`CoordError::Timeout`] in the end.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use moim_raft::{GroupError, Member, ServiceError, ServiceId, TransportError};
use tokio::sync::{Notify, oneshot};

use super::Inner;
use super::answers::{Bundle, Counter, Waiter};
use super::entry::{BatchId, Draft};
use super::error::CoordError;
use super::peer::{PeerReply, PeerRequest};
use super::shared::{Flight, NeverApplied, Takeoff};
use crate::reply::Reply;
use crate::request::Command;

/// Entries under way at a time.
const FLIGHTS: usize = 4;
/// A draft is closed at this many commands: what a reader may have to wait for while it is applied.
const DRAFT_COMMANDS: usize = 512;
/// And at this many bytes.
const DRAFT_BYTES: usize = 1 << 20;
/// Commands that may wait.
const QUEUE_COMMANDS: usize = 32_768;
/// Bytes that may wait.
const QUEUE_BYTES: usize = 64 << 20;
/// Between looks at what has waited too long.
const SWEEP: Duration = Duration::from_millis(250);
/// How long a command is waited for while this node has withdrawn.
const WITHDRAWN_MS: u64 = 500;
/// Before a leader that was not ready is asked again.
const PAUSE: Duration = Duration::from_millis(20);

/// Commands that wait to be proposed.
#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    wake: Notify,
}

#[derive(Default)]
struct Waiting {
    drafts: VecDeque<Filling>,
    /// Invariant: those of all drafts, and their bytes.
    commands: usize,
    bytes: usize,
    closed: bool,
}

struct Filling {
    draft: Draft,
    waiters: Vec<Waiter<Reply>>,
    since_ms: u64,
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a command; its reply comes through the receiver.
    pub(super) fn push(
        &self,
        command: &Command,
        through: Option<&Arc<Counter>>,
        now_ms: u64,
    ) -> Result<oneshot::Receiver<Result<Reply, CoordError>>, CoordError> {
        let (waiter, reply) = Waiter::new(through);
        {
            let mut waiting = self.waiting();
            if waiting.closed {
                return Err(CoordError::Stopped);
            }
            if waiting.commands >= QUEUE_COMMANDS || waiting.bytes >= QUEUE_BYTES {
                return Err(CoordError::TooManyRequests);
            }
            let has_room = waiting
                .drafts
                .back()
                .is_some_and(|last| last.draft.len() < DRAFT_BYTES && last.waiters.len() < DRAFT_COMMANDS);
            if !has_room {
                let filling = Filling { draft: Draft::new(), waiters: Vec::new(), since_ms: now_ms };
                waiting.drafts.push_back(filling);
            }
            let Some(last) = waiting.drafts.back_mut() else { return Err(CoordError::Stopped) };
            let before = if has_room { last.draft.len() } else { 0 };
            if let Err(error) = last.draft.push(command) {
                if last.waiters.is_empty() {
                    waiting.drafts.pop_back();
                }
                return Err(error.into());
            }
            last.waiters.push(waiter);
            let added = last.draft.len() - before;
            waiting.bytes += added;
            waiting.commands += 1;
        }
        self.wake.notify_one();
        Ok(reply)
    }

    fn pop(&self) -> Option<Filling> {
        let mut waiting = self.waiting();
        let first = waiting.drafts.pop_front()?;
        waiting.commands -= first.waiters.len();
        waiting.bytes -= first.draft.len();
        Some(first)
    }

    async fn next(&self) -> Filling {
        loop {
            if let Some(first) = self.pop() {
                return first;
            }
            self.wake.notified().await;
        }
    }

    /// Takes no more, and gives up what waits.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        while let Some(filling) = self.pop() {
            fail(filling, &CoordError::Stopped);
        }
    }

    fn give_up_before(&self, since_ms: u64) {
        while self.waiting().drafts.front().is_some_and(|first| first.since_ms < since_ms) {
            if let Some(filling) = self.pop() {
                fail(filling, &CoordError::NoLeader);
            }
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.waiting().closed
    }

    fn is_empty(&self) -> bool {
        self.waiting().drafts.is_empty()
    }
}

fn fail(filling: Filling, error: &CoordError) {
    let mut bundle = Bundle::default();
    for waiter in filling.waiters {
        bundle.answer(waiter, Err(error.clone()));
    }
}

/// What became of one try.
enum Try {
    /// Its waiters have been answered.
    Landed,
    /// Nobody took it, or nobody ever will.
    Again,
    /// It will never be.
    Refused(CoordError),
}

/// What is known of an entry that was sent.
enum Sent {
    /// It is in the log, or may be: whoever applies it tells.
    Perhaps,
    /// Nobody took it.
    Nobody,
    /// It was refused for good.
    Refused(CoordError),
}

impl Inner {
    /// Puts a command on its way and waits for what it comes to.
    pub(super) async fn submit(
        &self,
        command: &Command,
        through: Option<&Arc<Counter>>,
    ) -> Result<Reply, CoordError> {
        command.check()?;
        let reply = self.queue.push(command, through, self.now_ms())?;
        // A waiter is dropped unanswered only when the node goes down, and then nobody knows.
        reply.await.unwrap_or(Err(CoordError::Timeout))
    }

    /// Carries drafts into the log until the node stops.
    pub(super) async fn carry_proposals(self: Arc<Self>) {
        let mut flights = FuturesUnordered::new();
        let shutdown = self.shutdown.clone();
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => break,
                Some(()) = flights.next(), if !flights.is_empty() => {}
                filling = self.queue.next(), if flights.len() < FLIGHTS => {
                    flights.push(self.carry(filling));
                }
            }
        }
    }

    async fn carry(&self, filling: Filling) {
        let number = self.next_batch();
        let id = BatchId { nonce: self.shared.nonce, number };
        let deadline_ms = filling.since_ms + self.timeout_ms();
        let entry = filling.draft.finish(id);
        self.shared.flights().by_number.insert(number, Flight::new(filling.waiters, deadline_ms));
        self.took_off.notify_one();
        loop {
            match self.try_once(number, &entry, deadline_ms).await {
                Try::Landed => return,
                Try::Refused(error) => return self.shared.land(number, &error),
                Try::Again if self.now_ms() >= deadline_ms => {
                    return self.shared.land(number, &CoordError::NoLeader);
                }
                Try::Again => {}
            }
        }
    }

    /// Sends an entry to whoever leads, for that term only, and waits until it is known what became of it.
    async fn try_once(&self, number: u64, entry: &Bytes, deadline_ms: u64) -> Try {
        let Some((term, leader)) = self.group.leader_in_term() else {
            self.wait_leader(deadline_ms).await;
            return Try::Again;
        };
        let mut verdict = match self.shared.take_off(number, term) {
            Takeoff::Go(verdict) => verdict,
            Takeoff::Gone => return Try::Landed,
            Takeoff::TooLate => {
                tokio::time::sleep(PAUSE).await;
                return Try::Again;
            }
        };
        let judged = |told: Result<NeverApplied, _>| if told.is_ok() { Try::Again } else { Try::Landed };
        let sent = tokio::select! {
            biased;
            told = &mut verdict => return judged(told),
            sent = self.send(term, &leader, entry, deadline_ms) => sent,
        };
        match sent {
            #[cfg(feature = "planted")]
            Sent::Perhaps if moim_raft::planted::is_on(moim_raft::planted::Bug::SendTwice) => {
                self.shared.call_back(number);
                Try::Again
            }
            Sent::Perhaps => judged(verdict.await),
            Sent::Refused(error) => Try::Refused(error),
            Sent::Nobody => {
                self.shared.call_back(number);
                tokio::time::sleep(PAUSE).await;
                Try::Again
            }
        }
    }

    async fn send(&self, term: u64, leader: &Member, entry: &Bytes, deadline_ms: u64) -> Sent {
        if leader.id == self.group.voter() {
            return match self.group.propose_in_term(term, entry.clone()).await {
                Ok(_) | Err(GroupError::Unknown) => Sent::Perhaps,
                Err(GroupError::NotLeader { .. }) => Sent::Nobody,
                Err(error) => Sent::Refused(CoordError::of_group(error)),
            };
        }
        let left = Duration::from_millis(deadline_ms.saturating_sub(self.now_ms()).max(1));
        let request = PeerRequest::Propose { term, entry: entry.clone() }.encode();
        let answer = self.transport.ask(leader, ServiceId::COORDINATOR, request, left).await;
        match answer.map(PeerReply::decode) {
            Ok(Ok(PeerReply::Refused(CoordError::NotLeader)))
            | Err(
                ServiceError::NotHere
                | ServiceError::Busy
                | ServiceError::Transport(TransportError::Unreachable(_)),
            ) => Sent::Nobody,
            Ok(Ok(PeerReply::Refused(error))) if !error.is_unknown() => Sent::Refused(error),
            // Done, lost on the way, or not understood: from here on only the log knows.
            Ok(_) | Err(ServiceError::Transport(TransportError::Broken(_) | TransportError::TimedOut)) => {
                Sent::Perhaps
            }
        }
    }

    /// Gives up what has waited too long, while anything waits.
    pub(super) async fn sweep_flights(self: Arc<Self>) {
        let shutdown = self.shutdown.clone();
        loop {
            tokio::select! {
                biased;
                () = shutdown.stopped() => return,
                () = self.took_off.notified() => {}
            }
            while !self.shared.flights().by_number.is_empty() || !self.queue.is_empty() {
                tokio::select! {
                    biased;
                    () = shutdown.stopped() => return,
                    () = tokio::time::sleep(SWEEP) => {}
                }
                let now_ms = self.now_ms();
                // What was sent before this node withdrew may wait for its disk.
                let patience_ms = if *self.withdrawn.borrow() { WITHDRAWN_MS } else { self.timeout_ms() };
                self.queue.give_up_before(now_ms.saturating_sub(patience_ms));
                let sooner_ms = self.timeout_ms() - patience_ms;
                let mut late: Vec<u64> = {
                    let flights = self.shared.flights();
                    let is_late = |flight: &Flight| flight.deadline_ms.saturating_sub(sooner_ms) <= now_ms;
                    let late = flights.by_number.iter().filter(|(_, flight)| is_late(flight));
                    late.map(|(number, _)| *number).collect()
                };
                late.sort_unstable();
                for number in late {
                    self.shared.land(number, &CoordError::Timeout);
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
        while let Some(filling) = queue.pop() {
            assert!(filling.waiters.len() <= DRAFT_COMMANDS);
            assert!(filling.draft.len() <= DRAFT_BYTES + bytes + 64);
            taken += filling.waiters.len();
        }
        assert_eq!(taken, replies.len());
        let left = queue.waiting();
        assert_eq!((left.commands, left.bytes), (0, 0));
        drop(left);
        let too_large = queue.push(&put(crate::request::MAX_REQUEST_BYTES), None, 0);
        assert!(matches!(too_large, Err(CoordError::Refused(crate::Error::RequestTooLarge))));
        assert!(queue.is_empty(), "a refused command leaves no draft behind");
        queue.close();
        assert!(matches!(queue.push(&put(1), None, 0), Err(CoordError::Stopped)));
    }

    #[test]
    fn a_queue_is_bounded_in_commands_and_in_bytes() {
        check(10, QUEUE_COMMANDS, QUEUE_BYTES);
        check(100_000, QUEUE_BYTES / 100_000 + 1, QUEUE_BYTES + 100_000);
    }
}
