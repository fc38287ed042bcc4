//! Callbacks of the replica driver: becoming leader or follower, high watermark, appends and truncation of a
//! follower.
//!
//! All of them except `on_cut` are called under the driver's lock of this replica, in order, and must be short: they
//! change the partition's state and complete delayed requests. Invariant: every end of a leadership takes the
//! partition's lock, so after it returned nothing is appended under the old leader epoch.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use moim_base::{BrokerId, LeaderEpoch, Offset};
use moim_journal::{Frame, Journal, ReadError};
use moim_replica::driver::{Owner, Replicated};
use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::records::BatchHeader;

use super::check::batch_info;
use super::purgatory::Notifications;
use super::{NOT_LEADING, Partition, RoleChange, State};
use crate::config::TopicConfig;
use crate::loops::lock;
use crate::producer_state::{Loaded, ProducerStateManager};

impl Partition {
    /// Attaches the driver's state of this replica. Called once, before the first registration.
    pub(crate) fn attach(&self, replicated: Arc<Replicated>) {
        let first = self.replicated.set(replicated).is_ok();
        assert!(first, "a replica is attached once");
    }

    /// Makes a change under the partition's lock and completes delayed requests afterwards.
    fn step(&self, step: impl FnOnce(&mut State, &mut Notifications)) {
        let mut notifications = Notifications::default();
        step(&mut lock(&self.state), &mut notifications);
        notifications.deliver(&self.context.loops);
    }

    fn end_leadership(&self, state: &mut State, notifications: &mut Notifications) {
        state.leading = None;
        state.announce_pending = false;
        self.leading.store(NOT_LEADING, Ordering::Release);
        state.purgatory.fail_all(ErrorCode::NotLeaderOrFollower, notifications);
    }

    /// Moves the high watermark and what depends on it.
    fn advance(&self, state: &mut State, high_watermark: i64, notifications: &mut Notifications) {
        if high_watermark > self.high_watermark() {
            self.high_watermark.store(high_watermark, Ordering::Release);
            state.producers.on_watermark(high_watermark);
        }
        let high_watermark = self.high_watermark();
        let stable = state.producers.lso(high_watermark).max(self.journal.start());
        self.last_stable.store(stable, Ordering::Release);
        state.purgatory.on_committed(high_watermark, stable, notifications);
    }

    /// Notifies the coordinators once their whole log is committed.
    fn maybe_announce(self: &Arc<Self>, state: &mut State) {
        if state.announce_pending
            && self.has_committed_in_epoch()
            && let Some(epoch) = state.leading
        {
            state.announce_pending = false;
            self.context.roles.push(RoleChange::Elected(Arc::clone(self), epoch));
        }
    }
}

/// The driver's handle of a partition.
pub(crate) struct ReplicaOwner(pub(crate) Arc<Partition>);

impl Owner for ReplicaOwner {
    fn on_appended(&self, frames: &[Frame], bytes: &Bytes) {
        let partition = &self.0;
        let now_ms = partition.context.clock.wall_ms();
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
        self.0.step(|state, notifications| {
            self.0.advance(state, high_watermark.0, notifications);
            self.0.maybe_announce(state);
        });
    }

    fn on_lead(&self, epoch: LeaderEpoch, high_watermark: Offset) {
        let partition = &self.0;
        partition.step(|state, notifications| {
            partition.epoch_start.store(partition.journal.end(), Ordering::Release);
            partition.leader_epoch.store(epoch.0, Ordering::Release);
            state.leading = Some(epoch.0);
            let has_followed = std::mem::take(&mut state.has_followed);
            state.reordered.on_lead(has_followed);
            partition.leading.store(epoch.0, Ordering::Release);
            state.announce_pending = partition.context.is_coordinator_log;
            partition.advance(state, high_watermark.0, notifications);
            partition.maybe_announce(state);
        });
    }

    fn on_follow(&self, _: BrokerId, epoch: LeaderEpoch) {
        let partition = &self.0;
        partition.step(|state, notifications| {
            partition.leader_epoch.fetch_max(epoch.0, Ordering::AcqRel);
            state.has_followed = true;
            partition.end_leadership(state, notifications);
        });
    }

    fn on_idle(&self) {
        self.0.step(|state, notifications| self.0.end_leadership(state, notifications));
    }

    fn on_under_min_isr(&self) {
        self.0.step(|state, notifications| state.purgatory.on_under_min_isr(notifications));
    }

    fn on_leadership_ended(&self) {
        self.0.step(|state, notifications| self.0.end_leadership(state, notifications));
        if self.0.context.is_coordinator_log {
            self.0.context.roles.push(RoleChange::Resigned(Arc::clone(&self.0)));
        }
    }

    fn on_cut(&self, end: Offset) {
        let partition = &self.0;
        let rebuilt = rebuild_producer_state(
            &partition.journal,
            &partition.config.load(),
            partition.context.clock.wall_ms(),
        );
        let mut state = lock(&partition.state);
        match rebuilt {
            Ok(producers) => state.producers = producers,
            Err(error) => {
                // Without producer state, duplicates would be appended again. The replica stays disabled until the
                // next start reads it again.
                tracing::error!(
                    topic = %partition.topic, partition = partition.index, %error,
                    "cannot rebuild producer state after truncation; replica disabled"
                );
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
        // An older snapshot may cover truncated records.
        partition.keep_snapshot(&state);
    }

    fn on_drop(&self) {
        // The topic view applies the same registration and removes the replica.
    }
}

/// Rebuilds producer state: the snapshot kept with the journal plus every batch after it.
///
/// A snapshot from below the log start is unusable: the batches between it and the log start are deleted, and with
/// them the markers of transactions that it has as open and the sequences that followed those it has. Without it, a
/// producer that has no batch in the log is unknown, and any sequence is accepted as its first.
pub(super) fn rebuild_producer_state(
    journal: &Journal,
    config: &TopicConfig,
    now_ms: i64,
) -> Result<ProducerStateManager, ReadError> {
    let (start, end) = (journal.start(), journal.end());
    let (from, loaded) = journal
        .snapshot()
        .filter(|(offset, _)| (start..=end).contains(offset))
        .and_then(|(offset, bytes)| ProducerStateManager::load(&bytes).ok().map(|loaded| (offset, loaded)))
        .unwrap_or_else(|| (start, Loaded::default()));
    let mut producers = loaded.producers;
    if !loaded.has_aborted && start < from {
        find_aborted(journal, from, &mut producers)?;
    }
    for_each_whole(journal, from, journal.end(), &mut |frame, bytes| {
        // The first batch may begin below, if the log starts inside it.
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

/// Rebuilds the aborted transaction index below `until`, for a snapshot that was too small for it.
fn find_aborted(
    journal: &Journal,
    until: i64,
    producers: &mut ProducerStateManager,
) -> Result<(), ReadError> {
    let mut before = ProducerStateManager::default();
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

/// Walks the readable batches. A damaged replica accepts no appends; it is reported as damaged, and discarded as soon
/// as another in-sync replica exists.
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
                next = journal.next_readable(offset.max(next))?.max(next + 1);
            }
            other => return other,
        }
    }
    Ok(())
}

/// Applies a batch that a leader appended, or that was appended before a restart. Its producer counts as active now:
/// client timestamps must not decide about producer expiration.
fn note(producers: &mut ProducerStateManager, header: &BatchHeader, batch: &[u8], now_ms: i64) {
    if header.has_producer() {
        producers.on_append(now_ms, &batch_info(header, batch), header.base_offset, header.last_offset());
    }
}

/// Drops aborted transactions whose markers were compacted away: a snapshot may be older than the last compaction.
fn forget_compacted(journal: &Journal, producers: &mut ProducerStateManager) -> Result<(), ReadError> {
    let mut failure = None;
    producers.retain_aborted(|aborted| {
        let mut there = false;
        let mut visit = |frame: &Frame, _: &[u8]| {
            there = frame.last == aborted.last_offset;
            false
        };
        let visited = journal.for_each_frame(aborted.last_offset, aborted.last_offset + 1, &mut visit);
        match visited {
            // Unknown whether the marker still exists: the transaction stays aborted.
            Err(ReadError::Damaged { .. }) => return true,
            Err(error) => failure = Some(error),
            Ok(()) => {}
        }
        there
    });
    failure.map_or(Ok(()), Err)
}
