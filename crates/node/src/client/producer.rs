//! Writes messages: gathers them into batches, one per partition, and sends each batch until it counts.
//!
//! Invariants: a batch is built once and sent again as the same bytes, so that an idempotent broker writes it
//! once however often it arrives; at most one batch per partition is on its way, so that order is kept; a
//! message is counted only after its acknowledgement (or, with `acks=0`, after it was sent).

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

use super::{BACKOFF, Client, errors};
use crate::exit::{Failure, Outcome, Status};

/// A batch is sent when it has grown to this; well below the usual limit of a message.
const BATCH_BYTES: usize = 256 << 10;
/// All batches together; a flush sends them in one request per leader.
const FLUSH_BYTES: usize = 4 << 20;

/// How to write.
pub(crate) struct ProducerOptions {
    /// The topic.
    pub(crate) topic: KString,
    /// Every message goes here, when set.
    pub(crate) partition: Option<i32>,
    /// How batches are packed.
    pub(crate) compression: Compression,
    /// -1 all, 1 the leader, 0 nobody.
    pub(crate) acks: i16,
    /// Whether a repeated batch must be recognised.
    pub(crate) idempotent: bool,
}

/// One message to write.
#[derive(Debug, Default)]
pub(crate) struct Message<'a> {
    /// The key.
    pub(crate) key: Option<&'a [u8]>,
    /// The value.
    pub(crate) value: Option<&'a [u8]>,
    /// The headers, in order.
    pub(crate) headers: Vec<(&'a [u8], Option<&'a [u8]>)>,
    /// Goes to this partition, when set.
    pub(crate) partition: Option<i32>,
}

/// What has been written to one partition.
#[derive(Clone, Debug, Default)]
pub(crate) struct Written {
    /// Messages acknowledged.
    pub(crate) messages: u64,
    /// Offset of the first, when the server told.
    pub(crate) first_offset: Option<i64>,
    /// Offset of the last, when the server told.
    pub(crate) last_offset: Option<i64>,
}

/// Writes to one topic.
pub(crate) struct Producer {
    options: ProducerOptions,
    identity: Option<(i64, i16)>,
    lanes: Vec<Lane>,
    /// The partition that keyless messages fill at the moment.
    sticky: usize,
    pending_bytes: usize,
}

struct Lane {
    leader: i32,
    next_sequence: i32,
    batch: Option<BatchBuilder>,
    written: Written,
}

/// Who writes to one partition only does not mind the others.
fn needed(only: Option<i32>) -> impl Fn(&str, i32) -> bool {
    move |_, partition| only.is_none_or(|only| only == partition)
}

/// A batch on its way.
struct Sealed {
    lane: usize,
    bytes: Bytes,
    count: usize,
}

impl Producer {
    /// Finds the topic, which the server may create, and gets an identity.
    pub(crate) async fn start(client: &mut Client, options: ProducerOptions) -> Outcome<Self> {
        let topics =
            client.topics(std::slice::from_ref(&options.topic), true, needed(options.partition)).await?;
        let mut partitions: Vec<_> = topics.into_iter().flat_map(|topic| topic.partitions).collect();
        partitions.sort_by_key(|partition| partition.partition_index);
        let lane = |leader| Lane { leader, next_sequence: 0, batch: None, written: Written::default() };
        let lanes: Vec<_> = partitions.iter().map(|partition| lane(partition.leader_id)).collect();
        let identity = if options.idempotent { Some(identity(client).await?) } else { None };
        let sticky = fastrand::usize(..lanes.len().max(1));
        let producer = Self { options, identity, lanes, sticky, pending_bytes: 0 };
        if let Some(partition) = producer.options.partition {
            producer.lane_of(partition)?;
        }
        Ok(producer)
    }

    /// What has been written so far, by partition.
    pub(crate) fn written(&self) -> impl Iterator<Item = (usize, &Written)> {
        self.lanes.iter().map(|lane| &lane.written).enumerate()
    }

    /// Takes a message into its batch. True when it is time to flush.
    pub(crate) fn push(&mut self, message: &Message<'_>, now_ms: i64) -> Outcome<bool> {
        let index = match (message.partition.or(self.options.partition), message.key) {
            (Some(partition), _) => self.lane_of(partition)?,
            (None, Some(key)) => {
                let partitions = i32::try_from(self.lanes.len()).unwrap_or(i32::MAX);
                self.lane_of(partition_for_key(key, partitions))?
            }
            (None, None) => self.sticky,
        };
        let (identity, compression) = (self.identity, self.options.compression);
        let lane = &mut self.lanes[index];
        let sequence = lane.next_sequence;
        let batch = lane.batch.get_or_insert_with(|| match identity {
            Some((id, epoch)) => BatchBuilder::new(compression).producer(id, epoch, sequence),
            None => BatchBuilder::new(compression),
        });
        let before = batch.estimated_len();
        batch.push(now_ms, message.key, message.value, &message.headers);
        let len = batch.estimated_len();
        self.pending_bytes += len - before;
        let full = len >= BATCH_BYTES;
        if full && index == self.sticky {
            self.sticky = (self.sticky + 1) % self.lanes.len();
        }
        // Keyless messages may go on in the next partition before anything is sent; others have no choice.
        let may_go_on = message.key.is_none() && self.lanes[self.sticky].batch.is_none();
        Ok(self.pending_bytes >= FLUSH_BYTES || (full && !may_go_on))
    }

    /// Sends everything gathered and waits until it counts.
    pub(crate) async fn flush(&mut self, client: &mut Client) -> Outcome {
        let deadline = client.deadline();
        let mut waiting = self.seal();
        while !waiting.is_empty() {
            let (mut left, problem) = self.send(client, waiting).await?;
            if left.is_empty() {
                break;
            }
            if Instant::now() >= deadline {
                let failure = problem.unwrap_or_else(|| Failure::error("not written"));
                let hint = "some of the messages may have been written all the same";
                return Err(Failure::new(Status::Timeout, format!("gave up: {}", failure.message)).hint(hint));
            }
            tokio::time::sleep(BACKOFF).await;
            self.refresh(client).await?;
            left.sort_by_key(|sealed| sealed.lane);
            waiting = left;
        }
        Ok(())
    }

    fn seal(&mut self) -> Vec<Sealed> {
        self.pending_bytes = 0;
        let lanes = self.lanes.iter_mut().enumerate();
        lanes
            .filter_map(|(lane, state)| {
                let batch = state.batch.take()?;
                let count = batch.count();
                Some(Sealed { lane, bytes: batch.build(), count })
            })
            .collect()
    }

    /// One round: a request per leader, then the answers. Gives back what has to be sent again, and why.
    async fn send(
        &mut self,
        client: &mut Client,
        batches: Vec<Sealed>,
    ) -> Outcome<(Vec<Sealed>, Option<Failure>)> {
        let mut leaders: BTreeMap<i32, Vec<Sealed>> = BTreeMap::new();
        for sealed in batches {
            leaders.entry(self.lanes[sealed.lane].leader).or_default().push(sealed);
        }
        let (mut again, mut problem) = (Vec::new(), None);
        for (leader, batches) in leaders {
            let request = self.request(&batches, client.timeout());
            match self.exchange(client, leader, &request).await {
                Ok(answers) => {
                    for sealed in batches {
                        match answers.get(&sealed.lane) {
                            Some(answer) => problem = self.on_answer(sealed, answer, &mut again)?.or(problem),
                            None => self.on_written(&sealed, None),
                        }
                    }
                }
                Err(failure) if matches!(failure.status, Status::Unreachable | Status::Timeout) => {
                    problem = Some(failure);
                    again.extend(batches);
                }
                Err(failure) => return Err(failure),
            }
        }
        Ok((again, problem))
    }

    /// The code, message and base offset per partition; empty when nobody answers by agreement.
    async fn exchange(
        &self,
        client: &mut Client,
        leader: i32,
        request: &ProduceRequest,
    ) -> Outcome<BTreeMap<usize, (i16, Option<KString>, i64)>> {
        if self.options.acks == 0 {
            let deadline = client.deadline();
            let sent = client.connection(leader).await?.send(request, deadline).await;
            sent.inspect_err(|_| client.disconnect(leader))?;
            return Ok(BTreeMap::new());
        }
        let answer = client.on(leader, request).await?;
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
    ) -> Outcome<Option<Failure>> {
        let failure = || {
            let failure = errors::failure(*code, message.as_deref());
            failure.context(format!("{}:{}", self.options.topic, sealed.lane))
        };
        match ErrorCode::try_from(*code) {
            // Seen before and kept: the answer to the first time was lost.
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
        let lane = &mut self.lanes[sealed.lane];
        lane.written.messages += sealed.count as u64;
        if let Some(base) = base_offset {
            lane.written.first_offset.get_or_insert(base);
            lane.written.last_offset = Some(base + sealed.count as i64 - 1);
        }
        // Sequences wrap at 2^31, as the broker counts them.
        let count = i32::try_from(sealed.count).unwrap_or(0);
        lane.next_sequence = lane.next_sequence.wrapping_add(count) & i32::MAX;
    }

    fn request(&self, batches: &[Sealed], timeout: Duration) -> ProduceRequest {
        let partition = |sealed: &Sealed| PartitionProduceData {
            index: i32::try_from(sealed.lane).unwrap_or(-1),
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

    async fn refresh(&mut self, client: &mut Client) -> Outcome {
        let needed = needed(self.options.partition);
        let topics = match client.topics(std::slice::from_ref(&self.options.topic), false, needed).await {
            Ok(topics) => topics,
            // The whole cluster may be restarting; the caller's deadline decides how long that may take.
            Err(failure) if failure.status == Status::Unreachable => return Ok(()),
            Err(failure) => return Err(failure),
        };
        for partition in topics.iter().flat_map(|topic| &topic.partitions) {
            let index = usize::try_from(partition.partition_index).unwrap_or(usize::MAX);
            if let Some(lane) = self.lanes.get_mut(index) {
                lane.leader = partition.leader_id;
            }
        }
        Ok(())
    }

    fn lane_of(&self, partition: i32) -> Outcome<usize> {
        let index = usize::try_from(partition).ok().filter(|index| *index < self.lanes.len());
        index.ok_or_else(|| {
            let message = format!(
                "{} has no partition {partition}, only 0 to {}",
                self.options.topic,
                self.lanes.len() - 1
            );
            Failure::new(Status::NotFound, message)
        })
    }
}

async fn identity(client: &mut Client) -> Outcome<(i64, i16)> {
    let deadline = client.deadline();
    let request = InitProducerIdRequest { transaction_timeout_ms: i32::MAX, ..Default::default() };
    loop {
        let answer = client.any(&request).await?;
        match ErrorCode::try_from(answer.error_code) {
            Ok(ErrorCode::None) => return Ok((answer.producer_id, answer.producer_epoch)),
            Ok(error) if error.is_retriable() && Instant::now() < deadline => {
                tokio::time::sleep(BACKOFF).await
            }
            _ => return Err(errors::failure(answer.error_code, None).context("getting a producer id")),
        }
    }
}
