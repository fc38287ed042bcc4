//! Batches whose predecessors may still be on their way from the leader before this one.
//!
//! When a partition gets another leader, a client sends again what the old one did not acknowledge. librdkafka does so from
//! two threads, and what comes later may arrive first. Taken for a beginning, or called a gap, it would cost the client
//! what it is about to send: it takes the success of a batch for that of all before it, and after a gap it begins a new
//! epoch and sends everything a second time. So for a moment after a leadership was taken over such a batch is
//! told to come again, which brings the order back. Whoever has no predecessor to send is believed after that moment.
//!
//! Never part of producer state: a hint, which may be lost.

use hashbrown::HashMap;

use super::BatchInfo;

/// For so long after taking over: longer than clients wait for an answer of the leader before.
const YOUNG_MS: i64 = 120_000;

/// How long a batch is told to come again, from the first time it came: several retries of any client.
const MOMENT_MS: i64 = 1_000;

/// Producers beyond this many are not remembered.
const MOST: usize = 4_096;

/// Who is told to come again, in the present leadership.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    taken_over: bool,
    /// When the first batch came.
    since_ms: Option<i64>,
    first_ms: HashMap<(i64, i16), i64>,
}

impl Stragglers {
    /// A leadership begins; another node may have led before.
    pub(crate) fn on_lead(&mut self, taken_over: bool) {
        *self = Self { taken_over, ..Self::default() };
    }

    /// Whether a batch that does not follow on what is known is to come again.
    pub(crate) fn is_early(&mut self, now_ms: i64, batch: &BatchInfo) -> bool {
        if !self.taken_over {
            return false;
        }
        if now_ms - *self.since_ms.get_or_insert(now_ms) > YOUNG_MS {
            self.on_lead(false);
            return false;
        }
        let of = (batch.producer_id, batch.producer_epoch);
        if self.first_ms.len() >= MOST && !self.first_ms.contains_key(&of) {
            return false;
        }
        now_ms - *self.first_ms.entry(of).or_insert(now_ms) < MOMENT_MS
    }

    /// A batch follows on what is known: the next that does not has its own moment.
    pub(crate) fn on_there(&mut self, batch: &BatchInfo) {
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
    fn only_after_a_takeover_and_only_for_a_moment() {
        let mut stragglers = Stragglers::default();
        assert!(!stragglers.is_early(0, &batch(1, 5)), "nobody led before");
        stragglers.on_lead(true);
        assert!(stragglers.is_early(10, &batch(1, 5)));
        assert!(stragglers.is_early(900, &batch(2, 7)), "each producer has its own moment");
        assert!(!stragglers.is_early(10 + MOMENT_MS, &batch(1, 5)), "it has nothing else to send");
        stragglers.on_there(&batch(1, 5));
        assert!(stragglers.is_early(2_000, &batch(1, 7)));
        assert!(!stragglers.is_early(11 + YOUNG_MS, &batch(3, 5)), "the leader before is long gone");
    }
}
