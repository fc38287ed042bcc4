//! Producer state as bytes, kept with a journal so that a restart need not replay all of it.
//!
//! Layout, big-endian: magic `MPRD`, format version, then counted lists, then a CRC32C over all of it.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Buf, BufMut};
use hashbrown::HashMap;

use super::{AbortedTxn, Inner, Producer, Producers, REMEMBERED, Remembered};

const MAGIC: u32 = u32::from_be_bytes(*b"MPRD");
const VERSION: u16 = 1;

/// Why bytes are no snapshot. The caller then replays the journal instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error("not a snapshot of producer state")]
    Magic,
    #[error("a snapshot of format {0}, which this version does not know")]
    Version(u16),
    #[error("the checksum is wrong")]
    Crc,
    #[error("it is cut short")]
    Short,
}

impl Producers {
    /// The state as bytes.
    pub(crate) fn snapshot(&self) -> Vec<u8> {
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
            out.put_u8(p.batches.len() as u8);
            for b in &p.batches {
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
        out.put_u32(inner.aborted.len() as u32);
        for a in &inner.aborted {
            out.put_i64(a.producer_id);
            out.put_i64(a.first_offset);
            out.put_i64(a.last_offset);
        }
        let crc = crc32c::crc32c(&out);
        out.put_u32(crc);
        out
    }

    /// The state these bytes stand for.
    pub(crate) fn load(bytes: &[u8]) -> Result<Self, SnapshotError> {
        if bytes.len() < 10 {
            return Err(SnapshotError::Short);
        }
        let (body, crc) = bytes.split_at(bytes.len() - 4);
        let mut input = body;
        if input.get_u32() != MAGIC {
            return Err(SnapshotError::Magic);
        }
        let version = input.get_u16();
        if version != VERSION {
            return Err(SnapshotError::Version(version));
        }
        if crc32c::crc32c(body).to_be_bytes() != crc {
            return Err(SnapshotError::Crc);
        }
        let mut inner = Inner::default();
        read(&mut input, &mut inner).map_err(|_: bytes::TryGetError| SnapshotError::Short)?;
        let mut loaded = Self { inner: Some(Box::new(inner)) };
        loaded.shrink();
        Ok(loaded)
    }
}

fn read(input: &mut &[u8], inner: &mut Inner) -> Result<(), bytes::TryGetError> {
    let mut producers = HashMap::new();
    let mut open = BTreeMap::new();
    for _ in 0..input.try_get_u32()? {
        let id = input.try_get_i64()?;
        let mut producer = Producer {
            epoch: input.try_get_i16()?,
            coordinator_epoch: input.try_get_i32()?,
            last_ms: input.try_get_i64()?,
            last_offset: input.try_get_i64()?,
            txn_start: Some(input.try_get_i64()?).filter(|at| *at >= 0),
            proven: input.try_get_i32()?,
            from_zero: input.try_get_u8()? != 0,
            batches: VecDeque::with_capacity(REMEMBERED),
        };
        for _ in 0..input.try_get_u8()? {
            producer.batches.push_back(Remembered {
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
    for _ in 0..input.try_get_u32()? {
        inner.aborted.push(AbortedTxn {
            producer_id: input.try_get_i64()?,
            first_offset: input.try_get_i64()?,
            last_offset: input.try_get_i64()?,
        });
    }
    Ok(())
}
