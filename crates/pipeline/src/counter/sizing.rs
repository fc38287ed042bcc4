//! Adaptive transaction size: how many messages to put into a transaction, from the cost of recent ones.
//!
//! A transaction has a fixed cost (its round trips, other load on the machine) and a cost per message. Only the
//! second shrinks with the batch: halving a batch whose cost is fixed halves the throughput and saves nothing. So
//! both are estimated from recent transactions (least squares with exponential decay), and the messages of a batch
//! may take as long as the fixed cost, within bounds. Pure: time is an input.
//!
//! Limits: the estimate needs batches of different sizes, so the size changes by at most a factor of two at a time,
//! and a single slow transaction changes it by at most one step.

use std::time::Duration;

/// Bounds, in seconds, of the time for the messages of a batch, whatever the fixed cost is.
const LEAST: f64 = 0.5;
const MOST: f64 = 2.0;
/// Factor by which an observation loses weight with the next one.
const DECAY: f64 = 0.8;
/// Size of the first batch.
const FIRST: usize = 4_000;
/// Lower bound of the estimated size. Only consecutive failed transactions go below it.
const FLOOR: usize = 1_000;
/// After this many consecutive failures the size may be the cause; batches then shrink down to [`SMALLEST`].
const FAILURES: u32 = 3;
const SMALLEST: usize = 100;

/// The size of the next batch.
#[derive(Debug)]
pub(super) struct Sizing {
    now: usize,
    largest: usize,
    failures: u32,
    costs: Costs,
}

impl Sizing {
    pub(super) fn up_to(largest: usize) -> Self {
        Self { now: FIRST.min(largest), largest, failures: 0, costs: Costs::default() }
    }

    /// Maximum number of messages of the next transaction.
    pub(super) fn now(&self) -> usize {
        self.now
    }

    /// A transaction of `messages` messages took `took`, or was aborted.
    pub(super) fn on_end(&mut self, messages: usize, took: Duration, is_fine: bool) {
        if !is_fine {
            // Usually a broker has failed, and a smaller batch would have failed as well.
            self.failures += 1;
            if self.failures >= FAILURES {
                self.now = (self.now / 2).max(SMALLEST.min(self.largest));
            }
            return;
        }
        self.failures = 0;
        self.costs.observe(messages as f64, took.as_secs_f64());
        let wanted = self.costs.affordable();
        // A batch that was not full is no evidence about larger sizes.
        let grown = if messages >= self.now { self.now.saturating_mul(2) } else { self.now };
        let shrunk = (self.now / 2).max(FLOOR.min(self.now));
        let wanted = if wanted >= self.largest as f64 { self.largest } else { wanted as usize };
        self.now = wanted.clamp(shrunk, grown.max(shrunk)).min(self.largest).max(1);
    }
}

/// Weighted sums over (messages, seconds).
#[derive(Clone, Copy, Debug, Default)]
struct Costs {
    weight: f64,
    n: f64,
    t: f64,
    nn: f64,
    nt: f64,
    /// The lowest cost per message seen recently: an upper bound of the cost of a message.
    least_each: Option<f64>,
}

impl Costs {
    fn observe(&mut self, n: f64, t: f64) {
        for sum in [&mut self.weight, &mut self.n, &mut self.t, &mut self.nn, &mut self.nt] {
            *sum *= DECAY;
        }
        self.weight += 1.0;
        self.n += n;
        self.t += t;
        self.nn += n * n;
        self.nt += n * t;
        // The bound rises slowly, so that a machine that became slower is taken into account.
        let each = t / n.max(1.0);
        self.least_each = Some(self.least_each.map_or(each, |least| each.min(least * 1.1)));
    }

    /// Estimated fixed cost and cost per message, in seconds.
    fn estimate(&self) -> (f64, f64) {
        let (mean_n, mean_t) = (self.n / self.weight, self.t / self.weight);
        let spread = self.nn / self.weight - mean_n * mean_n;
        let bound = self.least_each.unwrap_or(0.0);
        // Batches of one size cannot separate the two costs: all of it is attributed to the messages.
        let each = if spread > (mean_n * 0.05).powi(2) {
            ((self.nt / self.weight - mean_n * mean_t) / spread).clamp(0.0, bound)
        } else {
            bound
        };
        ((mean_t - each * mean_n).max(0.0), each)
    }

    /// The number of messages that balances the fixed cost.
    fn affordable(&self) -> f64 {
        let (fixed, each) = self.estimate();
        fixed.clamp(LEAST, MOST) / each.max(1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs transactions whose cost in seconds is a function of their size.
    fn run(sizing: &mut Sizing, rounds: usize, cost: &mut dyn FnMut(usize) -> f64) -> (f64, f64) {
        let (mut counted, mut seconds) = (0.0, 0.0);
        for _ in 0..rounds {
            let size = sizing.now();
            let took = cost(size);
            sizing.on_end(size, Duration::from_secs_f64(took), true);
            counted += size as f64;
            seconds += took;
        }
        (counted, seconds)
    }

    #[test]
    fn fixed_cost_does_not_shrink_batches() {
        for fixed in [0.05, 0.5, 1.5, 3.0, 8.0] {
            let mut sizing = Sizing::up_to(20_000);
            run(&mut sizing, 30, &mut |n| fixed + n as f64 * 10e-6);
            assert!(sizing.now() >= 15_000, "{} messages at a fixed cost of {fixed} s", sizing.now());
        }
    }

    #[test]
    fn cost_per_message_bounds_the_batch_time() {
        for each in [50e-6, 200e-6, 1e-3] {
            let mut sizing = Sizing::up_to(20_000);
            run(&mut sizing, 40, &mut |n| 0.01 + n as f64 * each);
            let lasts = 0.01 + sizing.now() as f64 * each;
            assert!((0.2..=1.1).contains(&lasts), "{} messages of {each} s take {lasts} s", sizing.now());
        }
    }

    #[test]
    fn throughput_recovers_on_a_busy_machine() {
        // Phases: quiet; a machine on which every transaction takes seconds whatever its size; quiet again.
        for seed in 0..200 {
            let mut chance = fastrand::Rng::with_seed(seed);
            let mut sizing = Sizing::up_to(20_000);
            run(&mut sizing, 20, &mut |n| 0.02 + n as f64 * 12e-6);
            let (counted, seconds) =
                run(&mut sizing, 30, &mut |n| 0.5 + 4.5 * chance.f64() + n as f64 * 15e-6);
            let (rate, best) = (counted / seconds, 20_000.0 / 3.05);
            assert!(rate > best / 4.0, "seed {seed}: {rate:.0} messages/s of {best:.0}");
            let (counted, seconds) = run(&mut sizing, 40, &mut |n| 0.02 + n as f64 * 12e-6);
            assert!(counted / seconds > 40_000.0, "seed {seed}: it does not recover");
        }
    }

    #[test]
    fn only_consecutive_failures_shrink_batches() {
        let mut sizing = Sizing::up_to(20_000);
        let fail = |sizing: &mut Sizing| sizing.on_end(sizing.now(), Duration::from_secs(10), false);
        fail(&mut sizing);
        fail(&mut sizing);
        assert_eq!(sizing.now(), 4_000, "a broker that went away is not the batch's fault");
        (0..20).for_each(|_| fail(&mut sizing));
        assert_eq!(sizing.now(), SMALLEST);
        run(&mut sizing, 20, &mut |n| 0.01 + n as f64 * 10e-6);
        assert_eq!(sizing.now(), 20_000, "and large again");
        let mut small = Sizing::up_to(10);
        (0..9).for_each(|_| fail(&mut small));
        assert_eq!(small.now(), 10);
        // Batches that are not full do not change the size.
        let mut idle = Sizing::up_to(20_000);
        (0..50).for_each(|_| idle.on_end(3, Duration::from_millis(4), true));
        assert!(idle.now() >= FLOOR, "{}", idle.now());
    }
}
