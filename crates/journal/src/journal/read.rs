//! Reads: by offset, by timestamp, frame by frame.
//!
//! Frames in the ring are read from memory, others as ranges of segment files. The lock is held for lookups, never
//! while a file is read. A returned range stays readable: its file is open, and files are only replaced or unlinked
//! under readers, or truncated past the offsets that readers may use.
//!
//! Bytes that this process has neither written nor verified are verified before they are returned, once: see
//! [`Verified`](crate::segment::Verified). A read ends before a damaged frame; a read that starts there is refused, and
//! one that starts behind it is served.
//!
//! A truncation or a reset may happen during a read. Apparent damage is then a false alarm: every file access remembers
//! the number of truncations before it, and the read starts over if there are more.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::attach::saved_index;
use super::{Epochs, Journal, State};
use crate::codec::Locked;
use crate::disk::DiskFile;
use crate::framing::Frame;
use crate::index::Index;
use crate::segment::{FrameReader, HEADER, Segment, WalkError};
use crate::types::{Chunk, FileRange, Read, ReadError};

/// Read-ahead when only headers are read.
const HEADER_BLOCK: usize = 20 << 10;
/// Read-ahead when everything is read.
pub(super) const READ_BLOCK: usize = 1 << 20;

/// A part of a segment file to read, found under the lock.
pub(super) struct Window {
    pub(super) segment: i64,
    /// An exact frame start at or before the wanted offset.
    pub(super) from: u64,
    /// The expected frame there.
    pub(super) first: Expected,
    /// True if compaction may have removed offsets.
    pub(super) gaps: bool,
    /// A later exact frame start, still within the limits.
    pub(super) jump: Option<u64>,
    /// Everything from `from` up to this position is verified.
    pub(super) verified: u64,
    /// Nothing at or past this position is read; it is a frame's end.
    pub(super) limit: u64,
    /// The offset at `limit`.
    pub(super) limit_offset: i64,
}

/// The lowest offset that a read may start at.
#[derive(Clone, Copy)]
pub(super) enum Floor {
    LogStart,
    FirstFrame,
}

/// The expected start of the next frame. A checksum alone does not prove that a frame is at its position.
#[derive(Clone, Copy)]
pub(super) struct Expected {
    pub(super) offset: i64,
    /// True if no later offset is accepted.
    pub(super) exact: bool,
}

impl Expected {
    /// After a frame.
    pub(super) fn after(frame: &Frame, gaps: bool) -> Self {
        Self { offset: frame.last + 1, exact: !gaps }
    }

    /// Exactly this frame.
    pub(super) fn at(frame: &Frame) -> Self {
        Self { offset: frame.base, exact: true }
    }

    pub(super) fn admits(self, frame: &Frame) -> bool {
        frame.base == self.offset || (!self.exact && frame.base > self.offset)
    }
}

pub(super) enum Source {
    Ring,
    File(Window),
    NeedsIndex(i64),
    End,
}

impl Journal {
    /// Reads frames from the one that contains `from`: whole frames, at most `max_bytes` unless the first alone is
    /// larger (then only that one), and none that reaches `until` or past it.
    pub fn read(&self, from: i64, until: i64, max_bytes: usize) -> Result<Read, ReadError> {
        self.read_as((from, Floor::LogStart), until, max_bytes)
    }

    /// Like [`Journal::read`], also below the log start offset as far as frames exist: a new replica starts with the
    /// whole frame that holds the log start.
    pub fn read_for_replica(&self, from: i64, until: i64, max_bytes: usize) -> Result<Read, ReadError> {
        self.read_as((from, Floor::FirstFrame), until, max_bytes)
    }

    /// The base offset of the frame that holds `offset`; `offset` itself if no frame does, in a hole or past the log
    /// end, or if it cannot be read.
    pub fn base_of(&self, offset: i64) -> i64 {
        if offset >= self.end() {
            return offset;
        }
        let first =
            self.read_for_replica(offset, i64::MAX, 1).ok().and_then(|read| match read.chunks.first()? {
                Chunk::Mem(bytes) => self.peek_across(bytes, read.chunks.get(1)),
                Chunk::File(range) => {
                    let limit = range.pos + range.len as u64;
                    let mut reader =
                        FrameReader::new(&*range.file, &*self.framing, limit, self.framing.header_len());
                    reader.header(range.pos).ok().flatten()
                }
            });
        first.map_or(offset, |frame| frame.base.min(offset))
    }

    fn read_as(&self, from: (i64, Floor), until: i64, max_bytes: usize) -> Result<Read, ReadError> {
        loop {
            let truncations = self.truncations();
            match self.read_once(from, until, max_bytes, truncations) {
                Err(_) if self.truncations() != truncations => {}
                other => return other,
            }
        }
    }

    /// The number of truncations of this log so far.
    pub(super) fn truncations(&self) -> u64 {
        self.state.locked().truncations
    }

    fn read_once(
        &self,
        (from, floor): (i64, Floor),
        until: i64,
        max_bytes: usize,
        truncations: u64,
    ) -> Result<Read, ReadError> {
        let mut read = Read { next: from, ..Read::default() };
        loop {
            let mut state = self.state.locked();
            state.check_range(from, floor)?;
            let until = until.min(state.end);
            let budget = max_bytes.saturating_sub(read.bytes);
            if read.next >= until || (budget == 0 && read.bytes > 0) {
                return Ok(read);
            }
            match state.source(read.next, until, budget) {
                Source::End => return Ok(read),
                Source::Ring => {
                    state.read_ring(&mut read, until, max_bytes);
                    return Ok(read);
                }
                Source::NeedsIndex(base) => {
                    drop(state);
                    self.load_index_once(base, truncations)?;
                }
                Source::File(window) => {
                    drop(state);
                    if !self.read_file(&window, &mut read, (until, max_bytes), truncations)? {
                        return Ok(read);
                    }
                }
            }
        }
    }

    /// Adds the frames of the window; returns true if more may follow.
    fn read_file(
        &self,
        window: &Window,
        read: &mut Read,
        (until, max_bytes): (i64, usize),
        truncations: u64,
    ) -> Result<bool, ReadError> {
        let wanted = read.next;
        let file = self.open_for_read(window.segment, wanted, truncations)?;
        let mut reader = FrameReader::new(&*file, &*self.framing, window.limit, HEADER_BLOCK);
        let Some((start, first)) = self.seek(&mut reader, window, (wanted, truncations))? else {
            // Compaction left nothing at or past the wanted offset in this segment.
            read.next = window.limit_offset;
            return Ok(true);
        };
        let budget = max_bytes.saturating_sub(read.bytes) as u64;
        let is_first = read.bytes == 0;
        let (mut start, mut first) = (start, first);
        let (position, next) = loop {
            let fits = |position: u64, frame: &Frame| {
                let within = position + frame.len as u64 - start <= budget || (position == start && is_first);
                within && frame.last < until
            };
            let far = start.saturating_add(budget.max(first.len as u64)).min(window.limit);
            if window.verified >= far {
                let known = (budget, until);
                break self.extent(
                    &mut reader,
                    window,
                    (start, first),
                    known,
                    &fits,
                    (wanted, truncations),
                )?;
            }
            match self.verify(&*file, window, (start, first), &fits, truncations)? {
                Some(extent) => break extent,
                None if !is_first => return Ok(false),
                None => {
                    // Its header was misleading: the wanted frame may be behind it.
                    let behind = (start, first.base);
                    let found = find_valid(&mut reader, behind, wanted, window.limit_offset)?;
                    (start, first) =
                        found.ok_or(ReadError::Damaged { id: self.id, offset: first.base.min(wanted) })?;
                }
            }
        };
        if position == start {
            return Ok(false);
        }
        let len = usize::try_from(position - start).expect("a read is bounded by its budget or one frame");
        read.next = next;
        read.chunks.push(Chunk::File(FileRange { file, pos: start, len }));
        read.bytes += len;
        let mut state = self.state.locked();
        if state.truncations == truncations
            && let Some(segment) = state.segment(window.segment)
        {
            segment.hints = [(next, position), segment.hints[0]];
        }
        Ok(position == window.limit)
    }

    /// The end of a read of verified bytes, by headers and the index: position and offset.
    fn extent(
        &self,
        reader: &mut FrameReader<'_>,
        window: &Window,
        (start, first): (u64, Frame),
        (budget, until): (u64, i64),
        fits: &dyn Fn(u64, &Frame) -> bool,
        near: (i64, u64),
    ) -> Result<(u64, i64), ReadError> {
        if window.limit - start <= budget && window.limit_offset <= until {
            return Ok((window.limit, window.limit_offset));
        }
        let (mut position, mut next, mut frame) = (start, near.0, first);
        if let Some(jump) = window.jump.filter(|jump| *jump > start)
            && let Some(there) = self.header(reader, jump, near)?
        {
            (position, next, frame) = (jump, there.base, there);
        }
        while fits(position, &frame) {
            position += frame.len as u64;
            next = frame.last + 1;
            match self.header(reader, position, (next, near.1))? {
                Some(following) => frame = following,
                None => return Ok((position, window.limit_offset)),
            }
        }
        Ok((position, next))
    }

    /// The frame of the window that holds the wanted offset or is the first one after it, with its position; `None`
    /// without one. Skips damaged frames before it.
    fn seek(
        &self,
        reader: &mut FrameReader<'_>,
        window: &Window,
        (wanted, truncations): (i64, u64),
    ) -> Result<Option<(u64, Frame)>, ReadError> {
        let (mut start, mut expected, mut after_damage) = (window.from, window.first, false);
        let mut before = None;
        loop {
            let frame = match reader.header(start) {
                Ok(None) => return Ok(None),
                Ok(Some(frame)) if expected.admits(&frame) => frame,
                Err(WalkError::Io(error)) => return Err(error.into()),
                Ok(Some(_)) | Err(WalkError::BadFrame(_)) => {
                    let error = self.damage_error(WalkError::BadFrame(start), (expected.offset, truncations));
                    let ReadError::Damaged { .. } = error else { return Err(error) };
                    let next = resync(reader, before, (start, expected.offset), window.limit_offset)?;
                    let (at, frame) = next.ok_or(error)?;
                    (start, expected, after_damage, before) = (at, Expected::at(&frame), true, None);
                    continue;
                }
            };
            if after_damage && frame.base > wanted {
                return Err(ReadError::Damaged { id: self.id, offset: wanted });
            }
            if frame.last >= wanted {
                return Ok(Some((start, frame)));
            }
            (before, expected, after_damage) =
                (Some((start, frame)), Expected::after(&frame, window.gaps), false);
            start += frame.len as u64;
        }
    }

    /// Verifies frames of a segment file while they fit: checksums, and that each is at its position. Returns the end
    /// of the valid ones, position and offset; `None` if the first is already damaged.
    fn verify(
        &self,
        file: &dyn DiskFile,
        window: &Window,
        (start, first): (u64, Frame),
        fits: &dyn Fn(u64, &Frame) -> bool,
        truncations: u64,
    ) -> Result<Option<(u64, i64)>, ReadError> {
        let epochs = Epochs::from_vec(self.epochs());
        let mut reader = FrameReader::new(file, &*self.framing, window.limit, READ_BLOCK / 4);
        let (mut position, mut expected) = (start, Expected::at(&first));
        let mut is_bad = false;
        #[cfg(feature = "planted")]
        if crate::planted::is_on(crate::planted::Bug::UnverifiedSegment) {
            while let Ok(Some(frame)) = reader.header(position) {
                if !fits(position, &frame) {
                    break;
                }
                position += frame.len as u64;
                expected = Expected::after(&frame, window.gaps);
            }
        }
        while position < window.limit {
            // Validity first: a frame that does not fit may have a damaged header.
            match reader.frame(position) {
                Ok(Some((frame, _))) if expected.admits(&frame) && self.is_of_its_epoch(&frame, &epochs) => {
                    if !fits(position, &frame) {
                        break;
                    }
                    position += frame.len as u64;
                    expected = Expected::after(&frame, window.gaps);
                }
                Err(WalkError::Io(error)) => return Err(error.into()),
                Ok(_) | Err(WalkError::BadFrame(_)) => {
                    let error =
                        self.damage_error(WalkError::BadFrame(position), (expected.offset, truncations));
                    if !matches!(error, ReadError::Damaged { .. }) {
                        return Err(error);
                    }
                    is_bad = position == start;
                    break;
                }
            }
        }
        self.note_verified(window.segment, (start, position), truncations);
        let next = if position < window.limit { expected.offset } else { window.limit_offset };
        Ok((!is_bad).then_some((position, next)))
    }

    /// Where the checksum of a frame does not cover its epoch, the epoch table does.
    pub(super) fn is_of_its_epoch(&self, frame: &Frame, epochs: &Epochs) -> bool {
        self.framing.covers_epoch() || epochs.agrees(frame.epoch, frame.base)
    }

    fn header(
        &self,
        reader: &mut FrameReader<'_>,
        position: u64,
        near: (i64, u64),
    ) -> Result<Option<Frame>, ReadError> {
        reader.header(position).map_err(|walk| self.damage_error(walk, near))
    }

    /// The error for a bad frame near an offset, read after this many truncations.
    pub(super) fn damage_error(&self, walk: WalkError, (near, truncations): (i64, u64)) -> ReadError {
        match walk {
            WalkError::Io(error) => ReadError::Io(error),
            WalkError::BadFrame(position) => {
                let mut state = self.state.locked();
                if state.truncations != truncations {
                    return ReadError::OutOfRange { start: state.start, end: state.end };
                }
                if self.note_damage(&mut state) {
                    tracing::error!(journal = %self.id, position, near, "frame checksum mismatch");
                }
                ReadError::Damaged { id: self.id, offset: near }
            }
        }
    }

    pub(super) fn open_for_read(
        &self,
        segment: i64,
        near: i64,
        truncations: u64,
    ) -> Result<Arc<dyn DiskFile>, ReadError> {
        match self.segment_file(segment, false) {
            Ok(file) => Ok(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut state = self.state.locked();
                if state.segment(segment).is_none() || state.truncations != truncations {
                    // Dropped since the lookup: the log starts later now, or ends earlier.
                    return Err(ReadError::OutOfRange { start: state.start, end: state.end });
                }
                self.note_damage(&mut state);
                Err(ReadError::Damaged { id: self.id, offset: near })
            }
            Err(error) => Err(ReadError::Io(error)),
        }
    }

    /// Base offset of the first frame whose greatest timestamp is at least `ts_ms`.
    pub fn offset_for_timestamp(&self, ts_ms: i64) -> Result<Option<i64>, ReadError> {
        let mut from = self.start();
        loop {
            let (base, end) = {
                let state = self.state.locked();
                let young =
                    |segment: &&Segment| segment.image.max_timestamp_ms >= ts_ms && segment.image.end > from;
                match state.segments.iter().find(young) {
                    None => return Ok(None),
                    Some(segment) => (segment.image.base, segment.image.end),
                }
            };
            self.load_index(base)?;
            let hint = self.time_hint(base, ts_ms).map_or(base, |offset| offset.max(base));
            let mut found = None;
            self.for_each_header(hint.max(from), end, &mut |frame| {
                if frame.max_timestamp_ms >= ts_ms && frame.last >= from {
                    found = Some(frame.base);
                }
                found.is_none()
            })?;
            if found.is_some() {
                return Ok(found);
            }
            from = end;
        }
    }

    /// An offset before which every frame of the segment is older than `ts_ms`.
    fn time_hint(&self, base: i64, ts_ms: i64) -> Option<i64> {
        let mut state = self.state.locked();
        let segment = state.segment(base)?;
        let position = segment.index.time_floor(ts_ms)?;
        let at = segment.index.offsets.partition_point(|entry| entry.1 <= position).checked_sub(1)?;
        Some(base + i64::from(segment.index.offsets[at].0))
    }

    /// The greatest timestamp and the base offset of its frame.
    pub fn max_timestamp(&self) -> Result<Option<(i64, i64)>, ReadError> {
        let state = self.state.locked();
        let images =
            state.segments.iter().map(|segment| &segment.image).filter(|image| image.end > image.base);
        let images = images.filter(|image| image.end > state.start && image.max_timestamp_ms >= 0);
        Ok(images
            .max_by_key(|image| (image.max_timestamp_ms, std::cmp::Reverse(image.base)))
            .map(|image| (image.max_timestamp_ms, image.max_timestamp_base)))
    }

    /// Walks whole frames, verified, without holding the lock; `f` returns whether to continue.
    pub fn for_each_frame(
        &self,
        from: i64,
        until: i64,
        f: &mut dyn FnMut(&Frame, &[u8]) -> bool,
    ) -> Result<(), ReadError> {
        let mut next = from.max(self.start());
        while next < until.min(self.end()) {
            let truncations = self.truncations();
            let read = self.read(next, until, READ_BLOCK)?;
            if read.bytes == 0 && read.next <= next {
                return Ok(());
            }
            // A large frame in memory is two chunks: an incomplete frame is carried over to the next chunk.
            let mut carry: Vec<u8> = Vec::new();
            for chunk in &read.chunks {
                let bytes = chunk.bytes()?;
                let whole = if carry.is_empty() {
                    &bytes[..]
                } else {
                    carry.extend_from_slice(&bytes);
                    &carry
                };
                let (used, proceed) = self.walk_bytes(whole, (next, truncations), f)?;
                if !proceed {
                    return Ok(());
                }
                carry = whole[used..].to_vec();
            }
            if !carry.is_empty() {
                return Err(self.damage_error(WalkError::BadFrame(0), (next, truncations)));
            }
            next = read.next;
        }
        Ok(())
    }

    /// Returns the number of bytes in whole frames, and whether to continue.
    fn walk_bytes(
        &self,
        bytes: &[u8],
        near: (i64, u64),
        f: &mut dyn FnMut(&Frame, &[u8]) -> bool,
    ) -> Result<(usize, bool), ReadError> {
        let mut used = 0;
        while bytes.len() - used >= self.framing.header_len() {
            let rest = &bytes[used..];
            let peeked = self.framing.peek(rest).filter(|frame| frame.len > 0);
            let Some(frame) = peeked else { return Err(self.damage_error(WalkError::BadFrame(0), near)) };
            let Some(whole) = rest.get(..frame.len) else { break };
            if !self.framing.verify(whole) {
                return Err(self.damage_error(WalkError::BadFrame(0), (frame.base, near.1)));
            }
            if !f(&frame, whole) {
                return Ok((used, false));
            }
            used += frame.len;
        }
        Ok((used, true))
    }

    /// Walks frame headers only.
    pub(super) fn for_each_header(
        &self,
        from: i64,
        until: i64,
        f: &mut dyn FnMut(&Frame) -> bool,
    ) -> Result<(), ReadError> {
        let mut next = from;
        while next < until.min(self.end()) {
            let truncations = self.truncations();
            let read = self.read(next, until, READ_BLOCK)?;
            if read.bytes == 0 && read.next <= next {
                return Ok(());
            }
            let mut inside = 0;
            for (at, chunk) in read.chunks.iter().enumerate() {
                let proceed = match chunk {
                    Chunk::File(range) => self.walk_headers(range, (next, truncations), f)?,
                    Chunk::Mem(bytes) if inside > 0 => {
                        inside -= bytes.len();
                        true
                    }
                    Chunk::Mem(bytes) => match self.peek_across(bytes, read.chunks.get(at + 1)) {
                        None => return Err(self.damage_error(WalkError::BadFrame(0), (next, truncations))),
                        Some(frame) => {
                            inside = frame.len.saturating_sub(bytes.len());
                            f(&frame)
                        }
                    },
                };
                if !proceed {
                    return Ok(());
                }
            }
            next = read.next;
        }
        Ok(())
    }

    /// The header of a frame in memory whose first bytes may be a chunk of their own.
    fn peek_across(&self, first: &Bytes, second: Option<&Chunk>) -> Option<Frame> {
        let missing = self.framing.header_len().saturating_sub(first.len());
        match second {
            Some(Chunk::Mem(second)) if missing > 0 => {
                let header = [&first[..], second.get(..missing)?].concat();
                self.framing.peek(&header)
            }
            _ => self.framing.peek(first),
        }
    }

    fn walk_headers(
        &self,
        range: &FileRange,
        near: (i64, u64),
        f: &mut dyn FnMut(&Frame) -> bool,
    ) -> Result<bool, ReadError> {
        let mut position = range.pos;
        let limit = range.pos + range.len as u64;
        let mut reader = FrameReader::new(&*range.file, &*self.framing, limit, HEADER_BLOCK);
        while let Some(frame) = self.header(&mut reader, position, near)? {
            if !f(&frame) {
                return Ok(false);
            }
            position += frame.len as u64;
        }
        Ok(true)
    }

    pub(super) fn note_verified(&self, segment: i64, (from, to): (u64, u64), truncations: u64) {
        let mut state = self.state.locked();
        if state.truncations == truncations
            && let Some(segment) = state.segment(segment)
        {
            segment.verified.add(from, to);
        }
    }

    /// Completes the index of a segment: from its files where they are valid, from the frames for the rest.
    pub(super) fn load_index(&self, base: i64) -> Result<(), ReadError> {
        self.load_index_once(base, self.truncations())
    }

    pub(super) fn load_index_once(&self, base: i64, truncations: u64) -> Result<(), ReadError> {
        let (until, image) = {
            let mut state = self.state.locked();
            let Some(segment) = state.segment(base) else { return Ok(()) };
            if segment.index_complete {
                return Ok(());
            }
            let known = segment.index.offsets.first().map_or(segment.image.len, |first| u64::from(first.1));
            (known, segment.image.clone())
        };
        let (mut index, covered) = saved_index(&*self.store.disk, &self.folder_path(), base)
            .filter(|(_, covered)| *covered <= image.len)
            .unwrap_or_default();
        let saved = covered;
        let file = self.open_for_read(base, base, truncations)?;
        let mut reader = FrameReader::new(&*file, &*self.framing, until, READ_BLOCK / 4);
        // Continue at the last entry: frames between it and the covered length add nothing.
        let mut position = index.last_position().map_or(HEADER, u64::from);
        let mut expected = index.expected(base, position, image.compacted);
        let mut max_before = index.times.last().map_or(-1, |last| last.0);
        let mut before = None;
        while position < until {
            let frame = match reader.header(position) {
                Ok(None) => break,
                Ok(Some(frame)) if expected.admits(&frame) => frame,
                Err(WalkError::Io(error)) => return Err(error.into()),
                Ok(Some(_)) | Err(WalkError::BadFrame(_)) => {
                    let error =
                        self.damage_error(WalkError::BadFrame(position), (expected.offset, truncations));
                    let ReadError::Damaged { .. } = error else { return Err(error) };
                    // Frames behind the damage can still be found.
                    let next = resync(&mut reader, before, (position, expected.offset), image.end)?;
                    let Some((at, frame)) = next else { break };
                    index.truncate(u32::try_from(at).unwrap_or(u32::MAX));
                    (position, expected, before) = (at, Expected::at(&frame), None);
                    continue;
                }
            };
            let relative = u32::try_from(frame.base - base).unwrap_or(u32::MAX);
            let at = u32::try_from(position).unwrap_or(u32::MAX);
            if index.offsets.last().is_none_or(|last| last.1 < at) {
                index.note(relative, at, max_before);
            }
            max_before = max_before.max(frame.max_timestamp_ms);
            before = Some((position, frame));
            position += frame.len as u64;
            expected = Expected::after(&frame, image.compacted);
        }
        let mut state = self.state.locked();
        if state.truncations != truncations {
            // The index refers to truncated frames; the caller has to read again.
            return Err(ReadError::OutOfRange { start: state.start, end: state.end });
        }
        if let Some(segment) = state.segment(base).filter(|segment| !segment.index_complete) {
            segment.index.prepend(index);
            segment.index_complete = true;
            segment.index_saved = saved;
        }
        Ok(())
    }
}

/// The next valid frame after a position without one, which a walk over headers has reached. A damaged length of the
/// frame before it may have led there: then the search starts behind that frame's start.
pub(super) fn resync(
    reader: &mut FrameReader<'_>,
    before: Option<(u64, Frame)>,
    (position, offset): (u64, i64),
    limit_offset: i64,
) -> io::Result<Option<(u64, Frame)>> {
    let bad_length = before.filter(|(at, _)| !matches!(reader.frame(*at), Ok(Some(_))));
    let (position, offset) = bad_length.map_or((position, offset), |(at, frame)| (at, frame.base));
    reader.resync(position, offset..limit_offset)
}

/// The valid frame that holds an offset, behind a position without one.
fn find_valid(
    reader: &mut FrameReader<'_>,
    (mut position, mut offset): (u64, i64),
    wanted: i64,
    limit_offset: i64,
) -> io::Result<Option<(u64, Frame)>> {
    while let Some((at, frame)) = reader.resync(position, offset..limit_offset)? {
        if frame.base > wanted {
            return Ok(None);
        }
        if frame.last >= wanted {
            return Ok(Some((at, frame)));
        }
        (position, offset) = (at, frame.last + 1);
    }
    Ok(None)
}

impl Index {
    /// The expected start of the frame at an entry's position.
    fn expected(&self, base: i64, position: u64, gaps: bool) -> Expected {
        let after = self.offsets.partition_point(|entry| u64::from(entry.1) <= position);
        match after.checked_sub(1).map(|at| self.offsets[at]) {
            Some((relative, at)) => {
                Expected { offset: base + i64::from(relative), exact: u64::from(at) == position }
            }
            None => Expected { offset: base, exact: !gaps },
        }
    }
}

impl Segment {
    /// The part of the file from the frame that holds an offset, or an earlier one, up to a limit.
    pub(super) fn window(&self, from: i64, (limit, limit_offset): (u64, i64)) -> Window {
        let (image, gaps) = (&self.image, self.image.compacted);
        let hint = self.hints.iter().find(|hint| hint.0 == from).map(|hint| hint.1);
        let (position, first) = match hint {
            Some(position) => (position, Expected { offset: from, exact: !gaps }),
            None => {
                let relative = u32::try_from(from.max(image.base) - image.base).unwrap_or(u32::MAX);
                let floor = self.index.floor(relative).map_or(HEADER, u64::from);
                (floor, self.index.expected(image.base, floor, gaps))
            }
        };
        let verified = self.verified.until(position);
        Window { segment: image.base, from: position, first, gaps, jump: None, verified, limit, limit_offset }
    }
}

impl State {
    pub(super) fn check_range(&self, from: i64, floor: Floor) -> Result<(), ReadError> {
        let first = match floor {
            Floor::LogStart => self.start,
            Floor::FirstFrame => self.segments.first().map_or(self.start, |s| s.image.base).min(self.start),
        };
        if from < first || from > self.end {
            return Err(ReadError::OutOfRange { start: self.start, end: self.end });
        }
        Ok(())
    }

    /// Where the frame that contains `from` is stored.
    pub(super) fn source(&mut self, from: i64, until: i64, budget: usize) -> Source {
        if let (Some(front), Some(back)) = (self.recent.front(), self.recent.back())
            && from >= front.base
            && from <= back.last
        {
            return Source::Ring;
        }
        let ring = self.recent.front().map(|front| (front.segment, front.position, front.base));
        let Some(mut at) = self.segment_at(from) else { return Source::End };
        // An offset past this segment's end lies before the next one.
        if self.segments[at].image.end <= from {
            at += 1;
        }
        let Some(segment) = self.segments.get_mut(at) else { return Source::End };
        let image = &segment.image;
        if !segment.index_complete && !segment.hints.iter().any(|hint| hint.0 == from) {
            return Source::NeedsIndex(image.base);
        }
        let limit = match ring {
            Some((base, position, offset)) if base == image.base && from < offset => (position, offset),
            _ => (image.len, image.end),
        };
        let mut window = segment.window(from, limit);
        let far = window.from.saturating_add(budget as u64).min(window.limit - 1);
        let relative =
            u32::try_from(until.saturating_sub(1).max(image.base) - image.base).unwrap_or(u32::MAX);
        let far = u32::try_from(far).unwrap_or(u32::MAX);
        window.jump = segment.index.floor_at(far, relative).map(u64::from);
        Source::File(window)
    }

    fn read_ring(&self, read: &mut Read, until: i64, max_bytes: usize) {
        let first = self.recent.partition_point(|recent| recent.last < read.next);
        for recent in self.recent.range(first..) {
            let too_much = read.bytes > 0 && read.bytes + recent.len() > max_bytes;
            if too_much || recent.last >= until {
                return;
            }
            if !recent.head.is_empty() {
                read.chunks.push(Chunk::Mem(recent.head.clone()));
            }
            read.chunks.push(Chunk::Mem(recent.frame.clone()));
            read.bytes += recent.len();
            read.next = recent.last + 1;
        }
    }
}
