//! `cargo xtask bench queue|coord|slots|pipeline|cluster`: the side-by-side comparisons of docs/performance.md.
//!
//! Builds the release binary, passes the options to `moim-bench`, and prints the report. Progress goes to stderr.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use moim_bench::report::Report;
use moim_bench::slices::Plan;
use moim_bench::{cluster, coord, pipeline, queue, slots};

use crate::etcd;

/// What to measure.
#[derive(Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The queue against Kafka and against the limits of this machine
    #[command(after_help = "Example: cargo xtask bench queue --metric 1 --metric 5 --pairs 5")]
    Queue(Queue),
    /// Coordination against etcd
    #[command(after_help = "Example: cargo xtask bench coord --metric 12 --pairs 5")]
    Coord(Coord),
    /// The store and its client against Redis
    #[command(after_help = "Example: cargo xtask bench slots --metric 8 --pairs 5")]
    Slots(Slots),
    /// The pipeline on Moim, and on Kafka with a Redis Cluster
    #[command(after_help = "Example: cargo xtask bench pipeline --metric 23 --rounds 3")]
    Pipeline(Pipeline),
    /// The cluster library: a table pushed to 1,500 subscribers, plans, detection
    #[command(after_help = "Example: cargo xtask bench cluster --metric 28 --rounds 40")]
    Cluster(Cluster),
    /// A member of a cluster until it is killed: what metric 32 kills
    #[command(hide = true)]
    Member {
        /// The store
        etcd: String,
    },
}

/// Options of every comparison.
#[derive(Args)]
struct Common {
    /// Metric number of docs/performance.md; may be repeated [default: all]
    #[arg(long = "metric", value_name = "N")]
    metrics: Vec<u8>,
    /// Pairs of slices after the warm-up
    #[arg(long, default_value_t = 5)]
    pairs: usize,
    /// Length of a slice
    #[arg(long, default_value = "3s", value_parser = duration)]
    slice: Duration,
    /// Share of the machine, in percent, that other processes may use before a pair is dropped
    #[arg(long, default_value_t = 10.0, value_name = "PERCENT")]
    noise: f64,
    /// Measure this binary instead of building one
    #[arg(long, value_name = "PATH")]
    moim: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Args)]
struct Queue {
    #[command(flatten)]
    common: Common,
    /// The other broker
    #[arg(long, value_enum, default_value_t = Peer::Kafka)]
    peer: Peer,
    /// Compare clusters of this many processes instead of single brokers (metrics 19 to 21 and 27)
    #[arg(long, default_value_t = 1, value_name = "N")]
    nodes: usize,
    /// Partitions of the start-up test (metric 15)
    #[arg(long, default_value_t = 10_000)]
    partitions: usize,
}

#[derive(Args)]
struct Coord {
    #[command(flatten)]
    common: Common,
    /// A program of etcd to compare with; may be repeated [default: the installed one, and 3.5 built with Go]
    #[arg(long = "etcd", value_name = "PATH")]
    etcd: Vec<PathBuf>,
    /// How often the leader is killed (metric 17)
    #[arg(long, default_value_t = 5)]
    failovers: usize,
}

#[derive(Args)]
struct Slots {
    #[command(flatten)]
    common: Common,
    /// The redis-server to compare with [default: the installed one]
    #[arg(long, value_name = "PATH")]
    redis: Option<PathBuf>,
    /// Keys of the memory test (metric 14)
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,
    /// MiB of keys that move (metric 34)
    #[arg(long, value_name = "N", default_value_t = 1024)]
    moved_mib: u64,
}

#[derive(Args)]
struct Pipeline {
    /// Metric number of docs/performance.md; may be repeated [default: all]
    #[arg(long = "metric", value_name = "N")]
    metrics: Vec<u8>,
    /// The other side
    #[arg(long, value_enum, default_value_t = Peer::Kafka)]
    peer: Peer,
    /// How the other side is set; may be repeated [default: both]
    #[arg(long = "durability", value_enum)]
    durabilities: Vec<Durability>,
    /// Messages of the large run (metric 24)
    #[arg(long, default_value_t = 1_000_000)]
    messages: usize,
    /// How often a run is taken; the median counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Measure this binary instead of building one
    #[arg(long, value_name = "PATH")]
    moim: Option<PathBuf>,
    /// Where the pictures of metric 26 go
    #[arg(long, value_name = "DIR", default_value = "docs/pictures")]
    pictures: PathBuf,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Args)]
struct Cluster {
    /// Metric number of docs/performance.md; may be repeated [default: all]
    #[arg(long = "metric", value_name = "N")]
    metrics: Vec<u8>,
    /// Servers that are simulated
    #[arg(long, default_value_t = 1_000)]
    servers: usize,
    /// SDKs that are simulated
    #[arg(long, default_value_t = 500)]
    sdks: usize,
    /// Partitions of the table
    #[arg(long, default_value_t = 100_000)]
    partitions: usize,
    /// Changes that are pushed (metric 28); members that are killed, ten at most (metric 32)
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Measure this binary instead of building one
    #[arg(long, value_name = "PATH")]
    moim: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peer {
    Kafka,
    None,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Durability {
    /// As Kafka and Redis are by default
    Default,
    /// They acknowledge what is on disk, as Moim does
    Synced,
}

impl Durability {
    fn to_pipeline(self) -> pipeline::Durability {
        match self {
            Durability::Default => pipeline::Durability::Default,
            Durability::Synced => pipeline::Durability::Synced,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

/// Runs the benchmark; never false, because a missed aim is a finding and not a failure.
#[allow(clippy::print_stdout)] // The report is this command's data.
pub(crate) fn run(root: &Path, bench: &Bench) -> Result<bool> {
    let (output, report) = match &bench.what {
        What::Queue(args) => (args.common.output, run_queue(root, args)?),
        What::Coord(args) => (args.common.output, run_coord(root, args)?),
        What::Slots(args) => (args.common.output, run_slots(root, args)?),
        What::Pipeline(args) => (args.output, run_pipeline(root, args)?),
        // This suite measures the client as well: its plans, its library. So it must be a release build, like the
        // server.
        What::Cluster(_) if cfg!(debug_assertions) => return rerun_in_release(root),
        What::Cluster(args) => (args.output, run_cluster(root, args)?),
        What::Member { etcd } => return cluster::member(etcd).map(|()| true),
    };
    match output {
        Output::Table => println!("{}", report.table()),
        Output::Json => println!("{}", report.json()?),
    }
    Ok(true)
}

fn run_queue(root: &Path, args: &Queue) -> Result<Report> {
    let target = target_dir(root)?;
    let known: &[u8] = if args.nodes > 1 { &queue::REPLICATED_METRICS } else { &queue::METRICS };
    let options = queue::Options {
        metrics: args.common.metrics(known)?,
        plan: args.common.plan()?,
        with_kafka: args.peer == Peer::Kafka,
        moim: args.common.moim(root, &target)?,
        scratch: target.join("bench"),
        many_partitions: args.partitions,
    };
    let progress = &mut |line: &str| eprintln!("{line}");
    match args.nodes {
        0 | 1 => queue::run(&options, progress),
        nodes => queue::run_replicated(&options, nodes, progress),
    }
}

fn run_coord(root: &Path, args: &Coord) -> Result<Report> {
    let target = target_dir(root)?;
    let mut notes = Vec::new();
    let mut peers = args.etcd.clone();
    if peers.is_empty() {
        peers.extend(etcd::installed());
        match etcd::built(&target.join("bench")) {
            Ok(program) => peers.push(program),
            Err(why) => notes.push(format!("etcd 3.5 was not measured: {why:#}")),
        }
    }
    let options = coord::Options {
        metrics: args.common.metrics(&coord::METRICS)?,
        plan: args.common.plan()?,
        moim: args.common.moim(root, &target)?,
        etcd: peers,
        failovers: args.failovers,
    };
    let mut report = coord::run(&options, &mut |line| eprintln!("{line}"))?;
    report.notes.extend(notes);
    Ok(report)
}

fn run_slots(root: &Path, args: &Slots) -> Result<Report> {
    let target = target_dir(root)?;
    let options = slots::Options {
        metrics: args.common.metrics(&slots::METRICS)?,
        plan: args.common.plan()?,
        moim: Some(args.common.moim(root, &target)?),
        redis: args.redis.clone().or_else(installed_redis),
        scratch: target.join("bench"),
        keys: args.keys,
        moved_bytes: args.moved_mib << 20,
    };
    slots::run(&options, &mut |line| eprintln!("{line}"))
}

fn run_pipeline(root: &Path, args: &Pipeline) -> Result<Report> {
    let target = target_dir(root)?;
    let options = pipeline::Options {
        metrics: chosen(&args.metrics, &pipeline::METRICS)?,
        moim: match &args.moim {
            Some(path) => std::path::absolute(path)?,
            None => build(root, &target)?,
        },
        with_peer: args.peer == Peer::Kafka,
        durabilities: match &args.durabilities[..] {
            [] => vec![pipeline::Durability::Default, pipeline::Durability::Synced],
            some => some.iter().map(|wanted| wanted.to_pipeline()).collect(),
        },
        redis: installed_redis(),
        scratch: target.join("bench"),
        messages: args.messages,
        rounds: args.rounds.max(1),
        pictures: root.join(&args.pictures),
    };
    std::fs::create_dir_all(&options.scratch)?;
    pipeline::run(&options, &mut |line| eprintln!("{line}"))
}

fn run_cluster(root: &Path, args: &Cluster) -> Result<Report> {
    let target = target_dir(root)?;
    ensure!(args.servers > 0 && args.partitions > 0 && args.rounds > 0, "there must be something to measure");
    let myself = std::env::current_exe().context("this program")?.display().to_string();
    let options = cluster::Options {
        metrics: chosen(&args.metrics, &cluster::METRICS)?,
        moim: match &args.moim {
            Some(path) => path.clone(),
            None => build(root, &target)?,
        },
        member: vec![myself, "bench".into(), "member".into()],
        servers: args.servers,
        sdks: args.sdks,
        partitions: args.partitions,
        rounds: args.rounds,
    };
    cluster::run(&options, &mut |line| eprintln!("{line}"))
}

/// Runs the same command with a release build of this program.
fn rerun_in_release(root: &Path) -> Result<bool> {
    let status = Command::new(env!("CARGO"))
        .args(["run", "--quiet", "--release", "--package", "xtask", "--"])
        .args(std::env::args_os().skip(1))
        .current_dir(root)
        .status()
        .context("running cargo")?;
    ensure!(status.success(), "the release build failed");
    Ok(true)
}

fn installed_redis() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("redis-server")).find(|program| program.is_file())
}

impl Common {
    fn metrics(&self, known: &[u8]) -> Result<Vec<u8>> {
        chosen(&self.metrics, known)
    }

    fn plan(&self) -> Result<Plan> {
        ensure!(self.pairs > 0, "at least one pair");
        Ok(Plan { pairs: self.pairs, slice: self.slice, noise_limit: self.noise / 100.0 })
    }

    fn moim(&self, root: &Path, target: &Path) -> Result<PathBuf> {
        match &self.moim {
            Some(path) => Ok(path.clone()),
            None => build(root, target),
        }
    }
}

fn chosen(metrics: &[u8], known: &[u8]) -> Result<Vec<u8>> {
    if let Some(unknown) = metrics.iter().find(|number| !known.contains(number)) {
        bail!("there is no metric {unknown}; there are {known:?}");
    }
    Ok(if metrics.is_empty() { known.to_vec() } else { metrics.to_vec() })
}

fn build(root: &Path, target: &Path) -> Result<PathBuf> {
    let status = Command::new(env!("CARGO"))
        .args(["build", "--release", "--bin", "moim"])
        .current_dir(root)
        .status()
        .context("running cargo")?;
    ensure!(status.success(), "the release build failed");
    Ok(target.join("release").join("moim"))
}

/// Cargo's target directory, which also holds our data: the disk of the workspace, not a memory file system.
fn target_dir(root: &Path) -> Result<PathBuf> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .context("running cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    Ok(metadata["target_directory"].as_str().context("cargo metadata names no target directory")?.into())
}

/// `3s` or `500ms`.
fn duration(text: &str) -> Result<Duration, String> {
    let parse = |number: &str| number.parse::<f64>().ok().filter(|number| *number > 0.0);
    let seconds = match text.strip_suffix("ms") {
        Some(number) => parse(number).map(|ms| ms / 1e3),
        None => text.strip_suffix('s').and_then(parse),
    };
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("{text:?} is not a duration like 3s or 500ms"))
}

#[cfg(test)]
mod tests {
    use super::duration;
    use std::time::Duration;

    #[test]
    fn durations_have_a_unit_and_are_positive() {
        assert_eq!(duration("3s"), Ok(Duration::from_secs(3)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        for wrong in ["3", "-1s", "0s", "s", "1h"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
