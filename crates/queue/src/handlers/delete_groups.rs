//! DeleteGroups: deletes empty groups and their offsets.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::delete_groups::{
    DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::Response;
use crate::handlers::shared;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: DeleteGroupsRequest,
    _: Request,
) -> DeleteGroupsResponse {
    let mut results = Vec::with_capacity(request.groups_names.len());
    for name in request.groups_names {
        let group = shared(&name);
        let names = vec![Arc::clone(&group)];
        let answer = broker
            .groups
            .call(&broker, &group, |groups, now_ms, token| groups.delete_groups(now_ms, token, names))
            .await;
        let code = match answer {
            Ok(Response::DeleteGroups(results)) => {
                results.first().map_or(ErrorCode::UnknownServerError, |(_, code)| *code)
            }
            Ok(_) => ErrorCode::UnknownServerError,
            Err(code) => code,
        };
        results.push(DeletableGroupResult { group_id: name, error_code: code as i16 });
    }
    DeleteGroupsResponse { results, ..Default::default() }
}
