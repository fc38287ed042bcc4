//! Leases: grant, keep-alive, expiry, revocation, and the attached keys.

use std::time::{Duration, Instant};

use etcd_client::{Error, GetOptions, LeaseGrantOptions, LeaseTimeToLiveOptions, PutOptions, WatchOptions};

use crate::support::*;

const NOT_FOUND_TEXT: &str = "etcdserver: requested lease not found";
/// The minimum lease TTL of the real etcd.
const SHORTEST_S: i64 = 2;

pub(crate) async fn lease_grant_returns_id_and_ttl(t: &mut Scene) {
    let granted = t.client.lease_grant(60, None).await.unwrap();
    assert_eq!((granted.ttl(), granted.error()), (60, ""));
    assert!(granted.id() > 0);
    let other = t.client.lease_grant(60, None).await.unwrap();
    assert_ne!(granted.id(), other.id());
    for mut node in t.nodes().await {
        let left = node.lease_time_to_live(granted.id(), None).await.unwrap();
        assert_eq!((left.id(), left.granted_ttl()), (granted.id(), 60));
        assert!((55..=60).contains(&left.ttl()), "{}", left.ttl());
        assert!(left.keys().is_empty());
    }
    let shortest = t.client.lease_grant(0, None).await.unwrap();
    assert!(shortest.ttl() >= 1, "there is a shortest time");
    refused(t.client.lease_grant(9_000_000_001, None).await, OUT_OF_RANGE, "etcdserver: too large lease TTL");
}

pub(crate) async fn duplicate_lease_id_is_refused(t: &mut Scene) {
    let id = fastrand::i64(1..i64::MAX);
    let with = || Some(LeaseGrantOptions::new().with_id(id));
    assert_eq!(t.client.lease_grant(60, with()).await.unwrap().id(), id);
    refused(t.client.lease_grant(60, with()).await, FAILED_PRECONDITION, "etcdserver: lease already exists");
    t.client.lease_revoke(id).await.unwrap();
    assert_eq!(t.client.lease_grant(60, with()).await.unwrap().id(), id);
}

pub(crate) async fn lease_revoke_deletes_attached_keys(t: &mut Scene) {
    let lease = t.client.lease_grant(60, None).await.unwrap().id();
    for name in ["a", "b", "c"] {
        let key = t.key(name);
        t.client.put(key, "x", Some(PutOptions::new().with_lease(lease))).await.unwrap();
    }
    let last = t.put("free", "x").await;
    let with_keys = LeaseTimeToLiveOptions::new().with_keys();
    let info = t.client.lease_time_to_live(lease, Some(with_keys)).await.unwrap();
    let mut keys: Vec<String> =
        info.keys().iter().map(|key| String::from_utf8(key.clone()).unwrap()).collect();
    keys.sort();
    assert_eq!(keys, [t.key("a"), t.key("b"), t.key("c")]);
    let later = WatchOptions::new().with_prefix().with_start_revision(last + 1);
    let mut watch = t.client.watch(t.prefix(), Some(later)).await.unwrap();
    created(&mut watch).await;
    let revoked = t.client.lease_revoke(lease).await.unwrap();
    assert_eq!(t.names("", GetOptions::new().with_prefix()).await, ["free"]);
    let response = next(&mut watch).await;
    let mut ended = described(&response, &t.prefix());
    ended.sort();
    let at = response.events()[0].kv().unwrap().mod_revision();
    assert_eq!(ended, [format!("-a@{at}"), format!("-b@{at}"), format!("-c@{at}")], "all at one revision");
    assert!(at <= revision(revoked.header()));
}

pub(crate) async fn lease_without_keep_alive_expires(t: &mut Scene) {
    let mut watch = t.client.watch(t.key("k"), None).await.unwrap();
    created(&mut watch).await;
    let start = Instant::now();
    let granted = t.client.lease_grant(SHORTEST_S, None).await.unwrap();
    let key = t.key("k");
    t.client.put(key, "x", Some(PutOptions::new().with_lease(granted.id()))).await.unwrap();
    let seen = events(&mut watch, &t.prefix(), 2).await;
    let took = start.elapsed();
    assert!(seen[1].starts_with("-k@"), "{seen:?}");
    let ttl = Duration::from_secs(u64::try_from(granted.ttl()).unwrap());
    assert!(took >= ttl, "ended after {took:?}, before its time of {ttl:?}");
    assert!(took < ttl + Duration::from_secs(5), "ended after {took:?} only");
    assert_eq!(t.client.lease_time_to_live(granted.id(), None).await.unwrap().ttl(), -1);
}

pub(crate) async fn keep_alive_prolongs_a_lease(t: &mut Scene) {
    let granted = t.client.lease_grant(SHORTEST_S, None).await.unwrap();
    let key = t.key("k");
    t.client.put(key, "x", Some(PutOptions::new().with_lease(granted.id()))).await.unwrap();
    let (mut keeper, mut answers) = t.client.lease_keep_alive(granted.id()).await.unwrap();
    let end = Instant::now() + Duration::from_secs(u64::try_from(3 * granted.ttl()).unwrap());
    while Instant::now() < end {
        keeper.keep_alive().await.unwrap();
        let answer = tokio::time::timeout(PATIENCE, answers.message()).await.unwrap().unwrap().unwrap();
        assert_eq!((answer.id(), answer.ttl()), (granted.id(), granted.ttl()));
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    assert!(t.get("k").await.is_some());
    t.client.lease_revoke(granted.id()).await.unwrap();
    assert!(t.get("k").await.is_none());
    keeper.keep_alive().await.unwrap();
    let answer = tokio::time::timeout(PATIENCE, answers.message()).await.unwrap().unwrap().unwrap();
    assert_eq!((answer.id(), answer.ttl()), (granted.id(), 0), "an ended lease is not renewed");
}

pub(crate) async fn key_can_change_its_lease(t: &mut Scene) {
    let first = t.client.lease_grant(60, None).await.unwrap().id();
    let second = t.client.lease_grant(60, None).await.unwrap().id();
    let with = |lease| Some(PutOptions::new().with_lease(lease));
    for name in ["freed", "moved", "kept", "back"] {
        let key = t.key(name);
        t.client.put(key, "x", with(first)).await.unwrap();
    }
    t.put("freed", "x").await;
    t.client.put(t.key("moved"), "x", with(second)).await.unwrap();
    t.delete("back").await;
    t.put("back", "x").await;
    assert_eq!(t.get("freed").await.unwrap().lease(), 0);
    assert_eq!(t.get("moved").await.unwrap().lease(), second);
    t.client.lease_revoke(first).await.unwrap();
    assert_eq!(t.names("", GetOptions::new().with_prefix()).await, ["back", "freed", "moved"]);
    t.client.lease_revoke(second).await.unwrap();
    assert_eq!(t.names("", GetOptions::new().with_prefix()).await, ["back", "freed"]);
}

pub(crate) async fn unknown_lease_is_not_found(t: &mut Scene) {
    let unknown = fastrand::i64(1..i64::MAX);
    refused(t.client.lease_revoke(unknown).await, NOT_FOUND, NOT_FOUND_TEXT);
    let info = t.client.lease_time_to_live(unknown, None).await.unwrap();
    assert_eq!((info.id(), info.ttl(), info.granted_ttl(), info.keys().len()), (unknown, -1, 0, 0));
    let renewed = t.client.lease_keep_alive(unknown).await;
    assert!(matches!(renewed, Err(Error::LeaseKeepAliveError(_))), "its answer is a time of 0");
    let key = t.key("k");
    let put = t.client.put(key, "x", Some(PutOptions::new().with_lease(unknown))).await;
    refused(put, NOT_FOUND, NOT_FOUND_TEXT);
}

pub(crate) async fn leases_are_listed(t: &mut Scene) {
    let mut mine = Vec::new();
    for _ in 0..3 {
        mine.push(t.client.lease_grant(60, None).await.unwrap().id());
    }
    for mut node in t.nodes().await {
        eventually("all leases in the list", async || {
            let listed = node.leases().await.unwrap();
            let ids: Vec<i64> = listed.leases().iter().map(|lease| lease.id()).collect();
            mine.iter().all(|id| ids.contains(id))
        })
        .await;
    }
    t.client.lease_revoke(mine[0]).await.unwrap();
    eventually("the ended one to be gone", async || {
        let listed = t.client.leases().await.unwrap();
        !listed.leases().iter().any(|lease| lease.id() == mine[0])
    })
    .await;
}

pub(crate) async fn keep_alive_works_on_every_node(t: &mut Scene) {
    let lease = t.client.lease_grant(60, None).await.unwrap().id();
    for mut node in t.nodes().await {
        let (mut keeper, mut answers) = node.lease_keep_alive(lease).await.unwrap();
        keeper.keep_alive().await.unwrap();
        let answer = tokio::time::timeout(PATIENCE, answers.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(answer.ttl(), 60);
        let id = node.lease_grant(60, None).await.unwrap().id();
        node.lease_revoke(id).await.unwrap();
    }
}
