//! `cargo xtask bench queue`: the side-by-side comparison of docs/performance.md.
//!
//! Builds the release binary, hands everything to `moim-bench`, prints what comes back. Progress goes to stderr.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use moim_bench::queue::{METRICS, Options, run as run_queue};
use moim_bench::slices::Plan;

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
}

#[derive(Args)]
struct Queue {
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
    /// The other broker
    #[arg(long, value_enum, default_value_t = Peer::Kafka)]
    peer: Peer,
    /// Partitions of the start-up test (metric 15)
    #[arg(long, default_value_t = 10_000)]
    partitions: usize,
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
enum Output {
    Table,
    Json,
}

/// Runs it; false never, since a missed aim is a finding and not a failure.
#[allow(clippy::print_stdout)] // The report is this command's data.
pub(crate) fn run(root: &Path, bench: &Bench) -> Result<bool> {
    let What::Queue(queue) = &bench.what;
    if let Some(unknown) = queue.metrics.iter().find(|number| !METRICS.contains(number)) {
        bail!("there is no metric {unknown}; the queue has {METRICS:?}");
    }
    ensure!(queue.pairs > 0, "at least one pair");
    let target = target_dir(root)?;
    let moim = match &queue.moim {
        Some(path) => path.clone(),
        None => build(root, &target)?,
    };
    let options = Options {
        metrics: if queue.metrics.is_empty() { METRICS.to_vec() } else { queue.metrics.clone() },
        plan: Plan { pairs: queue.pairs, slice: queue.slice, noise_limit: queue.noise / 100.0 },
        with_kafka: queue.peer == Peer::Kafka,
        moim,
        scratch: target.join("bench"),
        many_partitions: queue.partitions,
    };
    let report = run_queue(&options, &mut |line| eprintln!("{line}"))?;
    match queue.output {
        Output::Table => println!("{}", report.table()),
        Output::Json => println!("{}", report.json()?),
    }
    Ok(true)
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

/// Where cargo puts its output, and we our data: the disk of the workspace, not a memory file system.
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
