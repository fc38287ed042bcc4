//! The trace of a run: a running hash over all lines, and the newest lines.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of lines kept.
const KEPT: usize = 50_000;

/// Handle to the trace of a world; clones share it.
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
    /// An empty trace.
    pub fn new() -> Self {
        Self::default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_now(&self, now_ms: u64) {
        self.inner().now_ms = now_ms;
    }

    /// Simulated time.
    pub fn now_ms(&self) -> u64 {
        self.inner().now_ms
    }

    /// Appends a line.
    pub fn record(&self, event: fmt::Arguments<'_>) {
        let mut inner = self.inner();
        let line = format!("{:>7} {event}", inner.now_ms);
        // FNV-1a: depends on order and content; collision resistance is not needed.
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

    /// Hash of all lines so far.
    pub fn hash(&self) -> u64 {
        self.inner().hash
    }

    /// Number of lines so far.
    pub fn count(&self) -> u64 {
        self.inner().count
    }

    /// The lines that are kept.
    pub fn lines(&self) -> Vec<String> {
        self.inner().lines.iter().cloned().collect()
    }
}
