//! Version 1 of the commit log and of the checkpoint: read only, for the upgrade (`store/upgrade.rs`).
//!
//! Differences from the current version: a record has no group position, a file use has no `Begin` record, and a
//! segment image does not tell whether compaction wrote it. No later group proves that a record was synced, so the log
//! ends at the first missing record: a torn write cannot be told from damage. The release that wrote these files had
//! the same rule.

use std::io;

use bytes::Bytes;

use super::log::LogFile;
use super::scan::{LogEntry, LogReader};
use super::{BLOCK, Kind, RECORD_HEADER};
use crate::checkpoint::LogPoint;
use crate::codec::Input;
use crate::segment::SegmentImage;
use crate::store::recover::Swap;

/// The format version of commit-log files and checkpoints.
pub(crate) const VERSION: u32 = 1;
const RECORD_MAGIC: u32 = 0x5243_4d4d; // "MMCR"

/// Reads records of one file.
pub(super) fn reader(file: &LogFile) -> LogReader<'_> {
    LogReader::with_magic(file, RECORD_MAGIC)
}

/// Calls `each` for every record past `floor`, in order, with its payload in the current encoding. Stops at the end of
/// the log.
pub(crate) fn scan(
    files: &[LogFile],
    floor: LogPoint,
    each: &mut dyn FnMut(LogEntry, Bytes) -> io::Result<()>,
) -> io::Result<()> {
    let mut next_lsn = floor.next_lsn;
    for file in files.iter().filter(|file| file.generation >= floor.generation) {
        let mut position =
            if file.generation == floor.generation { floor.position.max(BLOCK) } else { BLOCK };
        let mut reader = reader(file);
        while let Some((raw, start)) = reader.record(position, next_lsn)? {
            let payload = reader.payload(&raw, start);
            let payload = match raw.record.kind {
                Kind::Swap => swap(payload)?,
                _ => Bytes::copy_from_slice(payload),
            };
            each(LogEntry { lsn: next_lsn, record: raw.record }, payload)?;
            next_lsn += 1;
            position = start + (RECORD_HEADER + raw.payload_len) as u64;
        }
    }
    Ok(())
}

fn swap(payload: &[u8]) -> io::Result<Bytes> {
    let swap = Swap::decode_with(payload, segment_image);
    let undecodable = || io::Error::new(io::ErrorKind::InvalidData, "undecodable Swap record");
    Ok(swap.ok_or_else(undecodable)?.encode().into())
}

/// Decodes a segment image. Whether compaction wrote the segment is unknown, so gaps between its frames are no damage.
pub(crate) fn segment_image(input: &mut Input<'_>) -> Option<SegmentImage> {
    Some(SegmentImage {
        base: input.i64()?,
        end: input.i64()?,
        len: input.u64()?,
        max_timestamp_ms: input.i64()?,
        max_timestamp_base: input.i64()?,
        compacted: true,
    })
}

#[cfg(test)]
pub(crate) mod writer;
