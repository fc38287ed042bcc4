//! Opening a data directory: the first half of recovery.
//!
//! It reads the checkpoint and the commit log past it, folds the records per journal, and redoes in files what needs no
//! knowledge of frames: truncations, swaps and deletions that were logged and may be unfinished, and frames that are in
//! the log and may not be in their segment. The other half (`journal/attach.rs`) walks the segments once a journal is
//! opened and its framing known.
//!
//! Every step is idempotent: a crash during recovery is followed by the same recovery. docs/journal.md proves the
//! order.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, RwLock};

use bytes::Bytes;
use moim_base::Clock;

use super::behind::Behind;
use super::commit::{Bypass, Committer};
use super::upgrade::upgrade;
use super::{Counters, Inner, files};
use crate::checkpoint::{self, Checkpoint, JournalImage, LogPoint};
use crate::codec::{Input, Output};
use crate::commit::log::{self, CommitLog, Found, LogFile, OpenLog};
use crate::commit::scan::scan;
use crate::commit::stage::{MAX_RECORD, Stage};
use crate::commit::{Kind, RECORD_HEADER, Record, Staged};
use crate::disk::{Disk, DiskFile, create_dirs, read_all, write_at};
use crate::disk_watch::DiskWatch;
use crate::journal::{Epochs, Recovered};
use crate::segment::{self, HEADER, HeaderState};
use crate::types::{Durability, JournalId, OpenError, RecoveryReport, StoreOptions};

const CLEAN_MAGIC: &[u8; 8] = b"MOIMCLN\n";
const CLEAN_VERSION: u32 = 1;

/// The bytes of the clean-shutdown marker: valid for one checkpoint only.
pub(super) fn clean_marker(floor: LogPoint) -> Vec<u8> {
    let mut out = Vec::new();
    out.put(CLEAN_MAGIC);
    out.put_u32(CLEAN_VERSION);
    out.put_u64(floor.generation);
    out.put_u64(floor.position);
    out.put_u64(floor.next_lsn);
    let crc = crc32c::crc32c(&out);
    out.put_u32(crc);
    out
}

/// A frame in the commit log.
struct LoggedFrame {
    lsn: u64,
    record: Record,
}

/// The folded records of one journal.
struct Fold {
    image: JournalImage,
    epochs: Epochs,
    frames: Vec<LoggedFrame>,
    logged_end: i64,
    /// A truncation that was logged without its TruncateDone.
    open_truncation: Option<Record>,
    swaps: Vec<Swap>,
}

/// A compacted file that replaces segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Swap {
    /// Name of the compacted file in the journal's folder.
    pub(crate) name: String,
    /// Segments it replaces.
    pub(crate) replaced: Vec<i64>,
    /// Image of the compacted segment.
    pub(crate) image: segment::SegmentImage,
}

impl Swap {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.put_blob(self.name.as_bytes());
        out.put_count(self.replaced.len());
        self.replaced.iter().for_each(|base| out.put_i64(*base));
        self.image.encode(&mut out);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        Self::decode_with(bytes, segment::SegmentImage::decode)
    }

    /// Decodes a Swap whose segment image may be of another format version.
    pub(crate) fn decode_with(
        bytes: &[u8],
        image: fn(&mut Input<'_>) -> Option<segment::SegmentImage>,
    ) -> Option<Self> {
        let mut input = Input::new(bytes);
        let name = input.text()?;
        let mut replaced = Vec::new();
        for _ in 0..input.u32()? {
            replaced.push(input.i64()?);
        }
        Some(Self { name, replaced, image: image(&mut input)? })
    }

    /// Replaces the swapped segments in a list of segments.
    pub(crate) fn apply(&self, segments: &mut Vec<segment::SegmentImage>) {
        let Some(at) = segments.iter().position(|segment| self.replaced.contains(&segment.base)) else {
            return;
        };
        segments.retain(|segment| !self.replaced.contains(&segment.base));
        segments.insert(at, self.image.clone());
    }
}

impl Fold {
    fn new(image: JournalImage) -> Self {
        let epochs = Epochs::from_vec(image.epochs.clone());
        let logged_end = image.synced_end().max(image.start);
        Self { image, epochs, frames: Vec::new(), logged_end, open_truncation: None, swaps: Vec::new() }
    }

    fn take(&mut self, lsn: u64, record: Record, payload: &[u8]) {
        match record.kind {
            Kind::Frame | Kind::Pointer => {
                self.logged_end = self.logged_end.max(record.last + 1);
                self.frames.push(LoggedFrame { lsn, record });
            }
            Kind::Epoch => {
                self.epochs.note(record.epoch, record.base);
            }
            Kind::Start => {
                self.image.start = self.image.start.max(record.base);
                self.epochs.set_start(record.base);
                self.logged_end = self.logged_end.max(record.base);
            }
            Kind::Truncate => self.truncate(record),
            Kind::Reset => self.reset(record),
            Kind::TruncateDone => self.open_truncation = None,
            Kind::Swap => {
                if let Some(swap) = Swap::decode(payload) {
                    swap.apply(&mut self.image.segments);
                    self.swaps.push(swap);
                }
            }
            Kind::Create | Kind::Delete | Kind::Begin | Kind::Seal => {}
        }
    }

    fn truncate(&mut self, record: Record) {
        let end = record.base;
        while self.frames.last().is_some_and(|frame| frame.record.base >= end) {
            self.frames.pop();
        }
        if is_fresh(&record) {
            self.frames.clear();
            self.image.segments = vec![segment::Segment::new(end, 0).image];
        }
        self.logged_end = self.logged_end.min(end);
        self.epochs.truncate(end);
        self.image.snapshot = self.image.snapshot.take().filter(|snapshot| snapshot.0 <= end);
        if self.image.synced_end() > end {
            self.image.segments.retain(|segment| segment.base <= record.segment);
            if let Some(last) = self.image.segments.last_mut().filter(|last| last.base == record.segment) {
                last.len = record.position;
                last.end = end;
            }
        }
        self.open_truncation = Some(record);
    }

    fn reset(&mut self, record: Record) {
        self.frames.clear();
        self.image.segments = vec![segment::Segment::new(record.base, 0).image];
        self.image.start = record.base;
        self.image.snapshot = None;
        self.logged_end = record.base;
        self.epochs = Epochs::default();
        self.epochs.note(record.epoch, record.base);
        self.open_truncation = Some(record);
    }

    /// True if a segment lies wholly below the log start offset.
    fn dropped(&self, base: i64) -> bool {
        let later = |other: i64| other > base && other <= self.image.start;
        self.frames.iter().any(|frame| later(frame.record.segment))
            || self.image.segments.iter().any(|segment| later(segment.base))
    }
}

/// True if a truncation left nothing: all segments were dropped and an empty one starts at the log start.
fn is_fresh(truncation: &Record) -> bool {
    truncation.kind == Kind::Reset || truncation.epoch == 1
}

/// State collected before the store exists.
struct Opening<'a> {
    dir: &'a Path,
    disk: Arc<dyn Disk>,
    folds: BTreeMap<JournalId, Fold>,
    deleted: Vec<(JournalId, String)>,
    redone: BTreeSet<PathBuf>,
    trash: Vec<PathBuf>,
    aside: u64,
    report: RecoveryReport,
}

pub(super) fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, OpenError> {
    result.map_err(|source| OpenError::Io { path: path.display().to_string(), source })
}

impl Inner {
    pub(super) fn open(
        dir: &Path,
        disk: Arc<dyn Disk>,
        clock: Arc<dyn Clock>,
        options: StoreOptions,
    ) -> Result<Self, OpenError> {
        let began_ns = clock.monotonic_ns();
        let lock = prepare_dir(&*disk, dir)?;
        let (found_checkpoint, clean) = read_checkpoint(&*disk, dir)?;
        let commit_dir = dir.join("commit");
        let found = log::find(&*disk, &commit_dir)?;
        let (found_checkpoint, mut found) = upgrade(&disk, dir, &options, found_checkpoint, found)?;
        let mut opening = Opening {
            dir,
            disk: disk.clone(),
            folds: BTreeMap::new(),
            deleted: Vec::new(),
            redone: BTreeSet::new(),
            trash: Vec::new(),
            aside: 0,
            report: RecoveryReport::default(),
        };
        let Checkpoint { floor, journals, .. } = found_checkpoint;
        opening.folds = journals.into_iter().map(|(id, image)| (id, Fold::new(image))).collect();
        let max_group = usize::try_from(options.commit_file_bytes / 2).unwrap_or(usize::MAX).min(4 << 20);
        let max_record = (max_group / 2).min(MAX_RECORD);
        let (next_lsn, end) = opening.replay(&found, floor, (max_group + max_record) as u64)?;
        for path in &found.bad_headers {
            tracing::warn!(path = %path.display(), "commit-log file header damaged; records are valid");
        }
        for path in std::mem::take(&mut found.foreign) {
            opening.move_aside(&path, "not a commit-log file")?;
        }
        let truncate_done_records = opening.truncate_done_records();
        let log_open = OpenLog {
            folder: commit_dir.clone(),
            file_bytes: options.commit_file_bytes,
            first_file_bytes: options.first_commit_file_bytes,
            found,
            floor,
            next_lsn,
            end,
        };
        let log = at(&commit_dir, CommitLog::open(disk.clone(), log_open))?;
        if !truncate_done_records.is_empty() {
            at(
                &commit_dir,
                log.ensure_space(&truncate_done_records).and_then(|()| log.commit(&truncate_done_records)),
            )?;
        }
        opening.find_trash()?;
        opening.report.duration_ns = clock.monotonic_ns().saturating_sub(began_ns);
        opening
            .report
            .damage
            .iter()
            .for_each(|line| tracing::error!(damage = %line, "damage found by recovery"));
        let free = at(dir, disk.free_bytes(dir))?;
        let behind = Behind::new(opening.trash, clock.monotonic_ms() + options.checkpoint_ms);
        let images = opening.folds.into_iter().map(|(id, fold)| (id, fold.into_recovered(!clean))).collect();
        // A checkpoint recycles the files of earlier runs, even if nothing in them was redone: a node that is killed
        // again and again would otherwise collect them until it refuses appends.
        let commit_files = log.live_count();
        Ok(Self {
            dir: dir.to_path_buf(),
            disk,
            clock,
            bypass_from: options.bypass_bytes.min(max_record),
            max_record,
            max_group,
            stage: Stage::new(options.recent_bytes),
            first_generation: log.durable_point().generation,
            published: Mutex::new(log.durable_point()),
            swaps: AtomicU64::new(0),
            log,
            committer: Mutex::new(Committer::default()),
            disk_watch: DiskWatch::default(),
            bypass: Mutex::new(Bypass::default()),
            bypass_wake: Condvar::new(),
            behind: Mutex::new(behind),
            behind_wake: Condvar::new(),
            journals: RwLock::new(BTreeMap::new()),
            images: Mutex::new(images),
            opening: Mutex::new(()),
            open_files: Mutex::default(),
            sink: RwLock::new(None),
            ring_bytes: AtomicUsize::new(0),
            dirty_bytes: AtomicU64::new(0),
            dirty: AtomicBool::new(!opening.redone.is_empty() || commit_files > 1),
            dirty_dirs: Mutex::default(),
            redone: Mutex::new(opening.redone.into_iter().collect()),
            floor: Mutex::new(floor),
            low_space: AtomicBool::new(free < options.min_free_bytes),
            no_space: AtomicBool::new(false),
            unsealed_since_ms: AtomicU64::new(0),
            sealing: AtomicBool::new(false),
            log_full: AtomicBool::new(commit_files > options.commit_files),
            closed: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            checkpointing: Mutex::new(()),
            waiting: AtomicUsize::new(0),
            waiters: Mutex::new(()),
            waiters_wake: Condvar::new(),
            threads: Mutex::default(),
            running: AtomicBool::new(false),
            recovery: Mutex::new(opening.report),
            was_clean: clean,
            counters: Counters { free_bytes: AtomicU64::new(free), ..Counters::default() },
            scrub: Mutex::new(None),
            aside: AtomicU64::new(opening.aside),
            lock: Mutex::new(Some(lock)),
            options,
        })
    }
}

/// Creates missing folders and locks the directory for this process.
fn prepare_dir(disk: &dyn Disk, dir: &Path) -> Result<Arc<dyn DiskFile>, OpenError> {
    let missing: Vec<&Path> = dir
        .ancestors()
        .take_while(|path| !path.as_os_str().is_empty() && !matches!(disk.stat(path), Ok(Some(_))))
        .collect();
    for path in missing.into_iter().rev().filter(|path| path.parent().is_some()) {
        at(path, disk.create_dir(path))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        at(parent, disk.sync_dir(parent))?;
    }
    let path = dir.join("lock");
    let lock = match disk.lock(&path) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(OpenError::Locked),
        other => at(&path, other)?,
    };
    at(dir, create_dirs(disk, dir, Path::new("commit")))?;
    at(dir, disk.sync_dir(dir))?;
    Ok(lock)
}

/// The checkpoint, and whether the clean-shutdown marker is valid for it. The marker is removed, durably, when this
/// returns.
fn read_checkpoint(disk: &dyn Disk, dir: &Path) -> Result<(Checkpoint, bool), OpenError> {
    let path = dir.join("checkpoint");
    let checkpoint = match disk.open(&path) {
        Ok(file) => checkpoint::decode(&at(&path, read_all(&*file))?, &path.display().to_string())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let floor = LogPoint { generation: 0, position: 0, next_lsn: 1 };
            Checkpoint { version: None, floor, journals: HashMap::new() }
        }
        Err(source) => return Err(OpenError::Io { path: path.display().to_string(), source }),
    };
    let path = dir.join("clean");
    let clean = match disk.open(&path) {
        Ok(file) => {
            let clean = at(&path, read_all(&*file))? == clean_marker(checkpoint.floor);
            at(&path, disk.remove(&path))?;
            at(dir, disk.sync_dir(dir))?;
            clean
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(source) => return Err(OpenError::Io { path: path.display().to_string(), source }),
    };
    Ok((checkpoint, clean))
}

impl Fold {
    fn into_recovered(mut self, scan: bool) -> Recovered {
        self.image.epochs = self.epochs.to_vec();
        let synced = self.image.synced_end();
        let logged = self.frames.into_iter().map(|frame| frame.record).filter(|record| record.base >= synced);
        let logged = Arc::new(logged.collect());
        Recovered { image: self.image, logged_end: self.logged_end, logged, scan }
    }
}

impl Opening<'_> {
    /// Reads the log and redoes its records. Returns the next LSN, and the end of the log. A damaged log is refused
    /// before anything is written: the lost records may concern any journal.
    fn replay(
        &mut self,
        found: &Found,
        floor: LogPoint,
        max_group: u64,
    ) -> Result<(u64, (u64, u64)), OpenError> {
        let commit_dir = self.dir.join("commit");
        let scan = scan(&found.files, floor, &mut |entry, payload| {
            self.take(entry.lsn, entry.record, payload);
            Ok(())
        });
        let scan = at(&commit_dir, scan)?;
        if let Some(damage) = &scan.damage {
            let path = damage.file.map_or(commit_dir.clone(), |number| log::path_of(&commit_dir, number));
            return Err(OpenError::CommitLogDamaged {
                path: path.display().to_string(),
                position: damage.position,
                what: damage.what.clone(),
            });
        }
        at(&commit_dir, scan.rewrite_tail(max_group))?;
        self.report.records = scan.next_lsn - floor.next_lsn;
        self.report.files += scan.files;
        self.report.bytes += scan.bytes;
        self.redo_deletes()?;
        self.redo_swaps()?;
        self.redo_truncations()?;
        self.redo_frames(&found.files, floor)?;
        Ok((scan.next_lsn, scan.end(floor)))
    }

    fn take(&mut self, lsn: u64, record: Record, payload: &[u8]) {
        match record.kind {
            Kind::Create => {
                let Ok(folder) = std::str::from_utf8(payload) else { return };
                let durability = if record.epoch == 1 { Durability::Replicated } else { Durability::Fsync };
                self.folds.entry(record.id).or_insert_with(|| {
                    let mut image = JournalImage::new(record.id, folder.to_owned(), durability);
                    image.start = record.base;
                    Fold::new(image)
                });
            }
            Kind::Delete => {
                if let Some(fold) = self.folds.remove(&record.id) {
                    self.deleted.push((record.id, fold.image.folder));
                }
            }
            _ => {
                // A journal deleted before the checkpoint may still have records past it.
                if let Some(fold) = self.folds.get_mut(&record.id) {
                    fold.take(lsn, record, payload);
                }
            }
        }
    }

    /// Redoes deletions whose folder may not have moved. A folder in use by a live journal has moved: it could not be
    /// used before.
    fn redo_deletes(&mut self) -> Result<(), OpenError> {
        let used: BTreeSet<&str> = self.folds.values().map(|fold| fold.image.folder.as_str()).collect();
        let moves: Vec<_> =
            self.deleted.iter().filter(|(_, folder)| !used.contains(folder.as_str())).cloned().collect();
        for (id, folder) in moves {
            let from = self.dir.join(&folder);
            if at(&from, self.disk.stat(&from))?.is_none() {
                continue;
            }
            at(self.dir, create_dirs(&*self.disk, self.dir, Path::new("trash")))?;
            let trash = self.dir.join("trash");
            let mut to = trash.join(id.to_string());
            while at(&to, self.disk.stat(&to))?.is_some() {
                to.set_extension(format!("again{}", self.aside));
                self.aside += 1;
            }
            at(&from, self.disk.rename(&from, &to))?;
            for path in [Some(self.dir), Some(trash.as_path()), from.parent()].into_iter().flatten() {
                at(path, self.disk.sync_dir(path))?;
            }
        }
        Ok(())
    }

    fn redo_swaps(&mut self) -> Result<(), OpenError> {
        for fold in self.folds.values().filter(|fold| !fold.swaps.is_empty()) {
            let folder = self.dir.join(&fold.image.folder);
            for swap in &fold.swaps {
                at(&folder, finish_swap(&*self.disk, &folder, swap))?;
            }
        }
        Ok(())
    }

    fn redo_truncations(&mut self) -> Result<(), OpenError> {
        for fold in self.folds.values() {
            let Some(truncation) = fold.open_truncation else { continue };
            let folder = self.dir.join(&fold.image.folder);
            let entries = match self.disk.list(&folder) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => at(&folder, other)?,
            };
            for base in entries.iter().filter_map(|entry| segment::base_of(&entry.name)) {
                let path = segment::path_of(&folder, base, "log");
                if base > truncation.segment || (base < truncation.segment && is_fresh(&truncation)) {
                    at(&path, self.disk.remove(&path))?;
                } else if base == truncation.segment {
                    let file = at(&path, self.disk.open(&path))?;
                    if at(&path, file.len())? > truncation.position {
                        at(&path, file.set_len(truncation.position).and_then(|()| file.sync_data()))?;
                    }
                }
                if base >= truncation.segment || is_fresh(&truncation) {
                    for extension in ["index", "timeindex"] {
                        let path = segment::path_of(&folder, base, extension);
                        match self.disk.remove(&path) {
                            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                            other => at(&path, other)?,
                        }
                    }
                }
            }
            at(&folder, self.disk.sync_dir(&folder))?;
        }
        Ok(())
    }

    /// The TruncateDone records for the redone truncations.
    fn truncate_done_records(&self) -> Vec<Staged> {
        let truncations = self.folds.values().filter_map(|fold| fold.open_truncation);
        let done =
            truncations.map(|truncation| Record::control(Kind::TruncateDone, truncation.id, truncation.base));
        let staged =
            |record| Staged { record, payload: Bytes::new(), payload_crc: 0, journal: None, done: None };
        let all: Vec<Staged> = done.map(staged).collect();
        debug_assert!(all.iter().all(|staged| staged.bytes() == RECORD_HEADER));
        all
    }

    /// Writes every frame of the log into its segment, whatever is there: after a failed fsync the page cache cannot be
    /// trusted, the log can.
    fn redo_frames(&mut self, log_files: &[LogFile], floor: LogPoint) -> Result<(), OpenError> {
        let mut wanted: BTreeMap<u64, Record> = BTreeMap::new();
        for fold in self.folds.values() {
            let synced = fold.image.synced_end();
            let mut dropped: HashMap<i64, bool> = HashMap::new();
            for frame in fold.frames.iter().filter(|frame| frame.record.kind == Kind::Frame) {
                let base = frame.record.segment;
                let gone = *dropped.entry(base).or_insert_with(|| fold.dropped(base));
                if frame.record.base >= synced && !gone {
                    wanted.insert(frame.lsn, frame.record);
                }
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let mut files: HashMap<(JournalId, i64), Option<Arc<dyn DiskFile>>> = HashMap::new();
        let mut failed = None;
        let result = scan(log_files, floor, &mut |entry, payload| {
            let Some(record) = wanted.get(&entry.lsn) else { return Ok(()) };
            if files.len() > 512 {
                files.clear();
            }
            let key = (record.id, record.segment);
            let file = match files.entry(key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => match self.segment_for_redo(record) {
                    Ok(file) => new.insert(file),
                    Err(error) => {
                        failed = Some(error);
                        return Err(io::ErrorKind::Other.into());
                    }
                },
            };
            file.as_ref().map_or(Ok(()), |file| write_at(&**file, record.position, payload))
        });
        match failed {
            Some(error) => Err(error),
            None => at(&self.dir.join("commit"), result).map(|_| ()),
        }
    }

    /// The segment of a frame; `None` if it is damaged, which is reported when the journal is opened.
    fn segment_for_redo(&mut self, record: &Record) -> Result<Option<Arc<dyn DiskFile>>, OpenError> {
        let Some(fold) = self.folds.get(&record.id) else { return Ok(None) };
        let synced =
            fold.image.segments.iter().any(|segment| segment.base == record.segment && segment.len > HEADER);
        let folder_name = fold.image.folder.clone();
        let folder = self.dir.join(&folder_name);
        let path = segment::path_of(&folder, record.segment, "log");
        self.redone.insert(path.clone());
        match self.disk.open(&path) {
            Ok(file) => {
                let mut header = [0; HEADER as usize];
                let got = at(&path, file.pread(0, &mut header))?;
                match segment::check_header(&header[..got], record.id, record.segment) {
                    HeaderState::Valid => return Ok(Some(file)),
                    HeaderState::Corrupt => {
                        at(&path, write_at(&*file, 0, &segment::encode_header(record.id, record.segment)))?;
                        return Ok(Some(file));
                    }
                    HeaderState::TooNew(_) | HeaderState::Foreign => {}
                }
                if synced {
                    return Ok(None);
                }
                if header[..got].iter().all(|byte| *byte == 0) {
                    at(&path, write_at(&*file, 0, &segment::encode_header(record.id, record.segment)))?;
                    return Ok(Some(file));
                }
                self.move_aside(&path, "in the way of a segment")?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && synced => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(OpenError::Io { path: path.display().to_string(), source }),
        }
        for changed in at(&folder, create_dirs(&*self.disk, self.dir, Path::new(&folder_name)))? {
            at(&changed, self.disk.sync_dir(&changed))?;
        }
        let file = at(&path, self.disk.create(&path))?;
        at(&path, write_at(&*file, 0, &segment::encode_header(record.id, record.segment)))?;
        at(&folder, self.disk.sync_dir(&folder))?;
        Ok(Some(file))
    }

    fn move_aside(&mut self, path: &Path, why: &str) -> Result<(), OpenError> {
        let moved = at(path, files::move_aside(&*self.disk, self.dir, path, self.aside, why))?;
        tracing::warn!(%moved, "file moved to lost+found");
        self.aside += 1;
        self.report.moved_aside.push(moved);
        Ok(())
    }

    /// Deleted journals that were not unlinked yet.
    fn find_trash(&mut self) -> Result<(), OpenError> {
        let trash = self.dir.join("trash");
        match self.disk.list(&trash) {
            Ok(entries) => {
                self.trash = entries
                    .into_iter()
                    .filter(|entry| entry.is_dir)
                    .map(|entry| trash.join(entry.name))
                    .collect();
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(OpenError::Io { path: trash.display().to_string(), source }),
        }
    }
}

/// Replaces segments by a compacted file; does nothing if that has happened.
pub(crate) fn finish_swap(disk: &dyn Disk, folder: &Path, swap: &Swap) -> io::Result<()> {
    let aside = folder.join(&swap.name);
    if disk.stat(&aside)?.is_none() {
        return Ok(());
    }
    let remove = |path: &Path| match disk.remove(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    for base in &swap.replaced {
        remove(&segment::path_of(folder, *base, "index"))?;
        remove(&segment::path_of(folder, *base, "timeindex"))?;
        if *base != swap.image.base {
            remove(&segment::path_of(folder, *base, "log"))?;
        }
    }
    disk.rename(&aside, &segment::path_of(folder, swap.image.base, "log"))?;
    disk.sync_dir(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The format on disk: a change here needs a new version.
    #[test]
    fn golden_clean_marker() {
        let marker = clean_marker(LogPoint { generation: 3, position: 4096, next_lsn: 77 });
        let hex = marker.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex, "4d4f494d434c4e0a01000000030000000000000000100000000000004d00000000000000ce52ea38");
    }
}
