//! AddOffsetsToTxn: adds a group's partition of `__consumer_offsets` to the transaction.

use std::sync::Arc;

use moim_wire_kafka::messages::add_offsets_to_txn::{AddOffsetsToTxnRequest, AddOffsetsToTxnResponse};

use crate::broker::Broker;
use crate::dispatch::Request;
use crate::handlers::shared;
use crate::transactions::Input;

pub(crate) async fn handle(
    broker: Arc<Broker>,
    request: AddOffsetsToTxnRequest,
    context: Request,
) -> AddOffsetsToTxnResponse {
    let code = match broker.groups.ensure_topic(&broker).await {
        Err(code) => code,
        Ok(()) => {
            let id = shared(&request.transactional_id);
            let input = |token| Input::AddOffsets {
                token,
                version: context.version,
                transactional_id: Arc::clone(&id),
                producer_id: request.producer_id,
                producer_epoch: request.producer_epoch,
                offsets_partition: broker.groups.partition_of(&request.group_id),
            };
            broker
                .transactions
                .call_next(&broker, &id, input)
                .await
                .map_or_else(|code| code, |reply| reply.error)
        }
    };
    AddOffsetsToTxnResponse { error_code: code as i16, ..Default::default() }
}
