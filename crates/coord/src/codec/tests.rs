//! The bytes of every message, both ways, and malformed bytes.

use proptest::prelude::*;

use super::*;
use crate::range::SpaceId;
use crate::reply::{DeleteReply, KeyValue, PutReply, RangeReply, Reply, TxnOpReply, TxnReply};
use crate::request::{
    Alarm, AlarmKind, Compare, CompareResult, CompareTarget, DeleteRequest, Origin, PutRequest, RangeRequest,
    SortOrder, SortTarget, TxnOp, TxnRequest,
};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The content of old logs. A change here is a new format, not a new expectation.
#[test]
fn commands_of_format_one() {
    let put = PutRequest { prev_kv: true, lease: LeaseId(300), ..PutRequest::new("k", "val") };
    let txn = TxnRequest {
        compares: vec![
            Compare {
                key: "a".into(),
                range_end: "b".into(),
                target: CompareTarget::Mod(5),
                result: CompareResult::Greater,
            },
            Compare {
                key: "a".into(),
                range_end: Bytes::new(),
                target: CompareTarget::Value("v".into()),
                result: CompareResult::NotEqual,
            },
        ],
        success: vec![
            TxnOp::Put(PutRequest::new("a", "1")),
            TxnOp::Range(RangeRequest {
                limit: 2,
                revision: 3,
                keys_only: true,
                sort_order: SortOrder::Descend,
                sort_target: SortTarget::Mod,
                min_mod_revision: 4,
                ..RangeRequest::key("r")
            }),
        ],
        failure: vec![TxnOp::Txn(TxnRequest {
            success: vec![TxnOp::Delete(DeleteRequest::key("d"))],
            ..TxnRequest::default()
        })],
    };
    let cases = [
        (Command::client(Op::Put(put)), "01000101016b0376616cac02"),
        (
            Command::node(Op::Delete(DeleteRequest {
                key: "a".into(),
                range_end: "b".into(),
                prev_kv: true,
            })),
            "010102010161 0162",
        ),
        (
            Command::client(Op::Txn(txn)),
            "010003 02 01 0161 0162 02 05 03 0161 00 03 0176 02 02 00 0161 0131 00 01 01 02 03 0172 00 02 03 04 00 00 00 01 04 00 01 03 00 0164 00 00",
        ),
        (Command::client(Op::Compact { space: SpaceId::User, revision: 1_000 }), "01000400e807"),
        (Command::node(Op::Compact { space: SpaceId::System, revision: 1 }), "0101040101"),
        (Command::node(Op::AutoCompact { user: 9, system: 8 }), "0101050908"),
        (Command::client(Op::LeaseGrant { id: LeaseId(7), ttl_ms: 5_000 }), "010006078827"),
        (Command::client(Op::LeaseRevoke { id: LeaseId(-1) }), "010007ffffffffffffffffff01"),
        (Command::node(Op::LeaseCheckpoint { remaining: vec![(LeaseId(1), 2)] }), "010108010102"),
        (Command::client(Op::AlarmOn(Alarm { kind: AlarmKind::NoSpace, member: 3 })), "0100090103"),
        (Command::client(Op::AlarmOff(Alarm { kind: AlarmKind::Corrupt, member: 3 })), "01000a0203"),
        (Command::node(Op::Nothing), "01010b"),
    ];
    for (command, expected) in cases {
        let bytes = command.to_entry().unwrap();
        assert_eq!(hex(&bytes), expected.replace(' ', ""), "{command:?}");
        assert_eq!(Command::decode(bytes), Ok(command));
    }
}

#[test]
fn replies_of_format_one() {
    let kv = KeyValue {
        key: "k".into(),
        value: "v".into(),
        create_revision: 2,
        mod_revision: 3,
        version: 4,
        lease: LeaseId(5),
    };
    let range = RangeReply { revision: 9, kvs: vec![kv.clone()], more: true, count: 6 };
    let txn = TxnReply {
        revision: 9,
        succeeded: true,
        responses: vec![
            TxnOpReply::Range(range),
            TxnOpReply::Put(PutReply { revision: 9, prev_kv: None }),
            TxnOpReply::Delete(DeleteReply::default()),
            TxnOpReply::Txn(TxnReply::default()),
        ],
    };
    let cases = [
        (Reply::Error(Error::Compacted), "010008"),
        (
            Reply::Put(PutReply { revision: 9, prev_kv: Some(kv.clone()) }),
            "01 01 01 09 016b 0176 02 03 04 05",
        ),
        (
            Reply::Delete(DeleteReply { revision: 9, deleted: 1, prev_kvs: vec![kv] }),
            "01 02 09 01 01 016b 0176 02030405",
        ),
        (
            Reply::Txn(txn),
            "01 03 01 09 04 01 01 09 06 01 016b 0176 02030405 02 00 09 03 00 00 00 04 00 00 00",
        ),
        (Reply::Compacted { revision: 300 }, "0104ac02"),
        (Reply::LeaseGranted { revision: 1, id: LeaseId(2), ttl_ms: 3 }, "0105010203"),
        (Reply::LeaseRevoked { revision: 1 }, "010601"),
        (
            Reply::Alarms { revision: 1, changed: vec![Alarm { kind: AlarmKind::NoSpace, member: 2 }] },
            "010701010102",
        ),
        (Reply::Done { revision: 1 }, "010801"),
    ];
    for (reply, expected) in cases {
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        assert_eq!(hex(&bytes), expected.replace(' ', ""), "{reply:?}");
        assert_eq!(Reply::decode(Bytes::from(bytes)), Ok(reply));
    }
}

#[test]
fn every_error_round_trips() {
    for error in Error::ALL {
        let mut bytes = Vec::new();
        Reply::Error(error).encode(&mut bytes);
        assert_eq!(Reply::decode(Bytes::from(bytes)), Ok(Reply::Error(error)));
    }
}

#[test]
fn malformed_messages_are_refused() {
    let cases: [(&[u8], DecodeError); 9] = [
        (b"", DecodeError::Truncated),
        (b"\x02\x00\x0b", DecodeError::Format(2)),
        (b"\x01\x00\x0b\x00", DecodeError::Trailing(1)),
        (b"\x01\x02\x0b", DecodeError::Unknown { what: "origin", found: 2 }),
        (b"\x01\x00\x63", DecodeError::Unknown { what: "command", found: 0x63 }),
        (b"\x01\x00\x01\x08\x00\x00\x00", DecodeError::Unknown { what: "put flags", found: 8 }),
        (b"\x01\x00\x01\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", DecodeError::Truncated),
        (b"\x01\x00\x07\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", DecodeError::Number),
        (b"\x01\x01\x08\xff\xff\xff\xff\x0f", DecodeError::Truncated),
    ];
    for (bytes, expected) in cases {
        assert_eq!(Command::decode(Bytes::from_static(bytes)), Err(expected), "{bytes:x?}");
    }
}

#[test]
fn deep_nesting_is_refused_before_stack_overflow() {
    let mut bytes = vec![FORMAT, 0, 3];
    for _ in 0..100_000 {
        bytes.extend_from_slice(&[0, 1, 4]); // no comparisons, one operation, a transaction
    }
    assert_eq!(Command::decode(Bytes::from(bytes)), Err(DecodeError::Depth));
}

#[test]
fn request_size_is_limited() {
    let put = |length| Command::client(Op::Put(PutRequest::new("k", vec![0; length])));
    assert!(put(MAX_REQUEST_BYTES - 16).to_entry().is_ok());
    assert_eq!(put(MAX_REQUEST_BYTES).to_entry(), Err(Error::RequestTooLarge));
}

fn bytes() -> impl Strategy<Value = Bytes> {
    proptest::collection::vec(any::<u8>(), 0..6).prop_map(Bytes::from)
}

fn range() -> impl Strategy<Value = RangeRequest> {
    (bytes(), bytes(), any::<[i64; 6]>(), any::<bool>(), any::<bool>(), 0..3_usize, 0..5_usize).prop_map(
        |(key, range_end, numbers, keys_only, count_only, order, target)| RangeRequest {
            key,
            range_end,
            limit: numbers[0],
            revision: numbers[1],
            sort_order: [SortOrder::None, SortOrder::Ascend, SortOrder::Descend][order],
            sort_target: [
                SortTarget::Key,
                SortTarget::Version,
                SortTarget::Create,
                SortTarget::Mod,
                SortTarget::Value,
            ][target],
            keys_only,
            count_only,
            min_mod_revision: numbers[2],
            max_mod_revision: numbers[3],
            min_create_revision: numbers[4],
            max_create_revision: numbers[5],
        },
    )
}

proptest! {
    #[test]
    fn range_request_round_trips(request in range(), nested in any::<bool>()) {
        let mut out = Vec::new();
        request.encode(&mut out);
        prop_assert_eq!(RangeRequest::decode(Bytes::from(out)), Ok(request.clone()));
        let mut txn = TxnRequest { success: vec![TxnOp::Range(request)], ..TxnRequest::default() };
        if nested {
            txn = TxnRequest { failure: vec![TxnOp::Txn(txn)], ..TxnRequest::default() };
        }
        let command = Command { origin: Origin::Client, op: Op::Txn(txn) };
        prop_assert_eq!(Command::decode(command.to_entry().unwrap()), Ok(command));
    }

    #[test]
    fn random_bytes_are_refused_or_decode(tail in proptest::collection::vec(any::<u8>(), 0..60), tag in 0..12_u8) {
        let mut garbage = vec![FORMAT, 0, tag];
        garbage.extend(tail);
        if let Ok(command) = Command::decode(Bytes::from(garbage.clone())) {
            let entry = command.to_entry().unwrap();
            prop_assert_eq!(Command::decode(entry), Ok(command));
        }
        garbage.remove(1);
        if let Ok(reply) = Reply::decode(Bytes::from(garbage)) {
            let mut out = Vec::new();
            reply.encode(&mut out);
            prop_assert_eq!(Reply::decode(Bytes::from(out)), Ok(reply));
        }
    }
}
