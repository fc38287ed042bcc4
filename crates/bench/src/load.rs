//! The load tool: one client for every server that speaks the Kafka protocol, one for etcd's, one for Redis's.
//!
//! Owns the client side of every measurement. It shares the machine with the server, so it is cheap by design:
//! requests are encoded once and sent as the same bytes, responses are checked but not decoded, one thread serves all
//! connections, and one system call carries as many requests as the window allows. Every response is checked: an
//! error code ends the run, because a fast error is not a fast server. The one exception is a storage that cannot
//! keep up: like any client, the load waits, retries, and counts the refusal.
//!
//! It does not depend on the comparisons; it can be used as a load test against any address.

pub mod admin;
pub mod connection;
pub mod coord;
pub mod end_to_end;
pub mod fetch;
pub mod grpc;
pub mod idle;
pub mod produce;
pub mod slots;

use std::future::Future;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hdrhistogram::Histogram;
use moim_wire_kafka::ErrorCode;
use tokio::runtime::Runtime;
use tokio::task::{JoinSet, LocalSet};

use crate::slices::{Work, latencies};

/// When a load ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// After this time; requests in flight are finished.
    Elapsed(Duration),
    /// After this many operations on every connection.
    Operations(u64),
}

impl Until {
    fn more(self, started: Instant, sent: u64) -> bool {
        match self {
            Until::Elapsed(slice) => started.elapsed() < slice,
            Until::Operations(wanted) => sent < wanted,
        }
    }
}

/// Work of one connection.
struct Tally {
    ops: u64,
    bytes: u64,
    refused: u64,
    latency: Histogram<u64>,
}

impl Tally {
    fn new() -> Result<Tally> {
        Ok(Tally { ops: 0, bytes: 0, refused: 0, latency: latencies()? })
    }

    fn count(&mut self, bytes: usize, took: Duration) {
        self.ops += 1;
        self.bytes += bytes as u64;
        self.latency.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
}

/// The single-threaded runtime of the loads.
pub fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")
}

/// Runs one task per connection to completion and sums their work.
async fn all<F>(tasks: impl IntoIterator<Item = F>) -> Result<Work>
where
    F: Future<Output = Result<Tally>> + 'static,
{
    let started = Instant::now();
    let local = LocalSet::new();
    let mut running = JoinSet::new();
    for task in tasks {
        running.spawn_local_on(task, &local);
    }
    let mut sum = Tally::new()?;
    let gather = async {
        while let Some(ended) = running.join_next().await {
            let tally = ended.context("a connection's task panicked")??;
            sum.ops += tally.ops;
            sum.bytes += tally.bytes;
            sum.refused += tally.refused;
            sum.latency.add(&tally.latency)?;
        }
        Ok::<_, anyhow::Error>(())
    };
    local.run_until(gather).await?;
    Ok(Work {
        ops: sum.ops,
        bytes: sum.bytes,
        refused: sum.refused,
        elapsed: started.elapsed(),
        latency: Some(sum.latency),
        cpu: None,
    })
}

/// An error unless the code is 0.
fn expect_ok(what: &str, code: i16) -> Result<()> {
    match ErrorCode::try_from(code) {
        Ok(ErrorCode::None) => Ok(()),
        Ok(code) => bail!("{what}: {}", code.name()),
        Err(_) => bail!("{what}: error code {code}"),
    }
}

/// Reads everything a server sends, at full rate, and discards it. One operation is `op_bytes` of it.
pub async fn drain(addr: SocketAddr, op_bytes: u64, slice: Duration) -> Result<Work> {
    let mut connection = connection::Connection::open(addr).await?;
    let started = Instant::now();
    let mut bytes = 0;
    while started.elapsed() < slice {
        bytes += connection.receiver.discard(op_bytes).await?;
    }
    Ok(Work {
        ops: bytes / op_bytes,
        bytes,
        refused: 0,
        elapsed: started.elapsed(),
        latency: None,
        cpu: None,
    })
}

#[cfg(test)]
mod tests;
