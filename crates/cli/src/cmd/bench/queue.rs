//! `moim bench queue`: producers fill a topic made for the occasion, then consumers read it to its end.
//!
//! Every message that was acknowledged must come out again: one that does not is an error, however fast the others were.

use std::ops::ControlFlow;
use std::time::Duration;

use clap::Args;
use moim_base::{Clock as _, SystemClock};
use moim_kafka_client::{
    Client, Fetcher, Isolation, LATEST, Message, Offsets, Producer, ProducerOptions, TopicPartition,
};
use moim_wire_kafka::KString;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::messages::create_topics::CreatableTopic;
use moim_wire_kafka::messages::{CreateTopicsRequest, DeleteTopicsRequest};
use tokio::time::Instant;

use super::load::{Done, Figures, LoadArgs, Measured, Phase, Stop, Tally, noise, together, unique};
use crate::cmd::pipeline::live::grouped;
use crate::coordination::address;
use crate::exit::{Failure, Outcome, Status};
use crate::kafka::{self, errors, note_reset};
use crate::output::{Output, note};
use crate::target::ClientArgs;

/// How long a fetch waits for messages that are there already.
const FETCH_WAIT: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(super) struct QueueBench {
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    load: LoadArgs,
    /// How many clients write at the same time, each one batch at a time; as many read
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    clients: u16,
    /// Bytes of a message
    #[arg(long, value_name = "BYTES", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    size: u32,
    /// Bytes of messages in a batch; at least one message
    #[arg(long, value_name = "BYTES", default_value_t = 65_536)]
    batch: u32,
    /// Partitions of the topic
    #[arg(short, long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(i32).range(1..))]
    partitions: i32,
    /// Copies of each partition [default: the cluster's]
    #[arg(short, long, value_name = "N")]
    replication_factor: Option<i16>,
    /// Who must have a message before it counts
    #[arg(long, value_name = "WHO", default_value = "all", value_parser = ["all", "1"])]
    acks: String,
    /// How batches are packed: none, gzip, snappy, lz4 or zstd
    #[arg(short = 'z', long, value_name = "HOW", default_value = "none")]
    compression: String,
    /// Leave the topic there
    #[arg(long)]
    keep: bool,
}

pub(super) async fn run(args: &QueueBench, stop: &Stop, output: Output) -> Outcome {
    let compression = Compression::parse(&args.compression).ok_or_else(|| {
        Failure::usage(format!("-z {}: must be none, gzip, snappy, lz4 or zstd", args.compression))
    })?;
    let mut client = kafka::connect(&args.client).await?;
    let topic: KString = unique().into();
    create(&mut client, &topic, args).await?;
    let bench = Bench { args, topic: topic.clone(), compression, stop };
    let measured = bench.measure(&mut client).await;
    if args.keep {
        note(format_args!("the topic is {topic}"));
    } else if let Err(failure) = delete(&mut client, &topic).await {
        note(format_args!("topic {topic} is left over: {failure}"));
    }
    let phases = measured?;
    let servers: Vec<_> =
        args.client.target()?.addresses.iter().map(|(host, port)| address(host, *port)).collect();
    let clients = usize::from(args.clients);
    output.print(&Measured { bench: "queue", servers: servers.join(","), clients, phases })
}

async fn create(client: &mut Client, topic: &KString, args: &QueueBench) -> Outcome {
    let wanted = CreatableTopic {
        name: topic.clone(),
        num_partitions: args.partitions,
        replication_factor: args.replication_factor.unwrap_or(-1),
        ..Default::default()
    };
    let request =
        CreateTopicsRequest { topics: vec![wanted], timeout_ms: client.timeout_ms(), validate_only: false };
    let code = |answer: &moim_wire_kafka::messages::CreateTopicsResponse| {
        answer.topics.first().map_or(0, |topic| topic.error_code)
    };
    let answer = client.request_controller(&request, code).await?;
    match answer.topics.first() {
        Some(made) => errors::check(made.error_code, made.error_message.as_deref())
            .map_err(|failure| failure.context(format!("creating topic {topic}"))),
        None => Err(Failure::error("the cluster says nothing of the topic")),
    }
}

async fn delete(client: &mut Client, topic: &KString) -> Outcome {
    let request = DeleteTopicsRequest {
        topic_names: vec![topic.clone()],
        timeout_ms: client.timeout_ms(),
        ..Default::default()
    };
    let code = |answer: &moim_wire_kafka::messages::DeleteTopicsResponse| {
        answer.responses.first().map_or(0, |topic| topic.error_code)
    };
    let answer = client.request_controller(&request, code).await?;
    answer.responses.iter().try_for_each(|gone| errors::check(gone.error_code, gone.error_message.as_deref()))
}

struct Bench<'a> {
    args: &'a QueueBench,
    topic: KString,
    compression: Compression,
    stop: &'a Stop,
}

impl Bench<'_> {
    async fn measure(&self, client: &mut Client) -> Outcome<Vec<Figures>> {
        let args = self.args;
        let workers = usize::from(args.clients);
        let each = (args.batch / args.size).max(1);
        let mut writers = Vec::with_capacity(workers);
        for _ in 0..workers {
            let mut client = kafka::connect(&args.client).await?;
            let producer = Producer::start(&mut client, self.options()).await?;
            writers.push((client, producer));
        }
        note(format_args!(
            "{workers} clients write messages of {} bytes, {each} at a time, for {:.0} s",
            grouped(args.size.into()),
            args.load.duration.as_secs_f64()
        ));
        let phase = Phase::begin(&args.load, self.stop, workers, each.into(), args.client.timeout);
        let value = noise(args.size as usize);
        let writers = writers.into_iter().enumerate();
        let writers = writers.map(|(at, writer)| self.write(&phase, at, writer, &value, each));
        let written = together("write", writers).await?;
        if self.stop.is_stopped() {
            return Ok(vec![written]);
        }
        note(format_args!("reading {} messages", grouped(written.operations)));
        let read = self.read(client).await?;
        if read.operations != written.operations && !self.stop.is_stopped() {
            let (read, written) = (grouped(read.operations), grouped(written.operations));
            let message = format!("{written} messages were acknowledged, {read} came out");
            return Err(Failure::new(Status::Unhealthy, message));
        }
        Ok(vec![written, read])
    }

    fn options(&self) -> ProducerOptions {
        let acks = if self.args.acks == "1" { 1 } else { -1 };
        ProducerOptions {
            topic: self.topic.clone(),
            partition: None,
            compression: self.compression,
            acks,
            idempotent: acks == -1,
        }
    }

    /// One client: a batch to each partition in turn.
    async fn write(
        &self,
        phase: &Phase<'_>,
        at: usize,
        (mut client, mut producer): (Client, Producer),
        value: &[u8],
        each: u32,
    ) -> Outcome<Tally> {
        let (clock, partitions) = (SystemClock::new(), self.args.partitions);
        let work = async |number: u64| {
            let turn = (number + at as u64) % u64::from(partitions.unsigned_abs());
            let partition = Some(i32::try_from(turn).unwrap_or(0));
            let message = Message { value: Some(value), partition, ..Message::default() };
            let now_ms = clock.wall_ms();
            for _ in 0..each {
                producer.push(&message, now_ms)?;
            }
            producer.flush(&mut client).await?;
            Ok(Done { operations: each.into(), bytes: each as usize * value.len() })
        };
        phase.repeat(work).await
    }

    /// Everything there is, the partitions dealt out among the clients.
    async fn read(&self, client: &mut Client) -> Outcome<Figures> {
        let partitions = client.partitions(std::slice::from_ref(&self.topic)).await?;
        let ends = client.list_offsets(&partitions, LATEST, Isolation::ReadUncommitted).await?;
        let readers = usize::from(self.args.clients).min(partitions.len());
        let mut shares = Vec::with_capacity(readers);
        for reader in 0..readers {
            let mine: Vec<&TopicPartition> = partitions.iter().skip(reader).step_by(readers).collect();
            let positions: Offsets = mine.iter().map(|key| ((*key).clone(), 0)).collect();
            let fetcher = Fetcher::new(&positions, Some(&ends), Isolation::ReadUncommitted, note_reset);
            shares.push((kafka::connect(&self.args.client).await?, fetcher));
        }
        together("read", shares.into_iter().map(|(client, fetcher)| self.read_share(client, fetcher))).await
    }

    async fn read_share(&self, mut client: Client, mut fetcher: Fetcher) -> Outcome<Tally> {
        let mut tally = Tally::new()?;
        while !fetcher.is_done() && !self.stop.is_stopped() {
            let (mut operations, mut bytes) = (0, 0);
            let began = Instant::now();
            let _ = fetcher
                .poll(&mut client, FETCH_WAIT, &mut |_, _, record| {
                    operations += 1;
                    bytes += record.value.as_ref().map_or(0, |value| value.len());
                    Ok::<_, Failure>(ControlFlow::Continue(()))
                })
                .await?;
            tally.count(Done { operations, bytes }, began.elapsed());
        }
        Ok(tally)
    }
}
