//! A load: workers that repeat one operation until the time is over, and the measurement.
//!
//! Without a rate each worker begins when its last operation is done. With one, each operation has a moment at which it is
//! due, and its time counts from there: a server that stands still is not flattered by a load that waits for it.
//! A transient error is tolerated and counted; an outage that lasts ends the load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use hdrhistogram::Histogram;
use moim_kafka_client::{BACKOFF, OutageTolerance};
use serde::Serialize;
use tokio::time::Instant;

use crate::cmd::pipeline::live::grouped;
use crate::exit::{Failure, Outcome};
use crate::output::{Report, Section};
use crate::target::duration;

/// The flags of every load.
#[derive(Clone, Debug, Args)]
pub(super) struct LoadArgs {
    /// How long each phase lasts
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    pub(super) duration: Duration,
    /// At most so many operations a second, of all clients [default: as many as are answered]
    #[arg(long, value_name = "N", value_parser = rate)]
    pub(super) rate: Option<f64>,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| rate.is_finite() && *rate > 0.0);
    rate.ok_or_else(|| "must be a number above 0".to_owned())
}

/// Set by a signal: the load ends.
#[derive(Clone, Debug, Default)]
pub(super) struct Stop {
    stopped: Arc<AtomicBool>,
}

impl Stop {
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

/// One phase of a load.
pub(super) struct Phase<'a> {
    stop: &'a Stop,
    until: Instant,
    /// Between two operations of one worker.
    gap: Option<Duration>,
    /// How long servers may be unavailable.
    outage_limit: Duration,
}

impl<'a> Phase<'a> {
    /// Begins now. `each` is how many operations a worker does at a time.
    pub(super) fn begin(args: &LoadArgs, stop: &'a Stop, workers: usize, each: u64, away: Duration) -> Self {
        let gap = args.rate.map(|rate| Duration::from_secs_f64(workers as f64 * each as f64 / rate));
        Self { stop, until: Instant::now() + args.duration, gap, outage_limit: away }
    }

    /// One worker's share: `work` gets the number of the operation and answers what it has done.
    pub(super) async fn repeat(&self, mut work: impl AsyncFnMut(u64) -> Outcome<Done>) -> Outcome<Tally> {
        let mut tally = Tally::new()?;
        let mut outage = OutageTolerance::default();
        // Workers that all begin at once would all come at once ever after.
        let mut due = Instant::now() + self.gap.unwrap_or_default().mul_f64(fastrand::f64());
        for number in 0.. {
            if self.gap.is_some() {
                tokio::time::sleep_until(due.min(self.until)).await;
            }
            if Instant::now() >= self.until || self.stop.is_stopped() {
                break;
            }
            let began = if self.gap.is_some() { due } else { Instant::now() };
            match outage.tolerate(work(number).await, self.outage_limit)? {
                Some(done) => tally.count(done, began.elapsed()),
                None => {
                    tally.failed += 1;
                    tokio::time::sleep(BACKOFF).await;
                }
            }
            due += self.gap.unwrap_or_default();
        }
        Ok(tally)
    }
}

/// The work of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) operations: u64,
    pub(super) bytes: usize,
}

/// The measurement of one worker.
pub(super) struct Tally {
    pub(super) operations: u64,
    pub(super) bytes: u64,
    pub(super) failed: u64,
    took: Histogram<u64>,
}

impl Tally {
    pub(super) fn new() -> Outcome<Self> {
        // Microseconds, to three digits.
        let took = Histogram::new(3).map_err(|error| Failure::error(error.to_string()))?;
        Ok(Self { operations: 0, bytes: 0, failed: 0, took })
    }

    pub(super) fn count(&mut self, done: Done, took: Duration) {
        self.operations += done.operations;
        self.bytes += done.bytes as u64;
        // A histogram that grows takes every number; should it not, the operation still counts.
        let _ = self.took.record(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
    }
}

/// Runs workers to their end and adds up what they did.
pub(super) async fn together<F: Future<Output = Outcome<Tally>>>(
    name: &'static str,
    workers: impl IntoIterator<Item = F>,
) -> Outcome<Figures> {
    let began = Instant::now();
    let all = futures_util::future::try_join_all(workers).await?;
    let seconds = began.elapsed().as_secs_f64();
    let mut sum = Tally::new()?;
    for tally in all {
        sum.operations += tally.operations;
        sum.bytes += tally.bytes;
        sum.failed += tally.failed;
        sum.took.add(&tally.took).map_err(|error| Failure::error(error.to_string()))?;
    }
    Ok(Figures::of(name, &sum, seconds))
}

/// The measurement of a phase.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Figures {
    pub(super) phase: &'static str,
    pub(super) operations: u64,
    /// Given up because no server answered; not among the operations.
    pub(super) failed: u64,
    pub(super) seconds: f64,
    pub(super) operations_per_second: f64,
    pub(super) bytes_per_second: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) p999_ms: f64,
    pub(super) max_ms: f64,
}

impl Figures {
    fn of(phase: &'static str, tally: &Tally, seconds: f64) -> Self {
        let per_second = |n: u64| n as f64 / seconds.max(1e-9);
        let ms = |quantile: f64| tally.took.value_at_quantile(quantile) as f64 / 1e3;
        Self {
            phase,
            operations: tally.operations,
            failed: tally.failed,
            seconds,
            operations_per_second: per_second(tally.operations),
            bytes_per_second: per_second(tally.bytes),
            p50_ms: ms(0.5),
            p99_ms: ms(0.99),
            p999_ms: ms(0.999),
            max_ms: ms(1.0),
        }
    }
}

/// The report of a load.
#[derive(Debug, Serialize)]
pub(super) struct Measured {
    /// `queue`, `slots` or `coord`.
    pub(super) bench: &'static str,
    pub(super) servers: String,
    pub(super) clients: usize,
    pub(super) phases: Vec<Figures>,
}

impl Report for Measured {
    fn sections(&self) -> Vec<Section> {
        let columns = [
            "PHASE",
            ">OPERATIONS",
            ">FAILED",
            ">SECONDS",
            ">PER SECOND",
            ">MB/S",
            ">P50 MS",
            ">P99 MS",
            ">P99.9 MS",
            ">LONGEST MS",
        ];
        let mut table = Section::new(&columns);
        for figures in &self.phases {
            let ms = |ms: f64| format!("{ms:.2}");
            table.row(vec![
                figures.phase.to_owned(),
                grouped(figures.operations),
                grouped(figures.failed),
                format!("{:.1}", figures.seconds),
                grouped(figures.operations_per_second as u64),
                format!("{:.1}", figures.bytes_per_second / 1e6),
                ms(figures.p50_ms),
                ms(figures.p99_ms),
                ms(figures.p999_ms),
                ms(figures.max_ms),
            ]);
        }
        vec![table]
    }
}

/// A name nothing else has: what a load makes begins with it.
pub(super) fn unique() -> String {
    format!("moim-bench-{:08x}", fastrand::u32(..))
}

/// So many bytes that do not pack well.
pub(super) fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Status;

    fn args(rate: Option<f64>) -> LoadArgs {
        LoadArgs { duration: Duration::from_secs(10), rate }
    }

    async fn done(_: u64) -> Outcome<Done> {
        Ok(Done { operations: 2, bytes: 10 })
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_is_kept_and_a_slow_answer_makes_the_next_ones_late() {
        let stop = Stop::default();
        let phase = Phase::begin(&args(Some(100.0)), &stop, 1, 2, Duration::ZERO);
        let slow = async |number: u64| {
            if number == 0 {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            done(number).await
        };
        let figures = together("x", [phase.repeat(slow)]).await.unwrap();
        assert!((990..=1_000).contains(&figures.operations), "{figures:?}");
        assert!(figures.max_ms >= 999.0, "{figures:?}");
        // Those that were due while it stood still waited for it, and their wait counts.
        assert!(figures.p99_ms > 900.0, "{figures:?}");
        assert!(figures.p50_ms < 5.0, "{figures:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_away_for_a_moment_is_counted_and_one_that_stays_away_ends_the_load() {
        let stop = Stop::default();
        let away = || Err(Failure::new(Status::Unreachable, "away"));
        let phase = Phase::begin(&args(Some(10.0)), &stop, 1, 1, Duration::from_secs(3));
        let blinks = async |n: u64| if (10..20).contains(&n) { away() } else { done(n).await };
        let tally = phase.repeat(blinks).await.unwrap();
        assert_eq!(tally.failed, 10);
        let phase = Phase::begin(&args(Some(10.0)), &stop, 1, 1, Duration::from_secs(3));
        let gone = phase.repeat(async |n: u64| if n > 10 { away() } else { done(n).await }).await;
        assert_eq!(gone.err().map(|failure| failure.status), Some(Status::Unreachable));
    }

    #[tokio::test(start_paused = true)]
    async fn a_load_that_is_stopped_ends_early_and_says_what_it_did() {
        let stop = Stop::default();
        let phase = Phase::begin(&args(Some(10.0)), &stop, 1, 1, Duration::ZERO);
        let stopping = async |n: u64| {
            if n == 4 {
                stop.stop();
            }
            done(n).await
        };
        let figures = together("x", [phase.repeat(stopping)]).await.unwrap();
        assert_eq!(figures.operations, 10);
        assert!(figures.seconds < 1.0, "{figures:?}");
    }
}
