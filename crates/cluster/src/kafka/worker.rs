//! The Kafka mode worker: one thread, one consumer, and the partitions it owns.
//!
//! Owns the offsets and the assignment records of these partitions, and calls the application's handler. It never
//! writes a record without comparing its revision.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::KafkaResult;
use rdkafka::message::Message as _;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::KafkaElection;
use super::validity::Validity;
use crate::assignment::{
    AssignmentRecord, HandedOver, Handoff, HandoffError, HandoffOptions, HandoffStore, TopologyChange,
    TopologyEvent,
};
use crate::backoff::Backoff;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::keys;
use crate::metrics::seconds;
use crate::repository::{Compare, Txn, TxnOutcome};

/// Timeout of one poll.
const POLL_TIMEOUT: Duration = Duration::from_millis(50);
/// Timeout of one request to Kafka.
pub(super) const KAFKA_TIMEOUT: Duration = Duration::from_secs(3);
/// Consecutive failures between two warnings and `HandoffFailing` events.
pub(super) const ALERT_AFTER: u32 = 5;

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KafkaError {
    /// The Kafka client rejected its settings.
    #[error(transparent)]
    Client(#[from] rdkafka::error::KafkaError),
    /// The thread could not be started.
    #[error(transparent)]
    Thread(#[from] std::io::Error),
}

/// Settings of a [`KafkaWorker`].
#[derive(Clone, Debug)]
pub struct KafkaOptions {
    /// Bootstrap servers, as a comma-separated list.
    pub bootstrap: String,
    /// The consumer group; assignment records are stored under its name.
    pub group: String,
    /// The topics to consume.
    pub topics: Vec<String>,
    /// The equipment of each partition, by its name `topic-number`.
    pub equipment: BTreeMap<String, Vec<String>>,
    /// Further settings of librdkafka.
    pub settings: BTreeMap<String, String>,
    /// Session timeout of the group: a silent member is removed after it.
    pub session_timeout: Duration,
    /// Checkpoint interval while messages arrive.
    pub checkpoint_every: Duration,
    /// Storage limits of hand-offs.
    pub handoffs: HandoffOptions,
}

impl KafkaOptions {
    /// Default settings.
    pub fn new(bootstrap: impl Into<String>, group: impl Into<String>, topics: &[&str]) -> Self {
        Self {
            bootstrap: bootstrap.into(),
            group: group.into(),
            topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
            equipment: BTreeMap::new(),
            settings: BTreeMap::new(),
            session_timeout: Duration::from_secs(10),
            checkpoint_every: Duration::from_millis(500),
            handoffs: HandoffOptions::default(),
        }
    }
}

/// A consumed message.
#[derive(Clone, Copy, Debug)]
pub struct KafkaMessage<'a> {
    /// Partition name, as `topic-number`.
    pub partition: &'a str,
    /// Offset in the partition.
    pub offset: i64,
    /// Message key; `None` if null.
    pub key: Option<&'a [u8]>,
    /// Message value; `None` if null.
    pub value: Option<&'a [u8]>,
}

/// The application's side: called on the worker's thread, one call at a time.
pub trait KafkaHandler: Send + 'static {
    /// The partition was claimed; `handed_over` is the state of the previous owner.
    fn on_assigned(
        &mut self,
        partition: &str,
        equipment: &[String],
        token: i64,
        handed_over: Option<HandedOver>,
    );

    /// Processes a message. An error stops the worker: the next owner of the partition consumes the message again.
    fn on_message(&mut self, message: KafkaMessage<'_>) -> Result<(), String>;

    /// Returns the state after all messages consumed so far.
    fn checkpoint(&mut self, partition: &str) -> Handoff;

    /// The partition was revoked or lost: the handler drops its state.
    fn on_released(&mut self, partition: &str);
}

/// A claimed partition.
pub(super) struct OwnedPartition {
    pub(super) record: AssignmentRecord,
    pub(super) revision: i64,
    /// The last processed offset; -1 if there is none.
    pub(super) processed_offset: i64,
    /// The last offset in the assignment record; -1 if there is none.
    pub(super) recorded_offset: i64,
    /// The start offset without a record: the committed offset, or the one of the reset policy.
    pub(super) start_offset: i64,
    /// True until the first message after an assignment shows whether the topic was recreated since the record.
    pub(super) is_topic_unverified: bool,
    /// Fingerprint of the last processed message.
    pub(super) fingerprint: u32,
}

impl OwnedPartition {
    /// The offset at which the next owner would continue.
    fn next_offset(&self) -> i64 {
        if self.recorded_offset >= 0 { self.recorded_offset + 1 } else { self.start_offset }
    }
}

struct State {
    handler: Box<dyn KafkaHandler>,
    held: BTreeMap<String, OwnedPartition>,
    /// Assigned by Kafka and not claimed: the repository was unavailable, or another worker had the record. Retried.
    unclaimed: BTreeSet<String>,
}

pub(super) struct Shared {
    pub(super) context: Context,
    pub(super) options: KafkaOptions,
    pub(super) handoffs: HandoffStore,
    pub(super) runtime: Handle,
    state: Mutex<State>,
    pub(super) owned: watch::Sender<BTreeMap<String, i64>>,
    pub(super) validity: Validity,
    pub(super) stopping: AtomicBool,
    crashed: AtomicBool,
    failed: Mutex<Option<String>>,
}

/// Partition name `topic-number`.
pub(super) fn partition_name(topic: &str, partition: i32) -> String {
    format!("{topic}-{partition}")
}

/// Topic and number of a partition name.
fn parse_partition_name(partition: &str) -> Option<(&str, i32)> {
    let (topic, number) = partition.rsplit_once('-')?;
    Some((topic, number.parse().ok()?))
}

/// The first offset to consume: the last message that the record includes, which shows whether the topic was recreated.
fn seek_offset(owned: &OwnedPartition) -> Offset {
    Offset::Offset(if owned.processed_offset >= 0 { owned.processed_offset } else { owned.start_offset })
}

/// Checksum that distinguishes a message from another one at the same offset.
fn fingerprint_of(message: &rdkafka::message::BorrowedMessage<'_>) -> u32 {
    let time = message.timestamp().to_millis().unwrap_or(-1);
    let crc = crc32c::crc32c(&time.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, message.key().unwrap_or_default());
    crc32c::crc32c_append(crc, message.payload().unwrap_or_default())
}

/// True if the first message after an assignment shows that the topic was recreated since the record: its offset is
/// below the requested one, or the message at the recorded offset has another fingerprint. Compaction and retention
/// remove messages and cause neither.
fn is_recreated(owned: &OwnedPartition, offset: i64, fingerprint: u32) -> bool {
    let processed = owned.processed_offset;
    let is_other = owned.fingerprint != 0 && fingerprint != owned.fingerprint;
    processed >= 0 && (offset < processed || (offset == processed && is_other))
}

/// The key of a partition's claim, for transactions that are fenced by it.
pub(super) fn claim_key(group: &str, partition: &str) -> String {
    keys::leader(&format!("{}/{}", keys::segment(group), keys::segment(partition)))
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn group(&self) -> &str {
        &self.options.group
    }

    /// True if the group coordinator cannot have reassigned this member's partitions yet, by the local clock: it
    /// accepted a commit of this generation less than a session timeout ago.
    pub(super) fn is_membership_valid(&self) -> bool {
        self.validity.is_valid(self.context.clock.monotonic_ns())
    }

    fn publish_owned(&self, state: &State) {
        let owned: BTreeMap<String, i64> =
            state.held.iter().map(|(partition, held)| (partition.clone(), held.record.version)).collect();
        self.context.metrics.partitions_owned.set(i64::try_from(owned.len()).unwrap_or(i64::MAX));
        self.owned.send_replace(owned);
    }

    pub(super) fn alert(&self, partition: &str, failures: u32, reason: &str) {
        self.context.metrics.handoff_retries.inc();
        if failures.is_multiple_of(ALERT_AFTER) {
            tracing::warn!(partition, failures, reason, "hand-off failing repeatedly");
            self.context.events.publish(ClusterEvent::HandoffFailing {
                group: self.options.group.clone(),
                partition: partition.to_owned(),
                failures,
                reason: reason.to_owned(),
            });
        }
    }

    /// Commits the offsets of all owned partitions asynchronously: for tools, and as the proof that this member is in
    /// the current generation.
    fn commit(&self, consumer: &BaseConsumer<Callbacks>) {
        self.validity.send(self.context.clock.monotonic_ns(), || {
            let mut commits = TopicPartitionList::new();
            for (partition, held) in &self.state().held {
                if let Some((topic, number)) = parse_partition_name(partition) {
                    // Fails only for reserved offset values.
                    let _ = commits.add_partition_offset(topic, number, Offset::Offset(held.next_offset()));
                }
            }
            commits.count() > 0 && consumer.commit(&commits, CommitMode::Async).is_ok()
        });
    }

    /// Takes the coordinator's reply to the commit in flight.
    fn on_committed(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        let rejected = offsets.elements().iter().find_map(|element| element.error().err());
        let error = result.err().or(rejected);
        self.validity.on_reply(error.is_none());
        if let Some(error) = error {
            tracing::debug!(%error, "offset commit failed");
        }
    }

    /// Writes the state and the offset of a partition to its assignment record; with `release`, the same write clears
    /// the owner.
    async fn record(
        &self,
        partition: &str,
        held: &mut OwnedPartition,
        handoff: &Handoff,
        release: bool,
    ) -> Result<(), HandoffError> {
        let began = self.context.clock.monotonic_ns();
        let stored = self.handoffs.save(&self.options.group, partition, handoff).await?;
        self.context.metrics.handoff_bytes.observe(handoff.checkpoint.len() as f64);
        let mut record = held.record.clone();
        record.workflow_handoff = Some(stored.clone());
        record.last_offset = held.processed_offset;
        record.last_message = held.fingerprint;
        record.updated_at = self.context.clock.wall_ms();
        if release {
            record.owner_node_id.clear();
        }
        let key = keys::assignment(&self.options.group, partition);
        let txn =
            Txn::new().when(Compare::ModRevision(key.clone(), held.revision)).put(&key, record.to_bytes());
        let outcome = match self.context.repository.txn(txn).await {
            // Unknown outcome: if the record has our bytes at a later revision, the write succeeded.
            Err(crate::RepositoryError::Unknown) => match self.context.repository.get(&key).await? {
                Some(entry) if entry.value == record.to_bytes() => {
                    TxnOutcome::Done { revision: entry.mod_revision }
                }
                Some(entry) if entry.mod_revision == held.revision => {
                    return Err(crate::RepositoryError::Unknown.into());
                }
                _ => return Err(HandoffError::NotOwner(partition.to_owned())),
            },
            outcome => outcome?,
        };
        match outcome {
            TxnOutcome::Done { revision } => {
                let took = self.context.clock.monotonic_ns().saturating_sub(began);
                self.context.metrics.handoff_time.observe(seconds(took));
                self.handoffs.sweep(&self.options.group, partition, Some(&stored)).await;
                held.recorded_offset = held.processed_offset;
                held.revision = revision;
                held.record = record;
                Ok(())
            }
            TxnOutcome::Conflict { .. } => Err(HandoffError::NotOwner(partition.to_owned())),
        }
    }

    fn on_assigned(&self, consumer: &BaseConsumer<Callbacks>, list: &mut TopicPartitionList) {
        let partitions: Vec<(String, i32)> =
            list.elements().iter().map(|entry| (entry.topic().to_owned(), entry.partition())).collect();
        for (topic, number) in partitions {
            // Kafka reassigns the partitions of a member that does not return from this callback in time.
            let timeout = self.options.session_timeout / 4;
            match self.claim(consumer, &topic, number, timeout) {
                Some((held, handed_over)) => {
                    if let Err(error) = list.set_partition_offset(&topic, number, seek_offset(&held)) {
                        tracing::warn!(%error, topic, number, "consumer position not set");
                    }
                    self.start_processing(&partition_name(&topic, number), held, handed_over);
                }
                None => drop(self.state().unclaimed.insert(partition_name(&topic, number))),
            }
        }
    }

    /// Starts processing a claimed partition.
    fn start_processing(&self, partition: &str, held: OwnedPartition, handed_over: Option<HandedOver>) {
        let began = self.context.clock.monotonic_ns();
        let event =
            TopologyEvent::new(&self.options.group, partition, TopologyChange::Assigned, &held.record);
        self.context.events.publish(ClusterEvent::Topology(event));
        let mut state = self.state();
        let (equipment, token) = (held.record.equipment_ids.clone(), held.record.version);
        state.handler.on_assigned(partition, &equipment, token, handed_over);
        state.unclaimed.remove(partition);
        state.held.insert(partition.to_owned(), held);
        self.publish_owned(&state);
        let took = self.context.clock.monotonic_ns().saturating_sub(began);
        self.context.metrics.assigned_to_ready_time.observe(seconds(took));
    }

    /// Claims assigned partitions whose claim failed before, and consumes them from the offset in their record.
    fn claim_unclaimed(&self, consumer: &BaseConsumer<Callbacks>) {
        let unclaimed: Vec<String> = self.state().unclaimed.iter().cloned().collect();
        for partition in unclaimed {
            let Some((topic, number)) = parse_partition_name(&partition) else { continue };
            let Some((held, handed_over)) = self.claim(consumer, topic, number, Duration::ZERO) else {
                continue;
            };
            match consumer.seek(topic, number, seek_offset(&held), KAFKA_TIMEOUT) {
                Ok(()) => self.start_processing(&partition, held, handed_over),
                Err(error) => tracing::warn!(%error, partition, "consumer position not set"),
            }
        }
    }

    /// Releases a partition: records its hand-off, or drops it if the assignment was lost. Returns the recorded offset.
    fn release(&self, partition: &str, lost: bool) -> Option<i64> {
        let mut state = self.state();
        state.unclaimed.remove(partition);
        let mut held = state.held.remove(partition)?;
        self.publish_owned(&state);
        let mut change = TopologyChange::Lost;
        if !lost {
            let handoff = state.handler.checkpoint(partition);
            let mut backoff = Backoff::default();
            loop {
                match self.runtime.block_on(self.record(partition, &mut held, &handoff, true)) {
                    Ok(()) => {
                        change = TopologyChange::Revoked;
                        break;
                    }
                    Err(HandoffError::NotOwner(_)) => break,
                    Err(error) => {
                        self.alert(partition, backoff.failures() + 1, &error.to_string());
                        // Kafka reassigns the partition in any case; the next owner then continues from the last
                        // record that was written.
                        if backoff.failures() > 30 || matches!(error, HandoffError::TooLarge { .. }) {
                            break;
                        }
                        std::thread::sleep(backoff.next_pause());
                    }
                }
            }
        }
        state.handler.on_released(partition);
        drop(state);
        let event = TopologyEvent::new(&self.options.group, partition, change, &held.record);
        self.context.events.publish(ClusterEvent::Topology(event));
        (change == TopologyChange::Revoked && held.recorded_offset >= 0).then_some(held.recorded_offset)
    }

    fn on_revoked(&self, consumer: &BaseConsumer<Callbacks>, list: &TopicPartitionList) {
        let lost = consumer.assignment_lost();
        let mut commits = TopicPartitionList::new();
        for element in list.elements() {
            if let Some(offset) = self.release(&partition_name(element.topic(), element.partition()), lost) {
                // Fails only for reserved offset values.
                let next = Offset::Offset(offset + 1);
                let _ = commits.add_partition_offset(element.topic(), element.partition(), next);
            }
        }
        if commits.count() > 0
            && let Err(error) = consumer.commit(&commits, CommitMode::Sync)
        {
            // The record has the offset; the commit is for tools.
            tracing::debug!(%error, "offset commit on revoke failed");
        }
    }

    /// Writes the records of partitions with messages processed since their last record.
    fn checkpoint(&self) {
        let advanced: Vec<String> = {
            let state = self.state();
            let advanced = state.held.iter().filter(|(_, held)| held.processed_offset > held.recorded_offset);
            advanced.map(|(partition, _)| partition.clone()).collect()
        };
        for partition in advanced {
            let mut state = self.state();
            let handoff = state.handler.checkpoint(&partition);
            let Some(mut held) = state.held.remove(&partition) else { continue };
            match self.runtime.block_on(self.record(&partition, &mut held, &handoff, false)) {
                Ok(()) => drop(state.held.insert(partition, held)),
                Err(HandoffError::NotOwner(_)) => {
                    // Another worker has claimed the partition. While Kafka assigns it to this worker, it claims the
                    // partition again, from the record that it finds then.
                    state.handler.on_released(&partition);
                    state.unclaimed.insert(partition.clone());
                    let event = TopologyEvent::new(
                        &self.options.group,
                        &partition,
                        TopologyChange::Lost,
                        &held.record,
                    );
                    self.context.events.publish(ClusterEvent::Topology(event));
                    self.publish_owned(&state);
                }
                Err(error) => {
                    self.alert(&partition, ALERT_AFTER, &error.to_string());
                    state.held.insert(partition, held);
                }
            }
        }
    }

    fn run(&self, consumer: &BaseConsumer<Callbacks>) {
        let interval_ns = u64::try_from(self.options.checkpoint_every.as_nanos()).unwrap_or(u64::MAX);
        let mut checkpointed_ns = self.context.clock.monotonic_ns();
        while !self.stopping.load(Ordering::SeqCst) && !self.context.scope.shutdown().is_stopped() {
            match consumer.poll(POLL_TIMEOUT) {
                Some(Ok(message)) => {
                    let partition = partition_name(message.topic(), message.partition());
                    let mut state = self.state();
                    let fingerprint = fingerprint_of(&message);
                    if let Some(held) = state.held.get_mut(&partition).filter(|held| held.is_topic_unverified)
                    {
                        held.is_topic_unverified = false;
                        if is_recreated(held, message.offset(), fingerprint) {
                            tracing::warn!(
                                partition,
                                offset = held.processed_offset,
                                "topic recreated; consuming from its start"
                            );
                            (held.processed_offset, held.recorded_offset, held.start_offset) = (-1, -1, 0);
                            if message.offset() > 0
                                && let Err(error) = consumer.seek(
                                    message.topic(),
                                    message.partition(),
                                    Offset::Beginning,
                                    KAFKA_TIMEOUT,
                                )
                            {
                                tracing::warn!(%error, partition, "consumer position not set");
                            } else if message.offset() > 0 {
                                continue;
                            }
                        }
                    }
                    // A message fetched before its partition was revoked or lost is not processed.
                    let is_next = state
                        .held
                        .get(&partition)
                        .is_some_and(|held| message.offset() > held.processed_offset);
                    if is_next {
                        let processed = state.handler.on_message(KafkaMessage {
                            partition: &partition,
                            offset: message.offset(),
                            key: message.key(),
                            value: message.payload(),
                        });
                        match processed {
                            Ok(()) => {
                                if let Some(held) = state.held.get_mut(&partition) {
                                    held.processed_offset = message.offset();
                                    held.fingerprint = fingerprint;
                                }
                            }
                            Err(error) => {
                                tracing::error!(
                                    partition,
                                    offset = message.offset(),
                                    error,
                                    "message handler failed; worker stopped"
                                );
                                *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                                return;
                            }
                        }
                    }
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "consumer error");
                    std::thread::sleep(Duration::from_millis(10));
                }
                None => {}
            }
            let now = self.context.clock.monotonic_ns();
            if now.saturating_sub(checkpointed_ns) >= interval_ns {
                self.checkpoint();
                self.claim_unclaimed(consumer);
                self.commit(consumer);
                checkpointed_ns = now;
            }
        }
    }
}

/// The rebalance and commit callbacks of librdkafka.
pub(super) struct Callbacks(Arc<Shared>);

impl ClientContext for Callbacks {}

impl ConsumerContext for Callbacks {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, error: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let is_cooperative = matches!(consumer.rebalance_protocol(), RebalanceProtocol::Cooperative);
        let done = match error {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                self.0.on_assigned(consumer, list);
                if is_cooperative { consumer.incremental_assign(list) } else { consumer.assign(list) }
            }
            _ => {
                self.0.on_revoked(consumer, list);
                if is_cooperative { consumer.incremental_unassign(list) } else { consumer.unassign() }
            }
        };
        if let Err(error) = done {
            tracing::warn!(%error, "rebalance not applied");
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        self.0.on_committed(result, offsets);
    }
}

/// Consumes the partitions that Kafka assigns to this process.
pub struct KafkaWorker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl KafkaWorker {
    /// Joins the consumer group, on a thread of its own. Requests to the repository run on the current runtime.
    pub fn start(
        context: &Context,
        options: KafkaOptions,
        handler: Box<dyn KafkaHandler>,
    ) -> Result<Self, KafkaError> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &options.bootstrap)
            .set("group.id", &options.group)
            .set("client.id", &*context.node_id)
            .set("session.timeout.ms", options.session_timeout.as_millis().to_string())
            .set("auto.offset.reset", "earliest")
            // The assignment record decides the offset; the committed offset is for operators.
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false");
        for (name, value) in &options.settings {
            config.set(name, value);
        }
        let shared = Arc::new(Shared {
            context: context.clone(),
            handoffs: HandoffStore::new(Arc::clone(&context.repository), options.handoffs.clone()),
            runtime: Handle::current(),
            state: Mutex::new(State { handler, held: BTreeMap::new(), unclaimed: BTreeSet::new() }),
            owned: watch::channel(BTreeMap::new()).0,
            validity: Validity::new(options.session_timeout),
            stopping: AtomicBool::new(false),
            crashed: AtomicBool::new(false),
            failed: Mutex::default(),
            options,
        });
        let consumer: BaseConsumer<Callbacks> = config.create_with_context(Callbacks(Arc::clone(&shared)))?;
        let topics: Vec<&str> = shared.options.topics.iter().map(String::as_str).collect();
        consumer.subscribe(&topics)?;
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("moim-kafka-worker".to_owned()).spawn(move || {
            worker.run(&consumer);
            if worker.crashed.load(Ordering::SeqCst) {
                // Neither leaves the group nor answers it any more; the end of the process closes it.
                std::mem::forget(consumer);
                return;
            }
            // Partitions still owned are released while this member is in the group.
            let held: Vec<String> = worker.state().held.keys().cloned().collect();
            let failed = worker.failed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            for partition in held {
                worker.release(&partition, failed);
            }
            consumer.unsubscribe();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The partitions that this process owns, with their fencing tokens.
    pub fn owned(&self) -> BTreeMap<String, i64> {
        self.shared.owned.borrow().clone()
    }

    /// Leadership of a partition: active while this process owns it, otherwise standby.
    pub fn election(&self, partition: &str) -> KafkaElection {
        KafkaElection::new(Arc::clone(&self.shared), partition)
    }

    /// The handler error that stopped the worker, if any.
    pub fn failure(&self) -> Option<String> {
        self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Simulates a crash of the process: writes no record and does not leave the group, so that Kafka has to detect
    /// the failure. For tests of applications.
    pub fn crash(mut self) {
        self.shared.crashed.store(true, Ordering::SeqCst);
        self.shared.stopping.store(true, Ordering::SeqCst);
        // The thread keeps its consumer without polling it, so that it neither leaves the group nor commits.
        drop(self.thread.take());
    }

    /// Releases all partitions with their hand-offs and leaves the group.
    pub async fn stop(mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // A panic of the handler ended the thread and was reported there.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Drop for KafkaWorker {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
    }
}
