//! InitProducerId (22): an identity for an idempotent or transactional producer.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for the identity of an idempotent or transactional producer.
    InitProducerIdRequest(InitProducerId) {
        transactional_id: Option<KString>,
        transaction_timeout_ms: i32,
        producer_id: i64 [3..] = -1,
        producer_epoch: i16 [3..] = -1,
    }

    /// The answer to [`InitProducerIdRequest`].
    InitProducerIdResponse(InitProducerId) {
        throttle_time_ms: i32,
        error_code: i16,
        producer_id: i64 = -1,
        producer_epoch: i16,
    }
}
