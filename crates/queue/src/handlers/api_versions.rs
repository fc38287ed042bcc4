//! ApiVersions: the supported API versions. An unknown version gets a version 0 response with the error and the
//! ranges, so that every client can negotiate.
//!
//! API versions alone do not enable transaction version 2: a client looks for the feature `transaction.version`, and
//! uses EndTxn 5, TxnOffsetCommit 5 and Produce 12 only where it is finalized at 2.

use std::io;

use moim_wire_kafka::messages::api_versions::{FinalizedFeatureKey, SupportedFeatureKey};
use moim_wire_kafka::messages::{ApiVersion, ApiVersionsRequest, ApiVersionsResponse};
use moim_wire_kafka::{ApiKey, Decoder, ErrorCode};

use crate::connection::Connection;
use crate::dispatch::{SUPPORTED_APIS, decode};
use crate::response_writer::Call;

/// Features: name, minimum and maximum supported level, finalized level.
const FEATURES: [(&str, i16, i16, i16); 1] = [("transaction.version", 0, 2, 2)];

/// The first version whose clients accept a feature with minimum level 0.
const KNOWS_LEVEL_0: i16 = 4;

pub(crate) fn handle(connection: &mut Connection, call: Call, body: Decoder) -> io::Result<()> {
    connection.broker.metrics.request(ApiKey::ApiVersions);
    let known = SUPPORTED_APIS
        .iter()
        .any(|(k, versions)| *k == ApiKey::ApiVersions && versions.contains(&call.version));
    if !known {
        let response = response(ErrorCode::UnsupportedVersion, 0);
        return connection.respond(Call { version: 0, ..call }, &response);
    }
    let request: ApiVersionsRequest = decode(body, call.version)?;
    let mut error = ErrorCode::None;
    if call.version >= 3 {
        let (name, version) = (&request.client_software_name, &request.client_software_version);
        if is_software_text(name) && is_software_text(version) {
            connection.software = Some((name.to_string(), version.to_string()));
        } else {
            error = ErrorCode::InvalidRequest;
        }
    }
    connection.respond(call, &response(error, call.version))
}

/// KIP-511: letters, digits, dots and dashes, beginning and ending with a letter or digit.
fn is_software_text(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-'))
}

fn response(error: ErrorCode, version: i16) -> ApiVersionsResponse {
    let api_keys = SUPPORTED_APIS
        .iter()
        .map(|(key, versions)| ApiVersion {
            api_key: *key as i16,
            min_version: *versions.start(),
            max_version: *versions.end(),
        })
        .collect();
    let supported = FEATURES.iter().filter(|(_, min, ..)| *min > 0 || version >= KNOWS_LEVEL_0);
    let supported = supported.map(|&(name, min_version, max_version, _)| SupportedFeatureKey {
        name: name.into(),
        min_version,
        max_version,
    });
    let finalized = FEATURES.iter().map(|&(name, _, _, level)| FinalizedFeatureKey {
        name: name.into(),
        max_version_level: level,
        min_version_level: level,
    });
    ApiVersionsResponse {
        error_code: error as i16,
        api_keys,
        supported_features: supported.collect(),
        finalized_features_epoch: 0,
        finalized_features: finalized.collect(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_names_are_checked() {
        for (text, legal) in [
            ("librdkafka", true),
            ("apache-kafka-java", true),
            ("1.2.3-rc1", true),
            ("", false),
            ("-x", false),
            ("a b", false),
        ] {
            assert_eq!(is_software_text(text), legal, "{text}");
        }
    }

    #[test]
    fn every_api_is_listed_once_in_order() {
        let response = response(ErrorCode::None, 4);
        assert!(response.api_keys.windows(2).all(|w| w[0].api_key < w[1].api_key));
    }
}
