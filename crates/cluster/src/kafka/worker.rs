//! The worker: one thread, one consumer, the partitions it owns.

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

/// How long one poll waits.
const POLL: Duration = Duration::from_millis(50);
/// How long Kafka may take for one answer.
pub(super) const KAFKA_PATIENCE: Duration = Duration::from_secs(3);
/// Failures in a row after which somebody is told.
pub(super) const ALERT_AFTER: u32 = 5;

/// Why a worker does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KafkaError {
    /// The client refused its settings.
    #[error(transparent)]
    Client(#[from] rdkafka::error::KafkaError),
    /// The thread could not be started.
    #[error(transparent)]
    Thread(#[from] std::io::Error),
}

/// How a worker works.
#[derive(Clone, Debug)]
pub struct KafkaOptions {
    /// Kafka servers.
    pub bootstrap: String,
    /// The consumer group; the assignments are recorded under its name.
    pub group: String,
    /// What is consumed.
    pub topics: Vec<String>,
    /// The equipment of each partition, by its name `topic-number`.
    pub equipment: BTreeMap<String, Vec<String>>,
    /// Further settings of the client.
    pub settings: BTreeMap<String, String>,
    /// How long a member that is gone is waited for.
    pub session_timeout: Duration,
    /// The state is recorded at least this often while messages come.
    pub checkpoint_every: Duration,
    /// How large hand-offs are kept.
    pub handoffs: HandoffOptions,
}

impl KafkaOptions {
    /// The usual settings.
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

/// A message.
#[derive(Clone, Copy, Debug)]
pub struct KafkaMessage<'a> {
    /// Its partition, as `topic-number`.
    pub partition: &'a str,
    /// Its offset.
    pub offset: i64,
    /// Its key.
    pub key: Option<&'a [u8]>,
    /// What it holds.
    pub value: Option<&'a [u8]>,
}

/// The application's side: called on the worker's thread, one call at a time.
pub trait KafkaHandler: Send + 'static {
    /// The partition is ours, with what the owner before left.
    fn on_assigned(
        &mut self,
        partition: &str,
        equipment: &[String],
        token: i64,
        handed_over: Option<HandedOver>,
    );

    /// Works on a message. An error stops the worker: the message is consumed again by whoever owns the partition then.
    fn on_message(&mut self, message: KafkaMessage<'_>) -> Result<(), String>;

    /// The state after everything consumed so far.
    fn checkpoint(&mut self, partition: &str) -> Handoff;

    /// The partition is not ours any more: what is known about it is dropped.
    fn on_released(&mut self, partition: &str);
}

pub(super) struct Held {
    pub(super) record: AssignmentRecord,
    pub(super) revision: i64,
    /// The last offset that was worked on.
    pub(super) offset: i64,
    /// The last offset that is recorded.
    pub(super) recorded: i64,
    /// Where consuming begins when nothing is recorded: what Kafka had committed, or where its reset policy points.
    pub(super) start: i64,
    /// Set until the first message after an assignment shows whether the topic is the one the record was written for.
    pub(super) is_unproven: bool,
    /// Fingerprint of the last message that was worked on.
    pub(super) witness: u32,
}

impl Held {
    /// Where the next owner would go on.
    fn position(&self) -> i64 {
        if self.recorded >= 0 { self.recorded + 1 } else { self.start }
    }
}

struct State {
    handler: Box<dyn KafkaHandler>,
    held: BTreeMap<String, Held>,
    /// Assigned by Kafka and not claimed: the store was away, or another worker had the record. Claimed when possible.
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

/// The name of a partition.
pub(super) fn name_of(topic: &str, partition: i32) -> String {
    format!("{topic}-{partition}")
}

/// Topic and number of a partition's name.
fn split_name(partition: &str) -> Option<(&str, i32)> {
    let (topic, number) = partition.rsplit_once('-')?;
    Some((topic, number.parse().ok()?))
}

/// Where consuming begins: at the last message that the record includes, which shows whether the topic is still the same.
fn first_offset(held: &Held) -> Offset {
    Offset::Offset(if held.offset >= 0 { held.offset } else { held.start })
}

/// Tells a message apart from another one at the same offset.
fn fingerprint(message: &rdkafka::message::BorrowedMessage<'_>) -> u32 {
    let time = message.timestamp().to_millis().unwrap_or(-1);
    let crc = crc32c::crc32c(&time.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, message.key().unwrap_or_default());
    crc32c::crc32c_append(crc, message.payload().unwrap_or_default())
}

/// Whether the first message after an assignment shows another topic than the one the record was written for: an older
/// offset than asked for, or another message where the last one was. Compaction and retention remove messages and
/// never do either.
fn is_recreated(held: &Held, offset: i64, witness: u32) -> bool {
    held.offset >= 0
        && (offset < held.offset || (offset == held.offset && held.witness != 0 && witness != held.witness))
}

/// The claim of a partition, for transactions that are fenced by it.
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

    /// Whether the group coordinator cannot have given our partitions away yet, by this process's clock: it accepted a
    /// commit of this member's generation less than a session timeout ago.
    pub(super) fn is_fresh(&self) -> bool {
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
            tracing::warn!(partition, failures, reason, "a hand-off fails again and again");
            self.context.events.publish(ClusterEvent::HandoffFailing {
                group: self.options.group.clone(),
                partition: partition.to_owned(),
                failures,
                reason: reason.to_owned(),
            });
        }
    }

    /// Commits in the background where everything stands: for tools, and as the proof that this member is still in the
    /// current generation.
    fn commit(&self, consumer: &BaseConsumer<Callbacks>) {
        self.validity.send(self.context.clock.monotonic_ns(), || {
            let mut commits = TopicPartitionList::new();
            for (partition, held) in &self.state().held {
                if let Some((topic, number)) = split_name(partition) {
                    // A list takes any offset that is none of the special ones.
                    let _ = commits.add_partition_offset(topic, number, Offset::Offset(held.position()));
                }
            }
            commits.count() > 0 && consumer.commit(&commits, CommitMode::Async).is_ok()
        });
    }

    /// The coordinator's answer to the commit under way.
    fn on_committed(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        let refused = offsets.elements().iter().find_map(|one| one.error().err());
        let error = result.err().or(refused);
        self.validity.on_answer(error.is_none());
        if let Some(error) = error {
            tracing::debug!(%error, "offset commit failed");
        }
    }

    /// Records the state of a partition; with `release` it is let go in the same step.
    async fn record(
        &self,
        partition: &str,
        held: &mut Held,
        handoff: &Handoff,
        release: bool,
    ) -> Result<(), HandoffError> {
        let began = self.context.clock.monotonic_ns();
        let stored = self.handoffs.save(&self.options.group, partition, handoff).await?;
        self.context.metrics.handoff_bytes.observe(handoff.checkpoint.len() as f64);
        let mut record = held.record.clone();
        record.workflow_handoff = Some(stored.clone());
        record.last_offset = held.offset;
        record.last_message = held.witness;
        record.updated_at = self.context.clock.wall_ms();
        if release {
            record.owner_node_id.clear();
        }
        let key = keys::assignment(&self.options.group, partition);
        let txn =
            Txn::new().when(Compare::ModRevision(key.clone(), held.revision)).put(&key, record.to_bytes());
        let outcome = match self.context.repository.txn(txn).await {
            // Read what became of it: our own bytes at a later revision are ours.
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
                held.recorded = held.offset;
                held.revision = revision;
                held.record = record;
                Ok(())
            }
            TxnOutcome::Conflict { .. } => Err(HandoffError::NotOwner(partition.to_owned())),
        }
    }

    fn on_assigned(&self, consumer: &BaseConsumer<Callbacks>, list: &mut TopicPartitionList) {
        let partitions: Vec<(String, i32)> =
            list.elements().iter().map(|one| (one.topic().to_owned(), one.partition())).collect();
        for (topic, number) in partitions {
            // Kafka gives partitions away from a member that does not come back from here in time.
            let patience = self.options.session_timeout / 4;
            match self.claim(consumer, &topic, number, patience) {
                Some((held, handed_over)) => {
                    if let Err(error) = list.set_partition_offset(&topic, number, first_offset(&held)) {
                        tracing::warn!(%error, topic, number, "consumer position not set");
                    }
                    self.begin(&name_of(&topic, number), held, handed_over);
                }
                None => drop(self.state().unclaimed.insert(name_of(&topic, number))),
            }
        }
    }

    /// Lets the work on a claimed partition begin.
    fn begin(&self, partition: &str, held: Held, handed_over: Option<HandedOver>) {
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

    /// Claims what Kafka has assigned and could not be claimed before, and consumes it from where its record stands.
    fn claim_unclaimed(&self, consumer: &BaseConsumer<Callbacks>) {
        let unclaimed: Vec<String> = self.state().unclaimed.iter().cloned().collect();
        for partition in unclaimed {
            let Some((topic, number)) = split_name(&partition) else { continue };
            let Some((held, handed_over)) = self.claim(consumer, topic, number, Duration::ZERO) else {
                continue;
            };
            match consumer.seek(topic, number, first_offset(&held), KAFKA_PATIENCE) {
                Ok(()) => self.begin(&partition, held, handed_over),
                Err(error) => tracing::warn!(%error, partition, "consumer position not set"),
            }
        }
    }

    /// Hands a partition over, or drops it when it is not ours any more.
    fn give(&self, partition: &str, lost: bool) -> Option<i64> {
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
                        // Kafka gives the partition away at some point whether or not this works; what was recorded
                        // before is what the next owner has then.
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
        (change == TopologyChange::Revoked && held.recorded >= 0).then_some(held.recorded)
    }

    fn on_revoked(&self, consumer: &BaseConsumer<Callbacks>, list: &TopicPartitionList) {
        let lost = consumer.assignment_lost();
        let mut commits = TopicPartitionList::new();
        for one in list.elements() {
            if let Some(offset) = self.give(&name_of(one.topic(), one.partition()), lost) {
                // A list takes any offset that is none of the special ones.
                let _ =
                    commits.add_partition_offset(one.topic(), one.partition(), Offset::Offset(offset + 1));
            }
        }
        if commits.count() > 0
            && let Err(error) = consumer.commit(&commits, CommitMode::Sync)
        {
            // The record has the position; this is for tools.
            tracing::debug!(%error, "offsets were not committed");
        }
    }

    /// Records what has moved on since the last time.
    fn checkpoint(&self) {
        let moved: Vec<String> = {
            let state = self.state();
            let moved = state.held.iter().filter(|(_, held)| held.offset > held.recorded);
            moved.map(|(partition, _)| partition.clone()).collect()
        };
        for partition in moved {
            let mut state = self.state();
            let handoff = state.handler.checkpoint(&partition);
            let Some(mut held) = state.held.remove(&partition) else { continue };
            match self.runtime.block_on(self.record(&partition, &mut held, &handoff, false)) {
                Ok(()) => drop(state.held.insert(partition, held)),
                Err(HandoffError::NotOwner(_)) => {
                    // Another worker has claimed it. While Kafka assigns it to this one, it is claimed back, from the
                    // record that is there then.
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
        let every = u64::try_from(self.options.checkpoint_every.as_nanos()).unwrap_or(u64::MAX);
        let mut checkpointed = self.context.clock.monotonic_ns();
        while !self.stopping.load(Ordering::SeqCst) && !self.context.scope.shutdown().is_stopped() {
            match consumer.poll(POLL) {
                Some(Ok(message)) => {
                    let partition = name_of(message.topic(), message.partition());
                    let mut state = self.state();
                    let witness = fingerprint(&message);
                    if let Some(held) = state.held.get_mut(&partition).filter(|held| held.is_unproven) {
                        held.is_unproven = false;
                        if is_recreated(held, message.offset(), witness) {
                            tracing::warn!(
                                partition,
                                offset = held.offset,
                                "topic recreated: consuming from its start"
                            );
                            (held.offset, held.recorded, held.start) = (-1, -1, 0);
                            if message.offset() > 0
                                && let Err(error) = consumer.seek(
                                    message.topic(),
                                    message.partition(),
                                    Offset::Beginning,
                                    KAFKA_PATIENCE,
                                )
                            {
                                tracing::warn!(%error, partition, "consumer position not set");
                            } else if message.offset() > 0 {
                                continue;
                            }
                        }
                    }
                    // Fetched before it was revoked or lost: not ours to work on.
                    let is_next =
                        state.held.get(&partition).is_some_and(|held| message.offset() > held.offset);
                    if is_next {
                        let worked = state.handler.on_message(KafkaMessage {
                            partition: &partition,
                            offset: message.offset(),
                            key: message.key(),
                            value: message.payload(),
                        });
                        match worked {
                            Ok(()) => {
                                if let Some(held) = state.held.get_mut(&partition) {
                                    held.offset = message.offset();
                                    held.witness = witness;
                                }
                            }
                            Err(error) => {
                                tracing::error!(
                                    partition,
                                    offset = message.offset(),
                                    error,
                                    "the work failed"
                                );
                                *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                                return;
                            }
                        }
                    }
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "the consumer says");
                    std::thread::sleep(Duration::from_millis(10));
                }
                None => {}
            }
            let now = self.context.clock.monotonic_ns();
            if now.saturating_sub(checkpointed) >= every {
                self.checkpoint();
                self.claim_unclaimed(consumer);
                self.commit(consumer);
                checkpointed = now;
            }
        }
    }
}

/// What librdkafka calls.
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
            tracing::warn!(%error, "a rebalance was not carried out");
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        self.0.on_committed(result, offsets);
    }
}

/// Works on the partitions that Kafka gives to this process.
pub struct KafkaWorker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl KafkaWorker {
    /// Joins the consumer group, on a thread of its own. The store is asked on the current runtime.
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
            // The record decides where to go on; what Kafka knows is for people.
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
                // Neither leaves the group nor answers it; the process's end takes it away.
                std::mem::forget(consumer);
                return;
            }
            // What is still held is handed over while the group membership stands.
            let held: Vec<String> = worker.state().held.keys().cloned().collect();
            let failed = worker.failed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
            for partition in held {
                worker.give(&partition, failed);
            }
            consumer.unsubscribe();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The partitions this process works on, with their fencing tokens.
    pub fn owned(&self) -> BTreeMap<String, i64> {
        self.shared.owned.borrow().clone()
    }

    /// Leadership of a partition: active while this process owns it, standby else.
    pub fn election(&self, partition: &str) -> KafkaElection {
        KafkaElection::new(Arc::clone(&self.shared), partition)
    }

    /// Why the work stopped by itself, if it has.
    pub fn failure(&self) -> Option<String> {
        self.shared.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// As if the process had died: nothing is recorded any more, nobody is told, and Kafka finds out by itself. For
    /// tests of what is built on this.
    pub fn crash(mut self) {
        self.shared.crashed.store(true, Ordering::SeqCst);
        self.shared.stopping.store(true, Ordering::SeqCst);
        // The thread keeps its consumer, silent, so that it neither leaves the group nor commits.
        drop(self.thread.take());
    }

    /// Hands everything over and leaves the group.
    pub async fn stop(mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            // A panic of the work ends its thread and was reported there.
            let _ = tokio::task::spawn_blocking(move || thread.join()).await;
        }
    }
}

impl Drop for KafkaWorker {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
    }
}
