//! Appends.
//!
//! Three ways, all of which make the frame visible at once and durable later:
//! - small frames are copied once into the commit log's staging chunk, which is also the ring;
//! - large frames go to the bypass thread, which writes and syncs their segment and then logs a pointer record;
//! - under `Replicated` the frame is written straight into its segment, on the caller's thread, and is durable then.
//!
//! A journal's records enter the commit log in offset order: while one of its large frames is in the bypass, smaller
//! ones queue behind it. A failed append leaves the journal unchanged.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::{Journal, RECENT_COST, Recent, State};
use crate::codec::Locked;
use crate::commit::{Kind, Record, Staged};
use crate::disk::DiskFile;
use crate::framing::Frame;
use crate::store::BypassItem;
use crate::types::{Append, AppendError, Durability, JournalError};

impl Journal {
    /// Appends a frame; visible to `read` immediately, durable later.
    ///
    /// The caller serialises appends of one journal and assigns offsets: `base` must equal `end()`. Never waits for the
    /// disk, with one exception: the very first Replicated append of a journal waits for one group commit. On `Busy`
    /// and `Full` nothing was appended, and the caller may retry.
    pub fn append(&self, append: Append<'_>) -> Result<(), AppendError> {
        self.store.check_accepting(self.priority.load(Ordering::Relaxed))?;
        let len = append.prefix.len() + append.body.len();
        let frame = Frame {
            len,
            base: append.base,
            last: append.last,
            epoch: append.epoch,
            max_timestamp_ms: append.max_timestamp_ms,
        };
        assert!(frame.last >= frame.base && len > 0, "a frame holds at least one offset and one byte");
        let max = self.framing.max_len();
        if len > max {
            return Err(AppendError::TooLarge { len, max });
        }
        if self.replicated.load(Ordering::Relaxed) {
            return self.append_replicated(&append, &frame);
        }
        let small = len < self.bypass_from();
        let crc = if small { crc_of(&append) } else { 0 };
        let mut state = self.accept(&frame)?;
        if small {
            self.append_small(&mut state, &append, &frame, crc);
        } else {
            self.append_large(&mut state, &append, &frame);
        }
        Ok(())
    }

    fn bypass_from(&self) -> usize {
        // Priority journals must not wait behind large writes: their frames bypass only if the commit log cannot take
        // them.
        if self.priority.load(Ordering::Relaxed) { self.store.max_record } else { self.store.bypass_from }
    }

    fn accept(&self, frame: &Frame) -> Result<MutexGuard<'_, State>, AppendError> {
        let state = self.state.locked();
        if state.deleted {
            Err(AppendError::Closed)
        } else if state.damaged {
            Err(AppendError::Damaged)
        } else if state.truncating {
            Err(AppendError::Busy)
        } else if state.end != frame.base {
            Err(AppendError::NotNext { expected: state.end })
        } else {
            Ok(state)
        }
    }

    fn append_small(&self, state: &mut State, append: &Append<'_>, frame: &Frame, crc: u32) {
        let parts = [append.prefix, &append.body[..]];
        let record = self.assign_position(state, frame, Kind::Frame);
        let create = self.create_record(state);
        let journal = self.weak_self.upgrade();
        let waits = state.in_bypass > 0 || state.replicated_writes != state.replicated_synced;
        self.pending.fetch_add(1, Ordering::AcqRel);
        let mut copied = Bytes::new();
        let staged = |payload| Staged { record, payload, payload_crc: crc, journal, done: None };
        if waits {
            copied = self.store.stage.copy(parts);
            self.enter_bypass(state, create, staged(copied.clone()), None);
        } else {
            self.store.stage.push_frame(self.lane(), parts, |bytes| {
                copied = bytes.clone();
                [create, Some(staged(bytes))]
            });
        }
        self.finish(state, frame, &record, Bytes::new(), copied);
    }

    fn append_large(&self, state: &mut State, append: &Append<'_>, frame: &Frame) {
        let head = self.store.stage.copy([append.prefix, &[]]);
        let record = self.assign_position(state, frame, Kind::Pointer);
        let create = self.create_record(state);
        let payload = Bytes::new();
        let staged =
            Staged { record, payload, payload_crc: 0, journal: self.weak_self.upgrade(), done: None };
        self.pending.fetch_add(1, Ordering::AcqRel);
        self.enter_bypass(state, create, staged, Some((head.clone(), append.body.clone())));
        self.finish(state, frame, &record, head, append.body.clone());
    }

    fn enter_bypass(
        &self,
        state: &mut State,
        create: Option<Staged>,
        staged: Staged,
        write: Option<(Bytes, Bytes)>,
    ) {
        let sync_first = state.replicated_writes != state.replicated_synced;
        let journal = self.weak_self.upgrade().expect("the caller holds the journal");
        state.in_bypass += 1;
        let item = BypassItem { journal, create, staged, write, sync_first };
        self.store.push_bypass(item);
    }

    /// Assigns the frame its position in a segment.
    fn assign_position(&self, state: &mut State, frame: &Frame, kind: Kind) -> Record {
        state.roll_for(frame, self.store.clock.wall_ms());
        let active = state.segments.last().expect("a roll leaves an active segment");
        Record {
            kind,
            id: self.id,
            base: frame.base,
            last: frame.last,
            epoch: frame.epoch,
            max_timestamp_ms: frame.max_timestamp_ms,
            segment: active.image.base,
            position: active.image.len,
            len: u32::try_from(frame.len).expect("a frame is under 4 GiB"),
        }
    }

    /// The Create record of the journal, if it is not in the commit log yet.
    pub(super) fn create_record(&self, state: &mut State) -> Option<Staged> {
        if std::mem::replace(&mut state.create_staged, true) {
            return None;
        }
        let mut record = Record::control(Kind::Create, self.id, state.start);
        record.epoch = i32::from(state.durability == Durability::Replicated);
        let payload = Bytes::copy_from_slice(self.folder.as_bytes());
        let payload_crc = crc32c::crc32c(&payload);
        Some(Staged { record, payload, payload_crc, journal: None, done: Some(self.create_durable.clone()) })
    }

    fn finish(&self, state: &mut State, frame: &Frame, record: &Record, head: Bytes, rest: Bytes) {
        let cost = frame.len + RECENT_COST;
        self.store.ring_bytes.fetch_add(cost, Ordering::Relaxed);
        state.recent.push_back(Recent {
            base: frame.base,
            last: frame.last,
            segment: record.segment,
            position: record.position,
            written: false,
            head,
            frame: rest,
        });
        self.advance(state, frame);
    }

    fn advance(&self, state: &mut State, frame: &Frame) {
        state.segments.last_mut().expect("the frame has its segment").push(frame);
        state.epochs.note_frame(frame.epoch, frame.base);
        state.end = frame.last + 1;
        self.end.store(state.end, Ordering::Release);
    }

    fn append_replicated(&self, append: &Append<'_>, frame: &Frame) -> Result<(), AppendError> {
        if !self.create_durable.load(Ordering::Acquire) {
            self.log_create().map_err(|_| AppendError::Closed)?;
        }
        let mut wrote_behind = false;
        loop {
            let mut state = self.accept(frame)?;
            let settled = self.pending.load(Ordering::Acquire) == 0;
            let drained = settled && state.written == state.recent.len();
            if settled && !drained && !std::mem::replace(&mut wrote_behind, true) {
                // The journal was Fsync until now: its ring is written behind here, once.
                drop(state);
                self.write_behind().map_err(|error| self.append_error(error))?;
                continue;
            }
            if state.durability != Durability::Replicated || !drained {
                // Frames of the other mode are still pending: this one follows them through the commit log.
                if frame.len < self.bypass_from() {
                    self.append_small(&mut state, append, frame, crc_of(append));
                } else {
                    self.append_large(&mut state, append, frame);
                }
                return Ok(());
            }
            state.roll_for(frame, self.store.clock.wall_ms());
            let active = state.segments.last_mut().expect("a roll leaves an active segment");
            active.used = true;
            let base = active.image.base;
            match active.file.clone() {
                Some(file) => return self.write_through(&mut state, &*file, append, frame),
                None => drop(state),
            }
            self.segment_file(base, true).map_err(|error| self.append_error(error))?;
        }
    }

    fn write_through(
        &self,
        state: &mut State,
        file: &dyn DiskFile,
        append: &Append<'_>,
        frame: &Frame,
    ) -> Result<(), AppendError> {
        let segment_bytes = state.segment_bytes;
        let active = state.segments.last_mut().expect("the caller has rolled");
        let position = active.image.len;
        let written = active
            .reserve(file, frame.len as u64, segment_bytes)
            .and_then(|()| file.pwritev(position, &[IoSlice::new(append.prefix), IoSlice::new(append.body)]));
        if let Err(error) = written {
            // A part of the frame may be in the file; nothing may follow it there.
            if let Err(error) = file.set_len(position) {
                self.store.fatal("truncating a torn frame", &error);
            }
            return Err(self.append_error(error));
        }
        active.dirty = true;
        state.replicated_writes += 1;
        self.clear_ring(state);
        self.advance(state, frame);
        self.durable.store(state.end, Ordering::Release);
        self.store.note_dirty_bytes(frame.len as u64);
        Ok(())
    }

    /// Empties the ring; everything in it is in segment files.
    pub(super) fn clear_ring(&self, state: &mut State) {
        if !state.recent.is_empty() {
            let cost: usize = state.recent.iter().map(|recent| recent.len() + RECENT_COST).sum();
            self.store.ring_bytes.fetch_sub(cost, Ordering::Relaxed);
            state.recent.clear();
            state.written = 0;
        }
    }

    /// Logs the Create record of this journal and waits until it is durable.
    pub(super) fn log_create(&self) -> Result<(), JournalError> {
        let mut state = self.state.locked();
        if let Some(create) = self.create_record(&mut state) {
            self.store.stage.push(self.lane(), [create]);
        }
        drop(state);
        self.store.wait_for(|| self.create_durable.load(Ordering::Acquire))
    }

    fn append_error(&self, error: io::Error) -> AppendError {
        if error.kind() == io::ErrorKind::StorageFull {
            self.store.on_no_space();
            AppendError::Full
        } else {
            AppendError::Io(error)
        }
    }

    /// On a frame that left the bypass: it is in its segment, and its record is staged.
    pub(crate) fn on_bypass_done(&self, base: i64, wrote: bool) {
        let mut state = self.state.locked();
        state.in_bypass -= 1;
        if wrote {
            state.mark_written(base, base);
        }
    }

    /// Writes a large frame into its segment. Returns the file.
    pub(crate) fn write_large(
        &self,
        record: &Record,
        parts: &(Bytes, Bytes),
    ) -> io::Result<Arc<dyn DiskFile>> {
        let file = self.segment_file(record.segment, true)?;
        file.pwritev(record.position, &[IoSlice::new(&parts.0), IoSlice::new(&parts.1)])?;
        if let Some(segment) = self.state.locked().segment(record.segment) {
            segment.dirty = true;
        }
        self.store.note_dirty_bytes(u64::from(record.len));
        Ok(file)
    }

    /// Syncs Replicated appends that are not synced yet, before an Fsync append may be acknowledged.
    pub(crate) fn sync_replicated(&self) -> io::Result<()> {
        let (bases, writes) = {
            let state = self.state.locked();
            let unsynced = state.segments.iter().filter(|segment| segment.dirty || segment.syncing);
            (unsynced.map(|segment| segment.image.base).collect::<Vec<_>>(), state.replicated_writes)
        };
        for base in bases {
            self.segment_file(base, false)?.sync_data()?;
        }
        let mut state = self.state.locked();
        state.replicated_synced = state.replicated_synced.max(writes);
        Ok(())
    }
}

impl State {
    /// Marks ring entries from `first` to `last` as written and advances the written prefix.
    pub(super) fn mark_written(&mut self, first: i64, last: i64) {
        let from = self.recent.partition_point(|recent| recent.base < first);
        for recent in self.recent.range_mut(from..) {
            if recent.base > last {
                break;
            }
            recent.written = true;
        }
        self.advance_written();
    }

    /// Advances the written prefix over the written entries.
    pub(super) fn advance_written(&mut self) {
        while self.recent.get(self.written).is_some_and(|recent| recent.written) {
            self.written += 1;
        }
    }
}

fn crc_of(append: &Append<'_>) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(append.prefix), append.body)
}
