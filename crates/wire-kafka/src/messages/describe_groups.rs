//! DescribeGroups (15): state and members of classic groups.

use bytes::Bytes;

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for state and members of classic groups.
    DescribeGroupsRequest(DescribeGroups) {
        groups: Vec<KString>,
        include_authorized_operations: bool [3..],
    }

    /// The answer to [`DescribeGroupsRequest`].
    DescribeGroupsResponse(DescribeGroups) {
        throttle_time_ms: i32 [1.., ignorable],
        groups: Vec<DescribedGroup>,
    }

    /// An entry of [`DescribeGroupsResponse::groups`].
    DescribedGroup {
        error_code: i16,
        error_message: Option<KString> [6..],
        group_id: KString,
        group_state: KString,
        protocol_type: KString,
        protocol_data: KString,
        members: Vec<DescribedGroupMember>,
        authorized_operations: i32 [3..] = i32::MIN,
    }

    /// An entry of [`DescribedGroup::members`].
    DescribedGroupMember {
        member_id: KString,
        group_instance_id: Option<KString> [4.., ignorable],
        client_id: KString,
        client_host: KString,
        member_metadata: Bytes,
        member_assignment: Bytes,
    }
}
