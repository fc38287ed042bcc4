//! The etcd v3 API through the `etcd-client` crate: one suite, run on one Moim node, on three, and on a real etcd.
//!
//! The real etcd is the reference: `MOIM_TEST_ETCD` names its binary or its servers, or an installed `etcd` is
//! started. Without one, its part prints that and is skipped. Every case has its own keys, so cases share a cluster;
//! cases that compact, raise alarms or count revisions use it exclusively.

#![allow(clippy::disallowed_methods)] // real processes, real time
#![allow(clippy::unwrap_used)] // all of it is test

mod compaction;
mod election;
mod faults;
mod kv;
mod lease;
mod lock;
mod maintenance;
mod members;
mod support;
mod txn;
mod watch;

/// Runs every case once per target. A case that is missing here is dead code, and the compiler reports it.
macro_rules! suite {
    ($($list:tt)*) => {
        on_target!(on_etcd, Etcd, $($list)*);
        on_target!(on_one_node, OneNode, $($list)*);
        on_target!(on_three_nodes, ThreeNodes, $($list)*);
    };
}

macro_rules! on_target {
    ($module:ident, $target:ident, $($area:ident { shared: $($shared:ident)*; alone: $($alone:ident)*; })*) => {
        mod $module {
            $(mod $area {
                use crate::support::{Target, Use, run};
                $(#[test]
                fn $shared() {
                    run(Target::$target, Use::Shared, crate::$area::$shared);
                })*
                $(#[test]
                fn $alone() {
                    run(Target::$target, Use::Alone, crate::$area::$alone);
                })*
            })*
        }
    };
}

suite! {
    kv {
        shared:
            put_sets_revisions_and_version
            keys_and_values_are_arbitrary_bytes
            ranges_by_prefix_end_and_from_key
            range_limit_sets_more
            every_sort_target_and_order
            keys_only_and_count_only
            revision_bounds_filter_keys
            old_revisions_are_readable
            put_returns_prev_kv
            put_ignore_value_and_ignore_lease
            delete_returns_count_and_prev_kvs
            malformed_requests_are_refused
            oversized_requests_are_refused
            write_on_one_node_is_readable_on_every_node
            serializable_reads_become_current;
        alone:
            only_changes_increment_the_revision;
    }
    txn {
        shared:
            every_comparison
            missing_key_compares_as_zero
            range_compare_holds_for_every_key
            operations_see_earlier_operations_of_the_transaction
            nested_transactions
            transaction_has_one_mod_revision
            refused_operation_refuses_the_transaction
            future_revision_read_refuses_the_transaction
            duplicate_keys_are_refused
            max_txn_ops_is_enforced
            concurrent_increments_are_not_lost;
        alone:;
    }
    compaction {
        shared:;
        alone:
            compacted_revision_is_refused
            compaction_keeps_current_values
            invalid_compaction_revisions_are_refused
            watch_from_a_compacted_revision_is_cancelled;
    }
    lease {
        shared:
            lease_grant_returns_id_and_ttl
            duplicate_lease_id_is_refused
            lease_revoke_deletes_attached_keys
            lease_without_keep_alive_expires
            keep_alive_prolongs_a_lease
            key_can_change_its_lease
            unknown_lease_is_not_found
            leases_are_listed
            keep_alive_works_on_every_node;
        alone:;
    }
    watch {
        shared:
            events_arrive_in_revision_order
            watch_replays_history_from_a_revision
            watch_from_a_future_revision_waits
            transaction_events_arrive_in_one_response
            watch_returns_prev_kv_on_request
            filters_exclude_event_types
            one_stream_carries_many_watches
            cancelled_watch_sends_no_events
            client_chosen_watch_ids_are_unique
            empty_range_is_refused
            progress_request_is_answered
            large_revision_is_fragmented_only_on_request
            watch_misses_no_event_across_nodes
            watch_of_a_range_and_from_a_key;
        alone:;
    }
    lock {
        shared:
            lock_is_granted_in_request_order
            lease_expiry_releases_the_lock
            lock_without_a_lease
            lock_has_one_holder_at_a_time;
        alone:;
    }
    election {
        shared:
            leader_campaigns_proclaims_and_resigns
            next_candidate_is_elected_after_resign
            observe_returns_every_leader
            proclaim_by_a_non_leader_is_refused;
        alone:;
    }
    members {
        shared:
            every_node_lists_all_members
            headers_name_cluster_and_member
            unknown_members
            authentication_is_off
            plain_http_endpoints_answer;
        alone:
            learner_is_added_and_removed;
    }
    maintenance {
        shared:
            status_reports_leader_and_raft_index
            hash_kv_is_equal_on_all_nodes
            snapshot_ends_with_its_checksum
            defragment_changes_nothing;
        alone:
            nospace_alarm_refuses_writes_that_grow
            move_leader_transfers_leadership;
    }
}
