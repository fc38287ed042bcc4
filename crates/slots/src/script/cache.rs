//! Script cache of a node: script sources by SHA-1, and which scripts have been quick so far.

use std::sync::Arc;

use hashbrown::HashMap;

use super::MAX_COMPILED;

/// The script cache.
#[derive(Default)]
pub struct Scripts {
    cache: std::sync::Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    scripts: HashMap<String, (Arc<[u8]>, bool)>,
    bytes: usize,
    /// Number of consecutive quick runs per script.
    quick: HashMap<String, u8>,
}

impl Scripts {
    /// Cache size above which scripts cached only by EVAL are evicted.
    const MAX_BYTES: usize = 64 << 20;

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Consecutive quick runs after which a script is expected to be quick.
    const QUICK_RUNS: u8 = 3;
    /// Maximum duration of a quick run.
    const QUICK_NS: u64 = 300_000;

    /// True if a script may run on an event loop.
    pub fn is_quick(&self, sha: &str) -> bool {
        self.lock().quick.get(sha).is_some_and(|times| *times >= Self::QUICK_RUNS)
    }

    pub(super) fn on_run(&self, sha: &str, took_ns: u64) {
        let mut cache = self.lock();
        if cache.quick.len() > MAX_COMPILED {
            cache.quick.clear();
        }
        let times = cache.quick.entry_ref(sha).or_insert(0);
        *times = if took_ns <= Self::QUICK_NS { times.saturating_add(1) } else { 0 };
    }

    /// The source of a script.
    pub fn get(&self, sha: &str) -> Option<Arc<[u8]>> {
        self.lock().scripts.get(sha).map(|(source, _)| Arc::clone(source))
    }

    /// Caches a script; `pinned` ones (SCRIPT LOAD) stay until SCRIPT FLUSH.
    pub fn add(&self, sha: &str, source: &[u8], pinned: bool) {
        let mut cache = self.lock();
        if let Some((_, was_pinned)) = cache.scripts.get_mut(sha) {
            *was_pinned |= pinned;
            return;
        }
        if cache.bytes > Self::MAX_BYTES {
            cache.scripts.retain(|_, (_, pinned)| *pinned);
            cache.bytes = cache.scripts.values().map(|(source, _)| source.len()).sum();
        }
        cache.bytes += source.len();
        cache.scripts.insert(sha.to_owned(), (source.into(), pinned));
    }

    /// Clears the cache (SCRIPT FLUSH).
    pub fn clear(&self) {
        *self.lock() = Entries::default();
    }

    /// Number of cached scripts.
    pub fn len(&self) -> usize {
        self.lock().scripts.len()
    }

    /// True if the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
