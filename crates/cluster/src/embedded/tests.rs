//! What the suite of all backends asks and what does not depend on whose clock it is, on one node of a real core.

use std::sync::Arc;

use moim_coord::testing::TestCluster;

use super::*;
use crate::testing::Fixture;

/// One node. Leases live on the leader's own clock, so no time can be made to pass.
fn fixture() -> Fixture {
    let cluster = TestCluster::start(1, |_| {});
    cluster.settle();
    let repository = Arc::new(CoordRepository::new(cluster.node(0)));
    let cluster = std::sync::Mutex::new(cluster);
    let advance_ms = Box::new(move |_| drop(cluster.lock().map(|_| panic!("this clock is not ours"))));
    Fixture { repository, advance_ms, restart: None }
}

crate::conformance_tests!(fixture;
    a_key_has_the_revisions_of_its_changes,
    compare_and_swap_wins_only_as_expected,
    a_transaction_compares_many_keys_and_changes_all_or_nothing,
    a_transaction_that_cannot_be_is_refused,
    a_listing_is_the_prefix_and_nothing_else,
    racing_swaps_lose_no_update,
    a_revoked_lease_is_gone_at_once,
    a_key_put_without_its_lease_outlives_it,
    a_watch_sees_every_change_in_order,
    a_watch_starts_in_the_past,
    a_listing_and_a_watch_leave_no_gap,
);
