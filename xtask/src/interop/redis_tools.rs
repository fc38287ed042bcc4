//! Redis's own tools on a live cluster: `redis-cli --cluster` checks it, moves slots and rebalances them while
//! `redis-benchmark --cluster` writes and reads.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

use super::{Bench, Protocol, Suite, SuiteError, capture, output_tail, require_tool};

/// Timeout of one command.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The output of redis-cli for a healthy cluster.
const COVERED: &str = "[OK] All 16384 slots covered.";

pub(super) fn suite() -> Suite {
    Suite { name: "redis-cli", protocol: Protocol::Redis, install: find, run, settings: &[] }
}

fn find(_: &Bench) -> Result<String, SuiteError> {
    require_tool("redis-benchmark")?;
    require_tool("redis-cli")?;
    let output = capture(Command::new("redis-cli").arg("--version"), TIMEOUT)?;
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(version.split_whitespace().nth(1).unwrap_or_default().to_owned())
}

/// Clients that write and read continuously; they are stopped with the suite at the latest.
struct Load {
    child: Child,
    said: File,
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Load {
    fn start(host: &str, port: &str) -> Result<Self, SuiteError> {
        let said = tempfile::tempfile().context("a file for its output")?;
        let child = Command::new("redis-benchmark")
            .args(["--cluster", "-h", host, "-p", port, "-t", "set,get"])
            .args(["-n", "300000", "-r", "20000", "-c", "12", "-P", "4", "-q"])
            .stdin(Stdio::null())
            .stdout(said.try_clone().context("its output")?)
            .stderr(said.try_clone().context("its errors")?)
            .spawn()
            .context("redis-benchmark")?;
        Ok(Self { child, said })
    }

    /// Waits for the exit; returns its failure.
    fn end(mut self) -> Result<(), String> {
        use std::io::{Read as _, Seek as _};
        let ended = self.child.wait().map_err(|error| error.to_string())?;
        let mut text = String::new();
        let read = self.said.rewind().and_then(|()| self.said.read_to_string(&mut text));
        read.map_err(|error| error.to_string())?;
        let wrong = text.lines().flat_map(|line| line.split('\r')).find(|line| line.contains("rror"));
        match (ended.success(), wrong) {
            (true, None) => Ok(()),
            (_, wrong) => Err(format!("redis-benchmark: {ended} {}", wrong.unwrap_or_default())),
        }
    }
}

/// Number of passed steps, and the failed one.
struct Steps<'a> {
    address: &'a str,
    passed: usize,
}

impl Steps<'_> {
    /// Runs `redis-cli --cluster WHAT`, which must succeed and print `says`.
    fn cluster(&mut self, what: &str, args: &[&str], says: &str) -> Result<(), SuiteError> {
        let mut command = Command::new("redis-cli");
        command.args(["--cluster", what, self.address]).args(args);
        let output = capture(&mut command, TIMEOUT)?;
        if !output.status.success() || !String::from_utf8_lossy(&output.stdout).contains(says) {
            return Err(self.failed(format!("{what}: {}", output_tail(&output))));
        }
        self.passed += 1;
        Ok(())
    }

    fn failed(&self, reason: String) -> SuiteError {
        SuiteError::Failed { passed: self.passed, reason }
    }
}

fn run(_: &Bench, addresses: &str) -> Result<usize, SuiteError> {
    let address = addresses.split(',').next().unwrap_or(addresses);
    let (host, port) = address.rsplit_once(':').unwrap_or((address, "6379"));
    let mut steps = Steps { address, passed: 0 };
    steps.cluster("check", &[], COVERED)?;
    steps.cluster("info", &[], "[OK]")?;
    let primaries = primaries(host, port)?;
    let [one, two, ..] = primaries.as_slice() else {
        // One node: no slot can be moved, but the load must succeed.
        let load = Load::start(host, port)?;
        load.end().map_err(|why| steps.failed(why))?;
        return Ok(steps.passed + 1);
    };
    let load = Load::start(host, port)?;
    let reshard = ["--cluster-from", one, "--cluster-to", two, "--cluster-slots", "150", "--cluster-yes"];
    steps.cluster("reshard", &reshard, "Moving slot")?;
    steps.cluster("check", &[], COVERED)?;
    steps.cluster("rebalance", &["--cluster-threshold", "1"], "Rebalancing")?;
    load.end().map_err(|why| steps.failed(why))?;
    steps.passed += 1;
    steps.cluster("check", &[], COVERED)?;
    steps.cluster("rebalance", &["--cluster-threshold", "1"], "No rebalancing needed")?;
    Ok(steps.passed)
}

/// The ids of the nodes that own slots.
fn primaries(host: &str, port: &str) -> Result<Vec<String>, SuiteError> {
    let output =
        capture(Command::new("redis-cli").args(["-h", host, "-p", port, "cluster", "nodes"]), TIMEOUT)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let id = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let owns = words.get(2)?.contains("master") && words.len() > 8;
        owns.then(|| words[0].to_owned())
    };
    Ok(text.lines().filter_map(id).collect())
}
