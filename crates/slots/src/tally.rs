//! How often each command ran, how long it took, how often it failed: INFO commandstats, LATENCY HISTOGRAM.
//!
//! Kept under the shard's lock, so counting costs an addition. Reading the clock twice per command would cost more than
//! many a command: fast ones are measured now and then, and what they took together is reckoned from those.

use crate::cmd;
use crate::shared::Stats;

/// One in so many calls of a fast command is measured.
const SAMPLE: u64 = 64;

/// What is known about one command.
#[derive(Clone, Copy, Default, Debug)]
pub struct Tally {
    /// How often it ran.
    pub calls: u64,
    /// How often it was refused before it ran.
    pub rejected: u64,
    /// How often it answered with an error.
    pub failed: u64,
    measured: u64,
    nanos: u64,
    /// Calls that were measured by time taken: up to 1, 2, 4 … microseconds.
    buckets: [u32; 32],
}

impl Tally {
    /// What all calls took, in microseconds.
    pub fn usec(&self) -> f64 {
        if self.measured == 0 {
            return 0.0;
        }
        self.nanos as f64 / 1_000.0 * self.calls as f64 / self.measured as f64
    }

    /// Upper bounds in microseconds, and how many calls took no longer.
    pub fn histogram(&self) -> Vec<(u64, u64)> {
        let mut sum = 0;
        let mut shown = Vec::new();
        for (at, count) in self.buckets.iter().enumerate().filter(|(_, count)| **count > 0) {
            sum += u64::from(*count);
            shown.push((1 << at, sum * self.calls / self.measured.max(1)));
        }
        shown
    }
}

/// What was counted since the node's counters were told: they are shared by all loops, and cost more than an addition.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    /// Commands run.
    pub commands: u64,
    /// Lookups that found their key.
    pub hits: u64,
    /// Lookups that did not.
    pub misses: u64,
}

impl Counts {
    /// Tells the node's counters.
    pub fn report(&mut self, stats: &Stats) {
        let Self { commands, hits, misses } = std::mem::take(self);
        for (counter, count) in [(&stats.commands, commands), (&stats.hits, hits), (&stats.misses, misses)] {
            if count > 0 {
                counter.inc_by(count);
            }
        }
    }
}

/// The tallies of all commands and subcommands.
pub struct Tallies {
    all: Vec<Tally>,
    /// Changes that commands made since the start.
    pub changes: u64,
    /// What the node's counters have not been told yet: they are, when a turn ends.
    pub counts: Counts,
}

impl Default for Tallies {
    fn default() -> Self {
        Self { all: vec![Tally::default(); cmd::count()], changes: 0, counts: Counts::default() }
    }
}

impl Tallies {
    /// A command runs. Answers whether it is to be measured.
    #[inline]
    pub fn on_call(&mut self, index: u16) -> bool {
        let tally = &mut self.all[usize::from(index)];
        tally.calls += 1;
        tally.calls % SAMPLE == 1
    }

    /// It took so long.
    pub fn on_measured(&mut self, index: u16, nanos: u64) {
        let tally = &mut self.all[usize::from(index)];
        tally.measured += 1;
        tally.nanos += nanos;
        let micros = nanos.div_ceil(1_000).max(1);
        let bucket = (64 - (micros - 1).leading_zeros() as usize).min(31);
        tally.buckets[bucket] = tally.buckets[bucket].saturating_add(1);
    }

    /// It answered with an error.
    pub fn on_failed(&mut self, index: u16) {
        self.all[usize::from(index)].failed += 1;
    }

    /// It was refused.
    pub fn on_rejected(&mut self, index: u16) {
        self.all[usize::from(index)].rejected += 1;
    }

    /// What is known about the command with a number.
    pub fn get(&self, index: u16) -> &Tally {
        &self.all[usize::from(index)]
    }

    /// CONFIG RESETSTAT.
    pub fn reset(&mut self) {
        self.all.fill(Tally::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_stands_for_the_rest() {
        let mut tallies = Tallies::default();
        let measured = (0..130).filter(|_| tallies.on_call(3)).count();
        assert_eq!(measured, 3);
        for nanos in [500, 1_500, 9_000] {
            tallies.on_measured(3, nanos);
        }
        let tally = tallies.get(3);
        assert_eq!(tally.calls, 130);
        assert!((tally.usec() - 11.0 / 3.0 * 130.0).abs() < 0.01);
        assert_eq!(tally.histogram(), [(1, 43), (2, 86), (16, 130)]);
        tallies.reset();
        assert_eq!(tallies.get(3).calls, 0);
    }
}
