//! Metrics of the cluster library.

use std::time::Duration;

use moim_base::metrics::{Counter, Gauge, Histogram, Metrics, exponential_buckets};

/// Counters, gauges and histograms of one node's services.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // each is described where it is registered
pub struct ClusterMetrics {
    pub heartbeat_delay: Histogram,
    pub heartbeat_failures: Counter,
    pub members_up: Gauge,
    pub members_suspect: Gauge,
    pub leader_changes: Counter,
    pub is_leader: Gauge,
    pub lock_waits: Counter,
    pub lock_wait_time: Histogram,
    pub locks_held: Gauge,
    pub locks_lost: Counter,
    pub partitions_owned: Gauge,
    pub rebalances: Counter,
    pub rebalance_moves: Counter,
    pub rebalance_commit_time: Histogram,
    pub handoff_time: Histogram,
    pub handoff_bytes: Histogram,
    pub handoff_retries: Counter,
    pub assigned_to_ready_time: Histogram,
    pub join_approval_time: Histogram,
    pub join_failures: Counter,
    pub sync_time: Histogram,
    pub join_to_rebalance_time: Histogram,
    pub routing_version: Gauge,
    pub routing_subscribers: Gauge,
    pub routing_pushes: Counter,
}

fn times() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 16))
}

impl Default for ClusterMetrics {
    fn default() -> Self {
        Self {
            heartbeat_delay: times(),
            heartbeat_failures: Counter::default(),
            members_up: Gauge::default(),
            members_suspect: Gauge::default(),
            leader_changes: Counter::default(),
            is_leader: Gauge::default(),
            lock_waits: Counter::default(),
            lock_wait_time: times(),
            locks_held: Gauge::default(),
            locks_lost: Counter::default(),
            partitions_owned: Gauge::default(),
            rebalances: Counter::default(),
            rebalance_moves: Counter::default(),
            rebalance_commit_time: times(),
            handoff_time: times(),
            handoff_bytes: Histogram::new(exponential_buckets(64.0, 8.0, 9)),
            handoff_retries: Counter::default(),
            assigned_to_ready_time: times(),
            join_approval_time: times(),
            join_failures: Counter::default(),
            sync_time: times(),
            join_to_rebalance_time: times(),
            routing_version: Gauge::default(),
            routing_subscribers: Gauge::default(),
            routing_pushes: Counter::default(),
        }
    }
}

impl ClusterMetrics {
    /// Registers the metrics as `moim_cluster_…`.
    pub fn register(&self, metrics: &Metrics) {
        let put =
            |name: &str, help: &str, histogram: &Histogram| metrics.register(name, help, histogram.clone());
        put(
            "cluster_heartbeat_delay_seconds",
            "Time a heartbeat takes to be recorded",
            &self.heartbeat_delay,
        );
        put("cluster_lock_wait_seconds", "Time until a lock was held", &self.lock_wait_time);
        put("cluster_rebalance_commit_seconds", "Time to commit a rebalance", &self.rebalance_commit_time);
        put("cluster_handoff_seconds", "Time to record a hand-off", &self.handoff_time);
        put("cluster_handoff_bytes", "Size of a hand-off", &self.handoff_bytes);
        put("cluster_assigned_to_ready_seconds", "From assigned to processing", &self.assigned_to_ready_time);
        put("cluster_join_approval_seconds", "From a join request to its answer", &self.join_approval_time);
        put("cluster_sync_seconds", "Time a new member took for snapshot and log", &self.sync_time);
        put(
            "cluster_join_to_rebalance_seconds",
            "From joining to the first rebalance",
            &self.join_to_rebalance_time,
        );
        let count = |name: &str, help: &str, counter: &Counter| metrics.register(name, help, counter.clone());
        count("cluster_heartbeat_failures", "Heartbeats that were not recorded", &self.heartbeat_failures);
        count("cluster_leader_changes", "Changes of leadership seen", &self.leader_changes);
        count("cluster_lock_waits", "Locks that were not free at once", &self.lock_waits);
        count("cluster_locks_lost", "Locks that ended without being released", &self.locks_lost);
        count("cluster_rebalances", "Rebalances decided", &self.rebalances);
        count("cluster_rebalance_moves", "Partitions moved by rebalances", &self.rebalance_moves);
        count("cluster_handoff_retries", "Hand-offs that had to be recorded again", &self.handoff_retries);
        count("cluster_join_failures", "Joins that were refused or expired", &self.join_failures);
        count("cluster_routing_pushes", "Routing tables and changes pushed", &self.routing_pushes);
        let level = |name: &str, help: &str, gauge: &Gauge| metrics.register(name, help, gauge.clone());
        level("cluster_members_up", "Members with status UP", &self.members_up);
        level("cluster_members_suspect", "Members with status SUSPECT", &self.members_suspect);
        level("cluster_is_leader", "Leaderships this node has", &self.is_leader);
        level("cluster_locks_held", "Locks this node holds", &self.locks_held);
        level("cluster_partitions_owned", "Partitions this node owns", &self.partitions_owned);
        level("cluster_routing_version", "The routing table in force", &self.routing_version);
        level("cluster_routing_subscribers", "Servers and SDKs connected", &self.routing_subscribers);
    }
}

/// Nanoseconds as seconds, for histograms.
pub(crate) fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}
