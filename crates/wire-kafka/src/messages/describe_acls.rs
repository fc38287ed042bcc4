//! DescribeAcls (29): find access rules.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to find access rules.
    DescribeAclsRequest(DescribeAcls) {
        resource_type_filter: i8,
        resource_name_filter: Option<KString>,
        pattern_type_filter: i8 = 3,
        principal_filter: Option<KString>,
        host_filter: Option<KString>,
        operation: i8,
        permission_type: i8,
    }

    /// The answer to [`DescribeAclsRequest`].
    DescribeAclsResponse(DescribeAcls) {
        throttle_time_ms: i32,
        error_code: i16,
        error_message: Option<KString>,
        resources: Vec<DescribeAclsResource>,
    }

    /// An entry of [`DescribeAclsResponse::resources`].
    DescribeAclsResource {
        resource_type: i8,
        resource_name: KString,
        pattern_type: i8 = 3,
        acls: Vec<AclDescription>,
    }

    /// An entry of [`DescribeAclsResource::acls`].
    AclDescription {
        principal: KString,
        host: KString,
        operation: i8,
        permission_type: i8,
    }
}
