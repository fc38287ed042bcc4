//! The metrics of the store.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Service;
use crate::shared::lock;

impl Service {
    /// Registers the metrics; gauges are computed when the metrics page is rendered.
    pub(super) fn register_metrics(self: &Arc<Self>) {
        use moim_base::metrics::Gauge;
        let (metrics, stats) = (&self.parts.metrics, &self.shared.stats);
        metrics.register("slots_commands", "Commands run by the store", stats.commands.clone());
        metrics.register(
            "slots_expired_keys",
            "Keys deleted because their time had come",
            stats.expired.clone(),
        );
        metrics.register("slots_evicted_keys", "Keys deleted to make room", stats.evicted.clone());
        metrics.register(
            "slots_read_bytes",
            "Bytes read from clients of the store",
            stats.read_bytes.clone(),
        );
        metrics.register(
            "slots_written_bytes",
            "Bytes written to clients of the store",
            stats.written_bytes.clone(),
        );
        let gauge = |name: &str, help: &str| {
            let gauge: Gauge = Gauge::default();
            metrics.register(name, help, gauge.clone());
            gauge
        };
        let keys = gauge("slots_keys", "Keys in the shards of this node");
        let bytes = gauge("slots_memory_bytes", "Memory of keys and values");
        let clients = gauge("slots_connections", "Open connections of the store");
        let service = Arc::downgrade(self);
        metrics.before_render(move || {
            let Some(service) = service.upgrade() else { return };
            let shards: Vec<_> =
                lock(&service.locals).values().map(|local| Arc::clone(&local.shard)).collect();
            let (mut count, mut used) = (0, 0);
            for shard in shards {
                // Not counted while a script holds the lock.
                if let Some(turn) = shard.turn(&service.shared) {
                    count += turn.state.db.len();
                    used += turn.state.db.memory();
                }
            }
            keys.set(count as i64);
            bytes.set(used as i64);
            clients.set(service.shared.connections.load(Ordering::Relaxed) as i64);
        });
    }
}
