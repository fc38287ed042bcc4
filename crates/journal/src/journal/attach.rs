//! Opening a journal: the second half of recovery.
//!
//! The store has already redone from the commit log what it could without knowing the frames (`store/recover.rs`). Here
//! the framing is known: everything past the synced point is walked frame by frame, a torn tail is cut off durably
//! before anything can be appended after it, and what cannot belong to this log is moved aside. After a clean stop
//! nothing is read at all.
//!
//! Damage is told from a torn tail by two numbers: the synced point of the checkpoint, and the end of what the commit
//! log vouches for. A log that ends before either was damaged.

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
use crate::segment::{self, FrameReader, HEADER, HeaderState, Segment, SegmentImage, Verified, Walk};
use crate::store::Inner;
use crate::types::{Durability, JournalError, JournalId, JournalOptions, RecoveryReport};

/// What the store knows of a journal before it is opened.
#[derive(Clone)]
pub(crate) struct Recovered {
    pub(crate) image: JournalImage,
    /// The commit log vouches for everything before this.
    pub(crate) logged_end: i64,
    /// The frames past the synced point that it vouches for, in order.
    pub(crate) logged: Arc<Vec<Record>>,
    /// Whether files may hold more than the image says.
    pub(crate) scan: bool,
}

/// Walks what lies past the synced point of one journal.
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
    /// Opens a journal with what recovery found of it, or an empty one.
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
            // Segments of a journal that the log does not know were never acknowledged: they must not become part of
            // what is appended now.
            tail.list()?;
            tail.move_orphans_aside()?;
        }
        let scanned_bytes = tail.report.bytes;
        let Tail { start, mut segments, mut epochs, damage, report, folder, .. } = tail;
        for segment in segments.iter_mut().filter(|segment| segment.is_empty()) {
            segment.index_complete = true;
            // A roll that was never written to has no file yet.
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
            known,
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
        Ok(Arc::new_cyclic(|me| Journal {
            id,
            tag: options.tag,
            folder: image.folder,
            framing: options.framing.clone(),
            store: store.clone(),
            me: me.clone(),
            state: Mutex::new(state),
            files: Mutex::new(()),
            cleaned: Mutex::new(None),
            end: AtomicI64::new(end),
            durable: AtomicI64::new(end),
            pending: AtomicU32::new(0),
            group: AtomicU64::new(u64::MAX),
            priority: AtomicBool::new(false),
            fleeting: AtomicBool::new(false),
            wanted_from: AtomicI64::new(i64::MAX),
            introduced: Arc::new(AtomicBool::new(known)),
            replicated: AtomicBool::new(options.durability == Durability::Replicated),
        }))
    }
}

/// The index of a segment as saved, and the segment length it covers.
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
                Some(format!("journal {}: ends at {end}, the commit log vouches for {logged}", self.id));
        }
        let trusted = synced.max(self.logged_end);
        if end > trusted
            && (self.durability == Durability::Fsync || self.options.durability == Durability::Fsync)
        {
            self.write_again(trusted)?;
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

    /// Finishes what `set_start` may have left: segments wholly below the log start go.
    fn drop_below_start(&mut self) -> io::Result<()> {
        let start = self.start;
        let newest = self.segments.len().saturating_sub(1);
        let drop = self.segments[..newest.min(self.segments.len())]
            .partition_point(|segment| segment.image.end <= start);
        let mut gone: Vec<i64> = self.segments.drain(..drop).map(|segment| segment.image.base).collect();
        // The segment in which the log starts may be younger than the checkpoint.
        let known = self.segments.last().map(|segment| (segment.image.base, segment.image.end));
        let first = self.bases.range(..=start).next_back().copied();
        if let Some(first) = first
            && known.is_none_or(|(base, end)| first > base && start >= end)
        {
            gone.extend(self.segments.drain(..).map(|segment| segment.image.base));
            gone.extend(self.bases.range(..first));
            self.segments.push(Segment::new(first, self.store.clock.wall_ms()));
        }
        for base in gone {
            if self.bases.remove(&base) {
                for extension in ["log", "index", "timeindex"] {
                    self.store.remove_if_there(&segment::path_of(&self.folder, base, extension))?;
                }
                self.store.note_dirty_dir(self.folder.clone());
            }
        }
        Ok(())
    }

    /// Takes in what a segment holds past its image. Answers whether a next one may follow.
    fn walk_segment(&mut self, at: usize) -> Result<bool, JournalError> {
        let image = self.segments[at].image.clone();
        let path = segment::path_of(&self.folder, image.base, "log");
        let synced = image.len > HEADER;
        let file = match self.store.disk.open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if image.end <= self.start {
                    // Dropped with the log start; what followed it was never synced and is gone as well.
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
            HeaderState::Ours => {}
            HeaderState::Rotten => {
                tracing::warn!(path = %path.display(), "segment header damaged; it is written anew");
                write_at(&*file, 0, &segment::encode_header(self.id, image.base))?;
                file.sync_data()?;
            }
            HeaderState::TooNew(found) => {
                let path = path.display().to_string();
                return Err(JournalError::TooNew { path, found, known: segment::VERSION });
            }
            HeaderState::Foreign if synced => {
                self.damage = Some(format!("{}: the header is not what was written", path.display()));
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
        self.take_frames(at, &*file, len)?;
        let segment = &mut self.segments[at];
        segment.exists = true;
        segment.index_complete = !synced;
        // A log that ends before what the commit log vouches for takes no appends: what is there stays for a look.
        if segment.image.len < len && segment.image.end >= self.logged_end {
            // Durably, before anything new is written: stale frames must never follow fresh ones.
            self.report.cut_bytes += len - segment.image.len;
            file.set_len(segment.image.len)?;
            file.sync_data()?;
        }
        self.distrust_index(&image)?;
        Ok(true)
    }

    /// An index saved for bytes that were not synced may speak of frames that are gone.
    fn distrust_index(&self, synced: &SegmentImage) -> io::Result<()> {
        let covered =
            saved_index(&*self.store.disk, &self.folder, synced.base).map_or(0, |(_, covered)| covered);
        if covered > synced.len {
            for extension in ["index", "timeindex"] {
                self.store.remove_if_there(&segment::path_of(&self.folder, synced.base, extension))?;
            }
        }
        Ok(())
    }

    fn take_frames(&mut self, at: usize, file: &dyn DiskFile, len: u64) -> Result<(), JournalError> {
        let framing = self.options.framing.clone();
        let segment = &mut self.segments[at];
        let mut reader = FrameReader::new(file, &*framing, len, 1 << 20);
        // What is whole, in parts, where something in between is not.
        let mut whole = vec![(segment.image.len, segment.image.len)];
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
                Ok(_) | Err(Walk::Bad(_)) => {
                    // One that was acknowledged is damaged, not torn, and the log goes on behind it.
                    let at = self.logged.partition_point(|record| record.base < image.end);
                    let here = (image.base, image.len, image.end);
                    let lost =
                        self.logged.get(at).filter(|one| (one.segment, one.position, one.base) == here);
                    let Some(frame) = lost.map(Record::frame) else { break };
                    let what = format!("journal {}: frame checksum mismatch at {}", self.id, frame.base);
                    self.damage.get_or_insert(what);
                    whole.last_mut().expect("never empty").1 = image.len;
                    segment.push(&frame);
                    self.epochs.note_frame(frame.epoch, frame.base);
                    whole.push((segment.image.len, segment.image.len));
                }
                Err(Walk::Io(error)) => return Err(error.into()),
            }
        }
        if whole.len() > 1 {
            whole.last_mut().expect("never empty").1 = segment.image.len;
            segment.verified = Verified::new(&whole, segment.image.len);
        }
        self.report.bytes += reader.bytes_read;
        Ok(())
    }

    /// Segment files past the end of the log: what was appended after a hole that a power cut left.
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

    /// Frames that no sync vouches for are in the page cache at best, and after a failed sync the kernel may believe
    /// them clean: they are written once more and synced before they count as durable.
    fn write_again(&self, from: i64) -> io::Result<()> {
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
