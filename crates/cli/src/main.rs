//! The `moim` binary: parses the command line, runs one command, exits with its status.

mod allocator;
mod cli;
mod cmd;
mod config;
mod coordination;
mod exit;
mod format;
mod http;
mod kafka;
mod offset_spec;
mod output;
mod parent;
mod target;
mod timestamp;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use cli::{Cli, Command, ServeArgs};
use config::layers::{Effective, load};
use exit::Outcome;
use output::Output;

fn main() -> ExitCode {
    moim_node::set_release_memory(allocator::release_memory);
    // Clap exits by itself: status 0 for help, 2 for a wrong command line.
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
            parent::exit_with_parent(args.die_with)?;
            Ok(moim_node::run(&effective(&args)?.config)?)
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

/// The configuration that results from these flags, the environment and the file.
fn effective(args: &ServeArgs) -> Outcome<Effective> {
    load(args.config.as_deref(), std::env::vars(), &args.flag_values()?)
}
