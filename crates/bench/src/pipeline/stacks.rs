//! The stacks under the pipeline: three nodes of Moim; or Kafka and a Redis Cluster, each with its own defaults,
//! replication factor 3 and one replica per shard; or the same two configured to sync what they acknowledge.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::load::{self, admin};
use crate::peers::{self, Server};

/// Durability of Kafka's and Redis's acknowledgements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Their defaults: Kafka writes to the page cache, Redis to its memory.
    Default,
    /// Everything is synced, as in Moim.
    Synced,
}

const REDIS_NODES: usize = 6;
const READY_WITHIN: Duration = Duration::from_secs(60);

/// A queue and a store.
pub(super) struct Stack {
    pub(super) label: &'static str,
    /// `host:port,…`
    pub(super) kafka: String,
    /// `host:port,…`
    pub(super) redis: String,
    /// Additional flags of the pipeline.
    pub(super) flags: &'static [&'static str],
    brokers: Vec<Server>,
    stores: Vec<RedisNode>,
}

impl Stack {
    pub(super) fn moim(binary: &Path, folder: &Path) -> Result<Self> {
        let brokers = peers::start_moim_cluster(binary, folder, 3)?;
        let redis: Option<Vec<String>> =
            brokers.iter().map(|server| server.redis.map(|address| address.to_string())).collect();
        let redis = redis.context("node reported no Redis address")?.join(",");
        Ok(Self { label: "Moim", kafka: kafka(&brokers), redis, flags: &[], brokers, stores: Vec::new() })
    }

    pub(super) fn real(scratch: &Path, redis: &Path, durability: Durability) -> Result<Self> {
        let home = scratch.join("kafka");
        peers::install_kafka(&home)?;
        let folder = scratch.join("pipeline");
        let serves = |addr| load::runtime().is_ok_and(|runtime| runtime.block_on(admin::serves(addr)));
        let (label, kafka_settings, redis_settings): (_, _, &[&str]) = match durability {
            Durability::Default => ("Kafka + Redis", "", &[]),
            Durability::Synced => (
                "Kafka + Redis, synced",
                "log.flush.interval.messages=1\n",
                &["--appendonly", "yes", "--appendfsync", "always"],
            ),
        };
        let brokers = peers::start_kafka_cluster(&home, &folder, 3, kafka_settings, &serves)?;
        let stores = start_redis(redis, redis_settings, &folder)?;
        let nodes: Vec<String> = stores.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        Ok(Self {
            label,
            kafka: kafka(&brokers),
            redis: nodes.join(","),
            flags: &["--ack-after-queue"],
            brokers,
            stores,
        })
    }

    /// Process ids of the servers.
    pub(super) fn pids(&self) -> Vec<u32> {
        self.brokers.iter().map(Server::pid).chain(self.stores.iter().map(|node| node.child.id())).collect()
    }

    /// Stops the servers, and keeps the name.
    pub(super) fn ended(mut self) -> Self {
        self.brokers.clear();
        self.stores.clear();
        self
    }
}

fn kafka(brokers: &[Server]) -> String {
    brokers.iter().map(|server| server.addr.to_string()).collect::<Vec<_>>().join(",")
}

/// A redis-server; stopped and its directory removed on drop.
struct RedisNode {
    child: Child,
    port: u16,
    data: PathBuf,
}

impl Drop for RedisNode {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.data);
    }
}

fn start_redis(program: &Path, settings: &[&str], folder: &Path) -> Result<Vec<RedisNode>> {
    let mut nodes = Vec::new();
    for at in 1..=REDIS_NODES {
        // The cluster bus listens on the port plus 10,000.
        let port = low_port()?;
        let data = folder.join(format!("redis-{at}"));
        fs::create_dir_all(&data)?;
        let log = File::create(data.join("log"))?;
        let child = Command::new(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--dir"])
            .arg(&data)
            .args(settings)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("starting redis-server")?;
        nodes.push(RedisNode { child, port, data });
    }
    let until = Instant::now() + READY_WITHIN;
    let ports: Vec<u16> = nodes.iter().map(|node| node.port).collect();
    wait(until, || ports.iter().all(|port| cli(*port, &["ping"]).is_ok_and(|said| said.contains("PONG"))))?;
    let mut create: Vec<String> = vec!["--cluster".into(), "create".into()];
    create.extend(ports.iter().map(|port| format!("127.0.0.1:{port}")));
    create.extend(["--cluster-replicas", "1", "--cluster-yes"].map(str::to_owned));
    let created =
        Command::new("redis-cli").args(&create).stdin(Stdio::null()).output().context("redis-cli")?;
    ensure!(
        created.status.success(),
        "making the Redis Cluster: {}",
        String::from_utf8_lossy(&created.stdout)
    );
    let joined = |port: &u16| {
        cli(*port, &["cluster", "info"]).is_ok_and(|said| said.contains("cluster_state:ok"))
            && cli(*port, &["cluster", "nodes"])
                .is_ok_and(|said| said.matches("slave").count() == REDIS_NODES / 2)
    };
    wait(until, || ports.iter().all(joined))?;
    Ok(nodes)
}

fn cli(port: u16, command: &[&str]) -> Result<String> {
    let output = Command::new("redis-cli").args(["-p", &port.to_string()]).args(command).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn wait(until: Instant, mut ready: impl FnMut() -> bool) -> Result<()> {
    while !ready() {
        if Instant::now() > until {
            bail!("the Redis Cluster was not ready within {READY_WITHIN:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// A free port whose port plus 10,000 is free as well.
fn low_port() -> Result<u16> {
    for _ in 0..200 {
        let port = fastrand::u16(10_000..22_000);
        let free = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        if free(port) && free(port + 10_000) {
            return Ok(port);
        }
    }
    bail!("no free port was found")
}
