//! Put, range, delete: options, revisions, errors.

use etcd_client::{DeleteOptions, GetOptions, PutOptions, SortOrder, SortTarget};

use crate::support::*;

pub(crate) async fn put_sets_revisions_and_version(t: &mut Scene) {
    assert!(t.get("k").await.is_none());
    let first = t.put("k", "1").await;
    let kv = t.get("k").await.unwrap();
    assert_eq!((kv.create_revision(), kv.mod_revision(), kv.version(), kv.lease()), (first, first, 1, 0));
    let second = t.put("k", "2").await;
    assert!(second > first);
    let kv = t.get("k").await.unwrap();
    assert_eq!((kv.create_revision(), kv.mod_revision(), kv.version()), (first, second, 2));
    assert_eq!(kv.value(), b"2");
    t.delete("k").await;
    assert!(t.get("k").await.is_none());
    let third = t.put("k", "3").await;
    let kv = t.get("k").await.unwrap();
    assert_eq!((kv.create_revision(), kv.mod_revision(), kv.version()), (third, third, 1));
}

pub(crate) async fn only_changes_increment_the_revision(t: &mut Scene) {
    let start = t.put("k", "0").await;
    assert_eq!(t.put("k", "1").await, start + 1);
    assert_eq!(t.put("k", "1").await, start + 2, "an equal value is a change");
    let missing = t.client.delete(t.key("missing"), None).await.unwrap();
    assert_eq!((missing.deleted(), revision(missing.header())), (0, start + 2));
    let read = t.client.get(t.key("k"), None).await.unwrap();
    assert_eq!(revision(read.header()), start + 2);
    let old = t.client.get(t.key("k"), Some(GetOptions::new().with_revision(start))).await.unwrap();
    assert_eq!(revision(old.header()), start + 2, "the header has the revision of now");
    assert_eq!(t.delete("k").await, start + 3);
    let lease = t.client.lease_grant(60, None).await.unwrap();
    assert_eq!(t.put("k", "2").await, start + 4, "a lease is no change of a key");
    t.client.lease_revoke(lease.id()).await.unwrap();
    assert_eq!(t.put("k", "3").await, start + 5, "nor is its end, without keys");
}

pub(crate) async fn keys_and_values_are_arbitrary_bytes(t: &mut Scene) {
    let base = t.prefix().into_bytes();
    let tails: [&[u8]; 6] = [b"", b"\0", b"\0\0", b"\xff", b"\xff\xff", b"a\xffb"];
    for tail in tails {
        let key = [&base, tail].concat();
        t.client.put(key.clone(), tail, None).await.unwrap();
        let mut response = t.client.get(key.clone(), None).await.unwrap();
        let kv = response.take_kvs().pop().unwrap();
        assert_eq!((kv.key(), kv.value()), (&key[..], tail));
    }
    let all = t.client.get(base.clone(), Some(GetOptions::new().with_prefix())).await.unwrap();
    let mut sorted = tails.to_vec();
    sorted.sort();
    let found: Vec<&[u8]> = all.kvs().iter().map(|kv| &kv.key()[base.len()..]).collect();
    assert_eq!(found, sorted, "keys are ordered as bytes");
    // The range end of a prefix that ends in 0xff is the next shorter one.
    let high =
        t.client.get([&base[..], b"\xff"].concat(), Some(GetOptions::new().with_prefix())).await.unwrap();
    assert_eq!(high.count(), 2);
}

pub(crate) async fn ranges_by_prefix_end_and_from_key(t: &mut Scene) {
    for name in ["a", "b", "b/1", "b/2", "c", "d"] {
        t.put(name, "x").await;
    }
    let end = t.key("c");
    let cases: [(&str, GetOptions, &[&str]); 5] = [
        ("", GetOptions::new().with_prefix(), &["a", "b", "b/1", "b/2", "c", "d"]),
        ("b", GetOptions::new().with_prefix(), &["b", "b/1", "b/2"]),
        ("b", GetOptions::new().with_range(end.clone()), &["b", "b/1", "b/2"]),
        ("b", GetOptions::new(), &["b"]),
        ("c", GetOptions::new().with_range(end), &[]),
    ];
    for (from, options, expected) in cases {
        assert_eq!(t.names(from, options.clone()).await, expected, "{from} {options:?}");
    }
    let from =
        t.client.get(t.key("b/2"), Some(GetOptions::new().with_from_key().with_limit(3))).await.unwrap();
    let found: Vec<String> = from.kvs().iter().map(|kv| t.name_of(kv)).collect();
    assert_eq!(found, ["b/2", "c", "d"]);
    let backwards = t.client.get(t.key("d"), Some(GetOptions::new().with_range(t.key("a")))).await.unwrap();
    assert_eq!(
        (backwards.kvs().len(), backwards.count()),
        (0, 0),
        "a range that ends before it begins is empty"
    );
}

pub(crate) async fn range_limit_sets_more(t: &mut Scene) {
    for i in 0..5 {
        t.put(&format!("k{i}"), "x").await;
    }
    for (limit, returned, more) in [(0, 5, false), (1, 1, true), (4, 4, true), (5, 5, false), (9, 5, false)] {
        let options = GetOptions::new().with_prefix().with_limit(limit);
        let response = t.client.get(t.prefix(), Some(options)).await.unwrap();
        assert_eq!(response.kvs().len(), returned, "limit {limit}");
        assert_eq!(response.more(), more, "limit {limit}");
        assert_eq!(response.count(), 5, "the count ignores the limit {limit}");
    }
    let sorted = GetOptions::new().with_prefix().with_sort(SortTarget::Key, SortOrder::Descend).with_limit(2);
    assert_eq!(t.names("", sorted).await, ["k4", "k3"]);
}

pub(crate) async fn every_sort_target_and_order(t: &mut Scene) {
    t.put("a", "3").await;
    t.put("b", "2").await;
    t.put("c", "1").await;
    t.put("b", "2").await; // version 2, modified last but one
    t.put("a", "3").await;
    t.put("a", "3").await; // version 3, modified last
    let cases = [
        (SortTarget::Key, ["a", "b", "c"]),
        (SortTarget::Version, ["c", "b", "a"]),
        (SortTarget::Create, ["a", "b", "c"]),
        (SortTarget::Mod, ["c", "b", "a"]),
        (SortTarget::Value, ["c", "b", "a"]),
    ];
    for (target, mut expected) in cases {
        for order in [SortOrder::Ascend, SortOrder::None] {
            let options = GetOptions::new().with_prefix().with_sort(target, order);
            assert_eq!(t.names("", options).await, expected, "{target:?} {order:?}");
        }
        expected.reverse();
        let options = GetOptions::new().with_prefix().with_sort(target, SortOrder::Descend);
        assert_eq!(t.names("", options).await, expected, "{target:?} descending");
    }
    // With a sort order the whole range is sorted and then limited; without one it is cut to one more than the limit,
    // sorted, and cut again.
    t.put("d", "0").await;
    t.put("e", "0").await;
    let first = |order| GetOptions::new().with_prefix().with_sort(SortTarget::Value, order).with_limit(2);
    assert_eq!(t.names("", first(SortOrder::Ascend)).await, ["d", "e"]);
    assert_eq!(t.names("", first(SortOrder::None)).await, ["c", "b"]);
}

pub(crate) async fn keys_only_and_count_only(t: &mut Scene) {
    for i in 0..3 {
        t.put(&format!("k{i}"), "value").await;
    }
    let keys =
        t.client.get(t.prefix(), Some(GetOptions::new().with_prefix().with_keys_only())).await.unwrap();
    assert_eq!(keys.kvs().len(), 3);
    assert!(keys.kvs().iter().all(|kv| kv.value().is_empty() && kv.mod_revision() > 0 && kv.version() == 1));
    let counted =
        t.client.get(t.prefix(), Some(GetOptions::new().with_prefix().with_count_only())).await.unwrap();
    assert_eq!((counted.kvs().len(), counted.count(), counted.more()), (0, 3, false));
    let limited = GetOptions::new().with_prefix().with_count_only().with_limit(1);
    assert_eq!(t.client.get(t.prefix(), Some(limited)).await.unwrap().count(), 3);
    assert_eq!(
        t.client.get(t.key("k1"), Some(GetOptions::new().with_count_only())).await.unwrap().count(),
        1
    );
    assert_eq!(
        t.client.get(t.key("none"), Some(GetOptions::new().with_count_only())).await.unwrap().count(),
        0
    );
}

pub(crate) async fn revision_bounds_filter_keys(t: &mut Scene) {
    let a = t.put("a", "1").await;
    let b = t.put("b", "1").await;
    let c = t.put("c", "1").await;
    let again = t.put("a", "2").await;
    let all = || GetOptions::new().with_prefix();
    let cases: [(GetOptions, &[&str]); 6] = [
        (all().with_min_mod_revision(c), &["a", "c"]),
        (all().with_max_mod_revision(b), &["b"]),
        (all().with_min_create_revision(b), &["b", "c"]),
        (all().with_max_create_revision(a), &["a"]),
        (all().with_min_mod_revision(b).with_max_mod_revision(c), &["b", "c"]),
        (all().with_min_mod_revision(again + 1_000_000), &[]),
    ];
    for (options, expected) in cases {
        assert_eq!(t.names("", options.clone()).await, expected, "{options:?}");
    }
    let bounded = t.client.get(t.prefix(), Some(all().with_min_mod_revision(c).with_limit(1))).await.unwrap();
    assert_eq!(
        (bounded.kvs().len(), bounded.more(), bounded.count()),
        (1, true, 3),
        "bounds come before the limit"
    );
}

pub(crate) async fn old_revisions_are_readable(t: &mut Scene) {
    let first = t.put("a", "1").await;
    let second = t.put("b", "1").await;
    let third = t.put("a", "2").await;
    let gone = t.delete("b").await;
    for (at, expected) in
        [(first, vec!["a=1"]), (second, vec!["a=1", "b=1"]), (third, vec!["a=2", "b=1"]), (gone, vec!["a=2"])]
    {
        let options = GetOptions::new().with_prefix().with_revision(at);
        let response = t.client.get(t.prefix(), Some(options)).await.unwrap();
        let found: Vec<String> = response
            .kvs()
            .iter()
            .map(|kv| format!("{}={}", t.name_of(kv), kv.value_str().unwrap()))
            .collect();
        assert_eq!(found, expected, "at {at}");
        assert_eq!(response.count(), i64::try_from(expected.len()).unwrap());
    }
    let future = GetOptions::new().with_revision(gone + 1_000_000);
    let key = t.key("a");
    refused(
        t.client.get(key, Some(future)).await,
        OUT_OF_RANGE,
        "etcdserver: mvcc: required revision is a future revision",
    );
}

pub(crate) async fn put_returns_prev_kv(t: &mut Scene) {
    let key = t.key("k");
    let with = || Some(PutOptions::new().with_prev_key());
    let first = t.client.put(key.clone(), "1", with()).await.unwrap();
    assert!(first.prev_key().is_none());
    let second = t.client.put(key.clone(), "2", with()).await.unwrap();
    let before = second.prev_key().unwrap();
    assert_eq!((before.key_str().unwrap(), before.value(), before.version()), (key.as_str(), &b"1"[..], 1));
    assert_eq!(before.mod_revision(), revision(first.header()));
    assert!(t.client.put(key, "3", None).await.unwrap().prev_key().is_none(), "only if asked");
}

pub(crate) async fn put_ignore_value_and_ignore_lease(t: &mut Scene) {
    let lease = t.client.lease_grant(60, None).await.unwrap().id();
    let key = t.key("k");
    let missing = "etcdserver: key not found";
    let keep_value = || Some(PutOptions::new().with_ignore_value());
    let keep_lease = || Some(PutOptions::new().with_ignore_lease());
    refused(t.client.put(key.clone(), "", keep_value()).await, INVALID_ARGUMENT, missing);
    refused(t.client.put(key.clone(), "x", keep_lease()).await, INVALID_ARGUMENT, missing);
    t.client.put(key.clone(), "kept", None).await.unwrap();
    t.client
        .put(key.clone(), "", Some(PutOptions::new().with_ignore_value().with_lease(lease)))
        .await
        .unwrap();
    let kv = t.get("k").await.unwrap();
    assert_eq!((kv.value(), kv.lease(), kv.version()), (&b"kept"[..], lease, 2));
    t.client.put(key.clone(), "new", keep_lease()).await.unwrap();
    let kv = t.get("k").await.unwrap();
    assert_eq!((kv.value(), kv.lease(), kv.version()), (&b"new"[..], lease, 3));
    t.client
        .put(key.clone(), "", Some(PutOptions::new().with_ignore_value().with_ignore_lease()))
        .await
        .unwrap();
    let kv = t.get("k").await.unwrap();
    assert_eq!((kv.value(), kv.lease(), kv.version()), (&b"new"[..], lease, 4));
    refused(
        t.client.put(key.clone(), "x", keep_value()).await,
        INVALID_ARGUMENT,
        "etcdserver: value is provided",
    );
    let both = PutOptions::new().with_ignore_lease().with_lease(lease);
    refused(t.client.put(key, "x", Some(both)).await, INVALID_ARGUMENT, "etcdserver: lease is provided");
}

pub(crate) async fn delete_returns_count_and_prev_kvs(t: &mut Scene) {
    for name in ["a", "b", "b/1", "c", "d"] {
        t.put(name, name).await;
    }
    let one = t.client.delete(t.key("a"), Some(DeleteOptions::new().with_prev_key())).await.unwrap();
    assert_eq!((one.deleted(), one.prev_kvs().len()), (1, 1));
    assert_eq!(one.prev_kvs()[0].value(), b"a");
    let prefix = DeleteOptions::new().with_prefix().with_prev_key();
    let some = t.client.delete(t.key("b"), Some(prefix)).await.unwrap();
    let before: Vec<String> = some.prev_kvs().iter().map(|kv| t.name_of(kv)).collect();
    assert_eq!((some.deleted(), before), (2, vec!["b".to_owned(), "b/1".to_owned()]));
    let range = DeleteOptions::new().with_range(t.key("d"));
    let some = t.client.delete(t.key("a"), Some(range)).await.unwrap();
    assert_eq!((some.deleted(), some.prev_kvs().len()), (1, 0));
    assert_eq!(t.names("", GetOptions::new().with_prefix()).await, ["d"]);
    assert_eq!(t.client.delete(t.key("a"), None).await.unwrap().deleted(), 0);
}

pub(crate) async fn malformed_requests_are_refused(t: &mut Scene) {
    let empty = "etcdserver: key is not provided";
    refused(t.client.put("", "x", None).await, INVALID_ARGUMENT, empty);
    refused(t.client.get("", None).await, INVALID_ARGUMENT, empty);
    refused(t.client.delete("", None).await, INVALID_ARGUMENT, empty);
    let key = t.key("k");
    refused(
        t.client.put(key.clone(), "x", Some(PutOptions::new().with_lease(0x7777))).await,
        NOT_FOUND,
        "etcdserver: requested lease not found",
    );
    assert!(t.get("k").await.is_none());
}

pub(crate) async fn oversized_requests_are_refused(t: &mut Scene) {
    let key = t.key("k");
    t.client.put(key.clone(), vec![1; 1 << 20], None).await.unwrap();
    assert_eq!(t.get("k").await.unwrap().value().len(), 1 << 20);
    refused(
        t.client.put(key.clone(), vec![2; (3 << 19) + 1], None).await,
        INVALID_ARGUMENT,
        "etcdserver: request is too large",
    );
    let (code, text) = refusal(t.client.put(key.clone(), vec![3; 3 << 20], None).await);
    assert_eq!(code, RESOURCE_EXHAUSTED, "{text}");
    assert!(text.contains("received message larger than max"), "{text}");
    assert_eq!(t.get("k").await.unwrap().value()[0], 1);
    t.put("k", "small").await;
}

pub(crate) async fn write_on_one_node_is_readable_on_every_node(t: &mut Scene) {
    let mut nodes = t.nodes().await;
    let key = t.key("k");
    for round in 0..10 {
        for writer in 0..nodes.len() {
            let value = format!("{round} by {writer}");
            let written = nodes[writer].put(key.clone(), value.clone(), None).await.unwrap();
            for (reader, node) in nodes.iter_mut().enumerate() {
                let response = node.get(key.clone(), None).await.unwrap();
                assert_eq!(response.kvs()[0].value_str().unwrap(), value, "node {reader}");
                assert!(revision(response.header()) >= revision(written.header()));
            }
        }
    }
}

pub(crate) async fn serializable_reads_become_current(t: &mut Scene) {
    t.put("k", "new").await;
    let key = t.key("k");
    for mut node in t.nodes().await {
        eventually("a serializable read of the new value", async || {
            let options = GetOptions::new().with_serializable();
            let response = node.get(key.clone(), Some(options)).await.unwrap();
            response.kvs().first().is_some_and(|kv| kv.value() == b"new")
        })
        .await;
    }
}
