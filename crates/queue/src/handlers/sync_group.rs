//! SyncGroup: distributes the leader's assignment to the members.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::sync_group::{SyncGroupRequest, SyncGroupResponse};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::{Response, Sync};
use crate::handlers::{optional, shared};

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: SyncGroupRequest,
    context: Request,
) -> SyncGroupResponse {
    let failed = |code: ErrorCode| SyncGroupResponse { error_code: code as i16, ..Default::default() };
    if context.version >= 5 && (request.protocol_type.is_none() || request.protocol_name.is_none()) {
        return failed(ErrorCode::InconsistentGroupProtocol);
    }
    let sync = Sync {
        group: shared(&request.group_id),
        generation: request.generation_id,
        member_id: shared(&request.member_id),
        instance_id: optional(request.group_instance_id.as_ref()),
        protocol_type: optional(request.protocol_type.as_ref()),
        protocol: optional(request.protocol_name.as_ref()),
        assignments: request
            .assignments
            .iter()
            .map(|a| (shared(&a.member_id), bytes::Bytes::copy_from_slice(&a.assignment)))
            .collect(),
    };
    let group = Arc::clone(&sync.group);
    match broker.groups.call(&broker, &group, |groups, now_ms, token| groups.sync(now_ms, token, sync)).await
    {
        Ok(Response::Sync(synced)) => SyncGroupResponse {
            error_code: synced.error as i16,
            protocol_type: synced.protocol_type.as_deref().map(Into::into),
            protocol_name: synced.protocol.as_deref().map(Into::into),
            assignment: synced.assignment,
            ..Default::default()
        },
        Ok(_) => failed(ErrorCode::UnknownServerError),
        Err(code) => failed(code),
    }
}
