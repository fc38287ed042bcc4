//! Scan of the commit log: where it ends, and whether a missing record was ever written.
//!
//! A group is written only after everything before it was synced, so every record of a group proves that all bytes
//! before the group were synced. Only the last group of the log can be torn. Hence an unreadable record is
//! - the end of the log, if no later group exists: a torn group, stale bytes of an earlier use of the file, or zeros;
//! - damage, if a later group of the same file use exists, or if the Begin record of a later use says that the log
//!   continued past this position.
//!
//! The Begin record of a file use ([`Kind::Begin`]) names the end of the log before it; bytes past that position are
//! stale, whatever they look like. So the plan is made backwards, from the newest use to the floor of the checkpoint,
//! and read forwards.
//!
//! Limit: no later group follows the last one. A Seal ([`Kind::Seal`]) is written after it when the log is idle.

use std::io;

use super::log::LogFile;
use super::{BLOCK, Kind, RECORD_HEADER, RECORD_MAGIC, RawRecord, Record};
use crate::checkpoint::LogPoint;
use crate::disk::write_at;

/// A record found in the log.
pub(crate) struct LogEntry {
    pub(crate) lsn: u64,
    pub(crate) record: Record,
}

/// Synced records that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogDamage {
    /// Number of the file; `None` if the file itself is missing.
    pub(crate) file: Option<u64>,
    pub(crate) position: u64,
    pub(crate) what: String,
}

/// Result of a scan.
pub(crate) struct Scan {
    pub(crate) next_lsn: u64,
    pub(crate) bytes: u64,
    pub(crate) files: u64,
    /// The first damage; nothing past it was read.
    pub(crate) damage: Option<LogDamage>,
    /// End of the last record, if there was any.
    end: Option<(LogFile, u64)>,
}

impl Scan {
    /// Rewrites the last records and syncs them. After a failed fsync the kernel may take bytes for clean that never
    /// reached the disk; at most one group can be in that state, and no group is larger than this.
    pub(crate) fn rewrite_tail(&self, max_group: u64) -> io::Result<()> {
        let Some((file, end)) = &self.end else { return Ok(()) };
        let from = end.saturating_sub(max_group).max(BLOCK) / BLOCK * BLOCK;
        let mut bytes = vec![0; usize::try_from(end - from).expect("at most one group")];
        let got = file.file.pread(from, &mut bytes)?;
        write_at(&*file.file, from, &bytes[..got])?;
        file.file.sync_data()
    }

    /// The end of the log: (generation, position).
    pub(crate) fn end(&self, floor: LogPoint) -> (u64, u64) {
        match &self.end {
            Some((file, position)) => (file.generation, *position),
            None => (floor.generation, floor.position),
        }
    }
}

/// A part of the log in one file.
struct Part<'a> {
    file: &'a LogFile,
    from: u64,
    /// Its end and the LSN there, if a later part names it.
    end: Option<(u64, u64)>,
}

/// Calls `each` for every record past `floor`, in order, with its payload; stops at the end of the log, or at damage.
pub(crate) fn scan(
    files: &[LogFile],
    floor: LogPoint,
    each: &mut dyn FnMut(LogEntry, &[u8]) -> io::Result<()>,
) -> io::Result<Scan> {
    let mut scan = Scan { next_lsn: floor.next_lsn, bytes: 0, files: 0, damage: None, end: None };
    match plan(files, floor)? {
        Err(damage) => scan.damage = Some(damage),
        Ok(parts) => {
            for part in parts {
                scan.damage = scan.read(&part, each)?;
                if scan.damage.is_some() {
                    #[cfg(feature = "planted")]
                    if crate::planted::is_on(crate::planted::Bug::BadRecordEndsLog) {
                        scan.damage = None;
                    }
                    break;
                }
            }
        }
    }
    Ok(scan)
}

/// The parts of the log past the floor, oldest first.
fn plan(files: &[LogFile], floor: LogPoint) -> io::Result<Result<Vec<Part<'_>>, LogDamage>> {
    let mut parts = Vec::new();
    let mut end: Option<(u64, u64)> = None;
    // The generation that the later part names as its predecessor.
    let mut wanted: Option<u64> = None;
    let missing = |generation: u64, position: u64| LogDamage {
        file: None,
        position,
        what: format!("missing file of generation {generation}"),
    };
    let past = files.iter().rev().filter(|file| file.generation >= floor.generation);
    for file in past {
        if let Some(wanted) = wanted {
            if file.generation > wanted {
                continue; // stale: a use that never got to its first group
            }
            if file.generation < wanted {
                return Ok(Err(missing(wanted, end.map_or(0, |end| end.0))));
            }
        }
        if file.generation == floor.generation {
            parts.push(Part { file, from: floor.position.max(BLOCK), end });
            parts.reverse();
            return Ok(Ok(parts));
        }
        let mut reader = LogReader::new(file);
        let damaged =
            |what: &str| LogDamage { file: Some(file.number), position: BLOCK, what: what.to_owned() };
        let Some((before, lsn)) = reader.begin()? else {
            if wanted.is_some() || reader.is_followed_by_group(BLOCK)? {
                return Ok(Err(damaged("unreadable Begin record")));
            }
            continue;
        };
        parts.push(Part { file, from: BLOCK + RECORD_HEADER as u64, end });
        if before.0 == floor.generation && before.1 <= floor.position {
            if lsn != floor.next_lsn {
                return Ok(Err(damaged("missing records between the checkpoint and this file")));
            }
            parts.reverse();
            return Ok(Ok(parts));
        }
        (wanted, end) = (Some(before.0), Some((before.1, lsn)));
    }
    if let Some(wanted) = wanted {
        return Ok(Err(missing(wanted, end.map_or(0, |end| end.0))));
    }
    if floor.position > BLOCK {
        return Ok(Err(missing(floor.generation, floor.position)));
    }
    Ok(Ok(parts))
}

impl Scan {
    /// Reads one part; returns the damage in it.
    fn read(
        &mut self,
        part: &Part<'_>,
        each: &mut dyn FnMut(LogEntry, &[u8]) -> io::Result<()>,
    ) -> io::Result<Option<LogDamage>> {
        self.files += 1;
        let mut reader = LogReader::new(part.file);
        let mut position = part.from;
        let damaged =
            |position, what: String| Some(LogDamage { file: Some(part.file.number), position, what });
        while part.end.is_none_or(|end| position < end.0) {
            let Some((raw, start)) = reader.record(position, self.next_lsn)? else {
                #[cfg(feature = "planted")]
                if crate::planted::is_on(crate::planted::Bug::BadRecordEndsLog) && position > part.from {
                    self.end = Some((part.file.clone(), position));
                }
                if part.end.is_some() || reader.is_followed_by_group(position)? {
                    let what = format!("synced record {} is unreadable", self.next_lsn);
                    return Ok(damaged(position, what));
                }
                break;
            };
            let payload = reader.payload(&raw, start);
            if raw.record.kind.has_lsn() {
                each(LogEntry { lsn: raw.stamp.lsn, record: raw.record }, payload)?;
                self.next_lsn += 1;
            }
            let next = start + (RECORD_HEADER + raw.payload_len) as u64;
            self.bytes += next - position;
            position = next;
        }
        if position > part.from {
            self.end = Some((part.file.clone(), position));
        }
        Ok(match part.end {
            Some((_, lsn)) if lsn != self.next_lsn => {
                damaged(position, format!("record {lsn} follows record {}", self.next_lsn))
            }
            _ => None,
        })
    }
}

/// Reads records of one file.
pub(super) struct LogReader<'a> {
    file: &'a LogFile,
    /// The magic of its records: their format version.
    magic: u32,
    buffer: Vec<u8>,
    at: u64,
    filled: usize,
}

impl<'a> LogReader<'a> {
    pub(super) fn new(file: &'a LogFile) -> Self {
        Self::with_magic(file, RECORD_MAGIC)
    }

    pub(super) fn with_magic(file: &'a LogFile, magic: u32) -> Self {
        Self { file, magic, buffer: Vec::new(), at: 0, filled: 0 }
    }

    fn fill(&mut self, position: u64, need: usize) -> io::Result<bool> {
        let inside = position >= self.at && position + need as u64 <= self.at + self.filled as u64;
        if inside {
            return Ok(true);
        }
        self.buffer.resize(need.max(1 << 20), 0);
        self.filled = self.file.file.pread(position, &mut self.buffer)?;
        self.at = position;
        Ok(self.filled >= need)
    }

    /// The valid record at `start`, if it matches the predicate.
    fn at(&mut self, start: u64, wanted: impl Fn(&RawRecord) -> bool) -> io::Result<Option<RawRecord>> {
        if !self.fill(start, RECORD_HEADER)? {
            return Ok(None);
        }
        let from = usize::try_from(start - self.at).expect("inside the buffer");
        let raw = RawRecord::decode(&self.buffer[from..], self.magic).filter(|raw| wanted(raw));
        let Some(raw) = raw else { return Ok(None) };
        let whole = RECORD_HEADER + raw.payload_len;
        if whole as u64 > self.file.size.saturating_sub(start) || !self.fill(start, whole)? {
            return Ok(None);
        }
        let from = usize::try_from(start - self.at).expect("inside the buffer");
        let (header, payload) = self.buffer[from..from + whole].split_at(RECORD_HEADER);
        Ok(raw.matches(header, payload).then_some(raw))
    }

    /// The record with this LSN, at `position` or at the next block boundary; with its start.
    pub(super) fn record(&mut self, position: u64, lsn: u64) -> io::Result<Option<(RawRecord, u64)>> {
        let generation = self.file.generation;
        for start in [position, position.next_multiple_of(BLOCK)] {
            let wanted = |raw: &RawRecord| (raw.stamp.generation, raw.stamp.lsn) == (generation, lsn);
            if let Some(raw) = self.at(start, wanted)? {
                return Ok(Some((raw, start)));
            }
        }
        Ok(None)
    }

    /// The payload of the record that was read last, which begins at `start`.
    pub(super) fn payload(&self, raw: &RawRecord, start: u64) -> &[u8] {
        let from = usize::try_from(start - self.at).expect("inside the buffer") + RECORD_HEADER;
        &self.buffer[from..from + raw.payload_len]
    }

    /// The Begin record of this use: the end of the log before it, and the LSN of the record that follows.
    fn begin(&mut self) -> io::Result<Option<((u64, u64), u64)>> {
        let generation = self.file.generation;
        let first = |raw: &RawRecord| raw.stamp.generation == generation && raw.record.kind == Kind::Begin;
        let Some(raw) = self.at(BLOCK, first)? else { return Ok(None) };
        let before = u64::try_from(raw.record.base).ok().zip(u64::try_from(raw.record.last).ok());
        Ok(before.map(|before| (before, raw.stamp.lsn)))
    }

    /// True if a later group of this use was written after the record at `position`, or in the block after it, was
    /// synced. Groups start at blocks, so probing each block finds every one.
    fn is_followed_by_group(&mut self, position: u64) -> io::Result<bool> {
        let generation = self.file.generation;
        let next = position.next_multiple_of(BLOCK);
        let mut start = next;
        while start < self.file.size {
            // A record inside the group at `next` proves nothing: that group may be the torn one, and `position` the
            // padding before it. Its first record does: it has another LSN than the one expected there.
            let follows = |raw: &RawRecord| {
                raw.stamp.generation == generation
                    && (raw.stamp.group > next || (raw.stamp.group == next && start == next))
            };
            if self.at(start, follows)?.is_some() {
                return Ok(true);
            }
            start += BLOCK;
        }
        Ok(false)
    }

    /// The greatest generation of any group in the file, for a file with an unreadable header: a file is only recycled
    /// under a greater generation.
    pub(super) fn newest_generation(&mut self) -> io::Result<Option<u64>> {
        let (mut newest, mut start) = (None, BLOCK);
        while start < self.file.size {
            if let Some(raw) = self.at(start, |_| true)? {
                newest = newest.max(Some(raw.stamp.generation));
            }
            start += BLOCK;
        }
        Ok(newest)
    }
}
