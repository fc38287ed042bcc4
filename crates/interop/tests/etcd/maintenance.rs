//! Status, hashes, snapshots, alarms, leader transfer.

use etcd_client::{AlarmAction, AlarmOptions, AlarmType, GetOptions, PutOptions, Txn, TxnOp};

use crate::support::*;

pub(crate) async fn status_reports_leader_and_raft_index(t: &mut Scene) {
    t.put("k", "1").await;
    let listed = t.client.member_list().await.unwrap();
    let ids: Vec<u64> = listed.members().iter().map(|member| member.id()).collect();
    let mut leaders = Vec::new();
    for mut node in t.nodes().await {
        let status = node.status().await.unwrap();
        assert!(status.version().starts_with("3."), "{}", status.version());
        assert!(status.db_size() > 0);
        assert!(status.raft_used_db_size() > 0 && status.raft_used_db_size() <= status.db_size());
        assert!(status.raft_term() > 0 && status.raft_index() > 0);
        assert!(status.raft_applied_index() <= status.raft_index());
        assert!(!status.is_learner() && status.errors().is_empty(), "{status:?}");
        assert!(ids.contains(&status.leader()), "{status:?}");
        leaders.push(status.leader());
    }
    leaders.dedup();
    assert_eq!(leaders.len(), 1);
}

pub(crate) async fn hash_kv_is_equal_on_all_nodes(t: &mut Scene) {
    t.put("a", "1").await;
    let at = t.put("b", "1").await;
    let key = t.key("b");
    let mut hashes = Vec::new();
    for mut node in t.nodes().await {
        node.get(key.clone(), None).await.unwrap(); // the node has caught up
        hashes.push(node.hash_kv(at).await.unwrap().hash());
        node.hash().await.unwrap();
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:x?}");
    let (mut one, mut other) = (t.node(0).await, t.node(0).await);
    let later = t.put("b", "2").await;
    one.get(key, None).await.unwrap();
    let changed = one.hash_kv(later).await.unwrap().hash();
    assert_ne!(changed, hashes[0]);
    assert_eq!(other.hash_kv(at).await.unwrap().hash(), hashes[0], "the past does not change");
    let future = other.hash_kv(later + 1_000_000).await;
    refused(future, OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision");
}

pub(crate) async fn snapshot_ends_with_its_checksum(t: &mut Scene) {
    for i in 0..50 {
        t.put(&format!("{i}"), &"x".repeat(1000)).await;
    }
    let mut stream = t.client.snapshot().await.unwrap();
    let mut bytes = Vec::new();
    let mut last_remaining = u64::MAX;
    while let Some(part) = stream.message().await.unwrap() {
        bytes.extend_from_slice(part.blob());
        assert!(part.remaining_bytes() <= last_remaining, "what remains shrinks");
        last_remaining = part.remaining_bytes();
    }
    assert_eq!(last_remaining, 0);
    assert!(bytes.len() > 50_000, "{}", bytes.len());
    assert_eq!(
        bytes.len() % 512,
        32,
        "whole sectors and a SHA-256, which is how etcdctl tells that there is one"
    );
}

pub(crate) async fn defragment_changes_nothing(t: &mut Scene) {
    t.put("k", "1").await;
    for mut node in t.nodes().await {
        node.defragment().await.unwrap();
    }
    assert_eq!(t.value("k").await.as_deref(), Some("1"));
}

pub(crate) async fn nospace_alarm_refuses_writes_that_grow(t: &mut Scene) {
    t.put("k", "1").await;
    let member = t.client.member_list().await.unwrap().members()[0].id();
    let on_member = || {
        let mut options = AlarmOptions::new();
        options.with_member(member);
        Some(options)
    };
    let none = t.client.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap();
    assert!(none.alarms().is_empty());
    let raised = t.client.alarm(AlarmAction::Activate, AlarmType::Nospace, on_member()).await.unwrap();
    assert_eq!(raised.alarms().len(), 1);
    for mut node in t.nodes().await {
        let listed = node.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap();
        assert_eq!(
            (listed.alarms()[0].member_id(), listed.alarms()[0].alarm()),
            (member, AlarmType::Nospace)
        );
    }
    let full = "etcdserver: mvcc: database space exceeded";
    let key = t.key("k");
    refused(t.client.put(key.clone(), "2", None).await, RESOURCE_EXHAUSTED, full);
    let put = TxnOp::put(key.clone(), "2", Some(PutOptions::new()));
    refused(t.client.txn(Txn::new().and_then([put])).await, RESOURCE_EXHAUSTED, full);
    refused(t.client.lease_grant(60, None).await, RESOURCE_EXHAUSTED, full);
    assert_eq!(t.value("k").await.as_deref(), Some("1"), "reads go on");
    let status = t.node(0).await.status().await.unwrap();
    assert!(status.errors().iter().any(|error| error.contains("NOSPACE")), "{status:?}");
    t.delete("k").await;
    let lowered = t.client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, on_member()).await.unwrap();
    assert_eq!(lowered.alarms().len(), 1);
    eventually("puts to be taken again", async || {
        let key = key.clone();
        t.client.put(key, "3", None).await.is_ok()
    })
    .await;
}

pub(crate) async fn move_leader_transfers_leadership(t: &mut Scene) {
    let mut nodes = t.nodes().await;
    let mut ids = Vec::new();
    for node in &mut nodes {
        ids.push(
            node.get("x", Some(GetOptions::new().with_count_only()))
                .await
                .unwrap()
                .header()
                .unwrap()
                .member_id(),
        );
    }
    let leader = nodes[0].status().await.unwrap().leader();
    let at = ids.iter().position(|id| *id == leader).unwrap();
    let unknown = nodes[at].move_leader(0x1234).await;
    refused(unknown, FAILED_PRECONDITION, "etcdserver: bad leader transferee");
    let Some(other) = ids.iter().position(|id| *id != leader) else { return };
    refused(nodes[other].move_leader(ids[other]).await, FAILED_PRECONDITION, "etcdserver: not leader");
    nodes[at].move_leader(ids[other]).await.unwrap();
    for node in &mut nodes {
        eventually("the new leader", async || node.status().await.unwrap().leader() == ids[other]).await;
    }
    t.put("k", "under the new leader").await;
}
