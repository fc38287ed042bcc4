//! Members that join, miss heartbeats, leave and have duplicate ids, on every store.

use moim_base::ManualClock;
use std::sync::Arc;

use super::*;
use crate::events::ClusterEvent;
use crate::scenario::{Faults, Flaky, Store, everywhere, in_memory, until};

fn info(id: &str) -> NodeInfo {
    NodeInfo {
        id: id.to_owned(),
        host: "127.0.0.1".to_owned(),
        port: 7,
        roles: vec!["worker".to_owned()],
        zone: "z1".to_owned(),
        metadata: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
        ..NodeInfo::default()
    }
}

fn options(store: &Store) -> HeartbeatOptions {
    HeartbeatOptions { interval: store.ttl / 8, timeout: store.ttl / 2 }
}

async fn status_of(monitor: &Monitor, id: &str, wanted: MemberStatus) {
    let what = format!("{id} is {wanted:?}");
    until(&what, async || monitor.get(id).filter(|member| member.status == wanted).map(drop)).await;
}

#[test]
fn members_join_are_seen_and_leave() {
    everywhere(async |store| {
        let observer = store.node("o");
        let monitor = Monitor::start(&observer, &options(&store)).await.unwrap();
        let (snapshot, mut stream) = monitor.subscribe();
        assert!(snapshot.is_empty());
        let a = Membership::join(&store.node("a"), info("a"), &options(&store)).await.unwrap();
        status_of(&monitor, "a", MemberStatus::Up).await;
        tokio::time::sleep(store.ttl * 2).await;
        assert_eq!(monitor.up().len(), 1, "{}: heartbeats keep it up", store.name);
        let entry = store.repository.get("cluster:nodes/a").await.unwrap().unwrap();
        let record: serde_json::Value = serde_json::from_slice(&entry.value).unwrap();
        assert_eq!((&record["status"], &record["zone"]), (&"UP".into(), &"z1".into()));
        assert!(record["lastHeartbeat"].as_i64().unwrap() > 0 && record["sequence"].as_i64().unwrap() > 2);
        a.leave().await.unwrap();
        status_of(&monitor, "a", MemberStatus::Left).await;
        assert!(store.repository.get("cluster:nodes/a").await.unwrap().is_none());
        let mut seen = Vec::new();
        while seen.last() != Some(&MemberStatus::Left) {
            let event = stream.next().await.unwrap().unwrap();
            assert!(!event.reason.is_empty());
            seen.push(event.status);
        }
        assert_eq!(seen, [MemberStatus::Up, MemberStatus::Left], "{}", store.name);
    });
}

#[test]
fn silent_member_is_suspect_then_down_then_up_again() {
    everywhere(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let mut a = store.node("a");
        a.repository = flaky.clone();
        let observer = store.node("o");
        let monitor = Monitor::start(&observer, &options(&store)).await.unwrap();
        let mut events = observer.events.subscribe();
        let member = Membership::join(&a, info("a"), &options(&store)).await.unwrap();
        status_of(&monitor, "a", MemberStatus::Up).await;
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        let mut seen = Vec::new();
        while seen.last() != Some(&MemberStatus::Down) {
            if let Some(Ok(ClusterEvent::Member(event))) = events.next().await {
                seen.push(event.status);
            }
        }
        assert_eq!(seen, [MemberStatus::Up, MemberStatus::Suspect, MemberStatus::Down], "{}", store.name);
        assert!(!member.is_valid(), "the member detects its own expiry");
        drop(member);
        flaky.set(Faults::default());
        let _back = Membership::join(&a, info("a"), &options(&store)).await.unwrap();
        status_of(&monitor, "a", MemberStatus::Up).await;
    });
}

#[test]
fn second_process_with_the_same_id_waits_for_lease_expiry() {
    everywhere(async |store| {
        let first = Membership::join(&store.node("a"), info("a"), &options(&store)).await.unwrap();
        let second = Membership::join(&store.node("a"), info("a"), &options(&store)).await;
        assert!(matches!(second, Err(JoinError::DuplicateNode { .. })), "{}", store.name);
        assert!(first.is_valid());
        // The record of a crashed process is replaced after its lease has expired, and not before.
        let lease = store.repository.grant(store.ttl).await.unwrap();
        let left = NodeRecord { info: info("b"), incarnation: 7, ..NodeRecord::default() };
        let txn = Txn::new().put_leased("cluster:nodes/b", left.to_bytes(), lease.id);
        store.repository.txn(txn).await.unwrap();
        let b = Membership::join(&store.node("b"), info("b"), &options(&store)).await.unwrap();
        assert!(b.is_valid());
        assert!(store.repository.keep_alive(lease.id).await.is_err(), "{}: it waited", store.name);
        // A process whose record was replaced stops.
        let replacement = NodeRecord { info: info("b"), incarnation: 8, ..NodeRecord::default() };
        store.repository.txn(Txn::new().delete("cluster:nodes/b")).await.unwrap();
        store.repository.txn(Txn::new().put("cluster:nodes/b", replacement.to_bytes())).await.unwrap();
        assert!(matches!(b.lost().await, SessionEnd::Taken(_)));
    });
}

#[test]
fn invalid_ids_and_malformed_records_are_rejected() {
    in_memory(async |store| {
        for id in ["", "a/b"] {
            let refused = Membership::join(&store.node(id), info(id), &options(&store)).await;
            assert!(matches!(refused, Err(JoinError::BadId(_))));
        }
        let observer = store.node("o");
        let mut events = observer.events.subscribe();
        store.repository.txn(Txn::new().put("cluster:nodes/x", "{")).await.unwrap();
        let monitor = Monitor::start(&observer, &options(&store)).await.unwrap();
        let event = events.next().await.unwrap().unwrap();
        assert!(matches!(event, ClusterEvent::Malformed { key, .. } if key == "cluster:nodes/x"));
        assert!(monitor.view().is_empty());
    });
}

#[test]
fn wall_clock_jump_does_not_change_member_status() {
    in_memory(async |store| {
        let clock = Arc::new(ManualClock::at(10_000_000));
        let observer = store.node("o").with_clock(clock.clone());
        let monitor = Monitor::start(&observer, &options(&store)).await.unwrap();
        let _a = Membership::join(&store.node("a"), info("a"), &options(&store)).await.unwrap();
        status_of(&monitor, "a", MemberStatus::Up).await;
        let mut events = observer.events.subscribe();
        for wall in [0, i64::MAX / 2] {
            clock.jump_wall_to_ms(wall);
            tokio::time::sleep(store.ttl).await;
            assert_eq!(monitor.up().len(), 1);
        }
        let event = tokio::time::timeout(Duration::from_millis(10), events.next()).await;
        assert!(event.is_err(), "{event:?}");
    });
}
