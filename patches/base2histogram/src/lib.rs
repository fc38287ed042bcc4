//! Stands in for the crate of this name, which openraft keeps statistics with that nobody here reads.
//!
//! The real one makes tables for every resolution it could have, 26 MB and 50 ms of them, at the first histogram of a
//! process. A node at rest is to need less than that in all. So nothing is recorded here, and every percentile is 0.
//! What the node measures is in its own metrics. To be dropped when the real one makes only the table it uses.

use std::fmt;
use std::marker::PhantomData;

/// Records nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram<T = ()> {
    slots: PhantomData<T>,
}

impl<T> Default for Histogram<T> {
    fn default() -> Self {
        Self { slots: PhantomData }
    }
}

impl<T> Histogram<T> {
    /// A histogram.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the value.
    pub fn record(&mut self, _value: u64) {}

    /// Forgets the values.
    pub fn record_n(&mut self, _value: u64, _count: u64) {}

    /// Zero, of everything.
    pub fn percentile_stats(&self) -> PercentileStats {
        PercentileStats::default()
    }
}

/// Percentiles of what was recorded: all are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PercentileStats {
    pub samples: u64,
    pub p0_1: u64,
    pub p1: u64,
    pub p5: u64,
    pub p10: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p99_9: u64,
}

impl fmt::Display for PercentileStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[not recorded]")
    }
}

/// Draws nothing.
#[derive(Debug, Clone, Default)]
pub struct AsciiChart;

impl AsciiChart {
    /// A chart.
    pub fn new() -> Self {
        Self
    }

    /// Leaves a line out.
    #[must_use]
    pub fn add<T>(self, _name: impl ToString, _histogram: Histogram<T>) -> Self {
        self
    }
}

impl fmt::Display for AsciiChart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[not recorded]")
    }
}
