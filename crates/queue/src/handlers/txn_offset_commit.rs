//! TxnOffsetCommit: offsets that become visible when their transaction commits.

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

/// The first version whose clients send no AddOffsetsToTxn: the broker adds the group to the transaction (transaction
/// version 2).
const ADDS_GROUP: i16 = 5;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: TxnOffsetCommitRequest,
    context: Request,
) -> TxnOffsetCommitResponse {
    let failed = |code: ErrorCode| {
        let topics = request.topics.iter().map(|t| TopicErrors {
            topic: shared(&t.name),
            partitions: t.partitions.iter().map(|p| (p.partition_index, code)).collect(),
        });
        respond(topics.collect())
    };
    // The group's partition must belong to the transaction, or its marker would never be written here.
    let index = broker.groups.partition_of(&request.group_id);
    let producer = TxnProducer { id: request.producer_id, epoch: request.producer_epoch };
    if let Err(code) = broker.groups.ensure_topic(&broker).await {
        return failed(code);
    }
    let guard = match broker.groups.begin_verification(&broker, &request.group_id, producer) {
        Ok(guard) => guard,
        Err(code) => return failed(code),
    };
    let (id, partitions) = (&request.transactional_id, [(OFFSETS_TOPIC, index)]);
    let claim = (request.producer_id, request.producer_epoch);
    let verified = if context.version < ADDS_GROUP {
        broker.transactions.verify_anywhere(&broker, id, claim, &partitions).await
    } else if guard.is_some() {
        broker.transactions.add_anywhere(&broker, id, claim, &partitions).await
    } else {
        // The transaction is already open here, in this epoch.
        vec![Ok(-1)]
    };
    let verified = verified.into_iter().next().unwrap_or(Err(ErrorCode::UnknownServerError));
    let coordinator_epoch = match verified {
        Ok(coordinator_epoch) => coordinator_epoch,
        Err(code) => return failed(refusal(code)),
    };
    let guard = guard.map(|guard| guard.verified(coordinator_epoch));
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
        producer,
        group: shared(&request.group_id),
        generation: request.generation_id,
        member_id: shared(&request.member_id),
        instance_id: optional(request.group_instance_id.as_ref()),
        topics: topics.collect(),
    };
    let group = Arc::clone(&commit.group);
    let answer = broker
        .groups
        .call_verified(&broker, &group, guard, |groups, now_ms, token| {
            groups.txn_offset_commit(now_ms, token, commit)
        })
        .await;
    match answer {
        Ok(Response::OffsetCommit(topics)) => respond(topics),
        Ok(_) => failed(ErrorCode::UnknownServerError),
        Err(code) => failed(code),
    }
}

/// Maps the transaction coordinator's error to one for the client.
fn refusal(code: ErrorCode) -> ErrorCode {
    match code {
        ErrorCode::TransactionAbortable => ErrorCode::InvalidTxnState,
        ErrorCode::ConcurrentTransactions
        | ErrorCode::CoordinatorLoadInProgress
        // NOT_COORDINATOR of the transaction coordinator; the client would look up the group coordinator.
        | ErrorCode::NotCoordinator
        | ErrorCode::NetworkException
        | ErrorCode::RequestTimedOut => ErrorCode::CoordinatorNotAvailable,
        other => other,
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
