//! IncrementalAlterConfigs (44): set, unset, extend or shorten single settings.

use super::alter_configs::AlterConfigsResourceResponse;
use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to set, unset, extend or shorten single settings.
    IncrementalAlterConfigsRequest(IncrementalAlterConfigs) {
        resources: Vec<AlterConfigsResource>,
        validate_only: bool,
    }

    /// An entry of [`IncrementalAlterConfigsRequest::resources`].
    AlterConfigsResource {
        resource_type: i8,
        resource_name: KString,
        configs: Vec<AlterableConfig>,
    }

    /// An entry of [`AlterConfigsResource::configs`].
    AlterableConfig {
        name: KString,
        config_operation: i8,
        value: Option<KString>,
    }

    /// The answer to [`IncrementalAlterConfigsRequest`].
    IncrementalAlterConfigsResponse(IncrementalAlterConfigs) {
        throttle_time_ms: i32,
        responses: Vec<AlterConfigsResourceResponse>,
    }
}
