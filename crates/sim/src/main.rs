//! `moim-sim`: runs seeds and says which of them fail. `cargo xtask sim` calls it.
#![allow(clippy::print_stdout)] // a command

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use moim_sim::{Options, run_traced};

/// A whole cluster on one thread from one seed, with faults
#[derive(Parser)]
#[command(name = "moim-sim")]
struct Args {
    /// How many seeds to run
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    start: u64,
    /// Founding members, three to seven; 0 lets the seed choose
    #[arg(long, default_value_t = 0)]
    nodes: usize,
    /// Milliseconds of faults in the world's time
    #[arg(long, default_value_t = 8_000)]
    faults_ms: u64,
    /// Clients of the key-value store
    #[arg(long, default_value_t = 5)]
    clients: u64,
    /// Print every run, not only those that fail
    #[arg(short, long)]
    verbose: bool,
    /// Print the trace of every run, as far as it was kept
    #[arg(long)]
    trace: bool,
}

#[allow(clippy::disallowed_methods)] // a person waits: this is a stopwatch
fn main() -> ExitCode {
    let args = Args::parse();
    let start = Instant::now();
    let (mut answered, mut world_ms) = (0, 0);
    for seed in args.start..args.start + args.seeds {
        let options = Options { seed, nodes: args.nodes, faults_ms: args.faults_ms, clients: args.clients };
        let (result, trace) = run_traced(options);
        if args.trace {
            trace.iter().for_each(|line| println!("{line}"));
        }
        match result {
            Ok(report) => {
                if args.verbose {
                    println!("seed {seed}: {report:?} {:.1} s", start.elapsed().as_secs_f64());
                }
                answered += report.answered;
                world_ms += report.world_ms;
            }
            Err(failure) => {
                println!("{failure}");
                println!("again: cargo xtask sim --start {seed} --seeds 1 --nodes {} --trace", args.nodes);
                return ExitCode::FAILURE;
            }
        }
    }
    println!(
        "{} seeds, {answered} operations answered, {} s of cluster time in {:.0} s: nothing wrong",
        args.seeds,
        world_ms / 1_000,
        start.elapsed().as_secs_f64(),
    );
    ExitCode::SUCCESS
}
