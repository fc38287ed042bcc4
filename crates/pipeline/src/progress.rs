//! Counts of what each stage has done in this process, for people to watch. Verdicts never come from here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::latency::Latency;

/// One count per stage.
#[derive(Debug, Default)]
pub struct Counts {
    /// Messages clients have handed over, repeats included.
    pub sent: AtomicU64,
    /// Messages that are safe in the store.
    pub kept: AtomicU64,
    /// Messages that are in the queue.
    pub relayed: AtomicU64,
    /// Messages that were counted for their client.
    pub counted: AtomicU64,
    /// Messages that were counted by their text.
    pub aggregated: AtomicU64,
    /// Messages that went to the dead letters.
    pub dead: AtomicU64,
    /// Messages that went to the dead letters because one before them is missing.
    pub parked: AtomicU64,
    /// Partitions that were read again because of a gap.
    pub reread: AtomicU64,
    /// Messages that went out a second time.
    pub resent: AtomicU64,
    /// Transactions of counters.
    pub transactions: AtomicU64,
    /// Batches of aggregators.
    pub steps: AtomicU64,
    /// Transactions that had to be undone.
    pub aborted: AtomicU64,
    /// How long messages take, where somebody measures it.
    pub latency: OnceLock<Arc<Latency>>,
}

/// Shared by all stages.
pub type Progress = Arc<Counts>;

/// Adds to a count.
pub(crate) fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Ordering::Relaxed);
}

impl Counts {
    /// What a count shows.
    pub fn get(count: &AtomicU64) -> u64 {
        count.load(Ordering::Relaxed)
    }
}
