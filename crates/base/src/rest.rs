//! Aligned timers: pauses of background work that end together.
//!
//! An idle node polls many things periodically. If every poll woke its thread at its own time, this would add up to a
//! hundred wake-ups a second, and the wake-up is most of the cost of such a poll. Therefore a thread that is
//! [`aligned`] ends these pauses on a grid of [`STEP_MS`], all that are due at once.
//!
//! The step is deliberate: it is the width of a slot of tokio's second timer wheel, counted from the start of the
//! runtime. A timer on such a boundary fires from there; any other timer wakes the thread once more, to be moved to
//! the first wheel.
//!
//! On a thread that is not aligned (tests, the simulator) pauses are exact.

use std::cell::Cell;
use std::io;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

/// The distance of two grid points.
const STEP_MS: u64 = 64;

thread_local! {
    static ORIGIN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Builds the runtime of this thread; from now on, pauses of this thread end on its grid.
pub fn aligned(builder: &mut Builder) -> io::Result<Runtime> {
    // Not after it: a timer that is later by any amount is a millisecond later, and off the boundary.
    let origin = Instant::now();
    let runtime = builder.build()?;
    ORIGIN.set(Some(origin));
    Ok(runtime)
}

/// Pauses for about this long: up to half a step more or less, and never for zero time.
pub async fn rest(pause: Duration) {
    tokio::time::sleep_until(rest_end(pause)).await;
}

/// The end of a [`rest`] that begins now.
pub fn rest_end(pause: Duration) -> Instant {
    end(ORIGIN.get(), Instant::now(), pause)
}

/// The first grid point not before `at`; `None` on a thread that is not aligned.
pub fn grid_point(at: Instant) -> Option<Instant> {
    let origin = ORIGIN.get()?;
    let since_us = u64::try_from((at - origin).as_micros()).ok()?;
    Some(origin + Duration::from_millis(since_us.div_ceil(STEP_MS * 1000) * STEP_MS))
}

fn end(origin: Option<Instant>, now: Instant, pause: Duration) -> Instant {
    let Some(origin) = origin else { return now + pause };
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 2);
    let since = ms(now - origin);
    let nearest = (since + ms(pause) + STEP_MS / 2) / STEP_MS;
    let next = since / STEP_MS + 1;
    origin + Duration::from_millis(nearest.max(next) * STEP_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends_after(now_ms: u64, pause_ms: u64) -> u64 {
        let origin = Instant::now();
        let end = end(
            Some(origin),
            origin + Duration::from_millis(now_ms) + Duration::from_micros(300),
            Duration::from_millis(pause_ms),
        );
        u64::try_from((end - origin).as_millis()).unwrap()
    }

    #[test]
    fn pauses_end_on_the_grid_near_where_they_should() {
        assert_eq!(ends_after(0, 150), 128);
        assert_eq!(ends_after(128, 150), 256);
        assert_eq!(ends_after(120, 150), 256);
        assert_eq!(ends_after(640, 500), 640 + 512);
        assert_eq!(ends_after(700, 1000), 1728);
    }

    #[test]
    fn a_short_pause_is_still_one() {
        assert_eq!(ends_after(64, 5), 128);
        assert_eq!(ends_after(127, 5), 128);
    }

    #[test]
    fn without_a_grid_a_pause_is_what_it_says() {
        let now = Instant::now();
        assert_eq!(end(None, now, Duration::from_millis(7)), now + Duration::from_millis(7));
        assert_eq!(grid_point(now), None);
    }

    #[test]
    fn a_grid_point_is_never_early() {
        let origin = Instant::now();
        ORIGIN.set(Some(origin));
        let at = |ms| origin + Duration::from_millis(ms);
        assert_eq!(grid_point(at(64)), Some(at(64)));
        assert_eq!(grid_point(at(65)), Some(at(128)));
        assert_eq!(grid_point(at(500)), Some(at(512)));
        ORIGIN.set(None);
    }
}
