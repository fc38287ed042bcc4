//! The node's store: opened once, shared by the queue and by Raft, and who is told what it has made durable.
//!
//! Invariant: everything the disk thread reports reaches the one whose tag it carries. Partitions count from 0; the tags
//! from [`RESERVED`] on are the node's own.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use moim_base::metrics::{Gauge, Metrics};
use moim_base::{Clock, TopicId};
use moim_journal::{DurableSink, JournalId, OpenError, RealDisk, Store, StoreOptions};
use moim_raft::{Router, is_raft_journal};
use moim_replica::{Driver, PartitionId};

use crate::config::Config;
use crate::exit::Failure;

/// Tags from here on are not partitions of the queue, but shards of the store.
const SHARDS: u64 = moim_slots::service::TAG;
/// Tags from here on are not partitions.
const RESERVED: u64 = u64::MAX - 1_000;
/// The journals of the coordination group: this tag and the next.
pub(crate) const RAFT_TAG: u64 = RESERVED;
/// The journal of the repository that single nodes used to have.
pub(crate) const LOCAL_TAG: u64 = u64::MAX;

/// The store and what belongs to it.
#[derive(Clone)]
pub(crate) struct Journals {
    /// The store.
    pub(crate) store: Arc<Store>,
    /// Who is told about durable appends.
    pub(crate) progress: Arc<Progress>,
    /// Where Raft's requests and progress go.
    pub(crate) router: Router,
}

/// Deals the journals' progress out: to Raft, and to the broker's loops once there is a broker.
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

    /// From now on the broker hears of its partitions. Nothing was appended to them before.
    pub(crate) fn set_broker(&self, broker: Arc<dyn DurableSink>) {
        assert!(self.broker.set(broker).is_ok(), "a node has one broker");
    }

    /// From now on the driver hears of what follows.
    pub(crate) fn set_driver(&self, driver: Arc<Driver>) {
        assert!(self.driver.set(driver).is_ok(), "a node has one driver");
    }

    /// The partitions among these that the broker is to hear of: those of copies that follow are the driver's.
    fn of_broker(&self, advanced: &[(u64, i64)]) -> Vec<(u64, i64)> {
        let partitions: Vec<_> = advanced.iter().filter(|(tag, _)| *tag < SHARDS).copied().collect();
        match self.driver.get() {
            Some(driver) => driver.on_durable_following(&partitions),
            None => partitions,
        }
    }

    /// From now on the store hears of its shards.
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
    /// Recovers what the last run left and starts the disk thread. Blocks.
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

    /// Copies of partitions in which damage was found. The journals have to be open.
    pub(crate) fn damaged(&self) -> Vec<PartitionId> {
        let partition = |id: JournalId| PartitionId { topic: TopicId(id.incarnation), index: id.part };
        let damaged = self.store.damaged().into_iter().filter(|id| !is_raft_journal(id.incarnation));
        damaged.map(partition).collect()
    }

    /// Whether damage was found in the log or the votes of a Raft group.
    pub(crate) fn is_raft_damaged(&self) -> bool {
        self.store.damaged().iter().any(|id| is_raft_journal(id.incarnation))
    }

    /// Makes everything durable and marks the folder as closed in order. Blocks.
    pub(crate) fn close(&self) {
        match self.store.close() {
            Ok(()) => tracing::info!("all data is on disk"),
            // The next start recovers as after a crash.
            Err(error) => tracing::error!(%error, "the journals could not be closed in order"),
        }
    }
}

/// What to do with a directory whose commit log, checkpoint or Raft log is damaged. It may have lost acknowledged data and
/// votes, so it is as good as lost: it must neither vote nor count as in sync.
pub(crate) const LOST_DIRECTORY: &str = "in a cluster the other replicas have the data: move the data directory away, \
    run `moim cluster replace` for this node and start it with an empty directory; a node alone needs a backup";

/// Why the journals of a data directory cannot be opened.
pub(crate) struct RecoveryFailure {
    /// What the operator reads.
    pub(crate) failure: Failure,
    /// The commit log or the checkpoint is damaged: acknowledged records and votes may be missing.
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
            "recovery found damage; the journal is readable around it and takes no appends"
        );
    }
    for file in &report.moved_aside {
        tracing::warn!(file, "recovery moved a file aside that it does not know");
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

/// Gauges that are read when somebody asks.
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
    struct Heard(Mutex<Vec<(u64, i64)>>);

    impl DurableSink for Heard {
        fn on_durable(&self, advanced: &[(u64, i64)]) {
            self.0.lock().unwrap().extend_from_slice(advanced);
        }
    }

    #[test]
    fn the_broker_hears_of_its_partitions_and_of_nothing_else() {
        let progress = Progress::new(Router::new());
        progress.on_durable(&[(RAFT_TAG, 1)]);
        let heard = Arc::new(Heard::default());
        progress.set_broker(heard.clone());
        progress.on_durable(&[(RAFT_TAG, 2), (LOCAL_TAG, 3)]);
        progress.on_durable(&[(0, 4), (RAFT_TAG + 1, 5), (7, 6)]);
        progress.on_durable(&[(1, 7)]);
        assert_eq!(*heard.0.lock().unwrap(), [(0, 4), (7, 6), (1, 7)]);
    }
}
