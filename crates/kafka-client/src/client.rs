//! A session with a Kafka cluster: finds the broker that serves a request, and repeats the lookup when it has moved.
//!
//! Invariants: one request at a time per connection; no operation outlives the session's timeout; a missing response is
//! reported as a timeout or as unreachable, never as a refusal.

use std::collections::BTreeMap;
use std::time::Duration;

use moim_wire_kafka::messages::{
    FindCoordinatorRequest, MetadataRequest, MetadataRequestTopic, MetadataResponse, MetadataResponseTopic,
};
use moim_wire_kafka::{ErrorCode, KString};
use tokio::time::Instant;

use crate::connection::Connection;
use crate::error::{Error, ErrorKind, Result, server_error};
use crate::exchange::Exchange;

/// The pause between two attempts of the same request.
pub const BACKOFF: Duration = Duration::from_millis(100);
/// How long UNKNOWN_TOPIC_OR_PARTITION is retried: brokers learn of a new topic with a delay.
const UNKNOWN_TOPIC_RETRY: Duration = Duration::from_secs(2);

/// Where a session begins and how long its operations may take.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Bootstrap servers, host and port, in the order in which they are tried.
    pub addresses: Vec<(String, u16)>,
    /// The limit of each operation.
    pub timeout: Duration,
    /// The hint of an error when no bootstrap server can be used.
    pub bootstrap_hint: String,
}

/// A session with a cluster.
pub struct Client {
    options: ClientOptions,
    bootstrap: Option<Connection>,
    brokers: BTreeMap<i32, Broker>,
    /// The broker id of the controller; negative if it is not known.
    controller: i32,
}

struct Broker {
    host: String,
    port: u16,
    connection: Option<Connection>,
}

/// A partition of a topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicPartition {
    /// The name of the topic.
    pub topic: KString,
    /// The index of the partition.
    pub partition: i32,
}

impl std::fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.topic, self.partition)
    }
}

impl Client {
    /// Connects to the first bootstrap server that answers.
    pub async fn connect(options: ClientOptions) -> Result<Self> {
        let mut client = Self { options, bootstrap: None, brokers: BTreeMap::new(), controller: -1 };
        client.bootstrap().await?;
        Ok(client)
    }

    /// The deadline of an operation that starts now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }

    /// The limit of each operation.
    pub fn timeout(&self) -> Duration {
        self.options.timeout
    }

    /// The same in milliseconds, for the `timeout_ms` of requests.
    pub fn timeout_ms(&self) -> i32 {
        i32::try_from(self.options.timeout.as_millis()).unwrap_or(i32::MAX)
    }

    /// Sends a request to any broker: the connection of the bootstrap.
    pub async fn request_any<R: Exchange>(&mut self, request: &R) -> Result<R::Response> {
        let deadline = self.deadline();
        let connection = self.bootstrap().await?;
        let answer = connection.call(request, deadline).await;
        if answer.is_err() {
            self.bootstrap = None;
        }
        answer
    }

    /// Sends a request to one broker.
    pub async fn request<R: Exchange>(&mut self, broker: i32, request: &R) -> Result<R::Response> {
        let deadline = self.deadline();
        self.request_until(broker, request, deadline).await
    }

    /// Sends a request to one broker and waits until `deadline`. A failed connection is not used again.
    pub(crate) async fn request_until<R: Exchange>(
        &mut self,
        broker: i32,
        request: &R,
        deadline: Instant,
    ) -> Result<R::Response> {
        let answer = self.connection(broker).await?.call(request, deadline).await;
        if answer.is_err() {
            self.disconnect(broker);
        }
        answer
    }

    /// Sends a request to the controller. NOT_CONTROLLER, as `code_of` finds it in the response, repeats the lookup.
    pub async fn request_controller<R: Exchange>(
        &mut self,
        request: &R,
        code_of: impl Fn(&R::Response) -> i16,
    ) -> Result<R::Response> {
        let deadline = self.deadline();
        loop {
            if !self.brokers.contains_key(&self.controller) {
                self.metadata(Some(&[]), false).await?;
            }
            // A cluster without a known controller accepts the request on any broker.
            let known = self.brokers.contains_key(&self.controller);
            let answer = if known {
                self.request(self.controller, request).await?
            } else {
                self.request_any(request).await?
            };
            let moved = code_of(&answer) == ErrorCode::NotController.code();
            if !moved || Instant::now() >= deadline {
                return Ok(answer);
            }
            self.controller = -1;
            tokio::time::sleep(BACKOFF).await;
        }
    }

    /// Metadata of these topics, or of all. Updates the brokers and the controller of this session.
    pub async fn metadata(&mut self, topics: Option<&[KString]>, create: bool) -> Result<MetadataResponse> {
        let topic = |name: &KString| MetadataRequestTopic { name: Some(name.clone()), ..Default::default() };
        let request = MetadataRequest {
            topics: topics.map(|names| names.iter().map(topic).collect()),
            allow_auto_topic_creation: create,
            ..Default::default()
        };
        let answer = self.request_any(&request).await?;
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

    /// Metadata of these topics, with a leader for each partition that is `needed` (topic, partition); waits while
    /// topics are being created. Other partitions may have no leader: a negative leader id.
    pub async fn topics(
        &mut self,
        names: &[KString],
        create: bool,
        needed: impl Fn(&str, i32) -> bool,
    ) -> Result<Vec<MetadataResponseTopic>> {
        let started = Instant::now();
        loop {
            let answer = self.metadata(Some(names), create).await?;
            let waiting =
                answer.topics.iter().find_map(|topic| not_ready(topic, &needed).map(|code| (topic, code)));
            let Some((topic, code)) = waiting else {
                return Ok(answer.topics);
            };
            let retry = match ErrorCode::try_from(code) {
                Ok(ErrorCode::UnknownTopicOrPartition) if !create => Duration::ZERO,
                Ok(ErrorCode::UnknownTopicOrPartition) => UNKNOWN_TOPIC_RETRY,
                Ok(error) if error.is_retriable() => self.options.timeout,
                _ => Duration::ZERO,
            };
            if started.elapsed() >= retry.min(self.options.timeout) {
                return Err(server_error(code, None).context(topic.name.as_deref().unwrap_or("?")));
            }
            tokio::time::sleep(BACKOFF).await;
        }
    }

    /// The broker id of a group coordinator.
    pub async fn coordinator(&mut self, group: &str) -> Result<i32> {
        let deadline = self.deadline();
        let request = FindCoordinatorRequest { key: group.into(), ..Default::default() };
        loop {
            let answer = self.request_any(&request).await?;
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
                    return Err(server_error(answer.error_code, message).context(format!("group {group}")));
                }
            }
        }
    }

    /// The ids of all brokers of the cluster.
    pub async fn broker_ids(&mut self) -> Result<Vec<i32>> {
        self.metadata(Some(&[]), false).await?;
        Ok(self.brokers.keys().copied().collect())
    }

    /// The connection to a broker; opens one if there is none.
    pub(crate) async fn connection(&mut self, id: i32) -> Result<&mut Connection> {
        let deadline = self.deadline();
        if !self.brokers.contains_key(&id) {
            self.metadata(Some(&[]), false).await?;
        }
        let Some(broker) = self.brokers.get_mut(&id) else {
            return Err(Error::new(ErrorKind::Unreachable, format!("the cluster has no broker {id} now")));
        };
        if broker.connection.is_none() {
            broker.connection = Some(Connection::open(&broker.host, broker.port, deadline).await?);
        }
        match &mut broker.connection {
            Some(connection) => Ok(connection),
            None => Err(Error::other("no connection")),
        }
    }

    /// Drops a connection whose state is unknown.
    pub(crate) fn disconnect(&mut self, id: i32) {
        if let Some(broker) = self.brokers.get_mut(&id) {
            broker.connection = None;
        }
    }

    /// Drops every connection to a broker; the bootstrap connection stays.
    pub(crate) fn disconnect_all(&mut self) {
        self.brokers.values_mut().for_each(|broker| broker.connection = None);
    }

    async fn bootstrap(&mut self) -> Result<&mut Connection> {
        if self.bootstrap.is_none() {
            // Brokers from earlier metadata are tried too: the bootstrap servers may be gone by now.
            let learned = self.brokers.values().map(|broker| (broker.host.clone(), broker.port));
            let addresses: Vec<_> = self.options.addresses.iter().cloned().chain(learned).collect();
            // An address that drops packets must leave time for the next one.
            let share = self.options.timeout / u32::try_from(addresses.len()).unwrap_or(1).max(1);
            let mut first_error = None;
            for (host, port) in &addresses {
                match Connection::open(host, *port, Instant::now() + share).await {
                    Ok(connection) => {
                        self.bootstrap = Some(connection);
                        break;
                    }
                    Err(error) => first_error = first_error.or(Some(error)),
                }
            }
            if let (None, Some(error)) = (&self.bootstrap, first_error) {
                return Err(self.with_bootstrap_hint(error));
            }
        }
        match &mut self.bootstrap {
            Some(connection) => Ok(connection),
            None => Err(Error::new(ErrorKind::InvalidRequest, "no server address")),
        }
    }

    fn with_bootstrap_hint(&self, error: Error) -> Error {
        if error.hint.is_some() { error } else { error.hint(&self.options.bootstrap_hint) }
    }
}

/// The first error code because of which a topic cannot be used yet.
fn not_ready(topic: &MetadataResponseTopic, needed: impl Fn(&str, i32) -> bool) -> Option<i16> {
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
    fn only_needed_partitions_must_have_a_leader() {
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
        assert_eq!(not_ready(&topic, |_, _| false), None);
        assert_eq!(not_ready(&topic, |_, partition| partition == 0), None);
        assert_eq!(not_ready(&topic, |topic, partition| topic == "t" && partition == 1), no_leader);
        topic.partitions.clear();
        assert_eq!(not_ready(&topic, |_, _| false), no_leader, "the topic is being created");
    }
}
