//! The scrub, and the search for readable frames behind damage.
//!
//! Both read segment files, never the ring, and verify every frame. Neither holds the lock while it reads.

use super::read::{Expected, Floor, READ_BLOCK, Source, Window, resync};
use super::{Epochs, Journal, State};
use crate::codec::Locked;
use crate::segment::{FrameReader, HEADER, WalkError};
use crate::types::{ReadError, ScrubReport};

impl Journal {
    /// The first offset at or past `from` that can be read: for readers that must continue behind damage.
    pub fn next_readable(&self, from: i64) -> Result<i64, ReadError> {
        let window = loop {
            let mut state = self.state.locked();
            let truncations = state.truncations;
            state.check_range(from, Floor::LogStart)?;
            match state.source(from, i64::MAX, 0) {
                Source::File(window) => break window,
                Source::NeedsIndex(base) => {
                    drop(state);
                    self.load_index_once(base, truncations)?;
                }
                Source::Ring | Source::End => return Ok(from),
            }
        };
        let file = self.segment_file(window.segment, false)?;
        let mut reader = FrameReader::new(&*file, &*self.framing, window.limit, READ_BLOCK);
        let (mut position, mut expected) = (window.from, window.first);
        loop {
            match reader.frame(position) {
                Ok(None) => return Ok(window.limit_offset),
                Ok(Some((frame, _))) if expected.admits(&frame) && frame.last >= from => {
                    return Ok(frame.base.max(from));
                }
                Ok(Some((frame, _))) if expected.admits(&frame) => {
                    position += frame.len as u64;
                    expected = Expected::after(&frame, window.gaps);
                }
                Err(WalkError::Io(error)) => return Err(error.into()),
                Ok(Some(_)) | Err(WalkError::BadFrame(_)) => {
                    let next = reader.resync(position, expected.offset..window.limit_offset)?;
                    let Some((next, frame)) = next else { return Ok(window.limit_offset) };
                    (position, expected) = (next, Expected::at(&frame));
                }
            }
        }
    }

    /// Verifies segment files from `from` on, about `max_bytes` in all of `report`: the active segment, or the sealed
    /// ones. Returns where to continue, `None` at the end.
    pub(crate) fn scrub(
        &self,
        from: i64,
        active: bool,
        max_bytes: u64,
        report: &mut ScrubReport,
    ) -> Option<i64> {
        let (truncations, window) = loop {
            let mut state = self.state.locked();
            let truncations = state.truncations;
            match state.scrub_window(from, active) {
                Source::File(window) => break (truncations, window),
                Source::NeedsIndex(base) => {
                    drop(state);
                    if self.load_index_once(base, truncations).is_err() && self.truncations() == truncations {
                        return None; // reported as damage, or dropped
                    }
                }
                Source::Ring | Source::End => return None,
            }
        };
        let scrubbed = self.scrub_window(&window, from, truncations, max_bytes, report);
        match scrubbed {
            Ok(next) => Some(next),
            Err(error) => {
                if self.truncations() == truncations && !matches!(error, ReadError::OutOfRange { .. }) {
                    report.damage.push(format!("journal {}: {error}", self.id));
                }
                Some(window.limit_offset)
            }
        }
    }

    fn scrub_window(
        &self,
        window: &Window,
        from: i64,
        truncations: u64,
        max_bytes: u64,
        report: &mut ScrubReport,
    ) -> Result<i64, ReadError> {
        let file = self.open_for_read(window.segment, from, truncations)?;
        let mut reader = FrameReader::new(&*file, &*self.framing, window.limit, READ_BLOCK);
        let epochs = Epochs::from_vec(self.epochs());
        let (mut position, mut expected) = self.skip(&mut reader, window, from)?;
        let mut valid_from = position;
        while position < window.limit && report.bytes < max_bytes {
            match reader.frame(position) {
                Ok(Some((frame, _))) if expected.admits(&frame) && self.is_of_its_epoch(&frame, &epochs) => {
                    position += frame.len as u64;
                    report.bytes += frame.len as u64;
                    report.frames += 1;
                    expected = Expected::after(&frame, window.gaps);
                }
                Err(WalkError::Io(error)) => return Err(error.into()),
                Ok(_) | Err(WalkError::BadFrame(_)) => {
                    let error =
                        self.damage_error(WalkError::BadFrame(position), (expected.offset, truncations));
                    let ReadError::Damaged { .. } = error else { return Err(error) };
                    report.damage.push(format!("journal {}: {error}", self.id));
                    self.note_verified(window.segment, (valid_from, position), truncations);
                    let next = reader.resync(position, expected.offset..window.limit_offset)?;
                    let Some((next, frame)) = next else { return Ok(window.limit_offset) };
                    report.bytes += next - position;
                    (position, valid_from, expected) = (next, next, Expected::at(&frame));
                }
            }
        }
        self.note_verified(window.segment, (valid_from, position), truncations);
        Ok(if position < window.limit { expected.offset } else { window.limit_offset })
    }

    /// Skips frames before an offset, which the scrub has verified.
    fn skip(
        &self,
        reader: &mut FrameReader<'_>,
        window: &Window,
        from: i64,
    ) -> Result<(u64, Expected), ReadError> {
        let (mut position, mut expected) = (window.from, window.first);
        let mut before = None;
        while expected.offset < from {
            match reader.header(position) {
                Ok(None) => break,
                Ok(Some(frame)) if expected.admits(&frame) && frame.last >= from => break,
                Ok(Some(frame)) if expected.admits(&frame) => {
                    before = Some((position, frame));
                    position += frame.len as u64;
                    expected = Expected::after(&frame, window.gaps);
                }
                Err(WalkError::Io(error)) => return Err(error.into()),
                Ok(Some(_)) | Err(WalkError::BadFrame(_)) => {
                    // Damage that was reported when the scrub verified it.
                    let next = resync(reader, before, (position, from), window.limit_offset)?;
                    let none = (window.limit, Expected { offset: window.limit_offset, exact: true });
                    (position, expected) = next.map_or(none, |(at, frame)| (at, Expected::at(&frame)));
                    before = None;
                }
            }
        }
        Ok((position, expected))
    }
}

impl State {
    /// The part of a segment to scrub from an offset on, of the active segment or of the sealed ones.
    fn scrub_window(&mut self, from: i64, active: bool) -> Source {
        let Some(newest) = self.segments.len().checked_sub(1) else { return Source::End };
        let point = self.behind_point();
        let from = from.max(self.start);
        let at = if active { newest } else { self.segments.partition_point(|one| one.image.end <= from) };
        if !active && at >= newest {
            return Source::End;
        }
        let segment = &mut self.segments[at];
        let image = &segment.image;
        let from = from.max(image.base);
        let limit = match point {
            Some((base, position, offset)) if base == image.base => (position, offset),
            Some((base, ..)) if base < image.base => return Source::End,
            _ => (image.len, image.end),
        };
        if from >= limit.1 || limit.0 <= HEADER || !segment.exists {
            return if active || !segment.exists { Source::End } else { Source::Ring };
        }
        if !segment.index_complete {
            return Source::NeedsIndex(image.base);
        }
        Source::File(segment.window(from, limit))
    }
}
