//! A host: a persistent disk, and a process that starts and crashes.
//!
//! The disk thread of a real node is a task here: it pumps the store at random times, so that appended data stays
//! unsynced for a while. A crash cuts the power of the disk first, then drops the process with every task; unsynced
//! data is lost, kept, or torn, as the crash specifies.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::clock::Clock;
use moim_base::task::{Scope, Shutdown};
use moim_journal::disk::{Fault, Survival};
use moim_journal::{
    Chunk, Disk, Durability, DurableSink, Journal, JournalId, OpenError, SimDisk, Store, StoreOptions,
};
use moim_raft::{Router, Transport};
use tokio::runtime::{Handle, Runtime};
use tokio::time::Instant;

use super::clock::HostClock;
use super::network::{Link, Network, address};
use super::task::Task;
use super::trace::Trace;

const ROOT: &str = "/data";
/// Wall clock of a host with world time, at the start of the world.
const EPOCH_MS: i64 = 1_700_000_000_000;

/// The environment of a process.
#[derive(Clone)]
pub struct Process {
    /// Data directory.
    pub root: PathBuf,
    /// The host's disk.
    pub disk: Arc<dyn Disk>,
    /// The journal store on that disk; a task of the host pumps it.
    pub store: Store,
    /// Receives requests of peers and durability notifications of the disk.
    pub router: Router,
    /// Transport to peers.
    pub transport: Arc<dyn Transport>,
    /// The host's clocks.
    pub clock: Arc<dyn Clock>,
    /// Task scope of the process.
    pub scope: Scope,
}

/// One process of a host, from start to crash.
struct Instance {
    runtime: Runtime,
    router: Router,
    shutdown: Shutdown,
    store: Store,
    /// Set when the disk failed; a real node would stop.
    failed: Arc<AtomicBool>,
    /// Start time, by its own clock and by the world's.
    started: Instant,
    started_ms: u64,
}

/// A simulated machine.
pub struct Host {
    number: usize,
    network: Network,
    trace: Trace,
    disk: SimDisk,
    instance: Option<Instance>,
    paused: bool,
    now_ms: u64,
    /// Maximum duration of a sync.
    disk_ms: Arc<AtomicU64>,
    /// Set while the disk hangs: syncs do not return.
    hangs: Arc<AtomicBool>,
    /// True if the wall clock shows world time plus its steps; otherwise every process starts at a random wall time.
    uses_world_time: bool,
    /// Offset of the wall clock from world time.
    stepped_ms: Arc<AtomicI64>,
    /// Durable ends after the last syncs of this process.
    synced: Arc<Mutex<Synced>>,
    /// The ends that recovery must reach, unless it reports damage.
    expected_ends: Ends,
    has_bit_rot: bool,
}

/// End offset of each journal.
type Ends = BTreeMap<JournalId, i64>;

/// The durable ends of journals after the last two syncs: no later record vouches for the last one.
#[derive(Default)]
struct Synced {
    last: Ends,
    previous: Ends,
}

impl Synced {
    fn on_sync(&mut self, ends: Ends) {
        if ends != self.last {
            self.previous = std::mem::replace(&mut self.last, ends);
        }
    }
}

fn durable_ends(store: &Store) -> Ends {
    let journals = store.open_journals().into_iter();
    let synced = journals.filter(|journal| journal.durability() == Durability::Fsync);
    synced.map(|journal| (journal.id(), journal.durable_end())).collect()
}

/// The lower end of each journal that is in both.
fn lower_ends(one: &Ends, other: &Ends) -> Ends {
    one.iter().filter_map(|(id, end)| Some((*id, *end.min(other.get(id)?)))).collect()
}

struct Sink(Router);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        self.0.on_durable(advanced);
    }
}

fn store_options(failed: &Arc<AtomicBool>) -> StoreOptions {
    let failed = Arc::clone(failed);
    // Small limits, so that files are rotated, recycled and checkpointed frequently.
    StoreOptions {
        commit_file_bytes: 64 << 10,
        first_commit_file_bytes: 16 << 10,
        commit_files: 4,
        recent_bytes: 256 << 10,
        bypass_bytes: 16 << 10,
        min_free_bytes: 0,
        checkpoint_bytes: 64 << 10,
        checkpoint_ms: 400,
        open_files: 8,
        fatal: Arc::new(move |_, _| failed.store(true, Ordering::SeqCst)),
    }
}

async fn pump(store: Store, disk_ms: Arc<AtomicU64>, hangs: Arc<AtomicBool>, synced: Arc<Mutex<Synced>>) {
    loop {
        let longest = disk_ms.load(Ordering::Relaxed);
        let delay_ms = if fastrand::u8(0..50) == 0 {
            fastrand::u64(0..=longest * 8)
        } else {
            fastrand::u64(0..=longest)
        };
        tokio::time::sleep(Duration::from_millis(delay_ms.max(1))).await;
        if hangs.load(Ordering::Relaxed) {
            continue;
        }
        store.pump();
        synced.lock().unwrap_or_else(PoisonError::into_inner).on_sync(durable_ends(&store));
    }
}

fn empty_disk() -> SimDisk {
    let disk = SimDisk::new();
    disk.create_dir(Path::new(ROOT)).expect("the disk is empty");
    disk.sync_dir(Path::new("/")).expect("the disk is empty");
    disk
}

impl Host {
    pub(super) fn new(number: usize, network: Network, trace: Trace) -> Self {
        let disk = empty_disk();
        let disk_ms = Arc::new(AtomicU64::new(3));
        Self {
            number,
            network,
            trace,
            disk,
            instance: None,
            paused: false,
            now_ms: 0,
            disk_ms,
            hangs: Arc::default(),
            uses_world_time: false,
            stepped_ms: Arc::default(),
            synced: Arc::default(),
            expected_ends: Ends::new(),
            has_bit_rot: false,
        }
    }

    /// Address of the host, for its peers.
    pub fn address(&self) -> String {
        address(self.number)
    }

    /// Starts a process on the disk. Panics if the store cannot be opened.
    pub fn start(&mut self) -> Process {
        let number = self.number;
        self.try_start().unwrap_or_else(|error| panic!("host {number} cannot open its store: {error}"))
    }

    /// Starts a process on the disk; fails if the store refuses to open.
    pub fn try_start(&mut self) -> Result<Process, OpenError> {
        assert!(self.instance.is_none(), "host {} runs already", self.number);
        self.trace.record(format_args!("host {} starts", self.number));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime without drivers always starts");
        let failed = Arc::new(AtomicBool::new(false));
        let (shutdown, router) = (Shutdown::new(), Router::new());
        let (started, process) = {
            let _context = runtime.enter();
            // Two hosts never show the same time, unless they use world time.
            let (start_ns, random_ms) = (fastrand::u64(0..1 << 40), fastrand::i64(1 << 40..1 << 41));
            let true_ms = EPOCH_MS + i64::try_from(self.now_ms).unwrap_or(0);
            let wall_ms = if self.uses_world_time { true_ms } else { random_ms };
            let clock = HostClock::new(start_ns, wall_ms, Arc::clone(&self.stepped_ms));
            let clock: Arc<dyn Clock> = Arc::new(clock);
            let disk: Arc<dyn Disk> = Arc::new(self.disk.clone());
            let options = store_options(&failed);
            let store = Store::open(Path::new(ROOT), Arc::clone(&disk), Arc::clone(&clock), options)?;
            store.set_sink(Arc::new(Sink(router.clone())));
            let process = Process {
                root: PathBuf::from(ROOT),
                disk,
                store,
                router: router.clone(),
                transport: Arc::new(Link { network: self.network.clone(), host: self.number }),
                clock,
                scope: Scope::new(shutdown.clone()),
            };
            (Instant::now(), process)
        };
        self.synced = Arc::default();
        let (disk_ms, hangs) = (Arc::clone(&self.disk_ms), Arc::clone(&self.hangs));
        runtime.spawn(pump(process.store.clone(), disk_ms, hangs, Arc::clone(&self.synced)));
        self.network.on_start(self.number);
        self.paused = false;
        let store = process.store.clone();
        let started_ms = self.now_ms;
        self.instance = Some(Instance { runtime, router, shutdown, store, failed, started, started_ms });
        Ok(process)
    }

    /// True if a process runs, paused or not.
    pub fn is_up(&self) -> bool {
        self.instance.is_some()
    }

    /// True if the process is paused.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// True if the disk failed or lost power: the caller must [`Host::crash`] the host.
    pub fn has_failed(&self) -> bool {
        self.instance.as_ref().is_some_and(|instance| instance.failed.load(Ordering::SeqCst))
    }

    /// True if a task of the process panicked.
    pub fn has_panicked(&self) -> bool {
        self.instance.as_ref().is_some_and(|instance| instance.shutdown.has_panicked())
    }

    /// Runtime of the process.
    pub fn handle(&self) -> Option<Handle> {
        self.instance.as_ref().map(|instance| instance.runtime.handle().clone())
    }

    /// Spawns a task in the process.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<Task<T>> {
        self.instance.as_ref().map(|instance| Task::spawn(instance.runtime.handle(), work))
    }

    /// Cuts the power after this many disk operations, possibly in the middle of a write.
    pub fn cut_power_after(&self, operations: u64) {
        self.trace
            .record(format_args!("host {} loses power after {operations} disk operations", self.number));
        self.disk.set_fault(Some((self.disk.operations() + operations, Fault::PowerCut)));
    }

    /// Crashes the process without notifying peers or clients.
    pub fn crash(&mut self, survival: Survival, seed: u64) {
        let Some(instance) = self.instance.take() else { return };
        self.trace.record(format_args!("host {} crashes, {survival:?} unsynced survives", self.number));
        let after = self.disk.crash(survival, seed);
        let now = durable_ends(&instance.store);
        {
            let synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
            // A log that was truncated since is expected to end earlier.
            self.expected_ends = lower_ends(&synced.last, &now);
        }
        self.network.on_crash(self.number);
        // Dropped tasks may still read the clock.
        let handle = instance.runtime.handle().clone();
        let _context = handle.enter();
        drop(instance);
        self.disk = after;
        self.paused = false;
    }

    /// Flips one bit on the disk of a host that is off; returns its position.
    pub fn flip_bit(&mut self, random: &mut fastrand::Rng) -> Option<String> {
        assert!(self.instance.is_none(), "host {} runs", self.number);
        let len = |path: &PathBuf| self.disk.stat(path).ok().flatten().map_or(0, |stat| stat.len);
        let mut kinds: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for path in self.disk.files().into_iter().filter(|path| len(path) > 0) {
            let is_commit_log = path.components().any(|part| part.as_os_str() == "commit");
            let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
            kinds.entry(format!("{is_commit_log} {ending}")).or_default().push(path);
        }
        let kind = random.usize(..kinds.len().max(1));
        let paths = kinds.values().nth(kind)?;
        let path = &paths[random.usize(..paths.len())];
        let file = self.disk.open(path).ok()?;
        let mut bytes = vec![0; usize::try_from(len(path)).ok()?];
        file.pread(0, &mut bytes).ok()?;
        // Mostly in written bytes: files are preallocated.
        let position = (0..200).map(|_| random.usize(..bytes.len())).find(|at| bytes[*at] != 0);
        let at = position.unwrap_or(0) as u64 * 8 + random.u64(..8);
        self.disk.rot(path, at);
        self.has_bit_rot = true;
        // No later record vouches for the last sync.
        let synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        self.expected_ends = lower_ends(&self.expected_ends, &synced.previous);
        let bit = format!("bit {at} of {} of host {}", path.display(), self.number);
        self.trace.record(format_args!("{bit} flips"));
        Some(bit)
    }

    /// True if a bit flipped on the disk.
    pub fn has_bit_rot(&self) -> bool {
        self.has_bit_rot
    }

    /// Replaces the disk of a host that is off by an empty one.
    pub fn wipe(&mut self) {
        assert!(self.instance.is_none(), "host {} runs", self.number);
        self.trace.record(format_args!("host {} gets an empty disk", self.number));
        self.disk = empty_disk();
        self.expected_ends.clear();
        self.has_bit_rot = false;
    }

    /// Checks that every open journal has all data that was durable before the last crash, or reports damage. On every
    /// other call all frames are read, too: a frame that is returned must match its checksum.
    pub fn check_recovered(&self) -> Result<(), String> {
        let Some(instance) = &self.instance else { return Ok(()) };
        for journal in instance.store.open_journals() {
            let expected = self.expected_ends.get(&journal.id()).copied().unwrap_or(0);
            if journal.end() < expected && !journal.is_damaged() {
                return Err(format!(
                    "journal {} of host {} ends at {}, was durable up to {expected}, and reports no damage",
                    journal.id(),
                    self.number,
                    journal.end(),
                ));
            }
            if self.has_bit_rot && (self.now_ms / super::TICK_MS).is_multiple_of(2) {
                self.check_frames(&journal)?;
            }
        }
        Ok(())
    }

    /// Reads a journal up to its end or its damage.
    fn check_frames(&self, journal: &Journal) -> Result<(), String> {
        let mut from = journal.start();
        while let Ok(read) = journal.read(from, journal.end(), 1 << 16) {
            let mut bytes = Vec::new();
            for chunk in &read.chunks {
                match chunk {
                    Chunk::Mem(part) => bytes.extend_from_slice(part),
                    Chunk::File(range) => bytes.extend_from_slice(&range.read().map_err(|e| e.to_string())?),
                }
            }
            let Some(frames) = journal.split(&bytes) else {
                return Err(format!(
                    "journal {} of host {} returns frames with a checksum mismatch from offset {from}",
                    journal.id(),
                    self.number,
                ));
            };
            match frames.last() {
                Some(last) if last.last >= from => from = last.last + 1,
                _ => break,
            }
        }
        Ok(())
    }

    /// Pauses the process, like SIGSTOP.
    pub fn pause(&mut self) {
        self.trace.record(format_args!("host {} pauses", self.number));
        self.paused = true;
    }

    /// Resumes the process; its clock catches up at once.
    pub fn resume(&mut self) {
        if self.paused {
            self.trace.record(format_args!("host {} resumes", self.number));
            self.paused = false;
        }
    }

    /// From its next start on, the wall clock shows world time plus its steps.
    pub fn use_world_time(&mut self) {
        self.uses_world_time = true;
    }

    /// Steps the wall clock to this offset from world time; the monotonic clock is not affected.
    pub fn set_wall_offset_ms(&self, offset_ms: i64) {
        self.trace.record(format_args!("wall clock of host {} is off by {offset_ms} ms", self.number));
        self.stepped_ms.store(offset_ms, Ordering::Relaxed);
    }

    /// Sets the maximum duration of a sync; one in fifty takes up to eight times that.
    pub fn set_disk_ms(&self, longest: u64) {
        self.disk_ms.store(longest, Ordering::Relaxed);
    }

    /// While the disk hangs nothing is written and no sync returns; data in memory can be read.
    pub fn set_disk_hangs(&self, hangs: bool) {
        if self.hangs.swap(hangs, Ordering::Relaxed) != hangs {
            let state = if hangs { "hangs" } else { "recovers" };
            self.trace.record(format_args!("disk of host {} {state}", self.number));
        }
    }

    /// Runs the process until `now_ms` of world time.
    pub(super) fn run_until(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        let Some(instance) = self.instance.as_ref().filter(|_| !self.paused) else { return };
        let due = instance.started + Duration::from_millis(now_ms - instance.started_ms);
        instance.runtime.block_on(async {
            let behind = due.saturating_duration_since(Instant::now());
            if behind > Duration::from_millis(super::TICK_MS) {
                // The process was paused: all overdue timers fire at once.
                tokio::time::advance(behind - Duration::from_millis(super::TICK_MS)).await;
            }
            self.network.deliver(self.number, &instance.router, instance.runtime.handle());
            tokio::time::sleep_until(due).await;
        });
    }
}
