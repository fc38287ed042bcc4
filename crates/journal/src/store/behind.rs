//! The write-behind thread's work: segments, the ring, checkpoints, free space, unlinking, scrubbing.
//!
//! Nothing here is on the path of an append or a group commit. Order of a checkpoint: read the commit log's durable
//! point, write behind and capture every journal, sync what was captured and its folders, replace the checkpoint file,
//! recycle the commit log below that point. Lack of space stops a round, never the process: unwritten frames stay in
//! the ring and in the commit log.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Inner;
use crate::checkpoint::CheckpointWriter;
use crate::codec::{Locked, wait_on};
use crate::commit::stage::Lane;
use crate::commit::{Kind, Record, Staged};
use crate::disk::{DiskFile, replace_file};
use crate::journal::{Capture, Journal};
use crate::types::{JournalError, JournalId, ScrubReport};

/// The commit log is sealed when nothing was committed for this long: until then no later group proves that its last
/// group was synced.
const SEAL_AFTER_MS: u64 = 300;
/// Poll interval of free disk space.
const SPACE_POLL_MS: u64 = 500;
/// Durable bytes of uncached journals that are worth a write.
const UNCACHED_WRITE_BYTES: usize = 1 << 20;
/// From this many dirty files on, one `syncfs` is cheaper than syncing each.
const SYNCFS_FROM: usize = 64;

/// State of the write-behind thread between rounds.
#[derive(Default)]
pub(super) struct Behind {
    /// Journals with newly durable frames, in that order.
    queue: VecDeque<(Arc<Journal>, i64)>,
    queued_bytes: usize,
    /// Bytes of uncached journals, which `queued_bytes` does not include.
    uncached_bytes: usize,
    /// Frames below these ends are written and may leave the ring, oldest first.
    evictable: VecDeque<(Arc<Journal>, i64)>,
    /// Folders to unlink.
    pub(super) trash: Vec<PathBuf>,
    next_space_poll_ms: u64,
    next_checkpoint_ms: u64,
    pub(super) stopped: bool,
}

impl Behind {
    /// Starts with deleted journals that an earlier run has not unlinked.
    pub(super) fn new(trash: Vec<PathBuf>, next_checkpoint_ms: u64) -> Self {
        Self { trash, next_checkpoint_ms, ..Self::default() }
    }

    pub(super) fn push(&mut self, journal: Arc<Journal>, end: i64) {
        self.queue.push_back((journal, end));
    }

    /// Frames below `end` may be evicted when the rings hold too much.
    fn push_evictable(&mut self, journal: Arc<Journal>, end: i64) {
        match self.evictable.back_mut() {
            Some((last, to)) if Arc::ptr_eq(last, &journal) => *to = end.max(*to),
            _ => self.evictable.push_back((journal, end)),
        }
    }

    /// Counts newly durable bytes; true when this crosses the limit.
    pub(super) fn add_bytes(&mut self, bytes: usize, limit: usize) -> bool {
        let before = self.queued_bytes;
        self.queued_bytes += bytes;
        before < limit && self.queued_bytes >= limit
    }

    /// The same for uncached journals.
    pub(super) fn add_uncached_bytes(&mut self, bytes: usize, limit: usize) -> bool {
        let before = self.uncached_bytes;
        self.uncached_bytes += bytes;
        before < limit && self.uncached_bytes >= limit
    }
}

impl Inner {
    pub(super) fn behind_loop(&self) {
        loop {
            let did = self.behind_round();
            let behind = self.behind.locked();
            if behind.stopped || self.dead.load(Ordering::Acquire) {
                return;
            }
            if !did {
                let pause = if self.dirty.load(Ordering::Relaxed) { 100 } else { SPACE_POLL_MS };
                drop(wait_on(&self.behind_wake, behind, Some(Duration::from_millis(pause))));
            }
        }
    }

    /// One round; true if it did something.
    pub(super) fn behind_round(&self) -> bool {
        if self.dead.load(Ordering::Acquire) {
            return false;
        }
        match self.try_behind_round() {
            Ok(did) => did,
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.on_no_space();
                false
            }
            Err(error) => {
                self.fatal("writing segments behind", &error);
                false
            }
        }
    }

    fn try_behind_round(&self) -> io::Result<bool> {
        let now_ms = self.clock.monotonic_ms();
        self.poll_space(now_ms)?;
        let mut did = self.log.maybe_make_spare()?;
        let under_pressure = self.is_full() || self.log_full.load(Ordering::Relaxed);
        let (due, uncached_due) = {
            let behind = self.behind.locked();
            let ring_is_full = self.ring_bytes.load(Ordering::Relaxed) > self.options.recent_bytes;
            let limit = self.options.recent_bytes / 4;
            let due = behind.queued_bytes >= limit
                || ((under_pressure || ring_is_full) && !behind.queue.is_empty());
            (due, behind.uncached_bytes >= self.uncached_limit())
        };
        if due || uncached_due {
            did |= self.write_queue(due)?;
        }
        self.shrink_ring();
        if self.checkpoint_due(now_ms) {
            self.try_checkpoint()?;
            did = true;
        }
        did |= self.maybe_seal(now_ms);
        did |= self.empty_trash()?;
        Ok(did)
    }

    /// Stages a Seal record, whose group follows the last one of a burst and proves that it was synced; once, and never
    /// under load.
    fn maybe_seal(&self, now_ms: u64) -> bool {
        let since = self.unsealed_since_ms.load(Ordering::Relaxed);
        let idle = since != 0 && now_ms >= since.saturating_add(SEAL_AFTER_MS);
        if !idle || self.sealing.swap(true, Ordering::Relaxed) {
            return false;
        }
        let record = Record::of_log(Kind::Seal, 0);
        let staged =
            Staged { record, payload: Default::default(), payload_crc: 0, journal: None, done: None };
        self.stage.push(Lane::Normal, [staged]);
        true
    }

    fn poll_space(&self, now_ms: u64) -> io::Result<()> {
        {
            let mut behind = self.behind.locked();
            if now_ms < behind.next_space_poll_ms {
                return Ok(());
            }
            behind.next_space_poll_ms = now_ms + SPACE_POLL_MS;
        }
        let free = self.disk.free_bytes(&self.dir)?;
        self.counters.free_bytes.store(free, Ordering::Relaxed);
        let low = free < self.options.min_free_bytes;
        if low != self.low_space.swap(low, Ordering::Relaxed) {
            let dir = self.dir.display();
            if low {
                tracing::warn!(%dir, free, "free disk space low; appends refused");
            } else {
                tracing::info!(%dir, free, "free disk space sufficient; appends accepted");
            }
        }
        if !low {
            // Whether a failed write would succeed now is found out by the next one.
            self.no_space.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Durable bytes of uncached journals that may be in memory before they are written behind.
    pub(super) fn uncached_limit(&self) -> usize {
        UNCACHED_WRITE_BYTES.min(self.options.recent_bytes / 4)
    }

    /// Writes behind every journal that has newly durable frames; only the uncached ones, unless `all`.
    fn write_queue(&self, all: bool) -> io::Result<bool> {
        let queue = self.behind.locked().take_queue(all);
        let mut wrote = 0;
        let mut failed = None;
        for (journal, _) in &queue {
            match journal.write_behind() {
                Ok(bytes) => wrote += bytes,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        self.counters.behind_bytes.fetch_add(wrote, Ordering::Relaxed);
        // Frames that could not be written stay in the ring: eviction skips them and the next checkpoint retries.
        self.release_written(queue);
        failed.map_or(Ok(wrote > 0), Err)
    }

    /// Lets written frames leave the ring: at once if the journal is uncached and no reader needs them, otherwise when
    /// the rings hold too much.
    fn release_written(&self, queue: VecDeque<(Arc<Journal>, i64)>) {
        let (uncached, cached): (Vec<_>, Vec<_>) =
            queue.into_iter().partition(|(journal, _)| journal.is_uncached());
        self.behind.locked().evictable.extend(cached);
        for (journal, end) in uncached {
            let free = end.min(journal.cached_from());
            if journal.evict(free) || free < end {
                self.behind.locked().push_evictable(journal, end);
            }
        }
    }

    /// Evicts the oldest written frames while the rings hold too much.
    fn shrink_ring(&self) {
        // Frames that are not written yet stay on the list: there may be no later entry for them, because appends are
        // refused while the rings hold too much.
        let mut waiting = Vec::new();
        while self.ring_bytes.load(Ordering::Relaxed) > self.options.recent_bytes {
            let Some((journal, end)) = self.behind.locked().evictable.pop_front() else { break };
            if journal.evict(end) {
                waiting.push((journal, end));
            }
        }
        self.behind.locked().evictable.extend(waiting);
        // An idle ring must not make this list grow: drop entries that evict nothing.
        let mut behind = self.behind.locked();
        if behind.evictable.len() > 100_000 {
            let half = behind.evictable.len() / 2;
            let old: Vec<_> = behind.evictable.drain(..half).collect();
            drop(behind);
            let waiting: Vec<_> = old.into_iter().filter(|(journal, end)| journal.evict(*end)).collect();
            self.behind.locked().evictable.extend(waiting);
        }
    }

    fn checkpoint_due(&self, now_ms: u64) -> bool {
        if !self.dirty.load(Ordering::Relaxed) {
            return false;
        }
        let floor = *self.floor.locked();
        let log_limit = self.options.commit_file_bytes.saturating_mul(self.options.commit_files as u64) / 2;
        self.log.bytes_since(floor) >= log_limit
            || self.log_full.load(Ordering::Relaxed)
            || self.dirty_bytes.load(Ordering::Relaxed) >= self.options.checkpoint_bytes
            || now_ms >= self.behind.locked().next_checkpoint_ms
    }

    pub(crate) fn checkpoint(&self) -> Result<(), JournalError> {
        if self.dead.load(Ordering::Acquire) {
            return Err(JournalError::Closed);
        }
        match self.try_checkpoint() {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.on_no_space();
                Err(error.into())
            }
            Err(error) => {
                self.fatal("writing a checkpoint", &error);
                Err(error.into())
            }
        }
    }

    fn try_checkpoint(&self) -> io::Result<()> {
        let _one = self.checkpointing.locked();
        let began_ms = self.clock.monotonic_ms();
        self.dirty.store(false, Ordering::Relaxed);
        let unsynced = self.dirty_bytes.swap(0, Ordering::Relaxed);
        let mut captures = Vec::new();
        let result = self.checkpoint_with(&mut captures);
        match &result {
            Ok(()) => captures.iter().for_each(|(journal, capture)| journal.on_capture_synced(capture)),
            Err(_) => {
                captures.iter().for_each(|(journal, capture)| journal.on_capture_failed(capture));
                self.dirty_bytes.fetch_add(unsynced, Ordering::Relaxed);
                self.dirty.store(true, Ordering::Relaxed);
            }
        }
        let now_ms = self.clock.monotonic_ms();
        // A slow checkpoint must not run all the time.
        let pause = self.options.checkpoint_ms.max((now_ms - began_ms) * 10);
        self.behind.locked().next_checkpoint_ms = now_ms + pause;
        result
    }

    fn checkpoint_with(&self, captures: &mut Vec<(Arc<Journal>, Capture)>) -> io::Result<()> {
        // First the point, then the journals: every record before the point is in what is captured after it. The log's
        // own durable point would be too far: write-behind takes durable frames only, and a journal's durable end moves
        // a moment after the log's.
        let floor = *self.published.locked();
        let mut writer = CheckpointWriter::new(floor);
        let journals = {
            let images = self.images.locked();
            let open = self.journals.read().expect("journal map lock poisoned");
            images.values().for_each(|found| writer.push(&found.image));
            open.values().cloned().collect::<Vec<_>>()
        };
        let mut files = Vec::new();
        // Before anything is captured: frames that become durable from now on are not written below.
        let queue = self.behind.locked().take_queue(true);
        self.release_written(queue);
        for journal in journals {
            if let Some(capture) = journal.capture(&mut writer)? {
                files.extend(capture.dirty.iter().map(|base| (captures.len(), *base)));
                captures.push((journal, capture));
            }
        }
        self.sync_captured(captures, &files)?;
        replace_file(&*self.disk, &self.dir.join("checkpoint"), &writer.finish())?;
        self.redone.locked().clear();
        *self.floor.locked() = floor;
        self.log.recycle(floor)?;
        self.log_full.store(self.log.live_count() > self.options.commit_files, Ordering::Relaxed);
        self.counters.checkpoints.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn sync_captured(&self, captures: &[(Arc<Journal>, Capture)], files: &[(usize, i64)]) -> io::Result<()> {
        let redone = self.redone.locked().clone();
        if files.len() + redone.len() > SYNCFS_FROM {
            let mut dirs = self.dirty_dirs.locked();
            self.disk.syncfs(&self.dir)?;
            dirs.clear(); // syncfs covers names too
            return Ok(());
        }
        for path in &redone {
            match self.disk.open(path) {
                Ok(file) => file.sync_data()?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {} // dropped since
                Err(error) => return Err(error),
            }
        }
        for (at, base) in files {
            let file: Arc<dyn DiskFile> = match captures[*at].0.segment_file(*base, false) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue, // dropped since
                Err(error) => return Err(error),
            };
            file.sync_data()?;
        }
        self.sync_dirs()
    }

    pub(super) fn write_clean_marker(&self) -> Result<(), JournalError> {
        let floor = *self.floor.locked();
        replace_file(&*self.disk, &self.dir.join("clean"), &super::recover::clean_marker(floor))?;
        Ok(())
    }

    /// Scrubs the active segments of all journals first, then the sealed ones.
    pub(super) fn scrub_step(&self, max_bytes: u64) -> ScrubReport {
        let mut at = self.scrub.locked();
        let mut report = ScrubReport::default();
        let open: Vec<_> =
            self.journals.read().expect("journal map lock poisoned").values().cloned().collect();
        let mut position = at.take().or_else(|| Some(ScrubPosition::first(open.first()?.id, true)));
        while let Some(now) = position {
            if report.bytes >= max_bytes {
                *at = Some(now);
                return report;
            }
            let journal = open.iter().find(|journal| journal.id >= now.id);
            let next = journal.and_then(|journal| {
                let from = if journal.id == now.id { now.offset } else { i64::MIN };
                let offset = journal.scrub(from, now.active, max_bytes, &mut report)?;
                (offset > from).then_some(ScrubPosition { id: journal.id, offset, ..now })
            });
            let after = || {
                let id = open.iter().find(|other| journal.is_some_and(|done| other.id > done.id))?.id;
                Some(ScrubPosition::first(id, now.active))
            };
            let sealed = || Some(ScrubPosition::first(open.first()?.id, false)).filter(|_| now.active);
            position = next.or_else(after).or_else(sealed);
        }
        report.round_done = true;
        report
    }
}

/// Where the next scrub step continues.
#[derive(Clone, Copy)]
pub(super) struct ScrubPosition {
    active: bool,
    id: JournalId,
    offset: i64,
}

impl ScrubPosition {
    fn first(id: JournalId, active: bool) -> Self {
        Self { active, id, offset: i64::MIN }
    }
}

impl Behind {
    /// Releases all journals.
    pub(super) fn release(&mut self) {
        self.queue.clear();
        self.evictable.clear();
    }

    fn take_queue(&mut self, all: bool) -> VecDeque<(Arc<Journal>, i64)> {
        self.uncached_bytes = 0;
        if all {
            self.queued_bytes = 0;
            return std::mem::take(&mut self.queue);
        }
        let queue = std::mem::take(&mut self.queue);
        let (uncached, cached) = queue.into_iter().partition(|(journal, _)| journal.is_uncached());
        self.queue = cached;
        uncached
    }
}
