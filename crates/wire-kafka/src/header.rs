//! The headers of requests and responses: API key, version, correlation id.
//!
//! A request header is v1, or v2 (with tagged fields) for flexible versions; its client id keeps the classic
//! two-byte length in both, so a broker can read it before it knows the API. A response header is v0, or v1
//! with tagged fields; that of ApiVersions is always v0, so a client can read it before it knows the broker.

use crate::api::ApiKey;
use crate::codec::{DecodeError, Decoder, EncodeError, Encoder};
use crate::text::KString;

/// Header of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestHeader {
    /// The requested API key, as sent: it may be unknown.
    pub api_key: i16,
    /// The version of the body.
    pub api_version: i16,
    /// The correlation id, returned in the response.
    pub correlation_id: i32,
    /// The client id.
    pub client_id: Option<KString>,
}

impl RequestHeader {
    /// Reads the header and leaves `d` at the body.
    ///
    /// For an unknown API or version, whether tagged fields follow is irrelevant: the fields of the header itself
    /// come first, and the body cannot be decoded anyway.
    pub fn decode(d: &mut Decoder) -> Result<Self, DecodeError> {
        let header = Self {
            api_key: d.i16()?,
            api_version: d.i16()?,
            correlation_id: d.i32()?,
            client_id: d.classic_nullable_string()?,
        };
        let tagged = ApiKey::try_from(header.api_key).is_ok_and(|key| {
            let version = header.api_version;
            key.versions().contains(&version) && key.request_header_version(version) >= 2
        });
        if tagged {
            d.skip_tagged_fields()?;
        }
        Ok(header)
    }

    /// Appends the header.
    pub fn encode(&self, e: &mut Encoder) -> Result<(), EncodeError> {
        e.i16(self.api_key);
        e.i16(self.api_version);
        e.i32(self.correlation_id);
        e.classic_nullable_string(self.client_id.as_ref())?;
        if ApiKey::try_from(self.api_key).is_ok_and(|key| key.request_header_version(self.api_version) >= 2) {
            e.uvarint(0);
        }
        Ok(())
    }
}

/// Header of a response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResponseHeader {
    /// The correlation id of the request.
    pub correlation_id: i32,
}

impl ResponseHeader {
    /// Reads the header of a response to `key` in `version` and leaves `d` at the body.
    pub fn decode(d: &mut Decoder, key: ApiKey, version: i16) -> Result<Self, DecodeError> {
        let header = Self { correlation_id: d.i32()? };
        if key.response_header_version(version) >= 1 {
            d.skip_tagged_fields()?;
        }
        Ok(header)
    }

    /// Appends the header of a response to `key` in `version`.
    pub fn encode(&self, e: &mut Encoder, key: ApiKey, version: i16) {
        e.i32(self.correlation_id);
        if key.response_header_version(version) >= 1 {
            e.uvarint(0);
        }
    }
}
