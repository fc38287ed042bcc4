//! Encoding and decoding of commands and range requests.

use crate::range::SpaceId;
use crate::request::{
    Alarm, AlarmKind, Command, Compare, CompareResult, CompareTarget, DeleteRequest, Op, Origin, PutRequest,
    RangeRequest, SortOrder, SortTarget, TxnOp, TxnRequest,
};

use super::{
    DecodeError, Decoded, Input, MAX_DEPTH, put_bytes, put_flags, put_i64, put_lease, put_list, put_u64,
};

pub(super) fn put_command(out: &mut Vec<u8>, command: &Command) {
    out.push(match command.origin {
        Origin::Client => 0,
        Origin::Node => 1,
    });
    match &command.op {
        Op::Put(put) => {
            out.push(1);
            put_put(out, put);
        }
        Op::Delete(delete) => {
            out.push(2);
            put_delete(out, delete);
        }
        Op::Txn(txn) => {
            out.push(3);
            put_txn(out, txn);
        }
        Op::Compact { space, revision } => {
            out.push(4);
            put_flags(out, [*space == SpaceId::System]);
            put_i64(out, *revision);
        }
        Op::AutoCompact { user, system } => {
            out.push(5);
            put_i64(out, *user);
            put_i64(out, *system);
        }
        Op::LeaseGrant { id, ttl_ms } => {
            out.push(6);
            put_lease(out, *id);
            put_i64(out, *ttl_ms);
        }
        Op::LeaseRevoke { id } => {
            out.push(7);
            put_lease(out, *id);
        }
        Op::LeaseCheckpoint { remaining } => {
            out.push(8);
            put_list(out, remaining, |out, (id, remaining_ms)| {
                put_lease(out, *id);
                put_i64(out, *remaining_ms);
            });
        }
        Op::AlarmOn(alarm) => {
            out.push(9);
            put_alarm(out, alarm);
        }
        Op::AlarmOff(alarm) => {
            out.push(10);
            put_alarm(out, alarm);
        }
        Op::Nothing => out.push(11),
    }
}

pub(super) fn command(input: &mut Input) -> Decoded<Command> {
    let origin = match input.u8()? {
        0 => Origin::Client,
        1 => Origin::Node,
        other => return unknown("origin", other),
    };
    let op = match input.u8()? {
        1 => Op::Put(put(input)?),
        2 => Op::Delete(delete(input)?),
        3 => Op::Txn(txn(input, 0)?),
        4 => Op::Compact { space: space(input)?, revision: input.i64()? },
        5 => Op::AutoCompact { user: input.i64()?, system: input.i64()? },
        6 => Op::LeaseGrant { id: input.lease()?, ttl_ms: input.i64()? },
        7 => Op::LeaseRevoke { id: input.lease()? },
        8 => Op::LeaseCheckpoint { remaining: input.list(|input| Ok((input.lease()?, input.i64()?)))? },
        9 => Op::AlarmOn(alarm(input)?),
        10 => Op::AlarmOff(alarm(input)?),
        11 => Op::Nothing,
        other => return unknown("command", other),
    };
    Ok(Command { origin, op })
}

fn unknown<T>(what: &'static str, found: u8) -> Decoded<T> {
    Err(DecodeError::Unknown { what, found: found.into() })
}

fn space(input: &mut Input) -> Decoded<SpaceId> {
    let [system] = input.flags("space")?;
    Ok(if system { SpaceId::System } else { SpaceId::User })
}

fn put_put(out: &mut Vec<u8>, put: &PutRequest) {
    put_flags(out, [put.prev_kv, put.ignore_value, put.ignore_lease]);
    put_bytes(out, &put.key);
    put_bytes(out, &put.value);
    put_lease(out, put.lease);
}

fn put(input: &mut Input) -> Decoded<PutRequest> {
    let [prev_kv, ignore_value, ignore_lease] = input.flags("put flags")?;
    let (key, value, lease) = (input.bytes()?, input.bytes()?, input.lease()?);
    Ok(PutRequest { key, value, lease, prev_kv, ignore_value, ignore_lease })
}

fn put_delete(out: &mut Vec<u8>, delete: &DeleteRequest) {
    put_flags(out, [delete.prev_kv]);
    put_bytes(out, &delete.key);
    put_bytes(out, &delete.range_end);
}

fn delete(input: &mut Input) -> Decoded<DeleteRequest> {
    let [prev_kv] = input.flags("delete flags")?;
    Ok(DeleteRequest { key: input.bytes()?, range_end: input.bytes()?, prev_kv })
}

pub(super) fn put_range(out: &mut Vec<u8>, range: &RangeRequest) {
    put_flags(out, [range.keys_only, range.count_only]);
    out.push(match range.sort_order {
        SortOrder::None => 0,
        SortOrder::Ascend => 1,
        SortOrder::Descend => 2,
    });
    out.push(match range.sort_target {
        SortTarget::Key => 0,
        SortTarget::Version => 1,
        SortTarget::Create => 2,
        SortTarget::Mod => 3,
        SortTarget::Value => 4,
    });
    put_bytes(out, &range.key);
    put_bytes(out, &range.range_end);
    for number in [
        range.limit,
        range.revision,
        range.min_mod_revision,
        range.max_mod_revision,
        range.min_create_revision,
        range.max_create_revision,
    ] {
        put_i64(out, number);
    }
}

pub(super) fn range(input: &mut Input) -> Decoded<RangeRequest> {
    let [keys_only, count_only] = input.flags("range flags")?;
    let sort_order = match input.u8()? {
        0 => SortOrder::None,
        1 => SortOrder::Ascend,
        2 => SortOrder::Descend,
        other => return unknown("sort order", other),
    };
    let sort_target = match input.u8()? {
        0 => SortTarget::Key,
        1 => SortTarget::Version,
        2 => SortTarget::Create,
        3 => SortTarget::Mod,
        4 => SortTarget::Value,
        other => return unknown("sort target", other),
    };
    Ok(RangeRequest {
        key: input.bytes()?,
        range_end: input.bytes()?,
        limit: input.i64()?,
        revision: input.i64()?,
        sort_order,
        sort_target,
        keys_only,
        count_only,
        min_mod_revision: input.i64()?,
        max_mod_revision: input.i64()?,
        min_create_revision: input.i64()?,
        max_create_revision: input.i64()?,
    })
}

fn put_txn(out: &mut Vec<u8>, txn: &TxnRequest) {
    put_list(out, &txn.compares, put_compare);
    put_list(out, &txn.success, put_txn_op);
    put_list(out, &txn.failure, put_txn_op);
}

fn txn(input: &mut Input, depth: usize) -> Decoded<TxnRequest> {
    if depth > MAX_DEPTH {
        return Err(DecodeError::Depth);
    }
    Ok(TxnRequest {
        compares: input.list(compare)?,
        success: input.list(|input| txn_op(input, depth))?,
        failure: input.list(|input| txn_op(input, depth))?,
    })
}

fn put_txn_op(out: &mut Vec<u8>, op: &TxnOp) {
    match op {
        TxnOp::Range(range) => {
            out.push(1);
            put_range(out, range);
        }
        TxnOp::Put(put) => {
            out.push(2);
            put_put(out, put);
        }
        TxnOp::Delete(delete) => {
            out.push(3);
            put_delete(out, delete);
        }
        TxnOp::Txn(txn) => {
            out.push(4);
            put_txn(out, txn);
        }
    }
}

fn txn_op(input: &mut Input, depth: usize) -> Decoded<TxnOp> {
    Ok(match input.u8()? {
        1 => TxnOp::Range(range(input)?),
        2 => TxnOp::Put(put(input)?),
        3 => TxnOp::Delete(delete(input)?),
        4 => TxnOp::Txn(txn(input, depth + 1)?),
        other => return unknown("txn operation", other),
    })
}

fn put_compare(out: &mut Vec<u8>, compare: &Compare) {
    out.push(match compare.result {
        CompareResult::Equal => 0,
        CompareResult::Greater => 1,
        CompareResult::Less => 2,
        CompareResult::NotEqual => 3,
    });
    put_bytes(out, &compare.key);
    put_bytes(out, &compare.range_end);
    let mut number = |tag: u64, given: i64| {
        put_u64(out, tag);
        put_i64(out, given);
    };
    match &compare.target {
        CompareTarget::Version(given) => number(0, *given),
        CompareTarget::Create(given) => number(1, *given),
        CompareTarget::Mod(given) => number(2, *given),
        CompareTarget::Value(given) => {
            put_u64(out, 3);
            put_bytes(out, given);
        }
        CompareTarget::Lease(given) => number(4, given.0),
    }
}

fn compare(input: &mut Input) -> Decoded<Compare> {
    let result = match input.u8()? {
        0 => CompareResult::Equal,
        1 => CompareResult::Greater,
        2 => CompareResult::Less,
        3 => CompareResult::NotEqual,
        other => return unknown("comparison", other),
    };
    let (key, range_end) = (input.bytes()?, input.bytes()?);
    let target = match input.u8()? {
        0 => CompareTarget::Version(input.i64()?),
        1 => CompareTarget::Create(input.i64()?),
        2 => CompareTarget::Mod(input.i64()?),
        3 => CompareTarget::Value(input.bytes()?),
        4 => CompareTarget::Lease(input.lease()?),
        other => return unknown("compare target", other),
    };
    Ok(Compare { key, range_end, target, result })
}

pub(super) fn put_alarm(out: &mut Vec<u8>, alarm: &Alarm) {
    out.push(match alarm.kind {
        AlarmKind::NoSpace => 1,
        AlarmKind::Corrupt => 2,
    });
    put_u64(out, alarm.member);
}

pub(super) fn alarm(input: &mut Input) -> Decoded<Alarm> {
    let kind = match input.u8()? {
        1 => AlarmKind::NoSpace,
        2 => AlarmKind::Corrupt,
        other => return unknown("alarm", other),
    };
    Ok(Alarm { kind, member: input.u64()? })
}
