//! One replica of a partition: its journal, its producer state, and its purgatory of delayed produces and fetches.
//!
//! The replica driver (`moim_replica::driver`) decides whether this replica leads or follows and how far it is
//! committed, and reports that through [`replica`]. This module owns the order of appends (under the partition's
//! lock, one after the other, and only as leader), producer state, the last stable offset, and the completion of
//! delayed requests.
//!
//! Lock order: first the driver's lock of the replica, then the partition's lock. Appends happen under both; nothing
//! here calls the driver while it holds only the partition's lock.
//!
//! Invariants:
//! - the high watermark never moves back, except when the log itself is truncated below it (an unclean election);
//! - no record at or above it is returned to a consumer, and no produce with `acks=all` is acknowledged before it
//!   passed its records;
//! - a batch is appended only under the leader epoch in which this replica leads: leadership is checked and ended
//!   under the same lock;
//! - producer state is exactly what a replay of the journal from its start up to `State::applied` gives, on followers
//!   too.

mod check;
mod purgatory;
mod read;
mod replica;
#[cfg(test)]
mod tests;
mod transactions;

use std::cell::Cell;
use std::sync::atomic::{AtomicI16, AtomicI32, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};

use moim_base::{Clock, LeaderEpoch, Offset, TopicId};
use moim_journal::{Append, Journal, ReadError};
use moim_replica::AckError;
use moim_replica::driver::Replicated;
use moim_wire_kafka::compression::Compression;
use moim_wire_kafka::error::ErrorCode;
use moim_wire_kafka::records::{self, BatchHeader, PATCH_LEN, RecordsError, ValidateLimits};

use self::check::{check_timestamps, keyless_records, refuse_append, refuse_records};
use self::purgatory::{Notifications, Purgatory};
use self::transactions::MarkerAttempts;
use crate::completions::Completions;
use crate::config::TopicConfig;
use crate::loops::{Loops, Wake, lock};
use crate::producer_state::{BatchInfo, Check, ProducerStateManager, RejectedBatches, ReorderedBatches};

pub(crate) use self::check::{batch_info, compression_allowed};
pub(crate) use self::purgatory::{Ack, Call, DelayedProduce};
pub(crate) use self::read::{Fetched, OffsetSnapshot};
pub(crate) use self::replica::ReplicaOwner;
pub(crate) use self::transactions::{TxnMarker, VerificationGuard};

/// Maximum decompressed size of a batch, whatever its header claims.
pub(crate) const MAX_DECOMPRESSED_BYTES: usize = 128 << 20;

/// Cost of compressing a byte, in bytes validated.
const RECOMPRESSION_COST: usize = 16;
/// Uncompressed bytes that are validated in the time that one byte is decompressed and validated.
const PLAIN_BYTES_PER_WORK: usize = 4;

/// The value of a leader epoch while this replica does not lead.
const NOT_LEADING: i32 = -1;

/// One replica of a partition, on this node.
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) topic_id: TopicId,
    pub(crate) index: i32,
    /// The tag of this partition in the journal's durability notifications.
    pub(crate) tag: usize,
    pub(crate) journal: Arc<Journal>,
    pub(crate) config: Arc<ArcSwap<TopicConfig>>,
    context: PartitionContext,
    replicated: OnceLock<Arc<Replicated>>,
    /// The leader epoch under which this replica leads, or [`NOT_LEADING`]. Mirrors `state`, to be read without the
    /// lock.
    leading: AtomicI32,
    /// The newest leader epoch this replica knows.
    leader_epoch: AtomicI32,
    /// The start offset of this replica's own leader epoch: records below it may have been acknowledged by previous
    /// leaders.
    epoch_start: AtomicI64,
    high_watermark: AtomicI64,
    last_stable: AtomicI64,
    /// The error of every request after the replica was closed; 0 until then.
    closed: AtomicI16,
    state: Mutex<State>,
}

/// What a partition needs from its broker.
#[derive(Clone)]
pub(crate) struct PartitionContext {
    pub(crate) loops: Arc<Loops>,
    pub(crate) clock: Arc<dyn Clock>,
    /// The queue of role changes for the coordinators.
    pub(crate) roles: Completions<RoleChange>,
    /// True if this partition holds coordinator state.
    pub(crate) is_coordinator_log: bool,
}

/// A role change that a coordinator must follow.
pub(crate) enum RoleChange {
    /// This node leads the partition under this leader epoch, and its whole log is committed.
    Elected(Arc<Partition>, i32),
    /// This node no longer leads the partition.
    Resigned(Arc<Partition>),
}

struct State {
    /// Invariant: at least the leader epoch of every batch in the journal, while this replica leads.
    leading: Option<i32>,
    /// True if the coordinators are to be notified once the high watermark has reached the start of the leader epoch.
    announce_pending: bool,
    producers: ProducerStateManager,
    refused: RejectedBatches,
    reordered: ReorderedBatches,
    attempts: MarkerAttempts,
    /// True if another node has led the partition since this node started.
    has_followed: bool,
    /// Producer state covers the log below this offset. On followers the journal may be ahead for a moment.
    applied: i64,
    purgatory: Purgatory,
}

impl State {
    /// Checks the sequence of a batch. A batch after a gap that its client did not cause gets a retriable error.
    fn check(&mut self, now_ms: i64, batch: &BatchInfo) -> Check {
        let check = self.producers.check(now_ms, batch);
        let is_follower = match check {
            Check::Reject(ErrorCode::OutOfOrderSequenceNumber) => false,
            // An unknown producer may begin with any sequence, unless earlier batches of it are known to be missing.
            Check::Append => {
                batch.base_sequence <= 0 || self.producers.last_offset(batch.producer_id).is_some()
            }
            _ => true,
        };
        if is_follower {
            return check;
        }
        if let Some(code) = self.refused.before(now_ms, batch) {
            return Check::Reject(code);
        }
        if self.reordered.must_retry(now_ms, batch) {
            return Check::Reject(ErrorCode::NotEnoughReplicas);
        }
        check
    }

    /// A batch is in the log.
    fn on_appended(&mut self, batch: &BatchInfo) {
        self.refused.on_appended(batch);
        self.reordered.on_appended(batch);
    }
}

/// The result of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Appended {
    pub(crate) base_offset: i64,
    /// The append is committed once the high watermark reaches this offset, under leader epoch `epoch`.
    pub(crate) end: i64,
    pub(crate) epoch: i32,
    pub(crate) log_append_time_ms: i64,
}

/// A rejected operation, in the protocol's terms.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {}", code.name(), message.as_deref().unwrap_or(code.message()))]
pub struct Refused {
    /// The protocol's error code.
    pub code: ErrorCode,
    /// The error message for people.
    pub message: Option<String>,
    /// The rejected records of a batch, if single ones are invalid.
    pub records: Vec<i32>,
}

impl Refused {
    pub(crate) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: Some(message.into()), records: Vec::new() }
    }
}

impl From<ErrorCode> for Refused {
    fn from(code: ErrorCode) -> Self {
        Self { code, message: None, records: Vec::new() }
    }
}

/// The context of a client's append.
pub(crate) struct FromClient<'a> {
    pub(crate) now_ms: i64,
    /// True if the whole in-sync set must acknowledge (`acks=all`).
    pub(crate) acks_all: bool,
    /// Verifies with the transaction coordinator a transaction that is not open here. Gets the guard taken just now;
    /// returns it verified, or a guard that was taken and verified earlier.
    pub(crate) verify: &'a dyn Fn(VerificationGuard) -> Result<VerificationGuard, ErrorCode>,
    /// Remaining work budget of this thread, in record bytes to validate; the append deducts its work.
    pub(crate) work: &'a Cell<usize>,
}

/// Why a client's batch was not appended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotAppended {
    Refused(Refused),
    /// The batch needs more work than this thread may do: nothing was changed; retry off the loop.
    TooMuchWork,
}

impl From<Refused> for NotAppended {
    fn from(refused: Refused) -> Self {
        Self::Refused(refused)
    }
}

impl From<ErrorCode> for NotAppended {
    fn from(code: ErrorCode) -> Self {
        Self::Refused(code.into())
    }
}

/// A validated batch, ready for the append.
struct Ready {
    batch: Bytes,
    header: BatchHeader,
    now_ms: i64,
    log_append_time_ms: i64,
    acks_all: bool,
    /// Append only under this leader epoch.
    leader_epoch: Option<i32>,
    guard: Option<VerificationGuard>,
    marker: Option<TxnMarker>,
}

impl Ready {
    /// A batch that this broker created.
    fn new(batch: Bytes, header: BatchHeader, now_ms: i64) -> Self {
        let (log_append_time_ms, acks_all, leader_epoch) = (-1, true, None);
        let (guard, marker) = (None, None);
        Self { batch, header, now_ms, log_append_time_ms, acks_all, leader_epoch, guard, marker }
    }
}

impl Partition {
    /// A replica over a recovered journal; it neither leads nor follows until the driver assigns a role.
    pub(crate) fn open(
        topic: Arc<str>,
        topic_id: TopicId,
        index: i32,
        (tag, journal): (usize, Arc<Journal>),
        config: Arc<ArcSwap<TopicConfig>>,
        context: PartitionContext,
    ) -> Result<Self, ReadError> {
        let producers = replica::rebuild_producer_state(&journal, &config.load(), context.clock.wall_ms())?;
        let applied = journal.end();
        let start = journal.start();
        let last_epoch = journal.epochs().last().map_or(0, |(epoch, _)| *epoch);
        Ok(Self {
            topic,
            topic_id,
            index,
            tag,
            journal,
            config,
            context,
            replicated: OnceLock::new(),
            leading: AtomicI32::new(NOT_LEADING),
            leader_epoch: AtomicI32::new(last_epoch),
            epoch_start: AtomicI64::new(0),
            // Unknown until the driver reports it.
            high_watermark: AtomicI64::new(start),
            last_stable: AtomicI64::new(start),
            closed: AtomicI16::new(0),
            state: Mutex::new(State {
                leading: None,
                announce_pending: false,
                producers,
                refused: RejectedBatches::default(),
                reordered: ReorderedBatches::default(),
                attempts: MarkerAttempts::default(),
                has_followed: false,
                applied,
                purgatory: Purgatory::default(),
            }),
        })
    }

    /// The high watermark: records below this offset are committed.
    pub(crate) fn high_watermark(&self) -> i64 {
        self.high_watermark.load(Ordering::Acquire)
    }

    /// The last stable offset: every transaction below it has ended.
    pub(crate) fn last_stable(&self) -> i64 {
        self.last_stable.load(Ordering::Acquire)
    }

    /// The newest known leader epoch; its own while this replica leads.
    pub(crate) fn leader_epoch(&self) -> i32 {
        self.leader_epoch.load(Ordering::Acquire)
    }

    /// The leader epoch under which this replica leads, if it does.
    pub(crate) fn leading(&self) -> Option<i32> {
        Some(self.leading.load(Ordering::Acquire)).filter(|epoch| *epoch != NOT_LEADING)
    }

    /// True if no other node has, or is assigned, a replica.
    pub(crate) fn is_only_replica(&self) -> bool {
        let record = self.replicated.get().and_then(|replicated| replicated.record());
        record.is_some_and(|record| record.value.replicas.len() <= 1)
    }

    /// True if this replica follows a leader.
    pub(crate) fn is_follower(&self) -> bool {
        self.replicated.get().is_some_and(|replicated| replicated.leader().is_some())
    }

    /// True if the high watermark has reached the start of this leader's epoch: it then covers all previous commits.
    pub(crate) fn has_committed_in_epoch(&self) -> bool {
        self.high_watermark() >= self.epoch_start.load(Ordering::Acquire)
    }

    /// The driver's state of this replica.
    pub(crate) fn replicated(&self) -> Option<&Arc<Replicated>> {
        self.replicated.get()
    }

    /// The error of a closed replica.
    fn closed(&self) -> Option<ErrorCode> {
        match self.closed.load(Ordering::Acquire) {
            0 => None,
            code => Some(ErrorCode::try_from(code).unwrap_or(ErrorCode::UnknownTopicOrPartition)),
        }
    }

    /// Validates a client's batch and appends it.
    pub(crate) fn append_from_client(
        &self,
        batch: &Bytes,
        client: &FromClient<'_>,
    ) -> Result<Appended, NotAppended> {
        let (config, now_ms) = (self.config.load(), client.now_ms);
        if batch.len() > config.max_message_bytes {
            let (has, takes) = (batch.len(), config.max_message_bytes);
            let why = format!("The batch has {has} bytes; the topic takes {takes} (max.message.bytes).");
            return Err(Refused::new(ErrorCode::MessageTooLarge, why).into());
        }
        let (mut header, size) = self.validate(batch, &config, client.work.get())?;
        if header.is_control() {
            let why = "Clients may not write control batches.";
            return Err(Refused::new(ErrorCode::InvalidRecord, why).into());
        }
        check_timestamps(&header, &config, now_ms)?;
        let recompresses = config.compression.is_some_and(|to| header.compression().ok() != Some(to));
        let cost = if recompresses { size.saturating_mul(RECOMPRESSION_COST) } else { size };
        if cost > client.work.get() {
            return Err(NotAppended::TooMuchWork);
        }
        client.work.set(client.work.get() - cost);
        let batch = records::repair_max_timestamp(batch, &mut header);
        let batch = match config.compression {
            Some(to) if recompresses => {
                records::recompress(&batch, to, MAX_DECOMPRESSED_BYTES).map_err(refuse_records)?
            }
            _ => batch,
        };
        let (batch, log_append_time_ms) = if config.log_append_time {
            let mut own = BytesMut::from(&batch[..]);
            records::set_log_append_time(&mut own, now_ms);
            (own.freeze(), now_ms)
        } else {
            (batch, -1)
        };
        let header = BatchHeader::parse(&batch).ok_or(ErrorCode::CorruptMessage)?;
        let guard =
            if header.is_transactional() { self.verify_transaction(&header, &batch, client)? } else { None };
        let acks_all = client.acks_all;
        Ok(self.append(Ready { log_append_time_ms, acks_all, guard, ..Ready::new(batch, header, now_ms) })?)
    }

    /// Validates a batch with at most `work` bytes of its records. Returns the record count.
    fn validate(
        &self,
        batch: &Bytes,
        config: &TopicConfig,
        work: usize,
    ) -> Result<(BatchHeader, usize), NotAppended> {
        let limit = work.min(MAX_DECOMPRESSED_BYTES);
        // Uncompressed records are validated in place; four of their bytes cost as much as one decompressed byte.
        let plain =
            BatchHeader::parse(batch).is_some_and(|header| header.compression() == Ok(Compression::None));
        if plain && batch.len() / PLAIN_BYTES_PER_WORK > work {
            return Err(NotAppended::TooMuchWork);
        }
        let limits = ValidateLimits { max_decompressed_bytes: limit, require_keys: config.compact };
        match records::validate_batch_sized(batch, &limits) {
            Ok((header, size)) => Ok((header, if plain { size / PLAIN_BYTES_PER_WORK } else { size })),
            Err(RecordsError::TooLarge) if limit < MAX_DECOMPRESSED_BYTES => Err(NotAppended::TooMuchWork),
            Err(error) => {
                let keyless = error == RecordsError::Keyless;
                let mut refused = refuse_records(error);
                if keyless {
                    refused.records = keyless_records(batch);
                }
                Err(refused.into())
            }
        }
    }

    /// Verifies the first batch of a transaction with its coordinator.
    fn verify_transaction(
        &self,
        header: &BatchHeader,
        batch: &[u8],
        client: &FromClient<'_>,
    ) -> Result<Option<VerificationGuard>, Refused> {
        let producer = (header.producer_id, header.producer_epoch);
        let Some(guard) = self.begin_verification(producer, header.base_sequence) else { return Ok(None) };
        let verified = (client.verify)(guard).inspect_err(|code| {
            // Later batches of the producer must not be taken for its first.
            self.on_refused(client.now_ms, &batch_info(header, batch), *code);
        });
        Ok(Some(verified?))
    }

    /// Appends a batch that this broker created, under a given leader epoch only if one is set. `guard` is for a
    /// batch of a transaction.
    pub(crate) fn append_own(
        &self,
        batch: Bytes,
        now_ms: i64,
        leader_epoch: Option<i32>,
        guard: Option<VerificationGuard>,
    ) -> Result<Appended, Refused> {
        let header = BatchHeader::parse(&batch).ok_or(ErrorCode::CorruptMessage)?;
        self.append(Ready { leader_epoch, guard, ..Ready::new(batch, header, now_ms) })
    }

    fn append(&self, ready: Ready) -> Result<Appended, Refused> {
        let replicated = self.replicated.get().ok_or(ErrorCode::NotLeaderOrFollower)?;
        let (now_ms, acks_all) = (ready.now_ms, ready.acks_all);
        let info = ready.header.has_producer().then(|| batch_info(&ready.header, &ready.batch));
        let append = |epoch: LeaderEpoch| self.append_in(epoch.0, ready, info.as_ref());
        let appended = replicated.lead(acks_all, append).map_err(refuse_ack).flatten();
        if let (Err(refused), Some(info)) = (&appended, &info) {
            self.on_refused(now_ms, info, refused.code);
        }
        appended
    }

    /// A batch was rejected with a retriable error: later batches of its producer wait for it.
    pub(crate) fn on_refused(&self, now_ms: i64, batch: &BatchInfo, code: ErrorCode) {
        lock(&self.state).refused.on_refused(now_ms, batch, code);
    }

    /// Appends under a leader epoch. The driver calls this under its lock, so the leadership lasts until it returns.
    fn append_in(&self, epoch: i32, ready: Ready, info: Option<&BatchInfo>) -> Result<Appended, Refused> {
        let Ready { batch, header, now_ms, log_append_time_ms, leader_epoch, guard, marker, .. } = ready;
        let mut state = lock(&self.state);
        if let Some(code) = self.closed() {
            return Err(code.into());
        }
        if leader_epoch.is_some_and(|meant| meant != epoch) {
            return Err(ErrorCode::NotLeaderOrFollower.into());
        }
        assert_eq!(state.leading, Some(epoch), "the driver has set the leader epoch of this replica");
        if let Some(info) = info {
            match state.check(now_ms, info) {
                Check::Append => {}
                Check::Duplicate { base_offset, last_offset, timestamp } => {
                    state.on_appended(info);
                    let log_append_time_ms = if log_append_time_ms >= 0 { timestamp } else { -1 };
                    return Ok(Appended { base_offset, end: last_offset + 1, epoch, log_append_time_ms });
                }
                Check::Reject(code) => return Err(code.into()),
            }
        }
        if header.is_transactional() && !header.is_control() {
            state.check_transaction(epoch, &header, guard.as_ref())?;
        }
        if let Some(marker) = &marker {
            state.check_marker(marker)?;
        }
        let base = self.journal.end();
        let last = base + i64::from(header.last_offset_delta);
        let prefix = header.patched_prefix(base, epoch);
        let body = batch.slice(PATCH_LEN..);
        let append = Append {
            base,
            last,
            epoch,
            max_timestamp_ms: header.max_timestamp,
            prefix: &prefix,
            body: &body,
        };
        self.journal.append(append).map_err(refuse_append)?;
        if let Some(info) = info {
            state.producers.on_append(now_ms, info, base, last);
            state.on_appended(info);
        }
        if let Some(marker) = &marker {
            state.on_marker(marker);
        }
        state.applied = last + 1;
        Ok(Appended { base_offset: base, end: last + 1, epoch, log_append_time_ms })
    }

    /// Calls `ack` once the append is committed; at once if it already is.
    pub(crate) fn when_committed(&self, appended: &Appended, ack: Ack) {
        self.when(appended, ack, |state, ack| {
            if self.high_watermark() >= appended.end {
                return Some(ack);
            }
            state.purgatory.wait_committed(appended.end, ack);
            None
        });
    }

    /// Calls `ack` once this node's own disk has the append, whatever the followers have: `acks=1`.
    pub(crate) fn when_stored(&self, appended: &Appended, ack: Ack) {
        self.when(appended, ack, |state, ack| {
            if self.journal.durable_end() >= appended.end {
                return Some(ack);
            }
            state.purgatory.wait_stored(appended.end, ack);
            None
        });
    }

    /// Delays `ack`, unless `wait` returns it because no wait is needed, or its leader epoch has ended.
    fn when(&self, appended: &Appended, ack: Ack, wait: impl FnOnce(&mut State, Ack) -> Option<Ack>) {
        let mut state = lock(&self.state);
        let lost = match state.leading {
            _ if self.closed().is_some() => self.closed(),
            // Another leader epoch: these offsets may hold other records by now.
            other if other != Some(appended.epoch) => Some(ErrorCode::NotLeaderOrFollower),
            _ => None,
        };
        let (ack, outcome) = match lost {
            Some(code) => (ack, Err(code)),
            None => match wait(&mut state, ack) {
                Some(ack) => (ack, Ok(())),
                None => return,
            },
        };
        drop(state);
        match ack {
            // Never held for this partition, so there is no hold to release.
            Ack::Produce(pending, at) => pending.note(at, outcome),
            Ack::Call(call) => call(outcome),
        }
    }

    /// The journal's durable end has advanced. The position is read from the journal: the notification may be late,
    /// or meant for a deleted partition with the same tag.
    pub(crate) fn on_durable(&self) {
        let notifications = {
            let mut state = lock(&self.state);
            let mut notifications = Notifications::default();
            if !state.purgatory.is_disk_idle() {
                state.purgatory.on_stored(self.journal.durable_end(), &mut notifications);
            }
            notifications
        };
        notifications.deliver(&self.context.loops);
        if let Some(replicated) = self.replicated.get() {
            replicated.on_durable();
        }
    }

    /// Watches for data at `wanted` and wakes the connection. False if there is already data.
    pub(crate) fn wait_for(&self, wanted: i64, stable_only: bool, wake: &Arc<Wake>) -> bool {
        let mut state = lock(&self.state);
        let limit = if stable_only { self.last_stable() } else { self.high_watermark() };
        if wanted < limit || self.closed().is_some() {
            return false;
        }
        state.purgatory.wait_for_data(wanted, stable_only, wake);
        true
    }

    /// Cancels [`Self::wait_for`].
    pub(crate) fn stop_waiting(&self, connection: u64) {
        lock(&self.state).purgatory.stop_waiting(connection);
    }

    /// True if the partition's lock is currently held.
    pub(crate) fn is_locked(&self) -> bool {
        matches!(self.state.try_lock(), Err(std::sync::TryLockError::WouldBlock))
    }

    /// Expires producers that were idle for longer than `max_idle_ms`.
    pub(crate) fn expire_producers(&self, now_ms: i64, max_idle_ms: i64) {
        let mut state = lock(&self.state);
        let State { producers, attempts, .. } = &mut *state;
        producers.expire(now_ms, max_idle_ms);
        attempts.retain(|producer_id| producers.last_offset(producer_id).is_some());
    }

    /// Runs `f` on the producer state.
    pub(crate) fn with_producers<T>(&self, f: impl FnOnce(&mut ProducerStateManager) -> T) -> T {
        f(&mut lock(&self.state).producers)
    }

    /// Moves the log start offset up. The records below it are deleted from this replica when this returns; followers
    /// are notified at once.
    pub(crate) fn delete_records(&self, to: i64) -> Result<i64, ErrorCode> {
        let high_watermark = self.high_watermark();
        let to = if to == -1 { high_watermark } else { to };
        if to < 0 || to > high_watermark {
            return Err(ErrorCode::OffsetOutOfRange);
        }
        if to > self.journal.start() {
            self.journal.set_start(to).map_err(|e| {
                tracing::warn!(topic = %self.topic, partition = self.index, error = %e, "record deletion failed");
                ErrorCode::KafkaStorageError
            })?;
            self.on_log_start();
            if let Some(replicated) = self.replicated.get() {
                replicated.on_log_start();
            }
        }
        Ok(self.journal.start())
    }

    /// Waits until the log start of every in-sync replica has reached `start`; returns the low watermark.
    pub(crate) async fn wait_low_watermark(&self, start: i64) -> Result<i64, ErrorCode> {
        let Some(replicated) = self.replicated.get() else { return Ok(self.journal.start()) };
        let low = replicated.gone_everywhere(Offset(start)).await;
        low.map(|low| low.0).map_err(|error| refuse_ack(error).code)
    }

    /// The low watermark: the smallest log start offset of the in-sync set.
    pub(crate) fn low_watermark(&self) -> i64 {
        let low = self.replicated.get().and_then(|replicated| replicated.low_watermark());
        low.map_or(self.journal.start(), |low| low.0)
    }

    /// The log start offset moved (retention, DeleteRecords): producer state drops entries below it. A snapshot from
    /// below the log start could not be used any more, so a new one replaces it.
    pub(crate) fn on_log_start(&self) {
        let mut state = lock(&self.state);
        let start = self.journal.start();
        state.producers.on_log_start(start);
        self.last_stable.fetch_max(start, Ordering::AcqRel);
        if self.journal.snapshot().is_some_and(|(offset, _)| offset < start) {
            self.keep_snapshot(&state);
        }
    }

    /// Writes a producer snapshot with the journal, so that a restart replays little.
    pub(crate) fn snapshot_producers(&self) {
        let state = lock(&self.state);
        // A snapshot without producers is useful too: without it a restart reads the whole log.
        let kept = self.journal.snapshot().map(|(offset, _)| offset);
        if !state.producers.is_empty() || kept.unwrap_or_else(|| self.journal.start()) != state.applied {
            self.keep_snapshot(&state);
        }
    }

    /// A snapshot that is too large is not written: a restart then replays from the previous one, or the whole log.
    fn keep_snapshot(&self, state: &State) {
        match state.producers.snapshot() {
            Some(bytes) => self.journal.put_snapshot(state.applied, Bytes::from(bytes)),
            None => {
                let (topic, partition) = (&self.topic, self.index);
                tracing::debug!(%topic, partition, "producer snapshot too large; a restart replays the log");
            }
        }
    }

    /// Closes the replica: every waiting and every later request fails with `code`. The driver has detached the
    /// replica and reports nothing more, so the leadership ends here too.
    pub(crate) fn close(self: &Arc<Self>, code: ErrorCode) {
        let notifications = {
            let mut state = lock(&self.state);
            self.closed.store(code as i16, Ordering::Release);
            self.leading.store(NOT_LEADING, Ordering::Release);
            if state.leading.take().is_some() && self.context.is_coordinator_log {
                self.context.roles.push(RoleChange::Resigned(Arc::clone(self)));
            }
            let mut notifications = Notifications::default();
            state.purgatory.fail_all(code, &mut notifications);
            notifications
        };
        notifications.deliver(&self.context.loops);
    }
}

fn refuse_ack(error: AckError) -> Refused {
    match error {
        AckError::NotEnoughReplicas => ErrorCode::NotEnoughReplicas,
        AckError::NotEnoughReplicasAfterAppend => ErrorCode::NotEnoughReplicasAfterAppend,
        AckError::NotLeader => ErrorCode::NotLeaderOrFollower,
    }
    .into()
}
