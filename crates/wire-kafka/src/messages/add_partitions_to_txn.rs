//! AddPartitionsToTxn (24): say which partitions a transaction will write.
//! Versions 4+ are for brokers and take several transactions.
//!
//! The tagged field 10000 is not Kafka's: a coordinator of this cluster says in which epoch it answers.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Announces which partitions a transaction will write.
    AddPartitionsToTxnRequest(AddPartitionsToTxn) {
        transactions: Vec<AddPartitionsToTxnTransaction> [4..],
        v3_and_below_transactional_id: KString [..=3],
        v3_and_below_producer_id: i64 [..=3],
        v3_and_below_producer_epoch: i16 [..=3],
        v3_and_below_topics: Vec<AddPartitionsToTxnTopic> [..=3],
    }

    /// An entry of [`AddPartitionsToTxnRequest::transactions`].
    AddPartitionsToTxnTransaction {
        transactional_id: KString,
        producer_id: i64,
        producer_epoch: i16,
        verify_only: bool,
        topics: Vec<AddPartitionsToTxnTopic>,
    }

    /// An entry of [`AddPartitionsToTxnTransaction::topics`].
    AddPartitionsToTxnTopic {
        name: KString,
        partitions: Vec<i32>,
    }

    /// The answer to [`AddPartitionsToTxnRequest`].
    AddPartitionsToTxnResponse(AddPartitionsToTxn) {
        throttle_time_ms: i32,
        error_code: i16 [4.., ignorable],
        results_by_transaction: Vec<AddPartitionsToTxnResult> [4..],
        results_by_topic_v3_and_below: Vec<AddPartitionsToTxnTopicResult> [..=3],
    }

    /// An entry of [`AddPartitionsToTxnResponse::results_by_transaction`].
    AddPartitionsToTxnResult {
        transactional_id: KString,
        topic_results: Vec<AddPartitionsToTxnTopicResult>,
        coordinator_epoch: i32 [4.., tag 10000, ignorable] = -1,
    }

    /// An entry of [`AddPartitionsToTxnResult::topic_results`].
    AddPartitionsToTxnTopicResult {
        name: KString,
        results_by_partition: Vec<AddPartitionsToTxnPartitionResult>,
    }

    /// An entry of [`AddPartitionsToTxnTopicResult::results_by_partition`].
    AddPartitionsToTxnPartitionResult {
        partition_index: i32,
        partition_error_code: i16,
    }
}
