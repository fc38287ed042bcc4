//! Metrics 19 to 21 and 27: clusters of several processes on this machine, every partition replicated to all of them,
//! acks=all.
//!
//! 19 and 20 alternate slices between our cluster and Kafka's, for both durabilities of an acknowledgement; besides
//! the rates they report how many bytes crossed the loopback per acknowledged byte (client, replication and all). 21
//! kills the leader of a partition and reports the time without an acknowledgement. 27 kills the controller of a
//! cluster with many partitions and reports the time until every partition has a live leader.

use std::cell::Cell;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::runtime::Runtime;

use super::subjects::{Ack, Shape, settle_disk};
use super::{KIB, Options};
use crate::judge::{Wanted, What, judge, machine_line};
use crate::load::admin::{self, NewTopic};
use crate::load::produce::{self, ProduceLoad};
use crate::load::{self, Until};
use crate::peers::{self, Server};
use crate::report::{Aim, Figure, Metric, Report, Side};
use crate::slices::{Subject, Work, alternate, median};

/// Every metric of clusters.
pub const METRICS: [u8; 4] = [19, 20, 21, 27];

/// Number of leader kills.
const FAILOVERS: usize = 3;
/// Partition count of the cluster whose controller is killed.
const PARTITIONS: i32 = 10_000;
/// Timeout until the cluster accepts writes again.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum attempts of a slice during which leaders move, and the pause between them.
const ATTEMPTS: u32 = 5;
const SETTLE: Duration = Duration::from_secs(2);

struct Bench<'a> {
    options: &'a Options,
    nodes: usize,
    runtime: Runtime,
    folder: PathBuf,
    topics: Cell<u32>,
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Processes that form a cluster.
struct Cluster {
    servers: Vec<Server>,
}

impl Cluster {
    fn name(&self) -> &'static str {
        self.servers[0].name()
    }

    fn addr(&self) -> SocketAddr {
        self.servers[0].addr
    }

    fn pids(&self) -> Vec<u32> {
        self.servers.iter().map(Server::pid).collect()
    }
}

/// Runs the chosen metrics.
pub(super) fn run(options: &Options, nodes: usize, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    let folder = options.scratch.join(format!("run-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let bench = Bench { options, nodes, runtime: load::runtime()?, folder, topics: Cell::new(0) };
    let mut report = Report { machine: machine_line(), ..Report::default() };
    let mut kafka = options.with_kafka;
    if kafka && let Err(why) = peers::install_kafka(&options.scratch.join("kafka")) {
        report.notes.push(format!("Kafka was not measured: {why:#}"));
        kafka = false;
    }
    let wanted = |number: u8| options.metrics.contains(&number);
    if wanted(19) || wanted(20) {
        progress("starting the clusters");
        let mut clusters = vec![bench.start_moim("rates")?];
        if kafka {
            clusters.push(bench.start_kafka("rates")?);
        }
        if wanted(19) {
            report.metrics.push(bench.throughput(&clusters, progress)?);
        }
        if wanted(20) {
            report.metrics.push(bench.latency(&clusters, progress)?);
        }
    }
    if wanted(21) {
        report.metrics.push(bench.failover(kafka, progress)?);
    }
    if wanted(27) {
        report.metrics.push(bench.controller_failover(progress)?);
    }
    Ok(report)
}

impl Bench<'_> {
    fn start_moim(&self, what: &str) -> Result<Cluster> {
        let servers = peers::start_moim_cluster(&self.options.moim, &self.folder.join(what), self.nodes)?;
        Ok(Cluster { servers })
    }

    fn start_kafka(&self, what: &str) -> Result<Cluster> {
        let serves = |addr| load::runtime().is_ok_and(|runtime| runtime.block_on(admin::serves(addr)));
        let home = self.options.scratch.join("kafka");
        let servers = peers::start_kafka_cluster(&home, &self.folder.join(what), self.nodes, "", &serves)?;
        Ok(Cluster { servers })
    }

    fn topic(&self) -> String {
        self.topics.set(self.topics.get() + 1);
        format!("bench-{}", self.topics.get())
    }

    fn measure(
        &self,
        (number, title): (u8, String),
        clusters: &[Cluster],
        shapes: [Shape; 2],
        wanted: &[Wanted],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Metric> {
        let moved = [const { Cell::new((0, 0)) }; 4];
        let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
        for shape in &shapes {
            for cluster in clusters {
                let moved = &moved[subjects.len()];
                subjects.push(Box::new(Produce::new(self, cluster, shape, moved)));
            }
        }
        let watched: Vec<u32> = clusters.iter().flat_map(Cluster::pids).collect();
        let outcome = alternate(&self.options.plan, &mut subjects, &watched, progress)?;
        let labels: Vec<String> = subjects.iter().map(|subject| subject.label()).collect();
        let sides = subjects.iter().enumerate();
        let sides = sides.map(|(i, subject)| Side::of(&outcome, i, subject.label(), subject.durability()));
        let figures = labels.iter().zip(&moved).filter_map(|(label, moved)| {
            let (acknowledged, crossed) = moved.get();
            let ratio = crossed as f64 / acknowledged.max(1) as f64;
            let what = "bytes on the loopback per byte acknowledged";
            (acknowledged > 0).then(|| Figure::new(label, what, ratio, "", None))
        });
        let figures = figures.collect();
        Ok(Metric {
            number,
            title,
            sides: sides.collect(),
            comparisons: judge(&outcome, &labels, wanted),
            figures,
        })
    }

    fn throughput(&self, clusters: &[Cluster], progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let shape = |ack| Shape { partitions: 12, window: 4, batch_bytes: 16 * KIB, records: 16, ack };
        let wanted = [
            Wanted("Moim", "Kafka", What::Throughput, Some(Aim::AtLeast(2.0))),
            Wanted("Moim", "Kafka", What::P99, Some(Aim::AtMost(0.25))),
            Wanted("Moim", "Kafka", What::CpuPerGib, None),
            Wanted("Moim, fsync", "Kafka, fsync", What::Throughput, Some(Aim::AtLeast(2.0))),
            Wanted("Moim, fsync", "Kafka, fsync", What::P99, Some(Aim::AtMost(0.25))),
            Wanted("Moim, fsync", "Kafka", What::Throughput, None),
        ];
        let title = format!("produce to {} nodes, 12 partitions x 16 KiB batches, acks=all", self.nodes);
        let shapes = [shape(Ack::Written), shape(Ack::Synced)];
        self.measure((19, title), clusters, shapes, &wanted, progress)
    }

    fn latency(&self, clusters: &[Cluster], progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let shape = |ack| Shape { partitions: 1, window: 1, batch_bytes: 4 * KIB, records: 4, ack };
        let wanted = [
            Wanted("Moim", "Kafka", What::P50, None),
            Wanted("Moim", "Kafka", What::P99, Some(Aim::AtMost(0.25))),
            Wanted("Moim, fsync", "Kafka, fsync", What::P50, None),
            Wanted("Moim, fsync", "Kafka, fsync", What::P99, Some(Aim::AtMost(0.25))),
        ];
        let title = format!("produce latency on {} nodes, one connection, 4 KiB, acks=all", self.nodes);
        let shapes = [shape(Ack::Written), shape(Ack::Synced)];
        self.measure((20, title), clusters, shapes, &wanted, progress)
    }

    fn failover(&self, kafka: bool, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let mut figures = Vec::new();
        for ours in [true, false] {
            if !ours && !kafka {
                continue;
            }
            let mut gaps = Vec::new();
            for round in 0..FAILOVERS {
                let what = format!("failover-{ours}-{round}");
                let cluster = if ours { self.start_moim(&what)? } else { self.start_kafka(&what)? };
                let gap = self.runtime.block_on(kill_leader(cluster, &self.topic()))?;
                progress(&format!("failover {round}: {:.0} ms", gap.as_secs_f64() * 1e3));
                gaps.push(gap.as_secs_f64() * 1e3);
            }
            let label = if ours { "Moim" } else { "Kafka" };
            let aim = ours.then_some(Aim::AtMost(2_000.0));
            let worst = gaps.iter().copied().fold(0.0, f64::max);
            let middle = median(gaps).unwrap_or_default();
            let what = format!("no writes after kill -9 of a leader, median of {FAILOVERS}");
            figures.push(Figure::new(label, &what, middle, "ms", aim));
            figures.push(Figure::new(label, "the same, worst", worst, "ms", None));
        }
        let title = format!("failover of a partition on {} nodes, default timers", self.nodes);
        Ok(Metric { number: 21, title, figures, ..Metric::default() })
    }

    fn controller_failover(&self, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let mut gaps = Vec::new();
        for round in 0..FAILOVERS {
            let cluster = self.start_moim(&format!("controller-{round}"))?;
            let gap = self.runtime.block_on(kill_controller(cluster, &self.topic()))?;
            progress(&format!("controller failover {round}: {:.0} ms", gap.as_secs_f64() * 1e3));
            gaps.push(gap.as_secs_f64() * 1e3);
        }
        let worst = gaps.iter().copied().fold(0.0, f64::max);
        let middle = median(gaps).unwrap_or_default();
        let what = format!("until all is led again, median of {FAILOVERS}");
        let figures = vec![
            Figure::new("Moim", &what, middle, "ms", Some(Aim::AtMost(3_000.0))),
            Figure::new("Moim", "the same, worst", worst, "ms", None),
        ];
        let title =
            format!("kill -9 of the controller, {} nodes, {PARTITIONS} partitions on each", self.nodes);
        Ok(Metric { number: 27, title, figures, ..Metric::default() })
    }
}

/// A cluster under a produce load, every partition at its leader.
struct Produce<'a> {
    bench: &'a Bench<'a>,
    cluster: &'a Cluster,
    shape: Shape,
    load: ProduceLoad,
    leaders: Vec<SocketAddr>,
    /// Acknowledged bytes, and bytes that crossed the loopback meanwhile.
    moved: &'a Cell<(u64, u64)>,
}

impl<'a> Produce<'a> {
    fn new(bench: &'a Bench<'a>, cluster: &'a Cluster, shape: &Shape, moved: &'a Cell<(u64, u64)>) -> Self {
        let load = ProduceLoad {
            addr: cluster.addr(),
            topic: String::new(),
            partitions: shape.partitions,
            window: shape.window,
            batch: produce::batch(shape.batch_bytes, shape.records),
        };
        Self { bench, cluster, shape: *shape, load, leaders: Vec::new(), moved }
    }
}

impl Subject for Produce<'_> {
    fn label(&self) -> String {
        match self.shape.ack {
            Ack::Written => self.cluster.name().into(),
            Ack::Synced => format!("{}, fsync", self.cluster.name()),
        }
    }

    fn durability(&self) -> String {
        format!("all replicas: {}", self.shape.ack.text(self.cluster.name()))
    }

    fn pid(&self) -> Option<u32> {
        None
    }

    fn pids(&self) -> Vec<u32> {
        self.cluster.pids()
    }

    fn warm_up(&self) -> u32 {
        if self.cluster.name() == "Kafka" { 3 } else { 1 }
    }

    fn prepare(&mut self) -> Result<()> {
        self.load.topic = self.bench.topic();
        let mut configs = self.shape.ack.configs(self.cluster.name());
        configs.push(("min.insync.replicas".into(), "2".into()));
        let topic = NewTopic { name: self.load.topic.clone(), partitions: self.shape.partitions, configs };
        let factor = i16::try_from(self.bench.nodes)?;
        self.leaders =
            self.bench.runtime.block_on(admin::create_replicated(self.load.addr, &topic, factor))?;
        Ok(())
    }

    fn run(&mut self, slice: Duration) -> Result<Work> {
        let mut before = loopback_bytes()?;
        let mut attempts = 0;
        let work = loop {
            let produced = produce::produce_to(&self.load, &self.leaders, Until::Elapsed(slice));
            attempts += 1;
            match self.bench.runtime.block_on(produced) {
                Ok(work) => break work,
                Err(error) if attempts == ATTEMPTS => return Err(error),
                // Leaders move in a cluster that is short of cores; the slice is then repeated.
                Err(_) => std::thread::sleep(SETTLE),
            }
            let leaders = admin::leaders(self.load.addr, &self.load.topic, 1);
            let leaders = self.bench.runtime.block_on(leaders)?;
            if leaders.len() == self.leaders.len() {
                self.leaders = leaders;
            }
            before = loopback_bytes()?;
        };
        let (acknowledged, crossed) = self.moved.get();
        self.moved.set((acknowledged + work.bytes, crossed + loopback_bytes()?.saturating_sub(before)));
        Ok(work)
    }

    fn settle(&mut self) -> Result<()> {
        let gone = admin::delete(self.load.addr, std::slice::from_ref(&self.load.topic));
        self.bench.runtime.block_on(gone)?;
        settle_disk();
        Ok(())
    }
}

/// Bytes carried by the loopback since boot.
fn loopback_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/dev").context("/proc/net/dev")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("lo:")).context("no loopback")?;
    let first = line.split_whitespace().next().context("no counter")?;
    first.parse().context("the loopback's counter")
}

/// Produces one small batch after the other, kills the leader, and returns the time without an acknowledgement.
async fn kill_leader(mut cluster: Cluster, topic: &str) -> Result<Duration> {
    let new = NewTopic { name: topic.to_owned(), partitions: 1, configs: Vec::new() };
    let factor = i16::try_from(cluster.servers.len())?;
    let leader = admin::create_replicated(cluster.addr(), &new, factor).await?[0];
    let load = ProduceLoad {
        addr: leader,
        topic: topic.to_owned(),
        partitions: 1,
        window: 1,
        batch: produce::batch(KIB, 1),
    };
    produce::produce_to(&load, &[leader], Until::Operations(200)).await?;
    let at = cluster.servers.iter().position(|server| server.addr == leader).context("an unknown leader")?;
    let killed = Instant::now();
    cluster.servers.remove(at).kill()?;
    loop {
        ensure!(killed.elapsed() < TIMEOUT, "no write was taken within {TIMEOUT:?} of the leader's death");
        if try_once(&cluster, &load, leader).await.is_some() {
            return Ok(killed.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Kills the controller node, which leads its share of the partitions, and returns the time until every partition has
/// another leader.
async fn kill_controller(mut cluster: Cluster, topic: &str) -> Result<Duration> {
    let new = NewTopic { name: topic.to_owned(), partitions: PARTITIONS, configs: Vec::new() };
    let factor = i16::try_from(cluster.servers.len())?;
    admin::create_replicated(cluster.addr(), &new, factor).await?;
    let controller = admin::controller(cluster.addr()).await?;
    let at = cluster.servers.iter().position(|server| server.addr == controller);
    let at = at.context("an unknown controller")?;
    let killed = Instant::now();
    cluster.servers.remove(at).kill()?;
    loop {
        ensure!(killed.elapsed() < TIMEOUT, "not all is led within {TIMEOUT:?} of the controller's death");
        let asked = Instant::now();
        let leaders = admin::leaders(cluster.addr(), topic, 1).await.unwrap_or_default();
        if leaders.len() == usize::try_from(PARTITIONS)? && !leaders.contains(&controller) {
            return Ok(asked - killed);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Acts as a client: fetches the metadata, and produces to the leader.
async fn try_once(cluster: &Cluster, load: &ProduceLoad, dead: SocketAddr) -> Option<()> {
    let attempt = async {
        for server in &cluster.servers {
            let Ok(leaders) = admin::leaders(server.addr, &load.topic, 1).await else { continue };
            let Some(leader) = leaders.first().filter(|leader| **leader != dead) else { continue };
            if produce::produce_to(load, &[*leader], Until::Operations(1)).await.is_ok() {
                return Some(());
            }
        }
        None
    };
    tokio::time::timeout(Duration::from_secs(1), attempt).await.ok().flatten()
}
