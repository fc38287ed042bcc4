//! Fetch: returns committed batches as stored, and delays the response while there is less than `min.bytes`.
//!
//! A delayed fetch registers a watch with every partition and sleeps; a partition whose high watermark or last stable
//! offset passes the watched offset wakes it, and it reads again. Nothing is polled.
//!
//! A consumer at the log end repeats the same fetch. Its fetch, after an empty response, stays with the connection,
//! with its watches and its encoded response; a request with the same bytes resumes it as long as nothing has changed
//! that the response reports.
//!
//! A client with a rack is sent to an in-sync replica there (preferred read replica), and served by it up to the high
//! watermark that replica knows. All other clients are served by leaders.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use moim_base::rest::grid_point;
use moim_base::{BrokerId, ConnectionBudget, Exhausted, Permit};
use moim_journal::Chunk;
use moim_wire_kafka::messages::fetch::{
    AbortedTransaction, EpochEndOffset, FetchRequest, FetchResponse, FetchableTopicResponse, PartitionData,
};
use moim_wire_kafka::messages::produce::{LeaderIdAndEpoch, NodeEndpoint};
use moim_wire_kafka::{ErrorCode, Records, RequestHeader, Uuid};

use crate::broker::Broker;
use crate::brokers::LiveBroker;
use crate::connection::{Connection, QueuedResponse};
use crate::fetch_sessions::{Plan, RequestedPartition, Session};
use crate::loops::{Wake, lock};
use crate::partition::{Fetched, OffsetSnapshot, Partition};
use crate::response_writer::{Call, ResponseWriter};

/// Bounds of the timer grid on which long waits end: a tenth of the wait, within these bounds.
const GRID_MS: std::ops::RangeInclusive<u64> = 10..=50;

/// Approximate size of a response without records, and of each partition in it.
const EMPTY_BYTES: usize = 64;

/// An empty response with at most this many partitions is cached until the wait ends; a larger one is encoded again.
const MAX_CACHED_PARTITIONS: usize = 64;

/// Maximum size of a request that can be resumed.
const MAX_RESUMABLE_BYTES: usize = 1024;

/// Position of the correlation id in a request frame, and in a response with its length prefix.
const CORRELATION: std::ops::Range<usize> = 4..8;

/// In-memory records up to this size are not charged: every connection may hold that much.
const UNCOUNTED_BYTES: usize = 64 << 10;

/// Maximum record bytes of one response, unless one batch is larger: a client that does not read holds no more.
const RESPONSE_BYTES: usize = 8 << 20;

/// Retry interval of a fetch without memory for its records.
const MEMORY_RETRY: Duration = Duration::from_millis(20);

/// A delayed fetch: a fetch whose response is not complete.
pub(crate) struct DelayedFetch {
    call: Call,
    plan: Target,
    /// The request frame; empty if the fetch cannot be resumed.
    request_frame: Bytes,
    max_wait_ms: u64,
    pub(crate) deadline: Instant,
    /// Set if there is no memory for its records: time of the next attempt.
    retry_at: Option<Instant>,
    min_bytes: usize,
    max_bytes: usize,
    stable_only: bool,
    /// The client's rack, if it has one.
    rack: Option<Box<str>>,
    /// Set when the fetch is complete.
    outcome: Option<Outcome>,
    /// The encoded empty response, sent if the wait ends without a change; encoded, because it is small and a
    /// thousand consumers wait with one.
    empty_response: Option<Bytes>,
    /// The partitions that this fetch watches.
    watched: Vec<WatchedPartition>,
}

enum Outcome {
    Found(Found),
    EmptyResponse,
}

/// A partition that a delayed fetch watches.
struct WatchedPartition {
    partition: Arc<Partition>,
    /// A record at or after this offset completes the wait.
    next: i64,
    /// The partition's offsets at the last read.
    offsets: OffsetSnapshot,
}

enum Target {
    Once(Vec<RequestedPartition>),
    Session { id: i32, session: Arc<Mutex<Session>>, full: bool },
}

/// The result of one read over the partitions.
struct Found {
    response: FetchResponse,
    chunks: Vec<Vec<Chunk>>,
    bytes: usize,
    failed: bool,
    /// Memory permit of the in-memory chunks.
    permit: Option<Permit>,
    /// The partitions that were read, to be watched.
    watched: Vec<WatchedPartition>,
}

pub(crate) fn handle(
    connection: &mut Connection,
    call: Call,
    _header: &RequestHeader,
    request: FetchRequest,
) -> io::Result<()> {
    let broker = Arc::clone(&connection.broker);
    let request_frame = connection.take_request_frame();
    let plan =
        broker.fetch_sessions.plan(&broker.topics, &request, call.version, broker.clock.monotonic_ms());
    let plan = match plan {
        Plan::Once(requested) => Target::Once(requested),
        Plan::Session { id, session, full } => Target::Session { id, session, full },
        Plan::Refuse(code) => {
            let response = FetchResponse { error_code: code as i16, session_id: 0, ..Default::default() };
            return connection.respond(call, &response);
        }
    };
    let wait = u64::try_from(request.max_wait_ms).unwrap_or(0).min(broker.options.max_wait_ms);
    // The response memory holds several responses.
    let limit = broker.options.max_fetch_bytes.min(RESPONSE_BYTES).min(broker.responses.limit() / 4);
    // A session has an epoch per request, and a client with a rack is sent to its currently preferred replica.
    let is_resumable = matches!(plan, Target::Once(_)) && request.rack_id.is_empty();
    let fetch = Box::new(DelayedFetch {
        call,
        plan,
        request_frame: if is_resumable && request_frame.len() <= MAX_RESUMABLE_BYTES {
            request_frame
        } else {
            Bytes::new()
        },
        max_wait_ms: wait,
        deadline: deadline(connection.now, broker.started, wait),
        retry_at: None,
        min_bytes: usize::try_from(request.min_bytes).unwrap_or(0).min(limit / 2),
        max_bytes: usize::try_from(request.max_bytes).unwrap_or(0).min(limit),
        stable_only: request.isolation_level == 1,
        rack: (!request.rack_id.is_empty()).then(|| request.rack_id.as_str().into()),
        outcome: None,
        empty_response: None,
        watched: Vec::new(),
    });
    // The connection polls the fetch at once if no other request is queued before it.
    connection.enqueue(QueuedResponse::Fetch(fetch));
    Ok(())
}

/// The deadline of a delayed fetch. Long waits end together, on the grid of the loop's timer; shorter ones on a grid
/// of [`GRID_MS`]. A thousand idle consumers then wake the loop twenty times a second and not two thousand times.
fn deadline(now: Instant, started: Instant, wait_ms: u64) -> Instant {
    let grid_ms = (wait_ms / 10).clamp(*GRID_MS.start(), *GRID_MS.end());
    if wait_ms < 10 * GRID_MS.start() {
        return now + Duration::from_millis(wait_ms);
    }
    let whole = now + Duration::from_millis(wait_ms);
    if wait_ms >= 10 * GRID_MS.end()
        && let Some(together) = grid_point(whole)
    {
        return together;
    }
    let since = u64::try_from((now - started).as_micros().div_ceil(1000)).unwrap_or(u64::MAX);
    let end = since.saturating_add(wait_ms).next_multiple_of(grid_ms);
    started + Duration::from_millis(end)
}

impl DelayedFetch {
    /// Reads the partitions; if the fetch cannot complete, watches them. Does not read again without a wake-up,
    /// because nothing has changed.
    pub(crate) fn poll(
        &mut self,
        broker: &Broker,
        wake: &Arc<Wake>,
        now: Instant,
        woken: bool,
        memory: &ConnectionBudget,
    ) -> bool {
        if self.retry_at.is_some_and(|until| now < until) {
            return false;
        }
        self.retry_at = None;
        let expired = now >= self.deadline;
        if !woken && !self.watched.is_empty() {
            if !expired {
                return false;
            }
            if self.empty_response.is_some() && self.is_unchanged() {
                self.outcome = Some(Outcome::EmptyResponse);
                return true;
            }
        }
        loop {
            let mut found = match &self.plan {
                Target::Once(requested) => self.read_partitions(broker, requested, true, 0),
                Target::Session { id, session, full } => {
                    self.read_partitions(broker, &lock(session).requested, *full, *id)
                }
            };
            self.empty_response = None;
            if found.bytes >= self.min_bytes || found.failed || expired {
                self.forget(wake);
                let held = in_memory(&found.chunks);
                if held > UNCOUNTED_BYTES {
                    match memory.try_take(held) {
                        Ok(permit) => found.permit = Some(permit),
                        // A single batch is larger than the limit: it is sent alone, because the client cannot get
                        // past it otherwise.
                        Err(Exhausted::TooLarge) => {}
                        Err(Exhausted::Layer | Exhausted::Connection) => {
                            self.retry_at = Some(now + MEMORY_RETRY);
                            return false;
                        }
                    }
                }
                self.outcome = Some(Outcome::Found(found));
                return true;
            }
            if self.watch_partitions(std::mem::take(&mut found.watched), wake) {
                self.empty_response = self.encode_empty(&found);
                return false;
            }
        }
    }

    /// Time of the next poll without an event.
    pub(crate) fn next_timer(&self) -> Instant {
        self.retry_at.unwrap_or(self.deadline)
    }

    /// Encodes a response without records, valid as long as [`Self::is_unchanged`]. Not for a session, which would
    /// have to cache the sent offsets.
    fn encode_empty(&mut self, found: &Found) -> Option<Bytes> {
        let request_frame = std::mem::take(&mut self.request_frame);
        let is_stateless = matches!(self.plan, Target::Once(_)) || found.response.responses.is_empty();
        let small = self.watched.len() <= MAX_CACHED_PARTITIONS;
        if found.bytes > 0 || !is_stateless || !small {
            return None;
        }
        // Copied out of the input buffer, which other requests need.
        self.request_frame = Bytes::copy_from_slice(&request_frame);
        let mut own = ResponseWriter::with_capacity(EMPTY_BYTES * (1 + self.watched.len()));
        own.push(self.call, &found.response).ok()?;
        Some(own.into_bytes())
    }

    /// True if every watched partition has the offsets of the last read.
    fn is_unchanged(&self) -> bool {
        self.watched.iter().all(|watch| watch.partition.offset_snapshot() == Some(watch.offsets))
    }

    /// True if this fetch had an empty response and the same request may resume it.
    pub(crate) fn can_resume(&self) -> bool {
        self.empty_response.is_some() && !self.request_frame.is_empty()
    }

    /// Resumes the fetch: true if `frame` is the same request and the response is still valid. The watches were never
    /// removed, so no change in between was missed.
    pub(crate) fn maybe_resume(&mut self, frame: &[u8], broker: &Broker, now: Instant) -> bool {
        let (before, after) = (..CORRELATION.start, CORRELATION.end..);
        let is_same = frame.len() == self.request_frame.len()
            && frame[before] == self.request_frame[before]
            && frame[after.clone()] == self.request_frame[after];
        if !is_same || !self.is_unchanged() {
            return false;
        }
        self.call.correlation_id = i32::from_be_bytes([frame[4], frame[5], frame[6], frame[7]]);
        self.deadline = deadline(now, broker.started, self.max_wait_ms);
        true
    }

    /// Watches every partition; false if one already has new data. New data is compared with the last read: a high
    /// watermark that another thread moved since then must not be missed.
    fn watch_partitions(&mut self, watched: Vec<WatchedPartition>, wake: &Arc<Wake>) -> bool {
        self.forget(wake);
        self.watched = watched;
        self.watched.iter().all(|watch| watch.partition.wait_for(watch.next, self.stable_only, wake))
    }

    /// Removes every watch.
    pub(crate) fn forget(&mut self, wake: &Wake) {
        for watch in self.watched.drain(..) {
            watch.partition.stop_waiting(wake.connection);
        }
    }

    fn read_partitions(
        &self,
        broker: &Broker,
        requested: &[RequestedPartition],
        full: bool,
        session_id: i32,
    ) -> Found {
        let mut found = Found {
            response: FetchResponse { session_id, ..Default::default() },
            chunks: Vec::new(),
            bytes: 0,
            failed: false,
            permit: None,
            watched: Vec::with_capacity(requested.len()),
        };
        let mut remaining_bytes = self.max_bytes;
        for requested_partition in requested {
            let result = self.read_partition(broker, requested_partition, remaining_bytes, found.bytes == 0);
            let woken = match &result {
                Ok((_, fetched)) => {
                    fetched.read.is_some()
                        || requested_partition.sent_offsets != Some(fetched.offset_snapshot.sent_offsets())
                }
                Err(_) => true,
            };
            if let Ok((partition, fetched)) = &result {
                let visible = if self.stable_only {
                    fetched.offset_snapshot.last_stable
                } else {
                    fetched.offset_snapshot.high_watermark
                };
                found.watched.push(WatchedPartition {
                    partition: Arc::clone(partition),
                    next: visible.max(requested_partition.fetch_offset),
                    offsets: fetched.offset_snapshot,
                });
            }
            if full || woken {
                let (data, chunks) = self.partition_data(broker, requested_partition, result, &mut found);
                if let Some(chunks) = chunks {
                    remaining_bytes =
                        remaining_bytes.saturating_sub(data.records.as_ref().map_or(0, Records::len));
                    found.chunks.push(chunks);
                }
                push(&mut found.response, requested_partition, data);
            }
        }
        found
    }

    fn read_partition(
        &self,
        broker: &Broker,
        requested_partition: &RequestedPartition,
        remaining_bytes: usize,
        first: bool,
    ) -> Result<(Arc<Partition>, Fetched), Refusal> {
        let topic = requested_partition.topic.topic.as_ref().ok_or(requested_partition.topic.missing)?;
        let partition = topic.replica(requested_partition.partition)?;
        if partition.leading().is_none() && (self.rack.is_none() || !partition.is_follower()) {
            return Err(ErrorCode::NotLeaderOrFollower.into());
        }
        let epoch = partition.leader_epoch();
        if requested_partition.current_leader_epoch >= 0 && requested_partition.current_leader_epoch != epoch
        {
            let code = if requested_partition.current_leader_epoch < epoch {
                ErrorCode::FencedLeaderEpoch
            } else {
                ErrorCode::UnknownLeaderEpoch
            };
            return Err(Refusal { code, leader_epoch: epoch, diverging: None, nearer: None });
        }
        if requested_partition.last_fetched_epoch >= 0 {
            let (found, end) = partition.journal.end_offset_for_epoch(requested_partition.last_fetched_epoch);
            if found != requested_partition.last_fetched_epoch || end < requested_partition.fetch_offset {
                let diverging = Some(EpochEndOffset { epoch: found, end_offset: end });
                return Err(Refusal { code: ErrorCode::None, leader_epoch: epoch, diverging, nearer: None });
            }
        }
        if let Some(rack) = &self.rack
            && let Some(nearer) =
                broker.nearer_replica(topic, &partition, rack, requested_partition.fetch_offset)
        {
            return Err(Refusal { nearer: Some(nearer), ..ErrorCode::None.into() });
        }
        let limit = usize::try_from(requested_partition.max_bytes).unwrap_or(0).min(remaining_bytes);
        let mut fetched = partition.fetch(requested_partition.fetch_offset, limit, self.stable_only)?;
        // Only the first records of a response may exceed the client's limit, so that the client makes progress.
        if !first && fetched.read.as_ref().is_some_and(|r| r.bytes > limit) {
            fetched.read = None;
            fetched.aborted.clear();
        }
        Ok((partition, fetched))
    }

    fn partition_data(
        &self,
        broker: &Broker,
        requested_partition: &RequestedPartition,
        result: Result<(Arc<Partition>, Fetched), Refusal>,
        found: &mut Found,
    ) -> (PartitionData, Option<Vec<Chunk>>) {
        let fetched = match result {
            Ok((_, fetched)) => fetched,
            Err(refusal) => {
                found.failed = true;
                return (
                    refused(broker, requested_partition, refusal, self.call.version, &mut found.response),
                    None,
                );
            }
        };
        let mut data = PartitionData {
            partition_index: requested_partition.partition,
            high_watermark: fetched.offset_snapshot.high_watermark,
            last_stable_offset: fetched.offset_snapshot.last_stable,
            log_start_offset: fetched.offset_snapshot.log_start,
            records: Some(Records::Bytes(Bytes::new())),
            ..Default::default()
        };
        if self.stable_only {
            let aborted = fetched
                .aborted
                .iter()
                .map(|a| AbortedTransaction { producer_id: a.producer_id, first_offset: a.first_offset });
            data.aborted_transactions = Some(aborted.collect());
        }
        let Some(read) = fetched.read else { return (data, None) };
        found.bytes += read.bytes;
        data.records = Some(Records::Gap(read.bytes));
        (data, Some(read.chunks))
    }

    /// Writes the response and, for a session, records the sent offsets.
    pub(crate) fn write(&mut self, broker: &Broker, out: &mut ResponseWriter) -> io::Result<()> {
        let found = match self.outcome.take() {
            Some(Outcome::Found(found)) => found,
            Some(Outcome::EmptyResponse) => {
                let empty_response = self.empty_response.as_deref().unwrap_or_default();
                out.push_copy_with(empty_response, CORRELATION, &self.call.correlation_id.to_be_bytes());
                return Ok(());
            }
            None => return Err(io::Error::other("fetch completed without a response")),
        };
        broker.metrics.fetched_bytes.inc_by(found.bytes as u64);
        if let Target::Session { session, .. } = &self.plan {
            note(&mut lock(session), &found.response);
        }
        if let Some(permit) = found.permit {
            out.hold(permit);
        }
        out.push_with_chunks(self.call, &found.response, found.chunks)
    }
}

/// Size of the in-memory records.
fn in_memory(chunks: &[Vec<Chunk>]) -> usize {
    let bytes = |chunk: &Chunk| if let Chunk::Mem(bytes) = chunk { bytes.len() } else { 0 };
    chunks.iter().flatten().map(bytes).sum()
}

/// Records the sent offsets in the session; partitions with records move to the end, so that all get their turn.
fn note(session: &mut Session, response: &FetchResponse) {
    let mut served = hashbrown::HashSet::new();
    let mut sent_offsets = hashbrown::HashMap::new();
    for topic in &response.responses {
        for data in &topic.partitions {
            let key = (topic.topic_id.0, topic.topic.clone(), data.partition_index);
            if data.records.as_ref().is_some_and(|r| !r.is_empty()) {
                served.insert(key.clone());
            }
            let known = (data.error_code == 0).then_some((
                data.high_watermark,
                data.last_stable_offset,
                data.log_start_offset,
            ));
            sent_offsets.insert(key, known);
        }
    }
    let key_of = |w: &RequestedPartition| {
        let name = if w.topic.id == [0; 16] {
            moim_wire_kafka::KString::from(&*w.topic.name)
        } else {
            Default::default()
        };
        (w.topic.id, name, w.partition)
    };
    for requested_partition in &mut session.requested {
        if let Some(known) = sent_offsets.get(&key_of(requested_partition)) {
            requested_partition.sent_offsets = *known;
        }
    }
    if !served.is_empty() && served.len() < session.requested.len() {
        let (last, first): (Vec<_>, Vec<_>) =
            session.requested.drain(..).partition(|w| served.contains(&key_of(w)));
        session.requested.extend(first);
        session.requested.extend(last);
    }
}

struct Refusal {
    code: ErrorCode,
    leader_epoch: i32,
    diverging: Option<EpochEndOffset>,
    /// The preferred read replica in the client's rack.
    nearer: Option<BrokerId>,
}

impl From<ErrorCode> for Refusal {
    fn from(code: ErrorCode) -> Self {
        Self { code, leader_epoch: -1, diverging: None, nearer: None }
    }
}

fn refused(
    broker: &Broker,
    requested_partition: &RequestedPartition,
    refusal: Refusal,
    version: i16,
    response: &mut FetchResponse,
) -> PartitionData {
    let mut data = PartitionData {
        partition_index: requested_partition.partition,
        error_code: refusal.code as i16,
        high_watermark: -1,
        records: Some(Records::Bytes(Bytes::new())),
        ..Default::default()
    };
    if let Some(diverging) = refusal.diverging {
        data.diverging_epoch = diverging;
    }
    if let Some(nearer) = refusal.nearer {
        data.preferred_read_replica = nearer.0;
    }
    let leader = match refusal.code {
        ErrorCode::None => None,
        ErrorCode::NotLeaderOrFollower => requested_partition
            .topic
            .topic
            .as_ref()
            .and_then(|topic| broker.leader_hint(topic, requested_partition.partition)),
        // A follower with a newer leader epoch than the client's sends it to the leader, a leader to itself.
        _ if refusal.leader_epoch >= 0 => {
            let elsewhere = requested_partition
                .topic
                .topic
                .as_ref()
                .and_then(|topic| broker.leader_hint(topic, requested_partition.partition));
            Some(elsewhere.unwrap_or_else(|| (broker.me(), refusal.leader_epoch)))
        }
        _ => None,
    };
    if let Some((leader, leader_epoch)) = leader.filter(|_| version >= 12) {
        data.current_leader = LeaderIdAndEpoch { leader_id: leader.id.0, leader_epoch };
        if version >= 16 {
            add_endpoint(&mut response.node_endpoints, leader);
        }
    }
    data
}

/// Adds a broker endpoint to the response, once.
pub(crate) fn add_endpoint(endpoints: &mut Vec<NodeEndpoint>, broker: LiveBroker) {
    if endpoints.iter().all(|known| known.node_id != broker.id.0) {
        endpoints.push(NodeEndpoint {
            node_id: broker.id.0,
            host: broker.host.into(),
            port: i32::from(broker.port),
            rack: broker.rack.map(Into::into),
        });
    }
}

fn push(response: &mut FetchResponse, requested_partition: &RequestedPartition, data: PartitionData) {
    let same = response.responses.last().is_some_and(|t| {
        if requested_partition.topic.id == [0; 16] {
            *t.topic == *requested_partition.topic.name
        } else {
            t.topic_id.0 == requested_partition.topic.id
        }
    });
    if !same {
        let topic = if requested_partition.topic.id == [0; 16] {
            (&*requested_partition.topic.name).into()
        } else {
            Default::default()
        };
        response.responses.push(FetchableTopicResponse {
            topic,
            topic_id: Uuid(requested_partition.topic.id),
            partitions: Vec::new(),
        });
    }
    if let Some(topic) = response.responses.last_mut() {
        topic.partitions.push(data);
    }
}

#[cfg(test)]
mod tests;
