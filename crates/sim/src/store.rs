//! The store on simulated machines: the shipped service, shards, connections and replication, with the controller, over a
//! coordination core that is always right but not always reached.
//!
//! Clients write registers, pairs and counters while machines crash, stand still and lose each other; everything any of them saw
//! must be explained by one correct store. A seed decides faults, clients and times, but a run does not repeat itself to the last message: replication and
//! the controller iterate over hash maps, and select at random among what is ready.
//!
//! | file | owns |
//! |---|---|
//! | `wires.rs` | streams between machines and the way to the core |
//! | `node.rs` | a node on a machine, the controller |
//! | `clients.rs` | who uses the store |
//! | `mover.rs` | slots on the move, struck at every step |
//! | `time.rs` | steps of wall clocks, and what times to live are worth then |
//! | `trouble.rs` | what goes wrong |

mod clients;
mod mover;
mod node;
mod time;
mod trouble;
pub(crate) mod wires;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use moim_base::clock::Clock;
use moim_cluster::MemoryRepository;
use moim_journal::disk::Survival;
use moim_slots::effects::FrameLimits;

use self::clients::Crowd;
use self::mover::Mover;
pub use self::mover::{Struck, Victim};
use self::node::Node;
pub use self::time::ClockFaults;
use self::time::{Bounds, Stepper};
use self::trouble::Trouble;
use self::wires::Wires;
use crate::rot::{self, Directories, Rot};
use crate::run::Failure;
use crate::world::{Task, Trace, World};

const NODES: usize = 3;
const SHARDS: usize = 2;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Decides everything else.
    pub seed: u64,
    /// How long faults last, in the world's time.
    pub faults_ms: u64,
    /// Clients.
    pub clients: u64,
    /// Whether slots move, and whoever moves them is struck.
    pub moves: bool,
    /// How large the frames of the shards' journals are: every second seed has frames so small that what one command records
    /// is a group of several.
    pub frames: FrameLimits,
    /// What happens to wall clocks; clients write keys with times to live then. None: every process has a wall clock of its
    /// own, decades from the others.
    pub clocks: Option<ClockFaults>,
    /// The machine on whose disk bits flip while it is off.
    pub rot: Option<usize>,
}

impl StoreOptions {
    /// The usual run from a seed.
    pub fn new(seed: u64) -> Self {
        let frames = match seed % 2 {
            0 => FrameLimits::default(),
            _ => FrameLimits { frame: 24, queue: 2_000, ..FrameLimits::default() },
        };
        Self { seed, faults_ms: 8_000, clients: 5, moves: false, frames, clocks: None, rot: None }
    }

    /// A run in which slots move all the time.
    pub fn moving(seed: u64) -> Self {
        Self { moves: true, ..Self::new(seed) }
    }

    /// A run in which the disk of a machine rots.
    pub fn rotting(seed: u64) -> Self {
        let host = usize::try_from(seed % NODES as u64).unwrap_or(0);
        Self { rot: Some(host), ..Self::new(seed) }
    }

    /// A run in which wall clocks are stepped; in half of the seeds slots move, too.
    pub fn clocks(seed: u64) -> Self {
        Self { moves: seed / 9 % 2 == 1, clocks: Some(ClockFaults::of(seed)), ..Self::new(seed) }
    }
}

/// A run in which nothing was wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreReport {
    /// The checksum of everything that happened.
    pub hash: u64,
    /// Operations that were answered.
    pub answered: u64,
    /// Operations whose outcome nobody knows.
    pub unknown: u64,
    /// Faults.
    pub faults: u64,
    /// Moves of slots that came to their end.
    pub moved: u64,
    /// Primaries that were killed, and at which step of a move.
    pub struck: Vec<Struck>,
    /// Bits that flipped, and directories that were refused for it and replaced.
    pub rotted: (u64, u64),
    /// Steps of wall clocks.
    pub clock_steps: u64,
    /// Reads of keys with a time to live that found them, and that did not.
    pub ttl_reads: (u64, u64),
    /// Milliseconds that passed in the world.
    pub world_ms: u64,
}

/// What the world, the clients and the nodes know together.
pub(crate) struct Shared {
    trace: Trace,
    wires: Arc<Wires>,
    core: Arc<MemoryRepository>,
    core_host: usize,
    nodes: usize,
    shards: usize,
    frames: FrameLimits,
    directories: Directories,
    present: Mutex<BTreeMap<usize, Node>>,
    /// The true time.
    now_ms: Arc<AtomicU64>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn node(&self, host: usize) -> Option<Node> {
        locked(&self.present).get(&host).cloned()
    }

    fn now_ms(&self) -> u64 {
        self.now_ms.load(Ordering::Relaxed)
    }

    fn arrive(&self, host: usize, node: Node) {
        locked(&self.present).insert(host, node);
    }

    fn leave(&self, host: usize) {
        // Dropped outside the lock.
        let gone = locked(&self.present).remove(&host);
        drop(gone);
    }
}

/// The time of the world, for what belongs to no machine.
struct WorldClock(Arc<AtomicU64>);

impl Clock for WorldClock {
    fn wall_ms(&self) -> i64 {
        1_700_000_000_000 + i64::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn monotonic_ns(&self) -> u64 {
        (1 << 40) + self.0.load(Ordering::Relaxed) * 1_000_000
    }
}

/// Runs a world from a seed to its end.
pub fn run_store(options: StoreOptions) -> Result<StoreReport, Failure> {
    let mut world = World::new(options.seed);
    let result = Run::new(&mut world, options).and_then(|mut run| run.live(&mut world, options));
    let trace = world.trace.lines();
    result.map_err(|what| Failure { seed: options.seed, what, trace })
}

struct Run {
    shared: Arc<Shared>,
    crowd: Arc<Crowd>,
    trouble: Trouble,
    mover: Mover,
    stepper: Option<Stepper>,
    opening: BTreeMap<usize, Task<std::io::Result<()>>>,
    tasks: Vec<Task<()>>,
    client_host: usize,
    is_healed: bool,
    violation: Option<String>,
    /// Directories that were refused and replaced.
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
            wires: Arc::default(),
            core,
            core_host,
            nodes: NODES,
            shards: SHARDS,
            frames: options.frames,
            directories: Directories::default(),
            present: Mutex::default(),
            now_ms,
        });
        if options.clocks.is_some() {
            (0..NODES).for_each(|host| world.host(host).keep_time());
        }
        let clock = world.host(core_host).start().clock;
        let controlled = world.host(core_host).spawn(node::control(Arc::clone(&shared), clock));
        let leases = Arc::clone(&shared.core);
        let ticked = world.host(core_host).spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let _ = leases.tick(); // nothing can fail without a log
            }
        });
        drop((controlled, ticked));
        world.host(client_host).start();
        [core_host, client_host].iter().for_each(|host| world.host(*host).set_disk_ms(1_000));
        let disk_ms = [2, 6, 20][world.random.usize(..3)];
        (0..NODES).for_each(|host| world.host(host).set_disk_ms(disk_ms));
        let crowd = Crowd::new(Arc::clone(&shared), client_host, options.clocks.is_some(), options.moves);
        let mut run = Self {
            shared,
            crowd,
            trouble: Trouble::new(disk_ms, options.moves, options.rot.map(Rot::new)),
            mover: Mover::new(options.seed),
            stepper: options.clocks.map(Stepper::new),
            opening: BTreeMap::new(),
            tasks: Vec::new(),
            client_host,
            is_healed: false,
            violation: None,
            replaced: 0,
        };
        (0..NODES).for_each(|host| run.start(world, host));
        run.quiet(world, 30_000, "the store to be founded", |run, _| run.crowd.serves())?;
        if let Some(clocks) = options.clocks {
            let first = world.host(client_host).spawn(clients::write_first(Arc::clone(&run.crowd)));
            run.quiet(world, 30_000, "first writes", |_, _| first.as_ref().is_none_or(Task::is_over))?;
            locked(&run.crowd.expiries).begin(Bounds::new(clocks, world.now_ms()));
        }
        for number in 0..options.clients {
            let client = clients::client(Arc::clone(&run.crowd), number);
            run.tasks.extend(world.host(client_host).spawn(client));
        }
        Ok(run)
    }

    /// An operator replaces a directory that the node refuses.
    fn replace(&mut self, world: &mut World, host: usize, why: &str) {
        world.trace.note(format_args!("host {host} is replaced: {why}"));
        self.replaced += 1;
        self.crash(world, host, Survival::Everything);
        world.host(host).wipe();
        self.shared.directories.replace(host);
        self.start(world, host);
    }

    fn is_all_in_sync(&self) -> bool {
        (0..NODES).all(|host| self.shared.node(host).is_some()) && rot::is_all_in_sync(&self.shared.core)
    }

    /// Starts the node of a machine.
    fn start(&mut self, world: &mut World, host: usize) {
        let process = match world.host(host).try_start() {
            Ok(process) => process,
            Err(error) if world.host(host).is_rotten() => {
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
        self.shared.wires.set_deaf(host, false);
    }

    /// Ends the process of a machine.
    fn crash(&mut self, world: &mut World, host: usize, survival: Survival) {
        self.shared.leave(host);
        self.opening.remove(&host);
        let seed = world.random.u64(..);
        world.host(host).crash(survival, seed);
    }

    fn step(&mut self, world: &mut World) -> Result<(), String> {
        world.step();
        self.shared.now_ms.store(world.now_ms(), Ordering::Relaxed);
        for host in 0..NODES {
            if world.host(host).has_failed() {
                // While faults go on it stays down for a while.
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
                Some(Err(why)) if world.host(host).is_rotten() => self.replace(world, host, &why.to_string()),
                Some(Err(why)) => return Err(format!("host {host} cannot open its shards: {why}")),
                None => {}
            }
        }
        self.violation.take().map_or(Ok(()), Err)?;
        self.crowd.first_violation().map_or(Ok(()), Err)
    }

    /// Lets time pass without new faults until something is so.
    fn quiet(
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
        Err(format!("waited {timeout_ms} ms in vain for {what}"))
    }

    fn live(&mut self, world: &mut World, options: StoreOptions) -> Result<StoreReport, String> {
        let end_ms = world.now_ms() + options.faults_ms;
        while world.now_ms() < end_ms {
            self.step(world)?;
            self.disturb(world, false);
            if options.moves {
                self.keep_moving(world);
            }
            if let Some(stepper) = &mut self.stepper {
                stepper.step(world);
            }
        }
        self.disturb(world, true);
        self.is_healed = true;
        locked(&self.crowd.expiries).heal(world.now_ms());
        self.crowd.stop();
        let over = |run: &mut Self, _: &mut World| run.tasks.iter().all(Task::is_over);
        self.quiet(world, 30_000, "clients to end", over)?;
        if options.moves {
            self.quiet(world, 60_000, "moves to end", |run, _| run.mover.is_idle(&run.shared))?;
        }
        let last = world.host(self.client_host).spawn(clients::read_everything(Arc::clone(&self.crowd)));
        self.quiet(world, 40_000, "every key to be read", |_, _| last.as_ref().is_none_or(Task::is_over))?;
        if options.clocks.is_some() {
            let over =
                |run: &mut Self, world: &mut World| locked(&run.crowd.expiries).all_over(world.now_ms());
            self.quiet(world, 120_000, "times to live to end", over)?;
            let last = world.host(self.client_host).spawn(clients::read_ttls(Arc::clone(&self.crowd)));
            let over = |_: &mut Self, _: &mut World| last.as_ref().is_none_or(Task::is_over);
            self.quiet(world, 40_000, "every key with a time to live to be read", over)?;
        }
        self.crowd.judge()?;
        let expiries = locked(&self.crowd.expiries);
        Ok(StoreReport {
            hash: world.trace.hash(),
            answered: self.crowd.answered.load(Ordering::Relaxed),
            unknown: self.crowd.unknown.load(Ordering::Relaxed),
            faults: self.trouble.count,
            moved: self.mover.moved(),
            struck: self.mover.struck.clone(),
            rotted: (self.trouble.rot.as_ref().map_or(0, |rot| rot.flips), self.replaced),
            clock_steps: self.stepper.as_ref().map_or(0, |stepper| stepper.steps),
            ttl_reads: (expiries.seen_alive, expiries.seen_gone),
            world_ms: world.now_ms(),
        })
    }

    /// Ends what is over and maybe begins something; with `heal` everything ends.
    fn disturb(&mut self, world: &mut World, heal: bool) {
        let mut trouble = std::mem::replace(&mut self.trouble, Trouble::new(0, false, None));
        trouble.step(world, self, heal);
        self.trouble = trouble;
    }

    /// Sees to it that slots move, and strikes whoever moves them.
    fn keep_moving(&mut self, world: &mut World) {
        let mut mover = std::mem::replace(&mut self.mover, Mover::new(0));
        mover.step(world, self);
        self.mover = mover;
    }
}

/// Whether a run goes on.
#[derive(Default)]
struct Switch(AtomicBool);

impl Switch {
    fn off(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_off(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
