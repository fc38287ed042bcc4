//! A model: an old primary and a new one, with clock drift, pauses, slow reads, and an election in between.

use fastrand::Rng;

use super::*;

/// A known way to answer with a stale state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bug {
    None,
    CountFromAnswer,
    CheckBeforeExecuting,
    NewPrimaryDoesNotWait,
    NoMargin,
    ExtendBeforeApplying,
}

/// A clock that runs at its own rate.
struct Clock {
    rate: f64,
    offset: f64,
}

impl Clock {
    fn at(&self, real_ms: f64) -> u64 {
        (self.offset + real_ms * self.rate) as u64
    }
}

struct Old {
    clock: Clock,
    right: ServingRight,
    /// Stopped because of a record.
    deposed: bool,
    last_answer: f64,
}

/// Runs one old primary until well after its successor's election; returns (last answer of the old one, first of the
/// new one).
fn run(seed: u64, bug: Bug) -> (f64, f64) {
    let mut rng = Rng::with_seed(seed);
    let clock = |rng: &mut Rng| Clock { rate: 0.952 + rng.f64() * 0.095, offset: rng.f64() * 1e6 };
    let mut tuning = FenceTuning::default();
    if bug == Bug::NoMargin {
        tuning.margin_percent = 0;
    }
    let mut old =
        Old { clock: clock(&mut rng), right: ServingRight::new(tuning), deposed: false, last_answer: 0.0 };
    let elected = 2_000.0 + rng.f64() * 1_000.0;
    // When the old primary learns of it by its watch, if at all.
    let heard = elected + if rng.bool() { rng.f64() * 3_000.0 } else { 1e9 };
    // From then on the repository cannot reach it.
    let cut_off = if rng.bool() { elected - rng.f64() * 50.0 } else { 1e9 };
    let mut now = 0.0;
    while now < 6_000.0 {
        // One iteration of its loop: a read of the fence key, or a command; each may take long.
        let slow = |rng: &mut Rng| if rng.u32(0..60) == 0 { rng.f64() * 1_500.0 } else { rng.f64() * 20.0 };
        if rng.u32(0..4) == 0 {
            let sent = old.clock.at(now);
            let there = now + slow(&mut rng);
            let revision = if there >= elected { 9 } else { 0 };
            if there >= cut_off {
                now += 5.0;
                continue;
            }
            now = there + slow(&mut rng);
            let counted = if bug == Bug::CountFromAnswer { old.clock.at(now) } else { sent };
            match old.right.on_read(counted, revision) {
                FenceNews::Extended => {}
                FenceNews::Changed { revision } => {
                    if bug == Bug::ExtendBeforeApplying {
                        old.right.on_applied(revision);
                        now += slow(&mut rng);
                    } else {
                        // The record is applied before the serving right is extended.
                        now += slow(&mut rng);
                        old.deposed = true;
                        old.right.on_applied(revision);
                    }
                }
            }
        } else {
            old.deposed |= now >= heard;
            let checked = old.clock.at(now);
            now += slow(&mut rng);
            let asked = if bug == Bug::CheckBeforeExecuting { checked } else { old.clock.at(now) };
            if !old.deposed && old.right.may_answer(asked) {
                old.last_answer = now;
            }
        }
    }
    let new = clock(&mut rng);
    let mut now = elected + rng.f64() * 30.0;
    let takeover = Takeover::new(tuning, new.at(now), bug == Bug::NewPrimaryDoesNotWait);
    while !takeover.may_answer(new.at(now)) {
        now += 1.0;
    }
    (old.last_answer, now)
}

#[test]
fn two_primaries_never_answer_at_the_same_time() {
    let mut answered = 0;
    for seed in 0..20_000 {
        let (old, new) = run(seed, Bug::None);
        // A clock is read in whole milliseconds: that is the resolution of the model.
        assert!(old <= new + 1.0, "seed {seed}: the old one answered at {old}, the new one at {new}");
        answered += u32::from(old > 1_000.0);
    }
    assert!(answered > 10_000, "the old primary hardly ever answered");
}

#[test]
fn each_planted_bug_lets_two_primaries_answer() {
    for bug in [
        Bug::CountFromAnswer,
        Bug::CheckBeforeExecuting,
        Bug::NewPrimaryDoesNotWait,
        Bug::NoMargin,
        Bug::ExtendBeforeApplying,
    ] {
        let caught = (0..20_000).any(|seed| {
            let (old, new) = run(seed, bug);
            old > new + 1.0
        });
        assert!(caught, "{bug:?}");
    }
}

#[test]
fn recorded_release_skips_the_takeover_wait() {
    let tuning = FenceTuning::default();
    assert!(Takeover::new(tuning, 50, true).may_answer(50));
    let waits = Takeover::new(tuning, 50, false);
    assert!(!waits.may_answer(649) && waits.may_answer(650));
}

#[test]
fn fence_change_extends_no_serving_right_before_it_is_applied() {
    let mut right = ServingRight::new(FenceTuning::default());
    assert!(!right.may_answer(0));
    assert_eq!(right.on_read(100, 0), FenceNews::Extended);
    assert!(right.may_answer(639) && !right.may_answer(640));
    assert_eq!(right.on_read(600, 7), FenceNews::Changed { revision: 7 });
    assert!(!right.may_answer(700));
    right.on_applied(6);
    assert!(!right.may_answer(700));
    right.on_applied(7);
    assert!(right.may_answer(700));
}
