//! Giving frames out: by offset, by time, one by one.
//!
//! What is in the ring is answered from memory, the rest as ranges of segment files. The lock is held to look
//! things up, never while a file is read. A range handed out stays readable: its file is open, and files are only
//! ever replaced or unlinked under readers, or cut past what anybody may have been promised.
//!
//! A truncation or a reset may come in the middle of a read. What then looks like damage is none: every look at a file
//! remembers how many cuts there had been before it, and begins anew when there are more.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::attach::saved_index;
use super::{Journal, State};
use crate::codec::Locked;
use crate::disk::DiskFile;
use crate::framing::Frame;
use crate::segment::{self, FrameReader, HEADER, Walk};
use crate::types::{Chunk, FileRange, Read, ReadError, ScrubReport};

/// Read-ahead when only headers are looked at.
const LOOK_BLOCK: usize = 20 << 10;
/// Read-ahead when everything is read.
const READ_BLOCK: usize = 1 << 20;

/// A part of a segment file to look into, found under the lock.
struct Window {
    segment: i64,
    /// An exact frame start at or before the wanted offset.
    from: u64,
    /// A later exact frame start, still within the limits.
    jump: Option<u64>,
    /// Nothing at or past this position is looked at; it is a frame's end.
    limit: u64,
    /// The offset there.
    limit_offset: i64,
}

enum Source {
    Ring,
    File(Window),
    NeedsIndex(i64),
    End,
}

impl Journal {
    /// Frames from the one that contains `from`: whole frames, at most `max_bytes` unless the first alone is larger
    /// (then just it), and none that reaches `until` or past it.
    pub fn read(&self, from: i64, until: i64, max_bytes: usize) -> Result<Read, ReadError> {
        loop {
            let cuts = self.cuts();
            match self.read_uncut(from, until, max_bytes, cuts) {
                Err(_) if self.cuts() != cuts => {}
                other => return other,
            }
        }
    }

    /// How often this log was cut so far.
    fn cuts(&self) -> u64 {
        self.state.locked().truncations
    }

    fn read_uncut(&self, from: i64, until: i64, max_bytes: usize, cuts: u64) -> Result<Read, ReadError> {
        let mut read = Read { next: from, ..Read::default() };
        loop {
            let mut state = self.state.locked();
            state.check_range(from)?;
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
                    self.load_index_uncut(base, cuts)?;
                }
                Source::File(window) => {
                    drop(state);
                    if !self.read_file(&window, &mut read, (until, max_bytes), cuts)? {
                        return Ok(read);
                    }
                }
            }
        }
    }

    /// Adds what the window holds; answers whether more may follow.
    fn read_file(
        &self,
        window: &Window,
        read: &mut Read,
        (until, max_bytes): (i64, usize),
        cuts: u64,
    ) -> Result<bool, ReadError> {
        let file = self.open_for_read(window.segment, read.next, cuts)?;
        let mut reader = FrameReader::new(&*file, &*self.framing, window.limit, LOOK_BLOCK);
        let mut start = window.from;
        let mut frame = loop {
            match self.header(&mut reader, start, (read.next, cuts))? {
                None => {
                    // Compaction left nothing at or past the wanted offset in this segment.
                    read.next = window.limit_offset;
                    return Ok(true);
                }
                Some(frame) if frame.last >= read.next => break frame,
                Some(frame) => start += frame.len as u64,
            }
        };
        let budget = max_bytes.saturating_sub(read.bytes) as u64;
        let mut position = start;
        let first_of_all = read.bytes == 0;
        let fits = |position: u64, frame: &Frame| {
            let within = position + frame.len as u64 - start <= budget || (position == start && first_of_all);
            within && frame.last < until
        };
        if window.limit - start <= budget && window.limit_offset <= until {
            position = window.limit;
            read.next = window.limit_offset;
        } else {
            if let Some(jump) = window.jump.filter(|jump| *jump > start) {
                position = jump;
                if let Some(next) = self.header(&mut reader, position, (read.next, cuts))? {
                    read.next = next.base;
                    frame = next;
                }
            }
            while fits(position, &frame) {
                position += frame.len as u64;
                read.next = frame.last + 1;
                match self.header(&mut reader, position, (read.next, cuts))? {
                    Some(next) => frame = next,
                    None => {
                        read.next = window.limit_offset;
                        break;
                    }
                }
            }
        }
        let len = usize::try_from(position - start).expect("a read is bounded by its budget or one frame");
        if len > 0 {
            read.chunks.push(Chunk::File(FileRange { file, pos: start, len }));
            read.bytes += len;
        }
        let mut state = self.state.locked();
        if state.truncations == cuts
            && let Some(segment) = state.segment(window.segment)
        {
            segment.hints = [(read.next, position), segment.hints[0]];
        }
        Ok(position == window.limit)
    }

    fn header(
        &self,
        reader: &mut FrameReader<'_>,
        position: u64,
        near: (i64, u64),
    ) -> Result<Option<Frame>, ReadError> {
        reader.header(position).map_err(|walk| self.broken(walk, near))
    }

    /// What is wrong near an offset, looked at after so many cuts.
    fn broken(&self, walk: Walk, (near, cuts): (i64, u64)) -> ReadError {
        match walk {
            Walk::Io(error) => ReadError::Io(error),
            Walk::Bad(position) => {
                let mut state = self.state.locked();
                if state.truncations != cuts {
                    return ReadError::OutOfRange { start: state.start, end: state.end };
                }
                self.note_damage(&mut state);
                tracing::error!(journal = %self.id, position, near, "a frame is not what was written");
                ReadError::Damaged { id: self.id, offset: near }
            }
        }
    }

    fn open_for_read(&self, segment: i64, near: i64, cuts: u64) -> Result<Arc<dyn DiskFile>, ReadError> {
        match self.segment_file(segment, false) {
            Ok(file) => Ok(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut state = self.state.locked();
                if state.segment(segment).is_none() || state.truncations != cuts {
                    // Dropped since we looked: the log starts later now, or ends earlier.
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
                let young = |segment: &&segment::Segment| {
                    segment.image.max_timestamp_ms >= ts_ms && segment.image.end > from
                };
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

    /// Walks whole frames, verified, without holding the lock; `f` answers whether to go on.
    pub fn for_each_frame(
        &self,
        from: i64,
        until: i64,
        f: &mut dyn FnMut(&Frame, &[u8]) -> bool,
    ) -> Result<(), ReadError> {
        let mut next = from.max(self.start());
        while next < until.min(self.end()) {
            let cuts = self.cuts();
            let read = self.read(next, until, READ_BLOCK)?;
            if read.bytes == 0 && read.next <= next {
                return Ok(());
            }
            // A large frame in memory comes in two chunks: what is left over goes in front of the next one.
            let mut carry: Vec<u8> = Vec::new();
            for chunk in &read.chunks {
                let bytes = chunk.bytes()?;
                let whole = if carry.is_empty() {
                    &bytes[..]
                } else {
                    carry.extend_from_slice(&bytes);
                    &carry
                };
                let (used, go_on) = self.walk_bytes(whole, (next, cuts), f)?;
                if !go_on {
                    return Ok(());
                }
                carry = whole[used..].to_vec();
            }
            if !carry.is_empty() {
                return Err(self.broken(Walk::Bad(0), (next, cuts)));
            }
            next = read.next;
        }
        Ok(())
    }

    /// Answers how many bytes were whole frames, and whether to go on.
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
            let Some(frame) = peeked else { return Err(self.broken(Walk::Bad(0), near)) };
            let Some(whole) = rest.get(..frame.len) else { break };
            if !self.framing.verify(whole) {
                return Err(self.broken(Walk::Bad(0), (frame.base, near.1)));
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
            let cuts = self.cuts();
            let read = self.read(next, until, READ_BLOCK)?;
            if read.bytes == 0 && read.next <= next {
                return Ok(());
            }
            let mut inside = 0;
            for (at, chunk) in read.chunks.iter().enumerate() {
                let go_on = match chunk {
                    Chunk::File(range) => self.walk_headers(range, (next, cuts), f)?,
                    Chunk::Mem(bytes) if inside > 0 => {
                        inside -= bytes.len();
                        true
                    }
                    Chunk::Mem(bytes) => match self.peek_across(bytes, read.chunks.get(at + 1)) {
                        None => return Err(self.broken(Walk::Bad(0), (next, cuts))),
                        Some(frame) => {
                            inside = frame.len.saturating_sub(bytes.len());
                            f(&frame)
                        }
                    },
                };
                if !go_on {
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
        let mut reader = FrameReader::new(&*range.file, &*self.framing, limit, LOOK_BLOCK);
        while let Some(frame) = self.header(&mut reader, position, near)? {
            if !f(&frame) {
                return Ok(false);
            }
            position += frame.len as u64;
        }
        Ok(true)
    }

    /// Verifies sealed frames from `from` on, about `max_bytes` of them in all of `report`. Answers where to go on,
    /// `None` at the end of the sealed part.
    pub(crate) fn scrub(&self, from: i64, max_bytes: u64, report: &mut ScrubReport) -> Option<i64> {
        let (from, until) = {
            let state = self.state.locked();
            let sealed = state.segments.last().map_or(state.start, |active| active.image.base);
            (from.max(state.start), sealed)
        };
        if from >= until {
            return None;
        }
        let mut next = from;
        let walked = self.for_each_frame(from, until, &mut |frame, _| {
            report.bytes += frame.len as u64;
            report.frames += 1;
            next = frame.last + 1;
            report.bytes < max_bytes
        });
        match walked {
            Ok(()) if next == from => None,
            Ok(()) => Some(next),
            Err(ReadError::OutOfRange { .. }) => None,
            Err(error) => {
                report.damage.push(format!("journal {}: {error}", self.id));
                // Past the segment that holds the damage.
                let state = self.state.locked();
                state.segment_at(next).map(|at| state.segments[at].image.end.max(next + 1))
            }
        }
    }

    /// Makes the index of a segment complete: from its files where they fit, from the frames for the rest.
    pub(super) fn load_index(&self, base: i64) -> Result<(), ReadError> {
        self.load_index_uncut(base, self.cuts())
    }

    fn load_index_uncut(&self, base: i64, cuts: u64) -> Result<(), ReadError> {
        let (until, len) = {
            let mut state = self.state.locked();
            let Some(segment) = state.segment(base) else { return Ok(()) };
            if segment.index_complete {
                return Ok(());
            }
            let known = segment.index.offsets.first().map_or(segment.image.len, |first| u64::from(first.1));
            (known, segment.image.len)
        };
        let (mut index, covered) = saved_index(&*self.store.disk, &self.folder_path(), base)
            .filter(|(_, covered)| *covered <= len)
            .unwrap_or_default();
        let saved = covered;
        let file = self.open_for_read(base, base, cuts)?;
        let mut reader = FrameReader::new(&*file, &*self.framing, until, READ_BLOCK / 4);
        // Take up from the last entry: what lies between it and the covered length adds nothing.
        let mut position = index.last_position().map_or(HEADER, u64::from);
        let mut max_before = index.times.last().map_or(-1, |last| last.0);
        while position < until {
            let Some(frame) = self.header(&mut reader, position, (base, cuts))? else { break };
            let relative = u32::try_from(frame.base - base).unwrap_or(u32::MAX);
            let at = u32::try_from(position).unwrap_or(u32::MAX);
            if index.offsets.last().is_none_or(|last| last.1 < at) {
                index.note(relative, at, max_before);
            }
            max_before = max_before.max(frame.max_timestamp_ms);
            position += frame.len as u64;
        }
        let mut state = self.state.locked();
        if state.truncations != cuts {
            // The index speaks of frames that are gone; whoever still wants one looks again.
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

impl State {
    fn check_range(&self, from: i64) -> Result<(), ReadError> {
        if from < self.start || from > self.end {
            return Err(ReadError::OutOfRange { start: self.start, end: self.end });
        }
        Ok(())
    }

    /// Where the frame that contains `from` is.
    fn source(&mut self, from: i64, until: i64, budget: usize) -> Source {
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
        let (limit, limit_offset) = match ring {
            Some((base, position, offset)) if base == image.base && from < offset => (position, offset),
            _ => (image.len, image.end),
        };
        let hint = segment.hints.iter().find(|hint| hint.0 == from).map(|hint| hint.1);
        let relative = |offset: i64| u32::try_from(offset - image.base).unwrap_or(u32::MAX);
        let floor = || segment.index.floor(relative(from.max(image.base))).map_or(HEADER, u64::from);
        let start = hint.unwrap_or_else(floor);
        let far = u32::try_from(start.saturating_add(budget as u64).min(limit - 1)).unwrap_or(u32::MAX);
        let jump =
            segment.index.floor_at(far, relative(until.saturating_sub(1).max(image.base))).map(u64::from);
        Source::File(Window { segment: image.base, from: start, jump, limit, limit_offset })
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
