//! Drives the transaction coordinators: one per partition of `__transaction_state`, each under its own lock.
//!
//! The machine decides; this keeps its records, writes the markers it wants into the partitions of a
//! transaction, and reports back when they are committed. Both happen under the machine's lock, so records
//! enter the log in the order in which they were decided.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use tokio::sync::oneshot;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::{self, BatchBuilder, ControlKind};

use crate::broker::{Broker, BrokerOptions};
use crate::completions::Completions;
use crate::loops::lock;
use crate::partition::{Ack, MAX_DECOMPRESSED_BYTES, Refused};
use crate::topics::{OFFSETS_TOPIC, TRANSACTIONS_TOPIC};
use crate::transactions::{
    self, Config, Coordinator, Effect, Input, MarkersToken, PersistToken, Reply, Token, TopicPartition,
};

/// How often deadlines of transactions are looked at.
const TICK: Duration = Duration::from_millis(50);

/// The end of something a coordinator asked for.
enum Done {
    Record(usize, PersistToken, Result<(), ErrorCode>),
    Marker(usize, MarkersToken, TopicPartition, Result<(), ErrorCode>, OffsetsMarker),
}

/// What the group coordinator must know of a marker: set for partitions of the offsets topic.
#[derive(Clone, Copy)]
struct OffsetsMarker {
    producer_id: i64,
    producer_epoch: i16,
    commit: bool,
}

/// All transactions of this node.
pub(crate) struct TransactionService {
    config: Config,
    wanted_partitions: i32,
    shards: OnceLock<Vec<Shard>>,
    next_token: AtomicU64,
    done: Completions<Done>,
}

struct Shard {
    coordinator: Mutex<Coordinator>,
    waiting: Mutex<HashMap<Token, oneshot::Sender<Reply>>>,
}

impl TransactionService {
    pub(crate) fn new(options: &BrokerOptions) -> Self {
        let config = Config {
            max_timeout_ms: options.transaction_max_timeout_ms,
            id_expiration_ms: options.transactional_id_expiration_ms,
            ..Config::default()
        };
        Self {
            config,
            wanted_partitions: options.transaction_partitions,
            shards: OnceLock::new(),
            next_token: AtomicU64::new(1),
            done: Completions::default(),
        }
    }

    /// Reads every partition of the transaction topic. What was decided is carried out once ticks run.
    pub(crate) fn load(&self, broker: &Broker) -> Result<(), Refused> {
        let topic = broker.topics.get(TRANSACTIONS_TOPIC);
        let partitions = topic.map(|t| t.partitions.load_full()).unwrap_or_default();
        let count =
            if partitions.is_empty() { self.wanted_partitions.max(1) as usize } else { partitions.len() };
        let (now_ms, wall_ms) = (broker.clock.monotonic_ms(), broker.clock.wall_ms());
        let mut shards = Vec::with_capacity(count);
        for index in 0..count {
            // With one node nobody else was ever the coordinator; the epoch tells coordinators apart.
            let mut coordinator = Coordinator::new(self.config.clone(), 0);
            coordinator.set_wall_ms(now_ms, wall_ms);
            if let Some(partition) = partitions.get(index) {
                partition.read_all(|batch| load_batch(batch, &mut coordinator))?;
            }
            shards.push(Shard { coordinator: Mutex::new(coordinator), waiting: Mutex::default() });
        }
        let _ = self.shards.set(shards);
        for index in 0..count {
            self.run(broker, index, Coordinator::start);
        }
        Ok(())
    }

    fn shards(&self) -> &[Shard] {
        self.shards.get().map_or(&[], Vec::as_slice)
    }

    fn index_of(&self, transactional_id: &str) -> usize {
        transactions::partition_for(transactional_id, self.shards().len() as i32) as usize
    }

    /// Makes the transaction topic the first time somebody needs it.
    pub(crate) async fn ensure_topic(&self, broker: &Broker) -> Result<(), ErrorCode> {
        broker.topics.ensure_internal(TRANSACTIONS_TOPIC, self.shards().len()).await
    }

    /// Puts a request to the coordinator of a transactional id and waits for the answer.
    pub(crate) async fn call(
        &self,
        broker: &Broker,
        transactional_id: &str,
        input: impl FnOnce(Token) -> Input,
    ) -> Result<Reply, ErrorCode> {
        self.ensure_topic(broker).await?;
        let index = self.index_of(transactional_id);
        let token = Token(self.next_token.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = oneshot::channel();
        lock(&self.shards()[index].waiting).insert(token, sender);
        self.run(broker, index, |c, now_ms| c.step(now_ms, input(token)));
        receiver.await.map_err(|_| ErrorCode::CoordinatorNotAvailable)
    }

    /// Whether a partition belongs to the ongoing transaction of a producer.
    pub(crate) fn verify(
        &self,
        transactional_id: &str,
        producer_id: i64,
        epoch: i16,
        topic: &str,
        partition: i32,
    ) -> Result<(), ErrorCode> {
        let index = self.index_of(transactional_id);
        let shard = self.shards().get(index).ok_or(ErrorCode::CoordinatorNotAvailable)?;
        lock(&shard.coordinator).verify(transactional_id, producer_id, epoch, topic, partition)
    }

    /// Looks at the coordinator of a transactional id.
    pub(crate) fn look<T>(&self, transactional_id: &str, look: impl FnOnce(&Coordinator) -> T) -> T {
        look(&lock(&self.shards()[self.index_of(transactional_id)].coordinator))
    }

    /// Looks at all coordinators.
    pub(crate) fn look_at_all<T>(&self, mut look: impl FnMut(&Coordinator) -> T) -> Vec<T> {
        self.shards().iter().map(|s| look(&lock(&s.coordinator))).collect()
    }

    /// The whole life of the service besides requests: ends of writes, and time.
    pub(crate) async fn serve(&self, broker: &Broker) {
        loop {
            tokio::select! {
                done = self.done.take() => {
                    for done in done {
                        self.on_done(broker, done);
                    }
                }
                () = tokio::time::sleep(TICK) => self.tick(broker),
                () = broker.shutdown.stopped() => return,
            }
        }
    }

    fn on_done(&self, broker: &Broker, done: Done) {
        match done {
            Done::Record(index, token, result) => {
                self.run(broker, index, |c, now_ms| c.on_persisted(now_ms, token, result));
            }
            Done::Marker(index, token, at, result, marker) => {
                if result.is_ok() && *at.topic == *OFFSETS_TOPIC {
                    let OffsetsMarker { producer_id, producer_epoch, commit } = marker;
                    broker.groups.on_marker(
                        broker,
                        at.partition as usize,
                        producer_id,
                        producer_epoch,
                        commit,
                    );
                }
                self.run(broker, index, |c, now_ms| {
                    c.on_marker_written(now_ms, token, &at.topic, at.partition, result)
                });
            }
        }
    }

    fn tick(&self, broker: &Broker) {
        let now_ms = broker.clock.monotonic_ms();
        for (index, shard) in self.shards().iter().enumerate() {
            let due = lock(&shard.coordinator).next_deadline().is_some_and(|at| at <= now_ms);
            if due {
                self.run(broker, index, |c, now_ms| c.tick(now_ms));
            }
        }
    }

    /// Takes one step of a coordinator and does what it wants done.
    fn run(&self, broker: &Broker, index: usize, step: impl FnOnce(&mut Coordinator, u64) -> Vec<Effect>) {
        let Some(shard) = self.shards().get(index) else { return };
        let now_ms = broker.clock.monotonic_ms();
        let mut replies = Vec::new();
        {
            let mut coordinator = lock(&shard.coordinator);
            coordinator.set_wall_ms(now_ms, broker.clock.wall_ms());
            for effect in step(&mut coordinator, now_ms) {
                match effect {
                    Effect::Reply(token, reply) => replies.push((token, reply)),
                    Effect::Persist { key, value, token, .. } => {
                        let at = TopicPartition::new(TRANSACTIONS_TOPIC, index as i32);
                        let batch = record(&key, value.as_deref(), broker.clock.wall_ms());
                        let done = self.done.clone();
                        append(broker, &at, batch, move |result| {
                            done.push(Done::Record(index, token, result))
                        });
                    }
                    Effect::WriteMarkers {
                        token,
                        producer_id,
                        producer_epoch,
                        commit,
                        coordinator_epoch,
                        partitions,
                        ..
                    } => {
                        let marker = OffsetsMarker { producer_id, producer_epoch, commit };
                        self.write_markers(broker, index, token, marker, coordinator_epoch, &partitions);
                    }
                }
            }
        }
        let mut waiting = lock(&shard.waiting);
        for (token, reply) in replies {
            if let Some(sender) = waiting.remove(&token) {
                // The client may be gone; its request is carried out all the same.
                let _ = sender.send(reply);
            }
        }
    }

    fn write_markers(
        &self,
        broker: &Broker,
        index: usize,
        token: MarkersToken,
        marker: OffsetsMarker,
        coordinator_epoch: i32,
        partitions: &[(Arc<str>, Vec<i32>)],
    ) {
        let kind = if marker.commit { ControlKind::Commit } else { ControlKind::Abort };
        let wall_ms = broker.clock.wall_ms();
        for (topic, indexes) in partitions {
            for partition in indexes {
                let at = TopicPartition::new(Arc::clone(topic), *partition);
                let done = self.done.clone();
                let report = at.clone();
                let batch = records::control_batch(
                    kind,
                    marker.producer_id,
                    marker.producer_epoch,
                    coordinator_epoch,
                    wall_ms,
                    0,
                    0,
                );
                append(broker, &at, batch, move |result| {
                    // A topic deleted meanwhile needs no marker.
                    let result =
                        if result == Err(ErrorCode::UnknownTopicOrPartition) { Ok(()) } else { result };
                    done.push(Done::Marker(index, token, report, result, marker));
                });
            }
        }
    }
}

/// Appends a batch and calls `done` when it is committed or certainly is not.
fn append(
    broker: &Broker,
    at: &TopicPartition,
    batch: Bytes,
    done: impl FnOnce(Result<(), ErrorCode>) + Send + 'static,
) {
    let Some(partition) = broker.topics.partition(&at.topic, at.partition) else {
        done(Err(ErrorCode::UnknownTopicOrPartition));
        return;
    };
    let mut wakes = Vec::new();
    match partition.append_own(batch, broker.clock.wall_ms(), None, &mut wakes) {
        Ok(appended) => partition.when_committed(appended.end, Ack::Call(Box::new(done))),
        Err(refused) => {
            tracing::warn!(topic = %at.topic, partition = at.partition, reason = ?refused, "cannot keep transaction state");
            done(Err(refused.code));
        }
    }
    broker.loops.wake(None, &mut wakes);
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
