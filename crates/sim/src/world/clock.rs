//! The clocks of a process: the monotonic clock is the paused clock of its runtime, which the world advances; the wall
//! clock follows it until the world steps it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use moim_base::clock::Clock;
use tokio::time::Instant;

/// Clocks of one process; valid on its own runtime only.
pub struct HostClock {
    start: Instant,
    /// Monotonic time and wall clock time at `start`.
    start_ns: u64,
    start_wall_ms: i64,
    /// Total step of the host's wall clock.
    stepped_ms: Arc<AtomicI64>,
}

impl HostClock {
    /// Clocks that start at the present time of the runtime.
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
