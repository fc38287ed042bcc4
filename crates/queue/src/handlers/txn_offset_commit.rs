//! TxnOffsetCommit: offsets that count once their transaction commits.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::txn_offset_commit::{
    TxnOffsetCommitRequest, TxnOffsetCommitResponse, TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::{CommitPartition, CommitTopic, Response, TopicErrors, TxnOffsetCommit, TxnProducer};
use crate::handlers::{optional, shared};
use crate::topics::OFFSETS_TOPIC;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: TxnOffsetCommitRequest,
    _: Request,
) -> TxnOffsetCommitResponse {
    let failed = |code: ErrorCode| {
        let topics = request.topics.iter().map(|t| TopicErrors {
            topic: shared(&t.name),
            partitions: t.partitions.iter().map(|p| (p.partition_index, code)).collect(),
        });
        respond(topics.collect())
    };
    // The group's partition must belong to the transaction, or its marker would never come here.
    let index = broker.groups.partition_of(&request.group_id);
    broker.groups.before_verifying(&broker, &request.group_id, request.producer_id);
    let verified = broker
        .transactions
        .verify_anywhere(
            &broker,
            &request.transactional_id,
            (request.producer_id, request.producer_epoch),
            &[(OFFSETS_TOPIC, index)],
        )
        .await;
    if let Some(Err(code)) = verified.into_iter().next() {
        broker.groups.after_verifying(request.producer_id);
        return failed(match code {
            ErrorCode::TransactionAbortable => ErrorCode::InvalidTxnState,
            ErrorCode::ConcurrentTransactions
            | ErrorCode::CoordinatorLoadInProgress
            // Of the transaction's coordinator; the client would look for the group's.
            | ErrorCode::NotCoordinator
            | ErrorCode::NetworkException
            | ErrorCode::RequestTimedOut => ErrorCode::CoordinatorNotAvailable,
            other => other,
        });
    }
    let topics = request.topics.iter().map(|t| CommitTopic {
        topic: shared(&t.name),
        partitions: t
            .partitions
            .iter()
            .map(|p| CommitPartition {
                partition: p.partition_index,
                offset: p.committed_offset,
                leader_epoch: p.committed_leader_epoch,
                metadata: p.committed_metadata.as_deref().map(str::to_owned),
            })
            .collect(),
    });
    let commit = TxnOffsetCommit {
        producer: TxnProducer { id: request.producer_id, epoch: request.producer_epoch },
        group: shared(&request.group_id),
        generation: request.generation_id,
        member_id: shared(&request.member_id),
        instance_id: optional(request.group_instance_id.as_ref()),
        topics: topics.collect(),
    };
    let group = Arc::clone(&commit.group);
    let answer = broker
        .groups
        .call(&broker, &group, |groups, now_ms, token| groups.txn_offset_commit(now_ms, token, commit))
        .await;
    broker.groups.after_verifying(request.producer_id);
    match answer {
        Ok(Response::OffsetCommit(topics)) => respond(topics),
        Ok(_) => failed(ErrorCode::UnknownServerError),
        Err(code) => failed(code),
    }
}

fn respond(topics: Vec<TopicErrors>) -> TxnOffsetCommitResponse {
    let topics = topics.into_iter().map(|t| TxnOffsetCommitResponseTopic {
        name: (&*t.topic).into(),
        partitions: t
            .partitions
            .into_iter()
            .map(|(partition_index, code)| TxnOffsetCommitResponsePartition {
                partition_index,
                error_code: code as i16,
            })
            .collect(),
    });
    TxnOffsetCommitResponse { topics: topics.collect(), ..Default::default() }
}
