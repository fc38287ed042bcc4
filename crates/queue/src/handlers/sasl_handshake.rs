//! SaslHandshake: the client selects a SASL mechanism.

use std::io;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::{SaslHandshakeRequest, SaslHandshakeResponse};

use crate::connection::Connection;
use crate::response_writer::Call;
use crate::sasl::{Auth, MECHANISMS};

pub(crate) fn handle(
    connection: &mut Connection,
    call: Call,
    request: SaslHandshakeRequest,
) -> io::Result<()> {
    let code = match connection.auth {
        Auth::NotNeeded | Auth::Known(_) => ErrorCode::IllegalSaslState,
        _ if MECHANISMS.contains(&&*request.mechanism) => {
            connection.auth = Auth::Chosen { raw: call.version == 0 };
            ErrorCode::None
        }
        _ => ErrorCode::UnsupportedSaslMechanism,
    };
    let mechanisms = MECHANISMS.iter().map(|name| (*name).into()).collect();
    connection.respond(call, &SaslHandshakeResponse { error_code: code as i16, mechanisms })
}
