//! What the replica driver tells a copy: that it leads or follows, how far it is committed, what a follower appended or
//! had to cut off.
//!
//! All of it but `on_cut` is called under the driver's lock of this copy, in the order in which it happens, and must be
//! short: it changes what the partition knows and wakes whoever waits. Invariant: whatever ends a leadership takes the
//! partition's lock, so after it returned nothing is appended under the old epoch.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use moim_base::{BrokerId, LeaderEpoch, Offset};
use moim_journal::{Frame, Journal, ReadError};
use moim_replica::driver::{Owner, Replicated};
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::BatchHeader;

use super::check::batch_info;
use super::waiting::Told;
use super::{NOT_LEADING, Partition, RoleChange, State};
use crate::config::TopicConfig;
use crate::loops::lock;
use crate::producers::{Loaded, Producers};

impl Partition {
    /// Has the driver look after this copy. Called once, before it is told of any record.
    pub(crate) fn attach(&self, replicated: Arc<Replicated>) {
        let first = self.replicated.set(replicated).is_ok();
        assert!(first, "a copy is attached once");
    }

    /// Takes a step under the partition's lock and tells everybody afterwards.
    fn step(&self, step: impl FnOnce(&mut State, &mut Told)) {
        let mut told = Told::default();
        step(&mut lock(&self.state), &mut told);
        told.tell(&self.around.loops);
    }

    fn lead_no_more(&self, state: &mut State, told: &mut Told) {
        state.leading = None;
        state.to_announce = false;
        self.leading.store(NOT_LEADING, Ordering::Release);
        state.waiters.fail_all(ErrorCode::NotLeaderOrFollower, told);
    }

    /// Moves the high watermark and what follows from it.
    fn advance(&self, state: &mut State, high_watermark: i64, told: &mut Told) {
        if high_watermark > self.high_watermark() {
            self.high_watermark.store(high_watermark, Ordering::Release);
            state.producers.on_watermark(high_watermark);
        }
        let high_watermark = self.high_watermark();
        let stable = state.producers.lso(high_watermark).max(self.journal.start());
        self.last_stable.store(stable, Ordering::Release);
        state.waiters.on_committed(high_watermark, stable, told);
    }

    /// Tells the coordinators, once everything they would read is committed.
    fn maybe_announce(self: &Arc<Self>, state: &mut State) {
        if state.to_announce
            && self.knows_the_end()
            && let Some(epoch) = state.leading
        {
            state.to_announce = false;
            self.around.roles.push(RoleChange::Leads(Arc::clone(self), epoch));
        }
    }
}

/// A partition as the driver knows it.
pub(crate) struct Copy(pub(crate) Arc<Partition>);

impl Owner for Copy {
    fn on_appended(&self, frames: &[Frame], bytes: &Bytes) {
        let partition = &self.0;
        let now_ms = partition.around.clock.wall_ms();
        let mut state = lock(&partition.state);
        let mut at = 0;
        for frame in frames {
            let batch = &bytes[at..at + frame.len];
            at += frame.len;
            if let Some(header) = BatchHeader::parse(batch) {
                note(&mut state.producers, &header, batch, now_ms);
            }
            state.applied = frame.last + 1;
        }
    }

    fn on_high_watermark(&self, high_watermark: Offset) {
        self.0.step(|state, told| {
            self.0.advance(state, high_watermark.0, told);
            self.0.maybe_announce(state);
        });
    }

    fn on_lead(&self, epoch: LeaderEpoch, high_watermark: Offset) {
        let partition = &self.0;
        partition.step(|state, told| {
            partition.epoch_start.store(partition.journal.end(), Ordering::Release);
            partition.leader_epoch.store(epoch.0, Ordering::Release);
            state.leading = Some(epoch.0);
            let followed = std::mem::take(&mut state.followed);
            state.stragglers.on_lead(followed);
            partition.leading.store(epoch.0, Ordering::Release);
            state.to_announce = partition.around.keeps_state;
            partition.advance(state, high_watermark.0, told);
            partition.maybe_announce(state);
        });
    }

    fn on_follow(&self, _: BrokerId, epoch: LeaderEpoch) {
        let partition = &self.0;
        partition.step(|state, told| {
            partition.leader_epoch.fetch_max(epoch.0, Ordering::AcqRel);
            state.followed = true;
            partition.lead_no_more(state, told);
        });
    }

    fn on_idle(&self) {
        self.0.step(|state, told| self.0.lead_no_more(state, told));
    }

    fn on_under_min_isr(&self) {
        self.0.step(|state, told| state.waiters.on_under_min_isr(told));
    }

    fn on_leadership_ended(&self) {
        self.0.step(|state, told| self.0.lead_no_more(state, told));
        if self.0.around.keeps_state {
            self.0.around.roles.push(RoleChange::Resigned(Arc::clone(&self.0)));
        }
    }

    fn on_cut(&self, end: Offset) {
        let partition = &self.0;
        let rebuilt = rebuild(&partition.journal, &partition.config.load(), partition.around.clock.wall_ms());
        let mut state = lock(&partition.state);
        match rebuilt {
            Ok(producers) => state.producers = producers,
            Err(error) => {
                // Without it duplicates would be taken for new. The copy stays out until the next start reads it again.
                tracing::error!(topic = %partition.topic, partition = partition.index, %error, "a copy that was cut cannot be read");
                partition.closed.store(ErrorCode::KafkaStorageError as i16, Ordering::Release);
            }
        }
        state.applied = partition.journal.end();
        let (start, end) = (partition.journal.start(), end.0);
        let high_watermark = partition.high_watermark().min(end).max(start);
        partition.high_watermark.store(high_watermark, Ordering::Release);
        state.producers.on_watermark(high_watermark);
        let stable = state.producers.lso(high_watermark).max(start);
        partition.last_stable.store(stable, Ordering::Release);
        // What was kept before may be of what was cut off.
        partition.keep_snapshot(&state);
    }

    fn on_drop(&self) {
        // The view of topics sees the same record and removes the copy.
    }
}

/// Producer state is the snapshot kept with the journal plus every batch after it.
///
/// A snapshot from below the log start is of no use: the batches between it and the log start are gone, and with them the
/// markers of transactions that it calls open and the sequences that followed on those it knows. Without it a producer that
/// has nothing in the log is unknown, and any sequence is its first.
pub(super) fn rebuild(journal: &Journal, config: &TopicConfig, now_ms: i64) -> Result<Producers, ReadError> {
    let (start, end) = (journal.start(), journal.end());
    let (from, loaded) = journal
        .snapshot()
        .filter(|(offset, _)| (start..=end).contains(offset))
        .and_then(|(offset, bytes)| Producers::load(&bytes).ok().map(|loaded| (offset, loaded)))
        .unwrap_or_else(|| (start, Loaded::default()));
    let mut producers = loaded.producers;
    if !loaded.has_aborted && start < from {
        find_aborted(journal, from, &mut producers)?;
    }
    for_each_whole(journal, from, journal.end(), &mut |frame, bytes| {
        // The first one may begin below, where the log starts inside of it.
        if frame.last >= from
            && let Some(header) = BatchHeader::parse(bytes)
        {
            note(&mut producers, &header, bytes, now_ms);
        }
    })?;
    producers.on_log_start(journal.start());
    if config.compact {
        forget_compacted(journal, &mut producers)?;
    }
    Ok(producers)
}

/// Finds the aborted transactions that ended below `until`, for a snapshot that had no room for them.
fn find_aborted(journal: &Journal, until: i64, producers: &mut Producers) -> Result<(), ReadError> {
    let mut before = Producers::default();
    for_each_whole(journal, journal.start(), until, &mut |frame, bytes| {
        if frame.last < until
            && let Some(header) = BatchHeader::parse(bytes)
        {
            note(&mut before, &header, bytes, 0);
        }
    })?;
    producers.take_aborted(before);
    Ok(())
}

/// Walks the batches that can be read. A damaged copy takes no appends; it is known as damaged, and thrown away as soon as
/// another one counts.
fn for_each_whole(
    journal: &Journal,
    from: i64,
    until: i64,
    each: &mut dyn FnMut(&Frame, &[u8]),
) -> Result<(), ReadError> {
    let mut next = from;
    while next < until {
        let walked = journal.for_each_frame(next, until, &mut |frame, bytes| {
            each(frame, bytes);
            true
        });
        match walked {
            Err(ReadError::Damaged { offset, .. }) => {
                next = journal.next_whole(offset.max(next))?.max(next + 1);
            }
            other => return other,
        }
    }
    Ok(())
}

/// Takes in a batch that a leader appended, or that was appended before a restart. Its producer counts as heard of now:
/// timestamps of clients say nothing about when a producer may be forgotten.
fn note(producers: &mut Producers, header: &BatchHeader, batch: &[u8], now_ms: i64) {
    if header.has_producer() {
        producers.on_append(now_ms, &batch_info(header, batch), header.base_offset, header.last_offset());
    }
}

/// A snapshot may be older than the last compaction and mention aborted transactions whose markers are gone.
fn forget_compacted(journal: &Journal, producers: &mut Producers) -> Result<(), ReadError> {
    let mut failure = None;
    producers.retain_aborted(|aborted| {
        let mut there = false;
        let mut look = |frame: &Frame, _: &[u8]| {
            there = frame.last == aborted.last_offset;
            false
        };
        let looked = journal.for_each_frame(aborted.last_offset, aborted.last_offset + 1, &mut look);
        match looked {
            // Whether its marker is still there cannot be told: the transaction stays aborted.
            Err(ReadError::Damaged { .. }) => return true,
            Err(error) => failure = Some(error),
            Ok(()) => {}
        }
        there
    });
    failure.map_or(Ok(()), Err)
}
