//! Watches the heartbeats of the event loops.
//!
//! A loop that does not turn serves none of its clients, and may hold the lock of a shard: then the whole shard stands still
//! although its node looks healthy to the cluster. Silent for a second, it is a finding: a warning and a metric. Silent for
//! ten, the node hands over the shards whose lock cannot be had, or all that it leads if every lock can.
//!
//! The heartbeats stop with the process. So a round that itself comes late, after a pause of the process for one, judges nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moim_base::metrics::{Counter, Gauge};
use moim_base::rest::rest;

use crate::service::{Local, Service};
use crate::shard::{Role, Shard};
use crate::shared::lock;

/// Between two rounds.
const EVERY: Duration = Duration::from_millis(250);
/// A round that comes so much later than it should judges nothing.
const LATE_MS: u64 = 1_000;
/// A loop is silent.
const SILENT_MS: u64 = 1_000;
/// A silent loop costs the node what it leads.
const GIVE_UP_MS: u64 = 10_000;

/// What a round makes of the heartbeats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Finding {
    Turning,
    Silent,
    GivesUp,
}

fn judge(silent_ms: u64) -> Finding {
    match silent_ms {
        ..SILENT_MS => Finding::Turning,
        SILENT_MS..GIVE_UP_MS => Finding::Silent,
        GIVE_UP_MS.. => Finding::GivesUp,
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
    let mut findings = vec![Finding::Turning; service.server.loops()];
    loop {
        rest(EVERY).await;
        let now = clock.monotonic_ms();
        let is_late = now.saturating_sub(std::mem::replace(&mut before, now)) > LATE_MS;
        let silences = service.server.silent_ms(now);
        silent.set(silences.iter().copied().max().unwrap_or(0) as i64);
        if is_late {
            continue;
        }
        let stalled = silences.iter().filter(|silent_ms| judge(**silent_ms) != Finding::Turning).count();
        service.shared().stalled_loops.store(stalled, Ordering::Relaxed);
        for (index, (finding, silent_ms)) in findings.iter_mut().zip(silences).enumerate() {
            let found = judge(silent_ms);
            match (*finding, found) {
                (Finding::Turning, Finding::Silent | Finding::GivesUp) => {
                    stalls.inc();
                    tracing::warn!(index, silent_ms, "event loop stalled");
                }
                (Finding::Silent | Finding::GivesUp, Finding::Turning) => {
                    tracing::info!(index, "event loop turns again");
                }
                _ => {}
            }
            if found == Finding::GivesUp {
                service.give_up_leads(index).await;
            }
            *finding = found;
        }
    }
}

/// Whether the lock of a shard is held for long by other than a script away from the loops, which watches itself.
fn is_locked(shard: &Shard) -> bool {
    shard.scripts_away.load(Ordering::Acquire) == 0 && shard.lock_soon().is_none()
}

impl Service {
    /// What is wrong with the store of this node: event loops that stand still, and for each shard how often its keyspace
    /// differed from its primary's.
    pub fn findings(&self) -> (usize, BTreeMap<u16, u64>) {
        let stalled = self.shared().stalled_loops.load(Ordering::Relaxed);
        let differs = |local: &Local| local.shard.mismatches.load(Ordering::Relaxed);
        let shards = lock(&self.locals).values().map(|local| (local.shard.index, differs(local))).collect();
        (stalled, shards)
    }

    /// Hands over what a silent loop may hold up, where another in-sync replica can lead.
    async fn give_up_leads(&self, index: usize) {
        let led: Vec<Arc<Shard>> = lock(&self.locals)
            .values()
            .map(|local| Arc::clone(&local.shard))
            .filter(|shard| shard.role() == Role::Primary && shard.log.leads().is_some())
            .collect();
        let locked: Vec<_> = led.iter().filter(|shard| is_locked(shard)).cloned().collect();
        for shard in if locked.is_empty() { led } else { locked } {
            match self.give_lead(shard.index).await {
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
    fn a_second_is_a_finding_and_ten_cost_the_lead() {
        assert_eq!([0, 999].map(judge), [Finding::Turning; 2]);
        assert_eq!([1_000, 9_999].map(judge), [Finding::Silent; 2]);
        assert_eq!([10_000, 60_000].map(judge), [Finding::GivesUp; 2]);
    }
}
