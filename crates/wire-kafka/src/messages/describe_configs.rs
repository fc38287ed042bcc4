//! DescribeConfigs (32): settings of topics and brokers, and where each value comes from.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for settings of topics and brokers, and where each value comes from.
    DescribeConfigsRequest(DescribeConfigs) {
        resources: Vec<DescribeConfigsResource>,
        include_synonyms: bool,
        include_documentation: bool [3..],
    }

    /// An entry of [`DescribeConfigsRequest::resources`].
    DescribeConfigsResource {
        resource_type: i8,
        resource_name: KString,
        configuration_keys: Option<Vec<KString>>,
    }

    /// The answer to [`DescribeConfigsRequest`].
    DescribeConfigsResponse(DescribeConfigs) {
        throttle_time_ms: i32,
        results: Vec<DescribeConfigsResult>,
    }

    /// An entry of [`DescribeConfigsResponse::results`].
    DescribeConfigsResult {
        error_code: i16,
        error_message: Option<KString>,
        resource_type: i8,
        resource_name: KString,
        configs: Vec<DescribeConfigsResourceResult>,
    }

    /// An entry of [`DescribeConfigsResult::configs`].
    DescribeConfigsResourceResult {
        name: KString,
        value: Option<KString>,
        read_only: bool,
        config_source: i8 = -1,
        is_sensitive: bool,
        synonyms: Vec<DescribeConfigsSynonym>,
        config_type: i8 [3.., ignorable],
        documentation: Option<KString> [3.., ignorable],
    }

    /// An entry of [`DescribeConfigsResourceResult::synonyms`].
    DescribeConfigsSynonym {
        name: KString,
        value: Option<KString>,
        source: i8,
    }
}
