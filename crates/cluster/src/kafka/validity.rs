//! How long ownership is valid: while the group coordinator cannot have given this member's partitions away yet.
//!
//! The coordinator accepts a commit from a member of the current generation only, so an accepted commit proves membership at
//! some time after it was sent. Polling proves nothing: a client that is cut off goes on polling. Invariant: validity
//! counts from when the commit was sent, never from its answer.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Accepted commits of one member. Times are those of its monotonic clock, in nanoseconds.
pub(super) struct Validity {
    /// How long an accepted commit counts: below the session timeout, after which the coordinator gives partitions away.
    limit_ns: u64,
    /// When the last commit was sent that the coordinator accepted.
    confirmed_ns: AtomicU64,
    /// When the commit was sent whose answer is awaited. At most one is under way, so the answer is to this one.
    pending_ns: Mutex<Option<u64>>,
}

impl Validity {
    pub(super) fn new(session_timeout: Duration) -> Self {
        let limit_ns = u64::try_from(session_timeout.mul_f64(0.85).as_nanos()).unwrap_or(u64::MAX);
        Self { limit_ns, confirmed_ns: AtomicU64::new(0), pending_ns: Mutex::default() }
    }

    /// Sends a commit unless one is under way. `send` answers whether an answer will come.
    pub(super) fn send(&self, now_ns: u64, send: impl FnOnce() -> bool) {
        // Held while sending: the answer may come on another thread.
        let mut pending = self.pending_ns.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.is_none() && send() {
            *pending = Some(now_ns);
        }
    }

    /// The coordinator's answer to the commit under way.
    pub(super) fn on_answer(&self, accepted: bool) {
        let sent = self.pending_ns.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(sent) = sent.filter(|_| accepted) {
            self.confirm(sent);
        }
    }

    /// The coordinator accepted a commit that was sent then.
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
    fn ownership_is_valid_from_an_accepted_commit_on_and_for_less_than_a_session_timeout() {
        let validity = Validity::new(Duration::from_secs(10));
        let is_valid = |tenths: u64| validity.is_valid(tenths * SECOND / 10);
        assert!(!is_valid(1_000), "nothing was accepted yet");
        validity.send(100 * SECOND, || true);
        assert!(!is_valid(1_001), "a commit without an answer proves nothing");
        validity.send(101 * SECOND, || panic!("one is under way"));
        validity.on_answer(false);
        assert!(!is_valid(1_010), "the coordinator refused it: another generation");

        validity.send(102 * SECOND, || true);
        validity.on_answer(true);
        assert!(is_valid(1_021) && is_valid(1_104));
        assert!(!is_valid(1_105), "0.85 of the session timeout after it was sent, whenever the answer came");

        // Cut off: commits are sent and never answered, or not even sent.
        validity.send(106 * SECOND, || false);
        validity.send(107 * SECOND, || true);
        assert!(is_valid(1_104) && !is_valid(1_105));
        validity.on_answer(true);
        assert!(is_valid(1_154) && !is_valid(1_155));
        validity.confirm(103 * SECOND);
        assert!(is_valid(1_154), "an older commit takes nothing away");
        validity.on_answer(true);
        assert!(!is_valid(1_155), "an answer to no commit");
    }
}
