//! AddPartitionsToTxn: for one transaction (versions 0-3) or several, which brokers may only verify (4+). Each
//! transaction is added atomically.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::add_partitions_to_txn::{
    AddPartitionsToTxnPartitionResult, AddPartitionsToTxnRequest, AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult, AddPartitionsToTxnTopic, AddPartitionsToTxnTopicResult,
    AddPartitionsToTxnTransaction,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::shared;
use crate::topics::TRANSACTIONS_TOPIC;
use crate::transactions::{Input, TopicPartition};

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: AddPartitionsToTxnRequest,
    context: Request,
) -> AddPartitionsToTxnResponse {
    if context.version < 4 {
        let transaction = AddPartitionsToTxnTransaction {
            transactional_id: request.v3_and_below_transactional_id,
            producer_id: request.v3_and_below_producer_id,
            producer_epoch: request.v3_and_below_producer_epoch,
            verify_only: false,
            topics: request.v3_and_below_topics,
        };
        let results = add(&broker, &transaction, context.version).await;
        return AddPartitionsToTxnResponse { results_by_topic_v3_and_below: results, ..Default::default() };
    }
    let mut results = Vec::with_capacity(request.transactions.len());
    for transaction in request.transactions {
        let (coordinator_epoch, topic_results) = if transaction.verify_only {
            verify(&broker, &transaction)
        } else {
            (-1, add(&broker, &transaction, context.version).await)
        };
        let transactional_id = transaction.transactional_id;
        results.push(AddPartitionsToTxnResult { transactional_id, topic_results, coordinator_epoch });
    }
    AddPartitionsToTxnResponse { results_by_transaction: results, ..Default::default() }
}

async fn add(
    broker: &Broker,
    transaction: &AddPartitionsToTxnTransaction,
    version: i16,
) -> Vec<AddPartitionsToTxnTopicResult> {
    let exists = |topic: &str, index: i32| topic != TRANSACTIONS_TOPIC && broker.topics.has(topic, index);
    let mut partitions = Vec::new();
    for topic in &transaction.topics {
        let name = shared(&topic.name);
        partitions
            .extend(topic.partitions.iter().map(|&index| TopicPartition::new(Arc::clone(&name), index)));
    }
    if partitions.iter().any(|p| !exists(&p.topic, p.partition)) {
        return results(&transaction.topics, |topic, index| {
            if exists(topic, index) {
                ErrorCode::OperationNotAttempted
            } else {
                ErrorCode::UnknownTopicOrPartition
            }
        });
    }
    let id = shared(&transaction.transactional_id);
    let input = |token| Input::AddPartitions {
        token,
        version,
        transactional_id: Arc::clone(&id),
        producer_id: transaction.producer_id,
        producer_epoch: transaction.producer_epoch,
        partitions: partitions.clone(),
    };
    let code = match broker.transactions.call_next(broker, &id, input).await {
        Ok(reply) => reply.error,
        Err(code) => code,
    };
    results(&transaction.topics, |_, _| code)
}

/// The epoch of the verifying coordinator, and its result for each partition.
fn verify(
    broker: &Broker,
    transaction: &AddPartitionsToTxnTransaction,
) -> (i32, Vec<AddPartitionsToTxnTopicResult>) {
    let AddPartitionsToTxnTransaction { transactional_id, producer_id, producer_epoch, .. } = transaction;
    let mut coordinator_epoch = -1;
    let results = results(&transaction.topics, |topic, index| {
        let verified =
            broker.transactions.verify(broker, transactional_id, *producer_id, *producer_epoch, topic, index);
        match verified {
            // The oldest epoch, if the coordinator changed in between.
            Ok(epoch) if coordinator_epoch < 0 => coordinator_epoch = epoch,
            Ok(epoch) => coordinator_epoch = epoch.min(coordinator_epoch),
            Err(code) => return code,
        }
        ErrorCode::None
    });
    (coordinator_epoch, results)
}

fn results(
    topics: &[AddPartitionsToTxnTopic],
    mut code: impl FnMut(&str, i32) -> ErrorCode,
) -> Vec<AddPartitionsToTxnTopicResult> {
    topics
        .iter()
        .map(|topic| AddPartitionsToTxnTopicResult {
            name: topic.name.clone(),
            results_by_partition: topic
                .partitions
                .iter()
                .map(|&partition_index| AddPartitionsToTxnPartitionResult {
                    partition_index,
                    partition_error_code: code(&topic.name, partition_index) as i16,
                })
                .collect(),
        })
        .collect()
}
