//! `moim coord …`: the flags of every verb; what they do is in the file of the verb.

mod alarm;
mod compact;
mod del;
mod get;
mod lease;
mod put;
mod snapshot;
mod status;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::cmd::block_on;
use crate::coordination::{RangeArgs, parse_lease};
use crate::exit::Outcome;
use crate::output::Output;
use crate::target::{EtcdArgs, seconds};

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct CoordArgs {
    #[command(flatten)]
    client: EtcdArgs,
    #[command(subcommand)]
    verb: CoordVerb,
}

#[derive(Debug, Subcommand)]
enum CoordVerb {
    /// Read keys
    Get(GetArgs),
    /// Write a key
    Put(PutArgs),
    /// Delete keys
    Del(DelArgs),
    /// Print changes as they happen
    Watch(WatchArgs),
    /// Grant, renew, inspect and revoke leases
    Lease(LeaseArgs),
    /// Show how each server is
    #[command(after_help = "Example:\n  moim coord status\n  moim coord status -o json")]
    Status,
    /// Forget history before a revision
    Compact(CompactArgs),
    /// Show and take back alarms
    Alarm(AlarmArgs),
    /// Save the keys to a file, inspect it, make a new node from it
    Snapshot(SnapshotArgs),
}

/// What a range is sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortBy {
    /// The key.
    #[default]
    Key,
    /// How often it was put.
    Version,
    /// When it appeared.
    Create,
    /// When it last changed.
    Mod,
    /// What it holds.
    Value,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim coord get color
  moim coord get --prefix /services/ -o json
  moim coord get color --rev 17              # as it was at revision 17
  moim coord get color --value-only > file   # the bytes, and a line end")]
pub(crate) struct GetArgs {
    /// The key
    key: String,
    #[command(flatten)]
    range: RangeArgs,
    /// As it was at this revision
    #[arg(long, value_name = "N")]
    rev: Option<i64>,
    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    limit: i64,
    /// Sort by this
    #[arg(long, value_name = "WHAT", value_enum, default_value_t)]
    sort_by: SortBy,
    /// The largest first
    #[arg(long)]
    descending: bool,
    /// Keys without their values
    #[arg(long)]
    keys_only: bool,
    /// Only how many there are
    #[arg(long)]
    count_only: bool,
    /// Values alone, each with a line end
    #[arg(long, conflicts_with_all = ["keys_only", "count_only"])]
    value_only: bool,
    /// From the server that is asked, which may be behind
    #[arg(long)]
    serializable: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim coord put color blue
  moim coord put config < config.json
  moim coord put leader me --if-absent --lease 694d77aa9e38260f
  moim coord put color green --if-revision 17")]
pub(crate) struct PutArgs {
    /// The key
    key: String,
    /// The value [default: what comes on stdin]
    #[arg(allow_hyphen_values = true)]
    value: Option<String>,
    /// The lease that takes the key away
    #[arg(long, value_name = "ID", value_parser = parse_lease)]
    lease: Option<i64>,
    /// Show what the key held before
    #[arg(long)]
    prev: bool,
    /// Only if there is no such key; status 7 if there is
    #[arg(long, conflicts_with = "if_revision")]
    if_absent: bool,
    /// Only if the key was last changed at this revision; status 7 if not
    #[arg(long, value_name = "N")]
    if_revision: Option<i64>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim coord del color
  moim coord del --prefix /services/ --yes
  moim coord del color --if-revision 17")]
pub(crate) struct DelArgs {
    /// The key
    key: String,
    #[command(flatten)]
    range: RangeArgs,
    /// Show what was deleted
    #[arg(long)]
    prev: bool,
    /// Only if the key was last changed at this revision; status 7 if not
    #[arg(long, value_name = "N", conflicts_with_all = ["prefix", "from_key"])]
    if_revision: Option<i64>,
    /// Do not ask before deleting a range
    #[arg(short, long)]
    yes: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim coord watch --prefix /services/
  moim coord watch color --rev 17 -n 1 -o json")]
pub(crate) struct WatchArgs {
    /// The key
    key: String,
    #[command(flatten)]
    range: RangeArgs,
    /// From this revision on [default: what happens from now on]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    rev: i64,
    /// Show what keys held before
    #[arg(long)]
    prev: bool,
    /// Stop after so many changes
    #[arg(short, long, value_name = "N")]
    num: Option<u64>,
}

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct LeaseArgs {
    #[command(subcommand)]
    verb: LeaseVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LeaseVerb {
    /// Make a lease
    #[command(after_help = "Example:\n  moim coord lease grant 30s")]
    Grant {
        /// How long it lives without being renewed; a number is seconds
        #[arg(value_name = "TTL", value_parser = seconds)]
        ttl: Duration,
        /// Its id [default: the server's choice]
        #[arg(long, value_name = "ID", value_parser = parse_lease)]
        id: Option<i64>,
    },
    /// End a lease and delete its keys
    #[command(after_help = "Example:\n  moim coord lease revoke 694d77aa9e38260f")]
    Revoke {
        /// The lease
        #[arg(value_parser = parse_lease)]
        id: i64,
    },
    /// Renew a lease until it ends or you do
    #[command(after_help = "Example:\n  moim coord lease keep-alive 694d77aa9e38260f --once")]
    KeepAlive {
        /// The lease
        #[arg(value_parser = parse_lease)]
        id: i64,
        /// Renew it once
        #[arg(long)]
        once: bool,
    },
    /// Show how long a lease has left
    #[command(after_help = "Example:\n  moim coord lease ttl 694d77aa9e38260f --keys")]
    Ttl {
        /// The lease
        #[arg(value_parser = parse_lease)]
        id: i64,
        /// Show its keys too
        #[arg(long)]
        keys: bool,
    },
    /// List leases
    #[command(after_help = "Example:\n  moim coord lease list")]
    List,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  moim coord compact 1000")]
pub(crate) struct CompactArgs {
    /// The first revision that can still be read afterwards
    revision: i64,
    /// Wait until the memory is free
    #[arg(long)]
    physical: bool,
}

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct AlarmArgs {
    #[command(subcommand)]
    verb: AlarmVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AlarmVerb {
    /// List the alarms that are on
    #[command(after_help = "Example:\n  moim coord alarm list")]
    List,
    /// Take every alarm back
    #[command(after_help = "Example:\n  moim coord alarm disarm")]
    Disarm,
}

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct SnapshotArgs {
    #[command(subcommand)]
    verb: SnapshotVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotVerb {
    /// Save what a server has to a file, with a checksum at its end
    #[command(after_help = "Example:\n  moim coord snapshot save backup.snap")]
    Save {
        /// The file; it must not exist
        file: PathBuf,
    },
    /// Make the data folder of a new node, alone in a new cluster, that begins with the keys of a file
    #[command(after_help = "Example:
  moim coord snapshot restore backup.snap --data restored
  moim serve --data restored

Keys, revisions, history and leases of clients are as they were; what the old cluster knew about itself
(nodes, topics) is not taken over. Other nodes join the new one with --join.")]
    Restore {
        /// The file, written by `moim coord snapshot save` or `etcdctl snapshot save`, from a Moim or an etcd
        file: PathBuf,
        /// The folder to make; it must not exist, or be empty
        #[arg(long, value_name = "DIR")]
        data: PathBuf,
        /// The number of the new node
        #[arg(long, value_name = "N", default_value_t = 1)]
        node_id: i32,
    },
    /// Check a file and show what is in it
    #[command(after_help = "Example:\n  moim coord snapshot status backup.snap")]
    Status {
        /// The file
        file: PathBuf,
    },
}

pub(crate) fn run(args: CoordArgs, output: Output) -> Outcome {
    let CoordArgs { client, verb } = args;
    block_on(async move {
        match verb {
            CoordVerb::Get(args) => get::run(&client, &args, output).await,
            CoordVerb::Put(args) => put::run(&client, &args, output).await,
            CoordVerb::Del(args) => del::run(&client, &args, output).await,
            CoordVerb::Watch(args) => watch::run(&client, &args, output).await,
            CoordVerb::Lease(args) => lease::run(&client, args.verb, output).await,
            CoordVerb::Status => status::run(&client, output).await,
            CoordVerb::Compact(args) => compact::run(&client, &args, output).await,
            CoordVerb::Alarm(args) => alarm::run(&client, args.verb, output).await,
            CoordVerb::Snapshot(args) => snapshot::run(&client, args.verb, output).await,
        }
    })
}
