//! One client's way from the store into the queue, as a plain state machine: messages go out strictly in the order of
//! their sequence numbers, and when one of them fails or is not heard of again, it and everything after it goes out
//! again (go-back-N). The counter takes only the next number, so what went out behind a gap counts for nothing there.
//!
//! Invariants: `stored <= next - 1 <= acked`; a report of an earlier round changes nothing, because in the topic the
//! message it speaks of may stand behind a gap.

use std::collections::VecDeque;

use bytes::Bytes;

/// What a client's messages are waiting for.
#[derive(Debug)]
pub struct Relay {
    /// Everything up to here is in the queue, and marked as such in the store.
    stored: u64,
    /// What goes out next.
    next: u64,
    /// Rises whenever messages go out again.
    round: u64,
    /// Messages from `stored + 1` on, without a gap.
    messages: VecDeque<Bytes>,
    bytes: usize,
    /// Reported and not marked yet.
    reported: Vec<u64>,
    /// Since when the first message that is out has not been heard of.
    waiting_since_ms: u64,
}

/// What became of a message that went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reported {
    /// It is in the queue.
    Delivered,
    /// It may not be.
    Failed,
}

impl Relay {
    /// Everything up to `stored` is through.
    pub fn new(stored: u64) -> Self {
        Self {
            stored,
            next: stored + 1,
            round: 0,
            messages: VecDeque::new(),
            bytes: 0,
            reported: Vec::new(),
            waiting_since_ms: 0,
        }
    }

    /// Everything up to here is through.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// The last message it has.
    pub fn last(&self) -> u64 {
        self.stored + self.messages.len() as u64
    }

    /// How much memory the messages take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The present round.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// Whether nothing is left to do.
    pub fn is_done(&self) -> bool {
        self.messages.is_empty()
    }

    /// The store has the next message.
    pub fn push(&mut self, sn: u64, message: Bytes) {
        if sn <= self.last() {
            return;
        }
        assert_eq!(sn, self.last() + 1, "the store acknowledges without gaps");
        self.bytes += message.len();
        self.messages.push_back(message);
    }

    /// What to send now. Say `on_sent` once the producer has taken it; if it has not, ask again later.
    pub fn peek(&self) -> Option<(u64, &Bytes)> {
        let at = usize::try_from(self.next - self.stored - 1).ok()?;
        self.messages.get(at).map(|message| (self.next, message))
    }

    /// The producer has taken what `peek` showed.
    pub fn on_sent(&mut self, now_ms: u64) {
        if self.next == self.stored + 1 {
            self.waiting_since_ms = now_ms;
        }
        self.next += 1;
    }

    /// The producer reports. True when everything from the first message not through goes out again.
    pub fn on_report(&mut self, round: u64, sn: u64, what: Reported) -> bool {
        if round != self.round || sn <= self.stored {
            return false;
        }
        match what {
            Reported::Delivered => {
                self.reported.push(sn);
                false
            }
            Reported::Failed => {
                self.go_back();
                true
            }
        }
    }

    /// Whether messages are out that nothing was heard of.
    pub fn awaits_reports(&self) -> bool {
        (self.reported.len() as u64) < self.next - 1 - self.stored
    }

    /// Reports to be marked in the store; they are given out once.
    pub fn take_reported(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.reported)
    }

    /// The store says up to where everything is through.
    pub fn on_marked(&mut self, stored: u64, now_ms: u64) {
        while self.stored < stored {
            let Some(message) = self.messages.pop_front() else { break };
            self.bytes -= message.len();
            self.stored += 1;
            self.waiting_since_ms = now_ms;
        }
        self.next = self.next.max(self.stored + 1);
    }

    /// Whether the first message that is out has not been heard of for too long.
    pub fn is_late(&self, now_ms: u64, timeout_ms: u64) -> bool {
        self.next > self.stored + 1 && now_ms.saturating_sub(self.waiting_since_ms) > timeout_ms
    }

    /// Everything that is not through goes out again.
    pub fn go_back(&mut self) {
        self.round += 1;
        self.next = self.stored + 1;
        self.reported.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(count: u64) -> Relay {
        let mut relay = Relay::new(0);
        (1..=count).for_each(|sn| relay.push(sn, Bytes::from(vec![b'x'; 10])));
        relay
    }

    fn send_all(relay: &mut Relay) -> Vec<u64> {
        let mut sent = Vec::new();
        while let Some((sn, _)) = relay.peek() {
            sent.push(sn);
            relay.on_sent(0);
        }
        sent
    }

    #[test]
    fn messages_go_out_in_order_and_leave_once_marked() {
        let mut relay = with(3);
        assert_eq!(send_all(&mut relay), [1, 2, 3]);
        assert!(!relay.on_report(0, 1, Reported::Delivered));
        assert!(!relay.on_report(0, 3, Reported::Delivered));
        assert!(relay.awaits_reports());
        assert!(!relay.on_report(0, 2, Reported::Delivered));
        assert!(!relay.awaits_reports());
        assert_eq!(relay.take_reported(), [1, 3, 2]);
        relay.on_marked(1, 0);
        assert_eq!((relay.stored(), relay.last(), relay.bytes()), (1, 3, 20));
        relay.on_marked(3, 0);
        assert!(relay.is_done());
    }

    #[test]
    fn after_a_failure_it_and_all_after_it_go_out_again() {
        let mut relay = with(5);
        send_all(&mut relay);
        relay.on_report(0, 1, Reported::Delivered);
        relay.on_marked(1, 0);
        assert!(relay.on_report(0, 2, Reported::Failed));
        assert_eq!(send_all(&mut relay), [2, 3, 4, 5]);
        // The first 3 stands before the second 2 in the topic: its report is worth nothing.
        relay.on_report(0, 3, Reported::Delivered);
        assert_eq!(relay.take_reported(), Vec::<u64>::new());
        relay.on_report(1, 2, Reported::Delivered);
        assert_eq!(relay.take_reported(), [2]);
    }

    #[test]
    fn a_report_that_does_not_come_is_noticed() {
        let mut relay = with(2);
        assert!(!relay.is_late(10_000, 1_000), "nothing is out");
        relay.on_sent(5_000);
        assert!(!relay.is_late(6_000, 1_000));
        assert!(relay.is_late(6_001, 1_000));
        relay.go_back();
        assert_eq!(relay.peek().map(|(sn, _)| sn), Some(1));
    }

    #[test]
    fn what_is_pushed_twice_is_there_once() {
        let mut relay = with(2);
        relay.push(2, Bytes::from_static(b"again"));
        assert_eq!(relay.last(), 2);
    }
}
