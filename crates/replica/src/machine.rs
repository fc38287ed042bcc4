//! A state machine on top of a replicated journal: applying committed records, and snapshots of the result.
//!
//! The state at offset *n* is the result of applying every record below *n*, so every replica that has applied the
//! same offset has the same state. A snapshot replaces all records below its end; the journal may be trimmed below it
//! once a snapshot is kept. Uncommitted records are never applied here: a state machine that runs ahead (a shard's
//! primary) keeps that state to itself.

use bytes::{Bytes, BytesMut};
use moim_base::{LeaderEpoch, Offset};

use crate::message::Sender;

/// The state machine that interprets a journal's records.
pub trait StateMachine {
    /// Applies one committed record. Called in offset order, once per offset.
    fn apply(&mut self, offset: Offset, record: &[u8]);
    /// The whole state, encoded.
    fn snapshot(&self) -> Bytes;
    /// Replaces the present state. On error the present state is kept.
    fn install(&mut self, bytes: &[u8]) -> Result<(), InstallError>;
}

/// Why a snapshot cannot be installed.
#[derive(Debug, thiserror::Error)]
#[error("undecodable snapshot: {0}")]
pub struct InstallError(pub String);

/// A snapshot that replaces every record below `end`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// The first offset that the snapshot does not include.
    pub end: Offset,
    /// The leader epoch of the last included record: the last epoch of the log after the install.
    pub last_epoch: LeaderEpoch,
    /// The encoded state.
    pub bytes: Bytes,
}

/// A state machine and its applied offset.
#[derive(Debug)]
pub struct Applier<M> {
    machine: M,
    applied: Offset,
    last_epoch: LeaderEpoch,
    kept: Option<Snapshot>,
}

impl<M: StateMachine> Applier<M> {
    /// Starts with a state machine that has applied nothing.
    pub fn new(machine: M) -> Self {
        Self { machine, applied: Offset(0), last_epoch: LeaderEpoch(0), kept: None }
    }

    /// The state machine.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The applied offset: the first offset that has not been applied.
    pub fn applied(&self) -> Offset {
        self.applied
    }

    /// Applies committed records, from `applied()` on.
    pub fn on_committed<'a>(
        &mut self,
        records: impl IntoIterator<Item = (Offset, LeaderEpoch, &'a [u8])>,
        high_watermark: Offset,
    ) {
        for (offset, epoch, record) in records {
            assert!(offset < high_watermark, "applied record is below the high watermark");
            assert!(offset >= self.applied, "record applied twice");
            self.machine.apply(offset, record);
            self.applied = Offset(offset.0 + 1);
            self.last_epoch = epoch;
        }
    }

    /// Takes a snapshot and keeps it for followers. The journal may be trimmed below its end.
    pub fn take_snapshot(&mut self) -> Offset {
        let bytes = self.machine.snapshot();
        self.kept = Some(Snapshot { end: self.applied, last_epoch: self.last_epoch, bytes });
        self.applied
    }

    /// The kept snapshot.
    pub fn kept(&self) -> Option<&Snapshot> {
        self.kept.as_ref()
    }

    /// Installs another replica's snapshot. The caller must then reset the log to its end.
    pub fn install(&mut self, snapshot: Snapshot) -> Result<(), InstallError> {
        assert!(snapshot.end >= self.applied, "installed snapshot is not older than the applied offset");
        self.machine.install(&snapshot.bytes)?;
        (self.applied, self.last_epoch) = (snapshot.end, snapshot.last_epoch);
        self.kept = Some(snapshot);
        Ok(())
    }

    /// A chunk of the kept snapshot for a follower; the first chunk if the follower holds part of another snapshot.
    pub fn chunk(&self, fetch: &SnapshotFetch, max_bytes: usize) -> Option<Chunk> {
        let kept = self.kept.as_ref()?;
        let position = match fetch.snapshot {
            Some(end) if end == kept.end => fetch.position,
            _ => 0,
        };
        let from = usize::try_from(position).ok()?.min(kept.bytes.len());
        let until = kept.bytes.len().min(from + max_bytes.max(1));
        Some(Chunk {
            end: kept.end,
            last_epoch: kept.last_epoch,
            total: kept.bytes.len() as u64,
            position: from as u64,
            bytes: kept.bytes.slice(from..until),
        })
    }
}

/// A follower's request for the next chunk of the leader's snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotFetch {
    /// The follower.
    pub from: Sender,
    /// The leader epoch that the follower believes is current.
    pub leader_epoch: LeaderEpoch,
    /// The end of the snapshot whose first chunks the follower has; `None` before the first chunk.
    pub snapshot: Option<Offset>,
    /// The number of bytes of it that the follower has.
    pub position: u64,
}

/// A chunk of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// The snapshot's end: the first offset it does not include.
    pub end: Offset,
    /// The leader epoch of the last included record.
    pub last_epoch: LeaderEpoch,
    /// The size of the whole snapshot in bytes.
    pub total: u64,
    /// The position of this chunk in the snapshot.
    pub position: u64,
    /// The bytes of this chunk.
    pub bytes: Bytes,
}

/// A snapshot transfer in progress.
#[derive(Debug, Default)]
pub(crate) struct SnapshotTransfer {
    of: Option<Offset>,
    have: BytesMut,
    asked_ms: u64,
}

impl SnapshotTransfer {
    /// The next chunk to request: (snapshot end, position).
    pub(crate) fn next_chunk(&mut self, now_ms: u64) -> (Option<Offset>, u64) {
        self.asked_ms = now_ms;
        (self.of, self.have.len() as u64)
    }

    pub(crate) fn is_stale(&self, now_ms: u64, timeout_ms: u64) -> bool {
        now_ms.saturating_sub(self.asked_ms) > timeout_ms
    }

    /// Adds a chunk; returns the snapshot once it is complete. A chunk of another snapshot restarts the transfer, a
    /// repeated chunk is ignored.
    pub(crate) fn on_chunk(&mut self, chunk: Chunk) -> Option<Snapshot> {
        if self.of != Some(chunk.end) && chunk.position == 0 {
            self.of = Some(chunk.end);
            self.have.clear();
        }
        if self.of == Some(chunk.end) && chunk.position == self.have.len() as u64 {
            self.have.extend_from_slice(&chunk.bytes);
        }
        let whole = self.of == Some(chunk.end) && self.have.len() as u64 >= chunk.total;
        whole.then(|| Snapshot {
            end: chunk.end,
            last_epoch: chunk.last_epoch,
            bytes: std::mem::take(&mut self.have).freeze(),
        })
    }
}

#[cfg(test)]
mod tests;
