//! `cargo xtask interop`: unmodified third-party clients, from their own package managers, against a fresh server.
//!
//! Everything is installed below `target/interop`, nothing on the machine. A client whose tools or packages are
//! unavailable is skipped with the reason; a client that fails is a failure of ours.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use moim_interop::cluster::Cluster;
use moim_interop::{Options, Server};
use serde::Serialize;

mod clients;
mod etcd;
mod librdkafka;
mod redis;
mod redis_tools;

/// What to run and how to show it.
#[derive(Args)]
pub(crate) struct InteropArgs {
    /// Run only these suites (by name; see the table)
    #[arg(long, value_name = "SUITE", value_delimiter = ',')]
    only: Vec<String>,
    /// Run against this broker instead of a fresh `moim serve`
    #[arg(long, value_name = "HOST:PORT")]
    kafka: Option<String>,
    /// Run against this etcd instead of three fresh nodes
    #[arg(long, value_name = "HOST:PORT,…")]
    etcd: Option<String>,
    /// Run against this Redis Cluster instead of three fresh nodes
    #[arg(long, value_name = "HOST:PORT,…")]
    redis: Option<String>,
    /// How many fresh nodes the clients of the queue meet
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "kafka")]
    nodes: usize,
    /// How many fresh nodes the clients of the store meet
    #[arg(long, value_name = "N", default_value_t = 3, conflicts_with = "redis")]
    redis_nodes: usize,
    /// Run these tests of librdkafka's suite instead of the allow-list (`0011,0103`, or `all`)
    #[arg(long, value_name = "TESTS", value_delimiter = ',')]
    rdkafka_tests: Vec<String>,
    /// How to print the results
    #[arg(short, long, value_enum, default_value = "table")]
    output: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Aligned columns for people
    Table,
    /// One JSON object
    Json,
}

/// Result of a suite.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Verdict {
    /// All steps passed.
    Pass,
    /// A step failed.
    Fail,
    /// The suite could not be run here.
    Skip,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    suite: String,
    version: String,
    verdict: Verdict,
    /// Number of passed steps or tests.
    passed: usize,
    seconds: f64,
    /// Reason of a failure or a skip; empty otherwise.
    reason: String,
}

/// Environment of a suite.
pub(crate) struct Bench {
    /// Workspace root.
    pub(crate) root: PathBuf,
    /// Installation directory.
    pub(crate) home: PathBuf,
    /// Address of an externally managed broker.
    kafka: Option<String>,
    /// Number of nodes of our cluster.
    nodes: usize,
    /// Number of nodes for the clients of the store.
    redis_nodes: usize,
    /// Addresses of an externally managed etcd.
    etcd: Option<String>,
    /// Addresses of an externally managed Redis Cluster.
    redis: Option<String>,
    /// Tests of librdkafka's suite to run instead of the allow-list.
    pub(crate) rdkafka_tests: Vec<String>,
}

/// Why a suite did not pass. A suite that cannot be installed is skipped, not failed.
#[derive(Debug)]
pub(crate) enum SuiteError {
    /// Not available on this machine.
    Missing(String),
    /// The suite ran and failed.
    Failed { passed: usize, reason: String },
}

impl From<anyhow::Error> for SuiteError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed { passed: 0, reason: format!("{error:#}") }
    }
}

/// The protocol of a suite.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// Kafka, on one node.
    Kafka,
    /// etcd, on three nodes, whose addresses it gets.
    Etcd,
    /// Redis Cluster, on three nodes, whose addresses it gets.
    Redis,
    /// Redis, on one node with all slots.
    RedisAlone,
}

/// A suite: how to install it (returns its version) and how to run it against an address (returns the number of
/// passed steps).
pub(crate) struct Suite {
    pub(crate) name: &'static str,
    pub(crate) protocol: Protocol,
    pub(crate) install: fn(&Bench) -> Result<String, SuiteError>,
    pub(crate) run: fn(&Bench, &str) -> Result<usize, SuiteError>,
    /// Server settings that this suite expects, as keys of `moim.toml`.
    pub(crate) settings: &'static [(&'static str, &'static str)],
}

/// Runs the suites; true if none failed.
#[allow(clippy::print_stdout)] // the table is the command's output
pub(crate) fn run(root: &Path, args: &InteropArgs) -> Result<bool> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let home = target.join("interop");
    std::fs::create_dir_all(&home).context("the folder for clients")?;
    let bench = Bench {
        root: root.to_path_buf(),
        home,
        kafka: args.kafka.clone(),
        nodes: args.nodes.max(1),
        redis_nodes: args.redis_nodes.max(1),
        etcd: args.etcd.clone(),
        redis: args.redis.clone(),
        rdkafka_tests: args.rdkafka_tests.clone(),
    };
    let suites = suites();
    if let Some(unknown) =
        args.only.iter().find(|name| !suites.iter().any(|suite| suite.name == name.as_str()))
    {
        let known: Vec<&str> = suites.iter().map(|suite| suite.name).collect();
        bail!("no suite `{unknown}`; there are: {}", known.join(", "));
    }
    let mut outcomes = Vec::new();
    for suite in
        suites.iter().filter(|suite| args.only.is_empty() || args.only.iter().any(|name| name == suite.name))
    {
        eprintln!("==> {}", suite.name);
        let outcome = run_one(&bench, suite);
        eprintln!("    {:?} {}", outcome.verdict, first_line(&outcome.reason));
        outcomes.push(outcome);
    }
    match args.output {
        Format::Table => print!("{}", table(&outcomes)),
        Format::Json => println!("{}", serde_json::to_string_pretty(&outcomes)?),
    }
    Ok(outcomes.iter().all(|outcome| outcome.verdict != Verdict::Fail))
}

fn suites() -> Vec<Suite> {
    let mut suites = clients::suites();
    suites.push(librdkafka::suite());
    suites.extend(etcd::suites());
    suites.extend(redis::suites());
    suites
}

#[allow(clippy::disallowed_methods)] // elapsed time for the user
fn run_one(bench: &Bench, suite: &Suite) -> Outcome {
    let start = Instant::now();
    let mut version = String::new();
    let result = (suite.install)(bench).and_then(|installed| {
        version = installed;
        match suite.protocol {
            Protocol::Kafka | Protocol::RedisAlone => on_server(bench, suite),
            Protocol::Etcd | Protocol::Redis => on_cluster(bench, suite),
        }
    });
    let (verdict, passed, reason) = match result {
        Ok(passed) => (Verdict::Pass, passed, String::new()),
        Err(SuiteError::Missing(reason)) => (Verdict::Skip, 0, reason),
        Err(SuiteError::Failed { passed, reason }) => (Verdict::Fail, passed, reason),
    };
    let seconds = (start.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    Outcome { suite: suite.name.to_owned(), version, verdict, passed, seconds, reason }
}

/// Runs a suite on its own server, so that suites do not affect each other.
fn on_server(bench: &Bench, suite: &Suite) -> Result<usize, SuiteError> {
    let alone = suite.protocol == Protocol::RedisAlone;
    if let Some(address) = if alone { &bench.redis } else { &bench.kafka } {
        return (suite.run)(bench, address);
    }
    let options = suite.settings.iter().fold(Options::new(), |options, (key, value)| options.set(key, value));
    if bench.nodes > 1 && !alone {
        let first = |cluster: &Cluster| cluster.server(0).map(|server| server.kafka().to_owned());
        return on_nodes(bench, suite, bench.nodes, &options, |cluster| first(cluster).unwrap_or_default());
    }
    let mut server = Server::start(options)?;
    let mut result = (suite.run)(bench, if alone { server.redis() } else { server.kafka() });
    if !server.is_running() {
        result = Err(SuiteError::Failed { passed: 0, reason: "the server ended".to_owned() });
    }
    if let Err(SuiteError::Failed { reason, .. }) = &mut result {
        let log = bench.home.join(format!("{}.server.log", suite.name));
        let _ = std::fs::write(&log, server.log_tail());
        reason.push_str(&format!("\n(the server's log: {})", log.display()));
    }
    result
}

/// Runs a suite on three nodes, or on the chosen number of nodes for the clients of the store.
fn on_cluster(bench: &Bench, suite: &Suite) -> Result<usize, SuiteError> {
    let is_redis = suite.protocol == Protocol::Redis;
    if let Some(addresses) = if is_redis { &bench.redis } else { &bench.etcd } {
        return (suite.run)(bench, addresses);
    }
    let nodes = if is_redis { bench.redis_nodes } else { 3 };
    let stores = |cluster: &Cluster| -> Vec<String> {
        (0..nodes).filter_map(|node| Some(cluster.server(node)?.redis().to_owned())).collect()
    };
    on_nodes(bench, suite, nodes, &Options::new(), |cluster| {
        if is_redis { stores(cluster) } else { cluster.endpoints() }.join(",")
    })
}

/// Runs a suite on fresh nodes, at the address returned by `address`.
fn on_nodes(
    bench: &Bench,
    suite: &Suite,
    nodes: usize,
    options: &Options,
    address: impl FnOnce(&Cluster) -> String,
) -> Result<usize, SuiteError> {
    let mut cluster = Cluster::moim(nodes, options, false)?;
    let mut result = (suite.run)(bench, &address(&cluster));
    if let Some(node) = (0..nodes).find(|node| !cluster.is_running(*node)) {
        result = Err(SuiteError::Failed { passed: 0, reason: format!("node {} ended", node + 1) });
    }
    if let Err(SuiteError::Failed { reason, .. }) = &mut result {
        let log = bench.home.join(format!("{}.server.log", suite.name));
        let _ = std::fs::write(&log, cluster.log_tails());
        reason.push_str(&format!("\n(the nodes' logs: {})", log.display()));
    }
    result
}

impl Bench {
    /// The directory of a suite.
    pub(crate) fn dir(&self, name: &str) -> Result<PathBuf, SuiteError> {
        let dir = self.home.join(name);
        std::fs::create_dir_all(&dir).with_context(|| format!("the folder {}", dir.display()))?;
        Ok(dir)
    }

    /// The directory of our test programs for a language.
    pub(crate) fn programs(&self, language: &str) -> PathBuf {
        self.root.join("crates/interop/clients").join(language)
    }

    /// Copies a test program's files into the suite's directory, so that nothing is written to the sources.
    pub(crate) fn copy(&self, language: &str, to: &Path) -> Result<(), SuiteError> {
        let from = self.programs(language);
        for entry in std::fs::read_dir(&from).with_context(|| format!("{} is missing", from.display()))? {
            let path = entry.context("a file")?.path();
            if let (true, Some(name)) = (path.is_file(), path.file_name()) {
                std::fs::copy(&path, to.join(name)).context("a program was not copied")?;
            }
        }
        Ok(())
    }
}

/// Checks that a tool is on the path.
pub(crate) fn require_tool(tool: &str) -> Result<(), SuiteError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    match std::env::split_paths(&path).any(|dir| dir.join(tool).is_file()) {
        true => Ok(()),
        false => Err(SuiteError::Missing(format!("{tool} is not installed"))),
    }
}

/// Runs an installation command; if it fails, the suite is skipped with the last lines of its output.
pub(crate) fn install(command: &mut Command) -> Result<(), SuiteError> {
    let output = capture(command, Duration::from_secs(900))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(SuiteError::Missing(format!("{}: {}", name_of(command), output_tail(&output)))),
    }
}

/// Runs a test program and counts the steps it reports.
pub(crate) fn check(command: &mut Command) -> Result<usize, SuiteError> {
    let output = capture(command, Duration::from_secs(300))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let passed = stdout.lines().filter(|line| line.starts_with("ok ")).count();
    match output.status.success() {
        true if passed > 0 => Ok(passed),
        true => Err(SuiteError::Failed { passed, reason: "it did nothing".to_owned() }),
        false => Err(SuiteError::Failed { passed, reason: output_tail(&output) }),
    }
}

/// Runs a command to completion, or kills it after its timeout.
#[allow(clippy::disallowed_methods)] // real processes, real time
pub(crate) fn capture(command: &mut Command, patience: Duration) -> Result<Output, SuiteError> {
    let log = tempfile::tempfile().context("a file for its output")?;
    let errors = tempfile::tempfile().context("a file for its errors")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("its output")?)
        .stderr(errors.try_clone().context("its errors")?)
        .spawn()
        .map_err(|error| SuiteError::Missing(format!("{}: {error}", name_of(command))))?;
    let deadline = Instant::now() + patience;
    let status = loop {
        if let Some(status) = child.try_wait().context("its end")? {
            break status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let reason = format!("{} did not end within {} s", name_of(command), patience.as_secs());
            return Err(SuiteError::Failed { passed: 0, reason });
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    Ok(Output { status, stdout: contents(log)?, stderr: contents(errors)? })
}

fn contents(mut file: std::fs::File) -> Result<Vec<u8>, SuiteError> {
    use std::io::{Read, Seek};
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).context("its output")?;
    Ok(bytes)
}

fn name_of(command: &Command) -> String {
    Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The last lines of a program's output, stderr first.
pub(crate) fn output_tail(output: &Output) -> String {
    let text = [&output.stderr, &output.stdout]
        .into_iter()
        .map(|bytes| String::from_utf8_lossy(bytes).trim().to_owned())
        .find(|text| !text.is_empty())
        .unwrap_or_else(|| output.status.to_string());
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(6)..].join("\n")
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn table(outcomes: &[Outcome]) -> String {
    let heading = ["suite", "version", "result", "passed", "seconds", "reason"].map(str::to_owned);
    let mut rows = vec![heading];
    for outcome in outcomes {
        rows.push([
            outcome.suite.clone(),
            outcome.version.clone(),
            format!("{:?}", outcome.verdict).to_uppercase(),
            outcome.passed.to_string(),
            format!("{:.1}", outcome.seconds),
            outcome.reason.lines().next_back().filter(|line| !line.starts_with('(')).map_or_else(
                || outcome.reason.lines().rev().nth(1).unwrap_or_default().to_owned(),
                str::to_owned,
            ),
        ]);
    }
    let mut widths = [0; 6];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(verdict: Verdict, reason: &str) -> Outcome {
        Outcome {
            suite: "kcat".into(),
            version: "1.7".into(),
            verdict,
            passed: 3,
            seconds: 1.25,
            reason: reason.into(),
        }
    }

    #[test]
    fn table_columns_are_aligned() {
        let text = table(&[
            outcome(Verdict::Pass, ""),
            outcome(Verdict::Fail, "first\nlast\n(the server's log: x)"),
        ]);
        assert_eq!(
            text,
            "suite  version  result  passed  seconds  reason\n\
             kcat   1.7      PASS    3       1.2\n\
             kcat   1.7      FAIL    3       1.2      last\n"
        );
    }

    #[test]
    fn program_without_output_has_not_passed() {
        let Err(SuiteError::Failed { .. }) = check(&mut Command::new("true")) else { panic!("passed") };
        let Ok(2) = check(Command::new("printf").arg("ok a\nok b\n")) else { panic!("two steps") };
        let Err(SuiteError::Failed { passed: 1, reason }) =
            check(Command::new("sh").args(["-c", "echo ok a; echo wrong >&2; exit 3"]))
        else {
            panic!("passed")
        };
        assert_eq!(reason, "wrong");
    }

    #[test]
    fn uninstalled_tool_is_missing() {
        assert!(matches!(require_tool("no-such-tool-at-all"), Err(SuiteError::Missing(_))));
        assert!(matches!(install(&mut Command::new("false")), Err(SuiteError::Missing(_))));
        assert!(require_tool("sh").is_ok());
    }
}
