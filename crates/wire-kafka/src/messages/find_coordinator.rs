//! FindCoordinator (10): which broker looks after a group or transactional id. Versions 4+ take several keys.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks which broker looks after a group or transactional id.
    FindCoordinatorRequest(FindCoordinator) {
        key: KString [..=3],
        key_type: i8 [1..],
        coordinator_keys: Vec<KString> [4..],
    }

    /// The answer to [`FindCoordinatorRequest`].
    FindCoordinatorResponse(FindCoordinator) {
        throttle_time_ms: i32 [1.., ignorable],
        error_code: i16 [..=3],
        error_message: Option<KString> [1..=3, ignorable],
        node_id: i32 [..=3],
        host: KString [..=3],
        port: i32 [..=3],
        coordinators: Vec<Coordinator> [4..],
    }

    /// An entry of [`FindCoordinatorResponse::coordinators`].
    Coordinator {
        key: KString,
        node_id: i32,
        host: KString,
        port: i32,
        error_code: i16,
        error_message: Option<KString>,
    }
}
