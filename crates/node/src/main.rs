//! The `moim` binary: reads the command line, runs one command, ends with its status.

mod admin;
mod allocator;
mod cli;
mod client;
mod cmd;
mod config;
mod control;
mod coordination;
mod data_dir;
mod etcd;
mod exit;
mod format;
mod formation;
mod journals;
mod output;
mod parent;
mod place;
mod queue;
mod replication;
mod serve;
mod signals;
mod slots;
mod target;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use cli::{Cli, Command, ServeArgs};
use config::layers::{Effective, load};
use exit::Outcome;
use output::Output;

fn main() -> ExitCode {
    // Clap ends the process itself: status 0 for help, 2 for a wrong command line.
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(cli: Cli) -> Outcome {
    let output = Output { format: cli.output };
    match cli.command {
        Command::Serve(args) => {
            parent::die_with(args.die_with)?;
            serve::run(&effective(&args)?.config)
        }
        Command::Demo(args) => cmd::demo::run(args, output),
        Command::Pipeline(args) => cmd::pipeline::run(*args, output),
        Command::Bench(args) => cmd::bench::run(*args, output),
        Command::Dev(args) => cmd::dev::run(*args, output),
        Command::Cluster(args) => cmd::cluster::run(args, output),
        Command::Topic(args) => cmd::topic::run(args, output),
        Command::Group(args) => cmd::group::run(args, output),
        Command::Coord(args) => cmd::coord::run(args, output),
        Command::Lock(args) => cmd::lock::run(args),
        Command::Elect(args) => cmd::lock::elect(args),
        Command::Manager(args) => cmd::manager::run(&args),
        Command::Routing(args) => cmd::routing::run(args, output),
        Command::Slots(args) => cmd::slots::run(args, output),
        Command::Config(args) => cmd::config::run(&args.verb, output),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "moim", &mut std::io::stdout());
            Ok(())
        }
        Command::Version => cmd::version::run(output),
    }
}

/// The configuration these flags, the environment and the file give.
fn effective(args: &ServeArgs) -> Outcome<Effective> {
    load(args.config.as_deref(), std::env::vars(), &args.flag_values()?)
}
