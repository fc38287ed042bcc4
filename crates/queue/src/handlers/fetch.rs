//! Fetch: hands out committed batches as they are stored, waiting for data when there is too little.
//!
//! A fetch that must wait leaves its wish with every partition and sleeps; a partition whose watermark passes
//! the wish wakes it, and it looks again. Nothing is polled.
//!
//! A consumer for which there is nothing asks the same again and again. Its fetch, once answered empty-handed, stays with the
//! connection, wishes and answer included; the same question goes on with it as long as nothing has changed that the answer
//! tells.
//!
//! A client that says which rack it stands in is sent to a replica in sync there, and served by it: up to the high watermark
//! that replica has heard of. Everybody else is served by leaders.

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
use crate::connection::{Connection, Slot};
use crate::fetch_sessions::{Plan, Session, Wanted};
use crate::loops::{Wake, lock};
use crate::partition::{Fetched, Partition, Standing};
use crate::reply::{Call, Writer};

/// The grid on which long waits end is a tenth of the wait, within these bounds.
const GRID_MS: std::ops::RangeInclusive<u64> = 10..=50;

/// About what an answer without records takes, and again for each partition in it.
const EMPTY_BYTES: usize = 64;

/// An empty answer is kept until the wait ends when it names at most so many partitions; a larger one is made again.
const KEPT_PARTITIONS: usize = 64;

/// A question of at most so many bytes is remembered until it is asked again.
const KEPT_QUESTION: usize = 1024;

/// Where the correlation id stands in a frame, and in an answer with its length before it.
const CORRELATION: std::ops::Range<usize> = 4..8;

/// Records in memory up to this size are not counted: every connection may hold so many.
const UNCOUNTED_BYTES: usize = 64 << 10;

/// The records of one response, at most, unless one batch is larger: a client that does not read holds no more.
const RESPONSE_BYTES: usize = 8 << 20;

/// How long a fetch waits when there is no memory for its records.
const STARVED: Duration = Duration::from_millis(20);

/// A fetch that has not been answered yet.
pub(crate) struct PendingFetch {
    call: Call,
    plan: Target,
    /// What was asked, as it came; empty when nobody can go on with this fetch.
    asked: Bytes,
    max_wait_ms: u64,
    pub(crate) deadline: Instant,
    /// There is no memory for its records; looked at again then.
    starved: Option<Instant>,
    min_bytes: usize,
    max_bytes: usize,
    stable_only: bool,
    /// Where the client stands, if it says so.
    rack: Option<Box<str>>,
    /// Filled when the fetch is ready.
    answer: Option<Answer>,
    /// The answer to give if the wait ends before anything changes; encoded, because it is small and a thousand consumers
    /// wait with one.
    kept: Option<Bytes>,
    /// Partitions that hold a wish of this fetch.
    waiting: Vec<Wish>,
}

enum Answer {
    Found(Found),
    Kept,
}

/// What a fetch waits for at one partition.
struct Wish {
    partition: Arc<Partition>,
    /// A record from here on is news.
    next: i64,
    /// What an answer tells of the partition, when it was looked at.
    seen: Standing,
}

enum Target {
    Once(Vec<Wanted>),
    Session { id: i32, session: Arc<Mutex<Session>>, full: bool },
}

/// What one look at the partitions found.
struct Found {
    response: FetchResponse,
    chunks: Vec<Vec<Chunk>>,
    bytes: usize,
    failed: bool,
    /// For the chunks that are in memory.
    permit: Option<Permit>,
    /// The partitions that were read.
    seen: Vec<Wish>,
}

pub(crate) fn handle(
    connection: &mut Connection,
    call: Call,
    _header: &RequestHeader,
    request: FetchRequest,
) -> io::Result<()> {
    let broker = Arc::clone(&connection.broker);
    let asked = connection.take_question();
    let plan =
        broker.fetch_sessions.plan(&broker.topics, &request, call.version, broker.clock.monotonic_ms());
    let plan = match plan {
        Plan::Once(wanted) => Target::Once(wanted),
        Plan::Session { id, session, full } => Target::Session { id, session, full },
        Plan::Refuse(code) => {
            let response = FetchResponse { error_code: code as i16, session_id: 0, ..Default::default() };
            return connection.answer(call, &response);
        }
    };
    let wait = u64::try_from(request.max_wait_ms).unwrap_or(0).min(broker.options.max_wait_ms);
    // A response fits the memory for all of them several times.
    let limit = broker.options.max_fetch_bytes.min(RESPONSE_BYTES).min(broker.responses.limit() / 4);
    // A session counts its questions, and who has a rack is sent to whoever is nearest at that time.
    let repeats = matches!(plan, Target::Once(_)) && request.rack_id.is_empty();
    let fetch = Box::new(PendingFetch {
        call,
        plan,
        asked: if repeats && asked.len() <= KEPT_QUESTION { asked } else { Bytes::new() },
        max_wait_ms: wait,
        deadline: deadline(connection.now, broker.started, wait),
        starved: None,
        min_bytes: usize::try_from(request.min_bytes).unwrap_or(0).min(limit / 2),
        max_bytes: usize::try_from(request.max_bytes).unwrap_or(0).min(limit),
        stable_only: request.isolation_level == 1,
        rack: (!request.rack_id.is_empty()).then(|| request.rack_id.as_str().into()),
        answer: None,
        kept: None,
        waiting: Vec::new(),
    });
    // The connection looks at it at once if nothing stands before it.
    connection.wait(Slot::Fetch(fetch));
    Ok(())
}

/// When a fetch is answered with what there is. Long waits end together: on the grid of the loop's timer, shorter ones on
/// one of [`GRID_MS`]. A thousand idle consumers then wake the loop twenty times a second and not two thousand times.
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

impl PendingFetch {
    /// Looks whether the fetch can be answered; if not, leaves its wish where the data will be.
    /// Without news it does not look again: what it waits for has not come.
    pub(crate) fn poll(
        &mut self,
        broker: &Broker,
        wake: &Arc<Wake>,
        now: Instant,
        news: bool,
        memory: &ConnectionBudget,
    ) -> bool {
        if self.starved.is_some_and(|until| now < until) {
            return false;
        }
        self.starved = None;
        let expired = now >= self.deadline;
        if !news && !self.waiting.is_empty() {
            if !expired {
                return false;
            }
            if self.kept.is_some() && self.stands() {
                self.answer = Some(Answer::Kept);
                return true;
            }
        }
        loop {
            let mut found = match &self.plan {
                Target::Once(wanted) => self.look(broker, wanted, true, 0),
                Target::Session { id, session, full } => self.look(broker, &lock(session).wanted, *full, *id),
            };
            self.kept = None;
            if found.bytes >= self.min_bytes || found.failed || expired {
                self.forget(wake);
                let held = in_memory(&found.chunks);
                if held > UNCOUNTED_BYTES {
                    match memory.try_take(held) {
                        Ok(permit) => found.permit = Some(permit),
                        // One batch alone is larger: it goes by itself, as it is the only way to get past it.
                        Err(Exhausted::TooLarge) => {}
                        Err(Exhausted::Layer | Exhausted::Connection) => {
                            self.starved = Some(now + STARVED);
                            return false;
                        }
                    }
                }
                self.answer = Some(Answer::Found(found));
                return true;
            }
            if self.leave_wishes(std::mem::take(&mut found.seen), wake) {
                self.kept = self.keep(&found);
                return false;
            }
        }
    }

    /// When to look again though nothing has happened.
    pub(crate) fn alarm(&self) -> Instant {
        self.starved.unwrap_or(self.deadline)
    }

    /// Encodes an answer without records, true for as long as [`Self::stands`]. Not for a session that would have to
    /// remember what it was told.
    fn keep(&mut self, found: &Found) -> Option<Bytes> {
        let asked = std::mem::take(&mut self.asked);
        let untold = matches!(self.plan, Target::Once(_)) || found.response.responses.is_empty();
        let small = self.waiting.len() <= KEPT_PARTITIONS;
        if found.bytes > 0 || !untold || !small {
            return None;
        }
        // Out of the buffer that it came in, which others need.
        self.asked = Bytes::copy_from_slice(&asked);
        let mut own = Writer::with_capacity(EMPTY_BYTES * (1 + self.waiting.len()));
        own.push(self.call, &found.response).ok()?;
        Some(own.into_bytes())
    }

    /// Whether every partition is as it was when it was looked at.
    fn stands(&self) -> bool {
        self.waiting.iter().all(|wish| wish.partition.standing() == Some(wish.seen))
    }

    /// Whether this fetch was answered with nothing and may go on when the same is asked again.
    pub(crate) fn can_repeat(&self) -> bool {
        self.kept.is_some() && !self.asked.is_empty()
    }

    /// Goes on with the same question: true when `frame` asks it and the answer still stands. The wishes were never taken
    /// back, so that nothing that happened in between was missed.
    pub(crate) fn repeat(&mut self, frame: &[u8], broker: &Broker, now: Instant) -> bool {
        let (before, after) = (..CORRELATION.start, CORRELATION.end..);
        let is_same = frame.len() == self.asked.len()
            && frame[before] == self.asked[before]
            && frame[after.clone()] == self.asked[after];
        if !is_same || !self.stands() {
            return false;
        }
        self.call.correlation_id = i32::from_be_bytes([frame[4], frame[5], frame[6], frame[7]]);
        self.deadline = deadline(now, broker.started, self.max_wait_ms);
        true
    }

    /// Leaves a wish with every partition; false when one of them has news already. What is news is measured
    /// from what the look saw: a watermark that another thread moved since then must not be slept through.
    fn leave_wishes(&mut self, seen: Vec<Wish>, wake: &Arc<Wake>) -> bool {
        self.forget(wake);
        self.waiting = seen;
        self.waiting.iter().all(|wish| wish.partition.wait_for(wish.next, self.stable_only, wake))
    }

    /// Takes back every wish.
    pub(crate) fn forget(&mut self, wake: &Wake) {
        for wish in self.waiting.drain(..) {
            wish.partition.stop_waiting(wake.connection);
        }
    }

    fn look(&self, broker: &Broker, wanted: &[Wanted], full: bool, session_id: i32) -> Found {
        let mut found = Found {
            response: FetchResponse { session_id, ..Default::default() },
            chunks: Vec::new(),
            bytes: 0,
            failed: false,
            permit: None,
            seen: Vec::with_capacity(wanted.len()),
        };
        let mut room = self.max_bytes;
        for want in wanted {
            let result = self.look_at(broker, want, room, found.bytes == 0);
            let news = match &result {
                Ok((_, fetched)) => fetched.read.is_some() || want.told != Some(fetched.standing.told()),
                Err(_) => true,
            };
            if let Ok((partition, fetched)) = &result {
                let visible = if self.stable_only {
                    fetched.standing.last_stable
                } else {
                    fetched.standing.high_watermark
                };
                found.seen.push(Wish {
                    partition: Arc::clone(partition),
                    next: visible.max(want.fetch_offset),
                    seen: fetched.standing,
                });
            }
            if full || news {
                let (data, chunks) = self.partition_data(broker, want, result, &mut found);
                if let Some(chunks) = chunks {
                    room = room.saturating_sub(data.records.as_ref().map_or(0, Records::len));
                    found.chunks.push(chunks);
                }
                push(&mut found.response, want, data);
            }
        }
        found
    }

    fn look_at(
        &self,
        broker: &Broker,
        want: &Wanted,
        room: usize,
        first: bool,
    ) -> Result<(Arc<Partition>, Fetched), Refusal> {
        let topic = want.topic.topic.as_ref().ok_or(want.topic.missing)?;
        let partition = topic.copy(want.partition)?;
        if partition.leading().is_none() && (self.rack.is_none() || !partition.follows()) {
            return Err(ErrorCode::NotLeaderOrFollower.into());
        }
        let epoch = partition.leader_epoch();
        if want.current_leader_epoch >= 0 && want.current_leader_epoch != epoch {
            let code = if want.current_leader_epoch < epoch {
                ErrorCode::FencedLeaderEpoch
            } else {
                ErrorCode::UnknownLeaderEpoch
            };
            return Err(Refusal { code, leader_epoch: epoch, diverging: None, nearer: None });
        }
        if want.last_fetched_epoch >= 0 {
            let (found, end) = partition.journal.end_offset_for_epoch(want.last_fetched_epoch);
            if found != want.last_fetched_epoch || end < want.fetch_offset {
                let diverging = Some(EpochEndOffset { epoch: found, end_offset: end });
                return Err(Refusal { code: ErrorCode::None, leader_epoch: epoch, diverging, nearer: None });
            }
        }
        if let Some(rack) = &self.rack
            && let Some(nearer) = broker.nearer_replica(topic, &partition, rack, want.fetch_offset)
        {
            return Err(Refusal { nearer: Some(nearer), ..ErrorCode::None.into() });
        }
        let limit = usize::try_from(want.max_bytes).unwrap_or(0).min(room);
        let mut fetched = partition.fetch(want.fetch_offset, limit, self.stable_only)?;
        // Only the first records of an answer may be larger than the client allows, so that it gets anywhere.
        if !first && fetched.read.as_ref().is_some_and(|r| r.bytes > limit) {
            fetched.read = None;
            fetched.aborted.clear();
        }
        Ok((partition, fetched))
    }

    fn partition_data(
        &self,
        broker: &Broker,
        want: &Wanted,
        result: Result<(Arc<Partition>, Fetched), Refusal>,
        found: &mut Found,
    ) -> (PartitionData, Option<Vec<Chunk>>) {
        let fetched = match result {
            Ok((_, fetched)) => fetched,
            Err(refusal) => {
                found.failed = true;
                return (refused(broker, want, refusal, self.call.version, &mut found.response), None);
            }
        };
        let mut data = PartitionData {
            partition_index: want.partition,
            high_watermark: fetched.standing.high_watermark,
            last_stable_offset: fetched.standing.last_stable,
            log_start_offset: fetched.standing.log_start,
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

    /// Writes the answer and, for a session, notes what the client knows now.
    pub(crate) fn write(&mut self, broker: &Broker, out: &mut Writer) -> io::Result<()> {
        let found = match self.answer.take() {
            Some(Answer::Found(found)) => found,
            Some(Answer::Kept) => {
                let kept = self.kept.as_deref().unwrap_or_default();
                out.push_copy_with(kept, CORRELATION, &self.call.correlation_id.to_be_bytes());
                return Ok(());
            }
            None => return Err(io::Error::other("a fetch without an answer")),
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

/// The bytes of records that are not in files.
fn in_memory(chunks: &[Vec<Chunk>]) -> usize {
    let bytes = |chunk: &Chunk| if let Chunk::Mem(bytes) = chunk { bytes.len() } else { 0 };
    chunks.iter().flatten().map(bytes).sum()
}

/// Remembers what was told; partitions that got records go to the end of the line, so that all get their turn.
fn note(session: &mut Session, response: &FetchResponse) {
    let mut served = hashbrown::HashSet::new();
    let mut told = hashbrown::HashMap::new();
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
            told.insert(key, known);
        }
    }
    let key_of = |w: &Wanted| {
        let name = if w.topic.id == [0; 16] {
            moim_wire_kafka::KString::from(&*w.topic.name)
        } else {
            Default::default()
        };
        (w.topic.id, name, w.partition)
    };
    for want in &mut session.wanted {
        if let Some(known) = told.get(&key_of(want)) {
            want.told = *known;
        }
    }
    if !served.is_empty() && served.len() < session.wanted.len() {
        let (last, first): (Vec<_>, Vec<_>) =
            session.wanted.drain(..).partition(|w| served.contains(&key_of(w)));
        session.wanted.extend(first);
        session.wanted.extend(last);
    }
}

struct Refusal {
    code: ErrorCode,
    leader_epoch: i32,
    diverging: Option<EpochEndOffset>,
    /// The replica in the client's rack that it should read from.
    nearer: Option<BrokerId>,
}

impl From<ErrorCode> for Refusal {
    fn from(code: ErrorCode) -> Self {
        Self { code, leader_epoch: -1, diverging: None, nearer: None }
    }
}

fn refused(
    broker: &Broker,
    want: &Wanted,
    refusal: Refusal,
    version: i16,
    response: &mut FetchResponse,
) -> PartitionData {
    let mut data = PartitionData {
        partition_index: want.partition,
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
        ErrorCode::NotLeaderOrFollower => {
            want.topic.topic.as_ref().and_then(|topic| broker.hint(topic, want.partition))
        }
        // A follower that knows better than the client sends it to the leader, a leader to itself.
        _ if refusal.leader_epoch >= 0 => {
            let elsewhere = want.topic.topic.as_ref().and_then(|topic| broker.hint(topic, want.partition));
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

/// Names a broker once.
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

fn push(response: &mut FetchResponse, want: &Wanted, data: PartitionData) {
    let same = response.responses.last().is_some_and(|t| {
        if want.topic.id == [0; 16] { *t.topic == *want.topic.name } else { t.topic_id.0 == want.topic.id }
    });
    if !same {
        let topic = if want.topic.id == [0; 16] { (&*want.topic.name).into() } else { Default::default() };
        response.responses.push(FetchableTopicResponse {
            topic,
            topic_id: Uuid(want.topic.id),
            partitions: Vec::new(),
        });
    }
    if let Some(topic) = response.responses.last_mut() {
        topic.partitions.push(data);
    }
}

#[cfg(test)]
mod tests;
