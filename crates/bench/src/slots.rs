//! The metrics of the store: GET, SET and INCR, durable writes, reads beside them, bytes per key, and the client.
//!
//! Owns the store's part of docs/performance.md in executable form. Every subject is a separate server on the same
//! disk with the same client. Redis runs three times: without an append-only file (`none`), with one that is synced
//! every second (`everysec`), and with one that is synced before every reply (`always`), the only one with the
//! durability of Moim.

mod client;
mod failover;
mod figures;
mod moving;
mod subjects;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tokio::runtime::Runtime;

use crate::judge::{Wanted, What, judge, machine_line};
use crate::load::{self, slots as loads};
use crate::report::{Aim, Metric, Report, Side};
use crate::slices::{Plan, Subject, alternate};
use loads::{Command as Doing, Load};
use subjects::{BesideSubject, LoadSubject};

/// Every metric of this suite. 22 is the client, 33 a failover, 34 a slot migration.
pub const METRICS: [u8; 8] = [8, 9, 10, 11, 14, 22, 33, 34];

/// Connections, the default of redis-benchmark.
const CLIENTS: usize = 50;

const READY_WITHIN: Duration = Duration::from_secs(60);

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers from [`METRICS`].
    pub metrics: Vec<u8>,
    /// Slices and pairs.
    pub plan: Plan,
    /// Our binary; `None` measures the peers and the client only.
    pub moim: Option<PathBuf>,
    /// A redis-server, or a compatible binary.
    pub redis: Option<PathBuf>,
    /// Data directory of the run.
    pub scratch: PathBuf,
    /// Keys of the memory test.
    pub keys: u64,
    /// Bytes to move in the slot migration test.
    pub moved_bytes: u64,
}

/// A running server.
pub(crate) struct Running {
    label: &'static str,
    durability: &'static str,
    child: Child,
    addr: SocketAddr,
    data: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail if the process has already exited, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.data);
    }
}

/// State shared by the metrics.
struct Bench<'a> {
    options: &'a Options,
    runtime: Runtime,
}

/// Runs the chosen metrics and reports. `progress` gets occasional lines.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    let mut report = Report { machine: machine_line(), ..Report::default() };
    if options.redis.is_none() {
        report.notes.push("Redis was not measured: there is no redis-server on this machine".into());
    }
    let bench = Bench { options, runtime: load::runtime()? };
    let wanted = |number: u8| options.metrics.contains(&number);
    if [8, 9, 10, 11].into_iter().any(wanted) {
        bench.rates(&wanted, &mut report, progress)?;
    }
    type Measure<'b> = fn(&Bench<'b>, &mut dyn FnMut(&str)) -> Result<Metric>;
    let singles: [(u8, Measure<'_>); 4] =
        [(14, figures::memory), (22, client::clients), (33, failover::failover), (34, moving::moving)];
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

impl Bench<'_> {
    fn rates(
        &self,
        wanted: &dyn Fn(u8) -> bool,
        report: &mut Report,
        progress: &mut dyn FnMut(&str),
    ) -> Result<()> {
        let mut running = Vec::new();
        if let Some(program) = &self.options.moim {
            progress("starting Moim");
            running.push(self.start_moim(program)?);
        }
        for kind in ["none", "everysec", "always"] {
            if let Some(program) = &self.options.redis {
                progress(&format!("starting Redis ({kind})"));
                running.push(self.start_redis(program, kind)?);
            }
        }
        for server in &running {
            self.runtime.block_on(loads::fill(server.addr, loads::KEYS))?;
        }
        for (number, command, depth) in [
            (8, Doing::Get, 16),
            (8, Doing::Set, 16),
            (8, Doing::Incr, 16),
            (9, Doing::Get, 1),
            (10, Doing::Set, 1),
            (10, Doing::Set, 16),
        ] {
            if wanted(number) {
                let load = Load { command, clients: CLIENTS, depth };
                report.metrics.push(self.measure_load(number, load, &running, progress)?);
            }
        }
        if wanted(11) {
            let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
            for server in running.iter().filter(|server| matches!(server.durability, "fsync" | "always")) {
                subjects.push(Box::new(BesideSubject { bench: self, server, clients: CLIENTS }));
            }
            let wanted = [Wanted("Moim", "Redis always", What::P99, Some(Aim::AtMost(0.6)))];
            let title = "GET by 25 clients beside durable SET by 25";
            report.metrics.push(self.measure(11, title, &running, subjects, &wanted, progress)?);
        }
        Ok(())
    }

    fn measure_load(
        &self,
        number: u8,
        load: Load,
        running: &[Running],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Metric> {
        let durable = number == 10;
        let mut subjects: Vec<Box<dyn Subject + '_>> = Vec::new();
        // Writes are compared with a durable append-only file; without one only where the aim says so.
        let takes_part = |server: &Running| match (number, server.durability) {
            (_, "fsync" | "none") => true,
            (8, "everysec") => load.command != Doing::Get,
            (10, "always") => true,
            _ => false,
        };
        for server in running.iter().filter(|server| takes_part(server)) {
            subjects.push(Box::new(LoadSubject { bench: self, server, load }));
        }
        let rate =
            |durable_deep: f64, plain: f64| Some(Aim::AtLeast(if durable { durable_deep } else { plain }));
        let wanted = match (number, load.command, load.depth) {
            (8, Doing::Get, _) => vec![
                Wanted("Moim", "Redis none", What::Rate, rate(0.0, 1.2)),
                Wanted("Moim", "Redis none", What::CpuPerOp, Some(Aim::AtMost(0.65))),
            ],
            (8, command, _) => vec![
                Wanted(
                    "Moim",
                    "Redis everysec",
                    What::Rate,
                    rate(0.0, if command == Doing::Set { 1.6 } else { 1.2 }),
                ),
                Wanted("Moim", "Redis everysec", What::CpuPerOp, Some(Aim::AtMost(0.65))),
            ],
            (9, _, _) => vec![
                Wanted("Moim", "Redis none", What::Rate, None),
                Wanted("Moim", "Redis none", What::CpuPerOp, Some(Aim::AtMost(0.85))),
            ],
            (_, _, 1) => vec![
                Wanted("Moim", "Redis always", What::Rate, rate(1.3, 0.0)),
                Wanted("Moim", "Redis always", What::P99, None),
                Wanted("Moim", "Redis always", What::CpuPerOp, None),
            ],
            _ => vec![
                Wanted("Moim", "Redis always", What::Rate, rate(2.2, 0.0)),
                Wanted("Moim", "Redis none", What::Rate, rate(1.0, 0.0)),
                Wanted("Moim", "Redis always", What::CpuPerOp, None),
            ],
        };
        let title = format!("{:?} at depth {}, {} clients", load.command, load.depth, load.clients);
        self.measure(number, &title, running, subjects, &wanted, progress)
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
        let watched: Vec<u32> = running.iter().map(|server| server.child.id()).collect();
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

    /// An empty directory, and a log file beside it for the server's output.
    fn folder(&self, name: &str) -> Result<(PathBuf, File)> {
        let data = self.options.scratch.join(format!("slots-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&data);
        fs::create_dir_all(&data)?;
        let log = File::create(data.with_extension("log")).context("log file")?;
        Ok((data, log))
    }

    fn start_moim(&self, program: &Path) -> Result<Running> {
        let (data, log) = self.folder("moim")?;
        let mut child = Command::new(program)
            .args([
                "serve",
                "--kafka-port",
                "0",
                "--redis-port",
                "0",
                "--etcd-port",
                "0",
                "--admin-port",
                "0",
            ])
            .args(["--peer-port", "0", "--data"])
            .arg(&data)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let stdout = child.stdout.take().context("stdout")?;
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut running = Running { label: "Moim", durability: "fsync", child, addr, data };
        let (sender, receiver) = sync_channel(1);
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
            // After the deadline the receiver is gone and the line is not needed.
            let _ = sender.send(lines.find(|line| line.starts_with("ready ")));
        });
        let line = receiver.recv_timeout(READY_WITHIN).ok().flatten().context("no ready line")?;
        let redis = line.split_whitespace().find_map(|word| word.strip_prefix("redis="));
        running.addr =
            redis.and_then(|text| text.parse().ok()).with_context(|| format!("no store in {line:?}"))?;
        Ok(running)
    }

    fn start_redis(&self, program: &Path, kind: &'static str) -> Result<Running> {
        let (data, log) = self.folder(kind)?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let (on, sync) = match kind {
            "none" => ("no", "everysec"),
            kind => ("yes", kind),
        };
        let child = Command::new(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", on])
            .args(["--appendfsync", sync, "--dir"])
            .arg(&data)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        let label = match kind {
            "none" => "Redis none",
            "everysec" => "Redis everysec",
            _ => "Redis always",
        };
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let running = Running { label, durability: kind, child, addr, data };
        let started = Instant::now();
        while !self.runtime.block_on(loads::ask(addr, &["PING"])).is_ok_and(|answer| answer == "+PONG") {
            if started.elapsed() > READY_WITHIN {
                bail!("Redis did not serve within {READY_WITHIN:?}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(running)
    }
}
