//! Produce: appends each batch to its partition and responds when all are committed.
//!
//! Every partition of the request succeeds or fails on its own. `acks=0` has no response, `acks=1` responds when the
//! leader has the records on stable storage (or written, under `durability=replicated`), `acks=all` when the whole
//! in-sync set has.

use std::cell::Cell;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use tokio::time::Instant;

use moim_base::Permit;
use moim_wire_kafka::messages::produce::{LeaderIdAndEpoch, NodeEndpoint};
use moim_wire_kafka::messages::{
    BatchIndexAndErrorMessage, PartitionProduceData, PartitionProduceResponse, ProduceRequest,
    ProduceResponse, TopicProduceData, TopicProduceResponse,
};
use moim_wire_kafka::records::BatchHeader;
use moim_wire_kafka::{ErrorCode, Records};

use crate::broker::{Broker, DECOMPRESSION_BYTES};
use crate::connection::{Connection, PendingProduce, QueuedResponse};
use crate::handlers::fetch::add_endpoint;
use crate::loops::{Wake, lock};
use crate::partition::{
    Ack, Appended, DelayedProduce, FromClient, NotAppended, Partition, Refused, VerificationGuard,
    batch_info, compression_allowed,
};
use crate::response_writer::Call;
use crate::topics::Topic;
use crate::transactions::verification_error;

/// The first version whose clients know TRANSACTION_ABORTABLE.
const KNOWS_ABORTABLE: i16 = 11;

/// The first version whose clients send no AddPartitionsToTxn: the broker adds the partitions (transaction version
/// 2).
const ADDS_PARTITIONS: i16 = 12;

/// The first version with the current leader in the response.
const LEADER_HINTS: i16 = 10;

/// Compressed batches of at least this size are never validated on the event loop.
const HEAVY_BYTES: usize = 32 << 10;

/// Work budget of an event loop for one request, in record bytes to decompress and validate: about a millisecond. The
/// cost of a batch is known only after decompression: a few KiB may hold a hundred MiB. A batch that exceeds the
/// budget is handled off the loop, with the rest of its request.
const LOOP_WORK: usize = 512 << 10;

/// Work of an off-loop thread for a request without a memory permit. There are two such threads per loop.
const UNCOUNTED_WORK: usize = 8 << 20;

/// Serves one request. Its batches are appended before the next request of the connection is handled.
pub(crate) fn handle(connection: &mut Connection, call: Call, request: ProduceRequest) -> io::Result<()> {
    let broker = Arc::clone(&connection.broker);
    let wake = Arc::clone(&connection.wake);
    if let Some(id) = &request.transactional_id
        && (broker.transactions.may_be_remote(id) || adds_partitions(&broker, &request, call.version))
    {
        return verify_then_append(connection, call, request);
    }
    let mut appender = Appender::new(&wake, call, request);
    if appender.is_heavy() || !appender.run(&broker, &Verifications::new(), LOOP_WORK) {
        let off_loop = OffLoopAppend::new();
        connection.enqueue_appending(Arc::clone(&off_loop));
        // Until it is appended, the request counts as being received: many may be queued.
        let request_permit = connection.take_permit();
        tokio::task::spawn_blocking(move || {
            appender.run_off_loop(&broker, &Verifications::new());
            off_loop.set(appender.finish(&broker));
            drop(request_permit);
            broker.loops.wake_one(&wake);
        });
        return Ok(());
    }
    match appender.finish(&broker).outcome(&broker) {
        ProduceOutcome::Silent { failed } => {
            if failed {
                connection.close();
            }
            Ok(())
        }
        ProduceOutcome::Response(call, response) => connection.respond(call, &response),
        ProduceOutcome::Wait(pending) => {
            connection.enqueue(QueuedResponse::Produce(pending));
            Ok(())
        }
    }
}

/// The transaction coordinator's verification by partition.
type Verifications = HashMap<(Arc<str>, i32), Result<VerificationGuard, ErrorCode>>;

/// True if the request begins its transaction in a partition, which the coordinator must then add first.
fn adds_partitions(broker: &Broker, request: &ProduceRequest, version: i16) -> bool {
    version >= ADDS_PARTITIONS
        && request.topic_data.iter().any(|data| {
            let Some(topic) = find_topic(broker, data, version) else { return false };
            data.partition_data.iter().any(|data| {
                let header = transactional_header(data);
                let opens = |header: BatchHeader, partition: &Partition| {
                    !partition.has_open_transaction(header.producer_id, header.producer_epoch)
                };
                header.zip(topic.partition(data.index).ok()).is_some_and(|(h, p)| opens(h, &p))
            })
        })
}

fn transactional_header(data: &PartitionProduceData) -> Option<BatchHeader> {
    let header = data.records.as_ref().and_then(Records::bytes).and_then(|b| BatchHeader::parse(b));
    header.filter(BatchHeader::is_transactional)
}

/// Serves a request whose transaction must be verified by a remote coordinator: first the verification, then the
/// append. The next request of the connection waits, as after any off-loop append.
fn verify_then_append(connection: &mut Connection, call: Call, request: ProduceRequest) -> io::Result<()> {
    let (broker, wake) = (Arc::clone(&connection.broker), Arc::clone(&connection.wake));
    let off_loop = OffLoopAppend::new();
    connection.enqueue_appending(Arc::clone(&off_loop));
    let request_permit = connection.take_permit();
    let scope = broker.scope.clone();
    scope.spawn("produce", async move {
        let verifications = verify_partitions(&broker, &request, call.version).await;
        let (appender, woken) = (Arc::clone(&broker), Arc::clone(&wake));
        let append = move || {
            let mut appending = Appender::new(&woken, call, request);
            appending.run_off_loop(&appender, &verifications);
            appending.finish(&appender)
        };
        // Compressed batches are slow to validate, and one code path is enough here.
        match tokio::task::spawn_blocking(append).await {
            Ok(produced) => off_loop.set(produced),
            Err(error) => tracing::error!(%error, "produce append task failed"),
        }
        drop(request_permit);
        broker.loops.wake_one(&wake);
    });
    Ok(())
}

/// Verifies every partition in which the transaction is not open yet with the coordinator.
async fn verify_partitions(broker: &Broker, request: &ProduceRequest, version: i16) -> Verifications {
    let mut verifications = Verifications::new();
    let mut unverified = Vec::new();
    let mut producer = None;
    for topic_data in &request.topic_data {
        let Some(topic) = find_topic(broker, topic_data, version) else { continue };
        for data in &topic_data.partition_data {
            let Some(header) = transactional_header(data) else { continue };
            let Ok(partition) = topic.partition(data.index) else { continue };
            let of = (header.producer_id, header.producer_epoch);
            let Some(guard) = partition.begin_verification(of, header.base_sequence) else { continue };
            if *producer.get_or_insert(of) == of {
                unverified.push((Arc::clone(&topic.name), data.index, guard));
            }
        }
    }
    if let (Some(id), Some(producer)) = (&request.transactional_id, producer) {
        let partitions: Vec<(&str, i32)> =
            unverified.iter().map(|(topic, index, _)| (&**topic, *index)).collect();
        let results = if version >= ADDS_PARTITIONS {
            broker.transactions.add_anywhere(broker, id, producer, &partitions).await
        } else {
            broker.transactions.verify_anywhere(broker, id, producer, &partitions).await
        };
        for ((topic, index, guard), result) in unverified.into_iter().zip(results) {
            verifications.insert((topic, index), result.map(|epoch| guard.verified(epoch)));
        }
    }
    verifications
}

fn find_topic(broker: &Broker, data: &TopicProduceData, version: i16) -> Option<Arc<Topic>> {
    if version >= 13 {
        broker.topics.get_by_id(moim_base::TopicId::from_bytes(data.topic_id.0))
    } else {
        broker.topics.get(&data.name)
    }
}

/// A request whose batches are appended.
pub(crate) struct Produced {
    call: Call,
    response: ProduceResponse,
    acks: Arc<DelayedProduce>,
    deadline: Instant,
    wants_response: bool,
    failed: bool,
}

/// What an appended request waits for.
pub(crate) enum ProduceOutcome {
    /// `acks=0`: no response; on an error, closing the connection is the only signal to the client.
    Silent {
        failed: bool,
    },
    Response(Call, ProduceResponse),
    Wait(Box<PendingProduce>),
}

impl Produced {
    pub(crate) fn outcome(mut self, broker: &Broker) -> ProduceOutcome {
        if !self.wants_response {
            return ProduceOutcome::Silent { failed: self.failed };
        }
        if self.acks.release() {
            finish(broker, self.call.version, &mut self.response, &self.acks);
            return ProduceOutcome::Response(self.call, self.response);
        }
        let Self { call, response, acks, deadline, .. } = self;
        ProduceOutcome::Wait(Box::new(PendingProduce { call, response, acks, deadline }))
    }
}

/// The slot through which an off-loop append returns its result.
pub(crate) struct OffLoopAppend {
    produced: Mutex<Option<Produced>>,
}

impl OffLoopAppend {
    fn new() -> Arc<Self> {
        Arc::new(Self { produced: Mutex::new(None) })
    }

    fn set(&self, produced: Produced) {
        *lock(&self.produced) = Some(produced);
    }

    pub(crate) fn is_done(&self) -> bool {
        lock(&self.produced).is_some()
    }

    pub(crate) fn take(&self) -> Option<Produced> {
        lock(&self.produced).take()
    }
}

/// Appends the batches of a request in order; stops when the thread's work budget is exhausted.
struct Appender {
    call: Call,
    request: ProduceRequest,
    acks: Arc<DelayedProduce>,
    /// The next partition: its topic, its index in the topic, and its index in the request.
    next: (usize, usize),
    at: usize,
    responses: Vec<TopicProduceResponse>,
    partition_responses: Vec<PartitionProduceResponse>,
    node_endpoints: Vec<NodeEndpoint>,
    failed: bool,
}

impl Appender {
    fn new(wake: &Arc<Wake>, call: Call, request: ProduceRequest) -> Self {
        let partitions = request.topic_data.iter().map(|t| t.partition_data.len()).sum();
        let first = request.topic_data.first().map_or(0, |t| t.partition_data.len());
        Self {
            call,
            acks: DelayedProduce::new(Arc::clone(wake), partitions),
            next: (0, 0),
            at: 0,
            responses: Vec::with_capacity(request.topic_data.len()),
            partition_responses: Vec::with_capacity(first),
            node_endpoints: Vec::new(),
            failed: false,
            request,
        }
    }

    /// True if the request is known to exceed the event loop's work budget.
    fn is_heavy(&self) -> bool {
        let batches = self.request.topic_data.iter().flat_map(|t| &t.partition_data);
        let compressed = batches.filter_map(|p| p.records.as_ref()?.bytes()).filter(|batch| {
            // The low three bits of the attributes are the codec.
            batch.get(22).is_some_and(|attributes| attributes & 7 != 0)
        });
        compressed.map(Bytes::len).sum::<usize>() >= HEAVY_BYTES
    }

    /// Appends until all batches are done or the `work` budget is exhausted; false if there are more.
    fn run(&mut self, broker: &Broker, verifications: &Verifications, work: usize) -> bool {
        let work = Cell::new(work);
        let version = self.call.version;
        let unknown =
            if version >= 13 { ErrorCode::UnknownTopicId } else { ErrorCode::UnknownTopicOrPartition };
        while let Some(topic_data) = self.request.topic_data.get(self.next.0) {
            let topic = find_topic(broker, topic_data, version);
            while let Some(data) = topic_data.partition_data.get(self.next.1) {
                let appended = match &topic {
                    _ if !matches!(self.request.acks, -1..=1) => Err(ErrorCode::InvalidRequiredAcks.into()),
                    None => {
                        note_early_batch(broker, (&topic_data.name, None), data, unknown);
                        Err(unknown.into())
                    }
                    Some(topic) => {
                        let transaction = (self.request.transactional_id.as_deref(), verifications);
                        append(broker, topic, data, (version, self.request.acks), transaction, &work)
                    }
                };
                let appended = match appended {
                    Err(NotAppended::TooMuchWork) => return false,
                    Err(NotAppended::Refused(refused)) => Err(refused),
                    Ok(appended) => Ok(appended),
                };
                self.failed |= appended.is_err();
                if let Ok((partition, appended)) = &appended {
                    let ack = Ack::Produce(Arc::clone(&self.acks), self.at);
                    match self.request.acks {
                        0 => {}
                        1 => partition.when_stored(appended, ack),
                        _ => partition.when_committed(appended, ack),
                    }
                }
                let mut response = partition_response(data.index, appended, version);
                if let Some(topic) = &topic {
                    add_leader_hint(broker, topic, version, &mut response, &mut self.node_endpoints);
                }
                self.partition_responses.push(response);
                self.next.1 += 1;
                self.at += 1;
            }
            // Detached: a response that waits for the disk must not pin the whole request in memory.
            let (name, topic_id) = (topic_data.name.clone().detach(), topic_data.topic_id);
            let more = self.request.topic_data.get(self.next.0 + 1).map_or(0, |t| t.partition_data.len());
            let partition_responses =
                std::mem::replace(&mut self.partition_responses, Vec::with_capacity(more));
            self.responses.push(TopicProduceResponse { name, topic_id, partition_responses });
            self.next = (self.next.0 + 1, 0);
        }
        true
    }

    /// Appends the rest off the loop. A batch that decompresses to more than [`UNCOUNTED_WORK`] waits for a memory
    /// permit, and holds it until the request is done. Cannot deadlock: it holds no other memory that other requests
    /// wait for.
    fn run_off_loop(&mut self, broker: &Broker, verifications: &Verifications) {
        loop {
            let before = self.at;
            if self.run(broker, verifications, UNCOUNTED_WORK) {
                return;
            }
            if self.at == before {
                let _memory = decompression_permit(broker);
                self.run(broker, verifications, usize::MAX);
                return;
            }
        }
    }

    fn finish(self, broker: &Broker) -> Produced {
        let timeout_ms = u64::try_from(self.request.timeout_ms).unwrap_or(0).min(broker.options.max_wait_ms);
        let (responses, node_endpoints) = (self.responses, self.node_endpoints);
        Produced {
            call: self.call,
            response: ProduceResponse { responses, node_endpoints, ..Default::default() },
            acks: self.acks,
            deadline: Instant::now() + Duration::from_millis(timeout_ms),
            wants_response: self.request.acks != 0,
            failed: self.failed,
        }
    }
}

/// Waits for the memory to decompress a batch of maximum size. Blocks.
fn decompression_permit(broker: &Broker) -> Option<Permit> {
    let bytes = DECOMPRESSION_BYTES.min(broker.decompression.limit());
    let runtime = tokio::runtime::Handle::try_current().ok()?;
    // An error would mean that the request exceeds the limit, which cannot happen.
    runtime.block_on(broker.decompression.take(bytes)).ok()
}

fn append(
    broker: &Broker,
    topic: &Topic,
    data: &PartitionProduceData,
    (version, acks): (i16, i16),
    (transactional_id, verifications): (Option<&str>, &Verifications),
    work: &Cell<usize>,
) -> Result<(Arc<Partition>, Appended), NotAppended> {
    if topic.is_internal() {
        let why = "Only the broker writes to its internal topics.";
        return Err(Refused::new(ErrorCode::InvalidTopicException, why).into());
    }
    let partition = topic.partition(data.index).inspect_err(|code| {
        note_early_batch(broker, (&topic.name, topic.replica(data.index).ok()), data, *code);
    })?;
    broker.early_batches.hand_over(&topic.name, data.index, |at_ms, batch, code| {
        partition.on_refused(at_ms, batch, code);
    });
    let batch = single_batch(data.records.as_ref(), version)?;
    let verify = |guard: VerificationGuard| {
        let id = transactional_id.ok_or(ErrorCode::InvalidRecord)?;
        let unverified = || verifications.get(&(Arc::clone(&topic.name), data.index)).copied();
        let verified = match if verifications.is_empty() { None } else { unverified() } {
            Some(verdict) => verdict,
            // The transaction was open in the partition a moment ago; on a retry the client gets the outcome.
            None if version >= ADDS_PARTITIONS => Err(ErrorCode::ConcurrentTransactions),
            None => {
                let (producer_id, epoch) = guard.producer();
                let verified =
                    broker.transactions.verify(broker, id, producer_id, epoch, &topic.name, data.index);
                verified.map(|coordinator_epoch| guard.verified(coordinator_epoch))
            }
        };
        verified.map_err(|code| verification_error(code, version >= KNOWS_ABORTABLE))
    };
    let bytes = batch.len();
    let client = FromClient { now_ms: broker.clock.wall_ms(), acks_all: acks == -1, verify: &verify, work };
    let appended = partition.append_from_client(batch, &client)?;
    broker.metrics.produced_bytes.inc_by(bytes as u64);
    Ok((partition, appended))
}

/// Records a batch that arrived before its partition was led here, with the replica if there is one.
fn note_early_batch(
    broker: &Broker,
    (topic, replica): (&str, Option<Arc<Partition>>),
    data: &PartitionProduceData,
    code: ErrorCode,
) {
    let Some(batch) = data.records.as_ref().and_then(Records::bytes) else { return };
    let Some(header) = BatchHeader::parse(batch).filter(BatchHeader::has_producer) else { return };
    let (info, now_ms) = (batch_info(&header, batch), broker.clock.wall_ms());
    match replica {
        Some(replica) => replica.on_refused(now_ms, &info, code),
        None => broker.early_batches.on_refused(now_ms, (topic, data.index), info, code),
    }
}

/// A produce carries exactly one batch of magic 2 per partition.
fn single_batch(records: Option<&Records>, version: i16) -> Result<&Bytes, Refused> {
    let Some(Records::Bytes(bytes)) = records else {
        return Err(Refused::new(
            ErrorCode::InvalidRecord,
            "A produce needs one record batch per partition.",
        ));
    };
    // The batch length is in the first twelve bytes, the magic is the seventeenth byte.
    if bytes.get(16).is_some_and(|magic| *magic != 2) || version < 3 {
        return Err(Refused::new(
            ErrorCode::UnsupportedForMessageFormat,
            "Only record batches of magic 2 are stored; use a client of Kafka 0.11 or newer.",
        ));
    }
    let header = BatchHeader::parse(bytes)
        .ok_or_else(|| Refused::new(ErrorCode::CorruptMessage, "A malformed batch header."))?;
    if header.total_len() > bytes.len() {
        return Err(Refused::new(ErrorCode::CorruptMessage, "The record batch is cut short."));
    }
    if header.total_len() < bytes.len() {
        return Err(Refused::new(ErrorCode::InvalidRecord, "A produce carries one batch per partition."));
    }
    match header.compression() {
        Ok(kind) if compression_allowed(kind, version) => Ok(bytes),
        Ok(_) => Err(Refused::new(ErrorCode::UnsupportedCompressionType, "zstd needs Produce version 7.")),
        Err(e) => Err(Refused::new(ErrorCode::UnsupportedCompressionType, e.to_string())),
    }
}

fn partition_response(
    index: i32,
    appended: Result<(Arc<Partition>, Appended), Refused>,
    version: i16,
) -> PartitionProduceResponse {
    match appended {
        Ok((partition, appended)) => PartitionProduceResponse {
            index,
            base_offset: appended.base_offset,
            log_append_time_ms: appended.log_append_time_ms,
            log_start_offset: partition.journal.start(),
            ..Default::default()
        },
        Err(refused) => PartitionProduceResponse {
            index,
            error_code: refused.code as i16,
            base_offset: -1,
            log_append_time_ms: -1,
            log_start_offset: -1,
            record_errors: refused
                .records
                .iter()
                .map(|&batch_index| BatchIndexAndErrorMessage {
                    batch_index,
                    batch_index_error_message: refused.message.as_deref().map(Into::into),
                })
                .collect(),
            error_message: refused.message.filter(|_| version >= 8).map(Into::into),
            ..Default::default()
        },
    }
}

/// Fills in the outcomes of the delayed partitions. A partition without an outcome has timed out: whether its records
/// will be committed is unknown.
pub(crate) fn finish(broker: &Broker, version: i16, response: &mut ProduceResponse, acks: &DelayedProduce) {
    let mut outcomes = acks.outcomes();
    for topic in &mut response.responses {
        for partition in &mut topic.partition_responses {
            let code = outcomes.next().unwrap_or(ErrorCode::UnknownServerError);
            if partition.error_code != 0 || code == ErrorCode::None {
                continue;
            }
            partition.error_code = code as i16;
            partition.base_offset = -1;
            let id = moim_base::TopicId::from_bytes(topic.topic_id.0);
            let known =
                if version >= 13 { broker.topics.get_by_id(id) } else { broker.topics.get(&topic.name) };
            if let Some(known) = known {
                add_leader_hint(broker, &known, version, partition, &mut response.node_endpoints);
            }
        }
    }
}

/// Adds the current leader for a client that sent its request to the wrong broker.
fn add_leader_hint(
    broker: &Broker,
    topic: &Topic,
    version: i16,
    response: &mut PartitionProduceResponse,
    endpoints: &mut Vec<NodeEndpoint>,
) {
    let misled = response.error_code == ErrorCode::NotLeaderOrFollower as i16 && version >= LEADER_HINTS;
    if let Some((leader, leader_epoch)) = misled.then(|| broker.leader_hint(topic, response.index)).flatten()
    {
        response.current_leader = LeaderIdAndEpoch { leader_id: leader.id.0, leader_epoch };
        add_endpoint(endpoints, leader);
    }
}

#[cfg(test)]
mod tests {
    use moim_wire_kafka::compression::Compression;
    use moim_wire_kafka::records::BatchBuilder;

    use super::*;
    use crate::testing::TestBroker;

    fn request(values: &[Vec<u8>], compression: Compression) -> ProduceRequest {
        let data = |value: &Vec<u8>| {
            let mut batch = BatchBuilder::new(compression);
            batch.push(1_700_000_000_000, Some(b"k"), Some(value), &[]);
            PartitionProduceData { index: 0, records: Some(Records::Bytes(batch.build())) }
        };
        let partition_data = values.iter().map(data).collect();
        let topic_data = vec![TopicProduceData { name: "t".into(), partition_data, ..Default::default() }];
        ProduceRequest { acks: 1, timeout_ms: 1_000, topic_data, ..Default::default() }
    }

    #[test]
    fn batch_exceeding_the_loop_work_budget_is_appended_off_the_loop() {
        let fixture = TestBroker::new();
        let partition = fixture.topic("t", &[]);
        let (small, bomb) = (vec![1; 100], vec![0; 60 << 20]);
        for compression in [Compression::Zstd, Compression::Gzip, Compression::Lz4] {
            let before = partition.journal.end();
            let request = request(&[small.clone(), bomb.clone(), small.clone()], compression);
            let wake = Wake::new(0, 1);
            let mut appender = Appender::new(&wake, Call { correlation_id: 1, version: 9 }, request);
            let broker = &fixture.broker;
            assert!(!appender.run(broker, &Verifications::new(), LOOP_WORK), "{compression:?}");
            assert_eq!(partition.journal.end(), before + 1, "earlier batches are appended once");
            assert!(appender.run(broker, &Verifications::new(), usize::MAX));
            assert_eq!(partition.journal.end(), before + 3);
            let produced = appender.finish(broker);
            let results = &produced.response.responses[0].partition_responses;
            let offsets: Vec<i64> = results.iter().map(|result| result.base_offset).collect();
            assert_eq!(offsets, [before, before + 1, before + 2]);
        }
    }

    #[test]
    fn large_decompressed_batch_waits_for_memory_and_small_ones_do_not() {
        let fixture = TestBroker::new();
        let partition = fixture.topic("t", &[]);
        let all = fixture.broker.decompression.limit();
        let request_permit = fixture.broker.decompression.try_take(all).unwrap();
        let values = [vec![1; 100], vec![0; UNCOUNTED_WORK], vec![2; 100]];
        let request = request(&values, Compression::Zstd);
        let wake = Wake::new(0, 1);
        let mut appender = Appender::new(&wake, Call { correlation_id: 1, version: 9 }, request);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let broker = Arc::clone(&fixture.broker);
        let appending = runtime.spawn_blocking(move || appender.run_off_loop(&broker, &Verifications::new()));
        let deadline = Instant::now() + Duration::from_secs(20);
        while fixture.broker.decompression.waiting() == 0 {
            assert!(
                Instant::now() < deadline && !appending.is_finished(),
                "the append does not wait for memory"
            );
            std::thread::yield_now();
        }
        assert_eq!(partition.journal.end(), 1, "earlier batches are appended");
        drop(request_permit);
        runtime.block_on(appending).unwrap();
        assert_eq!(partition.journal.end(), 3);
        assert_eq!(fixture.broker.decompression.used(), 0);
    }

    #[test]
    fn batches_of_one_request_share_the_loop_work_budget() {
        let fixture = TestBroker::new();
        let partition = fixture.topic("t", &[]);
        let request = request(&vec![vec![0; LOOP_WORK / 4]; 8], Compression::Zstd);
        let wake = Wake::new(0, 1);
        let mut appender = Appender::new(&wake, Call { correlation_id: 1, version: 9 }, request);
        assert!(!appender.is_heavy(), "the compressed batches are small");
        assert!(!appender.run(&fixture.broker, &Verifications::new(), LOOP_WORK));
        assert_eq!(partition.journal.end(), 3);
    }
}
