//! Metadata: topics, partitions and their leaders. A request for an unknown topic creates it, where both the client
//! and the broker allow auto-creation.

use std::io;
use std::sync::Arc;

use moim_wire_kafka::messages::{
    MetadataRequest, MetadataResponse, MetadataResponseBroker, MetadataResponsePartition,
    MetadataResponseTopic,
};
use moim_wire_kafka::{ErrorCode, KString, RequestHeader, Uuid};

use crate::broker::Broker;
use crate::brokers::{LiveBroker, is_live};
use crate::connection::Connection;
use crate::dispatch::{self, Request};
use crate::response_writer::Call;
use crate::topics::{self, NewTopic, PartitionEntry, Topic};

/// Responds at once unless a topic must be created first.
pub(crate) fn dispatch(
    connection: &mut Connection,
    call: Call,
    header: RequestHeader,
    request: MetadataRequest,
) -> io::Result<()> {
    if missing(&connection.broker, &request, call.version).is_empty() {
        let response = respond(&connection.broker, &request, call.version);
        return connection.respond(call, &response);
    }
    dispatch::spawn_async(connection, call, header, request, handle);
    Ok(())
}

async fn handle(broker: Arc<Broker>, request: MetadataRequest, context: Request) -> MetadataResponse {
    for name in missing(&broker, &request, context.version) {
        auto_create(&broker, &name).await;
    }
    respond(&broker, &request, context.version)
}

/// Auto-creates a topic. The response shows whether it succeeded.
pub(crate) async fn auto_create(broker: &Broker, name: &str) {
    let new = NewTopic {
        name: name.to_owned(),
        partitions: broker.options.num_partitions,
        replication_factor: None,
        configs: Default::default(),
        assignment: None,
    };
    if let Err(refused) = broker.create_topic(new).await
        && refused.code != ErrorCode::TopicAlreadyExists
    {
        tracing::warn!(topic = name, code = refused.code.name(), "topic auto-creation failed");
    }
}

/// The topics to auto-create for this request.
fn missing(broker: &Broker, request: &MetadataRequest, version: i16) -> Vec<String> {
    if !broker.options.auto_create_topics || (version >= 4 && !request.allow_auto_topic_creation) {
        return Vec::new();
    }
    let Some(wanted) = &request.topics else { return Vec::new() };
    wanted
        .iter()
        .filter(|t| t.topic_id.is_zero())
        .filter_map(|t| t.name.as_deref())
        .filter(|name| {
            topics::refuse_name(name).is_none()
                && !topics::is_internal(name)
                && broker.topics.get(name).is_none()
        })
        .map(str::to_owned)
        .collect()
}

fn respond(broker: &Broker, request: &MetadataRequest, version: i16) -> MetadataResponse {
    let live = broker.live();
    let all = match &request.topics {
        None => true,
        Some(topics) => version == 0 && topics.is_empty(),
    };
    let topics = if all {
        broker.topics.all().iter().map(|t| describe(t, &live, version)).collect()
    } else {
        let wanted = request.topics.iter().flatten();
        wanted.map(|t| find(broker, t.name.as_ref(), t.topic_id, &live, version)).collect()
    };
    MetadataResponse {
        brokers: live
            .iter()
            .map(|broker| MetadataResponseBroker {
                node_id: broker.id.0,
                host: broker.host.as_str().into(),
                port: i32::from(broker.port),
                rack: broker.rack.as_deref().map(Into::into),
            })
            .collect(),
        cluster_id: Some(broker.options.cluster_id.as_str().into()),
        controller_id: broker.controller().0,
        topics,
        cluster_authorized_operations: if request.include_cluster_authorized_operations {
            ALL_CLUSTER_OPERATIONS
        } else {
            i32::MIN
        },
        ..Default::default()
    }
    .with_topic_operations(request.include_topic_authorized_operations)
}

/// Without authorization everything is allowed: one bit per operation (CREATE 5, DESCRIBE 8, …).
pub(crate) const ALL_CLUSTER_OPERATIONS: i32 =
    1 << 5 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12;
pub(crate) const ALL_TOPIC_OPERATIONS: i32 =
    1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 11;

trait WithTopicOperations {
    fn with_topic_operations(self, on: bool) -> Self;
}

impl WithTopicOperations for MetadataResponse {
    fn with_topic_operations(mut self, on: bool) -> Self {
        if on {
            for topic in self.topics.iter_mut().filter(|t| t.error_code == 0) {
                topic.topic_authorized_operations = ALL_TOPIC_OPERATIONS;
            }
        }
        self
    }
}

fn find(
    broker: &Broker,
    name: Option<&KString>,
    id: Uuid,
    live: &[LiveBroker],
    version: i16,
) -> MetadataResponseTopic {
    if !id.is_zero() {
        return match broker.topics.get_by_id(moim_base::TopicId::from_bytes(id.0)) {
            Some(topic) => describe(&topic, live, version),
            None => MetadataResponseTopic {
                error_code: ErrorCode::UnknownTopicId as i16,
                name: None,
                topic_id: id,
                ..Default::default()
            },
        };
    }
    let text = name.map_or("", |n| n.as_str());
    match broker.topics.get(text) {
        Some(topic) => describe(&topic, live, version),
        None => {
            let error = match topics::refuse_name(text) {
                Some(_) => ErrorCode::InvalidTopicException,
                None => ErrorCode::UnknownTopicOrPartition,
            };
            MetadataResponseTopic { error_code: error as i16, name: name.cloned(), ..Default::default() }
        }
    }
}

fn describe(topic: &Topic, live: &[LiveBroker], version: i16) -> MetadataResponseTopic {
    let partitions = topic.partitions.load().iter().map(|entry| partition(entry, live, version)).collect();
    MetadataResponseTopic {
        name: Some((&*topic.name).into()),
        topic_id: Uuid(topic.id.to_bytes()),
        is_internal: topic.is_internal(),
        partitions,
        ..Default::default()
    }
}

/// The metadata of a partition; one whose leader is not live has no leader.
pub(crate) fn partition(
    entry: &PartitionEntry,
    live: &[LiveBroker],
    version: i16,
) -> MetadataResponsePartition {
    let registration = entry.registration();
    let leader = registration.leader().filter(|leader| is_live(live, leader.0));
    let replica_nodes = registration.replicas();
    let offline: Vec<i32> = replica_nodes.iter().copied().filter(|node| !is_live(live, *node)).collect();
    let gone = leader.is_none();
    MetadataResponsePartition {
        error_code: if gone { ErrorCode::LeaderNotAvailable as i16 } else { 0 },
        partition_index: entry.index,
        leader_id: leader.map_or(-1, |leader| leader.0),
        leader_epoch: registration.leader_epoch(),
        replica_nodes,
        isr_nodes: registration.in_sync(),
        offline_replicas: if version >= 5 { offline } else { Vec::new() },
    }
}
