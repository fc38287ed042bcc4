//! Produce: appends each batch to its partition and answers when all are committed.
//!
//! Every partition of the request fails or succeeds on its own. `acks=0` gets no answer, `acks=1` one when the leader has
//! the records on stable storage (or written, under `durability=replicated`), `acks=all` when the whole in-sync set has.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use tokio::time::Instant;

use moim_wire_kafka::messages::produce::{LeaderIdAndEpoch, NodeEndpoint};
use moim_wire_kafka::messages::{
    BatchIndexAndErrorMessage, PartitionProduceData, PartitionProduceResponse, ProduceRequest,
    ProduceResponse, TopicProduceData, TopicProduceResponse,
};
use moim_wire_kafka::records::BatchHeader;
use moim_wire_kafka::{ErrorCode, Records};

use crate::broker::Broker;
use crate::connection::{Connection, PendingProduce, Slot};
use crate::handlers::fetch::add_endpoint;
use crate::loops::{Wake, lock};
use crate::partition::{
    Ack, Appended, FromClient, Partition, PendingAcks, Refused, Verified, batch_info, compression_allowed,
};
use crate::reply::Call;
use crate::topics::Topic;
use crate::transactions::verification_error;

/// The first version whose clients know the error that says: abort this transaction and go on.
const KNOWS_ABORTABLE: i16 = 11;

/// The first version that can tell a client who leads a partition.
const LEADER_HINTS: i16 = 10;

/// Compressed batches of this size and more are checked off the event loop: decompressing them takes longer
/// than others should wait.
const HEAVY_BYTES: usize = 32 << 10;

/// Serves one request. Its batches are appended before the next request of the connection is looked at.
pub(crate) fn handle(connection: &mut Connection, call: Call, request: ProduceRequest) -> io::Result<()> {
    let broker = Arc::clone(&connection.broker);
    let wake = Arc::clone(&connection.wake);
    if let Some(id) = &request.transactional_id
        && broker.transactions.is_elsewhere(id)
    {
        return ask_first(connection, call, request);
    }
    if is_heavy(&request) {
        let deferred = Deferred::new();
        connection.wait_appending(Arc::clone(&deferred));
        // Until it is appended the request counts as one that is being received: many may stand in line.
        let held = record_bytes(&request);
        broker.memory.take(held);
        tokio::task::spawn_blocking(move || {
            let produced = append_all(&broker, &wake, call, request, &Verdicts::new());
            broker.memory.release(held);
            deferred.set(produced);
            broker.loops.wake_one(&wake);
        });
        return Ok(());
    }
    match append_all(&broker, &wake, call, request, &Verdicts::new()).settle(&broker) {
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

/// What the coordinator of a transaction said of its partitions, and what was known of the producer before it was asked.
type Verdicts = HashMap<(Arc<str>, i32), Result<Verified, ErrorCode>>;

/// Serves a request of a transaction that another broker looks after: first it is asked, then the batches are appended.
/// The next request of the connection waits, as behind any that is appended off the loop.
fn ask_first(connection: &mut Connection, call: Call, request: ProduceRequest) -> io::Result<()> {
    let (broker, wake) = (Arc::clone(&connection.broker), Arc::clone(&connection.wake));
    let deferred = Deferred::new();
    connection.wait_appending(Arc::clone(&deferred));
    let held = record_bytes(&request);
    broker.memory.take(held);
    let scope = broker.scope.clone();
    scope.spawn("produce", async move {
        let verdicts = ask(&broker, &request, call.version).await;
        let (appender, woken) = (Arc::clone(&broker), Arc::clone(&wake));
        let append = move || append_all(&appender, &woken, call, request, &verdicts);
        // Compressed batches are slow to check, and this is not worth two ways.
        match tokio::task::spawn_blocking(append).await {
            Ok(produced) => deferred.set(produced),
            Err(error) => tracing::error!(%error, "a produce was given up"),
        }
        broker.memory.release(held);
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
            let header = data.records.as_ref().and_then(Records::bytes).and_then(|b| BatchHeader::parse(b));
            let Some(header) = header.filter(BatchHeader::is_transactional) else { continue };
            let Ok(partition) = topic.partition(data.index) else { continue };
            let of = (header.producer_id, header.producer_epoch);
            if partition.has_open_transaction(header.producer_id) || *producer.get_or_insert(of) != of {
                continue;
            }
            asked.push((Arc::clone(&topic.name), data.index, partition.before_verifying(header.producer_id)));
        }
    }
    if let (Some(id), Some(producer)) = (&request.transactional_id, producer) {
        let partitions: Vec<(&str, i32)> = asked.iter().map(|(topic, index, _)| (&**topic, *index)).collect();
        let answers = broker.transactions.verify_anywhere(broker, id, producer, &partitions).await;
        for ((topic, index, before), answer) in asked.into_iter().zip(answers) {
            verdicts.insert((topic, index), answer.map(|()| before));
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

fn record_bytes(request: &ProduceRequest) -> usize {
    let batches = request.topic_data.iter().flat_map(|t| &t.partition_data);
    batches.filter_map(|p| p.records.as_ref()?.bytes()).map(Bytes::len).sum()
}

fn is_heavy(request: &ProduceRequest) -> bool {
    let batches = request.topic_data.iter().flat_map(|t| &t.partition_data);
    let compressed = batches.filter_map(|p| p.records.as_ref()?.bytes()).filter(|batch| {
        // The low three bits of the attributes name the codec.
        batch.get(22).is_some_and(|attributes| attributes & 7 != 0)
    });
    compressed.map(Bytes::len).sum::<usize>() >= HEAVY_BYTES
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

fn append_all(
    broker: &Broker,
    wake: &Arc<Wake>,
    call: Call,
    request: ProduceRequest,
    verdicts: &Verdicts,
) -> Produced {
    let partitions = request.topic_data.iter().map(|t| t.partition_data.len()).sum();
    let acks = PendingAcks::new(Arc::clone(wake), partitions);
    let mut at = 0;
    let mut responses = Vec::with_capacity(request.topic_data.len());
    let mut failed = false;
    let mut node_endpoints = Vec::new();
    for topic_data in request.topic_data {
        let topic = find_topic(broker, &topic_data, call.version);
        let unknown =
            if call.version >= 13 { ErrorCode::UnknownTopicId } else { ErrorCode::UnknownTopicOrPartition };
        let mut partition_responses = Vec::with_capacity(topic_data.partition_data.len());
        for data in topic_data.partition_data {
            let index = data.index;
            let appended = match &topic {
                _ if !matches!(request.acks, -1..=1) => Err(ErrorCode::InvalidRequiredAcks.into()),
                None => {
                    turn_away(broker, (&topic_data.name, None), &data, unknown);
                    Err(unknown.into())
                }
                Some(topic) => {
                    let transaction = (request.transactional_id.as_deref(), verdicts);
                    append(broker, topic, data, call.version, request.acks, transaction)
                }
            };
            failed |= appended.is_err();
            if let Ok((partition, appended)) = &appended {
                let ack = Ack::Produce(Arc::clone(&acks), at);
                match request.acks {
                    0 => {}
                    1 => partition.when_stored(appended, ack),
                    _ => partition.when_committed(appended, ack),
                }
            }
            let mut response = partition_response(index, appended, call.version);
            if let Some(topic) = &topic {
                add_hint(broker, topic, call.version, &mut response, &mut node_endpoints);
            }
            partition_responses.push(response);
            at += 1;
        }
        // Detached: an answer that waits for the disk must not keep the whole request in memory.
        let (name, topic_id) = (topic_data.name.detach(), topic_data.topic_id);
        responses.push(TopicProduceResponse { name, topic_id, partition_responses });
    }
    let timeout_ms = u64::try_from(request.timeout_ms).unwrap_or(0).min(broker.options.max_wait_ms);
    Produced {
        call,
        response: ProduceResponse { responses, node_endpoints, ..Default::default() },
        acks,
        deadline: Instant::now() + Duration::from_millis(timeout_ms),
        wants_answer: request.acks != 0,
        failed,
    }
}

fn append(
    broker: &Broker,
    topic: &Topic,
    data: PartitionProduceData,
    version: i16,
    acks: i16,
    (transactional_id, verdicts): (Option<&str>, &Verdicts),
) -> Result<(Arc<Partition>, Appended), Refused> {
    if topic.is_internal() {
        return Err(Refused::new(
            ErrorCode::InvalidTopicException,
            "Only the broker writes to its internal topics.",
        ));
    }
    let partition = topic.partition(data.index).inspect_err(|code| {
        turn_away(broker, (&topic.name, topic.copy(data.index).ok()), &data, *code);
    })?;
    broker.turned_away.hand_over(&topic.name, data.index, |at_ms, batch, code| {
        partition.on_refused(at_ms, batch, code);
    });
    let batch = the_batch(data.records, version)?;
    let verify = |header: &BatchHeader| {
        let id = transactional_id.ok_or(ErrorCode::InvalidRecord)?;
        let asked = || verdicts.get(&(Arc::clone(&topic.name), data.index)).copied();
        let verified = match if verdicts.is_empty() { None } else { asked() } {
            Some(verdict) => verdict.map(Some),
            None => {
                let (producer_id, epoch) = (header.producer_id, header.producer_epoch);
                let verified =
                    broker.transactions.verify(broker, id, producer_id, epoch, &topic.name, data.index);
                verified.map(|()| None)
            }
        };
        verified.map_err(|code| verification_error(code, version >= KNOWS_ABORTABLE))
    };
    let bytes = batch.len();
    let client = FromClient { now_ms: broker.clock.wall_ms(), acks_all: acks == -1, verify: &verify };
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
fn the_batch(records: Option<Records>, version: i16) -> Result<Bytes, Refused> {
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
    let header = BatchHeader::parse(&bytes)
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
