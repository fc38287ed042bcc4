//! Records as owned values, for readers that keep them: group state, tests, tools.
//!
//! Invariant: the records of an uncompressed batch share its bytes; those of a compressed one share one decompressed
//! buffer. Nothing is reserved on the word of the record count alone.

use std::ops::ControlFlow;

use bytes::Bytes;

use super::walk::{MIN_RECORD_LEN, payload_of, walk};
use super::{BatchHeader, RecordsError};
use crate::compression::{self, Compression};

/// One record with its place in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The key; absent is not empty.
    pub key: Option<Bytes>,
    /// The value; absent marks a deletion in a compacted topic.
    pub value: Option<Bytes>,
    /// Names and values in the order they were sent; a name may repeat.
    pub headers: Vec<(Bytes, Option<Bytes>)>,
    /// Milliseconds since 1970: of the record, or of the append if the batch says so.
    pub timestamp: i64,
    /// The offset in its partition.
    pub offset: i64,
}

/// The header and the records of a batch, decompressed to at most `limit` bytes. Checks no CRC.
pub fn decode_batch(batch: &Bytes, limit: usize) -> Result<(BatchHeader, Vec<Record>), RecordsError> {
    let header = BatchHeader::read(batch)?;
    let payload = batch.slice_ref(payload_of(&header, batch)?);
    let payload = match header.compression()? {
        Compression::None => payload,
        codec => {
            let mut plain = Vec::new();
            compression::decompress_into(codec, &payload, &mut plain, limit)?;
            Bytes::from(plain)
        }
    };
    let count = usize::try_from(header.records_count).unwrap_or(0);
    let mut records = Vec::with_capacity(count.min(payload.len() / MIN_RECORD_LEN));
    let share = |slice: &[u8]| payload.slice_ref(slice);
    walk(&payload, header.records_count, |record, _| {
        records.push(Record {
            key: record.key.map(share),
            value: record.value.map(share),
            headers: record.headers.map(|(name, value)| (share(name), value.map(share))).collect(),
            timestamp: if header.is_log_append_time() {
                header.max_timestamp
            } else {
                header.base_timestamp.saturating_add(record.timestamp_delta)
            },
            offset: header.base_offset.saturating_add(i64::from(record.offset_delta)),
        });
        Ok(ControlFlow::Continue(()))
    })?;
    Ok((header, records))
}
