//! `moim topic describe`: partitions with their offsets, and settings with where they come from.

use std::time::Duration;

use moim_kafka_client::{Client, EARLIEST, Isolation, LATEST, OutageTolerance, TopicPartition};
use moim_wire_kafka::messages::describe_configs::{DescribeConfigsResource, DescribeConfigsResult};
use moim_wire_kafka::messages::{DescribeConfigsRequest, MetadataResponseTopic};
use moim_wire_kafka::{KString, Uuid};
use serde::Serialize;

use super::DescribeArgs;
use crate::cmd::{joined, or_dash};
use crate::exit::Outcome;
use crate::kafka::{self, errors};
use crate::output::{Output, Report, Section};
use crate::target::ClientArgs;

/// The resource type of topics in DescribeConfigs and IncrementalAlterConfigs.
pub(super) const TOPIC_RESOURCE: i8 = 2;

/// How long a leader may be unreachable before its partition has another one.
const FAILOVER: Duration = Duration::from_secs(5);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) async fn run(client: &ClientArgs, args: &DescribeArgs, output: Output) -> Outcome {
    let mut client = kafka::connect(client).await?;
    let names: Vec<KString> = args.names.iter().map(Into::into).collect();
    let mut outage = OutageTolerance::default();
    let topics = loop {
        // Metadata names a leader that has just failed until another one is elected.
        let fetched = fetch_topics(&mut client, &names, args.all).await;
        match outage.tolerate(fetched, FAILOVER)? {
            Some(topics) => break topics,
            None => tokio::time::sleep(PAUSE).await,
        }
    };
    output.print(&Topics { topics })
}

async fn fetch_topics(client: &mut Client, names: &[KString], all: bool) -> Outcome<Vec<Topic>> {
    let found = client.topics(names, false, |_, _| false).await?;
    let configs = describe_configs(client, names).await?;
    let mut topics = Vec::new();
    for topic in found {
        let name = topic.name.clone().unwrap_or_default();
        let settings = configs.iter().find(|one| one.resource_name == name);
        errors::check(
            settings.map_or(0, |one| one.error_code),
            settings.and_then(|one| one.error_message.as_deref()),
        )?;
        let partitions = partitions(client, &name, &topic).await?;
        topics.push(Topic {
            topic_id: Some(topic.topic_id).filter(|id| *id != Uuid::default()).map(|id| id.to_string()),
            name: name.to_string(),
            internal: topic.is_internal,
            replication_factor: topic.partitions.first().map_or(0, |one| one.replica_nodes.len()),
            partitions,
            configs: settings.map(|one| shown_configs(one, all)).unwrap_or_default(),
        });
    }
    Ok(topics)
}

async fn describe_configs(client: &mut Client, names: &[KString]) -> Outcome<Vec<DescribeConfigsResult>> {
    let resource = |name: &KString| DescribeConfigsResource {
        resource_type: TOPIC_RESOURCE,
        resource_name: name.clone(),
        configuration_keys: None,
    };
    let request =
        DescribeConfigsRequest { resources: names.iter().map(resource).collect(), ..Default::default() };
    Ok(client.request_any(&request).await?.results)
}

async fn partitions(
    client: &mut Client,
    name: &KString,
    topic: &MetadataResponseTopic,
) -> Outcome<Vec<Partition>> {
    let key = |partition| TopicPartition { topic: name.clone(), partition };
    // A partition without a leader has no broker that answers ListOffsets.
    let led = topic.partitions.iter().filter(|one| one.leader_id >= 0);
    let keys: Vec<_> = led.map(|one| key(one.partition_index)).collect();
    let starts = client.list_offsets(&keys, EARLIEST, Isolation::ReadUncommitted).await?;
    let ends = client.list_offsets(&keys, LATEST, Isolation::ReadUncommitted).await?;
    let mut partitions: Vec<Partition> = topic
        .partitions
        .iter()
        .map(|one| Partition {
            partition: one.partition_index,
            leader: one.leader_id,
            leader_epoch: Some(one.leader_epoch).filter(|epoch| *epoch >= 0),
            replicas: one.replica_nodes.clone(),
            isr: one.isr_nodes.clone(),
            offline_replicas: one.offline_replicas.clone(),
            start_offset: starts.get(&key(one.partition_index)).copied(),
            end_offset: ends.get(&key(one.partition_index)).copied(),
        })
        .collect();
    partitions.sort_by_key(|one| one.partition);
    Ok(partitions)
}

fn shown_configs(settings: &DescribeConfigsResult, all: bool) -> Vec<Setting> {
    let source = |number: i8| match number {
        1 => "topic",
        2..=4 => "broker",
        5 => "default",
        _ => "unknown",
    };
    let setting =
        |one: &moim_wire_kafka::messages::describe_configs::DescribeConfigsResourceResult| Setting {
            name: one.name.to_string(),
            value: one.value.as_ref().map(ToString::to_string),
            source: source(one.config_source),
            read_only: one.read_only,
        };
    let mut shown: Vec<Setting> =
        settings.configs.iter().map(setting).filter(|one| all || one.source == "topic").collect();
    shown.sort_by(|a, b| a.name.cmp(&b.name));
    shown
}

#[derive(Serialize)]
struct Topics {
    topics: Vec<Topic>,
}

#[derive(Serialize)]
struct Topic {
    name: String,
    topic_id: Option<String>,
    internal: bool,
    replication_factor: usize,
    partitions: Vec<Partition>,
    configs: Vec<Setting>,
}

#[derive(Serialize)]
struct Partition {
    partition: i32,
    leader: i32,
    leader_epoch: Option<i32>,
    replicas: Vec<i32>,
    isr: Vec<i32>,
    offline_replicas: Vec<i32>,
    start_offset: Option<i64>,
    end_offset: Option<i64>,
}

#[derive(Serialize)]
struct Setting {
    name: String,
    value: Option<String>,
    source: &'static str,
    read_only: bool,
}

impl Report for Topics {
    fn sections(&self) -> Vec<Section> {
        self.topics.iter().flat_map(Topic::sections).collect()
    }
}

impl Topic {
    fn sections(&self) -> Vec<Section> {
        let facts = Section::pairs([
            ("topic", self.name.clone()),
            ("id", or_dash(self.topic_id.as_ref())),
            ("partitions", self.partitions.len().to_string()),
            ("replicas", self.replication_factor.to_string()),
        ]);
        let columns = [">PARTITION", ">LEADER", ">EPOCH", "REPLICAS", "ISR", ">START", ">END", ">MESSAGES"];
        let mut partitions = Section::new(&columns);
        for one in &self.partitions {
            // As many as there can be: compaction and transaction markers leave gaps.
            let messages = one.start_offset.zip(one.end_offset).map(|(start, end)| end - start);
            partitions.row(vec![
                one.partition.to_string(),
                or_dash(Some(one.leader).filter(|leader| *leader >= 0)),
                or_dash(one.leader_epoch),
                joined(&one.replicas),
                joined(&one.isr),
                or_dash(one.start_offset),
                or_dash(one.end_offset),
                or_dash(messages),
            ]);
        }
        let mut all = vec![facts, partitions];
        if !self.configs.is_empty() {
            let mut configs = Section::new(&["SETTING", "VALUE", "FROM"]);
            for one in &self.configs {
                configs.row(vec![one.name.clone(), or_dash(one.value.as_ref()), one.source.to_owned()]);
            }
            all.push(configs);
        }
        all
    }
}
