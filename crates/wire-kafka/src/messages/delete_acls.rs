//! DeleteAcls (31): remove the access rules that match.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to remove the access rules that match.
    DeleteAclsRequest(DeleteAcls) {
        filters: Vec<DeleteAclsFilter>,
    }

    /// An entry of [`DeleteAclsRequest::filters`].
    DeleteAclsFilter {
        resource_type_filter: i8,
        resource_name_filter: Option<KString>,
        pattern_type_filter: i8 = 3,
        principal_filter: Option<KString>,
        host_filter: Option<KString>,
        operation: i8,
        permission_type: i8,
    }

    /// The answer to [`DeleteAclsRequest`].
    DeleteAclsResponse(DeleteAcls) {
        throttle_time_ms: i32,
        filter_results: Vec<DeleteAclsFilterResult>,
    }

    /// An entry of [`DeleteAclsResponse::filter_results`].
    DeleteAclsFilterResult {
        error_code: i16,
        error_message: Option<KString>,
        matching_acls: Vec<DeleteAclsMatchingAcl>,
    }

    /// An entry of [`DeleteAclsFilterResult::matching_acls`].
    DeleteAclsMatchingAcl {
        error_code: i16,
        error_message: Option<KString>,
        resource_type: i8,
        resource_name: KString,
        pattern_type: i8 = 3,
        principal: KString,
        host: KString,
        operation: i8,
        permission_type: i8,
    }
}
