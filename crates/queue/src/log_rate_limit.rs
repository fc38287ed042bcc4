//! A rate limit for log lines about misbehaving clients.
//!
//! Owns a count of lines per second. A client can send invalid requests at any rate: without a limit the log fills
//! its disk. The first lines of a second are written, the others are counted, and the next line that is written
//! reports how many were suppressed.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Maximum number of lines per [`WINDOW`].
const LINES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(1);

/// Decides which lines are written.
#[derive(Default)]
pub(crate) struct LogRateLimit {
    window: Mutex<Window>,
}

#[derive(Default)]
struct Window {
    began: Option<Instant>,
    written: u32,
    suppressed: u64,
}

impl LogRateLimit {
    /// Some if a line may be written now: the number of lines suppressed since the last one.
    pub(crate) fn take(&self, now: Instant) -> Option<u64> {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if window.began.is_none_or(|began| now.duration_since(began) >= WINDOW) {
            window.began = Some(now);
            window.written = 0;
        }
        if window.written == LINES {
            window.suppressed += 1;
            return None;
        }
        window.written += 1;
        Some(std::mem::take(&mut window.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_lines_are_reported_with_the_next_line() {
        let budget = LogRateLimit::default();
        let start = Instant::now();
        let written = (0..1_000).filter_map(|_| budget.take(start)).collect::<Vec<_>>();
        assert_eq!(written, vec![0; LINES as usize]);
        assert_eq!(budget.take(start + WINDOW / 2), None);
        assert_eq!(budget.take(start + WINDOW), Some(1_000 - u64::from(LINES) + 1));
        assert_eq!(budget.take(start + WINDOW), Some(0));
    }
}
