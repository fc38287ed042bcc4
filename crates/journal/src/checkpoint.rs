//! The checkpoint: where recovery starts.
//!
//! One file, replaced atomically. It says up to which LSN everything is in synced segments, where in the commit log the
//! rest begins (the floor), and for each journal what must outlive recycling: folder, log start offset, epochs,
//! segments up to the synced point, snapshot. Invariant: when it is renamed into place, every byte that it lists as
//! synced is synced.

use std::collections::HashMap;

use bytes::Bytes;

use crate::codec::{Input, Output};
use crate::commit::previous_format;
use crate::segment::SegmentImage;
use crate::types::{Durability, JournalId, OpenError};

const MAGIC: &[u8; 8] = b"MOIMCKP\n";
/// Format version of the checkpoint file.
pub(crate) const VERSION: u32 = 2;

/// A position in the commit log: the first record not covered by a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogPoint {
    pub(crate) generation: u64,
    pub(crate) position: u64,
    /// LSN of the first record at or past it.
    pub(crate) next_lsn: u64,
}

/// Image of a journal in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JournalImage {
    pub(crate) id: JournalId,
    pub(crate) folder: String,
    pub(crate) durability: Durability,
    pub(crate) start: i64,
    pub(crate) epochs: Vec<(i32, i64)>,
    /// Oldest first; the last one ends at the synced point.
    pub(crate) segments: Vec<SegmentImage>,
    pub(crate) snapshot: Option<(i64, Bytes)>,
}

impl JournalImage {
    pub(crate) fn new(id: JournalId, folder: String, durability: Durability) -> Self {
        Self { id, folder, durability, start: 0, epochs: Vec::new(), segments: Vec::new(), snapshot: None }
    }

    /// Offset up to which everything is in synced segments. Not the log start: a frame that the log start points into
    /// must still be at its position.
    pub(crate) fn synced_end(&self) -> i64 {
        self.segments.last().map_or(i64::MIN, |segment| segment.end)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.put_id(self.id);
        out.put_blob(self.folder.as_bytes());
        out.put_u8(match self.durability {
            Durability::Fsync => 0,
            Durability::Replicated => 1,
        });
        out.put_i64(self.start);
        out.put_count(self.epochs.len());
        for (epoch, start) in &self.epochs {
            out.put_i32(*epoch);
            out.put_i64(*start);
        }
        out.put_count(self.segments.len());
        self.segments.iter().for_each(|segment| segment.encode(out));
        match &self.snapshot {
            None => out.put_u8(0),
            Some((offset, bytes)) => {
                out.put_u8(1);
                out.put_i64(*offset);
                out.put_blob(bytes);
            }
        }
    }

    fn decode(input: &mut Input<'_>, segment: DecodeSegment) -> Option<Self> {
        let (id, folder) = (input.id()?, input.text()?);
        let durability = match input.u8()? {
            0 => Durability::Fsync,
            1 => Durability::Replicated,
            _ => return None,
        };
        let mut image = Self::new(id, folder, durability);
        image.start = input.i64()?;
        for _ in 0..input.u32()? {
            image.epochs.push((input.i32()?, input.i64()?));
        }
        for _ in 0..input.u32()? {
            image.segments.push(segment(input)?);
        }
        image.snapshot = match input.u8()? {
            0 => None,
            1 => Some((input.i64()?, Bytes::copy_from_slice(input.blob()?))),
            _ => return None,
        };
        Some(image)
    }
}

/// Decoder of segment images: they differ between format versions.
type DecodeSegment = fn(&mut Input<'_>) -> Option<SegmentImage>;

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// The format version of the file; `None` without a file.
    pub(crate) version: Option<u32>,
    pub(crate) floor: LogPoint,
    pub(crate) journals: HashMap<JournalId, JournalImage>,
}

/// Collects the bytes of a checkpoint journal by journal, so that no second copy of all images is needed.
pub(crate) struct CheckpointWriter {
    out: Vec<u8>,
    count: u32,
}

const COUNT_AT: usize = 8 + 4 + 4 + 24;

impl CheckpointWriter {
    pub(crate) fn new(floor: LogPoint) -> Self {
        let mut out = Vec::new();
        out.put(MAGIC);
        out.put_u32(VERSION);
        out.put_u32(0);
        out.put_u64(floor.generation);
        out.put_u64(floor.position);
        out.put_u64(floor.next_lsn);
        out.put_u32(0);
        Self { out, count: 0 }
    }

    pub(crate) fn push(&mut self, image: &JournalImage) {
        image.encode(&mut self.out);
        self.count += 1;
    }

    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.out[COUNT_AT..COUNT_AT + 4].copy_from_slice(&self.count.to_le_bytes());
        let crc = crc32c::crc32c(&self.out);
        self.out.put_u32(crc);
        self.out
    }
}

/// Decodes the file.
pub(crate) fn decode(bytes: &[u8], path: &str) -> Result<Checkpoint, OpenError> {
    let damaged = |what: &str| OpenError::Damaged { path: path.to_owned(), what: what.to_owned() };
    let mut input = Input::new(bytes);
    if input.bytes(8) != Some(MAGIC) {
        return Err(damaged("not a checkpoint"));
    }
    let version = input.u32().ok_or_else(|| damaged("too short"))?;
    let (body, crc) = bytes.split_at(bytes.len() - 4);
    // The checksum first: a flipped bit in the version is no other version.
    if Input::new(crc).u32() != Some(crc32c::crc32c(body)) {
        return Err(damaged("checksum mismatch"));
    }
    let segment = match version {
        VERSION => SegmentImage::decode,
        previous_format::VERSION => previous_format::segment_image,
        _ => return Err(OpenError::unknown_version(path, version, VERSION)),
    };
    parse(body, version, segment).ok_or_else(|| damaged("structure"))
}

/// Minimum bytes of the image of a journal, or fewer.
const MIN_IMAGE_BYTES: usize = 16;

fn parse(body: &[u8], version: u32, segment: DecodeSegment) -> Option<Checkpoint> {
    let mut input = Input::new(body.get(16..)?);
    let floor = LogPoint { generation: input.u64()?, position: input.u64()?, next_lsn: input.u64()? };
    let count = input.u32()?;
    // The exact capacity, so that nothing is moved while it grows, and never more than can be in the file.
    let mut journals = HashMap::with_capacity((count as usize).min(body.len() / MIN_IMAGE_BYTES));
    for _ in 0..count {
        let image = JournalImage::decode(&mut input, segment)?;
        journals.insert(image.id, image);
    }
    Some(Checkpoint { version: Some(version), floor, journals })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (Vec<u8>, Checkpoint) {
        let id = JournalId { incarnation: 1, part: 2 };
        let mut image = JournalImage::new(id, "queue/a/Partition-2".into(), Durability::Replicated);
        image.start = 3;
        image.epochs = vec![(1, 0), (4, 9)];
        let segment = SegmentImage {
            base: 0,
            end: 9,
            len: 100,
            max_timestamp_ms: 5,
            max_timestamp_base: 4,
            compacted: true,
        };
        image.segments = vec![segment];
        image.snapshot = Some((7, Bytes::from_static(b"snap")));
        let floor = LogPoint { generation: 8, position: 4096, next_lsn: 77 };
        let mut writer = CheckpointWriter::new(floor);
        writer.push(&image);
        (
            writer.finish(),
            Checkpoint { version: Some(VERSION), floor, journals: HashMap::from([(id, image)]) },
        )
    }

    #[test]
    fn checkpoint_round_trips_and_damage_is_refused() {
        let (bytes, checkpoint) = sample();
        assert_eq!(decode(&bytes, "checkpoint").unwrap(), checkpoint);
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 0x40;
            assert!(decode(&broken, "checkpoint").is_err(), "byte {at}");
            assert!(decode(&bytes[..at], "checkpoint").is_err(), "truncated at {at}");
        }
    }

    #[test]
    fn newer_checkpoint_is_refused_by_name() {
        let (mut bytes, _) = sample();
        bytes[8] = 3;
        let end = bytes.len() - 4;
        let crc = crc32c::crc32c(&bytes[..end]);
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
        let error = decode(&bytes, "checkpoint").unwrap_err().to_string();
        assert_eq!(error, "checkpoint has format version 3, this program knows up to 2");
    }

    #[test]
    fn golden_checkpoint() {
        let hex: String = sample().0.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "4d4f494d434b500a0200000000000000080000000000000000100000000000004d00000000000000",
                "0100000001000000000000000000000000000000020000001300000071756575652f612f50617274",
                "6974696f6e2d32010300000000000000020000000100000000000000000000000400000009000000",
                "00000000010000000000000000000000090000000000000064000000000000000500000000000000",
                "04000000000000000101070000000000000004000000736e6170a1ae2bc2",
            )
        );
    }
}
