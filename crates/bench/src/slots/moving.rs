//! Metric 34: a slot migration of one gibibyte of keys to another shard and back under load. Measures the throughput
//! of the migration, the clients' latency, and their errors.
//!
//! All three nodes need an additional gibibyte of memory during the migration, and as much for their files. A virtual
//! machine may have to get that from its host, page by page, which takes longer than the migration, and it returns
//! free memory after some seconds. So the memory is touched right before each direction; the speed of that is
//! reported as well: the slowest gibibyte shows the cost of the host's memory. Everything runs on three processes of
//! this machine: every byte is written by both primaries and four replicas.

use std::cell::{Cell, RefCell};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hdrhistogram::Histogram;
use moim_interop::Options;
use moim_interop::cluster::Cluster;
use moim_slot_client::Client;

use super::Bench;
use crate::report::{Aim, Figure, Metric};

/// Size of a value.
const VALUE: usize = 1_000;
/// Keys per write.
const KEYS_PER_WRITE: u64 = 500;
/// Tasks that read and write migrating keys, one after the other.
const TASKS: u64 = 8;
/// Initial slots of the first of three shards.
const SLOTS: &str = "0-5460";
/// How long the clients are observed before a migration.
const OBSERVE: Duration = Duration::from_secs(5);
/// Number of observations, at most, until the clients' latency is at most this multiple of the latency before the
/// first migration: snapshots are written after a migration.
const OBSERVATIONS: u32 = 6;
const OBSERVED_FACTOR: f64 = 2.0;
/// Memory that is touched before a migration, per migrated byte: three nodes keep it and write it to disk. At most
/// half of the free memory.
const TOUCHED: u64 = 8;
/// Page size.
const PAGE: usize = 4 << 10;
/// Timeout of every long operation.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What the clients observed.
struct Observed {
    /// Latencies in microseconds.
    latencies: RefCell<Histogram<u64>>,
    errors: Cell<u64>,
    stop: Cell<bool>,
}

impl Observed {
    fn new() -> Result<Self> {
        let latencies = RefCell::new(Histogram::new(3)?);
        Ok(Self { latencies, errors: Cell::new(0), stop: Cell::new(false) })
    }

    /// The 99th percentile since the last call, and the maximum, in milliseconds.
    fn take_percentiles(&self) -> (f64, f64) {
        let mut latencies = self.latencies.borrow_mut();
        let (p99, worst) = (latencies.value_at_quantile(0.99) as f64 / 1e3, latencies.max() as f64 / 1e3);
        latencies.reset();
        (p99, worst)
    }
}

pub(super) fn moving(bench: &Bench<'_>, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
    let program = bench.options.moim.clone().context("there is no Moim to measure")?;
    let options = Options { program: Some(program.clone()), ..Options::new() };
    let cluster = Cluster::moim(3, &options, false)?;
    let admin = cluster.server(0).context("a node")?.admin().to_owned();
    let stores: Vec<String> =
        (0..cluster.len()).filter_map(|node| Some(cluster.server(node)?.redis().to_owned())).collect();
    // A third of all slots: those of the first shard.
    let moves = [("there", "0", "1"), ("back", "1", "0")].map(|(way, from, to)| {
        let mut command = Command::new(&program);
        command.args(["slots", "move", "--from", from, "--to", to, "--slots", SLOTS, "--timeout", "2m"]);
        command.args(["--admin", &admin]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        (way, command)
    });
    bench.runtime.block_on(measure(&stores.join(","), bench.options.moved_bytes, moves, progress))
}

async fn measure(
    stores: &str,
    bytes: u64,
    moves: [(&str, Command); 2],
    progress: &mut dyn FnMut(&str),
) -> Result<Metric> {
    let client = Client::builder(stores).timeout(TIMEOUT).connect().await?;
    let deadline = Instant::now() + TIMEOUT;
    while client.uncovered_slots() > 0 {
        ensure!(Instant::now() < deadline, "not every slot has a primary");
        client.refresh();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Shard 0 has slot 0, and `06S` is a key of it.
    let port = client.primary_of("06S").context("a primary")?.port;
    let own = |key: &String| client.primary_of(key).is_some_and(|address| address.port == port);
    let wanted = bytes / (VALUE as u64 + 16);
    progress(&format!("metric 34: writing {wanted} keys"));
    let mut keys = (0..).map(|number: u64| format!("key:{number:012}")).filter(own);
    let value = "v".repeat(VALUE);
    for _ in (0..wanted).step_by(KEYS_PER_WRITE as usize) {
        let mut pipeline = client.pipeline();
        for key in keys.by_ref().take(KEYS_PER_WRITE as usize) {
            pipeline.set(key, value.as_str());
        }
        ensure!(pipeline.run().await.iter().all(Result::is_ok), "a key could not be written");
    }
    let hot: Vec<String> =
        (0..).map(|number: u64| format!("key:{number:012}")).filter(own).take(1_000).collect();
    let mut moved = Migration { client: &client, hot: &hot, value: &value, bytes, normal: None };
    let mut figures = Vec::new();
    for (way, command) in moves {
        figures.extend(moved.migrate(way, command, progress).await?);
    }
    let title = format!("{} MiB of keys move on three nodes", bytes >> 20);
    Ok(Metric { number: 34, title, figures, ..Metric::default() })
}

/// A migration and its concurrent clients.
struct Migration<'a> {
    client: &'a Client,
    hot: &'a [String],
    value: &'a str,
    bytes: u64,
    /// The 99th percentile before the first migration, in milliseconds.
    normal: Option<f64>,
}

impl Migration<'_> {
    async fn migrate(
        &mut self,
        way: &str,
        mut command: Command,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Vec<Figure>> {
        let (client, bytes, normal) = (self.client, self.bytes, self.normal);
        // Earlier writes are synced first: otherwise the kernel would write them back during the migration.
        tokio::task::spawn_blocking(rustix::fs::sync).await.context("sync")?;
        let observed = Observed::new()?;
        let workers = (0..TASKS).map(|task| work(client, self.hot, task, &observed, self.value));
        let watch = async {
            let (mut calm, mut calms) = (f64::INFINITY, 0);
            while calms < OBSERVATIONS && normal.map_or(calms == 0, |normal| calm > normal * OBSERVED_FACTOR)
            {
                tokio::time::sleep(OBSERVE).await;
                (calm, calms) = (observed.take_percentiles().0, calms + 1);
            }
            progress(&format!("metric 34: moving {way}"));
            let memory =
                tokio::task::spawn_blocking(move || touch(bytes * TOUCHED)).await.context("memory")?;
            observed.take_percentiles();
            let began = Instant::now();
            let moved = tokio::task::spawn_blocking(move || command.output()).await;
            let took = began.elapsed();
            observed.stop.set(true);
            Ok::<_, anyhow::Error>((calm, memory, took, moved.context("the command")??))
        };
        let (_, watched) = tokio::join!(futures_util::future::join_all(workers), watch);
        let (calm, memory, took, output) = watched?;
        let normal = *self.normal.get_or_insert(calm);
        // Requests still in flight at the end are counted as well.
        let answered = observed.latencies.borrow().len() as f64 / took.as_secs_f64();
        let during = observed.take_percentiles();
        ensure!(output.status.success(), "the move failed: {}", String::from_utf8_lossy(&output.stderr));
        client.refresh();
        let speed = bytes as f64 / f64::from(1 << 20) / took.as_secs_f64();
        let figure = |what: &str, value, unit: &str, aim| {
            Figure::new("Moim", &format!("{way}: {what}"), value, unit, aim)
        };
        Ok(vec![
            figure("moved in a second", speed, "MiB", Some(Aim::AtLeast(100.0))),
            figure("slowest GiB of memory touched before it", memory, "MiB/s", None),
            figure("99th percentile of GET and SET before", calm, "ms", None),
            figure("the same during the move", during.0, "ms", None),
            figure(
                "the same, times what it was before anything moved",
                during.0 / normal.max(1e-3),
                "",
                Some(Aim::AtMost(5.0)),
            ),
            figure("longest wait during the move", during.1, "ms", None),
            figure("GET and SET answered in a second during the move", answered, "op/s", None),
            figure(
                "errors that slot-client showed",
                observed.errors.get() as f64,
                "",
                Some(Aim::AtMost(0.0)),
            ),
        ])
    }
}

/// Touches memory page by page and frees it. Returns the slowest rate, in MiB per second.
fn touch(bytes: u64) -> f64 {
    let bytes = bytes.min(crate::procfs::available_memory().unwrap_or(0) / 2);
    let mut memory = vec![0u8; usize::try_from(bytes).unwrap_or(0)];
    let slowest = memory.chunks_exact_mut(1 << 30).map(|part| {
        let began = Instant::now();
        part.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
        part.len() as f64 / f64::from(1 << 20) / began.elapsed().as_secs_f64().max(1e-6)
    });
    let slowest = slowest.fold(f64::INFINITY, f64::min);
    std::hint::black_box(&memory);
    slowest
}

async fn work(client: &Client, keys: &[String], task: u64, observed: &Observed, value: &str) {
    let mut turn = task * 131;
    while !observed.stop.get() {
        let key = keys[(turn as usize) % keys.len()].as_str();
        let asked = Instant::now();
        let is_fine = match turn % 2 {
            0 => client.set(key, value).await.is_ok(),
            _ => client.get::<Option<bytes::Bytes>>(key).await.is_ok_and(|found| found.is_some()),
        };
        let waited = u64::try_from(asked.elapsed().as_micros()).unwrap_or(u64::MAX);
        // The histogram resizes itself, so recording cannot fail.
        let _ = observed.latencies.borrow_mut().record(waited);
        observed.errors.set(observed.errors.get() + u64::from(!is_fine));
        turn += 1;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
