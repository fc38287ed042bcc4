//! OffsetCommit: responds when the offsets are committed, with the durability of any record.

use std::sync::Arc;

use hashbrown::HashMap;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::offset_commit::{
    OffsetCommitRequest, OffsetCommitRequestTopic, OffsetCommitResponse, OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::{CommitPartition, CommitTopic, OffsetCommit, Response, TopicErrors};
use crate::handlers::{optional, shared};

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: OffsetCommitRequest,
    _: Request,
) -> OffsetCommitResponse {
    let mut unknown = Vec::new();
    let mut topics = Vec::with_capacity(request.topics.len());
    for topic in &request.topics {
        let (good, bad) = split_known(&broker, topic);
        topics.extend(good);
        unknown.extend(bad);
    }
    let answer = if topics.is_empty() && !request.topics.is_empty() {
        Ok(Response::OffsetCommit(Vec::new()))
    } else {
        let commit = OffsetCommit {
            group: shared(&request.group_id),
            generation: request.generation_id_or_member_epoch,
            member_id: shared(&request.member_id),
            instance_id: optional(request.group_instance_id.as_ref()),
            retention_ms: Some(request.retention_time_ms).filter(|ms| *ms >= 0),
            topics,
        };
        let group = Arc::clone(&commit.group);
        broker
            .groups
            .call(&broker, &group, |groups, now_ms, token| groups.offset_commit(now_ms, token, commit))
            .await
    };
    let committed = match answer {
        Ok(Response::OffsetCommit(committed)) => committed,
        Ok(_) => return all(&request, ErrorCode::UnknownServerError),
        Err(code) => return all(&request, code),
    };
    OffsetCommitResponse { topics: merge(committed, unknown), ..Default::default() }
}

/// Splits a topic into existing partitions, which are committed, and unknown ones, which are rejected one by one.
fn split_known(
    broker: &Broker,
    topic: &OffsetCommitRequestTopic,
) -> (Option<CommitTopic>, Option<TopicErrors>) {
    let exists = broker.topics.get(&topic.name);
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for p in &topic.partitions {
        if exists.as_ref().is_some_and(|t| t.has(p.partition_index)) {
            good.push(CommitPartition {
                partition: p.partition_index,
                offset: p.committed_offset,
                leader_epoch: p.committed_leader_epoch,
                metadata: p.committed_metadata.as_deref().map(str::to_owned),
            });
        } else {
            bad.push((p.partition_index, ErrorCode::UnknownTopicOrPartition));
        }
    }
    let name = shared(&topic.name);
    let bad = (!bad.is_empty()).then(|| TopicErrors { topic: Arc::clone(&name), partitions: bad });
    ((!good.is_empty()).then_some(CommitTopic { topic: name, partitions: good }), bad)
}

fn merge(committed: Vec<TopicErrors>, unknown: Vec<TopicErrors>) -> Vec<OffsetCommitResponseTopic> {
    let mut topics: Vec<OffsetCommitResponseTopic> = Vec::new();
    let mut at: HashMap<Arc<str>, usize> = HashMap::new();
    for TopicErrors { topic, partitions } in committed.into_iter().chain(unknown) {
        let partitions = partitions.into_iter().map(|(partition_index, code)| {
            OffsetCommitResponsePartition { partition_index, error_code: code as i16 }
        });
        let index = *at.entry(Arc::clone(&topic)).or_insert_with(|| {
            topics.push(OffsetCommitResponseTopic { name: (&*topic).into(), ..Default::default() });
            topics.len() - 1
        });
        topics[index].partitions.extend(partitions);
    }
    topics
}

fn all(request: &OffsetCommitRequest, code: ErrorCode) -> OffsetCommitResponse {
    let errors = |t: &OffsetCommitRequestTopic| TopicErrors {
        topic: shared(&t.name),
        partitions: t.partitions.iter().map(|p| (p.partition_index, code)).collect(),
    };
    OffsetCommitResponse {
        topics: merge(request.topics.iter().map(errors).collect(), Vec::new()),
        ..Default::default()
    }
}
