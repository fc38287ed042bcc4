//! The clocks of a process: the monotonic one is the paused clock of its runtime, which the world moves; the wall clock
//! goes with it until the world steps it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use moim_base::clock::Clock;
use tokio::time::Instant;

/// See above. Meaningful on the process's own runtime only.
pub struct HostClock {
    start: Instant,
    /// What the monotonic side and the wall show at the start.
    start_ns: u64,
    start_wall_ms: i64,
    /// By how much the machine's wall clock was stepped, altogether.
    stepped_ms: Arc<AtomicI64>,
}

impl HostClock {
    /// Starts at what the process's runtime shows now.
    pub(super) fn new(start_ns: u64, start_wall_ms: i64, stepped_ms: Arc<AtomicI64>) -> Self {
        Self { start: Instant::now(), start_ns, start_wall_ms, stepped_ms }
    }

    fn elapsed(&self) -> Duration {
        Instant::now().saturating_duration_since(self.start)
    }
}

impl Clock for HostClock {
    fn wall_ms(&self) -> i64 {
        let unstepped = self.start_wall_ms + i64::try_from(self.elapsed().as_millis()).unwrap_or(0);
        unstepped + self.stepped_ms.load(Ordering::Relaxed)
    }

    fn monotonic_ns(&self) -> u64 {
        self.start_ns + u64::try_from(self.elapsed().as_nanos()).unwrap_or(0)
    }
}
