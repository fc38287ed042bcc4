//! Validation of a produced batch before the append.
//!
//! Owns the rules for batches from producers. Invariant: an uncompressed batch costs one CRC pass and one walk and
//! allocates nothing; a compressed one decompresses into at most the limit. This module must never judge what depends on
//! broker state: sequences against the last ones, sizes against topic limits, who may send control batches.

use std::ops::ControlFlow;

use bytes::Bytes;

use super::walk::{walk, with_payload};
use super::{BatchHeader, NO_TIMESTAMP, RecordsError, check_crc};

/// The limits of validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidateLimits {
    /// The maximum decompressed size of the records of a compressed batch.
    pub max_decompressed_bytes: usize,
    /// True if every record needs a key, as in a compacted topic.
    pub require_keys: bool,
}

/// Checks a batch from a producer: length, format, CRC, flags, count, contiguous offsets, every record to its last byte.
///
/// The header that comes back holds the highest timestamp of the records. Some clients send a max timestamp that is not
/// (Sarama sends none at all), which is no reason to refuse them: where it differs from the bytes,
/// [`repair_max_timestamp`](super::repair_max_timestamp) makes the batch agree. Control batches pass; whether their
/// sender may send them is for the caller to say.
pub fn validate_batch(batch: &Bytes, limits: &ValidateLimits) -> Result<BatchHeader, RecordsError> {
    validate_batch_sized(batch, limits).map(|(header, _)| header)
}

/// Like [`validate_batch`], and returns the decompressed size of the records.
pub fn validate_batch_sized(
    batch: &Bytes,
    limits: &ValidateLimits,
) -> Result<(BatchHeader, usize), RecordsError> {
    let mut header = BatchHeader::read(batch)?;
    if header.total_len() != batch.len() {
        return Err(if header.total_len() > batch.len() {
            RecordsError::TooShort
        } else {
            RecordsError::Length
        });
    }
    if !check_crc(batch) {
        return Err(RecordsError::Crc);
    }
    check_flags(&header)?;
    // Both are non-negative; comparing this way round cannot overflow.
    if header.records_count.checked_sub(1) != Some(header.last_offset_delta) {
        return Err(RecordsError::Count);
    }
    let (max_timestamp, size) = with_payload(&header, batch, limits.max_decompressed_bytes, |payload| {
        Ok((check_records(payload, &header, limits.require_keys)?, payload.len()))
    })?;
    header.max_timestamp = max_timestamp;
    Ok((header, size))
}

fn check_flags(header: &BatchHeader) -> Result<(), RecordsError> {
    header.compression()?;
    if header.is_log_append_time() {
        return Err(RecordsError::TimestampType);
    }
    if header.has_producer() {
        if header.producer_epoch < 0 {
            return Err(RecordsError::Invalid("a producer id without an epoch"));
        }
        // A transaction marker carries its producer id, but has no sequence number.
        if header.base_sequence < 0 && !header.is_control() {
            return Err(RecordsError::Invalid("a producer id without a sequence"));
        }
    } else if header.is_transactional() || header.is_control() {
        return Err(RecordsError::Invalid("a transactional batch without a producer id"));
    }
    Ok(())
}

/// Walks the records once and returns their highest timestamp.
fn check_records(payload: &[u8], header: &BatchHeader, require_keys: bool) -> Result<i64, RecordsError> {
    let mut next_delta = 0;
    let mut max_delta = i64::MIN;
    let mut min_delta = i64::MAX;
    walk(payload, header.records_count, |record, _| {
        if record.offset_delta != next_delta {
            return Err(RecordsError::Invalid("the offsets of a batch must count from zero without a gap"));
        }
        if require_keys && record.key.is_none() {
            return Err(RecordsError::Keyless);
        }
        next_delta += 1;
        max_delta = max_delta.max(record.timestamp_delta);
        min_delta = min_delta.min(record.timestamp_delta);
        Ok(ControlFlow::Continue(()))
    })?;
    let in_range = header.base_timestamp.checked_add(min_delta).is_some();
    match header.base_timestamp.checked_add(max_delta) {
        Some(max) if in_range => Ok(max.max(NO_TIMESTAMP)),
        _ => Err(RecordsError::Invalid("a timestamp out of range")),
    }
}
