//! What stands before every message body: who asks for what, and which answer belongs to which question.
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
    /// The API asked for, as sent: it may be one we do not know.
    pub api_key: i16,
    /// The version of the body.
    pub api_version: i16,
    /// Comes back in the response.
    pub correlation_id: i32,
    /// What the client calls itself.
    pub client_id: Option<KString>,
}

impl RequestHeader {
    /// Reads the header and leaves `d` at the body.
    ///
    /// For an API or a version we do not know, whether tagged fields follow is a guess that nobody needs: the
    /// fields of the header itself come first, and the body cannot be read anyway.
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
    /// The number the request carried.
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
