//! The queue on simulated hosts: the shipped broker, its consumer groups and transactions, replication and the
//! controller.
//!
//! Producers write transactions that they commit or abort. Members of a group copy the records to another topic,
//! offsets and records in one transaction. Readers observe the topics, while hosts crash, pause and are partitioned.
//! In the end every committed transaction is present completely and once, no aborted one was ever visible, and the
//! copy equals the original. A seed decides faults, clients and times, but a run does not repeat itself to the last
//! message.
//!
//! | file | owns |
//! |---|---|
//! | `node.rs` | a node on a host |
//! | `kafka_client.rs` | requests of clients, and their outcomes |
//! | `producer.rs` | one transactional producer: producer id, sequence numbers, commit and abort |
//! | `group.rs`, `log.rs` | a group member; `read_committed` fetches |
//! | `clients.rs` | clients of the queue, and the checks of their observations |

mod clients;
mod group;
mod kafka_client;
mod log;
mod node;
mod producer;

use std::sync::Arc;

use self::clients::ClientPool;
use self::node::BrokerHandle;
use crate::bit_rot::BitRot;
use crate::run::Failure;
use crate::testbed::{self, Testbed};
use crate::world::{Task, World};

type Shared = testbed::Shared<BrokerHandle>;

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// The seed; it decides everything else.
    pub seed: u64,
    /// Duration of fault injection, in simulated time.
    pub faults_ms: u64,
    /// The host on whose disk bits flip while it is off.
    pub rot: Option<usize>,
}

impl QueueOptions {
    /// The default run of a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, faults_ms: 6_000, rot: None }
    }

    /// A run with bit rot on the disk of one host.
    pub fn with_bit_rot(seed: u64) -> Self {
        let host = usize::try_from(seed % testbed::NODES as u64).unwrap_or(0);
        Self { rot: Some(host), ..Self::new(seed) }
    }
}

/// Statistics of a run without a violation.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueReport {
    /// Transactions with an acknowledged commit.
    pub committed: usize,
    /// Transactions that were aborted.
    pub aborted: usize,
    /// Transactions with an unknown outcome.
    pub unknown: usize,
    /// Records that the group copied.
    pub copied: usize,
    /// Number of joins to a group generation.
    pub generations: u64,
    /// Number of injected faults.
    pub faults: u64,
    /// Flipped bits, and directories that were replaced because of them.
    pub rotted: (u64, u64),
    /// Simulated time of the run, in milliseconds.
    pub world_ms: u64,
}

/// Runs one seed to its end.
pub fn run_queue(options: QueueOptions) -> Result<QueueReport, Failure> {
    let mut world = World::new(options.seed);
    let result = execute(&mut world, options);
    let trace = world.trace.lines();
    result.map_err(|what| Failure { seed: options.seed, what, trace })
}

fn execute(world: &mut World, options: QueueOptions) -> Result<QueueReport, String> {
    let open = |shared, host, process, handle| -> moim_state::BoxFuture<'static, _> {
        Box::pin(node::open(shared, host, process, handle))
    };
    let mut testbed = Testbed::new(world, open, options.rot.map(BitRot::new));
    let pool = ClientPool::new(Arc::clone(&testbed.shared), testbed.client_host);
    let client_host = testbed.client_host;
    let created = world.host(client_host).spawn(clients::create_topics(Arc::clone(&pool)));
    let over = |task: &Option<Task<()>>| task.as_ref().is_none_or(Task::is_over);
    testbed.wait_until(world, 60_000, "topics to be created", || Ok(over(&created)))?;
    let mut writers = Vec::new();
    for number in 0..clients::WRITERS {
        writers.extend(world.host(client_host).spawn(clients::write(Arc::clone(&pool), number)));
    }
    let mut others = Vec::new();
    for number in 0..clients::COPIERS {
        others.extend(world.host(client_host).spawn(clients::copy(Arc::clone(&pool), number)));
    }
    for partition in 0..clients::PARTITIONS {
        others.extend(world.host(client_host).spawn(clients::read(Arc::clone(&pool), partition)));
    }
    testbed.run_faults(world, options.faults_ms, || pool.first_violation())?;
    pool.writing.stop();
    let ended = |tasks: &[Task<()>]| pool.first_violation().map_or(Ok(tasks.iter().all(Task::is_over)), Err);
    testbed.wait_until(world, 60_000, "producers to end", || ended(&writers))?;
    // No transaction stays open: the coordinator aborts those of dead producers after the transaction timeout.
    let input = world.host(client_host).spawn(clients::read_to_end(Arc::clone(&pool), clients::INPUT));
    testbed.wait_until(world, 60_000, "the input topic to be read", || ended(input.as_slice()))?;
    pool.check_input()?;
    testbed.wait_until(world, 90_000, "the group to copy all records", || {
        pool.first_violation().map_or(Ok(pool.is_copied()), Err)
    })?;
    pool.copying.stop();
    testbed.wait_until(world, 60_000, "the group to end", || ended(&others))?;
    let output = world.host(client_host).spawn(clients::read_to_end(Arc::clone(&pool), clients::OUTPUT));
    testbed.wait_until(world, 60_000, "the output topic to be read", || ended(output.as_slice()))?;
    let report = pool.check_output()?;
    let (faults, rotted) = (testbed.fault_count(), testbed.rotted());
    Ok(QueueReport { faults, rotted, world_ms: world.now_ms(), ..report })
}
