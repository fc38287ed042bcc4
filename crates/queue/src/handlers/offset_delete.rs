//! OffsetDelete: deletes a group's committed offsets of some partitions.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::offset_delete::{
    OffsetDeleteRequest, OffsetDeleteResponse, OffsetDeleteResponsePartition, OffsetDeleteResponseTopic,
};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::groups::{OffsetDelete, Response};
use crate::handlers::shared;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: OffsetDeleteRequest,
    _: Request,
) -> OffsetDeleteResponse {
    let topics = request
        .topics
        .iter()
        .map(|t| (shared(&t.name), t.partitions.iter().map(|p| p.partition_index).collect()))
        .collect();
    let delete = OffsetDelete { group: shared(&request.group_id), topics };
    let group = Arc::clone(&delete.group);
    let failed = |code: ErrorCode| OffsetDeleteResponse { error_code: code as i16, ..Default::default() };
    match broker
        .groups
        .call(&broker, &group, |groups, now_ms, token| groups.offset_delete(now_ms, token, delete))
        .await
    {
        Ok(Response::OffsetDelete(deleted)) => OffsetDeleteResponse {
            error_code: deleted.error as i16,
            topics: deleted
                .topics
                .into_iter()
                .map(|t| OffsetDeleteResponseTopic {
                    name: (&*t.topic).into(),
                    partitions: t
                        .partitions
                        .into_iter()
                        .map(|(partition_index, code)| OffsetDeleteResponsePartition {
                            partition_index,
                            error_code: code as i16,
                        })
                        .collect(),
                })
                .collect(),
            ..Default::default()
        },
        Ok(_) => failed(ErrorCode::UnknownServerError),
        Err(code) => failed(code),
    }
}
