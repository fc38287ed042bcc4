//! ApiVersions (18): what a broker speaks. The first request of almost every connection.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks what the broker speaks, and says which client asks.
    ApiVersionsRequest(ApiVersions) {
        client_software_name: KString [3.., ignorable],
        client_software_version: KString [3.., ignorable],
    }

    /// The answer to [`ApiVersionsRequest`].
    ApiVersionsResponse(ApiVersions) {
        error_code: i16,
        api_keys: Vec<ApiVersion>,
        throttle_time_ms: i32 [1.., ignorable],
        supported_features: Vec<SupportedFeatureKey> [3.., tag 0, ignorable],
        finalized_features_epoch: i64 [3.., tag 1, ignorable] = -1,
        finalized_features: Vec<FinalizedFeatureKey> [3.., tag 2, ignorable],
        zk_migration_ready: bool [3.., tag 3, ignorable],
    }

    /// An entry of [`ApiVersionsResponse::api_keys`].
    ApiVersion {
        api_key: i16,
        min_version: i16,
        max_version: i16,
    }

    /// An entry of [`ApiVersionsResponse::supported_features`].
    SupportedFeatureKey {
        name: KString,
        min_version: i16,
        max_version: i16,
    }

    /// An entry of [`ApiVersionsResponse::finalized_features`].
    FinalizedFeatureKey {
        name: KString,
        max_version_level: i16,
        min_version_level: i16,
    }
}
