//! LeaveGroup, for one member or (versions 3+) for several.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::leave_group::{LeaveGroupRequest, LeaveGroupResponse, MemberResponse};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::{Leave, LeavingMember, Response};
use crate::handlers::{optional, shared};

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: LeaveGroupRequest,
    context: Request,
) -> LeaveGroupResponse {
    let members = if context.version >= 3 {
        let member = |m: &moim_wire_kafka::messages::leave_group::MemberIdentity| LeavingMember {
            member_id: shared(&m.member_id),
            instance_id: optional(m.group_instance_id.as_ref()),
            reason: optional(m.reason.as_ref()),
        };
        request.members.iter().map(member).collect()
    } else {
        vec![LeavingMember { member_id: shared(&request.member_id), instance_id: None, reason: None }]
    };
    let leave = Leave { group: shared(&request.group_id), members };
    let group = Arc::clone(&leave.group);
    let failed = |code: ErrorCode| LeaveGroupResponse { error_code: code as i16, ..Default::default() };
    let left = match broker
        .groups
        .call(&broker, &group, |groups, now_ms, token| groups.leave(now_ms, token, leave))
        .await
    {
        Ok(Response::Leave(left)) => left,
        Ok(_) => return failed(ErrorCode::UnknownServerError),
        Err(code) => return failed(code),
    };
    if context.version < 3 {
        // There is one member, so its error is the response's error.
        let code = left
            .members
            .first()
            .map_or(left.error, |(_, code)| if left.error == ErrorCode::None { *code } else { left.error });
        return failed(code);
    }
    let members = left.members.into_iter().map(|(member, code)| MemberResponse {
        member_id: (&*member.member_id).into(),
        group_instance_id: member.instance_id.as_deref().map(Into::into),
        error_code: code as i16,
    });
    LeaveGroupResponse { error_code: left.error as i16, members: members.collect(), ..Default::default() }
}
