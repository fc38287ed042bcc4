//! The store from seeds: no acknowledged write is lost and histories are linearizable under faults; planted bugs are
//! found.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use moim_sim::{KilledAt, StoreOptions, Victim, run_store};
use moim_slots::service::Step;

/// Number of seeds; override with `MOIM_SIM_SEEDS`.
fn seeds(default: u64) -> u64 {
    std::env::var("MOIM_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(default)
}

#[test]
fn store_is_linearizable_and_durable_under_faults() {
    let (mut answered, mut faults, seeds) = (0, 0, seeds(12));
    for seed in 1..=seeds {
        let options = StoreOptions { faults_ms: 4_000, ..StoreOptions::new(seed) };
        let report = run_store(options).unwrap_or_else(|failure| panic!("{failure}"));
        answered += report.answered;
        faults += report.faults;
    }
    // A run without operations and faults proves nothing.
    assert!(answered > 100 * seeds, "{answered} operations were answered");
    assert!(faults > 2 * seeds, "{faults} faults");
}

#[test]
fn slot_migrations_complete_when_their_primaries_crash_at_every_step() {
    let (mut migrated, mut kills, seeds) = (0, BTreeSet::new(), seeds(5));
    for seed in 1..=seeds {
        let report =
            run_store(StoreOptions::with_migrations(seed)).unwrap_or_else(|failure| panic!("{failure}"));
        migrated += report.migrated;
        kills.extend(report.kills);
    }
    println!("{migrated} migrations, {} steps and victims", kills.len());
    assert!(migrated > 2 * seeds, "{migrated} migrations completed");
    // A few seeds have most of the kills, many seeds all of them.
    let all: BTreeSet<KilledAt> =
        Step::ALL.iter().flat_map(|step| Victim::ALL.map(|victim| (*step, victim))).collect();
    let missed: Vec<_> = all.difference(&kills).collect();
    assert!(missed.len() <= if seeds < 30 { 12 } else { 0 }, "no primary was killed at {missed:?}");
}

#[test]
fn times_to_live_expire_within_bounds_under_wall_clock_faults() {
    let (mut steps, mut found, mut missing, seeds) = (0, 0, 0, seeds(6));
    for seed in 1..=seeds {
        let options = StoreOptions { faults_ms: 6_000, ..StoreOptions::with_clock_faults(seed * 4) };
        let report = run_store(options).unwrap_or_else(|failure| panic!("{failure}"));
        (steps, found, missing) =
            (steps + report.clock_steps, found + report.ttl_reads.0, missing + report.ttl_reads.1);
    }
    println!("{steps} clock steps, {found} reads before and {missing} after a time to live expired");
    assert!(steps > 3 * seeds && found > 20 * seeds && missing > 10 * seeds, "{steps} {found} {missing}");
}

#[test]
fn bit_rot_on_one_disk_is_never_served_and_is_repaired() {
    let (mut answered, mut flips, mut replaced, seeds) = (0, 0, 0, seeds(8));
    for seed in 1..=seeds {
        let report =
            run_store(StoreOptions::with_bit_rot(seed)).unwrap_or_else(|failure| panic!("{failure}"));
        answered += report.answered;
        (flips, replaced) = (flips + report.rotted.0, replaced + report.rotted.1);
    }
    println!("{flips} bits flipped, {replaced} directories were replaced");
    assert!(answered > 100 * seeds && flips >= seeds, "{answered} {flips}");
}

/// Each planted bug of the journal must be found within these seeds.
#[cfg(feature = "planted")]
#[test]
fn every_planted_bug_of_the_journal_is_found() {
    use moim_journal::planted::{Bug, plant};
    for bug in Bug::ALL {
        plant(Some(bug));
        let found = (1..=200).find_map(|seed| run_store(StoreOptions::with_bit_rot(seed)).err());
        plant(None);
        let found = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: seed {}: {}", found.seed, found.what.lines().next().unwrap_or_default());
    }
}

/// Each planted bug must be found within these seeds.
#[cfg(feature = "planted")]
#[test]
fn every_planted_bug_of_the_store_is_found() {
    use moim_slots::planted::{Bug, plant};
    // `MOIM_SIM_BUG=FrozenTime` selects one bug.
    let only = std::env::var("MOIM_SIM_BUG").unwrap_or_default();
    for bug in Bug::ALL.into_iter().filter(|bug| format!("{bug:?}").contains(&only)) {
        plant(Some(bug));
        let options = match bug {
            Bug::ThawWithoutAbort => StoreOptions::with_migrations,
            Bug::FrozenTime | Bug::ReplayAtLocalClock | Bug::UnconfirmedJump => {
                StoreOptions::with_clock_faults
            }
            Bug::ReplyBeforeCommit | Bug::ServePastRight => StoreOptions::new,
        };
        // A bug that needs a pause at a certain moment shows in about one of forty seeds.
        let found = (1..=600).find_map(|seed| run_store(options(seed)).err());
        plant(None);
        let found = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: seed {}: {}", found.seed, found.what.lines().next().unwrap_or_default());
    }
}
