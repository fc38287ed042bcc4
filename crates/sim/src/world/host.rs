//! A machine: a disk that stays, and a process that comes and goes.
//!
//! The disk thread of a real node is a task here: it pumps the store at moments drawn from the generator, so that what
//! was appended stays unsynced for a while. A crash takes the power from the disk first, then drops the process with
//! every task it had; what the disk had not synced is lost, kept, or torn, as the crash says.

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
/// The wall clock of a machine that keeps time, when the world begins.
const EPOCH_MS: i64 = 1_700_000_000_000;

/// What a process is given.
#[derive(Clone)]
pub struct Process {
    /// Its data directory.
    pub root: PathBuf,
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// The store on it; somebody pumps it.
    pub store: Store,
    /// Gets what peers ask and what the disk says.
    pub router: Router,
    /// Reaches peers.
    pub transport: Arc<dyn Transport>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// For its tasks.
    pub scope: Scope,
}

struct Life {
    runtime: Runtime,
    router: Router,
    shutdown: Shutdown,
    store: Store,
    /// The disk failed: what a real node would stop for.
    failed: Arc<AtomicBool>,
    /// When it began, by its own clock and by the world's.
    began: Instant,
    began_ms: u64,
}

/// A machine.
pub struct Host {
    number: usize,
    network: Network,
    trace: Trace,
    disk: SimDisk,
    life: Option<Life>,
    paused: bool,
    now_ms: u64,
    /// The longest the disk takes for a sync.
    disk_ms: Arc<AtomicU64>,
    /// Syncs do not return.
    hangs: Arc<AtomicBool>,
    /// Its wall clock shows the world's time, but for its steps; otherwise every process begins at a time of its own.
    keeps_time: bool,
    /// How far its wall clock is from the world's time.
    stepped_ms: Arc<AtomicI64>,
    /// What the syncs of this process have made durable.
    synced: Arc<Mutex<Synced>>,
    /// What recovery must find, or tell that it is damaged.
    owed: Ends,
    is_rotten: bool,
}

/// Where journals end.
type Ends = BTreeMap<JournalId, i64>;

/// The durable ends of journals after the last two syncs: nothing vouches for what the last one wrote.
#[derive(Default)]
struct Synced {
    last: Ends,
    before: Ends,
}

impl Synced {
    fn note(&mut self, ends: Ends) {
        if ends != self.last {
            self.before = std::mem::replace(&mut self.last, ends);
        }
    }
}

fn durable_ends(store: &Store) -> Ends {
    let journals = store.open_journals().into_iter();
    let synced = journals.filter(|journal| journal.durability() == Durability::Fsync);
    synced.map(|journal| (journal.id(), journal.durable_end())).collect()
}

/// The lesser end of each journal that both name.
fn lesser(one: &Ends, other: &Ends) -> Ends {
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
    // Small, so that files are changed, recycled and checkpointed all the time.
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
        let nap = if fastrand::u8(0..50) == 0 {
            fastrand::u64(0..=longest * 8)
        } else {
            fastrand::u64(0..=longest)
        };
        tokio::time::sleep(Duration::from_millis(nap.max(1))).await;
        if hangs.load(Ordering::Relaxed) {
            continue;
        }
        store.pump();
        synced.lock().unwrap_or_else(PoisonError::into_inner).note(durable_ends(&store));
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
            life: None,
            paused: false,
            now_ms: 0,
            disk_ms,
            hangs: Arc::default(),
            keeps_time: false,
            stepped_ms: Arc::default(),
            synced: Arc::default(),
            owed: Ends::new(),
            is_rotten: false,
        }
    }

    /// What its peers call it.
    pub fn address(&self) -> String {
        address(self.number)
    }

    /// Switches it on: a process begins, on what the disk holds, which has no damage.
    pub fn start(&mut self) -> Process {
        let number = self.number;
        self.try_start().unwrap_or_else(|error| panic!("host {number} cannot open its store: {error}"))
    }

    /// Switches it on, unless the store refuses what the disk holds.
    pub fn try_start(&mut self) -> Result<Process, OpenError> {
        assert!(self.life.is_none(), "host {} runs already", self.number);
        self.trace.note(format_args!("host {} starts", self.number));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime without drivers always starts");
        let failed = Arc::new(AtomicBool::new(false));
        let (shutdown, router) = (Shutdown::new(), Router::new());
        let (began, process) = {
            let _inside = runtime.enter();
            // Two machines never show the same time, unless they keep it.
            let (start_ns, elsewhere_ms) = (fastrand::u64(0..1 << 40), fastrand::i64(1 << 40..1 << 41));
            let true_ms = EPOCH_MS + i64::try_from(self.now_ms).unwrap_or(0);
            let wall_ms = if self.keeps_time { true_ms } else { elsewhere_ms };
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
        self.network.begin_life(self.number);
        self.paused = false;
        let store = process.store.clone();
        self.life = Some(Life { runtime, router, shutdown, store, failed, began, began_ms: self.now_ms });
        Ok(process)
    }

    /// Whether a process runs, paused or not.
    pub fn is_up(&self) -> bool {
        self.life.is_some()
    }

    /// Whether it stands still.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether its disk has failed or lost power: time to [`Host::crash`].
    pub fn has_failed(&self) -> bool {
        self.life.as_ref().is_some_and(|life| life.failed.load(Ordering::SeqCst))
    }

    /// Whether a task of its process panicked.
    pub fn has_panicked(&self) -> bool {
        self.life.as_ref().is_some_and(|life| life.shutdown.has_panicked())
    }

    /// The runtime of its process.
    pub fn handle(&self) -> Option<Handle> {
        self.life.as_ref().map(|life| life.runtime.handle().clone())
    }

    /// Runs something in its process.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<Task<T>> {
        self.life.as_ref().map(|life| Task::spawn(life.runtime.handle(), work))
    }

    /// Takes the power away in the middle of a write: at this many operations of the disk from now.
    pub fn cut_power_after(&self, operations: u64) {
        self.trace.note(format_args!("host {} loses power after {operations} disk operations", self.number));
        self.disk.set_fault(Some((self.disk.operations() + operations, Fault::PowerCut)));
    }

    /// Ends the process, without a word to anybody.
    pub fn crash(&mut self, survival: Survival, seed: u64) {
        let Some(life) = self.life.take() else { return };
        self.trace.note(format_args!("host {} crashes, {survival:?} unsynced survives", self.number));
        let after = self.disk.crash(survival, seed);
        let now = durable_ends(&life.store);
        {
            let synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
            // A log that was cut back since owes less.
            self.owed = lesser(&synced.last, &now);
        }
        self.network.end_life(self.number);
        // Tasks that are dropped may still ask what time it is.
        let handle = life.runtime.handle().clone();
        let _inside = handle.enter();
        drop(life);
        self.disk = after;
        self.paused = false;
    }

    /// Flips one bit somewhere on the disk of a machine that is off; says where.
    pub fn rot(&mut self, random: &mut fastrand::Rng) -> Option<String> {
        assert!(self.life.is_none(), "host {} runs", self.number);
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
        // Mostly where something was written: files are longer than what they hold.
        let places = (0..200).map(|_| random.usize(..bytes.len())).find(|at| bytes[*at] != 0);
        let at = places.unwrap_or(0) as u64 * 8 + random.u64(..8);
        self.disk.rot(path, at);
        self.is_rotten = true;
        // Nothing vouches for what was synced last.
        let synced = self.synced.lock().unwrap_or_else(PoisonError::into_inner);
        self.owed = lesser(&self.owed, &synced.before);
        let what = format!("bit {at} of {} of host {}", path.display(), self.number);
        self.trace.note(format_args!("{what} flips"));
        Some(what)
    }

    /// Whether a bit flipped on its disk.
    pub fn is_rotten(&self) -> bool {
        self.is_rotten
    }

    /// Replaces the disk of a machine that is off with an empty one.
    pub fn wipe(&mut self) {
        assert!(self.life.is_none(), "host {} runs", self.number);
        self.trace.note(format_args!("host {} gets an empty disk", self.number));
        self.disk = empty_disk();
        self.owed.clear();
        self.is_rotten = false;
    }

    /// Whether the journals that are open have everything that was durable before the last crash, or know their damage. At
    /// every other time everything is read, too: whatever is given out must be what was written.
    pub fn check_recovered(&self) -> Result<(), String> {
        let Some(life) = &self.life else { return Ok(()) };
        for journal in life.store.open_journals() {
            let owed = self.owed.get(&journal.id()).copied().unwrap_or(0);
            if journal.end() < owed && !journal.is_damaged() {
                return Err(format!(
                    "journal {} of host {} ends at {}, but was durable up to {owed}, and has no damage",
                    journal.id(),
                    self.number,
                    journal.end(),
                ));
            }
            if self.is_rotten && (self.now_ms / super::TICK_MS).is_multiple_of(2) {
                self.check_frames(&journal)?;
            }
        }
        Ok(())
    }

    /// Reads a journal to its end, or to its damage.
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
                    "journal {} of host {} gives out frames with wrong checksums from {from} on",
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

    /// Stops its time, as SIGSTOP does.
    pub fn pause(&mut self) {
        self.trace.note(format_args!("host {} stands still", self.number));
        self.paused = true;
    }

    /// Lets its time catch up.
    pub fn resume(&mut self) {
        if self.paused {
            self.trace.note(format_args!("host {} goes on", self.number));
            self.paused = false;
        }
    }

    /// From its next start on its wall clock shows the world's time, but for its steps.
    pub fn keep_time(&mut self) {
        self.keeps_time = true;
    }

    /// Steps its wall clock, so that it is so far from the world's time; its monotonic clock goes on.
    pub fn set_wall_offset_ms(&self, offset_ms: i64) {
        self.trace.note(format_args!("wall clock of host {} is off by {offset_ms} ms", self.number));
        self.stepped_ms.store(offset_ms, Ordering::Relaxed);
    }

    /// How long the disk takes for a sync, at most; now and then eight times that.
    pub fn set_disk_ms(&self, longest: u64) {
        self.disk_ms.store(longest, Ordering::Relaxed);
    }

    /// While the disk hangs nothing is written and no sync returns; what is in memory can be read.
    pub fn set_disk_hangs(&self, hangs: bool) {
        if self.hangs.swap(hangs, Ordering::Relaxed) != hangs {
            let what = if hangs { "hangs" } else { "goes on" };
            self.trace.note(format_args!("the disk of host {} {what}", self.number));
        }
    }

    /// Lets its process run until the world's time.
    pub(super) fn run_until(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        let Some(life) = self.life.as_ref().filter(|_| !self.paused) else { return };
        let due = life.began + Duration::from_millis(now_ms - life.began_ms);
        life.runtime.block_on(async {
            let behind = due.saturating_duration_since(Instant::now());
            if behind > Duration::from_millis(super::TICK_MS) {
                // It stood still: everything that is overdue is due at once.
                tokio::time::advance(behind - Duration::from_millis(super::TICK_MS)).await;
            }
            self.network.deliver(self.number, &life.router, life.runtime.handle());
            tokio::time::sleep_until(due).await;
        });
    }
}
