//! One partition: its journal, what it knows of producers, and who waits for it.
//!
//! Owns the order of appends (they happen under the partition's lock, one after the other), the high
//! watermark and the last stable offset. On one node a record is committed when the journal has it on
//! stable storage, so the high watermark is the journal's durable end.
//!
//! Invariants:
//! - the high watermark never goes back;
//! - nothing at or above it is given to a consumer, and no produce is answered before it passed its records;
//! - producer state is exactly what replaying the journal from its start would give.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI16, AtomicI32, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use hashbrown::HashMap;

use moim_base::TopicId;
use moim_journal::{Append, AppendError, Journal, Read, ReadError};
use moim_wire_kafka::compression::{Compression, CompressionError};
use moim_wire_kafka::error::ErrorCode;
use moim_wire_kafka::records::{self, BatchHeader, PATCH_LEN, RecordsError, ValidateLimits};

use crate::config::TopicConfig;
use crate::loops::{Wake, lock};
use crate::producers::{AbortedTxn, BatchInfo, Check, Marker, Producers};

/// No batch may decompress to more than this, whatever it claims.
pub(crate) const MAX_DECOMPRESSED_BYTES: usize = 128 << 20;

/// A partition of a topic on this node.
pub(crate) struct Partition {
    pub(crate) topic: Arc<str>,
    pub(crate) topic_id: TopicId,
    pub(crate) index: i32,
    /// What the journal reports this partition's progress under.
    pub(crate) tag: usize,
    pub(crate) journal: Arc<Journal>,
    pub(crate) config: Arc<ArcSwap<TopicConfig>>,
    high_watermark: AtomicI64,
    last_stable: AtomicI64,
    /// What everybody is told from now on, once the partition is gone from here; 0 until then.
    closed: AtomicI16,
    state: Mutex<State>,
}

struct State {
    /// Invariant: at least the epoch of every batch in the journal.
    leader_epoch: i32,
    producers: Producers,
    /// Invariant: ordered by the offset waited for.
    acks: VecDeque<AckWaiter>,
    /// By connection: one fetch of a connection waits at a time.
    fetchers: HashMap<u64, FetchWaiter>,
}

struct AckWaiter {
    end: i64,
    ack: Ack,
}

/// What to do when the records are committed, or can no longer be.
pub(crate) enum Ack {
    Produce(Arc<PendingAcks>),
    Call(Box<dyn FnOnce(Result<(), ErrorCode>) + Send>),
}

struct FetchWaiter {
    wanted: i64,
    stable_only: bool,
    wake: Arc<Wake>,
}

/// A produce request that waits for one or more partitions.
pub(crate) struct PendingAcks {
    remaining: AtomicI32,
    error: AtomicI16,
    wake: Arc<Wake>,
}

impl PendingAcks {
    /// Starts with one hold, so that it cannot complete while the request is still being appended.
    pub(crate) fn new(wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self { remaining: AtomicI32::new(1), error: AtomicI16::new(0), wake })
    }

    fn add(&self) {
        self.remaining.fetch_add(1, Ordering::AcqRel);
    }

    /// Gives up one hold; true when it was the last.
    pub(crate) fn release(&self) -> bool {
        self.remaining.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether every partition has answered.
    pub(crate) fn is_done(&self) -> bool {
        self.remaining.load(Ordering::Acquire) == 0
    }

    /// The error of a partition that could not commit, if any.
    pub(crate) fn error(&self) -> Option<ErrorCode> {
        ErrorCode::try_from(self.error.load(Ordering::Acquire)).ok().filter(|e| *e != ErrorCode::None)
    }
}

/// What was known of a producer when its transaction was checked: the offset of its last record.
#[derive(Clone, Copy)]
pub(crate) struct Verified {
    last_offset: Option<i64>,
}

/// What became of an append.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Appended {
    pub(crate) base_offset: i64,
    /// Committed once the high watermark reaches this.
    pub(crate) end: i64,
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

/// A slice of the log for a consumer.
pub(crate) struct Fetched {
    pub(crate) read: Option<Read>,
    pub(crate) high_watermark: i64,
    pub(crate) last_stable: i64,
    pub(crate) log_start: i64,
    pub(crate) aborted: Vec<AbortedTxn>,
}

impl Partition {
    /// A partition over a recovered journal. `unclean` says that the last stop was not an orderly one: the
    /// next append then begins a new leader epoch.
    pub(crate) fn open(
        topic: Arc<str>,
        topic_id: TopicId,
        index: i32,
        (tag, journal): (usize, Arc<Journal>),
        config: Arc<ArcSwap<TopicConfig>>,
        unclean: bool,
        now_ms: i64,
    ) -> Result<Self, ReadError> {
        let last_epoch = journal.epochs().last().map_or(0, |(epoch, _)| *epoch);
        let leader_epoch = if unclean && journal.end() > 0 { last_epoch + 1 } else { last_epoch };
        // Noted also without data: clients cling to the newest epoch they have seen, so it must never go back.
        if leader_epoch > last_epoch {
            journal.note_epoch(leader_epoch, journal.end());
        }
        let mut producers = rebuild_producers(&journal, now_ms)?;
        if config.load().compact {
            forget_compacted(&journal, &mut producers)?;
        }
        let high_watermark = journal.durable_end();
        let last_stable = producers.lso(high_watermark).max(journal.start());
        Ok(Self {
            topic,
            topic_id,
            index,
            tag,
            journal,
            config,
            high_watermark: AtomicI64::new(high_watermark),
            last_stable: AtomicI64::new(last_stable),
            closed: AtomicI16::new(0),
            state: Mutex::new(State {
                leader_epoch,
                producers,
                acks: VecDeque::new(),
                fetchers: HashMap::new(),
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

    /// The leadership under which the next batch is written.
    pub(crate) fn leader_epoch(&self) -> i32 {
        lock(&self.state).leader_epoch
    }

    /// Leads under a newer leadership from now on; an older one changes nothing.
    pub(crate) fn raise_epoch(&self, epoch: i32) {
        let mut state = lock(&self.state);
        if epoch > state.leader_epoch {
            state.leader_epoch = epoch;
            self.journal.note_epoch(epoch, self.journal.end());
        }
    }

    /// Why nothing is done here any more, once that is so.
    fn closed(&self) -> Option<ErrorCode> {
        match self.closed.load(Ordering::Acquire) {
            0 => None,
            code => Some(ErrorCode::try_from(code).unwrap_or(ErrorCode::UnknownTopicOrPartition)),
        }
    }

    /// Checks a batch from a client and appends it. `verify` is asked about a transaction this partition
    /// does not know yet; if its coordinator was asked before, it gives what was known of the producer then.
    pub(crate) fn append_from_client(
        &self,
        batch: Bytes,
        now_ms: i64,
        verify: &dyn Fn(&BatchHeader) -> Result<Option<Verified>, ErrorCode>,
        wakes: &mut Vec<Arc<Wake>>,
    ) -> Result<Appended, Refused> {
        let config = self.config.load();
        if batch.len() > config.max_message_bytes {
            return Err(Refused::new(
                ErrorCode::MessageTooLarge,
                format!(
                    "The batch has {} bytes; the topic takes {} (max.message.bytes).",
                    batch.len(),
                    config.max_message_bytes
                ),
            ));
        }
        let limits =
            ValidateLimits { max_decompressed_bytes: MAX_DECOMPRESSED_BYTES, require_keys: config.compact };
        let mut header = records::validate_batch(&batch, &limits).map_err(|error| {
            let keyless = error == RecordsError::Keyless;
            let mut refused = refuse_records(error);
            if keyless {
                refused.records = keyless_records(&batch);
            }
            refused
        })?;
        if header.is_control() {
            return Err(Refused::new(ErrorCode::InvalidRecord, "Clients may not write control batches."));
        }
        check_timestamps(&header, &config, now_ms)?;
        let batch = records::repair_max_timestamp(&batch, &mut header);
        let batch = match config.compression {
            Some(to) if header.compression().ok() != Some(to) => {
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
        let verified =
            if header.is_transactional() { self.verify_transaction(&header, verify)? } else { None };
        self.append(batch, header, now_ms, log_append_time_ms, verified, wakes)
    }

    /// Has the first batch of a transaction checked by its coordinator. The coordinator cannot be asked under
    /// the partition's lock, so what was known of the producer before is returned: if it is another when the
    /// batch is appended, a marker came in between and the batch would open a transaction nobody ends.
    fn verify_transaction(
        &self,
        header: &BatchHeader,
        verify: &dyn Fn(&BatchHeader) -> Result<Option<Verified>, ErrorCode>,
    ) -> Result<Option<Verified>, Refused> {
        let last_offset = {
            let state = lock(&self.state);
            if state.producers.has_open_transaction(header.producer_id) {
                return Ok(None);
            }
            state.producers.last_offset(header.producer_id)
        };
        let before = verify(header)?;
        Ok(Some(before.unwrap_or(Verified { last_offset })))
    }

    /// Appends a batch this broker made itself (markers, coordinator records). `verified` is for one that is
    /// part of a transaction.
    pub(crate) fn append_own(
        &self,
        batch: Bytes,
        now_ms: i64,
        verified: Option<Verified>,
        wakes: &mut Vec<Arc<Wake>>,
    ) -> Result<Appended, Refused> {
        let header = BatchHeader::parse(&batch).ok_or(ErrorCode::CorruptMessage)?;
        self.append(batch, header, now_ms, -1, verified, wakes)
    }

    /// Whether a producer has a transaction open here: then its coordinator knows of this partition.
    pub(crate) fn has_open_transaction(&self, producer_id: i64) -> bool {
        lock(&self.state).producers.has_open_transaction(producer_id)
    }

    /// What is known of a producer now: taken before its coordinator is asked, see [`Verified`].
    pub(crate) fn before_verifying(&self, producer_id: i64) -> Verified {
        Verified { last_offset: lock(&self.state).producers.last_offset(producer_id) }
    }

    fn append(
        &self,
        batch: Bytes,
        header: BatchHeader,
        now_ms: i64,
        log_append_time_ms: i64,
        verified: Option<Verified>,
        wakes: &mut Vec<Arc<Wake>>,
    ) -> Result<Appended, Refused> {
        let info = header.has_producer().then(|| batch_info(&header, &batch));
        let mut state = lock(&self.state);
        if let Some(code) = self.closed() {
            return Err(code.into());
        }
        if let Some(info) = &info {
            match state.producers.check(now_ms, info) {
                Check::Append => {}
                Check::Duplicate { base_offset, last_offset, timestamp } => {
                    let log_append_time_ms = if log_append_time_ms >= 0 { timestamp } else { -1 };
                    return Ok(Appended { base_offset, end: last_offset + 1, log_append_time_ms });
                }
                Check::Reject(code) => return Err(code.into()),
            }
        }
        if let Some(verified) = verified
            && !state.producers.has_open_transaction(header.producer_id)
            && state.producers.last_offset(header.producer_id) != verified.last_offset
        {
            return Err(Refused::new(
                ErrorCode::NotEnoughReplicas,
                "The transaction ended meanwhile; try again.",
            ));
        }
        let base = self.journal.end();
        let last = base + i64::from(header.last_offset_delta);
        let prefix = header.patched_prefix(base, state.leader_epoch);
        let body = batch.slice(PATCH_LEN..);
        let append = Append {
            base,
            last,
            epoch: state.leader_epoch,
            max_timestamp_ms: header.max_timestamp,
            prefix: &prefix,
            body: &body,
        };
        self.journal.append(append).map_err(refuse_append)?;
        if let Some(info) = &info {
            state.producers.on_append(now_ms, info, base, last);
        }
        // Under `durability=replicated` the journal has it already.
        let durable = self.journal.durable_end();
        let calls = if durable > base { self.advance(&mut state, durable, wakes) } else { Vec::new() };
        drop(state);
        for call in calls {
            call(Ok(()));
        }
        Ok(Appended { base_offset: base, end: last + 1, log_append_time_ms })
    }

    /// Calls `ack` once everything below `end` is committed; at once when it already is.
    pub(crate) fn when_committed(&self, end: i64, ack: Ack) {
        let mut state = lock(&self.state);
        let outcome = if let Some(code) = self.closed() {
            Err(code)
        } else if self.high_watermark() >= end {
            Ok(())
        } else {
            if let Ack::Produce(pending) = &ack {
                pending.add();
            }
            let at = state.acks.partition_point(|w| w.end <= end);
            state.acks.insert(at, AckWaiter { end, ack });
            return;
        };
        drop(state);
        match ack {
            // Never held for this partition, so there is nothing to give up.
            Ack::Produce(pending) => {
                if let Err(code) = outcome {
                    pending.error.store(code as i16, Ordering::Release);
                }
            }
            Ack::Call(call) => call(outcome),
        }
    }

    /// The journal has everything below `end` on stable storage. News may be late and meant for a deleted
    /// partition that had the same tag, so the journal has the last word.
    pub(crate) fn on_durable(&self, end: i64, wakes: &mut Vec<Arc<Wake>>) {
        let end = end.min(self.journal.durable_end());
        let calls = {
            let mut state = lock(&self.state);
            self.advance(&mut state, end, wakes)
        };
        for call in calls {
            call(Ok(()));
        }
    }

    /// Moves the high watermark and collects whom to tell; the calls are made after the lock is gone.
    #[must_use]
    fn advance(&self, state: &mut State, end: i64, wakes: &mut Vec<Arc<Wake>>) -> Calls {
        let mut calls = Vec::new();
        if end > self.high_watermark() {
            self.high_watermark.store(end, Ordering::Release);
            state.producers.on_watermark(end);
        }
        let stable = state.producers.lso(self.high_watermark()).max(self.journal.start());
        self.last_stable.store(stable, Ordering::Release);
        while state.acks.front().is_some_and(|w| w.end <= end) {
            let Some(waiter) = state.acks.pop_front() else { break };
            match waiter.ack {
                Ack::Produce(pending) => {
                    if pending.release() {
                        wakes.push(Arc::clone(&pending.wake));
                    }
                }
                Ack::Call(call) => calls.push(call),
            }
        }
        if !state.fetchers.is_empty() {
            let high = self.high_watermark();
            state.fetchers.retain(|_, w| {
                let ready = w.wanted < if w.stable_only { stable } else { high };
                if ready {
                    wakes.push(Arc::clone(&w.wake));
                }
                !ready
            });
        }
        calls
    }

    /// Asks to be woken when there is something to read at `wanted`. False when there is already.
    pub(crate) fn wait_for(&self, wanted: i64, stable_only: bool, wake: &Arc<Wake>) -> bool {
        let mut state = lock(&self.state);
        let limit = if stable_only { self.last_stable() } else { self.high_watermark() };
        if wanted < limit || self.closed().is_some() {
            return false;
        }
        state.fetchers.insert(wake.connection, FetchWaiter { wanted, stable_only, wake: Arc::clone(wake) });
        true
    }

    /// Takes back [`Self::wait_for`].
    pub(crate) fn stop_waiting(&self, connection: u64) {
        lock(&self.state).fetchers.remove(&connection);
    }

    /// Reads committed records from `from`; with `stable_only` no further than the last stable offset.
    pub(crate) fn fetch(&self, from: i64, max_bytes: usize, stable_only: bool) -> Result<Fetched, ErrorCode> {
        if let Some(code) = self.closed() {
            return Err(code);
        }
        let high_watermark = self.high_watermark();
        let last_stable = self.last_stable();
        let log_start = self.journal.start();
        if from < log_start || from > self.journal.end() {
            return Err(ErrorCode::OffsetOutOfRange);
        }
        let until = if stable_only { last_stable } else { high_watermark };
        let mut fetched = Fetched { read: None, high_watermark, last_stable, log_start, aborted: Vec::new() };
        if from < until {
            let read = self.journal.read(from, until, max_bytes).map_err(refuse_read)?;
            if stable_only && read.bytes > 0 {
                fetched.aborted = lock(&self.state).producers.aborted(from, read.next);
            }
            fetched.read = (read.bytes > 0).then_some(read);
        }
        Ok(fetched)
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
        if timestamp < 0 || base >= visible {
            return Ok(None);
        }
        self.find_record(base, visible, |t| t >= timestamp)
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

    /// Runs `f` on the producer state.
    pub(crate) fn with_producers<T>(&self, f: impl FnOnce(&mut Producers) -> T) -> T {
        f(&mut lock(&self.state).producers)
    }

    /// Moves the log start up. What lies below is gone for good when this returns.
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
        }
        Ok(self.journal.start())
    }

    /// The log start moved (retention, DeleteRecords): producer state forgets what lies below.
    pub(crate) fn on_log_start(&self) {
        let mut state = lock(&self.state);
        let start = self.journal.start();
        state.producers.on_log_start(start);
        self.last_stable.fetch_max(start, Ordering::AcqRel);
    }

    /// Keeps a copy of the producer state with the journal, so that a restart replays little.
    pub(crate) fn snapshot_producers(&self) {
        let state = lock(&self.state);
        if !state.producers.is_empty() {
            self.journal.put_snapshot(self.journal.end(), Bytes::from(state.producers.snapshot()));
        }
    }

    /// Stops serving: everybody who waits, and everybody who comes, is told `code`.
    pub(crate) fn close(&self, code: ErrorCode, wakes: &mut Vec<Arc<Wake>>) {
        let calls: Vec<Call> = {
            let mut state = lock(&self.state);
            self.closed.store(code as i16, Ordering::Release);
            wakes.extend(state.fetchers.drain().map(|(_, w)| w.wake));
            let mut calls = Vec::new();
            for waiter in state.acks.drain(..) {
                match waiter.ack {
                    Ack::Produce(pending) => {
                        pending.error.store(code as i16, Ordering::Release);
                        if pending.release() {
                            wakes.push(Arc::clone(&pending.wake));
                        }
                    }
                    Ack::Call(call) => calls.push(call),
                }
            }
            calls
        };
        for call in calls {
            call(Err(code));
        }
    }
}

type Call = Box<dyn FnOnce(Result<(), ErrorCode>) + Send>;
type Calls = Vec<Call>;

fn batch_info(header: &BatchHeader, batch: &[u8]) -> BatchInfo {
    BatchInfo {
        producer_id: header.producer_id,
        producer_epoch: header.producer_epoch,
        base_sequence: header.base_sequence,
        last_sequence: header.last_sequence(),
        max_timestamp: header.max_timestamp,
        transactional: header.is_transactional(),
        control: header.is_control().then(|| marker(batch)).flatten(),
    }
}

/// What a control batch says.
fn marker(batch: &[u8]) -> Option<Marker> {
    let kind = records::control_kind(batch)?;
    let mut coordinator_epoch = 0;
    let _ = records::for_each_record(batch, batch.len(), &mut |record| {
        // Two bytes of version, then the epoch.
        if let Some(bytes) = record.value.and_then(|v| v.get(2..6)).and_then(|b| b.try_into().ok()) {
            coordinator_epoch = i32::from_be_bytes(bytes);
        }
        std::ops::ControlFlow::Break(())
    });
    Some(Marker { kind, coordinator_epoch })
}

/// Producer state is the snapshot kept with the journal plus every batch after it.
fn rebuild_producers(journal: &Journal, now_ms: i64) -> Result<Producers, ReadError> {
    let (from, mut producers) = journal
        .snapshot()
        .and_then(|(offset, bytes)| Producers::load(&bytes).ok().map(|p| (offset, p)))
        .unwrap_or_else(|| (journal.start(), Producers::default()));
    let from = from.max(journal.start());
    if from < journal.end() {
        journal.for_each_frame(from, journal.end(), &mut |frame, bytes| {
            if let Some(header) = BatchHeader::parse(bytes)
                && header.has_producer()
                && frame.base >= from
            {
                let at = if header.max_timestamp >= 0 { header.max_timestamp.min(now_ms) } else { now_ms };
                producers.on_append(at, &batch_info(&header, bytes), frame.base, frame.last);
            }
            true
        })?;
    }
    producers.on_log_start(journal.start());
    Ok(producers)
}

/// A snapshot may be older than the last compaction and mention aborted transactions whose markers are gone.
fn forget_compacted(journal: &Journal, producers: &mut Producers) -> Result<(), ReadError> {
    let mut failure = None;
    producers.retain_aborted(|aborted| {
        let mut there = false;
        let mut look = |frame: &moim_journal::Frame, _: &[u8]| {
            there = frame.last == aborted.last_offset;
            false
        };
        let looked = journal.for_each_frame(aborted.last_offset, aborted.last_offset + 1, &mut look);
        failure = looked.err().or(failure.take());
        there
    });
    failure.map_or(Ok(()), Err)
}

fn check_timestamps(header: &BatchHeader, config: &TopicConfig, now_ms: i64) -> Result<(), Refused> {
    if config.log_append_time || header.max_timestamp < 0 {
        return Ok(());
    }
    let ahead = header.max_timestamp.saturating_sub(now_ms);
    let behind = now_ms.saturating_sub(header.base_timestamp);
    if ahead > config.timestamp_after_max_ms || behind > config.timestamp_before_max_ms {
        return Err(Refused::new(
            ErrorCode::InvalidTimestamp,
            format!("Timestamp {} is too far from the broker's clock {now_ms}.", header.max_timestamp),
        ));
    }
    Ok(())
}

fn refuse_records(error: RecordsError) -> Refused {
    let code = match &error {
        RecordsError::Magic(_) => ErrorCode::UnsupportedForMessageFormat,
        RecordsError::TooLarge => ErrorCode::MessageTooLarge,
        RecordsError::TimestampType => ErrorCode::InvalidTimestamp,
        RecordsError::Compression(CompressionError::Unknown(_)) => ErrorCode::UnsupportedCompressionType,
        RecordsError::Keyless | RecordsError::Count | RecordsError::Invalid(_) => ErrorCode::InvalidRecord,
        _ => ErrorCode::CorruptMessage,
    };
    Refused::new(code, error.to_string())
}

/// The records without a key, by their place in the batch.
fn keyless_records(batch: &[u8]) -> Vec<i32> {
    let mut keyless = Vec::new();
    // The batch was walked before without trouble, up to the first of them.
    let _ = records::for_each_record(batch, MAX_DECOMPRESSED_BYTES, &mut |record| {
        if record.key.is_none() {
            keyless.push(record.offset_delta);
        }
        std::ops::ControlFlow::Continue(())
    });
    keyless
}

fn refuse_append(error: AppendError) -> Refused {
    let code = match &error {
        AppendError::Closed => ErrorCode::NotLeaderOrFollower,
        _ => ErrorCode::KafkaStorageError,
    };
    Refused::new(code, error.to_string())
}

pub(crate) fn refuse_read(error: ReadError) -> ErrorCode {
    match error {
        ReadError::OutOfRange { .. } => ErrorCode::OffsetOutOfRange,
        _ => {
            tracing::error!(%error, "a partition cannot be read");
            ErrorCode::KafkaStorageError
        }
    }
}

/// Whether a produce version may carry this compression.
pub(crate) fn compression_allowed(kind: Compression, produce_version: i16) -> bool {
    kind != Compression::Zstd || produce_version >= 7
}

#[cfg(test)]
mod tests;
