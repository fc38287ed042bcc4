//! The journal of a shard as the shard sees it: it appends frames and is told how far they are committed.
//!
//! A frame is one batch of effects at one offset. On a node alone, committed is durable; in a cluster it is what the
//! in-sync replicas have.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use moim_journal::{Append, AppendError, Chunk, Framing as _, Journal, PlainFraming, ReadError};

/// Why a frame was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogError {
    /// Not now: the disk is behind or full. Nothing was taken.
    Later,
    /// This node does not lead the shard in that epoch.
    NotLeader,
}

/// A shard's journal.
pub trait ShardLog: Send + Sync + 'static {
    /// Appends one frame at `base`, which is the end of the journal.
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError>;
    /// The journal itself, for reading.
    fn journal(&self) -> &Arc<Journal>;
    /// Whether writes would be refused now for lack of disk.
    fn is_full(&self) -> bool {
        false
    }
    /// Whether enough replicas are in sync for a write to be committed.
    fn admits(&self) -> bool {
        true
    }
    /// Whether this node leads the shard, and in which epoch.
    fn leads(&self) -> Option<i32>;
    /// Whether this node follows the shard's leader.
    fn follows(&self) -> bool {
        false
    }
    /// The epoch of the newest frame.
    fn last_epoch(&self) -> i32 {
        self.journal().epochs().last().map_or(0, |(epoch, _)| *epoch)
    }
    /// How many other replicas have everything below `end`.
    fn replicas_with(&self, end: i64) -> usize;
}

/// The bytes of the journal's own frame before the payload.
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

/// The frames from `from` up to `until`, about `max_bytes` of them: (offset, payload).
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
            let damaged = || io::Error::new(io::ErrorKind::InvalidData, "a frame that makes no sense");
            let frame = PlainFraming.peek(&bytes).ok_or_else(damaged)?;
            let payload = if frame.len <= bytes.len() {
                bytes.split_to(frame.len).slice(HEADER..)
            } else {
                // A large frame that is in memory comes in two pieces: what was put before the payload, and the payload.
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

/// A journal on this node alone.
pub struct LocalLog {
    journal: Arc<Journal>,
}

impl LocalLog {
    /// This journal, led by this node.
    pub fn new(journal: Arc<Journal>) -> Self {
        Self { journal }
    }
}

impl ShardLog for LocalLog {
    fn append(&self, base: i64, epoch: i32, time_ms: i64, payload: &[u8]) -> Result<(), LogError> {
        match append(&self.journal, base, epoch, time_ms, payload) {
            Ok(()) => Ok(()),
            Err(AppendError::Busy | AppendError::Full | AppendError::Io(_)) => Err(LogError::Later),
            Err(error) => {
                tracing::error!(%error, "the journal of a shard takes no more");
                Err(LogError::NotLeader)
            }
        }
    }

    fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    fn leads(&self) -> Option<i32> {
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
    fn frames_read_back_whether_they_are_in_memory_or_in_a_file_and_whatever_their_size() {
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
        journal.set_fleeting(true);
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
        assert!(store.stats().ring_bytes < 1 << 20, "it has left memory");
        check("in files");
    }
}
