//! Producer snapshots: producer state as bytes, kept with a journal so that a restart need not replay all of it.
//!
//! Layout, big-endian: magic `MPRD`, format version, counted lists, CRC32C over all of it.
//!
//! A journal keeps at most [`MAX_BYTES`]. A state that does not fit is written with only the last batch of each
//! producer: a retry of an earlier one is still detected as a duplicate, without its offset. If that is still too
//! large, the aborted transaction index is left out, and rebuilt from the log when the snapshot is loaded. Nothing
//! else is left out.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Buf, BufMut};
use hashbrown::HashMap;

use super::{AbortedTxn, BatchMetadata, Inner, MAX_BATCHES, ProducerStateEntry, ProducerStateManager};

const MAGIC: u32 = u32::from_be_bytes(*b"MPRD");
const VERSION: u16 = 2;
/// The previous version: it always has the aborted transactions, and no flag for them.
const PREVIOUS_VERSION: u16 = 1;

/// Maximum snapshot size.
const MAX_BYTES: usize = 4 << 20;

/// A decoded snapshot.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Loaded {
    pub(crate) producers: ProducerStateManager,
    /// True if the snapshot includes the aborted transaction index.
    pub(crate) has_aborted: bool,
}

/// An invalid snapshot. The caller then replays the journal instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error("not a producer snapshot: wrong magic")]
    Magic,
    #[error("unsupported producer snapshot format {0}")]
    Version(u16),
    #[error("producer snapshot checksum mismatch")]
    Crc,
    #[error("producer snapshot truncated")]
    Short,
}

impl ProducerStateManager {
    /// Encodes the state; `None` if there are too many producers.
    pub(crate) fn snapshot(&self) -> Option<Vec<u8>> {
        self.snapshot_within(MAX_BYTES)
    }

    fn snapshot_within(&self, max_bytes: usize) -> Option<Vec<u8>> {
        let forms = [(MAX_BATCHES, true), (1, true), (1, false)];
        forms
            .into_iter()
            .map(|(batches, aborted)| self.encode(batches, aborted))
            .find(|b| b.len() <= max_bytes)
    }

    fn encode(&self, most_batches: usize, with_aborted: bool) -> Vec<u8> {
        let empty = Inner::default();
        let inner = self.inner.as_deref().unwrap_or(&empty);
        let mut out = Vec::with_capacity(64 + inner.producers.len() * 64);
        out.put_u32(MAGIC);
        out.put_u16(VERSION);
        let mut producers: Vec<_> = inner.producers.iter().collect();
        producers.sort_by_key(|(id, _)| **id);
        out.put_u32(producers.len() as u32);
        for (id, p) in producers {
            out.put_i64(*id);
            out.put_i16(p.epoch);
            out.put_i32(p.coordinator_epoch);
            out.put_i64(p.last_ms);
            out.put_i64(p.last_offset);
            out.put_i64(p.txn_start.unwrap_or(-1));
            out.put_i32(p.proven);
            out.put_u8(u8::from(p.from_zero));
            let skipped = p.batches.len().saturating_sub(most_batches);
            out.put_u8((p.batches.len() - skipped) as u8);
            for b in p.batches.iter().skip(skipped) {
                out.put_i32(b.base_sequence);
                out.put_i32(b.last_sequence);
                out.put_i64(b.base_offset);
                out.put_i64(b.last_offset);
                out.put_i64(b.timestamp);
            }
        }
        out.put_u32(inner.ended.len() as u32);
        for (first, last) in &inner.ended {
            out.put_i64(*first);
            out.put_i64(*last);
        }
        out.put_u8(u8::from(with_aborted));
        let aborted = if with_aborted { &inner.aborted[..] } else { &[] };
        out.put_u32(aborted.len() as u32);
        for a in aborted {
            out.put_i64(a.producer_id);
            out.put_i64(a.first_offset);
            out.put_i64(a.last_offset);
        }
        let crc = crc32c::crc32c(&out);
        out.put_u32(crc);
        out
    }

    /// Decodes a snapshot.
    pub(crate) fn load(bytes: &[u8]) -> Result<Loaded, SnapshotError> {
        if bytes.len() < 10 {
            return Err(SnapshotError::Short);
        }
        let (body, crc) = bytes.split_at(bytes.len() - 4);
        let mut input = body;
        if input.get_u32() != MAGIC {
            return Err(SnapshotError::Magic);
        }
        let version = input.get_u16();
        if ![PREVIOUS_VERSION, VERSION].contains(&version) {
            return Err(SnapshotError::Version(version));
        }
        if crc32c::crc32c(body).to_be_bytes() != crc {
            return Err(SnapshotError::Crc);
        }
        let mut inner = Inner::default();
        let has_aborted =
            read(&mut input, version, &mut inner).map_err(|_: bytes::TryGetError| SnapshotError::Short)?;
        let mut producers = Self { inner: Some(Box::new(inner)) };
        producers.shrink();
        Ok(Loaded { producers, has_aborted })
    }
}

/// Reads the lists; returns true if they include the aborted transaction index.
fn read(input: &mut &[u8], version: u16, inner: &mut Inner) -> Result<bool, bytes::TryGetError> {
    let mut producers = HashMap::new();
    let mut open = BTreeMap::new();
    for _ in 0..input.try_get_u32()? {
        let id = input.try_get_i64()?;
        let mut producer = ProducerStateEntry {
            epoch: input.try_get_i16()?,
            coordinator_epoch: input.try_get_i32()?,
            last_ms: input.try_get_i64()?,
            last_offset: input.try_get_i64()?,
            txn_start: Some(input.try_get_i64()?).filter(|at| *at >= 0),
            proven: input.try_get_i32()?,
            from_zero: input.try_get_u8()? != 0,
            batches: VecDeque::with_capacity(MAX_BATCHES),
        };
        for _ in 0..input.try_get_u8()? {
            producer.batches.push_back(BatchMetadata {
                base_sequence: input.try_get_i32()?,
                last_sequence: input.try_get_i32()?,
                base_offset: input.try_get_i64()?,
                last_offset: input.try_get_i64()?,
                timestamp: input.try_get_i64()?,
            });
        }
        if let Some(at) = producer.txn_start {
            open.insert(at, id);
        }
        producers.insert(id, producer);
    }
    inner.producers = producers;
    inner.open = open;
    for _ in 0..input.try_get_u32()? {
        inner.ended.push_back((input.try_get_i64()?, input.try_get_i64()?));
    }
    let has_aborted = version == PREVIOUS_VERSION || input.try_get_u8()? != 0;
    for _ in 0..input.try_get_u32()? {
        inner.aborted.push(AbortedTxn {
            producer_id: input.try_get_i64()?,
            first_offset: input.try_get_i64()?,
            last_offset: input.try_get_i64()?,
        });
    }
    Ok(has_aborted)
}

#[cfg(test)]
mod tests {
    use moim_wire_kafka::records::ControlKind;

    use super::super::{BatchInfo, Check, Marker};
    use super::*;

    /// A producer with three batches, of which the last transaction was aborted.
    fn aborted(producers: &mut ProducerStateManager, producer_id: i64, from: i64) {
        let batch = |base_sequence: i32, control| BatchInfo {
            producer_id,
            producer_epoch: 0,
            base_sequence,
            last_sequence: base_sequence,
            max_timestamp: 0,
            transactional: true,
            control,
        };
        for sequence in 0..3 {
            let at = from + i64::from(sequence);
            producers.on_append(0, &batch(sequence, None), at, at);
        }
        let marker = Marker { kind: ControlKind::Abort, coordinator_epoch: 0 };
        producers.on_append(0, &batch(-1, Some(marker)), from + 3, from + 3);
        producers.on_watermark(from + 4);
    }

    #[test]
    fn previous_snapshot_version_is_readable() {
        let mut producers = ProducerStateManager::default();
        for id in 0..3 {
            aborted(&mut producers, id, id * 4);
        }
        // The previous format: another version, and no flag before the aborted transactions.
        let mut bytes = producers.snapshot().unwrap();
        bytes.truncate(bytes.len() - 4);
        bytes[4..6].copy_from_slice(&PREVIOUS_VERSION.to_be_bytes());
        let flag = bytes.len() - 3 * 24 - 4 - 1;
        assert_eq!(bytes.remove(flag), 1);
        bytes.put_u32(crc32c::crc32c(&bytes));
        assert_eq!(ProducerStateManager::load(&bytes), Ok(Loaded { producers, has_aborted: true }));
        for version in [0, VERSION + 1] {
            bytes[4..6].copy_from_slice(&version.to_be_bytes());
            assert_eq!(ProducerStateManager::load(&bytes), Err(SnapshotError::Version(version)));
        }
    }

    #[test]
    fn oversized_snapshot_drops_only_state_that_the_log_has() {
        let mut producers = ProducerStateManager::default();
        for id in 0..10 {
            aborted(&mut producers, id, id * 4);
        }
        let full = producers.snapshot().unwrap();
        assert_eq!(
            ProducerStateManager::load(&full),
            Ok(Loaded { producers: producers.clone(), has_aborted: true })
        );
        let fewer = producers.snapshot_within(full.len() - 1).unwrap();
        let loaded = ProducerStateManager::load(&fewer).unwrap();
        assert!(loaded.has_aborted && fewer.len() < full.len());
        assert_eq!(loaded.producers.aborted(0, 40), producers.aborted(0, 40));
        let repeat = BatchInfo {
            producer_id: 3,
            producer_epoch: 0,
            base_sequence: 0,
            last_sequence: 0,
            max_timestamp: 0,
            transactional: true,
            control: None,
        };
        let duplicate = Check::Reject(moim_wire_kafka::ErrorCode::DuplicateSequenceNumber);
        assert_eq!(loaded.producers.check(0, &repeat), duplicate, "a client takes a duplicate for success");
        let fewest = producers.snapshot_within(fewer.len() - 1).unwrap();
        let loaded = ProducerStateManager::load(&fewest).unwrap();
        assert!(!loaded.has_aborted && loaded.producers.aborted(0, 40).is_empty());
        assert_eq!(producers.snapshot_within(fewest.len() - 1), None);
    }
}
