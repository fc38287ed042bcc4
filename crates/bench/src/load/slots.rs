//! Loads for a server that speaks the Redis protocol: GET, SET and INCR, with any pipeline depth.
//!
//! Batches are encoded once and sent cyclically; replies are counted by their lines and every line is checked: an
//! error ends the run. A client has one batch in flight.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::BytesMut;
use moim_wire_resp::command;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Tally, Until, all};
use crate::slices::Work;

/// Number of keys that the loads cycle through.
pub const KEYS: u64 = 100_000;
/// Size of a value.
pub const VALUE_BYTES: usize = 64;
/// Number of distinct batches of a client.
const BATCHES: u64 = 64;

/// The command of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads an existing key.
    Get,
    /// Writes 64 bytes.
    Set,
    /// Increments a counter.
    Incr,
}

impl Command {
    /// Number of lines of a reply.
    fn lines(self) -> usize {
        match self {
            Self::Get => 2,
            Self::Set | Self::Incr => 1,
        }
    }

    /// The first byte of a reply.
    fn mark(self) -> u8 {
        match self {
            Self::Get => b'$',
            Self::Set => b'+',
            Self::Incr => b':',
        }
    }

    fn encode(self, out: &mut BytesMut, number: u64) {
        match self {
            Self::Get => command::encode(out, &["GET", &key(number)]),
            Self::Set => command::encode(out, &["SET", &key(number), &"v".repeat(VALUE_BYTES)]),
            Self::Incr => command::encode(out, &["INCR", &format!("counter:{number:012}")]),
        }
    }
}

fn key(number: u64) -> String {
    format!("key:{number:012}")
}

/// A load on the store.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The command of every client.
    pub command: Command,
    /// Number of connections.
    pub clients: usize,
    /// Pipeline depth: commands sent at once.
    pub depth: usize,
}

/// Runs a load.
pub async fn run(addr: SocketAddr, load: Load, until: Until) -> Result<Work> {
    let mut tasks = Vec::new();
    for client in 0..load.clients {
        // Readers and writers choose keys independently: with the same seeds, every reader would follow a writer from
        // key to key, which real clients do not do.
        let seed = (load.command as u64) << 32 | client as u64;
        tasks.push(batches(connect(addr).await?, load, seed, until));
    }
    all(tasks).await
}

/// Reads by half of the clients while the other half writes; only the reads are counted.
pub async fn reads_beside_writes(addr: SocketAddr, clients: usize, until: Until) -> Result<Work> {
    let reads = run(addr, Load { command: Command::Get, clients: clients / 2, depth: 1 }, until);
    let writes = run(addr, Load { command: Command::Set, clients: clients / 2, depth: 1 }, until);
    let (reads, writes) = tokio::join!(reads, writes);
    writes?;
    reads
}

/// Writes keys `0..count` once, so that reads hit existing keys.
pub async fn fill(addr: SocketAddr, count: u64) -> Result<()> {
    let mut stream = connect(addr).await?;
    let mut answers = Vec::new();
    for first in (0..count).step_by(500) {
        let mut batch = BytesMut::new();
        let last = count.min(first + 500);
        (first..last).for_each(|number| Command::Set.encode(&mut batch, number));
        exchange(&mut stream, &batch, Command::Set, (last - first) as usize, &mut answers).await?;
    }
    Ok(())
}

/// Sends one command and returns the first line of the reply.
pub async fn ask(addr: SocketAddr, words: &[&str]) -> Result<String> {
    let mut stream = connect(addr).await?;
    let mut frame = BytesMut::new();
    command::encode(&mut frame, words);
    stream.write_all(&frame).await?;
    let mut answer = Vec::new();
    while !answer.contains(&b'\n') {
        if stream.read_buf(&mut answer).await? == 0 {
            bail!("the server closed the connection");
        }
    }
    let line = answer.split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(String::from_utf8_lossy(line).trim_end().to_owned())
}

async fn connect(addr: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(addr).await.with_context(|| format!("connecting to {addr}"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn batches(mut stream: TcpStream, load: Load, seed: u64, until: Until) -> Result<Tally> {
    let mut random = fastrand::Rng::with_seed(seed);
    let prepared: Rc<[BytesMut]> = (0..BATCHES)
        .map(|_| {
            let mut batch = BytesMut::new();
            (0..load.depth).for_each(|_| load.command.encode(&mut batch, random.u64(..KEYS)));
            batch
        })
        .collect();
    let mut tally = Tally::new()?;
    let mut answers = Vec::with_capacity(64 * 1024);
    let start = Instant::now();
    let mut sent = 0;
    while until.more(start, sent) {
        let asked = Instant::now();
        let batch = &prepared[(sent % BATCHES) as usize];
        exchange(&mut stream, batch, load.command, load.depth, &mut answers).await?;
        let took: Duration = asked.elapsed();
        tally.count(VALUE_BYTES * load.depth, took);
        // A batch counts as many operations as it has commands; its latency is one observation.
        tally.ops += load.depth as u64 - 1;
        sent += 1;
    }
    Ok(tally)
}

/// Sends a batch and reads its replies.
async fn exchange(
    stream: &mut TcpStream,
    batch: &[u8],
    command: Command,
    count: usize,
    answers: &mut Vec<u8>,
) -> Result<()> {
    answers.clear();
    stream.write_all(batch).await?;
    let (mut lines, mut looked, mut line_start) = (0, 0, 0);
    while lines < count * command.lines() {
        if stream.read_buf(answers).await? == 0 {
            bail!("the server closed the connection");
        }
        for (at, byte) in answers.iter().enumerate().skip(looked) {
            let first_line = lines % command.lines() == 0;
            let refused = at == line_start && *byte != command.mark();
            let missing = command == Command::Get && at == line_start + 1 && *byte == b'-';
            if first_line && (refused || missing) {
                bail!("unexpected reply: {}", String::from_utf8_lossy(&answers[line_start..]));
            }
            if *byte == b'\n' {
                lines += 1;
                line_start = at + 1;
            }
        }
        looked = answers.len();
    }
    Ok(())
}
