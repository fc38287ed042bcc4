//! When a coordinator looks at the deadlines of its machines: at the next one, and soon after a machine has changed.
//!
//! A service with nothing to wait for never wakes its loop, one with much to do looks every [`STEP`] at most, whatever
//! else keeps it busy.
//!
//! Invariant: a change that [`Ticker::touch`] told of after [`Ticker::begin_look`] is looked at again. So a look begins
//! with that, and a change is told of after it was made.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The shortest time between two looks.
const STEP: Duration = Duration::from_millis(50);
/// The longest, while there is a deadline at all.
const LONGEST: Duration = Duration::from_secs(10);

/// See the top of the file.
#[derive(Default)]
pub(crate) struct Ticker {
    touched: AtomicBool,
    changed: Notify,
}

impl Ticker {
    /// A machine has changed: it may have an earlier deadline.
    pub(crate) fn touch(&self) {
        if !self.touched.swap(true, Ordering::AcqRel) {
            self.changed.notify_one();
        }
    }

    /// Changes from here on are news to the look that begins.
    pub(crate) fn begin_look(&self) {
        self.touched.store(false, Ordering::Release);
    }

    /// Waits until it is time to look; `at` is what [`next_look`] said after the last one. Cancel-safe.
    pub(crate) async fn wait(&self, at: &mut Option<Instant>) {
        loop {
            let due = async {
                match *at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = due => return,
                () = self.changed.notified() => {
                    let soon = Instant::now() + STEP;
                    *at = Some(at.map_or(soon, |at| at.min(soon)));
                }
            }
        }
    }
}

/// When to look again if nothing changes, given the next deadline of all machines.
pub(crate) fn next_look(next_ms: Option<u64>, now_ms: u64) -> Option<Instant> {
    let left = Duration::from_millis(next_ms?.saturating_sub(now_ms));
    Some(Instant::now() + left.clamp(STEP, LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_sleeps_until_the_deadline_and_a_change_brings_it_forward() {
        let ticker = Ticker::default();
        let began = Instant::now();
        let mut at = next_look(Some(5_000), 1_000);
        ticker.wait(&mut at).await;
        assert_eq!(began.elapsed().as_millis(), 4_000);

        ticker.begin_look();
        at = next_look(None, 5_000);
        assert_eq!(at, None, "nothing to wait for");
        ticker.touch();
        ticker.touch();
        ticker.wait(&mut at).await;
        assert_eq!(began.elapsed().as_millis(), 4_050);

        ticker.begin_look();
        at = next_look(Some(0), 9_000);
        ticker.wait(&mut at).await;
        assert_eq!(began.elapsed().as_millis(), 4_100, "an old deadline does not make it spin");
    }

    #[tokio::test(start_paused = true)]
    async fn news_that_never_pause_do_not_put_a_look_off() {
        let ticker = Ticker::default();
        let began = Instant::now();
        let mut at = None;
        let looked = loop {
            ticker.touch();
            tokio::select! {
                biased;
                () = ticker.wait(&mut at) => break began.elapsed(),
                () = tokio::time::sleep(Duration::from_millis(20)) => ticker.begin_look(),
            }
        };
        assert!(looked <= Duration::from_millis(60), "{looked:?}");
    }
}
