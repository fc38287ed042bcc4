//! Write-behind: moves frames from the ring into their segment files, and captures the journal for a checkpoint.
//!
//! Only durable frames are written behind: a segment's bytes past the checkpoint are then either in the commit log, or
//! a large frame in the bypass, or a Replicated frame. All of it runs under the journal's `files` lock.

use std::io::{self, IoSlice};
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::{Journal, RECENT_COST, State};
use crate::checkpoint::CheckpointWriter;
use crate::codec::Locked;
use crate::disk;
use crate::segment;

/// Maximum number of frames in one write.
const RUN_FRAMES: usize = 500;
/// Target number of bytes in one write.
const RUN_BYTES: usize = 4 << 20;

/// Consecutive frames of one segment.
struct Run {
    segment: i64,
    position: u64,
    first: i64,
    last: i64,
    bytes: usize,
    frames: Vec<Bytes>,
}

/// What the checkpoint has to sync for one journal before its image is valid. Without the image itself: there may be
/// very many journals.
pub(crate) struct Capture {
    /// Segments to sync before the image is valid.
    pub(crate) dirty: Vec<i64>,
    synced_end: i64,
    replicated_writes: u64,
    truncations: u64,
}

impl Journal {
    /// Writes every durable frame of the ring into its segment. Returns the bytes written.
    pub(crate) fn write_behind(&self) -> io::Result<u64> {
        let _files = self.files.locked();
        self.write_behind_locked()
    }

    fn write_behind_locked(&self) -> io::Result<u64> {
        let mut total = 0;
        loop {
            let durable = self.durable_end();
            let run = self.state.locked().next_run(durable);
            let Some(run) = run else { return Ok(total) };
            let file = self.segment_file(run.segment, true)?;
            {
                let mut state = self.state.locked();
                let segment_bytes = state.segment_bytes;
                if let Some(segment) = state.segment(run.segment) {
                    // Marked before the write: a capture may miss only bytes that it does not count.
                    segment.dirty = true;
                    segment.reserve(&*file, 0, segment_bytes)?;
                }
            }
            let bufs: Vec<IoSlice<'_>> = run.frames.iter().map(|frame| IoSlice::new(frame)).collect();
            file.pwritev(run.position, &bufs)?;
            self.state.locked().mark_written(run.first, run.last);
            self.store.note_dirty_bytes(run.bytes as u64);
            total += run.bytes as u64;
        }
    }

    /// Evicts written frames below `end` from the ring. Returns true if others below it are not written yet.
    pub(crate) fn evict(&self, end: i64) -> bool {
        let mut state = self.state.locked();
        let mut freed = 0;
        while state.written > 0 && state.recent.front().is_some_and(|recent| recent.last < end) {
            state.written -= 1;
            freed += state.recent.pop_front().map_or(0, |recent| recent.len() + RECENT_COST);
        }
        if state.recent.is_empty() && state.recent.capacity() > 64 {
            state.recent.shrink_to(0);
        }
        let waits = state.recent.front().is_some_and(|recent| recent.last < end);
        drop(state);
        self.store.ring_bytes.fetch_sub(freed, Ordering::Relaxed);
        waits
    }

    /// Writes behind and adds the journal's image to the checkpoint; `None` for a journal that needs no entry.
    pub(crate) fn capture(&self, checkpoint: &mut CheckpointWriter) -> io::Result<Option<Capture>> {
        let _files = self.files.locked();
        self.write_behind_locked()?;
        let mut state = self.state.locked();
        if state.deleted || !state.create_staged {
            return Ok(None);
        }
        let mut image = state.image(self);
        // A snapshot of frames that may still be lost would be valid again once other frames have their offsets.
        image.snapshot = image.snapshot.filter(|(offset, _)| *offset <= self.durable_end());
        if let Some((last, position, offset)) = state.behind_point() {
            image.segments = state
                .segments
                .iter()
                .map(|segment| segment.image.clone())
                .filter(|segment| segment.base <= last)
                .collect();
            if let Some(synced) = image.segments.last_mut() {
                synced.len = position;
                synced.end = offset;
            }
        }
        let mut dirty = Vec::new();
        for segment in &mut state.segments {
            if std::mem::take(&mut segment.dirty) {
                segment.syncing = true;
                dirty.push(segment.image.base);
            }
        }
        let (replicated_writes, truncations) = (state.replicated_writes, state.truncations);
        checkpoint.push(&image);
        Ok(Some(Capture { dirty, synced_end: image.synced_end(), replicated_writes, truncations }))
    }

    /// On a completed checkpoint sync: the captured segments are synced. Saves indexes of sealed segments.
    pub(crate) fn on_capture_synced(&self, capture: &Capture) {
        {
            let mut state = self.state.locked();
            state.replicated_synced = state.replicated_synced.max(capture.replicated_writes);
            state.segments.iter_mut().for_each(|segment| segment.syncing = false);
            state.checkpointed = Some((capture.truncations, capture.synced_end));
        }
        // An index can be rebuilt: a failure to save it is only logged.
        if let Err(error) = self.save_indexes(false) {
            tracing::warn!(journal = %self.id, %error, "segment index not saved");
        }
    }

    /// On a failed checkpoint: the captured segments still have to be synced.
    pub(crate) fn on_capture_failed(&self, capture: &Capture) {
        let mut state = self.state.locked();
        for base in &capture.dirty {
            if let Some(segment) = state.segment(*base) {
                segment.dirty = true;
                segment.syncing = false;
            }
        }
    }

    /// Saves the indexes of sealed segments, and of the active one if it has grown much or `all` is true.
    pub(crate) fn save_indexes(&self, all: bool) -> io::Result<()> {
        const ACTIVE_STEP: u64 = 32 << 20;
        // Below this, walking the frames is as quick as opening two more files.
        const MIN_SAVED_BYTES: u64 = 1 << 20;
        let _files = self.files.locked();
        let mut work = Vec::new();
        {
            let mut state = self.state.locked();
            if state.deleted {
                return Ok(());
            }
            let point = state.behind_point();
            let newest = state.segments.len().saturating_sub(1);
            for (at, segment) in state.segments.iter_mut().enumerate() {
                let len = segment.image.len;
                let settled = point.is_some_and(|(base, ..)| segment.image.base < base);
                let grown = len >= segment.index_saved + ACTIVE_STEP || (all && len >= MIN_SAVED_BYTES);
                let due = segment.index_saved < len
                    && (at < newest || grown)
                    && (settled || point == segment.at_end());
                if segment.index_complete && segment.exists && !segment.is_empty() && due {
                    segment.index_saved = len;
                    let base = segment.image.base;
                    work.push((
                        base,
                        segment.index.encode_offsets(base, len),
                        segment.index.encode_times(base, len),
                    ));
                }
            }
        }
        let folder = self.folder_path();
        for (base, offsets, times) in work {
            for (extension, bytes) in [("index", offsets), ("timeindex", times)] {
                let path = segment::path_of(&folder, base, extension);
                self.store.remove_if_exists(&path)?;
                disk::write_at(&*self.store.disk.create(&path)?, 0, &bytes)?;
            }
        }
        Ok(())
    }
}

impl State {
    /// The next frames to write behind.
    fn next_run(&self, durable: i64) -> Option<Run> {
        let mut run: Option<Run> = None;
        for recent in self.recent.range(self.written..) {
            if recent.last >= durable {
                break;
            }
            if recent.written {
                match run {
                    None => continue,
                    Some(_) => break,
                }
            }
            let run = run.get_or_insert_with(|| Run {
                segment: recent.segment,
                position: recent.position,
                first: recent.base,
                last: recent.last,
                bytes: 0,
                frames: Vec::new(),
            });
            let next = run.position + run.bytes as u64 == recent.position && run.segment == recent.segment;
            if !next || run.frames.len() >= RUN_FRAMES || run.bytes >= RUN_BYTES {
                break;
            }
            if !recent.head.is_empty() {
                run.frames.push(recent.head.clone());
            }
            run.frames.push(recent.frame.clone());
            run.bytes += recent.len();
            run.last = recent.last;
        }
        run
    }
}
