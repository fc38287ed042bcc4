//! The journal of a shard as the shard sees it: it appends frames and learns how far they are committed.
//!
//! A frame is one batch of effects at one offset. On a standalone node durable means committed; in a cluster a frame is
//! committed once the in-sync replicas have it.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use moim_journal::{Append, AppendError, Chunk, Framing as _, Journal, PlainFraming, ReadError};

/// Why a frame was not appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogError {
    /// Busy: the disk is behind or full. Nothing was appended; try again later.
    Busy,
    /// This node does not lead the shard in that epoch.
    NotLeader,
}

/// The journal of a shard.
pub trait ShardLog: Send + Sync + 'static {
    /// Appends one frame at `base`, which is the end of the journal.
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError>;
    /// The journal itself, for reading.
    fn journal(&self) -> &Arc<Journal>;
    /// True if writes would be refused now because the disk is full.
    fn is_full(&self) -> bool {
        false
    }
    /// True if enough replicas are in sync for a write to be committed.
    fn has_min_isr(&self) -> bool {
        true
    }
    /// The leader epoch if this node leads the shard.
    fn leader_epoch(&self) -> Option<i32>;
    /// True if this node follows the leader of the shard.
    fn is_follower(&self) -> bool {
        false
    }
    /// The leader epoch of the newest frame.
    fn last_epoch(&self) -> i32 {
        self.journal().epochs().last().map_or(0, |(epoch, _)| *epoch)
    }
    /// The number of other replicas that have everything below `end`.
    fn replicas_with(&self, end: i64) -> usize;
}

/// The length of the journal's frame header before the payload.
const HEADER: usize = 36;

/// Appends a payload to a journal without copying it first.
pub fn append(
    journal: &Journal,
    base: i64,
    epoch: i32,
    time_ms: i64,
    payload: &[u8],
) -> Result<(), AppendError> {
    let frame = PlainFraming::encode(base, base, epoch, time_ms, payload);
    let (prefix, body) = (&frame[..HEADER], frame.slice(HEADER..));
    journal.append(Append { base, last: base, epoch, max_timestamp_ms: time_ms, prefix, body: &body })
}

/// Reads the frames from `from` up to `until`, about `max_bytes` of them: (offset, payload).
pub fn read(
    journal: &Journal,
    from: i64,
    until: i64,
    max_bytes: usize,
) -> Result<Vec<(i64, Bytes)>, ReadError> {
    let read = journal.read(from, until, max_bytes)?;
    let mut frames = Vec::new();
    let mut chunks = read.chunks.iter();
    while let Some(chunk) = chunks.next() {
        let mut bytes = bytes_of(chunk)?;
        while !bytes.is_empty() {
            let damaged = || {
                io::Error::new(io::ErrorKind::InvalidData, "undecodable frame header in the shard journal")
            };
            let frame = PlainFraming.peek(&bytes).ok_or_else(damaged)?;
            let payload = if frame.len <= bytes.len() {
                bytes.split_to(frame.len).slice(HEADER..)
            } else {
                // A large frame in memory comes in two chunks: the header and the payload.
                let payload = bytes_of(chunks.next().ok_or_else(damaged)?)?;
                if std::mem::take(&mut bytes).len() != HEADER || payload.len() + HEADER != frame.len {
                    return Err(damaged().into());
                }
                payload
            };
            if frame.base >= from {
                frames.push((frame.base, payload));
            }
        }
    }
    Ok(frames)
}

fn bytes_of(chunk: &Chunk) -> Result<Bytes, ReadError> {
    match chunk {
        Chunk::Mem(bytes) => Ok(bytes.clone()),
        Chunk::File(range) => Ok(range.read()?),
    }
}

/// The journal of a standalone node.
pub struct LocalLog {
    journal: Arc<Journal>,
}

impl LocalLog {
    /// A journal that this node always leads.
    pub fn new(journal: Arc<Journal>) -> Self {
        Self { journal }
    }
}

impl ShardLog for LocalLog {
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError> {
        match append(&self.journal, base, epoch, time_ms, payload) {
            Ok(()) => Ok(()),
            Err(AppendError::Busy | AppendError::Full | AppendError::Io(_)) => Err(LogError::Busy),
            Err(error) => {
                tracing::error!(%error, "shard journal append failed");
                Err(LogError::NotLeader)
            }
        }
    }

    fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    fn leader_epoch(&self) -> Option<i32> {
        Some(1)
    }

    fn replicas_with(&self, _end: i64) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use moim_base::ManualClock;
    use moim_journal::{Durability, JournalId, JournalOptions, SimDisk, Store, StoreOptions};

    use super::*;

    #[test]
    fn frames_of_any_size_are_read_back_from_memory_and_from_files() {
        let options = StoreOptions { bypass_bytes: 1_000, min_free_bytes: 0, ..StoreOptions::default() };
        let clock = Arc::new(ManualClock::at(1_000));
        let store = Store::open(Path::new("/data"), Arc::new(SimDisk::new()), clock, options).unwrap();
        let options = JournalOptions {
            folder: "slots/shard-0".to_owned(),
            framing: Arc::new(PlainFraming),
            durability: Durability::Fsync,
            segment_bytes: 64 << 20,
            tag: 0,
        };
        let journal = store.journal(JournalId { incarnation: 1, part: 0 }, options).unwrap();
        journal.set_uncached(true);
        let sizes = [10, 5_000, 20, 30, 3 << 20, 40];
        let payload = |at: usize| vec![at as u8; sizes[at]];
        for at in 0..sizes.len() {
            append(&journal, at as i64, 1, 0, &payload(at)).unwrap();
        }
        let check = |when: &str| {
            for from in 0..sizes.len() {
                let frames = read(&journal, from as i64, sizes.len() as i64, 8 << 20).unwrap();
                let read: Vec<_> = frames.iter().map(|(at, bytes)| (*at, bytes.len())).collect();
                let wanted: Vec<_> = (from..sizes.len()).map(|at| (at as i64, sizes[at])).collect();
                assert_eq!(read, wanted, "{when}, from {from}");
                assert!(frames.iter().all(|(at, bytes)| *bytes == payload(*at as usize)), "{when}");
            }
        };
        check("in memory");
        while store.pump() {}
        assert!(store.stats().ring_bytes < 1 << 20, "the frames have left memory");
        check("in files");
    }
}
