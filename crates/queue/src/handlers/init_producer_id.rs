//! InitProducerId, for idempotent and for transactional producers.

use std::sync::Arc;

use moim_wire_kafka::ErrorCode;
use moim_wire_kafka::messages::init_producer_id::{InitProducerIdRequest, InitProducerIdResponse};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::optional;
use crate::transactions::Input;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: InitProducerIdRequest,
    context: Request,
) -> InitProducerIdResponse {
    match init(&broker, &request, context.version).await {
        Ok((producer_id, producer_epoch)) => {
            InitProducerIdResponse { producer_id, producer_epoch, ..Default::default() }
        }
        Err(code) => InitProducerIdResponse {
            error_code: code as i16,
            producer_id: -1,
            producer_epoch: -1,
            ..Default::default()
        },
    }
}

async fn init(
    broker: &Broker,
    request: &InitProducerIdRequest,
    version: i16,
) -> Result<(i64, i16), ErrorCode> {
    let fresh_id = broker.producer_ids.next().await?;
    let Some(transactional_id) = optional(request.transactional_id.as_ref()) else {
        // An idempotent producer gets a new producer id; there is nothing to fence.
        return Ok((fresh_id, 0));
    };
    if transactional_id.is_empty() {
        return Err(ErrorCode::InvalidRequest);
    }
    let current = match (request.producer_id, request.producer_epoch) {
        (-1, -1) => None,
        (producer_id, epoch) if producer_id >= 0 && epoch >= 0 && version >= 3 => Some((producer_id, epoch)),
        _ => return Err(ErrorCode::InvalidRequest),
    };
    let id = Arc::clone(&transactional_id);
    let input = |token| Input::InitProducerId {
        token,
        version,
        transactional_id: Some(id),
        timeout_ms: request.transaction_timeout_ms,
        current,
        fresh_id,
    };
    let reply = broker.transactions.call(broker, &transactional_id, input).await?;
    if reply.error == ErrorCode::None {
        Ok((reply.producer_id, reply.producer_epoch))
    } else {
        Err(reply.error)
    }
}
