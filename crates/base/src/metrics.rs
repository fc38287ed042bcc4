//! The registry behind `/metrics`. Names start with `moim_` and end in their unit.

use std::fmt::Write as _;
use std::sync::Mutex;

pub use prometheus_client::metrics::counter::Counter;
pub use prometheus_client::metrics::family::Family;
pub use prometheus_client::metrics::gauge::Gauge;
pub use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};

/// All metrics of a process.
pub struct Metrics {
    registry: Mutex<Registry>,
    before: Mutex<Vec<Refresh>>,
}

type Refresh = Box<dyn Fn() + Send + Sync>;

impl Metrics {
    /// An empty registry.
    pub fn new() -> Self {
        Self { registry: Mutex::new(Registry::with_prefix("moim")), before: Mutex::default() }
    }

    /// Adds a metric under `moim_<name>`. Counters get `_total` by themselves.
    pub fn register(&self, name: &str, help: &str, metric: impl Metric) {
        self.lock().register(name, help, metric);
    }

    /// Calls `refresh` before each rendering, for gauges that are cheaper to read than to maintain.
    pub fn before_render(&self, refresh: impl Fn() + Send + Sync + 'static) {
        self.before.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(Box::new(refresh));
    }

    /// The Prometheus text format.
    pub fn render(&self) -> String {
        for refresh in self.before.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter() {
            refresh();
        }
        let mut text = String::new();
        if prometheus_client::encoding::text::encode(&mut text, &self.lock()).is_err() {
            let _ = writeln!(text, "# a metric could not be encoded");
        }
        text
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_shows_its_prefix_and_suffix() {
        let metrics = Metrics::new();
        let counter: Counter = Counter::default();
        metrics.register("things", "Things that happened", counter.clone());
        counter.inc();
        assert!(metrics.render().contains("moim_things_total 1"));
    }

    #[test]
    fn gauges_are_refreshed_before_rendering() {
        let metrics = Metrics::new();
        let gauge: Gauge = Gauge::default();
        metrics.register("level_bytes", "A level", gauge.clone());
        metrics.before_render(move || {
            gauge.inc();
        });
        metrics.render();
        assert!(metrics.render().contains("moim_level_bytes 2"));
    }
}
