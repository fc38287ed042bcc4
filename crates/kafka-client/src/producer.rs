//! A producer: collects records into one batch per partition, and retries each batch until it is acknowledged.
//!
//! Invariants: a batch is encoded once and retried as the same bytes, so that the broker detects the duplicate by its
//! producer id and sequence number; at most one batch per partition is in flight, so that the order is kept; a record is
//! counted only after its acknowledgement (with `acks=0`: after it was sent).

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::messages::produce::{PartitionProduceData, TopicProduceData};
use moim_wire_kafka::messages::{InitProducerIdRequest, ProduceRequest};
use moim_wire_kafka::partitioner::partition_for_key;
use moim_wire_kafka::records::BatchBuilder;
use moim_wire_kafka::{ErrorCode, KString, Records};
use tokio::time::Instant;

use crate::client::{BACKOFF, Client};
use crate::error::{Error, ErrorKind, Result, Transient as _, server_error};

/// The size at which a batch is sent; well below the usual `max.message.bytes`.
const BATCH_BYTES: usize = 256 << 10;
/// The size of all batches together at which they are sent, in one request per leader.
const FLUSH_BYTES: usize = 4 << 20;

/// The topic of a producer, and its settings.
pub struct ProducerOptions {
    /// The topic; created if it does not exist and the broker allows that.
    pub topic: KString,
    /// The partition of all messages; otherwise each message has a partition, a key, or the sticky partition.
    pub partition: Option<i32>,
    /// The compression codec of batches.
    pub compression: Compression,
    /// Acknowledgements: -1 of all in-sync replicas, 1 of the leader, 0 none.
    pub acks: i16,
    /// True for an idempotent producer: the broker detects duplicate batches.
    pub idempotent: bool,
}

/// One message to write.
#[derive(Debug, Default)]
pub struct Message<'a> {
    /// The key; its hash selects the partition if none is given.
    pub key: Option<&'a [u8]>,
    /// The value; `None` is a tombstone.
    pub value: Option<&'a [u8]>,
    /// The headers, in order.
    pub headers: Vec<(&'a [u8], Option<&'a [u8]>)>,
    /// The partition, if the message names one.
    pub partition: Option<i32>,
}

/// The messages that were written to one partition.
#[derive(Clone, Debug, Default)]
pub struct Written {
    /// The number of acknowledged messages.
    pub messages: u64,
    /// The offset of the first message, if the response had a base offset.
    pub first_offset: Option<i64>,
    /// The offset of the last message, if the response had a base offset.
    pub last_offset: Option<i64>,
}

/// A producer for one topic.
pub struct Producer {
    options: ProducerOptions,
    /// The producer id and epoch of an idempotent producer.
    identity: Option<(i64, i16)>,
    partitions: Vec<PartitionQueue>,
    /// The partition of messages without a key, until its batch is full.
    sticky: usize,
    pending_bytes: usize,
}

/// The open batch of one partition.
struct PartitionQueue {
    leader: i32,
    next_sequence: i32,
    batch: Option<BatchBuilder>,
    written: Written,
}

/// A producer that writes to one partition needs only the leader of that partition.
fn needed(only: Option<i32>) -> impl Fn(&str, i32) -> bool {
    move |_, partition| only.is_none_or(|only| only == partition)
}

/// A batch that is encoded and not acknowledged yet.
struct Sealed {
    partition: usize,
    bytes: Bytes,
    count: usize,
}

impl Producer {
    /// Looks the topic up, which the broker may create, and gets a producer id.
    pub async fn start(client: &mut Client, options: ProducerOptions) -> Result<Self> {
        let topics =
            client.topics(std::slice::from_ref(&options.topic), true, needed(options.partition)).await?;
        let mut partitions: Vec<_> = topics.into_iter().flat_map(|topic| topic.partitions).collect();
        partitions.sort_by_key(|partition| partition.partition_index);
        let queue =
            |leader| PartitionQueue { leader, next_sequence: 0, batch: None, written: Written::default() };
        let partitions: Vec<_> = partitions.iter().map(|partition| queue(partition.leader_id)).collect();
        let identity = if options.idempotent { Some(identity(client).await?) } else { None };
        let sticky = fastrand::usize(..partitions.len().max(1));
        let producer = Self { options, identity, partitions, sticky, pending_bytes: 0 };
        if let Some(partition) = producer.options.partition {
            producer.index_of(partition)?;
        }
        Ok(producer)
    }

    /// What has been written so far, by partition.
    pub fn written(&self) -> impl Iterator<Item = (usize, &Written)> {
        self.partitions.iter().map(|queue| &queue.written).enumerate()
    }

    /// Takes a message into its batch. True when it is time to flush.
    pub fn push(&mut self, message: &Message<'_>, now_ms: i64) -> Result<bool> {
        let index = match (message.partition.or(self.options.partition), message.key) {
            (Some(partition), _) => self.index_of(partition)?,
            (None, Some(key)) => {
                let partitions = i32::try_from(self.partitions.len()).unwrap_or(i32::MAX);
                self.index_of(partition_for_key(key, partitions))?
            }
            (None, None) => self.sticky,
        };
        let (identity, compression) = (self.identity, self.options.compression);
        let queue = &mut self.partitions[index];
        let sequence = queue.next_sequence;
        let batch = queue.batch.get_or_insert_with(|| match identity {
            Some((id, epoch)) => BatchBuilder::new(compression).producer(id, epoch, sequence),
            None => BatchBuilder::new(compression),
        });
        let before = batch.estimated_len();
        batch.push(now_ms, message.key, message.value, &message.headers);
        let len = batch.estimated_len();
        self.pending_bytes += len - before;
        let full = len >= BATCH_BYTES;
        if full && index == self.sticky {
            self.sticky = (self.sticky + 1) % self.partitions.len();
        }
        // Messages without a key may continue in the next partition before a flush; others are bound to theirs.
        let can_continue = message.key.is_none() && self.partitions[self.sticky].batch.is_none();
        Ok(self.pending_bytes >= FLUSH_BYTES || (full && !can_continue))
    }

    /// Sends all open batches and waits for their acknowledgement.
    pub async fn flush(&mut self, client: &mut Client) -> Result {
        let deadline = client.deadline();
        let mut waiting = self.seal();
        while !waiting.is_empty() {
            let (mut left, problem) = self.send(client, waiting).await?;
            if left.is_empty() {
                break;
            }
            if Instant::now() >= deadline {
                let error = problem.unwrap_or_else(|| Error::other("not written"));
                let hint = "some of the messages may have been written all the same";
                return Err(Error::new(ErrorKind::Timeout, format!("gave up: {}", error.message)).hint(hint));
            }
            tokio::time::sleep(BACKOFF).await;
            self.refresh(client).await?;
            left.sort_by_key(|sealed| sealed.partition);
            waiting = left;
        }
        Ok(())
    }

    fn seal(&mut self) -> Vec<Sealed> {
        self.pending_bytes = 0;
        let partitions = self.partitions.iter_mut().enumerate();
        partitions
            .filter_map(|(partition, queue)| {
                let batch = queue.batch.take()?;
                let count = batch.count();
                Some(Sealed { partition, bytes: batch.build(), count })
            })
            .collect()
    }

    /// One attempt: a produce request per leader. Returns the batches to retry, and the last error.
    async fn send(
        &mut self,
        client: &mut Client,
        batches: Vec<Sealed>,
    ) -> Result<(Vec<Sealed>, Option<Error>)> {
        let mut leaders: BTreeMap<i32, Vec<Sealed>> = BTreeMap::new();
        for sealed in batches {
            leaders.entry(self.partitions[sealed.partition].leader).or_default().push(sealed);
        }
        let (mut again, mut problem) = (Vec::new(), None);
        for (leader, batches) in leaders {
            let request = self.request(&batches, client.timeout());
            match self.exchange(client, leader, &request).await {
                Ok(answers) => {
                    for sealed in batches {
                        match answers.get(&sealed.partition) {
                            Some(answer) => problem = self.on_answer(sealed, answer, &mut again)?.or(problem),
                            None => self.on_written(&sealed, None),
                        }
                    }
                }
                Err(error) if error.is_transient() => {
                    problem = Some(error);
                    again.extend(batches);
                }
                Err(error) => return Err(error),
            }
        }
        Ok((again, problem))
    }

    /// The error code, error message and base offset per partition; empty with `acks=0`, which has no response.
    async fn exchange(
        &self,
        client: &mut Client,
        leader: i32,
        request: &ProduceRequest,
    ) -> Result<BTreeMap<usize, (i16, Option<KString>, i64)>> {
        if self.options.acks == 0 {
            let deadline = client.deadline();
            let sent = client.connection(leader).await?.send(request, deadline).await;
            sent.inspect_err(|_| client.disconnect(leader))?;
            return Ok(BTreeMap::new());
        }
        let answer = client.request(leader, request).await?;
        let partitions = answer.responses.into_iter().flat_map(|topic| topic.partition_responses);
        let one = |partition: moim_wire_kafka::messages::produce::PartitionProduceResponse| {
            let index = usize::try_from(partition.index).unwrap_or(usize::MAX);
            (index, (partition.error_code, partition.error_message, partition.base_offset))
        };
        Ok(partitions.map(one).collect())
    }

    fn on_answer(
        &mut self,
        sealed: Sealed,
        (code, message, base_offset): &(i16, Option<KString>, i64),
        again: &mut Vec<Sealed>,
    ) -> Result<Option<Error>> {
        let failure = || {
            let failure = server_error(*code, message.as_deref());
            failure.context(format!("{}:{}", self.options.topic, sealed.partition))
        };
        match ErrorCode::try_from(*code) {
            // The broker has the batch already: the response to the first attempt was lost.
            Ok(ErrorCode::None | ErrorCode::DuplicateSequenceNumber) => {
                self.on_written(&sealed, Some(*base_offset).filter(|offset| *offset >= 0));
                Ok(None)
            }
            Ok(error) if error.is_retriable() => {
                let problem = failure();
                again.push(sealed);
                Ok(Some(problem))
            }
            _ => Err(failure()),
        }
    }

    fn on_written(&mut self, sealed: &Sealed, base_offset: Option<i64>) {
        let queue = &mut self.partitions[sealed.partition];
        queue.written.messages += sealed.count as u64;
        if let Some(base) = base_offset {
            queue.written.first_offset.get_or_insert(base);
            queue.written.last_offset = Some(base + sealed.count as i64 - 1);
        }
        // Sequence numbers wrap at 2^31, as on the broker.
        let count = i32::try_from(sealed.count).unwrap_or(0);
        queue.next_sequence = queue.next_sequence.wrapping_add(count) & i32::MAX;
    }

    fn request(&self, batches: &[Sealed], timeout: Duration) -> ProduceRequest {
        let partition = |sealed: &Sealed| PartitionProduceData {
            index: i32::try_from(sealed.partition).unwrap_or(-1),
            records: Some(Records::Bytes(sealed.bytes.clone())),
        };
        let topic = TopicProduceData {
            name: self.options.topic.clone(),
            partition_data: batches.iter().map(partition).collect(),
            ..Default::default()
        };
        ProduceRequest {
            acks: self.options.acks,
            timeout_ms: i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX),
            topic_data: vec![topic],
            ..Default::default()
        }
    }

    async fn refresh(&mut self, client: &mut Client) -> Result {
        let needed = needed(self.options.partition);
        let topics = match client.topics(std::slice::from_ref(&self.options.topic), false, needed).await {
            Ok(topics) => topics,
            // The whole cluster may be restarting: the deadline of the flush bounds the retries.
            Err(error) if error.kind == ErrorKind::Unreachable => return Ok(()),
            Err(error) => return Err(error),
        };
        for partition in topics.iter().flat_map(|topic| &topic.partitions) {
            let index = usize::try_from(partition.partition_index).unwrap_or(usize::MAX);
            if let Some(queue) = self.partitions.get_mut(index) {
                queue.leader = partition.leader_id;
            }
        }
        Ok(())
    }

    fn index_of(&self, partition: i32) -> Result<usize> {
        let index = usize::try_from(partition).ok().filter(|index| *index < self.partitions.len());
        index.ok_or_else(|| {
            let message = format!(
                "{} has no partition {partition}, only 0 to {}",
                self.options.topic,
                self.partitions.len() - 1
            );
            Error::new(ErrorKind::NotFound, message)
        })
    }
}

async fn identity(client: &mut Client) -> Result<(i64, i16)> {
    let deadline = client.deadline();
    let request = InitProducerIdRequest { transaction_timeout_ms: i32::MAX, ..Default::default() };
    loop {
        let answer = client.request_any(&request).await?;
        match ErrorCode::try_from(answer.error_code) {
            Ok(ErrorCode::None) => return Ok((answer.producer_id, answer.producer_epoch)),
            Ok(error) if error.is_retriable() && Instant::now() < deadline => {
                tokio::time::sleep(BACKOFF).await
            }
            _ => return Err(server_error(answer.error_code, None).context("getting a producer id")),
        }
    }
}
