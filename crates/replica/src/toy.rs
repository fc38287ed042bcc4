//! An in-memory log that can lose unsynced entries, for tests and the simulated world.

use moim_base::{LeaderEpoch, Offset};

use crate::log::LogView;

/// One record: its leader epoch and its content.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The leader epoch.
    pub epoch: LeaderEpoch,
    /// The content.
    pub value: u64,
}

/// An in-memory log of entries.
#[derive(Clone, Debug, Default)]
pub struct ToyLog {
    start: i64,
    entries: Vec<Entry>,
    /// Ascending in both columns, like the journal's table.
    epochs: Vec<(i32, i64)>,
    written: i64,
    durable: i64,
    cleaned_below: i64,
}

/// The kind of a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// A process crash: written entries survive.
    Process,
    /// A machine crash: synced entries survive.
    Machine,
}

impl ToyLog {
    /// Appends an entry, in memory.
    pub fn append(&mut self, entry: Entry) {
        // An election without a record: the log continues under another leader.
        self.epochs.retain(|(epoch, _)| *epoch <= entry.epoch.0);
        self.note_epoch(entry.epoch, self.end());
        self.entries.push(entry);
    }

    /// Notes that an epoch begins here.
    pub fn note_epoch(&mut self, epoch: LeaderEpoch, start: Offset) {
        if self.epochs.last().is_none_or(|(last, _)| *last < epoch.0) {
            self.epochs.retain(|(_, at)| *at < start.0);
            self.epochs.push((epoch.0, start.0));
        }
    }

    /// Writes up to `to`.
    pub fn write(&mut self, to: Offset) {
        self.written = self.written.max(to.0.min(self.end().0));
    }

    /// Writes and syncs up to `to`.
    pub fn sync(&mut self, to: Offset) {
        self.write(to);
        self.durable = self.durable.max(to.0.min(self.end().0));
    }

    /// Truncates the log, durably.
    pub fn truncate(&mut self, to: Offset) {
        assert!(to.0 >= self.start, "truncation below the log start");
        self.entries.truncate((to.0 - self.start) as usize);
        self.epochs.retain(|(_, at)| *at < to.0);
        (self.written, self.durable) = (self.written.min(to.0), self.durable.min(to.0));
    }

    /// Notes that compaction elsewhere removed tombstones below an offset.
    pub fn note_cleaned(&mut self, below: Offset) {
        self.cleaned_below = self.cleaned_below.max(below.0);
    }

    /// Drops all entries and starts an empty log, durably.
    pub fn reset(&mut self, start: Offset) {
        let cleaned_below = self.cleaned_below;
        let (start, written, durable) = (start.0, start.0, start.0);
        *self = Self { start, written, durable, cleaned_below, ..Self::default() };
    }

    /// Drops the entries below `start`.
    pub fn set_start(&mut self, start: Offset) {
        let start = start.0.clamp(self.start, self.end().0);
        self.entries.drain(..(start - self.start) as usize);
        self.start = start;
        let after = self.epochs.partition_point(|(_, at)| *at <= start);
        if after > 0 {
            self.epochs.drain(..after - 1);
            self.epochs[0].1 = start;
        }
    }

    /// Loses what a crash loses, except for `keep` further entries that happened to reach the disk.
    pub fn crash(&mut self, crash: Crash, keep: i64) {
        let safe = match crash {
            Crash::Process => self.written,
            Crash::Machine => self.durable,
        };
        let end = (safe + keep).min(self.end().0);
        self.entries.truncate((end - self.start) as usize);
        self.epochs.retain(|(_, at)| *at < end);
        // Recovery syncs the surviving entries.
        (self.written, self.durable) = (end, end);
    }

    /// The entry at an offset.
    pub fn get(&self, offset: Offset) -> Option<Entry> {
        let at = usize::try_from(offset.0.checked_sub(self.start)?).ok()?;
        self.entries.get(at).copied()
    }

    /// Up to `count` entries from an offset on.
    pub fn read(&self, from: Offset, count: usize) -> Vec<Entry> {
        let at = usize::try_from(from.0 - self.start).unwrap_or(usize::MAX);
        self.entries.iter().skip(at).take(count).copied().collect()
    }
}

impl LogView for ToyLog {
    fn cleaned_below(&self) -> Offset {
        Offset(self.cleaned_below)
    }

    fn start(&self) -> Offset {
        Offset(self.start)
    }

    fn end(&self) -> Offset {
        Offset(self.start + self.entries.len() as i64)
    }

    fn written(&self) -> Offset {
        Offset(self.written)
    }

    fn durable(&self) -> Offset {
        Offset(self.durable)
    }

    fn last_epoch(&self) -> Option<LeaderEpoch> {
        self.entries.last().map(|entry| entry.epoch)
    }

    fn end_of_epoch(&self, epoch: LeaderEpoch) -> Option<(LeaderEpoch, Offset)> {
        let after = self.epochs.partition_point(|(known, _)| *known <= epoch.0);
        let (known, _) = self.epochs.get(after.checked_sub(1)?)?;
        let end = self.epochs.get(after).map_or(self.end(), |(_, at)| Offset(*at));
        Some((LeaderEpoch(*known), end))
    }
}
