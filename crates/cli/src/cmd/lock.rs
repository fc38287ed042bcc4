//! `moim lock run` and `moim elect run`: a command that runs only while a lock is held.
//!
//! The lock is etcd's recipe, so `etcdctl lock` and `etcdctl elect` on the same name wait in the same queue: each
//! contender has a key of its own under the name, with its lease; the oldest key holds the lock; every other
//! contender waits for the deletion of the one before it.
//!
//! What keeps two commands from running at once:
//! - The lease's time counts from when a keep-alive was *sent*, on a clock that runs while the machine sleeps. The server
//!   counts from when it arrived, so the lease always expires later than this process assumes.
//! - The command gets SIGTERM at 70% of the lease's time and SIGKILL at 85%, unless a renewal came.
//! - A second process, the guard, does the same when this one cannot, because it was stopped or killed.
//!
//! Its limit: if all of them are stopped and the command is not, or the command runs on another machine, the next holder
//! gets the lock while the command works. The fencing token covers that: a resource must refuse a token that is smaller
//! than one it has seen.
//!
//! | file | owns |
//! |---|---|
//! | `session.rs` | the lease, the queue: everything the servers see |
//! | `run.rs` | the command: started, watched, stopped |
//! | `guard.rs` | the second process |
//! | `descendants.rs` | the processes of the command |
//! | `moment.rs` | the clock |

mod descendants;
mod guard;
mod moment;
mod run;
mod session;

use std::ffi::OsString;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};

use crate::cmd::block_on;
use crate::exit::Outcome;
use crate::target::{EtcdArgs, seconds};

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct LockArgs {
    #[command(flatten)]
    client: EtcdArgs,
    #[command(subcommand)]
    verb: LockVerb,
}

#[derive(Debug, Subcommand)]
enum LockVerb {
    /// Wait for a lock, run a command while it is held, and give it back
    Run(RunArgs),
    /// Become a command that ends with its parent.
    #[command(hide = true, after_help = "Example:\n  moim lock exec --die-with 42 -- true")]
    Exec {
        #[arg(long)]
        die_with: u32,
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Kill the descendants of the parent when it does not renew its time.
    #[command(hide = true, after_help = "Example:\n  moim lock guard --over 42 --mark 42-1")]
    Guard {
        #[arg(long)]
        over: u32,
        #[arg(long)]
        mark: String,
    },
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  moim lock run nightly -- ./backup.sh
  moim lock run nightly --wait 0s -- ./backup.sh          # only if no other client runs it
  moim lock run deploy --ttl 5s -- sh -c 'store --token $MOIM_FENCING_TOKEN'

The command finds a number in MOIM_FENCING_TOKEN that grows with each holder. The status is the command's;
125 means that the lock was not acquired, or was lost and the command stopped.")]
pub(crate) struct RunArgs {
    /// The lock
    #[arg(index = 1, value_parser = NonEmptyStringValueParser::new())]
    name: String,
    /// How long the lock outlives a holder that has gone silent; a number is seconds
    #[arg(long, default_value = "10s", value_parser = seconds)]
    ttl: Duration,
    /// How long to wait for it; 0s tries once [default: for ever]
    #[arg(long, value_name = "DURATION", value_parser = wait)]
    wait: Option<Duration>,
    /// The command and its arguments
    #[arg(index = 2, last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct ElectArgs {
    #[command(flatten)]
    client: EtcdArgs,
    #[command(subcommand)]
    verb: ElectVerb,
}

#[derive(Debug, Subcommand)]
enum ElectVerb {
    /// Wait to be elected, run a command while leading, and resign
    Run(ElectRunArgs),
}

#[derive(Debug, Args)]
#[command(mut_arg("name", |arg| arg.help("The election")))]
#[command(mut_arg("ttl", |arg| arg.help("How long a leader that has gone silent still leads; a number is seconds")))]
#[command(mut_arg("wait", |arg| arg.help("How long to wait for the election; 0s tries once [default: for ever]")))]
#[command(after_help = "Example:
  moim elect run scheduler -- ./scheduler
  moim elect run scheduler --value $HOSTNAME --ttl 5s -- ./scheduler

`etcdctl elect -l scheduler` shows who leads. The command finds the term's number in MOIM_FENCING_TOKEN. The
status is the command's; 125 means that it was not elected, or was deposed and the command stopped.")]
pub(crate) struct ElectRunArgs {
    #[command(flatten)]
    run: RunArgs,
    /// What observers see while this candidate leads [default: the machine's name and the process id]
    #[arg(long)]
    value: Option<String>,
}

/// Zero is valid here: try once.
fn wait(text: &str) -> Result<Duration, String> {
    if ["0", "0s", "0ms"].contains(&text) { Ok(Duration::ZERO) } else { seconds(text) }
}

pub(crate) fn run(args: LockArgs) -> Outcome {
    match args.verb {
        LockVerb::Run(run) => block_on(run::run(&args.client, &run, "")),
        LockVerb::Exec { die_with, command } => run::exec(die_with, &command),
        LockVerb::Guard { over, mark } => guard::watch(over, &mark),
    }
}

pub(crate) fn elect(args: ElectArgs) -> Outcome {
    let ElectVerb::Run(elect) = args.verb;
    let value = elect.value.unwrap_or_else(|| {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        format!("{host}:{}", std::process::id())
    });
    block_on(run::run(&args.client, &elect.run, &value))
}
