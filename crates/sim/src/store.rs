//! The store on simulated hosts: the shipped service, shards, connections and replication, with the controller, over a
//! coordination core that is always correct but not always reachable.
//!
//! Clients write registers, pairs and counters while hosts crash, pause and are partitioned; the history of all
//! clients must be linearizable. A seed decides faults, clients and times, but a run does not repeat itself to the
//! last message: replication and the controller iterate over hash maps, and select at random among ready futures.
//!
//! | file | owns |
//! |---|---|
//! | `links.rs` | streams between hosts, and requests to the core |
//! | `node.rs` | a node on a host, the controller |
//! | `clients.rs` | clients of the store and their histories |
//! | `migrations.rs` | slot migrations, with crashes at every step |
//! | `time.rs` | steps of wall clocks, and the bounds of times to live under them |
//! | `faults.rs` | fault injection |

mod clients;
mod faults;
pub(crate) mod links;
mod migrations;
mod node;
mod time;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moim_base::clock::Clock;
use moim_journal::disk::Survival;
use moim_slots::effects::FrameLimits;
use moim_state::MemoryRepository;

use self::clients::ClientPool;
use self::faults::Faults;
use self::links::Links;
use self::migrations::MigrationDriver;
pub use self::migrations::{KilledAt, Victim};
use self::node::Node;
pub use self::time::ClockFaults;
use self::time::{Bounds, ClockStepper};
use crate::bit_rot::{self, BitRot, Directories};
use crate::run::Failure;
use crate::world::{Task, Trace, World};

const NODES: usize = 3;
const SHARDS: usize = 2;

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// The seed; it decides everything else.
    pub seed: u64,
    /// Duration of fault injection, in simulated time.
    pub faults_ms: u64,
    /// Number of clients.
    pub clients: u64,
    /// True if slots migrate, with crashes of the primaries involved.
    pub migrations: bool,
    /// Frame limits of the shard journals: every second seed has frames so small that the effects of one command are a
    /// frame group.
    pub frames: FrameLimits,
    /// Faults of wall clocks; clients then write keys with times to live. `None`: every process has a random wall
    /// clock, decades from the others.
    pub clocks: Option<ClockFaults>,
    /// The host on whose disk bits flip while it is off.
    pub rot: Option<usize>,
}

impl StoreOptions {
    /// The default run of a seed.
    pub fn new(seed: u64) -> Self {
        let frames = match seed % 2 {
            0 => FrameLimits::default(),
            _ => FrameLimits { frame: 24, queue: 2_000, ..FrameLimits::default() },
        };
        Self { seed, faults_ms: 8_000, clients: 5, migrations: false, frames, clocks: None, rot: None }
    }

    /// A run with continuous slot migrations.
    pub fn with_migrations(seed: u64) -> Self {
        Self { migrations: true, ..Self::new(seed) }
    }

    /// A run with bit rot on the disk of one host.
    pub fn with_bit_rot(seed: u64) -> Self {
        let host = usize::try_from(seed % NODES as u64).unwrap_or(0);
        Self { rot: Some(host), ..Self::new(seed) }
    }

    /// A run with steps of wall clocks; half of the seeds have slot migrations, too.
    pub fn with_clock_faults(seed: u64) -> Self {
        Self { migrations: seed / 9 % 2 == 1, clocks: Some(ClockFaults::of(seed)), ..Self::new(seed) }
    }
}

/// Statistics of a run without a violation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreReport {
    /// Hash of the whole trace.
    pub hash: u64,
    /// Operations with a known outcome.
    pub answered: u64,
    /// Operations with an unknown outcome.
    pub unknown: u64,
    /// Number of injected faults.
    pub faults: u64,
    /// Completed slot migrations.
    pub migrated: u64,
    /// Crashed primaries, with the step of the migration.
    pub kills: Vec<KilledAt>,
    /// Flipped bits, and directories that were replaced because of them.
    pub rotted: (u64, u64),
    /// Number of wall clock steps.
    pub clock_steps: u64,
    /// Reads of keys with a time to live: found, and not found.
    pub ttl_reads: (u64, u64),
    /// Simulated time of the run, in milliseconds.
    pub world_ms: u64,
}

/// State shared by the world, the clients and the nodes.
pub(crate) struct Shared {
    trace: Trace,
    links: Arc<Links>,
    core: Arc<MemoryRepository>,
    core_host: usize,
    nodes: usize,
    shards: usize,
    frames: FrameLimits,
    directories: Directories,
    running: Mutex<BTreeMap<usize, Node>>,
    /// World time.
    now_ms: Arc<AtomicU64>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn node(&self, host: usize) -> Option<Node> {
        locked(&self.running).get(&host).cloned()
    }

    fn now_ms(&self) -> u64 {
        self.now_ms.load(Ordering::Relaxed)
    }

    fn add_node(&self, host: usize, node: Node) {
        locked(&self.running).insert(host, node);
    }

    fn remove_node(&self, host: usize) {
        // Dropped outside of the lock.
        let removed = locked(&self.running).remove(&host);
        drop(removed);
    }
}

/// World time, for parts that belong to no host.
struct WorldClock(Arc<AtomicU64>);

impl Clock for WorldClock {
    fn wall_ms(&self) -> i64 {
        1_700_000_000_000 + i64::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn monotonic_ns(&self) -> u64 {
        (1 << 40) + self.0.load(Ordering::Relaxed) * 1_000_000
    }
}

/// Runs one seed to its end.
pub fn run_store(options: StoreOptions) -> Result<StoreReport, Failure> {
    let mut world = World::new(options.seed);
    let result = Run::new(&mut world, options).and_then(|mut run| run.execute(&mut world, options));
    let trace = world.trace.lines();
    result.map_err(|what| Failure { seed: options.seed, what, trace })
}

struct Run {
    shared: Arc<Shared>,
    pool: Arc<ClientPool>,
    faults: Faults,
    migrations: MigrationDriver,
    clock_stepper: Option<ClockStepper>,
    opening: BTreeMap<usize, Task<std::io::Result<()>>>,
    tasks: Vec<Task<()>>,
    client_host: usize,
    is_healed: bool,
    violation: Option<String>,
    /// Directories that failed to open and were replaced.
    replaced: u64,
}

impl Run {
    fn new(world: &mut World, options: StoreOptions) -> Result<Self, String> {
        for _ in 0..NODES + 2 {
            world.add_host();
        }
        let (core_host, client_host) = (NODES, NODES + 1);
        let now_ms = Arc::new(AtomicU64::new(0));
        let core = Arc::new(MemoryRepository::new(Arc::new(WorldClock(Arc::clone(&now_ms)))));
        let shared = Arc::new(Shared {
            trace: world.trace.clone(),
            links: Arc::default(),
            core,
            core_host,
            nodes: NODES,
            shards: SHARDS,
            frames: options.frames,
            directories: Directories::default(),
            running: Mutex::default(),
            now_ms,
        });
        if options.clocks.is_some() {
            (0..NODES).for_each(|host| world.host(host).use_world_time());
        }
        let clock = world.host(core_host).start().clock;
        let controller = world.host(core_host).spawn(node::control(Arc::clone(&shared), clock));
        let leases = Arc::clone(&shared.core);
        let lease_ticks = world.host(core_host).spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let _ = leases.tick(); // cannot fail without a log
            }
        });
        drop((controller, lease_ticks));
        world.host(client_host).start();
        [core_host, client_host].iter().for_each(|host| world.host(*host).set_disk_ms(1_000));
        let disk_ms = [2, 6, 20][world.random.usize(..3)];
        (0..NODES).for_each(|host| world.host(host).set_disk_ms(disk_ms));
        let pool =
            ClientPool::new(Arc::clone(&shared), client_host, options.clocks.is_some(), options.migrations);
        let mut run = Self {
            shared,
            pool,
            faults: Faults::new(disk_ms, options.migrations, options.rot.map(BitRot::new)),
            migrations: MigrationDriver::new(options.seed),
            clock_stepper: options.clocks.map(ClockStepper::new),
            opening: BTreeMap::new(),
            tasks: Vec::new(),
            client_host,
            is_healed: false,
            violation: None,
            replaced: 0,
        };
        (0..NODES).for_each(|host| run.start(world, host));
        run.wait_until(world, 30_000, "the store to be founded", |run, _| run.pool.is_every_slot_served())?;
        if let Some(clocks) = options.clocks {
            let first = world.host(client_host).spawn(clients::write_initial_keys(Arc::clone(&run.pool)));
            run.wait_until(world, 30_000, "initial writes", |_, _| first.as_ref().is_none_or(Task::is_over))?;
            locked(&run.pool.expiries).begin(Bounds::new(clocks, world.now_ms()));
        }
        for number in 0..options.clients {
            let client = clients::client(Arc::clone(&run.pool), number);
            run.tasks.extend(world.host(client_host).spawn(client));
        }
        Ok(run)
    }

    /// Replaces a directory that the node refuses to open, as an operator would.
    fn replace(&mut self, world: &mut World, host: usize, why: &str) {
        world.trace.record(format_args!("directory of host {host} replaced: {why}"));
        self.replaced += 1;
        self.crash(world, host, Survival::Everything);
        world.host(host).wipe();
        self.shared.directories.replace(host);
        self.start(world, host);
    }

    fn is_all_in_sync(&self) -> bool {
        (0..NODES).all(|host| self.shared.node(host).is_some()) && bit_rot::is_all_in_sync(&self.shared.core)
    }

    /// Starts the node of a host.
    fn start(&mut self, world: &mut World, host: usize) {
        let process = match world.host(host).try_start() {
            Ok(process) => process,
            Err(error) if world.host(host).has_bit_rot() => {
                return self.replace(world, host, &error.to_string());
            }
            Err(error) => {
                self.violation.get_or_insert(format!("host {host} cannot open its store: {error}"));
                return;
            }
        };
        let Some(handle) = world.host(host).handle() else { return };
        let opened = world.host(host).spawn(node::open(Arc::clone(&self.shared), host, process, handle));
        self.opening.extend(opened.map(|task| (host, task)));
        self.shared.links.set_unresponsive(host, false);
    }

    /// Crashes the process of a host.
    fn crash(&mut self, world: &mut World, host: usize, survival: Survival) {
        self.shared.remove_node(host);
        self.opening.remove(&host);
        let seed = world.random.u64(..);
        world.host(host).crash(survival, seed);
    }

    fn step(&mut self, world: &mut World) -> Result<(), String> {
        world.step();
        self.shared.now_ms.store(world.now_ms(), Ordering::Relaxed);
        for host in 0..NODES {
            if world.host(host).has_failed() {
                // During fault injection the host stays down for a while.
                if self.is_healed {
                    self.crash(world, host, Survival::Random);
                    self.start(world, host);
                }
                continue;
            }
            if world.host(host).has_panicked() {
                return Err(format!("a task of host {host} panicked"));
            }
            match self.opening.get(&host).and_then(Task::take) {
                Some(Ok(())) => world.host(host).check_recovered()?,
                Some(Err(why)) if world.host(host).has_bit_rot() => {
                    self.replace(world, host, &why.to_string())
                }
                Some(Err(why)) => return Err(format!("host {host} cannot open its shards: {why}")),
                None => {}
            }
        }
        self.violation.take().map_or(Ok(()), Err)?;
        self.pool.first_violation().map_or(Ok(()), Err)
    }

    /// Steps without new faults until `done` returns true.
    fn wait_until(
        &mut self,
        world: &mut World,
        timeout_ms: u64,
        what: &str,
        mut done: impl FnMut(&mut Self, &mut World) -> bool,
    ) -> Result<(), String> {
        let deadline_ms = world.now_ms() + timeout_ms;
        while world.now_ms() < deadline_ms {
            self.step(world)?;
            if done(self, world) {
                return Ok(());
            }
        }
        Err(format!("timed out after {timeout_ms} ms waiting for {what}"))
    }

    fn execute(&mut self, world: &mut World, options: StoreOptions) -> Result<StoreReport, String> {
        let end_ms = world.now_ms() + options.faults_ms;
        while world.now_ms() < end_ms {
            self.step(world)?;
            self.step_faults(world, false);
            if options.migrations {
                self.step_migrations(world);
            }
            if let Some(clock_stepper) = &mut self.clock_stepper {
                clock_stepper.step(world);
            }
        }
        self.step_faults(world, true);
        self.is_healed = true;
        locked(&self.pool.expiries).heal(world.now_ms());
        self.pool.stop();
        let over = |run: &mut Self, _: &mut World| run.tasks.iter().all(Task::is_over);
        self.wait_until(world, 30_000, "clients to end", over)?;
        if options.migrations {
            self.wait_until(world, 60_000, "migrations to end", |run, _| {
                run.migrations.is_idle(&run.shared)
            })?;
        }
        let last = world.host(self.client_host).spawn(clients::read_all_keys(Arc::clone(&self.pool)));
        self.wait_until(world, 40_000, "every key to be read", |_, _| {
            last.as_ref().is_none_or(Task::is_over)
        })?;
        if options.clocks.is_some() {
            let over =
                |run: &mut Self, world: &mut World| locked(&run.pool.expiries).all_expired(world.now_ms());
            self.wait_until(world, 120_000, "times to live to expire", over)?;
            let last = world.host(self.client_host).spawn(clients::read_ttls(Arc::clone(&self.pool)));
            let over = |_: &mut Self, _: &mut World| last.as_ref().is_none_or(Task::is_over);
            self.wait_until(world, 40_000, "every key with a time to live to be read", over)?;
        }
        self.pool.check()?;
        let expiries = locked(&self.pool.expiries);
        Ok(StoreReport {
            hash: world.trace.hash(),
            answered: self.pool.answered.load(Ordering::Relaxed),
            unknown: self.pool.unknown.load(Ordering::Relaxed),
            faults: self.faults.count,
            migrated: self.migrations.completed(),
            kills: self.migrations.kills.clone(),
            rotted: (self.faults.rot.as_ref().map_or(0, |rot| rot.flips), self.replaced),
            clock_steps: self.clock_stepper.as_ref().map_or(0, |stepper| stepper.steps),
            ttl_reads: (expiries.reads_found, expiries.reads_missing),
            world_ms: world.now_ms(),
        })
    }

    /// Ends expired faults and may start a new one; with `heal` all faults end.
    fn step_faults(&mut self, world: &mut World, heal: bool) {
        let mut faults = std::mem::replace(&mut self.faults, Faults::new(0, false, None));
        faults.step(world, self, heal);
        self.faults = faults;
    }

    /// Starts slot migrations, and crashes their primaries.
    fn step_migrations(&mut self, world: &mut World) {
        let mut migrations = std::mem::replace(&mut self.migrations, MigrationDriver::new(0));
        migrations.step(world, self);
        self.migrations = migrations;
    }
}

/// Tells tasks of a run to stop.
#[derive(Default)]
struct StopFlag(AtomicBool);

impl StopFlag {
    fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
