//! Reading a partition: for consumers, for questions about offsets and moments, and for coordinators that find their
//! state again. Nobody but the latter sees past the high watermark.

use moim_journal::Read;
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::{self, BatchHeader};

use super::check::refuse_read;
use super::{MAX_DECOMPRESSED_BYTES, Partition, Refused};
use crate::loops::lock;
use crate::producers::AbortedTxn;

/// A slice of the log for a consumer.
pub(crate) struct Fetched {
    pub(crate) read: Option<Read>,
    pub(crate) standing: Standing,
    pub(crate) aborted: Vec<AbortedTxn>,
}

/// What the answer to a fetch tells of a partition besides its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// The epoch in which this copy leads, if it does.
    leading: Option<i32>,
    pub(crate) high_watermark: i64,
    pub(crate) last_stable: i64,
    pub(crate) log_start: i64,
}

impl Standing {
    /// What a session remembers of it.
    pub(crate) fn told(&self) -> (i64, i64, i64) {
        (self.high_watermark, self.last_stable, self.log_start)
    }
}

impl Partition {
    /// Reads committed records from `from`; with `stable_only` no further than the last stable offset.
    pub(crate) fn fetch(&self, from: i64, max_bytes: usize, stable_only: bool) -> Result<Fetched, ErrorCode> {
        if let Some(code) = self.closed() {
            return Err(code);
        }
        let standing = self.stand();
        let Standing { leading, high_watermark, last_stable, log_start } = standing;
        if from < log_start {
            return Err(ErrorCode::OffsetOutOfRange);
        }
        if from > high_watermark && (leading.is_none() || !self.knows_the_end()) {
            // Committed perhaps, and this copy has not heard of it yet: not for the client to begin anew.
            return Err(ErrorCode::OffsetNotAvailable);
        }
        if from > self.journal.end() {
            return Err(ErrorCode::OffsetOutOfRange);
        }
        let until = if stable_only { last_stable } else { high_watermark };
        let mut fetched = Fetched { read: None, standing, aborted: Vec::new() };
        if from < until {
            let read = self.journal.read(from, until, max_bytes).map_err(refuse_read)?;
            if stable_only && read.bytes > 0 {
                fetched.aborted = lock(&self.state).producers.aborted(from, read.next);
            }
            fetched.read = (read.bytes > 0).then_some(read);
        }
        Ok(fetched)
    }

    fn stand(&self) -> Standing {
        Standing {
            leading: self.leading(),
            high_watermark: self.high_watermark(),
            last_stable: self.last_stable(),
            log_start: self.journal.start(),
        }
    }

    /// How it stands now; nothing when nothing is done here any more.
    pub(crate) fn standing(&self) -> Option<Standing> {
        self.closed().is_none().then(|| self.stand())
    }

    /// The leadership under which `offset` was or will be written.
    pub(crate) fn epoch_at(&self, offset: i64) -> i32 {
        let epochs = self.journal.epochs();
        let at = epochs.partition_point(|(_, start)| *start <= offset);
        if at == 0 { self.leader_epoch() } else { epochs[at - 1].0 }
    }

    /// The largest known leadership up to `epoch` and the offset at which it ended.
    pub(crate) fn end_of_epoch(&self, epoch: i32) -> (i32, i64) {
        if epoch == self.leader_epoch() {
            return (epoch, self.journal.end());
        }
        self.journal.end_offset_for_epoch(epoch)
    }

    /// The first record below `visible` that is not older than `moment`.
    pub(crate) fn first_since(&self, moment: i64, visible: i64) -> Result<Option<(i64, i64)>, ErrorCode> {
        let Some(base) = self.journal.offset_for_timestamp(moment).map_err(refuse_read)? else {
            return Ok(None);
        };
        self.find_record(base, visible, |timestamp| timestamp >= moment)
    }

    /// The record below `visible` with the newest timestamp; the first of several.
    pub(crate) fn newest(&self, visible: i64) -> Result<Option<(i64, i64)>, ErrorCode> {
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
        // The newest batch is a marker, or not visible: the newest of the others is looked for, in the segments that may
        // hold it.
        match self.newest_batch(visible)? {
            Some((timestamp, base)) => self.find_record(base, visible, |t| t >= timestamp),
            None => Ok(None),
        }
    }

    /// The greatest timestamp of the batches with records below `visible`, and the base of the first that has it.
    fn newest_batch(&self, visible: i64) -> Result<Option<(i64, i64)>, ErrorCode> {
        let mut segments = self.journal.segments();
        segments.retain(|segment| segment.base < visible && segment.max_timestamp_ms >= 0);
        segments.sort_unstable_by_key(|segment| (std::cmp::Reverse(segment.max_timestamp_ms), segment.base));
        let mut best: Option<(i64, i64)> = None;
        for segment in segments {
            if best.is_some_and(|(timestamp, _)| timestamp >= segment.max_timestamp_ms) {
                break;
            }
            let mut look = |frame: &moim_journal::Frame, batch: &[u8]| {
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
                self.journal.for_each_frame(from, until, &mut look).map_err(refuse_read)?;
            }
        }
        Ok(best)
    }

    /// Looks through the batches from `base` on for a record whose timestamp pleases.
    fn find_record(
        &self,
        base: i64,
        visible: i64,
        pleases: impl Fn(i64) -> bool,
    ) -> Result<Option<(i64, i64)>, ErrorCode> {
        let mut found = None;
        let mut broken = false;
        let from = base.max(self.journal.start());
        if from >= visible {
            return Ok(None);
        }
        let mut look = |_: &moim_journal::Frame, batch: &[u8]| {
            let Some(header) = BatchHeader::parse(batch) else { return false };
            if !pleases(header.max_timestamp) || header.is_control() {
                return true;
            }
            let whole_batch = header.is_log_append_time().then_some(header.max_timestamp);
            let walked = records::for_each_record(batch, MAX_DECOMPRESSED_BYTES, &mut |record| {
                let timestamp = whole_batch.unwrap_or(header.base_timestamp + record.timestamp_delta);
                let offset = header.base_offset + i64::from(record.offset_delta);
                if pleases(timestamp) && offset >= from && offset < visible {
                    found = Some((timestamp, offset));
                    return std::ops::ControlFlow::Break(());
                }
                std::ops::ControlFlow::Continue(())
            });
            broken |= walked.is_err();
            found.is_none() && !broken
        };
        self.journal.for_each_frame(from, visible, &mut look).map_err(refuse_read)?;
        if broken { Err(ErrorCode::CorruptMessage) } else { Ok(found) }
    }

    /// Reads the whole log, batch by batch: how coordinators find their state again.
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
