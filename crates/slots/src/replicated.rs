//! A shard's journal in a cluster: one replica under the replica driver.
//!
//! The driver reports role, commit and truncation to the shard ([`ShardReplica`]) and appends fetched frames while this
//! node follows; the shard appends through [`ReplicatedLog`] while it leads. Callbacks run under the replica's lock, so
//! they only change atomics and wake the shard task, which does the rest.

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

/// The journal of a shard, appended to through its replica.
pub struct ReplicatedLog {
    journal: Arc<Journal>,
    store: Arc<Store>,
    replica: OnceLock<Arc<Replicated>>,
}

impl ReplicatedLog {
    /// A journal that is not attached to the replica driver yet.
    pub fn new(journal: Arc<Journal>, store: Arc<Store>) -> Self {
        Self { journal, store, replica: OnceLock::new() }
    }

    /// Attaches the replica of the driver.
    pub fn attach(&self, replica: Arc<Replicated>) {
        assert!(self.replica.set(replica).is_ok(), "a journal is attached once");
    }

    /// The replica; `None` before it is attached.
    pub fn replica(&self) -> Option<&Arc<Replicated>> {
        self.replica.get()
    }
}

impl ShardLog for ReplicatedLog {
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError> {
        let replica = self.replica.get().ok_or(LogError::NotLeader)?;
        let appended = replica.lead(false, |leads| {
            if leads.0 != epoch {
                return Err(LogError::NotLeader);
            }
            match log::append(&self.journal, base, epoch, time_ms, payload) {
                Ok(()) => Ok(()),
                Err(AppendError::Busy | AppendError::Full | AppendError::Io(_)) => Err(LogError::Busy),
                Err(error) => {
                    tracing::error!(%error, "shard journal append failed");
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

    fn has_min_isr(&self) -> bool {
        self.replica.get().is_some_and(|replica| replica.admit().is_ok())
    }

    fn leader_epoch(&self) -> Option<i32> {
        self.replica.get()?.leader_epoch().map(|epoch| epoch.0)
    }

    fn is_follower(&self) -> bool {
        self.replica.get().is_some_and(|replica| replica.leader().is_some())
    }

    fn replicas_with(&self, end: i64) -> usize {
        let Some(replica) = self.replica.get() else { return 0 };
        let Some(record) = replica.record() else { return 0 };
        let has = |node: &BrokerId| replica.progress_of(*node).is_some_and(|(written, _)| written.0 >= end);
        record.value.replicas.iter().filter(|node| has(node)).count()
    }
}

/// Receives the callbacks of the replica driver for one shard.
pub struct ShardReplica {
    shard: Arc<Shard>,
    clock: Arc<dyn Clock>,
    /// Set when this node is no replica of the shard any more; the replica is to be deleted.
    dropped: Arc<AtomicBool>,
}

impl ShardReplica {
    /// The callbacks for `shard`. `dropped` is set when this node is no replica of it any more.
    pub fn new(shard: Arc<Shard>, clock: Arc<dyn Clock>, dropped: Arc<AtomicBool>) -> Self {
        Self { shard, clock, dropped }
    }
}

impl Owner for ShardReplica {
    fn on_lead(&self, epoch: LeaderEpoch, high_watermark: Offset) {
        // The previous primary may hold the serving right for this long; the service revokes the wait if there is none.
        let wait_ms = FenceTuning::default().length_ms;
        self.shard.set_serving_right_from(epoch.0, self.clock.monotonic_ms() + wait_ms);
        self.shard.on_committed(high_watermark.0);
        self.shard.task_wakeup.notify_one();
    }

    fn on_follow(&self, _leader: BrokerId, _epoch: LeaderEpoch) {
        self.shard.task_wakeup.notify_one();
    }

    fn on_idle(&self) {
        self.shard.task_wakeup.notify_one();
    }

    fn on_leadership_ended(&self) {
        // Before any other commit: pending replies must not count as committed.
        self.shard.void_pending_replies();
        self.shard.task_wakeup.notify_one();
    }

    fn on_under_min_isr(&self) {}

    fn on_high_watermark(&self, high_watermark: Offset) {
        self.shard.on_committed(high_watermark.0);
    }

    fn on_appended(&self, _frames: &[Frame], _bytes: &Bytes) {}

    fn on_cut(&self, end: Offset) {
        self.shard.on_truncate(end.0);
    }

    fn snapshot(&self) -> Option<Snapshot> {
        crate::snapshot::newest_for_follower(&self.shard)
    }

    fn forget_snapshots(&self) -> std::io::Result<()> {
        crate::snapshot::remove_all(&self.shard)
    }

    fn install(&self, snapshot: Snapshot) -> Result<(), InstallError> {
        crate::snapshot::install(&self.shard, snapshot)
    }

    fn on_drop(&self) {
        self.dropped.store(true, Ordering::Release);
        self.shard.task_wakeup.notify_one();
    }
}
