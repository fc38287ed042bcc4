//! Opening a journal: the second half of recovery.
//!
//! The store has already redone from the commit log what needs no knowledge of frames (`store/recover.rs`). Here the
//! framing is known: everything past the synced point is walked frame by frame, a torn write is truncated durably
//! before anything can be appended after it, and files that cannot belong to this log are moved aside. After a clean
//! stop nothing is read at all.
//!
//! Damage is told from a torn write by two numbers: the synced point of the checkpoint, and the end of the frames in
//! the commit log. A log that ends before either was damaged.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};

use super::{Epochs, Journal, State};
use crate::checkpoint::JournalImage;
use crate::commit::Record;
use crate::disk::{Disk, DiskFile, read_all, write_at};
use crate::index::Index;
use crate::segment::{self, FrameReader, HEADER, HeaderState, Segment, SegmentImage, Verified, WalkError};
use crate::store::Inner;
use crate::types::{Durability, JournalError, JournalId, JournalOptions, RecoveryReport};

/// The recovered state of a journal before it is opened.
#[derive(Clone)]
pub(crate) struct Recovered {
    pub(crate) image: JournalImage,
    /// Everything before this offset is in the commit log or in synced segments.
    pub(crate) logged_end: i64,
    /// The commit log's frames past the synced point, in order.
    pub(crate) logged: Arc<Vec<Record>>,
    /// True if files may hold more than the image says.
    pub(crate) scan: bool,
}

/// Walks the segment bytes past the synced point of one journal.
struct Tail<'a> {
    store: &'a Inner,
    options: &'a JournalOptions,
    id: JournalId,
    folder: PathBuf,
    start: i64,
    logged_end: i64,
    logged: Arc<Vec<Record>>,
    durability: Durability,
    segments: Vec<Segment>,
    epochs: Epochs,
    bases: BTreeSet<i64>,
    damage: Option<String>,
    report: RecoveryReport,
}

impl Journal {
    /// Opens a recovered journal, or an empty one.
    pub(crate) fn attach(
        store: &Arc<Inner>,
        id: JournalId,
        options: &JournalOptions,
        recovered: Option<Recovered>,
    ) -> Result<Arc<Journal>, JournalError> {
        let known = recovered.is_some();
        let recovered = recovered.unwrap_or_else(|| Recovered {
            image: JournalImage::new(id, options.folder.clone(), options.durability),
            logged_end: 0,
            logged: Arc::default(),
            scan: false,
        });
        let image = recovered.image;
        let now_ms = store.clock.wall_ms();
        let mut tail = Tail {
            store,
            options,
            id,
            folder: store.dir.join(&image.folder),
            start: image.start,
            logged_end: recovered.logged_end,
            logged: recovered.logged,
            durability: image.durability,
            segments: image.segments.into_iter().map(|image| Segment::from_image(image, now_ms)).collect(),
            epochs: Epochs::from_vec(image.epochs),
            bases: BTreeSet::new(),
            damage: None,
            report: RecoveryReport::default(),
        };
        if recovered.scan {
            tail.recover()?;
        } else if !known {
            // Segments of a journal that the commit log does not know were never acknowledged: they must not become
            // part of the new log.
            tail.list()?;
            tail.move_orphans_aside()?;
        }
        let scanned_bytes = tail.report.bytes;
        let Tail { start, mut segments, mut epochs, damage, report, folder, .. } = tail;
        for segment in segments.iter_mut().filter(|segment| segment.is_empty()) {
            segment.index_complete = true;
            // A rolled segment that was never written to has no file yet.
            segment.exists =
                store.disk.stat(&segment::path_of(&folder, segment.image.base, "log"))?.is_some();
        }
        let end = segments.last().map_or(start, |segment| segment.image.end).max(start);
        if segments.last().is_some_and(|segment| segment.image.end < start) {
            segments.clear();
        }
        epochs.set_start(start);
        epochs.truncate(end.saturating_add(1));
        let damaged = damage.is_some();
        store.note_recovery(report, damage);
        let state = State {
            start,
            end,
            epochs,
            segments,
            recent: VecDeque::new(),
            written: 0,
            durability: options.durability,
            segment_bytes: options.segment_bytes,
            snapshot: image.snapshot.filter(|snapshot| snapshot.0 <= end),
            create_staged: known,
            in_bypass: 0,
            replicated_writes: u64::from(scanned_bytes > 0),
            replicated_synced: 0,
            truncating: false,
            damaged,
            unusable: false,
            deleted: false,
            truncations: 0,
            checkpointed: None,
        };
        if scanned_bytes > 0 {
            store.note_dirty_bytes(scanned_bytes);
        }
        Ok(Arc::new_cyclic(|weak_self| Journal {
            id,
            tag: options.tag,
            folder: image.folder,
            framing: options.framing.clone(),
            store: store.clone(),
            weak_self: weak_self.clone(),
            state: Mutex::new(state),
            files: Mutex::new(()),
            cleaned: Mutex::new(None),
            end: AtomicI64::new(end),
            durable: AtomicI64::new(end),
            pending: AtomicU32::new(0),
            group: AtomicU64::new(u64::MAX),
            priority: AtomicBool::new(false),
            uncached: AtomicBool::new(false),
            cached_from: AtomicI64::new(i64::MAX),
            create_durable: Arc::new(AtomicBool::new(known)),
            replicated: AtomicBool::new(options.durability == Durability::Replicated),
        }))
    }
}

/// The saved index of a segment, and the segment length it covers.
pub(super) fn saved_index(disk: &dyn Disk, folder: &Path, base: i64) -> Option<(Index, u64)> {
    let read = |extension| read_all(&*disk.open(&segment::path_of(folder, base, extension)).ok()?).ok();
    Index::decode(&read("index")?, &read("timeindex")?, base)
}

impl Tail<'_> {
    fn recover(&mut self) -> Result<(), JournalError> {
        self.list()?;
        self.drop_below_start()?;
        let synced = self.segments.last().map_or(self.start, |segment| segment.image.end);
        while let Some(at) = self.segments.len().checked_sub(1) {
            if !self.walk_segment(at)? {
                break;
            }
            let end = self.segments[at].image.end;
            if end == self.segments[at].image.base || !self.bases.contains(&end) {
                break;
            }
            self.segments.push(Segment::new(end, self.store.clock.wall_ms()));
        }
        self.move_orphans_aside()?;
        let end = self.segments.last().map_or(self.start, |segment| segment.image.end).max(self.start);
        if end < self.logged_end && self.damage.is_none() {
            let logged = self.logged_end;
            self.damage =
                Some(format!("journal {}: log ends at {end}, commit log has frames up to {logged}", self.id));
        }
        let trusted = synced.max(self.logged_end);
        if end > trusted
            && (self.durability == Durability::Fsync || self.options.durability == Durability::Fsync)
        {
            self.rewrite_unsynced(trusted)?;
        }
        Ok(())
    }

    fn list(&mut self) -> io::Result<()> {
        match self.store.disk.list(&self.folder) {
            Ok(entries) => {
                self.bases = entries.iter().filter_map(|entry| segment::base_of(&entry.name)).collect();
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Finishes an interrupted `set_start`: removes segments wholly below the log start.
    fn drop_below_start(&mut self) -> io::Result<()> {
        let start = self.start;
        let newest = self.segments.len().saturating_sub(1);
        let drop = self.segments[..newest.min(self.segments.len())]
            .partition_point(|segment| segment.image.end <= start);
        let mut removed: Vec<i64> = self.segments.drain(..drop).map(|segment| segment.image.base).collect();
        // The segment that holds the log start may be newer than the checkpoint.
        let known = self.segments.last().map(|segment| (segment.image.base, segment.image.end));
        let first = self.bases.range(..=start).next_back().copied();
        if let Some(first) = first
            && known.is_none_or(|(base, end)| first > base && start >= end)
        {
            removed.extend(self.segments.drain(..).map(|segment| segment.image.base));
            removed.extend(self.bases.range(..first));
            self.segments.push(Segment::new(first, self.store.clock.wall_ms()));
        }
        for base in removed {
            if self.bases.remove(&base) {
                for extension in ["log", "index", "timeindex"] {
                    self.store.remove_if_exists(&segment::path_of(&self.folder, base, extension))?;
                }
                self.store.note_dirty_dir(self.folder.clone());
            }
        }
        Ok(())
    }

    /// Recovers the frames of a segment past its image. Returns true if another segment may follow.
    fn walk_segment(&mut self, at: usize) -> Result<bool, JournalError> {
        let image = self.segments[at].image.clone();
        let path = segment::path_of(&self.folder, image.base, "log");
        let synced = image.len > HEADER;
        let file = match self.store.disk.open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if image.end <= self.start {
                    // Dropped with the log start; later segments were never synced and are gone as well.
                    self.segments.clear();
                } else if synced {
                    self.damage = Some(format!("{}: missing", path.display()));
                } else {
                    self.segments[at].exists = false;
                }
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        self.report.files += 1;
        self.bases.remove(&image.base);
        let mut header = [0; HEADER as usize];
        let got = file.pread(0, &mut header)?;
        match segment::check_header(&header[..got], self.id, image.base) {
            HeaderState::Valid => {}
            HeaderState::Corrupt => {
                tracing::warn!(path = %path.display(), "segment header damaged; header rewritten");
                write_at(&*file, 0, &segment::encode_header(self.id, image.base))?;
                file.sync_data()?;
            }
            HeaderState::TooNew(found) => {
                let path = path.display().to_string();
                return Err(JournalError::TooNew { path, found, known: segment::VERSION });
            }
            HeaderState::Foreign if synced => {
                self.damage = Some(format!("{}: segment header mismatch", path.display()));
                return Ok(false);
            }
            HeaderState::Foreign => {
                // Nothing of it was ever synced: a torn first write.
                self.report.cut_bytes += file.len()?;
                file.set_len(0)?;
                write_at(&*file, 0, &segment::encode_header(self.id, image.base))?;
                file.sync_data()?;
            }
        }
        let len = file.len()?;
        if len < image.len {
            self.damage = Some(format!("{}: {len} bytes, {} were synced", path.display(), image.len));
            return Ok(false);
        }
        self.recover_frames(at, &*file, len)?;
        let segment = &mut self.segments[at];
        segment.exists = true;
        segment.index_complete = !synced;
        // A log that ends before its last logged frame takes no appends: its bytes stay for inspection.
        if segment.image.len < len && segment.image.end >= self.logged_end {
            // Durable before anything new is written: stale frames must never follow new ones.
            self.report.cut_bytes += len - segment.image.len;
            file.set_len(segment.image.len)?;
            file.sync_data()?;
        }
        self.remove_stale_index(&image)?;
        Ok(true)
    }

    /// Removes a saved index that covers unsynced bytes: it may refer to frames that are gone.
    fn remove_stale_index(&self, synced: &SegmentImage) -> io::Result<()> {
        let covered =
            saved_index(&*self.store.disk, &self.folder, synced.base).map_or(0, |(_, covered)| covered);
        if covered > synced.len {
            for extension in ["index", "timeindex"] {
                self.store.remove_if_exists(&segment::path_of(&self.folder, synced.base, extension))?;
            }
        }
        Ok(())
    }

    fn recover_frames(&mut self, at: usize, file: &dyn DiskFile, len: u64) -> Result<(), JournalError> {
        let framing = self.options.framing.clone();
        let segment = &mut self.segments[at];
        let mut reader = FrameReader::new(file, &*framing, len, 1 << 20);
        // The valid ranges around damaged frames.
        let mut valid = vec![(segment.image.len, segment.image.len)];
        loop {
            let image = &segment.image;
            match reader.frame(image.len) {
                Ok(Some((frame, _)))
                    if frame.base == image.end && frame.last - image.base < i64::from(u32::MAX) =>
                {
                    segment.push(&frame);
                    segment.dirty = true;
                    self.epochs.note_frame(frame.epoch, frame.base);
                    self.report.frames += 1;
                }
                Ok(_) | Err(WalkError::BadFrame(_)) => {
                    // A logged frame that is invalid is damaged, not torn; the walk continues behind it.
                    let at = self.logged.partition_point(|record| record.base < image.end);
                    let here = (image.base, image.len, image.end);
                    let logged_frame =
                        self.logged.get(at).filter(|one| (one.segment, one.position, one.base) == here);
                    let Some(frame) = logged_frame.map(Record::frame) else { break };
                    let what = format!("journal {}: frame checksum mismatch at {}", self.id, frame.base);
                    self.damage.get_or_insert(what);
                    valid.last_mut().expect("never empty").1 = image.len;
                    segment.push(&frame);
                    self.epochs.note_frame(frame.epoch, frame.base);
                    valid.push((segment.image.len, segment.image.len));
                }
                Err(WalkError::Io(error)) => return Err(error.into()),
            }
        }
        if valid.len() > 1 {
            valid.last_mut().expect("never empty").1 = segment.image.len;
            segment.verified = Verified::new(&valid, segment.image.len);
        }
        self.report.bytes += reader.bytes_read;
        Ok(())
    }

    /// Moves aside segment files past the log end: appends after a hole left by a power cut.
    fn move_orphans_aside(&mut self) -> io::Result<()> {
        let last = self.segments.last().map_or(i64::MIN, |segment| segment.image.base);
        let known: BTreeSet<i64> = self.segments.iter().map(|segment| segment.image.base).collect();
        for base in std::mem::take(&mut self.bases) {
            if known.contains(&base) {
                continue;
            }
            let path = segment::path_of(&self.folder, base, "log");
            let why = if base > last { "past the end of its log" } else { "not part of its log" };
            self.report.moved_aside.push(self.store.move_aside(&path, why)?);
        }
        Ok(())
    }

    /// Frames without a known fsync are only in the page cache, and after a failed fsync the kernel may take them for
    /// clean: they are rewritten and synced before they count as durable.
    fn rewrite_unsynced(&self, from: i64) -> io::Result<()> {
        for segment in self.segments.iter().filter(|segment| segment.image.end > from && segment.dirty) {
            let file = self.store.disk.open(&segment::path_of(&self.folder, segment.image.base, "log"))?;
            let relative = u32::try_from((from - segment.image.base).max(0)).unwrap_or(u32::MAX);
            let mut position = segment.index.floor(relative).map_or(HEADER, u64::from);
            let mut buffer = vec![0; 1 << 20];
            while position < segment.image.len {
                let want = usize::try_from(segment.image.len - position)
                    .map_or(buffer.len(), |n| n.min(buffer.len()));
                let got = file.pread(position, &mut buffer[..want])?;
                if got == 0 {
                    break;
                }
                write_at(&*file, position, &buffer[..got])?;
                position += got as u64;
            }
            file.sync_data()?;
        }
        self.store.sync_dir_chain(&self.folder)
    }
}
