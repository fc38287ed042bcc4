//! The script cache of a node: the text of scripts by their SHA-1, and which of them have been quick so far.

use std::sync::Arc;

use hashbrown::HashMap;

use super::MAX_COMPILED;

/// The scripts that this node knows, by their names.
#[derive(Default)]
pub struct Scripts {
    known: std::sync::Mutex<Known>,
}

#[derive(Default)]
struct Known {
    scripts: HashMap<String, (Arc<[u8]>, bool)>,
    bytes: usize,
    /// How many times in a row a script was quick.
    quick: HashMap<String, u8>,
}

impl Scripts {
    /// Bytes of scripts above which those that only EVAL brought are forgotten.
    const MAX_BYTES: usize = 64 << 20;

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// A script that was quick this often is trusted to be quick again.
    const TRUSTED: u8 = 3;
    /// What is quick.
    const QUICK_NS: u64 = 300_000;

    /// Whether a script may run on an event loop.
    pub fn is_quick(&self, sha: &str) -> bool {
        self.lock().quick.get(sha).is_some_and(|times| *times >= Self::TRUSTED)
    }

    pub(super) fn on_run(&self, sha: &str, took_ns: u64) {
        let mut known = self.lock();
        if known.quick.len() > MAX_COMPILED {
            known.quick.clear();
        }
        let times = known.quick.entry_ref(sha).or_insert(0);
        *times = if took_ns <= Self::QUICK_NS { times.saturating_add(1) } else { 0 };
    }

    /// The text of a script.
    pub fn get(&self, sha: &str) -> Option<Arc<[u8]>> {
        self.lock().scripts.get(sha).map(|(source, _)| Arc::clone(source))
    }

    /// Keeps a script; `pinned` ones, of SCRIPT LOAD, are kept until SCRIPT FLUSH.
    pub fn add(&self, sha: &str, source: &[u8], pinned: bool) {
        let mut known = self.lock();
        if let Some((_, was_pinned)) = known.scripts.get_mut(sha) {
            *was_pinned |= pinned;
            return;
        }
        if known.bytes > Self::MAX_BYTES {
            known.scripts.retain(|_, (_, pinned)| *pinned);
            known.bytes = known.scripts.values().map(|(source, _)| source.len()).sum();
        }
        known.bytes += source.len();
        known.scripts.insert(sha.to_owned(), (source.into(), pinned));
    }

    /// Forgets all.
    pub fn clear(&self) {
        *self.lock() = Known::default();
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.lock().scripts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
