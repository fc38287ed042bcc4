//! How much may be logged about clients that misbehave.
//!
//! Owns a count of lines per second. A client can be wrong as often as it likes and far more often than
//! anybody wants to read: without a bound it fills the disk of whoever keeps the log. The first lines of a
//! second are written, the others counted, and the next line that is written says how many were left out.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Lines that may be written in one [`WINDOW`].
const LINES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(1);

/// Decides which lines are written.
#[derive(Default)]
pub(crate) struct LogBudget {
    window: Mutex<Window>,
}

#[derive(Default)]
struct Window {
    began: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl LogBudget {
    /// Whether a line may be written now; if so, how many were left out since the last one.
    pub(crate) fn take(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if window.began.is_none_or(|began| now.duration_since(began) >= WINDOW) {
            window.began = Some(now);
            window.written = 0;
        }
        if window.written == LINES {
            window.left_out += 1;
            return None;
        }
        window.written += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_told_with_the_next_line() {
        let budget = LogBudget::default();
        let start = Instant::now();
        let written = (0..1_000).filter_map(|_| budget.take(start)).collect::<Vec<_>>();
        assert_eq!(written, vec![0; LINES as usize]);
        assert_eq!(budget.take(start + WINDOW / 2), None);
        assert_eq!(budget.take(start + WINDOW), Some(1_000 - u64::from(LINES) + 1));
        assert_eq!(budget.take(start + WINDOW), Some(0));
    }
}
