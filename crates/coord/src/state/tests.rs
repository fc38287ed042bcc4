//! One scenario for each rule that clients rely on.

use super::*;
use crate::reply::TxnOpReply;
use crate::request::{Compare, CompareResult, CompareTarget, SortOrder, SortTarget, TxnOp};

/// A state and its last log index.
struct Log {
    state: State,
    index: u64,
}

impl Log {
    fn new() -> Self {
        Self { state: State::new(), index: 0 }
    }

    fn run(&mut self, command: Command) -> Reply {
        self.index += 1;
        self.state.apply(self.index, command)
    }

    fn client(&mut self, op: Op) -> Reply {
        self.run(Command::client(op))
    }

    fn put(&mut self, key: &'static str, value: &'static str) -> i64 {
        match self.client(Op::Put(PutRequest::new(key, value))) {
            Reply::Put(put) => put.revision,
            other => panic!("put {key}: {other:?}"),
        }
    }

    fn put_leased(&mut self, key: &'static str, lease: i64) -> Reply {
        self.client(Op::Put(PutRequest { lease: LeaseId(lease), ..PutRequest::new(key, "v") }))
    }

    fn delete(&mut self, key: &'static str, end: &'static str) -> DeleteReply {
        match self.client(Op::Delete(delete(key, end))) {
            Reply::Delete(delete) => delete,
            other => panic!("delete {key}: {other:?}"),
        }
    }

    fn txn(&mut self, txn: TxnRequest) -> TxnReply {
        match self.client(Op::Txn(txn)) {
            Reply::Txn(txn) => txn,
            other => panic!("{other:?}"),
        }
    }

    fn grant(&mut self, id: i64, ttl_ms: i64) -> Reply {
        self.client(Op::LeaseGrant { id: LeaseId(id), ttl_ms })
    }

    fn keys(&self, request: RangeRequest) -> Vec<String> {
        keys(&self.state.range(&request).unwrap())
    }

    fn all(&self) -> Vec<String> {
        self.keys(RangeRequest::between("\0", "\0"))
    }

    fn get(&self, key: &'static str) -> Option<KeyValue> {
        self.state.range(&RangeRequest::key(key)).unwrap().kvs.pop()
    }

    fn revision(&self) -> i64 {
        self.state.revision(SpaceId::User)
    }
}

fn keys(reply: &RangeReply) -> Vec<String> {
    reply.kvs.iter().map(|kv| String::from_utf8(kv.key.to_vec()).unwrap()).collect()
}

fn delete(key: &'static str, end: &'static str) -> DeleteRequest {
    DeleteRequest { key: key.into(), range_end: end.into(), prev_kv: true }
}

fn put_op(key: &'static str, value: &'static str) -> TxnOp {
    TxnOp::Put(PutRequest::new(key, value))
}

fn get_op(key: &'static str) -> TxnOp {
    TxnOp::Range(RangeRequest::key(key))
}

fn compare(key: &'static str, target: CompareTarget, result: CompareResult) -> Compare {
    Compare { key: key.into(), range_end: Bytes::new(), target, result }
}

fn success_only(success: Vec<TxnOp>) -> TxnRequest {
    TxnRequest { compares: vec![], success, failure: vec![] }
}

#[test]
fn key_version_counts_puts_and_restarts_after_delete() {
    let mut log = Log::new();
    assert_eq!(log.revision(), 1);
    let facts = |log: &Log| log.get("a").map(|kv| (kv.create_revision, kv.mod_revision, kv.version));
    assert_eq!(log.put("a", "1"), 2);
    assert_eq!(facts(&log), Some((2, 2, 1)));
    log.put("b", "x");
    assert_eq!(log.put("a", "1"), 4); // the same value is a change too
    assert_eq!(facts(&log), Some((2, 4, 2)));
    let gone = log.delete("a", "");
    assert_eq!((gone.revision, gone.deleted, gone.prev_kvs[0].version), (5, 1, 2));
    assert_eq!(facts(&log), None);
    assert_eq!(log.delete("a", "").revision, 5); // nothing there, nothing changes
    log.put("a", "2");
    assert_eq!(facts(&log), Some((6, 6, 1)));
    assert_eq!(log.state.live_keys(SpaceId::User), 2);
}

#[test]
fn put_returns_prev_kv_and_honours_ignore_value_and_ignore_lease() {
    let mut log = Log::new();
    log.grant(7, 10_000);
    let missing = [
        PutRequest { ignore_value: true, ..PutRequest::new("k", "") },
        PutRequest { ignore_lease: true, ..PutRequest::new("k", "v") },
    ];
    for put in missing {
        assert_eq!(log.client(Op::Put(put)), Reply::Error(Error::KeyNotFound));
    }
    assert_eq!(log.put_leased("k", 9), Reply::Error(Error::LeaseNotFound));
    let with_prev = PutRequest { prev_kv: true, lease: LeaseId(7), ..PutRequest::new("k", "one") };
    assert_eq!(log.client(Op::Put(with_prev)), Reply::Put(PutReply { revision: 2, prev_kv: None }));
    log.client(Op::Put(PutRequest { ignore_lease: true, ..PutRequest::new("k", "two") }));
    let kv = log.get("k").unwrap();
    assert_eq!((&kv.value[..], kv.lease), (&b"two"[..], LeaseId(7)));
    let keep_value = PutRequest { ignore_value: true, prev_kv: true, ..PutRequest::new("k", "") };
    let Reply::Put(put) = log.client(Op::Put(keep_value)) else { panic!() };
    assert_eq!(put.prev_kv, Some(kv));
    let kv = log.get("k").unwrap();
    assert_eq!((&kv.value[..], kv.lease, kv.version), (&b"two"[..], LeaseId::NONE, 3));
    assert_eq!(log.state.lease(LeaseId(7)).unwrap().keys().count(), 0);
}

fn five_keys() -> Log {
    let mut log = Log::new();
    for (key, value) in [("a", "5"), ("b", "3"), ("c", "4"), ("d", "1"), ("e", "2")] {
        log.put(key, value); // a..e at 2..6
    }
    log.put("b", "3"); // 7
    log.put("a", "5"); // 8
    log.put("a", "5"); // 9
    log
}

#[test]
fn range_applies_limit_filters_and_sort() {
    let log = five_keys();
    let all = || RangeRequest::between("a", "z");
    let by = |sort_target, sort_order| RangeRequest { sort_target, sort_order, ..all() };
    use SortOrder::{Ascend, Descend, None};
    use SortTarget::{Create, Key, Mod, Value, Version};
    let cases = [
        ("everything", all(), "abcde", false),
        ("half open", RangeRequest::between("b", "d"), "bc", false),
        ("from key", RangeRequest::between("d", "\0"), "de", false),
        ("backwards", RangeRequest::between("d", "a"), "", false),
        ("limit", RangeRequest { limit: 2, ..all() }, "ab", true),
        ("limit met", RangeRequest { limit: 5, ..all() }, "abcde", false),
        ("negative limit", RangeRequest { limit: -1, ..all() }, "abcde", false),
        ("key down", by(Key, Descend), "edcba", false),
        ("key down, limit", RangeRequest { limit: 2, ..by(Key, Descend) }, "ed", true),
        ("value", by(Value, Ascend), "debca", false),
        ("value, no order is up", by(Value, None), "debca", false),
        ("value down", by(Value, Descend), "acbed", false),
        ("mod down, limit", RangeRequest { limit: 2, ..by(Mod, Descend) }, "ab", true),
        ("create", by(Create, Ascend), "abcde", false),
        ("version", RangeRequest { limit: 3, ..by(Version, Descend) }, "abe", true),
        // Three keys and one more, to tell whether there are more, are read, then sorted: as etcd does.
        ("no order sorts after the limit", RangeRequest { limit: 3, ..by(Value, None) }, "dbc", true),
        ("explicit order sorts before", RangeRequest { limit: 3, ..by(Value, Ascend) }, "deb", true),
        ("min mod", RangeRequest { min_mod_revision: 6, ..all() }, "abe", false),
        ("max mod", RangeRequest { max_mod_revision: 6, ..all() }, "cde", false),
        ("min create", RangeRequest { min_create_revision: 4, ..all() }, "cde", false),
        ("max create", RangeRequest { max_create_revision: 3, ..all() }, "ab", false),
        ("filter before limit", RangeRequest { min_mod_revision: 6, limit: 2, ..all() }, "ab", true),
        ("in the past", RangeRequest { revision: 4, ..all() }, "abc", false),
    ];
    for (name, request, expected, more) in cases {
        let reply = log.state.range(&request).unwrap();
        assert_eq!((keys(&reply).concat().as_str(), reply.more), (expected, more), "{name}");
        assert_eq!(reply.revision, 9, "{name}");
        let whole = name != "half open" && name != "from key" && name != "backwards" && name != "in the past";
        if whole {
            assert_eq!(reply.count, 5, "{name}: the count ignores limit and filters");
        }
    }
    let reply = log.state.range(&RangeRequest { keys_only: true, ..all() }).unwrap();
    assert!(reply.kvs.iter().all(|kv| kv.value.is_empty() && kv.mod_revision > 0));
    let sorted = log.state.range(&RangeRequest { keys_only: true, ..by(Value, Ascend) }).unwrap();
    assert_eq!(keys(&sorted).concat(), "debca");
    let reply = log.state.range(&RangeRequest { count_only: true, limit: 1, ..all() }).unwrap();
    assert_eq!((reply.kvs.len(), reply.count, reply.more), (0, 5, false));
}

#[test]
fn past_revisions_are_readable_until_compacted() {
    let mut log = five_keys();
    log.delete("c", ""); // 10
    let at =
        |log: &Log, revision| log.state.range(&RangeRequest { revision, ..RangeRequest::between("a", "z") });
    assert_eq!(at(&log, 11), Err(Error::FutureRevision));
    assert_eq!(keys(&at(&log, 3).unwrap()), ["a", "b"]);
    let compact = |log: &mut Log, revision| log.client(Op::Compact { space: SpaceId::User, revision });
    assert_eq!(compact(&mut log, 11), Reply::Error(Error::FutureRevision));
    assert_eq!(compact(&mut log, 8), Reply::Compacted { revision: 10 });
    assert_eq!(compact(&mut log, 8), Reply::Error(Error::Compacted));
    assert_eq!(compact(&mut log, 5), Reply::Error(Error::Compacted));
    assert_eq!(at(&log, 7), Err(Error::Compacted));
    let old = at(&log, 8).unwrap();
    assert_eq!(keys(&old), ["a", "b", "c", "d", "e"]);
    assert_eq!((old.kvs[0].mod_revision, old.kvs[0].version), (8, 2));
    assert_eq!(log.all(), ["a", "b", "d", "e"]);
    assert_eq!(compact(&mut log, 10), Reply::Compacted { revision: 10 });
    assert_eq!(keys(&at(&log, 10).unwrap()), ["a", "b", "d", "e"]);
    log.put("c", "again");
    assert_eq!(log.get("c").unwrap().version, 1);
}

#[test]
fn auto_compaction_never_fails() {
    let mut log = five_keys();
    for (user, expected) in [(5, 5), (5, 5), (3, 5), (1_000, 9)] {
        assert_eq!(
            log.run(Command::node(Op::AutoCompact { user, system: 1 })),
            Reply::Compacted { revision: 9 }
        );
        assert_eq!(log.state.compact_revision(SpaceId::User), expected);
    }
}

#[test]
fn txn_compare_targets_and_results() {
    use CompareResult::{Equal, Greater, Less, NotEqual};
    use CompareTarget::{Create, Lease, Mod, Value, Version};
    let mut log = five_keys();
    log.grant(7, 10_000);
    log.put_leased("l", 7); // 10
    let value = |text: &'static str| Value(Bytes::from_static(text.as_bytes()));
    let cases = [
        ("version", compare("a", Version(3), Equal), true),
        ("version", compare("a", Version(3), NotEqual), false),
        ("create", compare("b", Create(3), Equal), true),
        ("create", compare("b", Create(3), Greater), false),
        ("mod", compare("b", Mod(6), Greater), true),
        ("mod", compare("b", Mod(7), Less), false),
        ("mod", compare("b", Mod(8), Less), true),
        ("lease", compare("l", Lease(LeaseId(7)), Equal), true),
        ("lease", compare("a", Lease(LeaseId(0)), Equal), true),
        ("value", compare("a", value("5"), Equal), true),
        ("value", compare("a", value("4"), Greater), true),
        ("value", compare("a", value("50"), Less), true),
        ("missing is 0", compare("x", Version(0), Equal), true),
        ("missing is 0", compare("x", Create(0), Equal), true),
        ("missing is 0", compare("x", Mod(1), Less), true),
        ("missing is 0", compare("x", Lease(LeaseId(0)), Greater), false),
        ("missing has no value", compare("x", value(""), Equal), false),
        ("missing has no value", compare("x", value("y"), NotEqual), false),
        ("every key", Compare { range_end: "c".into(), ..compare("a", Mod(6), Greater) }, true),
        ("every key", Compare { range_end: "d".into(), ..compare("a", Mod(6), Greater) }, false),
        ("from key", Compare { range_end: "\0".into(), ..compare("d", Version(1), Equal) }, true),
        ("no key in range", Compare { range_end: "z".into(), ..compare("x", Create(0), Equal) }, true),
        ("no key in range", Compare { range_end: "z".into(), ..compare("x", value(""), NotEqual) }, false),
    ];
    for (name, compare, expected) in cases {
        let txn = TxnRequest { compares: vec![compare.clone()], ..TxnRequest::default() };
        assert_eq!(log.txn(txn.clone()).succeeded, expected, "{name}: {compare:?}");
        assert_eq!(log.state.read_txn(&txn).unwrap().succeeded, expected, "{name}: {compare:?}");
    }
    assert_eq!(log.revision(), 10, "comparing changes nothing");
}

#[test]
fn txn_has_one_revision_and_reads_its_own_writes() {
    let mut log = Log::new();
    log.put("a", "old");
    let reply = log.txn(success_only(vec![
        get_op("a"),
        put_op("a", "new"),
        get_op("a"),
        put_op("b", "x"),
        TxnOp::Delete(delete("c", "")),
        TxnOp::Range(RangeRequest { revision: 2, ..RangeRequest::key("a") }),
    ]));
    assert_eq!((reply.revision, reply.succeeded), (3, true));
    let read = |at: usize| match &reply.responses[at] {
        TxnOpReply::Range(range) => (range.revision, range.kvs[0].value.clone()),
        other => panic!("{other:?}"),
    };
    assert_eq!(read(0), (2, "old".into()));
    assert_eq!(read(2), (3, "new".into()));
    assert_eq!(read(5), (3, "old".into()));
    assert!(matches!(&reply.responses[4], TxnOpReply::Delete(d) if d.deleted == 0 && d.revision == 3));
    assert_eq!((log.get("a").unwrap().mod_revision, log.get("b").unwrap().mod_revision), (3, 3));
    let idle = log.txn(success_only(vec![get_op("a"), TxnOp::Delete(delete("zz", ""))]));
    assert_eq!((idle.revision, log.revision()), (3, 3), "a txn that changes nothing has no revision");
}

#[test]
fn txn_is_checked_completely_before_it_writes() {
    let mut log = Log::new();
    log.put("a", "old");
    let bad = [
        (TxnOp::Put(PutRequest { lease: LeaseId(5), ..PutRequest::new("b", "v") }), Error::LeaseNotFound),
        (TxnOp::Put(PutRequest { ignore_value: true, ..PutRequest::new("b", "") }), Error::KeyNotFound),
        (TxnOp::Range(RangeRequest { revision: 3, ..RangeRequest::key("a") }), Error::FutureRevision),
        (put_op("a", "twice"), Error::DuplicateKey),
        (put_op("/moim/a", "v"), Error::TxnAcrossSpaces),
    ];
    for (op, error) in bad {
        let nested = TxnOp::Txn(success_only(vec![op.clone()]));
        for last in [op, nested] {
            let txn = success_only(vec![put_op("a", "new"), last]);
            assert_eq!(log.client(Op::Txn(txn)), Reply::Error(error));
            assert_eq!((log.revision(), log.get("a").unwrap().value), (2, "old".into()), "{error:?}");
        }
    }
    // Only the chosen branch is checked against the state.
    let other = TxnRequest {
        failure: vec![TxnOp::Put(PutRequest { lease: LeaseId(5), ..PutRequest::new("b", "v") })],
        ..success_only(vec![put_op("a", "new")])
    };
    assert_eq!(log.txn(other).revision, 3);
}

#[test]
fn nested_txn_compares_are_evaluated_before_any_write() {
    let mut log = Log::new();
    let is_new = |key| vec![compare(key, CompareTarget::Version(0), CompareResult::Equal)];
    let inner = TxnRequest {
        compares: is_new("a"),
        success: vec![put_op("won", "1")],
        failure: vec![put_op("lost", "1")],
    };
    let reply = log.txn(success_only(vec![put_op("a", "1"), TxnOp::Txn(inner), get_op("won")]));
    let TxnOpReply::Txn(nested) = &reply.responses[1] else { panic!() };
    assert!(nested.succeeded, "the condition looks at the state before the outer put");
    assert_eq!((nested.revision, reply.revision), (0, 2));
    assert_eq!(log.all(), ["a", "won"]);
    // A nested put and a later nested deletion of one key are both applied, in order, at one revision.
    let put = TxnOp::Txn(success_only(vec![put_op("x", "1")]));
    let gone = TxnOp::Txn(success_only(vec![TxnOp::Delete(delete("x", ""))]));
    let reply = log.txn(success_only(vec![put, gone]));
    assert_eq!((reply.revision, log.get("x")), (3, None));
    assert_eq!(log.all(), ["a", "won"]);
}

#[test]
fn system_keys_have_their_own_key_space() {
    let mut log = Log::new();
    log.put("/", "user");
    log.put("/z", "user");
    let system = Op::Put(PutRequest::new("/moim/members/1", "m"));
    assert_eq!(log.client(system.clone()), Reply::Error(Error::PermissionDenied));
    assert_eq!(log.run(Command::node(system)), Reply::Put(PutReply { revision: 2, prev_kv: None }));
    assert_eq!((log.state.revision(SpaceId::User), log.state.revision(SpaceId::System)), (3, 2));
    assert_eq!(log.all(), ["/", "/z"]);
    assert_eq!(log.keys(RangeRequest::between("/moim/", "/moim0")), ["/moim/members/1"]);
    assert_eq!(log.keys(RangeRequest::between("/moim/", "\0")), ["/moim/members/1"]);
    assert_eq!(log.delete("\0", "\0").deleted, 2);
    assert_eq!(log.state.live_keys(SpaceId::System), 1);
    let read = log.state.read_txn(&success_only(vec![get_op("/moim/members/1")])).unwrap();
    assert_eq!(read.revision, 2);
    let compact = Op::Compact { space: SpaceId::System, revision: 2 };
    assert_eq!(log.client(compact.clone()), Reply::Error(Error::PermissionDenied));
    assert_eq!(log.run(Command::node(compact)), Reply::Compacted { revision: 2 });
    assert_eq!(log.state.compact_revision(SpaceId::User), -1);
}

#[test]
fn lease_revoke_deletes_its_keys_at_one_revision() {
    let mut log = Log::new();
    let granted = |ttl_ms, revision| Reply::LeaseGranted { revision, id: LeaseId(7), ttl_ms };
    assert_eq!(log.grant(7, 10_000), granted(10_000, 1));
    assert_eq!(log.grant(7, 10_000), Reply::Error(Error::LeaseExists));
    assert_eq!(log.grant(0, 10_000), Reply::Error(Error::LeaseNotFound));
    assert_eq!(log.grant(8, MAX_LEASE_TTL_MS + 1), Reply::Error(Error::LeaseTtlTooLarge));
    log.put_leased("b", 7);
    log.put_leased("a", 7);
    log.put_leased("c", 7);
    log.put("c", "let go"); // 5
    log.delete("b", ""); // 6
    log.put_leased("b", 7); // 7
    let held: Vec<_> = log.state.lease(LeaseId(7)).unwrap().keys().cloned().collect();
    assert_eq!(held, ["a", "b"]);
    assert_eq!(log.client(Op::LeaseRevoke { id: LeaseId(7) }), Reply::LeaseRevoked { revision: 8 });
    assert_eq!(log.all(), ["c"]);
    assert_eq!(log.client(Op::LeaseRevoke { id: LeaseId(7) }), Reply::Error(Error::LeaseNotFound));
    assert_eq!(log.grant(7, -5), granted(MIN_CLIENT_TTL_MS, 8));
    assert_eq!(log.client(Op::LeaseRevoke { id: LeaseId(7) }), Reply::LeaseRevoked { revision: 8 });
}

#[test]
fn client_cannot_revoke_a_node_lease() {
    let mut log = Log::new();
    let id = LeaseId(7);
    log.run(Command::node(Op::LeaseGrant { id, ttl_ms: 300 }));
    assert_eq!(log.state.lease(id).unwrap().ttl_ms, 300);
    log.run(Command::node(Op::Put(PutRequest { lease: id, ..PutRequest::new("/moim/m", "v") })));
    log.put_leased("mine", 7);
    assert_eq!(log.client(Op::LeaseRevoke { id }), Reply::Error(Error::PermissionDenied));
    assert_eq!(log.run(Command::node(Op::LeaseRevoke { id })), Reply::LeaseRevoked { revision: 3 });
    assert_eq!((log.state.live_keys(SpaceId::User), log.state.live_keys(SpaceId::System)), (0, 0));
    assert_eq!(log.state.revision(SpaceId::System), 3);
}

#[test]
fn lease_checkpoints_are_stored_and_bounded_by_ttl() {
    let mut log = Log::new();
    log.grant(7, 10_000);
    let checkpoint = |remaining: Vec<(i64, i64)>| Op::LeaseCheckpoint {
        remaining: remaining.into_iter().map(|(id, ms)| (LeaseId(id), ms)).collect(),
    };
    assert_eq!(log.client(checkpoint(vec![(7, 1)])), Reply::Error(Error::PermissionDenied));
    for (remaining, rest) in [(4_000, 4_000), (99_000, 10_000), (0, 10_000), (-5, 10_000)] {
        let reply = log.run(Command::node(checkpoint(vec![(9, 1), (7, remaining)])));
        assert_eq!(reply, Reply::Done { revision: 1 });
        assert_eq!(log.state.lease(LeaseId(7)).unwrap().remaining_ttl_ms(), rest, "{remaining}");
    }
}

#[test]
fn nospace_alarm_refuses_commands_that_grow_the_state() {
    let mut log = Log::new();
    log.put("a", "v");
    log.grant(7, 10_000);
    let alarm = Alarm { kind: AlarmKind::NoSpace, member: 3 };
    let changed = |changed: Vec<Alarm>| Reply::Alarms { revision: 2, changed };
    assert_eq!(log.client(Op::AlarmOn(alarm)), changed(vec![alarm]));
    assert_eq!(log.client(Op::AlarmOn(alarm)), changed(vec![]));
    let refused = [
        Op::Put(PutRequest::new("a", "v")),
        Op::Txn(success_only(vec![put_op("a", "v")])),
        Op::Txn(TxnRequest {
            failure: vec![TxnOp::Txn(success_only(vec![put_op("a", "v")]))],
            ..success_only(vec![])
        }),
        Op::LeaseGrant { id: LeaseId(8), ttl_ms: 1_000 },
    ];
    for op in refused {
        assert_eq!(log.client(op), Reply::Error(Error::NoSpace));
    }
    assert!(log.get("a").is_some(), "reads go on");
    assert!(log.txn(success_only(vec![get_op("a")])).succeeded);
    let node = Command::node(Op::Put(PutRequest::new("/moim/a", "v")));
    assert!(matches!(log.run(node), Reply::Put(_)), "nodes may still write");
    assert!(matches!(log.client(Op::LeaseRevoke { id: LeaseId(7) }), Reply::LeaseRevoked { .. }));
    assert_eq!(log.delete("a", "").deleted, 1);
    assert!(matches!(log.client(Op::Compact { space: SpaceId::User, revision: 2 }), Reply::Compacted { .. }));
    assert!(matches!(log.client(Op::AlarmOff(alarm)), Reply::Alarms { changed, .. } if changed == [alarm]));
    assert!(matches!(log.client(Op::AlarmOff(alarm)), Reply::Alarms { changed, .. } if changed.is_empty()));
    log.put("a", "v");
}

#[test]
fn corrupt_alarm_refuses_clients_and_not_nodes() {
    let mut log = Log::new();
    log.run(Command::node(Op::LeaseGrant { id: LeaseId(9), ttl_ms: 3_000 }));
    log.client(Op::LeaseGrant { id: LeaseId(8), ttl_ms: 3_000 });
    log.client(Op::AlarmOn(Alarm { kind: AlarmKind::Corrupt, member: 1 }));
    let corrupt = Reply::Error(Error::Corrupt);
    assert_eq!(log.client(Op::Put(PutRequest::new("a", "v"))), corrupt);
    assert_eq!(log.client(Op::Delete(delete("a", ""))), corrupt);
    assert_eq!(log.run(Command::node(Op::LeaseRevoke { id: LeaseId(8) })), corrupt);
    assert!(matches!(log.run(Command::node(Op::Put(PutRequest::new("/moim/a", "v")))), Reply::Put(_)));
    assert_eq!(log.state.range(&RangeRequest::key("/moim/a")).unwrap().count, 1);
    let ended = log.run(Command::node(Op::LeaseRevoke { id: LeaseId(9) }));
    assert!(matches!(ended, Reply::LeaseRevoked { .. }), "a dead node does not live on by an alarm");
    assert_eq!(log.state.range(&RangeRequest::key("a")), Err(Error::Corrupt));
    assert_eq!(log.state.read_txn(&TxnRequest::default()), Err(Error::Corrupt));
}

#[test]
fn hash_kv_does_not_depend_on_reclamation() {
    let mut log = five_keys();
    let before = log.state.hash_kv(SpaceId::User, 0).unwrap();
    assert_eq!((before.hash_revision, before.compact_revision, before.revision), (9, -1, 9));
    log.put("a", "more"); // 10
    let again = log.state.hash_kv(SpaceId::User, 9).unwrap();
    assert_eq!((again.hash, again.revision), (before.hash, 10), "later changes do not show");
    assert_ne!(log.state.hash_kv(SpaceId::User, 10).unwrap().hash, before.hash);
    assert_eq!(log.state.hash_kv(SpaceId::User, 11), Err(Error::FutureRevision));
    // Compacted directly, so that nothing is reclaimed yet.
    log.state.user.compact(8);
    let closed = log.state.hash_kv(SpaceId::User, 0).unwrap();
    assert_eq!(log.state.hash_kv(SpaceId::User, 7), Err(Error::Compacted));
    while log.state.reclaim(1) {
        assert_eq!(log.state.hash_kv(SpaceId::User, 0).unwrap(), closed);
    }
    assert_eq!(log.state.hash_kv(SpaceId::User, 0).unwrap(), closed);
    assert_eq!(log.state.user.log().iter().count(), 3);
    assert_eq!(log.state.user.versions().count(), 3 + 4, "a at 8, 9 and 10, the others once");
}

#[test]
#[should_panic(expected = "apply out of order")]
fn apply_panics_on_an_earlier_index() {
    let mut state = State::new();
    state.apply(5, Command::node(Op::Nothing));
    state.apply(5, Command::node(Op::Nothing));
    state.apply(4, Command::node(Op::Nothing));
}
