//! The public types: ids, options, errors, reports.
//!
//! No behaviour here; it lives in [`crate::Store`] and [`crate::Journal`].

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::disk::DiskFile;
use crate::framing::Framing;

/// Incarnation of a journal: topic id and partition, never a name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Ord, PartialOrd, Debug)]
pub struct JournalId {
    /// Topic id (or any id that is never reused).
    pub incarnation: u128,
    /// Partition number.
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

/// Options of a journal.
#[derive(Clone)]
pub struct JournalOptions {
    /// Folder relative to the data directory, for example `queue/orders/Partition-0`.
    pub folder: String,
    /// Parses the frames.
    pub framing: Arc<dyn Framing>,
    /// When an append counts as durable.
    pub durability: Durability,
    /// A segment is sealed before it grows past this size.
    pub segment_bytes: u64,
    /// The caller's handle, returned in [`DurableSink::on_durable`].
    pub tag: u64,
}

/// Notified by the disk thread once per group commit, with every journal that advanced: (tag, durable end).
pub trait DurableSink: Send + Sync + 'static {
    /// Must be quick: the next group commit waits for it.
    fn on_durable(&self, advanced: &[(u64, i64)]);
}

/// Called on a disk failure that must stop the process.
pub type FatalHook = Arc<dyn Fn(&str, &io::Error) + Send + Sync>;

/// Settings of the store. `..StoreOptions::default()` fills the rest.
#[derive(Clone)]
pub struct StoreOptions {
    /// Size of one commit-log file.
    pub commit_file_bytes: u64,
    /// Size of the very first commit-log file: small, so that a cold start is quick.
    pub first_commit_file_bytes: u64,
    /// Commit-log files that may hold unrecycled records before appends fail with [`AppendError::Busy`].
    pub commit_files: usize,
    /// Bytes of recent frames kept in memory for readers.
    pub recent_bytes: usize,
    /// Frames at least this large bypass the commit log.
    pub bypass_bytes: usize,
    /// Appends are refused below this much free disk space; those of priority journals below a quarter of it.
    pub min_free_bytes: u64,
    /// Unsynced segment bytes that trigger a checkpoint.
    pub checkpoint_bytes: u64,
    /// Longest time a written segment byte stays unsynced.
    pub checkpoint_ms: u64,
    /// Maximum number of open segment files.
    pub open_files: usize,
    /// Called when an fsync or a commit-log write fails. The default logs and aborts the process.
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
                tracing::error!(%error, what, "disk failure; stopping the process");
                std::process::abort();
            }),
        }
    }
}

/// One frame to append; its bytes are `prefix` then `body`.
pub struct Append<'a> {
    /// First offset; must equal the log end.
    pub base: i64,
    /// Last offset.
    pub last: i64,
    /// Leader epoch.
    pub epoch: i32,
    /// Greatest timestamp in the frame.
    pub max_timestamp_ms: i64,
    /// The patched first bytes of the frame.
    pub prefix: &'a [u8],
    /// The rest of the frame, as received.
    pub body: &'a Bytes,
}

/// Why an append was refused.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// Too little free disk space; clears when space is freed.
    #[error("the disk is full")]
    Full,
    /// Write-behind or a checkpoint is behind schedule; retry shortly.
    #[error("the log is catching up with its disk")]
    Busy,
    /// The journal or the store is closed or deleted.
    #[error("the journal is closed")]
    Closed,
    /// The frame does not start at the log end.
    #[error("expected offset {expected}")]
    NotNext {
        /// The log end.
        expected: i64,
    },
    /// The journal is damaged.
    #[error("the journal is damaged")]
    Damaged,
    /// The frame exceeds the framing's limit and could not be read back. Nothing was appended.
    #[error("a frame of {len} bytes exceeds the frame limit of {max}")]
    TooLarge {
        /// Its length.
        len: usize,
        /// The longest frame that the journal's framing reads.
        max: usize,
    },
    /// I/O error of the disk.
    #[error("disk: {0}")]
    Io(#[from] io::Error),
}

/// Why a read failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The offset is outside the log.
    #[error("offset out of range [{start}, {end}]")]
    OutOfRange {
        /// Log start offset.
        start: i64,
        /// Log end offset.
        end: i64,
    },
    /// Frame checksum mismatch, or a missing or misplaced frame.
    #[error("journal {id} is damaged near offset {offset}")]
    Damaged {
        /// The damaged journal.
        id: JournalId,
        /// The damaged offset, as far as known.
        offset: i64,
    },
    /// I/O error of the disk.
    #[error("disk: {0}")]
    Io(#[from] io::Error),
}

/// Why an operation on a journal or the store failed.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The journal or the store is closed or deleted.
    #[error("the journal is closed")]
    Closed,
    /// The offset is outside the log.
    #[error("offset out of range [{start}, {end}]")]
    OutOfRange {
        /// Log start offset.
        start: i64,
        /// Log end offset.
        end: i64,
    },
    /// The folder belongs to another journal, or its name is not a plain relative path.
    #[error("folder {0} cannot be used")]
    Folder(String),
    /// The journal is damaged.
    #[error("the journal is damaged")]
    Damaged,
    /// A file was written by a newer version.
    #[error("{path} has format version {found}, this program knows up to {known}")]
    TooNew {
        /// The file.
        path: String,
        /// Its format version.
        found: u32,
        /// The newest format version that is supported.
        known: u32,
    },
    /// I/O error of the disk.
    #[error("disk: {0}")]
    Io(#[from] io::Error),
}

/// Why a data directory could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has locked it.
    #[error("the data directory is in use by another process")]
    Locked,
    /// A file was written by a newer version.
    #[error("{path} has format version {found}, this program knows up to {known}")]
    TooNew {
        /// The file.
        path: String,
        /// Its format version.
        found: u32,
        /// The newest format version that is supported.
        known: u32,
    },
    /// A file was written by an older version, in a format that is no longer supported.
    #[error("{path} has format version {found}, this program reads versions {oldest} and {known}")]
    TooOld {
        /// The file.
        path: String,
        /// Its format version.
        found: u32,
        /// The oldest format version that is supported.
        oldest: u32,
        /// The newest format version that is supported.
        known: u32,
    },
    /// Synced commit-log records cannot be read: acknowledged data of any journal, and Raft votes, may be lost. Nothing
    /// was written. The directory must neither vote nor count as in sync; treat it as lost.
    #[error(
        "commit log damaged: {path} at byte {position}: {what}; acknowledged data of this directory may be lost"
    )]
    CommitLogDamaged {
        /// The file, or the folder of a missing file.
        path: String,
        /// Byte position of the damage.
        position: u64,
        /// Description of the damage.
        what: String,
    },
    /// The checkpoint is damaged; starting without it could lose data silently.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: String,
        /// Description of the damage.
        what: String,
    },
    /// I/O error of the disk.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: String,
        /// The error of the disk.
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

/// Result of a read.
#[derive(Default)]
pub struct Read {
    /// The frames, back to back.
    pub chunks: Vec<Chunk>,
    /// Total size of the chunks.
    pub bytes: usize,
    /// The offset after the last frame returned; `from` if no frame was.
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

/// A byte range of a segment file. The file stays readable while this lives, even if it is unlinked or replaced.
#[derive(Clone)]
pub struct FileRange {
    /// The segment file.
    pub file: Arc<dyn DiskFile>,
    /// Start position.
    pub pos: u64,
    /// Length in bytes.
    pub len: usize,
}

impl FileRange {
    /// Reads the whole range.
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
    /// The bytes, read from the file if they are not in memory.
    pub fn bytes(&self) -> io::Result<Bytes> {
        match self {
            Chunk::Mem(bytes) => Ok(bytes.clone()),
            Chunk::File(range) => range.read(),
        }
    }
}

/// Limits of retention. Only whole sealed segments are dropped.
#[derive(Clone, Copy, Debug)]
pub struct Retain {
    /// Drop segments whose newest record is older than this wall-clock time.
    pub older_than_ms: Option<i64>,
    /// Drop oldest segments while the log is larger than this.
    pub max_bytes: Option<u64>,
    /// Never drop at or past this offset.
    pub below: i64,
}

/// One segment, for operators and for retention decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// First offset.
    pub base: i64,
    /// Offset after its last frame.
    pub end: i64,
    /// Size in bytes.
    pub bytes: u64,
    /// Greatest timestamp in the segment.
    pub max_timestamp_ms: i64,
    /// True if it is sealed: no frame is appended to it any more.
    pub sealed: bool,
}

/// Decision of compaction on a frame.
#[derive(Clone, Debug)]
pub enum Rewrite {
    /// Keep it byte for byte.
    Keep,
    /// Drop it.
    Drop,
    /// Replace it by these bytes; their offsets must lie within the old frame's range.
    Replace(Bytes),
}

/// Result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactReport {
    /// Segments read.
    pub segments_before: usize,
    /// Segments written in their place.
    pub segments_after: usize,
    /// Bytes read.
    pub bytes_before: u64,
    /// Bytes written in their place.
    pub bytes_after: u64,
}

/// Result of recovery.
#[derive(Clone, Debug, Default)]
pub struct RecoveryReport {
    /// Commit-log and segment files read.
    pub files: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Commit-log records replayed.
    pub records: u64,
    /// Frames accepted past the last checkpoint.
    pub frames: u64,
    /// Bytes of torn writes that were truncated.
    pub cut_bytes: u64,
    /// Damage found, one line each.
    pub damage: Vec<String>,
    /// Files moved to `lost+found`.
    pub moved_aside: Vec<String>,
    /// Duration in nanoseconds.
    pub duration_ns: u64,
}

/// Counters and gauges for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreStats {
    /// Commit-log fsyncs (group commits).
    pub syncs: u64,
    /// Records in these groups.
    pub records: u64,
    /// Bytes written to the commit log.
    pub commit_bytes: u64,
    /// Bytes that bypassed the commit log.
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
    /// Free disk space at the last poll.
    pub free_bytes: u64,
    /// Open segment files.
    pub open_files: u64,
    /// Open journals.
    pub journals: u64,
    /// True if appends are refused for lack of space.
    pub full: bool,
    /// Duration of the last group commit in nanoseconds.
    pub last_sync_ns: u64,
}

/// Result of one scrub step.
#[derive(Clone, Debug, Default)]
pub struct ScrubReport {
    /// Bytes verified in this step.
    pub bytes: u64,
    /// Frames verified in this step.
    pub frames: u64,
    /// Damage found, one line each.
    pub damage: Vec<String>,
    /// True if this step completed a whole round.
    pub round_done: bool,
}
