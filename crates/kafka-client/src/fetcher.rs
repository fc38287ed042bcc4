//! Reads partitions forward: one fetch request per leader at a time, all leaders in parallel.
//!
//! Invariants: the position of a partition is one past the last record that the sink got, so that it can be committed at
//! any moment; the sink gets neither records before the position (a fetch may start inside a batch) nor, with
//! `read_committed`, records of aborted transactions; positions advance past control batches and compaction gaps.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashSet};
use std::ops::ControlFlow;
use std::time::Duration;

use bytes::Bytes;
use moim_wire_kafka::messages::FetchRequest;
use moim_wire_kafka::messages::fetch::{FetchPartition, FetchTopic, PartitionData};
use moim_wire_kafka::records::{
    BatchHeader, ControlKind, Record, check_crc, control_kind, decode_batch, split_batches,
};
use moim_wire_kafka::{ErrorCode, KString};

use crate::client::{BACKOFF, Client, TopicPartition};
use crate::error::{Error, Result, Transient, check, server_error};
use crate::offsets::{EARLIEST, Isolation, Offsets, by_topic};
use crate::outage::OutageTolerance;

const MAX_BYTES: i32 = 32 << 20;
const PARTITION_MAX_BYTES: i32 = 1 << 20;
/// The limit of a decompressed batch; more is an attack or a mistake.
const DECOMPRESSED_LIMIT: usize = 512 << 20;

/// Takes records: topic, partition, record. A break ends the poll; the record of the break counts as taken.
pub type Sink<'a, E = Error> = dyn FnMut(&KString, i32, &Record) -> Result<ControlFlow<()>, E> + 'a;

/// A position that was OFFSET_OUT_OF_RANGE and was reset to the log start offset.
#[derive(Clone, Copy, Debug)]
pub struct OffsetReset<'a> {
    /// The partition.
    pub partition: &'a TopicPartition,
    /// The position before.
    pub from: i64,
    /// The log start offset, where the fetch continues.
    pub to: i64,
}

/// The partitions that are read, and their positions.
pub struct Fetcher {
    partitions: BTreeMap<TopicPartition, Position>,
    isolation: Isolation,
    outage: OutageTolerance,
    on_reset: fn(OffsetReset<'_>),
}

struct Position {
    /// One past the last record that the sink got.
    next: i64,
    /// Reading stops at this offset, if there is one.
    end: Option<i64>,
    leader: Option<i32>,
}

impl Position {
    fn is_done(&self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }
}

impl Fetcher {
    /// Reads from these positions, up to `ends` for the partitions that it names. `on_reset` is called when the position
    /// of a partition is OFFSET_OUT_OF_RANGE.
    pub fn new(
        positions: &Offsets,
        ends: Option<&Offsets>,
        isolation: Isolation,
        on_reset: fn(OffsetReset<'_>),
    ) -> Self {
        let position = |(key, next): (&TopicPartition, &i64)| {
            let end = ends.map(|ends| ends.get(key).copied().unwrap_or(*next));
            (key.clone(), Position { next: *next, end, leader: None })
        };
        let partitions = positions.iter().map(position).collect();
        Self { partitions, isolation, outage: OutageTolerance::default(), on_reset }
    }

    /// True if every partition has reached its end.
    pub fn is_done(&self) -> bool {
        self.partitions.values().all(Position::is_done)
    }

    /// One past the last record that the sink got, per partition.
    pub fn positions(&self) -> Offsets {
        self.partitions.iter().map(|(key, position)| (key.clone(), position.next)).collect()
    }

    /// Fetches once from every leader and passes the records to the sink. Breaks when the sink does. Tolerates
    /// [transient](Transient) errors for the timeout of the client.
    pub async fn poll<E: From<Error> + Transient>(
        &mut self,
        client: &mut Client,
        max_wait: Duration,
        sink: &mut Sink<'_, E>,
    ) -> Result<ControlFlow<()>, E> {
        let polled = self.try_poll(client, max_wait, sink).await;
        match self.outage.tolerate(polled, client.timeout())? {
            Some(flow) => Ok(flow),
            None => {
                self.partitions.values_mut().for_each(|position| position.leader = None);
                // Other brokers may still send a response that is not read any more.
                client.disconnect_all();
                tokio::time::sleep(BACKOFF).await;
                Ok(ControlFlow::Continue(()))
            }
        }
    }

    async fn try_poll<E: From<Error>>(
        &mut self,
        client: &mut Client,
        max_wait: Duration,
        sink: &mut Sink<'_, E>,
    ) -> Result<ControlFlow<()>, E> {
        self.find_leaders(client).await?;
        let mut brokers: BTreeMap<i32, Vec<(&TopicPartition, i64)>> = BTreeMap::new();
        for (key, position) in self.partitions.iter().filter(|(_, position)| !position.is_done()) {
            if let Some(leader) = position.leader {
                brokers.entry(leader).or_default().push((key, position.next));
            }
        }
        let brokers: Vec<_> = brokers
            .into_iter()
            .map(|(broker, positions)| (broker, fetch_request(&positions, max_wait, self.isolation)))
            .collect();
        // All requests first, then all responses: the waits overlap.
        let deadline = client.deadline() + max_wait;
        for (broker, request) in &brokers {
            let sent = client.connection(*broker).await?.send(request, deadline).await;
            sent.inspect_err(|_| client.disconnect(*broker))?;
        }
        let mut flow = ControlFlow::Continue(());
        for (broker, _) in &brokers {
            let answer = client.connection(*broker).await?.receive::<FetchRequest>(deadline).await;
            let answer = answer.inspect_err(|_| client.disconnect(*broker))?;
            check(answer.error_code, None)?;
            for topic in answer.responses {
                for partition in topic.partitions {
                    // After a break the remaining responses still have to be read from their connections.
                    if flow.is_continue() {
                        let key = TopicPartition {
                            topic: topic.topic.clone(),
                            partition: partition.partition_index,
                        };
                        flow = self.on_partition(client, &key, partition, sink).await?;
                    }
                }
            }
        }
        Ok(flow)
    }

    async fn find_leaders(&mut self, client: &mut Client) -> Result {
        if self.partitions.values().all(|position| position.leader.is_some()) {
            return Ok(());
        }
        let keys: Vec<TopicPartition> = self.partitions.keys().cloned().collect();
        let leaders = client.leaders(&keys).await?;
        for (key, position) in &mut self.partitions {
            let unknown = || server_error(ErrorCode::UnknownTopicOrPartition.code(), None).context(key);
            position.leader = Some(*leaders.get(key).ok_or_else(unknown)?);
        }
        Ok(())
    }

    async fn on_partition<E: From<Error>>(
        &mut self,
        client: &mut Client,
        key: &TopicPartition,
        data: PartitionData,
        sink: &mut Sink<'_, E>,
    ) -> Result<ControlFlow<()>, E> {
        let Some(position) = self.partitions.get_mut(key) else {
            return Ok(ControlFlow::Continue(()));
        };
        match ErrorCode::try_from(data.error_code) {
            Ok(ErrorCode::None) => deliver(key, position, &data, self.isolation, sink),
            Ok(ErrorCode::OffsetOutOfRange) => {
                // Retention, DeleteRecords or a truncation removed the offset: continue at the log start offset.
                let starts = client.list_offsets(std::slice::from_ref(key), EARLIEST, self.isolation).await?;
                let start = starts.get(key).copied().unwrap_or(0);
                (self.on_reset)(OffsetReset { partition: key, from: position.next, to: start });
                position.next = start;
                Ok(ControlFlow::Continue(()))
            }
            Ok(error) if error.is_retriable() && error != ErrorCode::UnknownTopicOrPartition => {
                position.leader = None;
                tokio::time::sleep(BACKOFF).await;
                Ok(ControlFlow::Continue(()))
            }
            _ => Err(server_error(data.error_code, None).context(key).into()),
        }
    }
}

/// Passes the records of one partition of a fetch response to the sink and advances the position.
fn deliver<E: From<Error>>(
    key: &TopicPartition,
    position: &mut Position,
    data: &PartitionData,
    isolation: Isolation,
    sink: &mut Sink<'_, E>,
) -> Result<ControlFlow<()>, E> {
    let records = data.records.as_ref().and_then(|records| records.bytes()).cloned().unwrap_or_default();
    let mut aborted = Aborted::new(data, isolation);
    for batch in split_batches(&records) {
        // A fetch response may end inside a batch; the next fetch returns the whole batch.
        let Ok(batch) = batch else { break };
        let damaged =
            |why: String| Error::other(format!("{key}: a batch at {} is damaged: {why}", position.next));
        if !check_crc(&batch) {
            return Err(damaged("its checksum is wrong".to_owned()).into());
        }
        let header = BatchHeader::read(&batch).map_err(|error| damaged(error.to_string()))?;
        if !aborted.hides(&header, &batch) {
            let (_, records) =
                decode_batch(&batch, DECOMPRESSED_LIMIT).map_err(|error| damaged(error.to_string()))?;
            for record in &records {
                if record.offset < position.next || position.end.is_some_and(|end| record.offset >= end) {
                    continue;
                }
                let flow = sink(&key.topic, key.partition, record)?;
                position.next = record.offset + 1;
                if flow.is_break() {
                    return Ok(flow);
                }
            }
        }
        position.next = position.next.max(header.last_offset().saturating_add(1));
    }
    Ok(ControlFlow::Continue(()))
}

/// The batches of a fetch response that belong to aborted transactions.
struct Aborted {
    /// Transactions not yet begun at the current batch, the first one on top.
    to_come: BinaryHeap<Reverse<(i64, i64)>>,
    producers: HashSet<i64>,
}

impl Aborted {
    fn new(data: &PartitionData, isolation: Isolation) -> Self {
        let listed =
            data.aborted_transactions.iter().flatten().filter(|_| isolation == Isolation::ReadCommitted);
        let to_come = listed.map(|one| Reverse((one.first_offset, one.producer_id))).collect();
        Self { to_come, producers: HashSet::new() }
    }

    /// True if the sink must not get this batch. Called with every batch, in order.
    fn hides(&mut self, header: &BatchHeader, batch: &Bytes) -> bool {
        while let Some(Reverse((first, producer))) = self.to_come.peek().copied() {
            if first > header.last_offset() {
                break;
            }
            self.producers.insert(producer);
            self.to_come.pop();
        }
        if header.is_control() {
            if control_kind(batch) == Some(ControlKind::Abort) {
                self.producers.remove(&header.producer_id);
            }
            return true;
        }
        header.is_transactional() && self.producers.contains(&header.producer_id)
    }
}

fn fetch_request(
    positions: &[(&TopicPartition, i64)],
    max_wait: Duration,
    isolation: Isolation,
) -> FetchRequest {
    let topics = by_topic(positions.iter().map(|(key, next)| (*key, *next)));
    let partition = |(partition, fetch_offset)| FetchPartition {
        partition,
        fetch_offset,
        partition_max_bytes: PARTITION_MAX_BYTES,
        ..Default::default()
    };
    let topic = |(topic, all): (KString, Vec<(i32, i64)>)| FetchTopic {
        topic,
        partitions: all.into_iter().map(partition).collect(),
        ..Default::default()
    };
    FetchRequest {
        max_wait_ms: i32::try_from(max_wait.as_millis()).unwrap_or(i32::MAX),
        min_bytes: 1,
        max_bytes: MAX_BYTES,
        isolation_level: isolation as i8,
        topics: topics.into_iter().map(topic).collect(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests;
