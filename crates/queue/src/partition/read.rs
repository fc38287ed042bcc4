//! Partition reads: for consumers, for offset and timestamp lookups, and for coordinators that load their state. Only
//! the latter read past the high watermark.

use moim_journal::Read;
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::{self, BatchHeader};

use super::check::refuse_read;
use super::{MAX_DECOMPRESSED_BYTES, Partition, Refused};
use crate::loops::lock;
use crate::producer_state::AbortedTxn;

/// The result of a consumer's read.
pub(crate) struct Fetched {
    pub(crate) read: Option<Read>,
    pub(crate) offset_snapshot: OffsetSnapshot,
    pub(crate) aborted: Vec<AbortedTxn>,
}

/// The offsets and leader epoch that a fetch response reports besides the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OffsetSnapshot {
    /// The leader epoch under which this replica leads, if it does.
    leading: Option<i32>,
    pub(crate) high_watermark: i64,
    pub(crate) last_stable: i64,
    pub(crate) log_start: i64,
}

impl OffsetSnapshot {
    /// The offsets that a fetch session caches.
    pub(crate) fn sent_offsets(&self) -> (i64, i64, i64) {
        (self.high_watermark, self.last_stable, self.log_start)
    }
}

impl Partition {
    /// Reads committed records from `from`; with `stable_only` up to the last stable offset (`read_committed`).
    pub(crate) fn fetch(&self, from: i64, max_bytes: usize, stable_only: bool) -> Result<Fetched, ErrorCode> {
        if let Some(code) = self.closed() {
            return Err(code);
        }
        let offset_snapshot = self.current_offsets();
        let OffsetSnapshot { leading, high_watermark, last_stable, log_start } = offset_snapshot;
        if from < log_start {
            return Err(ErrorCode::OffsetOutOfRange);
        }
        if from > high_watermark && (leading.is_none() || !self.has_committed_in_epoch()) {
            // Possibly committed, and not yet known here: the client must not reset its offset.
            return Err(ErrorCode::OffsetNotAvailable);
        }
        if from > self.journal.end() {
            return Err(ErrorCode::OffsetOutOfRange);
        }
        let until = if stable_only { last_stable } else { high_watermark };
        let mut fetched = Fetched { read: None, offset_snapshot, aborted: Vec::new() };
        if from < until {
            let read = self.journal.read(from, until, max_bytes).map_err(refuse_read)?;
            if stable_only && read.bytes > 0 {
                fetched.aborted = lock(&self.state).producers.aborted(from, read.next);
            }
            fetched.read = (read.bytes > 0).then_some(read);
        }
        Ok(fetched)
    }

    fn current_offsets(&self) -> OffsetSnapshot {
        OffsetSnapshot {
            leading: self.leading(),
            high_watermark: self.high_watermark(),
            last_stable: self.last_stable(),
            log_start: self.journal.start(),
        }
    }

    /// The current offsets; `None` if the replica is closed.
    pub(crate) fn offset_snapshot(&self) -> Option<OffsetSnapshot> {
        self.closed().is_none().then(|| self.current_offsets())
    }

    /// The leader epoch under which `offset` was or will be written.
    pub(crate) fn epoch_at(&self, offset: i64) -> i32 {
        let epochs = self.journal.epochs();
        let at = epochs.partition_point(|(_, start)| *start <= offset);
        if at == 0 { self.leader_epoch() } else { epochs[at - 1].0 }
    }

    /// The largest known leader epoch up to `epoch` and its end offset.
    pub(crate) fn end_of_epoch(&self, epoch: i32) -> (i32, i64) {
        if epoch == self.leader_epoch() {
            return (epoch, self.journal.end());
        }
        self.journal.end_offset_for_epoch(epoch)
    }

    /// The first record below `visible` with a timestamp of at least `moment`.
    pub(crate) fn first_at_or_after(
        &self,
        moment: i64,
        visible: i64,
    ) -> Result<Option<(i64, i64)>, ErrorCode> {
        let Some(base) = self.journal.offset_for_timestamp(moment).map_err(refuse_read)? else {
            return Ok(None);
        };
        self.find_record(base, visible, |timestamp| timestamp >= moment)
    }

    /// The record below `visible` with the maximum timestamp; the first of several.
    pub(crate) fn max_timestamp_record(&self, visible: i64) -> Result<Option<(i64, i64)>, ErrorCode> {
        let Some((timestamp, base)) = self.journal.max_timestamp().map_err(refuse_read)? else {
            return Ok(None);
        };
        if timestamp < 0 {
            return Ok(None);
        }
        let found = self.find_record(base, visible, |t| t >= timestamp)?;
        if found.is_some() {
            return Ok(found);
        }
        // The batch with the maximum timestamp is a marker, or not visible: searches the others, in the segments that
        // may hold it.
        match self.max_timestamp_batch(visible)? {
            Some((timestamp, base)) => self.find_record(base, visible, |t| t >= timestamp),
            None => Ok(None),
        }
    }

    /// The maximum timestamp of the data batches below `visible`, and the base offset of the first batch that has it.
    fn max_timestamp_batch(&self, visible: i64) -> Result<Option<(i64, i64)>, ErrorCode> {
        let mut segments = self.journal.segments();
        segments.retain(|segment| segment.base < visible && segment.max_timestamp_ms >= 0);
        segments.sort_unstable_by_key(|segment| (std::cmp::Reverse(segment.max_timestamp_ms), segment.base));
        let mut best: Option<(i64, i64)> = None;
        for segment in segments {
            if best.is_some_and(|(timestamp, _)| timestamp >= segment.max_timestamp_ms) {
                break;
            }
            let mut visit = |frame: &moim_journal::Frame, batch: &[u8]| {
                let has_records =
                    BatchHeader::parse(batch).is_some_and(|h| !h.is_control() && h.records_count > 0);
                let newer = best.is_none_or(|(timestamp, _)| frame.max_timestamp_ms > timestamp);
                if has_records && newer && frame.max_timestamp_ms >= 0 {
                    best = Some((frame.max_timestamp_ms, frame.base));
                }
                true
            };
            let (from, until) = (segment.base.max(self.journal.start()), segment.end.min(visible));
            if from < until {
                self.journal.for_each_frame(from, until, &mut visit).map_err(refuse_read)?;
            }
        }
        Ok(best)
    }

    /// Finds the first record from `base` on that matches the predicate.
    fn find_record(
        &self,
        base: i64,
        visible: i64,
        matches_predicate: impl Fn(i64) -> bool,
    ) -> Result<Option<(i64, i64)>, ErrorCode> {
        let mut found = None;
        let mut broken = false;
        let from = base.max(self.journal.start());
        if from >= visible {
            return Ok(None);
        }
        let mut visit = |_: &moim_journal::Frame, batch: &[u8]| {
            let Some(header) = BatchHeader::parse(batch) else { return false };
            if !matches_predicate(header.max_timestamp) || header.is_control() {
                return true;
            }
            let whole_batch = header.is_log_append_time().then_some(header.max_timestamp);
            let walked = records::for_each_record(batch, MAX_DECOMPRESSED_BYTES, &mut |record| {
                let timestamp = whole_batch.unwrap_or(header.base_timestamp + record.timestamp_delta);
                let offset = header.base_offset + i64::from(record.offset_delta);
                if matches_predicate(timestamp) && offset >= from && offset < visible {
                    found = Some((timestamp, offset));
                    return std::ops::ControlFlow::Break(());
                }
                std::ops::ControlFlow::Continue(())
            });
            broken |= walked.is_err();
            found.is_none() && !broken
        };
        self.journal.for_each_frame(from, visible, &mut visit).map_err(refuse_read)?;
        if broken { Err(ErrorCode::CorruptMessage) } else { Ok(found) }
    }

    /// Reads the whole log, batch by batch, for coordinators that load their state.
    pub(crate) fn read_all(&self, mut f: impl FnMut(&[u8]) -> Result<(), String>) -> Result<(), Refused> {
        let broken = |why: String| {
            Refused::new(ErrorCode::KafkaStorageError, format!("{}-{}: {why}", self.topic, self.index))
        };
        let mut failure = None;
        let mut read = |_: &moim_journal::Frame, batch: &[u8]| {
            failure = f(batch).err();
            failure.is_none()
        };
        let (start, end) = (self.journal.start(), self.journal.end());
        if start < end {
            self.journal.for_each_frame(start, end, &mut read).map_err(|e| broken(e.to_string()))?;
        }
        failure.map_or(Ok(()), |why| Err(broken(why)))
    }
}
