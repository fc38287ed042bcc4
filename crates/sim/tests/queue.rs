//! The queue from seeds: transactions are atomic and a group copies every record once, under faults.
#![allow(clippy::unwrap_used)]

use moim_sim::{QueueOptions, QueueReport, run_queue};

/// Number of seeds; override with `MOIM_SIM_SEEDS`.
fn seeds(default: u64) -> u64 {
    std::env::var("MOIM_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(default)
}

#[test]
fn transactions_are_atomic_and_group_copies_exactly_once_under_faults() {
    let (mut all, seeds) = (QueueReport::default(), seeds(10));
    for seed in 1..=seeds {
        let options = QueueOptions { faults_ms: 4_000, ..QueueOptions::new(seed) };
        let report = run_queue(options).unwrap_or_else(|failure| panic!("{failure}"));
        all.committed += report.committed;
        all.aborted += report.aborted;
        all.unknown += report.unknown;
        all.copied += report.copied;
        all.generations += report.generations;
        all.faults += report.faults;
    }
    println!("{seeds} seeds: {all:?}");
    // A run without operations and faults proves nothing.
    let least = usize::try_from(seeds).unwrap();
    assert!(all.committed > 5 * least && all.aborted > least && all.copied > 5 * least, "{all:?}");
    assert!(all.generations > seeds && all.faults > 2 * seeds, "{all:?}");
}

#[test]
fn bit_rot_on_one_disk_is_never_served_and_is_repaired() {
    let (mut flips, mut replaced, mut committed, seeds) = (0, 0, 0, seeds(4));
    for seed in 1..=seeds {
        let report =
            run_queue(QueueOptions::with_bit_rot(seed)).unwrap_or_else(|failure| panic!("{failure}"));
        (flips, replaced) = (flips + report.rotted.0, replaced + report.rotted.1);
        committed += report.committed as u64;
    }
    println!("{flips} bits flipped, {replaced} directories were replaced");
    assert!(committed > 5 * seeds && flips >= seeds, "{committed} {flips}");
}

/// Each planted bug must be found within these seeds.
#[cfg(feature = "planted")]
#[test]
fn every_planted_bug_of_the_queue_is_found() {
    use moim_queue::planted::{Bug, plant};
    for bug in Bug::ALL {
        plant(Some(bug));
        let found = (1..=120).find_map(|seed| run_queue(QueueOptions::new(seed)).err());
        plant(None);
        let found = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: seed {}: {}", found.seed, found.what.lines().next().unwrap_or_default());
    }
}
