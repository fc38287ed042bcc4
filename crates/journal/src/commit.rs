//! The commit log: record format, and the staging queue.
//!
//! A record is a 96-byte header and a payload; the CRC covers both. The header carries the generation of the file it
//! was written into, so that stale bytes in a recycled file never count, its LSN, so that a gap is detected, and the
//! position of its group: everything before that position was synced when the group was written. A bad record before
//! the position of a later group is damage, never the end of the log (`scan.rs`). The records of one journal enter the
//! log in the order of that journal's appends.

pub(crate) mod log;
pub(crate) mod previous_format;
pub(crate) mod scan;
pub(crate) mod stage;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;

use crate::codec::{Input, Output};
use crate::framing::Frame;
use crate::journal::Journal;
use crate::types::JournalId;

/// Bytes of a record header.
pub(crate) const RECORD_HEADER: usize = 96;
/// Groups start at multiples of this, so that an fsync never touches a page that holds an older group.
pub(crate) const BLOCK: u64 = 4096;

/// The last byte is the format version of a record.
pub(crate) const RECORD_MAGIC: u32 = 0x3243_4d4d; // "MMC2"
/// Largest commit-log file: the block of a group's start has 24 bits.
pub(crate) const MAX_FILE: u64 = BLOCK << 24;

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Payload is a frame.
    Frame = 1,
    /// The frame is in its segment, synced before this record was written.
    Pointer = 2,
    /// First record of a journal; the payload is its folder.
    Create = 3,
    /// Leader epoch `epoch` starts at `base`.
    Epoch = 4,
    /// The log start offset is `base`.
    Start = 5,
    /// Everything at or past `base` is truncated; the file position is `segment`, `position`.
    Truncate = 6,
    /// The last Truncate is done and durable.
    TruncateDone = 7,
    /// The journal is deleted.
    Delete = 8,
    /// Payload names the segments that a compacted file replaces.
    Swap = 9,
    /// Everything is dropped; an empty log starts at `base`, where `epoch` is in force (-1: unknown). Ends like a
    /// Truncate.
    Reset = 10,
    /// First record of a file use: the log before it ends in generation `base` at position `last`. Has the LSN of the
    /// record that follows.
    Begin = 11,
    /// No content; its group proves that the one before it was synced. Has the LSN of the record that follows.
    Seal = 12,
}

impl Kind {
    fn from_u8(value: u8) -> Option<Self> {
        use Kind::{
            Begin, Create, Delete, Epoch, Frame, Pointer, Reset, Seal, Start, Swap, Truncate, TruncateDone,
        };
        [Frame, Pointer, Create, Epoch, Start, Truncate, TruncateDone, Delete, Swap, Reset, Begin, Seal]
            .into_iter()
            .find(|kind| *kind as u8 == value)
    }

    /// True if a record of this kind has an LSN of its own.
    pub(crate) fn has_lsn(self) -> bool {
        !matches!(self, Kind::Begin | Kind::Seal)
    }
}

/// The logical part of a record, independent of where it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kind: Kind,
    pub(crate) id: JournalId,
    pub(crate) base: i64,
    pub(crate) last: i64,
    pub(crate) epoch: i32,
    pub(crate) max_timestamp_ms: i64,
    /// Base offset of the segment the frame belongs to.
    pub(crate) segment: i64,
    /// Position of the frame in that segment.
    pub(crate) position: u64,
    /// Length of the frame: of the payload, or of the frame that a pointer refers to.
    pub(crate) len: u32,
}

impl Record {
    /// The frame of the record.
    pub(crate) fn frame(&self) -> Frame {
        Frame {
            len: self.len as usize,
            base: self.base,
            last: self.last,
            epoch: self.epoch,
            max_timestamp_ms: self.max_timestamp_ms,
        }
    }

    /// A record about the log itself.
    pub(crate) fn of_log(kind: Kind, base: i64) -> Self {
        Self::control(kind, JournalId { incarnation: 0, part: 0 }, base)
    }

    /// A record about a journal without a frame.
    pub(crate) fn control(kind: Kind, id: JournalId, base: i64) -> Self {
        Self { kind, id, base, last: base, epoch: 0, max_timestamp_ms: 0, segment: 0, position: 0, len: 0 }
    }
}

/// A staged record.
pub(crate) struct Staged {
    pub(crate) record: Record,
    pub(crate) payload: Bytes,
    /// CRC of the payload, computed by the appender so that the disk thread need not touch the bytes.
    pub(crate) payload_crc: u32,
    /// The journal whose durable end this record advances.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Set once the record is durable.
    pub(crate) done: Option<Arc<AtomicBool>>,
}

impl Staged {
    /// Bytes of the record in the log.
    pub(crate) fn bytes(&self) -> usize {
        RECORD_HEADER + self.payload.len()
    }
}

/// Where a record is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) generation: u64,
    pub(crate) lsn: u64,
    /// Position of its group: everything before it in this generation was synced before the group was written.
    pub(crate) group: u64,
}

/// Appends the header of a record; the checksum covers the payload first, then the rest of the header.
pub(crate) fn encode_record(
    out: &mut Vec<u8>,
    record: &Record,
    stamp: Stamp,
    payload_len: usize,
    payload_crc: u32,
) {
    debug_assert!(stamp.group.is_multiple_of(BLOCK) && stamp.group < MAX_FILE);
    let start = out.len();
    out.put_u32(RECORD_MAGIC);
    out.put_u32(0);
    out.put_u8(record.kind as u8);
    out.put(&(stamp.group / BLOCK).to_le_bytes()[..3]);
    out.put_count(payload_len);
    out.put_u64(stamp.generation);
    out.put_u64(stamp.lsn);
    out.put_id(record.id);
    out.put_i32(record.epoch);
    out.put_i64(record.base);
    out.put_i64(record.last);
    out.put_i64(record.max_timestamp_ms);
    out.put_i64(record.segment);
    out.put_u32(u32::try_from(record.position).expect("a segment is under 4 GiB"));
    out.put_u32(record.len);
    debug_assert_eq!(out.len() - start, RECORD_HEADER);
    let crc = crc32c::crc32c_append(payload_crc, &out[start + 8..]);
    out[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
}

/// A decoded record header, not yet checked against its payload.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RawRecord {
    pub(crate) record: Record,
    pub(crate) stamp: Stamp,
    pub(crate) payload_len: usize,
    crc: u32,
}

impl RawRecord {
    /// Decodes a header; `None` if the bytes are no header, or one of another format version.
    pub(crate) fn decode(header: &[u8], magic: u32) -> Option<Self> {
        let mut input = Input::new(header.get(..RECORD_HEADER)?);
        if input.u32()? != magic {
            return None;
        }
        let crc = input.u32()?;
        let kind = Kind::from_u8(input.u8()?)?;
        let block: [u8; 3] = input.bytes(3)?.try_into().ok()?;
        let group = u64::from(u32::from_le_bytes([block[0], block[1], block[2], 0])) * BLOCK;
        let payload_len = usize::try_from(input.u32()?).ok()?;
        let stamp = Stamp { generation: input.u64()?, lsn: input.u64()?, group };
        let (id, epoch) = (input.id()?, input.i32()?);
        let (base, last, max_timestamp_ms) = (input.i64()?, input.i64()?, input.i64()?);
        let (segment, position, len) = (input.i64()?, u64::from(input.u32()?), input.u32()?);
        let record = Record { kind, id, base, last, epoch, max_timestamp_ms, segment, position, len };
        Some(Self { record, stamp, payload_len, crc })
    }

    /// True if the checksum of header and payload matches.
    pub(crate) fn matches(&self, header: &[u8], payload: &[u8]) -> bool {
        self.crc == crc32c::crc32c_append(crc32c::crc32c(payload), &header[8..RECORD_HEADER])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { generation: 9, lsn: 10, group: 0x02_0103 * BLOCK };

    fn sample() -> (Vec<u8>, Record) {
        let record = Record {
            kind: Kind::Frame,
            id: JournalId { incarnation: 1, part: 2 },
            base: 3,
            last: 4,
            epoch: 5,
            max_timestamp_ms: 6,
            segment: 7,
            position: 8,
            len: 4,
        };
        let mut out = Vec::new();
        encode_record(&mut out, &record, STAMP, 4, crc32c::crc32c(b"moim"));
        (out, record)
    }

    #[test]
    fn record_round_trips_and_any_flipped_bit_is_detected() {
        let (bytes, record) = sample();
        let raw = RawRecord::decode(&bytes, RECORD_MAGIC).unwrap();
        assert_eq!((raw.record, raw.stamp, raw.payload_len), (record, STAMP, 4));
        assert!(raw.matches(&bytes, b"moim"));
        assert!(!raw.matches(&bytes, b"moin"));
        for bit in 0..bytes.len() * 8 {
            let mut broken = bytes.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            let raw = RawRecord::decode(&broken, RECORD_MAGIC);
            let seen = raw.is_some_and(|raw| raw.matches(&broken, b"moim"));
            assert!(!seen, "bit {bit}");
        }
    }

    #[test]
    fn golden_record_header() {
        let hex: String = sample().0.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "4d4d4332e0aed8d1010301020400000009000000000000000a000000000000000100000000000000",
                "00000000000000000200000005000000030000000000000004000000000000000600000000000000",
                "07000000000000000800000004000000",
            )
        );
    }
}
