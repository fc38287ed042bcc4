//! Waiting for a condition, never for an amount of time.

use std::time::{Duration, Instant};

/// A point in time after which a wait fails.
#[derive(Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// A deadline this long from now.
    pub fn after(patience: Duration) -> Self {
        Self(Instant::now() + patience)
    }

    /// The remaining time.
    pub fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// True if the deadline has passed.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

/// Polls `ask` until it returns a value.
///
/// # Panics
/// If the condition does not hold before the deadline; `what` names the condition.
pub fn until<T>(patience: Duration, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Deadline::after(patience);
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(!deadline.is_over(), "waited {patience:?} in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn until_returns_the_first_value() {
        let mut asked = 0;
        let answer = until(Duration::from_secs(5), "three", || {
            asked += 1;
            (asked == 3).then_some(asked)
        });
        assert_eq!(answer, 3);
    }

    #[test]
    #[should_panic(expected = "in vain for nothing")]
    fn until_panics_after_the_deadline() {
        until::<()>(Duration::from_millis(1), "nothing", || None);
    }
}
