//! The replication throttle of reassignments.
//!
//! A rate applies to everything that this node sends to (or receives for) replicas that a reassignment adds and that
//! are not in sync yet. In-sync replicas are never throttled: commits wait for them.
//!
//! Time is an input. Sent bytes are charged afterwards, so one answer may exceed the rate; the charge delays the next
//! answer, which keeps the mean rate.

use std::sync::Mutex;

use super::lock;

/// The minimum answer size under a rate: below it every answer would be a single batch and a round trip.
const SMALLEST: u64 = 64 << 10;
/// The number of answers per second into which a rate is divided.
const ANSWERS_PER_S: u64 = 8;

/// The interval at which held-back answers are re-evaluated.
const REEVALUATE_MS: u64 = 50;
/// The maximum unused time that accumulates: a late re-evaluation loses no bandwidth.
const MAX_CREDIT_MS: u64 = REEVALUATE_MS;

/// One rate and its consumption.
#[derive(Debug, Default)]
pub(super) struct Throttle(Mutex<Spent>);

#[derive(Debug, Default)]
struct Spent {
    /// Bytes per second; `None`: unlimited.
    rate: Option<u64>,
    /// When the next byte may be sent.
    free_at_us: u64,
}

impl Throttle {
    /// Sets the rate. Debt under another rate is dropped.
    pub(super) fn set(&self, rate: Option<u64>) {
        let mut spent = lock(&self.0);
        if spent.rate != rate {
            *spent = Spent { rate: rate.map(|rate| rate.max(1)), free_at_us: 0 };
        }
    }

    /// True if there is a rate.
    pub(super) fn limits(&self) -> bool {
        lock(&self.0).rate.is_some()
    }

    /// The time until the next send; 0 if sending is allowed now.
    pub(super) fn wait_ms(&self, now_ms: u64) -> u64 {
        let spent = lock(&self.0);
        spent.free_at_us.saturating_sub(now_ms.saturating_mul(1_000)).div_ceil(1_000)
    }

    /// When a held-back answer is re-evaluated: the replica may have become in sync meanwhile, and then commits wait
    /// for it.
    pub(super) fn reevaluate_in_ms(wait_ms: u64) -> u64 {
        wait_ms.min(REEVALUATE_MS)
    }

    /// The maximum size of one answer, at most `most`.
    pub(super) fn answer_bytes(&self, most: usize) -> usize {
        let part = lock(&self.0).rate.map(|rate| (rate / ANSWERS_PER_S).max(SMALLEST));
        part.map_or(most, |part| usize::try_from(part).unwrap_or(most).min(most))
    }

    /// Charges sent bytes.
    pub(super) fn charge(&self, bytes: usize, now_ms: u64) {
        let mut spent = lock(&self.0);
        if let Some(rate) = spent.rate {
            let cost_us = (bytes as u64).saturating_mul(1_000_000) / rate;
            let from_us = spent.free_at_us.max(now_ms.saturating_sub(MAX_CREDIT_MS).saturating_mul(1_000));
            spent.free_at_us = from_us.saturating_add(cost_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_without_rate_never_waits() {
        let throttle = Throttle::default();
        throttle.charge(1 << 40, 5);
        assert_eq!(
            (throttle.limits(), throttle.wait_ms(5), throttle.answer_bytes(1 << 20)),
            (false, 0, 1 << 20)
        );
    }

    /// Sends answers of this size for a minute whenever allowed, and returns the mean bytes per second.
    fn mean(rate: u64, answer: usize) -> u64 {
        let throttle = Throttle::default();
        throttle.set(Some(rate));
        let (mut now_ms, mut sent) = (1_000, 0);
        while now_ms < 61_000 {
            match throttle.wait_ms(now_ms) {
                0 => {
                    sent += answer as u64;
                    throttle.charge(answer, now_ms);
                }
                wait => now_ms += wait,
            }
        }
        sent / 60
    }

    #[test]
    fn mean_throughput_equals_the_rate_for_any_answer_size() {
        for (rate, answer) in
            [(1_000_000, 64 << 10), (1_000_000, 100), (10_000_000, 1 << 20), (50_000, 1 << 20)]
        {
            let got = mean(rate, answer);
            let off = got.abs_diff(rate);
            // One answer may exceed the rate, and a millisecond is the finest step.
            assert!(off <= rate / 50 + answer as u64 / 60 + 1, "{rate} with {answer}: {got}");
        }
    }

    #[test]
    fn throttle_credit_is_bounded_and_rate_change_drops_debt() {
        let throttle = Throttle::default();
        throttle.set(Some(1_000));
        throttle.charge(500, 100_000);
        assert_eq!(throttle.wait_ms(100_000), 450);
        throttle.set(Some(1_000));
        assert_eq!(throttle.wait_ms(100_100), 350, "the same rate again changes nothing");
        throttle.set(Some(2_000));
        assert_eq!(throttle.wait_ms(100_100), 0);
        throttle.set(None);
        throttle.charge(500, 100_100);
        assert_eq!(throttle.wait_ms(100_100), 0);
    }

    #[test]
    fn answers_are_smaller_under_a_rate() {
        let throttle = Throttle::default();
        throttle.set(Some(1_600_000));
        assert_eq!(throttle.answer_bytes(1 << 20), 200_000);
        throttle.set(Some(10));
        assert_eq!(throttle.answer_bytes(1 << 20), 64 << 10);
        throttle.set(Some(u64::MAX));
        assert_eq!(throttle.answer_bytes(1 << 20), 1 << 20);
    }
}
