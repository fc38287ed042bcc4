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
            a_key_has_revisions_and_a_version
            keys_and_values_are_any_bytes
            ranges_by_prefix_end_and_from_key
            a_limit_cuts_the_answer_and_says_so
            every_sort_target_and_order
            keys_only_and_count_only
            revision_bounds_filter_keys
            old_revisions_are_readable
            put_returns_what_was_before
            put_keeps_value_or_lease_if_asked
            delete_counts_and_returns_what_was_before
            malformed_requests_are_refused
            requests_have_a_size_limit
            what_one_node_took_every_node_has
            serializable_reads_catch_up;
        alone:
            revisions_count_changes_only;
    }
    txn {
        shared:
            every_comparison
            a_missing_key_compares_as_nothing
            a_range_is_compared_key_by_key
            operations_see_those_before_them
            nested_transactions
            all_changes_have_one_revision
            a_refused_step_refuses_the_whole
            a_read_of_the_future_refuses_the_whole
            duplicate_keys_are_refused
            operations_are_counted
            counters_lose_no_increment;
        alone:;
    }
    compaction {
        shared:;
        alone:
            what_is_compacted_is_refused
            compaction_keeps_what_is_current
            bad_compactions_are_refused
            a_watch_from_before_is_cancelled;
    }
    lease {
        shared:
            a_lease_has_an_id_and_a_time
            a_given_id_is_taken_once
            keys_end_with_their_lease
            a_lease_that_is_not_renewed_ends
            a_renewed_lease_lives
            a_key_can_change_its_lease
            unknown_leases
            leases_are_listed
            every_node_renews;
        alone:;
    }
    watch {
        shared:
            changes_arrive_in_order
            history_is_replayed_from_a_revision
            a_future_revision_is_awaited
            a_transaction_arrives_whole
            the_value_before_is_sent_if_asked
            filters_leave_out_kinds
            one_stream_has_many_watchers
            a_cancelled_watcher_is_silent
            own_ids_are_kept_and_not_shared
            an_empty_range_is_refused
            progress_is_told_on_request
            a_large_revision_is_split_only_if_asked
            nothing_is_missed_across_nodes
            a_range_of_keys_and_all_from_a_key;
        alone:;
    }
    lock {
        shared:
            the_next_in_line_waits
            the_end_of_a_lease_frees_its_lock
            a_lock_needs_no_lease
            never_two_holders;
        alone:;
    }
    election {
        shared:
            a_leader_campaigns_proclaims_and_resigns
            the_next_candidate_follows
            observers_see_every_leader
            who_does_not_lead_cannot_speak;
        alone:;
    }
    members {
        shared:
            every_node_lists_all
            headers_name_cluster_and_member
            unknown_members
            authentication_is_off
            plain_http_answers;
        alone:
            a_learner_comes_and_goes;
    }
    maintenance {
        shared:
            status_tells_leader_and_progress
            nodes_agree_on_the_hash
            a_snapshot_ends_with_its_checksum
            defragment_changes_nothing;
        alone:
            no_space_refuses_what_grows
            leadership_moves_on_request;
    }
}
