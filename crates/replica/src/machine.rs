//! A state machine on top of a replicated journal: applying what is committed, and snapshots of what came of it.
//!
//! The machine's state at offset *n* is what applying every record below *n* gives, so any replica that has applied as
//! far has the same state; a snapshot stands for all records below its end, and the journal's beginning may be dropped
//! once one is kept. What is not committed is never applied here: a machine that runs ahead (a shard's primary) keeps
//! that to itself.

use bytes::{Bytes, BytesMut};
use moim_base::{LeaderEpoch, Offset};

use crate::message::Sender;

/// What a journal's records mean.
pub trait StateMachine {
    /// Applies one committed record. Called in order, each offset once.
    fn apply(&mut self, offset: Offset, record: &[u8]);
    /// The whole state as bytes.
    fn snapshot(&self) -> Bytes;
    /// Puts this state in the place of the present one. An error leaves the present one.
    fn install(&mut self, bytes: &[u8]) -> Result<(), InstallError>;
}

/// Why a snapshot cannot be installed.
#[derive(Debug, thiserror::Error)]
#[error("the snapshot is not understood: {0}")]
pub struct InstallError(pub String);

/// A state that stands for every record below `end`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// The first offset it does not contain.
    pub end: Offset,
    /// The epoch of the last record it contains: what the log is said to end with after installing it.
    pub last_epoch: LeaderEpoch,
    /// The state.
    pub bytes: Bytes,
}

/// A state machine and how far it has got.
#[derive(Debug)]
pub struct Applier<M> {
    machine: M,
    applied: Offset,
    last_epoch: LeaderEpoch,
    kept: Option<Snapshot>,
}

impl<M: StateMachine> Applier<M> {
    /// A machine that has seen nothing.
    pub fn new(machine: M) -> Self {
        Self { machine, applied: Offset(0), last_epoch: LeaderEpoch(0), kept: None }
    }

    /// The machine.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The first offset it has not applied.
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
            assert!(offset < high_watermark, "only what is committed is applied");
            assert!(offset >= self.applied, "no record is applied twice");
            self.machine.apply(offset, record);
            self.applied = Offset(offset.0 + 1);
            self.last_epoch = epoch;
        }
    }

    /// Takes a snapshot and keeps it for followers. The journal may be dropped below its end.
    pub fn take_snapshot(&mut self) -> Offset {
        let bytes = self.machine.snapshot();
        self.kept = Some(Snapshot { end: self.applied, last_epoch: self.last_epoch, bytes });
        self.applied
    }

    /// The snapshot kept.
    pub fn kept(&self) -> Option<&Snapshot> {
        self.kept.as_ref()
    }

    /// Installs another replica's snapshot. The log is to be begun anew at its end.
    pub fn install(&mut self, snapshot: Snapshot) -> Result<(), InstallError> {
        assert!(snapshot.end >= self.applied, "a snapshot never takes a machine back");
        self.machine.install(&snapshot.bytes)?;
        (self.applied, self.last_epoch) = (snapshot.end, snapshot.last_epoch);
        self.kept = Some(snapshot);
        Ok(())
    }

    /// A part of the kept snapshot for a follower; its beginning when the follower has a part of another one.
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

/// A follower wants the next part of the leader's snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SnapshotFetch {
    /// Who asks.
    pub from: Sender,
    /// The leadership it believes in.
    pub leader_epoch: LeaderEpoch,
    /// The snapshot it has the beginning of, by its end; none yet otherwise.
    pub snapshot: Option<Offset>,
    /// How much of it it has.
    pub position: u64,
}

/// A part of a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Which snapshot: the first offset it does not contain.
    pub end: Offset,
    /// The epoch of the last record it contains.
    pub last_epoch: LeaderEpoch,
    /// Size of the whole.
    pub total: u64,
    /// Where this part begins.
    pub position: u64,
    /// The part.
    pub bytes: Bytes,
}

/// A snapshot on its way in.
#[derive(Debug, Default)]
pub(crate) struct Install {
    of: Option<Offset>,
    have: BytesMut,
    asked_ms: u64,
}

impl Install {
    /// What to ask for: (snapshot, position).
    pub(crate) fn on_ask(&mut self, now_ms: u64) -> (Option<Offset>, u64) {
        self.asked_ms = now_ms;
        (self.of, self.have.len() as u64)
    }

    pub(crate) fn is_stale(&self, now_ms: u64, timeout_ms: u64) -> bool {
        now_ms.saturating_sub(self.asked_ms) > timeout_ms
    }

    /// Takes a part; answers the whole once it is there. A part of another snapshot begins anew, a repeated one is
    /// left aside.
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
