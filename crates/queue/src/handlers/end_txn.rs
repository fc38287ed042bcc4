//! EndTxn: answered when the decision is durable; the markers follow.

use std::sync::Arc;

use moim_wire_kafka::messages::end_txn::{EndTxnRequest, EndTxnResponse};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::shared;
use crate::transactions::Input;

pub(crate) async fn handle(broker: Arc<Broker>, request: EndTxnRequest, context: Request) -> EndTxnResponse {
    let id = shared(&request.transactional_id);
    let input = |token| Input::EndTxn {
        token,
        version: context.version,
        transactional_id: Arc::clone(&id),
        producer_id: request.producer_id,
        producer_epoch: request.producer_epoch,
        commit: request.committed,
    };
    let code =
        broker.transactions.call(&broker, &id, input).await.map_or_else(|code| code, |reply| reply.error);
    EndTxnResponse { error_code: code as i16, ..Default::default() }
}
