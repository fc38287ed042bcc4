//! SaslAuthenticate: checks the client's PLAIN token. A wrong token gets an error response, and then the connection
//! is closed.

use std::io;
use std::sync::Arc;

use moim_wire_kafka::messages::{SaslAuthenticateRequest, SaslAuthenticateResponse};
use moim_wire_kafka::{ErrorCode, KString};

use crate::connection::Connection;
use crate::response_writer::Call;
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
    connection.respond(
        call,
        &SaslAuthenticateResponse { error_code: code as i16, error_message, ..Default::default() },
    )
}

/// Checks a token and counts failures.
pub(crate) fn token(connection: &mut Connection, token: &[u8]) -> bool {
    let broker = Arc::clone(&connection.broker);
    let known = connection.auth.authenticate(&broker.options.users, token);
    if !known {
        broker.metrics.failed_authentications.inc();
        tracing::warn!(peer = %connection.peer, "authentication failed");
    }
    known
}
