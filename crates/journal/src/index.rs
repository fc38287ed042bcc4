//! The sparse index of one segment: frame positions by offset and by timestamp.
//!
//! Every 16 KiB of segment has one entry (offset relative to the segment's base, position), every 64 KiB one entry of
//! the greatest timestamp before it. Entries name exact frame starts. The index is derived from the segment: a missing
//! or damaged file is rebuilt from the frames, and frames always win.

use crate::codec::{Input, Output};

/// Bytes of segment per offset entry.
pub(crate) const OFFSET_STEP: u64 = 16 << 10;
/// Bytes of segment per time entry.
pub(crate) const TIME_STEP: u64 = 64 << 10;

const OFFSET_MAGIC: u32 = 0x584f_4d4d; // "MMOX"
const TIME_MAGIC: u32 = 0x5854_4d4d; // "MMTX"
const VERSION: u32 = 1;

/// The sparse index of one segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Index {
    /// (offset - segment base, position), ascending in both.
    pub(crate) offsets: Vec<(u32, u32)>,
    /// (greatest timestamp of frames before position, position), ascending in position.
    pub(crate) times: Vec<(i64, u32)>,
}

impl Index {
    /// Adds a frame at `pos`; `max_before_ms` is the greatest timestamp of the frames before it.
    pub(crate) fn note(&mut self, relative: u32, pos: u32, max_before_ms: i64) {
        let far = |last: Option<u32>, step: u64| last.is_none_or(|last| u64::from(pos - last) >= step);
        if far(self.offsets.last().map(|entry| entry.1), OFFSET_STEP) {
            self.offsets.push((relative, pos));
        }
        if far(self.times.last().map(|entry| entry.1), TIME_STEP) {
            self.times.push((max_before_ms, pos));
        }
    }

    /// The position of the last entry at or below `relative`.
    pub(crate) fn floor(&self, relative: u32) -> Option<u32> {
        let after = self.offsets.partition_point(|entry| entry.0 <= relative);
        after.checked_sub(1).map(|at| self.offsets[at].1)
    }

    /// The last entry with both its position and its offset at or below the limits.
    pub(crate) fn floor_at(&self, pos: u32, relative: u32) -> Option<u32> {
        let after = self.offsets.partition_point(|entry| entry.1 <= pos && entry.0 <= relative);
        after.checked_sub(1).map(|at| self.offsets[at].1)
    }

    /// A position before which every frame is older than `ts_ms`.
    pub(crate) fn time_floor(&self, ts_ms: i64) -> Option<u32> {
        let after = self.times.partition_point(|entry| entry.0 < ts_ms);
        after.checked_sub(1).map(|at| self.times[at].1)
    }

    /// The position of the last entry of either kind, where a rebuild continues. One of the two may be well past the
    /// other.
    pub(crate) fn last_position(&self) -> Option<u32> {
        let (offset, time) = (self.offsets.last(), self.times.last());
        offset.map(|entry| entry.1).max(time.map(|entry| entry.1))
    }

    /// Drops entries at or past a position.
    pub(crate) fn truncate(&mut self, pos: u32) {
        self.offsets.truncate(self.offsets.partition_point(|entry| entry.1 < pos));
        self.times.truncate(self.times.partition_point(|entry| entry.1 < pos));
    }

    /// Inserts the entries of an earlier part of the same segment in front.
    pub(crate) fn prepend(&mut self, mut earlier: Index) {
        if let Some(first) = self.offsets.first() {
            earlier.truncate(first.1);
        }
        earlier.offsets.append(&mut self.offsets);
        earlier.times.append(&mut self.times);
        *self = earlier;
    }

    /// The bytes of the `.index` file; `len` is the segment length it covers.
    pub(crate) fn encode_offsets(&self, base: i64, len: u64) -> Vec<u8> {
        let mut out = start(OFFSET_MAGIC, base, len, self.offsets.len());
        for (relative, pos) in &self.offsets {
            out.put_u32(*relative);
            out.put_u32(*pos);
        }
        seal(out)
    }

    /// The bytes of the `.timeindex` file.
    pub(crate) fn encode_times(&self, base: i64, len: u64) -> Vec<u8> {
        let mut out = start(TIME_MAGIC, base, len, self.times.len());
        for (ts, pos) in &self.times {
            out.put_i64(*ts);
            out.put_u32(*pos);
        }
        seal(out)
    }

    /// Decodes both files; returns the index and the segment length it covers.
    pub(crate) fn decode(offsets: &[u8], times: &[u8], base: i64) -> Option<(Index, u64)> {
        let (mut input, count, len) = open(offsets, OFFSET_MAGIC, base)?;
        let mut index = Index::default();
        for _ in 0..count {
            index.offsets.push((input.u32()?, input.u32()?));
        }
        let (mut input, count, times_len) = open(times, TIME_MAGIC, base)?;
        for _ in 0..count {
            index.times.push((input.i64()?, input.u32()?));
        }
        (len == times_len).then_some((index, len))
    }
}

fn start(magic: u32, base: i64, len: u64, count: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(32 + count * 12);
    out.put_u32(magic);
    out.put_u32(VERSION);
    out.put_i64(base);
    out.put_u64(len);
    out.put_count(count);
    out
}

fn seal(mut out: Vec<u8>) -> Vec<u8> {
    let crc = crc32c::crc32c(&out);
    out.put_u32(crc);
    out
}

fn open(bytes: &[u8], magic: u32, base: i64) -> Option<(Input<'_>, u32, u64)> {
    let (body, crc) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
    let mut input = Input::new(body);
    let known = Input::new(crc).u32()? == crc32c::crc32c(body)
        && input.u32()? == magic
        && input.u32()? == VERSION
        && input.i64()? == base;
    let len = input.u64()?;
    let count = input.u32()?;
    known.then_some((input, count, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Index {
        let mut index = Index::default();
        for frame in 0..40_u32 {
            index.note(frame, 64 + frame * 5_000, i64::from(frame) * 10);
        }
        index
    }

    #[test]
    fn entries_are_sparse_and_floor_finds_the_last_one_below() {
        let index = sample();
        assert_eq!(
            index.offsets,
            [
                (0, 64),
                (4, 20_064),
                (8, 40_064),
                (12, 60_064),
                (16, 80_064),
                (20, 100_064),
                (24, 120_064),
                (28, 140_064),
                (32, 160_064),
                (36, 180_064)
            ]
        );
        assert_eq!((index.floor(7), index.floor(8)), (Some(20_064), Some(40_064)));
        assert_eq!((index.floor_at(45_000, 100), index.floor_at(45_000, 7)), (Some(40_064), Some(20_064)));
        assert_eq!(index.time_floor(141), Some(70_064));
    }

    #[test]
    fn rebuild_continues_past_both_kinds_of_entries() {
        let mut index = Index::default();
        let note =
            |index: &mut Index, frame: u32| index.note(frame, 64 + frame * 5_000, i64::from(frame) * 10);
        (0..15).for_each(|frame| note(&mut index, frame));
        let (offset, time) = (index.offsets.last().unwrap().1, index.times.last().unwrap().1);
        assert_eq!((offset, time, index.last_position()), (60_064, 70_064, Some(70_064)));
        (14..40).for_each(|frame| note(&mut index, frame));
        assert_eq!(index, sample());
        assert_eq!(Index::default().last_position(), None);
    }

    #[test]
    fn index_files_round_trip_and_a_flipped_bit_is_detected() {
        let index = sample();
        let (offsets, times) = (index.encode_offsets(5, 777), index.encode_times(5, 777));
        assert_eq!(Index::decode(&offsets, &times, 5), Some((index, 777)));
        assert_eq!(Index::decode(&offsets, &times, 6), None);
        for at in 0..offsets.len() {
            let mut broken = offsets.clone();
            broken[at] ^= 0x10;
            assert_eq!(Index::decode(&broken, &times, 5), None, "byte {at}");
        }
    }

    /// The formats on disk: a change here needs a new version.
    #[test]
    fn golden_index_files() {
        let mut index = Index::default();
        index.note(0, 64, 1_000);
        index.note(9, 64 + 20_000, 2_000);
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(
            hex(&index.encode_offsets(5, 777)),
            "4d4d4f58010000000500000000000000090300000000000002000000000000004000000009000000604e00001142d353"
        );
        assert_eq!(
            hex(&index.encode_times(5, 777)),
            "4d4d5458010000000500000000000000090300000000000001000000e803000000000000400000009d264d6b"
        );
    }
}
