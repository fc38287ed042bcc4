//! How fast replicas that are being moved may be filled.
//!
//! A rate holds for everything this node sends (or takes in) for replicas that a reassignment brings in and that are not in
//! sync yet; nobody else waits for it. Whoever is in sync is never slowed down: commits wait for it.
//!
//! Time is an input. What was sent is charged afterwards, so the bytes of one answer may be ahead of the rate; what is
//! charged moves the moment at which the next may go, which keeps the mean.

use std::sync::Mutex;

use super::lock;

/// The smallest answer a rate is cut into: below it every answer would be a single batch and a round trip.
const SMALLEST: u64 = 64 << 10;
/// A rate is cut into so many answers a second.
const ANSWERS_PER_S: u64 = 8;

/// What is held back is looked at so often.
const LOOK_MS: u64 = 50;
/// So much unused time is saved up: who is looked at late loses nothing by it.
const SAVED_MS: u64 = LOOK_MS;

/// One rate and how far it is used up.
#[derive(Debug, Default)]
pub(super) struct Throttle(Mutex<Spent>);

#[derive(Debug, Default)]
struct Spent {
    /// Bytes a second; none: as fast as it goes.
    rate: Option<u64>,
    /// When the next byte may go.
    free_at_us: u64,
}

impl Throttle {
    /// From now on this rate. What was owed under another one is forgotten.
    pub(super) fn set(&self, rate: Option<u64>) {
        let mut spent = lock(&self.0);
        if spent.rate != rate {
            *spent = Spent { rate: rate.map(|rate| rate.max(1)), free_at_us: 0 };
        }
    }

    /// Whether there is a rate.
    pub(super) fn limits(&self) -> bool {
        lock(&self.0).rate.is_some()
    }

    /// How long nothing may go; 0: something may.
    pub(super) fn wait_ms(&self, now_ms: u64) -> u64 {
        let spent = lock(&self.0);
        spent.free_at_us.saturating_sub(now_ms.saturating_mul(1_000)).div_ceil(1_000)
    }

    /// When what has to wait so long is looked at again: it may have come in sync meanwhile, and then commits wait for it.
    pub(super) fn look_in_ms(wait_ms: u64) -> u64 {
        wait_ms.min(LOOK_MS)
    }

    /// How large one answer may be, at most `most`.
    pub(super) fn answer_bytes(&self, most: usize) -> usize {
        let part = lock(&self.0).rate.map(|rate| (rate / ANSWERS_PER_S).max(SMALLEST));
        part.map_or(most, |part| usize::try_from(part).unwrap_or(most).min(most))
    }

    /// So much went.
    pub(super) fn charge(&self, bytes: usize, now_ms: u64) {
        let mut spent = lock(&self.0);
        if let Some(rate) = spent.rate {
            let cost_us = (bytes as u64).saturating_mul(1_000_000) / rate;
            let from_us = spent.free_at_us.max(now_ms.saturating_sub(SAVED_MS).saturating_mul(1_000));
            spent.free_at_us = from_us.saturating_add(cost_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_rate_nothing_waits() {
        let throttle = Throttle::default();
        throttle.charge(1 << 40, 5);
        assert_eq!(
            (throttle.limits(), throttle.wait_ms(5), throttle.answer_bytes(1 << 20)),
            (false, 0, 1 << 20)
        );
    }

    /// Sends answers of this size whenever it may for a minute, and answers how much went a second.
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
    fn the_mean_is_the_rate_whatever_the_size_of_the_answers() {
        for (rate, answer) in
            [(1_000_000, 64 << 10), (1_000_000, 100), (10_000_000, 1 << 20), (50_000, 1 << 20)]
        {
            let got = mean(rate, answer);
            let off = got.abs_diff(rate);
            // One answer may be ahead of the rate, and a millisecond is the finest step.
            assert!(off <= rate / 50 + answer as u64 / 60 + 1, "{rate} with {answer}: {got}");
        }
    }

    #[test]
    fn little_unused_time_is_saved_up_and_another_rate_forgets_what_was_owed() {
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
