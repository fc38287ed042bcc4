//! EndTxn: responds when the decision is durable; the markers follow. From version 5 on the response carries the
//! producer id and epoch of the next transaction (transaction version 2).

use std::sync::Arc;

use moim_wire_kafka::messages::end_txn::{EndTxnRequest, EndTxnResponse};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::shared;
use crate::transactions::{Input, LAST_EPOCH, Reply};

pub(crate) async fn handle(broker: Arc<Broker>, request: EndTxnRequest, context: Request) -> EndTxnResponse {
    let id = shared(&request.transactional_id);
    // Rare: the epochs of the producer id are exhausted.
    let fresh_id = if context.version >= 5 && request.producer_epoch >= LAST_EPOCH {
        match broker.producer_ids.next().await {
            Ok(fresh_id) => fresh_id,
            Err(code) => return EndTxnResponse { error_code: code as i16, ..Default::default() },
        }
    } else {
        -1
    };
    let input = |token| Input::EndTxn {
        token,
        version: context.version,
        transactional_id: Arc::clone(&id),
        producer_id: request.producer_id,
        producer_epoch: request.producer_epoch,
        commit: request.committed,
        fresh_id,
    };
    match broker.transactions.call(&broker, &id, input).await {
        Ok(Reply { error, producer_id, producer_epoch }) => {
            EndTxnResponse { error_code: error as i16, producer_id, producer_epoch, ..Default::default() }
        }
        Err(code) => EndTxnResponse { error_code: code as i16, ..Default::default() },
    }
}
