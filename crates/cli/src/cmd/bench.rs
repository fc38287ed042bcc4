//! `moim bench …`: a load test of your own cluster. (`cargo xtask bench` compares side by side.)
//!
//! Every load cleans up what it made, also when it fails or is stopped with Ctrl-C; a second Ctrl-C leaves it lying.
//!
//! | file | owns |
//! |---|---|
//! | `load.rs` | workers that do one thing again and again, and what came of it |
//! | `queue.rs` | messages into a topic, and out of it |
//! | `slots.rs` | SET and GET |
//! | `coord.rs` | puts, reads and watches |
//! | `pipeline.rs` | the pipeline, from the clients to the verdict |

mod coord;
mod load;
mod pipeline;
mod queue;
mod slots;

use clap::{Args, Subcommand};
use moim_node::Signals;

use crate::cmd::block_on;
use crate::exit::{Failure, Outcome};
use crate::output::{Output, note};

use self::load::Stop;

#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Messages into a topic of its own as fast as they are acknowledged, and out of it again
    #[command(after_help = "Example:
  moim bench queue
  moim bench queue --size 100 --batch 1048576 --acks 1   # small messages, large batches
  moim bench queue --rate 10000                          # how long a write takes when nothing is in a hurry
  moim bench queue --kafka k1:9092,k2:9092 -o json")]
    Queue(queue::QueueBench),
    /// SET and GET over keys of its own
    #[command(after_help = "Example:
  moim bench slots
  moim bench slots --clients 200 --size 1000 --keys 100000
  moim bench slots --redis r1:6379,r2:6379 --rate 5000 -o json")]
    Slots(slots::SlotsBench),
    /// Puts, reads of the newest state, and how soon a watcher sees a change
    #[command(after_help = "Example:
  moim bench coord
  moim bench coord --clients 1                   # how long one put takes
  moim bench coord --etcd e1:2379,e2:2379 -o json")]
    Coord(coord::CoordBench),
    /// Messages from clients through gateways, counters and aggregators until the verdict
    #[command(after_help = "Example:
  moim bench pipeline --clients 100 --lines 10000
  moim bench pipeline --rate 50                  # how long messages take when nothing is in a hurry
  moim bench pipeline --kafka k1:9092 --redis r1:6379 --ack-after-queue -o json")]
    Pipeline(pipeline::PipelineBench),
}

pub(crate) fn run(args: BenchArgs, output: Output) -> Outcome {
    let stop = Stop::default();
    block_on(async {
        match args.what {
            What::Queue(args) => stoppable(&stop, queue::run(&args, &stop, output)).await,
            What::Slots(args) => stoppable(&stop, slots::run(&args, &stop, output)).await,
            What::Coord(args) => stoppable(&stop, coord::run(&args, &stop, output)).await,
            What::Pipeline(args) => pipeline::run(&args, output).await,
        }
    })
}

/// Ctrl-C ends the load early: what was measured until then is shown, and what was made is cleaned up.
async fn stoppable(stop: &Stop, load: impl Future<Output = Outcome>) -> Outcome {
    let mut signals = Signals::listen()?;
    let mut load = std::pin::pin!(load);
    tokio::select! {
        outcome = &mut load => return outcome,
        _ = signals.next() => {}
    }
    note("stopping and cleaning up; Ctrl-C again leaves things as they are");
    stop.stop();
    tokio::select! {
        outcome = load => outcome,
        _ = signals.next() => Err(Failure::error("stopped before everything was cleaned up")
            .hint("what is left has names that begin with `moim-bench`")),
    }
}
