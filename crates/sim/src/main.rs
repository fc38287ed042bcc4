//! `moim-sim`: runs seeds and reports those that fail. `cargo xtask sim` calls it.
#![allow(clippy::print_stdout)] // a command

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
#[cfg(feature = "planted")]
use moim_raft::planted::{Bug, plant};
#[cfg(feature = "planted")]
use moim_sim::run;
use moim_sim::{Options, QueueOptions, run_queue, run_traced};

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
    /// Switch known bugs on, one after the other, and fail unless each is found within that many seeds
    #[cfg(feature = "planted")]
    #[arg(long)]
    planted: bool,
    /// With `--planted`: only bugs whose name contains this
    #[cfg(feature = "planted")]
    #[arg(long, default_value = "")]
    bug: String,
    /// Run the queue, its transactions and groups, instead of the coordination core
    #[arg(long)]
    queue: bool,
    /// Print every run, not only those that fail
    #[arg(short, long)]
    verbose: bool,
    /// Print the trace of every run, as far as it was kept
    #[arg(long)]
    trace: bool,
}

impl Args {
    fn options(&self, seed: u64) -> Options {
        Options { seed, nodes: self.nodes, faults_ms: self.faults_ms, clients: self.clients }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    #[cfg(feature = "planted")]
    if args.planted {
        return find_planted(&args);
    }
    if args.queue {
        return run_queues(&args);
    }
    run_seeds(&args)
}

/// Runs the queue from every seed, also after a failure: a seed that failed may pass when it is repeated.
fn run_queues(args: &Args) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for seed in args.start..args.start + args.seeds {
        match run_queue(QueueOptions { faults_ms: args.faults_ms, ..QueueOptions::new(seed) }) {
            Ok(report) if args.verbose => println!("seed {seed}: {report:?}"),
            Ok(_) => {}
            Err(failure) => {
                println!("{failure}");
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

/// Fails unless each planted bug is found.
#[cfg(feature = "planted")]
fn find_planted(args: &Args) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for bug in Bug::ALL.into_iter().filter(|bug| format!("{bug:?}").contains(&args.bug)) {
        plant(Some(bug));
        let failed = (args.start..args.start + args.seeds).find_map(|seed| run(args.options(seed)).err());
        match failed {
            Some(failure) => println!("{bug:?}: seed {}: {}", failure.seed, failure.what),
            None => {
                println!("{bug:?}: NOT FOUND in {} seeds", args.seeds);
                code = ExitCode::FAILURE;
            }
        }
    }
    plant(None);
    code
}

#[allow(clippy::disallowed_methods)] // elapsed time for the operator
fn run_seeds(args: &Args) -> ExitCode {
    let start = Instant::now();
    let (mut answered, mut world_ms) = (0, 0);
    for seed in args.start..args.start + args.seeds {
        let (result, trace) = run_traced(args.options(seed));
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
