//! The queue on simulated machines: the shipped broker, its groups and transactions, replication and the controller.
//!
//! Producers write transactions that they commit or abort, members of a group copy what they read to another topic, offsets
//! and records in one transaction, and readers look on, while machines crash, stand still and lose each other. In the end every
//! transaction that was committed is there whole and once, none that was aborted was ever seen, and the copy is the original.
//! A seed decides faults, clients and times, but a run does not repeat itself to the last message.
//!
//! | file | owns |
//! |---|---|
//! | `node.rs` | a node on a machine |
//! | `wire.rs` | requests of clients, and what became of them |
//! | `producer.rs` | one transactional producer: identity, sequence, commit and abort |
//! | `group.rs`, `log.rs` | a member of a group; reading what is committed |
//! | `clients.rs` | who uses the queue, and what they were promised |

mod clients;
mod group;
mod log;
mod node;
mod producer;
mod wire;

use std::sync::Arc;

use self::clients::Crowd;
use self::node::Serves;
use crate::rot::Rot;
use crate::run::Failure;
use crate::site::{self, Site};
use crate::world::{Task, World};

type Shared = site::Shared<Serves>;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Decides everything else.
    pub seed: u64,
    /// How long faults last, in the world's time.
    pub faults_ms: u64,
    /// The machine on whose disk bits flip while it is off.
    pub rot: Option<usize>,
}

impl QueueOptions {
    /// The usual run from a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, faults_ms: 6_000, rot: None }
    }

    /// A run in which the disk of a machine rots.
    pub fn rotting(seed: u64) -> Self {
        let host = usize::try_from(seed % site::NODES as u64).unwrap_or(0);
        Self { rot: Some(host), ..Self::new(seed) }
    }
}

/// A run in which nothing was wrong.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueReport {
    /// Transactions whose commit was acknowledged.
    pub committed: usize,
    /// Transactions whose abort was.
    pub aborted: usize,
    /// Transactions of which nobody was told.
    pub unknown: usize,
    /// Records that the group copied.
    pub copied: usize,
    /// How often a member came to a new generation of the group.
    pub generations: u64,
    /// Faults.
    pub faults: u64,
    /// Bits that flipped, and directories that were refused for it and replaced.
    pub rotted: (u64, u64),
    /// Milliseconds that passed in the world.
    pub world_ms: u64,
}

/// Runs a world from a seed to its end.
pub fn run_queue(options: QueueOptions) -> Result<QueueReport, Failure> {
    let mut world = World::new(options.seed);
    let result = live(&mut world, options);
    let trace = world.trace.lines();
    result.map_err(|what| Failure { seed: options.seed, what, trace })
}

fn live(world: &mut World, options: QueueOptions) -> Result<QueueReport, String> {
    let open = |shared, host, process, handle| -> moim_cluster::BoxFuture<'static, _> {
        Box::pin(node::open(shared, host, process, handle))
    };
    let mut site = Site::new(world, open, options.rot.map(Rot::new));
    let crowd = Crowd::new(Arc::clone(&site.shared), site.client_host);
    let client_host = site.client_host;
    let founded = world.host(client_host).spawn(clients::found(Arc::clone(&crowd)));
    let over = |task: &Option<Task<()>>| task.as_ref().is_none_or(Task::is_over);
    site.quiet(world, 60_000, "topics to be made", || Ok(over(&founded)))?;
    let mut writers = Vec::new();
    for number in 0..clients::WRITERS {
        writers.extend(world.host(client_host).spawn(clients::write(Arc::clone(&crowd), number)));
    }
    let mut others = Vec::new();
    for number in 0..clients::COPIERS {
        others.extend(world.host(client_host).spawn(clients::copy(Arc::clone(&crowd), number)));
    }
    for partition in 0..clients::PARTITIONS {
        others.extend(world.host(client_host).spawn(clients::read(Arc::clone(&crowd), partition)));
    }
    site.suffer(world, options.faults_ms, || crowd.first_violation())?;
    crowd.writing.off();
    let ended = |tasks: &[Task<()>]| crowd.first_violation().map_or(Ok(tasks.iter().all(Task::is_over)), Err);
    site.quiet(world, 60_000, "producers to end", || ended(&writers))?;
    // Nothing is left open: what a dead producer began is given up when its time is over.
    let input = world.host(client_host).spawn(clients::read_to_the_end(Arc::clone(&crowd), clients::INPUT));
    site.quiet(world, 60_000, "everything that was written to be read", || ended(input.as_slice()))?;
    crowd.judge_input()?;
    site.quiet(world, 90_000, "everything to be copied", || {
        crowd.first_violation().map_or(Ok(crowd.is_copied()), Err)
    })?;
    crowd.copying.off();
    site.quiet(world, 60_000, "the group to end", || ended(&others))?;
    let output = world.host(client_host).spawn(clients::read_to_the_end(Arc::clone(&crowd), clients::OUTPUT));
    site.quiet(world, 60_000, "everything that was copied to be read", || ended(output.as_slice()))?;
    let counted = crowd.judge()?;
    Ok(QueueReport { faults: site.faults(), rotted: site.rotted(), world_ms: world.now_ms(), ..counted })
}
