//! Offsets: ListOffsets (log start, log end, by timestamp), and OffsetFetch and OffsetCommit of a group.

use std::collections::BTreeMap;
use std::time::Duration;

use moim_wire_kafka::messages::offset_commit::{OffsetCommitRequestPartition, OffsetCommitRequestTopic};
use moim_wire_kafka::messages::offset_fetch::OffsetFetchRequestTopic;
use moim_wire_kafka::messages::{
    ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic, OffsetCommitRequest, OffsetFetchRequest,
};
use moim_wire_kafka::{ErrorCode, KString};
use tokio::time::Instant;

use crate::client::{BACKOFF, Client, TopicPartition};
use crate::error::{Result, server_error};

/// The timestamp of ListOffsets that means the end of the partition: high watermark or last stable offset.
pub const LATEST: i64 = -1;
/// The timestamp of ListOffsets that means the log start offset.
pub const EARLIEST: i64 = -2;

/// An offset per partition.
pub type Offsets = BTreeMap<TopicPartition, i64>;

/// The isolation level of fetches and of ListOffsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// All records up to the high watermark.
    ReadUncommitted = 0,
    /// Records up to the last stable offset, without aborted transactions.
    ReadCommitted = 1,
}

/// A position in a partition, relative to its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffsetSpec {
    /// The log start offset.
    Earliest,
    /// The end of the partition.
    Latest,
    /// An absolute offset.
    Offset(i64),
    /// This many records after the log start offset.
    AfterEarliest(i64),
    /// This many records before the end.
    BeforeLatest(i64),
    /// The first record with this timestamp or a later one, in ms since 1970.
    Timestamp(i64),
}

impl Client {
    /// All partitions of these topics, also those without a leader.
    pub async fn partitions(&mut self, topics: &[KString]) -> Result<Vec<TopicPartition>> {
        let known = self.topics(topics, false, |_, _| false).await?;
        let mut all: Vec<TopicPartition> = Vec::new();
        for topic in known {
            let name = topic.name.unwrap_or_default();
            let key = |partition| TopicPartition { topic: name.clone(), partition };
            all.extend(topic.partitions.iter().map(|one| key(one.partition_index)));
        }
        all.sort();
        Ok(all)
    }

    /// The leader of each of these partitions; waits until each has one. The result omits partitions that do not exist.
    pub(crate) async fn leaders(&mut self, keys: &[TopicPartition]) -> Result<BTreeMap<TopicPartition, i32>> {
        let mut leaders = BTreeMap::new();
        let needed = |topic: &str, partition| {
            keys.iter().any(|key| key.partition == partition && key.topic.as_str() == topic)
        };
        for topic in self.topics(&topics_of(keys), false, needed).await? {
            let name = topic.name.unwrap_or_default();
            for partition in &topic.partitions {
                let key = TopicPartition { topic: name.clone(), partition: partition.partition_index };
                leaders.insert(key, partition.leader_id);
            }
        }
        Ok(leaders)
    }

    /// The offset of a timestamp (or [`LATEST`], [`EARLIEST`]) in each partition. The result omits partitions without a
    /// record of that timestamp or later.
    pub async fn list_offsets(
        &mut self,
        partitions: &[TopicPartition],
        timestamp: i64,
        isolation: Isolation,
    ) -> Result<Offsets> {
        let deadline = self.deadline();
        let mut waiting: Vec<TopicPartition> = partitions.to_vec();
        let mut found = Offsets::new();
        loop {
            let leaders = self.leaders(&waiting).await?;
            let mut retry = Vec::new();
            for (leader, partitions) in by_leader(&waiting, &leaders)? {
                let request = list_offsets_request(&partitions, timestamp, isolation);
                for topic in self.request(leader, &request).await?.topics {
                    for partition in topic.partitions {
                        let key = TopicPartition {
                            topic: topic.name.clone(),
                            partition: partition.partition_index,
                        };
                        match ErrorCode::try_from(partition.error_code) {
                            Ok(ErrorCode::None) if partition.offset >= 0 => {
                                found.insert(key, partition.offset);
                            }
                            Ok(ErrorCode::None) => {}
                            Ok(error) if error.is_retriable() && Instant::now() < deadline => retry.push(key),
                            _ => return Err(server_error(partition.error_code, None).context(&key)),
                        }
                    }
                }
            }
            if retry.is_empty() {
                return Ok(found);
            }
            waiting = retry;
            tokio::time::sleep(BACKOFF).await;
        }
    }

    /// The offset of `spec` in each partition, between the log start offset and the end.
    pub async fn resolve(
        &mut self,
        partitions: &[TopicPartition],
        spec: OffsetSpec,
        isolation: Isolation,
    ) -> Result<Offsets> {
        let starts = self.list_offsets(partitions, EARLIEST, isolation).await?;
        let ends = self.list_offsets(partitions, LATEST, isolation).await?;
        let times = match spec {
            OffsetSpec::Timestamp(ms) => self.list_offsets(partitions, ms, isolation).await?,
            _ => Offsets::new(),
        };
        let resolved = partitions.iter().map(|key| {
            let start = starts.get(key).copied().unwrap_or(0);
            let end = ends.get(key).copied().unwrap_or(start);
            let at = match spec {
                OffsetSpec::Earliest => start,
                OffsetSpec::Latest => end,
                OffsetSpec::Offset(offset) => offset,
                OffsetSpec::AfterEarliest(count) => start.saturating_add(count),
                OffsetSpec::BeforeLatest(count) => end.saturating_sub(count),
                OffsetSpec::Timestamp(_) => times.get(key).copied().unwrap_or(end),
            };
            (key.clone(), at.clamp(start, end.max(start)))
        });
        Ok(resolved.collect())
    }

    /// The committed offsets of a group: of these partitions, or of all.
    pub async fn committed(&mut self, group: &str, of: Option<&[TopicPartition]>) -> Result<Offsets> {
        let deadline = self.deadline();
        let topics = of.map(|partitions| {
            let topics = by_topic(partitions.iter().map(|key| (key, ())));
            let one = |(name, all): (KString, Vec<(i32, ())>)| OffsetFetchRequestTopic {
                name,
                partition_indexes: all.into_iter().map(|(partition, ())| partition).collect(),
            };
            topics.into_iter().map(one).collect()
        });
        let request = OffsetFetchRequest { group_id: group.into(), topics, ..Default::default() };
        loop {
            let coordinator = self.coordinator(group).await?;
            let answer = self.request(coordinator, &request).await?;
            let partitions = answer.topics.iter().flat_map(|topic| topic.partitions.iter());
            let code =
                partitions.map(|one| one.error_code).chain([answer.error_code]).find(|code| *code != 0);
            match code {
                None => {
                    let mut found = Offsets::new();
                    for topic in answer.topics {
                        for one in topic.partitions.iter().filter(|one| one.committed_offset >= 0) {
                            let key =
                                TopicPartition { topic: topic.name.clone(), partition: one.partition_index };
                            found.insert(key, one.committed_offset);
                        }
                    }
                    return Ok(found);
                }
                Some(code) if retriable(code) && Instant::now() < deadline => {
                    tokio::time::sleep(BACKOFF).await
                }
                Some(code) => return Err(server_error(code, None).context(format!("group {group}"))),
            }
        }
    }

    /// Commits offsets without a member id: the group must be empty.
    pub async fn commit(&mut self, group: &str, offsets: &Offsets) -> Result {
        match self.try_commit(group, None, offsets).await? {
            None => Ok(()),
            Some(code) => Err(server_error(code, None).context(format!("group {group}"))),
        }
    }

    /// Commits offsets, as a member if there is a generation; returns the error code of a refusal.
    pub(crate) async fn try_commit(
        &mut self,
        group: &str,
        member: Option<(i32, KString)>,
        offsets: &Offsets,
    ) -> Result<Option<i16>> {
        let deadline = self.deadline();
        let (generation, member_id) = member.unwrap_or((-1, KString::default()));
        let topics = by_topic(offsets.iter().map(|(key, offset)| (key, *offset)));
        let partition = |(partition_index, committed_offset)| OffsetCommitRequestPartition {
            partition_index,
            committed_offset,
            committed_metadata: Some(KString::default()),
            ..Default::default()
        };
        let topic = |(name, all): (KString, Vec<(i32, i64)>)| OffsetCommitRequestTopic {
            name,
            partitions: all.into_iter().map(partition).collect(),
            ..Default::default()
        };
        let request = OffsetCommitRequest {
            group_id: group.into(),
            generation_id_or_member_epoch: generation,
            member_id,
            topics: topics.into_iter().map(topic).collect(),
            ..Default::default()
        };
        loop {
            let coordinator = self.coordinator(group).await?;
            let answer = self.request(coordinator, &request).await?;
            let codes =
                answer.topics.iter().flat_map(|topic| topic.partitions.iter().map(|one| one.error_code));
            match codes.into_iter().find(|code| *code != 0) {
                None => return Ok(None),
                Some(code) if retriable(code) && Instant::now() < deadline => {
                    tokio::time::sleep(BACKOFF).await
                }
                refused => return Ok(refused),
            }
        }
    }
}

/// True if the request can be repeated. REBALANCE_IN_PROGRESS cannot: the member has to rejoin first.
fn retriable(code: i16) -> bool {
    ErrorCode::try_from(code)
        .is_ok_and(|error| error.is_retriable() && error != ErrorCode::RebalanceInProgress)
}

/// The distinct topics of these partitions.
fn topics_of(partitions: &[TopicPartition]) -> Vec<KString> {
    let mut topics: Vec<KString> = partitions.iter().map(|key| key.topic.clone()).collect();
    topics.sort();
    topics.dedup();
    topics
}

/// Groups values by topic, the structure of most requests.
pub(crate) fn by_topic<'a, T>(
    values: impl Iterator<Item = (&'a TopicPartition, T)>,
) -> BTreeMap<KString, Vec<(i32, T)>> {
    let mut topics: BTreeMap<KString, Vec<(i32, T)>> = BTreeMap::new();
    for (key, value) in values {
        topics.entry(key.topic.clone()).or_default().push((key.partition, value));
    }
    topics
}

fn by_leader(
    partitions: &[TopicPartition],
    leaders: &BTreeMap<TopicPartition, i32>,
) -> Result<BTreeMap<i32, Vec<TopicPartition>>> {
    let mut brokers: BTreeMap<i32, Vec<TopicPartition>> = BTreeMap::new();
    for key in partitions {
        let unknown = || server_error(ErrorCode::UnknownTopicOrPartition.code(), None).context(key);
        let leader = leaders.get(key).ok_or_else(unknown)?;
        brokers.entry(*leader).or_default().push(key.clone());
    }
    Ok(brokers)
}

fn list_offsets_request(
    partitions: &[TopicPartition],
    timestamp: i64,
    isolation: Isolation,
) -> ListOffsetsRequest {
    let topics = by_topic(partitions.iter().map(|key| (key, ())));
    let partition =
        |(partition_index, ())| ListOffsetsPartition { partition_index, timestamp, ..Default::default() };
    let topic = |(name, all): (KString, Vec<(i32, ())>)| ListOffsetsTopic {
        name,
        partitions: all.into_iter().map(partition).collect(),
    };
    ListOffsetsRequest {
        replica_id: -1,
        isolation_level: isolation as i8,
        topics: topics.into_iter().map(topic).collect(),
        timeout_ms: i32::try_from(Duration::from_secs(30).as_millis()).unwrap_or(i32::MAX),
    }
}
