//! `moim_etcd_*`: metrics of the etcd port.

use moim_base::metrics::{Counter, Family, Gauge, Metrics};

/// Counters of the etcd port. The handles are resolved once: counting takes no lock.
pub(super) struct EtcdMetrics {
    pub(super) connections: Gauge,
    pub(super) refused_connections: Counter,
    pub(super) bad_connections: Counter,
    pub(super) watch_streams: Gauge,
    pub(super) ranges: Counter,
    pub(super) puts: Counter,
    pub(super) deletes: Counter,
    pub(super) txns: Counter,
    pub(super) other_calls: Counter,
    pub(super) failed_calls: Counter,
}

impl EtcdMetrics {
    /// Counters registered with `metrics`, if any.
    pub(super) fn register(metrics: Option<&Metrics>) -> Self {
        let calls: Family<Vec<(String, String)>, Counter> = Family::default();
        let call = |name: &str| calls.get_or_create(&vec![("method".into(), name.into())]).clone();
        let counters = Self {
            connections: Gauge::default(),
            refused_connections: Counter::default(),
            bad_connections: Counter::default(),
            watch_streams: Gauge::default(),
            ranges: call("Range"),
            puts: call("Put"),
            deletes: call("DeleteRange"),
            txns: call("Txn"),
            other_calls: call("other"),
            failed_calls: Counter::default(),
        };
        let Some(metrics) = metrics else { return counters };
        metrics.register("etcd_calls", "Calls by method", calls);
        metrics.register(
            "etcd_failed_calls",
            "Calls that ended with an error",
            counters.failed_calls.clone(),
        );
        metrics.register("etcd_connections", "Connections that are open", counters.connections.clone());
        metrics.register(
            "etcd_refused_connections",
            "Connections refused over the limit",
            counters.refused_connections.clone(),
        );
        metrics.register(
            "etcd_bad_connections",
            "Connections closed because of what they sent",
            counters.bad_connections.clone(),
        );
        metrics.register("etcd_watch_streams", "Watch streams that are open", counters.watch_streams.clone());
        counters
    }
}

/// Increments a gauge as long as it exists.
pub(super) struct Counted<'a>(&'a Gauge);

impl<'a> Counted<'a> {
    pub(super) fn new(gauge: &'a Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
