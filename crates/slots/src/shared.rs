//! What all shards and clients of a node share: settings and counters.

use std::sync::Mutex;

use moim_base::metrics::Counter;

/// See the module.
#[derive(Default)]
pub struct Shared {
    /// Counters.
    pub stats: Stats,
}

/// Counters that INFO and the metrics show.
#[derive(Default)]
pub struct Stats {
    /// Keys deleted because their time had come.
    pub expired: Counter,
    /// Keys deleted to make room.
    pub evicted: Counter,
    /// Lookups that found their key.
    pub hits: Counter,
    /// Lookups that did not.
    pub misses: Counter,
    errors: Mutex<std::collections::BTreeMap<String, u64>>,
}

impl Stats {
    /// A command answered with an error of this code.
    pub fn on_error(&self, code: &str) {
        /// Scripts can make up codes.
        const MOST: usize = 128;
        let mut errors = self.errors.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(count) = errors.get_mut(code) {
            *count += 1;
        } else if errors.len() < MOST {
            errors.insert(code.to_owned(), 1);
        }
    }
}
