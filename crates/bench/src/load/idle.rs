//! Many idle consumers: each waits in a long poll and fetches again after an empty response.
//!
//! Owns the waiting. The server's CPU time meanwhile is the cost of idle consumers.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::connection::Connection;
use super::fetch::{fetch_request, records_of};
use super::{Tally, all};
use crate::slices::Work;

/// Idle consumers.
#[derive(Clone, Debug)]
pub struct Idle {
    /// The broker.
    pub addr: SocketAddr,
    /// An empty topic.
    pub topic: String,
    /// Its partition count; the consumers are spread over the partitions.
    pub partitions: i32,
    /// Number of consumers, one connection each.
    pub consumers: i32,
    /// `max_wait_ms` of each fetch.
    pub max_wait_ms: i32,
}

/// Connected consumers, before they wait: connecting a thousand of them is not measured.
pub struct Waiting {
    connections: Vec<Connection>,
}

/// Connects all consumers.
pub async fn connect(idle: &Idle) -> Result<Waiting> {
    let mut connections = Vec::new();
    for _ in 0..idle.consumers {
        connections.push(Connection::open(idle.addr).await?);
    }
    Ok(Waiting { connections })
}

/// The response to one consumer that does not wait, without its length prefix.
pub async fn sample(idle: &Idle) -> Result<bytes::Bytes> {
    let mut connection = Connection::open(idle.addr).await?;
    connection.sender.send(&fetch_request(&idle.topic, 0, 0, 1 << 20, 0)?, 1).await?;
    connection.receiver.frame().await
}

/// Waits for `slice`; polls in flight at its end are finished.
pub async fn wait(idle: &Idle, waiting: Waiting, slice: Duration) -> Result<Work> {
    let mut tasks = Vec::new();
    for (connection, number) in waiting.connections.into_iter().zip(0..) {
        let question = fetch_request(&idle.topic, number % idle.partitions, 0, 1 << 20, idle.max_wait_ms)?;
        // Real consumers do not start in step; these are spread over one wait.
        let offset =
            Duration::from_millis(u64::try_from(idle.max_wait_ms)?) / u32::try_from(idle.consumers.max(1))?;
        let late = offset * u32::try_from(number)?;
        tasks.push(async move {
            let deadline = Instant::now() + slice;
            tokio::time::sleep(late.min(slice)).await;
            one(connection, question, deadline).await
        });
    }
    all(tasks).await
}

async fn one(mut connection: Connection, question: bytes::Bytes, deadline: Instant) -> Result<Tally> {
    let mut tally = Tally::new()?;
    while Instant::now() < deadline {
        let asked = Instant::now();
        connection.sender.send(&question, 1).await.context("idle consumer")?;
        let records = records_of(connection.receiver.frame().await?)?;
        ensure!(records.is_empty(), "the idle topic is not empty");
        tally.count(0, asked.elapsed());
    }
    Ok(tally)
}
