//! The node's journal store: opened once, shared by the queue, the store and Raft, and the dispatch of its durability
//! notifications.
//!
//! Invariant: every notification of the disk thread reaches the owner of its tag. Tags of queue partitions count from
//! 0; the tags from [`RESERVED`] on belong to the node.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use moim_base::metrics::{Gauge, Metrics};
use moim_base::{Clock, TopicId};
use moim_journal::{DurableSink, JournalId, OpenError, RealDisk, Store, StoreOptions};
use moim_raft::{Router, is_raft_journal};
use moim_replica::{Driver, PartitionId};

use crate::config::Config;
use crate::exit::Failure;

/// First tag of the shards of the store.
const SHARDS: u64 = moim_slots::service::TAG;
/// First tag of the node's own journals.
const RESERVED: u64 = u64::MAX - 1_000;
/// First of the two tags of the coordination group's journals.
pub(crate) const RAFT_TAG: u64 = RESERVED;

/// The journal store and the receivers of its notifications.
#[derive(Clone)]
pub(crate) struct Journals {
    /// The journal store.
    pub(crate) store: Arc<Store>,
    /// Dispatcher of durability notifications.
    pub(crate) progress: Arc<Progress>,
    /// Receiver of Raft requests and notifications.
    pub(crate) router: Router,
}

/// Dispatches durability notifications by tag: to Raft, the broker, the replica driver and the store.
pub(crate) struct Progress {
    router: Router,
    broker: OnceLock<Arc<dyn DurableSink>>,
    driver: OnceLock<Arc<Driver>>,
    slots: OnceLock<Arc<dyn DurableSink>>,
}

impl Progress {
    fn new(router: Router) -> Self {
        Self { router, broker: OnceLock::new(), driver: OnceLock::new(), slots: OnceLock::new() }
    }

    /// Sets the broker. Nothing was appended to its partitions before.
    pub(crate) fn set_broker(&self, broker: Arc<dyn DurableSink>) {
        assert!(self.broker.set(broker).is_ok(), "a node has one broker");
    }

    /// Sets the replica driver, which gets the notifications of following replicas.
    pub(crate) fn set_driver(&self, driver: Arc<Driver>) {
        assert!(self.driver.set(driver).is_ok(), "a node has one driver");
    }

    /// The notifications for the broker; those of following replicas go to the driver.
    fn of_broker(&self, advanced: &[(u64, i64)]) -> Vec<(u64, i64)> {
        let partitions: Vec<_> = advanced.iter().filter(|(tag, _)| *tag < SHARDS).copied().collect();
        match self.driver.get() {
            Some(driver) => driver.on_durable_following(&partitions),
            None => partitions,
        }
    }

    /// Sets the store.
    pub(crate) fn set_slots(&self, slots: Arc<dyn DurableSink>) {
        assert!(self.slots.set(slots).is_ok(), "a node has one store");
    }
}

impl DurableSink for Progress {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        if let Some(slots) = self.slots.get()
            && advanced.iter().any(|(tag, _)| is_shard(*tag))
        {
            slots.on_durable(advanced);
        }
        let ours = advanced.iter().filter(|(tag, _)| *tag >= RESERVED).count();
        if ours > 0 {
            self.router.on_durable(advanced);
        }
        let Some(broker) = self.broker.get() else { return };
        let partitions = self.of_broker(advanced);
        if !partitions.is_empty() {
            broker.on_durable(&partitions);
        }
    }
}

fn is_shard(tag: u64) -> bool {
    (SHARDS..RESERVED).contains(&tag)
}

impl Journals {
    /// Recovers the journals and starts the disk thread. Blocks.
    pub(crate) fn open(
        path: &Path,
        config: &Config,
        clock: Arc<dyn Clock>,
        metrics: &Metrics,
    ) -> Result<Self, RecoveryFailure> {
        let store = Store::open(path, Arc::new(RealDisk), clock, store_options(config))
            .map_err(|error| RecoveryFailure::new(path, &error))?;
        let store = Arc::new(store);
        report_recovery(&store);
        let router = Router::new();
        let progress = Arc::new(Progress::new(router.clone()));
        store.set_sink(Arc::clone(&progress) as Arc<dyn DurableSink>);
        store.start();
        register_metrics(metrics, &store);
        Ok(Self { store, progress, router })
    }

    /// Damaged replicas. The journals must be open.
    pub(crate) fn damaged(&self) -> Vec<PartitionId> {
        let partition = |id: JournalId| PartitionId { topic: TopicId(id.incarnation), index: id.part };
        let damaged = self.store.damaged().into_iter().filter(|id| !is_raft_journal(id.incarnation));
        damaged.map(partition).collect()
    }

    /// True if the log or the vote journal of a Raft group is damaged.
    pub(crate) fn is_raft_damaged(&self) -> bool {
        self.store.damaged().iter().any(|id| is_raft_journal(id.incarnation))
    }

    /// Syncs all journals and marks the shutdown as clean. Blocks.
    pub(crate) fn close(&self) {
        match self.store.close() {
            Ok(()) => tracing::info!("journals closed"),
            // The next start recovers as after a crash.
            Err(error) => tracing::error!(%error, "journals not closed cleanly"),
        }
    }
}

/// Remedy for a data directory whose commit log, checkpoint or Raft log is damaged. It may have lost acknowledged data
/// and votes, so it counts as lost: it must neither vote nor be in sync.
pub(crate) const LOST_DIRECTORY: &str = "in a cluster the other replicas have the data: move the data directory away, \
    run `moim cluster replace` for this node and start it with an empty directory; a node alone needs a backup";

/// Failed recovery of a data directory.
pub(crate) struct RecoveryFailure {
    /// The message for the operator.
    pub(crate) failure: Failure,
    /// True if the commit log or the checkpoint is damaged: acknowledged records and votes may be missing.
    pub(crate) is_damage: bool,
}

impl RecoveryFailure {
    fn new(path: &Path, error: &OpenError) -> Self {
        let is_damage = matches!(error, OpenError::CommitLogDamaged { .. } | OpenError::Damaged { .. });
        Self { failure: cannot_recover(path, error), is_damage }
    }
}

fn cannot_recover(path: &Path, error: &OpenError) -> Failure {
    let failure = Failure::error(format!("cannot recover {}: {error}", path.display()));
    match error {
        OpenError::CommitLogDamaged { .. } | OpenError::Damaged { .. } => failure.hint(LOST_DIRECTORY),
        OpenError::TooOld { .. } => {
            failure.hint("start it once with a moim in between that reads this version, then with this one")
        }
        OpenError::TooNew { .. } => failure.hint("run the newer moim that wrote it"),
        OpenError::Locked | OpenError::Io { .. } => failure,
    }
}

fn store_options(config: &Config) -> StoreOptions {
    StoreOptions {
        commit_file_bytes: config.journal.commit_file_bytes,
        recent_bytes: usize::try_from(config.journal.recent_bytes).unwrap_or(usize::MAX),
        bypass_bytes: usize::try_from(config.journal.bypass_bytes).unwrap_or(usize::MAX),
        min_free_bytes: config.journal.min_free_bytes,
        ..StoreOptions::default()
    }
}

fn report_recovery(store: &Store) {
    let report = store.recovery();
    for damage in &report.damage {
        tracing::error!(
            damage,
            "journal damage found by recovery; the journal is readable around it and rejects appends"
        );
    }
    for file in &report.moved_aside {
        tracing::warn!(file, "unknown file moved aside by recovery");
    }
    tracing::info!(
        clean = store.was_clean(),
        bytes = report.bytes,
        frames = report.frames,
        cut_bytes = report.cut_bytes,
        ms = report.duration_ns / 1_000_000,
        "journals recovered"
    );
}

/// Registers gauges that are sampled at scrape time.
fn register_metrics(metrics: &Metrics, store: &Arc<Store>) {
    let gauge = |name: &str, help: &str| {
        let gauge: Gauge = Gauge::default();
        metrics.register(name, help, gauge.clone());
        gauge
    };
    let syncs = gauge("journal_syncs", "Syncs of the commit log since the start");
    let sync_ns = gauge("journal_last_sync_nanoseconds", "How long the last sync took");
    let ring = gauge("journal_recent_bytes", "Memory that holds recent records");
    let dirty = gauge("journal_dirty_bytes", "Records that their segment does not hold yet");
    let free = gauge("journal_free_bytes", "Free space on the disk");
    let full = gauge("journal_full", "1 while the disk is too full to take records");
    let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    let store = Arc::clone(store);
    metrics.before_render(move || {
        let stats = store.stats();
        syncs.set(number(stats.syncs));
        sync_ns.set(number(stats.last_sync_ns));
        ring.set(number(stats.ring_bytes));
        dirty.set(number(stats.dirty_bytes));
        free.set(number(stats.free_bytes));
        full.set(i64::from(stats.full));
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Received(Mutex<Vec<(u64, i64)>>);

    impl DurableSink for Received {
        fn on_durable(&self, advanced: &[(u64, i64)]) {
            self.0.lock().unwrap().extend_from_slice(advanced);
        }
    }

    #[test]
    fn broker_gets_notifications_of_its_partitions_only() {
        let progress = Progress::new(Router::new());
        progress.on_durable(&[(RAFT_TAG, 1)]);
        let received = Arc::new(Received::default());
        progress.set_broker(received.clone());
        progress.on_durable(&[(RAFT_TAG, 2), (u64::MAX, 3)]);
        progress.on_durable(&[(0, 4), (RAFT_TAG + 1, 5), (7, 6)]);
        progress.on_durable(&[(1, 7)]);
        assert_eq!(*received.0.lock().unwrap(), [(0, 4), (7, 6), (1, 7)]);
    }
}
