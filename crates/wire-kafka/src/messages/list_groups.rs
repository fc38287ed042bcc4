//! ListGroups (16): the groups a broker coordinates.

use crate::KString;
use crate::codec::messages;

messages! {
    /// Asks for the groups a broker coordinates.
    ListGroupsRequest(ListGroups) {
        states_filter: Vec<KString> [4..],
        types_filter: Vec<KString> [5..],
    }

    /// The answer to [`ListGroupsRequest`].
    ListGroupsResponse(ListGroups) {
        throttle_time_ms: i32 [1.., ignorable],
        error_code: i16,
        groups: Vec<ListedGroup>,
    }

    /// An entry of [`ListGroupsResponse::groups`].
    ListedGroup {
        group_id: KString,
        protocol_type: KString,
        group_state: KString [4.., ignorable],
        group_type: KString [5.., ignorable],
    }
}
