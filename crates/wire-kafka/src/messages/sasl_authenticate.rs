//! SaslAuthenticate (36): one step of an authentication exchange.

use bytes::Bytes;

use crate::KString;
use crate::codec::messages;

messages! {
    /// The client's part of one step.
    SaslAuthenticateRequest(SaslAuthenticate) {
        auth_bytes: Bytes,
    }

    /// The server's part of one step.
    SaslAuthenticateResponse(SaslAuthenticate) {
        error_code: i16,
        error_message: Option<KString>,
        auth_bytes: Bytes,
        session_lifetime_ms: i64 [1.., ignorable],
    }
}
