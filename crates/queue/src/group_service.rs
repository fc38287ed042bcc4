//! The group coordinator service: one state machine per partition of `__consumer_offsets` that this node leads, each
//! under its own lock. A machine is loaded from its partition once the node leads it and the whole log is committed,
//! and is valid only for that leader epoch: afterwards new and waiting requests get NOT_COORDINATOR. A request during
//! the load waits a moment, and then gets COORDINATOR_LOAD_IN_PROGRESS.
//!
//! The machine decides; this service appends its records, reports their commit back, and delivers its responses to
//! the waiting requests. Appends of a machine happen under its lock, so they enter the log in the order in which the
//! machine decided them.

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
use crate::deadline_timer::{DeadlineTimer, next_tick};
use crate::groups::{
    self, Config, Effect, GroupRecord, Groups, Loader, PersistToken, Response, Token, TxnProducer,
};
use crate::loops::lock;
use crate::partition::{Ack, Call, MAX_DECOMPRESSED_BYTES, Partition, Refused, TxnMarker, VerificationGuard};
use crate::topics::OFFSETS_TOPIC;

/// Maximum wait of a request for a machine that is being loaded. A client that must retry takes longer.
pub(crate) const LOAD_TIMEOUT: Duration = Duration::from_secs(1);

/// The key of a no-op record: its version is one that no reader knows. Without a value, it is compacted away.
const NOOP_KEY: [u8; 2] = i16::MAX.to_be_bytes();

/// All consumer groups that this node coordinates.
pub(crate) struct GroupService {
    config: Config,
    wanted_partitions: i32,
    /// One per partition of `__consumer_offsets`, led here or not; empty while the topic does not exist.
    shards: ArcSwap<Vec<Arc<Shard>>>,
    /// An empty machine that answers requests before `__consumer_offsets` exists.
    empty: Mutex<Groups>,
    next_token: AtomicU64,
    written: Completions<CompletedWrite>,
    timer: DeadlineTimer,
    /// Notified when a machine is loaded or unloaded.
    loaded: Notify,
}

#[derive(Default)]
struct Shard {
    /// `None` while another node leads the partition, or while it is being loaded.
    machine: Mutex<Option<Machine>>,
    waiting: Mutex<HashMap<Token, oneshot::Sender<Response>>>,
}

struct Machine {
    /// Identifies this machine among those of the same partition: a write may complete after another one was loaded.
    incarnation: u64,
    groups: Groups,
    /// The machine's partition, and the leader epoch in which it was loaded.
    partition: Arc<Partition>,
    epoch: i32,
}

impl Machine {
    /// True if the leader epoch of its load is still current.
    fn is_current(&self) -> bool {
        self.partition.leading() == Some(self.epoch)
    }
}

/// A completed write of a machine.
struct CompletedWrite {
    index: i32,
    incarnation: u64,
    result: Result<(), ErrorCode>,
    kind: WriteKind,
}

enum WriteKind {
    /// Records that the machine persisted.
    Records(PersistToken),
    /// A transaction marker: its producer, its position among the writes, and its outcome.
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
            empty: Mutex::new(Loader::new().finish(0, 0, config.clone(), 0)),
            config,
            wanted_partitions: options.offsets_partitions.max(1),
            shards: ArcSwap::default(),
            next_token: AtomicU64::new(1),
            written: Completions::default(),
            timer: DeadlineTimer::default(),
            loaded: Notify::new(),
        }
    }

    /// `__consumer_offsets` exists with this fixed partition count.
    pub(crate) fn on_topic(&self, partitions: i32) {
        self.shards.store(Arc::new((0..partitions).map(|_| Arc::default()).collect()));
    }

    /// This node leads a partition of `__consumer_offsets`: loads its groups.
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
        let mut loader = Loader::new();
        partition.read_all(|batch| load_batch(batch, &mut loader))?;
        let (now_ms, wall_ms) = (broker.clock.monotonic_ms(), broker.clock.wall_ms());
        let groups = loader.finish(now_ms, wall_ms, self.config.clone(), fastrand::u128(..));
        let incarnation = self.next_token.fetch_add(1, Ordering::Relaxed);
        let partition = Arc::clone(partition);
        *lock(&shard.machine) = Some(Machine { incarnation, groups, partition, epoch });
        self.loaded.notify_waiters();
        self.timer.on_change();
        Ok(())
    }

    /// This node no longer leads a partition of `__consumer_offsets`.
    pub(crate) fn on_resignation(&self, partition: &Partition) {
        if let Some(shard) = self.shard(partition.index) {
            // A machine of a later leader epoch stays.
            lock(&shard.machine).take_if(|machine| !machine.is_current());
            lock(&shard.waiting).clear();
            self.loaded.notify_waiters();
        }
    }

    /// The error if a machine is not available: NOT_COORDINATOR, or a load in progress.
    fn unavailable_error(&self, broker: &Broker, index: i32) -> ErrorCode {
        match broker.topics.partition(OFFSETS_TOPIC, index) {
            Ok(_) => ErrorCode::CoordinatorLoadInProgress,
            Err(_) => ErrorCode::NotCoordinator,
        }
    }

    /// True if the machine of a partition is loaded and current.
    pub(crate) fn is_ready(&self, index: i32) -> bool {
        self.shard(index).is_some_and(|s| lock(&s.machine).as_ref().is_some_and(Machine::is_current))
    }

    /// Waits a moment for a machine that is being loaded.
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

    pub(crate) fn count(&self) -> usize {
        self.query_all(|groups| groups.len()).into_iter().sum()
    }

    /// The partition of `__consumer_offsets` that holds a group.
    pub(crate) fn partition_of(&self, group: &str) -> i32 {
        let partitions = self.shards.load().len() as i32;
        groups::partition_for(group, if partitions == 0 { self.wanted_partitions } else { partitions })
    }

    /// Creates `__consumer_offsets` on first use.
    pub(crate) async fn ensure_topic(&self, broker: &Broker) -> Result<(), ErrorCode> {
        broker.ensure_internal(OFFSETS_TOPIC, self.wanted_partitions).await
    }

    /// Passes a request to the machine of its group and waits for the response.
    pub(crate) async fn call(
        &self,
        broker: &Broker,
        group: &str,
        request: impl FnOnce(&mut Groups, u64, Token) -> Vec<Effect>,
    ) -> Result<Response, ErrorCode> {
        self.call_verified(broker, group, None, request).await
    }

    /// As [`Self::call`], for the offsets of a verified transaction.
    pub(crate) async fn call_verified(
        &self,
        broker: &Broker,
        group: &str,
        guard: Option<VerificationGuard>,
        request: impl FnOnce(&mut Groups, u64, Token) -> Vec<Effect>,
    ) -> Result<Response, ErrorCode> {
        self.ensure_topic(broker).await?;
        let index = self.partition_of(group);
        self.wait_loaded(broker, index).await?;
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

    /// Takes a guard before the transaction of a group's offsets is verified; `None` if it is open in the group's
    /// partition.
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

    /// Confirms that this node still coordinates a group: a coordinator that does not know yet that it was replaced
    /// would return stale offsets. Only the leader of a partition can commit to it, so a committed record is the
    /// proof; a partition with a single replica needs none.
    pub(crate) async fn confirm_leadership(&self, broker: &Broker, group: &str) -> Result<(), ErrorCode> {
        let index = self.partition_of(group);
        // The following query returns the error.
        let Ok(partition) = broker.topics.partition(OFFSETS_TOPIC, index) else { return Ok(()) };
        if partition.is_only_replica() {
            return Ok(());
        }
        let wall_ms = broker.clock.wall_ms();
        let noop = (Bytes::from_static(&NOOP_KEY), None);
        // A coordinator that is current as far as it knows, and cannot prove it now, can do so soon: clients retry.
        // On NOT_COORDINATOR librdkafka would leave the partitions unread.
        let unproven =
            || self.query(broker, group, |_| ()).err().unwrap_or(ErrorCode::CoordinatorLoadInProgress);
        let appended = partition
            .append_own(encode(&[noop], None, wall_ms), wall_ms, None, None)
            .map_err(|_| unproven())?;
        let (sender, committed) = oneshot::channel();
        let done = move |result| {
            let _ = sender.send(result); // the caller may have been dropped
        };
        partition.when_committed(&appended, Ack::Call(Box::new(done)));
        match tokio::time::timeout(LOAD_TIMEOUT, committed).await {
            Ok(Ok(Ok(()))) => Ok(()),
            _ => Err(unproven()),
        }
    }

    /// Queries the machine of a group without changing it.
    pub(crate) fn query<T>(
        &self,
        broker: &Broker,
        group: &str,
        query: impl FnOnce(&mut Groups) -> T,
    ) -> Result<T, ErrorCode> {
        let index = self.partition_of(group);
        let Some(shard) = self.shard(index) else { return Ok(query(&mut lock(&self.empty))) };
        let mut machine = lock(&shard.machine);
        let current = machine.as_mut().filter(|machine| machine.is_current());
        current.map(|m| query(&mut m.groups)).ok_or_else(|| self.unavailable_error(broker, index))
    }

    /// Queries all machines of this node.
    pub(crate) fn query_all<T>(&self, mut query: impl FnMut(&mut Groups) -> T) -> Vec<T> {
        let shards = self.shards.load();
        let query = |shard: &Arc<Shard>| {
            let mut machine = lock(&shard.machine);
            machine.as_mut().filter(|m| m.is_current()).map(|m| query(&mut m.groups))
        };
        shards.iter().filter_map(query).collect()
    }

    /// Runs the service: handles completed writes and deadlines.
    pub(crate) async fn serve(&self, broker: &Broker) {
        let mut query = None;
        loop {
            tokio::select! {
                written = self.written.take() => {
                    for written in written {
                        self.on_written(broker, written);
                    }
                }
                () = self.timer.wait(&mut query) => query = self.tick(broker),
                () = broker.shutdown.stopped() => return,
            }
        }
    }

    /// Handles due deadlines; returns the time of the next tick.
    fn tick(&self, broker: &Broker) -> Option<Instant> {
        self.timer.begin_tick();
        let now_ms = broker.clock.monotonic_ms();
        let mut earliest = None;
        for (index, shard) in (0..).zip(self.shards.load().iter()) {
            let next = || lock(&shard.machine).as_ref().and_then(|m| m.groups.next_deadline());
            if next().is_some_and(|at| at <= now_ms) {
                self.run(broker, index, None, None, |groups, now_ms| groups.tick(now_ms));
            }
            earliest = earliest.into_iter().chain(next()).min();
        }
        next_tick(earliest, now_ms)
    }

    fn on_written(&self, broker: &Broker, written: CompletedWrite) {
        let CompletedWrite { index, incarnation, result, kind } = written;
        match kind {
            WriteKind::Records(token) => {
                let step = |groups: &mut Groups, now_ms| groups.on_persisted(now_ms, token, result);
                self.run(broker, index, Some(incarnation), None, step);
            }
            WriteKind::Marker { producer_id, before, commit, done } => {
                if result.is_ok() {
                    // An unloaded machine needs no notification: the next one reads the marker from the log.
                    self.run(broker, index, Some(incarnation), None, |groups, _| {
                        groups.on_txn_marker(producer_id, before, commit);
                        Vec::new()
                    });
                }
                done(result);
            }
        }
    }

    /// Appends a marker to a partition of `__consumer_offsets`; `done` is called when it is committed and its offsets
    /// are decided, or when it certainly was not appended.
    ///
    /// Runs under the machine's lock and in its leader epoch only: the machine learns which offsets precede the
    /// marker, and a machine that is being loaded could miss it.
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
        let current = machine.as_mut().and_then(|m| m.as_mut()).filter(|machine| machine.is_current());
        let Some(Machine { incarnation, groups, partition, epoch }) = current else {
            drop(machine);
            return done(Err(ErrorCode::CoordinatorLoadInProgress));
        };
        let appended = match leader_epoch {
            Some(expected) if expected != *epoch => Err(ErrorCode::NotLeaderOrFollower.into()),
            _ => partition.append_marker(marker, broker.clock.wall_ms(), Some(*epoch)),
        };
        match appended {
            Ok(appended) => {
                let (incarnation, before, written) =
                    (*incarnation, groups.begin_txn_marker(), self.written.clone());
                let TxnMarker { producer_id, commit, .. } = marker;
                let on_committed = move |result| {
                    let kind = WriteKind::Marker { producer_id, before, commit, done };
                    written.push(CompletedWrite { index, incarnation, result, kind });
                };
                partition.when_committed(&appended, Ack::Call(Box::new(on_committed)));
            }
            Err(refused) => {
                drop(machine);
                done(Err(refused.code));
            }
        }
    }

    /// Deletes the offsets of a deleted topic.
    pub(crate) fn on_topic_deleted(&self, broker: &Broker, topic: &str) {
        for index in 0..self.shards.load().len() as i32 {
            self.run(broker, index, None, None, |groups, now_ms| groups.on_topic_deleted(now_ms, topic));
        }
    }

    /// Runs one step of a machine and carries out its effects; false if the machine is not loaded, or not the
    /// expected one. `guard` is for the step's writes in a transaction.
    fn run(
        &self,
        broker: &Broker,
        index: i32,
        expected: Option<u64>,
        guard: Option<VerificationGuard>,
        step: impl FnOnce(&mut Groups, u64) -> Vec<Effect>,
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
            let Machine { incarnation, groups, partition, epoch } = machine;
            let target = PersistTarget { index, incarnation: *incarnation, partition, epoch: *epoch, guard };
            groups.set_wall_ms(now_ms, broker.clock.wall_ms());
            for effect in step(groups, now_ms) {
                match effect {
                    Effect::Reply(token, response) => replies.push((token, response)),
                    Effect::Persist { records, txn, then, .. } => {
                        self.persist(broker, &target, &records, txn, then)
                    }
                }
            }
        }
        self.timer.on_change();
        let mut waiting = lock(&shard.waiting);
        for (token, response) in replies {
            if let Some(sender) = waiting.remove(&token) {
                // The client may have disconnected; its request is processed all the same.
                let _ = sender.send(response);
            }
        }
        true
    }

    fn persist(
        &self,
        broker: &Broker,
        target: &PersistTarget<'_>,
        records: &[GroupRecord],
        txn: Option<TxnProducer>,
        then: PersistToken,
    ) {
        let PersistTarget { index, incarnation, partition, epoch, guard } = *target;
        let (written, wall_ms, kind) =
            (self.written.clone(), broker.clock.wall_ms(), WriteKind::Records(then));
        match partition.append_own(encode(records, txn, wall_ms), wall_ms, Some(epoch), guard) {
            Ok(appended) => {
                let done = move |result| written.push(CompletedWrite { index, incarnation, result, kind });
                partition.when_committed(&appended, Ack::Call(Box::new(done)));
            }
            Err(refused) => {
                tracing::warn!(index, reason = ?refused.message, "group state append failed");
                written.push(CompletedWrite { index, incarnation, result: Err(refused.code), kind });
            }
        }
    }
}

/// Where a machine's records are appended.
struct PersistTarget<'a> {
    index: i32,
    incarnation: u64,
    partition: &'a Arc<Partition>,
    /// The machine's leader epoch: nothing is appended under another one.
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
    let header = BatchHeader::parse(batch).ok_or("malformed batch header")?;
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
    use crate::testing::{TestBroker, wait};

    const PRODUCER: TxnProducer = TxnProducer { id: 7, epoch: 0 };

    fn commit(
        fixture: &TestBroker,
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
        let groups = &fixture.broker.groups;
        groups.call_verified(&fixture.broker, "g", guard, |groups, now_ms, token| {
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
    fn offset_commit_verified_before_the_marker_opens_no_transaction() {
        let fixture = TestBroker::new();
        wait(fixture.broker.groups.ensure_topic(&fixture.broker)).unwrap();
        fixture.apply_roles();
        let (groups, partition) = (&fixture.broker.groups, fixture.partition(OFFSETS_TOPIC));
        let guard = || {
            let guard = groups.begin_verification(&fixture.broker, "g", PRODUCER).unwrap();
            guard.map(|guard| guard.verified(0))
        };
        let attempt = |guard, offset| {
            let synced = async {
                loop {
                    fixture.sync(&partition);
                    tokio::task::yield_now().await;
                }
            };
            wait(async {
                tokio::select! {
                    response = commit(&fixture, guard, offset) => code(response),
                    () = groups.serve(&fixture.broker) => panic!("the service runs until the broker stops"),
                    never = synced => never,
                }
            })
        };
        // Two concurrent commits: both are verified before either is written, each with its own guard.
        let (one, other) = (guard(), guard());
        assert_eq!(attempt(one, 1), ErrorCode::None);
        assert_eq!(attempt(other, 2), ErrorCode::None, "it joins the open transaction");
        let late = (None, one);
        let marker = TxnMarker {
            producer_id: PRODUCER.id,
            producer_epoch: 0,
            commit: true,
            coordinator_epoch: 0,
            epoch_per_transaction: false,
            attempt: Some(1),
        };
        groups.write_marker(&fixture.broker, 0, marker, None, Box::new(|_| {}));
        assert_eq!(
            attempt(late.0, 3),
            ErrorCode::CoordinatorNotAvailable,
            "checked while a transaction was open"
        );
        assert_eq!(attempt(late.1, 3), ErrorCode::CoordinatorNotAvailable, "verified before the end");
        fixture.sync(&partition);
        assert_eq!(partition.last_stable(), partition.high_watermark(), "no transaction is open");
        assert_eq!(attempt(guard(), 3), ErrorCode::None);
    }
}
