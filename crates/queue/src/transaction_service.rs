//! The transaction coordinator service: one coordinator per partition of `__transaction_state` that this node leads,
//! each under its own lock. A coordinator is loaded from its partition once the node leads it and the whole log is
//! committed, and is valid only for that leader epoch. Markers for partitions of other nodes are sent to them.
//!
//! The coordinator decides; this service appends its records, writes its markers into the partitions of a
//! transaction, and reports their commit back. Both happen under the coordinator's lock, so records enter the log in
//! the order in which they were decided.

mod markers;
mod remote;

pub(crate) use self::markers::append_marker;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use bytes::Bytes;
use hashbrown::HashMap;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Duration, Instant};

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::{self, BatchBuilder};

use crate::broker::{Broker, BrokerOptions};
use crate::completions::Completions;
use crate::deadline_timer::{DeadlineTimer, next_tick};
use crate::group_service::LOAD_TIMEOUT;
use crate::loops::lock;
use crate::partition::{Ack, MAX_DECOMPRESSED_BYTES, Partition, Refused};
use crate::topics::TRANSACTIONS_TOPIC;
use crate::transactions::{
    self, Config, Coordinator, Effect, Input, MarkersToken, PersistToken, Reply, Token, TopicPartition,
};

/// Maximum wait of a request that begins a transaction for the completion of the previous one. A client that gets
/// CONCURRENT_TRANSACTIONS backs off for longer than the markers take.
const COMPLETION_WAIT: Duration = Duration::from_millis(100);

/// The completion of a coordinator's write or marker.
enum Completion {
    Record(CoordinatorRef, PersistToken, Result<(), ErrorCode>),
    Marker(CoordinatorRef, MarkersToken, TopicPartition, Result<(), ErrorCode>),
}

/// A coordinator: its partition, and its incarnation.
type CoordinatorRef = (i32, u64);

/// The epoch of the coordinator that verified that a partition belongs to an open transaction.
pub(crate) type Verification = Result<i32, ErrorCode>;

/// Stands for the coordinator epoch of an added partition: a replaced coordinator cannot add.
const ADDED: i32 = i32::MAX;

/// All transactions that this node coordinates.
pub(crate) struct TransactionService {
    config: Config,
    wanted_partitions: i32,
    /// One per partition of `__transaction_state`, led here or not; empty while the topic does not exist.
    shards: ArcSwap<Vec<Arc<Shard>>>,
    /// An empty coordinator that answers requests before `__transaction_state` exists.
    empty: Coordinator,
    next_token: AtomicU64,
    done: Completions<Completion>,
    remote: Completions<markers::RemoteMarker>,
    timer: DeadlineTimer,
    /// Notified when a coordinator is loaded or unloaded.
    loaded: Notify,
}

#[derive(Default)]
struct Shard {
    /// `None` while another node leads the partition, or while it is being loaded.
    machine: Mutex<Option<Machine>>,
    waiting: Mutex<HashMap<Token, oneshot::Sender<Reply>>>,
    /// Notified when a write has completed: a transaction may have ended.
    ended: Notify,
}

struct Machine {
    /// Identifies this coordinator among those of the same partition: a write may complete after another one was
    /// loaded.
    incarnation: u64,
    coordinator: Coordinator,
    /// The coordinator's partition, and the leader epoch in which it was loaded.
    partition: Arc<Partition>,
    epoch: i32,
}

impl Machine {
    /// True if the leader epoch of its load is still current.
    fn is_current(&self) -> bool {
        self.partition.leading() == Some(self.epoch)
    }
}

impl TransactionService {
    pub(crate) fn new(options: &BrokerOptions) -> Self {
        let config = Config {
            max_timeout_ms: options.transaction_max_timeout_ms,
            id_expiration_ms: options.transactional_id_expiration_ms,
            ..Config::default()
        };
        let mut empty = Coordinator::new(config.clone(), 0);
        empty.start(0);
        Self {
            config,
            empty,
            wanted_partitions: options.transaction_partitions.max(1),
            shards: ArcSwap::default(),
            next_token: AtomicU64::new(1),
            done: Completions::default(),
            remote: Completions::default(),
            timer: DeadlineTimer::default(),
            loaded: Notify::new(),
        }
    }

    /// `__transaction_state` exists with this fixed partition count.
    pub(crate) fn on_topic(&self, partitions: i32) {
        self.shards.store(Arc::new((0..partitions).map(|_| Arc::default()).collect()));
    }

    /// This node leads a partition of `__transaction_state`: loads its transactions, and completes those that were
    /// decided.
    pub(crate) fn on_election(
        &self,
        broker: &Broker,
        partition: &Arc<Partition>,
        epoch: i32,
    ) -> Result<(), Refused> {
        let Some(shard) = self.shard(partition.index) else { return Ok(()) };
        if partition.leading() != Some(epoch) {
            return Ok(());
        }
        let (now_ms, wall_ms) = (broker.clock.monotonic_ms(), broker.clock.wall_ms());
        // The leader epoch is the coordinator epoch: partitions reject markers of older coordinators.
        let mut coordinator = Coordinator::new(self.config.clone(), epoch);
        coordinator.set_wall_ms(now_ms, wall_ms);
        partition.read_all(|batch| load_batch(batch, &mut coordinator))?;
        let incarnation = self.next_token.fetch_add(1, Ordering::Relaxed);
        let (index, partition) = (partition.index, Arc::clone(partition));
        *lock(&shard.machine) = Some(Machine { incarnation, coordinator, partition, epoch });
        self.run(broker, index, Some(incarnation), Coordinator::start);
        self.loaded.notify_waiters();
        Ok(())
    }

    /// This node no longer leads a partition of `__transaction_state`.
    pub(crate) fn on_resignation(&self, partition: &Partition) {
        if let Some(shard) = self.shard(partition.index) {
            // A coordinator of a later leader epoch stays.
            lock(&shard.machine).take_if(|machine| !machine.is_current());
            lock(&shard.waiting).clear();
            self.loaded.notify_waiters();
        }
    }

    /// The error if a coordinator is not available: NOT_COORDINATOR, or a load in progress.
    fn unavailable_error(&self, broker: &Broker, index: i32) -> ErrorCode {
        match broker.topics.partition(TRANSACTIONS_TOPIC, index) {
            Ok(_) => ErrorCode::CoordinatorLoadInProgress,
            Err(_) => ErrorCode::NotCoordinator,
        }
    }

    fn is_ready(&self, index: i32) -> bool {
        self.shard(index).is_some_and(|s| lock(&s.machine).as_ref().is_some_and(Machine::is_current))
    }

    /// Waits a moment for a coordinator that is being loaded.
    async fn wait_loaded(&self, broker: &Broker, index: i32) -> Result<(), ErrorCode> {
        let loaded = async {
            loop {
                let notified = self.loaded.notified();
                if self.is_ready(index) {
                    return Ok(());
                }
                match self.unavailable_error(broker, index) {
                    ErrorCode::CoordinatorLoadInProgress => notified.await,
                    code => return Err(code),
                }
            }
        };
        tokio::time::timeout(LOAD_TIMEOUT, loaded).await.unwrap_or(Err(ErrorCode::CoordinatorLoadInProgress))
    }

    fn shard(&self, partition: i32) -> Option<Arc<Shard>> {
        usize::try_from(partition).ok().and_then(|at| self.shards.load().get(at).cloned())
    }

    /// The partition of `__transaction_state` that holds a transactional id.
    pub(crate) fn partition_of(&self, transactional_id: &str) -> i32 {
        let partitions = self.shards.load().len() as i32;
        let partitions = if partitions == 0 { self.wanted_partitions } else { partitions };
        transactions::partition_for(transactional_id, partitions)
    }

    /// Creates `__transaction_state` on first use.
    pub(crate) async fn ensure_topic(&self, broker: &Broker) -> Result<(), ErrorCode> {
        broker.ensure_internal(TRANSACTIONS_TOPIC, self.wanted_partitions).await
    }

    /// Passes a request to the coordinator of a transactional id and waits for the response.
    pub(crate) async fn call(
        &self,
        broker: &Broker,
        transactional_id: &str,
        input: impl FnOnce(Token) -> Input,
    ) -> Result<Reply, ErrorCode> {
        self.ensure_topic(broker).await?;
        let index = self.partition_of(transactional_id);
        self.wait_loaded(broker, index).await?;
        let shard = self.shard(index).ok_or(ErrorCode::NotCoordinator)?;
        let token = Token(self.next_token.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = oneshot::channel();
        lock(&shard.waiting).insert(token, sender);
        if !self.run(broker, index, None, |c, now_ms| c.step(now_ms, input(token))) {
            lock(&shard.waiting).remove(&token);
            return Err(ErrorCode::NotCoordinator);
        }
        receiver.await.map_err(|_| ErrorCode::NotCoordinator)
    }

    /// As [`Self::call`], for a request that may begin a transaction while the previous one is completing: it waits
    /// for the completion, for a moment.
    pub(crate) async fn call_next(
        &self,
        broker: &Broker,
        transactional_id: &str,
        input: impl Fn(Token) -> Input,
    ) -> Result<Reply, ErrorCode> {
        let until = Instant::now() + COMPLETION_WAIT;
        loop {
            let Some(shard) = self.shard(self.partition_of(transactional_id)) else {
                return self.call(broker, transactional_id, input).await;
            };
            let mut ended = std::pin::pin!(shard.ended.notified());
            // Registered before the request: a completion between response and wait is not missed.
            ended.as_mut().enable();
            let reply = self.call(broker, transactional_id, &input).await?;
            let busy = reply.error == ErrorCode::ConcurrentTransactions;
            if !busy || tokio::time::timeout_at(until, ended).await.is_err() {
                return Ok(reply);
            }
        }
    }

    /// True if the coordinator of a transactional id may be on another node.
    pub(crate) fn may_be_remote(&self, transactional_id: &str) -> bool {
        let index = self.partition_of(transactional_id);
        self.shard(index).is_some() && !self.is_ready(index)
    }

    /// Verifies that a partition belongs to the ongoing transaction of a producer.
    pub(crate) fn verify(
        &self,
        broker: &Broker,
        transactional_id: &str,
        producer_id: i64,
        epoch: i16,
        topic: &str,
        partition: i32,
    ) -> Verification {
        let verify = |c: &Coordinator| {
            let verified = c.verify(transactional_id, producer_id, epoch, topic, partition);
            verified.map(|()| c.epoch())
        };
        self.query(broker, transactional_id, verify)?
    }

    /// As [`Self::verify`], with the local or the remote coordinator of the transactional id.
    pub(crate) async fn verify_anywhere(
        &self,
        broker: &Broker,
        transactional_id: &str,
        producer: (i64, i16),
        partitions: &[(&str, i32)],
    ) -> Vec<Verification> {
        // A local coordinator that is being loaded is awaited; if it is still missing, the code below returns the
        // error.
        let _ = self.wait_loaded(broker, self.partition_of(transactional_id)).await;
        if !self.may_be_remote(transactional_id) {
            let (id, epoch) = producer;
            let verify = |(topic, index): &(&str, i32)| {
                self.verify(broker, transactional_id, id, epoch, topic, *index)
            };
            return partitions.iter().map(verify).collect();
        }
        let coordinator_broker = broker.leader_of(TRANSACTIONS_TOPIC, self.partition_of(transactional_id));
        let results = match coordinator_broker {
            Some(coordinator_broker) if coordinator_broker.id == broker.options.node_id => {
                Err(ErrorCode::CoordinatorLoadInProgress)
            }
            Some(coordinator_broker) => {
                remote::verify(&broker.peers, &coordinator_broker, transactional_id, producer, partitions)
                    .await
            }
            None => Err(ErrorCode::CoordinatorNotAvailable),
        };
        results.unwrap_or_else(|code| vec![Err(code); partitions.len()])
    }

    /// Has the local or remote coordinator of a transactional id add partitions to the transaction of a producer that
    /// sends no AddPartitionsToTxn (transaction version 2). Returns when that is durable; atomic over the partitions.
    pub(crate) async fn add_anywhere(
        &self,
        broker: &Broker,
        transactional_id: &str,
        (producer_id, producer_epoch): (i64, i16),
        partitions: &[(&str, i32)],
    ) -> Vec<Verification> {
        let index = self.partition_of(transactional_id);
        let _ = self.wait_loaded(broker, index).await;
        let coordinator_broker = broker.leader_of(TRANSACTIONS_TOPIC, index);
        let results = match coordinator_broker {
            Some(coordinator_broker)
                if self.may_be_remote(transactional_id)
                    && coordinator_broker.id != broker.options.node_id =>
            {
                let producer = (producer_id, producer_epoch);
                remote::add(&broker.peers, &coordinator_broker, transactional_id, producer, partitions).await
            }
            _ => {
                let id: Arc<str> = transactional_id.into();
                let partitions: Vec<_> =
                    partitions.iter().map(|(topic, index)| TopicPartition::new(*topic, *index)).collect();
                let input = |token| Input::AddPartitions {
                    token,
                    version: remote::ADD_VERSION,
                    transactional_id: Arc::clone(&id),
                    producer_id,
                    producer_epoch,
                    partitions: partitions.clone(),
                };
                let reply = self.call_next(broker, transactional_id, input).await;
                reply.and_then(|reply| match reply.error {
                    ErrorCode::None => Ok(vec![Ok(ADDED); partitions.len()]),
                    code => Err(code),
                })
            }
        };
        results.unwrap_or_else(|code| vec![Err(code); partitions.len()])
    }

    /// Queries the coordinator of a transactional id.
    pub(crate) fn query<T>(
        &self,
        broker: &Broker,
        transactional_id: &str,
        query: impl FnOnce(&Coordinator) -> T,
    ) -> Result<T, ErrorCode> {
        let index = self.partition_of(transactional_id);
        let Some(shard) = self.shard(index) else { return Ok(query(&self.empty)) };
        let machine = lock(&shard.machine);
        let current = machine.as_ref().filter(|machine| machine.is_current());
        current.map(|m| query(&m.coordinator)).ok_or_else(|| self.unavailable_error(broker, index))
    }

    /// Queries all coordinators of this node.
    pub(crate) fn query_all<T>(&self, mut query: impl FnMut(&Coordinator) -> T) -> Vec<T> {
        let shards = self.shards.load();
        let query = |shard: &Arc<Shard>| {
            let machine = lock(&shard.machine);
            machine.as_ref().filter(|m| m.is_current()).map(|m| query(&m.coordinator))
        };
        shards.iter().filter_map(query).collect()
    }

    /// Runs the service: handles completed writes and deadlines.
    pub(crate) async fn serve(&self, broker: &Broker) {
        let mut query = None;
        loop {
            tokio::select! {
                done = self.done.take() => {
                    for done in done {
                        self.on_done(broker, done);
                    }
                }
                remote = self.remote.take() => self.send_remote(broker, remote),
                () = self.timer.wait(&mut query) => query = self.tick(broker),
                () = broker.shutdown.stopped() => return,
            }
        }
    }

    fn on_done(&self, broker: &Broker, done: Completion) {
        match done {
            Completion::Record((index, incarnation), token, result) => {
                self.run(broker, index, Some(incarnation), |c, now_ms| c.on_persisted(now_ms, token, result));
                if let Some(shard) = self.shard(index) {
                    shard.ended.notify_waiters();
                }
            }
            Completion::Marker((index, incarnation), token, at, result) => {
                self.run(broker, index, Some(incarnation), |c, now_ms| {
                    c.on_marker_written(now_ms, token, &at.topic, at.partition, result)
                });
            }
        }
    }

    /// Handles due deadlines; returns the time of the next tick.
    fn tick(&self, broker: &Broker) -> Option<Instant> {
        self.timer.begin_tick();
        let now_ms = broker.clock.monotonic_ms();
        let mut earliest = None;
        for (index, shard) in (0..).zip(self.shards.load().iter()) {
            let next = || lock(&shard.machine).as_ref().and_then(|m| m.coordinator.next_deadline());
            if next().is_some_and(|at| at <= now_ms) {
                self.run(broker, index, None, |c, now_ms| c.tick(now_ms));
            }
            earliest = earliest.into_iter().chain(next()).min();
        }
        next_tick(earliest, now_ms)
    }

    /// Runs one step of a coordinator and carries out its effects; false if it is not loaded, or not the expected
    /// one.
    fn run(
        &self,
        broker: &Broker,
        index: i32,
        expected: Option<u64>,
        step: impl FnOnce(&mut Coordinator, u64) -> Vec<Effect>,
    ) -> bool {
        let Some(shard) = self.shard(index) else { return false };
        let now_ms = broker.clock.monotonic_ms();
        let mut replies = Vec::new();
        {
            let mut machine = lock(&shard.machine);
            let expected = |m: &&mut Machine| {
                m.is_current() && expected.is_none_or(|incarnation| incarnation == m.incarnation)
            };
            let Some(machine) = machine.as_mut().filter(expected) else { return false };
            let Machine { incarnation, coordinator, partition, epoch } = machine;
            let coordinator_ref = (index, *incarnation);
            coordinator.set_wall_ms(now_ms, broker.clock.wall_ms());
            for effect in step(coordinator, now_ms) {
                match effect {
                    Effect::Reply(token, reply) => replies.push((token, reply)),
                    Effect::Persist { key, value, token, .. } => {
                        let batch = record(&key, value.as_deref(), broker.clock.wall_ms());
                        let done = self.done.clone();
                        // Only under the leader epoch in which it was decided.
                        append(broker, partition, *epoch, batch, move |result| {
                            done.push(Completion::Record(coordinator_ref, token, result))
                        });
                    }
                    Effect::WriteMarkers(markers) => self.write_markers(broker, coordinator_ref, &markers),
                }
            }
        }
        self.timer.on_change();
        let mut waiting = lock(&shard.waiting);
        for (token, reply) in replies {
            if let Some(sender) = waiting.remove(&token) {
                // The client may have disconnected; its request is processed all the same.
                let _ = sender.send(reply);
            }
        }
        true
    }
}

/// Appends a record under one leader epoch and calls `done` when it is committed or certainly is not.
fn append(
    broker: &Broker,
    partition: &Partition,
    epoch: i32,
    batch: Bytes,
    done: impl FnOnce(Result<(), ErrorCode>) + Send + 'static,
) {
    match partition.append_own(batch, broker.clock.wall_ms(), Some(epoch), None) {
        Ok(appended) => partition.when_committed(&appended, Ack::Call(Box::new(done))),
        Err(refused) => {
            tracing::warn!(partition = partition.index, reason = ?refused, "transaction state append failed");
            done(Err(refused.code));
        }
    }
}

fn record(key: &Bytes, value: Option<&[u8]>, wall_ms: i64) -> Bytes {
    let mut builder = BatchBuilder::new(Compression::None);
    builder.push(wall_ms, Some(key), value, &[]);
    builder.build()
}

fn load_batch(batch: &[u8], coordinator: &mut Coordinator) -> Result<(), String> {
    let batch = Bytes::copy_from_slice(batch);
    let (_, records) = records::decode_batch(&batch, MAX_DECOMPRESSED_BYTES).map_err(|e| e.to_string())?;
    for record in records {
        let key = record.key.unwrap_or_default();
        coordinator.replay(&key, record.value.as_deref()).map_err(|e| e.to_string())?;
    }
    Ok(())
}
