//! End-to-end latency: one record at a fixed rate, a consumer in a long poll, the time between.
//!
//! Owns the rate. The sender never waits for the server (acknowledgements are read concurrently), so a stall shows in
//! the latency of every record sent meanwhile instead of slowing the load. The value of a record is its send time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::records::{BatchBuilder, BatchHeader, for_each_record, split_batches};
use tokio::time::{MissedTickBehavior, interval};

use super::Tally;
use super::connection::{Connection, Receiver, Sender};
use super::fetch::{fetch_request, records_of};
use super::produce::{acknowledged, produce_request, wall_ms};
use crate::slices::Work;

const VALUE_BYTES: usize = 100;
const MAX_WAIT_MS: i32 = 500;
const MAX_BYTES: i32 = 1 << 20;
/// How long the consumer waits for the last records after the sender has stopped.
const DRAIN: Duration = Duration::from_secs(10);

/// An end-to-end load.
#[derive(Clone, Debug)]
pub struct EndToEnd {
    /// The broker.
    pub addr: SocketAddr,
    /// A topic with one partition.
    pub topic: String,
    /// Offset of the next record: the topic's log end offset.
    pub from: i64,
    /// Interval between two records.
    pub every: Duration,
}

/// Sends for `slice` and waits until every record was consumed.
pub async fn end_to_end(load: &EndToEnd, slice: Duration) -> Result<Work> {
    let wanted = u64::try_from(slice.as_nanos() / load.every.as_nanos().max(1))?;
    let Connection { mut sender, receiver } = Connection::open(load.addr).await?;
    let consumer = Connection::open(load.addr).await?;
    let epoch = Instant::now();
    // The sender outlives the sending: dropping it would close the connection before the last acknowledgements.
    let sending = send(&mut sender, load, epoch, wanted);
    let acknowledging = acknowledge(receiver, wanted);
    let consuming = async {
        tokio::time::timeout(slice + DRAIN, consume(consumer, load, epoch, wanted))
            .await
            .context("records did not arrive in time")?
    };
    let ((), (), tally) = tokio::try_join!(sending, acknowledging, consuming)?;
    let elapsed = epoch.elapsed();
    Ok(Work {
        ops: tally.ops,
        bytes: tally.bytes,
        refused: 0,
        elapsed,
        latency: Some(tally.latency),
        cpu: None,
    })
}

async fn send(sender: &mut Sender, load: &EndToEnd, epoch: Instant, wanted: u64) -> Result<()> {
    let mut pace = interval(load.every);
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for _ in 0..wanted {
        pace.tick().await;
        let mut value = [b'x'; VALUE_BYTES];
        value[..8].copy_from_slice(&nanos_since(epoch).to_be_bytes());
        let mut builder = BatchBuilder::new(Compression::None);
        builder.push(wall_ms(), None, Some(&value), &[]);
        sender.send(&produce_request(&load.topic, 0, &builder.build())?, 1).await?;
    }
    Ok(())
}

async fn acknowledge(mut receiver: Receiver, wanted: u64) -> Result<()> {
    for _ in 0..wanted {
        ensure!(acknowledged(receiver.frame().await?)?, "the server refused a record");
    }
    Ok(())
}

async fn consume(mut connection: Connection, load: &EndToEnd, epoch: Instant, wanted: u64) -> Result<Tally> {
    let mut tally = Tally::new()?;
    let mut next = load.from;
    while tally.ops < wanted {
        let question = fetch_request(&load.topic, 0, next, MAX_BYTES, MAX_WAIT_MS)?;
        connection.sender.send(&question, 1).await?;
        let records = records_of(connection.receiver.frame().await?)?;
        let seen = nanos_since(epoch);
        for batch in split_batches(&records) {
            let batch = batch.context("fetched batch")?;
            let header = BatchHeader::parse(&batch).context("fetched batch")?;
            ensure!(header.base_offset == next, "expected offset {next}, got {}", header.base_offset);
            for_each_record(&batch, usize::MAX, &mut |record| {
                if let Some(sent) = record.value.and_then(|value| value.first_chunk::<8>()) {
                    let took = seen.saturating_sub(u64::from_be_bytes(*sent));
                    tally.count(VALUE_BYTES, Duration::from_nanos(took));
                }
                std::ops::ControlFlow::Continue(())
            })?;
            next = header.last_offset() + 1;
        }
    }
    Ok(tally)
}

fn nanos_since(epoch: Instant) -> u64 {
    u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
