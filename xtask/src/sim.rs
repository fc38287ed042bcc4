//! `cargo xtask sim`: builds the simulator and passes the arguments on.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

/// What to run.
#[derive(Args)]
#[command(after_help = "Example: cargo xtask sim --seeds 500 --nodes 5")]
pub(crate) struct SimArgs {
    /// How many seeds to run
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    start: u64,
    /// Founding members, three to seven; 0 lets the seed choose
    #[arg(long, default_value_t = 0)]
    nodes: usize,
    /// Milliseconds of faults in the cluster's own time
    #[arg(long, default_value_t = 8_000)]
    faults_ms: u64,
    /// Print every run
    #[arg(short, long)]
    verbose: bool,
    /// Print the trace of every run, as far as it was kept
    #[arg(long)]
    trace: bool,
    /// Switch known bugs on, one after the other, and fail unless each is found within that many seeds
    #[arg(long)]
    planted: bool,
    /// Build it optimised: worth it for more than a few hundred seeds
    #[arg(long)]
    release: bool,
}

/// True if no seed failed.
pub(crate) fn run(root: &Path, args: &SimArgs) -> Result<bool> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root).args(["run", "--quiet", "--package", "moim-sim"]);
    if args.release {
        command.arg("--release");
    }
    if args.planted {
        command.args(["--features", "planted"]);
    }
    command.arg("--");
    for (flag, value) in [
        ("--seeds", args.seeds),
        ("--start", args.start),
        ("--nodes", args.nodes as u64),
        ("--faults-ms", args.faults_ms),
    ] {
        command.arg(flag).arg(value.to_string());
    }
    for (flag, given) in [("--verbose", args.verbose), ("--trace", args.trace), ("--planted", args.planted)] {
        if given {
            command.arg(flag);
        }
    }
    Ok(command.status().context("cargo did not start")?.success())
}
