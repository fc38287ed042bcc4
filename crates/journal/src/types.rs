//! The words callers use: ids, options, errors, reports.
//!
//! Nothing here does anything; behaviour lives with [`crate::Store`] and [`crate::Journal`].

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::disk::DiskFile;
use crate::framing::Framing;

/// Which incarnation of a journal: topic id and partition, never a name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct JournalId {
    /// Topic id (or any id that is never used twice).
    pub incarnation: u128,
    /// Partition.
    pub part: u32,
}

impl std::fmt::Display for JournalId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}-{}", self.incarnation, self.part)
    }
}

/// When an append counts as durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// When an fsync that covers it has returned.
    Fsync,
    /// When the kernel has it; the fsync follows with the next checkpoint.
    Replicated,
}

/// How to open a journal.
#[derive(Clone)]
pub struct JournalOptions {
    /// Folder relative to the data directory, for example `queue/orders/Partition-0`.
    pub folder: String,
    /// Reads the frames.
    pub framing: Arc<dyn Framing>,
    /// When an append counts as durable.
    pub durability: Durability,
    /// A segment is sealed before it grows past this.
    pub segment_bytes: u64,
    /// The caller's handle, given back in [`DurableSink::on_durable`].
    pub tag: u64,
}

/// Told by the disk thread once per sync, with every journal that advanced: (tag, durable end).
pub trait DurableSink: Send + Sync + 'static {
    /// Must be quick: the next sync waits for it.
    fn on_durable(&self, advanced: &[(u64, i64)]);
}

/// Called when the disk has failed in a way that must end the process.
pub type FatalHook = Arc<dyn Fn(&str, &io::Error) + Send + Sync>;

/// How the store behaves. `..StoreOptions::default()` fills the rest.
#[derive(Clone)]
pub struct StoreOptions {
    /// Size of one commit-log file.
    pub commit_file_bytes: u64,
    /// Size of the very first commit-log file: small, so that a cold start is quick.
    pub first_commit_file_bytes: u64,
    /// Commit-log files that may hold unrecycled records before appends are told [`AppendError::Busy`].
    pub commit_files: usize,
    /// Bytes of recent frames kept in memory for readers.
    pub recent_bytes: usize,
    /// Frames at least this large go straight to their segment.
    pub bypass_bytes: usize,
    /// Appends are refused below this much free disk; those of priority journals below a quarter of it.
    pub min_free_bytes: u64,
    /// Unsynced segment bytes that start a checkpoint.
    pub checkpoint_bytes: u64,
    /// Longest time something stays unsynced in its segment.
    pub checkpoint_ms: u64,
    /// Most segment files kept open.
    pub open_files: usize,
    /// What to do when a sync or a commit-log write fails. The default logs and aborts the process.
    pub fatal: FatalHook,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            commit_file_bytes: 64 << 20,
            first_commit_file_bytes: 4 << 20,
            commit_files: 4,
            recent_bytes: 64 << 20,
            bypass_bytes: 256 << 10,
            min_free_bytes: 256 << 20,
            checkpoint_bytes: 256 << 20,
            checkpoint_ms: 5_000,
            open_files: 1_000,
            fatal: Arc::new(|what, error| {
                tracing::error!(%error, "{what}: the disk cannot be trusted any more, stopping");
                std::process::abort();
            }),
        }
    }
}

/// One frame to append; its bytes are `prefix` then `body`.
pub struct Append<'a> {
    /// First offset; must equal the journal's end.
    pub base: i64,
    /// Last offset.
    pub last: i64,
    /// Leader epoch.
    pub epoch: i32,
    /// Greatest timestamp inside.
    pub max_timestamp_ms: i64,
    /// The patched first bytes of the frame.
    pub prefix: &'a [u8],
    /// The rest of the frame, as it arrived.
    pub body: &'a Bytes,
}

/// Why an append was not taken.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// Too little free disk; goes away by itself when space returns.
    #[error("the disk is full")]
    Full,
    /// Write-behind or checkpoint is behind schedule; try again shortly.
    #[error("the log is catching up with its disk")]
    Busy,
    /// The journal or the store is closed or deleted.
    #[error("the journal is closed")]
    Closed,
    /// The frame is not the next one.
    #[error("expected offset {expected}")]
    NotNext {
        /// The journal's end.
        expected: i64,
    },
    /// Damage was found in this journal.
    #[error("the journal is damaged")]
    Damaged,
    /// The frame could not be read back. Nothing was taken.
    #[error("a frame of {len} bytes exceeds the frame limit of {max}")]
    TooLarge {
        /// Its length.
        len: usize,
        /// The longest that the journal's framing reads.
        max: usize,
    },
    /// The disk refused.
    #[error("disk: {0}")]
    Io(#[from] io::Error),
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The offset is not in the log.
    #[error("offset out of range [{start}, {end}]")]
    OutOfRange {
        /// Log start.
        start: i64,
        /// Next offset.
        end: i64,
    },
    /// The bytes there are not what was written.
    #[error("journal {id} is damaged near offset {offset}")]
    Damaged {
        /// Which journal.
        id: JournalId,
        /// Where, as far as known.
        offset: i64,
    },
    /// The disk refused.
    #[error("disk: {0}")]
    Io(#[from] io::Error),
}

/// Why an operation on a journal or the store failed.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The journal or the store is closed or deleted.
    #[error("the journal is closed")]
    Closed,
    /// The offset is not in the log.
    #[error("offset out of range [{start}, {end}]")]
    OutOfRange {
        /// Log start.
        start: i64,
        /// Next offset.
        end: i64,
    },
    /// The folder belongs to another journal, or its name is not a plain relative path.
    #[error("folder {0} cannot be used")]
    Folder(String),
    /// Damage was found in this journal.
    #[error("the journal is damaged")]
    Damaged,
    /// A file was written by a newer program.
    #[error("{path} has format version {found}, this program knows up to {known}")]
    TooNew {
        /// Which file.
        path: String,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// The disk refused.
    #[error("disk: {0}")]
    Io(#[from] io::Error),
}

/// Why a data directory could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it.
    #[error("the data directory is in use by another process")]
    Locked,
    /// A file was written by a newer program.
    #[error("{path} has format version {found}, this program knows up to {known}")]
    TooNew {
        /// Which file.
        path: String,
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// A file was written by an older program, in a format that this one does not read.
    #[error("{path} has format version {found}, this program reads versions {oldest} and {known}")]
    TooOld {
        /// Which file.
        path: String,
        /// Its version.
        found: u32,
        /// The oldest one that is read.
        oldest: u32,
        /// Ours.
        known: u32,
    },
    /// Synced records of the commit log cannot be read: acknowledged data of any journal may be lost, and votes. Nothing
    /// was written. The directory must neither vote nor count as in sync; it is as good as lost.
    #[error(
        "commit log damaged: {path} at byte {position}: {what}; acknowledged data of this directory may be lost"
    )]
    CommitLogDamaged {
        /// Which file, or the folder of a missing one.
        path: String,
        /// Where.
        position: u64,
        /// How.
        what: String,
    },
    /// The checkpoint is not what was written; starting without it could lose data silently.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// Which file.
        path: String,
        /// How.
        what: String,
    },
    /// The disk refused.
    #[error("{path}: {source}")]
    Io {
        /// Which file or folder.
        path: String,
        /// Why.
        source: io::Error,
    },
}

impl OpenError {
    /// Refuses a format version that is neither `known` nor the one before it.
    pub(crate) fn unknown_version(path: &str, found: u32, known: u32) -> Self {
        let path = path.to_owned();
        if found > known {
            Self::TooNew { path, found, known }
        } else {
            Self::TooOld { path, found, oldest: known - 1, known }
        }
    }
}

/// What a read found.
#[derive(Default)]
pub struct Read {
    /// The frames, back to back.
    pub chunks: Vec<Chunk>,
    /// Their bytes.
    pub bytes: usize,
    /// The offset after the last frame returned; `from` when there is none.
    pub next: i64,
}

/// A run of whole frames.
#[derive(Clone)]
pub enum Chunk {
    /// In memory.
    Mem(Bytes),
    /// In a segment file.
    File(FileRange),
}

/// Bytes of a segment file. The file stays readable while this lives, whatever happens to its name.
#[derive(Clone)]
pub struct FileRange {
    /// The file.
    pub file: Arc<dyn DiskFile>,
    /// Where the bytes start.
    pub pos: u64,
    /// How many.
    pub len: usize,
}

impl FileRange {
    /// Reads them all.
    pub fn read(&self) -> io::Result<Bytes> {
        let mut bytes = vec![0; self.len];
        if self.file.pread(self.pos, &mut bytes)? != self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes.into())
    }
}

impl std::fmt::Debug for FileRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileRange").field("pos", &self.pos).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Chunk {
    /// The bytes, read from the file where they are not in memory.
    pub fn bytes(&self) -> io::Result<Bytes> {
        match self {
            Chunk::Mem(bytes) => Ok(bytes.clone()),
            Chunk::File(range) => range.read(),
        }
    }
}

/// What retention may drop. Only whole sealed segments go.
#[derive(Clone, Copy, Debug)]
pub struct Retain {
    /// Drop segments whose newest record is older than this wall-clock time.
    pub older_than_ms: Option<i64>,
    /// Drop oldest segments while the log is larger than this.
    pub max_bytes: Option<u64>,
    /// Never past this offset.
    pub below: i64,
}

/// One segment, for people and for retention decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// First offset.
    pub base: i64,
    /// Offset after its last frame.
    pub end: i64,
    /// Size in bytes.
    pub bytes: u64,
    /// Greatest timestamp inside.
    pub max_timestamp_ms: i64,
    /// Whether it will never grow again.
    pub sealed: bool,
}

/// What compaction wants done with a frame.
#[derive(Clone, Debug)]
pub enum Rewrite {
    /// Keep it byte for byte.
    Keep,
    /// Drop it.
    Drop,
    /// Put these bytes in its place; they must frame offsets within the old frame's range.
    Replace(Bytes),
}

/// What compaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactReport {
    /// Segments read.
    pub segments_before: usize,
    /// Segments left of them.
    pub segments_after: usize,
    /// Bytes read.
    pub bytes_before: u64,
    /// Bytes left of them.
    pub bytes_after: u64,
}

/// What recovery did.
#[derive(Clone, Debug, Default)]
pub struct RecoveryReport {
    /// Commit-log and segment files read.
    pub files: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Commit-log records taken.
    pub records: u64,
    /// Frames accepted past the last checkpoint.
    pub frames: u64,
    /// Bytes of torn tail cut off.
    pub cut_bytes: u64,
    /// Damage found, one line each.
    pub damage: Vec<String>,
    /// Files moved to `lost+found`.
    pub moved_aside: Vec<String>,
    /// Time spent, in nanoseconds.
    pub duration_ns: u64,
}

/// Counters and gauges for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreStats {
    /// Commit-log syncs.
    pub syncs: u64,
    /// Records in them.
    pub records: u64,
    /// Bytes written to the commit log.
    pub commit_bytes: u64,
    /// Bytes that went straight to a segment.
    pub bypass_bytes: u64,
    /// Bytes written behind.
    pub behind_bytes: u64,
    /// Bytes of recent frames in memory.
    pub ring_bytes: u64,
    /// Segment bytes not yet synced.
    pub dirty_bytes: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Commit-log files that hold unrecycled records.
    pub commit_files: u64,
    /// Free disk, as last seen.
    pub free_bytes: u64,
    /// Segment files open.
    pub open_files: u64,
    /// Journals open.
    pub journals: u64,
    /// Whether appends are refused for lack of space.
    pub full: bool,
    /// Nanoseconds of the last sync.
    pub last_sync_ns: u64,
}

/// What one slice of the scrub saw.
#[derive(Clone, Debug, Default)]
pub struct ScrubReport {
    /// Bytes verified in this slice.
    pub bytes: u64,
    /// Frames verified.
    pub frames: u64,
    /// Damage found, one line each.
    pub damage: Vec<String>,
    /// Whether this slice ended a whole round.
    pub round_done: bool,
}
