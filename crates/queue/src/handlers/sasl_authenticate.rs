//! SaslAuthenticate: the client says who it is. A wrong answer is told, and ends the connection.

use std::io;
use std::sync::Arc;

use moim_wire_kafka::messages::{SaslAuthenticateRequest, SaslAuthenticateResponse};
use moim_wire_kafka::{ErrorCode, KString};

use crate::connection::Connection;
use crate::reply::Call;
use crate::sasl::Auth;

pub(crate) fn handle(
    connection: &mut Connection,
    call: Call,
    request: &SaslAuthenticateRequest,
) -> io::Result<()> {
    let code = if connection.auth != (Auth::Chosen { raw: false }) {
        ErrorCode::IllegalSaslState
    } else if token(connection, &request.auth_bytes) {
        ErrorCode::None
    } else {
        connection.close();
        ErrorCode::SaslAuthenticationFailed
    };
    let error_message = match code {
        ErrorCode::None => None,
        ErrorCode::SaslAuthenticationFailed => Some(KString::from_static("Invalid user name or password.")),
        other => Some(KString::from_static(other.message())),
    };
    connection.answer(
        call,
        &SaslAuthenticateResponse { error_code: code as i16, error_message, ..Default::default() },
    )
}

/// Checks a token and counts those that are wrong.
pub(crate) fn token(connection: &mut Connection, token: &[u8]) -> bool {
    let broker = Arc::clone(&connection.broker);
    let known = connection.auth.authenticate(&broker.options.users, token);
    if !known {
        broker.metrics.failed_authentications.inc();
        tracing::warn!(peer = %connection.peer, "wrong user name or password");
    }
    known
}
