//! IncrementalAlterConfigs (44): set, unset, extend or shorten single settings.

use super::alter_configs::{AlterConfigsResource, AlterConfigsResourceResponse};
use crate::codec::messages;

messages! {
    /// Asks to set, unset, extend or shorten single settings.
    IncrementalAlterConfigsRequest(IncrementalAlterConfigs) {
        resources: Vec<AlterConfigsResource>,
        validate_only: bool,
    }

    /// The answer to [`IncrementalAlterConfigsRequest`].
    IncrementalAlterConfigsResponse(IncrementalAlterConfigs) {
        throttle_time_ms: i32,
        responses: Vec<AlterConfigsResourceResponse>,
    }
}
