//! The deadline timer of a coordinator: ticks at the next deadline of its state machines, and soon after a state
//! change.
//!
//! A service without deadlines never wakes its loop; a busy one ticks once per [`MIN_INTERVAL`] at most, whatever
//! else keeps it busy.
//!
//! Invariant: a change reported by [`DeadlineTimer::on_change`] after [`DeadlineTimer::begin_tick`] causes another
//! tick. So a tick begins with `begin_tick`, and a change is reported after it was made.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Minimum time between two ticks.
const MIN_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time between two ticks, while there is a deadline at all.
const MAX_INTERVAL: Duration = Duration::from_secs(10);

/// Schedules the ticks of one coordinator service; see the module comment.
#[derive(Default)]
pub(crate) struct DeadlineTimer {
    pending: AtomicBool,
    changed: Notify,
}

impl DeadlineTimer {
    /// Reports a state change: there may be an earlier deadline.
    pub(crate) fn on_change(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.changed.notify_one();
        }
    }

    /// Begins a tick: changes from here on cause another one.
    pub(crate) fn begin_tick(&self) {
        self.pending.store(false, Ordering::Release);
    }

    /// Waits for the next tick; `at` is what [`next_tick`] returned after the last one. Cancel-safe.
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
                    let soon = Instant::now() + MIN_INTERVAL;
                    *at = Some(at.map_or(soon, |at| at.min(soon)));
                }
            }
        }
    }
}

/// The time of the next tick if nothing changes, given the next deadline of all state machines.
pub(crate) fn next_tick(next_ms: Option<u64>, now_ms: u64) -> Option<Instant> {
    let left = Duration::from_millis(next_ms?.saturating_sub(now_ms));
    Some(Instant::now() + left.clamp(MIN_INTERVAL, MAX_INTERVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn sleeps_until_the_deadline_and_a_change_advances_the_tick() {
        let timer = DeadlineTimer::default();
        let began = Instant::now();
        let mut at = next_tick(Some(5_000), 1_000);
        timer.wait(&mut at).await;
        assert_eq!(began.elapsed().as_millis(), 4_000);

        timer.begin_tick();
        at = next_tick(None, 5_000);
        assert_eq!(at, None, "no deadline");
        timer.on_change();
        timer.on_change();
        timer.wait(&mut at).await;
        assert_eq!(began.elapsed().as_millis(), 4_050);

        timer.begin_tick();
        at = next_tick(Some(0), 9_000);
        timer.wait(&mut at).await;
        assert_eq!(began.elapsed().as_millis(), 4_100, "a past deadline does not make it spin");
    }

    #[tokio::test(start_paused = true)]
    async fn continuous_changes_do_not_postpone_the_tick() {
        let timer = DeadlineTimer::default();
        let began = Instant::now();
        let mut at = None;
        let last_tick = loop {
            timer.on_change();
            tokio::select! {
                biased;
                () = timer.wait(&mut at) => break began.elapsed(),
                () = tokio::time::sleep(Duration::from_millis(20)) => timer.begin_tick(),
            }
        };
        assert!(last_tick <= Duration::from_millis(60), "{last_tick:?}");
    }
}
