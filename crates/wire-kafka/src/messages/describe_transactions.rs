//! DescribeTransactions (65): state of transactions.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for state of transactions.
    DescribeTransactionsRequest(DescribeTransactions) {
        transactional_ids: Vec<KString>,
    }

    /// The answer to [`DescribeTransactionsRequest`].
    DescribeTransactionsResponse(DescribeTransactions) {
        throttle_time_ms: i32,
        transaction_states: Vec<TransactionState>,
    }

    /// An entry of [`DescribeTransactionsResponse::transaction_states`].
    TransactionState {
        error_code: i16,
        transactional_id: KString,
        transaction_state: KString,
        transaction_timeout_ms: i32,
        transaction_start_time_ms: i64,
        producer_id: i64,
        producer_epoch: i16,
        topics: Vec<TopicData>,
    }

    /// An entry of [`TransactionState::topics`].
    TopicData {
        topic: KString,
        partitions: Vec<i32>,
    }
}
