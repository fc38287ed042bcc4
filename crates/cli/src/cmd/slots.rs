//! `moim slots …`: slot owners, the slot of a key, and slot migration, through the admin port of any node.
//!
//! The cluster executes a migration: it continues when the command is interrupted, and `status` shows it.

mod moving;
mod show;

use clap::{Args, Subcommand};
use moim_slots::service::SlotsReport;

use crate::cmd::block_on;
use crate::cmd::cluster::Nodes;
use crate::exit::{Failure, Outcome};
use crate::output::Output;
use crate::target::AdminArgs;

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct SlotsArgs {
    #[command(flatten)]
    admin: AdminArgs,
    #[command(subcommand)]
    verb: SlotsVerb,
}

#[derive(Debug, Subcommand)]
enum SlotsVerb {
    /// The shards, where they are, and their slots
    #[command(after_help = "Example:\n  moim slots map\n  moim slots map -o json")]
    Map,
    /// Where a key lives
    #[command(after_help = "Example:\n  moim slots where user:{42}:name")]
    Where {
        /// The key
        key: String,
    },
    /// Move slots from a shard to another, without an error for clients
    #[command(after_help = "Example:\n  moim slots move --from 0 --to 1 --count 100\n  \
        moim slots move --from 127.0.0.1:20101 --to 127.0.0.1:20201 --slots 0-99,200 --timeout 10m")]
    Move(MoveArgs),
    /// Give every shard as many slots
    #[command(
        after_help = "Example:\n  moim slots rebalance --timeout 10m\n  moim slots rebalance --no-wait"
    )]
    Rebalance(WaitArgs),
    /// The moves: under way, waiting, and the newest that are over
    #[command(after_help = "Example:\n  moim slots status")]
    Status,
    /// Give a move up: its slots stay where they are
    #[command(after_help = "Example:\n  moim slots abort 7")]
    Abort {
        /// The move
        id: u64,
    },
    /// What an answer promises: on disk of the in-sync replicas (fsync), or not yet (async)
    #[command(
        after_help = "Example:\n  moim slots durability async --shard 2\n  moim slots durability fsync"
    )]
    Durability {
        /// fsync or async
        durability: String,
        /// Only of this shard
        #[arg(long, value_name = "SHARD")]
        shard: Option<String>,
    },
}

#[derive(Debug, Args)]
struct MoveArgs {
    /// The shard that gives: its number, or the address or id of its primary
    #[arg(long, value_name = "SHARD")]
    from: String,
    /// The shard that gets
    #[arg(long, value_name = "SHARD")]
    to: String,
    /// So many slots, the highest first
    #[arg(long, value_name = "N", conflicts_with = "slots", required_unless_present = "slots")]
    count: Option<usize>,
    /// These slots
    #[arg(long, value_name = "0-99,200")]
    slots: Option<String>,
    #[command(flatten)]
    wait: WaitArgs,
}

#[derive(Debug, Args)]
struct WaitArgs {
    /// Do not wait for the end
    #[arg(long)]
    no_wait: bool,
}

pub(crate) fn run(args: SlotsArgs, output: Output) -> Outcome {
    let SlotsArgs { admin, verb } = args;
    block_on(async {
        let nodes = Nodes::new(&admin)?;
        match verb {
            SlotsVerb::Map => show::map(&nodes, output).await,
            SlotsVerb::Where { key } => show::place(&nodes, &key, output).await,
            SlotsVerb::Move(args) => moving::begin(&nodes, &args, output).await,
            SlotsVerb::Rebalance(args) => moving::rebalance(&nodes, &args, output).await,
            SlotsVerb::Status => moving::status(&nodes, output).await,
            SlotsVerb::Abort { id } => moving::abort(&nodes, id, output).await,
            SlotsVerb::Durability { durability, shard } => {
                show::durability(&nodes, &durability, shard.as_deref(), output).await
            }
        }
    })
}

async fn report(nodes: &Nodes) -> Outcome<SlotsReport> {
    let body = nodes.get("/api/v1/slots").await?;
    serde_json::from_str(&body)
        .map_err(|error| Failure::error(format!("a node says what this moim does not know: {error}")))
}
