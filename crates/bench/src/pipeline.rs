//! The pipeline end to end: the same programs (`moim bench pipeline`) on three nodes of Moim, and on three Kafka
//! processes with a Redis Cluster of six: with their defaults, and configured to acknowledge only synced writes, as
//! Moim does.
//!
//! Clients, gateways, counters and aggregators are one process of the binary under test on either side; only the
//! addresses differ, and on the peer's side the store's acknowledgement is not relied on (`--ack-after-queue`). A run
//! whose verdict is not `ok` is not a measurement: it ends the comparison.

mod chart;
mod stacks;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::judge::machine_line;
use crate::procfs;
use crate::report::{Aim, Figure, Metric, Report};

use self::chart::Chart;
pub use self::stacks::Durability;
use self::stacks::Stack;

/// Numbers of the metrics in docs/performance.md.
pub const METRICS: [u8; 4] = [23, 24, 25, 26];

/// Options of a run.
pub struct Options {
    /// Numbers from [`METRICS`].
    pub metrics: Vec<u8>,
    /// The binary under test.
    pub moim: PathBuf,
    /// True to measure Kafka and Redis.
    pub with_peer: bool,
    /// Durability settings of the peer; metric 25 uses the first.
    pub durabilities: Vec<Durability>,
    /// The installed redis-server.
    pub redis: Option<PathBuf>,
    /// Directory of data and Kafka's artifacts.
    pub scratch: PathBuf,
    /// Number of messages of metric 24.
    pub messages: usize,
    /// Number of runs for metrics 23 and 25, in turn; the median counts.
    pub rounds: usize,
    /// Directory of the charts of metric 26.
    pub pictures: PathBuf,
}

/// The output of `moim bench pipeline -o json`.
#[derive(Clone, Debug, Deserialize)]
struct Run {
    messages_per_second: f64,
    verified_seconds: f64,
    p50_ms: f64,
    p99_ms: f64,
    peak_memory_bytes: u64,
    verdict: String,
}

/// Runs the chosen metrics and reports.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    let mut report = Report { machine: machine_line(), ..Report::default() };
    let mut bench = Bench { options, progress, notes: Vec::new() };
    let wanted = |number: u8| options.metrics.contains(&number);
    if wanted(23) {
        report.metrics.push(bench.reference()?);
    }
    if wanted(24) {
        report.metrics.push(bench.hundred_clients()?);
    }
    if wanted(25) {
        report.metrics.push(bench.low_rate_latency()?);
    }
    if wanted(26) {
        report.metrics.push(bench.curves()?);
    }
    report.notes = bench.notes;
    Ok(report)
}

struct Bench<'a> {
    options: &'a Options,
    progress: &'a mut dyn FnMut(&str),
    notes: Vec<String>,
}

impl Bench<'_> {
    fn progress_line(&mut self, line: &str) {
        (self.progress)(line);
    }

    fn moim(&mut self) -> Result<Stack> {
        Stack::moim(&self.options.moim, &self.options.scratch.join("pipeline"))
    }

    /// The durability settings in which the peer is measured.
    fn peers(&self, at_most: usize) -> Vec<Durability> {
        self.options.durabilities.iter().copied().take(at_most).collect()
    }

    /// Kafka and Redis; none, with a note, if they are not installed.
    fn peer(&mut self, durability: Durability) -> Result<Option<Stack>> {
        if !self.options.with_peer {
            return Ok(None);
        }
        let Some(redis) = &self.options.redis else {
            self.note("no redis-server: the other side was not measured");
            return Ok(None);
        };
        match Stack::real(&self.options.scratch, redis, durability) {
            Ok(stack) => Ok(Some(stack)),
            Err(why) => {
                self.note(&format!("Kafka and Redis were not measured: {why:#}"));
                Ok(None)
            }
        }
    }

    fn note(&mut self, text: &str) {
        if !self.notes.iter().any(|known| known == text) {
            self.notes.push(text.to_owned());
        }
    }

    fn bench(&mut self, stack: &Stack, args: &[&str]) -> Result<Run> {
        let output = Command::new(&self.options.moim)
            .args(["bench", "pipeline", "--clean", "-o", "json"])
            .args(["--kafka", &stack.kafka, "--redis", &stack.redis])
            .args(stack.flags)
            .args(args)
            .current_dir(&self.options.scratch)
            .stdin(Stdio::null())
            .output()
            .context("running the pipeline")?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(
            output.status.success(),
            "{}: the pipeline ended with {}\n{out}{err}",
            stack.label,
            output.status
        );
        let run: Run = serde_json::from_str(&out).context("the pipeline's report")?;
        ensure!(run.verdict == "ok", "{}: the verdict is {}", stack.label, run.verdict);
        (self.progress)(&format!(
            "  {}: {:.0} messages/s, p50 {:.1} ms, p99 {:.1} ms",
            stack.label, run.messages_per_second, run.p50_ms, run.p99_ms
        ));
        Ok(run)
    }

    /// All runs on one stack.
    fn rounds(&mut self, stack: &Stack, args: &[&str]) -> Result<Vec<Run>> {
        (0..self.options.rounds).map(|_| self.bench(stack, args)).collect()
    }

    /// The runs of Moim, then those of the peer, each alone on the machine: an idle Kafka takes a third of the speed
    /// of a concurrent process. Each side has a warm-up run.
    fn run_each_alone(
        &mut self,
        moim: Stack,
        peers: &[Durability],
        args: &[&str],
    ) -> Result<(Vec<Stack>, Vec<Vec<Run>>)> {
        let mut runs = vec![self.rounds(&moim, args)?];
        let mut stacks = vec![moim.ended()];
        for durability in peers {
            let Some(peer) = self.peer(*durability)? else { continue };
            self.bench(&peer, args)?;
            runs.push(self.rounds(&peer, args)?);
            stacks.push(peer.ended());
        }
        Ok((stacks, runs))
    }

    /// Metric 23: ten clients, 44,220 messages.
    fn reference(&mut self) -> Result<Metric> {
        self.progress_line("metric 23: the reference run, with the start of the cluster");
        let since = Instant::now();
        let moim = self.moim()?;
        let started = since.elapsed().as_secs_f64();
        self.bench(&moim, &["--clients", "10"])?;
        let whole = since.elapsed().as_secs_f64();
        let (stacks, runs) = self.run_each_alone(moim, &self.peers(usize::MAX), &["--clients", "10"])?;
        let mut figures = vec![
            Figure::new("Moim", "cluster of three ready", started, "s", None),
            Figure::new("Moim", "from nothing to verified, first run", whole, "s", Some(Aim::AtMost(10.0))),
        ];
        compare(&mut figures, &stacks, &runs, "the reference run");
        let title = "pipeline: 10 clients, 44,220 messages, until verified".into();
        Ok(Metric { number: 23, title, figures, ..Metric::default() })
    }

    /// Metric 24: a hundred clients, and the memory used.
    fn hundred_clients(&mut self) -> Result<Metric> {
        let lines = (self.options.messages / 100).max(2).to_string();
        self.progress_line(&format!("metric 24: 100 clients, {lines} lines each"));
        let args = ["--clients", "100", "--lines", &lines];
        let mut figures = Vec::new();
        let (mut stacks, mut all) = (Vec::new(), Vec::new());
        // One after the other, not concurrently: the peer's memory would interfere.
        let moim = self.moim()?;
        all.push(vec![self.bench(&moim, &args)?]);
        memory(&mut figures, &moim, &all[0][0])?;
        stacks.push(moim.ended());
        for durability in self.peers(usize::MAX) {
            let Some(peer) = self.peer(durability)? else { continue };
            let run = self.bench(&peer, &args)?;
            memory(&mut figures, &peer, &run)?;
            all.push(vec![run]);
            stacks.push(peer.ended());
        }
        let mut compared = Vec::new();
        compare(&mut compared, &stacks, &all, "the run");
        compared.extend(figures);
        let title = format!("pipeline: 100 clients, {} messages, until verified", self.options.messages);
        Ok(Metric { number: 24, title, figures: compared, ..Metric::default() })
    }

    /// Metric 25: message latency at a low rate.
    fn low_rate_latency(&mut self) -> Result<Metric> {
        self.progress_line("metric 25: 10 clients, 50 lines a second each");
        let args = ["--clients", "10", "--lines", "500", "--rate", "50"];
        let moim = self.moim()?;
        self.bench(&moim, &args)?;
        let (stacks, runs) = self.run_each_alone(moim, &self.peers(1), &args)?;
        let mut figures = Vec::new();
        for (stack, runs) in stacks.iter().zip(&runs) {
            figures.push(Figure::new(
                stack.label,
                "sent to counted, p50",
                median(runs, |r| r.p50_ms),
                "ms",
                None,
            ));
            figures.push(Figure::new(
                stack.label,
                "sent to counted, p99",
                median(runs, |r| r.p99_ms),
                "ms",
                None,
            ));
        }
        if let [ours, theirs] = &runs[..] {
            let ratio = median(ours, |r| r.p99_ms) / median(theirs, |r| r.p99_ms);
            figures.push(Figure::new(
                "Moim",
                "p99, of that of Kafka + Redis",
                ratio,
                "x",
                Some(Aim::AtMost(0.25)),
            ));
        }
        let title = "pipeline: 10 clients, 500 messages a second in all".into();
        Ok(Metric { number: 25, title, figures, ..Metric::default() })
    }

    /// Metric 26: one varied setting per chart.
    fn curves(&mut self) -> Result<Metric> {
        const CURVES: [(&str, &str, &str, &[u32]); 4] = [
            (
                "transaction-size",
                "--transaction-size",
                "messages in a transaction",
                &[100, 300, 1_000, 5_000, 20_000],
            ),
            (
                "batch",
                "--batch",
                "messages between two commits of an aggregator",
                &[100, 500, 2_000, 5_000, 20_000],
            ),
            ("window", "--window", "messages of a client in flight", &[16, 64, 256, 1_024, 4_096]),
            ("instances", "--instances", "counters, and as many aggregators", &[1, 2, 3, 5, 10]),
        ];
        self.progress_line("metric 26: curves");
        let moim = self.moim()?;
        fs::create_dir_all(&self.options.pictures)?;
        let mut figures = Vec::new();
        for (name, flag, what, values) in CURVES {
            let mut chart = Chart::new(what);
            for value in values {
                let text = value.to_string();
                let args = ["--clients", "10", "--lines", "4000", flag, &text];
                let runs = self.rounds(&moim, &args)?;
                let rate = median(&runs, |run| run.messages_per_second);
                let p50 = median(&runs, |run| run.p50_ms);
                chart.point(&text, rate, p50);
                figures.push(Figure::new("Moim", &format!("{value} {what}"), rate, "messages/s", None));
            }
            fs::write(picture(&self.options.pictures, name), chart.svg())?;
        }
        let title = "pipeline: 10 clients, 40,000 messages with other settings".into();
        Ok(Metric { number: 26, title, figures, ..Metric::default() })
    }
}

fn picture(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("pipeline-{name}.svg"))
}

/// Rates and times of all sides, and ours against each peer's. The aims are the same.
fn compare(figures: &mut Vec<Figure>, stacks: &[Stack], runs: &[Vec<Run>], what: &str) {
    for (stack, runs) in stacks.iter().zip(runs) {
        let mut figure = |what: &str, of: fn(&Run) -> f64, unit| {
            figures.push(Figure::new(stack.label, what, median(runs, of), unit, None));
        };
        figure("messages", |r| r.messages_per_second, "/s");
        figure("until verified", |r| r.verified_seconds, "s");
        figure("sent to counted at full speed, p50", |r| r.p50_ms, "ms");
        figure("sent to counted at full speed, p99", |r| r.p99_ms, "ms");
    }
    let [ours, theirs @ ..] = runs else { return };
    for (stack, theirs) in stacks[1..].iter().zip(theirs) {
        let ratio = |of: fn(&Run) -> f64| median(ours, of) / median(theirs, of);
        let mut figure = |name: &str, of: fn(&Run) -> f64, aim| {
            let name = format!("{name} of {what}, of that of {}", stack.label);
            figures.push(Figure::new("Moim", &name, ratio(of), "x", Some(aim)));
        };
        figure("messages/s", |r| r.messages_per_second, Aim::AtLeast(5.0));
        figure("p99", |r| r.p99_ms, Aim::AtMost(0.25));
    }
}

fn memory(figures: &mut Vec<Figure>, stack: &Stack, run: &Run) -> Result<()> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut resident = 0;
    for pid in stack.pids() {
        resident += procfs::memory_of(pid).context("memory of a server")?.resident;
    }
    figures.push(Figure::new(stack.label, "memory of all servers after the run", mib(resident), "MiB", None));
    let programs = "peak memory of clients, gateways, counters and aggregators";
    figures.push(Figure::new(stack.label, programs, mib(run.peak_memory_bytes), "MiB", None));
    Ok(())
}

fn median(runs: &[Run], of: impl Fn(&Run) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
