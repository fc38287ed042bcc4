//! AlterUserScramCredentials (51): set and remove SCRAM credentials.

use bytes::Bytes;

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to set and remove SCRAM credentials.
    AlterUserScramCredentialsRequest(AlterUserScramCredentials) {
        deletions: Vec<ScramCredentialDeletion>,
        upsertions: Vec<ScramCredentialUpsertion>,
    }

    /// An entry of [`AlterUserScramCredentialsRequest::deletions`].
    ScramCredentialDeletion {
        name: KString,
        mechanism: i8,
    }

    /// An entry of [`AlterUserScramCredentialsRequest::upsertions`].
    ScramCredentialUpsertion {
        name: KString,
        mechanism: i8,
        iterations: i32,
        salt: Bytes,
        salted_password: Bytes,
    }

    /// The answer to [`AlterUserScramCredentialsRequest`].
    AlterUserScramCredentialsResponse(AlterUserScramCredentials) {
        throttle_time_ms: i32,
        results: Vec<AlterUserScramCredentialsResult>,
    }

    /// An entry of [`AlterUserScramCredentialsResponse::results`].
    AlterUserScramCredentialsResult {
        user: KString,
        error_code: i16,
        error_message: Option<KString>,
    }
}
