//! Drives the group machines: one per partition of `__consumer_offsets`, each under its own lock.
//!
//! The machine decides; this appends what it wants kept, reports back when that is committed, and hands its
//! answers to the requests that wait for them. Appends of a machine happen under its lock, so they enter the
//! log in the order in which the machine decided them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use tokio::sync::oneshot;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::{self, BatchBuilder, BatchHeader, ControlKind};

use crate::broker::{Broker, BrokerOptions};
use crate::completions::Completions;
use crate::groups::{
    self, Config, Effect, GroupRecord, Groups, Loader, PersistToken, Response, Token, TxnProducer,
};
use crate::loops::lock;
use crate::partition::{Ack, MAX_DECOMPRESSED_BYTES, Refused, Verified};
use crate::topics::OFFSETS_TOPIC;

/// How often deadlines of groups are looked at.
const TICK: Duration = Duration::from_millis(50);

/// All consumer groups of this node.
pub(crate) struct GroupService {
    config: Config,
    wanted_partitions: i32,
    shards: OnceLock<Vec<Shard>>,
    next_token: AtomicU64,
    written: Completions<(usize, PersistToken, Result<(), ErrorCode>)>,
    /// By producer: what was known of it before its coordinator was asked about the offsets it sends.
    verified: Mutex<HashMap<i64, Verified>>,
}

struct Shard {
    groups: Mutex<Groups>,
    waiting: Mutex<HashMap<Token, oneshot::Sender<Response>>>,
}

impl GroupService {
    pub(crate) fn new(options: &BrokerOptions) -> Self {
        let config = Config {
            min_session_timeout_ms: i32::try_from(options.group_min_session_timeout_ms).unwrap_or(i32::MAX),
            max_session_timeout_ms: i32::try_from(options.group_max_session_timeout_ms).unwrap_or(i32::MAX),
            initial_rebalance_delay_ms: options.group_initial_rebalance_delay_ms,
            max_group_size: options.group_max_size,
            max_offset_metadata: options.offset_metadata_max_bytes,
            offset_retention_ms: options.offsets_retention_ms,
            ..Config::default()
        };
        Self {
            config,
            wanted_partitions: options.offsets_partitions,
            shards: OnceLock::new(),
            next_token: AtomicU64::new(1),
            written: Completions::default(),
            verified: Mutex::default(),
        }
    }

    /// Reads every partition of the offsets topic.
    pub(crate) fn load(&self, broker: &Broker) -> Result<(), Refused> {
        let topic = broker.topics.get(OFFSETS_TOPIC);
        let partitions = topic.map(|t| t.partitions.load_full()).unwrap_or_default();
        let count =
            if partitions.is_empty() { self.wanted_partitions.max(1) as usize } else { partitions.len() };
        let (now_ms, wall_ms) = (broker.clock.monotonic_ms(), broker.clock.wall_ms());
        let mut shards = Vec::with_capacity(count);
        for index in 0..count {
            let mut loader = Loader::new();
            if let Some(partition) = partitions.get(index) {
                partition.read_all(|batch| load_batch(batch, &mut loader))?;
            }
            let groups = loader.finish(now_ms, wall_ms, self.config.clone(), fastrand::u128(..));
            shards.push(Shard { groups: Mutex::new(groups), waiting: Mutex::default() });
        }
        let _ = self.shards.set(shards);
        Ok(())
    }

    fn shards(&self) -> &[Shard] {
        self.shards.get().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn count(&self) -> usize {
        self.shards().iter().map(|s| lock(&s.groups).len()).sum()
    }

    /// The partition of the offsets topic that keeps a group.
    pub(crate) fn partition_of(&self, group: &str) -> i32 {
        groups::partition_for(group, self.shards().len() as i32)
    }

    /// Makes the offsets topic the first time somebody needs it.
    pub(crate) async fn ensure_topic(&self, broker: &Broker) -> Result<(), ErrorCode> {
        broker.topics.ensure_internal(OFFSETS_TOPIC, self.shards().len()).await
    }

    /// Puts a request to the machine of its group and waits for the answer.
    pub(crate) async fn call(
        &self,
        broker: &Broker,
        group: &str,
        request: impl FnOnce(&mut Groups, u64, Token) -> Vec<Effect>,
    ) -> Result<Response, ErrorCode> {
        self.ensure_topic(broker).await?;
        let index = self.partition_of(group) as usize;
        let token = Token(self.next_token.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = oneshot::channel();
        lock(&self.shards()[index].waiting).insert(token, sender);
        self.run(broker, index, |groups, now_ms| request(groups, now_ms, token));
        receiver.await.map_err(|_| ErrorCode::CoordinatorNotAvailable)
    }

    /// Notes what is known of a producer, before the transaction that its offsets belong to is checked.
    pub(crate) fn before_verifying(&self, broker: &Broker, group: &str, producer_id: i64) {
        if let Some(partition) = broker.topics.partition(OFFSETS_TOPIC, self.partition_of(group)) {
            lock(&self.verified).insert(producer_id, partition.before_verifying(producer_id));
        }
    }

    /// Takes [`Self::before_verifying`] back when nothing was written.
    pub(crate) fn after_verifying(&self, producer_id: i64) {
        lock(&self.verified).remove(&producer_id);
    }

    /// Looks at the machine of a group without changing it.
    pub(crate) fn look<T>(&self, group: &str, look: impl FnOnce(&mut Groups) -> T) -> T {
        let index = self.partition_of(group) as usize;
        look(&mut lock(&self.shards()[index].groups))
    }

    /// Looks at all machines.
    pub(crate) fn look_at_all<T>(&self, mut look: impl FnMut(&mut Groups) -> T) -> Vec<T> {
        self.shards().iter().map(|s| look(&mut lock(&s.groups))).collect()
    }

    /// The whole life of the service besides requests: ends of writes, and time.
    pub(crate) async fn serve(&self, broker: &Broker) {
        loop {
            tokio::select! {
                written = self.written.take() => {
                    for (index, token, result) in written {
                        self.run(broker, index, |groups, now_ms| groups.on_persisted(now_ms, token, result));
                    }
                }
                () = tokio::time::sleep(TICK) => self.tick(broker),
                () = broker.shutdown.stopped() => return,
            }
        }
    }

    fn tick(&self, broker: &Broker) {
        let now_ms = broker.clock.monotonic_ms();
        for (index, shard) in self.shards().iter().enumerate() {
            let due = lock(&shard.groups).next_deadline().is_some_and(|at| at <= now_ms);
            if due {
                self.run(broker, index, |groups, now_ms| groups.tick(now_ms));
            }
        }
    }

    /// A transaction that wrote offsets to partition `index` has ended.
    pub(crate) fn on_marker(
        &self,
        broker: &Broker,
        index: usize,
        producer_id: i64,
        epoch: i16,
        commit: bool,
    ) {
        self.run(broker, index, |groups, _| {
            groups.on_txn_marker(producer_id, epoch, commit);
            Vec::new()
        });
    }

    /// Offsets of a topic that is gone are forgotten.
    pub(crate) fn on_topic_deleted(&self, broker: &Broker, topic: &str) {
        if broker.topics.get(OFFSETS_TOPIC).is_some() {
            for index in 0..self.shards().len() {
                self.run(broker, index, |groups, now_ms| groups.on_topic_deleted(now_ms, topic));
            }
        }
    }

    /// Takes one step of a machine and does what it wants done.
    fn run(&self, broker: &Broker, index: usize, step: impl FnOnce(&mut Groups, u64) -> Vec<Effect>) {
        let Some(shard) = self.shards().get(index) else { return };
        let now_ms = broker.clock.monotonic_ms();
        let mut replies = Vec::new();
        {
            let mut groups = lock(&shard.groups);
            groups.set_wall_ms(now_ms, broker.clock.wall_ms());
            for effect in step(&mut groups, now_ms) {
                match effect {
                    Effect::Reply(token, response) => replies.push((token, response)),
                    Effect::Persist { records, txn, then, .. } => {
                        self.persist(broker, index, &records, txn, then)
                    }
                }
            }
        }
        let mut waiting = lock(&shard.waiting);
        for (token, response) in replies {
            if let Some(sender) = waiting.remove(&token) {
                // The client may be gone; its request is answered all the same.
                let _ = sender.send(response);
            }
        }
    }

    fn persist(
        &self,
        broker: &Broker,
        index: usize,
        records: &[GroupRecord],
        txn: Option<TxnProducer>,
        then: PersistToken,
    ) {
        let written = self.written.clone();
        let wall_ms = broker.clock.wall_ms();
        let Some(partition) = broker.topics.partition(OFFSETS_TOPIC, index as i32) else {
            written.push((index, then, Err(ErrorCode::CoordinatorNotAvailable)));
            return;
        };
        let mut wakes = Vec::new();
        let verified = txn.and_then(|producer| lock(&self.verified).remove(&producer.id));
        match partition.append_own(encode(records, txn, wall_ms), wall_ms, verified, &mut wakes) {
            Ok(appended) => {
                let done = move |result| written.push((index, then, result));
                partition.when_committed(appended.end, Ack::Call(Box::new(done)));
            }
            Err(refused) => {
                tracing::warn!(index, reason = ?refused.message, "cannot keep group state");
                written.push((index, then, Err(refused.code)));
            }
        }
        broker.loops.wake(None, &mut wakes);
    }
}

fn encode(records: &[GroupRecord], txn: Option<TxnProducer>, wall_ms: i64) -> Bytes {
    let mut builder = BatchBuilder::new(Compression::None);
    if let Some(producer) = txn {
        // Written by the coordinator on the producer's behalf: it has no sequence.
        builder = builder.producer(producer.id, producer.epoch, records::NO_SEQUENCE).transactional(true);
    }
    for (key, value) in records {
        builder.push(wall_ms, Some(key), value.as_deref(), &[]);
    }
    builder.build()
}

fn load_batch(batch: &[u8], loader: &mut Loader) -> Result<(), String> {
    let header = BatchHeader::parse(batch).ok_or("a malformed batch")?;
    if header.is_control() {
        let kind = records::control_kind(batch);
        loader.marker(header.producer_id, header.producer_epoch, kind == Some(ControlKind::Commit));
        return Ok(());
    }
    let txn = header.is_transactional().then_some((header.producer_id, header.producer_epoch));
    let (_, records) = records::decode_batch(&Bytes::copy_from_slice(batch), MAX_DECOMPRESSED_BYTES)
        .map_err(|e| e.to_string())?;
    for record in records {
        let key = record.key.unwrap_or_default();
        loader.record(key, record.value, txn).map_err(|e| e.to_string())?;
    }
    Ok(())
}
