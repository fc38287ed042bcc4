//! Loads for a server that speaks etcd v3: puts, linearizable gets, watches.
//!
//! A client has one request in flight. Sixteen clients share a connection, as the clients of one process do.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use moim_wire_grpc::etcd::{
    PutRequest, RangeRequest, RangeResponse, StatusRequest, StatusResponse, WatchCreateRequest, WatchRequest,
    WatchRequestKind, WatchResponse,
};
use moim_wire_grpc::{FrameReader, decode, encode_frame, method};
use tokio::task::{JoinSet, LocalSet};

use super::grpc::{Call, Channel, Stream};
use super::{Tally, Until, all};
use crate::slices::{Work, latencies};

/// Clients per connection.
const CLIENTS_PER_CONNECTION: usize = 16;
/// Number of keys that puts cycle through.
const KEYS: u64 = 10_000;
/// Size of a value.
const VALUE_BYTES: usize = 256;

/// The key of a number.
fn key(number: u64) -> Bytes {
    Bytes::from(format!("bench/{number:08}"))
}

/// An encoded put request.
#[must_use]
pub fn put_frame(key: Bytes, value: Bytes) -> Bytes {
    encode_frame(&PutRequest { key, value, ..PutRequest::default() })
}

async fn channels(addr: SocketAddr, clients: usize) -> Result<Vec<Channel>> {
    let mut channels = Vec::new();
    for _ in 0..clients.div_ceil(CLIENTS_PER_CONNECTION) {
        channels.push(Channel::open(addr).await?);
    }
    Ok(channels)
}

/// Puts of 256 bytes, each client on a part of the keys.
pub async fn puts(addr: SocketAddr, clients: usize, until: Until) -> Result<Work> {
    let channels = channels(addr, clients).await?;
    let mut tasks = Vec::new();
    for client in 0..clients {
        let call = channels[client % channels.len()].method(method::kv::PUT)?;
        tasks.push(put_loop(call, client as u64, clients as u64, until));
    }
    all(tasks).await
}

async fn put_loop(call: Call, client: u64, clients: u64, until: Until) -> Result<Tally> {
    let mut tally = Tally::new()?;
    let value = Bytes::from(vec![b'v'; VALUE_BYTES]);
    let start = Instant::now();
    let mut sent = 0;
    while until.more(start, sent) {
        let frame = put_frame(key((client + sent * clients) % KEYS), value.clone());
        let asked = Instant::now();
        call.unary(frame).await?;
        tally.count(VALUE_BYTES, asked.elapsed());
        sent += 1;
    }
    Ok(tally)
}

/// Puts every key once, so that gets hit existing keys.
pub async fn fill(addr: SocketAddr) -> Result<()> {
    puts(addr, 64, Until::Operations(KEYS.div_ceil(64))).await.map(drop)
}

/// Linearizable gets of single existing keys.
pub async fn gets(addr: SocketAddr, clients: usize, until: Until) -> Result<Work> {
    let channels = channels(addr, clients).await?;
    let mut tasks = Vec::new();
    for client in 0..clients {
        let call = channels[client % channels.len()].method(method::kv::RANGE)?;
        tasks.push(get_loop(call, client as u64, until));
    }
    all(tasks).await
}

async fn get_loop(call: Call, client: u64, until: Until) -> Result<Tally> {
    let mut tally = Tally::new()?;
    let start = Instant::now();
    let mut sent = 0;
    while until.more(start, sent) {
        let wanted = key((client * 997 + sent) % KEYS);
        let frame = encode_frame(&RangeRequest { key: wanted, ..RangeRequest::default() });
        let asked = Instant::now();
        let answer = call.unary(frame).await?;
        tally.count(VALUE_BYTES, asked.elapsed());
        if sent == 0 {
            let answer: RangeResponse = decode(answer)?;
            ensure!(answer.kvs.len() == 1, "the key is missing");
        }
        sent += 1;
    }
    Ok(tally)
}

/// The status of one node.
pub async fn status(addr: SocketAddr) -> Result<StatusResponse> {
    let call = Channel::open(addr).await?.method(method::maintenance::STATUS)?;
    Ok(decode(call.unary(encode_frame(&StatusRequest::default())).await?)?)
}

/// Watchers of one key, each on its own stream, and one writer.
pub struct Watchers {
    streams: Vec<Stream>,
    writer: Call,
    key: Bytes,
    epoch: Instant,
}

/// Maximum size of a watch message.
const MAX_MESSAGE: usize = 4 << 20;

impl Watchers {
    /// Creates `count` watchers.
    pub async fn create(addr: SocketAddr, count: usize) -> Result<Watchers> {
        let key = Bytes::from_static(b"bench-watched");
        let create = WatchCreateRequest { key: key.clone(), ..WatchCreateRequest::default() };
        let frame = encode_frame(&WatchRequest { request: Some(WatchRequestKind::Create(create)) });
        let channels = channels(addr, count).await?;
        let mut streams = Vec::new();
        for watcher in 0..count {
            let call = channels[watcher % channels.len()].method(method::watch::WATCH)?;
            let mut stream = call.stream(frame.clone()).await?;
            let mut reader = FrameReader::new(MAX_MESSAGE);
            let created = loop {
                reader.push(stream.piece().await?);
                if let Some(frame) = reader.next_frame()? {
                    break decode::<WatchResponse>(frame)?;
                }
            };
            ensure!(created.created && !created.canceled, "the watcher was refused");
            streams.push(stream);
        }
        let writer = channels[0].method(method::kv::PUT)?;
        Ok(Watchers { streams, writer, key, epoch: Instant::now() })
    }

    /// Puts at a fixed rate until the slice ends. The work is the received events, each with its time since the put.
    pub async fn run(&mut self, slice: Duration, pace: Duration) -> Result<Work> {
        let updates = u64::try_from(slice.as_nanos() / pace.as_nanos().max(1))?.max(1);
        let started = Instant::now();
        let epoch = self.epoch;
        let local = LocalSet::new();
        let mut readers = JoinSet::new();
        for stream in self.streams.drain(..) {
            readers.spawn_local_on(read_events(stream, epoch, updates), &local);
        }
        let (writer, key) = (self.writer.clone(), self.key.clone());
        let mut streams = Vec::new();
        let mut latency = latencies()?;
        let watch = async {
            let mut timer = tokio::time::interval(pace);
            for _ in 0..updates {
                timer.tick().await;
                let now = u64::try_from(epoch.elapsed().as_nanos())?;
                writer.unary(put_frame(key.clone(), Bytes::from(now.to_string()))).await?;
            }
            while let Some(ended) = readers.join_next().await {
                let (stream, seen) = ended.context("a watcher's task panicked")??;
                streams.push(stream);
                for nanos in seen {
                    latency.saturating_record(nanos);
                }
            }
            Ok::<_, anyhow::Error>(())
        };
        local.run_until(watch).await?;
        self.streams = streams;
        Ok(Work {
            ops: latency.len(),
            bytes: 0,
            refused: 0,
            elapsed: started.elapsed(),
            latency: Some(latency),
            cpu: None,
        })
    }
}

/// Reads events until `wanted` were received; returns the age of each.
async fn read_events(mut stream: Stream, epoch: Instant, wanted: u64) -> Result<(Stream, Vec<u64>)> {
    let mut reader = FrameReader::new(MAX_MESSAGE);
    let mut seen = Vec::new();
    while (seen.len() as u64) < wanted {
        reader.push(stream.piece().await?);
        let now = u64::try_from(epoch.elapsed().as_nanos())?;
        while let Some(frame) = reader.next_frame()? {
            let message: WatchResponse = decode(frame)?;
            ensure!(!message.canceled, "the watcher was cancelled");
            for event in &message.events {
                let value = &event.kv.as_ref().context("an event without a key")?.value;
                let sent: u64 = std::str::from_utf8(value)?.parse()?;
                seen.push(now.saturating_sub(sent));
            }
        }
    }
    Ok((stream, seen))
}

/// One client that puts without pause until the stop flag is set, and switches to the next server when one does not
/// answer: returns the times at which a put was acknowledged.
pub async fn put_until_stopped(
    addrs: Vec<SocketAddr>,
    patience: Duration,
    stop: Rc<std::cell::Cell<bool>>,
) -> Result<Vec<Instant>> {
    let mut acknowledged = Vec::new();
    let mut turn = 0;
    while !stop.get() {
        let addr = addrs[turn % addrs.len()];
        turn += 1;
        let Ok(Ok(channel)) = tokio::time::timeout(patience, Channel::open(addr)).await else { continue };
        let call = channel.method(method::kv::PUT)?;
        while !stop.get() {
            let frame = put_frame(Bytes::from_static(b"bench-hammer"), Bytes::from_static(b"x"));
            match tokio::time::timeout(patience, call.unary(frame)).await {
                Ok(Ok(_)) => acknowledged.push(Instant::now()),
                Ok(Err(_)) | Err(_) => break,
            }
        }
    }
    Ok(acknowledged)
}
