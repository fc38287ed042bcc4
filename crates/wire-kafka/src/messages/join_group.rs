//! JoinGroup (11): enter a group, and wait there for the rebalance to gather everyone.

use bytes::Bytes;

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to enter a group, and wait there for the rebalance to gather everyone.
    JoinGroupRequest(JoinGroup) {
        group_id: KString,
        session_timeout_ms: i32,
        rebalance_timeout_ms: i32 [1.., ignorable] = -1,
        member_id: KString,
        group_instance_id: Option<KString> [5..],
        protocol_type: KString,
        protocols: Vec<JoinGroupRequestProtocol>,
        reason: Option<KString> [8.., ignorable],
    }

    /// An entry of [`JoinGroupRequest::protocols`].
    JoinGroupRequestProtocol {
        name: KString,
        metadata: Bytes,
    }

    /// The answer to [`JoinGroupRequest`].
    JoinGroupResponse(JoinGroup) {
        throttle_time_ms: i32 [2.., ignorable],
        error_code: i16,
        generation_id: i32 = -1,
        protocol_type: Option<KString> [7.., ignorable],
        protocol_name: Option<KString> [null 7..] = Some(KString::default()),
        leader: KString,
        skip_assignment: bool [9..],
        member_id: KString,
        members: Vec<JoinGroupResponseMember>,
    }

    /// An entry of [`JoinGroupResponse::members`].
    JoinGroupResponseMember {
        member_id: KString,
        group_instance_id: Option<KString> [5.., ignorable],
        metadata: Bytes,
    }
}
