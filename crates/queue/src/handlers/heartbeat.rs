//! Heartbeat: the most frequent request of a consumer; it takes one lock and allocates nothing.

use moim_wire_kafka::messages::heartbeat::{HeartbeatRequest, HeartbeatResponse};

use crate::broker::Broker;

pub(crate) fn handle(broker: &Broker, request: HeartbeatRequest, _version: i16) -> HeartbeatResponse {
    let now_ms = broker.clock.monotonic_ms();
    let instance = request.group_instance_id.as_deref();
    let error = broker.groups.query(broker, &request.group_id, |groups| {
        groups.heartbeat(now_ms, &request.group_id, request.generation_id, &request.member_id, instance)
    });
    let error = error.unwrap_or_else(|code| code);
    HeartbeatResponse { error_code: error as i16, ..Default::default() }
}
