//! One transactional producer, as a careful client is: it takes an identity, numbers its batches, repeats what got no answer
//! under the same number, and does not begin anew before it knows that it may.

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

use super::wire::{Lost, Wire, said};
use crate::site::Switch;

/// A transaction is given up by the coordinator after this.
const TIMEOUT_MS: i32 = 2_000;
/// How often something is asked again before the transaction is given up.
const ATTEMPTS: usize = 12;
const PAUSE: Duration = Duration::from_millis(40);

/// A member of a group, as a commit of offsets names it.
#[derive(Clone, Debug, Default)]
pub(super) struct Membership {
    pub(super) member: KString,
    pub(super) generation: i32,
}

/// The producer.
pub(super) struct Producer<'a> {
    wire: &'a Wire,
    name: KString,
    /// Whether it gets an epoch with every transaction and does not announce partitions (transaction version 2).
    own_epochs: bool,
    id: i64,
    epoch: i16,
    /// The next number in every partition that was written to under this identity.
    sequences: std::collections::BTreeMap<(&'static str, i32), i32>,
}

impl<'a> Producer<'a> {
    /// Takes an identity: whoever had it before is fenced, and what it left open is given up. None when the run is over.
    pub(super) async fn begin(
        wire: &'a Wire,
        name: &str,
        own_epochs: bool,
        goes_on: &Switch,
    ) -> Option<Self> {
        let sequences = Default::default();
        let mut producer = Self { wire, name: name.into(), own_epochs, id: -1, epoch: -1, sequences };
        while producer.init().await.is_err() {
            if goes_on.is_off() {
                return None;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Some(producer)
    }

    async fn init(&mut self) -> Result<(), Lost> {
        let at = self.wire.coordinator(&self.name, true).await?;
        let question = InitProducerIdRequest {
            transactional_id: Some(self.name.clone()),
            transaction_timeout_ms: TIMEOUT_MS,
            ..Default::default()
        };
        let answer: InitProducerIdResponse = self.wire.ask(at, &question, 4).await?;
        said(answer.error_code)?;
        (self.id, self.epoch) = (answer.producer_id, answer.producer_epoch);
        self.sequences.clear();
        Ok(())
    }

    /// Writes into the open transaction.
    pub(super) async fn write(
        &mut self,
        topic: &'static str,
        partition: i32,
        values: &[String],
    ) -> Result<(), Lost> {
        let topics = vec![AddPartitionsToTxnTopic { name: topic.into(), partitions: vec![partition] }];
        let add = AddPartitionsToTxnRequest {
            v3_and_below_transactional_id: self.name.clone(),
            v3_and_below_producer_id: self.id,
            v3_and_below_producer_epoch: self.epoch,
            v3_and_below_topics: topics,
            ..Default::default()
        };
        if !self.own_epochs {
            self.again(Step::Add(add)).await?;
        }
        let next = self.sequences.get(&(topic, partition)).copied().unwrap_or(0);
        // One that gives up at once aborts while its batch is on its way: it may come behind the marker.
        let attempts = if fastrand::u8(..4) == 0 { 1 } else { ATTEMPTS };
        self.attempts(attempts, Step::Produce(topic, partition, self.batch(values, next))).await?;
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

    async fn produce(&self, topic: &'static str, partition: i32, batch: Bytes) -> Result<(), Lost> {
        let (at, _) = self.wire.leader(topic, partition).await?;
        let data = PartitionProduceData { index: partition, records: Some(Records::Bytes(batch)) };
        let data = TopicProduceData { name: topic.into(), partition_data: vec![data], ..Default::default() };
        let question = ProduceRequest {
            transactional_id: Some(self.name.clone()),
            acks: -1,
            timeout_ms: 1_000,
            topic_data: vec![data],
        };
        let version = if self.own_epochs { 12 } else { 9 };
        let answer: ProduceResponse = self.wire.ask(at, &question, version).await?;
        let results = answer.responses.iter().flat_map(|topic| &topic.partition_responses);
        let mut results = results.map(|result| result.error_code);
        match results.next() {
            // It was taken before, and the answer got lost.
            Some(code) if code == ErrorCode::DuplicateSequenceNumber as i16 => Ok(()),
            Some(code) => said(code),
            None => Err(Lost::Unknown),
        }
    }

    /// Puts offsets of a group into the open transaction.
    pub(super) async fn commit_offset(
        &mut self,
        group: &'static str,
        membership: &Membership,
        (topic, partition, offset): (&'static str, i32, i64),
    ) -> Result<(), Lost> {
        let add = AddOffsetsToTxnRequest {
            transactional_id: self.name.clone(),
            producer_id: self.id,
            producer_epoch: self.epoch,
            group_id: group.into(),
        };
        if !self.own_epochs {
            self.again(Step::AddOffsets(add)).await?;
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
        self.again(Step::Commit(group, commit)).await
    }

    /// Ends the transaction. Unknown when nobody said how it ended: the identity must be taken anew then.
    pub(super) async fn end(&mut self, committed: bool) -> Result<(), Lost> {
        let question = EndTxnRequest {
            transactional_id: self.name.clone(),
            producer_id: self.id,
            producer_epoch: self.epoch,
            committed,
        };
        let mut unsure = false;
        for _ in 0..ATTEMPTS {
            let asked = async {
                let at = self.wire.coordinator(&self.name, true).await?;
                let version = if self.own_epochs { 5 } else { 3 };
                let answer: EndTxnResponse =
                    self.wire.ask(at, &question, version).await.inspect_err(|_| unsure = true)?;
                said(answer.error_code)?;
                Ok((answer.producer_id, answer.producer_epoch))
            };
            match asked.await {
                Ok(next) => {
                    if self.own_epochs {
                        (self.id, self.epoch) = next;
                        self.sequences.clear();
                    }
                    return Ok(());
                }
                Err(lost) if is_passing(lost) => tokio::time::sleep(PAUSE).await,
                // An earlier attempt may have ended it before it was refused.
                Err(_) if unsure => return Err(Lost::Unknown),
                Err(lost) => return Err(lost),
            }
        }
        Err(Lost::Unknown)
    }

    /// Repeats what may be repeated.
    async fn again(&self, step: Step) -> Result<(), Lost> {
        self.attempts(ATTEMPTS, step).await
    }

    async fn attempts(&self, attempts: usize, step: Step) -> Result<(), Lost> {
        let mut last = Lost::Unknown;
        for _ in 0..attempts {
            match self.attempt(&step).await {
                Ok(()) => return Ok(()),
                Err(lost) if is_passing(lost) => last = lost,
                Err(lost) => return Err(lost),
            }
            tokio::time::sleep(PAUSE).await;
        }
        Err(last)
    }

    async fn attempt(&self, step: &Step) -> Result<(), Lost> {
        match step {
            Step::Add(add) => {
                let at = self.wire.coordinator(&self.name, true).await?;
                let answer: AddPartitionsToTxnResponse = self.wire.ask(at, add, 3).await?;
                let topics = answer.results_by_topic_v3_and_below.iter();
                let mut results = topics.flat_map(|topic| &topic.results_by_partition);
                results.try_for_each(|result| said(result.partition_error_code))
            }
            Step::Produce(topic, partition, batch) => self.produce(topic, *partition, batch.clone()).await,
            Step::AddOffsets(add) => {
                let at = self.wire.coordinator(&self.name, true).await?;
                let answer: AddOffsetsToTxnResponse = self.wire.ask(at, add, 3).await?;
                said(answer.error_code)
            }
            Step::Commit(group, commit) => {
                let at = self.wire.coordinator(group, false).await?;
                let version = if self.own_epochs { 5 } else { 3 };
                let answer: TxnOffsetCommitResponse = self.wire.ask(at, commit, version).await?;
                let mut results = answer.topics.iter().flat_map(|topic| &topic.partitions);
                results.try_for_each(|result| said(result.error_code))
            }
        }
    }
}

/// What a transaction consists of, but for its end. All of it may be asked twice.
enum Step {
    Add(AddPartitionsToTxnRequest),
    Produce(&'static str, i32, Bytes),
    AddOffsets(AddOffsetsToTxnRequest),
    Commit(&'static str, TxnOffsetCommitRequest),
}

/// Whether the same question may be answered otherwise soon.
fn is_passing(lost: Lost) -> bool {
    match lost {
        Lost::Unknown => true,
        Lost::Refused(code) => ErrorCode::try_from(code).is_ok_and(ErrorCode::is_retriable),
    }
}
