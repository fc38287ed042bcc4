//! Kafka access of the pipeline: its topics, and the configuration of its producers and consumers.
//!
//! Only the Kafka protocol is used, so any Kafka broker works.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use tokio::time::Instant;

/// Messages of clients, keyed by client.
pub const CLIENT_MESSAGE: &str = "client_message";
/// Counted messages, keyed by text.
pub const MESSAGE_AGGREGATION: &str = "message_aggregation";
/// Messages that could not be processed, with their origin.
pub const DEAD_LETTER: &str = "pipeline_dead_letter";

/// Connection to the queue, and the settings of new topics.
#[derive(Clone, Debug)]
pub struct QueueOptions {
    /// Kafka's `bootstrap.servers`.
    pub brokers: String,
    /// Partitions of each topic.
    pub partitions: i32,
    /// Replication factor; none for the cluster's default.
    pub factor: Option<i32>,
    /// Prefix of group names and transactional ids, so that several runs can share a cluster.
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

    /// An idempotent producer: keeps order and writes no duplicates.
    pub(crate) fn idempotent(&self, role: &str, report_timeout: Duration) -> ClientConfig {
        let mut config = self.base(role);
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            // Messages that arrive together are batched: the cost of a batch is paid on three nodes.
            .set("linger.ms", "5")
            .set("partitioner", "murmur2_random")
            .set("message.timeout.ms", report_timeout.as_millis().to_string());
        config
    }

    /// A transactional producer: its records are committed together with the consumed offsets.
    pub(crate) fn transactional(&self, role: &str) -> ClientConfig {
        let mut config = self.base(role);
        config
            .set("transactional.id", format!("{}-{role}", self.name))
            .set("linger.ms", "4")
            // A failed delivery aborts the transaction; successful deliveries need no report.
            .set("delivery.report.only.error", "true")
            .set("partitioner", "murmur2_random")
            // The next transaction may begin before the markers of the last one are written: the broker then answers
            // with a retriable error.
            .set("retry.backoff.ms", "5")
            .set("transaction.timeout.ms", "15000")
            .set("message.timeout.ms", "9000");
        config
    }

    /// A `read_committed` consumer of the group of `role`, without auto-commit.
    pub(crate) fn consumer(&self, role: &str) -> ClientConfig {
        let mut config = self.base(role);
        config
            .set("group.id", format!("{}-{role}", self.name))
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest")
            .set("isolation.level", "read_committed")
            .set("session.timeout.ms", "6000")
            // An instance that blocks in a call, because the queue or the store does not answer, delays a rebalance
            // by this long.
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

/// How long an unavailable queue, or one without enough brokers, is retried.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);

/// Creates the missing topics. Waits for a cluster that is starting or in a failover, and calls `on_wait` with the
/// reason, once per reason.
pub async fn create_topics(options: &QueueOptions, mut on_wait: impl FnMut(&str)) -> Result<(), KafkaError> {
    let until = Instant::now() + RETRY_TIMEOUT;
    let mut last_reason = None;
    loop {
        match try_create_topics(options).await {
            Err(error) if is_retriable(&error) && Instant::now() < until => {
                tracing::debug!(%error, "topic creation failed; retrying");
                let code = code_of(&error);
                if last_reason.replace(code) != Some(code) {
                    on_wait(&wait_reason(options, &error));
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            other => return other,
        }
    }
}

/// What the call waits for, as text for the user.
fn wait_reason(options: &QueueOptions, error: &KafkaError) -> String {
    let seconds = RETRY_TIMEOUT.as_secs();
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

/// True if the error is retriable.
fn is_retriable(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::{
        AllBrokersDown, BrokerTransportFailure, InvalidReplicationFactor, NetworkException, NotController,
        OperationTimedOut, RequestTimedOut,
    };
    let retriable = [
        AllBrokersDown,
        BrokerTransportFailure,
        // Brokers join one after the other; until enough have joined, the replication factor is invalid.
        InvalidReplicationFactor,
        NetworkException,
        NotController,
        OperationTimedOut,
        RequestTimedOut,
    ];
    code_of(error).is_some_and(|code| retriable.contains(&code))
}

async fn try_create_topics(options: &QueueOptions) -> Result<(), KafkaError> {
    let admin = options.admin()?;
    let factor = options.factor.unwrap_or(-1);
    let topic = |name| NewTopic::new(name, options.partitions, TopicReplication::Fixed(factor));
    let topics = [topic(CLIENT_MESSAGE), topic(MESSAGE_AGGREGATION), topic(DEAD_LETTER)];
    let admin_options = AdminOptions::new().operation_timeout(Some(Duration::from_secs(20)));
    for result in admin.create_topics(&topics, &admin_options).await? {
        match result {
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((_, code)) => return Err(KafkaError::AdminOp(code)),
        }
    }
    Ok(())
}

/// Deletes the topics with their records, and the consumer groups that read them.
pub async fn delete_topics(options: &QueueOptions) -> Result<(), KafkaError> {
    let admin = options.admin()?;
    let admin_options = AdminOptions::new().operation_timeout(Some(Duration::from_secs(20)));
    let topics = [CLIENT_MESSAGE, MESSAGE_AGGREGATION, DEAD_LETTER];
    for result in admin.delete_topics(&topics, &admin_options).await? {
        match result {
            Ok(_) | Err((_, RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic)) => {}
            Err((_, code)) => return Err(KafkaError::AdminOp(code)),
        }
    }
    let groups = ["counter", "aggregator"].map(|role| format!("{}-{role}", options.name));
    let names: Vec<&str> = groups.iter().map(String::as_str).collect();
    // A group that does not exist, or still has members, is not an error: its offsets were deleted with the topics.
    // The timeout is short, because a Kafka cluster that never had a group first creates the offsets topic.
    let admin_options = admin_options.request_timeout(Some(Duration::from_secs(10)));
    let _ = admin.delete_groups(&names, &admin_options).await;
    Ok(())
}

/// True if the topics exist.
pub async fn has_topics(options: &QueueOptions) -> Result<bool, KafkaError> {
    let admin = options.admin()?;
    let resources = [CLIENT_MESSAGE, MESSAGE_AGGREGATION].map(ResourceSpecifier::Topic);
    let described = admin.describe_configs(&resources, &AdminOptions::new()).await?;
    Ok(described.iter().all(Result::is_ok))
}

/// Partition count of a topic. Blocks.
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

/// Origin of a record: client and sequence number. None if the headers are missing or malformed.
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
