//! `moim topic consume`: prints messages as they come, alone or as a member of a group.
//!
//! Invariants: what was handed to stdout is flushed before it is committed, so that a crash repeats and never
//! loses; a group member that ends commits and leaves first.

use std::io::{self, BufWriter, StdoutLock, Write as _};
use std::ops::ControlFlow;
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_base::{Clock as _, SystemClock};
use moim_wire_kafka::KString;
use moim_wire_kafka::records::Record;
use tokio::time::Instant;

use super::ConsumeArgs;
use crate::client::fetcher::Fetcher;
use crate::client::member::{Member, Standing};
use crate::client::offsets::{Isolation, LATEST, Offsets};
use crate::client::{BACKOFF, Client, Patience, TopicPartition};
use crate::exit::{Failure, Outcome, Status};
use crate::format::{MessageFormat, message_json};
use crate::output::{Format, Output, note};
use crate::place::Place;
use crate::signals::Signals;
use crate::target::ClientArgs;

/// A fetch with nothing to bring waits this long on the server.
const MAX_WAIT: Duration = Duration::from_millis(500);
const COMMIT_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(client: &ClientArgs, args: &ConsumeArgs, output: Output) -> Outcome {
    let place = args.offset.as_deref().map(|text| Place::parse(text, SystemClock::new().wall_ms()));
    let place = place.transpose().map_err(Failure::usage)?.unwrap_or(Place::Start);
    let mut printer = Printer::new(args, output)?;
    if args.num == Some(0) {
        return Ok(());
    }
    let mut client = Client::connect(client).await?;
    let topics: Vec<KString> = args.topics.iter().map(Into::into).collect();
    let isolation = if args.read_uncommitted { Isolation::ReadUncommitted } else { Isolation::ReadCommitted };
    match &args.group {
        Some(group) => {
            let mut reader = GroupReader {
                args,
                place,
                isolation,
                member: Member::new(group, &topics),
                patience: Patience::default(),
            };
            // Groups subscribe to what exists; a typo should say so instead of waiting for ever.
            client.topics(&topics, false, |_, _| false).await?;
            let stop = stop_on_signal()?;
            let read = reader.read(&mut client, &mut printer, &stop).await;
            let left = reader.member.leave(&mut client).await;
            read.and(left)
        }
        None => read_alone(&mut client, args, &topics, place, isolation, &mut printer).await,
    }
}

async fn read_alone(
    client: &mut Client,
    args: &ConsumeArgs,
    topics: &[KString],
    place: Place,
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
    let positions = client.resolve(&partitions, place, isolation).await?;
    let ends =
        if args.exit { Some(client.list_offsets(&partitions, LATEST, isolation).await?) } else { None };
    let mut fetcher = Fetcher::new(&positions, ends.as_ref(), isolation);
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
    place: Place,
    isolation: Isolation,
    member: Member,
    patience: Patience,
}

impl GroupReader<'_> {
    async fn read(&mut self, client: &mut Client, printer: &mut Printer, stop: &Shutdown) -> Outcome {
        let mut patience = Patience::default();
        while !stop.is_stopped() {
            let round = self.read_generation(client, printer, stop).await;
            match patience.forgive(round, client.timeout())? {
                Some(ControlFlow::Break(())) => return Ok(()),
                Some(ControlFlow::Continue(())) => {}
                None => tokio::time::sleep(BACKOFF).await,
            }
        }
        Ok(())
    }

    /// Joins, then reads until this member is done (break) or the group changes (continue).
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
                // Nothing more to read; only the last commit may still have to be tried again.
            } else if share.is_empty() {
                tokio::time::sleep(MAX_WAIT).await;
            } else {
                let print = &mut |topic: &KString, partition, record: &Record| {
                    printer.print(topic, partition, record)
                };
                finished = fetcher.poll(client, MAX_WAIT, print).await?.is_break();
            }
            printer.flush()?;
            let standing = self.heartbeat(client).await?;
            if finished || standing != Standing::Fine || last_commit.elapsed() >= COMMIT_EVERY {
                let moved = moved(&fetcher.positions(), &committed);
                let commit = self.member.commit(client, &moved).await;
                match self.patience.forgive(commit, client.timeout())? {
                    Some(Standing::Fine) => committed.extend(moved),
                    Some(Standing::Rebalance | Standing::Lost) => {
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
            if standing != Standing::Fine {
                return Ok(ControlFlow::Continue(()));
            }
        }
    }

    /// Where the group stopped, and a fetcher that goes on from there; where it never was, from `place`.
    async fn begin(&self, client: &mut Client, share: &[TopicPartition]) -> Outcome<(Offsets, Fetcher)> {
        let group = self.args.group.as_deref().unwrap_or_default();
        let committed = client.committed(group, Some(share)).await?;
        let mut positions = committed.clone();
        let fresh: Vec<_> = share.iter().filter(|key| !positions.contains_key(*key)).cloned().collect();
        if !fresh.is_empty() {
            positions.extend(client.resolve(&fresh, self.place, self.isolation).await?);
        }
        let ends = match self.args.exit {
            true if !share.is_empty() => Some(client.list_offsets(share, LATEST, self.isolation).await?),
            true => Some(Offsets::new()),
            false => None,
        };
        Ok((committed, Fetcher::new(&positions, ends.as_ref(), self.isolation)))
    }

    /// Says that we are here when it is time to. A coordinator that is away is asked again soon.
    async fn heartbeat(&mut self, client: &mut Client) -> Outcome<Standing> {
        if !self.member.heartbeat_is_due() {
            return Ok(Standing::Fine);
        }
        let beat = self.member.heartbeat(client).await;
        Ok(self.patience.forgive(beat, client.timeout())?.unwrap_or(Standing::Fine))
    }
}

/// The positions that are not what was committed.
fn moved(positions: &Offsets, committed: &Offsets) -> Offsets {
    let is_new = |(key, offset): &(&TopicPartition, &i64)| committed.get(*key) != Some(*offset);
    positions.iter().filter(is_new).map(|(key, offset)| (key.clone(), *offset)).collect()
}

/// The first signal asks to commit and leave; the second one ends at once.
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

/// Puts messages on stdout and counts them.
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
