//! Command statistics: calls, execution time, failures and rejections per command (INFO commandstats, LATENCY
//! HISTOGRAM).
//!
//! Kept under the shard's lock, so a count costs one addition. Reading the clock twice would cost more than many
//! commands take: fast commands are sampled and their total time is extrapolated.

use crate::cmd;
use crate::shared::Stats;

/// Sampling rate: one in this many calls of a fast command is timed.
const SAMPLE: u64 = 64;

/// The statistics of one command.
#[derive(Clone, Copy, Default, Debug)]
pub struct CommandStat {
    /// Number of calls (`calls`).
    pub calls: u64,
    /// Calls rejected before execution (`rejected_calls`).
    pub rejected: u64,
    /// Calls that replied with an error (`failed_calls`).
    pub failed: u64,
    measured: u64,
    nanos: u64,
    /// Histogram of the sampled calls: up to 1, 2, 4 … microseconds.
    buckets: [u32; 32],
}

impl CommandStat {
    /// Total execution time of all calls in microseconds (`usec`), extrapolated from the samples.
    pub fn usec(&self) -> f64 {
        if self.measured == 0 {
            return 0.0;
        }
        self.nanos as f64 / 1_000.0 * self.calls as f64 / self.measured as f64
    }

    /// Cumulative histogram: upper bounds in microseconds and the calls up to each.
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

/// Counts not yet reported to the node's counters: those are shared by all event loops and cost more than an
/// addition.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counts {
    /// Commands executed.
    pub commands: u64,
    /// Key lookups that hit.
    pub hits: u64,
    /// Key lookups that missed.
    pub misses: u64,
}

impl Counts {
    /// Adds the counts to the node's counters.
    pub fn report(&mut self, stats: &Stats) {
        let Self { commands, hits, misses } = std::mem::take(self);
        for (counter, count) in [(&stats.commands, commands), (&stats.hits, hits), (&stats.misses, misses)] {
            if count > 0 {
                counter.inc_by(count);
            }
        }
    }
}

/// The statistics of all commands and subcommands.
pub struct CommandStats {
    all: Vec<CommandStat>,
    /// Changes made by commands since the start.
    pub changes: u64,
    /// Counts not yet reported to the node; reported when a turn ends.
    pub counts: Counts,
}

impl Default for CommandStats {
    fn default() -> Self {
        Self { all: vec![CommandStat::default(); cmd::count()], changes: 0, counts: Counts::default() }
    }
}

impl CommandStats {
    /// Counts a call. Returns true if this call is to be timed.
    #[inline]
    pub fn on_call(&mut self, index: u16) -> bool {
        let stat = &mut self.all[usize::from(index)];
        stat.calls += 1;
        stat.calls % SAMPLE == 1
    }

    /// Adds the duration of a timed call.
    pub fn on_timed(&mut self, index: u16, nanos: u64) {
        let stat = &mut self.all[usize::from(index)];
        stat.measured += 1;
        stat.nanos += nanos;
        let micros = nanos.div_ceil(1_000).max(1);
        let bucket = (64 - (micros - 1).leading_zeros() as usize).min(31);
        stat.buckets[bucket] = stat.buckets[bucket].saturating_add(1);
    }

    /// Counts a call that replied with an error.
    pub fn on_failed(&mut self, index: u16) {
        self.all[usize::from(index)].failed += 1;
    }

    /// Counts a call that was rejected.
    pub fn on_rejected(&mut self, index: u16) {
        self.all[usize::from(index)].rejected += 1;
    }

    /// The statistics of the command with this index.
    pub fn get(&self, index: u16) -> &CommandStat {
        &self.all[usize::from(index)]
    }

    /// Resets all statistics (CONFIG RESETSTAT).
    pub fn reset(&mut self) {
        self.all.fill(CommandStat::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_time_is_extrapolated_from_samples() {
        let mut command_stats = CommandStats::default();
        let measured = (0..130).filter(|_| command_stats.on_call(3)).count();
        assert_eq!(measured, 3);
        for nanos in [500, 1_500, 9_000] {
            command_stats.on_timed(3, nanos);
        }
        let stat = command_stats.get(3);
        assert_eq!(stat.calls, 130);
        assert!((stat.usec() - 11.0 / 3.0 * 130.0).abs() < 0.01);
        assert_eq!(stat.histogram(), [(1, 43), (2, 86), (16, 130)]);
        command_stats.reset();
        assert_eq!(command_stats.get(3).calls, 0);
    }
}
