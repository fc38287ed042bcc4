//! The command line: nouns, verbs and flags, and nothing they do.
//!
//! Every verb's help ends with an example, and a test parses each of them. Flags that name layers which
//! are not built yet are understood, so that one script fits all versions, and refused in plain words.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::cmd::bench::BenchArgs;
use crate::cmd::cluster::ClusterArgs;
use crate::cmd::coord::CoordArgs;
use crate::cmd::demo::DemoArgs;
use crate::cmd::dev::DevArgs;
use crate::cmd::group::GroupArgs;
use crate::cmd::lock::{ElectArgs, LockArgs};
use crate::cmd::manager::ManagerArgs;
use crate::cmd::pipeline::PipelineArgs;
use crate::cmd::routing::RoutingArgs;
use crate::cmd::slots::SlotsArgs;
use crate::cmd::topic::TopicArgs;
use crate::config::layers::FlagValue;
use crate::exit::{Failure, Outcome};
use crate::output::Format;

/// A queue that speaks Kafka, a store that speaks Redis Cluster and a coordination core that speaks etcd, in one binary
#[derive(Debug, Parser)]
#[command(
    name = "moim",
    version,
    propagate_version = false,
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(after_help = "Example:
  moim serve                                # a node on 127.0.0.1:9092
  echo hello | moim topic produce greetings
  moim topic consume greetings -e")]
pub(crate) struct Cli {
    /// How to print: aligned columns or JSON
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "table|json")]
    #[arg(hide_possible_values = true, hide_default_value = true)]
    pub(crate) output: Format,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// See it work: three nodes, a load, a kill, and a verdict
    Demo(DemoArgs),
    /// Run a node
    Serve(Box<ServeArgs>),
    /// Run a cluster of several nodes on this machine
    Dev(Box<DevArgs>),
    /// Look at the cluster and change its nodes
    Cluster(ClusterArgs),
    /// Create, inspect, change, read and write topics
    Topic(TopicArgs),
    /// Inspect and move consumer groups
    Group(GroupArgs),
    /// Read, write and watch keys of the coordination core, or of an etcd
    Coord(CoordArgs),
    /// Run the exactly-once pipeline, its load and its verifier
    Pipeline(Box<PipelineArgs>),
    /// Put a load on a cluster and measure it
    Bench(Box<BenchArgs>),
    /// Run a command while a lock is held
    Lock(LockArgs),
    /// Run a command while leading
    Elect(ElectArgs),
    /// Run a partition manager: keeps a routing table and pushes it to servers and SDKs
    Manager(Box<ManagerArgs>),
    /// The slots of the store: who owns them, and moving them
    Slots(SlotsArgs),
    /// Look at a routing table and change it
    Routing(RoutingArgs),
    /// Check and show the configuration of a node
    Config(ConfigArgs),
    /// Print a completion script for a shell
    #[command(
        after_help = "Example:\n  moim completion bash > ~/.local/share/bash-completion/completions/moim"
    )]
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Print the version
    #[command(after_help = "Example:\n  moim version -o json")]
    Version,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) verb: ConfigVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigVerb {
    /// Say whether the configuration is right; status 2 when it is not
    #[command(after_help = "Example:\n  moim config check --config moim.toml")]
    Check(Box<ServeArgs>),
    /// Print every key, its value, and where the value comes from
    #[command(after_help = "Example:\n  MOIM__LOG__RETENTION_MS=1h moim config show --kafka-port 19092")]
    Show(Box<ServeArgs>),
}

/// The flags of a node. Each beats the environment, which beats the file.
#[derive(Clone, Debug, Default, Args)]
#[command(after_help = "Example:
  moim serve --data /var/lib/moim --kafka-port 9092
  moim serve --data /tmp/scratch --kafka-port 0 --redis-port 0 --etcd-port 0 --peer-port 0 --admin-port 0
  moim serve --node-id 1 --initial-cluster 1=10.0.0.1:9645,2=10.0.0.2:9645,3=10.0.0.3:9645
  moim serve --node-id 4 --join 10.0.0.1:9645

The one line on stdout is `ready node=… cluster=… kafka=… redis=… etcd=… admin=… peer=…`; logs go to stderr.
Every key of moim.toml can be set as MOIM__SECTION__KEY; `moim config show` lists them.")]
pub(crate) struct ServeArgs {
    /// Configuration file [default: moim.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The stable number of this node; Kafka clients see it as the broker id [default: 1]
    #[arg(long, value_name = "N")]
    node_id: Option<i32>,
    /// Data folder [default: .moim/data]
    #[arg(long, value_name = "DIR")]
    data: Option<String>,
    /// Address all listeners bind to [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    host: Option<String>,
    /// Port of the Kafka protocol; 0 picks a free one [default: 9092]
    #[arg(long, value_name = "PORT")]
    kafka_port: Option<u16>,
    /// Port of health, metrics and the admin API; 0 picks a free one [default: 9644]
    #[arg(long, value_name = "PORT")]
    admin_port: Option<u16>,
    /// Port of the etcd protocol; 0 picks a free one [default: 2379]
    #[arg(long, value_name = "PORT")]
    etcd_port: Option<u16>,
    /// Port of the Redis protocol, for this node's home shard; 0 picks a free one [default: 6379]
    #[arg(long, value_name = "PORT")]
    redis_port: Option<u16>,
    /// Ports for the replicas of other shards; 0 picks free ones [default: 6380-6389]
    #[arg(long, value_name = "FIRST-LAST")]
    redis_replica_ports: Option<String>,
    /// Port other nodes connect to; 0 picks a free one [default: 9645]
    #[arg(long, value_name = "PORT")]
    peer_port: Option<u16>,
    /// The address Kafka clients are told to connect to [default: the listener's own]
    #[arg(long, value_name = "HOST:PORT")]
    advertise_kafka: Option<String>,
    /// The address etcd clients are told to connect to [default: the listener's own]
    #[arg(long, value_name = "HOST:PORT")]
    advertise_etcd: Option<String>,
    /// The address Redis clients are told to connect to [default: the listener's own]
    #[arg(long, value_name = "HOST:PORT")]
    advertise_redis: Option<String>,
    /// The address other nodes are told to connect to [default: the listener's own]
    #[arg(long, value_name = "HOST:PORT")]
    advertise_peer: Option<String>,
    /// Found a cluster with these nodes, this one included, when the data folder is empty
    #[arg(long, value_name = "1=HOST:PEER,2=…", conflicts_with = "join")]
    initial_cluster: Option<String>,
    /// Join the cluster of any of these nodes, when the data folder is empty
    #[arg(long, value_name = "HOST:PEER,…")]
    join: Option<String>,
    /// The failure domain of this node
    #[arg(long)]
    zone: Option<String>,
    /// Allow a host that other machines can reach, without TLS and authentication
    #[arg(long)]
    insecure: bool,
    /// error, warn, info, debug, trace, or a filter; RUST_LOG wins [default: info]
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// End when the process with this id, which must be the parent, ends.
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) die_with: Option<u32>,
    #[command(flatten)]
    later: LaterArgs,
}

/// Flags of layers that come later. Only values that ask for nothing pass.
#[derive(Clone, Debug, Default, Args)]
struct LaterArgs {
    #[arg(long, hide = true)]
    roles: Option<String>,
    #[arg(long, hide = true)]
    coord: Option<String>,
}

impl ServeArgs {
    /// The flags as values of the configuration, after refusing what this build cannot do.
    pub(crate) fn flag_values(&self) -> Outcome<Vec<FlagValue>> {
        self.later.refuse()?;
        let set = |flag, key, value: Option<String>| value.map(|value| FlagValue { flag, key, value });
        let all = [
            set("--node-id", "node.id", self.node_id.map(|id| id.to_string())),
            set("--data", "node.data", self.data.clone()),
            set("--host", "node.host", self.host.clone()),
            set("--kafka-port", "kafka.port", self.kafka_port.map(|port| port.to_string())),
            set("--admin-port", "admin.port", self.admin_port.map(|port| port.to_string())),
            set("--etcd-port", "etcd.port", self.etcd_port.map(|port| port.to_string())),
            set("--redis-port", "redis.port", self.redis_port.map(|port| port.to_string())),
            set("--redis-replica-ports", "redis.replica_ports", self.redis_replica_ports.clone()),
            set("--advertise-redis", "redis.advertise", self.advertise_redis.clone()),
            set("--peer-port", "peer.port", self.peer_port.map(|port| port.to_string())),
            set("--advertise-etcd", "etcd.advertise", self.advertise_etcd.clone()),
            set("--advertise-peer", "peer.advertise", self.advertise_peer.clone()),
            set("--initial-cluster", "cluster.initial", self.initial_cluster.clone()),
            set("--join", "cluster.join", self.join.clone()),
            set("--advertise-kafka", "kafka.advertise", self.advertise_kafka.clone()),
            set("--zone", "node.zone", self.zone.clone()),
            set("--insecure", "node.insecure", self.insecure.then(|| "true".to_owned())),
            set("--log-level", "node.log_level", self.log_level.clone()),
        ];
        Ok(all.into_iter().flatten().collect())
    }
}

impl LaterArgs {
    fn refuse(&self) -> Outcome {
        const COORD: &str = "an etcd of your own";
        let asked = [("--coord", COORD, self.coord.is_some())];
        if let Some((flag, what, _)) = asked.iter().find(|(_, _, asked)| *asked) {
            return Err(Failure::usage(format!("{flag}: {what} is not part of this build yet"))
                .hint("leave the flag out"));
        }
        match self.roles.as_deref() {
            None | Some("queue,slots,coord") => Ok(()),
            Some(roles) => Err(Failure::usage(format!(
                "--roles {roles}: only `queue,slots,coord` is part of this build yet"
            ))),
        }
    }
}

#[cfg(test)]
mod tests;
