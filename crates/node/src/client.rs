//! A small Kafka client for the command line: finds the right broker for each question and asks again when
//! the answer says it moved.
//!
//! Built on `wire-kafka` alone, so that it works against any Kafka and needs no C library. Invariants: one
//! request at a time per connection; no operation outlives the command's timeout; an answer that never came
//! is reported as a timeout or as unreachable, never as a refusal.

pub(crate) mod connection;
pub(crate) mod errors;
pub(crate) mod exchange;
pub(crate) mod fetcher;
pub(crate) mod http;
pub(crate) mod member;
pub(crate) mod offsets;
pub(crate) mod producer;
pub(crate) mod subscription;

use std::collections::BTreeMap;
use std::time::Duration;

use moim_wire_kafka::messages::{
    FindCoordinatorRequest, MetadataRequest, MetadataRequestTopic, MetadataResponse, MetadataResponseTopic,
};
use moim_wire_kafka::{ErrorCode, KString};
use tokio::time::Instant;

use crate::exit::{Failure, Outcome, Status};
use crate::target::{ClientArgs, Target};
use connection::Connection;
use exchange::Exchange;

/// Between two tries of the same question.
pub(crate) const BACKOFF: Duration = Duration::from_millis(100);
/// How long a topic may be unknown before we believe it: a new one needs a moment to be known everywhere.
const UNKNOWN_TOPIC_PATIENCE: Duration = Duration::from_secs(2);

/// A session with a cluster.
pub(crate) struct Client {
    target: Target,
    timeout: Duration,
    bootstrap: Option<Connection>,
    brokers: BTreeMap<i32, Broker>,
    controller: i32,
}

struct Broker {
    host: String,
    port: u16,
    connection: Option<Connection>,
}

/// A partition of a topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TopicPartition {
    /// The topic.
    pub(crate) topic: KString,
    /// The partition.
    pub(crate) partition: i32,
}

impl std::fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.topic, self.partition)
    }
}

/// Runs a command that talks to servers.
pub(crate) fn block_on<F: Future<Output = Outcome>>(future: F) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(future)
}

impl Client {
    /// Connects to the first server that answers.
    pub(crate) async fn connect(args: &ClientArgs) -> Outcome<Self> {
        let mut client = Self {
            target: args.target()?,
            timeout: args.timeout,
            bootstrap: None,
            brokers: BTreeMap::new(),
            controller: -1,
        };
        client.bootstrap().await?;
        Ok(client)
    }

    /// The moment by which an operation that starts now must be over.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// How long an operation may take.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The same as milliseconds, for requests that tell the server how long to try.
    pub(crate) fn timeout_ms(&self) -> i32 {
        i32::try_from(self.timeout.as_millis()).unwrap_or(i32::MAX)
    }

    /// Asks whichever server is at hand.
    pub(crate) async fn any<R: Exchange>(&mut self, request: &R) -> Outcome<R::Response> {
        let deadline = self.deadline();
        let connection = self.bootstrap().await?;
        let answer = connection.call(request, deadline).await;
        if answer.is_err() {
            self.bootstrap = None;
        }
        answer
    }

    /// Asks one broker.
    pub(crate) async fn on<R: Exchange>(&mut self, broker: i32, request: &R) -> Outcome<R::Response> {
        let deadline = self.deadline();
        self.on_by(broker, request, deadline).await
    }

    /// Asks one broker and waits until `deadline`. A connection that broke is not used again.
    pub(crate) async fn on_by<R: Exchange>(
        &mut self,
        broker: i32,
        request: &R,
        deadline: Instant,
    ) -> Outcome<R::Response> {
        let answer = self.connection(broker).await?.call(request, deadline).await;
        if answer.is_err() {
            self.disconnect(broker);
        }
        answer
    }

    /// Asks the controller; a server that is not in charge says so in `code_of`, and then we look again.
    pub(crate) async fn controller<R: Exchange>(
        &mut self,
        request: &R,
        code_of: impl Fn(&R::Response) -> i16,
    ) -> Outcome<R::Response> {
        let deadline = self.deadline();
        loop {
            if !self.brokers.contains_key(&self.controller) {
                self.metadata(Some(&[]), false).await?;
            }
            // A cluster that names no controller takes the question anywhere.
            let known = self.brokers.contains_key(&self.controller);
            let answer =
                if known { self.on(self.controller, request).await? } else { self.any(request).await? };
            let moved = code_of(&answer) == ErrorCode::NotController.code();
            if !moved || Instant::now() >= deadline {
                return Ok(answer);
            }
            self.controller = -1;
            tokio::time::sleep(BACKOFF).await;
        }
    }

    /// What the cluster knows of these topics, or of all. Learns the brokers by the way.
    pub(crate) async fn metadata(
        &mut self,
        topics: Option<&[KString]>,
        create: bool,
    ) -> Outcome<MetadataResponse> {
        let topic = |name: &KString| MetadataRequestTopic { name: Some(name.clone()), ..Default::default() };
        let request = MetadataRequest {
            topics: topics.map(|names| names.iter().map(topic).collect()),
            allow_auto_topic_creation: create,
            ..Default::default()
        };
        let answer = self.any(&request).await?;
        let mut brokers = BTreeMap::new();
        for broker in &answer.brokers {
            let (host, port) = (broker.host.to_string(), u16::try_from(broker.port).unwrap_or(0));
            let old = self.brokers.remove(&broker.node_id).filter(|old| old.host == host && old.port == port);
            let connection = old.and_then(|old| old.connection);
            brokers.insert(broker.node_id, Broker { host, port, connection });
        }
        self.brokers = brokers;
        self.controller = answer.controller_id;
        Ok(answer)
    }

    /// The topics, with a leader for each partition that is `needed` (topic, partition); waits while they are
    /// being made. The others may have none, which is a leader below zero.
    pub(crate) async fn topics(
        &mut self,
        names: &[KString],
        create: bool,
        needed: impl Fn(&str, i32) -> bool,
    ) -> Outcome<Vec<MetadataResponseTopic>> {
        let started = Instant::now();
        loop {
            let answer = self.metadata(Some(names), create).await?;
            let waiting =
                answer.topics.iter().find_map(|topic| unready(topic, &needed).map(|code| (topic, code)));
            let Some((topic, code)) = waiting else {
                return Ok(answer.topics);
            };
            let patience = match ErrorCode::try_from(code) {
                Ok(ErrorCode::UnknownTopicOrPartition) if !create => Duration::ZERO,
                Ok(ErrorCode::UnknownTopicOrPartition) => UNKNOWN_TOPIC_PATIENCE,
                Ok(error) if error.is_retriable() => self.timeout,
                _ => Duration::ZERO,
            };
            if started.elapsed() >= patience.min(self.timeout) {
                return Err(errors::failure(code, None).context(topic.name.as_deref().unwrap_or("?")));
            }
            tokio::time::sleep(BACKOFF).await;
        }
    }

    /// The broker that looks after a group.
    pub(crate) async fn coordinator(&mut self, group: &str) -> Outcome<i32> {
        let deadline = self.deadline();
        let request = FindCoordinatorRequest { key: group.into(), ..Default::default() };
        loop {
            let answer = self.any(&request).await?;
            match ErrorCode::try_from(answer.error_code) {
                Ok(ErrorCode::None) => {
                    let (host, port) = (answer.host.to_string(), u16::try_from(answer.port).unwrap_or(0));
                    self.brokers.entry(answer.node_id).or_insert(Broker { host, port, connection: None });
                    return Ok(answer.node_id);
                }
                Ok(error) if error.is_retriable() && Instant::now() < deadline => {
                    tokio::time::sleep(BACKOFF).await;
                }
                _ => {
                    let message = answer.error_message.as_deref();
                    return Err(errors::failure(answer.error_code, message).context(format!("group {group}")));
                }
            }
        }
    }

    /// Every broker of the cluster.
    pub(crate) async fn broker_ids(&mut self) -> Outcome<Vec<i32>> {
        self.metadata(Some(&[]), false).await?;
        Ok(self.brokers.keys().copied().collect())
    }

    /// The connection to a broker, opened when there is none.
    pub(crate) async fn connection(&mut self, id: i32) -> Outcome<&mut Connection> {
        let deadline = self.deadline();
        if !self.brokers.contains_key(&id) {
            self.metadata(Some(&[]), false).await?;
        }
        let Some(broker) = self.brokers.get_mut(&id) else {
            return Err(Failure::new(Status::Unreachable, format!("the cluster has no broker {id} now")));
        };
        if broker.connection.is_none() {
            broker.connection = Some(Connection::open(&broker.host, broker.port, deadline).await?);
        }
        match &mut broker.connection {
            Some(connection) => Ok(connection),
            None => Err(Failure::error("no connection")),
        }
    }

    /// Forgets a connection whose state is not known any more.
    pub(crate) fn disconnect(&mut self, id: i32) {
        if let Some(broker) = self.brokers.get_mut(&id) {
            broker.connection = None;
        }
    }

    /// Forgets every connection to a broker.
    pub(crate) fn disconnect_all(&mut self) {
        self.brokers.values_mut().for_each(|broker| broker.connection = None);
    }

    async fn bootstrap(&mut self) -> Outcome<&mut Connection> {
        if self.bootstrap.is_none() {
            // Brokers learned later are as good, and still there when the first address is gone.
            let learned = self.brokers.values().map(|broker| (broker.host.clone(), broker.port));
            let addresses: Vec<_> = self.target.addresses.iter().cloned().chain(learned).collect();
            // An address that swallows packets must leave time for the next one.
            let share = self.timeout / u32::try_from(addresses.len()).unwrap_or(1).max(1);
            let mut last = None;
            for (host, port) in &addresses {
                match Connection::open(host, *port, Instant::now() + share).await {
                    Ok(connection) => {
                        self.bootstrap = Some(connection);
                        break;
                    }
                    Err(failure) => last = last.or(Some(failure)),
                }
            }
            if let (None, Some(failure)) = (&self.bootstrap, last) {
                return Err(self.advise(failure));
            }
        }
        match &mut self.bootstrap {
            Some(connection) => Ok(connection),
            None => Err(Failure::usage("no server address")),
        }
    }

    fn advise(&self, failure: Failure) -> Failure {
        if failure.hint.is_some() {
            return failure;
        }
        match self.target.named_by.as_str() {
            "default" => failure.hint("is `moim serve` running? pass --kafka HOST:PORT or set MOIM_KAFKA"),
            named_by => failure.hint(format!("is `moim serve` running? the address comes from {named_by}")),
        }
    }
}

/// Forgives servers for being away: a restart or a new leader is no reason to give up at once.
#[derive(Default)]
pub(crate) struct Patience {
    since: Option<Instant>,
}

impl Patience {
    /// Nothing when the servers were away, as long as that has not lasted for `limit`.
    pub(crate) fn forgive<T>(&mut self, outcome: Outcome<T>, limit: Duration) -> Outcome<Option<T>> {
        match outcome {
            Ok(value) => {
                self.since = None;
                Ok(Some(value))
            }
            Err(failure) if matches!(failure.status, Status::Unreachable | Status::Timeout) => {
                let since = *self.since.get_or_insert_with(Instant::now);
                if since.elapsed() >= limit { Err(failure) } else { Ok(None) }
            }
            Err(failure) => Err(failure),
        }
    }
}

/// The first reason a topic cannot be used yet.
fn unready(topic: &MetadataResponseTopic, needed: impl Fn(&str, i32) -> bool) -> Option<i16> {
    if topic.error_code != 0 {
        return Some(topic.error_code);
    }
    let name = topic.name.as_deref().unwrap_or_default();
    let leaderless =
        topic.partitions.iter().any(|one| one.leader_id < 0 && needed(name, one.partition_index));
    (leaderless || topic.partitions.is_empty()).then_some(ErrorCode::LeaderNotAvailable.code())
}

#[cfg(test)]
mod tests {
    use moim_wire_kafka::messages::metadata::MetadataResponsePartition;

    use super::*;

    #[test]
    fn only_the_partitions_asked_for_need_a_leader() {
        let partition = |partition_index, leader_id| MetadataResponsePartition {
            partition_index,
            leader_id,
            ..Default::default()
        };
        let mut topic = MetadataResponseTopic {
            name: Some("t".into()),
            partitions: vec![partition(0, 1), partition(1, -1)],
            ..Default::default()
        };
        let no_leader = Some(ErrorCode::LeaderNotAvailable.code());
        assert_eq!(unready(&topic, |_, _| false), None);
        assert_eq!(unready(&topic, |_, partition| partition == 0), None);
        assert_eq!(unready(&topic, |topic, partition| topic == "t" && partition == 1), no_leader);
        topic.partitions.clear();
        assert_eq!(unready(&topic, |_, _| false), no_leader, "it is being made");
    }
}
