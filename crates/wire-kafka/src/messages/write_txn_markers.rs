//! WriteTxnMarkers (27): the coordinator tells partition leaders how a transaction ended.
//!
//! The tagged fields from 10000 on are not Kafka's: a broker of this cluster adds them, so that the partition leader can
//! recognise a marker that arrives after its sender has sent a newer one.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Ends of transactions to write into partitions.
    WriteTxnMarkersRequest(WriteTxnMarkers) {
        markers: Vec<WritableTxnMarker>,
    }

    /// An entry of [`WriteTxnMarkersRequest::markers`].
    WritableTxnMarker {
        producer_id: i64,
        producer_epoch: i16,
        transaction_result: bool,
        topics: Vec<WritableTxnMarkerTopic>,
        coordinator_epoch: i32,
        transaction_version: i8 [2.., ignorable],
        attempt: i64 [1.., tag 10000, ignorable] = -1,
        leader_epoch: i32 [1.., tag 10001, ignorable] = -1,
    }

    /// An entry of [`WritableTxnMarker::topics`].
    WritableTxnMarkerTopic {
        name: KString,
        partition_indexes: Vec<i32>,
    }

    /// The answer to [`WriteTxnMarkersRequest`].
    WriteTxnMarkersResponse(WriteTxnMarkers) {
        markers: Vec<WritableTxnMarkerResult>,
    }

    /// An entry of [`WriteTxnMarkersResponse::markers`].
    WritableTxnMarkerResult {
        producer_id: i64,
        topics: Vec<WritableTxnMarkerTopicResult>,
    }

    /// An entry of [`WritableTxnMarkerResult::topics`].
    WritableTxnMarkerTopicResult {
        name: KString,
        partitions: Vec<WritableTxnMarkerPartitionResult>,
    }

    /// An entry of [`WritableTxnMarkerTopicResult::partitions`].
    WritableTxnMarkerPartitionResult {
        partition_index: i32,
        error_code: i16,
    }
}
