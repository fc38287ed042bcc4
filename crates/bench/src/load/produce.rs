//! Produce at full rate: one connection per partition, a window of requests in flight on each.
//!
//! Owns the batch that every request carries. The request is encoded once per connection; the same bytes are sent
//! every time, which a server cannot distinguish from a producer with repetitive data: batches carry no producer id
//! and random values.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::messages::{PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData};
use moim_wire_kafka::records::BatchBuilder;
use moim_wire_kafka::{ErrorCode, KString, Records, decode_response};

use super::connection::{Connection, request};
use super::{Tally, Until, all, expect_ok};
use crate::slices::Work;

/// The last version with topic names instead of topic ids.
pub(crate) const PRODUCE_VERSION: i16 = 12;

/// The default retry backoff of clients.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// A produce load.
#[derive(Clone, Debug)]
pub struct ProduceLoad {
    /// The broker.
    pub addr: SocketAddr,
    /// The topic; it must exist.
    pub topic: String,
    /// Partitions 0..n, one connection each.
    pub partitions: i32,
    /// Requests in flight on each connection.
    pub window: usize,
    /// The batch in every request.
    pub batch: Bytes,
}

/// A batch of `records` records of about `bytes` bytes, as close as whole records allow.
#[must_use]
pub fn batch(bytes: usize, records: usize) -> Bytes {
    let mut rng = fastrand::Rng::with_seed(7);
    let now_ms = wall_ms();
    // 61 bytes of batch header, about 10 bytes of overhead per value.
    let value_len = (bytes.saturating_sub(61) / records).saturating_sub(10).max(1);
    let mut builder = BatchBuilder::new(Compression::None);
    let mut value = vec![0; value_len];
    for _ in 0..records {
        rng.fill(&mut value);
        builder.push(now_ms, None, Some(&value), &[]);
    }
    builder.build()
}

pub(crate) fn wall_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// The produce request with `batch` for one partition, acks=all.
pub fn produce_request(topic: &str, partition: i32, batch: &Bytes) -> Result<Bytes> {
    let partition_data =
        vec![PartitionProduceData { index: partition, records: Some(Records::Bytes(batch.clone())) }];
    let topic = TopicProduceData { name: KString::from(topic), partition_data, ..Default::default() };
    let question =
        ProduceRequest { acks: -1, timeout_ms: 30_000, topic_data: vec![topic], ..Default::default() };
    request(PRODUCE_VERSION, &question)
}

/// True if the response acknowledges the request. False if the storage could not keep up, which is retriable; any
/// other error code is an error.
pub(crate) fn acknowledged(frame: Bytes) -> Result<bool> {
    let (_, response) =
        decode_response::<ProduceResponse>(frame, PRODUCE_VERSION).context("produce response")?;
    let topic = response.responses.first().context("produce response without a topic")?;
    let partition = topic.partition_responses.first().context("produce response without a partition")?;
    if partition.error_code == ErrorCode::KafkaStorageError as i16 {
        return Ok(false);
    }
    expect_ok("produce", partition.error_code)?;
    Ok(true)
}

/// Produces on all connections at once.
pub async fn produce(load: &ProduceLoad, until: Until) -> Result<Work> {
    produce_to(load, &vec![load.addr; usize::try_from(load.partitions)?], until).await
}

/// Produces on all connections at once, every partition at its leader.
pub async fn produce_to(load: &ProduceLoad, leaders: &[SocketAddr], until: Until) -> Result<Work> {
    let mut tasks = Vec::new();
    for (partition, leader) in (0..load.partitions).zip(leaders) {
        let connection = Connection::open(*leader).await?;
        let frame = produce_request(&load.topic, partition, &load.batch)?;
        tasks.push(one(connection, frame, load.window, load.batch.len(), until));
    }
    all(tasks).await
}

async fn one(
    mut connection: Connection,
    frame: Bytes,
    window: usize,
    bytes: usize,
    until: Until,
) -> Result<Tally> {
    let mut tally = Tally::new()?;
    let mut under_way = VecDeque::with_capacity(window);
    let (started, mut sent) = (Instant::now(), 0);
    loop {
        let free = window - under_way.len();
        let mut fresh = 0;
        while fresh < free && until.more(started, sent) {
            fresh += 1;
            sent += 1;
        }
        if fresh > 0 {
            let now = Instant::now();
            under_way.extend(std::iter::repeat_n(now, fresh));
            connection.sender.send(&frame, fresh).await?;
        }
        if under_way.is_empty() {
            return Ok(tally);
        }
        let mut answer = Some(connection.receiver.frame().await?);
        let now = Instant::now();
        let mut refused = 0;
        while let Some(frame) = answer {
            let asked = under_way.pop_front().context("a response without a request")?;
            if acknowledged(frame)? {
                tally.count(bytes, now - asked);
            } else {
                tally.refused += 1;
                refused += 1;
                sent -= 1;
            }
            answer = connection.receiver.buffered()?;
        }
        if refused > 0 {
            ensure!(tally.refused < 1000 + tally.ops, "the server refuses more requests than it accepts");
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }
}
