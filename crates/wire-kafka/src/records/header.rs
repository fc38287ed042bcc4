//! The batch header: reading, writing, and finding where batches begin and end.
//!
//! Invariant: a [`BatchHeader`] that was parsed has magic 2 and a length that covers at least the header itself, a
//! record count and a last offset delta that are not negative. Nothing here looks at the records.

use bytes::Bytes;

use super::{NO_PRODUCER_ID, NO_SEQUENCE, NO_TIMESTAMP, RecordsError};
use crate::compression::{Compression, CompressionError};

/// Bytes of a batch before its records.
pub const HEADER_LEN: usize = 61;
/// Bytes at the front of a batch that a broker may rewrite without touching the CRC: base offset, length, leader epoch.
pub const PATCH_LEN: usize = 16;
/// The batch format.
pub const MAGIC: i8 = 2;

/// Base offset and length: what the length field does not count.
const LENGTH_OVERHEAD: usize = 12;
const MAGIC_AT: usize = 16;
const CRC_AT: usize = 17;
/// Where the bytes begin that the CRC covers.
const CRC_FROM: usize = 21;

pub(super) const LOG_APPEND_TIME: i16 = 1 << 3;
pub(super) const TRANSACTIONAL: i16 = 1 << 4;
pub(super) const CONTROL: i16 = 1 << 5;

/// The fields in front of the records of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    /// The offset of the first record. Producers send 0; the partition leader assigns it.
    pub base_offset: i64,
    /// Bytes of the batch after this field.
    pub batch_length: i32,
    /// The epoch of the leader that appended the batch; -1 from a producer.
    pub partition_leader_epoch: i32,
    /// The format: 2.
    pub magic: i8,
    /// CRC32C of everything after this field.
    pub crc: u32,
    /// Compression, timestamp type, transactional and control flags.
    pub attributes: i16,
    /// The last offset minus the base offset. Outlives compaction, which may remove the last record.
    pub last_offset_delta: i32,
    /// The timestamp that the records' deltas add to.
    pub base_timestamp: i64,
    /// The highest timestamp in the batch, or the append time.
    pub max_timestamp: i64,
    /// The idempotent producer, or -1.
    pub producer_id: i64,
    /// Its epoch.
    pub producer_epoch: i16,
    /// The sequence of the first record, or -1.
    pub base_sequence: i32,
    /// How many records follow.
    pub records_count: i32,
}

impl Default for BatchHeader {
    /// The header of an empty, uncompressed batch without a producer id.
    fn default() -> Self {
        Self {
            base_offset: 0,
            batch_length: (HEADER_LEN - LENGTH_OVERHEAD) as i32,
            partition_leader_epoch: -1,
            magic: MAGIC,
            crc: 0,
            attributes: 0,
            last_offset_delta: 0,
            base_timestamp: NO_TIMESTAMP,
            max_timestamp: NO_TIMESTAMP,
            producer_id: NO_PRODUCER_ID,
            producer_epoch: -1,
            base_sequence: NO_SEQUENCE,
            records_count: 0,
        }
    }
}

impl BatchHeader {
    /// The header at the front of `bytes`, or nothing if there is no sane one. The bytes may end before the batch does.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Self::read(bytes).ok()
    }

    /// As [`parse`](Self::parse), and says what is wrong.
    pub fn read(bytes: &[u8]) -> Result<Self, RecordsError> {
        // An old message set has its magic at the same place but may be shorter than our header: look there first, so
        // that its sender learns the real reason.
        match bytes.get(MAGIC_AT) {
            None => return Err(RecordsError::TooShort),
            Some(magic) if *magic as i8 != MAGIC => return Err(RecordsError::Magic(*magic as i8)),
            Some(_) => {}
        }
        let bytes: &[u8; HEADER_LEN] = bytes.first_chunk().ok_or(RecordsError::TooShort)?;
        let header = Self {
            base_offset: i64::from_be_bytes(field(bytes, 0)),
            batch_length: i32::from_be_bytes(field(bytes, 8)),
            partition_leader_epoch: i32::from_be_bytes(field(bytes, 12)),
            magic: MAGIC,
            crc: u32::from_be_bytes(field(bytes, CRC_AT)),
            attributes: i16::from_be_bytes(field(bytes, 21)),
            last_offset_delta: i32::from_be_bytes(field(bytes, 23)),
            base_timestamp: i64::from_be_bytes(field(bytes, 27)),
            max_timestamp: i64::from_be_bytes(field(bytes, 35)),
            producer_id: i64::from_be_bytes(field(bytes, 43)),
            producer_epoch: i16::from_be_bytes(field(bytes, 51)),
            base_sequence: i32::from_be_bytes(field(bytes, 53)),
            records_count: i32::from_be_bytes(field(bytes, 57)),
        };
        if header.batch_length < (HEADER_LEN - LENGTH_OVERHEAD) as i32 {
            return Err(RecordsError::Length);
        }
        if header.records_count < 0 || header.last_offset_delta < 0 {
            return Err(RecordsError::Count);
        }
        Ok(header)
    }

    /// Bytes of the whole batch.
    pub fn total_len(&self) -> usize {
        LENGTH_OVERHEAD + self.batch_length as usize
    }

    /// The offset of the last record.
    pub fn last_offset(&self) -> i64 {
        self.base_offset.saturating_add(i64::from(self.last_offset_delta))
    }

    /// How the records are compressed.
    pub fn compression(&self) -> Result<Compression, CompressionError> {
        Compression::from_attributes(self.attributes)
    }

    /// Whether the batch belongs to a transaction.
    pub fn is_transactional(&self) -> bool {
        self.attributes & TRANSACTIONAL != 0
    }

    /// Whether the batch is a marker of a coordinator. Ordinary clients may not send one.
    pub fn is_control(&self) -> bool {
        self.attributes & CONTROL != 0
    }

    /// Whether the max timestamp is the time of the append, and the time of every record.
    pub fn is_log_append_time(&self) -> bool {
        self.attributes & LOG_APPEND_TIME != 0
    }

    /// Whether an idempotent producer sent the batch.
    pub fn has_producer(&self) -> bool {
        self.producer_id > NO_PRODUCER_ID
    }

    /// The sequence number of the last record. Sequences count from 0 to 2^31 - 1 and wrap. -1 without a producer
    /// sequence.
    pub fn last_sequence(&self) -> i32 {
        if self.base_sequence < 0 {
            return NO_SEQUENCE;
        }
        self.base_sequence.wrapping_add(self.last_offset_delta) & i32::MAX
    }

    /// The first [`PATCH_LEN`] bytes of this batch at another place in a log.
    pub fn patched_prefix(&self, base_offset: i64, leader_epoch: i32) -> [u8; PATCH_LEN] {
        let mut prefix = [0; PATCH_LEN];
        prefix[..8].copy_from_slice(&base_offset.to_be_bytes());
        prefix[8..12].copy_from_slice(&self.batch_length.to_be_bytes());
        prefix[12..].copy_from_slice(&leader_epoch.to_be_bytes());
        prefix
    }

    /// The header as bytes, with the length and CRC it holds.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..PATCH_LEN]
            .copy_from_slice(&self.patched_prefix(self.base_offset, self.partition_leader_epoch));
        bytes[MAGIC_AT] = self.magic as u8;
        bytes[CRC_AT..CRC_FROM].copy_from_slice(&self.crc.to_be_bytes());
        bytes[21..23].copy_from_slice(&self.attributes.to_be_bytes());
        bytes[23..27].copy_from_slice(&self.last_offset_delta.to_be_bytes());
        bytes[27..35].copy_from_slice(&self.base_timestamp.to_be_bytes());
        bytes[35..43].copy_from_slice(&self.max_timestamp.to_be_bytes());
        bytes[43..51].copy_from_slice(&self.producer_id.to_be_bytes());
        bytes[51..53].copy_from_slice(&self.producer_epoch.to_be_bytes());
        bytes[53..57].copy_from_slice(&self.base_sequence.to_be_bytes());
        bytes[57..].copy_from_slice(&self.records_count.to_be_bytes());
        bytes
    }

    /// Writes this header over the front of `batch` with the length and CRC that fit its records, and keeps both here.
    pub(super) fn seal(&mut self, batch: &mut [u8]) {
        let Ok(length) = i32::try_from(batch.len() - LENGTH_OVERHEAD) else {
            panic!("a batch stays below 2 GiB")
        };
        self.batch_length = length;
        batch[..HEADER_LEN].copy_from_slice(&self.to_bytes());
        self.crc = crc32c::crc32c(&batch[CRC_FROM..]);
        batch[CRC_AT..CRC_FROM].copy_from_slice(&self.crc.to_be_bytes());
    }
}

/// Eight or fewer bytes of the header. Every call is within its bounds by construction.
fn field<const N: usize>(header: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}

/// Whether the checksum of a whole batch is right.
pub fn check_crc(batch: &[u8]) -> bool {
    let Some(header) = BatchHeader::parse(batch) else { return false };
    match batch.get(CRC_FROM..header.total_len()) {
        Some(covered) => crc32c::crc32c(covered) == header.crc,
        None => false,
    }
}

/// The batches of a range of a log, one after the other, without a copy. Checks where they begin and end, not their CRC.
///
/// Ends after the first error. [`RecordsError::TooShort`] means the range ends inside a batch, which the end of a fetch
/// response may do.
pub fn split_batches(records: &Bytes) -> Batches {
    Batches { rest: records.clone() }
}

/// The iterator of [`split_batches`].
#[derive(Clone, Debug)]
pub struct Batches {
    rest: Bytes,
}

impl Batches {
    /// What is left after the batches taken so far.
    pub fn rest(&self) -> &Bytes {
        &self.rest
    }
}

impl Iterator for Batches {
    type Item = Result<Bytes, RecordsError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let batch = match BatchHeader::read(&self.rest) {
            Ok(header) if header.total_len() <= self.rest.len() => Ok(self.rest.split_to(header.total_len())),
            Ok(_) => Err(RecordsError::TooShort),
            Err(error) => Err(error),
        };
        if batch.is_err() {
            self.rest.clear();
        }
        Some(batch)
    }
}
