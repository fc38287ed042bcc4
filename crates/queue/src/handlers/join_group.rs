//! JoinGroup: passes a join to the group coordinator and waits for the next generation.

use std::sync::Arc;

use moim_wire_kafka::messages::join_group::{JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember};
use moim_wire_kafka::{ErrorCode, KString};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::{Join, Protocol, Response};
use crate::handlers::{optional, shared};

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: JoinGroupRequest,
    context: Request,
) -> JoinGroupResponse {
    let join = Join {
        group: shared(&request.group_id),
        member_id: shared(&request.member_id),
        instance_id: optional(request.group_instance_id.as_ref()),
        client_id: Arc::clone(&context.client_id),
        client_host: Arc::clone(&context.client_host),
        session_timeout_ms: request.session_timeout_ms,
        rebalance_timeout_ms: if context.version >= 1 {
            request.rebalance_timeout_ms
        } else {
            request.session_timeout_ms
        },
        protocol_type: shared(&request.protocol_type),
        protocols: request
            .protocols
            .iter()
            // Copied: group state far outlives the request and must not pin its buffer.
            .map(|p| Protocol { name: shared(&p.name), metadata: bytes::Bytes::copy_from_slice(&p.metadata) })
            .collect(),
        require_known_member_id: context.version >= 4,
        can_skip_assignment: context.version >= 9,
        reason: optional(request.reason.as_ref()),
    };
    let group = Arc::clone(&join.group);
    let answer =
        broker.groups.call(&broker, &group, |groups, now_ms, token| groups.join(now_ms, token, join)).await;
    let joined = match answer {
        Ok(Response::Join(joined)) => joined,
        Ok(_) => return failed(ErrorCode::UnknownServerError, request.member_id),
        Err(code) => return failed(code, request.member_id),
    };
    let protocol_name = match (joined.protocol, context.version) {
        (Some(name), _) => Some((&*name).into()),
        (None, 7..) => None,
        (None, _) => Some(KString::default()),
    };
    JoinGroupResponse {
        error_code: joined.error as i16,
        generation_id: joined.generation,
        protocol_type: joined.protocol_type.as_deref().map(Into::into),
        protocol_name,
        leader: (&*joined.leader).into(),
        skip_assignment: joined.skip_assignment && context.version >= 9,
        member_id: (&*joined.member_id).into(),
        members: joined
            .members
            .into_iter()
            .map(|m| JoinGroupResponseMember {
                member_id: (&*m.member_id).into(),
                group_instance_id: m.instance_id.as_deref().map(Into::into),
                metadata: m.metadata,
            })
            .collect(),
        ..Default::default()
    }
}

fn failed(code: ErrorCode, member_id: KString) -> JoinGroupResponse {
    JoinGroupResponse { error_code: code as i16, member_id, ..Default::default() }
}
