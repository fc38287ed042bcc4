//! The only source of time.
//!
//! Invariant: `monotonic_ns` never goes back within one process; `wall_ms` may jump in either direction
//! and is for people and for record timestamps only, never for a deadline.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A source of time.
pub trait Clock: Send + Sync + 'static {
    /// Milliseconds since 1970, according to the machine.
    fn wall_ms(&self) -> i64;
    /// Nanoseconds since some fixed moment of this process.
    fn monotonic_ns(&self) -> u64;

    /// Milliseconds since some fixed moment of this process: what deadlines are made of.
    fn monotonic_ms(&self) -> u64 {
        self.monotonic_ns() / 1_000_000
    }
}

/// The machine's own clock.
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock whose monotonic time starts now.
    #[allow(clippy::disallowed_methods)] // the one place that may ask the machine
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods)] // the one place that may ask the machine
    fn wall_ms(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    }

    fn monotonic_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A clock that a test or the simulator moves by hand.
#[derive(Default)]
pub struct ManualClock {
    wall_ms: AtomicI64,
    monotonic_ns: AtomicU64,
}

impl ManualClock {
    /// A clock that shows `wall_ms` and zero monotonic time.
    pub fn at(wall_ms: i64) -> Self {
        Self { wall_ms: AtomicI64::new(wall_ms), monotonic_ns: AtomicU64::new(0) }
    }

    /// Advances both clocks.
    pub fn advance_ms(&self, ms: u64) {
        self.monotonic_ns.fetch_add(ms * 1_000_000, Ordering::SeqCst);
        self.wall_ms.fetch_add(i64::try_from(ms).unwrap_or(i64::MAX), Ordering::SeqCst);
    }

    /// Makes the wall clock jump, as operators and NTP do.
    pub fn jump_wall_to_ms(&self, wall_ms: i64) {
        self.wall_ms.store(wall_ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn wall_ms(&self) -> i64 {
        self.wall_ms.load(Ordering::SeqCst)
    }

    fn monotonic_ns(&self) -> u64 {
        self.monotonic_ns.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wall_clock_jump_does_not_move_the_monotonic_side() {
        let clock = ManualClock::at(1_000);
        clock.advance_ms(5);
        clock.jump_wall_to_ms(10);
        assert_eq!((clock.wall_ms(), clock.monotonic_ms()), (10, 5));
    }
}
