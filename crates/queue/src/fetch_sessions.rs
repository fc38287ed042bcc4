//! Fetch sessions (KIP-227): the broker caches the partitions a consumer fetches, so that a request carries only
//! changed partitions and a response only partitions with new data.
//!
//! Bounded: the cache has a maximum number of sessions, and a new session evicts the one idle longest once that one
//! has been idle for [`MIN_IDLE_MS`]; all sessions together cache at most [`MAX_PARTITIONS`] partitions. A client
//! that gets no session sends full fetches.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use hashbrown::{HashMap, HashSet};

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::FetchRequest;

use crate::loops::lock;
use crate::topics::{Topic, Topics};

const MIN_IDLE_MS: u64 = 120_000;
/// Maximum number of cached partitions of all sessions together: about 100 bytes each.
const MAX_PARTITIONS: i64 = 2_000_000;

/// One partition of a fetch request.
#[derive(Clone)]
pub(crate) struct RequestedPartition {
    pub(crate) topic: TopicRef,
    pub(crate) partition: i32,
    pub(crate) fetch_offset: i64,
    pub(crate) max_bytes: i32,
    pub(crate) current_leader_epoch: i32,
    pub(crate) last_fetched_epoch: i32,
    /// High watermark, last stable offset and log start offset of the last response.
    pub(crate) sent_offsets: Option<(i64, i64, i64)>,
}

/// A topic as the request named it.
#[derive(Clone)]
pub(crate) struct TopicRef {
    pub(crate) name: Arc<str>,
    pub(crate) id: [u8; 16],
    pub(crate) topic: Option<Arc<Topic>>,
    /// The error if there is no such topic.
    pub(crate) missing: ErrorCode,
}

/// A partition in requests: by topic id, or by topic name where there is no id.
type Key<'a> = ([u8; 16], &'a str, i32);

fn key(id: [u8; 16], name: &str, partition: i32) -> Key<'_> {
    (id, if id == [0; 16] { name } else { "" }, partition)
}

impl RequestedPartition {
    fn key(&self) -> Key<'_> {
        key(self.topic.id, &self.topic.name, self.partition)
    }
}

/// The partitions of one session, in the order in which they are served next.
pub(crate) struct Session {
    pub(crate) requested: Vec<RequestedPartition>,
    epoch: i32,
    last_used_ms: u64,
    /// Number of partitions that all sessions together may still cache.
    remaining: Arc<AtomicI64>,
    /// Number of partitions this session has taken from `remaining`.
    charged: i64,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.remaining.fetch_add(self.charged, Ordering::Relaxed);
    }
}

/// What to serve after the session lookup.
pub(crate) enum Plan {
    /// A sessionless fetch: serve these partitions and cache nothing.
    Once(Vec<RequestedPartition>),
    /// Serve the partitions of this session; `full` if every partition is in the response.
    Session { id: i32, session: Arc<Mutex<Session>>, full: bool },
    /// The request contradicts the cached session.
    Refuse(ErrorCode),
}

/// The fetch session cache.
pub(crate) struct FetchSessions {
    limit: usize,
    sessions: Mutex<HashMap<i32, Arc<Mutex<Session>>>>,
    remaining: Arc<AtomicI64>,
}

impl FetchSessions {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, sessions: Mutex::default(), remaining: Arc::new(AtomicI64::new(MAX_PARTITIONS)) }
    }

    /// Finds or creates the session of a request and applies the request to it.
    pub(crate) fn plan(&self, topics: &Topics, request: &FetchRequest, version: i16, now_ms: u64) -> Plan {
        let (id, epoch) = (request.session_id, request.session_epoch);
        if version < 7 || epoch == -1 {
            if id != 0 {
                lock(&self.sessions).remove(&id);
            }
            return Plan::Once(requested(topics, request, version));
        }
        if epoch == 0 {
            if id != 0 {
                lock(&self.sessions).remove(&id);
            }
            let requested = requested(topics, request, version);
            if requested.is_empty() {
                return Plan::Once(requested);
            }
            return match self.insert(requested, now_ms) {
                Ok((id, session)) => Plan::Session { id, session, full: true },
                Err(requested) => Plan::Once(requested),
            };
        }
        let Some(session) = lock(&self.sessions).get(&id).cloned() else {
            return Plan::Refuse(ErrorCode::FetchSessionIdNotFound);
        };
        {
            let mut state = lock(&session);
            if state.epoch != epoch {
                return Plan::Refuse(ErrorCode::InvalidFetchSessionEpoch);
            }
            state.epoch = if epoch == i32::MAX { 1 } else { epoch + 1 };
            state.last_used_ms = now_ms;
            if !state.update(topics, request, version) {
                drop(state);
                lock(&self.sessions).remove(&id);
                return Plan::Refuse(ErrorCode::FetchSessionIdNotFound);
            }
        }
        Plan::Session { id, session, full: false }
    }

    /// Creates a session; returns the partitions if the cache is full.
    fn insert(
        &self,
        requested: Vec<RequestedPartition>,
        now_ms: u64,
    ) -> Result<(i32, Arc<Mutex<Session>>), Vec<RequestedPartition>> {
        let mut sessions = lock(&self.sessions);
        let many = self.remaining.load(Ordering::Relaxed) < requested.len() as i64;
        if many || sessions.len() >= self.limit {
            let oldest = sessions.iter().map(|(id, s)| (lock(s).last_used_ms, *id)).min();
            match oldest {
                Some((used_ms, id)) if now_ms.saturating_sub(used_ms) >= MIN_IDLE_MS => sessions.remove(&id),
                _ => return Err(requested),
            };
        }
        let mut session = Session {
            requested,
            epoch: 1,
            last_used_ms: now_ms,
            remaining: Arc::clone(&self.remaining),
            charged: 0,
        };
        if !session.count() {
            return Err(std::mem::take(&mut session.requested));
        }
        let id = loop {
            let id = fastrand::i32(1..i32::MAX);
            if !sessions.contains_key(&id) {
                break id;
            }
        };
        let session = Arc::new(Mutex::new(session));
        sessions.insert(id, Arc::clone(&session));
        Ok((id, session))
    }
}

impl Session {
    /// Updates the session's share of the partition limit; false if the limit is exceeded.
    fn count(&mut self) -> bool {
        let now = self.requested.len() as i64;
        let more = now - std::mem::replace(&mut self.charged, now);
        self.remaining.fetch_sub(more, Ordering::Relaxed) >= more
    }

    /// Applies an incremental request; false if the partition limit is exceeded.
    fn update(&mut self, topics: &Topics, request: &FetchRequest, version: i16) -> bool {
        let id_of = |id: moim_wire_kafka::Uuid| if version >= 13 { id.0 } else { [0; 16] };
        if !request.forgotten_topics_data.is_empty() {
            let forgotten = request.forgotten_topics_data.iter();
            let forgotten: HashSet<Key<'_>> = forgotten
                .flat_map(|t| t.partitions.iter().map(move |p| key(id_of(t.topic_id), &t.topic, *p)))
                .collect();
            self.requested.retain(|w| !forgotten.contains(&w.key()));
        }
        // A missing topic may have been created since, and an existing one may be a new incarnation.
        for requested in &mut self.requested {
            let gone = requested.topic.topic.as_ref().is_none_or(|t| topics.get_by_id(t.id).is_none());
            if gone {
                requested.topic = resolve(topics, &requested.topic.name, requested.topic.id, version);
                requested.sent_offsets = None;
            }
        }
        self.apply_incremental(requested(topics, request, version));
        self.count()
    }

    fn apply_incremental(&mut self, updates: Vec<RequestedPartition>) {
        if updates.is_empty() {
            return;
        }
        let known: HashMap<Key<'_>, usize> =
            self.requested.iter().enumerate().map(|(at, w)| (w.key(), at)).collect();
        let known_indexes: Vec<Option<usize>> =
            updates.iter().map(|new| known.get(&new.key()).copied()).collect();
        drop(known);
        for (new, known_index) in updates.into_iter().zip(known_indexes) {
            match known_index {
                Some(at) => {
                    self.requested[at] =
                        RequestedPartition { sent_offsets: self.requested[at].sent_offsets, ..new }
                }
                None => self.requested.push(new),
            }
        }
    }
}

fn requested(topics: &Topics, request: &FetchRequest, version: i16) -> Vec<RequestedPartition> {
    let mut all = Vec::with_capacity(request.topics.iter().map(|t| t.partitions.len()).sum());
    for topic in &request.topics {
        let id = if version >= 13 { topic.topic_id.0 } else { [0; 16] };
        let reference = resolve(topics, &topic.topic, id, version);
        for partition in &topic.partitions {
            all.push(RequestedPartition {
                topic: reference.clone(),
                partition: partition.partition,
                fetch_offset: partition.fetch_offset,
                max_bytes: partition.partition_max_bytes,
                current_leader_epoch: partition.current_leader_epoch,
                last_fetched_epoch: partition.last_fetched_epoch,
                sent_offsets: None,
            });
        }
    }
    all
}

fn resolve(topics: &Topics, name: &str, id: [u8; 16], version: i16) -> TopicRef {
    let topic =
        if version >= 13 { topics.get_by_id(moim_base::TopicId::from_bytes(id)) } else { topics.get(name) };
    let missing = if version >= 13 { ErrorCode::UnknownTopicId } else { ErrorCode::UnknownTopicOrPartition };
    let name = topic.as_ref().map_or_else(|| Arc::from(name), |t| Arc::clone(&t.name));
    TopicRef { name, id, topic, missing }
}

#[cfg(test)]
mod tests {
    use moim_wire_kafka::messages::fetch::{FetchPartition, FetchTopic, ForgottenTopic};

    use super::*;
    use crate::testing::TestBroker;

    fn request(session: (i32, i32), partitions: std::ops::Range<i32>) -> FetchRequest {
        let requested = partitions.map(|partition| FetchPartition { partition, ..Default::default() });
        let topic = FetchTopic { topic: "t".into(), partitions: requested.collect(), ..Default::default() };
        let (session_id, session_epoch) = session;
        FetchRequest { session_id, session_epoch, topics: vec![topic], ..Default::default() }
    }

    fn partitions(plan: &Plan) -> Vec<i32> {
        let Plan::Session { session, .. } = plan else { panic!("no session") };
        lock(session).requested.iter().map(|w| w.partition).collect()
    }

    #[test]
    fn session_keeps_partitions_until_forgotten() {
        let fixture = TestBroker::new();
        let topics = &fixture.broker.topics;
        let sessions = FetchSessions::new(10);
        let plan = sessions.plan(topics, &request((0, 0), 0..3), 12, 0);
        let Plan::Session { id, .. } = plan else { panic!("no session") };
        let plan = sessions.plan(topics, &request((id, 1), 2..5), 12, 0);
        assert_eq!(partitions(&plan), [0, 1, 2, 3, 4]);
        let forgotten = ForgottenTopic { topic: "t".into(), partitions: vec![1, 3], ..Default::default() };
        let mut last = request((id, 2), 0..0);
        last.forgotten_topics_data = vec![forgotten];
        assert_eq!(partitions(&sessions.plan(topics, &last, 12, 0)), [0, 2, 4]);
    }

    #[test]
    fn sessions_share_a_partition_limit() {
        let fixture = TestBroker::new();
        let topics = &fixture.broker.topics;
        let sessions = FetchSessions::new(10);
        sessions.remaining.store(10, Ordering::Relaxed);
        let plan = sessions.plan(topics, &request((0, 0), 0..6), 12, 0);
        let Plan::Session { id, .. } = plan else { panic!("the limit allows six") };
        let second = sessions.plan(topics, &request((0, 0), 0..6), 12, 0);
        assert!(matches!(second, Plan::Once(requested) if requested.len() == 6), "served without a session");
        let grown = sessions.plan(topics, &request((id, 1), 6..12), 12, 0);
        assert!(matches!(grown, Plan::Refuse(ErrorCode::FetchSessionIdNotFound)));
        drop(plan);
        assert_eq!(
            sessions.remaining.load(Ordering::Relaxed),
            10,
            "forgotten partitions are returned to the limit"
        );
    }
}
