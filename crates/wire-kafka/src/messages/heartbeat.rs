//! Heartbeat (12): stay in a group.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to stay in a group.
    HeartbeatRequest(Heartbeat) {
        group_id: KString,
        generation_id: i32,
        member_id: KString,
        group_instance_id: Option<KString> [3..],
    }

    /// The answer to [`HeartbeatRequest`].
    HeartbeatResponse(Heartbeat) {
        throttle_time_ms: i32 [1.., ignorable],
        error_code: i16,
    }
}
