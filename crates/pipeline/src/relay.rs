//! State machine of one client's relay from the store to the queue. Messages are sent strictly in sequence order. If
//! one fails, or has no delivery report in time, it and every later message are resent (go-back-N). The counter
//! accepts only the next sequence number, so a message that was sent behind a gap is not counted.
//!
//! Invariants: `stored <= next - 1 <= acked`; a delivery report of an earlier round changes nothing, because its
//! message may stand behind a gap in the topic.

use std::collections::VecDeque;

use bytes::Bytes;

/// Relay state of one client.
#[derive(Debug)]
pub struct Relay {
    /// Everything up to this sequence number is in the queue, and marked as such in the store.
    stored: u64,
    /// Sequence number to send next.
    next: u64,
    /// Incremented by every resend.
    round: u64,
    /// Messages from `stored + 1` on, without a gap.
    messages: VecDeque<Bytes>,
    bytes: usize,
    /// Reported as delivered and not yet marked in the store.
    reported: Vec<u64>,
    /// When the oldest outstanding message began to wait for its delivery report.
    waiting_since_ms: u64,
}

/// Outcome of a sent message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The message is in the queue.
    Delivered,
    /// The message may not be in the queue.
    Failed,
}

impl Relay {
    /// A relay whose messages up to `stored` are in the queue.
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

    /// Everything up to this sequence number is in the queue.
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// Sequence number of the last message.
    pub fn last(&self) -> u64 {
        self.stored + self.messages.len() as u64
    }

    /// Memory used by the messages.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The current round.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// True if no message is left to relay.
    pub fn is_done(&self) -> bool {
        self.messages.is_empty()
    }

    /// Adds the next message, which the store has.
    pub fn push(&mut self, sn: u64, message: Bytes) {
        if sn <= self.last() {
            return;
        }
        assert_eq!(sn, self.last() + 1, "the store acknowledges without gaps");
        self.bytes += message.len();
        self.messages.push_back(message);
    }

    /// The message to send next. Call `on_sent` once the producer has accepted it; otherwise ask again later.
    pub fn peek(&self) -> Option<(u64, &Bytes)> {
        let at = usize::try_from(self.next - self.stored - 1).ok()?;
        self.messages.get(at).map(|message| (self.next, message))
    }

    /// The producer has accepted the message that `peek` returned.
    pub fn on_sent(&mut self, now_ms: u64) {
        if self.next == self.stored + 1 {
            self.waiting_since_ms = now_ms;
        }
        self.next += 1;
    }

    /// Takes a delivery report. True if everything from the first unstored message on must be resent.
    pub fn on_report(&mut self, round: u64, sn: u64, what: Delivery) -> bool {
        if round != self.round || sn <= self.stored {
            return false;
        }
        match what {
            Delivery::Delivered => {
                self.reported.push(sn);
                false
            }
            Delivery::Failed => {
                self.start_round();
                true
            }
        }
    }

    /// True if sent messages have no delivery report yet.
    pub fn awaits_reports(&self) -> bool {
        (self.reported.len() as u64) < self.next - 1 - self.stored
    }

    /// Takes the reports that must be marked in the store; each is returned once.
    pub fn take_reported(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.reported)
    }

    /// The store has marked everything up to `stored`.
    pub fn on_marked(&mut self, stored: u64, now_ms: u64) {
        while self.stored < stored {
            let Some(message) = self.messages.pop_front() else { break };
            self.bytes -= message.len();
            self.stored += 1;
            self.waiting_since_ms = now_ms;
        }
        self.next = self.next.max(self.stored + 1);
    }

    /// True if the delivery report of the oldest outstanding message is overdue.
    pub fn is_overdue(&self, now_ms: u64, timeout_ms: u64) -> bool {
        self.next > self.stored + 1 && now_ms.saturating_sub(self.waiting_since_ms) > timeout_ms
    }

    /// Starts a new round: every unstored message is resent.
    pub fn start_round(&mut self) {
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
    fn messages_are_sent_in_order_and_removed_once_marked() {
        let mut relay = with(3);
        assert_eq!(send_all(&mut relay), [1, 2, 3]);
        assert!(!relay.on_report(0, 1, Delivery::Delivered));
        assert!(!relay.on_report(0, 3, Delivery::Delivered));
        assert!(relay.awaits_reports());
        assert!(!relay.on_report(0, 2, Delivery::Delivered));
        assert!(!relay.awaits_reports());
        assert_eq!(relay.take_reported(), [1, 3, 2]);
        relay.on_marked(1, 0);
        assert_eq!((relay.stored(), relay.last(), relay.bytes()), (1, 3, 20));
        relay.on_marked(3, 0);
        assert!(relay.is_done());
    }

    #[test]
    fn failed_delivery_resends_from_the_failed_message() {
        let mut relay = with(5);
        send_all(&mut relay);
        relay.on_report(0, 1, Delivery::Delivered);
        relay.on_marked(1, 0);
        assert!(relay.on_report(0, 2, Delivery::Failed));
        assert_eq!(send_all(&mut relay), [2, 3, 4, 5]);
        // The first 3 stands before the second 2 in the topic, so its delivery report is ignored.
        relay.on_report(0, 3, Delivery::Delivered);
        assert_eq!(relay.take_reported(), Vec::<u64>::new());
        relay.on_report(1, 2, Delivery::Delivered);
        assert_eq!(relay.take_reported(), [2]);
    }

    #[test]
    fn missing_delivery_report_is_overdue() {
        let mut relay = with(2);
        assert!(!relay.is_overdue(10_000, 1_000), "nothing is out");
        relay.on_sent(5_000);
        assert!(!relay.is_overdue(6_000, 1_000));
        assert!(relay.is_overdue(6_001, 1_000));
        relay.start_round();
        assert_eq!(relay.peek().map(|(sn, _)| sn), Some(1));
    }

    #[test]
    fn duplicate_push_is_ignored() {
        let mut relay = with(2);
        relay.push(2, Bytes::from_static(b"again"));
        assert_eq!(relay.last(), 2);
    }
}
