//! Framing: where a frame ends and whether it is valid.
//!
//! The journal stores frames as opaque bytes. It asks a [`Framing`] for their length, offsets, epoch and timestamp.
//! Implementations must never panic and never trust a length they read: `peek` runs over arbitrary bytes whenever a
//! torn write is scanned.

use bytes::{BufMut, Bytes, BytesMut};

use crate::codec::Input;

/// The header fields of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Whole length in bytes, header included.
    pub len: usize,
    /// First offset.
    pub base: i64,
    /// Last offset, at least `base`.
    pub last: i64,
    /// Leader epoch it was written under.
    pub epoch: i32,
    /// Greatest timestamp in the frame.
    pub max_timestamp_ms: i64,
}

/// Parses frames of one kind.
pub trait Framing: Send + Sync + 'static {
    /// The smallest prefix of a frame that [`Framing::peek`] needs.
    fn header_len(&self) -> usize;
    /// The header of the frame that starts with these bytes; `None` if they cannot be a frame.
    fn peek(&self, header: &[u8]) -> Option<Frame>;
    /// The largest frame that may be appended: [`Framing::peek`] accepts every frame up to it.
    fn max_len(&self) -> usize {
        usize::MAX
    }
    /// True if one whole frame is valid: checksum and structure.
    fn verify(&self, frame: &[u8]) -> bool;
    /// True if [`Framing::verify`] covers the epoch. If not, the journal compares it with its epoch table.
    fn covers_epoch(&self) -> bool {
        true
    }
    /// A valid frame without content that starts at `base` and ends at `last` at most, for a log that must continue
    /// after a hole in the log it is a copy of. `None` if the framing has no such frame.
    fn filler(&self, _base: i64, _last: i64, _epoch: i32) -> Option<Bytes> {
        None
    }
}

/// The crate's own small frame, for logs that are not Kafka record batches.
///
/// Layout, little-endian: length of the bytes after the checksum (u32), CRC32C of them (u32), base (i64), last (i64),
/// epoch (i32), timestamp (i64), payload.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainFraming;

const PLAIN_HEADER: usize = 36;

impl PlainFraming {
    /// The largest frame, header included: [`crate::Journal::append`] refuses a larger one, and every frame up to it is
    /// read.
    pub const MAX: usize = 2 << 30;

    /// Encodes one frame.
    pub fn encode(base: i64, last: i64, epoch: i32, timestamp_ms: i64, payload: &[u8]) -> Bytes {
        let mut frame = BytesMut::with_capacity(PLAIN_HEADER + payload.len());
        frame.put_u32_le(
            u32::try_from(PLAIN_HEADER - 8 + payload.len()).expect("a plain frame is under 4 GiB"),
        );
        frame.put_u32_le(0);
        frame.put_i64_le(base);
        frame.put_i64_le(last);
        frame.put_i32_le(epoch);
        frame.put_i64_le(timestamp_ms);
        frame.put_slice(payload);
        let crc = crc32c::crc32c(&frame[8..]);
        frame[4..8].copy_from_slice(&crc.to_le_bytes());
        frame.freeze()
    }

    /// The payload of a whole frame; empty if the bytes are too short.
    pub fn payload(frame: &[u8]) -> &[u8] {
        frame.get(PLAIN_HEADER..).unwrap_or_default()
    }
}

impl Framing for PlainFraming {
    fn header_len(&self) -> usize {
        PLAIN_HEADER
    }

    fn peek(&self, header: &[u8]) -> Option<Frame> {
        let mut input = Input::new(header);
        let len = usize::try_from(input.u32()?).ok()?.checked_add(8)?;
        let _crc = input.u32()?;
        let (base, last, epoch, max_timestamp_ms) = (input.i64()?, input.i64()?, input.i32()?, input.i64()?);
        let sound = (PLAIN_HEADER..=Self::MAX).contains(&len) && base >= 0 && last >= base && last < i64::MAX;
        sound.then_some(Frame { len, base, last, epoch, max_timestamp_ms })
    }

    fn max_len(&self) -> usize {
        Self::MAX
    }

    fn verify(&self, frame: &[u8]) -> bool {
        let whole = self.peek(frame).is_some_and(|peeked| peeked.len == frame.len());
        whole && Input::new(&frame[4..8]).u32() == Some(crc32c::crc32c(&frame[8..]))
    }

    fn filler(&self, base: i64, last: i64, epoch: i32) -> Option<Bytes> {
        Some(Self::encode(base, last, epoch, -1, &[]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_frame_round_trips_and_any_flipped_bit_is_detected() {
        let frame = PlainFraming::encode(7, 9, 3, 1_000, b"payload");
        let peeked = PlainFraming.peek(&frame).unwrap();
        assert_eq!(peeked, Frame { len: frame.len(), base: 7, last: 9, epoch: 3, max_timestamp_ms: 1_000 });
        assert_eq!(PlainFraming::payload(&frame), b"payload");
        assert!(PlainFraming.verify(&frame));
        for bit in 0..frame.len() * 8 {
            let mut broken = frame.to_vec();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(!PlainFraming.verify(&broken), "bit {bit}");
        }
    }

    #[test]
    fn every_frame_up_to_the_limit_is_read() {
        let header = |len: usize| {
            let mut frame = PlainFraming::encode(1, 1, 1, 1, b"").to_vec();
            frame[..4].copy_from_slice(&u32::try_from(len - 8).unwrap().to_le_bytes());
            frame
        };
        let is_read = |len: usize| PlainFraming.peek(&header(len)).is_some_and(|frame| frame.len == len);
        for len in [PLAIN_HEADER, 300 << 20, PlainFraming.max_len() - 1, PlainFraming.max_len()] {
            assert!(is_read(len), "{len}");
        }
        assert!(!is_read(PLAIN_HEADER - 1) && !is_read(PlainFraming.max_len() + 1));
    }

    #[test]
    fn golden_plain_frame() {
        let frame = PlainFraming::encode(1, 2, 3, 4, b"moim");
        let hex: String = frame.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "2000000067169f86010000000000000002000000000000000300000004000000000000006d6f696d");
    }
}
