//! The metrics of coordination: puts, linearizable gets, watches, failover, and the queue as a noisy neighbour.
//!
//! Owns the coordination part of docs/performance.md in executable form. Every subject is a separate server that
//! syncs what it acknowledges, has its data on the same disk, and gets the same client. Metrics 12, 13 and 16
//! alternate slices; 14, 17 and 18 are single figures ([`figures`]).

mod figures;
mod subjects;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use moim_interop::Options as ServerOptions;
use moim_interop::cluster::{Cluster, RealEtcd};
use tokio::runtime::Runtime;

use crate::judge::{Wanted, What, judge, machine_line};
use crate::load::{self, coord as loads};
use crate::report::{Aim, Metric, Report, Side};
use crate::slices::{Plan, Subject, alternate};
use subjects::{GetSubject, PutSubject, WatchSubject};

/// Every metric of this suite.
pub const METRICS: [u8; 6] = [12, 13, 14, 16, 17, 18];

/// Watchers of the fan-out.
const WATCHERS: usize = 1000;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers from [`METRICS`].
    pub metrics: Vec<u8>,
    /// Slices and pairs.
    pub plan: Plan,
    /// Our binary.
    pub moim: PathBuf,
    /// Binaries of etcd to compare with.
    pub etcd: Vec<PathBuf>,
    /// Number of leader kills.
    pub failovers: usize,
}

/// A kind of server that can be started.
pub(crate) struct Maker<'a> {
    options: &'a Options,
    etcd: Option<&'a Path>,
    label: &'static str,
}

/// A running server or cluster.
pub(crate) struct Running {
    label: &'static str,
    cluster: Cluster,
}

impl Maker<'_> {
    fn start(&self, nodes: usize) -> Result<Running> {
        let cluster = match self.etcd {
            Some(program) => Cluster::etcd(&RealEtcd::Program(program.to_owned()), nodes, false),
            None => {
                let program = Some(self.options.moim.clone());
                let options = ServerOptions { program, ..ServerOptions::new() };
                Cluster::moim(nodes, &options, false)
            }
        };
        let cluster = cluster.with_context(|| format!("starting {}", self.label))?;
        Ok(Running { label: self.label, cluster })
    }
}

impl Running {
    fn addr(&self, node: usize) -> Result<SocketAddr> {
        self.cluster.endpoint(node).parse().context("the address of a server")
    }

    fn addrs(&self) -> Result<Vec<SocketAddr>> {
        (0..self.cluster.len()).map(|node| self.addr(node)).collect()
    }
}

/// State shared by the metrics.
struct Bench<'a> {
    options: &'a Options,
    runtime: Runtime,
    makers: Vec<Maker<'a>>,
}

/// Runs the chosen metrics and reports. `progress` gets occasional lines.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    let mut makers = vec![Maker { options, etcd: None, label: "Moim" }];
    for program in &options.etcd {
        makers.push(Maker { options, etcd: Some(program), label: version(program)? });
    }
    let mut report = Report { machine: machine_line(), ..Report::default() };
    if options.etcd.is_empty() {
        report.notes.push("etcd was not measured: there is none on this machine".into());
    }
    let bench = Bench { options, runtime: load::runtime()?, makers };
    let wanted = |number: u8| options.metrics.contains(&number);
    if [12, 13, 16].into_iter().any(wanted) {
        bench.rates(&wanted, &mut report, progress)?;
    }
    type Measure<'b> = fn(&Bench<'b>, &mut dyn FnMut(&str)) -> Result<Metric>;
    let singles: [(u8, Measure<'_>); 3] =
        [(14, figures::memory), (17, figures::failover), (18, figures::isolation)];
    for (number, measure) in singles {
        if wanted(number) {
            // A failed metric does not stop the others.
            match measure(&bench, progress) {
                Ok(metric) => report.metrics.push(metric),
                Err(why) => report.notes.push(format!("metric {number} was not taken: {why:#}")),
            }
        }
    }
    Ok(report)
}

/// `etcd 3.5` or `etcd 3.4`: the label of the subject in comparisons.
fn version(program: &Path) -> Result<&'static str> {
    let output = Command::new(program).arg("--version").output();
    let output = output.with_context(|| format!("running {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let known = [("3.4.", "etcd 3.4"), ("3.5.", "etcd 3.5"), ("3.6.", "etcd 3.6")];
    let found = known.iter().find(|(number, _)| text.contains(&format!("etcd Version: {number}")));
    found.map(|(_, label)| *label).with_context(|| format!("an etcd of an unknown version: {text:?}"))
}

impl Bench<'_> {
    fn rates(
        &self,
        wanted: &dyn Fn(u8) -> bool,
        report: &mut Report,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let mut running = Vec::new();
        for maker in &self.makers {
            progress(&format!("starting {}", maker.label));
            running.push(maker.start(1)?);
        }
        if wanted(12) {
            for clients in [1, 64, 256] {
                report.metrics.push(self.puts(&running, clients, progress)?);
            }
        }
        if wanted(13) {
            for server in &running {
                self.runtime.block_on(loads::fill(server.addr(0)?))?;
            }
            report.metrics.push(self.gets(&running, 64, progress)?);
        }
        if wanted(16) {
            report.metrics.push(self.watches(&running, progress)?);
        }
        Ok(())
    }

    fn puts(&self, running: &[Running], clients: usize, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
        for server in running {
            subjects.push(Box::new(PutSubject::new(self, server, clients)?));
        }
        let aims = (clients == 256).then_some((Aim::AtLeast(2.2), Aim::AtMost(0.4)));
        let wanted = [
            Wanted("Moim", "etcd 3.5", What::Rate, aims.map(|aims| aims.0)),
            Wanted("Moim", "etcd 3.5", What::P99, None),
            Wanted("Moim", "etcd 3.5", What::CpuPerOp, aims.map(|aims| aims.1)),
            Wanted("Moim", "etcd 3.4", What::Rate, None),
            Wanted("Moim", "etcd 3.4", What::CpuPerOp, None),
        ];
        let title = format!("puts of 256 bytes, {clients} client{}", if clients == 1 { "" } else { "s" });
        self.measure(12, &title, running, subjects, &wanted, progress)
    }

    fn gets(&self, running: &[Running], clients: usize, progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
        for server in running {
            subjects.push(Box::new(GetSubject::new(self, server, clients)?));
        }
        let wanted = [
            Wanted("Moim", "etcd 3.5", What::Rate, Some(Aim::AtLeast(3.3))),
            Wanted("Moim", "etcd 3.5", What::P99, None),
            Wanted("Moim", "etcd 3.5", What::CpuPerOp, None),
            Wanted("Moim", "etcd 3.4", What::Rate, None),
            Wanted("Moim", "etcd 3.4", What::CpuPerOp, None),
        ];
        self.measure(13, "linearizable gets, 64 clients", running, subjects, &wanted, progress)
    }

    fn watches(&self, running: &[Running], progress: &mut dyn FnMut(&str)) -> Result<Metric> {
        let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
        for server in running {
            subjects.push(Box::new(WatchSubject::new(self, server, WATCHERS)?));
        }
        let wanted = [
            Wanted("Moim", "etcd 3.5", What::P99, None),
            Wanted("Moim", "etcd 3.5", What::CpuPerOp, None),
            Wanted("Moim", "etcd 3.4", What::P99, None),
        ];
        let title = "one update each 100 ms seen by 1,000 watchers (aim: p99 20 ms)";
        self.measure(16, title, running, subjects, &wanted, progress)
    }

    /// Alternates the subjects and judges the outcome.
    fn measure(
        &self,
        number: u8,
        title: &str,
        running: &[Running],
        mut subjects: Vec<Box<dyn Subject + '_>>,
        wanted: &[Wanted],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Metric> {
        progress(&format!("metric {number}: {title}"));
        let watched: Vec<u32> = running.iter().flat_map(|server| server.cluster.pids()).collect();
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
}
