//! Seeded runs. Every invariant is checked continuously; see `check.rs`.

use super::*;
use crate::mutant::Mutant;

fn run(seeds: std::ops::Range<u64>, mutant: Option<Mutant>) -> Vec<RunReport> {
    run_as(Scenario::new, seeds, mutant)
}

fn run_as(kind: fn(u64) -> Scenario, seeds: std::ops::Range<u64>, mutant: Option<Mutant>) -> Vec<RunReport> {
    let run = |seed| {
        let mut scenario = kind(seed);
        scenario.mutants = mutant.map(Mutants::plant).unwrap_or_default();
        World::run(scenario)
    };
    seeds.map(run).collect()
}

/// The number of seeds to run: more with `MOIM_SIM_SEEDS`.
fn seeds() -> u64 {
    std::env::var("MOIM_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(150)
}

#[test]
fn no_acknowledged_record_is_lost_under_faults() {
    let seeds = seeds();
    let reports = run(0..seeds, None);
    let violations: Vec<&String> = reports.iter().filter_map(|report| report.violation.as_ref()).collect();
    assert_eq!(violations, Vec::<&String>::new());
    let acked: usize = reports.iter().map(|report| report.acked).sum();
    let elections: usize = reports.iter().map(|report| report.elections).sum();
    assert!(acked > seeds as usize * 200, "only {acked} records were acknowledged");
    assert!(elections > seeds as usize * 10, "only {elections} elections");
}

#[test]
fn no_acknowledged_record_is_lost_or_duplicated_during_cluster_changes() {
    let seeds = seeds();
    let reports = run_as(Scenario::changing, 0..seeds, None);
    let violations: Vec<&String> = reports.iter().filter_map(|report| report.violation.as_ref()).collect();
    assert_eq!(violations, Vec::<&String>::new());
    let acked: usize = reports.iter().map(|report| report.acked).sum();
    let changes: usize = reports.iter().map(|report| report.changes).sum();
    assert!(acked > seeds as usize * 150, "only {acked} records were acknowledged");
    assert!(changes > seeds as usize * 2, "only {changes} changes");
}

#[test]
fn hung_disk_stalls_commits_for_three_seconds_at_most() {
    let seeds = seeds();
    let reports = run_as(Scenario::hanging, 0..seeds, None);
    let violations: Vec<&String> = reports.iter().filter_map(|report| report.violation.as_ref()).collect();
    assert_eq!(violations, Vec::<&String>::new());
    let acked: usize = reports.iter().map(|report| report.acked).sum();
    assert!(acked > seeds as usize * 200, "only {acked} records were acknowledged");
}

#[test]
fn leader_that_keeps_a_hung_follower_in_sync_is_caught() {
    let seed = caught(Scenario::hanging, Mutant::KeepStalledFollower, 20);
    let violation =
        run_as(Scenario::hanging, seed..seed + 1, Some(Mutant::KeepStalledFollower))[0].violation.clone();
    assert!(violation.is_some_and(|violation| violation.contains("no record was acknowledged")));
}

#[test]
fn same_seed_gives_same_run() {
    assert_eq!(run(7..10, None), run(7..10, None));
    assert_ne!(run(7..8, None)[0].trace, run(8..9, None)[0].trace);
}

/// The number of seeds until the checker catches a planted bug.
fn caught(kind: fn(u64) -> Scenario, mutant: Mutant, within: u64) -> u64 {
    for seed in 0..within {
        // A partition that does not heal is no proof of lost data.
        let violation = run_as(kind, seed..seed + 1, Some(mutant))[0].violation.clone();
        let lost =
            |violation: &String| !violation.contains("did not heal") && !violation.contains("did not grow");
        if let Some(violation) = violation.filter(lost) {
            println!("{mutant:?} at {seed}: {violation}");
            return seed;
        }
    }
    panic!("{mutant:?} was not caught within {within} seeds");
}

#[test]
fn each_planted_bug_is_caught() {
    let mutants = [
        Mutant::TruncateByHighWatermark,
        Mutant::AckBeforeIsr,
        Mutant::TrustUncleanReplica,
        Mutant::IgnoreEpoch,
        Mutant::ForgetPendingIsr,
        Mutant::CommitUnderMinIsr,
        Mutant::ReuseLeaderEpoch,
    ];
    for mutant in mutants {
        caught(Scenario::new, mutant, 200);
    }
    caught(Scenario::changing, Mutant::ForgetProducers, 200);
}

#[test]
fn previously_failing_seeds_pass() {
    // A follower whose log ended at the leader's log start, in epochs that the leader had forgotten: it could not
    // continue, and when it could, it kept records that were never committed. A log end request that was never
    // repeated.
    for seed in [568, 603, 892, 1290, 1879] {
        assert_eq!(run(seed..seed + 1, None)[0].violation, None);
    }
    // An epoch that was noted without a record: in the epoch table it ended its predecessor, and the leader made a
    // follower truncate committed records. A node that was restored while suspected, and got no replicas.
    for seed in [432, 1988] {
        assert_eq!(run_as(Scenario::changing, seed..seed + 1, None)[0].violation, None);
    }
}
