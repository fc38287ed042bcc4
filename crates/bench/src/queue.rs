//! The metrics of the queue: the loads, the peers, and the aims.
//!
//! Owns the list of docs/performance.md in executable form: metrics 1-7 alternate slices between our broker, Kafka
//! and the limits of the machine ([`subjects`]); 14 and 15 are single figures about memory and start-up
//! ([`figures`]); 19 to 21 are about clusters ([`replicated`]). Both sides of a comparison get the same topic shape,
//! the same client and the same durability, which the report names.

mod figures;
mod replicated;
mod subjects;

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::runtime::Runtime;

use crate::judge::{Wanted, What, judge, machine_line};
use crate::load::{self, admin};
use crate::peers::{self, Server};
use crate::probes::floor::Keep;
use crate::probes::{self, Target};
use crate::report::{Aim, Metric, Report, Side};
use crate::slices::{Plan, Subject, alternate};
use subjects::{
    Ack, BlastSubject, EndToEndSubject, FetchSubject, FloorSubject, ProduceSubject, RawSubject, Shape,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Every metric of this suite.
pub const METRICS: [u8; 9] = [1, 2, 3, 4, 5, 6, 7, 14, 15];
pub use replicated::METRICS as REPLICATED_METRICS;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers from [`METRICS`].
    pub metrics: Vec<u8>,
    /// Slices and pairs.
    pub plan: Plan,
    /// True to compare with Kafka.
    pub with_kafka: bool,
    /// Our binary.
    pub moim: PathBuf,
    /// Directory of data, probes and Kafka's artifacts; on the disk under test.
    pub scratch: PathBuf,
    /// Partition count of the start-up test.
    pub many_partitions: usize,
}

/// Runs the chosen ones of [`REPLICATED_METRICS`] on clusters of `nodes` processes and reports.
pub fn run_replicated(options: &Options, nodes: usize, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    replicated::run(options, nodes, progress)
}

/// State shared by the metrics, with the running servers.
struct Bench<'a> {
    options: &'a Options,
    runtime: Runtime,
    /// Data directory of this run, removed at its end.
    folder: PathBuf,
    moim: Option<Server>,
    kafka: Option<Server>,
    topics: Cell<u32>,
}

/// Runs the chosen metrics and reports. `progress` gets occasional lines.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    let folder = options.scratch.join(format!("run-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let runtime = load::runtime()?;
    let mut bench = Bench { options, runtime, folder, moim: None, kafka: None, topics: Cell::new(0) };
    let mut report = Report { machine: machine_line(), ..Report::default() };
    let kafka_home = options.scratch.join("kafka");
    let mut kafka = options.with_kafka;
    if kafka && let Err(why) = peers::install_kafka(&kafka_home) {
        report.notes.push(format!("Kafka was not measured: {why:#}"));
        kafka = false;
    }
    let wanted = |number: u8| options.metrics.contains(&number);
    if (1..=7).any(wanted) {
        progress("starting moim");
        bench.moim = Some(bench.start_moim("moim")?);
        if kafka && [1, 2, 4, 5, 6, 7].into_iter().any(wanted) {
            progress("starting kafka");
            bench.kafka = Some(bench.start_kafka("kafka")?);
        }
        bench.rates(&wanted, &mut report, progress)?;
        bench.moim = None;
        bench.kafka = None;
    }
    if wanted(14) {
        report.metrics.push(figures::idle_memory(&bench, kafka, progress)?);
    }
    if wanted(15) {
        report.metrics.push(figures::starting(&bench, kafka, progress)?);
    }
    Ok(report)
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        self.moim = None;
        self.kafka = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Bench<'_> {
    fn start_moim(&self, name: &str) -> Result<Server> {
        peers::start_moim(&self.options.moim, &self.folder.join(name))
    }

    fn start_kafka(&self, name: &str) -> Result<Server> {
        let serves = |addr| self.runtime.block_on(admin::serves(addr));
        peers::start_kafka(&self.options.scratch.join("kafka"), &self.folder.join(name), &serves)
    }

    /// A topic name that is unique in this run.
    fn topic(&self) -> String {
        self.topics.set(self.topics.get() + 1);
        format!("bench-{}", self.topics.get())
    }

    fn rates(
        &self,
        wanted: &dyn Fn(u8) -> bool,
        report: &mut Report,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        type Measure<'b> = fn(&Bench<'b>, &mut dyn FnMut(&str)) -> Result<Metric>;
        let all: [(&[u8], Measure<'_>); 6] = [
            (&[1], Bench::produce_page_cache),
            (&[2], Bench::produce_small_fsync),
            (&[3], Bench::produce_large_fsync),
            (&[4], Bench::produce_latency),
            (&[5, 6], Bench::fetch_hot),
            (&[7], Bench::end_to_end),
        ];
        for (numbers, measure) in all {
            if numbers.iter().any(|number| wanted(*number)) {
                progress(&format!("metric {}", numbers[0]));
                report
                    .metrics
                    .push(measure(self, progress).with_context(|| format!("metric {}", numbers[0]))?);
            }
        }
        Ok(())
    }

    /// The brokers under one produce shape: ours first, Kafka if it runs.
    fn producers(&self, shape: &Shape) -> Vec<Box<dyn Subject + '_>> {
        let brokers = self.moim.iter().chain(&self.kafka);
        brokers.map(|server| Box::new(ProduceSubject::new(self, server, shape)) as Box<dyn Subject>).collect()
    }

    fn floor(&self, keep: Keep, shape: &Shape) -> Result<Box<dyn Subject + '_>> {
        Ok(Box::new(FloorSubject::new(self, keep, shape)?))
    }

    /// Alternates the subjects and judges the outcome.
    fn measure(
        &self,
        number: u8,
        title: &str,
        mut subjects: Vec<Box<dyn Subject + '_>>,
        wanted: &[Wanted],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Metric> {
        let watched: Vec<u32> = self.moim.iter().chain(&self.kafka).map(Server::pid).collect();
        let outcome = alternate(&self.options.plan, &mut subjects, &watched, progress)?;
        let labels: Vec<String> = subjects.iter().map(|subject| subject.label()).collect();
        let sides = subjects.iter().enumerate();
        let sides = sides.map(|(i, subject)| Side::of(&outcome, i, subject.label(), subject.durability()));
        Ok(Metric {
            number,
            title: title.into(),
            sides: sides.collect(),
            comparisons: judge(&outcome, &labels, wanted),
            figures: Vec::new(),
        })
    }

    fn produce_page_cache(&self, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let shape = Shape { partitions: 4, window: 4, batch_bytes: 64 * KIB, records: 64, ack: Ack::Written };
        let mut subjects = self.producers(&shape);
        let folder = self.folder.clone();
        subjects.push(Box::new(RawSubject::new(
            "crc32c + pwrite",
            "page cache, growing file",
            move |slice| probes::crc_and_write(&folder, 64 * KIB, slice),
        )));
        subjects.push(self.floor(Keep::PageCache, &shape)?);
        let wanted = [
            Wanted("Moim", "Kafka", What::Throughput, Some(Aim::AtLeast(2.0))),
            Wanted("Moim", "Kafka", What::CpuPerOp, None),
            Wanted("Moim", "crc32c + pwrite", What::Throughput, Some(Aim::AtLeast(0.7))),
            Wanted("Moim", "floor server", What::Throughput, None),
            Wanted("Moim", "floor server", What::CpuPerOp, None),
        ];
        self.measure(1, "produce, 4 partitions x 64 KiB batches", subjects, &wanted, progress)
    }

    fn produce_small_fsync(&self, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        const RAW: &str = "32 x 4 KiB pwrite + fdatasync";
        let shape = Shape { partitions: 32, window: 4, batch_bytes: 4 * KIB, records: 4, ack: Ack::Synced };
        let mut subjects = self.producers(&shape);
        let folder = self.folder.clone();
        subjects.push(Box::new(RawSubject::new(RAW, "fsync, prewritten file", move |slice| {
            probes::write_and_sync(&folder, Target::Recycled, 4 * KIB, 32, slice)
        })));
        subjects.push(self.floor(Keep::SyncShared, &shape)?);
        let wanted = [
            Wanted("Moim", "Kafka", What::Throughput, Some(Aim::AtLeast(10.0))),
            Wanted("Moim", "Kafka", What::CpuPerOp, None),
            Wanted("Moim", "floor server", What::Throughput, Some(Aim::AtLeast(0.8))),
            Wanted("Moim", "floor server", What::CpuPerOp, None),
            Wanted("Moim", RAW, What::Throughput, None),
        ];
        self.measure(2, "produce, 32 partitions x 4 KiB batches, fsync", subjects, &wanted, progress)
    }

    fn produce_large_fsync(&self, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        const GROWING: &str = "1 MB pwrite + fdatasync, growing";
        const RECYCLED: &str = "1 MB pwrite + fdatasync, recycled";
        let shape =
            Shape { partitions: 4, window: 2, batch_bytes: 1_000_000, records: 1000, ack: Ack::Synced };
        let moim = self.moim.as_ref().context("moim runs")?;
        let mut subjects: Vec<Box<dyn Subject + '_>> =
            vec![Box::new(ProduceSubject::new(self, moim, &shape))];
        for (label, target) in [(GROWING, Target::Growing), (RECYCLED, Target::Recycled)] {
            let folder = self.folder.clone();
            subjects.push(Box::new(RawSubject::new(label, "fsync", move |slice| {
                probes::write_and_sync(&folder, target, 1_000_000, 1, slice)
            })));
        }
        let wanted = [
            Wanted("Moim", GROWING, What::Throughput, Some(Aim::AtLeast(0.6))),
            Wanted("Moim", RECYCLED, What::Throughput, None),
        ];
        self.measure(3, "produce, 4 partitions x 1 MB batches, fsync", subjects, &wanted, progress)
    }

    fn produce_latency(&self, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let shape = Shape { partitions: 1, window: 1, batch_bytes: 4 * KIB, records: 4, ack: Ack::Synced };
        let mut subjects = self.producers(&shape);
        subjects.push(self.floor(Keep::SyncEach, &shape)?);
        let wanted = [
            Wanted("Moim", "floor server", What::P50, Some(Aim::AtMost(1.3))),
            Wanted("Moim", "Kafka", What::P50, None),
            Wanted("Moim", "Kafka", What::CpuPerOp, None),
        ];
        self.measure(4, "produce latency, one connection, 4 KiB, fsync", subjects, &wanted, progress)
    }

    fn fetch_hot(&self, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
        for server in self.moim.iter().chain(&self.kafka) {
            progress(&format!("filling {}", server.name()));
            subjects.push(Box::new(FetchSubject::fill(self, server, 2, 128 * MIB)?));
        }
        subjects.push(Box::new(BlastSubject::start(self, 256 * MIB as u64)?));
        let wanted = [
            Wanted("Moim", "Kafka", What::Throughput, Some(Aim::AtLeast(1.5))),
            Wanted("Moim", "Kafka", What::CpuPerGib, None),
            Wanted("Moim", "sendfile blast", What::Throughput, Some(Aim::AtLeast(0.85))),
            Wanted("Moim", "sendfile blast", What::CpuPerGib, Some(Aim::AtMost(1.2))),
        ];
        self.measure(5, "fetch 1 MiB, hot (metrics 5 and 6)", subjects, &wanted, progress)
    }

    fn end_to_end(&self, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
        for ack in [Ack::Written, Ack::Synced] {
            for server in self.moim.iter().chain(&self.kafka) {
                subjects.push(Box::new(EndToEndSubject::new(self, server, ack, Duration::from_millis(1))));
            }
        }
        let wanted = [
            Wanted("Moim", "Kafka", What::P99, Some(Aim::AtMost(0.2))),
            Wanted("Moim", "Kafka", What::P50, None),
            Wanted("Moim", "Kafka", What::CpuPerOp, None),
            Wanted("Moim, fsync", "Kafka, fsync", What::P99, Some(Aim::AtMost(0.2))),
            Wanted("Moim, fsync", "Kafka", What::P99, None),
        ];
        self.measure(7, "end to end, one record a millisecond, long poll", subjects, &wanted, progress)
    }
}
