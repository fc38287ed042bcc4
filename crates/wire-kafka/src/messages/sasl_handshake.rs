//! SaslHandshake (17): agree on an authentication mechanism.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to agree on an authentication mechanism.
    SaslHandshakeRequest(SaslHandshake) {
        mechanism: KString,
    }

    /// The answer to [`SaslHandshakeRequest`].
    SaslHandshakeResponse(SaslHandshake) {
        error_code: i16,
        mechanisms: Vec<KString>,
    }
}
