//! The assignment worker: acquires the partitions assigned to this member, hands over the partitions it must
//! release, and stops when its membership ends.
//!
//! Order per partition: acquired (the record names this member) → hand-off loaded →
//! [`PartitionHandler::on_assigned`] → … → [`PartitionHandler::on_revoked`] has returned (processing has
//! stopped) → hand-off recorded and partition released, in one compare-and-swap. The next owner therefore
//! never starts before this owner has stopped.
//!
//! Partitions are independent: the records of one partition are applied in order, those of different
//! partitions concurrently. A hand-off that cannot be read or recorded blocks only its own partition.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Mutex as AsyncMutex;

use super::handoff::{Handoff, HandoffError, HandoffStore};
use super::record::{AssignmentRecord, TopologyChange, TopologyEvent};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::fault_injection::{self, Bug};
use crate::keys;
use crate::membership::Membership;
use crate::metrics::seconds;
use crate::repository::{BoxFuture, Compare, Entry, Event, Txn, TxnOutcome};
use crate::session::SessionWatch;

/// Consecutive failures after which an operator alert is logged.
const ALERT_AFTER: u32 = 5;

/// State that an owner records for the next owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HandedOver {
    /// Checkpoint and stage of the work.
    pub handoff: Handoff,
    /// Last offset that the checkpoint includes; -1 for none.
    pub last_offset: i64,
}

/// Callbacks of the application for partition ownership.
pub trait PartitionHandler: Send + Sync + 'static {
    /// This node owns the partition; `handed_over` is the state of the previous owner. Work may start when
    /// this is called.
    fn on_assigned(&self, owned: Owned, handed_over: Option<HandedOver>) -> BoxFuture<'_, ()>;

    /// The partition moves to another node: stop the work on it and return the state for the next owner.
    fn on_revoked<'a>(&'a self, partition: &'a str) -> BoxFuture<'a, HandedOver>;

    /// The partition is lost: stop immediately. Nothing can be recorded any more.
    fn on_lost(&self, partition: &str);
}

/// A partition owned by this node.
#[derive(Clone)]
pub struct Owned {
    group: Arc<str>,
    partition: Arc<str>,
    equipment_ids: Arc<[String]>,
    version: i64,
    session: SessionWatch,
    worker: Arc<Inner>,
}

impl Owned {
    /// Partition id.
    pub fn partition(&self) -> &str {
        &self.partition
    }

    /// Assignment group.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// Equipment of the partition.
    pub fn equipment_ids(&self) -> &[String] {
        &self.equipment_ids
    }

    /// Fencing token, larger than the token of every previous owner; pass it to every system the work writes
    /// to.
    pub fn fencing_token(&self) -> i64 {
        self.version
    }

    /// True while this node owns the partition. Check before each use.
    pub fn is_valid(&self) -> bool {
        let known = self.worker.owned.lock().unwrap_or_else(PoisonError::into_inner);
        self.session.is_valid()
            && known.get(&*self.partition).is_some_and(|held| held.version == self.version)
    }

    /// Records a checkpoint, for recovery after a crash of this process.
    pub async fn checkpoint(&self, state: &HandedOver) -> Result<(), HandoffError> {
        self.worker.record(&self.partition, self.version, state, false).await
    }
}

struct Held {
    version: i64,
    revision: i64,
    record: AssignmentRecord,
}

struct Inner {
    context: Context,
    group: Arc<str>,
    fence: Compare,
    epoch: i64,
    session: SessionWatch,
    handoffs: HandoffStore,
    handler: Arc<dyn PartitionHandler>,
    /// Partitions owned by this node.
    owned: Mutex<BTreeMap<String, Held>>,
    /// Serializes the changes of each partition's record by this process.
    writing: Mutex<HashMap<String, Arc<AsyncMutex<()>>>>,
    /// Start of the wait for the first partition, and whether this member has acquired one.
    began: u64,
    is_at_work: AtomicBool,
}

/// Owns partitions of one group for this node.
pub struct AssignmentWorker {
    inner: Arc<Inner>,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl AssignmentWorker {
    /// Acquires the partitions assigned to this member, until its membership ends.
    pub fn start(
        context: &Context,
        membership: &Membership,
        group: impl Into<Arc<str>>,
        handoffs: HandoffStore,
        handler: Arc<dyn PartitionHandler>,
    ) -> Self {
        let inner = Arc::new(Inner {
            context: context.clone(),
            group: group.into(),
            fence: membership.fence(),
            epoch: membership.epoch(),
            session: membership.session().watcher(),
            handoffs,
            handler,
            owned: Mutex::default(),
            writing: Mutex::default(),
            began: context.clock.monotonic_ns(),
            is_at_work: AtomicBool::new(false),
        });
        let (running, stop) = (Arc::clone(&inner), context.scope.shutdown().clone());
        let task = context.scope.spawn("cluster assignments", async move {
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                _ = running.session.lost() => {}
                () = running.run() => {}
            }
            running.on_all_lost();
        });
        Self { inner, task: Some(task) }
    }

    /// Owned partitions with their fencing tokens.
    pub fn owned(&self) -> BTreeMap<String, i64> {
        let owned = self.inner.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.iter().map(|(partition, held)| (partition.clone(), held.version)).collect()
    }

    /// Hands over all partitions and stops. For a node that leaves.
    pub async fn stop(mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // Ended or aborted: either way it acquires nothing any more.
            let _ = task.await;
        }
        let held: Vec<String> = self.owned().into_keys().collect();
        join_all(held.iter().map(|partition| self.inner.hand_over(partition))).await;
    }
}

impl Drop for AssignmentWorker {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            self.inner.on_all_lost();
        }
    }
}

impl Inner {
    async fn run(self: &Arc<Self>) {
        let prefix = keys::assignments(&self.group);
        let mut backoff = Backoff::default();
        let mut queues = PartitionQueues::default();
        loop {
            if let Ok((revision, entries)) = self.context.repository.list(&prefix).await
                && let Ok(mut watch) = self.context.repository.watch(&prefix, revision + 1).await
            {
                backoff.reset();
                let mut listed = HashSet::new();
                for entry in entries {
                    if let Some(partition) = entry.key.strip_prefix(&prefix).map(keys::name) {
                        listed.insert(partition.clone());
                        queues.push(self, partition, Some(entry));
                    }
                }
                // Deleted while no watch was open.
                for partition in self.partitions().into_iter().filter(|held| !listed.contains(held)) {
                    queues.push(self, partition, None);
                }
                loop {
                    tokio::select! {
                        biased;
                        () = queues.next(self), if !queues.running.is_empty() => {}
                        event = watch.next() => {
                            let Some(Ok(event)) = event else { break };
                            let (key, entry) = match event {
                                Event::Put(entry) => (entry.key.clone(), Some(entry)),
                                Event::Delete { key, .. } => (key, None),
                            };
                            if let Some(partition) = key.strip_prefix(&prefix) {
                                queues.push(self, keys::name(partition), entry);
                            }
                        }
                    }
                }
            }
            backoff.pause().await;
        }
    }

    /// Applies the newest record of a partition; `None` for a deleted record.
    async fn on_change(self: &Arc<Self>, partition: &str, entry: Option<Entry>) {
        match entry {
            Some(entry) => self.on_record(partition, &entry).await,
            None => self.on_partition_lost(partition),
        }
    }

    fn partitions(&self) -> Vec<String> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    async fn on_record(self: &Arc<Self>, partition: &str, entry: &Entry) {
        let record = match AssignmentRecord::from_bytes(&entry.value) {
            Ok(record) => record,
            Err(reason) => {
                self.context.events.publish(ClusterEvent::Malformed { key: entry.key.clone(), reason });
                return self.on_partition_lost(partition);
            }
        };
        let me = &*self.context.node_id;
        let held = self.held(partition);
        if held.as_ref().is_some_and(|(_, revision)| *revision >= entry.mod_revision) {
            return; // own write, or stale
        }
        let is_ours = record.owner_node_id == me && record.owner_epoch == self.epoch;
        if let Some((version, _)) = held {
            if is_ours && record.version == version {
                let moves = is_leaving(&record, me);
                self.remember(partition, entry.mod_revision, record);
                if moves {
                    self.hand_over(partition).await;
                }
                return;
            }
            self.on_partition_lost(partition);
        }
        if record.owner_node_id.is_empty() && record.target_node_id == me {
            self.acquire(partition, entry, record).await;
        } else if is_ours {
            self.on_recorded_as_owner(partition, &entry.key).await;
        } else if !record.owner_node_id.is_empty() && record.target_node_id.is_empty() {
            let event = TopologyEvent::new(&self.group, partition, TopologyChange::Moved, &record);
            self.context.events.publish(ClusterEvent::Topology(event));
        }
    }

    /// The record names this member as owner, and the partition is not held: it was acquired by an attempt
    /// whose reply was lost, or it was released since and this record is stale. Only a read of the store can
    /// distinguish the two.
    async fn on_recorded_as_owner(self: &Arc<Self>, partition: &str, key: &str) {
        let mut backoff = Backoff::default();
        let entry = loop {
            match self.context.repository.get(key).await {
                Ok(Some(entry)) => break entry,
                Ok(None) => return,
                Err(_) => backoff.pause().await,
            }
        };
        if let Ok(record) = AssignmentRecord::from_bytes(&entry.value)
            && *record.owner_node_id == *self.context.node_id
            && record.owner_epoch == self.epoch
        {
            self.adopt(partition, entry.mod_revision, record).await;
        }
    }

    fn held(&self, partition: &str) -> Option<(i64, i64)> {
        let owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.get(partition).map(|held| (held.version, held.revision))
    }

    fn remember(&self, partition: &str, revision: i64, record: AssignmentRecord) {
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let held = Held { version: record.version, revision, record };
        owned.insert(partition.to_owned(), held);
        self.context.metrics.partitions_owned.set(i64::try_from(owned.len()).unwrap_or(i64::MAX));
    }

    fn forget(&self, partition: &str) -> Option<AssignmentRecord> {
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let held = owned.remove(partition);
        self.context.metrics.partitions_owned.set(i64::try_from(owned.len()).unwrap_or(i64::MAX));
        held.map(|held| held.record)
    }

    async fn acquire(self: &Arc<Self>, partition: &str, entry: &Entry, mut record: AssignmentRecord) {
        record.owner_node_id = self.context.node_id.to_string();
        record.owner_epoch = self.epoch;
        record.target_node_id.clear();
        record.version = record.next_version(entry.mod_revision);
        record.updated_at = self.context.clock.wall_ms();
        let txn = Txn::new()
            .when(Compare::ModRevision(entry.key.clone(), entry.mod_revision))
            .when(self.fence.clone())
            .put(&entry.key, record.to_bytes());
        let mut backoff = Backoff::default();
        loop {
            match self.context.repository.txn(txn.clone()).await {
                Ok(TxnOutcome::Done { revision }) => return self.adopt(partition, revision, record).await,
                // Planned again, or committed by an attempt whose reply was lost: the watch delivers the
                // result.
                Ok(TxnOutcome::Conflict { .. }) => return,
                Err(error) if error.is_retryable() => backoff.pause().await,
                Err(error) => return tracing::warn!(%error, partition, "partition acquisition failed"),
            }
        }
    }

    /// The record names this member as owner: loads the hand-off and starts the work.
    async fn adopt(self: &Arc<Self>, partition: &str, revision: i64, record: AssignmentRecord) {
        let began = self.context.clock.monotonic_ns();
        let mut backoff = Backoff::default();
        let now = self.context.clock.wall_ms();
        let handed_over = loop {
            let Some(stored) = &record.workflow_handoff else { break None };
            if self.handoffs.is_expired(record.updated_at, now) {
                self.alert(partition, &backoff, "hand-off is over the limit of its age and is not used");
                break None;
            }
            match self.handoffs.load(stored).await {
                Ok(handoff) => break Some(HandedOver { handoff, last_offset: record.last_offset }),
                Err(error) => {
                    self.context.metrics.handoff_retries.inc();
                    self.alert(partition, &backoff, &error.to_string());
                    // An unreadable hand-off may be repaired or become readable; a start without it would
                    // lose it.
                    backoff.pause().await;
                    let now = self.context.repository.get(&keys::assignment(&self.group, partition)).await;
                    if now.is_ok_and(|now| now.is_none_or(|now| now.mod_revision != revision)) {
                        return; // a newer record is queued behind this one
                    }
                }
            }
        };
        let owned = Owned {
            group: Arc::clone(&self.group),
            partition: partition.into(),
            equipment_ids: record.equipment_ids.clone().into(),
            version: record.version,
            session: self.session.clone(),
            worker: Arc::clone(self),
        };
        let event = TopologyEvent::new(&self.group, partition, TopologyChange::Assigned, &record);
        let moves = is_leaving(&record, &self.context.node_id);
        self.remember(partition, revision, record);
        self.context.events.publish(ClusterEvent::Topology(event));
        self.handler.on_assigned(owned, handed_over).await;
        let now = self.context.clock.monotonic_ns();
        self.context.metrics.assigned_to_ready_time.observe(seconds(now.saturating_sub(began)));
        if !self.is_at_work.swap(true, Ordering::SeqCst) {
            self.context.metrics.join_to_rebalance_time.observe(seconds(now.saturating_sub(self.began)));
        }
        if moves {
            self.hand_over(partition).await;
        }
    }

    /// Drains a partition, records its hand-off and releases it.
    async fn hand_over(self: &Arc<Self>, partition: &str) {
        let Some((version, _)) = self.held(partition) else { return };
        // Without a membership this node owns nothing, and the store would reject the write.
        if !self.session.is_valid() {
            return self.on_partition_lost(partition);
        }
        let state = self.handler.on_revoked(partition).await;
        let mut backoff = Backoff::default();
        loop {
            match self.record(partition, version, &state, true).await {
                Ok(()) => return,
                Err(HandoffError::NotOwner(_)) => return self.on_partition_lost(partition),
                Err(_) if !self.session.is_valid() => return self.on_partition_lost(partition),
                Err(error) => {
                    self.context.metrics.handoff_retries.inc();
                    self.alert(partition, &backoff, &error.to_string());
                    if matches!(error, HandoffError::TooLarge { .. }) {
                        // A retry cannot fit either. The partition is kept, not dropped: the operator
                        // decides.
                        return;
                    }
                    backoff.pause().await;
                }
            }
        }
    }

    fn alert(&self, partition: &str, backoff: &Backoff, reason: &str) {
        let failures = backoff.failures() + 1;
        if failures.is_multiple_of(ALERT_AFTER) || reason.contains("over the limit") {
            tracing::warn!(partition, failures, reason, "hand-off failed repeatedly");
            self.context.events.publish(ClusterEvent::HandoffFailing {
                group: self.group.to_string(),
                partition: partition.to_owned(),
                failures,
                reason: reason.to_owned(),
            });
        }
    }

    /// Records a hand-off if this node still owns the partition at `version`; with `release` the partition
    /// is released in the same transaction.
    async fn record(
        self: &Arc<Self>,
        partition: &str,
        version: i64,
        state: &HandedOver,
        release: bool,
    ) -> Result<(), HandoffError> {
        let writing = {
            let mut writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(writing.entry(partition.to_owned()).or_default())
        };
        let _one_at_a_time = writing.lock().await;
        let began = self.context.clock.monotonic_ns();
        let stored = self.handoffs.save(&self.group, partition, &state.handoff).await?;
        self.context.metrics.handoff_bytes.observe(state.handoff.checkpoint.len() as f64);
        let key = keys::assignment(&self.group, partition);
        loop {
            let not_owner = || HandoffError::NotOwner(partition.to_owned());
            let Some(entry) = self.context.repository.get(&key).await? else { return Err(not_owner()) };
            let mut record = AssignmentRecord::from_bytes(&entry.value)
                .map_err(|reason| HandoffError::Damaged(format!("{key}: {reason}")))?;
            let released = record.owner_node_id.is_empty()
                && record.version == version
                && record.workflow_handoff.as_ref() == Some(&stored);
            if release && released {
                // Released by an attempt whose reply was lost.
                self.on_released(partition, &record);
                return Ok(());
            }
            let is_ours = *record.owner_node_id == *self.context.node_id
                && record.owner_epoch == self.epoch
                && record.version == version;
            if !is_ours {
                return Err(not_owner());
            }
            let kept = !(release && fault_injection::is_injected(Bug::NoHandoff));
            record.workflow_handoff = kept.then(|| stored.clone());
            record.last_offset = if kept { state.last_offset } else { -1 };
            record.updated_at = self.context.clock.wall_ms();
            if release {
                record.owner_node_id.clear();
                record.owner_epoch = 0;
            }
            let txn = Txn::new()
                .when(Compare::ModRevision(key.clone(), entry.mod_revision))
                .when(self.fence.clone())
                .put(&key, record.to_bytes());
            match self.context.repository.txn(txn).await? {
                TxnOutcome::Done { revision } => {
                    let took = self.context.clock.monotonic_ns().saturating_sub(began);
                    self.context.metrics.handoff_time.observe(seconds(took));
                    self.handoffs.sweep(&self.group, partition, Some(&stored)).await;
                    if release {
                        self.on_released(partition, &record);
                    } else {
                        self.on_recorded(partition, revision, record);
                    }
                    return Ok(());
                }
                TxnOutcome::Conflict { .. } if !self.session.is_valid() => return Err(not_owner()),
                // The leader wrote a target concurrently: retry.
                TxnOutcome::Conflict { current, .. } if current.get(1).is_some_and(Option::is_none) => {
                    return Err(not_owner());
                }
                TxnOutcome::Conflict { .. } => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }

    /// The watch delivers the checkpoint's own record; a target that the leader wrote before it must not be
    /// missed.
    fn on_recorded(self: &Arc<Self>, partition: &str, revision: i64, record: AssignmentRecord) {
        let is_settled = !is_leaving(&record, &self.context.node_id);
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = owned.get_mut(partition).filter(|held| held.version == record.version) {
            // A partition with a target stays unseen, so that the watch acts on it.
            if is_settled {
                held.revision = held.revision.max(revision);
            }
            held.record = record;
        }
    }

    fn on_released(&self, partition: &str, record: &AssignmentRecord) {
        if self.forget(partition).is_some() {
            let event = TopologyEvent::new(&self.group, partition, TopologyChange::Revoked, record);
            self.context.events.publish(ClusterEvent::Topology(event));
        }
    }

    fn on_partition_lost(&self, partition: &str) {
        if let Some(record) = self.forget(partition) {
            self.handler.on_lost(partition);
            let event = TopologyEvent::new(&self.group, partition, TopologyChange::Lost, &record);
            self.context.events.publish(ClusterEvent::Topology(event));
        }
    }

    fn on_all_lost(&self) {
        let held: Vec<String> = {
            let owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
            owned.keys().cloned().collect()
        };
        for partition in held {
            self.on_partition_lost(&partition);
        }
    }
}

/// True if the owner `me` must hand the partition over.
fn is_leaving(record: &AssignmentRecord, me: &str) -> bool {
    record.is_retired || !(record.target_node_id.is_empty() || record.target_node_id == me)
}

/// Record changes in progress, one for each partition, and the newest record queued behind each.
#[derive(Default)]
struct PartitionQueues {
    running: FuturesUnordered<BoxFuture<'static, String>>,
    /// Partitions with a change in progress; queued is the newest record, or an inner `None` for a deletion.
    waiting: HashMap<String, Option<Option<Entry>>>,
}

impl PartitionQueues {
    /// A record is the complete state: a newer record replaces a queued one.
    fn push(&mut self, worker: &Arc<Inner>, partition: String, entry: Option<Entry>) {
        match self.waiting.get_mut(&partition) {
            Some(waiting) => *waiting = Some(entry),
            None => {
                self.waiting.insert(partition.clone(), None);
                let worker = Arc::clone(worker);
                self.running.push(Box::pin(async move {
                    worker.on_change(&partition, entry).await;
                    partition
                }));
            }
        }
    }

    /// Waits for a change to complete and starts the queued one. Cancel-safe.
    async fn next(&mut self, worker: &Arc<Inner>) {
        let Some(partition) = self.running.next().await else { return };
        if let Some(Some(entry)) = self.waiting.remove(&partition) {
            self.push(worker, partition, entry);
        }
    }
}
