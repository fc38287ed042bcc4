//! AddOffsetsToTxn (25): say that a transaction will commit a group's offsets.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Announces that a transaction will commit a group's offsets.
    AddOffsetsToTxnRequest(AddOffsetsToTxn) {
        transactional_id: KString,
        producer_id: i64,
        producer_epoch: i16,
        group_id: KString,
    }

    /// The answer to [`AddOffsetsToTxnRequest`].
    AddOffsetsToTxnResponse(AddOffsetsToTxn) {
        throttle_time_ms: i32,
        error_code: i16,
    }
}
