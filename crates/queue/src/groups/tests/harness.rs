//! A test harness: a group coordinator with a log and a clock, and the invariants that hold after every step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use crate::groups::group::{Group, Phase};
use crate::groups::outbox::OnWritten;
use crate::groups::*;

/// The contents of the log, in order.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Entry {
    Record(Bytes, Option<Bytes>, Option<(i64, i16)>),
    Marker(i64, i16, bool),
}

/// Pending log writes, in order.
enum Queued {
    Write { group: Arc<str>, records: Vec<GroupRecord>, txn: Option<TxnProducer>, then: PersistToken },
    Marker(TxnProducer, bool),
}

pub(super) struct Harness {
    pub(super) groups: Groups,
    pub(super) now: u64,
    pub(super) log: Vec<Entry>,
    queue: VecDeque<Queued>,
    open: BTreeSet<Token>,
    answers: BTreeMap<Token, Response>,
    asked: u64,
    generations: BTreeMap<Arc<str>, i32>,
    /// The generation each member got last, by group and member.
    known_generations: BTreeMap<(Arc<str>, Arc<str>), i32>,
    /// The group of each join token.
    joining: BTreeMap<Token, Arc<str>>,
}

/// Wall time at `now == 0`.
pub(super) const WALL: i64 = 1_700_000_000_000;

pub(super) fn config() -> Config {
    Config { min_session_timeout_ms: 10, initial_rebalance_delay_ms: 0, ..Config::default() }
}

impl Harness {
    pub(super) fn new(config: Config) -> Self {
        let mut groups = Groups::new(config, 7);
        groups.set_wall_ms(0, WALL);
        Self {
            groups,
            now: 0,
            log: Vec::new(),
            queue: VecDeque::new(),
            open: BTreeSet::new(),
            answers: BTreeMap::new(),
            asked: 0,
            generations: BTreeMap::new(),
            known_generations: BTreeMap::new(),
            joining: BTreeMap::new(),
        }
    }

    pub(super) fn ask(&mut self, input: impl FnOnce(Token) -> Input) -> Token {
        self.asked += 1;
        let token = Token(self.asked);
        self.open.insert(token);
        let input = input(token);
        if let Input::Join(_, join) = &input {
            self.joining.insert(token, join.group.clone());
        }
        let effects = self.groups.step(self.now, input);
        self.apply(effects);
        token
    }

    /// Sends a request, completes every write, and expects the response.
    pub(super) fn ask_now(&mut self, input: impl FnOnce(Token) -> Input) -> Response {
        let token = self.ask(input);
        self.write_all();
        self.take(token).expect("no response yet")
    }

    pub(super) fn take(&mut self, token: Token) -> Option<Response> {
        self.answers.remove(&token)
    }

    pub(super) fn unanswered(&self) -> usize {
        self.open.len()
    }

    fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Reply(token, response) => {
                    assert!(self.open.remove(&token), "{token:?} answered twice, now {response:?}");
                    self.note_join(token, &response);
                    self.answers.insert(token, response);
                }
                Effect::Persist { group, records, txn, then } => {
                    assert!(!records.is_empty(), "an empty write");
                    self.queue.push_back(Queued::Write { group, records, txn, then });
                }
            }
        }
        self.check();
    }

    fn note_join(&mut self, token: Token, response: &Response) {
        let Some(group) = self.joining.remove(&token) else { return };
        let Response::Join(join) = response else { panic!("a join answered by {response:?}") };
        if join.error == ErrorCode::None {
            assert!(join.members.is_empty() || join.leader == join.member_id);
            self.known_generations.insert((group, join.member_id.clone()), join.generation);
        }
    }

    pub(super) fn topic_deleted(&mut self, topic: &str) {
        let effects = self.groups.step(self.now, Input::TopicDeleted(topic.into()));
        self.apply(effects);
    }

    pub(super) fn unload(&mut self) {
        let effects = self.groups.unload(self.now, |_| true);
        self.apply(effects);
    }

    pub(super) fn marker(&mut self, producer: TxnProducer, commit: bool) {
        self.queue.push_back(Queued::Marker(producer, commit));
    }

    /// True if the marker of the producer's transaction is pending; until then it cannot begin another.
    pub(super) fn is_ending(&self, producer: TxnProducer) -> bool {
        self.queue.iter().any(|queued| matches!(queued, Queued::Marker(of, _) if *of == producer))
    }

    /// Completes the oldest write. Returns false if no write is pending.
    pub(super) fn write_one(&mut self, result: Result<(), ErrorCode>) -> bool {
        match self.queue.pop_front() {
            None => return false,
            Some(Queued::Marker(producer, commit)) => {
                self.log.push(Entry::Marker(producer.id, producer.epoch, commit));
                let effects = self.groups.step(self.now, Input::TxnMarker { producer, commit });
                self.apply(effects);
            }
            Some(Queued::Write { group, records, txn, then }) => {
                for (key, value) in records {
                    let read = records::read_key(key.clone()).expect("our own key");
                    let (records::Key::Offset { group: of, .. } | records::Key::Group { group: of }) = read
                    else {
                        panic!("an unknown kind of record")
                    };
                    assert_eq!(of, group, "a record in another group's write");
                    if result.is_ok() {
                        self.log.push(Entry::Record(key, value, txn.map(|t| (t.id, t.epoch))));
                    }
                }
                let effects = self.groups.step(self.now, Input::Persisted(then, result));
                self.apply(effects);
            }
        }
        true
    }

    /// Fails the oldest write, unless no request waits for it: the log then lacks what memory has, by design.
    pub(super) fn refuse_one(&mut self) {
        let noticed = match self.queue.front() {
            Some(Queued::Write { then, .. }) => {
                let write = self.groups.out.writes.get(then);
                write.is_some_and(|write| {
                    !matches!(write.then, OnWritten::Nothing | OnWritten::StaticJoin { .. })
                })
            }
            Some(Queued::Marker(..)) | None => false,
        };
        self.write_one(if noticed { Err(ErrorCode::NotEnoughReplicas) } else { Ok(()) });
    }

    pub(super) fn write_all(&mut self) {
        while self.write_one(Ok(())) {}
    }

    /// Advances time, stopping at every deadline on the way.
    pub(super) fn advance(&mut self, ms: u64) {
        let end = self.now + ms;
        while let Some(at) = self.groups.next_deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            let effects = self.groups.step(self.now, Input::Tick);
            self.apply(effects);
        }
        self.now = end;
    }

    /// The coordinator that a restart would load from the log.
    pub(super) fn reload(&self) -> Groups {
        let mut loader = Loader::new();
        for entry in self.log.clone() {
            match entry {
                Entry::Record(key, value, txn) => loader.record(key, value, txn).expect("our own record"),
                Entry::Marker(id, epoch, commit) => loader.marker(id, epoch, commit),
            }
        }
        // A real process takes a random seed; here it must only be one that was not used before.
        loader.finish(self.now, WALL + self.now as i64, config(), u128::from(self.asked) << 64 | 8)
    }

    /// Restarts from the log; waiting requests are dropped.
    pub(super) fn restart(&mut self) {
        self.groups = self.reload();
        self.queue.clear();
        self.open.clear();
        self.joining.clear();
        self.generations.clear();
        for (name, group) in &self.groups.groups {
            for id in group.members.keys() {
                self.known_generations.insert((name.clone(), id.clone()), group.generation);
            }
        }
        self.check();
    }

    fn check(&mut self) {
        let mut indexed = 0;
        for (name, group) in &self.groups.groups {
            self.check_group(name, group);
            indexed += usize::from(group.wake.is_some());
            if let Some(wake) = group.wake {
                assert!(self.groups.deadlines.contains(&(wake, name.clone())));
            }
            let due = group.next_deadline();
            assert!(
                due.is_none_or(|due| group.wake.is_some_and(|wake| wake <= due)),
                "{name} sleeps past {due:?}"
            );
        }
        assert_eq!(indexed, self.groups.deadlines.len(), "the index holds removed groups");
        self.generations.retain(|name, _| self.groups.groups.contains_key(name));
        for (name, group) in &self.groups.groups {
            let last = self.generations.insert(name.clone(), group.generation).unwrap_or(0);
            assert!(group.generation >= last || group.generation == 0, "{name} went back from {last}");
        }
    }

    fn check_group(&self, name: &Arc<str>, group: &Group) {
        let members = &group.members;
        let leads = group.leader.as_ref().map(|leader| members.contains_key(leader));
        assert_eq!(leads.unwrap_or(false), !members.is_empty(), "{name} has no leader or a ghost");
        let instances: BTreeMap<_, _> =
            members.iter().filter_map(|(id, m)| Some((m.instance_id.clone()?, id.clone()))).collect();
        assert_eq!(instances, group.instances);
        for (id, member) in members {
            assert!(!group.pending.contains_key(id));
            match group.phase {
                Phase::Empty => panic!("{name} is empty and has {id}"),
                Phase::Preparing { .. } => assert!(member.awaiting_sync.is_none()),
                Phase::Completing | Phase::Stable => {
                    assert!(member.awaiting_join.is_none() && !member.is_new);
                    assert!(group.phase == Phase::Completing || member.awaiting_sync.is_none());
                    let known_generations = self.known_generations.get(&(name.clone(), id.clone()));
                    let knows = known_generations == Some(&group.generation);
                    assert!(
                        knows || member.instance_id.is_some(),
                        "{id} is in {} but knows {known_generations:?}",
                        group.generation
                    );
                }
            }
            for token in [member.awaiting_join, member.awaiting_sync].into_iter().flatten() {
                assert!(self.open.contains(&token), "{id} holds an answered token");
            }
        }
    }
}

/// A consumer's subscription to these topics.
pub(super) fn subscription(topics: &[&str]) -> Bytes {
    let mut out = BytesMut::new();
    out.put_i16(1);
    out.put_i32(topics.len() as i32);
    for topic in topics {
        out.put_u16(topic.len() as u16);
        out.put_slice(topic.as_bytes());
    }
    out.put_i32(-1);
    out.freeze()
}

pub(super) fn join(group: &str, client: &str, member_id: &Arc<str>, topics: &[&str]) -> Join {
    Join {
        group: group.into(),
        member_id: member_id.clone(),
        instance_id: None,
        client_id: client.into(),
        client_host: "/127.0.0.1".into(),
        session_timeout_ms: 10_000,
        rebalance_timeout_ms: 60_000,
        protocol_type: "consumer".into(),
        protocols: vec![Protocol { name: "range".into(), metadata: subscription(topics) }],
        require_known_member_id: false,
        can_skip_assignment: false,
        reason: None,
    }
}

pub(super) fn commit_topics(offsets: &[(&str, i32, i64)]) -> Vec<CommitTopic> {
    let line = |(topic, partition, offset): &(&str, i32, i64)| CommitTopic {
        topic: (*topic).into(),
        partitions: vec![CommitPartition {
            partition: *partition,
            offset: *offset,
            leader_epoch: 3,
            metadata: Some(format!("at {offset}")),
        }],
    };
    offsets.iter().map(line).collect()
}

/// A commit by a client without membership.
pub(super) fn simple_commit(group: &str, offsets: &[(&str, i32, i64)]) -> OffsetCommit {
    OffsetCommit {
        group: group.into(),
        generation: -1,
        member_id: Arc::default(),
        instance_id: None,
        retention_ms: None,
        topics: commit_topics(offsets),
    }
}
