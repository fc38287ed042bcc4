//! Cutting a journal at either end: truncation, reset, log start, retention, age rolls, elections, deletion.
//!
//! Every operation here is first a durable record, then a change of files, so that a crash in between is finished
//! by recovery. Truncation and reset need a second record once the cut is durable: later appends of the same offsets must
//! not be mistaken for what was cut. None of it blocks readers.

use std::io;
use std::sync::atomic::Ordering;

use super::{Epochs, Journal, RECENT_COST, State};
use crate::codec::Locked;
use crate::commit::{Kind, Record, Staged};
use crate::segment::{self, FrameReader, HEADER, Segment, Walk};
use crate::types::{JournalError, ReadError, Retain};

/// Where a truncation cuts.
#[derive(Clone, Copy)]
struct Cut {
    segment: i64,
    position: u64,
    end: i64,
    /// Nothing at or past the log start is left: all segments go and an empty one begins there.
    fresh: bool,
    /// The log start moves there as well, whatever it was; with the epoch in force there.
    reset: Option<i32>,
}

impl Cut {
    fn at(segment: i64, position: u64, end: i64) -> Self {
        Self { segment, position, end, fresh: false, reset: None }
    }
}

impl Journal {
    /// Drops everything at or past `to`; durable when it returns. A frame that contains `to` goes as a whole.
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
        let cut = self.truncate_quietly(to);
        self.state.locked().truncating = false;
        cut
    }

    /// The truncation itself; appends are refused meanwhile.
    fn truncate_quietly(&self, to: i64) -> Result<(), JournalError> {
        self.store.wait_for(|| self.pending.load(Ordering::Acquire) == 0)?;
        let _files = self.files.locked();
        let mut cut = self.find_cut(to)?;
        let start = self.start();
        if cut.end < start {
            // The frame that holds the log start goes: its earlier offsets are not there to be appended again.
            cut = Cut { segment: start, position: HEADER, end: start, fresh: true, reset: None };
        }
        let mut record = Record::control(Kind::Truncate, self.id, cut.end);
        record.epoch = i32::from(cut.fresh);
        record.segment = cut.segment;
        record.position = cut.position;
        self.log(record)?;
        if let Err(error) = self.cut(cut) {
            self.store.fatal("cutting a segment", &error);
            return Err(error.into());
        }
        self.log(Record::control(Kind::TruncateDone, self.id, cut.end))
    }

    /// Drops the whole log and begins an empty one at `start`, whatever was there; durable when it returns. `last_epoch` is
    /// the epoch in force there, if one is known. A reader in the middle of it finds that its offset is out of range.
    pub fn reset(&self, start: i64, last_epoch: Option<i32>) -> Result<(), JournalError> {
        assert!(start >= 0, "offsets are not negative");
        {
            let mut state = self.state.locked();
            if state.deleted {
                return Err(JournalError::Closed);
            }
            state.truncating = true;
        }
        let done = self.reset_quietly(start, last_epoch.unwrap_or(-1));
        self.state.locked().truncating = false;
        done
    }

    fn reset_quietly(&self, start: i64, epoch: i32) -> Result<(), JournalError> {
        self.store.wait_for(|| self.pending.load(Ordering::Acquire) == 0)?;
        let _files = self.files.locked();
        let mut record = Record::control(Kind::Reset, self.id, start);
        record.epoch = epoch;
        record.segment = start;
        record.position = HEADER;
        self.log(record)?;
        let cut = Cut { segment: start, position: HEADER, end: start, fresh: true, reset: Some(epoch) };
        if let Err(error) = self.cut(cut) {
            self.store.fatal("dropping a log", &error);
            return Err(error.into());
        }
        self.log(Record::control(Kind::TruncateDone, self.id, start))
    }

    fn log(&self, record: Record) -> Result<(), JournalError> {
        self.introduce()?;
        let staged =
            Staged { record, payload: Default::default(), payload_crc: 0, journal: None, done: None };
        self.store.log_and_wait(self.lane(), staged)
    }

    fn find_cut(&self, to: i64) -> Result<Cut, JournalError> {
        let (segment, limit) = {
            let state = self.state.locked();
            if let Some(front) = state.recent.front().filter(|front| front.base <= to) {
                let at = state.recent.partition_point(|recent| recent.last < to);
                if let Some(recent) = state.recent.get(at) {
                    let end = recent.base.min(to).max(front.base);
                    return Ok(Cut::at(recent.segment, recent.position, end));
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
                return Ok(Cut::at(segment, HEADER, to));
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
                Ok(Some(frame)) => return Ok(Cut::at(segment, position, frame.base.min(to))),
                Ok(None) => return Ok(Cut::at(segment, position, to)),
                Err(Walk::Io(error)) => return Err(error.into()),
                Err(Walk::Bad(_)) => return Err(JournalError::Damaged),
            }
        }
    }

    /// Cuts memory and files.
    fn cut(&self, cut: Cut) -> io::Result<()> {
        let (dropped, exists, position) = {
            let mut state = self.state.locked();
            state.truncations += 1;
            self.cut_ring(&mut state, if cut.fresh { i64::MIN } else { cut.end });
            let kept = |segment: &Segment| !cut.fresh && segment.image.base <= cut.segment;
            let keep = state.segments.partition_point(kept);
            let dropped: Vec<Segment> = state.segments.drain(keep..).collect();
            if cut.fresh {
                state.segments.push(Segment::new(cut.segment, self.store.clock.wall_ms()));
            }
            let active = state.segments.last_mut().expect("the cut is in a segment");
            active.index.cut(u32::try_from(cut.position).unwrap_or(u32::MAX));
            active.image.len = cut.position;
            active.image.end = cut.end;
            active.index_saved = 0;
            active.allocated = 0;
            active.hints = [(-1, 0); 2];
            active.verified.cut(cut.position);
            let exists = active.exists;
            state.end = cut.end;
            state.epochs.truncate(cut.end);
            state.snapshot = state.snapshot.take().filter(|snapshot| snapshot.0 <= cut.end);
            if let Some(epoch) = cut.reset {
                state.start = cut.end;
                state.epochs = Epochs::default();
                state.epochs.note(epoch, cut.end);
                state.snapshot = None;
                // Whatever was damaged is gone, and the node hears of that as well.
                state.unusable = false;
                if std::mem::take(&mut state.damaged) {
                    self.store.note_damage();
                }
                self.durable.store(cut.end, Ordering::Release);
            }
            self.end.store(cut.end, Ordering::Release);
            self.durable.fetch_min(cut.end, Ordering::AcqRel);
            (dropped, exists, cut.position)
        };
        self.remove_index(cut.segment)?;
        if exists {
            let file = self.segment_file(cut.segment, false)?;
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
        self.recount_timestamps(cut.segment)
    }

    fn cut_ring(&self, state: &mut State, end: i64) {
        let mut freed = 0;
        while state.recent.back().is_some_and(|recent| recent.base >= end) {
            freed += state.recent.pop_back().map_or(0, |recent| recent.len() + RECENT_COST);
        }
        state.written = state.written.min(state.recent.len());
        self.store.ring_bytes.fetch_sub(freed, Ordering::Relaxed);
    }

    /// The greatest timestamp of a segment that lost its tail.
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

    /// Moves the log start up; durable when it returns. Whole segments below it are dropped.
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
            // What is not durable yet may still be on its way into its segment: that goes the next time.
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
            // A large frame may have been written ahead of the small ones that just went.
            state.advance_written();
            self.store.ring_bytes.fetch_sub(freed, Ordering::Relaxed);
        }
        dropped
    }

    fn remove_segment(&self, segment: &Segment) -> io::Result<()> {
        if segment.exists {
            self.store.remove_if_there(&segment::path_of(&self.folder_path(), segment.image.base, "log"))?;
        }
        Ok(())
    }

    pub(super) fn remove_index(&self, base: i64) -> io::Result<()> {
        let folder = self.folder_path();
        self.store.remove_if_there(&segment::path_of(&folder, base, "index"))?;
        self.store.remove_if_there(&segment::path_of(&folder, base, "timeindex"))
    }

    /// Drops whole sealed segments by age and size. Answers the log start afterwards.
    pub fn retain(&self, retain: Retain) -> Result<i64, JournalError> {
        let wanted = {
            let state = self.state.locked();
            let sealed = state.segments.len().saturating_sub(1);
            let mut bytes: u64 = state.segments.iter().map(|segment| segment.image.len).sum();
            let mut start = state.start;
            for segment in &state.segments[..sealed] {
                let image = &segment.image;
                // Frames without a time are as old as their segment.
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

    /// Takes note that `epoch` starts at `start`, also without data. Durable with the next group commit, and before
    /// any later append.
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

    /// Refuses appends from now on, waits for those under way, and logs the deletion.
    pub(crate) fn begin_delete(&self) -> Result<bool, JournalError> {
        let known = {
            let mut state = self.state.locked();
            state.deleted = true;
            state.known
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
