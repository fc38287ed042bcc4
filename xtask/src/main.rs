//! The developer toolbox behind `cargo xtask`: the checks that CI runs and the suites that need more than `cargo
//! test` provides. None of it is part of the product.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

mod bench;
mod chaos;
mod ci;
mod etcd;
mod interop;
mod sim;
mod tidy;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks and suites of the Moim workspace")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check the rules no compiler knows: layering, file shape, links, terms, leftovers
    Tidy,
    /// Everything a change must pass: fmt, clippy, tidy, cargo test
    Ci,
    /// Unmodified third-party clients against a fresh `moim serve`
    Interop(interop::InteropArgs),
    /// A whole cluster on one thread from one seed, with faults
    Sim(sim::SimArgs),
    /// Real nodes that are killed, paused, cut off and emptied under real clients
    Chaos(chaos::ChaosArgs),
    /// Compare our speed with others and with the limits of this machine
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<bool> {
    let root = workspace_root()?;
    match &cli.command {
        Command::Tidy => tidy::run(&root),
        Command::Ci => ci::run(&root),
        Command::Interop(args) => interop::run(&root, args),
        Command::Sim(args) => sim::run(&root, args),
        Command::Chaos(args) => chaos::run(&root, args),
        Command::Bench(bench) => bench::run(&root, bench),
    }
}

/// The workspace root, known at compile time: `cargo xtask` works from any directory inside.
fn workspace_root() -> Result<PathBuf> {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    Ok(manifest.parent().context("xtask stands in the workspace")?.to_path_buf())
}
