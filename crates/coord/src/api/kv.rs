//! The KV service: range, put, delete, txn, compaction.

use moim_wire_grpc::Status;
use moim_wire_grpc::etcd as wire;

use super::convert::{self, CLIENT_SPACE};
use super::{Api, status};
use crate::reply::Reply;
use crate::request::{Command, Op, Origin};

pub(super) async fn range(api: &Api, request: wire::RangeRequest) -> Result<wire::RangeResponse, Status> {
    let (request, serializable) = convert::range(request)?;
    let reply = api.coordinator.range(request, serializable).await?;
    Ok(convert::range_reply(api.header(reply.revision), reply))
}

pub(super) async fn put(api: &Api, request: wire::PutRequest) -> Result<wire::PutResponse, Status> {
    let command = Command::client(Op::Put(convert::put(request)));
    match api.coordinator.execute(command).await? {
        Reply::Put(reply) => Ok(convert::put_reply(api.header(reply.revision), reply)),
        _ => Err(status::mismatched()),
    }
}

pub(super) async fn delete_range(
    api: &Api,
    request: wire::DeleteRangeRequest,
) -> Result<wire::DeleteRangeResponse, Status> {
    let command = Command::client(Op::Delete(convert::delete(request)));
    match api.coordinator.execute(command).await? {
        Reply::Delete(reply) => Ok(convert::delete_reply(api.header(reply.revision), reply)),
        _ => Err(status::mismatched()),
    }
}

pub(super) async fn txn(api: &Api, request: wire::TxnRequest) -> Result<wire::TxnResponse, Status> {
    let serializable = convert::is_serializable(&request);
    let reply = api.coordinator.txn(Origin::Client, convert::txn(request)?, serializable).await?;
    Ok(convert::txn_reply(api.header(reply.revision), reply))
}

/// Compacts history of the user keys. Only the leader compacts the system keys.
pub(super) async fn compact(
    api: &Api,
    request: wire::CompactionRequest,
) -> Result<wire::CompactionResponse, Status> {
    let revision =
        api.coordinator.compact(Origin::Client, CLIENT_SPACE, request.revision, request.physical).await?;
    Ok(wire::CompactionResponse { header: Some(api.header(revision)) })
}
