//! Counts of what each stage has done in this process, for display only. Verdicts are never derived from them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::latency::Latency;

/// One count per stage.
#[derive(Debug, Default)]
pub struct Counts {
    /// Messages received from clients, resends included.
    pub sent: AtomicU64,
    /// Messages persisted in the store.
    pub kept: AtomicU64,
    /// Messages stored in the queue.
    pub relayed: AtomicU64,
    /// Messages that were counted for their client.
    pub counted: AtomicU64,
    /// Messages that were counted by their text.
    pub aggregated: AtomicU64,
    /// Messages written to the dead-letter topic.
    pub dead: AtomicU64,
    /// Messages written to the dead-letter topic because a predecessor is missing.
    pub parked: AtomicU64,
    /// Partitions re-read because of a gap.
    pub reread: AtomicU64,
    /// Messages sent to the queue again.
    pub resent: AtomicU64,
    /// Transactions committed by counters.
    pub transactions: AtomicU64,
    /// Batches committed by aggregators.
    pub steps: AtomicU64,
    /// Aborted transactions.
    pub aborted: AtomicU64,
    /// Message latency, if it is measured.
    pub latency: OnceLock<Arc<Latency>>,
}

/// Shared by all stages.
pub type Progress = Arc<Counts>;

/// Adds to a count.
pub(crate) fn add(count: &AtomicU64, n: u64) {
    count.fetch_add(n, Ordering::Relaxed);
}

impl Counts {
    /// The current value of a count.
    pub fn get(count: &AtomicU64) -> u64 {
        count.load(Ordering::Relaxed)
    }
}
