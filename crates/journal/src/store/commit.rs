//! The disk thread's work: one group commit after another; and the bypass thread's: large frames.
//!
//! A group is whatever was queued while the previous one was synced. Order inside a round: make room, write, sync,
//! then and only then move durable ends, wake waiters, tell the sink. A failed write or sync of the commit log is
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

/// What the disk thread keeps between rounds.
#[derive(Default)]
pub(super) struct Committer {
    /// The group being committed; stays here while there is no room for it.
    group: Vec<Staged>,
    number: u64,
    advanced: Vec<(u64, i64)>,
}

/// A frame that goes to its segment before its record enters the log, or a record that must follow one.
pub(crate) struct BypassItem {
    pub(crate) journal: Arc<Journal>,
    /// Introduces the journal to the commit log.
    pub(crate) create: Option<Staged>,
    pub(crate) staged: Staged,
    /// What to write at the record's position.
    pub(crate) write: Option<(Bytes, Bytes)>,
    /// Replicated frames before this one must be synced first.
    pub(crate) sync_first: bool,
}

#[derive(Default)]
pub(super) struct Bypass {
    queue: VecDeque<BypassItem>,
    /// Taken and not finished for lack of space.
    held: Vec<BypassItem>,
    pub(super) stopped: bool,
}

impl Committer {
    /// Lets go of all journals.
    pub(super) fn forget(&mut self) {
        self.group.clear();
    }
}

impl Bypass {
    /// Lets go of all journals.
    pub(super) fn forget(&mut self) {
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
            return false; // a failed sync is never tried again
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

    /// Commits the group; false when it has to wait for space, or the disk failed.
    fn commit_group(&self, committer: &mut Committer) -> bool {
        let before = self.clock.monotonic_ns();
        match self.log.make_room(&committer.group) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.on_no_space();
                return false;
            }
            Err(error) => {
                self.fatal("changing the commit-log file", &error);
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
            0 // nothing in the group itself needs to be vouched for, or to reach a checkpoint
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
        self.announce(committer);
        true
    }

    /// Everything in the group is durable: tell everybody.
    fn announce(&self, committer: &mut Committer) {
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
        *self.announced.locked() = point;
        advanced.clear();
        let (mut bytes, mut fleeting_bytes) = (0, 0);
        let mut behind = self.behind.locked();
        for staged in group.drain(..) {
            let fleeting = staged.journal.as_ref().is_some_and(|journal| journal.is_fleeting());
            let counted = if fleeting { &mut fleeting_bytes } else { &mut bytes };
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
            | behind.add_fleeting_bytes(fleeting_bytes, self.fleeting_limit());
        drop(behind);
        if wake {
            self.behind_wake.notify_one();
        }
        self.notify_waiters();
        if !advanced.is_empty() {
            let sink = self.sink.read().expect("nobody panics holding the sink").clone();
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

    /// Writes and syncs queued large frames, then hands their records to the commit log.
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
            item.journal.leave_bypass(base, wrote);
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
        // A frame in a file whose name may vanish is not durable.
        self.sync_dirs()?;
        // Who wants a frame of a fleeting journal soon finds it in the ring; the memory is better used for the next one.
        for item in items.iter().filter(|item| item.write.is_some() && item.journal.is_fleeting()) {
            let record = &item.staged.record;
            if let Some((_, file)) = files.iter().find(|(key, _)| *key == (record.id, record.segment)) {
                file.forget(record.position, u64::from(record.len));
            }
        }
        Ok(())
    }
}
