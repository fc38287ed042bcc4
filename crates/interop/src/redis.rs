//! A real Redis Cluster for comparison: six processes of Debian's redis-server, three primaries with one replica
//! each.
//!
//! Every node announces a proxy for its clients and its replicas ([`Net`]) and one for the cluster bus, so that any
//! node can be isolated from the others while clients still reach it.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::net::Net;
use crate::process::Process;
use crate::server::scratch;
use crate::wait::Deadline;

/// Number of servers; the first three become primaries.
pub const NODES: usize = 6;
/// `cluster-node-timeout`: short, so that tests are.
const NODE_TIMEOUT_MS: u32 = 1500;
const START_TIMEOUT: Duration = Duration::from_secs(40);

/// A running Redis Cluster.
pub struct RedisCluster {
    nodes: Vec<Node>,
    clients: Net,
    buses: Net,
    _dir: TempDir,
}

struct Node {
    port: u16,
    bus: u16,
    folder: PathBuf,
    process: Option<Process>,
}

impl RedisCluster {
    /// Starts a cluster; `None` if Redis is not installed.
    pub fn start() -> Result<Option<Self>> {
        if !["redis-server", "redis-cli"].iter().all(|name| on_path(name)) {
            return Ok(None);
        }
        let dir = scratch()?;
        let ports = free_ports(2 * NODES)?;
        let (clients, buses) = (Net::between(NODES)?, Net::between(NODES)?);
        let mut nodes = Vec::new();
        for (number, pair) in ports.chunks(2).enumerate() {
            let folder = dir.path().join(number.to_string());
            std::fs::create_dir_all(&folder)?;
            nodes.push(Node { port: pair[0], bus: pair[1], folder, process: None });
            clients.forward(number, &format!("127.0.0.1:{}", pair[0]));
            buses.forward(number, &format!("127.0.0.1:{}", pair[1]));
        }
        let mut cluster = Self { nodes, clients, buses, _dir: dir };
        for node in 0..NODES {
            cluster.restart(node)?;
        }
        cluster.form()?;
        Ok(Some(cluster))
    }

    fn form(&self) -> Result<()> {
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]);
        create.args((0..NODES).map(|node| format!("127.0.0.1:{}", self.nodes[node].port)));
        let output = create.args(["--cluster-replicas", "1", "--cluster-yes"]).output()?;
        if !output.status.success() {
            bail!("no cluster: {}", String::from_utf8_lossy(&output.stdout));
        }
        for node in 0..NODES {
            await_that("the cluster is formed", || {
                let links = self.cli(node, &["INFO", "replication"]);
                self.cli(node, &["CLUSTER", "INFO"]).contains("cluster_state:ok")
                    && (links.contains("master_link_status:up") || links.contains("state=online"))
            })?;
        }
        Ok(())
    }

    /// `HOST:PORT` that a node announces.
    pub fn address(&self, node: usize) -> String {
        self.clients.address(node)
    }

    /// The node behind this announced port.
    pub fn node_at(&self, port: u16) -> Option<usize> {
        (0..NODES).find(|node| self.address(*node).ends_with(&format!(":{port}")))
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self, node: usize) -> Result<()> {
        self.signal(node, Signal::KILL)?;
        let process = self.nodes[node].process.take();
        process.context("it does not run")?.wait(Duration::from_secs(10)).map(drop)
    }

    /// Sends SIGSTOP.
    pub fn pause(&self, node: usize) -> Result<()> {
        self.signal(node, Signal::STOP)
    }

    /// Sends SIGCONT.
    pub fn resume(&self, node: usize) -> Result<()> {
        self.signal(node, Signal::CONT)
    }

    fn signal(&self, node: usize, signal: Signal) -> Result<()> {
        self.nodes[node].process.as_ref().context("it does not run")?.signal(signal)
    }

    /// Starts or restarts a node.
    pub fn restart(&mut self, node: usize) -> Result<()> {
        let announced = |net: &Net| net.address(node).rsplit(':').next().unwrap_or_default().to_owned();
        let own = &mut self.nodes[node];
        let log = File::options().create(true).append(true).open(own.folder.join("log"))?;
        let mut command = Command::new("redis-server");
        command
            .args(["--bind", "127.0.0.1", "--port", &own.port.to_string()])
            .args(["--cluster-enabled", "yes", "--cluster-port", &own.bus.to_string()])
            .args(["--cluster-node-timeout", &NODE_TIMEOUT_MS.to_string()])
            .args(["--cluster-announce-ip", "127.0.0.1"])
            .args(["--cluster-announce-port", &announced(&self.clients)])
            .args(["--cluster-announce-bus-port", &announced(&self.buses)])
            .args([
                "--replica-announce-ip",
                "127.0.0.1",
                "--replica-announce-port",
                &announced(&self.clients),
            ])
            // The strongest single-node durability that Redis offers; and no delay before a full resync of a replica.
            .args(["--appendonly", "yes", "--save", "", "--repl-diskless-sync-delay", "0", "--dir"])
            .arg(&own.folder)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(Stdio::null());
        let process = Process::spawn(&mut command)?;
        self.clients.identify(node)(process.id());
        self.buses.identify(node)(process.id());
        own.process = Some(process);
        await_that("a server answers", || self.cli(node, &["PING"]).contains("PONG"))
    }

    /// Isolates a node from the others, in both directions.
    pub fn isolate(&self, node: usize) {
        self.clients.isolate(node);
        self.buses.isolate(node);
    }

    /// Heals all links.
    pub fn heal(&self, reset: bool) {
        self.clients.heal(reset);
        self.buses.heal(reset);
    }

    fn cli(&self, node: usize, args: &[&str]) -> String {
        let port = self.nodes[node].port.to_string();
        let output = Command::new("redis-cli").args(["-p", &port]).args(args).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    }

    /// The tails of all logs, for the message of a failed test.
    pub fn log_tails(&self) -> String {
        let mut text = String::new();
        for (number, node) in self.nodes.iter().enumerate() {
            let log = std::fs::read_to_string(node.folder.join("log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(10)..].join("\n");
            text.push_str(&format!("--- redis {number}\n{tail}\n"));
        }
        text
    }
}

fn await_that(what: &str, mut ask: impl FnMut() -> bool) -> Result<()> {
    let deadline = Deadline::after(START_TIMEOUT);
    while !ask() {
        if deadline.is_over() {
            bail!("timed out after {START_TIMEOUT:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(30));
    }
    Ok(())
}

fn free_ports(count: usize) -> Result<Vec<u16>> {
    let addresses = crate::cluster::free_addresses(count)?;
    addresses.iter().map(|address| Ok(address.rsplit(':').next().unwrap_or_default().parse()?)).collect()
}

fn on_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}
