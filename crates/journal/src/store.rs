//! The store: one data directory, its commit log and its journals.
//!
//! `store/commit.rs` is the work of the disk thread (group commit) and of the bypass thread (large frames),
//! `store/behind.rs` that of the write-behind thread (segments, checkpoints, free space, unlinking), `store/recover.rs`
//! opens a directory, `store/upgrade.rs` upgrades one of the previous format version. Each is a function that does one
//! round, so that [`Store::pump`] runs the same code on one thread.
//!
//! Lock order, outermost first: `checkpointing`, `images`, a journal's `files`, `opening`, a journal's `state`, then
//! the queues (`stage`, `bypass`, `behind`), which are leaves. The disk thread takes no journal lock while it commits.
//!
//! Directory: `checkpoint`, `clean` (only after a clean stop), `lock`, `commit/`, `trash/` (deleted journals not yet
//! unlinked), `lost+found/` (foreign files that were in the way), and the journals' folders.

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

use self::behind::{Behind, ScrubPosition};
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

/// The fraction of `min_free_bytes` that priority journals must leave free, too.
const RESERVE_SHARE: u64 = 4;

/// Many journals and the commit log they share. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Handle>,
}

/// Shared by all clones of a [`Store`]; stops the store's threads when the last one is dropped.
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

/// State shared by the store's parts.
pub(crate) struct Inner {
    pub(crate) dir: PathBuf,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) clock: Arc<dyn Clock>,
    options: StoreOptions,
    /// Frames at least this large bypass the commit log.
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
    /// Recovered journals that are not opened yet.
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
    /// Too little free disk space at the last poll.
    low_space: AtomicBool,
    /// A write failed for lack of space and no write has succeeded since.
    no_space: AtomicBool,
    /// When the last unsealed group was committed, in monotonic milliseconds; 0 when the log is sealed.
    unsealed_since_ms: AtomicU64,
    /// A Seal record is staged.
    sealing: AtomicBool,
    /// The commit log is waiting for a checkpoint.
    log_full: AtomicBool,
    closed: AtomicBool,
    dead: AtomicBool,
    /// One checkpoint at a time.
    checkpointing: Mutex<()>,
    /// The floor of the last durable checkpoint in the commit log.
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
    scrub: Mutex<Option<ScrubPosition>>,
    aside: AtomicU64,
    /// The commit log's generation when this run began; with the swap counter it names swaps uniquely.
    first_generation: u64,
    /// Everything before this point is durable, and the journals' durable ends say so. Never past the log's durable
    /// point.
    published: Mutex<LogPoint>,
    swaps: AtomicU64,
    /// Locks out other processes while it lives.
    lock: Mutex<Option<Arc<dyn DiskFile>>>,
}

impl Store {
    /// Opens a data directory, creating it if needed, and recovers the state of the last run.
    pub fn open(
        dir: &Path,
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        options: StoreOptions,
    ) -> Result<Store, OpenError> {
        Ok(Store { inner: Arc::new(Handle(Arc::new(Inner::open(dir, disk, clock, options)?))) })
    }

    /// Starts the disk thread, the bypass thread and the write-behind thread. Without it, [`Store::pump`] does their
    /// work.
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

    /// The calling thread is about to sleep, or has done this much work and continues for another client. From the
    /// first call on, its appends are gathered and committed together: when it sleeps the next time, or after some more
    /// work. For event loops, of one store each, which must also call it before they end.
    pub fn rest(&self, done: Option<usize>) {
        self.inner.stage.rest(done);
    }

    /// Sets the receiver of durable-end notifications.
    pub fn set_sink(&self, sink: Arc<dyn DurableSink>) {
        *self.inner.sink.write().expect("sink lock poisoned") = Some(sink);
    }

    /// The journals that exist: recovered ones and those written since.
    pub fn journals(&self) -> Vec<(JournalId, String)> {
        let images = self.inner.images.locked();
        let mut all: Vec<_> =
            images.values().map(|found| (found.image.id, found.image.folder.clone())).collect();
        drop(images);
        let open = self.inner.journals.read().expect("journal map lock poisoned");
        all.extend(open.values().map(|journal| (journal.id, journal.folder.clone())));
        all.sort();
        all
    }

    /// The open journals.
    pub fn open_journals(&self) -> Vec<Arc<Journal>> {
        let open = self.inner.journals.read().expect("journal map lock poisoned");
        open.values().map(Arc::clone).collect()
    }

    /// The open journals that are damaged.
    pub fn damaged(&self) -> Vec<JournalId> {
        let open = self.inner.journals.read().expect("journal map lock poisoned");
        let mut damaged: Vec<_> =
            open.values().filter(|journal| journal.is_damaged()).map(|journal| journal.id).collect();
        damaged.sort();
        damaged
    }

    /// Changes whenever damage is found in a journal, and when a damaged journal is reset: a reason to read
    /// [`Store::damaged`].
    pub fn damages(&self) -> u64 {
        self.inner.counters.damages.load(Ordering::Acquire)
    }

    /// Opens a journal, or creates it; a journal that was never written to has no file.
    pub fn journal(&self, id: JournalId, options: JournalOptions) -> Result<Arc<Journal>, JournalError> {
        self.inner.open_journal(id, &options)
    }

    /// Deletes a journal: its folder moves to the trash at once, the files are unlinked later. Readers keep their open
    /// files.
    pub fn delete(&self, id: JournalId) -> Result<(), JournalError> {
        self.inner.delete_journal(id)
    }

    /// Writes everything behind, syncs it and recycles the commit log.
    pub fn checkpoint(&self) -> Result<(), JournalError> {
        self.inner.checkpoint()
    }

    /// Stops the threads after all appends are durable, writes a checkpoint and the clean-shutdown marker.
    pub fn close(&self) -> Result<(), JournalError> {
        self.inner.close()
    }

    /// True if the last stop left the clean-shutdown marker.
    pub fn was_clean(&self) -> bool {
        self.inner.was_clean
    }

    /// Result of recovery so far; journals add to it as they are opened.
    pub fn recovery(&self) -> RecoveryReport {
        self.inner.recovery.locked().clone()
    }

    /// True if write-behind does not keep up. Appends are still accepted; a caller that can wait should, or it will be
    /// refused with `Busy` soon.
    pub fn is_behind(&self) -> bool {
        self.inner.is_behind()
    }

    /// True if appends are refused for lack of free disk space.
    pub fn is_full(&self) -> bool {
        self.inner.is_full()
    }

    /// True if priority journals are refused too: the space reserved for them is used up.
    pub fn is_exhausted(&self) -> bool {
        self.inner.is_exhausted()
    }

    /// How long fsyncs take now. The slowest one is reported once: there is one watchdog. Never waits.
    pub fn sync_report(&self) -> SyncReport {
        self.inner.disk_watch.report(self.inner.clock.monotonic_ns())
    }

    /// Writes and syncs a block, to check the disk of an idle store. Blocks as long as the disk hangs.
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
            journals: inner.journals.read().expect("journal map lock poisoned").len() as u64,
            full: inner.is_full(),
            last_sync_ns: count(&inner.counters.last_sync_ns),
        }
    }

    /// Scrubs up to `max_bytes` of segments, from where the last call stopped: active ones first.
    pub fn scrub_step(&self, max_bytes: u64) -> ScrubReport {
        self.inner.scrub_step(max_bytes)
    }
}

impl Inner {
    /// Counts a newly damaged journal, or the reset of a damaged one.
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
        // Held to the end: a checkpoint sees the journal either here or in the map.
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
        self.journals.write().expect("journal map lock poisoned").insert(id, journal.clone());
        Ok(journal)
    }

    fn find(&self, id: JournalId) -> Option<Arc<Journal>> {
        self.journals.read().expect("journal map lock poisoned").get(&id).cloned()
    }

    /// Checks whether appends are accepted. Priority journals may use most of the reserved space: deletions and alarms
    /// go through them, and without them space could not be freed.
    pub(crate) fn check_accepting(&self, priority: bool) -> Result<(), AppendError> {
        if self.closed.load(Ordering::Acquire) || self.dead.load(Ordering::Acquire) {
            return Err(AppendError::Closed);
        }
        if self.is_full() && (!priority || self.is_exhausted()) {
            return Err(AppendError::Full);
        }
        // Priority journals have half as much again: while the disk hangs, Raft must still be able to transfer its
        // leadership and to learn the new leader from its log.
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
            return false; // waiting does not help: the append fails with Full
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

    /// On a write that failed for lack of space: refuse appends until one succeeds.
    pub(crate) fn on_no_space(&self) {
        if !self.no_space.swap(true, Ordering::Relaxed) {
            tracing::warn!(dir = %self.dir.display(), "disk full; appends refused until space is freed");
        }
        self.dirty.store(true, Ordering::Relaxed);
    }

    /// Marks that something must reach the next checkpoint.
    pub(crate) fn note_dirty(&self) {
        self.dirty.store(true, Ordering::Relaxed);
    }

    /// Counts segment bytes that were written and not synced.
    pub(crate) fn note_dirty_bytes(&self, bytes: u64) {
        self.note_dirty();
        let before = self.dirty_bytes.fetch_add(bytes, Ordering::Relaxed);
        let limit = self.options.checkpoint_bytes;
        if before < limit && before + bytes >= limit {
            self.behind_wake.notify_one();
        }
    }

    /// On a disk failure: calls the fatal hook once.
    pub(crate) fn fatal(&self, what: &str, error: &io::Error) {
        if !self.dead.swap(true, Ordering::SeqCst) {
            (self.options.fatal)(what, error);
        }
        self.notify_waiters();
    }

    /// Stages a record and waits until it is durable.
    pub(crate) fn log_and_wait(&self, lane: Lane, mut staged: Staged) -> Result<(), JournalError> {
        let done = Arc::new(AtomicBool::new(false));
        staged.done = Some(done.clone());
        self.stage.push(lane, [staged]);
        self.wait_for(|| done.load(Ordering::Acquire))
    }

    /// Waits for a condition that a group commit brings about.
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
            tracing::error!(damage = %line, "damage found by recovery");
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
            self.journals.read().expect("journal map lock poisoned").values().cloned().collect();
        for journal in &open {
            journal.write_behind()?;
            journal.save_indexes(true)?;
        }
        self.checkpoint()?;
        let has_unscanned = self.images.locked().values().any(|found| found.scan);
        if !has_unscanned {
            self.write_clean_marker()?;
        }
        *self.lock.locked() = None;
        Ok(())
    }

    fn release_journals(&self) {
        self.journals.write().expect("journal map lock poisoned").clear();
        self.behind.locked().release();
        self.bypass.locked().release();
        let mut committer = self.committer.locked();
        committer.release();
        let mut rest = Vec::new();
        self.stage.take(&mut rest, usize::MAX);
    }

    fn stop_threads(&self) {
        if !self.running.load(Ordering::SeqCst) {
            return;
        }
        // The bypass thread stages records for the disk thread: it ends first.
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
    /// The last `Store` was dropped: threads end, the directory is unlocked, journals refuse appends. Nothing is
    /// flushed; that is what `close` is for.
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.stop_threads();
        // Journals and store reference each other: release them, or neither is ever freed.
        self.0.release_journals();
        *self.0.lock.locked() = None;
    }
}
