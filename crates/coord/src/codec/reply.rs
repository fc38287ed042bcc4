//! Encoding and decoding of replies.

use crate::error::Error;
use crate::reply::{DeleteReply, KeyValue, PutReply, RangeReply, Reply, TxnOpReply, TxnReply};

use super::request::{alarm, put_alarm};
use super::{DecodeError, Decoded, Input, MAX_DEPTH, put_bytes, put_flags, put_i64, put_lease, put_list};

pub(super) fn put_reply(out: &mut Vec<u8>, reply: &Reply) {
    match reply {
        Reply::Error(error) => out.extend_from_slice(&[0, *error as u8]),
        Reply::Put(put) => {
            out.push(1);
            put_put_reply(out, put);
        }
        Reply::Delete(delete) => {
            out.push(2);
            put_delete_reply(out, delete);
        }
        Reply::Txn(txn) => {
            out.push(3);
            put_txn_reply(out, txn);
        }
        Reply::Compacted { revision } => {
            out.push(4);
            put_i64(out, *revision);
        }
        Reply::LeaseGranted { revision, id, ttl_ms } => {
            out.push(5);
            put_i64(out, *revision);
            put_lease(out, *id);
            put_i64(out, *ttl_ms);
        }
        Reply::LeaseRevoked { revision } => {
            out.push(6);
            put_i64(out, *revision);
        }
        Reply::Alarms { revision, changed } => {
            out.push(7);
            put_i64(out, *revision);
            put_list(out, changed, put_alarm);
        }
        Reply::Done { revision } => {
            out.push(8);
            put_i64(out, *revision);
        }
    }
}

pub(super) fn reply(input: &mut Input) -> Decoded<Reply> {
    Ok(match input.u8()? {
        0 => {
            let number = input.u8()?;
            let error = Error::ALL.into_iter().find(|error| *error as u8 == number);
            Reply::Error(error.ok_or(DecodeError::Unknown { what: "error", found: number.into() })?)
        }
        1 => Reply::Put(put_reply_in(input)?),
        2 => Reply::Delete(delete_reply(input)?),
        3 => Reply::Txn(txn_reply(input, 0)?),
        4 => Reply::Compacted { revision: input.i64()? },
        5 => Reply::LeaseGranted { revision: input.i64()?, id: input.lease()?, ttl_ms: input.i64()? },
        6 => Reply::LeaseRevoked { revision: input.i64()? },
        7 => Reply::Alarms { revision: input.i64()?, changed: input.list(alarm)? },
        8 => Reply::Done { revision: input.i64()? },
        other => return Err(DecodeError::Unknown { what: "reply", found: other.into() }),
    })
}

fn put_kv(out: &mut Vec<u8>, kv: &KeyValue) {
    put_bytes(out, &kv.key);
    put_bytes(out, &kv.value);
    put_i64(out, kv.create_revision);
    put_i64(out, kv.mod_revision);
    put_i64(out, kv.version);
    put_lease(out, kv.lease);
}

fn kv(input: &mut Input) -> Decoded<KeyValue> {
    Ok(KeyValue {
        key: input.bytes()?,
        value: input.bytes()?,
        create_revision: input.i64()?,
        mod_revision: input.i64()?,
        version: input.i64()?,
        lease: input.lease()?,
    })
}

pub(super) fn put_range_reply(out: &mut Vec<u8>, range: &RangeReply) {
    put_flags(out, [range.more]);
    put_i64(out, range.revision);
    put_i64(out, range.count);
    put_list(out, &range.kvs, put_kv);
}

pub(super) fn range_reply(input: &mut Input) -> Decoded<RangeReply> {
    let [more] = input.flags("range reply flags")?;
    let (revision, count) = (input.i64()?, input.i64()?);
    Ok(RangeReply { revision, kvs: input.list(kv)?, more, count })
}

fn put_put_reply(out: &mut Vec<u8>, put: &PutReply) {
    put_flags(out, [put.prev_kv.is_some()]);
    put_i64(out, put.revision);
    if let Some(prev) = &put.prev_kv {
        put_kv(out, prev);
    }
}

fn put_reply_in(input: &mut Input) -> Decoded<PutReply> {
    let [has_prev] = input.flags("put reply flags")?;
    let revision = input.i64()?;
    Ok(PutReply { revision, prev_kv: if has_prev { Some(kv(input)?) } else { None } })
}

fn put_delete_reply(out: &mut Vec<u8>, delete: &DeleteReply) {
    put_i64(out, delete.revision);
    put_i64(out, delete.deleted);
    put_list(out, &delete.prev_kvs, put_kv);
}

fn delete_reply(input: &mut Input) -> Decoded<DeleteReply> {
    Ok(DeleteReply { revision: input.i64()?, deleted: input.i64()?, prev_kvs: input.list(kv)? })
}

fn put_txn_reply(out: &mut Vec<u8>, txn: &TxnReply) {
    put_flags(out, [txn.succeeded]);
    put_i64(out, txn.revision);
    put_list(out, &txn.responses, |out, response| match response {
        TxnOpReply::Range(range) => {
            out.push(1);
            put_range_reply(out, range);
        }
        TxnOpReply::Put(put) => {
            out.push(2);
            put_put_reply(out, put);
        }
        TxnOpReply::Delete(delete) => {
            out.push(3);
            put_delete_reply(out, delete);
        }
        TxnOpReply::Txn(txn) => {
            out.push(4);
            put_txn_reply(out, txn);
        }
    });
}

fn txn_reply(input: &mut Input, depth: usize) -> Decoded<TxnReply> {
    if depth > MAX_DEPTH {
        return Err(DecodeError::Depth);
    }
    let [succeeded] = input.flags("txn reply flags")?;
    let revision = input.i64()?;
    let responses = input.list(|input| {
        Ok(match input.u8()? {
            1 => TxnOpReply::Range(range_reply(input)?),
            2 => TxnOpReply::Put(put_reply_in(input)?),
            3 => TxnOpReply::Delete(delete_reply(input)?),
            4 => TxnOpReply::Txn(txn_reply(input, depth + 1)?),
            other => return Err(DecodeError::Unknown { what: "txn reply", found: other.into() }),
        })
    })?;
    Ok(TxnReply { revision, succeeded, responses })
}
