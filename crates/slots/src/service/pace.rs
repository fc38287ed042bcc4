//! How fast the keys of a move go: as fast as they can while nobody else is served, and no faster than those who are served
//! can bear.
//!
//! What a client would wait is measured without one: something small is to happen every two milliseconds, on the threads and
//! processors that clients need, too; by how much it comes too late is what the move costs the others. Both ends of a move
//! measure, the worse counts. Late pieces make the pause before the next one longer by half, others shorter by an eighth, so that
//! the pace finds the edge and stays near it.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moim_base::Clock;

/// How often it is looked.
const LOOK_US: u64 = 2_000;
/// Timers are not more precise than this.
const TIMER_US: u64 = 1_000;
/// Later than this is too late.
const LATE_US: u64 = 1_500;
/// A piece is followed by this much rest in any case: what has queued up behind it is done then.
const BREATH_US: u64 = 800;
/// The longest pause: a move goes on however busy the others are.
const LONGEST_US: u64 = 40_000;

/// After so many pieces without anybody else served nobody is there. Who comes now and then, or was kept waiting by a whole
/// piece, is not served during every one.
const ALONE: u32 = 16;

/// What one end saw while it worked on a piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Strain {
    /// By how much something small came too late, at worst.
    pub(super) late_us: u64,
    /// Whether anybody else was served.
    pub(super) is_shared: bool,
}

impl Strain {
    /// Of both ends.
    pub(super) fn and(self, other: Self) -> Self {
        Self { late_us: self.late_us.max(other.late_us), is_shared: self.is_shared || other.is_shared }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    pause_us: u64,
    /// Pieces in a row without anybody else.
    alone: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { pause_us: 0, alone: ALONE }
    }
}

impl Pace {
    /// How long to rest before the next piece.
    pub(super) fn on_piece(&mut self, strain: Strain) -> Option<Duration> {
        self.alone = if strain.is_shared { 0 } else { self.alone.saturating_add(1) };
        if self.alone >= ALONE {
            self.pause_us = 0;
            return None;
        }
        self.pause_us = match strain.late_us > LATE_US {
            true => (self.pause_us * 3 / 2 + 500).min(LONGEST_US),
            false => self.pause_us * 7 / 8,
        };
        Some(Duration::from_micros(self.pause_us.max(BREATH_US)))
    }
}

/// Does something and looks meanwhile by how much others would come too late.
pub(super) async fn watched<T>(clock: &dyn Clock, work: impl Future<Output = T>) -> (T, u64) {
    let worst_us = AtomicU64::new(0);
    let look = async {
        loop {
            let due = clock.monotonic_ns() / 1_000 + LOOK_US + TIMER_US;
            tokio::time::sleep(Duration::from_micros(LOOK_US)).await;
            let late = (clock.monotonic_ns() / 1_000).saturating_sub(due);
            worst_us.fetch_max(late, Ordering::Relaxed);
        }
    };
    let done: Result<T, Infallible> = tokio::select! {
        biased;
        never = look => Err(never),
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

    /// The pauses after so many pieces that were as late as this.
    fn pauses(pace: &mut Pace, pieces: usize, late_us: u64, is_shared: bool) -> Duration {
        (0..pieces).filter_map(|_| pace.on_piece(Strain { late_us, is_shared })).sum()
    }

    #[test]
    fn a_move_slows_down_for_others_and_for_nobody_else() {
        let mut pace = Pace::default();
        let breath = Duration::from_micros(BREATH_US);
        assert_eq!(pauses(&mut pace, 100, 50_000, false), Duration::ZERO, "nobody else is there");
        assert_eq!(pauses(&mut pace, 100, LATE_US, true), breath * 100, "nobody waits");
        assert!(pauses(&mut pace, 20, LATE_US + 1, true) > breath * 100, "somebody does");
        assert_eq!(pace.pause_us, LONGEST_US, "but the move goes on");
        let (first, then) = (pauses(&mut pace, 50, 0, true), pauses(&mut pace, 50, 0, true));
        assert!(first > then && then == breath * 50, "nobody waits any more: {first:?}, {then:?}");
        assert!(
            pauses(&mut pace, ALONE as usize - 1, 50_000, false) > Duration::ZERO,
            "somebody may be waiting"
        );
        assert_eq!(pauses(&mut pace, 10, 50_000, false), Duration::ZERO, "nobody is there any more");
    }

    #[test]
    fn the_worse_end_counts() {
        let (here, there) = (Strain { late_us: 7, is_shared: false }, Strain { late_us: 3, is_shared: true });
        assert_eq!(here.and(there), Strain { late_us: 7, is_shared: true });
    }

    #[test]
    fn a_thread_that_is_kept_busy_is_seen() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let clock = moim_base::clock::SystemClock::new();
        let work = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            // What keeps others from this thread is not waiting.
            std::thread::sleep(Duration::from_millis(20));
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let ((), late) = runtime.block_on(watched(&clock, work));
        assert!(late >= 10_000, "{late}");
    }
}
