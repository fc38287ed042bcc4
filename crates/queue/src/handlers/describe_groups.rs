//! DescribeGroups: state, protocol and members of groups.

use std::sync::Arc;

use moim_wire_kafka::messages::describe_groups::{
    DescribeGroupsRequest, DescribeGroupsResponse, DescribedGroup, DescribedGroupMember,
};
use moim_wire_kafka::{ErrorCode, KString};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::shared;

/// READ, DELETE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS: all operations, because there is no authorization.
const ALL_GROUP_OPERATIONS: i32 = 1 << 3 | 1 << 6 | 1 << 8;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: DescribeGroupsRequest,
    context: Request,
) -> DescribeGroupsResponse {
    let groups = request.groups.iter().map(|name| {
        let group = shared(name);
        let described = match broker.groups.query(&broker, &group, |groups| groups.describe(&group)) {
            Ok(described) => described,
            Err(code) => {
                let group_id = name.clone();
                return DescribedGroup { error_code: code as i16, group_id, ..Default::default() };
            }
        };
        let missing = described.error == ErrorCode::GroupIdNotFound;
        // Before version 6 an unknown group was a dead one, without an error.
        let error = if missing && context.version < 6 { ErrorCode::None } else { described.error };
        let operations = if request.include_authorized_operations { ALL_GROUP_OPERATIONS } else { i32::MIN };
        DescribedGroup {
            error_code: error as i16,
            error_message: (missing && context.version >= 6)
                .then(|| KString::from(format!("Group {name} not found."))),
            group_id: name.clone(),
            group_state: described.state.name().into(),
            protocol_type: (&*described.protocol_type).into(),
            protocol_data: (&*described.protocol).into(),
            members: described
                .members
                .into_iter()
                .map(|m| DescribedGroupMember {
                    member_id: (&*m.member_id).into(),
                    group_instance_id: m.instance_id.as_deref().map(Into::into),
                    client_id: (&*m.client_id).into(),
                    client_host: (&*m.client_host).into(),
                    member_metadata: m.metadata,
                    member_assignment: m.assignment,
                })
                .collect(),
            authorized_operations: operations,
        }
    });
    DescribeGroupsResponse { groups: groups.collect(), ..Default::default() }
}
