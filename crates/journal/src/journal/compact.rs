//! Key compaction: rewrites sealed segments, a few at a time, concurrently with readers and appends.
//!
//! The caller decides frame by frame; this module copies the kept frames into a new file next to the old ones, syncs
//! it, logs a Swap record, and only then renames. A crash before the record leaves a file that the next compaction
//! removes; a crash after it is finished by recovery. A checkpoint runs first, so that no commit-log record past it
//! still points into the rewritten segments; a concurrent truncation makes the compaction give up.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use super::{Journal, State};
use crate::codec::Locked;
use crate::commit::{Kind, Record, Staged};
use crate::disk::{DiskFile, write_at};
use crate::framing::Frame;
use crate::segment::{self, FrameReader, HEADER, MAX_BYTES, Segment, SegmentImage, WalkError};
use crate::store::recover::{Swap, finish_swap};
use crate::types::{CompactReport, JournalError, Rewrite};

/// Bytes collected before they are written.
const WRITE_BLOCK: usize = 1 << 20;
/// File extension of a compacted segment until it is swapped in.
const EXTENSION: &str = "compact";

/// Decides what a compaction keeps.
pub trait Compactor {
    /// The decision on a frame; called in offset order.
    fn rewrite(&mut self, frame: &[u8]) -> Rewrite;

    /// Called before dropped or replaced frames are removed, once for each file that is swapped in. An error ends the
    /// compaction; segments not yet swapped stay.
    fn before_swap(&mut self, _journal: &Journal) -> io::Result<()> {
        Ok(())
    }
}

struct FnCompactor<'a>(&'a mut dyn FnMut(&[u8]) -> Rewrite);

impl Compactor for FnCompactor<'_> {
    fn rewrite(&mut self, frame: &[u8]) -> Rewrite {
        (self.0)(frame)
    }
}

/// A segment being written.
struct Output {
    segment: Segment,
    file: Arc<dyn DiskFile>,
    buffer: Vec<u8>,
    written: u64,
}

impl Journal {
    /// Rewrites sealed segments that end at or below `upto`. `rewrite` is called frame by frame in offset order; a
    /// `Replace` must cover offsets within the old frame's. Small adjacent segments are merged. Never blocks readers or
    /// appends.
    pub fn compact(
        &self,
        upto: i64,
        rewrite: &mut dyn FnMut(&[u8]) -> Rewrite,
    ) -> Result<CompactReport, JournalError> {
        self.compact_by(upto, &mut FnCompactor(rewrite))
    }

    /// Like [`Journal::compact`], with a call of the compactor before the frames it dropped are removed.
    pub fn compact_by(
        &self,
        upto: i64,
        compactor: &mut dyn Compactor,
    ) -> Result<CompactReport, JournalError> {
        let mut report = CompactReport::default();
        let settled = {
            let state = self.state.locked();
            let sealed = state.segments.len().saturating_sub(1);
            let ends = state.segments[..sealed].iter().map(|segment| segment.image.end);
            let Some(limit) = ends.filter(|end| *end <= upto).max() else { return Ok(report) };
            state
                .checkpointed
                .is_some_and(|(truncations, end)| truncations == state.truncations && end >= limit)
        };
        if !settled {
            self.store.checkpoint()?;
        }
        self.remove_leftovers()?;
        let (groups, truncations) = {
            let state = self.state.locked();
            if state.deleted {
                return Err(JournalError::Closed);
            }
            let sealed = state.sealed_below(upto, self.durable_end());
            (group(sealed, state.segment_bytes), state.truncations)
        };
        for group in groups {
            let Some(output) = self.rewrite_group(&group, compactor)? else { return Ok(report) };
            compactor.before_swap(self)?;
            let before: u64 = group.iter().map(|image| image.len).sum();
            let after = output.segment.image.len;
            if !self.swap_in(&group, output, truncations)? {
                return Ok(report);
            }
            report.segments_before += group.len();
            report.segments_after += 1;
            report.bytes_before += before;
            report.bytes_after += after;
        }
        Ok(report)
    }

    /// Removes files of a compaction that was interrupted before its Swap record.
    fn remove_leftovers(&self) -> io::Result<()> {
        let _files = self.files.locked();
        let folder = self.folder_path();
        let entries = match self.store.disk.list(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in entries.iter().filter(|entry| entry.name.ends_with(&format!(".{EXTENSION}"))) {
            self.store.remove_if_exists(&folder.join(&entry.name))?;
        }
        Ok(())
    }

    /// Copies the kept frames of a few segments into one new file, synced. `None` if one of them was dropped.
    fn rewrite_group(
        &self,
        group: &[SegmentImage],
        compactor: &mut dyn Compactor,
    ) -> Result<Option<Output>, JournalError> {
        let base = group.first().map_or(0, |image| image.base);
        let path = segment::path_of(&self.folder_path(), base, EXTENSION);
        let file = self.store.disk.create(&path)?;
        write_at(&*file, 0, &segment::encode_header(self.id, base))?;
        let mut segment = Segment::new(base, self.store.clock.wall_ms());
        segment.image.compacted = true;
        let mut output = Output { segment, file, buffer: Vec::new(), written: HEADER };
        for image in group {
            let file = match self.segment_file(image.base, false) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.store.remove_if_exists(&path)?;
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            };
            let mut reader = FrameReader::new(&*file, &*self.framing, image.len, WRITE_BLOCK);
            let mut position = HEADER;
            loop {
                let (frame, bytes) = match reader.frame(position) {
                    Ok(Some(found)) => found,
                    Ok(None) => break,
                    Err(WalkError::Io(error)) => return Err(error.into()),
                    Err(WalkError::BadFrame(_)) => return Err(self.found_damage(image.base, position)),
                };
                position += frame.len as u64;
                match compactor.rewrite(bytes) {
                    Rewrite::Keep => output.push(&frame, bytes)?,
                    Rewrite::Drop => {}
                    Rewrite::Replace(bytes) => output.push(&self.replacement(&frame, &bytes)?, &bytes)?,
                }
            }
            output.segment.image.end = image.end;
        }
        output.finish()?;
        Ok(Some(output))
    }

    fn replacement(&self, old: &Frame, bytes: &Bytes) -> io::Result<Frame> {
        let new = self.framing.peek(bytes).filter(|new| new.len == bytes.len());
        new.filter(|new| new.base >= old.base && new.last <= old.last).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                "replacement frame exceeds the offsets of the frame it replaces",
            )
        })
    }

    fn found_damage(&self, segment: i64, position: u64) -> JournalError {
        if self.note_damage(&mut self.state.locked()) {
            tracing::error!(journal = %self.id, segment, position, "frame checksum mismatch");
        }
        JournalError::Damaged
    }

    /// Swaps the new file in. False if a truncation or a new log start came in between.
    fn swap_in(
        &self,
        group: &[SegmentImage],
        output: Output,
        truncations: u64,
    ) -> Result<bool, JournalError> {
        let _files = self.files.locked();
        let folder = self.folder_path();
        let name = format!("{:020}.{EXTENSION}", output.segment.image.base);
        {
            let state = self.state.locked();
            let is_current =
                |image: &SegmentImage| state.segments.iter().any(|segment| segment.image == *image);
            if state.deleted || state.truncations != truncations || !group.iter().all(is_current) {
                drop(state);
                self.store.remove_if_exists(&folder.join(&name))?;
                return Ok(false);
            }
        }
        // A name that no earlier record can refer to: a stale Swap must never match a later file.
        let unique = format!("{:020}-{}.{EXTENSION}", output.segment.image.base, self.store.next_swap());
        self.store.disk.rename(&folder.join(&name), &folder.join(&unique))?;
        self.store.disk.sync_dir(&folder)?;
        let replaced: Vec<i64> = group.iter().map(|image| image.base).collect();
        let swap = Swap { name: unique, replaced, image: output.segment.image.clone() };
        let payload = Bytes::from(swap.encode());
        let record = Record::control(Kind::Swap, self.id, swap.image.base);
        let payload_crc = crc32c::crc32c(&payload);
        let staged = Staged { record, payload, payload_crc, journal: None, done: None };
        self.store.log_and_wait(self.lane(), staged)?;
        if let Err(error) = finish_swap(&*self.store.disk, &folder, &swap) {
            self.store.fatal("swapping in a compacted segment", &error);
            return Err(error.into());
        }
        let mut state = self.state.locked();
        let at = state.segments.partition_point(|segment| segment.image.base < swap.image.base);
        let mut segment = output.segment;
        segment.exists = true;
        segment.file = Some(output.file);
        let end = segment.image.end;
        state.segments.splice(at..at + group.len(), [segment]);
        drop(state);
        // The ring still has the frames as they were; the files hold all of them.
        self.evict(end);
        self.store.note_open(self.id, swap.image.base);
        self.store.note_dirty();
        Ok(true)
    }
}

impl State {
    /// Sealed, durable, written segments that end at or below an offset.
    fn sealed_below(&self, upto: i64, durable: i64) -> Vec<SegmentImage> {
        let behind = self.behind_point().map_or(0, |point| point.2);
        let limit = upto.min(durable).min(behind);
        let sealed = self.segments.len().saturating_sub(1);
        let whole =
            self.segments[..sealed].iter().filter(|segment| segment.image.end <= limit && segment.exists);
        whole.map(|segment| segment.image.clone()).collect()
    }
}

/// Groups of adjacent segments that together are no larger than one segment.
fn group(segments: Vec<SegmentImage>, segment_bytes: u64) -> Vec<Vec<SegmentImage>> {
    let mut groups: Vec<Vec<SegmentImage>> = Vec::new();
    for image in segments {
        let limit = segment_bytes.min(MAX_BYTES - 1);
        match groups.last_mut() {
            Some(group)
                if group.iter().map(|image| image.len).sum::<u64>() + image.len <= limit
                    && group.last().is_some_and(|last| last.end == image.base)
                    && image.end - group[0].base < i64::from(u32::MAX) =>
            {
                group.push(image);
            }
            _ => groups.push(vec![image]),
        }
    }
    groups
}

impl Output {
    fn push(&mut self, frame: &Frame, bytes: &[u8]) -> io::Result<()> {
        self.segment.push(frame);
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= WRITE_BLOCK { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.buffer.is_empty() {
            write_at(&*self.file, self.written, &self.buffer)?;
            self.written += self.buffer.len() as u64;
            self.buffer.clear();
        }
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        self.flush()?;
        self.file.sync_data()
    }
}
