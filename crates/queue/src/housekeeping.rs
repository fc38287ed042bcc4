//! Periodic maintenance: retention, compaction, producer-id expiration, producer snapshots, the scrub.
//!
//! All of it does disk I/O, so it runs on its own thread, one job at a time; the event loops never wait for it.
//! Coordinator timers run on the first loop.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashSet;

use moim_journal::Retain;

use crate::broker::Broker;
use crate::compaction::{self, Progress};
use crate::loops::lock;
use crate::partition::Partition;

/// Interval at which the thread checks for due jobs.
const STEP: Duration = Duration::from_millis(200);
/// Interval of producer snapshots, which keep the replay after a restart short.
const SNAPSHOT_MS: u64 = 60_000;

/// Starts the coordinators' timers on this loop and the maintenance thread.
pub(crate) fn spawn(broker: &Arc<Broker>) {
    spawn_timers(broker);
    let shared = Arc::clone(broker);
    let started = std::thread::Builder::new().name("housekeeping".into()).spawn(move || run(&shared));
    match started {
        Ok(thread) => *lock(&broker.housekeeping) = Some(thread),
        Err(error) => {
            tracing::error!(%error, "housekeeping thread start failed");
            broker.shutdown.stop();
        }
    }
}

/// Starts all of it on this loop.
pub(crate) fn spawn_here(broker: &Arc<Broker>) {
    spawn_timers(broker);
    let shared = Arc::clone(broker);
    broker.scope.spawn("housekeeping", async move {
        let mut maintenance = Maintenance::default();
        while !shared.shutdown.is_stopped() {
            maintenance.step(&shared);
            tokio::time::sleep(STEP).await;
        }
    });
}

fn spawn_timers(broker: &Arc<Broker>) {
    let scope = broker.scope.clone();
    let groups = Arc::clone(broker);
    scope.spawn("groups", async move { groups.groups.serve(&groups).await });
    let transactions = Arc::clone(broker);
    scope.spawn("transactions", async move { transactions.transactions.serve(&transactions).await });
    scope.spawn("view", crate::metadata_watch::run(Arc::clone(broker)));
    scope.spawn("roles", Arc::clone(broker).run_role_changes());
}

fn run(broker: &Broker) {
    let mut maintenance = Maintenance::default();
    while !broker.shutdown.is_stopped() {
        maintenance.step(broker);
        std::thread::sleep(STEP);
    }
}

/// Last run and progress of each job.
#[derive(Default)]
struct Maintenance {
    due: Due,
    progress: Progress,
    /// Damage found by the last complete scrub pass, and by the current pass so far.
    damage: BTreeSet<String>,
    found: BTreeSet<String>,
}

impl Maintenance {
    /// Runs the jobs that are due.
    fn step(&mut self, broker: &Broker) {
        let now = broker.clock.monotonic_ms();
        if self.due.retention.is_due(now, broker.options.retention_check_ms) {
            retention(broker);
        }
        if self.due.compaction.is_due(now, broker.options.compaction_check_ms) {
            compact(broker, &mut self.progress);
        }
        if self.due.snapshots.is_due(now, SNAPSHOT_MS) {
            producers(broker);
        }
        let slice = broker.options.scrub_bytes_per_second / (1000 / STEP.as_millis() as u64);
        if slice > 0 {
            let report = broker.store.scrub_step(slice);
            if report.round_done {
                // Damage is logged once: when it is new in a scrub pass.
                self.damage = std::mem::take(&mut self.found);
            }
            for damage in report.damage {
                if !self.damage.contains(&damage) && !self.found.contains(&damage) {
                    tracing::error!(damage, "scrub found damage");
                    broker.metrics.damage.inc();
                }
                self.found.insert(damage);
            }
        }
    }
}

#[derive(Default)]
struct Due {
    retention: Timer,
    compaction: Timer,
    snapshots: Timer,
}

#[derive(Default)]
struct Timer {
    last_ms: u64,
}

impl Timer {
    fn is_due(&mut self, now_ms: u64, every_ms: u64) -> bool {
        let due = now_ms.saturating_sub(self.last_ms) >= every_ms;
        if due {
            self.last_ms = now_ms;
        }
        due
    }
}

fn for_each_partition(broker: &Broker, mut f: impl FnMut(&Arc<Partition>)) {
    for topic in broker.topics.all() {
        for partition in topic.replicas() {
            if broker.shutdown.is_stopped() {
                return;
            }
            f(&partition);
        }
    }
}

fn retention(broker: &Broker) {
    let now_ms = broker.clock.wall_ms();
    for_each_partition(broker, |partition| {
        let config = partition.config.load();
        if partition.journal.end() == partition.journal.start() {
            return;
        }
        partition.journal.roll_if_older(now_ms.saturating_sub(config.segment_ms));
        if !config.delete {
            return;
        }
        let older_than_ms = config.retention_ms.map(|ms| now_ms.saturating_sub(ms));
        if let Some(cutoff) = older_than_ms {
            // An active segment whose records are all expired must not wait until it is full.
            let active = partition.journal.segments().pop();
            if active.is_some_and(|s| (0..cutoff).contains(&s.max_timestamp_ms)) {
                partition.journal.roll_if_older(i64::MAX);
            }
        }
        let retain =
            Retain { older_than_ms, max_bytes: config.retention_bytes, below: partition.high_watermark() };
        let before = partition.journal.start();
        match partition.journal.retain(retain) {
            Ok(start) if start > before => {
                tracing::debug!(
                    topic = %partition.topic, partition = partition.index, start,
                    "log start moved by retention"
                );
                partition.on_log_start();
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(
                    topic = %partition.topic, partition = partition.index, %error,
                    "retention failed; retrying"
                );
            }
        }
    });
}

fn compact(broker: &Broker, progress: &mut Progress) {
    let now_ms = broker.clock.wall_ms();
    let topics: HashSet<u128> = broker.topics.all().iter().map(|t| t.id.0).collect();
    progress.keep_only(&topics);
    for_each_partition(broker, |partition| {
        let config = partition.config.load();
        if !config.compact || partition.journal.end() == partition.journal.start() {
            return;
        }
        partition
            .journal
            .roll_if_older(now_ms.saturating_sub(config.segment_ms.min(config.max_compaction_lag_ms)));
        match compaction::compact(partition, &config, progress.of(partition), now_ms) {
            Ok(Some(done)) => {
                tracing::debug!(
                    topic = %partition.topic, partition = partition.index, keys = done.keys,
                    "log compacted"
                );
                progress.note(partition, done.first_dirty_offset);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(
                    topic = %partition.topic, partition = partition.index, %error,
                    "compaction failed; retrying"
                );
            }
        }
    });
}

fn producers(broker: &Broker) {
    let now_ms = broker.clock.wall_ms();
    for_each_partition(broker, |partition| {
        partition.expire_producers(now_ms, broker.options.producer_id_expiration_ms);
        partition.snapshot_producers();
    });
}
