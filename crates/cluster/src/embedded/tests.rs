//! The suite on coordination cores of one node and of three, asked through a follower; the cases about bounded
//! buffers are not ours: a watch here is a position in history.

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

/// The suite calls from inside its runtime, which the cluster's own must not be in.
fn aside<T: Send>(work: impl FnOnce() -> T + Send) -> T {
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
            aside(|| passing.lock().unwrap().wait_leases_ended());
        }),
        restart: Some(Box::new(move || {
            aside(|| {
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
        a_key_has_the_revisions_of_its_changes,
        compare_and_swap_wins_only_as_expected,
        a_transaction_compares_many_keys_and_changes_all_or_nothing,
        a_transaction_that_cannot_be_is_refused,
        a_listing_is_the_prefix_and_nothing_else,
        racing_swaps_lose_no_update,
        a_lease_takes_its_keys_when_it_ends,
        a_lease_that_is_kept_alive_stays,
        a_revoked_lease_is_gone_at_once,
        a_key_put_without_its_lease_outlives_it,
        a_watch_sees_every_change_in_order,
        a_watch_starts_in_the_past,
        a_listing_and_a_watch_leave_no_gap,
        a_restart_keeps_everything,
    );
}

mod three_nodes {
    use super::three;
    crate::conformance_tests!(three;
        a_key_has_the_revisions_of_its_changes,
        compare_and_swap_wins_only_as_expected,
        a_transaction_compares_many_keys_and_changes_all_or_nothing,
        a_transaction_that_cannot_be_is_refused,
        a_listing_is_the_prefix_and_nothing_else,
        racing_swaps_lose_no_update,
        a_lease_takes_its_keys_when_it_ends,
        a_lease_that_is_kept_alive_stays,
        a_revoked_lease_is_gone_at_once,
        a_key_put_without_its_lease_outlives_it,
        a_watch_sees_every_change_in_order,
        a_watch_starts_in_the_past,
        a_listing_and_a_watch_leave_no_gap,
        a_restart_keeps_everything,
    );
}

#[test]
fn a_watch_far_behind_hears_everything_and_one_before_history_is_told() {
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
