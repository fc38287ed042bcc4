//! `moim dev …`: a development cluster of real processes on this machine.
//!
//! One process, the supervisor, starts the nodes, watches them and ends with them. The verbs that act on one node use a
//! socket in the data directory; no process is signalled by an id from a file, because the id may be reused.
//!
//! | file | owns |
//! |---|---|
//! | `plan.rs` | the ports of each node |
//! | `roster.rs` | cluster.json and context.toml |
//! | `runner.rs` | one node's process |
//! | `control.rs` | the control socket, both ends |
//! | `up.rs` | the supervisor |
//! | `readmit.rs` | nodes that lost their data directory |
//! | `embed.rs` | a cluster that another command runs |
//! | `wires.rs` | nodes in network namespaces, which can be partitioned |
//! | `detach.rs` | `-d` |
//! | `purge.rs` | `purge` |

mod control;
mod detach;
pub(crate) mod embed;
mod plan;
mod purge;
mod readmit;
mod roster;
mod runner;
mod up;
pub(crate) mod wires;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::cmd::block_on;
use crate::exit::Outcome;
use crate::output::Output;
use crate::target::duration;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim dev                       # three nodes; Ctrl-C stops them
  moim dev -n 5 -d               # five, in the background
  moim dev kill 2                # from another terminal: kill -9 of node 2
  moim dev restart 2
  moim dev stop                  # all of them

Node i listens on base + 100*i + {0 kafka, 2 etcd, 3 admin, 4 peer}; a base of 0 picks a free one.
Client commands in this folder and below find the cluster through .moim/context.toml.")]
pub(crate) struct DevArgs {
    #[command(flatten)]
    up: UpArgs,
    /// The folder of the cluster
    #[arg(long, global = true, value_name = "DIR", default_value = ".moim/dev")]
    data: PathBuf,
    /// How long to wait until nodes are ready
    #[arg(long, global = true, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    timeout: Duration,
    #[command(subcommand)]
    verb: Option<DevVerb>,
}

/// How a cluster is started.
#[derive(Clone, Debug, Args)]
struct UpArgs {
    /// How many nodes [default: 3, or what the folder has]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: Option<u16>,
    /// Where the ports begin; 0 picks a free range [default: 20000, or what the folder has]
    #[arg(long, value_name = "PORT")]
    base_port: Option<u16>,
    /// Run in the background; `moim dev stop` ends it
    #[arg(short, long)]
    detach: bool,
    /// Set by `-d` for the process that stays.
    #[arg(long, hide = true)]
    detached: bool,
}

#[derive(Debug, Subcommand)]
enum DevVerb {
    /// Stop a node in order, or all of them
    #[command(after_help = "Example:\n  moim dev stop 2\n  moim dev stop --data .moim/dev")]
    Stop {
        /// The node [default: all, and the supervisor]
        node: Option<i32>,
    },
    /// Start a node again, stopping it first if it runs
    #[command(
        after_help = "Example:\n  moim dev restart 2\n  moim dev restart 2 --fresh     # after `moim cluster remove 2`"
    )]
    Restart {
        /// The node
        node: i32,
        /// Delete its data first and let it in as a new node; the way back for one that was removed
        #[arg(long)]
        fresh: bool,
    },
    /// kill -9 of a node
    #[command(after_help = "Example:\n  moim dev kill 2")]
    Kill {
        /// The node
        node: i32,
    },
    /// Show the nodes
    #[command(after_help = "Example:\n  moim dev status -o json")]
    Status,
    /// Stop everything and delete the folder of the cluster
    #[command(after_help = "Example:\n  moim dev purge --yes")]
    Purge {
        /// Do not ask
        #[arg(short, long)]
        yes: bool,
    },
}

pub(crate) fn run(args: DevArgs, output: Output) -> Outcome {
    let DevArgs { up, data, timeout, verb } = args;
    match verb {
        None if up.detach && !up.detached => detach::run(&up, &data, timeout, output),
        verb => block_on(async {
            match verb {
                None => up::run(&up, &data, timeout, output).await,
                Some(DevVerb::Stop { node }) => control::stop(&data, node, timeout, output).await,
                Some(DevVerb::Restart { node, fresh }) => {
                    control::restart(&data, node, fresh, timeout, output).await
                }
                Some(DevVerb::Kill { node }) => control::kill(&data, node, timeout, output).await,
                Some(DevVerb::Status) => control::status(&data, timeout, output).await,
                Some(DevVerb::Purge { yes }) => purge::run(&data, yes, timeout).await,
            }
        }),
    }
}
