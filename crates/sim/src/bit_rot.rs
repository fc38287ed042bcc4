//! Bit rot at rest: a bit flips on the disk of a host that is off.
//!
//! One host of a run rots repeatedly, and only while every replica of every partition is in sync: this is the
//! condition of the guarantee. While its replicas are repaired no other fault starts, and they must be in sync again
//! within [`REPAIR_MS`]. Later they may become leader with damage that was not detected yet.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use futures_util::FutureExt;
use moim_replica::{PartitionState, keys};
use moim_state::{MemoryRepository, StateRepository};

/// Time limit for all replicas of a host with bit rot to be in sync again.
const REPAIR_MS: u64 = 30_000;
/// Time after a start in which a host detects its damage.
const DETECTION_MS: u64 = 1_500;

/// The data directories of the hosts: each has its own voter id; a replacement gets a new one.
#[derive(Default)]
pub(crate) struct Directories(Mutex<BTreeMap<usize, u64>>);

impl Directories {
    /// Voter id of a host's directory.
    pub(crate) fn voter(&self, host: usize) -> u64 {
        let replaced = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        host as u64 + 1 + 100 * replaced.get(&host).copied().unwrap_or(0)
    }

    /// Records that the host has a new directory.
    pub(crate) fn replace(&self, host: usize) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(host).or_default() += 1;
    }
}

/// True if every replica of every partition is in sync.
pub(crate) fn is_all_in_sync(core: &MemoryRepository) -> bool {
    let records = core.list(keys::PARTITIONS).now_or_never();
    let Some(Ok((_, entries))) = records else { return false };
    let full = |state: PartitionState| state.isr.len() == state.replicas.len() && state.leader.is_some();
    entries.iter().all(|entry| PartitionState::decode(&entry.value).is_ok_and(full))
}

/// Bit rot of one run.
pub(crate) struct BitRot {
    /// The host whose disk rots.
    pub(crate) host: usize,
    /// Start of the repair in progress.
    since_ms: Option<u64>,
    /// True if the next bit flips as soon as no other fault is active.
    pub(crate) is_due: bool,
    pub(crate) flips: u64,
}

impl BitRot {
    pub(crate) fn new(host: usize) -> Self {
        Self { host, since_ms: None, is_due: false, flips: 0 }
    }

    /// A bit has flipped; the host restarts at this time.
    pub(crate) fn on_flip(&mut self, restart_ms: u64) {
        (self.flips, self.is_due) = (self.flips + 1, false);
        self.since_ms = Some(restart_ms);
    }

    /// True if replicas are being repaired; fails if the repair takes longer than [`REPAIR_MS`].
    pub(crate) fn is_repairing(
        &mut self,
        now_ms: u64,
        is_in_sync: impl Fn() -> bool,
    ) -> Result<bool, String> {
        let Some(since_ms) = self.since_ms else { return Ok(false) };
        if now_ms >= since_ms + DETECTION_MS && is_in_sync() {
            self.since_ms = None;
            return Ok(false);
        }
        if now_ms > since_ms + REPAIR_MS {
            return Err(format!("replicas of host {} not in sync {REPAIR_MS} ms after bit rot", self.host));
        }
        Ok(true)
    }
}
