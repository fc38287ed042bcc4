//! Error codes of Kafka responses as failures with an exit status.

use crate::exit::{Failure, Outcome};

/// Fails unless the error code is zero.
pub(crate) fn check(code: i16, message: Option<&str>) -> Outcome {
    Ok(moim_kafka_client::check(code, message)?)
}

/// The failure for an error code. The server's own message is preferred to the general text of the code.
pub(crate) fn failure(code: i16, message: Option<&str>) -> Failure {
    moim_kafka_client::server_error(code, message).into()
}

/// The name of an error code, for programs.
pub(crate) fn name(code: i16) -> String {
    moim_kafka_client::error_name(code)
}
