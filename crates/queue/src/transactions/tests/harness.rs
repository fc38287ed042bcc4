//! A test harness: a transaction coordinator with a log and partitions, which a test completes step by step or all at
//! once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use moim_wire_kafka::ErrorCode;

use super::super::*;

/// Wall time at monotonic 0.
pub(super) const WALL: i64 = 1_000_000;

/// A marker to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Marker {
    pub(super) token: MarkersToken,
    pub(super) id: Arc<str>,
    pub(super) producer: (i64, i16),
    pub(super) commit: bool,
    pub(super) own_epoch: bool,
    pub(super) at: TopicPartition,
}

pub(super) struct Harness {
    pub(super) c: Coordinator,
    pub(super) now: u64,
    /// The durable log.
    pub(super) log: Vec<(Bytes, Option<Bytes>)>,
    pub(super) writes: VecDeque<(PersistToken, Bytes, Option<Bytes>)>,
    pub(super) markers: Vec<Marker>,
    /// Durable markers, with the log length at that time.
    pub(super) written: Vec<(usize, Marker)>,
    /// `None` while a request waits.
    pub(super) answers: BTreeMap<Token, Option<Reply>>,
    pub(super) fresh_id: i64,
}

impl Harness {
    pub(super) fn new() -> Self {
        let mut harness = Self {
            c: Coordinator::new(Config::default(), 7),
            now: 0,
            log: Vec::new(),
            writes: VecDeque::new(),
            markers: Vec::new(),
            written: Vec::new(),
            answers: BTreeMap::new(),
            fresh_id: 100,
        };
        harness.restart();
        harness
    }

    /// Loses everything in memory; keeps the log.
    pub(super) fn restart(&mut self) {
        self.answers.retain(|_, reply| reply.is_some());
        self.writes.clear();
        self.markers.clear();
        self.c = Coordinator::new(Config::default(), 7);
        self.c.set_wall_ms(self.now, WALL.saturating_add_unsigned(self.now));
        for (key, value) in &self.log {
            self.c.replay(key, value.as_deref()).unwrap();
        }
        let effects = self.c.start(self.now);
        self.take(effects);
    }

    pub(super) fn take(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Reply(token, reply) => {
                    let slot = self.answers.get_mut(&token).expect("a response to a request");
                    assert_eq!(slot.replace(reply), None, "{token:?} answered twice");
                }
                Effect::Persist { transactional_id, key, value, token } => {
                    assert_eq!(decode_key(&key), Ok(Some(transactional_id)));
                    self.writes.push_back((token, key, value));
                }
                Effect::WriteMarkers(WriteMarkers {
                    token,
                    transactional_id,
                    producer_id,
                    producer_epoch,
                    commit,
                    coordinator_epoch,
                    epoch_per_transaction,
                    partitions,
                }) => {
                    assert_eq!(coordinator_epoch, 7);
                    let all = partitions
                        .into_iter()
                        .flat_map(|(t, ps)| ps.into_iter().map(move |p| (t.clone(), p)));
                    self.markers.extend(all.map(|(topic, partition)| Marker {
                        token,
                        id: transactional_id.clone(),
                        producer: (producer_id, producer_epoch),
                        commit,
                        own_epoch: epoch_per_transaction,
                        at: TopicPartition { topic, partition },
                    }));
                }
            }
        }
    }

    /// Sends a request and leaves its effects pending.
    pub(super) fn send(&mut self, input: impl FnOnce(Token, i64) -> Input) -> Token {
        let token = Token(self.answers.last_key_value().map_or(0, |(t, _)| t.0) + 1);
        self.answers.insert(token, None);
        self.fresh_id += 1;
        let effects = self.c.step(self.now, input(token, self.fresh_id));
        self.take(effects);
        token
    }

    /// Sends a request, completes its writes but no marker, and returns the response.
    pub(super) fn ask(&mut self, input: impl FnOnce(Token, i64) -> Input) -> Reply {
        let token = self.send(input);
        self.persist_all();
        self.answers[&token].expect("answered")
    }

    pub(super) fn persist(&mut self, result: Result<(), ErrorCode>) {
        let Some((token, key, value)) = self.writes.pop_front() else { return };
        if result.is_ok() {
            self.log.push((key, value));
        }
        let effects = self.c.on_persisted(self.now, token, result);
        self.take(effects);
    }

    pub(super) fn persist_all(&mut self) {
        while !self.writes.is_empty() {
            self.persist(Ok(()));
        }
    }

    pub(super) fn mark(&mut self, index: usize, result: Result<(), ErrorCode>) {
        let marker = self.markers.remove(index);
        if result.is_ok() {
            self.written.push((self.log.len(), marker.clone()));
        }
        let at = &marker.at;
        let effects = self.c.on_marker_written(self.now, marker.token, &at.topic, at.partition, result);
        self.take(effects);
    }

    /// Completes everything that is pending now.
    pub(super) fn settle(&mut self) {
        while !self.writes.is_empty() || !self.markers.is_empty() {
            self.persist_all();
            if !self.markers.is_empty() {
                self.mark(0, Ok(()));
            }
        }
    }

    pub(super) fn advance(&mut self, ms: u64) {
        self.now += ms;
        let effects = self.c.tick(self.now);
        self.take(effects);
    }

    pub(super) fn state(&self, id: &str) -> &'static str {
        self.c.describe(id).map_or("-", |d| d.state)
    }
}

pub(super) fn init(id: &str, current: Option<(i64, i16)>) -> impl FnOnce(Token, i64) -> Input {
    init_at(4, id, current)
}

pub(super) fn init_at(
    version: i16,
    id: &str,
    current: Option<(i64, i16)>,
) -> impl FnOnce(Token, i64) -> Input {
    move |token, fresh_id| Input::InitProducerId {
        token,
        version,
        transactional_id: Some(id.into()),
        timeout_ms: 60_000,
        current,
        fresh_id,
    }
}

pub(super) fn add(id: &str, producer: (i64, i16), partitions: &[i32]) -> impl FnOnce(Token, i64) -> Input {
    add_at(3, id, producer, partitions)
}

pub(super) fn add_at(
    version: i16,
    id: &str,
    (producer_id, producer_epoch): (i64, i16),
    partitions: &[i32],
) -> impl FnOnce(Token, i64) -> Input {
    move |token, _| Input::AddPartitions {
        token,
        version,
        transactional_id: id.into(),
        producer_id,
        producer_epoch,
        partitions: partitions.iter().map(|p| TopicPartition::new("t", *p)).collect(),
    }
}

pub(super) fn end(id: &str, producer: (i64, i16), commit: bool) -> impl FnOnce(Token, i64) -> Input {
    end_at(3, id, producer, commit)
}

pub(super) fn end_at(
    version: i16,
    id: &str,
    (producer_id, producer_epoch): (i64, i16),
    commit: bool,
) -> impl FnOnce(Token, i64) -> Input {
    move |token, fresh_id| Input::EndTxn {
        token,
        version,
        transactional_id: id.into(),
        producer_id,
        producer_epoch,
        commit,
        fresh_id,
    }
}
