//! The checks that need no state, as tables.

use super::*;

fn put(key: &'static str) -> TxnOp {
    TxnOp::Put(PutRequest::new(key, "v"))
}

fn delete(key: &'static str, end: &'static str) -> TxnOp {
    TxnOp::Delete(DeleteRequest { key: key.into(), range_end: end.into(), prev_kv: false })
}

fn get(key: &'static str) -> TxnOp {
    TxnOp::Range(RangeRequest::key(key))
}

fn nested(success: Vec<TxnOp>, failure: Vec<TxnOp>) -> TxnOp {
    TxnOp::Txn(TxnRequest { compares: vec![], success, failure })
}

fn txn(success: Vec<TxnOp>) -> TxnRequest {
    TxnRequest { compares: vec![], success, failure: vec![] }
}

#[test]
fn txn_with_duplicate_key_is_refused() {
    let duplicate = Err(Error::DuplicateKey);
    let cases: Vec<(&str, Vec<TxnOp>, Result<(), Error>)> = vec![
        ("two keys", vec![put("a"), put("b")], Ok(())),
        ("put twice", vec![put("a"), put("a")], duplicate),
        ("put and delete", vec![put("b"), delete("a", "c")], duplicate),
        ("delete and put", vec![delete("a", "c"), put("b")], duplicate),
        ("put at the end of a deletion", vec![delete("a", "c"), put("c")], Ok(())),
        ("put past a single deletion", vec![delete("a", ""), put("aa")], Ok(())),
        ("from-key deletion, which etcd lets pass", vec![delete("b", "\0"), put("z")], Ok(())),
        ("put, then from-key deletion", vec![put("z"), delete("b", "\0")], Ok(())),
        ("from-key deletion beside another", vec![delete("b", "\0"), delete("a", "c"), put("b")], duplicate),
        ("from-key deletion, below", vec![delete("b", "\0"), put("a")], Ok(())),
        ("empty deletion", vec![delete("c", "a"), put("b")], Ok(())),
        ("deletions overlap", vec![delete("a", "c"), delete("b", "d")], Ok(())),
        ("deletions merge", vec![delete("a", "c"), delete("e", "g"), delete("b", "f"), put("d")], duplicate),
        ("the farther end", vec![delete("a", "c"), delete("e", "g"), delete("b", "f"), put("f")], duplicate),
        ("one inside another", vec![delete("a", "g"), delete("b", "c"), put("d")], duplicate),
        ("between two", vec![delete("a", "b"), delete("c", "d"), put("b")], Ok(())),
        ("put and get", vec![put("a"), get("a"), get("a")], Ok(())),
        ("nested put meets outer put", vec![nested(vec![put("a")], vec![]), put("a")], duplicate),
        ("branches exclude each other", vec![nested(vec![put("a")], vec![put("a")])], Ok(())),
        (
            "else meets sibling",
            vec![nested(vec![put("a")], vec![]), nested(vec![], vec![put("a")])],
            duplicate,
        ),
        ("nested put, outer delete", vec![nested(vec![put("a")], vec![]), delete("a", "")], duplicate),
        ("nested delete, outer put", vec![nested(vec![delete("a", "")], vec![]), put("a")], duplicate),
        (
            "nested delete then nested put",
            vec![nested(vec![delete("a", "")], vec![]), nested(vec![put("a")], vec![])],
            duplicate,
        ),
        (
            "nested put then nested delete",
            vec![nested(vec![put("a")], vec![]), nested(vec![delete("a", "")], vec![])],
            Ok(()),
        ),
    ];
    for (name, ops, expected) in cases {
        assert_eq!(txn(ops.clone()).check(), expected, "{name}");
        let failing = TxnRequest { compares: vec![], success: vec![], failure: ops };
        assert_eq!(failing.check(), expected, "{name}, in the other branch");
    }
}

#[test]
fn txn_has_at_most_128_operations_along_each_path() {
    let gets = |n: usize| vec![get("k"); n];
    assert_eq!(txn(gets(128)).check(), Ok(()));
    assert_eq!(txn(gets(129)).check(), Err(Error::TooManyOps));
    let compare = Compare {
        key: "k".into(),
        range_end: Bytes::new(),
        target: CompareTarget::Version(0),
        result: CompareResult::Equal,
    };
    let compares = TxnRequest { compares: vec![compare; 129], ..TxnRequest::default() };
    assert_eq!(compares.check(), Err(Error::TooManyOps));
    assert_eq!(txn(vec![nested(gets(127), vec![])]).check(), Ok(()));
    assert_eq!(txn(vec![nested(gets(128), vec![])]).check(), Err(Error::TooManyOps));
    assert_eq!(TxnRequest { failure: gets(129), ..TxnRequest::default() }.check(), Err(Error::TooManyOps));
}

#[test]
fn empty_keys_and_contradictory_flags_are_refused() {
    let cases = [
        (PutRequest::new("", "v"), Err(Error::EmptyKey)),
        (PutRequest { ignore_value: true, ..PutRequest::new("k", "v") }, Err(Error::ValueProvided)),
        (PutRequest { ignore_value: true, ..PutRequest::new("k", "") }, Ok(())),
        (
            PutRequest { ignore_lease: true, lease: LeaseId(7), ..PutRequest::new("k", "v") },
            Err(Error::LeaseProvided),
        ),
        (PutRequest { ignore_lease: true, ..PutRequest::new("k", "v") }, Ok(())),
    ];
    for (put, expected) in cases {
        assert_eq!(Command::client(Op::Put(put.clone())).check(), expected, "{put:?}");
        assert_eq!(txn(vec![nested(vec![TxnOp::Put(put.clone())], vec![])]).check(), expected, "{put:?}");
    }
    assert_eq!(RangeRequest::key("").check(), Err(Error::EmptyKey));
    assert_eq!(Command::client(Op::Delete(DeleteRequest::key(""))).check(), Err(Error::EmptyKey));
    assert_eq!(txn(vec![get("")]).check(), Err(Error::EmptyKey));
    assert_eq!(txn(vec![delete("", "")]).check(), Err(Error::EmptyKey));
}

#[test]
fn system_keys_are_for_nodes_and_separate_from_user_keys() {
    let denied = Err(Error::PermissionDenied);
    let across = Err(Error::TxnAcrossSpaces);
    let cases = [
        ("put", Op::Put(PutRequest::new("/moim/a", "v")), denied, Ok(())),
        ("put beside", Op::Put(PutRequest::new("/moim", "v")), Ok(()), Ok(())),
        ("delete", Op::Delete(DeleteRequest::key("/moim/a")), denied, Ok(())),
        (
            "delete everything",
            Op::Delete(DeleteRequest { key: "\0".into(), range_end: "\0".into(), prev_kv: false }),
            Ok(()),
            Ok(()),
        ),
        ("read only", Op::Txn(txn(vec![get("/moim/a")])), Ok(()), Ok(())),
        ("write", Op::Txn(txn(vec![put("/moim/a")])), denied, Ok(())),
        ("nested write", Op::Txn(txn(vec![nested(vec![], vec![put("/moim/a")])])), denied, Ok(())),
        ("across", Op::Txn(txn(vec![get("/moim/a"), put("b")])), across, across),
        (
            "across, nested",
            Op::Txn(txn(vec![nested(vec![get("/moim/a")], vec![]), get("b")])),
            across,
            across,
        ),
        ("compact", Op::Compact { space: SpaceId::System, revision: 2 }, denied, Ok(())),
    ];
    for (name, op, client, node) in cases {
        assert_eq!(Command::client(op.clone()).check(), client, "{name} by a client");
        assert_eq!(Command::node(op).check(), node, "{name} by a node");
    }
}
