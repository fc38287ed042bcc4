//! Segmented append-only logs that share one fsync.
//!
//! A [`Store`] owns one data directory with many [`Journal`]s (a journal is one partition, one shard or one Raft log)
//! and one commit log, the write-ahead log that all journals share. Small appends of every journal go into the commit
//! log and share its fsync (group commit); each journal's own segment files are written behind and synced at
//! checkpoints, after which the commit log is recycled. Large appends bypass the commit log: they go straight to their
//! segment and leave a pointer record in the commit log.
//!
//! Invariants of the crate:
//! - nothing is reported durable before the bytes that prove it are on stable storage ([`Durability::Replicated`]: in
//!   the kernel), and a journal's durable end is a contiguous prefix;
//! - all time comes from `moim_base::Clock`, all I/O through [`Disk`], so that the simulator runs this very code;
//! - a failed fsync stops the process, it is never retried;
//! - no file that this crate did not write is ever deleted.
//!
//! The ordering proofs are in `docs/journal.md`.

mod checkpoint;
mod codec;
mod commit;
pub mod disk;
mod disk_watch;
mod framing;
mod index;
mod journal;
#[cfg(feature = "planted")]
pub mod planted;
mod segment;
mod store;
mod types;

pub use disk::{Disk, DiskEntry, DiskFile, DiskStat, RealDisk, SimDisk};
pub use disk_watch::SyncReport;
pub use framing::{Frame, Framing, PlainFraming};
pub use journal::{Cleaned, Compactor, Journal};
pub use store::Store;
pub use types::*;
