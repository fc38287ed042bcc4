//! DescribeUserScramCredentials (50): which users have SCRAM credentials (never the secrets).

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks which users have SCRAM credentials (never the secrets).
    DescribeUserScramCredentialsRequest(DescribeUserScramCredentials) {
        users: Option<Vec<UserName>>,
    }

    /// An entry of [`DescribeUserScramCredentialsRequest::users`].
    UserName {
        name: KString,
    }

    /// The answer to [`DescribeUserScramCredentialsRequest`].
    DescribeUserScramCredentialsResponse(DescribeUserScramCredentials) {
        throttle_time_ms: i32,
        error_code: i16,
        error_message: Option<KString>,
        results: Vec<DescribeUserScramCredentialsResult>,
    }

    /// An entry of [`DescribeUserScramCredentialsResponse::results`].
    DescribeUserScramCredentialsResult {
        user: KString,
        error_code: i16,
        error_message: Option<KString>,
        credential_infos: Vec<CredentialInfo>,
    }

    /// An entry of [`DescribeUserScramCredentialsResult::credential_infos`].
    CredentialInfo {
        mechanism: i8,
        iterations: i32,
    }
}
