//! The subscribers: servers and SDKs that follow a manager, each on its own connection, and the versions they
//! receive.
//!
//! Metrics 28 to 30. A change moves one partition from a server to another: requested from the manager, drained,
//! prepared, saved, pushed. Its time runs from the request to the receipt of the change by each of the subscribers,
//! so it includes the store's two synced writes and the two servers' responses.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use hdrhistogram::Histogram;
use moim_wire_grpc::routing::{
    Ack, ChangeKind, ChangeRequest, ChangeResponse, FollowRequest, FollowRequestKind, FollowResponse,
    FollowResponseKind, Hello, ShowRequest, ShowResponse, method,
};
use moim_wire_grpc::{FrameReader, decode, encode_frame};
use tokio::sync::mpsc;
use tokio::task::{JoinSet, LocalSet};

use super::{Manager, NAMESPACE, Options, context, fill, partition, server, store};
use crate::load::grpc::{Call, Channel, Stream};
use crate::procfs;
use crate::report::{Aim, Figure, Metric};
use crate::slices::latencies;

/// Interval between two changes.
const CHANGE_INTERVAL: Duration = Duration::from_millis(250);
/// Timeout of every operation.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum message size.
const MAX_MESSAGE: usize = 64 << 20;
/// Concurrent connects while nothing is measured.
const CONNECT_WIDTH: usize = 64;

/// An event of a subscriber.
struct Received {
    version: i64,
    at: Instant,
}

/// The table version that subscribers have.
#[derive(Clone, Copy)]
struct TableVersion {
    incarnation: i64,
    version: i64,
}

/// A connected subscriber.
struct Subscriber {
    stream: Stream,
    reader: FrameReader,
}

/// Connects one subscriber; an SDK has no node id.
async fn connect(manager: SocketAddr, node_id: String, at: TableVersion) -> Result<Subscriber> {
    let call = Channel::open(manager).await?.method(method::FOLLOW)?;
    let hello = Hello {
        namespace: NAMESPACE.to_owned(),
        node_id,
        incarnation: at.incarnation,
        have_version: at.version,
        drained: Vec::new(),
    };
    let hello = FollowRequest { kind: Some(FollowRequestKind::Hello(hello)) };
    let stream = call.stream(encode_frame(&hello)).await?;
    Ok(Subscriber { stream, reader: FrameReader::new(MAX_MESSAGE) })
}

fn names(options: &Options) -> impl Iterator<Item = String> {
    let servers = options.servers;
    (0..servers + options.sdks).map(move |at| if at < servers { server(at) } else { String::new() })
}

/// Connects all subscribers, `width` at a time.
async fn connect_all(
    options: &Options,
    manager: SocketAddr,
    at: TableVersion,
    width: usize,
) -> Result<Vec<Subscriber>> {
    let mut names = names(options);
    let mut connecting = JoinSet::new();
    let mut connected = Vec::new();
    loop {
        while connecting.len() < width {
            let Some(name) = names.next() else { break };
            connecting.spawn_local(connect(manager, name, at));
        }
        match connecting.join_next().await {
            Some(one) => connected.push(one.context("a subscriber's task panicked")??),
            None => return Ok(connected),
        }
    }
}

/// Follows the table until dropped: answers commands, and reports every received change.
async fn follow(mut subscriber: Subscriber, received: mpsc::Sender<Received>) -> Result<()> {
    loop {
        subscriber.reader.push(subscriber.stream.piece().await?);
        let at = Instant::now();
        while let Some(frame) = subscriber.reader.next_frame()? {
            match decode::<FollowResponse>(frame)?.kind {
                Some(FollowResponseKind::Delta(delta)) => {
                    if received.send(Received { version: delta.to, at }).await.is_err() {
                        return Ok(());
                    }
                }
                Some(FollowResponseKind::Command(command)) if command.operation > 0 => {
                    let ack =
                        Ack { operation: command.operation, error: String::new(), handoff: Bytes::new() };
                    let ack = FollowRequest { kind: Some(FollowRequestKind::Ack(ack)) };
                    subscriber.stream.send(encode_frame(&ack))?;
                }
                Some(FollowResponseKind::Command(_) | FollowResponseKind::Snapshot(_)) | None => {}
            }
        }
    }
}

/// Moves a partition to another server; returns the version after it.
async fn change(call: &Call, options: &Options, round: usize) -> Result<i64> {
    let number = round * 977 % options.partitions;
    let to = (number + 1 + round) % options.servers;
    let request = ChangeRequest {
        namespace: NAMESPACE.to_owned(),
        kind: ChangeKind::Migrate as i32,
        partition_id: partition(number),
        node_id: server(to),
        ..ChangeRequest::default()
    };
    let answer: ChangeResponse = decode(call.unary(encode_frame(&request)).await?)?;
    Ok(answer.version)
}

/// Waits until the manager leads and all known servers are connected.
async fn await_manager(manager: SocketAddr, wanted: usize) -> Result<ShowResponse> {
    let show = encode_frame(&ShowRequest { namespace: NAMESPACE.to_owned() });
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let call = Channel::open(manager).await?.method(method::SHOW)?;
        if let Ok(answer) = call.unary(show.clone()).await {
            let shown: ShowResponse = decode(answer)?;
            if shown.version > 0 && shown.subscribers >= wanted as u64 {
                return Ok(shown);
            }
        }
        ensure!(Instant::now() < deadline, "the manager does not settle");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Measures metrics 28 to 30 with one set of subscribers.
pub(super) async fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Metric>> {
    progress("starting the store, writing the table, registering the servers");
    let store = store(options)?;
    let (context, scope) = context(&store.endpoint(0), "bench");
    fill(options, &context).await?;
    let manager = Manager::start(options, &store.endpoint(0))?;
    let taken = LocalSet::new().run_until(Box::pin(measure(options, &manager, progress))).await;
    scope.shutdown().stop();
    taken
}

async fn measure(
    options: &Options,
    manager: &Manager,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Metric>> {
    let shown = await_manager(manager.address, 0).await?;
    let mut at = TableVersion { incarnation: shown.incarnation, version: shown.version };
    let subscriber_count = options.servers + options.sdks;
    // The first subscriber triggers the encoding of the full table: that one-time cost is not a subscriber's.
    drop(connect(manager.address, String::new(), TableVersion { incarnation: 0, version: 0 }).await?);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = procfs::memory_of(manager.pid())?;

    progress(&format!("connecting {subscriber_count} subscribers"));
    let connected = connect_all(options, manager.address, at, CONNECT_WIDTH).await?;
    await_manager(manager.address, subscriber_count).await?;
    let after = procfs::memory_of(manager.pid())?;
    let memory = memory(subscriber_count, before.anonymous, after.anonymous);

    progress(&format!("metric 28: {} changes", options.rounds));
    let (received, mut inbox) = mpsc::channel(subscriber_count * 4);
    let mut following = JoinSet::new();
    connected.into_iter().for_each(|one| drop(following.spawn_local(follow(one, received.clone()))));
    let call = Channel::open(manager.address).await?.method(method::CHANGE)?;
    // The first changes fill caches.
    for round in 0..3 {
        at.version = change(&call, options, options.rounds + round).await?;
    }
    await_version(&mut inbox, &mut following, subscriber_count, at.version).await?;
    let (reach, answered, cpu) =
        pushes(options, manager, &call, &mut at, &mut inbox, &mut following, subscriber_count).await?;
    let pushed = pushed(options, &reach, &answered, cpu);

    progress("metric 30: everybody comes back at once");
    following.shutdown().await;
    let reconnect_all = reconnect_all(options, manager, &call, &mut at, progress).await?;
    Ok(vec![pushed, memory, reconnect_all])
}

fn memory(subscriber_count: usize, before: u64, after: u64) -> Metric {
    let each = after.saturating_sub(before) as f64 / subscriber_count as f64 / 1024.0;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let figures = vec![
        Figure::new("manager", "memory for each subscriber", each, "KiB", Some(Aim::AtMost(64.0))),
        Figure::new("manager", "memory with the table, no subscriber", mib(before), "MiB", None),
        Figure::new(
            "manager",
            &format!("memory with {subscriber_count} subscribers"),
            mib(after),
            "MiB",
            None,
        ),
    ];
    Metric { number: 29, title: "what a subscriber costs".into(), figures, ..Metric::default() }
}

/// Waits until all subscribers have received a version.
async fn await_version(
    inbox: &mut mpsc::Receiver<Received>,
    following: &mut JoinSet<Result<()>>,
    subscriber_count: usize,
    version: i64,
) -> Result<Vec<Instant>> {
    let mut times = Vec::with_capacity(subscriber_count);
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while times.len() < subscriber_count {
        tokio::select! {
            biased;
            received = inbox.recv() => {
                let received = received.context("all subscribers have disconnected")?;
                if received.version == version {
                    times.push(received.at);
                }
            }
            Some(ended) = following.join_next() => {
                ended.context("a subscriber's task panicked")?.context("a subscriber was lost")?;
            }
            () = tokio::time::sleep_until(deadline) => {
                anyhow::bail!("{} of {subscriber_count} saw version {version}", times.len());
            }
        }
    }
    Ok(times)
}

/// Changes at a fixed rate: from request to receipt, from request to response, and the manager's CPU time for each.
async fn pushes(
    options: &Options,
    manager: &Manager,
    call: &Call,
    at: &mut TableVersion,
    inbox: &mut mpsc::Receiver<Received>,
    following: &mut JoinSet<Result<()>>,
    subscriber_count: usize,
) -> Result<(Histogram<u64>, Histogram<u64>, Duration)> {
    let (mut reach, mut answered) = (latencies()?, latencies()?);
    let before = procfs::cpu_of(manager.pid())?;
    for round in 0..options.rounds {
        let asked = Instant::now();
        let changing = change(call, options, round);
        at.version += 1;
        let (version, times) =
            tokio::join!(changing, await_version(inbox, following, subscriber_count, at.version));
        ensure!(version? == at.version, "another client changed the table");
        let last = times?.into_iter().map(|time| time - asked).collect::<Vec<_>>();
        for time in &last {
            reach.saturating_record(u64::try_from(time.as_nanos())?);
        }
        let worst = last.iter().max().copied().unwrap_or_default();
        answered.saturating_record(u64::try_from(worst.as_nanos())?);
        tokio::time::sleep(CHANGE_INTERVAL.saturating_sub(asked.elapsed())).await;
    }
    let cpu = procfs::cpu_of(manager.pid())?.saturating_sub(before);
    Ok((reach, answered, cpu / u32::try_from(options.rounds)?))
}

fn pushed(options: &Options, reach: &Histogram<u64>, last: &Histogram<u64>, cpu: Duration) -> Metric {
    let ms = |histogram: &Histogram<u64>, quantile| histogram.value_at_quantile(quantile) as f64 / 1e6;
    let figures = vec![
        Figure::new("manager", "from question to sight, median", ms(reach, 0.5), "ms", None),
        Figure::new(
            "manager",
            "from question to sight, p99",
            ms(reach, 0.99),
            "ms",
            Some(Aim::AtMost(100.0)),
        ),
        Figure::new("manager", "until the last one sees it, worst", last.max() as f64 / 1e6, "ms", None),
        Figure::new("manager", "CPU of the manager for one change", cpu.as_secs_f64() * 1e3, "ms", None),
    ];
    let title = format!(
        "a change of {} partitions to {} servers and {} SDKs",
        options.partitions, options.servers, options.sdks
    );
    Metric { number: 28, title, figures, ..Metric::default() }
}

/// All subscribers disconnect and reconnect at once: with their previous table, and without one.
async fn reconnect_all(
    options: &Options,
    manager: &Manager,
    call: &Call,
    at: &mut TableVersion,
    progress: &mut dyn FnMut(&str),
) -> Result<Metric> {
    let subscriber_count = options.servers + options.sdks;
    let began = Instant::now();
    let connected = connect_all(options, manager.address, *at, subscriber_count).await?;
    let back = began.elapsed();
    let (received, mut inbox) = mpsc::channel(subscriber_count * 4);
    let mut following = JoinSet::new();
    connected.into_iter().for_each(|one| drop(following.spawn_local(follow(one, received.clone()))));
    at.version = change(call, options, options.rounds * 2).await?;
    await_version(&mut inbox, &mut following, subscriber_count, at.version).await?;
    let current = began.elapsed();
    following.shutdown().await;

    progress("metric 30: the same, and no subscriber has a table");
    let began = Instant::now();
    let mut reading = JoinSet::new();
    for name in names(options) {
        let at = TableVersion { incarnation: 0, version: 0 };
        let manager = manager.address;
        reading.spawn_local(async move { read_table(connect(manager, name, at).await?).await });
    }
    let mut bytes = 0;
    while let Some(read) = reading.join_next().await {
        bytes += read.context("a subscriber's task panicked")??;
    }
    let all = began.elapsed();
    let peak = procfs::memory_of(manager.pid())?.anonymous;
    let secs = |time: Duration| time.as_secs_f64();
    let figures = vec![
        Figure::new("manager", "all are connected again", secs(back), "s", None),
        Figure::new("manager", "and have seen the next change", secs(current), "s", Some(Aim::AtMost(5.0))),
        Figure::new("manager", "all have got the whole table", secs(all), "s", None),
        Figure::new("manager", "which is, in all", bytes as f64 / f64::from(1 << 30), "GiB", None),
        Figure::new("manager", "memory after it", peak as f64 / f64::from(1 << 20), "MiB", None),
    ];
    Ok(Metric { number: 30, title: "everybody comes back at once".into(), figures, ..Metric::default() })
}

/// Reads the complete table; returns its size.
async fn read_table(mut subscriber: Subscriber) -> Result<u64> {
    let mut bytes = 0;
    loop {
        let piece = subscriber.stream.piece().await?;
        bytes += piece.len() as u64;
        subscriber.reader.push(piece);
        while let Some(frame) = subscriber.reader.next_frame()? {
            if last_part(&frame)? {
                return Ok(bytes);
            }
        }
    }
}

/// True if a message is the last part of a table. Only the numbers of the part are decoded: they precede its routes,
/// and decoding 100,000 of those 1,500 times is not what is measured.
fn last_part(frame: &Bytes) -> Result<bool> {
    // The message, its one field's tag and length, then incarnation, version, index and count: sixty bytes at most.
    let mut numbers = Vec::new();
    let mut at = 0;
    let mut varint = || -> Option<u64> {
        let (mut value, mut shift) = (0_u64, 0);
        loop {
            let byte = *frame.get(at)?;
            at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
            shift += 7;
        }
    };
    ensure!(varint() == Some(0x0a), "a snapshot was expected");
    let _length = varint();
    while numbers.len() < 4 {
        match varint() {
            // A varint field: its number follows the tag.
            Some(tag @ (0x08 | 0x10 | 0x18 | 0x20)) => numbers.push((tag, varint().unwrap_or(0))),
            _ => break,
        }
    }
    let find = |tag: u64| numbers.iter().find(|(known, _)| *known == tag).map_or(0, |(_, value)| *value);
    // Zero is omitted on the wire.
    Ok(find(0x18) + 1 == find(0x20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use moim_wire_grpc::routing::{Route, Snapshot};

    #[test]
    fn last_part_of_a_table_is_detected_without_decoding_its_routes() {
        for (index, count, last) in
            [(0, 1, true), (0, 2, false), (1, 2, true), (300, 301, true), (300, 500, false)]
        {
            let routes = vec![Route { partition_id: "p".repeat(200), ..Route::default() }; 3];
            let snapshot = Snapshot { incarnation: 9_000, version: 1 << 40, index, count, routes };
            let message = FollowResponse { kind: Some(FollowResponseKind::Snapshot(snapshot)) };
            let mut reader = FrameReader::new(MAX_MESSAGE);
            reader.push(encode_frame(&message));
            let frame = reader.next_frame().unwrap().unwrap();
            assert_eq!(last_part(&frame).unwrap(), last, "{index} of {count}");
        }
        assert!(last_part(&Bytes::from_static(b"\x12\x00")).is_err());
    }
}
