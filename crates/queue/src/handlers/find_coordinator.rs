//! FindCoordinator: the coordinator of a group or a transactional id is the leader of the internal partition that
//! holds its state, once that internal topic exists.

use std::sync::Arc;

use moim_wire_kafka::messages::find_coordinator::{
    Coordinator, FindCoordinatorRequest, FindCoordinatorResponse,
};
use moim_wire_kafka::{ErrorCode, KString};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::topics::{OFFSETS_TOPIC, TRANSACTIONS_TOPIC};

const GROUP: i8 = 0;
const TRANSACTION: i8 = 1;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: FindCoordinatorRequest,
    context: Request,
) -> FindCoordinatorResponse {
    let keys = if context.version >= 4 { request.coordinator_keys } else { vec![request.key] };
    let ready = match request.key_type {
        GROUP => broker.groups.ensure_topic(&broker).await,
        TRANSACTION => broker.transactions.ensure_topic(&broker).await,
        _ => Err(ErrorCode::InvalidRequest),
    };
    let coordinators =
        keys.into_iter().map(|key| coordinator(&broker, key, request.key_type, ready)).collect();
    if context.version >= 4 {
        return FindCoordinatorResponse { coordinators, ..Default::default() };
    }
    let first: Coordinator = coordinators.into_iter().next().unwrap_or_default();
    FindCoordinatorResponse {
        error_code: first.error_code,
        error_message: first.error_message,
        node_id: first.node_id,
        host: first.host,
        port: first.port,
        ..Default::default()
    }
}

fn coordinator(broker: &Broker, key: KString, key_type: i8, ready: Result<(), ErrorCode>) -> Coordinator {
    let ready =
        if key.is_empty() && key_type == TRANSACTION { Err(ErrorCode::InvalidRequest) } else { ready };
    let coordinator_broker = ready.and_then(|()| {
        let leader = if key_type == TRANSACTION {
            broker.leader_of(TRANSACTIONS_TOPIC, broker.transactions.partition_of(&key))
        } else {
            broker.leader_of(OFFSETS_TOPIC, broker.groups.partition_of(&key))
        };
        leader.ok_or(ErrorCode::CoordinatorNotAvailable)
    });
    match coordinator_broker {
        Ok(coordinator_broker) => Coordinator {
            key,
            node_id: coordinator_broker.id.0,
            host: coordinator_broker.host.into(),
            port: i32::from(coordinator_broker.port),
            error_message: None,
            ..Default::default()
        },
        Err(code) => Coordinator {
            key,
            node_id: -1,
            port: -1,
            error_code: code as i16,
            error_message: Some(KString::from_static(code.message())),
            ..Default::default()
        },
    }
}
