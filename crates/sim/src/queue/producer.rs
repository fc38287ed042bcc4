//! One transactional producer: it initializes its producer id, numbers its batches, repeats a request without a
//! response under the same sequence number, and starts no transaction before the outcome of the previous one is
//! known.

use std::time::Duration;

use bytes::Bytes;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::messages::{
    AddOffsetsToTxnRequest, AddOffsetsToTxnResponse, AddPartitionsToTxnRequest, AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic, EndTxnRequest, EndTxnResponse, InitProducerIdRequest, InitProducerIdResponse,
    PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData, TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition, TxnOffsetCommitRequestTopic, TxnOffsetCommitResponse,
};
use moim_wire_kafka::records::BatchBuilder;
use moim_wire_kafka::{ErrorCode, KString, Records};

use super::kafka_client::{KafkaClient, RequestError, check_code};
use crate::testbed::StopFlag;

/// Transaction timeout: the coordinator aborts a transaction after it.
const TIMEOUT_MS: i32 = 2_000;
/// Attempts of a request before the producer abandons the transaction.
const ATTEMPTS: usize = 12;
const PAUSE: Duration = Duration::from_millis(40);

/// Member id and generation for offset commits.
#[derive(Clone, Debug, Default)]
pub(super) struct Membership {
    pub(super) member: KString,
    pub(super) generation: i32,
}

/// A transactional producer.
pub(super) struct Producer<'a> {
    kafka: &'a KafkaClient,
    name: KString,
    /// Transaction version 2: an epoch per transaction, and no AddPartitionsToTxn.
    uses_transaction_v2: bool,
    id: i64,
    epoch: i16,
    /// Next sequence number of every partition under this producer epoch.
    sequences: std::collections::BTreeMap<(&'static str, i32), i32>,
}

impl<'a> Producer<'a> {
    /// Initializes the producer id: a previous holder is fenced and its open transaction is aborted. `None` if the run
    /// ends.
    pub(super) async fn begin(
        kafka: &'a KafkaClient,
        name: &str,
        uses_transaction_v2: bool,
        stop: &StopFlag,
    ) -> Option<Self> {
        let sequences = Default::default();
        let mut producer =
            Self { kafka, name: name.into(), uses_transaction_v2, id: -1, epoch: -1, sequences };
        while producer.init().await.is_err() {
            if stop.is_stopped() {
                return None;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Some(producer)
    }

    async fn init(&mut self) -> Result<(), RequestError> {
        let coordinator = self.kafka.coordinator(&self.name, true).await?;
        let request = InitProducerIdRequest {
            transactional_id: Some(self.name.clone()),
            transaction_timeout_ms: TIMEOUT_MS,
            ..Default::default()
        };
        let response: InitProducerIdResponse = self.kafka.request(coordinator, &request, 4).await?;
        check_code(response.error_code)?;
        (self.id, self.epoch) = (response.producer_id, response.producer_epoch);
        self.sequences.clear();
        Ok(())
    }

    /// Produces a batch in the open transaction.
    pub(super) async fn write(
        &mut self,
        topic: &'static str,
        partition: i32,
        values: &[String],
    ) -> Result<(), RequestError> {
        let topics = vec![AddPartitionsToTxnTopic { name: topic.into(), partitions: vec![partition] }];
        let add = AddPartitionsToTxnRequest {
            v3_and_below_transactional_id: self.name.clone(),
            v3_and_below_producer_id: self.id,
            v3_and_below_producer_epoch: self.epoch,
            v3_and_below_topics: topics,
            ..Default::default()
        };
        if !self.uses_transaction_v2 {
            self.retry(Step::Add(add)).await?;
        }
        let next = self.sequences.get(&(topic, partition)).copied().unwrap_or(0);
        // A producer that does not retry aborts while its batch is in flight: the batch may arrive after the marker.
        let attempts = if fastrand::u8(..4) == 0 { 1 } else { ATTEMPTS };
        self.retry_up_to(attempts, Step::Produce(topic, partition, self.batch(values, next))).await?;
        let count = i32::try_from(values.len()).unwrap_or(0);
        self.sequences.insert((topic, partition), next + count);
        Ok(())
    }

    fn batch(&self, values: &[String], sequence: i32) -> Bytes {
        let batch = BatchBuilder::new(Compression::None).producer(self.id, self.epoch, sequence);
        let mut batch = batch.transactional(true);
        for value in values {
            batch.push(1, None, Some(value.as_bytes()), &[]);
        }
        batch.build()
    }

    async fn produce(&self, topic: &'static str, partition: i32, batch: Bytes) -> Result<(), RequestError> {
        let (leader, _) = self.kafka.leader(topic, partition).await?;
        let data = PartitionProduceData { index: partition, records: Some(Records::Bytes(batch)) };
        let data = TopicProduceData { name: topic.into(), partition_data: vec![data], ..Default::default() };
        let request = ProduceRequest {
            transactional_id: Some(self.name.clone()),
            acks: -1,
            timeout_ms: 1_000,
            topic_data: vec![data],
        };
        let version = if self.uses_transaction_v2 { 12 } else { 9 };
        let response: ProduceResponse = self.kafka.request(leader, &request, version).await?;
        let results = response.responses.iter().flat_map(|topic| &topic.partition_responses);
        let mut results = results.map(|result| result.error_code);
        match results.next() {
            // An earlier attempt was appended, and its response was lost.
            Some(code) if code == ErrorCode::DuplicateSequenceNumber as i16 => Ok(()),
            Some(code) => check_code(code),
            None => Err(RequestError::Unknown),
        }
    }

    /// Adds an offset commit of a group to the open transaction.
    pub(super) async fn commit_offset(
        &mut self,
        group: &'static str,
        membership: &Membership,
        (topic, partition, offset): (&'static str, i32, i64),
    ) -> Result<(), RequestError> {
        let add = AddOffsetsToTxnRequest {
            transactional_id: self.name.clone(),
            producer_id: self.id,
            producer_epoch: self.epoch,
            group_id: group.into(),
        };
        if !self.uses_transaction_v2 {
            self.retry(Step::AddOffsets(add)).await?;
        }
        let partition = TxnOffsetCommitRequestPartition {
            partition_index: partition,
            committed_offset: offset,
            ..Default::default()
        };
        let commit = TxnOffsetCommitRequest {
            transactional_id: self.name.clone(),
            group_id: group.into(),
            producer_id: self.id,
            producer_epoch: self.epoch,
            generation_id: membership.generation,
            member_id: membership.member.clone(),
            topics: vec![TxnOffsetCommitRequestTopic { name: topic.into(), partitions: vec![partition] }],
            ..Default::default()
        };
        self.retry(Step::Commit(group, commit)).await
    }

    /// Ends the transaction. After an unknown outcome the producer id must be initialized again.
    pub(super) async fn end(&mut self, committed: bool) -> Result<(), RequestError> {
        let request = EndTxnRequest {
            transactional_id: self.name.clone(),
            producer_id: self.id,
            producer_epoch: self.epoch,
            committed,
        };
        let mut is_uncertain = false;
        for _ in 0..ATTEMPTS {
            let attempt = async {
                let coordinator = self.kafka.coordinator(&self.name, true).await?;
                let version = if self.uses_transaction_v2 { 5 } else { 3 };
                let response: EndTxnResponse = self
                    .kafka
                    .request(coordinator, &request, version)
                    .await
                    .inspect_err(|_| is_uncertain = true)?;
                check_code(response.error_code)?;
                Ok((response.producer_id, response.producer_epoch))
            };
            match attempt.await {
                Ok(next) => {
                    if self.uses_transaction_v2 {
                        (self.id, self.epoch) = next;
                        self.sequences.clear();
                    }
                    return Ok(());
                }
                Err(error) if is_retriable(error) => tokio::time::sleep(PAUSE).await,
                // An earlier attempt with an unknown outcome may have ended the transaction.
                Err(_) if is_uncertain => return Err(RequestError::Unknown),
                Err(error) => return Err(error),
            }
        }
        Err(RequestError::Unknown)
    }

    /// Sends an idempotent request with retries.
    async fn retry(&self, step: Step) -> Result<(), RequestError> {
        self.retry_up_to(ATTEMPTS, step).await
    }

    async fn retry_up_to(&self, attempts: usize, step: Step) -> Result<(), RequestError> {
        let mut last = RequestError::Unknown;
        for _ in 0..attempts {
            match self.attempt(&step).await {
                Ok(()) => return Ok(()),
                Err(error) if is_retriable(error) => last = error,
                Err(error) => return Err(error),
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(last)
    }

    async fn attempt(&self, step: &Step) -> Result<(), RequestError> {
        match step {
            Step::Add(add) => {
                let coordinator = self.kafka.coordinator(&self.name, true).await?;
                let response: AddPartitionsToTxnResponse = self.kafka.request(coordinator, add, 3).await?;
                let topics = response.results_by_topic_v3_and_below.iter();
                let mut results = topics.flat_map(|topic| &topic.results_by_partition);
                results.try_for_each(|result| check_code(result.partition_error_code))
            }
            Step::Produce(topic, partition, batch) => self.produce(topic, *partition, batch.clone()).await,
            Step::AddOffsets(add) => {
                let coordinator = self.kafka.coordinator(&self.name, true).await?;
                let response: AddOffsetsToTxnResponse = self.kafka.request(coordinator, add, 3).await?;
                check_code(response.error_code)
            }
            Step::Commit(group, commit) => {
                let coordinator = self.kafka.coordinator(group, false).await?;
                let version = if self.uses_transaction_v2 { 5 } else { 3 };
                let response: TxnOffsetCommitResponse =
                    self.kafka.request(coordinator, commit, version).await?;
                let mut results = response.topics.iter().flat_map(|topic| &topic.partitions);
                results.try_for_each(|result| check_code(result.error_code))
            }
        }
    }
}

/// The requests of a transaction before its end. All of them may be repeated.
enum Step {
    Add(AddPartitionsToTxnRequest),
    Produce(&'static str, i32, Bytes),
    AddOffsets(AddOffsetsToTxnRequest),
    Commit(&'static str, TxnOffsetCommitRequest),
}

/// True if a repeated request may succeed.
fn is_retriable(error: RequestError) -> bool {
    match error {
        RequestError::Unknown => true,
        RequestError::Rejected(code) => ErrorCode::try_from(code).is_ok_and(ErrorCode::is_retriable),
    }
}
