//! One journal: appending, reading, and what it keeps in memory.
//!
//! State lives behind one short lock that is never held across I/O, except the write itself of a `Replicated`
//! append. Invariants:
//! - `end` is where the next frame goes; the caller serialises appends and numbers them;
//! - frames not yet in their segment file are in the ring, and leave it only when the file holds them;
//! - the ring is a run of consecutive frames that ends at the newest frame appended through the commit log;
//! - `durable` never passes a frame whose proof is not on stable storage (Replicated: in the kernel).
//!
//! Files of this module: `append.rs` takes frames in, `read.rs` gives them out, `behind.rs` moves them into segment
//! files, `scrub.rs` verifies them, `maintain.rs` truncates, deletes and retains, `compact.rs` rewrites.

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

/// A frame kept in memory.
struct Recent {
    base: i64,
    last: i64,
    segment: i64,
    position: u64,
    /// Whether its segment file holds it.
    written: bool,
    /// The patched first bytes of a large frame, whose rest is kept as it arrived; empty for a small one.
    head: Bytes,
    frame: Bytes,
}

impl Recent {
    fn len(&self) -> usize {
        self.head.len() + self.frame.len()
    }
}

/// What a ring entry costs besides its bytes.
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
    /// Whether the record that introduces this journal is staged, or older than this run.
    known: bool,
    /// Large frames on their way into their segment; smaller ones queue behind them.
    in_bypass: u32,
    /// Counts Replicated writes; while it differs from `replicated_synced`, an fsync append must sync them first.
    replicated_writes: u64,
    replicated_synced: u64,
    truncating: bool,
    damaged: bool,
    /// Damaged by its meaning, not by its bytes.
    unusable: bool,
    deleted: bool,
    /// Counts truncations: a compaction that overlaps one gives up.
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
    me: Weak<Journal>,
    state: Mutex<State>,
    /// Held while segment files are written behind, cut, swapped or captured. Never taken by the disk thread or
    /// under `state`.
    files: Mutex<()>,
    /// What compaction has removed; read from its file when it is first asked for.
    cleaned: Mutex<Option<Cleaned>>,
    end: AtomicI64,
    durable: AtomicI64,
    /// Records of this journal that are staged and not yet durable.
    pending: AtomicU32,
    /// Number of the last group this journal was part of: finds each journal once per group.
    group: AtomicU64,
    priority: AtomicBool,
    /// Whether frames leave memory as soon as their segment has them.
    fleeting: AtomicBool,
    /// Which of them stay nevertheless, for somebody who is about to read them.
    wanted_from: AtomicI64,
    /// Whether the record that introduces this journal is durable.
    introduced: Arc<AtomicBool>,
    /// Mirror of `state.durability`, to decide before the lock whether a checksum is worth computing.
    replicated: AtomicBool,
}

impl Journal {
    /// Log start offset.
    pub fn start(&self) -> i64 {
        self.state.locked().start
    }

    /// What it reports progress under: the tag of whoever opened it first.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Next offset.
    pub fn end(&self) -> i64 {
        self.end.load(Ordering::Acquire)
    }

    /// End of the contiguous durable prefix.
    pub fn durable_end(&self) -> i64 {
        self.durable.load(Ordering::Acquire)
    }

    /// Which journal this is.
    pub fn id(&self) -> JournalId {
        self.id
    }

    /// Folder relative to the data directory.
    pub fn folder(&self) -> &str {
        &self.folder
    }

    /// Whether damage was found in it.
    pub fn is_damaged(&self) -> bool {
        self.state.locked().damaged
    }

    /// What is in it cannot be used, although its checksums are right: nothing more is appended, and the node hears of it.
    pub fn mark_damaged(&self) {
        let mut state = self.state.locked();
        state.unusable = true;
        self.note_damage(&mut state);
    }

    /// Whether it is damaged, and another copy of the same frames would not be: one whose checksums are right may be like
    /// this one.
    pub fn is_repairable(&self) -> bool {
        let state = self.state.locked();
        state.damaged && !state.unusable
    }

    /// What is kept beside the journal and belongs to it, a snapshot of its frames, is damaged: the copy is worth nothing
    /// without it.
    pub fn set_damaged(&self, why: &str) {
        if self.note_damage(&mut self.state.locked()) {
            tracing::error!(journal = %self.id, why, "journal is damaged");
        }
    }

    /// Nothing more is appended, and the node hears of it. Answers whether this is news.
    fn note_damage(&self, state: &mut State) -> bool {
        let news = !std::mem::replace(&mut state.damaged, true);
        if news {
            self.store.note_damage();
        }
        news
    }

    /// The leader-epoch table: (epoch, first offset).
    pub fn epochs(&self) -> Vec<(i32, i64)> {
        self.state.locked().epochs.to_vec()
    }

    /// The greatest known epoch at or below `epoch` and the offset where it ends; (-1, -1) when there is none.
    pub fn end_offset_for_epoch(&self, epoch: i32) -> (i32, i64) {
        let state = self.state.locked();
        state.epochs.end_offset(epoch, state.end)
    }

    /// The epoch in force just before `offset`.
    pub fn epoch_before(&self, offset: i64) -> Option<i32> {
        self.state.locked().epochs.before(offset)
    }

    /// The frames these bytes are, back to back; `None` when one of them is not intact or they are not all.
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

    /// What its appends wait for.
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

    /// Lets this journal's small appends go first in every group. To be called before its first append: answers
    /// false, and does nothing, while appends are under way.
    pub fn set_priority(&self, priority: bool) -> bool {
        let _state = self.state.locked();
        let idle = self.pending.load(Ordering::Acquire) == 0;
        if idle {
            self.priority.store(priority, Ordering::Relaxed);
        }
        idle
    }

    /// Lets frames leave memory as soon as they are in their segment, and brings them there in smaller steps. For a
    /// journal that is read back once, at a restart: others are read from memory while they are recent.
    pub fn set_fleeting(&self, fleeting: bool) {
        self.fleeting.store(fleeting, Ordering::Relaxed);
    }

    /// Frames from here on are about to be read: they stay in memory while there is room, although the journal is
    /// fleeting.
    pub fn set_wanted_from(&self, offset: i64) {
        self.wanted_from.store(offset, Ordering::Relaxed);
    }

    pub(crate) fn wanted_from(&self) -> i64 {
        self.wanted_from.load(Ordering::Relaxed)
    }

    pub(crate) fn is_fleeting(&self) -> bool {
        self.fleeting.load(Ordering::Relaxed)
    }

    /// Keeps a small blob with the journal, written with the next checkpoint. At most 4 MiB, larger ones are
    /// ignored: a snapshot only shortens a replay.
    pub fn put_snapshot(&self, offset: i64, bytes: Bytes) {
        const MAX: usize = 4 << 20;
        if bytes.len() <= MAX {
            self.state.locked().snapshot = Some((offset, bytes));
            self.store.note_dirty();
        }
    }

    /// The newest snapshot whose offset is at most the end.
    pub fn snapshot(&self) -> Option<(i64, Bytes)> {
        self.state.locked().snapshot.clone()
    }

    pub(crate) fn lane(&self) -> Lane {
        if self.priority.load(Ordering::Relaxed) { Lane::Priority } else { Lane::Normal }
    }

    fn folder_path(&self) -> PathBuf {
        self.store.dir.join(&self.folder)
    }

    /// Told by the disk thread: a record of this journal is durable. A frame's end moves the durable end.
    pub(crate) fn on_durable(&self, frame_end: Option<i64>) {
        if let Some(end) = frame_end {
            self.durable.store(end, Ordering::Release);
        }
        self.pending.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether this is the first look at this journal in the group with this number.
    pub(crate) fn first_in_group(&self, group: u64) -> bool {
        self.group.swap(group, Ordering::Relaxed) != group
    }

    /// The segment's file; opened if it is not, created if it does not exist and `create` says so.
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

    /// Lets go of a segment's descriptor unless it was used since the last look. Answers whether it is closed now;
    /// `None` when the journal is busy.
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

    /// Up to where everything is in segment files: (segment, position, offset).
    fn behind_point(&self) -> Option<(i64, u64, i64)> {
        match self.recent.get(self.written) {
            Some(first) => Some((first.segment, first.position, first.base)),
            None => {
                self.segments.last().map(|active| (active.image.base, active.image.len, active.image.end))
            }
        }
    }

    /// The active segment with room for a frame; seals the old one where it must.
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
    fn an_idle_journal_is_small() {
        // Besides the structure itself: its folder's name, a map entry, one segment if it was ever written to.
        let resident = size_of::<Journal>() + size_of::<Segment>() + 256;
        assert!(resident <= 1_536, "{resident} bytes");
    }
}
