//! The queue as the pipeline sees it: its topics, and how its producers and consumers are set.
//!
//! Only the Kafka protocol is used, so any Kafka will do.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use tokio::time::Instant;

/// What clients sent, keyed by client.
pub const CLIENT_MESSAGE: &str = "client_message";
/// What was counted, keyed by message.
pub const MESSAGE_AGGREGATION: &str = "message_aggregation";
/// What could not be processed, with where it came from.
pub const DEAD_LETTER: &str = "pipeline_dead_letter";

/// How the queue is reached, and what its topics are made with.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// Kafka's `bootstrap.servers`.
    pub brokers: String,
    /// Partitions of each topic.
    pub partitions: i32,
    /// Copies; none is what the cluster does by itself.
    pub factor: Option<i32>,
    /// Put before the names of groups and transactional ids, so that several runs can share a cluster.
    pub name: String,
}

impl QueueOptions {
    fn base(&self, role: &str) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", format!("{}-{role}", self.name))
            .set("socket.keepalive.enable", "true")
            .set("reconnect.backoff.ms", "50")
            .set("reconnect.backoff.max.ms", "1000")
            .set("topic.metadata.refresh.interval.ms", "5000");
        config
    }

    /// A producer that keeps order and repeats nothing.
    pub(crate) fn idempotent(&self, role: &str, report_timeout: Duration) -> ClientConfig {
        let mut config = self.base(role);
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            // Messages that come together go together: what a batch costs is paid on three nodes.
            .set("linger.ms", "5")
            .set("partitioner", "murmur2_random")
            .set("message.timeout.ms", report_timeout.as_millis().to_string());
        config
    }

    /// A producer whose records count only with the offsets they came from.
    pub(crate) fn transactional(&self, role: &str) -> ClientConfig {
        let mut config = self.base(role);
        config
            .set("transactional.id", format!("{}-{role}", self.name))
            .set("linger.ms", "4")
            // A message that was not stored undoes the transaction; of all others nobody needs to hear.
            .set("delivery.report.only.error", "true")
            .set("partitioner", "murmur2_random")
            // The next transaction may begin before the last one's markers are written: it is told to try again.
            .set("retry.backoff.ms", "5")
            .set("transaction.timeout.ms", "15000")
            .set("message.timeout.ms", "9000");
        config
    }

    /// A consumer of the group of `role`, which reads what is committed and commits by itself nothing.
    pub(crate) fn consumer(&self, role: &str) -> ClientConfig {
        let mut config = self.base(role);
        config
            .set("group.id", format!("{}-{role}", self.name))
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest")
            .set("isolation.level", "read_committed")
            .set("session.timeout.ms", "6000")
            // One that hangs in a call, because the queue or the store does not answer it, holds up a rebalance for so long.
            .set("max.poll.interval.ms", "30000")
            .set("heartbeat.interval.ms", "1000")
            .set("fetch.wait.max.ms", "100")
            .set("partition.assignment.strategy", "range");
        config
    }

    fn admin(&self) -> Result<AdminClient<DefaultClientContext>, KafkaError> {
        self.base("admin").create()
    }
}

/// A queue that does not answer, or whose brokers are not all there yet, is asked again for so long.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes the topics that are not there. Waits for a cluster that is only just starting, or in the middle of a failover, and
/// tells `on_wait` for what, once for each reason.
pub async fn create_topics(options: &QueueOptions, mut on_wait: impl FnMut(&str)) -> Result<(), KafkaError> {
    let until = Instant::now() + PATIENCE;
    let mut told = None;
    loop {
        match try_create_topics(options).await {
            Err(error) if passes(&error) && Instant::now() < until => {
                tracing::debug!(%error, "cannot make the topics; trying again");
                let code = code_of(&error);
                if told.replace(code) != Some(code) {
                    on_wait(&wanting(options, &error));
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            other => return other,
        }
    }
}

/// What is waited for, for people.
fn wanting(options: &QueueOptions, error: &KafkaError) -> String {
    let seconds = PATIENCE.as_secs();
    match (code_of(error), options.factor) {
        (Some(RDKafkaErrorCode::InvalidReplicationFactor), Some(factor)) => {
            format!("waiting up to {seconds} s for more brokers: the topics are to have {factor} copies")
        }
        (Some(RDKafkaErrorCode::InvalidReplicationFactor), None) => {
            format!("waiting up to {seconds} s for more brokers: there are fewer than copies of a topic")
        }
        _ => format!("waiting up to {seconds} s for the queue at {}: {error}", options.brokers),
    }
}

fn code_of(error: &KafkaError) -> Option<RDKafkaErrorCode> {
    match error {
        KafkaError::AdminOp(code) => Some(*code),
        other => other.rdkafka_error_code(),
    }
}

/// Whether the next try may go better.
fn passes(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{
        AllBrokersDown, BrokerTransportFailure, InvalidReplicationFactor, NetworkException, NotController,
        OperationTimedOut, RequestTimedOut,
    };
    let passing = [
        AllBrokersDown,
        BrokerTransportFailure,
        // Brokers join one after the other; until enough of them are there, a topic cannot have its copies.
        InvalidReplicationFactor,
        NetworkException,
        NotController,
        OperationTimedOut,
        RequestTimedOut,
    ];
    code_of(error).is_some_and(|code| passing.contains(&code))
}

async fn try_create_topics(options: &QueueOptions) -> Result<(), KafkaError> {
    let admin = options.admin()?;
    let factor = options.factor.unwrap_or(-1);
    let topic = |name| NewTopic::new(name, options.partitions, TopicReplication::Fixed(factor));
    let topics = [topic(CLIENT_MESSAGE), topic(MESSAGE_AGGREGATION), topic(DEAD_LETTER)];
    let asked = AdminOptions::new().operation_timeout(Some(Duration::from_secs(20)));
    for result in admin.create_topics(&topics, &asked).await? {
        match result {
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((_, code)) => return Err(KafkaError::AdminOp(code)),
        }
    }
    Ok(())
}

/// Deletes the topics with all that is in them, and the groups that read them.
pub async fn delete_topics(options: &QueueOptions) -> Result<(), KafkaError> {
    let admin = options.admin()?;
    let asked = AdminOptions::new().operation_timeout(Some(Duration::from_secs(20)));
    let topics = [CLIENT_MESSAGE, MESSAGE_AGGREGATION, DEAD_LETTER];
    for result in admin.delete_topics(&topics, &asked).await? {
        match result {
            Ok(_) | Err((_, RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic)) => {}
            Err((_, code)) => return Err(KafkaError::AdminOp(code)),
        }
    }
    let groups = ["counter", "aggregator"].map(|role| format!("{}-{role}", options.name));
    let names: Vec<&str> = groups.iter().map(String::as_str).collect();
    // A group that is not there, or still has members, is no reason to fail: its offsets went with the topics. Nor is it one
    // to wait for: a Kafka that never had a group makes a topic for them first.
    let asked = asked.request_timeout(Some(Duration::from_secs(10)));
    let _ = admin.delete_groups(&names, &asked).await;
    Ok(())
}

/// Whether the topics are there.
pub async fn has_topics(options: &QueueOptions) -> Result<bool, KafkaError> {
    let admin = options.admin()?;
    let resources = [CLIENT_MESSAGE, MESSAGE_AGGREGATION].map(ResourceSpecifier::Topic);
    let described = admin.describe_configs(&resources, &AdminOptions::new()).await?;
    Ok(described.iter().all(Result::is_ok))
}

/// How many partitions a topic has. Blocks.
pub(crate) fn partitions<C: rdkafka::ClientContext>(
    client: &rdkafka::client::Client<C>,
    topic: &str,
) -> Result<i32, KafkaError> {
    let metadata = client.fetch_metadata(Some(topic), Duration::from_secs(10))?;
    let count = metadata.topics().first().map_or(0, |topic| topic.partitions().len());
    match i32::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(KafkaError::MetadataFetch(RDKafkaErrorCode::UnknownTopicOrPartition)),
    }
}

/// How many partitions of the pipeline's topics each broker leads. Blocks.
pub fn leaders(options: &QueueOptions) -> Result<BTreeMap<i32, usize>, KafkaError> {
    let consumer: BaseConsumer = options.base("metadata").create()?;
    let mut leaders = BTreeMap::new();
    for topic in [CLIENT_MESSAGE, MESSAGE_AGGREGATION] {
        let metadata = consumer.fetch_metadata(Some(topic), Duration::from_secs(10))?;
        for partition in metadata.topics().iter().flat_map(|topic| topic.partitions()) {
            if partition.leader() >= 0 {
                *leaders.entry(partition.leader()).or_default() += 1;
            }
        }
    }
    Ok(leaders)
}

/// The headers every record carries.
pub(crate) fn headers(client: &str, sn: u64) -> OwnedHeaders {
    let sn = sn.to_string();
    OwnedHeaders::new_with_capacity(2)
        .insert(Header { key: "cid", value: Some(client) })
        .insert(Header { key: "sn", value: Some(&sn) })
}

/// Whose message a record is: client and sequence number. None when it does not say so as it should.
pub(crate) fn origin(record: &impl Message) -> Option<(&str, u64)> {
    let (mut client, mut sn) = (None, None);
    for header in record.headers()?.iter() {
        match header.key {
            "cid" if client.is_none() => client = Some(header.value?),
            "sn" if sn.is_none() => sn = Some(header.value?),
            _ => {}
        }
    }
    let text = |value| std::str::from_utf8(value).ok().filter(|text: &&str| !text.is_empty());
    let sn = text(sn?)?.parse().ok().filter(|sn| *sn > 0)?;
    Some((text(client?)?, sn))
}
