//! EndTxn (26): commit or abort a transaction.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to commit or abort a transaction.
    EndTxnRequest(EndTxn) {
        transactional_id: KString,
        producer_id: i64,
        producer_epoch: i16,
        committed: bool,
    }

    /// The answer to [`EndTxnRequest`].
    EndTxnResponse(EndTxn) {
        throttle_time_ms: i32,
        error_code: i16,
        producer_id: i64 [5.., ignorable] = -1,
        producer_epoch: i16 [5.., ignorable] = -1,
    }
}
