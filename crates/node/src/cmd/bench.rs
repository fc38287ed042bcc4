//! `moim bench …`: a load test of your own cluster. (`cargo xtask bench` compares side by side.)
//!
//! | file | owns |
//! |---|---|
//! | `pipeline.rs` | the pipeline, from the clients to the verdict |

mod pipeline;

use clap::{Args, Subcommand};

use crate::client::block_on;
use crate::exit::Outcome;
use crate::output::Output;

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Messages from clients through gateways, counters and aggregators until the verdict
    #[command(after_help = "Example:
  moim bench pipeline --clients 100 --lines 10000
  moim bench pipeline --rate 50                  # how long messages take when nothing is in a hurry
  moim bench pipeline --kafka k1:9092 --redis r1:6379 --ack-after-queue -o json")]
    Pipeline(pipeline::PipelineBench),
}

pub(crate) fn run(args: BenchArgs, output: Output) -> Outcome {
    block_on(async {
        match args.what {
            What::Pipeline(args) => pipeline::run(&args, output).await,
        }
    })
}
