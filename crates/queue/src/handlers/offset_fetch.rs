//! OffsetFetch: committed offsets, for one group or (versions 8+) for several.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::offset_fetch::{
    OffsetFetchRequest, OffsetFetchResponse, OffsetFetchResponseGroup, OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions, OffsetFetchResponseTopic, OffsetFetchResponseTopics,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::{FetchedGroup, OffsetFetch};
use crate::handlers::shared;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: OffsetFetchRequest,
    context: Request,
) -> OffsetFetchResponse {
    if context.version >= 8 {
        let mut groups = Vec::with_capacity(request.groups.len());
        for g in &request.groups {
            let topics = g
                .topics
                .as_ref()
                .map(|t| t.iter().map(|t| (shared(&t.name), t.partition_indexes.clone())).collect());
            let group = shared(&g.group_id);
            let wanted = OffsetFetch { group, topics, require_stable: request.require_stable };
            groups.push(several(fetch(&broker, wanted).await));
        }
        return OffsetFetchResponse { groups, ..Default::default() };
    }
    let topics = request
        .topics
        .as_ref()
        .map(|t| t.iter().map(|t| (shared(&t.name), t.partition_indexes.clone())).collect());
    let require_stable = request.require_stable && context.version >= 7;
    single(fetch(&broker, OffsetFetch { group: shared(&request.group_id), topics, require_stable }).await)
}

/// A `require_stable` fetch also confirms the coordinator's leadership, because stale offsets would be as wrong as
/// unstable ones.
async fn fetch(broker: &Broker, wanted: OffsetFetch) -> FetchedGroup {
    let group = Arc::clone(&wanted.group);
    if wanted.require_stable
        && let Err(error) = broker.groups.confirm_leadership(broker, &group).await
    {
        return FetchedGroup { group, error, topics: Vec::new() };
    }
    let fetched = broker.groups.query(broker, &group, |groups| groups.offset_fetch(&wanted));
    fetched.unwrap_or_else(|error| FetchedGroup { group, error, topics: Vec::new() })
}

fn single(fetched: FetchedGroup) -> OffsetFetchResponse {
    let topics = fetched.topics.into_iter().map(|topic| OffsetFetchResponseTopic {
        name: (&*topic.topic).into(),
        partitions: topic
            .partitions
            .into_iter()
            .map(|p| OffsetFetchResponsePartition {
                partition_index: p.partition,
                committed_offset: p.offset,
                committed_leader_epoch: p.leader_epoch,
                metadata: Some(p.metadata.into()),
                error_code: p.error as i16,
            })
            .collect(),
    });
    OffsetFetchResponse { topics: topics.collect(), error_code: fetched.error as i16, ..Default::default() }
}

fn several(fetched: FetchedGroup) -> OffsetFetchResponseGroup {
    let topics = fetched.topics.into_iter().map(|topic| OffsetFetchResponseTopics {
        name: (&*topic.topic).into(),
        partitions: topic
            .partitions
            .into_iter()
            .map(|p| OffsetFetchResponsePartitions {
                partition_index: p.partition,
                committed_offset: p.offset,
                committed_leader_epoch: p.leader_epoch,
                metadata: Some(p.metadata.into()),
                error_code: p.error as i16,
            })
            .collect(),
        ..Default::default()
    });
    OffsetFetchResponseGroup {
        group_id: (&*fetched.group).into(),
        topics: if fetched.error == ErrorCode::None { topics.collect() } else { Vec::new() },
        error_code: fetched.error as i16,
    }
}
