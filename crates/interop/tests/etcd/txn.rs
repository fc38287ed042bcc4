//! Transactions: comparisons, branches, nesting, limits, atomicity.

use etcd_client::{
    Compare, CompareOp, DeleteOptions, GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse, TxnResponse,
};

use crate::support::*;

/// True if a transaction with these comparisons executes its success branch.
async fn holds(t: &mut Scene, compares: Vec<Compare>) -> bool {
    let txn = Txn::new().when(compares);
    t.client.txn(txn).await.unwrap().succeeded()
}

pub(crate) async fn every_comparison(t: &mut Scene) {
    use CompareOp::{Equal, Greater, Less, NotEqual};
    let lease = t.client.lease_grant(60, None).await.unwrap().id();
    let key = t.key("k");
    let created = t.put("k", "1").await;
    let put = t.client.put(key.clone(), "m", Some(PutOptions::new().with_lease(lease))).await.unwrap();
    let changed = revision(put.header());
    let orders = [
        (Equal, [false, true, false]),
        (NotEqual, [true, false, true]),
        (Greater, [true, false, false]),
        (Less, [false, false, true]),
    ];
    for (op, expected) in orders {
        // Each numeric field (the version is 2) is compared with its value minus one, its value, and its value plus one.
        for (with, expected) in [-1, 0, 1].into_iter().zip(expected) {
            let of_number = [
                Compare::version(key.clone(), op, 2 + with),
                Compare::create_revision(key.clone(), op, created + with),
                Compare::mod_revision(key.clone(), op, changed + with),
                Compare::lease(key.clone(), op, lease + with),
            ];
            for compare in of_number {
                assert_eq!(holds(t, vec![compare.clone()]).await, expected, "{compare:?}");
            }
        }
        for (with, expected) in ["a", "m", "z"].into_iter().zip(expected) {
            let compare = Compare::value(key.clone(), op, with);
            assert_eq!(holds(t, vec![compare.clone()]).await, expected, "{compare:?}");
        }
    }
    let (yes, no) = (Compare::version(key.clone(), Equal, 2), Compare::version(key, Equal, 3));
    assert!(holds(t, vec![yes.clone(), yes.clone()]).await);
    assert!(!holds(t, vec![yes, no]).await, "all conditions must hold");
    assert!(holds(t, vec![]).await, "no condition holds");
}

pub(crate) async fn missing_key_compares_as_zero(t: &mut Scene) {
    use CompareOp::{Equal, Greater, Less, NotEqual};
    let key = t.key("missing");
    for (op, expected) in [(Equal, true), (NotEqual, false), (Greater, false), (Less, false)] {
        let with_zero = [
            Compare::version(key.clone(), op, 0),
            Compare::create_revision(key.clone(), op, 0),
            Compare::mod_revision(key.clone(), op, 0),
            Compare::lease(key.clone(), op, 0),
        ];
        for compare in with_zero {
            assert_eq!(holds(t, vec![compare.clone()]).await, expected, "{compare:?}");
        }
        let compare = Compare::value(key.clone(), op, "x");
        assert!(!holds(t, vec![compare]).await, "no value is neither equal nor different");
    }
    assert!(!holds(t, vec![Compare::value(key, Equal, "")]).await);
}

pub(crate) async fn range_compare_holds_for_every_key(t: &mut Scene) {
    let first = t.put("a", "1").await;
    t.put("b", "1").await;
    let last = t.put("c", "2").await;
    let prefix = t.prefix();
    let all = |compare: Compare| vec![compare.with_prefix()];
    assert!(holds(t, all(Compare::version(prefix.clone(), CompareOp::Equal, 1))).await);
    assert!(holds(t, all(Compare::create_revision(prefix.clone(), CompareOp::Greater, first - 1))).await);
    assert!(!holds(t, all(Compare::mod_revision(prefix.clone(), CompareOp::Less, last))).await);
    assert!(!holds(t, all(Compare::value(prefix.clone(), CompareOp::Equal, "1"))).await);
    let end = t.key("c");
    let some = Compare::value(prefix.clone(), CompareOp::Equal, "1").with_range(end);
    assert!(holds(t, vec![some]).await);
    let nothing = t.key("none/");
    assert!(
        holds(t, all(Compare::version(nothing.clone(), CompareOp::Equal, 0))).await,
        "an empty range has version 0"
    );
    assert!(!holds(t, all(Compare::version(nothing, CompareOp::Greater, 0))).await);
}

/// The response of each operation of a transaction, as text.
fn answers(response: &TxnResponse) -> Vec<String> {
    let answer = |op: TxnOpResponse| match op {
        TxnOpResponse::Put(put) => {
            format!("put {}", put.prev_key().map_or("-", |kv| kv.value_str().unwrap()))
        }
        TxnOpResponse::Get(get) => {
            let values: Vec<&str> = get.kvs().iter().map(|kv| kv.value_str().unwrap()).collect();
            format!("get {}", values.join(","))
        }
        TxnOpResponse::Delete(delete) => format!("delete {}", delete.deleted()),
        TxnOpResponse::Txn(txn) => format!("txn {} [{}]", txn.succeeded(), answers(&txn).join("; ")),
    };
    response.op_responses().into_iter().map(answer).collect()
}

pub(crate) async fn operations_see_earlier_operations_of_the_transaction(t: &mut Scene) {
    t.put("a", "old").await;
    let (a, b) = (t.key("a"), t.key("b"));
    let prev = || Some(PutOptions::new().with_prev_key());
    let txn = Txn::new()
        .when([Compare::value(a.clone(), CompareOp::Equal, "old")])
        .and_then([
            TxnOp::get(a.clone(), None),
            TxnOp::put(a.clone(), "new", prev()),
            TxnOp::get(a.clone(), None),
            TxnOp::put(b.clone(), "b", prev()),
            TxnOp::get(t.prefix(), Some(GetOptions::new().with_prefix())),
        ])
        .or_else([TxnOp::delete(a.clone(), None)]);
    let response = t.client.txn(txn.clone()).await.unwrap();
    assert!(response.succeeded());
    assert_eq!(answers(&response), ["get old", "put old", "get new", "put -", "get new,b"]);
    let response = t.client.txn(txn).await.unwrap();
    assert!(!response.succeeded());
    assert_eq!(answers(&response), ["delete 1"]);
    assert!(t.get("a").await.is_none());
    let txn = Txn::new().and_then([
        TxnOp::delete(t.prefix(), Some(DeleteOptions::new().with_prefix())),
        TxnOp::get(t.prefix(), Some(GetOptions::new().with_prefix())),
    ]);
    assert_eq!(answers(&t.client.txn(txn).await.unwrap()), ["delete 1", "get "]);
}

pub(crate) async fn nested_transactions(t: &mut Scene) {
    let (a, b, c) = (t.key("a"), t.key("b"), t.key("c"));
    let exists = |key: &str| Compare::version(key, CompareOp::Greater, 0);
    // All comparisons are evaluated before anything changes: the inner one does not see the outer put.
    let inner = Txn::new()
        .when([exists(&a)])
        .and_then([TxnOp::put(b.clone(), "saw a", None)])
        .or_else([TxnOp::put(c.clone(), "saw nothing", None)]);
    let txn = Txn::new().and_then([TxnOp::put(a.clone(), "1", None), TxnOp::txn(inner.clone())]);
    let response = t.client.txn(txn.clone()).await.unwrap();
    assert_eq!(answers(&response), ["put -", "txn false [put -]"]);
    let response = t.client.txn(txn).await.unwrap();
    assert_eq!(answers(&response), ["put -", "txn true [put -]"]);
    assert_eq!(t.value("b").await.as_deref(), Some("saw a"));
    assert_eq!(t.value("c").await.as_deref(), Some("saw nothing"));
    let deep = Txn::new().and_then([TxnOp::txn(
        Txn::new().and_then([TxnOp::txn(Txn::new().and_then([TxnOp::get(a, None)]))]),
    )]);
    assert_eq!(answers(&t.client.txn(deep).await.unwrap()), ["txn true [txn true [get 1]]"]);
}

pub(crate) async fn transaction_has_one_mod_revision(t: &mut Scene) {
    t.put("gone", "x").await;
    let (a, b, gone) = (t.key("a"), t.key("b"), t.key("gone"));
    let inner = Txn::new().and_then([TxnOp::put(b, "2", None)]);
    let txn = Txn::new().and_then([TxnOp::put(a, "1", None), TxnOp::txn(inner), TxnOp::delete(gone, None)]);
    let response = t.client.txn(txn).await.unwrap();
    let at = revision(response.header());
    assert_eq!(t.get("a").await.unwrap().mod_revision(), at);
    assert_eq!(t.get("b").await.unwrap().mod_revision(), at);
    assert!(t.get("gone").await.is_none());
    let before = GetOptions::new().with_prefix().with_revision(at - 1);
    assert_eq!(t.names("", before).await, ["gone"]);
}

pub(crate) async fn refused_operation_refuses_the_transaction(t: &mut Scene) {
    let (a, b) = (t.key("a"), t.key("b"));
    let not_found = "etcdserver: requested lease not found";
    let unknown_lease = Some(PutOptions::new().with_lease(0x6666));
    let txn =
        Txn::new().and_then([TxnOp::put(a.clone(), "1", None), TxnOp::put(b.clone(), "1", unknown_lease)]);
    refused(t.client.txn(txn).await, NOT_FOUND, not_found);
    let missing = Some(PutOptions::new().with_ignore_value());
    let txn = Txn::new().and_then([TxnOp::put(a.clone(), "1", None), TxnOp::put(b.clone(), "", missing)]);
    refused(t.client.txn(txn).await, INVALID_ARGUMENT, "etcdserver: key not found");
    let no_key = "etcdserver: key is not provided";
    for txn in [
        Txn::new().and_then([TxnOp::put(a.clone(), "1", None), TxnOp::put("", "1", None)]),
        Txn::new().or_else([TxnOp::delete("", None)]),
        Txn::new().when([Compare::version("", CompareOp::Equal, 0)]),
        Txn::new().and_then([TxnOp::txn(Txn::new().and_then([TxnOp::get("", None)]))]),
    ] {
        refused(t.client.txn(txn).await, INVALID_ARGUMENT, no_key);
    }
    assert!(t.names("", GetOptions::new().with_prefix()).await.is_empty());
}

/// Not for a real etcd of several nodes: there the nodes that do not serve the client skip the reads of a
/// transaction, so they apply the put that the serving node refuses, and diverge from then on.
pub(crate) async fn future_revision_read_refuses_the_transaction(t: &mut Scene) {
    if t.target == Target::Etcd && t.cluster.endpoints().len() > 1 {
        return;
    }
    let (a, b) = (t.key("a"), t.key("b"));
    let future = Some(GetOptions::new().with_revision(1 << 40));
    let txn = Txn::new().and_then([TxnOp::put(a, "1", None), TxnOp::get(b, future)]);
    refused(
        t.client.txn(txn).await,
        OUT_OF_RANGE,
        "etcdserver: mvcc: required revision is a future revision",
    );
    for mut node in t.nodes().await {
        let options = GetOptions::new().with_prefix().with_count_only();
        assert_eq!(node.get(t.prefix(), Some(options)).await.unwrap().count(), 0);
    }
}

pub(crate) async fn duplicate_keys_are_refused(t: &mut Scene) {
    let (a, b) = (t.key("a"), t.key("b"));
    let put = |key: &str| TxnOp::put(key, "x", None);
    let delete_all = TxnOp::delete(t.prefix(), Some(DeleteOptions::new().with_prefix()));
    let nested = |ops: Vec<TxnOp>| TxnOp::txn(Txn::new().and_then(ops));
    let duplicate = "etcdserver: duplicate key given in txn request";
    let refused_ones = [
        vec![put(&a), put(&a)],
        vec![put(&a), TxnOp::delete(a.clone(), None)],
        vec![TxnOp::delete(a.clone(), None), put(&a)],
        vec![put(&b), delete_all.clone()],
        vec![put(&a), nested(vec![put(&a)])],
        vec![nested(vec![put(&a)]), nested(vec![put(&a)])],
    ];
    for ops in refused_ones {
        refused(t.client.txn(Txn::new().and_then(ops.clone())).await, INVALID_ARGUMENT, duplicate);
        refused(t.client.txn(Txn::new().or_else(ops)).await, INVALID_ARGUMENT, duplicate);
    }
    let fine = [
        Txn::new().and_then([put(&a), put(&b)]),
        Txn::new().and_then([put(&a)]).or_else([put(&a)]),
        Txn::new().and_then([TxnOp::delete(a.clone(), None), delete_all]),
        Txn::new().and_then([put(&a), TxnOp::get(a.clone(), None)]),
        Txn::new().and_then([TxnOp::txn(Txn::new().and_then([put(&a)]).or_else([put(&a)]))]),
    ];
    for txn in fine {
        t.client.txn(txn).await.unwrap();
    }
}

pub(crate) async fn max_txn_ops_is_enforced(t: &mut Scene) {
    let puts = |from: usize, count: usize| -> Vec<TxnOp> {
        (from..from + count).map(|i| TxnOp::put(t.key(&format!("{i:03}")), "x", None)).collect()
    };
    let compares = |count: usize| vec![Compare::version(t.key("none"), CompareOp::Equal, 0); count];
    let nested = |outer: usize, inner: usize| {
        let mut ops = puts(0, outer - 1);
        ops.push(TxnOp::txn(Txn::new().and_then(puts(500, inner))));
        Txn::new().and_then(ops)
    };
    let fine = [
        Txn::new().and_then(puts(0, 128)),
        Txn::new().when(compares(128)).and_then(puts(0, 128)).or_else(puts(0, 128)),
        nested(64, 64),
    ];
    let too_many = [
        Txn::new().and_then(puts(0, 129)),
        Txn::new().or_else(puts(0, 129)),
        Txn::new().when(compares(129)),
        nested(64, 65),
        nested(129, 1),
    ];
    for txn in fine {
        t.client.txn(txn).await.unwrap();
    }
    let text = "etcdserver: too many operations in txn request";
    for txn in too_many {
        refused(t.client.txn(txn).await, INVALID_ARGUMENT, text);
    }
    assert_eq!(t.names("", GetOptions::new().with_prefix()).await.len(), 128 + 64);
}

pub(crate) async fn concurrent_increments_are_not_lost(t: &mut Scene) {
    const CLIENTS: usize = 6;
    const EACH: usize = 15;
    t.put("counter", "0").await;
    let key = t.key("counter");
    let nodes = t.nodes().await;
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..CLIENTS {
        let (mut client, key) = (nodes[i % nodes.len()].clone(), key.clone());
        tasks.spawn(async move {
            for _ in 0..EACH {
                loop {
                    let kv = client.get(key.clone(), None).await.unwrap().take_kvs().pop().unwrap();
                    let more = kv.value_str().unwrap().parse::<usize>().unwrap() + 1;
                    let unchanged = Compare::mod_revision(key.clone(), CompareOp::Equal, kv.mod_revision());
                    let txn = Txn::new().when([unchanged]).and_then([TxnOp::put(
                        key.clone(),
                        more.to_string(),
                        None,
                    )]);
                    if client.txn(txn).await.unwrap().succeeded() {
                        break;
                    }
                }
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.unwrap();
    }
    let kv = t.get("counter").await.unwrap();
    assert_eq!(kv.value_str().unwrap(), (CLIENTS * EACH).to_string());
    assert_eq!(kv.version(), i64::try_from(CLIENTS * EACH).unwrap() + 1);
}
