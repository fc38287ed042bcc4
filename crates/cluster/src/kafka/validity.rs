//! Validity of ownership: the time in which the group coordinator cannot have reassigned this member's partitions.
//!
//! The coordinator accepts a commit from a member of the current generation only, so an accepted commit proves
//! membership at some time after it was sent. Polling proves nothing: a disconnected client continues to poll.
//! Invariant: validity counts from the sending of the commit, never from its reply.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Accepted commits of one member. Times are those of its monotonic clock, in nanoseconds.
pub(super) struct Validity {
    /// Validity of an accepted commit: below the session timeout, after which the coordinator reassigns partitions.
    limit_ns: u64,
    /// Send time of the newest commit that the coordinator accepted.
    confirmed_ns: AtomicU64,
    /// Send time of the commit in flight. At most one is in flight, so a reply belongs to it.
    pending_ns: Mutex<Option<u64>>,
}

impl Validity {
    pub(super) fn new(session_timeout: Duration) -> Self {
        let limit_ns = u64::try_from(session_timeout.mul_f64(0.85).as_nanos()).unwrap_or(u64::MAX);
        Self { limit_ns, confirmed_ns: AtomicU64::new(0), pending_ns: Mutex::default() }
    }

    /// Sends a commit unless one is in flight. `send` returns true if a reply will follow.
    pub(super) fn send(&self, now_ns: u64, send: impl FnOnce() -> bool) {
        // The lock is held while sending: the reply may arrive on another thread.
        let mut pending = self.pending_ns.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.is_none() && send() {
            *pending = Some(now_ns);
        }
    }

    /// Takes the coordinator's reply to the commit in flight.
    pub(super) fn on_reply(&self, accepted: bool) {
        let sent = self.pending_ns.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(sent) = sent.filter(|_| accepted) {
            self.confirm(sent);
        }
    }

    /// Records that the coordinator accepted a commit sent at `sent_ns`.
    pub(super) fn confirm(&self, sent_ns: u64) {
        self.confirmed_ns.fetch_max(sent_ns, Ordering::SeqCst);
    }

    pub(super) fn is_valid(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.confirmed_ns.load(Ordering::SeqCst)) < self.limit_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn ownership_is_valid_for_less_than_a_session_timeout_after_an_accepted_commit() {
        let validity = Validity::new(Duration::from_secs(10));
        let is_valid = |tenths: u64| validity.is_valid(tenths * SECOND / 10);
        assert!(!is_valid(1_000), "no commit was accepted yet");
        validity.send(100 * SECOND, || true);
        assert!(!is_valid(1_001), "a commit without a reply proves nothing");
        validity.send(101 * SECOND, || panic!("a commit is in flight"));
        validity.on_reply(false);
        assert!(!is_valid(1_010), "the coordinator rejected the generation");

        validity.send(102 * SECOND, || true);
        validity.on_reply(true);
        assert!(is_valid(1_021) && is_valid(1_104));
        assert!(!is_valid(1_105), "0.85 of the session timeout after the send, whenever the reply came");

        // Disconnected: commits get no reply, or are not even sent.
        validity.send(106 * SECOND, || false);
        validity.send(107 * SECOND, || true);
        assert!(is_valid(1_104) && !is_valid(1_105));
        validity.on_reply(true);
        assert!(is_valid(1_154) && !is_valid(1_155));
        validity.confirm(103 * SECOND);
        assert!(is_valid(1_154), "an older commit does not shorten validity");
        validity.on_reply(true);
        assert!(!is_valid(1_155), "a reply without a commit in flight");
    }
}
