//! `moim group …`: the flags of every verb; what they do is in the file of the verb.

mod delete;
mod describe;
mod list;
mod seek;

use clap::{Args, Subcommand};

use crate::cmd::block_on;
use crate::exit::Outcome;
use crate::output::Output;
use crate::target::ClientArgs;

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct GroupArgs {
    #[command(flatten)]
    client: ClientArgs,
    #[command(subcommand)]
    verb: GroupVerb,
}

#[derive(Debug, Subcommand)]
enum GroupVerb {
    /// List groups
    List(ListArgs),
    /// Show members, committed offsets and lag
    Describe(DescribeArgs),
    /// Move the committed offsets of a group without members
    Seek(SeekArgs),
    /// Delete groups and their offsets
    Delete(DeleteArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  moim group list")]
pub(crate) struct ListArgs {
    /// Only groups in this state, such as Stable or Empty; may be repeated
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  moim group describe billing\n  moim group describe billing -o json")]
pub(crate) struct DescribeArgs {
    /// Groups to show
    #[arg(required = true, value_name = "GROUP")]
    groups: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim group seek billing --to start --dry-run
  moim group seek billing --to @2026-11-01T00:00:00Z --topic orders
  moim group seek billing --to 42 --topic orders:0")]
pub(crate) struct SeekArgs {
    /// The group
    group: String,
    /// Where to: start, end, @TIME (RFC 3339, ms since 1970, or ago such as @-1h), or an offset
    #[arg(long, value_name = "WHERE", allow_hyphen_values = true)]
    to: String,
    /// Only this topic, or TOPIC:PARTITION; may be repeated [default: all the group has committed]
    #[arg(long = "topic", value_name = "TOPIC[:P]")]
    topics: Vec<String>,
    /// Only show what would change
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  moim group delete billing --yes")]
pub(crate) struct DeleteArgs {
    /// Groups to delete
    #[arg(required = true, value_name = "GROUP")]
    groups: Vec<String>,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

pub(crate) fn run(args: GroupArgs, output: Output) -> Outcome {
    let GroupArgs { client, verb } = args;
    block_on(async move {
        match verb {
            GroupVerb::List(args) => list::run(&client, &args, output).await,
            GroupVerb::Describe(args) => describe::run(&client, &args, output).await,
            GroupVerb::Seek(args) => seek::run(&client, &args, output).await,
            GroupVerb::Delete(args) => delete::run(&client, &args, output).await,
        }
    })
}
