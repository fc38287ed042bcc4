//! The watchdog of the event loops.
//!
//! A stalled loop serves none of its clients, and may hold the lock of a shard: then the whole shard is unavailable
//! although its node looks healthy to the cluster. After one second without a heartbeat the loop is stalled: a warning
//! and a metric. After ten seconds the node hands over the shards whose lock is held, or all shards that it leads if no
//! lock is.
//!
//! Heartbeats stop when the process is paused, too. So a round that is late itself draws no conclusion.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::metrics::{Counter, Gauge};
use moim_base::rest::rest;

use crate::service::{Local, Service};
use crate::shard::{Role, Shard};
use crate::shared::lock;

/// The interval between two rounds.
const INTERVAL: Duration = Duration::from_millis(250);
/// A round that is late by more than this draws no conclusion.
const MAX_LATENESS_MS: u64 = 1_000;
/// A loop without a heartbeat for this long is stalled.
const STALLED_MS: u64 = 1_000;
/// A loop stalled for this long makes the node hand over its shards.
const HAND_OVER_MS: u64 = 10_000;

/// The state of an event loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LoopState {
    Running,
    Stalled,
    HandsOver,
}

fn classify(silent_ms: u64) -> LoopState {
    match silent_ms {
        ..STALLED_MS => LoopState::Running,
        STALLED_MS..HAND_OVER_MS => LoopState::Stalled,
        HAND_OVER_MS.. => LoopState::HandsOver,
    }
}

/// Runs until the shutdown.
pub(super) async fn watch(service: Arc<Service>) {
    let (stalls, silent): (Counter, Gauge) = (Counter::default(), Gauge::default());
    let metrics = &service.parts.metrics;
    metrics.register("slots_event_loop_stalls", "Event loops that did not turn for a second", stalls.clone());
    metrics.register(
        "slots_event_loop_silent_ms",
        "How long the most silent event loop has not turned",
        silent.clone(),
    );
    let clock = Arc::clone(&service.parts.clock);
    let mut before = clock.monotonic_ms();
    let mut states = vec![LoopState::Running; service.server.loops()];
    loop {
        rest(INTERVAL).await;
        let now = clock.monotonic_ms();
        let is_late = now.saturating_sub(std::mem::replace(&mut before, now)) > MAX_LATENESS_MS;
        let silences = service.server.silent_ms(now);
        silent.set(silences.iter().copied().max().unwrap_or(0) as i64);
        if is_late {
            continue;
        }
        let stalled = silences.iter().filter(|silent_ms| classify(**silent_ms) != LoopState::Running).count();
        service.shared().stalled_loops.store(stalled, Ordering::Relaxed);
        for (index, (state, silent_ms)) in states.iter_mut().zip(silences).enumerate() {
            let found = classify(silent_ms);
            match (*state, found) {
                (LoopState::Running, LoopState::Stalled | LoopState::HandsOver) => {
                    stalls.inc();
                    tracing::warn!(index, silent_ms, "event loop stalled");
                }
                (LoopState::Stalled | LoopState::HandsOver, LoopState::Running) => {
                    tracing::info!(index, "event loop turns again");
                }
                _ => {}
            }
            if found == LoopState::HandsOver {
                service.hand_over_shards(index).await;
            }
            *state = found;
        }
    }
}

/// True if the lock of a shard is held for long, other than by an offloaded script, which has its own watchdog.
fn is_locked(shard: &Shard) -> bool {
    shard.offloaded_scripts.load(Ordering::Acquire) == 0 && shard.lock_soon().is_none()
}

impl Service {
    /// The findings of this node's store: the number of stalled event loops, and the keyspace hash mismatches of each
    /// shard.
    pub fn findings(&self) -> (usize, BTreeMap<u16, u64>) {
        let stalled = self.shared().stalled_loops.load(Ordering::Relaxed);
        let differs = |local: &Local| local.shard.mismatches.load(Ordering::Relaxed);
        let shards = lock(&self.locals).values().map(|local| (local.shard.index, differs(local))).collect();
        (stalled, shards)
    }

    /// Hands over the shards that a stalled loop may block, where another in-sync replica can lead.
    async fn hand_over_shards(&self, index: usize) {
        let led: Vec<Arc<Shard>> = lock(&self.locals)
            .values()
            .map(|local| Arc::clone(&local.shard))
            .filter(|shard| shard.role() == Role::Primary && shard.log.leader_epoch().is_some())
            .collect();
        let locked: Vec<_> = led.iter().filter(|shard| is_locked(shard)).cloned().collect();
        for shard in if locked.is_empty() { led } else { locked } {
            match self.hand_over(shard.index).await {
                Ok(Some(to)) => {
                    tracing::warn!(
                        shard = shard.index,
                        event_loop = index,
                        to = to.0,
                        "leadership given up: event loop stalled"
                    );
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(shard = shard.index, error = %error.0, "leadership cannot be given up")
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_is_stalled_after_one_second_and_hands_over_after_ten() {
        assert_eq!([0, 999].map(classify), [LoopState::Running; 2]);
        assert_eq!([1_000, 9_999].map(classify), [LoopState::Stalled; 2]);
        assert_eq!([10_000, 60_000].map(classify), [LoopState::HandsOver; 2]);
    }
}
