//! A shard's journal in a cluster: one copy under the replica driver.
//!
//! The driver tells the shard what becomes of its copy ([`Copy`]) and appends what it fetched while this node follows; the
//! shard appends through [`ReplicatedLog`] while it leads. What the driver says arrives under the copy's lock, so it only
//! changes atomics and wakes the keeper; the keeper does the rest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use moim_base::{BrokerId, Clock, LeaderEpoch, Offset};
use moim_journal::{AppendError, Frame, Journal, Store};
use moim_replica::fence::FenceTuning;
use moim_replica::machine::{InstallError, Snapshot};
use moim_replica::{Owner, Replicated};

use crate::log::{self, LogError, ShardLog};
use crate::shard::Shard;

/// The journal of a shard, through its copy.
pub struct ReplicatedLog {
    journal: Arc<Journal>,
    store: Arc<Store>,
    copy: OnceLock<Arc<Replicated>>,
}

impl ReplicatedLog {
    /// Not under the driver yet.
    pub fn new(journal: Arc<Journal>, store: Arc<Store>) -> Self {
        Self { journal, store, copy: OnceLock::new() }
    }

    /// The driver has it from now on.
    pub fn attach(&self, copy: Arc<Replicated>) {
        assert!(self.copy.set(copy).is_ok(), "a journal is attached once");
    }

    /// The copy, once there is one.
    pub fn copy(&self) -> Option<&Arc<Replicated>> {
        self.copy.get()
    }
}

impl ShardLog for ReplicatedLog {
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError> {
        let copy = self.copy.get().ok_or(LogError::NotLeader)?;
        let appended = copy.lead(false, |leads| {
            if leads.0 != epoch {
                return Err(LogError::NotLeader);
            }
            match log::append(&self.journal, base, epoch, time_ms, payload) {
                Ok(()) => Ok(()),
                Err(AppendError::Busy | AppendError::Full | AppendError::Io(_)) => Err(LogError::Later),
                Err(error) => {
                    tracing::error!(%error, "the journal of a shard takes no more");
                    Err(LogError::NotLeader)
                }
            }
        });
        appended.unwrap_or(Err(LogError::NotLeader))
    }

    fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    fn is_full(&self) -> bool {
        self.store.is_full()
    }

    fn admits(&self) -> bool {
        self.copy.get().is_some_and(|copy| copy.admit().is_ok())
    }

    fn leads(&self) -> Option<i32> {
        self.copy.get()?.leader_epoch().map(|epoch| epoch.0)
    }

    fn follows(&self) -> bool {
        self.copy.get().is_some_and(|copy| copy.leader().is_some())
    }

    fn replicas_with(&self, end: i64) -> usize {
        let Some(copy) = self.copy.get() else { return 0 };
        let Some(record) = copy.record() else { return 0 };
        let has = |node: &BrokerId| copy.progress_of(*node).is_some_and(|(written, _)| written.0 >= end);
        record.value.replicas.iter().filter(|node| has(node)).count()
    }
}

/// What the driver tells about a shard's copy.
pub struct Copy {
    shard: Arc<Shard>,
    clock: Arc<dyn Clock>,
    /// The copy is to be deleted.
    dropped: Arc<AtomicBool>,
}

impl Copy {
    /// For this shard. `dropped` is set when this node has no part in it any more.
    pub fn new(shard: Arc<Shard>, clock: Arc<dyn Clock>, dropped: Arc<AtomicBool>) -> Self {
        Self { shard, clock, dropped }
    }
}

impl Owner for Copy {
    fn on_lead(&self, epoch: LeaderEpoch, high_watermark: Offset) {
        // Whoever led before may answer until its right has run out; the service takes this back where nobody can.
        let wait_ms = FenceTuning::default().length_ms;
        self.shard.set_right_from(epoch.0, self.clock.monotonic_ms() + wait_ms);
        self.shard.on_committed(high_watermark.0);
        self.shard.news.notify_one();
    }

    fn on_follow(&self, _leader: BrokerId, _epoch: LeaderEpoch) {
        self.shard.news.notify_one();
    }

    fn on_idle(&self) {
        self.shard.news.notify_one();
    }

    fn on_leadership_ended(&self) {
        // Before anything else can be committed: answers that wait must not be taken for answered.
        self.shard.void_answers();
        self.shard.news.notify_one();
    }

    fn on_under_min_isr(&self) {}

    fn on_high_watermark(&self, high_watermark: Offset) {
        self.shard.on_committed(high_watermark.0);
    }

    fn on_appended(&self, _frames: &[Frame], _bytes: &Bytes) {}

    fn on_cut(&self, end: Offset) {
        self.shard.on_cut(end.0);
    }

    fn snapshot(&self) -> Option<Snapshot> {
        crate::snapshot::kept(&self.shard)
    }

    fn forget_snapshots(&self) -> std::io::Result<()> {
        crate::snapshot::forget(&self.shard)
    }

    fn install(&self, snapshot: Snapshot) -> Result<(), InstallError> {
        crate::snapshot::install(&self.shard, snapshot)
    }

    fn on_drop(&self) {
        self.dropped.store(true, Ordering::Release);
        self.shard.news.notify_one();
    }
}
