//! A short run of seeds of the coordination core; the repeatability of a run; planted bugs are found.
#![allow(clippy::unwrap_used)]

use moim_sim::{Options, run, run_traced};

fn short(seed: u64) -> Options {
    Options { faults_ms: 2_500, ..Options::new(seed) }
}

/// Runs `count` seeds from `first` on, and checks that clients and faults were active.
fn check(first: u64, count: u64, nodes: usize) {
    let (mut answered, mut terms, mut leases) = (0, 0, 0);
    for seed in first..first + count {
        let report = run(Options { nodes, ..short(seed) }).unwrap_or_else(|failure| panic!("{failure}"));
        answered += report.answered;
        terms += report.terms;
        leases += report.leases;
    }
    // A run without operations and faults proves nothing.
    assert!(answered > 20 * count, "{answered} operations were answered");
    assert!(leases > count, "{leases} leases were granted");
    assert!(terms > usize::try_from(count).unwrap(), "{terms} terms had a leader");
}

#[test]
fn three_to_five_nodes_survive_faults() {
    check(1, 20, 0);
}

#[test]
fn seven_nodes_survive_faults() {
    check(1_000, 4, 7);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [7, 8] {
        let (first, first_trace) = run_traced(short(seed));
        // Another run in between: it must leave no state behind.
        let (other, _) = run_traced(short(seed + 100));
        let (second, second_trace) = run_traced(short(seed));
        let differs = first_trace.iter().zip(&second_trace).position(|(first, second)| first != second);
        assert_eq!(differs, None, "seed {seed} gave another trace");
        assert_eq!(first.as_ref().unwrap(), second.as_ref().unwrap());
        assert_ne!(first.unwrap().hash, other.unwrap().hash);
    }
}

/// Each planted bug must be found within these seeds.
#[cfg(feature = "planted")]
#[test]
fn every_planted_bug_is_found() {
    use moim_raft::planted::{Bug, plant};
    for bug in Bug::ALL {
        plant(Some(bug));
        let found = (1..=60).find_map(|seed| run(Options::new(seed)).err());
        plant(None);
        assert!(found.is_some(), "{bug:?} was not found");
    }
}
