//! Produce: appends each batch to its partition and answers when all are committed.
//!
//! Every partition of the request fails or succeeds on its own. `acks=0` gets no answer, `acks=1` one when the leader has
//! the records on stable storage (or written, under `durability=replicated`), `acks=all` when the whole in-sync set has.

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
use crate::connection::{Connection, PendingProduce, Slot};
use crate::handlers::fetch::add_endpoint;
use crate::loops::{Wake, lock};
use crate::partition::{
    Ack, Appended, FromClient, NotAppended, Partition, PendingAcks, Refused, VerificationGuard, batch_info,
    compression_allowed,
};
use crate::reply::Call;
use crate::topics::Topic;
use crate::transactions::verification_error;

/// The first version whose clients know the error that says: abort this transaction and go on.
const KNOWS_ABORTABLE: i16 = 11;

/// The first version whose clients do not announce the partitions of a transaction: the broker adds them (transaction
/// version 2).
const ADDS_PARTITIONS: i16 = 12;

/// The first version that can tell a client who leads a partition.
const LEADER_HINTS: i16 = 10;

/// Compressed batches of this size and more are not even begun on the event loop.
const HEAVY_BYTES: usize = 32 << 10;

/// What an event loop does for one request, in bytes of records to decompress and look at: about a millisecond. How much a
/// batch takes is known when it was done: a few KiB may hold a hundred MiB. One that takes more is done elsewhere, and the
/// rest of its request with it.
const LOOP_WORK: usize = 512 << 10;

/// What a thread off the loop decompresses of a request without asking for memory. There are two such threads per loop.
const UNCOUNTED_WORK: usize = 8 << 20;

/// Serves one request. Its batches are appended before the next request of the connection is looked at.
pub(crate) fn handle(connection: &mut Connection, call: Call, request: ProduceRequest) -> io::Result<()> {
    let broker = Arc::clone(&connection.broker);
    let wake = Arc::clone(&connection.wake);
    if let Some(id) = &request.transactional_id
        && (broker.transactions.is_elsewhere(id) || adds_partitions(&broker, &request, call.version))
    {
        return ask_first(connection, call, request);
    }
    let mut appender = Appender::new(&wake, call, request);
    if appender.is_heavy() || !appender.run(&broker, &Verdicts::new(), LOOP_WORK) {
        let deferred = Deferred::new();
        connection.wait_appending(Arc::clone(&deferred));
        // Until it is appended the request counts as one that is being received: many may stand in line.
        let held = connection.take_permit();
        tokio::task::spawn_blocking(move || {
            appender.run_off_loop(&broker, &Verdicts::new());
            deferred.set(appender.finish(&broker));
            drop(held);
            broker.loops.wake_one(&wake);
        });
        return Ok(());
    }
    match appender.finish(&broker).settle(&broker) {
        Settled::Silent { failed } => {
            if failed {
                connection.close();
            }
            Ok(())
        }
        Settled::Answer(call, response) => connection.answer(call, &response),
        Settled::Wait(pending) => {
            connection.wait(Slot::Produce(pending));
            Ok(())
        }
    }
}

/// What the coordinator of a transaction said of its partitions.
type Verdicts = HashMap<(Arc<str>, i32), Result<VerificationGuard, ErrorCode>>;

/// Whether the request begins its transaction in a partition, which the coordinator must then write down first.
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

/// Serves a request of a transaction that another broker looks after: first it is asked, then the batches are appended.
/// The next request of the connection waits, as behind any that is appended off the loop.
fn ask_first(connection: &mut Connection, call: Call, request: ProduceRequest) -> io::Result<()> {
    let (broker, wake) = (Arc::clone(&connection.broker), Arc::clone(&connection.wake));
    let deferred = Deferred::new();
    connection.wait_appending(Arc::clone(&deferred));
    let held = connection.take_permit();
    let scope = broker.scope.clone();
    scope.spawn("produce", async move {
        let verdicts = ask(&broker, &request, call.version).await;
        let (appender, woken) = (Arc::clone(&broker), Arc::clone(&wake));
        let append = move || {
            let mut appending = Appender::new(&woken, call, request);
            appending.run_off_loop(&appender, &verdicts);
            appending.finish(&appender)
        };
        // Compressed batches are slow to check, and this is not worth two ways.
        match tokio::task::spawn_blocking(append).await {
            Ok(produced) => deferred.set(produced),
            Err(error) => tracing::error!(%error, "a produce was given up"),
        }
        drop(held);
        broker.loops.wake_one(&wake);
    });
    Ok(())
}

/// Asks the coordinator about every partition in which the transaction is not open yet.
async fn ask(broker: &Broker, request: &ProduceRequest, version: i16) -> Verdicts {
    let mut verdicts = Verdicts::new();
    let mut asked = Vec::new();
    let mut producer = None;
    for topic_data in &request.topic_data {
        let Some(topic) = find_topic(broker, topic_data, version) else { continue };
        for data in &topic_data.partition_data {
            let Some(header) = transactional_header(data) else { continue };
            let Ok(partition) = topic.partition(data.index) else { continue };
            let of = (header.producer_id, header.producer_epoch);
            let Some(guard) = partition.begin_verification(of, header.base_sequence) else { continue };
            if *producer.get_or_insert(of) == of {
                asked.push((Arc::clone(&topic.name), data.index, guard));
            }
        }
    }
    if let (Some(id), Some(producer)) = (&request.transactional_id, producer) {
        let partitions: Vec<(&str, i32)> = asked.iter().map(|(topic, index, _)| (&**topic, *index)).collect();
        let answers = if version >= ADDS_PARTITIONS {
            broker.transactions.add_anywhere(broker, id, producer, &partitions).await
        } else {
            broker.transactions.verify_anywhere(broker, id, producer, &partitions).await
        };
        for ((topic, index, guard), answer) in asked.into_iter().zip(answers) {
            verdicts.insert((topic, index), answer.map(|epoch| guard.verified(epoch)));
        }
    }
    verdicts
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
    acks: Arc<PendingAcks>,
    deadline: Instant,
    wants_answer: bool,
    failed: bool,
}

/// What a produced request waits for.
pub(crate) enum Settled {
    /// The client asked for no answer; if something failed, a closed connection is the only way to tell it.
    Silent {
        failed: bool,
    },
    Answer(Call, ProduceResponse),
    Wait(Box<PendingProduce>),
}

impl Produced {
    pub(crate) fn settle(mut self, broker: &Broker) -> Settled {
        if !self.wants_answer {
            return Settled::Silent { failed: self.failed };
        }
        if self.acks.release() {
            finish(broker, self.call.version, &mut self.response, &self.acks);
            return Settled::Answer(self.call, self.response);
        }
        let Self { call, response, acks, deadline, .. } = self;
        Settled::Wait(Box::new(PendingProduce { call, response, acks, deadline }))
    }
}

/// The place where a request that is appended off the loop comes back.
pub(crate) struct Deferred {
    produced: Mutex<Option<Produced>>,
}

impl Deferred {
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

/// Appends the batches of a request, one after the other, with a pause where the thread has to leave off.
struct Appender {
    call: Call,
    request: ProduceRequest,
    acks: Arc<PendingAcks>,
    /// The partition that comes next: its topic and its place in it, and its place in the request.
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
            acks: PendingAcks::new(Arc::clone(wake), partitions),
            next: (0, 0),
            at: 0,
            responses: Vec::with_capacity(request.topic_data.len()),
            partition_responses: Vec::with_capacity(first),
            node_endpoints: Vec::new(),
            failed: false,
            request,
        }
    }

    /// Whether it is known beforehand that an event loop has no time for it.
    fn is_heavy(&self) -> bool {
        let batches = self.request.topic_data.iter().flat_map(|t| &t.partition_data);
        let compressed = batches.filter_map(|p| p.records.as_ref()?.bytes()).filter(|batch| {
            // The low three bits of the attributes name the codec.
            batch.get(22).is_some_and(|attributes| attributes & 7 != 0)
        });
        compressed.map(Bytes::len).sum::<usize>() >= HEAVY_BYTES
    }

    /// Appends until all is done, or as far as `work` bytes of records go; false when there is more to do.
    fn run(&mut self, broker: &Broker, verdicts: &Verdicts, work: usize) -> bool {
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
                        turn_away(broker, (&topic_data.name, None), data, unknown);
                        Err(unknown.into())
                    }
                    Some(topic) => {
                        let transaction = (self.request.transactional_id.as_deref(), verdicts);
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
                    add_hint(broker, topic, version, &mut response, &mut self.node_endpoints);
                }
                self.partition_responses.push(response);
                self.next.1 += 1;
                self.at += 1;
            }
            // Detached: an answer that waits for the disk must not keep the whole request in memory.
            let (name, topic_id) = (topic_data.name.clone().detach(), topic_data.topic_id);
            let more = self.request.topic_data.get(self.next.0 + 1).map_or(0, |t| t.partition_data.len());
            let partition_responses =
                std::mem::replace(&mut self.partition_responses, Vec::with_capacity(more));
            self.responses.push(TopicProduceResponse { name, topic_id, partition_responses });
            self.next = (self.next.0 + 1, 0);
        }
        true
    }

    /// Appends the rest, on a thread that has time. A batch that inflates to more than [`UNCOUNTED_WORK`] waits for memory,
    /// and holds it until the request is done. Never waits for ever: it holds no other memory that others wait for.
    fn run_off_loop(&mut self, broker: &Broker, verdicts: &Verdicts) {
        loop {
            let before = self.at;
            if self.run(broker, verdicts, UNCOUNTED_WORK) {
                return;
            }
            if self.at == before {
                let _memory = decompression_permit(broker);
                self.run(broker, verdicts, usize::MAX);
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
            wants_answer: self.request.acks != 0,
            failed: self.failed,
        }
    }
}

/// Waits for the memory to decompress a batch of any size. Blocks.
fn decompression_permit(broker: &Broker) -> Option<Permit> {
    let bytes = DECOMPRESSION_BYTES.min(broker.decompression.limit());
    let runtime = tokio::runtime::Handle::try_current().ok()?;
    // An error says that waiting does not help, which cannot be: no more than the limit is asked for.
    runtime.block_on(broker.decompression.take(bytes)).ok()
}

fn append(
    broker: &Broker,
    topic: &Topic,
    data: &PartitionProduceData,
    (version, acks): (i16, i16),
    (transactional_id, verdicts): (Option<&str>, &Verdicts),
    work: &Cell<usize>,
) -> Result<(Arc<Partition>, Appended), NotAppended> {
    if topic.is_internal() {
        let why = "Only the broker writes to its internal topics.";
        return Err(Refused::new(ErrorCode::InvalidTopicException, why).into());
    }
    let partition = topic.partition(data.index).inspect_err(|code| {
        turn_away(broker, (&topic.name, topic.copy(data.index).ok()), data, *code);
    })?;
    broker.turned_away.hand_over(&topic.name, data.index, |at_ms, batch, code| {
        partition.on_refused(at_ms, batch, code);
    });
    let batch = the_batch(data.records.as_ref(), version)?;
    let verify = |guard: VerificationGuard| {
        let id = transactional_id.ok_or(ErrorCode::InvalidRecord)?;
        let asked = || verdicts.get(&(Arc::clone(&topic.name), data.index)).copied();
        let verified = match if verdicts.is_empty() { None } else { asked() } {
            Some(verdict) => verdict,
            // The transaction was open in the partition a moment ago; asked again, the client is told how it ended.
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

/// Remembers that a batch came before its partition was led here, with the copy if there is one.
fn turn_away(
    broker: &Broker,
    (topic, copy): (&str, Option<Arc<Partition>>),
    data: &PartitionProduceData,
    code: ErrorCode,
) {
    let Some(batch) = data.records.as_ref().and_then(Records::bytes) else { return };
    let Some(header) = BatchHeader::parse(batch).filter(BatchHeader::has_producer) else { return };
    let (info, now_ms) = (batch_info(&header, batch), broker.clock.wall_ms());
    match copy {
        Some(copy) => copy.on_refused(now_ms, &info, code),
        None => broker.turned_away.on_refused(now_ms, (topic, data.index), info, code),
    }
}

/// A produce carries exactly one batch of magic 2 per partition.
fn the_batch(records: Option<&Records>, version: i16) -> Result<&Bytes, Refused> {
    let Some(Records::Bytes(bytes)) = records else {
        return Err(Refused::new(
            ErrorCode::InvalidRecord,
            "A produce needs one record batch per partition.",
        ));
    };
    // The length stands in the first twelve bytes, the magic in the seventeenth.
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

/// Puts into the answer how the partitions that were waited for ended. For one that has not, nobody knows yet whether its
/// records will be there.
pub(crate) fn finish(broker: &Broker, version: i16, response: &mut ProduceResponse, acks: &PendingAcks) {
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
                add_hint(broker, &known, version, partition, &mut response.node_endpoints);
            }
        }
    }
}

/// Tells a client that came to the wrong broker where to go.
fn add_hint(
    broker: &Broker,
    topic: &Topic,
    version: i16,
    response: &mut PartitionProduceResponse,
    endpoints: &mut Vec<NodeEndpoint>,
) {
    let misled = response.error_code == ErrorCode::NotLeaderOrFollower as i16 && version >= LEADER_HINTS;
    if let Some((leader, leader_epoch)) = misled.then(|| broker.hint(topic, response.index)).flatten() {
        response.current_leader = LeaderIdAndEpoch { leader_id: leader.id.0, leader_epoch };
        add_endpoint(endpoints, leader);
    }
}

#[cfg(test)]
mod tests {
    use moim_wire_kafka::compression::Compression;
    use moim_wire_kafka::records::BatchBuilder;

    use super::*;
    use crate::testing::Still;

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
    fn a_batch_that_inflates_is_left_to_a_thread_that_has_time() {
        let still = Still::new();
        let partition = still.topic("t", &[]);
        let (small, bomb) = (vec![1; 100], vec![0; 60 << 20]);
        for compression in [Compression::Zstd, Compression::Gzip, Compression::Lz4] {
            let before = partition.journal.end();
            let request = request(&[small.clone(), bomb.clone(), small.clone()], compression);
            let wake = Wake::new(0, 1);
            let mut appender = Appender::new(&wake, Call { correlation_id: 1, version: 9 }, request);
            let broker = &still.broker;
            assert!(!appender.run(broker, &Verdicts::new(), LOOP_WORK), "{compression:?}");
            assert_eq!(partition.journal.end(), before + 1, "what came before it is appended once");
            assert!(appender.run(broker, &Verdicts::new(), usize::MAX));
            assert_eq!(partition.journal.end(), before + 3);
            let produced = appender.finish(broker);
            let answers = &produced.response.responses[0].partition_responses;
            let offsets: Vec<i64> = answers.iter().map(|answer| answer.base_offset).collect();
            assert_eq!(offsets, [before, before + 1, before + 2]);
        }
    }

    #[test]
    fn a_batch_that_inflates_waits_for_memory_and_small_ones_do_not() {
        let still = Still::new();
        let partition = still.topic("t", &[]);
        let all = still.broker.decompression.limit();
        let held = still.broker.decompression.try_take(all).unwrap();
        let values = [vec![1; 100], vec![0; UNCOUNTED_WORK], vec![2; 100]];
        let request = request(&values, Compression::Zstd);
        let wake = Wake::new(0, 1);
        let mut appender = Appender::new(&wake, Call { correlation_id: 1, version: 9 }, request);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let broker = Arc::clone(&still.broker);
        let appending = runtime.spawn_blocking(move || appender.run_off_loop(&broker, &Verdicts::new()));
        let deadline = Instant::now() + Duration::from_secs(20);
        while still.broker.decompression.waiting() == 0 {
            assert!(Instant::now() < deadline && !appending.is_finished(), "it does not wait for memory");
            std::thread::yield_now();
        }
        assert_eq!(partition.journal.end(), 1, "what came before it is appended");
        drop(held);
        runtime.block_on(appending).unwrap();
        assert_eq!(partition.journal.end(), 3);
        assert_eq!(still.broker.decompression.used(), 0);
    }

    #[test]
    fn many_batches_of_one_request_share_what_a_loop_may_do() {
        let still = Still::new();
        let partition = still.topic("t", &[]);
        let request = request(&vec![vec![0; LOOP_WORK / 4]; 8], Compression::Zstd);
        let wake = Wake::new(0, 1);
        let mut appender = Appender::new(&wake, Call { correlation_id: 1, version: 9 }, request);
        assert!(!appender.is_heavy(), "they are small as long as they are compressed");
        assert!(!appender.run(&still.broker, &Verdicts::new(), LOOP_WORK));
        assert_eq!(partition.journal.end(), 3);
    }
}
