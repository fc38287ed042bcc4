//! The queue's metrics.

use moim_base::metrics::{Counter, Family, Metrics};
use moim_wire_kafka::ApiKey;

/// Counters of the broker. The per-API counters are an array: counting a request takes no lock.
pub(crate) struct QueueMetrics {
    pub(crate) produced_bytes: Counter,
    pub(crate) fetched_bytes: Counter,
    pub(crate) bad_connections: Counter,
    pub(crate) refused_connections: Counter,
    pub(crate) damage: Counter,
    pub(crate) failed_authentications: Counter,
    requests: Vec<Option<Counter>>,
}

impl QueueMetrics {
    pub(crate) fn register(metrics: &Metrics) -> Self {
        let produced_bytes = Counter::default();
        metrics.register(
            "queue_produced_bytes",
            "Bytes of record batches appended for clients",
            produced_bytes.clone(),
        );
        let fetched_bytes = Counter::default();
        metrics.register(
            "queue_fetched_bytes",
            "Bytes of record batches sent to clients",
            fetched_bytes.clone(),
        );
        let bad_connections = Counter::default();
        metrics.register(
            "queue_bad_connections",
            "Connections closed because of what they sent",
            bad_connections.clone(),
        );
        let refused_connections = Counter::default();
        metrics.register(
            "queue_refused_connections",
            "Connections refused over the limit",
            refused_connections.clone(),
        );
        let failed_authentications = Counter::default();
        metrics.register(
            "queue_failed_authentications",
            "Wrong user names or passwords",
            failed_authentications.clone(),
        );
        let damage = Counter::default();
        metrics.register("queue_damaged_ranges", "Ranges of records the scrub found damaged", damage.clone());
        let family: Family<Vec<(String, String)>, Counter> = Family::default();
        metrics.register("queue_requests", "Requests by API", family.clone());
        let mut requests = Vec::new();
        for (key, _) in crate::dispatch::SUPPORTED_APIS {
            let at = *key as usize;
            requests.resize(requests.len().max(at + 1), None);
            requests[at] = Some(family.get_or_create(&vec![("api".into(), key.name().into())]).clone());
        }
        Self {
            produced_bytes,
            fetched_bytes,
            bad_connections,
            refused_connections,
            damage,
            failed_authentications,
            requests,
        }
    }

    pub(crate) fn request(&self, key: ApiKey) {
        if let Some(Some(counter)) = self.requests.get(key as usize) {
            counter.inc();
        }
    }
}
