//! Fetch sessions (KIP-227): the broker remembers which partitions a consumer fetches, so that a request
//! carries only what changed and a response only what has news.
//!
//! Bounded: so many sessions as the broker allows, and the one idle longest makes room for a new one once it has
//! been idle for [`MIN_IDLE_MS`]; and all of them together remember at most [`MAX_PARTITIONS`]. Without room
//! the client simply fetches without a session.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use hashbrown::{HashMap, HashSet};

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::FetchRequest;

use crate::loops::lock;
use crate::topics::{Topic, Topics};

const MIN_IDLE_MS: u64 = 120_000;
/// All sessions together never remember more partitions than this: about 100 bytes each.
const MAX_PARTITIONS: i64 = 2_000_000;

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

/// A partition as requests name it: by the topic's id, or by its name where there is no id.
type Key<'a> = ([u8; 16], &'a str, i32);

fn key(id: [u8; 16], name: &str, partition: i32) -> Key<'_> {
    (id, if id == [0; 16] { name } else { "" }, partition)
}

impl Wanted {
    fn key(&self) -> Key<'_> {
        key(self.topic.id, &self.topic.name, self.partition)
    }
}

/// The partitions of one session, in the order in which they are served next.
pub(crate) struct Session {
    pub(crate) wanted: Vec<Wanted>,
    epoch: i32,
    last_used_ms: u64,
    /// How many partitions more all sessions may remember.
    room: Arc<AtomicI64>,
    /// What this one has taken of `room`.
    counted: i64,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.room.fetch_add(self.counted, Ordering::Relaxed);
    }
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
    room: Arc<AtomicI64>,
}

impl FetchSessions {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, sessions: Mutex::default(), room: Arc::new(AtomicI64::new(MAX_PARTITIONS)) }
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
            if wanted.is_empty() {
                return Plan::Once(wanted);
            }
            return match self.insert(wanted, now_ms) {
                Ok((id, session)) => Plan::Session { id, session, full: true },
                Err(wanted) => Plan::Once(wanted),
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

    /// Makes a session; gives the partitions back when there is no room for it.
    fn insert(&self, wanted: Vec<Wanted>, now_ms: u64) -> Result<(i32, Arc<Mutex<Session>>), Vec<Wanted>> {
        let mut sessions = lock(&self.sessions);
        let many = self.room.load(Ordering::Relaxed) < wanted.len() as i64;
        if many || sessions.len() >= self.limit {
            let oldest = sessions.iter().map(|(id, s)| (lock(s).last_used_ms, *id)).min();
            match oldest {
                Some((used_ms, id)) if now_ms.saturating_sub(used_ms) >= MIN_IDLE_MS => sessions.remove(&id),
                _ => return Err(wanted),
            };
        }
        let mut session =
            Session { wanted, epoch: 1, last_used_ms: now_ms, room: Arc::clone(&self.room), counted: 0 };
        if !session.count() {
            return Err(std::mem::take(&mut session.wanted));
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
    /// Brings the share of this session up to date; false when all sessions remember too much with it.
    fn count(&mut self) -> bool {
        let now = self.wanted.len() as i64;
        let more = now - std::mem::replace(&mut self.counted, now);
        self.room.fetch_sub(more, Ordering::Relaxed) >= more
    }

    /// Takes in what changed; false when there is no room for it.
    fn update(&mut self, topics: &Topics, request: &FetchRequest, version: i16) -> bool {
        let id_of = |id: moim_wire_kafka::Uuid| if version >= 13 { id.0 } else { [0; 16] };
        if !request.forgotten_topics_data.is_empty() {
            let forgotten = request.forgotten_topics_data.iter();
            let forgotten: HashSet<Key<'_>> = forgotten
                .flat_map(|t| t.partitions.iter().map(move |p| key(id_of(t.topic_id), &t.topic, *p)))
                .collect();
            self.wanted.retain(|w| !forgotten.contains(&w.key()));
        }
        // A topic that was missing may exist by now, and one that existed may be another incarnation.
        for wanted in &mut self.wanted {
            let gone = wanted.topic.topic.as_ref().is_none_or(|t| topics.get_by_id(t.id).is_none());
            if gone {
                wanted.topic = resolve(topics, &wanted.topic.name, wanted.topic.id, version);
                wanted.told = None;
            }
        }
        self.take_in(wanted(topics, request, version));
        self.count()
    }

    fn take_in(&mut self, news: Vec<Wanted>) {
        if news.is_empty() {
            return;
        }
        let known: HashMap<Key<'_>, usize> =
            self.wanted.iter().enumerate().map(|(at, w)| (w.key(), at)).collect();
        let places: Vec<Option<usize>> = news.iter().map(|new| known.get(&new.key()).copied()).collect();
        drop(known);
        for (new, place) in news.into_iter().zip(places) {
            match place {
                Some(at) => self.wanted[at] = Wanted { told: self.wanted[at].told, ..new },
                None => self.wanted.push(new),
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

#[cfg(test)]
mod tests {
    use moim_wire_kafka::messages::fetch::{FetchPartition, FetchTopic, ForgottenTopic};

    use super::*;
    use crate::testing::Still;

    fn request(session: (i32, i32), partitions: std::ops::Range<i32>) -> FetchRequest {
        let wanted = partitions.map(|partition| FetchPartition { partition, ..Default::default() });
        let topic = FetchTopic { topic: "t".into(), partitions: wanted.collect(), ..Default::default() };
        let (session_id, session_epoch) = session;
        FetchRequest { session_id, session_epoch, topics: vec![topic], ..Default::default() }
    }

    fn partitions(plan: &Plan) -> Vec<i32> {
        let Plan::Session { session, .. } = plan else { panic!("no session") };
        lock(session).wanted.iter().map(|w| w.partition).collect()
    }

    #[test]
    fn a_session_keeps_what_was_asked_for_until_it_is_forgotten() {
        let still = Still::new();
        let topics = &still.broker.topics;
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
    fn sessions_together_remember_only_so_many_partitions() {
        let still = Still::new();
        let topics = &still.broker.topics;
        let sessions = FetchSessions::new(10);
        sessions.room.store(10, Ordering::Relaxed);
        let plan = sessions.plan(topics, &request((0, 0), 0..6), 12, 0);
        let Plan::Session { id, .. } = plan else { panic!("there is room for six") };
        let second = sessions.plan(topics, &request((0, 0), 0..6), 12, 0);
        assert!(matches!(second, Plan::Once(wanted) if wanted.len() == 6), "served, but not remembered");
        let grown = sessions.plan(topics, &request((id, 1), 6..12), 12, 0);
        assert!(matches!(grown, Plan::Refuse(ErrorCode::FetchSessionIdNotFound)));
        drop(plan);
        assert_eq!(sessions.room.load(Ordering::Relaxed), 10, "what is forgotten makes room");
    }
}
