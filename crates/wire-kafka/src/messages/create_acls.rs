//! CreateAcls (30): add access rules.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to add access rules.
    CreateAclsRequest(CreateAcls) {
        creations: Vec<AclCreation>,
    }

    /// An entry of [`CreateAclsRequest::creations`].
    AclCreation {
        resource_type: i8,
        resource_name: KString,
        resource_pattern_type: i8 = 3,
        principal: KString,
        host: KString,
        operation: i8,
        permission_type: i8,
    }

    /// The answer to [`CreateAclsRequest`].
    CreateAclsResponse(CreateAcls) {
        throttle_time_ms: i32,
        results: Vec<AclCreationResult>,
    }

    /// An entry of [`CreateAclsResponse::results`].
    AclCreationResult {
        error_code: i16,
        error_message: Option<KString>,
    }
}
