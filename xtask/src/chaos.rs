//! `cargo xtask chaos`: real nodes and real clients under faults, for as many rounds as wanted.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

/// What to run.
#[derive(Args)]
#[command(after_help = "Example: cargo xtask chaos --everything --rounds 200 --seed 7")]
pub(crate) struct ChaosArgs {
    /// How many faults, one after the other
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// Which faults: the same seed gives the same
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long the cluster may take to be whole after a fault (without --everything)
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    whole_within: u64,
    /// Every kind of fault (bit flips, rollbacks, clones, hung and slow disks, clock steps), a load on all three protocols
    /// and hostile clients
    #[arg(long)]
    everything: bool,
    /// The program under test [default: the one of this workspace]
    #[arg(long, value_name = "MOIM")]
    program: Option<String>,
}

/// True if the run found no violation.
pub(crate) fn run(root: &Path, args: &ChaosArgs) -> Result<bool> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    let target = if args.everything { "storm" } else { "chaos" };
    command
        .current_dir(root)
        .args(["test", "--quiet", "--package", "moim-interop", "--test", target, "--", "--nocapture"])
        .env("MOIM_STORM_ROUNDS", args.rounds.to_string())
        .env("MOIM_STORM_SEED", args.seed.to_string())
        .env("MOIM_CHAOS_ROUNDS", args.rounds.to_string())
        .env("MOIM_CHAOS_SEED", args.seed.to_string())
        .env("MOIM_CHAOS_WHOLE_S", args.whole_within.to_string());
    if let Some(program) = &args.program {
        command.env("MOIM_BIN", program);
    }
    Ok(command.status().context("cargo did not start")?.success())
}
