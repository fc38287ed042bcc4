//! DescribeClientQuotas (48): find quotas.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to find quotas.
    DescribeClientQuotasRequest(DescribeClientQuotas) {
        components: Vec<ComponentData>,
        strict: bool,
    }

    /// An entry of [`DescribeClientQuotasRequest::components`].
    ComponentData {
        entity_type: KString,
        match_type: i8,
        r#match: Option<KString>,
    }

    /// The answer to [`DescribeClientQuotasRequest`].
    DescribeClientQuotasResponse(DescribeClientQuotas) {
        throttle_time_ms: i32,
        error_code: i16,
        error_message: Option<KString>,
        entries: Option<Vec<EntryData>>,
    }

    /// An entry of [`DescribeClientQuotasResponse::entries`].
    EntryData {
        entity: Vec<EntityData>,
        values: Vec<ValueData>,
    }

    /// An entry of [`EntryData::entity`].
    EntityData {
        entity_type: KString,
        entity_name: Option<KString>,
    }

    /// An entry of [`EntryData::values`].
    ValueData {
        key: KString,
        value: f64,
    }
}
