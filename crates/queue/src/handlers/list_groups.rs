//! ListGroups: the groups this node coordinates, filtered by state and type.

use std::sync::Arc;

use moim_wire_kafka::messages::list_groups::{ListGroupsRequest, ListGroupsResponse, ListedGroup};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::ListFilter;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: ListGroupsRequest,
    _: Request,
) -> ListGroupsResponse {
    let filter = ListFilter {
        states: request.states_filter.iter().map(|s| s.to_string()).collect(),
        types: request.types_filter.iter().map(|s| s.to_string()).collect(),
    };
    let mut groups: Vec<ListedGroup> = broker
        .groups
        .query_all(|groups| groups.list(&filter))
        .into_iter()
        .flatten()
        .map(|g| ListedGroup {
            group_id: (&*g.group).into(),
            protocol_type: (&*g.protocol_type).into(),
            group_state: g.state.name().into(),
            group_type: g.group_type.into(),
        })
        .collect();
    groups.sort_by(|a, b| a.group_id.cmp(&b.group_id));
    ListGroupsResponse { groups, ..Default::default() }
}
