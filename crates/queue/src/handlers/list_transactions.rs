//! ListTransactions: the transactional ids this node coordinates, filtered by state, producer and duration.

use moim_wire_kafka::messages::list_transactions::{
    ListTransactionsRequest, ListTransactionsResponse, TransactionState,
};

use crate::broker::Broker;
use crate::transactions::ListFilter;

pub(crate) fn handle(
    broker: &Broker,
    request: ListTransactionsRequest,
    _version: i16,
) -> ListTransactionsResponse {
    let filter = ListFilter {
        states: request.state_filters.iter().map(|s| s.to_string()).collect(),
        producer_ids: request.producer_id_filters,
        min_duration_ms: Some(request.duration_filter).filter(|ms| *ms >= 0),
    };
    let now_ms = broker.clock.monotonic_ms();
    let mut response = ListTransactionsResponse::default();
    for listed in broker.transactions.query_all(|c| c.list(now_ms, &filter)) {
        match listed {
            Ok((transactions, unknown)) => {
                response.unknown_state_filters = unknown.into_iter().map(Into::into).collect();
                response.transaction_states.extend(transactions.into_iter().map(|t| TransactionState {
                    transactional_id: (&*t.transactional_id).into(),
                    producer_id: t.producer_id,
                    transaction_state: t.state.into(),
                }));
            }
            Err(code) => return ListTransactionsResponse { error_code: code as i16, ..Default::default() },
        }
    }
    response.transaction_states.sort_by(|a, b| a.transactional_id.cmp(&b.transactional_id));
    response
}
