//! Drives the transaction coordinators: one per partition of `__transaction_state` that this node leads, each under its
//! own lock. A coordinator begins with what its partition holds once the node leads it and all of that is committed, and
//! counts no longer than that leadership. Markers for partitions of other nodes are sent to them.
//!
//! The machine decides; this keeps its records, writes the markers it wants into the partitions of a
//! transaction, and reports back when they are committed. Both happen under the machine's lock, so records
//! enter the log in the order in which they were decided.

mod far;
mod markers;

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
use crate::group_service::PATIENCE;
use crate::loops::lock;
use crate::partition::{Ack, MAX_DECOMPRESSED_BYTES, Partition, Refused};
use crate::ticker::{Ticker, next_look};
use crate::topics::TRANSACTIONS_TOPIC;
use crate::transactions::{
    self, Config, Coordinator, Effect, Input, MarkersToken, PersistToken, Reply, Token, TopicPartition,
};

/// How long a request that begins a transaction waits for the end of the one before. Clients that are told to come back
/// wait longer than the markers take.
const ENDING: Duration = Duration::from_millis(100);

/// The end of something a coordinator asked for.
enum Done {
    Record(Whose, PersistToken, Result<(), ErrorCode>),
    Marker(Whose, MarkersToken, TopicPartition, Result<(), ErrorCode>),
}

/// A coordinator: its partition, and which of the coordinators that partition has had here.
type Whose = (i32, u64);

/// A partition that belongs to an open transaction, as verified by the coordinator of this epoch.
pub(crate) type Verification = Result<i32, ErrorCode>;

/// Stands for the coordinator's epoch where a partition was added: a coordinator that was replaced adds nothing.
const ADDED: i32 = i32::MAX;

/// All transactions of this node.
pub(crate) struct TransactionService {
    config: Config,
    wanted_partitions: i32,
    /// One per partition of the transaction topic, led here or not; none while there is no such topic.
    shards: ArcSwap<Vec<Arc<Shard>>>,
    /// What those are answered from who ask before there is a transaction topic: it knows no transactional id.
    nobody: Coordinator,
    next_token: AtomicU64,
    done: Completions<Done>,
    far: Completions<markers::FarMarker>,
    ticker: Ticker,
    /// Told when a coordinator has been read, or is gone.
    read: Notify,
}

#[derive(Default)]
struct Shard {
    /// Nothing while another node leads the partition, or while it is being read.
    machine: Mutex<Option<Machine>>,
    waiting: Mutex<HashMap<Token, oneshot::Sender<Reply>>>,
    /// Told when a write has ended: a transaction may be over.
    ended: Notify,
}

struct Machine {
    /// Tells this coordinator from others of the same partition: the end of a write may come when another stands here.
    life: u64,
    coordinator: Coordinator,
    /// The partition that keeps it, and the leadership in which it was read.
    partition: Arc<Partition>,
    epoch: i32,
}

impl Machine {
    /// Whether the leadership it was read in lasts.
    fn counts(&self) -> bool {
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
        let mut nobody = Coordinator::new(config.clone(), 0);
        nobody.start(0);
        Self {
            config,
            nobody,
            wanted_partitions: options.transaction_partitions.max(1),
            shards: ArcSwap::default(),
            next_token: AtomicU64::new(1),
            done: Completions::default(),
            far: Completions::default(),
            ticker: Ticker::default(),
            read: Notify::new(),
        }
    }

    /// There is a transaction topic of so many partitions, which never change in number.
    pub(crate) fn on_topic(&self, partitions: i32) {
        self.shards.store(Arc::new((0..partitions).map(|_| Arc::default()).collect()));
    }

    /// This node leads a partition of the transaction topic: reads the transactions it keeps, and carries out what was
    /// decided.
    pub(crate) fn lead(
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
        // The leadership of the partition tells its coordinators apart: partitions refuse markers of older ones.
        let mut coordinator = Coordinator::new(self.config.clone(), epoch);
        coordinator.set_wall_ms(now_ms, wall_ms);
        partition.read_all(|batch| load_batch(batch, &mut coordinator))?;
        let life = self.next_token.fetch_add(1, Ordering::Relaxed);
        let (index, partition) = (partition.index, Arc::clone(partition));
        *lock(&shard.machine) = Some(Machine { life, coordinator, partition, epoch });
        self.run(broker, index, Some(life), Coordinator::start);
        self.read.notify_waiters();
        Ok(())
    }

    /// This node no longer leads a partition of the transaction topic.
    pub(crate) fn resign(&self, partition: &Partition) {
        if let Some(shard) = self.shard(partition.index) {
            // One of a later leadership stays.
            lock(&shard.machine).take_if(|machine| !machine.counts());
            lock(&shard.waiting).clear();
            self.read.notify_waiters();
        }
    }

    /// Why a coordinator does not answer: its partition is led elsewhere, or is being read.
    fn missing(&self, broker: &Broker, index: i32) -> ErrorCode {
        match broker.topics.partition(TRANSACTIONS_TOPIC, index) {
            Ok(_) => ErrorCode::CoordinatorLoadInProgress,
            Err(_) => ErrorCode::NotCoordinator,
        }
    }

    fn is_ready(&self, index: i32) -> bool {
        self.shard(index).is_some_and(|s| lock(&s.machine).as_ref().is_some_and(Machine::counts))
    }

    /// Waits a moment for a coordinator that is being read.
    async fn ready(&self, broker: &Broker, index: i32) -> Result<(), ErrorCode> {
        let read = async {
            loop {
                let news = self.read.notified();
                if self.is_ready(index) {
                    return Ok(());
                }
                match self.missing(broker, index) {
                    ErrorCode::CoordinatorLoadInProgress => news.await,
                    code => return Err(code),
                }
            }
        };
        tokio::time::timeout(PATIENCE, read).await.unwrap_or(Err(ErrorCode::CoordinatorLoadInProgress))
    }

    fn shard(&self, partition: i32) -> Option<Arc<Shard>> {
        usize::try_from(partition).ok().and_then(|at| self.shards.load().get(at).cloned())
    }

    /// The partition of the transaction topic that keeps a transactional id.
    pub(crate) fn partition_of(&self, transactional_id: &str) -> i32 {
        let partitions = self.shards.load().len() as i32;
        let partitions = if partitions == 0 { self.wanted_partitions } else { partitions };
        transactions::partition_for(transactional_id, partitions)
    }

    /// Makes the transaction topic the first time somebody needs it.
    pub(crate) async fn ensure_topic(&self, broker: &Broker) -> Result<(), ErrorCode> {
        broker.ensure_internal(TRANSACTIONS_TOPIC, self.wanted_partitions).await
    }

    /// Puts a request to the coordinator of a transactional id and waits for the answer.
    pub(crate) async fn call(
        &self,
        broker: &Broker,
        transactional_id: &str,
        input: impl FnOnce(Token) -> Input,
    ) -> Result<Reply, ErrorCode> {
        self.ensure_topic(broker).await?;
        let index = self.partition_of(transactional_id);
        self.ready(broker, index).await?;
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

    /// The same for a request that may be the first of a transaction while the one before it is still ending: it waits
    /// for that, for a moment.
    pub(crate) async fn call_next(
        &self,
        broker: &Broker,
        transactional_id: &str,
        input: impl Fn(Token) -> Input,
    ) -> Result<Reply, ErrorCode> {
        let until = Instant::now() + ENDING;
        loop {
            let Some(shard) = self.shard(self.partition_of(transactional_id)) else {
                return self.call(broker, transactional_id, input).await;
            };
            let mut ended = std::pin::pin!(shard.ended.notified());
            // Before the question: an end between answer and wait is not missed.
            ended.as_mut().enable();
            let reply = self.call(broker, transactional_id, &input).await?;
            let busy = reply.error == ErrorCode::ConcurrentTransactions;
            if !busy || tokio::time::timeout_at(until, ended).await.is_err() {
                return Ok(reply);
            }
        }
    }

    /// Whether this node may have to ask another about a transactional id.
    pub(crate) fn is_elsewhere(&self, transactional_id: &str) -> bool {
        let index = self.partition_of(transactional_id);
        self.shard(index).is_some() && !self.is_ready(index)
    }

    /// Whether a partition belongs to the ongoing transaction of a producer.
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
        self.look(broker, transactional_id, verify)?
    }

    /// The same, asked of whichever broker looks after the transactional id.
    pub(crate) async fn verify_anywhere(
        &self,
        broker: &Broker,
        transactional_id: &str,
        producer: (i64, i16),
        partitions: &[(&str, i32)],
    ) -> Vec<Verification> {
        // One that is here and being read is waited for; what is missing then is said below.
        let _ = self.ready(broker, self.partition_of(transactional_id)).await;
        if !self.is_elsewhere(transactional_id) {
            let (id, epoch) = producer;
            let verify = |(topic, index): &(&str, i32)| {
                self.verify(broker, transactional_id, id, epoch, topic, *index)
            };
            return partitions.iter().map(verify).collect();
        }
        let keeper = broker.leader_of(TRANSACTIONS_TOPIC, self.partition_of(transactional_id));
        let answers = match keeper {
            Some(keeper) if keeper.id == broker.options.node_id => Err(ErrorCode::CoordinatorLoadInProgress),
            Some(keeper) => far::verify(&broker.peers, &keeper, transactional_id, producer, partitions).await,
            None => Err(ErrorCode::CoordinatorNotAvailable),
        };
        answers.unwrap_or_else(|code| vec![Err(code); partitions.len()])
    }

    /// Has the coordinator of a transactional id, here or elsewhere, add partitions to the transaction of a producer that
    /// does not announce them (transaction version 2). Answers when that is durable; all are added, or none.
    pub(crate) async fn add_anywhere(
        &self,
        broker: &Broker,
        transactional_id: &str,
        (producer_id, producer_epoch): (i64, i16),
        partitions: &[(&str, i32)],
    ) -> Vec<Verification> {
        let index = self.partition_of(transactional_id);
        let _ = self.ready(broker, index).await;
        let keeper = broker.leader_of(TRANSACTIONS_TOPIC, index);
        let answers = match keeper {
            Some(keeper) if self.is_elsewhere(transactional_id) && keeper.id != broker.options.node_id => {
                let producer = (producer_id, producer_epoch);
                far::add(&broker.peers, &keeper, transactional_id, producer, partitions).await
            }
            _ => {
                let id: Arc<str> = transactional_id.into();
                let partitions: Vec<_> =
                    partitions.iter().map(|(topic, index)| TopicPartition::new(*topic, *index)).collect();
                let input = |token| Input::AddPartitions {
                    token,
                    version: far::ADD_VERSION,
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
        answers.unwrap_or_else(|code| vec![Err(code); partitions.len()])
    }

    /// Looks at the coordinator of a transactional id.
    pub(crate) fn look<T>(
        &self,
        broker: &Broker,
        transactional_id: &str,
        look: impl FnOnce(&Coordinator) -> T,
    ) -> Result<T, ErrorCode> {
        let index = self.partition_of(transactional_id);
        let Some(shard) = self.shard(index) else { return Ok(look(&self.nobody)) };
        let machine = lock(&shard.machine);
        let here = machine.as_ref().filter(|machine| machine.counts());
        here.map(|m| look(&m.coordinator)).ok_or_else(|| self.missing(broker, index))
    }

    /// Looks at all coordinators of this node.
    pub(crate) fn look_at_all<T>(&self, mut look: impl FnMut(&Coordinator) -> T) -> Vec<T> {
        let shards = self.shards.load();
        let look = |shard: &Arc<Shard>| {
            let machine = lock(&shard.machine);
            machine.as_ref().filter(|m| m.counts()).map(|m| look(&m.coordinator))
        };
        shards.iter().filter_map(look).collect()
    }

    /// The whole life of the service besides requests: ends of writes, and time.
    pub(crate) async fn serve(&self, broker: &Broker) {
        let mut look = None;
        loop {
            tokio::select! {
                done = self.done.take() => {
                    for done in done {
                        self.on_done(broker, done);
                    }
                }
                far = self.far.take() => self.send_far(broker, far),
                () = self.ticker.wait(&mut look) => look = self.tick(broker),
                () = broker.shutdown.stopped() => return,
            }
        }
    }

    fn on_done(&self, broker: &Broker, done: Done) {
        match done {
            Done::Record((index, life), token, result) => {
                self.run(broker, index, Some(life), |c, now_ms| c.on_persisted(now_ms, token, result));
                if let Some(shard) = self.shard(index) {
                    shard.ended.notify_waiters();
                }
            }
            Done::Marker((index, life), token, at, result) => {
                self.run(broker, index, Some(life), |c, now_ms| {
                    c.on_marker_written(now_ms, token, &at.topic, at.partition, result)
                });
            }
        }
    }

    /// Does what is due; says when to look again.
    fn tick(&self, broker: &Broker) -> Option<Instant> {
        self.ticker.begin_look();
        let now_ms = broker.clock.monotonic_ms();
        let mut earliest = None;
        for (index, shard) in (0..).zip(self.shards.load().iter()) {
            let next = || lock(&shard.machine).as_ref().and_then(|m| m.coordinator.next_deadline());
            if next().is_some_and(|at| at <= now_ms) {
                self.run(broker, index, None, |c, now_ms| c.tick(now_ms));
            }
            earliest = earliest.into_iter().chain(next()).min();
        }
        next_look(earliest, now_ms)
    }

    /// Takes one step of a coordinator and does what it wants done; false when it is not here, or not the one that is
    /// meant.
    fn run(
        &self,
        broker: &Broker,
        index: i32,
        meant: Option<u64>,
        step: impl FnOnce(&mut Coordinator, u64) -> Vec<Effect>,
    ) -> bool {
        let Some(shard) = self.shard(index) else { return false };
        let now_ms = broker.clock.monotonic_ms();
        let mut replies = Vec::new();
        {
            let mut machine = lock(&shard.machine);
            let meant = |m: &&mut Machine| m.counts() && meant.is_none_or(|life| life == m.life);
            let Some(machine) = machine.as_mut().filter(meant) else { return false };
            let Machine { life, coordinator, partition, epoch } = machine;
            let whose = (index, *life);
            coordinator.set_wall_ms(now_ms, broker.clock.wall_ms());
            for effect in step(coordinator, now_ms) {
                match effect {
                    Effect::Reply(token, reply) => replies.push((token, reply)),
                    Effect::Persist { key, value, token, .. } => {
                        let batch = record(&key, value.as_deref(), broker.clock.wall_ms());
                        let done = self.done.clone();
                        // In the leadership in which it was decided, or not at all.
                        append(broker, partition, *epoch, batch, move |result| {
                            done.push(Done::Record(whose, token, result))
                        });
                    }
                    Effect::WriteMarkers(markers) => self.write_markers(broker, whose, &markers),
                }
            }
        }
        self.ticker.touch();
        let mut waiting = lock(&shard.waiting);
        for (token, reply) in replies {
            if let Some(sender) = waiting.remove(&token) {
                // The client may be gone; its request is carried out all the same.
                let _ = sender.send(reply);
            }
        }
        true
    }
}

/// Appends a record in one leadership and calls `done` when it is committed or certainly is not.
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
            tracing::warn!(partition = partition.index, reason = ?refused, "cannot keep transaction state");
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
