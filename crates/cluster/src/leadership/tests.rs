//! Elections on every store: one leader at a time, also after a process pause or lost replies.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use moim_base::ManualClock;

use super::*;
use crate::context::Context;
use crate::events::ClusterEvent;
use crate::repository::TxnOutcome;
use crate::scenario::{Faults, Flaky, Resource, everywhere, in_memory, until};

fn candidate(context: &Context, ttl: Duration) -> CasElection {
    CasElection::new(context, "jobs", ElectionOptions { ttl, ..ElectionOptions::default() })
}

#[test]
fn one_candidate_leads_and_the_next_leader_has_a_larger_token() {
    everywhere(async |store| {
        let (a, b) = (store.node("a"), store.node("b"));
        let first = candidate(&a, store.ttl).campaign().await.unwrap();
        let found = candidate(&b, store.ttl).try_lead().await.unwrap().unwrap_err().unwrap();
        assert_eq!((found.node_id.as_str(), found.fencing_token), ("a", first.fencing_token()));
        let second = candidate(&b, store.ttl);
        let mut waiting = second.campaign();
        assert!(tokio::time::timeout(store.ttl, &mut waiting).await.is_err(), "{}", store.name);
        assert!(first.is_valid());
        let token = first.fencing_token();
        first.resign().await.unwrap();
        let second = waiting.await.unwrap();
        assert!(second.fencing_token() > token, "{}", store.name);
    });
}

#[test]
fn failed_leader_is_replaced_after_lease_expiry() {
    everywhere(async |store| {
        // The process crashes: the lease is neither renewed nor revoked.
        let flaky = Flaky::new(store.repository.clone());
        let mut a = store.node("a");
        a.repository = flaky.clone();
        let first = candidate(&a, store.ttl).campaign().await.unwrap();
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        let second = candidate(&store.node("b"), store.ttl).campaign().await.unwrap();
        assert!(!first.is_valid(), "{}: it stopped before the lease expiry", store.name);
        assert!(second.fencing_token() > first.fencing_token());
    });
}

#[test]
fn observers_see_every_leader() {
    everywhere(async |store| {
        let mut changes = candidate(&store.node("o"), store.ttl).observe();
        let a = store.node("a");
        let mut events = a.events.subscribe();
        let first = candidate(&a, store.ttl).campaign().await.unwrap();
        until("the leader is observed", async || {
            changes.current().filter(|leader| leader.node_id == "a").map(drop)
        })
        .await;
        let Some(Ok(ClusterEvent::Leader { leader, token, .. })) = events.next().await else { panic!() };
        assert_eq!((leader.as_deref(), token), (Some("a"), first.fencing_token()));
        first.resign().await.unwrap();
        loop {
            if changes.changed().await.unwrap().is_none() {
                break;
            }
        }
    });
}

#[test]
fn deleted_key_ends_the_leadership() {
    everywhere(async |store| {
        let a = store.node("a");
        let leadership = candidate(&a, Duration::from_secs(30)).campaign().await.unwrap();
        let mut events = a.events.subscribe();
        store.repository.txn(Txn::new().delete("cluster:leader/jobs")).await.unwrap();
        assert!(matches!(leadership.lost().await, SessionEnd::Taken(_)), "{}", store.name);
        assert!(!leadership.is_valid());
        loop {
            if let ClusterEvent::LeadershipLost { name, .. } = events.next().await.unwrap().unwrap() {
                break assert_eq!(name, "jobs");
            }
        }
    });
}

#[test]
fn deposed_leader_is_fenced_in_the_store() {
    everywhere(async |store| {
        let a = store.node("a");
        let first = candidate(&a, store.ttl).campaign().await.unwrap();
        let done = store.repository.txn(first.fenced(Txn::new().put("x", "1"))).await.unwrap();
        assert!(matches!(done, TxnOutcome::Done { .. }));
        let fence = first.fence();
        first.resign().await.unwrap();
        let _second = candidate(&store.node("b"), store.ttl).campaign().await.unwrap();
        let late = store.repository.txn(Txn::new().when(fence).put("x", "2")).await.unwrap();
        assert!(matches!(late, TxnOutcome::Conflict { .. }), "{}", store.name);
    });
}

#[test]
fn paused_leader_loses_validity_and_the_resource_rejects_its_token() {
    in_memory(async |store| {
        let clock = Arc::new(ManualClock::at(1_000));
        let paused = store.node("a").with_clock(clock.clone());
        let resource = Resource::default();
        let first = candidate(&paused, Duration::from_secs(10)).campaign().await.unwrap();
        assert!(first.is_valid() && resource.write(first.fencing_token(), "1"));
        // The leader checked its validity, was paused before its write, and another leader was elected
        // meanwhile.
        assert!(first.is_valid());
        clock.advance_ms(60_000);
        store.repository.txn(Txn::new().delete("cluster:leader/jobs")).await.unwrap();
        let second = candidate(&store.node("b"), store.ttl).campaign().await.unwrap();
        assert!(resource.write(second.fencing_token(), "2"));
        assert!(!resource.write(first.fencing_token(), "3"), "the token is stale");
        assert!(!first.is_valid(), "the next check fails");
        assert_eq!(resource.writes().len(), 2);
    });
}

#[test]
fn many_candidates_never_lead_concurrently() {
    in_memory(async |store| {
        let (leaders, terms) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for number in 0..5 {
            let flaky = Flaky::new(store.repository.clone());
            let mut context = store.node(&format!("n{number}"));
            context.repository = flaky.clone();
            let (leaders, terms, ttl) = (leaders.clone(), terms.clone(), store.ttl);
            store.scope.spawn("candidate", async move {
                loop {
                    flaky.set(Faults { lost_percent: 10, ..Faults::default() });
                    let leadership = candidate(&context, ttl).campaign().await.unwrap();
                    terms.fetch_add(1, Ordering::SeqCst);
                    for step in 0..20 {
                        if !leadership.is_valid() {
                            break;
                        }
                        assert_eq!(leaders.fetch_add(1, Ordering::SeqCst), 0, "two leaders");
                        leaders.fetch_sub(1, Ordering::SeqCst);
                        if step == 10 && fastrand::bool() {
                            flaky.set(Faults { unreachable: true, ..Faults::default() });
                        }
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    drop(leadership);
                }
            });
        }
        until("some terms have passed", async || (terms.load(Ordering::SeqCst) > 20).then_some(())).await;
        assert!(!store.scope.shutdown().has_panicked());
    });
}
