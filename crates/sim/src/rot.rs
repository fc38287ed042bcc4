//! Bit rot at rest: a bit flips on the disk of a machine that is off.
//!
//! One machine of a run rots, again and again, and only while every replica of everything is in sync: that is what the
//! promise asks for. While its replicas are repaired nothing else goes wrong, and they must be in sync again within
//! [`REPAIR_MS`]. Later they may lead, with damage that was not found yet.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use futures_util::FutureExt;
use moim_cluster::{MemoryRepository, StateRepository};
use moim_replica::{PartitionState, keys};

/// Within this time a machine whose disk has rotted has everything again.
const REPAIR_MS: u64 = 30_000;
/// After its start a machine needs a while to find out what it lacks.
const LOOK_MS: u64 = 1_500;

/// The data directories of the machines: each has a voter id of its own, and a replaced one a new one.
#[derive(Default)]
pub(crate) struct Directories(Mutex<BTreeMap<usize, u64>>);

impl Directories {
    /// The voter id of a machine's directory.
    pub(crate) fn voter(&self, host: usize) -> u64 {
        let replaced = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        host as u64 + 1 + 100 * replaced.get(&host).copied().unwrap_or(0)
    }

    /// The machine has another directory from now on.
    pub(crate) fn replace(&self, host: usize) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(host).or_default() += 1;
    }
}

/// Whether every replica of every partition is in sync.
pub(crate) fn is_all_in_sync(core: &MemoryRepository) -> bool {
    let records = core.list(keys::PARTITIONS).now_or_never();
    let Some(Ok((_, entries))) = records else { return false };
    let full = |state: PartitionState| state.isr.len() == state.replicas.len() && state.leader.is_some();
    entries.iter().all(|entry| PartitionState::decode(&entry.value).is_ok_and(full))
}

/// Bit rot of one run.
pub(crate) struct Rot {
    /// The machine that rots.
    pub(crate) host: usize,
    /// Since when it is repaired.
    since_ms: Option<u64>,
    /// It rots as soon as nothing else is wrong.
    pub(crate) is_due: bool,
    pub(crate) flips: u64,
}

impl Rot {
    pub(crate) fn new(host: usize) -> Self {
        Self { host, since_ms: None, is_due: false, flips: 0 }
    }

    /// A bit has flipped; the machine starts again at this time.
    pub(crate) fn on_flip(&mut self, restart_ms: u64) {
        (self.flips, self.is_due) = (self.flips + 1, false);
        self.since_ms = Some(restart_ms);
    }

    /// Whether replicas are being repaired; it fails if that takes too long.
    pub(crate) fn is_repairing(
        &mut self,
        now_ms: u64,
        is_in_sync: impl Fn() -> bool,
    ) -> Result<bool, String> {
        let Some(since_ms) = self.since_ms else { return Ok(false) };
        if now_ms >= since_ms + LOOK_MS && is_in_sync() {
            self.since_ms = None;
            return Ok(false);
        }
        if now_ms > since_ms + REPAIR_MS {
            return Err(format!(
                "the replicas of host {} are not in sync {REPAIR_MS} ms after bit rot",
                self.host
            ));
        }
        Ok(true)
    }
}
