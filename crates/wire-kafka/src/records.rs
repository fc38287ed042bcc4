//! The record batch, format 2: what producers send, journals keep and consumers read.
//!
//! Owns the 61-byte batch header, the records behind it, and every rewrite of a batch. Invariants: bytes that came from
//! outside are checked, never trusted, and nothing is reserved on the word of a length field; the CRC of a batch made or
//! rewritten here is right. The CRC32C covers the bytes from the attributes on, so base offset and leader epoch can be
//! patched without touching it. This module must never assign offsets: the partition that appends does.
//!
//! A batch on the wire:
//!
//! | at | size | field |
//! |---|---|---|
//! | 0 | 8 | base offset |
//! | 8 | 4 | length of what follows this field |
//! | 12 | 4 | partition leader epoch |
//! | 16 | 1 | magic, 2 |
//! | 17 | 4 | CRC32C of everything from 21 on |
//! | 21 | 2 | attributes |
//! | 23 | 4 | last offset delta |
//! | 27 | 8 | base timestamp |
//! | 35 | 8 | max timestamp |
//! | 43 | 8 | producer id |
//! | 51 | 2 | producer epoch |
//! | 53 | 4 | base sequence |
//! | 57 | 4 | record count |
//! | 61 | … | records, compressed as one block |

mod build;
mod decode;
mod header;
mod rewrite;
mod validate;
mod varint;
mod walk;

pub use build::{BatchBuilder, ControlKind, control_batch, control_kind};
pub use decode::{Record, decode_batch};
pub use header::{BatchHeader, Batches, HEADER_LEN, MAGIC, PATCH_LEN, check_crc, split_batches};
pub use rewrite::{Keep, empty_batch, recompress, repair_max_timestamp, retain_records, set_log_append_time};
pub use validate::{ValidateLimits, validate_batch, validate_batch_sized};
pub use walk::{Headers, RecordView, for_each_record};

use crate::compression::CompressionError;

/// Marks a record or a batch without a timestamp.
pub const NO_TIMESTAMP: i64 = -1;
/// Marks a batch whose producer is not idempotent.
pub const NO_PRODUCER_ID: i64 = -1;
/// Marks a batch without a sequence: not idempotent, or written by a coordinator.
pub const NO_SEQUENCE: i32 = -1;

/// What is wrong with a batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordsError {
    /// The bytes end before the batch does. At the end of a fetched range this is no fault.
    #[error("the bytes end before the batch does")]
    TooShort,
    /// A message set of an older format (0 or 1), or no batch at all.
    #[error("record format {0} is not supported")]
    Magic(i8),
    /// The length field contradicts the bytes.
    #[error("the batch length is wrong")]
    Length,
    /// The checksum does not match.
    #[error("the batch checksum is wrong")]
    Crc,
    /// The header's record count contradicts its offsets or the records.
    #[error("the record count is wrong")]
    Count,
    /// A compacted topic got a record without a key.
    #[error("a record of a compacted topic needs a key")]
    Keyless,
    /// A producer sent a batch that claims the broker's own time.
    #[error("a producer may not send log append time")]
    TimestampType,
    /// The codec is unknown or refused the records.
    #[error(transparent)]
    Compression(CompressionError),
    /// The records decompress to more than the limit.
    #[error("the decompressed records exceed the limit")]
    TooLarge,
    /// Anything else; the text says which rule.
    #[error("invalid record batch: {0}")]
    Invalid(&'static str),
}

impl From<CompressionError> for RecordsError {
    fn from(error: CompressionError) -> Self {
        match error {
            CompressionError::TooLarge => Self::TooLarge,
            other => Self::Compression(other),
        }
    }
}

#[cfg(test)]
mod tests;
