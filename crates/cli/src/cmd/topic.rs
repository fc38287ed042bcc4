//! `moim topic …`: the flags of every verb; what they do is in the file of the verb.

mod add_partitions;
mod alter;
mod consume;
mod create;
mod delete;
mod describe;
mod list;
mod produce;
mod reassign;

use clap::{Args, Subcommand};

use crate::cmd::block_on;
use crate::exit::Outcome;
use crate::output::Output;
use crate::target::ClientArgs;

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct TopicArgs {
    #[command(flatten)]
    client: ClientArgs,
    #[command(subcommand)]
    verb: TopicVerb,
}

#[derive(Debug, Subcommand)]
enum TopicVerb {
    /// Create topics
    Create(CreateArgs),
    /// List topics
    List(ListArgs),
    /// Show partitions, leaders, offsets and configuration
    Describe(DescribeArgs),
    /// Change the configuration of topics
    Alter(AlterArgs),
    /// Delete topics and all their messages
    Delete(DeleteArgs),
    /// Give topics more partitions
    AddPartitions(AddPartitionsArgs),
    /// Move the replicas of a partition to other nodes
    Reassign(ReassignArgs),
    /// Print messages
    Consume(ConsumeArgs),
    /// Send lines of stdin as messages
    Produce(ProduceArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim topic create orders -p 6
  moim topic create prices -c cleanup.policy=compact -c segment.bytes=1048576")]
pub(crate) struct CreateArgs {
    /// Names of the new topics
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Partitions [default: the server's]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    partitions: Option<i32>,
    /// Replicas of each partition [default: the server's]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(i16).range(1..))]
    replication_factor: Option<i16>,
    /// A topic setting; may be repeated
    #[arg(short, long = "config", value_name = "KEY=VALUE", value_parser = key_value)]
    configs: Vec<(String, String)>,
    /// Succeed when the topic exists already
    #[arg(long)]
    if_not_exists: bool,
    /// Only ask the server whether it would work
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  moim topic list\n  moim topic list --internal -o json")]
pub(crate) struct ListArgs {
    /// Show the server's own topics too
    #[arg(short, long)]
    internal: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  moim topic describe orders")]
pub(crate) struct DescribeArgs {
    /// Topics to show
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Show settings that are at their default too
    #[arg(short, long)]
    all: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim topic alter orders -c retention.ms=86400000
  moim topic alter orders --unset retention.ms")]
pub(crate) struct AlterArgs {
    /// Topics to change
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// A setting and its new value; may be repeated
    #[arg(short, long = "config", value_name = "KEY=VALUE", value_parser = key_value, required_unless_present = "unset")]
    configs: Vec<(String, String)>,
    /// A setting to put back to its default; may be repeated
    #[arg(long, value_name = "KEY")]
    unset: Vec<String>,
    /// Only ask the server whether it would work
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  moim topic delete orders --yes")]
pub(crate) struct DeleteArgs {
    /// Topics to delete
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  moim topic add-partitions orders --to 12\n  moim topic add-partitions orders -n 2"
)]
pub(crate) struct AddPartitionsArgs {
    /// Topics to grow
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// How many to add
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..), required_unless_present = "to")]
    num: Option<i32>,
    /// How many there shall be
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..), conflicts_with = "num")]
    to: Option<i32>,
    /// Only ask the server whether it would work
    #[arg(long)]
    dry_run: bool,
}

/// How fast replicas may be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rate(Option<u64>);

/// A size, with or without `/s`; or `none`.
fn parse_rate(text: &str) -> Result<Rate, String> {
    if text == "none" {
        return Ok(Rate(None));
    }
    let bytes = crate::config::units::parse_bytes(text.trim_end_matches("/s"));
    match bytes.and_then(|bytes| u64::try_from(bytes).ok()).filter(|bytes| *bytes > 0) {
        Some(bytes) => Ok(Rate(Some(bytes))),
        None => Err("must be bytes a second such as 20MiB, or none".to_owned()),
    }
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim topic reassign orders -p 0 --to 1,2,3      # this partition exactly there
  moim topic reassign orders --to 2,3,4           # all of the topic, evenly over these nodes
  moim topic reassign --drain 2                   # everything off node 2
  moim topic reassign --plan moves.json           # as kafka-reassign-partitions writes it
  moim topic reassign --drain 2 --throttle 20MiB  # no faster than 20 MiB a second from and to each node
  moim topic reassign --status                    # what is moving, and how far it is
  moim topic reassign --throttle none             # what is moving goes on at full speed
  moim topic reassign orders --cancel")]
pub(crate) struct ReassignArgs {
    /// The topics [default: all, with --drain, --plan, --status and --cancel]
    #[arg(value_name = "TOPIC")]
    names: Vec<String>,
    /// Only this partition
    #[arg(short, long, value_name = "P", requires = "names")]
    partition: Option<i32>,
    /// The nodes that shall hold it, the preferred leader first; `cancel` stops a move under way
    #[arg(long, value_name = "NODES", conflicts_with_all = ["drain", "plan", "cancel"])]
    to: Option<String>,
    /// Move everything off this node
    #[arg(long, value_name = "NODE", conflicts_with_all = ["plan", "cancel"])]
    drain: Option<i32>,
    /// A file that says where partitions shall be
    #[arg(long, value_name = "FILE", conflicts_with = "cancel")]
    plan: Option<String>,
    /// Stop moves under way: what has not arrived is not wanted any more
    #[arg(long)]
    cancel: bool,
    /// Show what is moving and how far it is
    #[arg(long, conflicts_with_all = ["to", "drain", "plan", "cancel", "throttle", "dry_run"])]
    status: bool,
    /// Bytes a second that each node may send and take in for moves, such as 20MiB; `none` lifts it. Ends with the
    /// moves when this command waits for them
    #[arg(long, value_name = "BYTES", conflicts_with = "cancel", value_parser = parse_rate)]
    throttle: Option<Rate>,
    /// Do not wait until everything is there
    #[arg(long)]
    no_wait: bool,
    /// Only show what would be moved where
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim topic consume orders -e                       # all that is there, then stop
  moim topic consume orders --offset -10 -e          # the last ten of each partition
  moim topic consume orders --offset @-1h -f '%T %k %v\\n'
  moim topic consume orders payments -g billing      # as a member of a group; commits

Format: %t topic, %p partition, %o offset, %k key, %v or %s value, %T timestamp (ms), %h headers,
%K and %S sizes of key and value in bytes (-1 when null), %% a percent sign, \\n \\t \\r \\0 \\\\ \\xHH.")]
pub(crate) struct ConsumeArgs {
    /// Topics to read
    #[arg(required = true, value_name = "TOPIC")]
    topics: Vec<String>,
    /// Where to begin: start, end, N, +N after the start, -N before the end, @TIME (RFC 3339,
    /// ms since 1970, or ago such as @-1h); in a group, only where it has not committed [default: start]
    #[arg(long, value_name = "WHERE", allow_hyphen_values = true)]
    offset: Option<String>,
    /// Only this partition; may be repeated
    #[arg(short, long = "partition", value_name = "P", conflicts_with = "group")]
    partitions: Vec<i32>,
    /// Stop after so many messages
    #[arg(short, long, value_name = "N")]
    num: Option<u64>,
    /// Stop at what is the end when the command starts
    #[arg(short, long)]
    exit: bool,
    /// Read as a member of this consumer group and commit what was printed
    #[arg(short, long, value_name = "GROUP")]
    group: Option<String>,
    /// How to print a message [default: '%v\n']
    #[arg(short, long, value_name = "FORMAT", allow_hyphen_values = true)]
    format: Option<String>,
    /// Show messages of open and aborted transactions too
    #[arg(long)]
    read_uncommitted: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  seq 1000 | moim topic produce numbers
  echo 'alice,{\"n\":1}' | moim topic produce orders -f '%k,%v\\n' -H source=shell
  moim topic produce orders -k alice -z zstd < orders.ndjson

Format of a line: %k key, %v or %s value, %p partition, %h headers as K=V,K=V; everything else stands for itself.")]
pub(crate) struct ProduceArgs {
    /// The topic to write
    topic: String,
    /// The key of every message
    #[arg(short, long, value_name = "KEY", allow_hyphen_values = true)]
    key: Option<String>,
    /// A header of every message; may be repeated
    #[arg(short = 'H', long = "header", value_name = "KEY=VALUE", value_parser = key_value)]
    headers: Vec<(String, String)>,
    /// How to read a line [default: '%v\n']
    #[arg(short, long, value_name = "FORMAT", allow_hyphen_values = true)]
    format: Option<String>,
    /// Write to this partition [default: by key; without one, filling one after the other]
    #[arg(short, long, value_name = "P")]
    partition: Option<i32>,
    /// Compress batches: none, gzip, snappy, lz4, zstd
    #[arg(short = 'z', long, value_name = "CODEC", default_value = "none")]
    compression: String,
    /// Acknowledgements to wait for: all (every in-sync replica), 1 (the leader) or 0 (none)
    #[arg(long, value_name = "ACKS", default_value = "all", value_parser = ["all", "-1", "1", "0"], allow_hyphen_values = true)]
    acks: String,
    /// Send an empty line as a null value (a tombstone on compacted topics)
    #[arg(short = 'Z', long)]
    tombstone: bool,
    /// Let a retry after a lost answer write a message twice
    #[arg(long)]
    no_idempotence: bool,
}

pub(crate) fn run(args: TopicArgs, output: Output) -> Outcome {
    let TopicArgs { client, verb } = args;
    block_on(async move {
        match verb {
            TopicVerb::Create(args) => create::run(&client, &args, output).await,
            TopicVerb::List(args) => list::run(&client, &args, output).await,
            TopicVerb::Describe(args) => describe::run(&client, &args, output).await,
            TopicVerb::Alter(args) => alter::run(&client, &args, output).await,
            TopicVerb::Delete(args) => delete::run(&client, &args, output).await,
            TopicVerb::AddPartitions(args) => add_partitions::run(&client, &args, output).await,
            TopicVerb::Reassign(args) => reassign::run(&client, &args, output).await,
            TopicVerb::Consume(args) => consume::run(&client, &args, output).await,
            TopicVerb::Produce(args) => produce::run(&client, &args, output).await,
        }
    })
}

/// `K=V`, where only the value may be empty or hold another `=`.
fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("must be KEY=VALUE".to_owned()),
    }
}
