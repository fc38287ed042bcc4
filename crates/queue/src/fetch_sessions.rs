//! Fetch sessions (KIP-227): the broker remembers which partitions a consumer fetches, so that a request
//! carries only what changed and a response only what has news.
//!
//! Bounded: so many sessions as the broker allows, and the one idle longest makes room for a new one once it has
//! been idle for [`MIN_IDLE_MS`]; without room the client simply fetches without a session.

use std::sync::{Arc, Mutex};

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::FetchRequest;

use crate::loops::lock;
use crate::topics::{Topic, Topics};

const MIN_IDLE_MS: u64 = 120_000;
/// A session never remembers more partitions than this.
const MAX_PARTITIONS: usize = 200_000;

/// One partition that a client fetches.
#[derive(Clone)]
pub(crate) struct Wanted {
    pub(crate) topic: TopicRef,
    pub(crate) partition: i32,
    pub(crate) fetch_offset: i64,
    pub(crate) max_bytes: i32,
    pub(crate) current_leader_epoch: i32,
    pub(crate) last_fetched_epoch: i32,
    /// What the client was told last: high watermark, last stable offset, log start.
    pub(crate) told: Option<(i64, i64, i64)>,
}

/// A topic as the request named it.
#[derive(Clone)]
pub(crate) struct TopicRef {
    pub(crate) name: Arc<str>,
    pub(crate) id: [u8; 16],
    pub(crate) topic: Option<Arc<Topic>>,
    /// What to answer when there is no such topic.
    pub(crate) missing: ErrorCode,
}

impl TopicRef {
    fn same(&self, name: &str, id: [u8; 16]) -> bool {
        if id == [0; 16] { self.id == [0; 16] && *self.name == *name } else { self.id == id }
    }
}

/// The partitions of one session, in the order in which they are served next.
#[derive(Default)]
pub(crate) struct Session {
    pub(crate) wanted: Vec<Wanted>,
    epoch: i32,
    last_used_ms: u64,
}

/// What a request asks for after its session was looked up.
pub(crate) enum Plan {
    /// Serve these and forget them.
    Once(Vec<Wanted>),
    /// Serve the partitions of this session; `full` when every one is to be answered.
    Session { id: i32, session: Arc<Mutex<Session>>, full: bool },
    /// The request contradicts what the broker remembers.
    Refuse(ErrorCode),
}

/// All sessions.
pub(crate) struct FetchSessions {
    limit: usize,
    sessions: Mutex<HashMap<i32, Arc<Mutex<Session>>>>,
}

impl FetchSessions {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, sessions: Mutex::default() }
    }

    /// Finds or makes the session of a request and brings it up to date.
    pub(crate) fn plan(&self, topics: &Topics, request: &FetchRequest, version: i16, now_ms: u64) -> Plan {
        let (id, epoch) = (request.session_id, request.session_epoch);
        if version < 7 || epoch == -1 {
            if id != 0 {
                lock(&self.sessions).remove(&id);
            }
            return Plan::Once(wanted(topics, request, version));
        }
        if epoch == 0 {
            if id != 0 {
                lock(&self.sessions).remove(&id);
            }
            let wanted = wanted(topics, request, version);
            if wanted.is_empty() || wanted.len() > MAX_PARTITIONS {
                return Plan::Once(wanted);
            }
            return match self
                .insert(Session { wanted: wanted.clone(), epoch: 1, last_used_ms: now_ms }, now_ms)
            {
                Some((id, session)) => Plan::Session { id, session, full: true },
                None => Plan::Once(wanted),
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
            state.update(topics, request, version);
        }
        Plan::Session { id, session, full: false }
    }

    fn insert(&self, session: Session, now_ms: u64) -> Option<(i32, Arc<Mutex<Session>>)> {
        let mut sessions = lock(&self.sessions);
        if sessions.len() >= self.limit {
            let oldest = sessions.iter().map(|(id, s)| (lock(s).last_used_ms, *id)).min()?;
            if now_ms.saturating_sub(oldest.0) < MIN_IDLE_MS {
                return None;
            }
            sessions.remove(&oldest.1);
        }
        let id = loop {
            let id = fastrand::i32(1..i32::MAX);
            if !sessions.contains_key(&id) {
                break id;
            }
        };
        let session = Arc::new(Mutex::new(session));
        sessions.insert(id, Arc::clone(&session));
        Some((id, session))
    }
}

impl Session {
    fn update(&mut self, topics: &Topics, request: &FetchRequest, version: i16) {
        for forgotten in &request.forgotten_topics_data {
            let id = if version >= 13 { forgotten.topic_id.0 } else { [0; 16] };
            self.wanted.retain(|w| {
                !(w.topic.same(&forgotten.topic, id) && forgotten.partitions.contains(&w.partition))
            });
        }
        // A topic that was missing may exist by now, and one that existed may be another incarnation.
        for wanted in &mut self.wanted {
            let gone = wanted.topic.topic.as_ref().is_none_or(|t| topics.get_by_id(t.id).is_none());
            if gone {
                wanted.topic = resolve(topics, &wanted.topic.name, wanted.topic.id, version);
                wanted.told = None;
            }
        }
        if request.topics.is_empty() {
            return;
        }
        for new in wanted(topics, request, version) {
            let same =
                |w: &Wanted| w.partition == new.partition && w.topic.same(&new.topic.name, new.topic.id);
            match self.wanted.iter().position(same) {
                Some(at) => self.wanted[at] = Wanted { told: self.wanted[at].told, ..new },
                None if self.wanted.len() < MAX_PARTITIONS => self.wanted.push(new),
                None => {}
            }
        }
    }
}

fn wanted(topics: &Topics, request: &FetchRequest, version: i16) -> Vec<Wanted> {
    let mut all = Vec::with_capacity(request.topics.iter().map(|t| t.partitions.len()).sum());
    for topic in &request.topics {
        let id = if version >= 13 { topic.topic_id.0 } else { [0; 16] };
        let reference = resolve(topics, &topic.topic, id, version);
        for partition in &topic.partitions {
            all.push(Wanted {
                topic: reference.clone(),
                partition: partition.partition,
                fetch_offset: partition.fetch_offset,
                max_bytes: partition.partition_max_bytes,
                current_leader_epoch: partition.current_leader_epoch,
                last_fetched_epoch: partition.last_fetched_epoch,
                told: None,
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
