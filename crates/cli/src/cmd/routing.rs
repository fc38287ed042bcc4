//! `moim routing`: looks at the table of a namespace and changes it, through the manager that leads.
//!
//! The manager is found in the store, where it says that it leads; `--manager` names one when the store cannot be
//! reached from here.

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use moim_base::task::{Scope, Shutdown};
use moim_cluster::routing::{NodeStatus, RoutingClient};
use moim_cluster::{Context, EtcdRepository, MemoryRepository, StateRepository as _};
use moim_wire_grpc::routing::ShowResponse;
use serde::Serialize;

use crate::cmd::block_on;
use crate::coordination::{change_failure, connect, failure};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, confirm};
use crate::target::EtcdArgs;

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct RoutingArgs {
    #[command(flatten)]
    client: EtcdArgs,
    /// Whose table
    #[arg(long, global = true, default_value = "moim")]
    namespace: String,
    /// Managers [default: the one that leads, as the store says]
    #[arg(long, global = true, value_name = "HOST:PORT,…")]
    manager: Option<String>,
    #[command(subcommand)]
    verb: RoutingVerb,
}

#[derive(Debug, Subcommand)]
enum RoutingVerb {
    /// Show ranges and servers
    #[command(
        after_help = "Example:\n  moim routing show\n  moim routing show --namespace actorbase -o json"
    )]
    Show,
    /// Divide a partition at a key
    #[command(after_help = "Example:\n  moim routing split p7 user:5000")]
    Split {
        /// The partition
        partition: String,
        /// The first key of the upper part
        key: String,
    },
    /// Take the partition above into this one
    #[command(after_help = "Example:\n  moim routing merge p7 p23 --yes")]
    Merge {
        /// The partition
        partition: String,
        /// The one that begins where it ends
        above: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Move a partition to a server
    #[command(after_help = "Example:\n  moim routing migrate p7 --to server-3")]
    Migrate {
        /// The partition
        partition: String,
        /// The server
        #[arg(long, value_name = "SERVER")]
        to: String,
    },
    /// Move everything away from a server and give it nothing any more
    #[command(after_help = "Example:\n  moim routing drain server-3\n  moim routing drain server-3 --undo")]
    Drain {
        /// The server
        server: String,
        /// Give it ranges again
        #[arg(long)]
        undo: bool,
    },
}

pub(crate) fn run(args: RoutingArgs, output: Output) -> Outcome {
    block_on(drive(args, output))
}

async fn drive(args: RoutingArgs, output: Output) -> Outcome {
    if let RoutingVerb::Merge { partition, above, yes } = &args.verb {
        confirm(&format!("merge partition {above} into {partition}"), *yes)?;
    }
    let managers = managers(&args).await?;
    let scope = Scope::new(Shutdown::new());
    let clock = Arc::new(moim_cluster::clock::BootClock);
    // A client of managers needs no store.
    let context = Context::new("moim", Arc::new(MemoryRepository::new(clock)), &scope);
    let client = RoutingClient::connect(&context, &args.namespace, &managers);
    let patience = args.client.timeout;
    match &args.verb {
        RoutingVerb::Show => show(&client, patience, output).await,
        RoutingVerb::Split { partition, key } => {
            let done = client.split(partition, key, patience).await;
            let upper = done.map_err(|error| change_failure(&error))?;
            output.print(&Changed {
                done: format!("split at {key:?}"),
                partition: Some(upper),
                version: None,
            })
        }
        RoutingVerb::Merge { partition, above, .. } => {
            let done = client.merge(partition, above, patience).await;
            changed(format!("{above} merged into {partition}"), Some(partition), done, output)
        }
        RoutingVerb::Migrate { partition, to } => {
            let done = client.migrate(partition, to, patience).await;
            changed(format!("moved to {to}"), Some(partition), done, output)
        }
        RoutingVerb::Drain { server, undo } => {
            let done = client.drain(server, *undo, patience.max(Duration::from_secs(1))).await;
            let what = if *undo { "takes ranges again" } else { "has no ranges any more" };
            changed(format!("{server} {what}"), None, done, output)
        }
    }
}

fn changed(
    done: String,
    partition: Option<&String>,
    result: Result<i64, moim_cluster::etcd::EtcdError>,
    output: Output,
) -> Outcome {
    let version = result.map_err(|error| change_failure(&error))?;
    output.print(&Changed { done, partition: partition.cloned(), version: Some(version) })
}

/// The managers that the request goes to.
async fn managers(args: &RoutingArgs) -> Outcome<Vec<String>> {
    if let Some(list) = &args.manager {
        return Ok(list.split(',').map(|one| one.trim().to_owned()).collect());
    }
    let repository = EtcdRepository::new(connect(&args.client).await?, "");
    let key = format!("/{}/manager", args.namespace.trim_matches('/'));
    let found = repository.get(&key).await.map_err(|error| Failure::error(error.to_string()))?;
    let leader = found.and_then(|entry| {
        let record: serde_json::Value = serde_json::from_slice(&entry.value).ok()?;
        record["nodeId"].as_str().map(str::to_owned)
    });
    let no_leader = || {
        Failure::new(Status::Unreachable, format!("no manager leads the namespace {}", args.namespace))
            .hint("start one with `moim manager`, or name another namespace with --namespace")
    };
    Ok(vec![leader.ok_or_else(no_leader)?])
}

async fn show(client: &RoutingClient, patience: Duration, output: Output) -> Outcome {
    let shown = client.show(patience).await.map_err(|error| failure(&error))?;
    output.print(&Table::from(shown))
}

#[derive(Serialize)]
struct Changed {
    done: String,
    partition: Option<String>,
    version: Option<i64>,
}

impl Report for Changed {
    fn sections(&self) -> Vec<Section> {
        let dash = || "-".to_owned();
        vec![Section::pairs([
            ("done", self.done.clone()),
            ("partition", self.partition.clone().unwrap_or_else(dash)),
            ("version", self.version.map_or_else(dash, |version| version.to_string())),
        ])]
    }
}

#[derive(Serialize)]
struct Table {
    version: i64,
    leader: String,
    subscribers: u64,
    servers: Vec<Server>,
    partitions: Vec<Partition>,
}

#[derive(Serialize)]
struct Server {
    node_id: String,
    node_address: String,
    status: &'static str,
    partitions: u64,
    connected: bool,
}

#[derive(Serialize)]
struct Partition {
    partition_id: String,
    key_range_start: String,
    key_range_end: String,
    node_id: String,
    node_address: String,
    node_status: i32,
}

impl From<ShowResponse> for Table {
    fn from(shown: ShowResponse) -> Self {
        let server = |server: moim_wire_grpc::routing::Server| Server {
            status: NodeStatus::from_i32(server.node_status).name(),
            node_id: server.node_id,
            node_address: server.node_address,
            partitions: server.partitions,
            connected: server.connected,
        };
        let partition = |route: moim_wire_grpc::routing::Route| Partition {
            partition_id: route.partition_id,
            key_range_start: route.key_range_start,
            key_range_end: route.key_range_end,
            node_id: route.node_id,
            node_address: route.node_address,
            node_status: route.node_status,
        };
        Self {
            version: shown.version,
            leader: shown.leader,
            subscribers: shown.subscribers,
            servers: shown.servers.into_iter().map(server).collect(),
            partitions: shown.routes.into_iter().map(partition).collect(),
        }
    }
}

impl Report for Table {
    fn sections(&self) -> Vec<Section> {
        let head = Section::pairs([
            ("version", self.version.to_string()),
            ("manager", self.leader.clone()),
            ("subscribers", self.subscribers.to_string()),
        ]);
        let mut servers = Section::new(&["SERVER", "ADDRESS", "STATUS", ">PARTITIONS", "CONNECTED"]);
        for server in &self.servers {
            let connected = if server.connected { "yes" } else { "no" };
            servers.row(vec![
                server.node_id.clone(),
                server.node_address.clone(),
                server.status.to_owned(),
                server.partitions.to_string(),
                connected.to_owned(),
            ]);
        }
        let mut partitions = Section::new(&["PARTITION", "FROM", "TO", "SERVER", "STATUS"]);
        for one in &self.partitions {
            partitions.row(vec![
                one.partition_id.clone(),
                format!("{:?}", one.key_range_start),
                if one.key_range_end.is_empty() {
                    "-".to_owned()
                } else {
                    format!("{:?}", one.key_range_end)
                },
                one.node_id.clone(),
                NodeStatus::from_i32(one.node_status).name().to_owned(),
            ]);
        }
        vec![head, servers, partitions]
    }
}
