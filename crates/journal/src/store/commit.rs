//! Group commit by the disk thread, and large frames by the bypass thread.
//!
//! A group is whatever was staged while the previous one was synced. Order inside a round: ensure space, write, sync,
//! then and only then advance durable ends, wake waiters, notify the sink. A failed write or fsync of the commit log is
//! fatal and never retried; only lack of space for the *next* file makes a group wait.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;

use super::Inner;
use crate::codec::{Locked, wait_on};
use crate::commit::{Kind, Staged};
use crate::journal::Journal;

/// Bytes of large frames written between two syncs.
const BYPASS_ROUND: usize = 16 << 20;

/// State of the disk thread between rounds.
#[derive(Default)]
pub(super) struct Committer {
    /// The group being committed; stays here while there is no space for it.
    group: Vec<Staged>,
    number: u64,
    advanced: Vec<(u64, i64)>,
}

/// A frame that is written to its segment before its record is staged, or a record that must follow one.
pub(crate) struct BypassItem {
    pub(crate) journal: Arc<Journal>,
    /// The Create record of the journal.
    pub(crate) create: Option<Staged>,
    pub(crate) staged: Staged,
    /// The bytes to write at the record's position.
    pub(crate) write: Option<(Bytes, Bytes)>,
    /// True if Replicated frames before this one must be synced first.
    pub(crate) sync_first: bool,
}

#[derive(Default)]
pub(super) struct Bypass {
    queue: VecDeque<BypassItem>,
    /// Items taken from the queue and not finished for lack of space.
    held: Vec<BypassItem>,
    pub(super) stopped: bool,
}

impl Committer {
    /// Releases all journals.
    pub(super) fn release(&mut self) {
        self.group.clear();
    }
}

impl Bypass {
    /// Releases all journals.
    pub(super) fn release(&mut self) {
        self.queue.clear();
        self.held.clear();
    }
}

impl Inner {
    pub(super) fn commit_loop(&self) {
        loop {
            let mut committer = self.committer.locked();
            if committer.group.is_empty() && !self.stage.wait_and_take(&mut committer.group, self.max_group) {
                return;
            }
            if self.dead.load(Ordering::Acquire) {
                return;
            }
            if !self.commit_group(&mut committer) {
                drop(committer);
                let guard = self.waiters.locked();
                drop(wait_on(&self.waiters_wake, guard, Some(Duration::from_millis(50))));
            }
        }
    }

    /// Bypass and commit until neither has anything left to do; true if something was done.
    pub(super) fn commit_rounds(&self) -> bool {
        let mut did = false;
        if self.dead.load(Ordering::Acquire) {
            return false; // a failed fsync is never retried
        }
        loop {
            let bypassed = self.bypass_round();
            let committed = {
                let mut committer = self.committer.locked();
                if committer.group.is_empty() {
                    self.stage.take(&mut committer.group, self.max_group);
                }
                !committer.group.is_empty() && self.commit_group(&mut committer)
            };
            if self.dead.load(Ordering::Acquire) || !(bypassed || committed) {
                return did;
            }
            did = true;
        }
    }

    /// Commits the group; false if it has to wait for space, or the disk failed.
    fn commit_group(&self, committer: &mut Committer) -> bool {
        let before = self.clock.monotonic_ns();
        match self.log.ensure_space(&committer.group) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.on_no_space();
                return false;
            }
            Err(error) => {
                self.fatal("switching the commit-log file", &error);
                return false;
            }
        }
        let committed = self.disk_watch.commit(&*self.clock, || self.log.commit(&committer.group));
        let bytes = match committed {
            Ok(bytes) => bytes,
            Err(error) => {
                self.fatal("writing the commit log", &error);
                return false;
            }
        };
        if self.log.live_count() > self.options.commit_files {
            self.log_full.store(true, Ordering::Relaxed);
            self.behind_wake.notify_one();
        }
        let is_seal = |staged: &Staged| staged.record.kind == Kind::Seal;
        let sealed = self.sealing.load(Ordering::Relaxed) && committer.group.iter().any(is_seal);
        if sealed {
            self.sealing.store(false, Ordering::Relaxed);
        }
        let unsealed_since_ms = if sealed && committer.group.len() == 1 {
            0 // the Seal itself needs no later proof and no checkpoint
        } else {
            self.dirty.store(true, Ordering::Relaxed);
            self.clock.monotonic_ms().max(1)
        };
        self.unsealed_since_ms.store(unsealed_since_ms, Ordering::Relaxed);
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        self.counters.records.fetch_add(committer.group.len() as u64, Ordering::Relaxed);
        self.counters.commit_bytes.fetch_add(bytes, Ordering::Relaxed);
        let took = self.clock.monotonic_ns().saturating_sub(before);
        self.counters.last_sync_ns.store(took, Ordering::Relaxed);
        self.publish(committer);
        true
    }

    /// Publishes that everything in the group is durable.
    fn publish(&self, committer: &mut Committer) {
        let point = self.log.durable_point();
        let Committer { group, number, advanced } = committer;
        *number += 1;
        for staged in group.iter() {
            if let Some(journal) = &staged.journal {
                let frame = matches!(staged.record.kind, Kind::Frame | Kind::Pointer);
                journal.on_durable(frame.then_some(staged.record.last + 1));
            }
            if let Some(done) = &staged.done {
                done.store(true, Ordering::Release);
            }
        }
        *self.published.locked() = point;
        advanced.clear();
        let (mut bytes, mut uncached_bytes) = (0, 0);
        let mut behind = self.behind.locked();
        for staged in group.drain(..) {
            let uncached = staged.journal.as_ref().is_some_and(|journal| journal.is_uncached());
            let counted = if uncached { &mut uncached_bytes } else { &mut bytes };
            *counted += staged.record.len as usize;
            if let Some(journal) = staged.journal
                && journal.first_in_group(*number)
            {
                let end = journal.durable_end();
                advanced.push((journal.tag, end));
                behind.push(journal, end);
            }
        }
        let wake = behind.add_bytes(bytes, self.options.recent_bytes / 4)
            | behind.add_uncached_bytes(uncached_bytes, self.uncached_limit());
        drop(behind);
        if wake {
            self.behind_wake.notify_one();
        }
        self.notify_waiters();
        if !advanced.is_empty() {
            let sink = self.sink.read().expect("sink lock poisoned").clone();
            if let Some(sink) = sink {
                sink.on_durable(advanced);
            }
        }
    }

    /// Queues a frame for the bypass thread; called under the journal's lock, so the order of one journal is kept.
    pub(crate) fn push_bypass(&self, item: BypassItem) {
        self.bypass.locked().queue.push_back(item);
        self.bypass_wake.notify_one();
    }

    pub(super) fn bypass_loop(&self) {
        loop {
            {
                let mut bypass = self.bypass.locked();
                while bypass.queue.is_empty() && bypass.held.is_empty() {
                    if bypass.stopped {
                        return;
                    }
                    bypass = wait_on(&self.bypass_wake, bypass, None);
                }
            }
            if self.dead.load(Ordering::Acquire) {
                return;
            }
            if !self.bypass_round() {
                let bypass = self.bypass.locked();
                if bypass.stopped {
                    return;
                }
                drop(wait_on(&self.bypass_wake, bypass, Some(Duration::from_millis(50))));
            }
        }
    }

    /// Writes and syncs queued large frames, then stages their records.
    fn bypass_round(&self) -> bool {
        let items = {
            let mut bypass = self.bypass.locked();
            let mut items = std::mem::take(&mut bypass.held);
            let mut bytes = 0;
            while let Some(item) = bypass.queue.pop_front() {
                bytes += item.staged.record.len as usize;
                items.push(item);
                if bytes >= BYPASS_ROUND {
                    break;
                }
            }
            items
        };
        if items.is_empty() {
            return false;
        }
        match self.write_and_sync(&items) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.on_no_space();
                self.bypass.locked().held = items;
                return false;
            }
            Err(error) => {
                self.fatal("writing a large frame", &error);
                return false;
            }
        }
        for item in items {
            let (base, wrote) = (item.staged.record.base, item.write.is_some());
            let lane = item.journal.lane();
            self.stage.push(lane, item.create.into_iter().chain([item.staged]));
            item.journal.on_bypass_done(base, wrote);
        }
        true
    }

    fn write_and_sync(&self, items: &[BypassItem]) -> io::Result<()> {
        let mut files: Vec<((crate::types::JournalId, i64), Arc<dyn crate::disk::DiskFile>)> = Vec::new();
        for item in items {
            if item.sync_first {
                item.journal.sync_replicated()?;
            }
            if let Some(parts) = &item.write {
                let record = &item.staged.record;
                let file = item.journal.write_large(record, parts)?;
                let key = (record.id, record.segment);
                if !files.iter().any(|(known, _)| *known == key) {
                    files.push((key, file));
                }
                self.counters.bypass_bytes.fetch_add(u64::from(record.len), Ordering::Relaxed);
            }
        }
        for (_, file) in &files {
            file.sync_data()?;
        }
        // A frame in a file whose name may be lost is not durable.
        self.sync_dirs()?;
        // Readers of an uncached journal's recent frames find them in the ring; page cache is better used for the next
        // frame.
        for item in items.iter().filter(|item| item.write.is_some() && item.journal.is_uncached()) {
            let record = &item.staged.record;
            if let Some((_, file)) = files.iter().find(|(key, _)| *key == (record.id, record.segment)) {
                file.drop_cache(record.position, u64::from(record.len));
            }
        }
        Ok(())
    }
}
