//! Compaction: compacted revisions are refused, current ones stay.

use etcd_client::{CompactionOptions, GetOptions, Txn, TxnOp, WatchOptions};

use crate::support::*;

const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

pub(crate) async fn compacted_revision_is_refused(t: &mut Scene) {
    let first = t.put("k", "1").await;
    let second = t.put("k", "2").await;
    let third = t.put("k", "3").await;
    t.client.compact(second, None).await.unwrap();
    let key = t.key("k");
    let at = |revision| Some(GetOptions::new().with_revision(revision));
    for mut node in t.nodes().await {
        // A linearizable read lets the node catch up before it is asked for a past revision.
        node.get(key.clone(), None).await.unwrap();
        refused(node.get(key.clone(), at(first)).await, OUT_OF_RANGE, COMPACTED);
        for (revision, value) in [(second, "2"), (third, "3")] {
            let response = node.get(key.clone(), at(revision)).await.unwrap();
            assert_eq!(response.kvs()[0].value_str().unwrap(), value);
        }
    }
    let txn = Txn::new().and_then([TxnOp::get(key, at(first))]);
    refused(t.client.txn(txn).await, OUT_OF_RANGE, COMPACTED);
}

pub(crate) async fn compaction_keeps_current_values(t: &mut Scene) {
    for i in 0..20 {
        t.put(&format!("k{:02}", i % 10), &i.to_string()).await;
    }
    for i in 0..5 {
        t.delete(&format!("k{i:02}")).await;
    }
    let now = t.put("last", "x").await;
    t.client.compact(now, Some(CompactionOptions::new().with_physical())).await.unwrap();
    let names = t.names("", GetOptions::new().with_prefix()).await;
    assert_eq!(names, ["k05", "k06", "k07", "k08", "k09", "last"]);
    let kv = t.get("k07").await.unwrap();
    assert_eq!((kv.value(), kv.version()), (&b"17"[..], 2), "versions survive");
    t.put("k07", "again").await;
    assert_eq!(t.get("k07").await.unwrap().version(), 3);
    t.put("k00", "back").await;
    assert_eq!(t.get("k00").await.unwrap().version(), 1);
}

pub(crate) async fn invalid_compaction_revisions_are_refused(t: &mut Scene) {
    t.put("k", "1").await;
    let now = t.put("k", "2").await;
    t.client.compact(now - 1, None).await.unwrap();
    refused(t.client.compact(now - 1, None).await, OUT_OF_RANGE, COMPACTED);
    refused(t.client.compact(1, None).await, OUT_OF_RANGE, COMPACTED);
    let future = "etcdserver: mvcc: required revision is a future revision";
    refused(t.client.compact(now + 1_000, None).await, OUT_OF_RANGE, future);
    t.client.compact(now, None).await.unwrap();
}

pub(crate) async fn watch_from_a_compacted_revision_is_cancelled(t: &mut Scene) {
    let first = t.put("k", "1").await;
    let second = t.put("k", "2").await;
    let third = t.put("k", "3").await;
    t.client.compact(second, None).await.unwrap();
    let key = t.key("k");
    for mut node in t.nodes().await {
        node.get(key.clone(), None).await.unwrap();
        let from = |revision| Some(WatchOptions::new().with_start_revision(revision));
        let mut watch = node.watch(key.clone(), from(first)).await.unwrap();
        let id = created(&mut watch).await.watch_id();
        let end = next(&mut watch).await;
        assert!(end.canceled(), "{end:?}");
        assert_eq!((end.watch_id(), end.compact_revision()), (id, second));
        // The stream continues for other watches.
        watch.watch(key.clone(), from(second)).await.unwrap();
        created(&mut watch).await;
        let seen = events(&mut watch, &t.prefix(), 2).await;
        assert_eq!(seen, [format!("+k=2@{second}"), format!("+k=3@{third}")]);
    }
}
