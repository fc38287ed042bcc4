//! ListTransactions (66): the transactions a broker coordinates.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for the transactions a broker coordinates.
    ListTransactionsRequest(ListTransactions) {
        state_filters: Vec<KString>,
        producer_id_filters: Vec<i64>,
        duration_filter: i64 [1..] = -1,
        transactional_id_pattern: Option<KString> [2..],
    }

    /// The answer to [`ListTransactionsRequest`].
    ListTransactionsResponse(ListTransactions) {
        throttle_time_ms: i32,
        error_code: i16,
        unknown_state_filters: Vec<KString>,
        transaction_states: Vec<TransactionState>,
    }

    /// An entry of [`ListTransactionsResponse::transaction_states`].
    TransactionState {
        transactional_id: KString,
        producer_id: i64,
        transaction_state: KString,
    }
}
