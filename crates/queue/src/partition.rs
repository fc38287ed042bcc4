//! One copy of a partition: its journal, what it knows of producers, and who waits for it.
//!
//! The replica driver (`moim_replica::driver`) decides whether this copy leads or follows and how far it is committed, and
//! says so through [`copy`]. This owns the order of appends (under the partition's lock, one after the other, and only
//! while it leads), producer state, the last stable offset, and who is told what.
//!
//! Locks: first the driver's lock of the copy, then the partition's. Appends happen under both; nothing here calls the
//! driver while it holds the partition's lock alone.
//!
//! Invariants:
//! - the high watermark never goes back, except when the log itself is cut below it (an election that lost data);
//! - nothing at or above it is given to a consumer, and no produce with `acks=all` is answered before it passed its records;
//! - a batch is appended only under the leader epoch in which this copy leads: the lock under which that is checked is the
//!   one under which a leadership ends;
//! - producer state is exactly what replaying the journal from its start up to `State::applied` would give, on followers too.

mod check;
mod copy;
mod read;
#[cfg(test)]
mod tests;
mod transactions;
mod waiting;

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
use self::transactions::MarkerAttempts;
use self::waiting::{Told, Waiters};
use crate::completions::Completions;
use crate::config::TopicConfig;
use crate::loops::{Loops, Wake, lock};
use crate::producers::{BatchInfo, Check, Producers, RefusedBatches, Stragglers};

pub(crate) use self::check::{batch_info, compression_allowed};
pub(crate) use self::copy::Copy;
pub(crate) use self::read::{Fetched, Standing};
pub(crate) use self::transactions::{TxnMarker, VerificationGuard};
pub(crate) use self::waiting::{Ack, Call, PendingAcks};

/// No batch may decompress to more than this, whatever it claims.
pub(crate) const MAX_DECOMPRESSED_BYTES: usize = 128 << 20;

/// Compressing a byte takes about as long as looking at so many.
const RECOMPRESSION_COST: usize = 16;
/// Uncompressed bytes that are looked at in the time that one is decompressed and looked at.
const PLAIN_BYTES_PER_WORK: usize = 4;

/// Stands for "does not lead" where a leader epoch is kept.
const NOT_LEADING: i32 = -1;

/// One copy of a partition, on this node.
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) topic_id: TopicId,
    pub(crate) index: i32,
    /// What the journal reports this partition's progress under.
    pub(crate) tag: usize,
    pub(crate) journal: Arc<Journal>,
    pub(crate) config: Arc<ArcSwap<TopicConfig>>,
    around: Around,
    replicated: OnceLock<Arc<Replicated>>,
    /// The leader epoch under which this copy leads, or [`NOT_LEADING`]. A copy of what `state` says, to be read without
    /// the lock.
    leading: AtomicI32,
    /// The newest leadership this copy has heard of.
    leader_epoch: AtomicI32,
    /// Where its own leadership began: what is below was perhaps announced by leaders before it.
    epoch_start: AtomicI64,
    high_watermark: AtomicI64,
    last_stable: AtomicI64,
    /// What everybody is told from now on, once the copy is gone from here; 0 until then.
    closed: AtomicI16,
    state: Mutex<State>,
}

/// What a partition needs of its broker.
#[derive(Clone)]
pub(crate) struct Around {
    pub(crate) loops: Arc<Loops>,
    pub(crate) clock: Arc<dyn Clock>,
    /// Where partitions that keep a coordinator's state say who leads them.
    pub(crate) roles: Completions<RoleChange>,
    /// Whether this is one of those.
    pub(crate) keeps_state: bool,
}

/// Something a coordinator must act on.
pub(crate) enum RoleChange {
    /// This node leads the partition, and everything in it is committed.
    Leads(Arc<Partition>, i32),
    /// It does not lead it any more.
    Resigned(Arc<Partition>),
}

struct State {
    /// Invariant: at least the epoch of every batch in the journal, while it leads.
    leading: Option<i32>,
    /// Coordinators are to be told once the high watermark has reached the start of the leadership.
    to_announce: bool,
    producers: Producers,
    refused: RefusedBatches,
    stragglers: Stragglers,
    attempts: MarkerAttempts,
    /// Somebody else has led since this node runs.
    followed: bool,
    /// Producer state covers everything below. On followers the journal may be ahead for a moment.
    applied: i64,
    waiters: Waiters,
}

impl State {
    /// Whether a batch may be appended now. One that stands at a gap which its client did not make comes again.
    fn check(&mut self, now_ms: i64, batch: &BatchInfo) -> Check {
        let check = self.producers.check(now_ms, batch);
        let follows = match check {
            Check::Reject(ErrorCode::OutOfOrderSequenceNumber) => false,
            // Any sequence is a beginning when nothing is known; this one may be known not to be.
            Check::Append => {
                batch.base_sequence <= 0 || self.producers.last_offset(batch.producer_id).is_some()
            }
            _ => true,
        };
        if follows {
            return check;
        }
        if let Some(code) = self.refused.before(now_ms, batch) {
            return Check::Reject(code);
        }
        if self.stragglers.is_early(now_ms, batch) {
            return Check::Reject(ErrorCode::NotEnoughReplicas);
        }
        check
    }

    /// A batch is in the log.
    fn on_there(&mut self, batch: &BatchInfo) {
        self.refused.on_there(batch);
        self.stragglers.on_there(batch);
    }
}

/// What became of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Appended {
    pub(crate) base_offset: i64,
    /// Committed once the high watermark reaches this, in the leadership of `epoch`.
    pub(crate) end: i64,
    pub(crate) epoch: i32,
    pub(crate) log_append_time_ms: i64,
}

/// Why something was refused, in the protocol's terms.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {}", code.name(), message.as_deref().unwrap_or(code.message()))]
pub struct Refused {
    /// The protocol's error.
    pub code: ErrorCode,
    /// What a person should know besides.
    pub message: Option<String>,
    /// Which records of a batch are at fault, where single ones are.
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

/// What a client asks for and where it is checked.
pub(crate) struct FromClient<'a> {
    pub(crate) now_ms: i64,
    /// Whether the whole in-sync set is to have it (`acks=all`).
    pub(crate) acks_all: bool,
    /// Asks the coordinator about a transaction that is not open here. Passed the guard taken just now; returns it
    /// verified, or another one that was taken and verified before.
    pub(crate) verify: &'a dyn Fn(VerificationGuard) -> Result<VerificationGuard, ErrorCode>,
    /// How much may be done on this thread, in bytes of records to look at; what was done is taken off.
    pub(crate) work: &'a Cell<usize>,
}

/// Why a client's batch was not appended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotAppended {
    Refused(Refused),
    /// It takes more work than this thread may do: nothing has happened, try again where there is time.
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

/// A batch that is ready to be appended.
struct Ready {
    batch: Bytes,
    header: BatchHeader,
    now_ms: i64,
    log_append_time_ms: i64,
    acks_all: bool,
    /// Only in this leadership.
    leader_epoch: Option<i32>,
    guard: Option<VerificationGuard>,
    marker: Option<TxnMarker>,
}

impl Ready {
    /// A batch that this broker made.
    fn new(batch: Bytes, header: BatchHeader, now_ms: i64) -> Self {
        let (log_append_time_ms, acks_all, leader_epoch) = (-1, true, None);
        let (guard, marker) = (None, None);
        Self { batch, header, now_ms, log_append_time_ms, acks_all, leader_epoch, guard, marker }
    }
}

impl Partition {
    /// A copy over a recovered journal; it neither leads nor follows until the driver says so.
    pub(crate) fn open(
        topic: Arc<str>,
        topic_id: TopicId,
        index: i32,
        (tag, journal): (usize, Arc<Journal>),
        config: Arc<ArcSwap<TopicConfig>>,
        around: Around,
    ) -> Result<Self, ReadError> {
        let producers = copy::rebuild(&journal, &config.load(), around.clock.wall_ms())?;
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
            around,
            replicated: OnceLock::new(),
            leading: AtomicI32::new(NOT_LEADING),
            leader_epoch: AtomicI32::new(last_epoch),
            epoch_start: AtomicI64::new(0),
            // Not known before the driver says so.
            high_watermark: AtomicI64::new(start),
            last_stable: AtomicI64::new(start),
            closed: AtomicI16::new(0),
            state: Mutex::new(State {
                leading: None,
                to_announce: false,
                producers,
                refused: RefusedBatches::default(),
                stragglers: Stragglers::default(),
                attempts: MarkerAttempts::default(),
                followed: false,
                applied,
                waiters: Waiters::default(),
            }),
        })
    }

    /// The offset below which records are committed.
    pub(crate) fn high_watermark(&self) -> i64 {
        self.high_watermark.load(Ordering::Acquire)
    }

    /// The offset below which every transaction has ended.
    pub(crate) fn last_stable(&self) -> i64 {
        self.last_stable.load(Ordering::Acquire)
    }

    /// The newest leadership this copy knows of: its own while it leads.
    pub(crate) fn leader_epoch(&self) -> i32 {
        self.leader_epoch.load(Ordering::Acquire)
    }

    /// The leader epoch in which this copy leads, if it does.
    pub(crate) fn leading(&self) -> Option<i32> {
        Some(self.leading.load(Ordering::Acquire)).filter(|epoch| *epoch != NOT_LEADING)
    }

    /// Whether no other node has, or is to have, a copy.
    pub(crate) fn is_only_copy(&self) -> bool {
        let record = self.replicated.get().and_then(|replicated| replicated.record());
        record.is_some_and(|record| record.value.replicas.len() <= 1)
    }

    /// Whether this copy follows a leader.
    pub(crate) fn follows(&self) -> bool {
        self.replicated.get().is_some_and(|replicated| replicated.leader().is_some())
    }

    /// Whether a leader has heard of everything that was committed before it.
    pub(crate) fn knows_the_end(&self) -> bool {
        self.high_watermark() >= self.epoch_start.load(Ordering::Acquire)
    }

    /// What the driver knows of this copy.
    pub(crate) fn replicated(&self) -> Option<&Arc<Replicated>> {
        self.replicated.get()
    }

    /// Why nothing is done here any more, once that is so.
    fn closed(&self) -> Option<ErrorCode> {
        match self.closed.load(Ordering::Acquire) {
            0 => None,
            code => Some(ErrorCode::try_from(code).unwrap_or(ErrorCode::UnknownTopicOrPartition)),
        }
    }

    /// Checks a batch from a client and appends it.
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

    /// Checks a batch, looking at no more than `work` bytes of its records. Answers how many there are.
    fn validate(
        &self,
        batch: &Bytes,
        config: &TopicConfig,
        work: usize,
    ) -> Result<(BatchHeader, usize), NotAppended> {
        let limit = work.min(MAX_DECOMPRESSED_BYTES);
        // Uncompressed records are looked at where they are; four of their bytes cost what one decompressed byte does.
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

    /// Has the first batch of a transaction verified by its coordinator.
    fn verify_transaction(
        &self,
        header: &BatchHeader,
        batch: &[u8],
        client: &FromClient<'_>,
    ) -> Result<Option<VerificationGuard>, Refused> {
        let producer = (header.producer_id, header.producer_epoch);
        let Some(guard) = self.begin_verification(producer, header.base_sequence) else { return Ok(None) };
        let verified = (client.verify)(guard).inspect_err(|code| {
            // The batches behind it must not be taken for the beginning.
            self.on_refused(client.now_ms, &batch_info(header, batch), *code);
        });
        Ok(Some(verified?))
    }

    /// Appends a batch this broker made itself, in this leadership only if one is given. `guard` is for one that is part
    /// of a transaction.
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

    /// A batch was not appended, for the moment: those behind it wait for it.
    pub(crate) fn on_refused(&self, now_ms: i64, batch: &BatchInfo, code: ErrorCode) {
        lock(&self.state).refused.on_refused(now_ms, batch, code);
    }

    /// Appends in a leadership. The driver calls this back under its lock, so the leadership lasts until it returns.
    fn append_in(&self, epoch: i32, ready: Ready, info: Option<&BatchInfo>) -> Result<Appended, Refused> {
        let Ready { batch, header, now_ms, log_append_time_ms, leader_epoch, guard, marker, .. } = ready;
        let mut state = lock(&self.state);
        if let Some(code) = self.closed() {
            return Err(code.into());
        }
        if leader_epoch.is_some_and(|meant| meant != epoch) {
            return Err(ErrorCode::NotLeaderOrFollower.into());
        }
        assert_eq!(state.leading, Some(epoch), "the driver has told in which epoch this copy leads");
        if let Some(info) = info {
            match state.check(now_ms, info) {
                Check::Append => {}
                Check::Duplicate { base_offset, last_offset, timestamp } => {
                    state.on_there(info);
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
            state.on_there(info);
        }
        if let Some(marker) = &marker {
            state.on_marker(marker);
        }
        state.applied = last + 1;
        Ok(Appended { base_offset: base, end: last + 1, epoch, log_append_time_ms })
    }

    /// Calls `ack` once what was appended is committed; at once when it already is.
    pub(crate) fn when_committed(&self, appended: &Appended, ack: Ack) {
        self.when(appended, ack, |state, ack| {
            if self.high_watermark() >= appended.end {
                return Some(ack);
            }
            state.waiters.wait_committed(appended.end, ack);
            None
        });
    }

    /// Calls `ack` once this node's own disk has what was appended, whatever the others have: `acks=1`.
    pub(crate) fn when_stored(&self, appended: &Appended, ack: Ack) {
        self.when(appended, ack, |state, ack| {
            if self.journal.durable_end() >= appended.end {
                return Some(ack);
            }
            state.waiters.wait_stored(appended.end, ack);
            None
        });
    }

    /// Has `ack` wait, unless `wait` gives it back because it need not, or the leadership it hopes for has ended.
    fn when(&self, appended: &Appended, ack: Ack, wait: impl FnOnce(&mut State, Ack) -> Option<Ack>) {
        let mut state = lock(&self.state);
        let lost = match state.leading {
            _ if self.closed().is_some() => self.closed(),
            // Another leadership: these offsets may hold something else by now.
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
            // Never held for this partition, so there is nothing to give up.
            Ack::Produce(pending, at) => pending.note(at, outcome),
            Ack::Call(call) => call(outcome),
        }
    }

    /// The journal has got further. How far is asked of it: news may be late, and meant for a deleted partition that
    /// had the same tag.
    pub(crate) fn on_durable(&self) {
        let told = {
            let mut state = lock(&self.state);
            let mut told = Told::default();
            if !state.waiters.none_for_disk() {
                state.waiters.on_stored(self.journal.durable_end(), &mut told);
            }
            told
        };
        told.tell(&self.around.loops);
        if let Some(replicated) = self.replicated.get() {
            replicated.on_durable();
        }
    }

    /// Asks to be woken when there is something to read at `wanted`. False when there is already.
    pub(crate) fn wait_for(&self, wanted: i64, stable_only: bool, wake: &Arc<Wake>) -> bool {
        let mut state = lock(&self.state);
        let limit = if stable_only { self.last_stable() } else { self.high_watermark() };
        if wanted < limit || self.closed().is_some() {
            return false;
        }
        state.waiters.wait_for_data(wanted, stable_only, wake);
        true
    }

    /// Takes back [`Self::wait_for`].
    pub(crate) fn stop_waiting(&self, connection: u64) {
        lock(&self.state).waiters.stop_waiting(connection);
    }

    /// Whether the lock is held right now.
    pub(crate) fn is_locked(&self) -> bool {
        matches!(self.state.try_lock(), Err(std::sync::TryLockError::WouldBlock))
    }

    /// Forgets producers that were silent for longer than `max_idle_ms`.
    pub(crate) fn expire_producers(&self, now_ms: i64, max_idle_ms: i64) {
        let mut state = lock(&self.state);
        let State { producers, attempts, .. } = &mut *state;
        producers.expire(now_ms, max_idle_ms);
        attempts.retain(|producer_id| producers.last_offset(producer_id).is_some());
    }

    /// Runs `f` on the producer state.
    pub(crate) fn with_producers<T>(&self, f: impl FnOnce(&mut Producers) -> T) -> T {
        f(&mut lock(&self.state).producers)
    }

    /// Moves the log start up. What lies below is gone from here for good when this returns; followers hear of it at once.
    pub(crate) fn delete_records(&self, to: i64) -> Result<i64, ErrorCode> {
        let high_watermark = self.high_watermark();
        let to = if to == -1 { high_watermark } else { to };
        if to < 0 || to > high_watermark {
            return Err(ErrorCode::OffsetOutOfRange);
        }
        if to > self.journal.start() {
            self.journal.set_start(to).map_err(|e| {
                tracing::warn!(topic = %self.topic, partition = self.index, error = %e, "could not delete records");
                ErrorCode::KafkaStorageError
            })?;
            self.on_log_start();
            if let Some(replicated) = self.replicated.get() {
                replicated.on_log_start();
            }
        }
        Ok(self.journal.start())
    }

    /// Waits until what lies below `start` is gone from everybody in sync; answers where their logs start.
    pub(crate) async fn gone_everywhere(&self, start: i64) -> Result<i64, ErrorCode> {
        let Some(replicated) = self.replicated.get() else { return Ok(self.journal.start()) };
        let low = replicated.gone_everywhere(Offset(start)).await;
        low.map(|low| low.0).map_err(|error| refuse_ack(error).code)
    }

    /// Where the logs of everybody in sync start at the latest.
    pub(crate) fn low_watermark(&self) -> i64 {
        let low = self.replicated.get().and_then(|replicated| replicated.low_watermark());
        low.map_or(self.journal.start(), |low| low.0)
    }

    /// The log start moved (retention, DeleteRecords): producer state forgets what lies below. A snapshot from below it
    /// could not be used any more, so another one takes its place.
    pub(crate) fn on_log_start(&self) {
        let mut state = lock(&self.state);
        let start = self.journal.start();
        state.producers.on_log_start(start);
        self.last_stable.fetch_max(start, Ordering::AcqRel);
        if self.journal.snapshot().is_some_and(|(offset, _)| offset < start) {
            self.keep_snapshot(&state);
        }
    }

    /// Keeps a copy of the producer state with the journal, so that a restart replays little.
    pub(crate) fn snapshot_producers(&self) {
        let state = lock(&self.state);
        // One that says that there are no producers is worth as much: without it a restart reads the whole log.
        let kept = self.journal.snapshot().map(|(offset, _)| offset);
        if !state.producers.is_empty() || kept.unwrap_or_else(|| self.journal.start()) != state.applied {
            self.keep_snapshot(&state);
        }
    }

    /// One that is too large is not kept: a restart then replays from the one before, or all of the log.
    fn keep_snapshot(&self, state: &State) {
        match state.producers.snapshot() {
            Some(bytes) => self.journal.put_snapshot(state.applied, Bytes::from(bytes)),
            None => {
                let (topic, partition) = (&self.topic, self.index);
                tracing::debug!(%topic, partition, "producer snapshot too large; a restart replays the log");
            }
        }
    }

    /// Stops serving: everybody who waits, and everybody who comes, is told `code`. The driver has let go of the copy and
    /// says nothing more, so a leadership ends here too.
    pub(crate) fn close(self: &Arc<Self>, code: ErrorCode) {
        let told = {
            let mut state = lock(&self.state);
            self.closed.store(code as i16, Ordering::Release);
            self.leading.store(NOT_LEADING, Ordering::Release);
            if state.leading.take().is_some() && self.around.keeps_state {
                self.around.roles.push(RoleChange::Resigned(Arc::clone(self)));
            }
            let mut told = Told::default();
            state.waiters.fail_all(code, &mut told);
            told
        };
        told.tell(&self.around.loops);
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
