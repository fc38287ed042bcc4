//! What happened, as a running checksum of everything and the newest lines of it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lines kept for whoever asks why.
const KEPT: usize = 50_000;

/// Shared by everybody in a world.
#[derive(Clone, Default)]
pub struct Trace {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    now_ms: u64,
    hash: u64,
    lines: VecDeque<String>,
    count: u64,
}

impl Trace {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_now(&self, now_ms: u64) {
        self.inner().now_ms = now_ms;
    }

    /// The world's time.
    pub fn now_ms(&self) -> u64 {
        self.inner().now_ms
    }

    /// Takes something down.
    pub fn note(&self, what: fmt::Arguments<'_>) {
        let mut inner = self.inner();
        let line = format!("{:>7} {what}", inner.now_ms);
        // FNV-1a: order and content count, strength does not.
        let mut hash = inner.hash ^ 0xcbf2_9ce4_8422_2325;
        for byte in line.as_bytes() {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        inner.hash = hash;
        inner.count += 1;
        if inner.lines.len() == KEPT {
            inner.lines.pop_front();
        }
        inner.lines.push_back(line);
    }

    /// The checksum of everything so far.
    pub fn hash(&self) -> u64 {
        self.inner().hash
    }

    /// How many lines there were.
    pub fn count(&self) -> u64 {
        self.inner().count
    }

    /// The newest lines.
    pub fn lines(&self) -> Vec<String> {
        self.inner().lines.iter().cloned().collect()
    }
}
