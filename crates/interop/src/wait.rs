//! Waiting for a condition, never for an amount of time.

use std::time::{Duration, Instant};

/// A moment after which waiting is pointless.
#[derive(Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// This long from now.
    pub fn after(patience: Duration) -> Self {
        Self(Instant::now() + patience)
    }

    /// What is left of it.
    pub fn left(&self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether nothing is left.
    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

/// Asks again and again until there is an answer.
///
/// # Panics
/// When there is none in time; `what` says what was awaited.
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
    fn the_first_answer_ends_the_wait() {
        let mut asked = 0;
        let answer = until(Duration::from_secs(5), "three", || {
            asked += 1;
            (asked == 3).then_some(asked)
        });
        assert_eq!(answer, 3);
    }

    #[test]
    #[should_panic(expected = "in vain for nothing")]
    fn no_answer_is_a_failure() {
        until::<()>(Duration::from_millis(1), "nothing", || None);
    }
}
