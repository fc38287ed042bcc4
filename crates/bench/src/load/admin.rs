//! Topic administration for the loads: create a topic, wait for its leaders, list its end offset, delete it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use moim_wire_kafka::KString;
use moim_wire_kafka::messages::{
    ApiVersionsRequest, ApiVersionsResponse, CreatableReplicaAssignment, CreatableTopic,
    CreatableTopicConfig, CreateTopicsRequest, CreateTopicsResponse, DeleteTopicsRequest,
    DeleteTopicsResponse, ListOffsetsPartition, ListOffsetsRequest, ListOffsetsResponse, ListOffsetsTopic,
    MetadataRequest, MetadataRequestTopic, MetadataResponse,
};

use super::connection::Connection;
use super::expect_ok;

const SERVES_WITHIN: Duration = Duration::from_secs(60);
const CREATE_VERSION: i16 = 5;
const DELETE_VERSION: i16 = 5;
const METADATA_VERSION: i16 = 9;
const LIST_OFFSETS_VERSION: i16 = 5;
const LATEST: i64 = -1;

/// A topic to create.
#[derive(Clone, Debug)]
pub struct NewTopic {
    /// Topic name.
    pub name: String,
    /// Partition count.
    pub partitions: i32,
    /// Topic configs that differ from the server's defaults.
    pub configs: Vec<(String, String)>,
}

/// True if a server answers requests.
pub async fn serves(addr: SocketAddr) -> bool {
    let ask = async {
        let mut connection = Connection::open(addr).await?;
        let versions: ApiVersionsResponse = connection.call(0, &ApiVersionsRequest::default()).await?;
        expect_ok("ApiVersions", versions.error_code)?;
        let question = MetadataRequest { topics: Some(Vec::new()), ..Default::default() };
        let metadata: MetadataResponse = connection.call(METADATA_VERSION, &question).await?;
        ensure!(!metadata.brokers.is_empty(), "no broker yet");
        Ok::<_, anyhow::Error>(())
    };
    matches!(tokio::time::timeout(Duration::from_secs(1), ask).await, Ok(Ok(())))
}

/// Creates topics with replication factor 1, and waits until every partition has a leader.
pub async fn create(addr: SocketAddr, topics: &[NewTopic]) -> Result<()> {
    create_somewhere(addr, topics, None).await
}

/// Creates topics with every partition on one broker of several: the one at the address.
pub async fn create_on(addr: SocketAddr, broker: i32, topics: &[NewTopic]) -> Result<()> {
    create_somewhere(addr, topics, Some(broker)).await
}

async fn create_somewhere(addr: SocketAddr, topics: &[NewTopic], broker: Option<i32>) -> Result<()> {
    let mut connection = Connection::open(addr).await?;
    let assign = |topic: &NewTopic, broker: i32| -> Vec<CreatableReplicaAssignment> {
        let on_broker =
            |partition_index| CreatableReplicaAssignment { partition_index, broker_ids: vec![broker] };
        (0..topic.partitions).map(on_broker).collect()
    };
    let wanted = topics.iter().map(|topic| CreatableTopic {
        name: KString::from(topic.name.as_str()),
        num_partitions: if broker.is_some() { -1 } else { topic.partitions },
        replication_factor: if broker.is_some() { -1 } else { 1 },
        assignments: broker.map(|broker| assign(topic, broker)).unwrap_or_default(),
        configs: topic
            .configs
            .iter()
            .map(|(name, value)| CreatableTopicConfig {
                name: KString::from(name.as_str()),
                value: Some(KString::from(value.as_str())),
            })
            .collect(),
    });
    let question = CreateTopicsRequest { topics: wanted.collect(), timeout_ms: 60_000, ..Default::default() };
    let answer: CreateTopicsResponse = connection.call(CREATE_VERSION, &question).await?;
    for topic in &answer.topics {
        let why = topic.error_message.as_deref().unwrap_or_default();
        expect_ok("create", topic.error_code)
            .with_context(|| format!("topic {}: {why}", topic.name.as_str()))?;
    }
    let deadline = Instant::now() + SERVES_WITHIN;
    while !led(&mut connection, topics).await? {
        ensure!(Instant::now() < deadline, "partitions without a leader after {SERVES_WITHIN:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// True if the broker leads every partition of the topics. Metadata may name a leader that is not aware of it yet, so
/// the leader itself is asked for the end offset of each partition.
async fn led(connection: &mut Connection, topics: &[NewTopic]) -> Result<bool> {
    let latest =
        |partition_index| ListOffsetsPartition { partition_index, timestamp: LATEST, ..Default::default() };
    let topics = topics.iter().map(|topic| ListOffsetsTopic {
        name: KString::from(topic.name.as_str()),
        partitions: (0..topic.partitions).map(latest).collect(),
    });
    let question = ListOffsetsRequest { replica_id: -1, topics: topics.collect(), ..Default::default() };
    let answer: ListOffsetsResponse = connection.call(LIST_OFFSETS_VERSION, &question).await?;
    Ok(answer.topics.iter().flat_map(|topic| &topic.partitions).all(|partition| partition.error_code == 0))
}

/// Deletes topics and waits until they are gone.
pub async fn delete(addr: SocketAddr, names: &[String]) -> Result<()> {
    let mut connection = Connection::open(addr).await?;
    let topic_names = names.iter().map(|name| KString::from(name.as_str())).collect();
    let question = DeleteTopicsRequest { topic_names, timeout_ms: 60_000, ..Default::default() };
    let answer: DeleteTopicsResponse = connection.call(DELETE_VERSION, &question).await?;
    for topic in &answer.responses {
        expect_ok("delete", topic.error_code)?;
    }
    Ok(())
}

/// Creates a topic with this replication factor; waits until every partition has a leader and all replicas are in
/// sync, and returns the leaders' addresses.
pub async fn create_replicated(addr: SocketAddr, topic: &NewTopic, factor: i16) -> Result<Vec<SocketAddr>> {
    let configs = topic.configs.iter().map(|(name, value)| CreatableTopicConfig {
        name: KString::from(name.as_str()),
        value: Some(KString::from(value.as_str())),
    });
    let wanted = CreatableTopic {
        name: KString::from(topic.name.as_str()),
        num_partitions: topic.partitions,
        replication_factor: factor,
        configs: configs.collect(),
        ..Default::default()
    };
    let question = CreateTopicsRequest { topics: vec![wanted], timeout_ms: 60_000, ..Default::default() };
    let answer: CreateTopicsResponse = Connection::open(addr).await?.call(CREATE_VERSION, &question).await?;
    for topic in &answer.topics {
        let why = topic.error_message.as_deref().unwrap_or_default();
        expect_ok("create", topic.error_code).with_context(|| why.to_owned())?;
    }
    let deadline = Instant::now() + SERVES_WITHIN;
    loop {
        let leaders = leaders(addr, &topic.name, usize::try_from(factor)?).await?;
        if leaders.len() == usize::try_from(topic.partitions)? {
            return Ok(leaders);
        }
        ensure!(Instant::now() < deadline, "not every replica is in sync after {SERVES_WITHIN:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The leaders' addresses of the first partitions, as far as they have `in_sync` in-sync replicas.
pub async fn leaders(addr: SocketAddr, topic: &str, in_sync: usize) -> Result<Vec<SocketAddr>> {
    let asked = MetadataRequestTopic { name: Some(KString::from(topic)), ..Default::default() };
    let question = MetadataRequest { topics: Some(vec![asked]), ..Default::default() };
    let answer: MetadataResponse = Connection::open(addr).await?.call(METADATA_VERSION, &question).await?;
    let mut partitions: Vec<_> = answer.topics.iter().flat_map(|topic| &topic.partitions).collect();
    partitions.sort_by_key(|partition| partition.partition_index);
    let mut leaders = Vec::new();
    for partition in partitions {
        let broker = answer.brokers.iter().find(|broker| broker.node_id == partition.leader_id);
        match broker {
            Some(broker) if partition.error_code == 0 && partition.isr_nodes.len() >= in_sync => {
                let address = format!("{}:{}", broker.host.as_str(), broker.port);
                leaders.push(address.parse().with_context(|| address)?);
            }
            _ => break,
        }
    }
    Ok(leaders)
}

/// The controller's address, according to a server.
pub async fn controller(addr: SocketAddr) -> Result<SocketAddr> {
    let question = MetadataRequest { topics: Some(Vec::new()), ..Default::default() };
    let answer: MetadataResponse = Connection::open(addr).await?.call(METADATA_VERSION, &question).await?;
    let broker = answer.brokers.iter().find(|broker| broker.node_id == answer.controller_id);
    let broker = broker.context("no controller is named")?;
    let address = format!("{}:{}", broker.host.as_str(), broker.port);
    address.parse().with_context(|| address)
}

/// The end offset of a partition.
pub async fn end_offset(addr: SocketAddr, topic: &str, partition: i32) -> Result<i64> {
    let partitions =
        vec![ListOffsetsPartition { partition_index: partition, timestamp: LATEST, ..Default::default() }];
    let topics = vec![ListOffsetsTopic { name: KString::from(topic), partitions }];
    let question = ListOffsetsRequest { replica_id: -1, topics, ..Default::default() };
    let answer: ListOffsetsResponse =
        Connection::open(addr).await?.call(LIST_OFFSETS_VERSION, &question).await?;
    let found = answer
        .topics
        .first()
        .and_then(|topic| topic.partitions.first())
        .context("no partition in the answer")?;
    expect_ok("ListOffsets", found.error_code)?;
    Ok(found.offset)
}
