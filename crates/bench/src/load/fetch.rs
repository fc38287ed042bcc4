//! Fetch at full rate: one connection per partition, requests for consecutive ranges in flight on each.
//!
//! Owns the walk over a partition of equal batches: because every batch has the same size and record count, each
//! request is known in advance and is encoded once. The walk restarts at the end of the partition, so the data is
//! hot. A response that does not begin at the requested offset ends the run.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use moim_wire_kafka::messages::{FetchPartition, FetchRequest, FetchResponse, FetchTopic};
use moim_wire_kafka::{KString, Records, decode_response};

use super::connection::{Connection, request};
use super::{Tally, Until, all, expect_ok};
use crate::slices::Work;

/// The last version with topic names instead of topic ids.
pub(crate) const FETCH_VERSION: i16 = 12;

/// A fetch load.
#[derive(Clone, Debug)]
pub struct FetchLoad {
    /// The broker.
    pub addr: SocketAddr,
    /// The topic; every partition holds `batches` equal batches.
    pub topic: String,
    /// Partitions 0..n, one connection each.
    pub partitions: i32,
    /// Requests in flight on each connection.
    pub window: usize,
    /// Batches per partition.
    pub batches: usize,
    /// Batches per fetch request.
    pub batches_per_fetch: usize,
    /// Size of a batch.
    pub batch_bytes: usize,
    /// Records in a batch.
    pub batch_records: usize,
}

/// A fetch request for at most `max_bytes` of one partition; it waits up to `max_wait_ms` for the first byte.
pub fn fetch_request(
    topic: &str,
    partition: i32,
    offset: i64,
    max_bytes: i32,
    max_wait_ms: i32,
) -> Result<Bytes> {
    let partition = FetchPartition {
        partition,
        fetch_offset: offset,
        partition_max_bytes: max_bytes,
        ..Default::default()
    };
    let topic = FetchTopic { topic: KString::from(topic), partitions: vec![partition], ..Default::default() };
    let question = FetchRequest {
        max_wait_ms,
        min_bytes: 1,
        max_bytes: 64 << 20,
        topics: vec![topic],
        ..Default::default()
    };
    request(FETCH_VERSION, &question)
}

/// The records of a response for one partition; empty after a timeout.
pub(crate) fn records_of(frame: Bytes) -> Result<Bytes> {
    let (_, response) = decode_response::<FetchResponse>(frame, FETCH_VERSION).context("fetch response")?;
    expect_ok("fetch", response.error_code)?;
    let Some(partition) =
        response.responses.into_iter().next().and_then(|topic| topic.partitions.into_iter().next())
    else {
        return Ok(Bytes::new());
    };
    expect_ok("fetch", partition.error_code)?;
    match partition.records {
        Some(Records::Bytes(bytes)) => Ok(bytes),
        Some(Records::Gap(_)) | None => Ok(Bytes::new()),
    }
}

/// Fetches on all connections at once.
pub async fn fetch(load: &FetchLoad, until: Until) -> Result<Work> {
    let mut tasks = Vec::new();
    for partition in 0..load.partitions {
        let max_bytes = i32::try_from(load.batches_per_fetch * load.batch_bytes)?;
        let mut questions = Vec::new();
        for first in (0..load.batches).step_by(load.batches_per_fetch) {
            let offset = i64::try_from(first * load.batch_records)?;
            questions.push((offset, fetch_request(&load.topic, partition, offset, max_bytes, 500)?));
        }
        let connection = Connection::open(load.addr).await?;
        tasks.push(one(connection, questions, load.window, until));
    }
    all(tasks).await
}

async fn one(
    mut connection: Connection,
    questions: Vec<(i64, Bytes)>,
    window: usize,
    until: Until,
) -> Result<Tally> {
    let mut tally = Tally::new()?;
    let mut under_way = VecDeque::with_capacity(window);
    let mut next = questions.iter().cycle();
    let (started, mut sent) = (Instant::now(), 0);
    loop {
        while under_way.len() < window && until.more(started, sent) {
            let (offset, question) = next.next().context("nothing to fetch")?;
            under_way.push_back((*offset, Instant::now()));
            connection.sender.send(question, 1).await?;
            sent += 1;
        }
        let Some((offset, asked)) = under_way.pop_front() else { return Ok(tally) };
        let records = records_of(connection.receiver.frame().await?)?;
        let base = records.first_chunk::<8>().map(|bytes| i64::from_be_bytes(*bytes));
        ensure!(base == Some(offset), "asked for offset {offset}, got {base:?}");
        tally.count(records.len(), asked.elapsed());
    }
}
