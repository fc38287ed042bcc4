//! AlterConfigs (33): replace all settings of a resource. Deprecated; see IncrementalAlterConfigs.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to replace all settings of a resource.
    AlterConfigsRequest(AlterConfigs) {
        resources: Vec<AlterConfigsResource>,
        validate_only: bool,
    }

    /// An entry of [`AlterConfigsRequest::resources`].
    AlterConfigsResource {
        resource_type: i8,
        resource_name: KString,
        configs: Vec<AlterableConfig>,
    }

    /// An entry of [`AlterConfigsResource::configs`].
    AlterableConfig {
        name: KString,
        value: Option<KString>,
    }

    /// The answer to [`AlterConfigsRequest`].
    AlterConfigsResponse(AlterConfigs) {
        throttle_time_ms: i32,
        responses: Vec<AlterConfigsResourceResponse>,
    }

    /// An entry of [`AlterConfigsResponse::responses`].
    AlterConfigsResourceResponse {
        error_code: i16,
        error_message: Option<KString>,
        resource_type: i8,
        resource_name: KString,
    }
}
