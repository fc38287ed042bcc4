//! LeaveGroup (13): leave a group. Versions 3+ can remove several members.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to leave a group.
    LeaveGroupRequest(LeaveGroup) {
        group_id: KString,
        member_id: KString [..=2],
        members: Vec<MemberIdentity> [3..],
    }

    /// An entry of [`LeaveGroupRequest::members`].
    MemberIdentity {
        member_id: KString,
        group_instance_id: Option<KString>,
        reason: Option<KString> [5.., ignorable],
    }

    /// The answer to [`LeaveGroupRequest`].
    LeaveGroupResponse(LeaveGroup) {
        throttle_time_ms: i32 [1.., ignorable],
        error_code: i16,
        members: Vec<MemberResponse> [3..],
    }

    /// An entry of [`LeaveGroupResponse::members`].
    MemberResponse {
        member_id: KString,
        group_instance_id: Option<KString>,
        error_code: i16,
    }
}
