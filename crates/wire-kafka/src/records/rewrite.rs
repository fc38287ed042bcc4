//! Batch rewrites: log append time, recompression, compaction.
//!
//! Invariant: offsets, producer and sequence of a batch never change here, and the output CRC is valid. The caller
//! must have checked the input CRC: a rewrite would give damaged bytes a valid checksum.

use std::ops::ControlFlow;

use bytes::{Bytes, BytesMut};

use super::header::LOG_APPEND_TIME;
use super::walk::{payload_of, walk, with_payload};
use super::{BatchHeader, HEADER_LEN, NO_TIMESTAMP, RecordsError};
use crate::compression::{self, Compression};

/// Gives a batch, and with it each of its records, the time of its append. The records stay as they are: readers take
/// the time from the header.
///
/// # Panics
/// When `batch` is not exactly one batch: it was validated before it came here.
pub fn set_log_append_time(batch: &mut BytesMut, now_ms: i64) {
    let Some(mut header) = BatchHeader::parse(batch).filter(|header| header.total_len() == batch.len())
    else {
        panic!("append time goes on a batch that was validated");
    };
    header.attributes |= LOG_APPEND_TIME;
    header.max_timestamp = now_ms;
    header.seal(batch);
}

/// The batch with the max timestamp that validation found in its records; the same bytes when they said so already.
/// `header` is what [`validate_batch`](super::validate_batch) returned, and gets the new CRC.
pub fn repair_max_timestamp(batch: &Bytes, header: &mut BatchHeader) -> Bytes {
    match BatchHeader::parse(batch) {
        Some(stored) if stored.max_timestamp != header.max_timestamp => {
            let mut repaired = batch.to_vec();
            header.seal(&mut repaired);
            Bytes::from(repaired)
        }
        _ => batch.clone(),
    }
}

/// The same records with another codec, for a topic whose `compression.type` is not `producer`. The same bytes when the
/// batch has that codec already, or nothing to compress.
pub fn recompress(batch: &Bytes, to: Compression, limit: usize) -> Result<Bytes, RecordsError> {
    let header = BatchHeader::read(batch)?;
    if header.compression()? == to || header.records_count == 0 {
        return Ok(batch.clone());
    }
    with_payload(&header, batch, limit, |payload| seal_payload(header, to, payload))
}

/// The compaction predicate: called with a record's offset, its key, and whether it is a tombstone.
pub type Keep<'a> = dyn FnMut(i64, Option<&[u8]>, bool) -> bool + 'a;

/// Retains the records for which `keep(offset, key, is_tombstone)` is true, for compaction.
///
/// Retained records keep their offset and timestamp, the batch its base and last offset and its codec. Returns the
/// same bytes if all records stay; nothing if none does, where [`empty_batch`] may replace it.
pub fn retain_records(
    batch: &Bytes,
    limit: usize,
    keep: &mut Keep<'_>,
) -> Result<Option<Bytes>, RecordsError> {
    let header = BatchHeader::read(batch)?;
    with_payload(&header, batch, limit, |payload| {
        // Most batches of a compacted log lose nothing: copy only once a record is removed.
        let mut kept: Option<Vec<u8>> = None;
        let mut walked = 0;
        let mut count = 0;
        let mut max_timestamp = NO_TIMESTAMP;
        walk(payload, header.records_count, |record, raw| {
            let offset = header.base_offset.saturating_add(i64::from(record.offset_delta));
            if keep(offset, record.key, record.value.is_none()) {
                count += 1;
                max_timestamp =
                    max_timestamp.max(header.base_timestamp.saturating_add(record.timestamp_delta));
                if let Some(kept) = &mut kept {
                    kept.extend_from_slice(raw);
                }
            } else if kept.is_none() {
                kept = Some(payload[..walked].to_vec());
            }
            walked += raw.len();
            Ok(ControlFlow::Continue(()))
        })?;
        let Some(kept) = kept else { return Ok(Some(batch.clone())) };
        if count == 0 {
            return Ok(None);
        }
        let mut smaller = BatchHeader { records_count: count, ..header };
        if !header.is_log_append_time() {
            smaller.max_timestamp = max_timestamp;
        }
        seal_payload(smaller, header.compression()?, &kept).map(Some)
    })
}

/// The batch without its records. Compaction keeps it for a producer's last batch, so that its sequence number is
/// still known.
pub fn empty_batch(batch: &[u8]) -> Result<Bytes, RecordsError> {
    let mut header = BatchHeader::read(batch)?;
    payload_of(&header, batch)?;
    header.records_count = 0;
    header.attributes &= !Compression::ATTRIBUTE_MASK;
    let mut empty = vec![0; HEADER_LEN];
    header.seal(&mut empty);
    Ok(Bytes::from(empty))
}

fn seal_payload(mut header: BatchHeader, codec: Compression, payload: &[u8]) -> Result<Bytes, RecordsError> {
    let mut batch = Vec::with_capacity(HEADER_LEN + payload.len());
    batch.resize(HEADER_LEN, 0);
    compression::compress(codec, payload, &mut batch)?;
    if batch.len() > i32::MAX as usize {
        return Err(RecordsError::TooLarge);
    }
    header.attributes = header.attributes & !Compression::ATTRIBUTE_MASK | codec as i16;
    header.seal(&mut batch);
    batch.shrink_to_fit();
    Ok(Bytes::from(batch))
}
