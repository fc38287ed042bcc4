//! Batches made here: by tests, tools, internal topics and the transaction coordinator.
//!
//! Invariant: what [`BatchBuilder::build`] returns passes [`validate_batch`](super::validate_batch) (unless it claims
//! log append time, which only a broker may). Its inputs come from this process, so misuse is a broken invariant and
//! stops it.

use std::ops::ControlFlow;

use bytes::Bytes;

use super::header::{CONTROL, LOG_APPEND_TIME, TRANSACTIONAL};
use super::{BatchHeader, HEADER_LEN, NO_TIMESTAMP, for_each_record, varint};
use crate::compression::{self, Compression};

/// Collects records into one batch.
#[derive(Clone, Debug)]
pub struct BatchBuilder {
    header: BatchHeader,
    compression: Compression,
    append_time: Option<i64>,
    /// Space for the header, then the records, uncompressed.
    buffer: Vec<u8>,
}

impl BatchBuilder {
    /// An empty batch from a producer that is not idempotent.
    pub fn new(compression: Compression) -> Self {
        Self { header: BatchHeader::default(), compression, append_time: None, buffer: vec![0; HEADER_LEN] }
    }

    /// The idempotent producer of the batch and the sequence of its first record.
    #[must_use]
    pub fn producer(mut self, id: i64, epoch: i16, base_sequence: i32) -> Self {
        self.header.producer_id = id;
        self.header.producer_epoch = epoch;
        self.header.base_sequence = base_sequence;
        self
    }

    /// Whether the batch belongs to a transaction.
    #[must_use]
    pub fn transactional(self, on: bool) -> Self {
        self.flag(TRANSACTIONAL, on)
    }

    /// Whether the batch is a coordinator's marker.
    #[must_use]
    pub fn control(self, on: bool) -> Self {
        self.flag(CONTROL, on)
    }

    /// The offset of the first record.
    #[must_use]
    pub fn base_offset(mut self, offset: i64) -> Self {
        self.header.base_offset = offset;
        self
    }

    /// The epoch of the leader that appends the batch.
    #[must_use]
    pub fn leader_epoch(mut self, epoch: i32) -> Self {
        self.header.partition_leader_epoch = epoch;
        self
    }

    /// Gives every record the time of the append.
    #[must_use]
    pub fn log_append_time(mut self, now_ms: i64) -> Self {
        self.append_time = Some(now_ms);
        self.flag(LOG_APPEND_TIME, true)
    }

    fn flag(mut self, flag: i16, on: bool) -> Self {
        if on {
            self.header.attributes |= flag;
        } else {
            self.header.attributes &= !flag;
        }
        self
    }

    /// Adds a record at the next offset. Headers keep their order, and a name may repeat.
    pub fn push(
        &mut self,
        timestamp: i64,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
        headers: &[(&[u8], Option<&[u8]>)],
    ) {
        let offset_delta = self.header.records_count;
        if offset_delta == 0 {
            self.header.base_timestamp = timestamp;
        }
        self.header.max_timestamp = self.header.max_timestamp.max(timestamp);
        let timestamp_delta = timestamp.wrapping_sub(self.header.base_timestamp);

        let headers_len: usize =
            headers.iter().map(|(name, value)| bytes_len(Some(name)) + bytes_len(*value)).sum();
        let body_len = 1
            + varint::len(timestamp_delta)
            + varint::len(i64::from(offset_delta))
            + bytes_len(key)
            + bytes_len(value)
            + varint::len(headers.len() as i64)
            + headers_len;
        let out = &mut self.buffer;
        out.reserve(body_len + 5);
        varint::write(out, body_len as i64);
        out.push(0);
        varint::write(out, timestamp_delta);
        varint::write(out, i64::from(offset_delta));
        write_bytes(out, key);
        write_bytes(out, value);
        varint::write(out, headers.len() as i64);
        for (name, value) in headers {
            write_bytes(out, Some(name));
            write_bytes(out, *value);
        }
        self.header.last_offset_delta = offset_delta;
        self.header.records_count += 1;
    }

    /// How many records the batch has so far.
    pub fn count(&self) -> usize {
        self.header.records_count as usize
    }

    /// Whether the batch has no record yet.
    pub fn is_empty(&self) -> bool {
        self.header.records_count == 0
    }

    /// How many bytes the batch would have without compression.
    pub fn estimated_len(&self) -> usize {
        self.buffer.len()
    }

    /// The batch, with its length and CRC. Without a record it is the empty batch that compaction leaves: one offset
    /// and nothing there.
    ///
    /// Records that the codec refuses stay uncompressed: compression saves bytes, it is never worth losing a record.
    pub fn build(self) -> Bytes {
        let Self { mut header, compression, append_time, mut buffer } = self;
        if let Some(now_ms) = append_time {
            header.max_timestamp = now_ms;
        }
        if compression != Compression::None && header.records_count > 0 {
            let mut packed = vec![0; HEADER_LEN];
            if compression::compress(compression, &buffer[HEADER_LEN..], &mut packed).is_ok() {
                header.attributes |= compression as i16;
                buffer = packed;
            }
        }
        header.seal(&mut buffer);
        Bytes::from(buffer)
    }
}

fn bytes_len(bytes: Option<&[u8]>) -> usize {
    bytes.map_or(1, |bytes| varint::len(bytes.len() as i64) + bytes.len())
}

fn write_bytes(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    match bytes {
        None => varint::write(out, -1),
        Some(bytes) => {
            varint::write(out, bytes.len() as i64);
            out.extend_from_slice(bytes);
        }
    }
}

/// The outcome of a transaction: the type in a control record's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i16)]
pub enum ControlKind {
    /// The transaction was aborted: its records must not be read.
    Abort = 0,
    /// The transaction was committed: its records may be read.
    Commit = 1,
}

/// The version of the keys and values of control records.
const CONTROL_VERSION: i16 = 0;
/// A control batch holds one small record; a larger batch is not a marker.
const CONTROL_LIMIT: usize = 64 * 1024;

/// The transaction marker (control batch) that ends a producer's transaction in one partition.
pub fn control_batch(
    kind: ControlKind,
    producer_id: i64,
    producer_epoch: i16,
    coordinator_epoch: i32,
    timestamp: i64,
    base_offset: i64,
    leader_epoch: i32,
) -> Bytes {
    let mut key = [0; 4];
    key[..2].copy_from_slice(&CONTROL_VERSION.to_be_bytes());
    key[2..].copy_from_slice(&(kind as i16).to_be_bytes());
    let mut value = [0; 6];
    value[..2].copy_from_slice(&CONTROL_VERSION.to_be_bytes());
    value[2..].copy_from_slice(&coordinator_epoch.to_be_bytes());
    let mut builder = BatchBuilder::new(Compression::None)
        .producer(producer_id, producer_epoch, super::NO_SEQUENCE)
        .transactional(true)
        .control(true)
        .base_offset(base_offset)
        .leader_epoch(leader_epoch);
    builder.push(timestamp.max(NO_TIMESTAMP), Some(&key), Some(&value), &[]);
    builder.build()
}

/// The transaction marker type of a control batch; `None` for other batches and unknown types.
pub fn control_kind(batch: &[u8]) -> Option<ControlKind> {
    if !BatchHeader::parse(batch)?.is_control() {
        return None;
    }
    let mut kind = None;
    let outcome = for_each_record(batch, CONTROL_LIMIT, &mut |record| {
        // A key of a later version may be longer; the type stays where it is.
        kind = match record.key {
            Some([_, _, 0, 0, ..]) => Some(ControlKind::Abort),
            Some([_, _, 0, 1, ..]) => Some(ControlKind::Commit),
            _ => None,
        };
        ControlFlow::Break(())
    });
    outcome.ok().and(kind)
}
