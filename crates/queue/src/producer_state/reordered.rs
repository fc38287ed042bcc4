//! Reordered batches after a leader change: batches whose predecessors may still be in flight to the previous leader.
//!
//! When a partition gets another leader, a client resends what the old one did not acknowledge. librdkafka does so
//! from two threads, and later batches may arrive first. If such a batch were accepted as the producer's first, or
//! rejected as out of order, the client would lose what it is about to send: it takes the success of a batch for that
//! of all before it, and after a sequence error it starts a new epoch and resends everything. So for a short time
//! after a leader change such a batch gets a retriable error, which restores the order. A producer without a
//! predecessor to send is accepted after that time.
//!
//! Never part of producer state: a hint, which may be lost.

use hashbrown::HashMap;

use super::BatchInfo;

/// Duration of the check after a leader change: longer than clients wait for a response of the previous leader.
const LEADER_CHANGE_WINDOW_MS: i64 = 120_000;

/// Time for which a batch gets a retriable error, from its first arrival: several retries of any client.
const RETRY_WINDOW_MS: i64 = 1_000;

/// Maximum number of tracked producers.
const MAX_PRODUCERS: usize = 4_096;

/// The producers with a reordered batch, in the current leader epoch.
#[derive(Debug, Default)]
pub(crate) struct ReorderedBatches {
    taken_over: bool,
    /// Arrival of the first batch.
    since_ms: Option<i64>,
    first_ms: HashMap<(i64, i16), i64>,
}

impl ReorderedBatches {
    /// A leader epoch begins; `taken_over` if another node may have led before.
    pub(crate) fn on_lead(&mut self, taken_over: bool) {
        *self = Self { taken_over, ..Self::default() };
    }

    /// True if a batch that does not follow the known sequence must be retried.
    pub(crate) fn must_retry(&mut self, now_ms: i64, batch: &BatchInfo) -> bool {
        if !self.taken_over {
            return false;
        }
        if now_ms - *self.since_ms.get_or_insert(now_ms) > LEADER_CHANGE_WINDOW_MS {
            self.on_lead(false);
            return false;
        }
        let of = (batch.producer_id, batch.producer_epoch);
        if self.first_ms.len() >= MAX_PRODUCERS && !self.first_ms.contains_key(&of) {
            return false;
        }
        now_ms - *self.first_ms.entry(of).or_insert(now_ms) < RETRY_WINDOW_MS
    }

    /// A batch follows the known sequence: the next one that does not gets its own retry window.
    pub(crate) fn on_appended(&mut self, batch: &BatchInfo) {
        if !self.first_ms.is_empty() {
            self.first_ms.remove(&(batch.producer_id, batch.producer_epoch));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(producer_id: i64, base_sequence: i32) -> BatchInfo {
        BatchInfo {
            producer_id,
            producer_epoch: 0,
            base_sequence,
            last_sequence: base_sequence,
            max_timestamp: 0,
            transactional: false,
            control: None,
        }
    }

    #[test]
    fn retriable_only_after_leader_change_and_for_the_retry_window() {
        let mut reordered = ReorderedBatches::default();
        assert!(!reordered.must_retry(0, &batch(1, 5)), "no previous leader");
        reordered.on_lead(true);
        assert!(reordered.must_retry(10, &batch(1, 5)));
        assert!(reordered.must_retry(900, &batch(2, 7)), "each producer has its own retry window");
        assert!(!reordered.must_retry(10 + RETRY_WINDOW_MS, &batch(1, 5)), "it has no predecessor to send");
        reordered.on_appended(&batch(1, 5));
        assert!(reordered.must_retry(2_000, &batch(1, 7)));
        assert!(
            !reordered.must_retry(11 + LEADER_CHANGE_WINDOW_MS, &batch(3, 5)),
            "the leader change is long past"
        );
    }
}
