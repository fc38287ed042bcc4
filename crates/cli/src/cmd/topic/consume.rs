//! `moim topic consume`: prints messages as they come, alone or as a member of a group.
//!
//! Invariants: stdout is flushed before offsets are committed, so that a crash repeats messages and never loses one; a
//! group member that ends commits its offsets and leaves the group first.

use std::io::{self, BufWriter, StdoutLock, Write as _};
use std::ops::ControlFlow;
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_base::{Clock as _, SystemClock};
use moim_kafka_client::{
    BACKOFF, Client, Fetcher, Isolation, LATEST, Member, MemberState, OffsetSpec, Offsets, OutageTolerance,
    TopicPartition,
};
use moim_node::Signals;
use moim_wire_kafka::KString;
use moim_wire_kafka::records::Record;
use tokio::time::Instant;

use super::ConsumeArgs;
use crate::exit::{Failure, Outcome, Status};
use crate::format::{MessageFormat, message_json};
use crate::kafka::{self, note_reset};
use crate::offset_spec::parse_offset_spec;
use crate::output::{Format, Output, note};
use crate::target::ClientArgs;

/// `max_wait_ms` of a fetch.
const MAX_WAIT: Duration = Duration::from_millis(500);
const COMMIT_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(client: &ClientArgs, args: &ConsumeArgs, output: Output) -> Outcome {
    let now_ms = SystemClock::new().wall_ms();
    let start = args.offset.as_deref().map(|text| parse_offset_spec(text, now_ms));
    let start = start.transpose().map_err(Failure::usage)?.unwrap_or(OffsetSpec::Earliest);
    let mut printer = Printer::new(args, output)?;
    if args.num == Some(0) {
        return Ok(());
    }
    let mut client = kafka::connect(client).await?;
    let topics: Vec<KString> = args.topics.iter().map(Into::into).collect();
    let isolation = if args.read_uncommitted { Isolation::ReadUncommitted } else { Isolation::ReadCommitted };
    match &args.group {
        Some(group) => {
            let mut reader = GroupReader {
                args,
                start,
                isolation,
                member: Member::new(group, &topics),
                outage: OutageTolerance::default(),
            };
            // A subscription to a topic that does not exist is an error: a group would wait for it for ever.
            client.topics(&topics, false, |_, _| false).await?;
            let stop = stop_on_signal()?;
            let read = reader.read(&mut client, &mut printer, &stop).await;
            let left = reader.member.leave(&mut client).await;
            read.and(left.map_err(Failure::from))
        }
        None => read_alone(&mut client, args, &topics, start, isolation, &mut printer).await,
    }
}

async fn read_alone(
    client: &mut Client,
    args: &ConsumeArgs,
    topics: &[KString],
    start: OffsetSpec,
    isolation: Isolation,
    printer: &mut Printer,
) -> Outcome {
    let mut partitions: Vec<TopicPartition> = client.partitions(topics).await?;
    if !args.partitions.is_empty() {
        for topic in topics {
            let known = |wanted| partitions.iter().any(|key| key.topic == *topic && key.partition == wanted);
            if let Some(unknown) = args.partitions.iter().find(|wanted| !known(**wanted)) {
                return Err(Failure::new(Status::NotFound, format!("{topic} has no partition {unknown}")));
            }
        }
        partitions.retain(|key| args.partitions.contains(&key.partition));
    }
    let positions = client.resolve(&partitions, start, isolation).await?;
    let ends =
        if args.exit { Some(client.list_offsets(&partitions, LATEST, isolation).await?) } else { None };
    let mut fetcher = Fetcher::new(&positions, ends.as_ref(), isolation, note_reset);
    while !fetcher.is_done() {
        let flow = fetcher
            .poll(client, MAX_WAIT, &mut |topic, partition, record| printer.print(topic, partition, record))
            .await?;
        printer.flush()?;
        if flow.is_break() {
            break;
        }
    }
    Ok(())
}

struct GroupReader<'a> {
    args: &'a ConsumeArgs,
    start: OffsetSpec,
    isolation: Isolation,
    member: Member,
    outage: OutageTolerance,
}

impl GroupReader<'_> {
    async fn read(&mut self, client: &mut Client, printer: &mut Printer, stop: &Shutdown) -> Outcome {
        let mut outage = OutageTolerance::default();
        while !stop.is_stopped() {
            let round = self.read_generation(client, printer, stop).await;
            match outage.tolerate(round, client.timeout())? {
                Some(ControlFlow::Break(())) => return Ok(()),
                Some(ControlFlow::Continue(())) => {}
                None => tokio::time::sleep(BACKOFF).await,
            }
        }
        Ok(())
    }

    /// Joins, then fetches until this member is done (break) or the group rebalances (continue).
    async fn read_generation(
        &mut self,
        client: &mut Client,
        printer: &mut Printer,
        stop: &Shutdown,
    ) -> Outcome<ControlFlow<()>> {
        let share = self.member.join(client).await?;
        let (mut committed, mut fetcher) = self.begin(client, &share).await?;
        let mut last_commit = Instant::now();
        let mut finished = false;
        loop {
            finished |= stop.is_stopped() || (self.args.exit && fetcher.is_done());
            if finished {
                // Nothing more to fetch; only the last commit may have to be retried.
            } else if share.is_empty() {
                tokio::time::sleep(MAX_WAIT).await;
            } else {
                let print = &mut |topic: &KString, partition, record: &Record| {
                    printer.print(topic, partition, record)
                };
                finished = fetcher.poll(client, MAX_WAIT, print).await?.is_break();
            }
            printer.flush()?;
            let state = self.heartbeat(client).await?;
            if finished || state != MemberState::Stable || last_commit.elapsed() >= COMMIT_EVERY {
                let moved = moved(&fetcher.positions(), &committed);
                let commit = self.member.commit(client, &moved).await;
                match self.outage.tolerate(commit, client.timeout())? {
                    Some(MemberState::Stable) => committed.extend(moved),
                    Some(MemberState::Rebalance | MemberState::Fenced) => {
                        note(
                            "moim: the group changed before the last messages were committed; they will come again",
                        );
                        return Ok(if finished { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
                    }
                    None => {
                        tokio::time::sleep(BACKOFF).await;
                        continue;
                    }
                }
                last_commit = Instant::now();
            }
            if finished {
                return Ok(ControlFlow::Break(()));
            }
            if state != MemberState::Stable {
                return Ok(ControlFlow::Continue(()));
            }
        }
    }

    /// The committed offsets, and a fetcher that continues there; at `start` for partitions without a committed offset.
    async fn begin(&self, client: &mut Client, share: &[TopicPartition]) -> Outcome<(Offsets, Fetcher)> {
        let group = self.args.group.as_deref().unwrap_or_default();
        let committed = client.committed(group, Some(share)).await?;
        let mut positions = committed.clone();
        let fresh: Vec<_> = share.iter().filter(|key| !positions.contains_key(*key)).cloned().collect();
        if !fresh.is_empty() {
            positions.extend(client.resolve(&fresh, self.start, self.isolation).await?);
        }
        let ends = match self.args.exit {
            true if !share.is_empty() => Some(client.list_offsets(share, LATEST, self.isolation).await?),
            true => Some(Offsets::new()),
            false => None,
        };
        Ok((committed, Fetcher::new(&positions, ends.as_ref(), self.isolation, note_reset)))
    }

    /// Sends a heartbeat if it is due. An unavailable coordinator is tolerated for the timeout of the client.
    async fn heartbeat(&mut self, client: &mut Client) -> Outcome<MemberState> {
        if !self.member.heartbeat_is_due() {
            return Ok(MemberState::Stable);
        }
        let beat = self.member.heartbeat(client).await;
        Ok(self.outage.tolerate(beat, client.timeout())?.unwrap_or(MemberState::Stable))
    }
}

/// The positions that differ from the committed offsets.
fn moved(positions: &Offsets, committed: &Offsets) -> Offsets {
    let is_new = |(key, offset): &(&TopicPartition, &i64)| committed.get(*key) != Some(*offset);
    positions.iter().filter(is_new).map(|(key, offset)| (key.clone(), *offset)).collect()
}

/// The first signal commits and leaves the group; the second one ends the process at once.
fn stop_on_signal() -> Outcome<Shutdown> {
    let stop = Shutdown::new();
    let mut signals = Signals::listen()?;
    let told = stop.clone();
    Scope::new(stop.clone()).spawn("signals", async move {
        signals.next().await;
        told.stop();
        signals.next().await;
        std::process::exit(130);
    });
    Ok(stop)
}

/// Writes messages to stdout and counts them.
struct Printer {
    out: BufWriter<StdoutLock<'static>>,
    style: Style,
    left: Option<u64>,
}

enum Style {
    Json,
    Text(MessageFormat),
}

impl Printer {
    fn new(args: &ConsumeArgs, output: Output) -> Outcome<Self> {
        let style = match (output.format, &args.format) {
            (Format::Json, Some(_)) => {
                return Err(Failure::usage("-o json and -f say different things; choose one"));
            }
            (Format::Json, None) => Style::Json,
            (Format::Table, format) => {
                let format = format.as_deref().unwrap_or("%v\\n");
                Style::Text(
                    MessageFormat::parse(format)
                        .map_err(|why| Failure::usage(format!("-f '{format}': {why}")))?,
                )
            }
        };
        Ok(Self { out: BufWriter::with_capacity(64 << 10, io::stdout().lock()), style, left: args.num })
    }

    fn print(&mut self, topic: &KString, partition: i32, record: &Record) -> Outcome<ControlFlow<()>> {
        match &self.style {
            Style::Json => {
                serde_json::to_writer(&mut self.out, &message_json(topic, partition, record))?;
                self.out.write_all(b"\n")?;
            }
            Style::Text(format) => format.write(&mut self.out, topic, partition, record)?,
        }
        if let Some(left) = &mut self.left {
            *left -= 1;
            if *left == 0 {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn flush(&mut self) -> Outcome {
        Ok(self.out.flush()?)
    }
}
