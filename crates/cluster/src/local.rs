//! The repository of a single node: durable, on a journal of the node's store, sharing its fsync with the
//! queue.
//!
//! The log holds decisions, one per offset, and periodic snapshots of the whole state; once a snapshot is
//! durable the log start moves to it. Opening replays from the log start. The keys and values are the
//! cluster's metadata format; the encoding of this log is private to it and becomes obsolete when the
//! coordination core takes over.
//!
//! Invariant: the state at log end is exactly the replay of the frames from log start.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use moim_base::Clock;
use moim_journal::{
    Append, AppendError, Durability, Journal, JournalId, JournalOptions, PlainFraming, ReadError, Store,
};

use crate::engine::record::{self, Logged};
use crate::engine::state::{Record, State};
use crate::engine::{Engine, Log};
use crate::repository::RepositoryError;

/// The metadata journal of a standalone node.
pub const JOURNAL: JournalId = JournalId { incarnation: 1, part: 0 };
/// Its folder below the data directory.
pub const FOLDER: &str = "coord/local";

const SEGMENT_BYTES: u64 = 16 << 20;
/// Minimum log growth before a snapshot.
const SNAPSHOT_AFTER_BYTES: usize = 256 << 10;

/// A repository on a journal of this node.
pub type LocalRepository = Engine<JournalLog>;

/// The log of a [`LocalRepository`].
pub struct JournalLog {
    journal: Arc<Journal>,
    clock: Arc<dyn Clock>,
    snapshots: Mutex<Snapshots>,
}

/// Snapshot policy, and the pending trim.
struct Snapshots {
    after_bytes: usize,
    grown_bytes: usize,
    last_bytes: usize,
    /// The log is trimmed to this offset once the snapshot there is durable.
    trim_to: Option<i64>,
}

impl LocalRepository {
    /// Opens the repository in a recovered store. The owner of the store's durable sink passes the
    /// notifications for `tag` to [`on_durable`](Engine::on_durable); without them replies still arrive, but
    /// later.
    pub fn open(store: &Store, clock: Arc<dyn Clock>, tag: u64) -> Result<Self, RepositoryError> {
        Self::open_with(store, clock, tag, SNAPSHOT_AFTER_BYTES)
    }

    fn open_with(
        store: &Store,
        clock: Arc<dyn Clock>,
        tag: u64,
        after_bytes: usize,
    ) -> Result<Self, RepositoryError> {
        let options = JournalOptions {
            folder: FOLDER.to_owned(),
            framing: Arc::new(PlainFraming),
            durability: Durability::Fsync,
            segment_bytes: SEGMENT_BYTES,
            tag,
        };
        let journal = store
            .journal(JOURNAL, options)
            .map_err(|error| RepositoryError::Damaged(format!("{FOLDER}: {error}")))?;
        let (state, grown_bytes) = replay(&journal)?;
        let snapshots = Snapshots { after_bytes, grown_bytes, last_bytes: 0, trim_to: None };
        let log = JournalLog { journal, clock: Arc::clone(&clock), snapshots: Mutex::new(snapshots) };
        Ok(Self::with(state, log, clock))
    }
}

/// Replays the journal: the state, and the number of bytes.
fn replay(journal: &Journal) -> Result<(State, usize), RepositoryError> {
    let (start, end) = (journal.start(), journal.end());
    let mut state = State::default();
    let mut bytes = 0;
    let mut first = true;
    let mut failure = None;
    journal
        .for_each_frame(start, end, &mut |_, frame| {
            bytes += frame.len();
            let step =
                record::decode(Bytes::copy_from_slice(PlainFraming::payload(frame))).and_then(|logged| {
                    match logged {
                        Logged::Snapshot(snapshot) => {
                            state = snapshot;
                            Ok(())
                        }
                        Logged::Record(_) if first && start > 0 => {
                            Err(RepositoryError::Damaged(format!("{FOLDER} does not start with a snapshot")))
                        }
                        Logged::Record(record) => state.apply(&record).map(drop),
                    }
                });
            first = false;
            failure = step.err();
            failure.is_none()
        })
        .map_err(|error: ReadError| RepositoryError::Damaged(format!("{FOLDER}: {error}")))?;
    match failure {
        Some(error) => Err(error),
        None => Ok((state, bytes)),
    }
}

impl JournalLog {
    fn write(&self, payload: &[u8]) -> Result<i64, RepositoryError> {
        let offset = self.journal.end();
        let timestamp_ms = self.clock.wall_ms();
        let frame = PlainFraming::encode(offset, offset, 0, timestamp_ms, payload);
        let append = Append {
            base: offset,
            last: offset,
            epoch: 0,
            max_timestamp_ms: timestamp_ms,
            prefix: &[],
            body: &frame,
        };
        self.journal.append(append).map_err(append_failed)?;
        Ok(offset)
    }

    fn snapshots(&self) -> MutexGuard<'_, Snapshots> {
        self.snapshots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rejected append changed nothing, so only damage is final.
fn append_failed(error: AppendError) -> RepositoryError {
    match error {
        AppendError::Damaged => RepositoryError::Damaged(format!("{FOLDER}: {error}")),
        AppendError::Full
        | AppendError::Busy
        | AppendError::Closed
        | AppendError::NotNext { .. }
        | AppendError::TooLarge { .. }
        | AppendError::Io(_) => RepositoryError::Unavailable(error.to_string()),
    }
}

impl Log for JournalLog {
    fn append(&self, record: &Record) -> Result<(), RepositoryError> {
        let payload = record::encode_record(record);
        self.write(&payload)?;
        self.snapshots().grown_bytes += payload.len();
        Ok(())
    }

    fn on_applied(&self, state: &State) {
        let mut snapshots = self.snapshots();
        // As much log as two snapshots: snapshots then cost at most half of the log writes.
        if snapshots.grown_bytes < snapshots.after_bytes.max(2 * snapshots.last_bytes) {
            return;
        }
        let payload = record::encode_snapshot(state);
        match self.write(&payload) {
            Ok(offset) => {
                snapshots.grown_bytes = 0;
                snapshots.last_bytes = payload.len();
                snapshots.trim_to = Some(offset);
            }
            // The log continues without the snapshot; the next change retries.
            Err(error) => tracing::warn!(%error, "metadata snapshot failed"),
        }
    }

    fn end(&self) -> i64 {
        self.journal.end()
    }

    fn durable_end(&self) -> i64 {
        self.journal.durable_end()
    }

    fn maybe_trim(&self) {
        let trim_to = {
            let mut snapshots = self.snapshots();
            let durable_end = self.journal.durable_end();
            let Some(offset) = snapshots.trim_to.take_if(|offset| *offset < durable_end) else { return };
            offset
        };
        if let Err(error) = self.journal.set_start(trim_to) {
            // Costs only space: the next snapshot trims further.
            tracing::warn!(%error, offset = trim_to, "metadata log trim failed");
        }
    }
}

#[cfg(test)]
mod tests;
