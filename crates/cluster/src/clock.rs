//! The lease clock: a monotonic clock that includes suspended time.
//!
//! Servers continue to count while this machine is suspended, so a deadline on an ordinary monotonic clock
//! would pass too late after a suspend. The wall clock never decides a deadline: it jumps.

use moim_base::Clock;
use rustix::time::{ClockId, clock_gettime};

/// The machine's clocks; the monotonic clock includes suspended time.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

#[cfg(any(target_os = "linux", target_os = "android"))]
const STEADY: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const STEADY: ClockId = ClockId::Monotonic;

impl Clock for BootClock {
    fn wall_ms(&self) -> i64 {
        let now = clock_gettime(ClockId::Realtime);
        now.tv_sec.saturating_mul(1_000).saturating_add(now.tv_nsec / 1_000_000)
    }

    fn monotonic_ns(&self) -> u64 {
        let now = clock_gettime(STEADY);
        let ns = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
        u64::try_from(ns).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_clock_advances() {
        let before = BootClock.monotonic_ns();
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert!(BootClock.monotonic_ns() >= before + 2_000_000);
        assert!(BootClock.wall_ms() > 1_600_000_000_000);
    }
}
