//! Prometheus metrics of the coordination core (`moim_coord_*`).

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use moim_base::metrics::{Gauge, Metrics};
use moim_base::task::Scope;
use moim_coord::Coordinator;

/// Registers the gauges; most are sampled at scrape time.
pub(super) fn register(metrics: &Metrics, coordinator: &Coordinator, scope: &Scope) {
    let gauge = |name: &str, help: &str| {
        let gauge: Gauge = Gauge::default();
        metrics.register(name, help, gauge.clone());
        gauge
    };
    let term = gauge("coord_term", "The Raft term");
    let leader = gauge("coord_is_leader", "1 while this node leads the coordination group");
    let has_leader = gauge("coord_has_leader", "1 while this node knows a leader");
    let changes = gauge("coord_leader_changes", "Leaders this node has seen since it started");
    let proposed = gauge("coord_log_index", "The last entry of the Raft log");
    let committed = gauge("coord_committed_index", "The last entry that is committed");
    let applied = gauge("coord_applied_index", "The last entry that is applied");
    let voters = gauge("coord_voters", "Members with a vote");
    let learners = gauge("coord_learners", "Members without a vote");
    let leases = gauge("coord_leases", "Leases that live");
    let bytes = gauge("coord_db_bytes", "Bytes of keys, values and history");
    let revision = gauge("coord_revision", "The revision of the clients' keys");
    let seen = Arc::new(AtomicI64::new(0));
    let counted = Arc::clone(&seen);
    let mut watch = coordinator.leadership();
    scope.spawn("leader-changes", async move {
        let mut last = None;
        while let Some(now) = watch.changed().await {
            if now.leader.is_some() && now.leader != last {
                last = now.leader;
                let voter = now.leader.map(|leader| leader.0);
                tracing::info!(?voter, term = now.term, "coordination group leader elected");
                counted.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let core = coordinator.clone();
    metrics.before_render(move || {
        let group = core.group().metrics();
        let status = core.status();
        term.set(number(status.term));
        leader.set(i64::from(core.group().is_leader()));
        has_leader.set(i64::from(status.leader.is_some()));
        changes.set(seen.load(Ordering::Relaxed));
        proposed.set(number(group.last_index.unwrap_or(0)));
        committed.set(number(group.committed.unwrap_or(0)));
        applied.set(number(status.applied));
        voters.set(group.voters.len() as i64);
        learners.set(group.learners.len() as i64);
        bytes.set(number(status.db_size));
        revision.set(core.header(moim_coord::SpaceId::User).revision);
        leases.set(core.read(|state| state.leases().count()) as i64);
    });
}
