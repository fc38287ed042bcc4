//! AlterClientQuotas (49): set and remove quotas.

use super::describe_client_quotas::EntityData;
use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to set and remove quotas.
    AlterClientQuotasRequest(AlterClientQuotas) {
        entries: Vec<EntryData>,
        validate_only: bool,
    }

    /// An entry of [`AlterClientQuotasRequest::entries`].
    EntryData {
        entity: Vec<EntityData>,
        ops: Vec<OpData>,
    }

    /// An entry of [`EntryData::ops`].
    OpData {
        key: KString,
        value: f64,
        remove: bool,
    }

    /// The answer to [`AlterClientQuotasRequest`].
    AlterClientQuotasResponse(AlterClientQuotas) {
        throttle_time_ms: i32,
        entries: Vec<AlterClientQuotasEntryResponse>,
    }

    /// An entry of [`AlterClientQuotasResponse::entries`].
    AlterClientQuotasEntryResponse {
        error_code: i16,
        error_message: Option<KString>,
        entity: Vec<EntityData>,
    }
}
