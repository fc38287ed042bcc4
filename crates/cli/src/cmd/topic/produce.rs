//! `moim topic produce`: each line of stdin becomes a message.
//!
//! A thread reads stdin, because a blocked read must not delay the sending of earlier lines. Lines that are available
//! together are sent together; when no line is waiting the producer is flushed, so that each line of a terminal is sent
//! at once.

use std::io::{self, BufRead as _, Read as _};

use moim_base::{Clock as _, SystemClock};
use moim_kafka_client::{Client, Message, Producer, ProducerOptions};
use moim_wire_kafka::compression::Compression;
use serde::Serialize;
use tokio::sync::mpsc;

use super::ProduceArgs;
use crate::config::units::show_bytes;
use crate::exit::{Failure, Outcome};
use crate::format::LineFormat;
use crate::kafka;
use crate::output::{Format, Output, Report, Section, counted, note};
use crate::target::ClientArgs;

/// A line longer than this is not a message of any topic.
const MAX_LINE: u64 = 256 << 20;
/// Lines read ahead of the sender, in chunks of about 64 KiB.
const CHUNKS_AHEAD: usize = 64;

pub(super) async fn run(client: &ClientArgs, args: &ProduceArgs, output: Output) -> Outcome {
    let text = args.format.as_deref().unwrap_or("%v\\n");
    let format = LineFormat::parse(text).map_err(|why| Failure::usage(format!("-f '{text}': {why}")))?;
    if format.has_key() && args.key.is_some() {
        return Err(Failure::usage("-k and %k say different things; choose one"));
    }
    let compression = Compression::parse(&args.compression).ok_or_else(|| {
        Failure::usage(format!("-z {}: must be none, gzip, snappy, lz4 or zstd", args.compression))
    })?;
    let acks = match args.acks.as_str() {
        "all" | "-1" => -1,
        "1" => 1,
        _ => 0,
    };
    let options = ProducerOptions {
        topic: args.topic.as_str().into(),
        partition: args.partition,
        compression,
        acks,
        // An idempotent producer requires acks=all.
        idempotent: acks == -1 && !args.no_idempotence,
    };
    let clock = SystemClock::new();
    let mut client = kafka::connect(client).await?;
    let mut producer = Producer::start(&mut client, options).await?;
    let bytes = send_lines(&mut client, &mut producer, args, &format, &clock).await?;
    summarize(&producer, args, bytes, clock.monotonic_ms(), output)
}

async fn send_lines(
    client: &mut Client,
    producer: &mut Producer,
    args: &ProduceArgs,
    format: &LineFormat,
    clock: &SystemClock,
) -> Outcome<u64> {
    let (sender, mut lines) = mpsc::channel(CHUNKS_AHEAD);
    std::thread::Builder::new().name("stdin".to_owned()).spawn(move || read_lines(&sender))?;
    let (mut line_number, mut bytes) = (0_u64, 0_u64);
    while let Some(chunk) = lines.recv().await {
        let chunk: Vec<u8> = chunk?;
        let now_ms = clock.wall_ms();
        for line in chunk.split_inclusive(|byte| *byte == b'\n') {
            let line = line.strip_suffix(b"\n").unwrap_or(line);
            line_number += 1;
            bytes += line.len() as u64;
            let message = message(args, format, line)
                .map_err(|why| Failure::usage(format!("line {line_number}: {why}")));
            // The lines before the invalid one were accepted: send them first.
            let Ok(message) = message else {
                producer.flush(client).await?;
                return message.map(|_| 0);
            };
            if producer.push(&message, now_ms)? {
                producer.flush(client).await?;
            }
        }
        if lines.is_empty() {
            producer.flush(client).await?;
        }
    }
    producer.flush(client).await?;
    Ok(bytes)
}

fn message<'a>(args: &'a ProduceArgs, format: &LineFormat, line: &'a [u8]) -> Result<Message<'a>, String> {
    let line = format.split(line)?;
    let common = args.headers.iter().map(|(name, value)| (name.as_bytes(), Some(value.as_bytes())));
    Ok(Message {
        key: line.key.or(args.key.as_deref().map(str::as_bytes)),
        value: if args.tombstone && line.value.is_empty() { None } else { Some(line.value) },
        headers: common.chain(line.headers).collect(),
        partition: line.partition,
    })
}

/// Passes stdin on in whole lines, until the end of the input or until the receiver is closed.
fn read_lines(sender: &mpsc::Sender<io::Result<Vec<u8>>>) {
    let mut input = io::BufReader::with_capacity(64 << 10, io::stdin().lock());
    loop {
        let chunk = read_chunk(&mut input);
        let is_last = !matches!(&chunk, Ok(chunk) if !chunk.is_empty());
        let is_empty = matches!(&chunk, Ok(chunk) if chunk.is_empty());
        if (!is_empty && sender.blocking_send(chunk).is_err()) || is_last {
            return;
        }
    }
}

/// All whole lines that are available, at least one; nothing at the end of the input.
fn read_chunk(input: &mut impl io::BufRead) -> io::Result<Vec<u8>> {
    let available = input.fill_buf()?;
    let whole = available.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let mut chunk = available[..whole].to_vec();
    input.consume(whole);
    if whole == 0 {
        input.by_ref().take(MAX_LINE).read_until(b'\n', &mut chunk)?;
        if chunk.len() as u64 == MAX_LINE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line of stdin is longer than 256 MiB"));
        }
    }
    Ok(chunk)
}

fn summarize(producer: &Producer, args: &ProduceArgs, bytes: u64, ms: u64, output: Output) -> Outcome {
    let partitions: Vec<Partition> = producer
        .written()
        .filter(|(_, written)| written.messages > 0)
        .map(|(partition, written)| Partition {
            partition,
            messages: written.messages,
            first_offset: written.first_offset,
            last_offset: written.last_offset,
        })
        .collect();
    let messages: u64 = partitions.iter().map(|one| one.messages).sum();
    if output.format == Format::Json {
        return output.print(&Summary {
            topic: args.topic.clone(),
            messages,
            bytes,
            elapsed_ms: ms,
            partitions,
        });
    }
    note(format_args!(
        "{} ({}) to {} in {:.1} s, {}",
        counted(messages, "message"),
        show_bytes(bytes),
        args.topic,
        ms as f64 / 1000.0,
        counted(partitions.len() as u64, "partition")
    ));
    Ok(())
}

#[derive(Serialize)]
struct Summary {
    topic: String,
    messages: u64,
    bytes: u64,
    elapsed_ms: u64,
    partitions: Vec<Partition>,
}

#[derive(Serialize)]
struct Partition {
    partition: usize,
    messages: u64,
    first_offset: Option<i64>,
    last_offset: Option<i64>,
}

impl Report for Summary {
    fn sections(&self) -> Vec<Section> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_whole_lines() {
        let text = b"one\ntwo\nlonger than the buffer\nlast";
        let mut input = io::BufReader::with_capacity(10, &text[..]);
        let mut chunks = Vec::new();
        loop {
            let chunk = read_chunk(&mut input).unwrap();
            if chunk.is_empty() {
                break;
            }
            chunks.push(String::from_utf8(chunk).unwrap());
        }
        assert_eq!(chunks, ["one\ntwo\n", "longer than the buffer\n", "last"]);
    }
}
