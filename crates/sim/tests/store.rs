//! The store from seeds: nothing acknowledged is lost and no answer is wrong, whatever happens; known bugs are found.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use moim_sim::{StoreOptions, Struck, Victim, run_store};
use moim_slots::service::Step;

/// How many seeds: more with `MOIM_SIM_SEEDS`.
fn seeds(default: u64) -> u64 {
    std::env::var("MOIM_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(default)
}

#[test]
fn the_store_keeps_its_promises_under_faults() {
    let (mut answered, mut faults, seeds) = (0, 0, seeds(12));
    for seed in 1..=seeds {
        let options = StoreOptions { faults_ms: 4_000, ..StoreOptions::new(seed) };
        let report = run_store(options).unwrap_or_else(|failure| panic!("{failure}"));
        answered += report.answered;
        faults += report.faults;
    }
    // A run in which nothing happens proves nothing.
    assert!(answered > 100 * seeds, "{answered} operations were answered");
    assert!(faults > 2 * seeds, "{faults} faults");
}

#[test]
fn slots_move_although_whoever_moves_them_dies_at_every_step() {
    let (mut moved, mut struck, seeds) = (0, BTreeSet::new(), seeds(5));
    for seed in 1..=seeds {
        let report = run_store(StoreOptions::moving(seed)).unwrap_or_else(|failure| panic!("{failure}"));
        moved += report.moved;
        struck.extend(report.struck);
    }
    println!("{moved} moves, {} steps and victims", struck.len());
    assert!(moved > 2 * seeds, "{moved} moves came to their end");
    // Each blow falls sooner or later; a few seeds have most of them.
    let all: BTreeSet<Struck> =
        Step::ALL.iter().flat_map(|step| Victim::ALL.map(|victim| (*step, victim))).collect();
    let missed: Vec<_> = all.difference(&struck).collect();
    assert!(missed.len() <= if seeds < 30 { 12 } else { 0 }, "nobody was struck at {missed:?}");
}

#[test]
fn times_to_live_last_as_long_as_promised_whatever_the_wall_clocks_do() {
    let (mut steps, mut alive, mut gone, seeds) = (0, 0, 0, seeds(6));
    for seed in 1..=seeds {
        let options = StoreOptions { faults_ms: 6_000, ..StoreOptions::clocks(seed * 4) };
        let report = run_store(options).unwrap_or_else(|failure| panic!("{failure}"));
        (steps, alive, gone) =
            (steps + report.clock_steps, alive + report.ttl_reads.0, gone + report.ttl_reads.1);
    }
    println!("{steps} clock steps, {alive} reads before and {gone} after the end of a time to live");
    assert!(steps > 3 * seeds && alive > 20 * seeds && gone > 10 * seeds, "{steps} {alive} {gone}");
}

#[test]
fn bit_rot_on_one_disk_is_never_served_and_is_repaired() {
    let (mut answered, mut flips, mut replaced, seeds) = (0, 0, 0, seeds(8));
    for seed in 1..=seeds {
        let report = run_store(StoreOptions::rotting(seed)).unwrap_or_else(|failure| panic!("{failure}"));
        answered += report.answered;
        (flips, replaced) = (flips + report.rotted.0, replaced + report.rotted.1);
    }
    println!("{flips} bits flipped, {replaced} directories were replaced");
    assert!(answered > 100 * seeds && flips >= seeds, "{answered} {flips}");
}

/// Bugs of the journal, and seeds within which each must be found.
#[cfg(feature = "planted")]
#[test]
fn every_planted_bug_of_the_journal_is_found() {
    use moim_journal::planted::{Bug, plant};
    for bug in Bug::ALL {
        plant(Some(bug));
        let found = (1..=200).find_map(|seed| run_store(StoreOptions::rotting(seed)).err());
        plant(None);
        let found = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: seed {}: {}", found.seed, found.what.lines().next().unwrap_or_default());
    }
}

/// Seeds within which each known bug must be found.
#[cfg(feature = "planted")]
#[test]
fn every_planted_bug_of_the_store_is_found() {
    use moim_slots::planted::{Bug, plant};
    // One alone: `MOIM_SIM_BUG=FrozenTime`.
    let only = std::env::var("MOIM_SIM_BUG").unwrap_or_default();
    for bug in Bug::ALL.into_iter().filter(|bug| format!("{bug:?}").contains(&only)) {
        plant(Some(bug));
        let options = match bug {
            Bug::ThawWithoutAbort => StoreOptions::moving,
            Bug::FrozenTime | Bug::ReplayAtLocalClock | Bug::UnconfirmedJump => StoreOptions::clocks,
            Bug::ReplyBeforeCommit | Bug::ServePastRight => StoreOptions::new,
        };
        // One that needs a pause at the wrong moment shows in about every fortieth seed.
        let found = (1..=600).find_map(|seed| run_store(options(seed)).err());
        plant(None);
        let found = found.unwrap_or_else(|| panic!("{bug:?} was not found"));
        println!("{bug:?}: seed {}: {}", found.seed, found.what.lines().next().unwrap_or_default());
    }
}
