//! The metrics of the cluster library: a routing table pushed to 1,500 subscribers, the cost of each, all of them
//! reconnecting at once, the plan for 100,000 partitions, and the detection time of a killed member.
//!
//! Owns the cluster part of docs/performance.md in executable form. Store and manager are separate processes of the
//! release binary; subscribers speak the manager's protocol over one connection each ([`subscribers`]) and hold no table,
//! because 1,500 of them in one process would measure that process. There is no peer to compare with: every figure
//! has its own aim.

mod single;
mod subscribers;

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use moim_base::task::{Scope, Shutdown};
use moim_cluster::etcd::EtcdOptions;
use moim_cluster::registry::{ServerInfo, nodes_prefix};
use moim_cluster::routing::{RouteEntry, RoutingTable, RoutingTableStore, Saved};
use moim_cluster::{Context, EtcdClient, EtcdRepository, Txn};
use moim_interop::Options as ServerOptions;
use moim_interop::cluster::Cluster;

use crate::judge::machine_line;
use crate::report::Report;

pub use single::member;

/// Every metric of this suite.
pub const METRICS: [u8; 5] = [28, 29, 30, 31, 32];

/// Namespace of the table.
const NAMESPACE: &str = "bench";
/// Lease TTL of the simulated servers.
const LEASE: Duration = Duration::from_secs(20);

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers from [`METRICS`].
    pub metrics: Vec<u8>,
    /// Our binary.
    pub moim: PathBuf,
    /// A program and its arguments that runs [`member`]; the address of the store is appended.
    pub member: Vec<String>,
    /// Number of simulated servers.
    pub servers: usize,
    /// Number of simulated SDKs.
    pub sdks: usize,
    /// Partition count of the table.
    pub partitions: usize,
    /// Number of pushed changes, and of kills.
    pub rounds: usize,
}

/// Runs the chosen metrics and reports. `progress` gets occasional lines.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report> {
    let mut report = Report { machine: machine_line(), ..Report::default() };
    let wanted = |number: u8| options.metrics.contains(&number);
    let runtime = crate::load::runtime()?;
    if [28, 29, 30].into_iter().any(wanted) {
        let taken = runtime.block_on(subscribers::run(options, progress))?;
        report.metrics.extend(taken.into_iter().filter(|metric| wanted(metric.number)));
    }
    if wanted(31) {
        progress("metric 31: the plan");
        report.metrics.push(single::plans(options)?);
    }
    if wanted(32) {
        report.metrics.push(runtime.block_on(single::detection(options, progress))?);
    }
    Ok(report)
}

/// Starts a store of one node.
fn store(options: &Options) -> Result<Cluster> {
    let program = Some(options.moim.clone());
    Cluster::moim(1, &ServerOptions { program, ..ServerOptions::new() }, false).context("starting the store")
}

/// A client of the store, as applications use it.
fn context(etcd: &str, node: &str) -> (Context, Scope) {
    let scope = Scope::new(Shutdown::new());
    let client = EtcdClient::new(EtcdOptions::new([etcd]), &scope);
    let context = Context::new(node, Arc::new(EtcdRepository::new(client, "")), &scope);
    (context, scope)
}

/// A child process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A manager in a separate process.
struct Manager {
    process: Running,
    address: SocketAddr,
}

impl Manager {
    fn start(options: &Options, etcd: &str) -> Result<Self> {
        let mut child = Command::new(&options.moim)
            .args(["manager", "--namespace", NAMESPACE, "--port", "0", "--etcd", etcd])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("starting the manager")?;
        let out = child.stdout.take().context("the manager's output")?;
        let process = Running(child);
        let mut ready = String::new();
        BufReader::new(out).read_line(&mut ready)?;
        let address = ready.trim().rsplit_once("manager=").context("the manager's ready line")?.1;
        Ok(Self { process, address: address.parse().context("the manager's address")? })
    }

    fn pid(&self) -> u32 {
        self.process.0.id()
    }
}

/// The name of a simulated server.
fn server(number: usize) -> String {
    format!("server-{number:04}")
}

fn partition(number: usize) -> String {
    format!("part-{number:06}")
}

/// The complete table, with every server's share.
fn table(options: &Options) -> Result<RoutingTable> {
    let count = options.partitions;
    let bound =
        |at: usize| if at == 0 || at == count { String::new() } else { format!("user:{:09}", at * 1_000) };
    let entry = |at: usize| {
        let owner = at % options.servers;
        RouteEntry {
            partition_id: partition(at),
            key_range_start: bound(at),
            key_range_end: bound(at + 1),
            node_id: server(owner),
            node_address: address(owner),
            node_status: 1,
        }
    };
    Ok(RoutingTable::new(1, (0..count).map(entry).collect())?)
}

fn address(number: usize) -> String {
    format!("10.0.{}.{}:7000", number / 250, number % 250)
}

/// Saves the table and registers the servers, under one lease that is kept alive until the scope stops.
async fn fill(options: &Options, context: &Context) -> Result<Saved> {
    let store = RoutingTableStore::new(context, NAMESPACE);
    let saved = store.save(&Saved::default(), table(options)?, Vec::new(), None).await?;
    let repository = Arc::clone(&context.repository);
    let lease = repository.grant(LEASE).await?;
    let prefix = nodes_prefix(NAMESPACE);
    let numbers: Vec<usize> = (0..options.servers).collect();
    for some in numbers.chunks(100) {
        let txn = some.iter().try_fold(Txn::new(), |txn, number| {
            let info = ServerInfo { id: server(*number), address: address(*number), ..ServerInfo::default() };
            let value = serde_json::to_vec(&info)?;
            anyhow::Ok(txn.put_leased(format!("{prefix}{}", info.id), value, lease.id))
        })?;
        repository.txn(txn).await?;
    }
    let stop = context.scope.shutdown().clone();
    context.scope.spawn("servers' lease", async move {
        let keep = async {
            loop {
                tokio::time::sleep(LEASE / 4).await;
                // A failed keep-alive is followed by another, long before the lease expires.
                let _ = repository.keep_alive(lease.id).await;
            }
        };
        tokio::select! {
            () = stop.stopped() => {}
            () = keep => {}
        }
    });
    ensure!(saved.table.entries().len() == options.partitions, "the table is whole");
    Ok(saved)
}
