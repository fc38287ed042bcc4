//! Reads partitions forward: one fetch per leader at a time, all leaders at once.
//!
//! Invariants: a partition's position is one past the last record handed out, so that it can be committed at
//! any moment; records before the position (a fetch may start inside a batch) and records of aborted
//! transactions are never handed out; positions pass over control batches and compacted gaps.

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

use super::offsets::{EARLIEST, Isolation, Offsets, by_topic};
use super::{BACKOFF, Client, Patience, TopicPartition, errors};
use crate::exit::{Failure, Outcome};
use crate::output::note;

const MAX_BYTES: i32 = 32 << 20;
const PARTITION_MAX_BYTES: i32 = 1 << 20;
/// A batch may unpack to this much; more is an attack or a mistake.
const UNPACKED_LIMIT: usize = 512 << 20;

/// Where to hand records: topic, partition, record.
pub(crate) type Sink<'a> = dyn FnMut(&KString, i32, &Record) -> Outcome<ControlFlow<()>> + 'a;

/// Partitions being read.
pub(crate) struct Fetcher {
    lanes: BTreeMap<TopicPartition, Lane>,
    isolation: Isolation,
    patience: Patience,
}

struct Lane {
    next: i64,
    /// Reading stops here, when there is such a place.
    end: Option<i64>,
    leader: Option<i32>,
}

impl Lane {
    fn is_done(&self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }
}

impl Fetcher {
    /// Reads from these positions, up to `ends` where one is named.
    pub(crate) fn new(positions: &Offsets, ends: Option<&Offsets>, isolation: Isolation) -> Self {
        let lane = |(key, next): (&TopicPartition, &i64)| {
            let end = ends.map(|ends| ends.get(key).copied().unwrap_or(*next));
            (key.clone(), Lane { next: *next, end, leader: None })
        };
        Self { lanes: positions.iter().map(lane).collect(), isolation, patience: Patience::default() }
    }

    /// Whether every partition has reached its end.
    pub(crate) fn is_done(&self) -> bool {
        self.lanes.values().all(Lane::is_done)
    }

    /// One past the last record handed out, per partition.
    pub(crate) fn positions(&self) -> Offsets {
        self.lanes.iter().map(|(key, lane)| (key.clone(), lane.next)).collect()
    }

    /// Fetches once from every leader and hands out what came. Breaks when the sink does.
    pub(crate) async fn poll(
        &mut self,
        client: &mut Client,
        max_wait: Duration,
        sink: &mut Sink<'_>,
    ) -> Outcome<ControlFlow<()>> {
        let polled = self.try_poll(client, max_wait, sink).await;
        match self.patience.forgive(polled, client.timeout())? {
            Some(flow) => Ok(flow),
            None => {
                self.lanes.values_mut().for_each(|lane| lane.leader = None);
                // Others may still have an answer on its way that nobody waits for now.
                client.disconnect_all();
                tokio::time::sleep(BACKOFF).await;
                Ok(ControlFlow::Continue(()))
            }
        }
    }

    async fn try_poll(
        &mut self,
        client: &mut Client,
        max_wait: Duration,
        sink: &mut Sink<'_>,
    ) -> Outcome<ControlFlow<()>> {
        self.find_leaders(client).await?;
        let mut brokers: BTreeMap<i32, Vec<(&TopicPartition, i64)>> = BTreeMap::new();
        for (key, lane) in self.lanes.iter().filter(|(_, lane)| !lane.is_done()) {
            if let Some(leader) = lane.leader {
                brokers.entry(leader).or_default().push((key, lane.next));
            }
        }
        let brokers: Vec<_> = brokers
            .into_iter()
            .map(|(broker, asked)| (broker, fetch_request(&asked, max_wait, self.isolation)))
            .collect();
        // All questions first, then all answers: the waits overlap.
        let deadline = client.deadline() + max_wait;
        for (broker, request) in &brokers {
            let sent = client.connection(*broker).await?.send(request, deadline).await;
            sent.inspect_err(|_| client.disconnect(*broker))?;
        }
        let mut flow = ControlFlow::Continue(());
        for (broker, _) in &brokers {
            let answer = client.connection(*broker).await?.receive::<FetchRequest>(deadline).await;
            let answer = answer.inspect_err(|_| client.disconnect(*broker))?;
            errors::check(answer.error_code, None)?;
            for topic in answer.responses {
                for partition in topic.partitions {
                    // After a break the answers still have to be taken off their connections.
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

    async fn find_leaders(&mut self, client: &mut Client) -> Outcome {
        if self.lanes.values().all(|lane| lane.leader.is_some()) {
            return Ok(());
        }
        let keys: Vec<TopicPartition> = self.lanes.keys().cloned().collect();
        let leaders = client.leaders(&keys).await?;
        for (key, lane) in &mut self.lanes {
            let unknown = || errors::failure(ErrorCode::UnknownTopicOrPartition.code(), None).context(key);
            lane.leader = Some(*leaders.get(key).ok_or_else(unknown)?);
        }
        Ok(())
    }

    async fn on_partition(
        &mut self,
        client: &mut Client,
        key: &TopicPartition,
        data: PartitionData,
        sink: &mut Sink<'_>,
    ) -> Outcome<ControlFlow<()>> {
        let Some(lane) = self.lanes.get_mut(key) else {
            return Ok(ControlFlow::Continue(()));
        };
        match ErrorCode::try_from(data.error_code) {
            Ok(ErrorCode::None) => hand_out(key, lane, &data, self.isolation, sink),
            Ok(ErrorCode::OffsetOutOfRange) => {
                // Retention took it away, or somebody truncated; go on with the oldest there is.
                let starts = client.list_offsets(std::slice::from_ref(key), EARLIEST, self.isolation).await?;
                let start = starts.get(key).copied().unwrap_or(0);
                note(format_args!("moim: {key}: offset {} is gone; going on at {start}", lane.next));
                lane.next = start;
                Ok(ControlFlow::Continue(()))
            }
            Ok(error) if error.is_retriable() && error != ErrorCode::UnknownTopicOrPartition => {
                lane.leader = None;
                tokio::time::sleep(BACKOFF).await;
                Ok(ControlFlow::Continue(()))
            }
            _ => Err(errors::failure(data.error_code, None).context(key)),
        }
    }
}

/// Hands out the records of one partition's answer and moves its position.
fn hand_out(
    key: &TopicPartition,
    lane: &mut Lane,
    data: &PartitionData,
    isolation: Isolation,
    sink: &mut Sink<'_>,
) -> Outcome<ControlFlow<()>> {
    let records = data.records.as_ref().and_then(|records| records.bytes()).cloned().unwrap_or_default();
    let mut aborted = Aborted::new(data, isolation);
    for batch in split_batches(&records) {
        // A fetch may end in half a batch; the next one brings it whole.
        let Ok(batch) = batch else { break };
        let damaged =
            |why: String| Failure::error(format!("{key}: a batch at {} is damaged: {why}", lane.next));
        if !check_crc(&batch) {
            return Err(damaged("its checksum is wrong".to_owned()));
        }
        let header = BatchHeader::read(&batch).map_err(|error| damaged(error.to_string()))?;
        if !aborted.hides(&header, &batch) {
            let (_, records) =
                decode_batch(&batch, UNPACKED_LIMIT).map_err(|error| damaged(error.to_string()))?;
            for record in &records {
                if record.offset < lane.next || lane.end.is_some_and(|end| record.offset >= end) {
                    continue;
                }
                let flow = sink(&key.topic, key.partition, record)?;
                lane.next = record.offset + 1;
                if flow.is_break() {
                    return Ok(flow);
                }
            }
        }
        lane.next = lane.next.max(header.last_offset().saturating_add(1));
    }
    Ok(ControlFlow::Continue(()))
}

/// Which batches of an answer belong to transactions that were given up.
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

    /// Whether this batch must not be shown. Called with every batch, in order.
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

fn fetch_request(asked: &[(&TopicPartition, i64)], max_wait: Duration, isolation: Isolation) -> FetchRequest {
    let topics = by_topic(asked.iter().map(|(key, next)| (*key, *next)));
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
