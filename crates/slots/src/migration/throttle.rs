//! Throttles a slot migration: full speed while no client is served, and a pause after each piece while clients are.
//!
//! The latency that a client would see is measured without one: a timer fires every two milliseconds on the threads and
//! processors that clients need, too; its lateness is the cost of the migration. Source and target both measure, and
//! the larger value counts. A late piece makes the next pause longer by half, any other shorter by an eighth, so that
//! the throttle converges to the largest rate with acceptable latency.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moim_base::Clock;

/// The interval of the timer.
const PROBE_INTERVAL_US: u64 = 2_000;
/// The precision of timers.
const TIMER_PRECISION_US: u64 = 1_000;
/// The acceptable lateness.
const MAX_LATENESS_US: u64 = 1_500;
/// The shortest pause while clients are served: requests that queued up behind a piece are done then.
const MIN_PAUSE_US: u64 = 800;
/// The longest pause: a migration makes progress however busy the clients are.
const MAX_PAUSE_US: u64 = 40_000;

/// After this many pieces during which no command was served, there are no clients. Not after one: a client with few
/// requests, or one that was kept waiting by a whole piece, is not served during every piece.
const IDLE_PIECES: u32 = 16;

/// The load that one side measured while it worked on a piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// The largest lateness of the timer.
    pub(crate) late_us: u64,
    /// True if commands of clients were served.
    pub(crate) is_shared: bool,
}

impl Load {
    /// The combined load of both sides.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { late_us: self.late_us.max(other.late_us), is_shared: self.is_shared || other.is_shared }
    }
}

/// The throttle of one import.
#[derive(Debug)]
pub(crate) struct Throttle {
    pause_us: u64,
    /// Pieces in a row during which no command was served.
    idle_pieces: u32,
}

impl Default for Throttle {
    fn default() -> Self {
        Self { pause_us: 0, idle_pieces: IDLE_PIECES }
    }
}

impl Throttle {
    /// The pause before the next piece; `None` for full speed.
    pub(crate) fn next_pause(&mut self, load: Load) -> Option<Duration> {
        self.idle_pieces = if load.is_shared { 0 } else { self.idle_pieces.saturating_add(1) };
        if self.idle_pieces >= IDLE_PIECES {
            self.pause_us = 0;
            return None;
        }
        self.pause_us = match load.late_us > MAX_LATENESS_US {
            true => (self.pause_us * 3 / 2 + 500).min(MAX_PAUSE_US),
            false => self.pause_us * 7 / 8,
        };
        Some(Duration::from_micros(self.pause_us.max(MIN_PAUSE_US)))
    }
}

/// Runs `work` and measures the lateness of a timer meanwhile.
pub(crate) async fn measure_latency<T>(clock: &dyn Clock, work: impl Future<Output = T>) -> (T, u64) {
    let worst_us = AtomicU64::new(0);
    let probe = async {
        loop {
            let due = clock.monotonic_ns() / 1_000 + PROBE_INTERVAL_US + TIMER_PRECISION_US;
            tokio::time::sleep(Duration::from_micros(PROBE_INTERVAL_US)).await;
            let late = (clock.monotonic_ns() / 1_000).saturating_sub(due);
            worst_us.fetch_max(late, Ordering::Relaxed);
        }
    };
    let done: Result<T, Infallible> = tokio::select! {
        biased;
        never = probe => Err(never),
        done = work => Ok(done),
    };
    match done {
        Ok(done) => (done, worst_us.into_inner()),
        Err(never) => match never {},
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum of the pauses after `pieces` pieces with this lateness.
    fn pauses(throttle: &mut Throttle, pieces: usize, late_us: u64, is_shared: bool) -> Duration {
        (0..pieces).filter_map(|_| throttle.next_pause(Load { late_us, is_shared })).sum()
    }

    #[test]
    fn a_migration_pauses_for_clients_and_runs_at_full_speed_without_them() {
        let mut throttle = Throttle::default();
        let min_pause = Duration::from_micros(MIN_PAUSE_US);
        assert_eq!(pauses(&mut throttle, 100, 50_000, false), Duration::ZERO, "no clients");
        assert_eq!(pauses(&mut throttle, 100, MAX_LATENESS_US, true), min_pause * 100, "acceptable lateness");
        assert!(pauses(&mut throttle, 20, MAX_LATENESS_US + 1, true) > min_pause * 100, "clients wait");
        assert_eq!(throttle.pause_us, MAX_PAUSE_US, "but the migration makes progress");
        let (first, then) = (pauses(&mut throttle, 50, 0, true), pauses(&mut throttle, 50, 0, true));
        assert!(first > then && then == min_pause * 50, "no client waits any more: {first:?}, {then:?}");
        assert!(
            pauses(&mut throttle, IDLE_PIECES as usize - 1, 50_000, false) > Duration::ZERO,
            "a client may be waiting"
        );
        assert_eq!(pauses(&mut throttle, 10, 50_000, false), Duration::ZERO, "no clients any more");
    }

    #[test]
    fn the_side_with_the_higher_load_counts() {
        let (here, there) = (Load { late_us: 7, is_shared: false }, Load { late_us: 3, is_shared: true });
        assert_eq!(here.and(there), Load { late_us: 7, is_shared: true });
    }

    #[test]
    fn a_busy_thread_is_measured_as_late() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let clock = moim_base::clock::SystemClock::new();
        let work = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            // Blocks the thread, as work that does not yield.
            std::thread::sleep(Duration::from_millis(20));
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let ((), late) = runtime.block_on(measure_latency(&clock, work));
        assert!(late >= 10_000, "{late}");
    }
}
