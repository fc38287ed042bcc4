//! Drives the group machines: one per partition of `__consumer_offsets` that this node leads, each under its own lock.
//! A machine begins with what its partition holds once the node leads it and all of that is committed, and counts no
//! longer than that leadership: those who ask then, and those who wait, are told to look for the coordinator. Who asks
//! while it is being read waits a moment, and is then told to ask again.
//!
//! The machine decides; this appends what it wants kept, reports back when that is committed, and hands its
//! answers to the requests that wait for them. Appends of a machine happen under its lock, so they enter the
//! log in the order in which the machine decided them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use hashbrown::HashMap;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::{self, BatchBuilder, BatchHeader, ControlKind};

use crate::broker::{Broker, BrokerOptions};
use crate::completions::Completions;
use crate::groups::{
    self, Config, Effect, GroupRecord, Groups, Loader, PersistToken, Response, Token, TxnProducer,
};
use crate::loops::lock;
use crate::partition::{Ack, Call, MAX_DECOMPRESSED_BYTES, Partition, Refused, TxnMarker, VerificationGuard};
use crate::ticker::{Ticker, next_look};
use crate::topics::OFFSETS_TOPIC;

/// How long a request waits for a machine that is being read. A client that is told to ask again takes longer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// The key of a record that says nothing: its version is none that anybody reads. Without a value, it is compacted away.
const NOTHING_KEY: [u8; 2] = i16::MAX.to_be_bytes();

/// All consumer groups of this node.
pub(crate) struct GroupService {
    config: Config,
    wanted_partitions: i32,
    /// One per partition of the offsets topic, led here or not; none while there is no such topic.
    shards: ArcSwap<Vec<Arc<Shard>>>,
    /// What those are answered from who ask before there is an offsets topic: it knows no group.
    nobody: Mutex<Groups>,
    next_token: AtomicU64,
    written: Completions<Written>,
    ticker: Ticker,
    /// Told when a machine has been read, or is gone.
    read: Notify,
}

#[derive(Default)]
struct Shard {
    /// Nothing while another node leads the partition, or while it is being read.
    machine: Mutex<Option<Machine>>,
    waiting: Mutex<HashMap<Token, oneshot::Sender<Response>>>,
}

struct Machine {
    /// Tells this machine from others of the same partition: the end of a write may come when another stands here.
    life: u64,
    groups: Groups,
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

/// The end of a write of a machine.
struct Written {
    index: i32,
    life: u64,
    result: Result<(), ErrorCode>,
    what: What,
}

enum What {
    /// Records that the machine wanted kept.
    Records(PersistToken),
    /// The marker of a transaction: its producer, its place among the writes, and how it ended.
    Marker { producer_id: i64, before: PersistToken, commit: bool, done: Call },
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
            nobody: Mutex::new(Loader::new().finish(0, 0, config.clone(), 0)),
            config,
            wanted_partitions: options.offsets_partitions.max(1),
            shards: ArcSwap::default(),
            next_token: AtomicU64::new(1),
            written: Completions::default(),
            ticker: Ticker::default(),
            read: Notify::new(),
        }
    }

    /// There is an offsets topic of so many partitions, which never change in number.
    pub(crate) fn on_topic(&self, partitions: i32) {
        self.shards.store(Arc::new((0..partitions).map(|_| Arc::default()).collect()));
    }

    /// This node leads a partition of the offsets topic: reads the groups it keeps.
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
        let mut loader = Loader::new();
        partition.read_all(|batch| load_batch(batch, &mut loader))?;
        let (now_ms, wall_ms) = (broker.clock.monotonic_ms(), broker.clock.wall_ms());
        let groups = loader.finish(now_ms, wall_ms, self.config.clone(), fastrand::u128(..));
        let life = self.next_token.fetch_add(1, Ordering::Relaxed);
        let partition = Arc::clone(partition);
        *lock(&shard.machine) = Some(Machine { life, groups, partition, epoch });
        self.read.notify_waiters();
        self.ticker.touch();
        Ok(())
    }

    /// This node no longer leads a partition of the offsets topic.
    pub(crate) fn resign(&self, partition: &Partition) {
        if let Some(shard) = self.shard(partition.index) {
            // One of a later leadership stays.
            lock(&shard.machine).take_if(|machine| !machine.counts());
            lock(&shard.waiting).clear();
            self.read.notify_waiters();
        }
    }

    /// Why a machine does not answer: its partition is led elsewhere, or is being read.
    fn missing(&self, broker: &Broker, index: i32) -> ErrorCode {
        match broker.topics.partition(OFFSETS_TOPIC, index) {
            Ok(_) => ErrorCode::CoordinatorLoadInProgress,
            Err(_) => ErrorCode::NotCoordinator,
        }
    }

    /// Whether the machine of a partition answers.
    pub(crate) fn is_ready(&self, index: i32) -> bool {
        self.shard(index).is_some_and(|s| lock(&s.machine).as_ref().is_some_and(Machine::counts))
    }

    /// Waits a moment for a machine that is being read.
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

    pub(crate) fn count(&self) -> usize {
        self.look_at_all(|groups| groups.len()).into_iter().sum()
    }

    /// The partition of the offsets topic that keeps a group.
    pub(crate) fn partition_of(&self, group: &str) -> i32 {
        let partitions = self.shards.load().len() as i32;
        groups::partition_for(group, if partitions == 0 { self.wanted_partitions } else { partitions })
    }

    /// Makes the offsets topic the first time somebody needs it.
    pub(crate) async fn ensure_topic(&self, broker: &Broker) -> Result<(), ErrorCode> {
        broker.ensure_internal(OFFSETS_TOPIC, self.wanted_partitions).await
    }

    /// Puts a request to the machine of its group and waits for the answer.
    pub(crate) async fn call(
        &self,
        broker: &Broker,
        group: &str,
        request: impl FnOnce(&mut Groups, u64, Token) -> Vec<Effect>,
    ) -> Result<Response, ErrorCode> {
        self.call_verified(broker, group, None, request).await
    }

    /// The same for offsets of a transaction that was verified.
    pub(crate) async fn call_verified(
        &self,
        broker: &Broker,
        group: &str,
        guard: Option<VerificationGuard>,
        request: impl FnOnce(&mut Groups, u64, Token) -> Vec<Effect>,
    ) -> Result<Response, ErrorCode> {
        self.ensure_topic(broker).await?;
        let index = self.partition_of(group);
        self.ready(broker, index).await?;
        let shard = self.shard(index).ok_or(ErrorCode::NotCoordinator)?;
        let token = Token(self.next_token.fetch_add(1, Ordering::Relaxed));
        let (sender, receiver) = oneshot::channel();
        lock(&shard.waiting).insert(token, sender);
        if !self.run(broker, index, None, guard, |groups, now_ms| request(groups, now_ms, token)) {
            lock(&shard.waiting).remove(&token);
            return Err(ErrorCode::NotCoordinator);
        }
        receiver.await.map_err(|_| ErrorCode::NotCoordinator)
    }

    /// What to take before the transaction that offsets of a group belong to is verified; none when it is open in the
    /// partition of the group.
    pub(crate) fn begin_verification(
        &self,
        broker: &Broker,
        group: &str,
        producer: TxnProducer,
    ) -> Result<Option<VerificationGuard>, ErrorCode> {
        let partition = broker.topics.partition(OFFSETS_TOPIC, self.partition_of(group));
        let partition = partition.map_err(|_| ErrorCode::NotCoordinator)?;
        Ok(partition.begin_verification((producer.id, producer.epoch), records::NO_SEQUENCE))
    }

    /// Proves that this node still coordinates a group: one that was replaced, and has not heard of it, would answer with
    /// what was committed before. Whoever leads a partition can commit to it, so that is the proof; a partition with one
    /// copy needs none.
    pub(crate) async fn confirm(&self, broker: &Broker, group: &str) -> Result<(), ErrorCode> {
        let index = self.partition_of(group);
        // Whoever looks is told what is missing.
        let Ok(partition) = broker.topics.partition(OFFSETS_TOPIC, index) else { return Ok(()) };
        if partition.is_only_copy() {
            return Ok(());
        }
        let wall_ms = broker.clock.wall_ms();
        let nothing = (Bytes::from_static(&NOTHING_KEY), None);
        // Who coordinates by all it knows, and cannot prove it now, will in a moment: clients repeat the question. Told that the
        // coordinator has moved, librdkafka would leave the partitions unread.
        let unproven =
            || self.look(broker, group, |_| ()).err().unwrap_or(ErrorCode::CoordinatorLoadInProgress);
        let appended = partition
            .append_own(encode(&[nothing], None, wall_ms), wall_ms, None, None)
            .map_err(|_| unproven())?;
        let (sender, committed) = oneshot::channel();
        let done = move |result| {
            let _ = sender.send(result); // whoever asked may be gone
        };
        partition.when_committed(&appended, Ack::Call(Box::new(done)));
        match tokio::time::timeout(PATIENCE, committed).await {
            Ok(Ok(Ok(()))) => Ok(()),
            _ => Err(unproven()),
        }
    }

    /// Looks at the machine of a group without changing it.
    pub(crate) fn look<T>(
        &self,
        broker: &Broker,
        group: &str,
        look: impl FnOnce(&mut Groups) -> T,
    ) -> Result<T, ErrorCode> {
        let index = self.partition_of(group);
        let Some(shard) = self.shard(index) else { return Ok(look(&mut lock(&self.nobody))) };
        let mut machine = lock(&shard.machine);
        let here = machine.as_mut().filter(|machine| machine.counts());
        here.map(|m| look(&mut m.groups)).ok_or_else(|| self.missing(broker, index))
    }

    /// Looks at all machines of this node.
    pub(crate) fn look_at_all<T>(&self, mut look: impl FnMut(&mut Groups) -> T) -> Vec<T> {
        let shards = self.shards.load();
        let look = |shard: &Arc<Shard>| {
            let mut machine = lock(&shard.machine);
            machine.as_mut().filter(|m| m.counts()).map(|m| look(&mut m.groups))
        };
        shards.iter().filter_map(look).collect()
    }

    /// The whole life of the service besides requests: ends of writes, and time.
    pub(crate) async fn serve(&self, broker: &Broker) {
        let mut look = None;
        loop {
            tokio::select! {
                written = self.written.take() => {
                    for written in written {
                        self.on_written(broker, written);
                    }
                }
                () = self.ticker.wait(&mut look) => look = self.tick(broker),
                () = broker.shutdown.stopped() => return,
            }
        }
    }

    /// Does what is due; says when to look again.
    fn tick(&self, broker: &Broker) -> Option<Instant> {
        self.ticker.begin_look();
        let now_ms = broker.clock.monotonic_ms();
        let mut earliest = None;
        for (index, shard) in (0..).zip(self.shards.load().iter()) {
            let next = || lock(&shard.machine).as_ref().and_then(|m| m.groups.next_deadline());
            if next().is_some_and(|at| at <= now_ms) {
                self.run(broker, index, None, None, |groups, now_ms| groups.tick(now_ms));
            }
            earliest = earliest.into_iter().chain(next()).min();
        }
        next_look(earliest, now_ms)
    }

    fn on_written(&self, broker: &Broker, written: Written) {
        let Written { index, life, result, what } = written;
        match what {
            What::Records(token) => {
                let step = |groups: &mut Groups, now_ms| groups.on_persisted(now_ms, token, result);
                self.run(broker, index, Some(life), None, step);
            }
            What::Marker { producer_id, before, commit, done } => {
                if result.is_ok() {
                    // A machine that is gone needs no news: the next one reads the marker.
                    self.run(broker, index, Some(life), None, |groups, _| {
                        groups.on_txn_marker(producer_id, before, commit);
                        Vec::new()
                    });
                }
                done(result);
            }
        }
    }

    /// Appends a marker to a partition of the offsets topic; `done` is called when it is committed and its offsets are
    /// decided, or when it certainly was not appended.
    ///
    /// Under the lock of the machine and in its leadership only: the machine learns which offsets are before the marker,
    /// and one that is being read now would perhaps miss it.
    pub(crate) fn write_marker(
        &self,
        broker: &Broker,
        index: i32,
        marker: TxnMarker,
        leader_epoch: Option<i32>,
        done: Call,
    ) {
        let shard = self.shard(index);
        let mut machine = shard.as_ref().map(|shard| lock(&shard.machine));
        let here = machine.as_mut().and_then(|m| m.as_mut()).filter(|machine| machine.counts());
        let Some(Machine { life, groups, partition, epoch }) = here else {
            drop(machine);
            return done(Err(ErrorCode::CoordinatorLoadInProgress));
        };
        let appended = match leader_epoch {
            Some(meant) if meant != *epoch => Err(ErrorCode::NotLeaderOrFollower.into()),
            _ => partition.append_marker(marker, broker.clock.wall_ms(), Some(*epoch)),
        };
        match appended {
            Ok(appended) => {
                let (life, before, written) = (*life, groups.begin_txn_marker(), self.written.clone());
                let TxnMarker { producer_id, commit, .. } = marker;
                let told = move |result| {
                    let what = What::Marker { producer_id, before, commit, done };
                    written.push(Written { index, life, result, what });
                };
                partition.when_committed(&appended, Ack::Call(Box::new(told)));
            }
            Err(refused) => {
                drop(machine);
                done(Err(refused.code));
            }
        }
    }

    /// Offsets of a topic that is gone are forgotten.
    pub(crate) fn on_topic_deleted(&self, broker: &Broker, topic: &str) {
        for index in 0..self.shards.load().len() as i32 {
            self.run(broker, index, None, None, |groups, now_ms| groups.on_topic_deleted(now_ms, topic));
        }
    }

    /// Takes one step of a machine and does what it wants done; false when the machine is not here, or not the one
    /// that is meant. `guard` is for what the step writes as part of a transaction.
    fn run(
        &self,
        broker: &Broker,
        index: i32,
        meant: Option<u64>,
        guard: Option<VerificationGuard>,
        step: impl FnOnce(&mut Groups, u64) -> Vec<Effect>,
    ) -> bool {
        let Some(shard) = self.shard(index) else { return false };
        let now_ms = broker.clock.monotonic_ms();
        let mut replies = Vec::new();
        {
            let mut machine = lock(&shard.machine);
            let meant = |m: &&mut Machine| m.counts() && meant.is_none_or(|life| life == m.life);
            let Some(machine) = machine.as_mut().filter(meant) else { return false };
            let Machine { life, groups, partition, epoch } = machine;
            let keep = Keep { index, life: *life, partition, epoch: *epoch, guard };
            groups.set_wall_ms(now_ms, broker.clock.wall_ms());
            for effect in step(groups, now_ms) {
                match effect {
                    Effect::Reply(token, response) => replies.push((token, response)),
                    Effect::Persist { records, txn, then, .. } => {
                        self.persist(broker, &keep, &records, txn, then)
                    }
                }
            }
        }
        self.ticker.touch();
        let mut waiting = lock(&shard.waiting);
        for (token, response) in replies {
            if let Some(sender) = waiting.remove(&token) {
                // The client may be gone; its request is answered all the same.
                let _ = sender.send(response);
            }
        }
        true
    }

    fn persist(
        &self,
        broker: &Broker,
        keep: &Keep<'_>,
        records: &[GroupRecord],
        txn: Option<TxnProducer>,
        then: PersistToken,
    ) {
        let Keep { index, life, partition, epoch, guard } = *keep;
        let (written, wall_ms, what) = (self.written.clone(), broker.clock.wall_ms(), What::Records(then));
        match partition.append_own(encode(records, txn, wall_ms), wall_ms, Some(epoch), guard) {
            Ok(appended) => {
                let done = move |result| written.push(Written { index, life, result, what });
                partition.when_committed(&appended, Ack::Call(Box::new(done)));
            }
            Err(refused) => {
                tracing::warn!(index, reason = ?refused.message, "cannot keep group state");
                written.push(Written { index, life, result: Err(refused.code), what });
            }
        }
    }
}

/// Where what a machine wants kept goes.
struct Keep<'a> {
    index: i32,
    life: u64,
    partition: &'a Arc<Partition>,
    /// The leadership of the machine: nothing is appended in another.
    epoch: i32,
    guard: Option<VerificationGuard>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::{CommitPartition, CommitTopic, TxnOffsetCommit};
    use crate::testing::{Still, wait};

    const PRODUCER: TxnProducer = TxnProducer { id: 7, epoch: 0 };

    fn commit(
        still: &Still,
        guard: Option<VerificationGuard>,
        offset: i64,
    ) -> impl Future<Output = Result<Response, ErrorCode>> {
        let partition = CommitPartition { partition: 0, offset, leader_epoch: -1, metadata: None };
        let commit = TxnOffsetCommit {
            producer: PRODUCER,
            group: "g".into(),
            generation: -1,
            member_id: "".into(),
            instance_id: None,
            topics: vec![CommitTopic { topic: "t".into(), partitions: vec![partition] }],
        };
        let groups = &still.broker.groups;
        groups.call_verified(&still.broker, "g", guard, |groups, now_ms, token| {
            groups.txn_offset_commit(now_ms, token, commit)
        })
    }

    fn code(response: Result<Response, ErrorCode>) -> ErrorCode {
        match response.unwrap() {
            Response::OffsetCommit(topics) => topics[0].partitions[0].1,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn offsets_of_a_transaction_that_ended_meanwhile_open_none() {
        let still = Still::new();
        wait(still.broker.groups.ensure_topic(&still.broker)).unwrap();
        still.settle();
        let (groups, partition) = (&still.broker.groups, still.partition(OFFSETS_TOPIC));
        let guard = || {
            let guard = groups.begin_verification(&still.broker, "g", PRODUCER).unwrap();
            guard.map(|guard| guard.verified(0))
        };
        let attempt = |guard, offset| {
            let synced = async {
                loop {
                    still.sync(&partition);
                    tokio::task::yield_now().await;
                }
            };
            wait(async {
                tokio::select! {
                    response = commit(&still, guard, offset) => code(response),
                    () = groups.serve(&still.broker) => panic!("it serves for as long as the broker runs"),
                    never = synced => never,
                }
            })
        };
        // Two at once: both are verified before either is written, and each with its own guard.
        let (one, other) = (guard(), guard());
        assert_eq!(attempt(one, 1), ErrorCode::None);
        assert_eq!(attempt(other, 2), ErrorCode::None, "it joins the transaction that is open");
        let late = (None, one);
        let marker = TxnMarker {
            producer_id: PRODUCER.id,
            producer_epoch: 0,
            commit: true,
            coordinator_epoch: 0,
            epoch_per_transaction: false,
            attempt: Some(1),
        };
        groups.write_marker(&still.broker, 0, marker, None, Box::new(|_| {}));
        assert_eq!(
            attempt(late.0, 3),
            ErrorCode::CoordinatorNotAvailable,
            "it was checked while one was open"
        );
        assert_eq!(attempt(late.1, 3), ErrorCode::CoordinatorNotAvailable, "it was verified before the end");
        still.sync(&partition);
        assert_eq!(partition.last_stable(), partition.high_watermark(), "no transaction is open");
        assert_eq!(attempt(guard(), 3), ErrorCode::None);
    }
}
