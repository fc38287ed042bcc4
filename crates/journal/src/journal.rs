//! One journal: append, read, and its in-memory state.
//!
//! State is behind one short lock that is never held across I/O, except for the write of a `Replicated` append.
//! Invariants:
//! - `end` is the offset of the next frame; the caller serialises appends and assigns offsets;
//! - frames not yet in their segment file are in the ring, and leave it only when the file holds them;
//! - the ring is a run of consecutive frames that ends at the newest frame appended through the commit log;
//! - `durable` never passes a frame whose proof is not on stable storage (Replicated: in the kernel).
//!
//! Files of this module: `append.rs` appends frames, `read.rs` reads them, `behind.rs` writes them behind into segment
//! files, `scrub.rs` verifies them, `maintain.rs` truncates, deletes and applies retention, `compact.rs` rewrites.

mod append;
mod attach;
mod behind;
mod cleaned;
mod compact;
mod epochs;
mod maintain;
mod read;
mod scrub;

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;

pub(crate) use self::attach::Recovered;
pub(crate) use self::behind::Capture;
pub use self::cleaned::Cleaned;
pub use self::compact::Compactor;
pub(crate) use self::epochs::Epochs;
use crate::checkpoint::JournalImage;
use crate::codec::Locked;
use crate::commit::stage::Lane;
use crate::disk::DiskFile;
use crate::framing::{Frame, Framing};
use crate::segment::{self, Segment};
use crate::store::Inner;
use crate::types::{Durability, JournalId, SegmentInfo};

/// A frame in the ring.
struct Recent {
    base: i64,
    last: i64,
    segment: i64,
    position: u64,
    /// True if its segment file holds it.
    written: bool,
    /// The patched first bytes of a large frame, whose body is kept as received; empty for a small frame.
    head: Bytes,
    frame: Bytes,
}

impl Recent {
    fn len(&self) -> usize {
        self.head.len() + self.frame.len()
    }
}

/// Memory of a ring entry beside its bytes.
const RECENT_COST: usize = std::mem::size_of::<Recent>();

struct State {
    start: i64,
    end: i64,
    epochs: Epochs,
    segments: Vec<Segment>,
    recent: VecDeque<Recent>,
    /// Entries at the front of `recent` that are written.
    written: usize,
    durability: Durability,
    segment_bytes: u64,
    snapshot: Option<(i64, Bytes)>,
    /// True if the Create record of this journal is staged, or older than this run.
    create_staged: bool,
    /// Large frames being written to their segment; smaller ones queue behind them.
    in_bypass: u32,
    /// Counts Replicated writes; while it differs from `replicated_synced`, an Fsync append must sync them first.
    replicated_writes: u64,
    replicated_synced: u64,
    truncating: bool,
    damaged: bool,
    /// Damaged although all checksums match: its content cannot be used.
    unusable: bool,
    deleted: bool,
    /// Counts truncations: a compaction that overlaps one is abandoned.
    truncations: u64,
    /// What the last durable checkpoint holds of this journal: (truncations by then, synced end).
    checkpointed: Option<(u64, i64)>,
}

/// One append-only log.
pub struct Journal {
    pub(crate) id: JournalId,
    pub(crate) tag: u64,
    pub(crate) folder: String,
    framing: Arc<dyn Framing>,
    store: Arc<Inner>,
    weak_self: Weak<Journal>,
    state: Mutex<State>,
    /// Held while segment files are written behind, truncated, swapped or captured. Never taken by the disk thread or
    /// under `state`.
    files: Mutex<()>,
    /// The compaction state; loaded from its file on first use.
    cleaned: Mutex<Option<Cleaned>>,
    end: AtomicI64,
    durable: AtomicI64,
    /// Records of this journal that are staged and not yet durable.
    pending: AtomicU32,
    /// Number of the last group this journal was part of: visits each journal once per group.
    group: AtomicU64,
    priority: AtomicBool,
    /// True if frames leave the ring as soon as their segment holds them.
    uncached: AtomicBool,
    /// Offset from which frames stay in the ring although the journal is uncached: a reader is about to read them.
    cached_from: AtomicI64,
    /// True if the Create record of this journal is durable.
    create_durable: Arc<AtomicBool>,
    /// Copy of `state.durability`, to decide before locking whether a checksum is worth computing.
    replicated: AtomicBool,
}

impl Journal {
    /// Log start offset.
    pub fn start(&self) -> i64 {
        self.state.locked().start
    }

    /// Tag under which it reports progress: that of the first caller that opened it.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Log end offset.
    pub fn end(&self) -> i64 {
        self.end.load(Ordering::Acquire)
    }

    /// End of the contiguous durable prefix.
    pub fn durable_end(&self) -> i64 {
        self.durable.load(Ordering::Acquire)
    }

    /// The journal's id.
    pub fn id(&self) -> JournalId {
        self.id
    }

    /// Folder relative to the data directory.
    pub fn folder(&self) -> &str {
        &self.folder
    }

    /// True if the journal is damaged.
    pub fn is_damaged(&self) -> bool {
        self.state.locked().damaged
    }

    /// Marks the journal as damaged although its checksums match: its content cannot be used. Appends are refused from
    /// now on, and the node is notified.
    pub fn mark_damaged(&self) {
        let mut state = self.state.locked();
        state.unusable = true;
        self.note_damage(&mut state);
    }

    /// True if the journal is damaged and a copy from another replica would repair it. If the checksums match, another
    /// replica may hold the same unusable frames.
    pub fn is_repairable(&self) -> bool {
        let state = self.state.locked();
        state.damaged && !state.unusable
    }

    /// Marks the journal as damaged because a file that belongs to it, such as a snapshot of its frames, is damaged:
    /// the replica is worth nothing without it.
    pub fn set_damaged(&self, why: &str) {
        if self.note_damage(&mut self.state.locked()) {
            tracing::error!(journal = %self.id, why, "journal damaged");
        }
    }

    /// Refuses further appends and notifies the node. Returns true on the first call.
    fn note_damage(&self, state: &mut State) -> bool {
        let is_first = !std::mem::replace(&mut state.damaged, true);
        if is_first {
            self.store.note_damage();
        }
        is_first
    }

    /// The leader-epoch table: (epoch, start offset).
    pub fn epochs(&self) -> Vec<(i32, i64)> {
        self.state.locked().epochs.to_vec()
    }

    /// The greatest known epoch at or below `epoch` and its end offset; (-1, -1) if there is no such epoch.
    pub fn end_offset_for_epoch(&self, epoch: i32) -> (i32, i64) {
        let state = self.state.locked();
        state.epochs.end_offset(epoch, state.end)
    }

    /// The leader epoch in force just before `offset`.
    pub fn epoch_before(&self, offset: i64) -> Option<i32> {
        self.state.locked().epochs.before(offset)
    }

    /// Splits bytes into frames; `None` if a frame is damaged, misplaced or incomplete.
    pub fn split(&self, bytes: &[u8]) -> Option<Vec<Frame>> {
        let mut frames = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let frame =
                self.framing.peek(rest.get(..self.framing.header_len())?).filter(|frame| frame.len > 0)?;
            let (whole, after) = rest.split_at_checked(frame.len)?;
            let next = frames.last().is_none_or(|before: &Frame| before.last < frame.base);
            if !next || !self.framing.verify(whole) {
                return None;
            }
            frames.push(frame);
            rest = after;
        }
        Some(frames)
    }

    /// A frame without content for this journal: see [`Framing::filler`].
    pub fn filler(&self, base: i64, last: i64, epoch: i32) -> Option<Bytes> {
        self.framing.filler(base, last, epoch)
    }

    /// Bytes in its segments.
    pub fn size_bytes(&self) -> u64 {
        self.state.locked().segments.iter().map(|segment| segment.image.len - segment::HEADER).sum()
    }

    /// Its segments, oldest first.
    pub fn segments(&self) -> Vec<SegmentInfo> {
        let state = self.state.locked();
        let newest = state.segments.len().saturating_sub(1);
        state.segments.iter().enumerate().map(|(at, segment)| segment.info(at < newest)).collect()
    }

    /// When its appends count as durable.
    pub fn durability(&self) -> Durability {
        self.state.locked().durability
    }

    /// Changes durability and segment size from the next append on.
    pub fn set_options(&self, durability: Durability, segment_bytes: u64) {
        let mut state = self.state.locked();
        state.durability = durability;
        state.segment_bytes = segment_bytes;
        self.replicated.store(durability == Durability::Replicated, Ordering::Relaxed);
    }

    /// Gives this journal's small appends priority in every group. Call it before the first append: returns false, and
    /// does nothing, while appends are pending.
    pub fn set_priority(&self, priority: bool) -> bool {
        let _state = self.state.locked();
        let idle = self.pending.load(Ordering::Acquire) == 0;
        if idle {
            self.priority.store(priority, Ordering::Relaxed);
        }
        idle
    }

    /// Lets frames leave the ring as soon as they are in their segment, and writes them behind in smaller steps. For a
    /// journal that is only read at a restart: other journals are read from memory while frames are recent.
    pub fn set_uncached(&self, uncached: bool) {
        self.uncached.store(uncached, Ordering::Relaxed);
    }

    /// Keeps frames from this offset on in the ring while memory allows, although the journal is uncached: a reader is
    /// about to read them.
    pub fn set_cached_from(&self, offset: i64) {
        self.cached_from.store(offset, Ordering::Relaxed);
    }

    pub(crate) fn cached_from(&self) -> i64 {
        self.cached_from.load(Ordering::Relaxed)
    }

    pub(crate) fn is_uncached(&self) -> bool {
        self.uncached.load(Ordering::Relaxed)
    }

    /// Stores a small blob with the journal, written with the next checkpoint. At most 4 MiB; a larger one is ignored,
    /// because a snapshot only shortens a replay.
    pub fn put_snapshot(&self, offset: i64, bytes: Bytes) {
        const MAX: usize = 4 << 20;
        if bytes.len() <= MAX {
            self.state.locked().snapshot = Some((offset, bytes));
            self.store.note_dirty();
        }
    }

    /// The newest snapshot whose offset is at most the log end.
    pub fn snapshot(&self) -> Option<(i64, Bytes)> {
        self.state.locked().snapshot.clone()
    }

    pub(crate) fn lane(&self) -> Lane {
        if self.priority.load(Ordering::Relaxed) { Lane::Priority } else { Lane::Normal }
    }

    fn folder_path(&self) -> PathBuf {
        self.store.dir.join(&self.folder)
    }

    /// On a durable record of this journal, from the disk thread. A frame's end advances the durable end.
    pub(crate) fn on_durable(&self, frame_end: Option<i64>) {
        if let Some(end) = frame_end {
            self.durable.store(end, Ordering::Release);
        }
        self.pending.fetch_sub(1, Ordering::AcqRel);
    }

    /// True if this is the first visit of this journal in the group with this number.
    pub(crate) fn first_in_group(&self, group: u64) -> bool {
        self.group.swap(group, Ordering::Relaxed) != group
    }

    /// The segment's file; opened if it is closed, created if it does not exist and `create` is true.
    pub(crate) fn segment_file(&self, base: i64, create: bool) -> io::Result<Arc<dyn DiskFile>> {
        if let Some(file) = self.state.locked().open_file(base) {
            return Ok(file);
        }
        let opening = self.store.opening.locked();
        let exists = {
            let mut state = self.state.locked();
            if let Some(file) = state.open_file(base) {
                return Ok(file);
            }
            state.segment(base).map(|segment| segment.exists)
        };
        let folder = self.folder_path();
        let path = segment::path_of(&folder, base, "log");
        let file = match exists {
            Some(true) => self.store.disk.open(&path)?,
            Some(false) if create => self.store.create_segment(self.id, &self.folder, base)?,
            _ => return Err(io::ErrorKind::NotFound.into()),
        };
        if let Some(segment) = self.state.locked().segment(base) {
            segment.exists = true;
            segment.used = true;
            segment.file = Some(file.clone());
        }
        drop(opening);
        self.store.note_open(self.id, base);
        Ok(file)
    }

    /// Closes a segment's file descriptor unless it was used since the last call. Returns whether it is closed; `None`
    /// if the journal is busy.
    pub(crate) fn close_if_unused(&self, base: i64) -> Option<bool> {
        let mut state = self.state.try_lock().ok()?;
        let Some(segment) = state.segment(base) else { return Some(true) };
        if std::mem::take(&mut segment.used) {
            return Some(false);
        }
        segment.file = None;
        Some(true)
    }
}

impl State {
    fn segment(&mut self, base: i64) -> Option<&mut Segment> {
        let at = self.segments.binary_search_by_key(&base, |segment| segment.image.base).ok()?;
        Some(&mut self.segments[at])
    }

    /// The segment that holds `offset`, or the one before the gap it falls into.
    fn segment_at(&self, offset: i64) -> Option<usize> {
        self.segments.partition_point(|segment| segment.image.base <= offset).checked_sub(1)
    }

    fn open_file(&mut self, base: i64) -> Option<Arc<dyn DiskFile>> {
        let segment = self.segment(base)?;
        segment.used = true;
        segment.file.clone()
    }

    /// The point up to which everything is in segment files: (segment, position, offset).
    fn behind_point(&self) -> Option<(i64, u64, i64)> {
        match self.recent.get(self.written) {
            Some(first) => Some((first.segment, first.position, first.base)),
            None => {
                self.segments.last().map(|active| (active.image.base, active.image.len, active.image.end))
            }
        }
    }

    /// Ensures that the active segment has space for a frame; seals the old one and rolls if it must.
    fn roll_for(&mut self, frame: &Frame, now_ms: i64) {
        let bytes = frame.len as u64;
        let fits =
            self.segments.last().is_some_and(|active| active.fits(frame.last, bytes, self.segment_bytes));
        if !fits {
            self.segments.push(Segment::new(frame.base, now_ms));
        }
    }

    fn image(&self, journal: &Journal) -> JournalImage {
        let mut image = JournalImage::new(journal.id, journal.folder.clone(), self.durability);
        image.start = self.start;
        image.epochs = self.epochs.to_vec();
        image.snapshot = self.snapshot.clone();
        image
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_journal_takes_little_memory() {
        // Beside the structure itself: its folder name, a map entry, one segment if it was ever written to.
        let resident = size_of::<Journal>() + size_of::<Segment>() + 256;
        assert!(resident <= 1_536, "{resident} bytes");
    }
}
