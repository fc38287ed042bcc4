//! Truncation, reset, log start, retention, rolls by age, leader epochs, deletion.
//!
//! Every operation here is first a durable record, then a change of files, so that recovery finishes it after a crash
//! in between. Truncation and reset need a second record once the truncation is durable: later appends of the same
//! offsets must not be mistaken for the truncated ones. None of it blocks readers.

use std::io;
use std::sync::atomic::Ordering;

use super::{Epochs, Journal, RECENT_COST, State};
use crate::codec::Locked;
use crate::commit::{Kind, Record, Staged};
use crate::segment::{self, FrameReader, HEADER, Segment, WalkError};
use crate::types::{JournalError, ReadError, Retain};

/// Where a truncation ends the log.
#[derive(Clone, Copy)]
struct TruncationPoint {
    segment: i64,
    position: u64,
    end: i64,
    /// Nothing at or past the log start is left: all segments are dropped and an empty one starts there.
    fresh: bool,
    /// The log start moves there as well, whatever it was; with the epoch in force there.
    reset: Option<i32>,
}

impl TruncationPoint {
    fn at(segment: i64, position: u64, end: i64) -> Self {
        Self { segment, position, end, fresh: false, reset: None }
    }
}

impl Journal {
    /// Truncates everything at or past `to`; durable when it returns. A frame that contains `to` is dropped as a whole.
    pub fn truncate(&self, to: i64) -> Result<(), JournalError> {
        {
            let mut state = self.state.locked();
            if state.deleted {
                return Err(JournalError::Closed);
            }
            if to < state.start {
                return Err(JournalError::OutOfRange { start: state.start, end: state.end });
            }
            if to >= state.end {
                return Ok(());
            }
            state.truncating = true;
        }
        let outcome = self.truncate_idle(to);
        self.state.locked().truncating = false;
        outcome
    }

    /// The truncation itself; appends are refused meanwhile.
    fn truncate_idle(&self, to: i64) -> Result<(), JournalError> {
        self.store.wait_for(|| self.pending.load(Ordering::Acquire) == 0)?;
        let _files = self.files.locked();
        let mut point = self.find_truncation_point(to)?;
        let start = self.start();
        if point.end < start {
            // The frame that holds the log start is dropped: its earlier offsets cannot be appended again.
            point =
                TruncationPoint { segment: start, position: HEADER, end: start, fresh: true, reset: None };
        }
        let mut record = Record::control(Kind::Truncate, self.id, point.end);
        record.epoch = i32::from(point.fresh);
        record.segment = point.segment;
        record.position = point.position;
        self.log(record)?;
        if let Err(error) = self.apply_truncation(point) {
            self.store.fatal("truncating a segment", &error);
            return Err(error.into());
        }
        self.log(Record::control(Kind::TruncateDone, self.id, point.end))
    }

    /// Drops the whole log and starts an empty one at `start`; durable when it returns. `last_epoch` is the epoch in
    /// force there, if known. A concurrent reader gets an out-of-range error.
    pub fn reset(&self, start: i64, last_epoch: Option<i32>) -> Result<(), JournalError> {
        assert!(start >= 0, "offsets are not negative");
        {
            let mut state = self.state.locked();
            if state.deleted {
                return Err(JournalError::Closed);
            }
            state.truncating = true;
        }
        let done = self.reset_idle(start, last_epoch.unwrap_or(-1));
        self.state.locked().truncating = false;
        done
    }

    fn reset_idle(&self, start: i64, epoch: i32) -> Result<(), JournalError> {
        self.store.wait_for(|| self.pending.load(Ordering::Acquire) == 0)?;
        let _files = self.files.locked();
        let mut record = Record::control(Kind::Reset, self.id, start);
        record.epoch = epoch;
        record.segment = start;
        record.position = HEADER;
        self.log(record)?;
        let point =
            TruncationPoint { segment: start, position: HEADER, end: start, fresh: true, reset: Some(epoch) };
        if let Err(error) = self.apply_truncation(point) {
            self.store.fatal("dropping a log", &error);
            return Err(error.into());
        }
        self.log(Record::control(Kind::TruncateDone, self.id, start))
    }

    fn log(&self, record: Record) -> Result<(), JournalError> {
        self.log_create()?;
        let staged =
            Staged { record, payload: Default::default(), payload_crc: 0, journal: None, done: None };
        self.store.log_and_wait(self.lane(), staged)
    }

    fn find_truncation_point(&self, to: i64) -> Result<TruncationPoint, JournalError> {
        let (segment, limit) = {
            let state = self.state.locked();
            if let Some(front) = state.recent.front().filter(|front| front.base <= to) {
                let at = state.recent.partition_point(|recent| recent.last < to);
                if let Some(recent) = state.recent.get(at) {
                    let end = recent.base.min(to).max(front.base);
                    return Ok(TruncationPoint::at(recent.segment, recent.position, end));
                }
            }
            let at = state
                .segment_at(to)
                .ok_or(JournalError::OutOfRange { start: state.start, end: state.end })?;
            let image = &state.segments[at].image;
            let written = match state.recent.front() {
                Some(front) if front.segment == image.base => front.position,
                _ => image.len,
            };
            (image.base, written)
        };
        let file = match self.segment_file(segment, false) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound && limit <= HEADER => {
                return Ok(TruncationPoint::at(segment, HEADER, to));
            }
            Err(error) => return Err(error.into()),
        };
        if self.load_index(segment).is_err() {
            return Err(JournalError::Damaged);
        }
        let from = {
            let mut state = self.state.locked();
            let relative = u32::try_from(to - segment).unwrap_or(u32::MAX);
            let floor = state.segment(segment).and_then(|segment| segment.index.floor(relative));
            floor.map_or(HEADER, u64::from)
        };
        let mut reader = FrameReader::new(&*file, &*self.framing, limit, 16 << 10);
        let mut position = from;
        loop {
            match reader.frame(position).map(|found| found.map(|(frame, _)| frame)) {
                Ok(Some(frame)) if frame.last < to => position += frame.len as u64,
                Ok(Some(frame)) => return Ok(TruncationPoint::at(segment, position, frame.base.min(to))),
                Ok(None) => return Ok(TruncationPoint::at(segment, position, to)),
                Err(WalkError::Io(error)) => return Err(error.into()),
                Err(WalkError::BadFrame(_)) => return Err(JournalError::Damaged),
            }
        }
    }

    /// Truncates memory and files.
    fn apply_truncation(&self, point: TruncationPoint) -> io::Result<()> {
        let (dropped, exists, position) = {
            let mut state = self.state.locked();
            state.truncations += 1;
            self.truncate_ring(&mut state, if point.fresh { i64::MIN } else { point.end });
            let kept = |segment: &Segment| !point.fresh && segment.image.base <= point.segment;
            let keep = state.segments.partition_point(kept);
            let dropped: Vec<Segment> = state.segments.drain(keep..).collect();
            if point.fresh {
                state.segments.push(Segment::new(point.segment, self.store.clock.wall_ms()));
            }
            let active = state.segments.last_mut().expect("the point is in a segment");
            active.index.truncate(u32::try_from(point.position).unwrap_or(u32::MAX));
            active.image.len = point.position;
            active.image.end = point.end;
            active.index_saved = 0;
            active.allocated = 0;
            active.hints = [(-1, 0); 2];
            active.verified.truncate(point.position);
            let exists = active.exists;
            state.end = point.end;
            state.epochs.truncate(point.end);
            state.snapshot = state.snapshot.take().filter(|snapshot| snapshot.0 <= point.end);
            if let Some(epoch) = point.reset {
                state.start = point.end;
                state.epochs = Epochs::default();
                state.epochs.note(epoch, point.end);
                state.snapshot = None;
                // The damage is gone, and the node is notified of that as well.
                state.unusable = false;
                if std::mem::take(&mut state.damaged) {
                    self.store.note_damage();
                }
                self.durable.store(point.end, Ordering::Release);
            }
            self.end.store(point.end, Ordering::Release);
            self.durable.fetch_min(point.end, Ordering::AcqRel);
            (dropped, exists, point.position)
        };
        self.remove_index(point.segment)?;
        if exists {
            let file = self.segment_file(point.segment, false)?;
            file.set_len(position)?;
            file.sync_data()?;
        }
        for segment in &dropped {
            self.remove_segment(segment)?;
            self.remove_index(segment.image.base)?;
        }
        let folder = self.folder_path();
        if self.store.disk.stat(&folder)?.is_some() {
            self.store.disk.sync_dir(&folder)?;
        }
        self.recount_timestamps(point.segment)
    }

    fn truncate_ring(&self, state: &mut State, end: i64) {
        let mut freed = 0;
        while state.recent.back().is_some_and(|recent| recent.base >= end) {
            freed += state.recent.pop_back().map_or(0, |recent| recent.len() + RECENT_COST);
        }
        state.written = state.written.min(state.recent.len());
        self.store.ring_bytes.fetch_sub(freed, Ordering::Relaxed);
    }

    /// Recomputes the greatest timestamp of a truncated segment.
    fn recount_timestamps(&self, base: i64) -> io::Result<()> {
        let (start, end) = {
            let mut state = self.state.locked();
            let Some(segment) = state.segment(base) else { return Ok(()) };
            segment.image.max_timestamp_ms = -1;
            segment.image.max_timestamp_base = base;
            (base.max(state.start), state.end)
        };
        let mut max = (-1, base);
        let walked = self.for_each_header(start, end, &mut |frame| {
            if frame.max_timestamp_ms > max.0 {
                max = (frame.max_timestamp_ms, frame.base);
            }
            true
        });
        match walked {
            Err(ReadError::Io(error)) => return Err(error),
            Err(ReadError::OutOfRange { .. } | ReadError::Damaged { .. }) | Ok(()) => {}
        }
        if let Some(segment) = self.state.locked().segment(base) {
            (segment.image.max_timestamp_ms, segment.image.max_timestamp_base) = max;
        }
        Ok(())
    }

    /// Advances the log start offset; durable when it returns. Whole segments below it are dropped.
    pub fn set_start(&self, start: i64) -> Result<(), JournalError> {
        {
            let state = self.state.locked();
            if state.deleted {
                return Err(JournalError::Closed);
            }
            if start > state.end {
                return Err(JournalError::OutOfRange { start: state.start, end: state.end });
            }
            if start <= state.start {
                return Ok(());
            }
        }
        let _files = self.files.locked();
        {
            // A truncation may have come first; none can begin now.
            let state = self.state.locked();
            if start > state.end {
                return Err(JournalError::OutOfRange { start: state.start, end: state.end });
            }
        }
        self.log(Record::control(Kind::Start, self.id, start))?;
        let dropped = {
            let mut state = self.state.locked();
            state.start = state.start.max(start);
            state.epochs.set_start(start);
            // Frames that are not durable yet may still be on their way into their segment: they are dropped the next
            // time.
            self.drop_segments(&mut state, start.min(self.durable_end()))
        };
        for segment in &dropped {
            self.remove_segment(segment)?;
            self.remove_index(segment.image.base)?;
        }
        if dropped.iter().any(|segment| segment.exists) {
            self.store.note_dirty_dir(self.folder_path());
        }
        Ok(())
    }

    fn drop_segments(&self, state: &mut State, below: i64) -> Vec<Segment> {
        let sealed = state.segments.len().saturating_sub(1);
        let count = state.segments[..sealed].partition_point(|segment| segment.image.end <= below);
        let dropped: Vec<Segment> = state.segments.drain(..count).collect();
        if let Some(first) = state.segments.first().map(|segment| segment.image.base) {
            let mut freed = 0;
            while state.recent.front().is_some_and(|recent| recent.segment < first) {
                freed += state.recent.pop_front().map_or(0, |recent| recent.len() + RECENT_COST);
                state.written = state.written.saturating_sub(1);
            }
            // A large frame may have been written ahead of the small ones that were just dropped.
            state.advance_written();
            self.store.ring_bytes.fetch_sub(freed, Ordering::Relaxed);
        }
        dropped
    }

    fn remove_segment(&self, segment: &Segment) -> io::Result<()> {
        if segment.exists {
            self.store.remove_if_exists(&segment::path_of(&self.folder_path(), segment.image.base, "log"))?;
        }
        Ok(())
    }

    pub(super) fn remove_index(&self, base: i64) -> io::Result<()> {
        let folder = self.folder_path();
        self.store.remove_if_exists(&segment::path_of(&folder, base, "index"))?;
        self.store.remove_if_exists(&segment::path_of(&folder, base, "timeindex"))
    }

    /// Drops whole sealed segments by age and size. Returns the log start offset afterwards.
    pub fn retain(&self, retain: Retain) -> Result<i64, JournalError> {
        let wanted = {
            let state = self.state.locked();
            let sealed = state.segments.len().saturating_sub(1);
            let mut bytes: u64 = state.segments.iter().map(|segment| segment.image.len).sum();
            let mut start = state.start;
            for segment in &state.segments[..sealed] {
                let image = &segment.image;
                // Frames without a timestamp are as old as their segment.
                let newest =
                    if image.max_timestamp_ms < 0 { segment.created_ms } else { image.max_timestamp_ms };
                let old = retain.older_than_ms.is_some_and(|limit| newest < limit);
                let large = retain.max_bytes.is_some_and(|limit| bytes - image.len >= limit);
                if image.end > retain.below || !(old || large) {
                    break;
                }
                bytes -= image.len;
                start = start.max(image.end);
            }
            start
        };
        self.set_start(wanted)?;
        Ok(self.start())
    }

    /// Seals the active segment if its first append is older than this wall-clock time.
    pub fn roll_if_older(&self, than_ms: i64) {
        let mut state = self.state.locked();
        let end = state.end;
        if state.segments.last().is_some_and(|active| !active.is_empty() && active.created_ms < than_ms) {
            state.segments.push(Segment::new(end, self.store.clock.wall_ms()));
        }
    }

    /// Records that `epoch` starts at `start`, also without data. Durable with the next group commit, and before any
    /// later append.
    pub fn note_epoch(&self, epoch: i32, start: i64) {
        let mut state = self.state.locked();
        if state.deleted || !state.epochs.note(epoch, start) {
            return;
        }
        let create = self.create_record(&mut state);
        let mut record = Record::control(Kind::Epoch, self.id, start);
        record.epoch = epoch;
        let staged =
            Staged { record, payload: Default::default(), payload_crc: 0, journal: None, done: None };
        self.store.stage.push(self.lane(), create.into_iter().chain([staged]));
    }

    /// Refuses appends from now on, waits for pending ones, and logs the deletion.
    pub(crate) fn begin_delete(&self) -> Result<bool, JournalError> {
        let known = {
            let mut state = self.state.locked();
            state.deleted = true;
            state.create_staged
        };
        self.store.wait_for(|| self.pending.load(Ordering::Acquire) == 0)?;
        let _files = self.files.locked();
        if known {
            let record = Record::control(Kind::Delete, self.id, 0);
            let staged =
                Staged { record, payload: Default::default(), payload_crc: 0, journal: None, done: None };
            self.store.log_and_wait(self.lane(), staged)?;
        }
        let mut state = self.state.locked();
        let cost: usize = state.recent.iter().map(|recent| recent.len() + RECENT_COST).sum();
        self.store.ring_bytes.fetch_sub(cost, Ordering::Relaxed);
        state.recent.clear();
        state.written = 0;
        Ok(known)
    }
}
