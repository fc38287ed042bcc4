//! One segment: its file header, its in-memory state, and walking its frames.
//!
//! A segment file is a 64-byte header, then frames exactly as received. Its name is its base offset in twenty digits.
//! Invariant: positions are those of whole frames; frames of the active segment have contiguous offsets, those of a
//! compacted one may have gaps.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::codec::{Input, Output};
use crate::disk::DiskFile;
use crate::framing::{Frame, Framing};
use crate::index::Index;
use crate::types::{JournalId, SegmentInfo};

/// Bytes before the first frame.
pub(crate) const HEADER: u64 = 64;
/// Positions are 32 bits in the index.
pub(crate) const MAX_BYTES: u64 = 4 << 30;
/// Format version of a segment file.
pub(crate) const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"MOIMSEG\n";
/// A header that differs in at most this many bits is damaged; a different header has a different checksum as well.
const MAX_FLIPPED_BITS: u32 = 4;

/// Image of a segment in the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SegmentImage {
    pub(crate) base: i64,
    pub(crate) end: i64,
    pub(crate) len: u64,
    pub(crate) max_timestamp_ms: i64,
    /// Base offset of the frame with the greatest timestamp.
    pub(crate) max_timestamp_base: i64,
    /// True if compaction wrote it: offsets may have gaps.
    pub(crate) compacted: bool,
}

/// A segment in memory.
pub(crate) struct Segment {
    pub(crate) image: SegmentImage,
    pub(crate) index: Index,
    /// True if `index` covers the segment from its first frame.
    pub(crate) index_complete: bool,
    /// Segment length that the index files on disk cover.
    pub(crate) index_saved: u64,
    pub(crate) file: Option<Arc<dyn DiskFile>>,
    /// True if the file exists.
    pub(crate) exists: bool,
    /// Written since the last fsync.
    pub(crate) dirty: bool,
    /// A checkpoint has taken `dirty` and not synced yet.
    pub(crate) syncing: bool,
    /// End of the preallocated space.
    pub(crate) allocated: u64,
    /// Wall-clock time of its first append here, for rolls by age.
    pub(crate) created_ms: i64,
    /// Used since the last descriptor sweep.
    pub(crate) used: bool,
    /// Where the last reads ended: sequential readers start there.
    pub(crate) hints: [(i64, u64); 2],
    /// The bytes verified, or written, since the process started.
    pub(crate) verified: Verified,
}

/// The bytes of a segment file that may be used and sent: written by this process, or verified since it started.
/// Invariant: ranges are those of whole frames, sorted, and not adjacent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verified {
    ranges: Vec<(u64, u64)>,
    /// Everything at or past this was written by this process.
    written_from: u64,
}

impl Verified {
    /// Maximum number of ranges; readers all over the segment may verify some bytes again.
    const MAX: usize = 64;

    pub(crate) fn new(ranges: &[(u64, u64)], written_from: u64) -> Self {
        let mut verified = Self::written_from(written_from);
        ranges.iter().for_each(|range| verified.add(range.0, range.1));
        verified
    }

    fn written_from(position: u64) -> Self {
        Self { ranges: Vec::new(), written_from: position }
    }

    /// The end of the verified bytes from this position on.
    pub(crate) fn until(&self, from: u64) -> u64 {
        let at = self.ranges.partition_point(|range| range.0 <= from).checked_sub(1);
        let end = at.map_or(from, |at| self.ranges[at].1.max(from));
        if end >= self.written_from { u64::MAX } else { end }
    }

    pub(crate) fn add(&mut self, from: u64, to: u64) {
        let to = to.min(self.written_from);
        if from >= to {
            return;
        }
        let first = self.ranges.partition_point(|range| range.1 < from);
        let after = self.ranges.partition_point(|range| range.0 <= to);
        let merged = self.ranges[first..after]
            .iter()
            .fold((from, to), |all, range| (all.0.min(range.0), all.1.max(range.1)));
        self.ranges.splice(first..after, [merged]);
        if self.ranges.len() > Self::MAX {
            let smallest = (0..self.ranges.len()).min_by_key(|at| self.ranges[*at].1 - self.ranges[*at].0);
            self.ranges.remove(smallest.unwrap_or(0));
        }
    }

    /// Truncates at a position; later bytes are written by this process.
    pub(crate) fn truncate(&mut self, position: u64) {
        self.written_from = self.written_from.min(position);
        self.ranges.retain_mut(|range| {
            range.1 = range.1.min(position);
            range.0 < range.1
        });
    }
}

impl Segment {
    pub(crate) fn new(base: i64, created_ms: i64) -> Self {
        let image = SegmentImage {
            base,
            end: base,
            len: HEADER,
            max_timestamp_ms: -1,
            max_timestamp_base: base,
            compacted: false,
        };
        let mut segment = Self::from_image(image, created_ms);
        segment.exists = false;
        segment.index_complete = true;
        segment.verified = Verified::written_from(HEADER);
        segment
    }

    pub(crate) fn from_image(image: SegmentImage, created_ms: i64) -> Self {
        Self {
            verified: Verified::written_from(image.len),
            image,
            index: Index::default(),
            index_complete: false,
            index_saved: 0,
            file: None,
            exists: true,
            dirty: false,
            syncing: false,
            allocated: 0,
            created_ms,
            used: false,
            hints: [(-1, 0); 2],
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.image.len <= HEADER
    }

    /// Adds a frame at the end of the segment.
    pub(crate) fn push(&mut self, frame: &Frame) {
        let relative =
            u32::try_from(frame.base - self.image.base).expect("a roll keeps offsets within 32 bits");
        let pos = u32::try_from(self.image.len).expect("a roll keeps positions within 32 bits");
        self.index.note(relative, pos, self.image.max_timestamp_ms);
        self.image.push(frame);
    }

    /// True if a frame of this size and last offset still fits.
    pub(crate) fn fits(&self, last: i64, bytes: u64, segment_bytes: u64) -> bool {
        let len = self.image.len + bytes;
        let near = last - self.image.base < i64::from(u32::MAX);
        (len <= segment_bytes || self.is_empty()) && len < MAX_BYTES && near
    }

    /// Preallocates space in steps that grow with the segment: a small partition costs little.
    pub(crate) fn reserve(&mut self, file: &dyn DiskFile, bytes: u64, segment_bytes: u64) -> io::Result<()> {
        let need = self.image.len + bytes;
        if need > self.allocated {
            let step = self.image.len.next_power_of_two().clamp(64 << 10, 16 << 20);
            let until = need.max((need + step).min(segment_bytes));
            file.allocate(self.allocated, until - self.allocated)?;
            self.allocated = until;
        }
        Ok(())
    }

    /// The end of this segment, in the form of `behind_point`.
    pub(crate) fn at_end(&self) -> Option<(i64, u64, i64)> {
        Some((self.image.base, self.image.len, self.image.end))
    }

    pub(crate) fn info(&self, sealed: bool) -> SegmentInfo {
        let image = &self.image;
        SegmentInfo {
            base: image.base,
            end: image.end,
            bytes: image.len,
            max_timestamp_ms: image.max_timestamp_ms,
            sealed,
        }
    }
}

impl SegmentImage {
    /// Adds a frame at the end of the segment.
    pub(crate) fn push(&mut self, frame: &Frame) {
        if frame.max_timestamp_ms > self.max_timestamp_ms {
            self.max_timestamp_ms = frame.max_timestamp_ms;
            self.max_timestamp_base = frame.base;
        }
        self.len += frame.len as u64;
        self.end = frame.last + 1;
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_i64(self.base);
        out.put_i64(self.end);
        out.put_u64(self.len);
        out.put_i64(self.max_timestamp_ms);
        out.put_i64(self.max_timestamp_base);
        out.put_u8(u8::from(self.compacted));
    }

    pub(crate) fn decode(input: &mut Input<'_>) -> Option<Self> {
        Some(Self {
            base: input.i64()?,
            end: input.i64()?,
            len: input.u64()?,
            max_timestamp_ms: input.i64()?,
            max_timestamp_base: input.i64()?,
            compacted: input.u8()? != 0,
        })
    }
}

/// `<folder>/<base>.<extension>`.
pub(crate) fn path_of(folder: &Path, base: i64, extension: &str) -> PathBuf {
    folder.join(format!("{base:020}.{extension}"))
}

/// The base offset in a segment's file name.
pub(crate) fn base_of(name: &str) -> Option<i64> {
    let digits = name.strip_suffix(".log")?;
    (digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// The header of a segment file.
pub(crate) fn encode_header(id: JournalId, base: i64) -> [u8; HEADER as usize] {
    let mut out = Vec::with_capacity(HEADER as usize);
    out.put(MAGIC);
    out.put_u32(VERSION);
    out.put_u32(0);
    out.put_id(id);
    out.put_i64(base);
    out.resize(HEADER as usize - 4, 0);
    let crc = crc32c::crc32c(&out);
    out.put_u32(crc);
    out.try_into().expect("the header was padded to its size")
}

/// State of a segment file's header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HeaderState {
    Valid,
    /// Valid except for a few flipped bits: it says nothing that its name does not say, so it is rewritten.
    Corrupt,
    TooNew(u32),
    Foreign,
}

/// Checks the header of a segment file.
pub(crate) fn check_header(bytes: &[u8], id: JournalId, base: i64) -> HeaderState {
    if bytes == encode_header(id, base) {
        return HeaderState::Valid;
    }
    let expected = encode_header(id, base);
    let flipped: u32 = bytes.iter().zip(expected).map(|(found, wanted)| (found ^ wanted).count_ones()).sum();
    if bytes.len() == expected.len() && flipped <= MAX_FLIPPED_BITS {
        return HeaderState::Corrupt;
    }
    let mut input = Input::new(bytes);
    match (input.bytes(8), input.u32()) {
        (Some(magic), Some(version)) if magic == MAGIC && version > VERSION => HeaderState::TooNew(version),
        _ => HeaderState::Foreign,
    }
}

/// Why a walk over frames stopped early.
pub(crate) enum WalkError {
    /// The bytes at this position are not a valid frame.
    BadFrame(u64),
    Io(io::Error),
}

impl From<io::Error> for WalkError {
    fn from(error: io::Error) -> Self {
        WalkError::Io(error)
    }
}

/// Reads frames of one file through one reused buffer.
pub(crate) struct FrameReader<'a> {
    file: &'a dyn DiskFile,
    framing: &'a dyn Framing,
    /// Nothing at or past this position is read.
    limit: u64,
    block: usize,
    buffer: Vec<u8>,
    /// Position of the buffer's first byte.
    at: u64,
    filled: usize,
    /// Bytes read from the file so far.
    pub(crate) bytes_read: u64,
}

impl<'a> FrameReader<'a> {
    /// `block` is the read-ahead: small to read headers, large to read everything.
    pub(crate) fn new(file: &'a dyn DiskFile, framing: &'a dyn Framing, limit: u64, block: usize) -> Self {
        Self { file, framing, limit, block, buffer: Vec::new(), at: 0, filled: 0, bytes_read: 0 }
    }

    fn window(&mut self, pos: u64, need: usize) -> io::Result<Option<&[u8]>> {
        if pos + need as u64 > self.limit {
            return Ok(None);
        }
        let inside = pos >= self.at && pos + need as u64 <= self.at + self.filled as u64;
        if !inside {
            let want = usize::try_from(self.limit - pos).unwrap_or(usize::MAX).min(self.block.max(need));
            if self.buffer.len() < want {
                self.buffer.resize(want, 0);
            }
            self.filled = self.file.pread(pos, &mut self.buffer[..want])?;
            self.bytes_read += self.filled as u64;
            self.at = pos;
            if self.filled < need {
                return Ok(None);
            }
        }
        let from = usize::try_from(pos - self.at).expect("inside the buffer");
        Ok(Some(&self.buffer[from..from + need]))
    }

    /// The header of the frame at `pos`; `None` at the limit.
    pub(crate) fn header(&mut self, pos: u64) -> Result<Option<Frame>, WalkError> {
        if pos >= self.limit {
            return Ok(None);
        }
        let (framing, limit) = (self.framing, self.limit);
        let Some(header) = self.window(pos, framing.header_len())? else {
            return Err(WalkError::BadFrame(pos));
        };
        match framing.peek(header) {
            Some(frame) if frame.len > 0 && frame.last >= frame.base && frame.len as u64 <= limit - pos => {
                Ok(Some(frame))
            }
            _ => Err(WalkError::BadFrame(pos)),
        }
    }

    /// The next valid frame after a position without one, with its position. Its offsets lie within these.
    pub(crate) fn resync(
        &mut self,
        pos: u64,
        offsets: std::ops::Range<i64>,
    ) -> io::Result<Option<(u64, Frame)>> {
        for pos in pos + 1..self.limit {
            let inside = |frame: &Frame| frame.base >= offsets.start && frame.last < offsets.end;
            match self.header(pos) {
                Ok(Some(frame)) if inside(&frame) => {}
                Ok(_) | Err(WalkError::BadFrame(_)) => continue,
                Err(WalkError::Io(error)) => return Err(error),
            }
            match self.frame(pos) {
                Ok(Some((frame, _))) => return Ok(Some((pos, frame))),
                Ok(None) | Err(WalkError::BadFrame(_)) => {}
                Err(WalkError::Io(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The valid frame at `pos`; `None` at the limit.
    pub(crate) fn frame(&mut self, pos: u64) -> Result<Option<(Frame, &[u8])>, WalkError> {
        let Some(frame) = self.header(pos)? else { return Ok(None) };
        let framing = self.framing;
        match self.window(pos, frame.len)? {
            Some(bytes) if framing.verify(bytes) => Ok(Some((frame, bytes))),
            _ => Err(WalkError::BadFrame(pos)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_segment_header() {
        let id = JournalId { incarnation: 0x0102_0304, part: 5 };
        let hex: String = encode_header(id, 42).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "4d4f494d5345470a010000000000000004030201000000000000000000000000050000002a000000",
                "00000000000000000000000000000000000000008f9e424e",
            )
        );
    }

    #[test]
    fn newer_version_is_distinguished_from_a_foreign_file() {
        let id = JournalId { incarnation: 1, part: 2 };
        let mut header = encode_header(id, 42);
        assert_eq!(check_header(&header, id, 42), HeaderState::Valid);
        assert_eq!(check_header(&header, id, 43), HeaderState::Foreign);
        header[20] ^= 8;
        assert_eq!(check_header(&header, id, 42), HeaderState::Corrupt);
        header[20] ^= 8;
        header[8] = 9;
        assert_eq!(check_header(&header, id, 42), HeaderState::Corrupt, "a newer one has another checksum");
        header[60..].fill(0x5a);
        assert_eq!(check_header(&header, id, 42), HeaderState::TooNew(9));
        assert_eq!(check_header(&[0; 64], id, 42), HeaderState::Foreign);
    }

    #[test]
    fn verified_ranges_merge_and_written_bytes_are_verified() {
        let mut verified = Verified::written_from(1_000);
        let check = |verified: &Verified, from, to, covered| {
            assert_eq!(verified.until(from) >= to, covered, "{from}..{to} in {verified:?}");
        };
        check(&verified, 1_000, 9_000, true);
        check(&verified, 999, 9_000, false);
        verified.add(100, 200);
        verified.add(300, 400);
        check(&verified, 100, 200, true);
        check(&verified, 150, 301, false);
        verified.add(200, 300);
        assert_eq!(verified.ranges, [(100, 400)]);
        verified.add(50, 2_000);
        assert_eq!(verified.ranges, [(50, 1_000)]);
        check(&verified, 60, 5_000, true);
        check(&verified, 40, 60, false);
        verified.truncate(500);
        check(&verified, 60, 5_000, true);
        assert_eq!((verified.ranges.as_slice(), verified.written_from), (&[(50, 500)][..], 500));
        verified.truncate(50);
        assert_eq!(verified, Verified::written_from(50));
        for at in 0..200 {
            verified = Verified { written_from: 1 << 20, ..verified };
            verified.add(at * 100, at * 100 + 50);
        }
        assert_eq!(verified.ranges.len(), Verified::MAX);
    }

    #[test]
    fn segment_names_round_trip() {
        assert_eq!(base_of("00000000000000000042.log"), Some(42));
        assert_eq!(base_of("42.log"), None);
        assert_eq!(base_of("00000000000000000042.index"), None);
        assert_eq!(base_of("+0000000000000000042.log"), None);
    }
}
