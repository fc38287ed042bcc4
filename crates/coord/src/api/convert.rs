//! Conversion between protocol messages and the types of the state machine. Byte strings are moved, not copied.

use moim_wire_grpc::etcd as wire;
use moim_wire_grpc::{Code, Status};

use crate::error::Error;
use crate::reply::{DeleteReply, KeyValue, PutReply, RangeReply, TxnOpReply, TxnReply};
use crate::request::{
    Compare, CompareResult, CompareTarget, DeleteRequest, MAX_TXN_OPS, PutRequest, RangeRequest, SortOrder,
    SortTarget, TxnOp, TxnRequest,
};
use crate::watch::Event;
use crate::{LeaseId, SpaceId};

/// A range read, and whether it is serializable.
pub(super) fn range(request: wire::RangeRequest) -> Result<(RangeRequest, bool), Error> {
    if request.key.is_empty() {
        return Err(Error::EmptyKey);
    }
    let sort_order = match request.sort_order {
        0 => SortOrder::None,
        1 => SortOrder::Ascend,
        2 => SortOrder::Descend,
        _ => return Err(Error::InvalidSortOption),
    };
    let sort_target = match request.sort_target {
        0 => SortTarget::Key,
        1 => SortTarget::Version,
        2 => SortTarget::Create,
        3 => SortTarget::Mod,
        4 => SortTarget::Value,
        _ => return Err(Error::InvalidSortOption),
    };
    let range = RangeRequest {
        key: request.key,
        range_end: request.range_end,
        limit: request.limit.max(0),
        revision: request.revision,
        sort_order,
        sort_target,
        keys_only: request.keys_only,
        count_only: request.count_only,
        min_mod_revision: request.min_mod_revision,
        max_mod_revision: request.max_mod_revision,
        min_create_revision: request.min_create_revision,
        max_create_revision: request.max_create_revision,
    };
    Ok((range, request.serializable))
}

pub(super) fn put(request: wire::PutRequest) -> PutRequest {
    PutRequest {
        key: request.key,
        value: request.value,
        lease: LeaseId(request.lease),
        prev_kv: request.prev_kv,
        ignore_value: request.ignore_value,
        ignore_lease: request.ignore_lease,
    }
}

pub(super) fn delete(request: wire::DeleteRangeRequest) -> DeleteRequest {
    DeleteRequest { key: request.key, range_end: request.range_end, prev_kv: request.prev_kv }
}

/// A transaction. Its nesting is bounded by the decoder. Of several errors the first one that etcd finds is returned:
/// too many operations, then compares and operations in order, a nested transaction at its position.
pub(super) fn txn(request: wire::TxnRequest) -> Result<TxnRequest, Status> {
    bounded_txn(request, MAX_TXN_OPS)
}

fn bounded_txn(request: wire::TxnRequest, allowed: usize) -> Result<TxnRequest, Status> {
    let ops = request.compare.len().max(request.success.len()).max(request.failure.len());
    let left = allowed.checked_sub(ops).ok_or(Error::TooManyOps)?;
    if request.compare.iter().any(|compare| compare.key.is_empty()) {
        return Err(Error::EmptyKey.into());
    }
    let op = |one| op(one, left);
    Ok(TxnRequest {
        compares: request.compare.into_iter().map(compare).collect::<Result<_, _>>()?,
        success: request.success.into_iter().map(op).collect::<Result<_, _>>()?,
        failure: request.failure.into_iter().map(op).collect::<Result<_, _>>()?,
    })
}

/// True if a read-only transaction may be served from this node's applied state: all its reads are serializable. A
/// transaction with compares and no reads is linearizable.
pub(super) fn is_serializable(request: &wire::TxnRequest) -> bool {
    let mut ops = request.success.iter().chain(&request.failure).peekable();
    ops.peek().is_some()
        && ops.all(|op| matches!(&op.op, Some(wire::RequestOpKind::Range(range)) if range.serializable))
}

fn op(op: wire::RequestOp, allowed: usize) -> Result<TxnOp, Status> {
    use wire::RequestOpKind as Kind;
    Ok(match op.op {
        Some(Kind::Range(request)) => TxnOp::Range(range(request)?.0),
        Some(Kind::Put(request)) => {
            let put = put(request);
            put.check()?;
            TxnOp::Put(put)
        }
        Some(Kind::DeleteRange(request)) if request.key.is_empty() => return Err(Error::EmptyKey.into()),
        Some(Kind::DeleteRange(request)) => TxnOp::Delete(delete(request)),
        Some(Kind::Txn(request)) => TxnOp::Txn(bounded_txn(request, allowed)?),
        // etcd's error for an empty operation.
        None => return Err(Error::KeyNotFound.into()),
    })
}

/// A compare. If its value is missing, or belongs to another target, it compares with 0 or with empty bytes.
fn compare(compare: wire::Compare) -> Result<Compare, Status> {
    use wire::CompareValue as Value;
    let value = compare.value;
    let target = match (compare.target, value) {
        (0, Some(Value::Version(version))) => CompareTarget::Version(version),
        (0, _) => CompareTarget::Version(0),
        (1, Some(Value::CreateRevision(revision))) => CompareTarget::Create(revision),
        (1, _) => CompareTarget::Create(0),
        (2, Some(Value::ModRevision(revision))) => CompareTarget::Mod(revision),
        (2, _) => CompareTarget::Mod(0),
        (3, Some(Value::Value(bytes))) => CompareTarget::Value(bytes),
        (3, _) => CompareTarget::Value(bytes::Bytes::new()),
        (4, Some(Value::Lease(lease))) => CompareTarget::Lease(LeaseId(lease)),
        (4, _) => CompareTarget::Lease(LeaseId::NONE),
        (other, _) => return Err(unknown("compare target", other)),
    };
    let result = match compare.result {
        0 => CompareResult::Equal,
        1 => CompareResult::Greater,
        2 => CompareResult::Less,
        3 => CompareResult::NotEqual,
        other => return Err(unknown("compare result", other)),
    };
    Ok(Compare { key: compare.key, range_end: compare.range_end, target, result })
}

fn unknown(what: &str, number: i32) -> Status {
    Status::new(Code::InvalidArgument, format!("moim: unknown {what} {number}"))
}

pub(super) fn key_value(kv: KeyValue) -> wire::KeyValue {
    wire::KeyValue {
        key: kv.key,
        create_revision: kv.create_revision,
        mod_revision: kv.mod_revision,
        version: kv.version,
        value: kv.value,
        lease: kv.lease.0,
    }
}

fn key_values(kvs: Vec<KeyValue>) -> Vec<wire::KeyValue> {
    kvs.into_iter().map(key_value).collect()
}

pub(super) fn range_reply(header: wire::ResponseHeader, reply: RangeReply) -> wire::RangeResponse {
    wire::RangeResponse {
        header: Some(header),
        kvs: key_values(reply.kvs),
        more: reply.more,
        count: reply.count,
    }
}

pub(super) fn put_reply(header: wire::ResponseHeader, reply: PutReply) -> wire::PutResponse {
    wire::PutResponse { header: Some(header), prev_kv: reply.prev_kv.map(key_value) }
}

pub(super) fn delete_reply(header: wire::ResponseHeader, reply: DeleteReply) -> wire::DeleteRangeResponse {
    wire::DeleteRangeResponse {
        header: Some(header),
        deleted: reply.deleted,
        prev_kvs: key_values(reply.prev_kvs),
    }
}

pub(super) fn txn_reply(header: wire::ResponseHeader, reply: TxnReply) -> wire::TxnResponse {
    let responses = reply.responses.into_iter().map(op_reply).collect();
    wire::TxnResponse { header: Some(header), succeeded: reply.succeeded, responses }
}

/// The responses inside a transaction have a header with only a revision.
fn op_reply(reply: TxnOpReply) -> wire::ResponseOp {
    use wire::ResponseOpKind as Kind;
    let header = |revision| wire::ResponseHeader { revision, ..wire::ResponseHeader::default() };
    let op = match reply {
        TxnOpReply::Range(reply) => Kind::Range(range_reply(header(reply.revision), reply)),
        TxnOpReply::Put(reply) => Kind::Put(put_reply(header(reply.revision), reply)),
        TxnOpReply::Delete(reply) => Kind::DeleteRange(delete_reply(header(reply.revision), reply)),
        TxnOpReply::Txn(reply) => Kind::Txn(txn_reply(header(reply.revision), reply)),
    };
    wire::ResponseOp { op: Some(op) }
}

pub(super) fn event(event: Event) -> wire::Event {
    let kind = if event.is_delete { wire::EventType::Delete } else { wire::EventType::Put };
    wire::Event { kind: kind.into(), kv: Some(key_value(event.kv)), prev_kv: event.prev_kv.map(key_value) }
}

/// The key space of client keys; compaction and hashes apply to it.
pub(super) const CLIENT_SPACE: SpaceId = SpaceId::User;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn txn_with_several_errors_reports_the_first_that_etcd_finds() {
        use wire::RequestOpKind as Kind;
        let step = |op| wire::RequestOp { op: Some(op) };
        let none = || wire::RequestOp { op: None };
        let put =
            |key: &'static str| step(Kind::Put(wire::PutRequest { key: key.into(), ..Default::default() }));
        let bad_sort =
            || step(Kind::Range(wire::RangeRequest { key: "k".into(), sort_order: 9, ..Default::default() }));
        let no_key_bad_sort =
            || step(Kind::Range(wire::RangeRequest { sort_order: 9, ..Default::default() }));
        let nested = |success| step(Kind::Txn(wire::TxnRequest { success, ..Default::default() }));
        let compare = |key: &'static str| wire::Compare { key: key.into(), ..Default::default() };
        let many = |first| {
            let mut ops = vec![first];
            ops.resize_with(MAX_TXN_OPS + 1, || put("k"));
            ops
        };
        let cases = [
            ("too many comes before an empty operation", vec![], many(none()), Error::TooManyOps),
            ("a condition comes before the steps", vec![compare("")], vec![none()], Error::EmptyKey),
            ("steps come in order", vec![], vec![put(""), bad_sort()], Error::EmptyKey),
            ("steps come in order", vec![], vec![bad_sort(), put("")], Error::InvalidSortOption),
            ("steps come in order", vec![], vec![none(), put("")], Error::KeyNotFound),
            ("the key comes before the sort option", vec![], vec![no_key_bad_sort()], Error::EmptyKey),
            ("a nested one where it stands", vec![], vec![nested(vec![put("")]), none()], Error::EmptyKey),
            (
                "a nested one has what is left",
                vec![],
                vec![nested((0..MAX_TXN_OPS).map(|_| put("k")).collect()), none()],
                Error::TooManyOps,
            ),
        ];
        for (name, compare, success, expected) in cases {
            let failure = vec![none()];
            let found = txn(wire::TxnRequest { compare, success, failure }).unwrap_err();
            assert_eq!(found, Status::from(expected), "{name}");
        }
    }

    #[test]
    fn txn_is_serializable_only_when_all_its_reads_are() {
        let read = |serializable| wire::RequestOp {
            op: Some(wire::RequestOpKind::Range(wire::RangeRequest { serializable, ..Default::default() })),
        };
        let put = || wire::RequestOp { op: Some(wire::RequestOpKind::Put(wire::PutRequest::default())) };
        let cases = [
            (vec![], vec![], false),
            (vec![read(true)], vec![], true),
            (vec![read(true)], vec![read(true), read(true)], true),
            (vec![read(true)], vec![read(false)], false),
            (vec![read(true), put()], vec![], false),
        ];
        for (success, failure, expected) in cases {
            let txn = wire::TxnRequest { success, failure, ..Default::default() };
            assert_eq!(is_serializable(&txn), expected, "{txn:?}");
        }
    }
}
