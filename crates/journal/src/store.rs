//! The store: one data directory, its commit log and its journals.
//!
//! Who does what: `store/commit.rs` is the disk thread's work (group commit) and the bypass thread's (large frames),
//! `store/behind.rs` the write-behind thread's (segments, checkpoints, free space, unlinking), `store/recover.rs`
//! opens a directory, `store/upgrade.rs` one of the previous format version. Each is a function that does one round, so that [`Store::pump`] runs the same code on one thread.
//!
//! Lock order, outermost first: `checkpointing`, `images`, a journal's `files`, `opening`, a journal's `state`, then
//! the queues (`stage`, `bypass`, `behind`), which are leaves. The disk thread takes no journal lock while it commits.
//!
//! Directory: `checkpoint`, `clean` (only after a clean stop), `lock`, `commit/`, `trash/` (deleted journals on their way
//! out), `lost+found/` (what was in the way and is not ours to delete), and the journals' folders.

mod behind;
mod commit;
mod files;
pub(crate) mod recover;
mod upgrade;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use moim_base::Clock;

use self::behind::{Behind, ScrubPlace};
pub(crate) use self::commit::BypassItem;
use self::commit::{Bypass, Committer};
use self::files::OpenFiles;
use crate::checkpoint::LogPoint;
use crate::codec::{Locked, wait_on};
use crate::commit::Staged;
use crate::commit::log::CommitLog;
use crate::commit::stage::{Lane, Stage};
use crate::disk::{Disk, DiskFile};
use crate::disk_watch::{DiskWatch, SyncReport};
use crate::journal::{Journal, Recovered};
use crate::types::{
    AppendError, DurableSink, JournalError, JournalId, JournalOptions, OpenError, RecoveryReport,
    ScrubReport, StoreOptions, StoreStats,
};

/// The share of `min_free_bytes` that stays free of priority journals, too.
const RESERVE_SHARE: u64 = 4;

/// Many journals and the commit log they share. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Handle>,
}

/// What all clones of a [`Store`] share; ends the store's threads when the last one goes.
struct Handle(Arc<Inner>);

impl std::ops::Deref for Handle {
    type Target = Arc<Inner>;

    fn deref(&self) -> &Arc<Inner> {
        &self.0
    }
}

#[derive(Default)]
struct Counters {
    syncs: AtomicU64,
    records: AtomicU64,
    commit_bytes: AtomicU64,
    bypass_bytes: AtomicU64,
    behind_bytes: AtomicU64,
    checkpoints: AtomicU64,
    free_bytes: AtomicU64,
    last_sync_ns: AtomicU64,
    damages: AtomicU64,
}

/// What the store's parts share.
pub(crate) struct Inner {
    pub(crate) dir: PathBuf,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    options: StoreOptions,
    /// Frames at least this large go straight to their segment.
    pub(crate) bypass_from: usize,
    /// The largest frame the commit log takes at all.
    pub(crate) max_record: usize,
    max_group: usize,
    pub(crate) stage: Stage,
    log: CommitLog,
    committer: Mutex<Committer>,
    disk_watch: DiskWatch,
    bypass: Mutex<Bypass>,
    bypass_wake: Condvar,
    behind: Mutex<Behind>,
    behind_wake: Condvar,
    /// Ordered, so that the same history touches the disk in the same order.
    journals: RwLock<BTreeMap<JournalId, Arc<Journal>>>,
    /// Journals that recovery found and nobody has opened yet.
    images: Mutex<BTreeMap<JournalId, Recovered>>,
    /// Only one thread opens or creates a segment file at a time.
    pub(crate) opening: Mutex<()>,
    open_files: Mutex<OpenFiles>,
    sink: RwLock<Option<Arc<dyn DurableSink>>>,
    /// Bytes of frames in all rings.
    pub(crate) ring_bytes: AtomicUsize,
    dirty_bytes: AtomicU64,
    dirty: AtomicBool,
    /// Folders whose names changed and are not synced.
    dirty_dirs: Mutex<std::collections::BTreeSet<PathBuf>>,
    /// Too little free disk, by the last look.
    low_space: AtomicBool,
    /// A write failed for lack of space and has not succeeded since.
    no_space: AtomicBool,
    /// When the last group was committed that nothing vouches for yet, in monotonic milliseconds; 0 when the log is sealed.
    unsealed_since_ms: AtomicU64,
    /// A seal is on its way into the log.
    sealing: AtomicBool,
    /// The commit log is waiting for a checkpoint.
    log_full: AtomicBool,
    closed: AtomicBool,
    dead: AtomicBool,
    /// One checkpoint at a time.
    checkpointing: Mutex<()>,
    /// Where the last durable checkpoint left the commit log.
    floor: Mutex<LogPoint>,
    /// Files that recovery wrote to, to be synced by the first checkpoint.
    redone: Mutex<Vec<PathBuf>>,
    waiting: AtomicUsize,
    waiters: Mutex<()>,
    waiters_wake: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
    running: AtomicBool,
    recovery: Mutex<RecoveryReport>,
    was_clean: bool,
    counters: Counters,
    scrub: Mutex<Option<ScrubPlace>>,
    aside: AtomicU64,
    /// The commit log's generation when this run began, and the swaps since.
    first_generation: u64,
    /// Everything before this is durable, and the journals know it. Never past the log's durable point.
    announced: Mutex<LogPoint>,
    swaps: AtomicU64,
    /// Keeps other processes out while it lives.
    lock: Mutex<Option<Arc<dyn DiskFile>>>,
}

impl Store {
    /// Opens a data directory, creating it if need be, and recovers what the last run left.
    pub fn open(
        dir: &Path,
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        options: StoreOptions,
    ) -> Result<Store, OpenError> {
        Ok(Store { inner: Arc::new(Handle(Arc::new(Inner::open(dir, disk, clock, options)?))) })
    }

    /// Starts the disk thread and its two helpers. Without it, [`Store::pump`] does their work.
    pub fn start(&self) {
        let inner = &self.inner.0;
        if inner.running.swap(true, Ordering::SeqCst) {
            return;
        }
        inner.stage.restart();
        let spawn = |name: &str, work: fn(&Inner)| {
            let inner = inner.clone();
            let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10);
            thread.spawn(move || work(&inner)).expect("the machine can start a thread")
        };
        let threads = [
            spawn("moim-disk", Inner::commit_loop),
            spawn("moim-bypass", Inner::bypass_loop),
            spawn("moim-behind", Inner::behind_loop),
        ];
        inner.threads.locked().extend(threads);
    }

    /// One deterministic round of all background work; true if it did something.
    pub fn pump(&self) -> bool {
        let committed = self.inner.commit_rounds();
        let behind = self.inner.behind_round();
        committed || behind
    }

    /// The calling thread is about to rest, or has done this much and goes on with somebody else's work. From the first call on,
    /// what it appends is gathered and goes to the disk together: when it rests the next time, or after some more work. For
    /// event loops, of one store each, which call it before they end, too.
    pub fn rest(&self, done: Option<usize>) {
        self.inner.stage.rest(done);
    }

    /// Who is told about durable appends.
    pub fn set_sink(&self, sink: Arc<dyn DurableSink>) {
        *self.inner.sink.write().expect("nobody panics holding the sink") = Some(sink);
    }

    /// The journals that exist: those recovery found and those written since.
    pub fn journals(&self) -> Vec<(JournalId, String)> {
        let images = self.inner.images.locked();
        let mut all: Vec<_> =
            images.values().map(|found| (found.image.id, found.image.folder.clone())).collect();
        drop(images);
        let open = self.inner.journals.read().expect("nobody panics holding the map");
        all.extend(open.values().map(|journal| (journal.id, journal.folder.clone())));
        all.sort();
        all
    }

    /// The journals that are open.
    pub fn open_journals(&self) -> Vec<Arc<Journal>> {
        let open = self.inner.journals.read().expect("nobody panics holding the map");
        open.values().map(Arc::clone).collect()
    }

    /// The open journals in which damage was found.
    pub fn damaged(&self) -> Vec<JournalId> {
        let open = self.inner.journals.read().expect("nobody panics holding the map");
        let mut damaged: Vec<_> =
            open.values().filter(|journal| journal.is_damaged()).map(|journal| journal.id).collect();
        damaged.sort();
        damaged
    }

    /// Changes whenever damage is found in a journal that was taken for whole, and when a damaged journal begins anew:
    /// a reason to look at [`Store::damaged`].
    pub fn damages(&self) -> u64 {
        self.inner.counters.damages.load(Ordering::Acquire)
    }

    /// Opens a journal, or creates it; one that was never written to has no file.
    pub fn journal(&self, id: JournalId, options: JournalOptions) -> Result<Arc<Journal>, JournalError> {
        self.inner.open_journal(id, &options)
    }

    /// Deletes a journal: its folder moves aside at once, the files are unlinked later. Readers keep theirs.
    pub fn delete(&self, id: JournalId) -> Result<(), JournalError> {
        self.inner.delete_journal(id)
    }

    /// Writes everything behind, syncs it and recycles the commit log.
    pub fn checkpoint(&self) -> Result<(), JournalError> {
        self.inner.checkpoint()
    }

    /// Stops the threads after what was appended is durable, writes a checkpoint and the clean-shutdown marker.
    pub fn close(&self) -> Result<(), JournalError> {
        self.inner.close()
    }

    /// Whether the last stop left the clean marker.
    pub fn was_clean(&self) -> bool {
        self.inner.was_clean
    }

    /// What recovery did so far; journals add to it as they are opened.
    pub fn recovery(&self) -> RecoveryReport {
        self.inner.recovery.locked().clone()
    }

    /// Whether the disk does not keep up. Appends are still taken; a caller that can wait should, or it will be
    /// refused with `Busy` soon.
    pub fn is_behind(&self) -> bool {
        self.inner.is_behind()
    }

    /// Whether the disk is too full to take appends.
    pub fn is_full(&self) -> bool {
        self.inner.is_full()
    }

    /// Whether not even priority journals may append: what is kept free for them is used up.
    pub fn is_exhausted(&self) -> bool {
        self.inner.is_exhausted()
    }

    /// How long syncs take now. The slowest one is told once: there is one watchdog. Never waits.
    pub fn sync_report(&self) -> SyncReport {
        self.inner.disk_watch.report(self.inner.clock.monotonic_ns())
    }

    /// Writes and syncs a block, to see whether the disk of an idle store works. Blocks for as long as it does not.
    pub fn probe_disk(&self) -> io::Result<()> {
        self.inner.disk_watch.probe(&*self.inner.disk, &self.inner.dir, &*self.inner.clock)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> StoreStats {
        let inner = &self.inner;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StoreStats {
            syncs: count(&inner.counters.syncs),
            records: count(&inner.counters.records),
            commit_bytes: count(&inner.counters.commit_bytes),
            bypass_bytes: count(&inner.counters.bypass_bytes),
            behind_bytes: count(&inner.counters.behind_bytes),
            ring_bytes: inner.ring_bytes.load(Ordering::Relaxed) as u64,
            dirty_bytes: count(&inner.dirty_bytes),
            checkpoints: count(&inner.counters.checkpoints),
            commit_files: inner.log.live_count() as u64,
            free_bytes: count(&inner.counters.free_bytes),
            open_files: inner.open_files.locked().len() as u64,
            journals: inner.journals.read().expect("nobody panics holding the map").len() as u64,
            full: inner.is_full(),
            last_sync_ns: count(&inner.counters.last_sync_ns),
        }
    }

    /// Verifies up to `max_bytes` of segments, going on where the last call stopped: active ones first.
    pub fn scrub_step(&self, max_bytes: u64) -> ScrubReport {
        self.inner.scrub_step(max_bytes)
    }
}

impl Inner {
    /// A journal that was taken for whole is not, or one that was damaged begins anew.
    pub(crate) fn note_damage(&self) {
        self.counters.damages.fetch_add(1, Ordering::Release);
    }

    fn open_journal(
        self: &Arc<Self>,
        id: JournalId,
        options: &JournalOptions,
    ) -> Result<Arc<Journal>, JournalError> {
        if self.closed.load(Ordering::Acquire) {
            return Err(JournalError::Closed);
        }
        if let Some(open) = self.find(id) {
            return Ok(open);
        }
        let clean_path = |path: &str| {
            let parts = Path::new(path).components();
            !path.is_empty() && parts.clone().all(|part| matches!(part, std::path::Component::Normal(_)))
        };
        if !clean_path(&options.folder) {
            return Err(JournalError::Folder(options.folder.clone()));
        }
        // Held to the end: a checkpoint sees the journal either here or there.
        let mut images = self.images.locked();
        if let Some(open) = self.find(id) {
            return Ok(open);
        }
        let recovered = images.get(&id).cloned();
        if recovered.as_ref().is_some_and(|found| found.image.folder != options.folder) {
            return Err(JournalError::Folder(options.folder.clone()));
        }
        let journal = Journal::attach(self, id, options, recovered)?;
        images.remove(&id);
        self.journals.write().expect("nobody panics holding the map").insert(id, journal.clone());
        Ok(journal)
    }

    fn find(&self, id: JournalId) -> Option<Arc<Journal>> {
        self.journals.read().expect("nobody panics holding the map").get(&id).cloned()
    }

    /// Whether appends may come in. Those of priority journals may use up most of what is kept free: deletions and
    /// alarms go through them, and nobody could make room without.
    pub(crate) fn check_accepting(&self, priority: bool) -> Result<(), AppendError> {
        if self.closed.load(Ordering::Acquire) || self.dead.load(Ordering::Acquire) {
            return Err(AppendError::Closed);
        }
        if self.is_full() && (!priority || self.is_exhausted()) {
            return Err(AppendError::Full);
        }
        // Priority journals have half as much again to themselves: while the disk hangs, Raft must still be able to hand
        // its leadership over and to learn from its log who took over.
        let share = if priority { 3 } else { 2 };
        let ring = self.ring_bytes.load(Ordering::Relaxed) > self.options.recent_bytes.saturating_mul(share);
        let dirty = self.dirty_bytes.load(Ordering::Relaxed)
            > self.options.checkpoint_bytes.saturating_mul(4 * share as u64);
        let log = self.log.live_count() > self.options.commit_files.saturating_mul(share);
        if ring || dirty || log {
            self.behind_wake.notify_one();
            return Err(AppendError::Busy);
        }
        Ok(())
    }

    fn is_behind(&self) -> bool {
        if self.is_full() {
            return false; // waiting does not help: the append is refused, and says why
        }
        let recent = self.options.recent_bytes;
        let behind = self.ring_bytes.load(Ordering::Relaxed) > recent.saturating_add(recent / 2)
            || self.dirty_bytes.load(Ordering::Relaxed) > self.options.checkpoint_bytes.saturating_mul(6)
            || self.log_full.load(Ordering::Relaxed);
        if behind {
            self.behind_wake.notify_one();
        }
        behind
    }

    fn is_full(&self) -> bool {
        self.low_space.load(Ordering::Relaxed) || self.no_space.load(Ordering::Relaxed)
    }

    fn is_exhausted(&self) -> bool {
        let reserve = self.options.min_free_bytes / RESERVE_SHARE;
        self.no_space.load(Ordering::Relaxed)
            || (self.low_space.load(Ordering::Relaxed)
                && self.counters.free_bytes.load(Ordering::Relaxed) < reserve)
    }

    /// A write failed for lack of space: refuse appends until one succeeds.
    pub(crate) fn on_no_space(&self) {
        if !self.no_space.swap(true, Ordering::Relaxed) {
            tracing::warn!(dir = %self.dir.display(), "the disk is full, refusing appends until space returns");
        }
        self.dirty.store(true, Ordering::Relaxed);
    }

    /// Something must reach the next checkpoint.
    pub(crate) fn note_dirty(&self) {
        self.dirty.store(true, Ordering::Relaxed);
    }

    /// Segment bytes were written and not synced.
    pub(crate) fn note_dirty_bytes(&self, bytes: u64) {
        self.note_dirty();
        let before = self.dirty_bytes.fetch_add(bytes, Ordering::Relaxed);
        let limit = self.options.checkpoint_bytes;
        if before < limit && before + bytes >= limit {
            self.behind_wake.notify_one();
        }
    }

    /// The disk cannot be trusted any more.
    pub(crate) fn fatal(&self, what: &str, error: &io::Error) {
        if !self.dead.swap(true, Ordering::SeqCst) {
            (self.options.fatal)(what, error);
        }
        self.notify_waiters();
    }

    /// Queues a record and waits until it is durable.
    pub(crate) fn log_and_wait(&self, lane: Lane, mut staged: Staged) -> Result<(), JournalError> {
        let done = Arc::new(AtomicBool::new(false));
        staged.done = Some(done.clone());
        self.stage.push(lane, [staged]);
        self.wait_for(|| done.load(Ordering::Acquire))
    }

    /// Waits for something that commits bring about.
    pub(crate) fn wait_for(&self, ready: impl Fn() -> bool) -> Result<(), JournalError> {
        if !self.running.load(Ordering::SeqCst) {
            while !ready() {
                if self.dead.load(Ordering::Acquire) || !self.commit_rounds() {
                    return Err(JournalError::Closed);
                }
            }
            return Ok(());
        }
        self.stage.flush();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.waiters.locked();
        while !ready() && !self.dead.load(Ordering::Acquire) {
            guard = wait_on(&self.waiters_wake, guard, Some(Duration::from_millis(100)));
        }
        drop(guard);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if ready() { Ok(()) } else { Err(JournalError::Closed) }
    }

    fn notify_waiters(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let _guard = self.waiters.locked();
            self.waiters_wake.notify_all();
        }
    }

    /// Adds to the recovery report.
    pub(crate) fn note_recovery(&self, part: RecoveryReport, damage: Option<String>) {
        let mut report = self.recovery.locked();
        report.files += part.files;
        report.bytes += part.bytes;
        report.records += part.records;
        report.frames += part.frames;
        report.cut_bytes += part.cut_bytes;
        report.duration_ns += part.duration_ns;
        report.moved_aside.extend(part.moved_aside);
        for line in part.damage.into_iter().chain(damage) {
            tracing::error!("{line}");
            report.damage.push(line);
        }
    }

    fn close(&self) -> Result<(), JournalError> {
        if self.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        self.stop_threads();
        while self.commit_rounds() {}
        if self.dead.load(Ordering::Acquire) {
            return Err(JournalError::Closed);
        }
        let open: Vec<_> =
            self.journals.read().expect("nobody panics holding the map").values().cloned().collect();
        for journal in &open {
            journal.write_behind()?;
            journal.save_indexes(true)?;
        }
        self.checkpoint()?;
        let unseen = self.images.locked().values().any(|found| found.scan);
        if !unseen {
            self.write_clean_marker()?;
        }
        *self.lock.locked() = None;
        Ok(())
    }

    fn forget_journals(&self) {
        self.journals.write().expect("nobody panics holding the map").clear();
        self.behind.locked().forget();
        self.bypass.locked().forget();
        let mut committer = self.committer.locked();
        committer.forget();
        let mut rest = Vec::new();
        self.stage.take(&mut rest, usize::MAX);
    }

    fn stop_threads(&self) {
        if !self.running.load(Ordering::SeqCst) {
            return;
        }
        // The bypass thread feeds the disk thread: it ends first.
        self.bypass.locked().stopped = true;
        self.bypass_wake.notify_all();
        self.behind.locked().stopped = true;
        self.behind_wake.notify_all();
        self.stage.stop();
        let threads = std::mem::take(&mut *self.threads.locked());
        for thread in threads {
            if thread.join().is_err() {
                self.fatal("a disk thread panicked", &io::Error::other("panic"));
            }
        }
        self.running.store(false, Ordering::SeqCst);
    }
}

impl Drop for Handle {
    /// The last `Store` is gone: threads end, the directory is free for others, journals refuse appends. Nothing is
    /// flushed, that is what `close` is for.
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.stop_threads();
        // Journals know their store and the store knows them: let go, or neither is ever freed.
        self.0.forget_journals();
        *self.0.lock.locked() = None;
    }
}
