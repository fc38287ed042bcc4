//! SyncGroup (14): the leader hands in the assignment, every member gets its share.

use bytes::Bytes;

use crate::KString;
use crate::codec::messages;

messages! {
    /// A member requests its assignment; the group leader's request carries the assignment of every member.
    SyncGroupRequest(SyncGroup) {
        group_id: KString,
        generation_id: i32,
        member_id: KString,
        group_instance_id: Option<KString> [3..],
        protocol_type: Option<KString> [5.., ignorable],
        protocol_name: Option<KString> [5.., ignorable],
        assignments: Vec<SyncGroupRequestAssignment>,
    }

    /// An entry of [`SyncGroupRequest::assignments`].
    SyncGroupRequestAssignment {
        member_id: KString,
        assignment: Bytes,
    }

    /// The share of one member.
    SyncGroupResponse(SyncGroup) {
        throttle_time_ms: i32 [1.., ignorable],
        error_code: i16,
        protocol_type: Option<KString> [5.., ignorable],
        protocol_name: Option<KString> [5.., ignorable],
        assignment: Bytes,
    }
}
