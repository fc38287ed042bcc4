//! DescribeTransactions: state, producer and partitions of transactional ids.

use moim_wire_kafka::messages::describe_transactions::{
    DescribeTransactionsRequest, DescribeTransactionsResponse, TopicData, TransactionState,
};

use crate::broker::Broker;

pub(crate) fn handle(
    broker: &Broker,
    request: DescribeTransactionsRequest,
    _version: i16,
) -> DescribeTransactionsResponse {
    let states = request.transactional_ids.into_iter().map(|id| {
        match broker.transactions.query(broker, &id, |c| c.describe(&id)).and_then(|described| described) {
            Err(code) => {
                TransactionState { error_code: code as i16, transactional_id: id, ..Default::default() }
            }
            Ok(found) => TransactionState {
                transactional_id: id,
                transaction_state: found.state.into(),
                transaction_timeout_ms: found.timeout_ms,
                transaction_start_time_ms: found.start_ms,
                producer_id: found.producer_id,
                producer_epoch: found.producer_epoch,
                topics: found
                    .partitions
                    .into_iter()
                    .map(|(topic, partitions)| TopicData { topic: (&*topic).into(), partitions })
                    .collect(),
                ..Default::default()
            },
        }
    });
    DescribeTransactionsResponse { transaction_states: states.collect(), ..Default::default() }
}
