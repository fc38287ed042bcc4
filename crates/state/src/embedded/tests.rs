//! The repository suite on coordination cores of one node and of three, called through a follower. The cases
//! about bounded buffers do not apply: a watch here is a position in the history.

use std::sync::{Arc, Mutex};

use moim_base::ManualClock;
use moim_coord::testing::TestCluster;

use super::*;
use crate::testing::Fixture;

fn quick(options: &mut coord::CoordinatorOptions) {
    options.group.timers = moim_raft::Timers { heartbeat_ms: 20, election_min_ms: 60, election_max_ms: 100 };
    options.group.snapshot_after = 100;
    options.group.keep_entries = 20;
}

fn repository(cluster: &TestCluster, at: usize) -> Arc<CoordRepository> {
    Arc::new(CoordRepository::under(cluster.node(at), "/moim/test"))
}

/// The suite calls from inside its runtime, which must not contain the cluster's own runtime.
fn on_other_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

fn fixture(count: usize) -> Fixture {
    let clock = Arc::new(ManualClock::at(1_000));
    let cluster = TestCluster::start_at(count, quick, clock.clone());
    cluster.settle();
    let at = if count > 1 { cluster.follower() } else { 0 };
    let repository_here = repository(&cluster, at);
    let cluster = Arc::new(Mutex::new(cluster));
    let passing = Arc::clone(&cluster);
    Fixture {
        repository: repository_here,
        advance_ms: Box::new(move |ms| {
            clock.advance_ms(ms);
            on_other_thread(|| passing.lock().unwrap().wait_leases_ended());
        }),
        restart: Some(Box::new(move || {
            on_other_thread(|| {
                let mut cluster = cluster.lock().unwrap();
                cluster.kill(at);
                cluster.start_node(at);
                cluster.settle();
                repository(&cluster, at)
            })
        })),
    }
}

fn one() -> Fixture {
    fixture(1)
}

fn three() -> Fixture {
    fixture(3)
}

mod one_node {
    use super::one;
    crate::conformance_tests!(one;
        key_revisions_follow_its_changes,
        compare_and_swap_succeeds_only_if_precondition_holds,
        transaction_is_atomic_over_many_keys,
        invalid_transaction_is_rejected,
        list_returns_exactly_the_prefix,
        concurrent_compare_and_swaps_lose_no_update,
        lease_expiry_deletes_its_keys,
        renewed_lease_does_not_expire,
        revoked_lease_ends_immediately,
        key_put_without_lease_outlives_its_old_lease,
        watch_delivers_every_event_in_order,
        watch_from_past_revision_delivers_history,
        list_then_watch_misses_no_event,
        restart_keeps_keys_revisions_and_leases,
    );
}

mod three_nodes {
    use super::three;
    crate::conformance_tests!(three;
        key_revisions_follow_its_changes,
        compare_and_swap_succeeds_only_if_precondition_holds,
        transaction_is_atomic_over_many_keys,
        invalid_transaction_is_rejected,
        list_returns_exactly_the_prefix,
        concurrent_compare_and_swaps_lose_no_update,
        lease_expiry_deletes_its_keys,
        renewed_lease_does_not_expire,
        revoked_lease_ends_immediately,
        key_put_without_lease_outlives_its_old_lease,
        watch_delivers_every_event_in_order,
        watch_from_past_revision_delivers_history,
        list_then_watch_misses_no_event,
        restart_keeps_keys_revisions_and_leases,
    );
}

#[test]
fn lagging_watch_receives_all_events_and_watch_of_compacted_revision_gets_a_gap() {
    let cluster = TestCluster::start(1, quick);
    cluster.settle();
    let store = repository(&cluster, 0);
    cluster.wait(async {
        let mut behind = store.watch("k", 0).await.unwrap();
        let first = store.list("").await.unwrap().0 + 1;
        for step in 0..40 {
            let txn = (0..100).fold(Txn::new(), |txn, i| txn.put(format!("k{i}"), format!("{step}")));
            store.txn(txn).await.unwrap();
        }
        for number in 0..4_000 {
            let event = behind.next().await.unwrap().unwrap();
            assert_eq!(event.revision(), first + number / 100);
        }
        let coordinator = store.coordinator();
        coordinator.compact(Origin::Node, coord::SpaceId::System, first + 20, true).await.unwrap();
        let mut late = store.watch("k", first).await.unwrap();
        assert_eq!(late.next().await, Some(Err(WatchGap::Compacted { oldest: first + 20 })));
        assert_eq!(late.next().await, None);
    });
}
