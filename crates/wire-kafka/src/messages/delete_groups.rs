//! DeleteGroups (42): delete groups that are empty.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks to delete groups that are empty.
    DeleteGroupsRequest(DeleteGroups) {
        groups_names: Vec<KString>,
    }

    /// The answer to [`DeleteGroupsRequest`].
    DeleteGroupsResponse(DeleteGroups) {
        throttle_time_ms: i32,
        results: Vec<DeletableGroupResult>,
    }

    /// An entry of [`DeleteGroupsResponse::results`].
    DeletableGroupResult {
        group_id: KString,
        error_code: i16,
    }
}
