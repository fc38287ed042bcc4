//! The worker: one thread, one consumer, the partitions it owns.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::message::Message as _;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::KafkaElection;
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
/// Failures in a row after which somebody is told.
const ALERT_AFTER: u32 = 5;

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

struct Held {
    record: AssignmentRecord,
    revision: i64,
    /// The last offset that was worked on.
    offset: i64,
    /// The last offset that is recorded.
    recorded: i64,
}

struct State {
    handler: Box<dyn KafkaHandler>,
    held: BTreeMap<String, Held>,
}

pub(super) struct Shared {
    pub(super) context: Context,
    options: KafkaOptions,
    handoffs: HandoffStore,
    runtime: Handle,
    state: Mutex<State>,
    pub(super) owned: watch::Sender<BTreeMap<String, i64>>,
    /// When the worker last asked Kafka for messages.
    polled_ns: AtomicU64,
    stopping: AtomicBool,
    crashed: AtomicBool,
    failed: Mutex<Option<String>>,
}

/// The name of a partition.
fn name_of(topic: &str, partition: i32) -> String {
    format!("{topic}-{partition}")
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

    /// Whether Kafka cannot have given our partitions away yet, by this process's clock.
    pub(super) fn is_fresh(&self) -> bool {
        let silent = self.context.clock.monotonic_ns().saturating_sub(self.polled_ns.load(Ordering::SeqCst));
        let limit = u64::try_from(self.options.session_timeout.mul_f64(0.85).as_nanos()).unwrap_or(u64::MAX);
        silent < limit
    }

    fn publish_owned(&self, state: &State) {
        let owned: BTreeMap<String, i64> =
            state.held.iter().map(|(partition, held)| (partition.clone(), held.record.version)).collect();
        self.context.metrics.partitions_owned.set(i64::try_from(owned.len()).unwrap_or(i64::MAX));
        self.owned.send_replace(owned);
    }

    fn alert(&self, partition: &str, failures: u32, reason: &str) {
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

    /// Makes the record ours and loads what was handed over. Tries until it works or the worker stops.
    async fn claim(&self, partition: &str) -> Option<(Held, Option<HandedOver>)> {
        let mut backoff = Backoff::default();
        while !self.stopping.load(Ordering::SeqCst) {
            match self.try_claim(partition).await {
                Ok(claimed) => return Some(claimed),
                Err(error) => {
                    self.alert(partition, backoff.failures() + 1, &error.to_string());
                    backoff.pause().await;
                }
            }
        }
        None
    }

    async fn try_claim(&self, partition: &str) -> Result<(Held, Option<HandedOver>), HandoffError> {
        let key = keys::assignment(&self.options.group, partition);
        let entry = self.context.repository.get(&key).await?;
        let mut record = match &entry {
            Some(entry) => AssignmentRecord::from_bytes(&entry.value).unwrap_or_else(|reason| {
                self.context.events.publish(ClusterEvent::Malformed { key: key.clone(), reason });
                AssignmentRecord::new()
            }),
            None => AssignmentRecord::new(),
        };
        let now = self.context.clock.wall_ms();
        let handed_over = match &record.workflow_handoff {
            Some(_) if self.handoffs.is_expired(record.updated_at, now) => {
                self.alert(partition, ALERT_AFTER, "it is over the limit of its age and not used any more");
                // Neither state nor position: Kafka says where to begin.
                record.last_offset = -1;
                record.workflow_handoff = None;
                None
            }
            Some(stored) => {
                let handoff = self.handoffs.load(stored).await?;
                Some(HandedOver { handoff, last_offset: record.last_offset })
            }
            None => None,
        };
        record.owner_node_id = self.context.node_id.to_string();
        record.owner_epoch = 0;
        record.target_node_id.clear();
        record.version += 1;
        record.updated_at = self.context.clock.wall_ms();
        if let Some(equipment) = self.options.equipment.get(partition) {
            record.equipment_ids.clone_from(equipment);
        }
        let expected = match &entry {
            Some(entry) => Compare::ModRevision(key.clone(), entry.mod_revision),
            None => Compare::Absent(key.clone()),
        };
        let txn = Txn::new()
            .when(expected)
            .put(&key, record.to_bytes())
            .put(claim_key(&self.options.group, partition), record.version.to_string());
        match self.context.repository.txn(txn).await? {
            TxnOutcome::Done { revision } => {
                let (offset, recorded) = (record.last_offset, record.last_offset);
                Ok((Held { record, revision, offset, recorded }, handed_over))
            }
            TxnOutcome::Conflict { .. } => Err(HandoffError::NotOwner(partition.to_owned())),
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

    fn on_assigned(&self, list: &mut TopicPartitionList) {
        let partitions: Vec<(String, i32)> =
            list.elements().iter().map(|one| (one.topic().to_owned(), one.partition())).collect();
        for (topic, number) in partitions {
            let began = self.context.clock.monotonic_ns();
            let partition = name_of(&topic, number);
            let Some((held, handed_over)) = self.runtime.block_on(self.claim(&partition)) else { return };
            if held.record.last_offset >= 0 {
                let next = Offset::Offset(held.record.last_offset + 1);
                if let Err(error) = list.set_partition_offset(&topic, number, next) {
                    tracing::warn!(%error, partition, "the position could not be set");
                }
            }
            let event =
                TopologyEvent::new(&self.options.group, &partition, TopologyChange::Assigned, &held.record);
            self.context.events.publish(ClusterEvent::Topology(event));
            let mut state = self.state();
            let (equipment, token) = (held.record.equipment_ids.clone(), held.record.version);
            state.handler.on_assigned(&partition, &equipment, token, handed_over);
            state.held.insert(partition, held);
            self.publish_owned(&state);
            let took = self.context.clock.monotonic_ns().saturating_sub(began);
            self.context.metrics.assigned_to_ready_time.observe(seconds(took));
        }
    }

    /// Hands a partition over, or drops it when it is not ours any more.
    fn give(&self, partition: &str, lost: bool) -> Option<i64> {
        let mut state = self.state();
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
    fn checkpoint(&self, consumer: &BaseConsumer<Callbacks>) {
        let moved: Vec<String> = {
            let state = self.state();
            let moved = state.held.iter().filter(|(_, held)| held.offset > held.recorded);
            moved.map(|(partition, _)| partition.clone()).collect()
        };
        let mut commits = TopicPartitionList::new();
        for partition in moved {
            let mut state = self.state();
            let handoff = state.handler.checkpoint(&partition);
            let Some(mut held) = state.held.remove(&partition) else { continue };
            match self.runtime.block_on(self.record(&partition, &mut held, &handoff, false)) {
                Ok(()) => {
                    if let Some((topic, number)) = partition.rsplit_once('-')
                        && let Ok(number) = number.parse()
                    {
                        // A list takes any offset that is none of the special ones.
                        let _ =
                            commits.add_partition_offset(topic, number, Offset::Offset(held.recorded + 1));
                    }
                    state.held.insert(partition, held);
                }
                Err(HandoffError::NotOwner(_)) => {
                    // Somebody else has claimed it: we were away for too long, and Kafka will say so, too.
                    state.handler.on_released(&partition);
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
        if commits.count() > 0 {
            // For tools; the next one includes this one.
            let _ = consumer.commit(&commits, CommitMode::Async);
        }
    }

    fn run(&self, consumer: &BaseConsumer<Callbacks>) {
        let every = u64::try_from(self.options.checkpoint_every.as_nanos()).unwrap_or(u64::MAX);
        let mut checkpointed = self.context.clock.monotonic_ns();
        while !self.stopping.load(Ordering::SeqCst) && !self.context.scope.shutdown().is_stopped() {
            self.polled_ns.store(self.context.clock.monotonic_ns(), Ordering::SeqCst);
            match consumer.poll(POLL) {
                Some(Ok(message)) => {
                    let partition = name_of(message.topic(), message.partition());
                    let mut state = self.state();
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
                self.checkpoint(consumer);
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
                self.0.on_assigned(list);
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
            state: Mutex::new(State { handler, held: BTreeMap::new() }),
            owned: watch::channel(BTreeMap::new()).0,
            polled_ns: AtomicU64::new(context.clock.monotonic_ns()),
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
