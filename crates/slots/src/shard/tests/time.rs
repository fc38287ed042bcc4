//! Expiry when the wall clock is stepped.

use std::sync::atomic::Ordering;

use super::frames::Bed;
use crate::keyspace::Keyspace;
use crate::session::Session;
use crate::shard::State;
use crate::snapshot::Loaded;

fn answer(bed: &mut Bed, command: &[&str]) -> String {
    bed.turn(&[command]).remove(0).0
}

#[test]
fn keys_expire_although_the_wall_clock_was_stepped_back() {
    let mut bed = Bed::new();
    answer(&mut bed, &["SET", "k", "v", "PX", "1000"]);
    bed.clock.jump_wall_to_ms(1_000);
    bed.clock.advance_ms(1_000);
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$1\r\nv\r\n", "half of its time has passed");
    bed.clock.advance_ms(1_100);
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$-1\r\n");
}

#[test]
fn no_key_ends_early_when_a_clock_that_was_stepped_back_is_set_right() {
    let mut bed = Bed::new();
    answer(&mut bed, &["SET", "other", "v"]);
    let wall_ms = bed.shared.clock.wall_ms();
    bed.clock.jump_wall_to_ms(wall_ms - 60_000);
    bed.clock.advance_ms(2_000);
    answer(&mut bed, &["SET", "k", "v", "PX", "4000"]);
    bed.clock.advance_ms(1_000);
    bed.clock.jump_wall_to_ms(wall_ms + 3_000);
    bed.clock.advance_ms(2_900);
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$1\r\nv\r\n", "3.9 s have passed");
    bed.clock.advance_ms(200);
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$-1\r\n");
}

/// A replica that applied the frames of a bed from `live_from` on as they came, and then becomes primary.
fn shard_time_of_new_primary(bed: &Bed, live_from: i64, since_ms: u64) -> i64 {
    let mut state = State { live_from, ..State::empty() };
    for (offset, payload) in bed.frames() {
        assert_eq!(state.applied, offset);
        let frame = crate::effects::parse(&payload).unwrap();
        state.replay_frame(&bed.shared, &mut Session::nobody(), frame).unwrap();
        state.applied += 1;
    }
    bed.clock.advance_ms(since_ms);
    assert!(!state.waits_for_time(&bed.shared));
    state.time_ms
}

#[test]
fn no_key_ends_early_on_a_failover_while_the_primarys_clock_is_behind() {
    let mut bed = Bed::new();
    answer(&mut bed, &["SET", "k", "v", "PX", "60000"]);
    let set_ms = bed.shared.clock.wall_ms();
    // The clock of the primary shows nothing of these 5 s; those of the other nodes do.
    bed.clock.jump_wall_to_ms(set_ms + 5_000);
    assert_eq!(shard_time_of_new_primary(&bed, 0, 1_000), set_ms + 1_007, "1 s and a little of the lag");
    assert_eq!(shard_time_of_new_primary(&bed, 1, 1_000), set_ms + 7_000, "read at a start: the wall clock");
}

#[test]
fn shard_time_after_a_snapshot_is_not_extrapolated_from_an_earlier_moment() {
    let mut bed = Bed::new();
    answer(&mut bed, &["SET", "k", "v"]);
    bed.shared.time_agreed_until_ns.store(0, Ordering::Release);
    let (wall_ms, mut state) = (bed.shared.clock.wall_ms(), State::empty());
    state.waits_for_time(&bed.shared);
    bed.clock.advance_ms(300_000);
    state.forget();
    let moves = crate::moves::Moves::default();
    state.take_in(Loaded { db: Keyspace::new(1), end: 1, time_ms: wall_ms, moves });
    bed.clock.jump_wall_to_ms(wall_ms + 900_000);
    assert!(state.waits_for_time(&bed.shared));
    assert_eq!(state.time_ms, wall_ms, "its age is not known");
}

#[test]
fn a_clock_that_is_far_ahead_is_followed_only_with_a_majority() {
    let mut bed = Bed::new();
    bed.shared.time_agreed_until_ns.store(0, Ordering::Release);
    answer(&mut bed, &["SET", "k", "v", "PX", "1000"]);
    bed.clock.jump_wall_to_ms(99_000_000);
    assert_eq!(answer(&mut bed, &["SET", "l", "v", "PX", "5000"]), "+OK\r\n");
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$1\r\nv\r\n");
    // The clock is set right: what was written meanwhile has not moved the time of the shard.
    bed.clock.jump_wall_to_ms(1_000_000);
    bed.clock.advance_ms(1_100);
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$-1\r\n");
    assert_eq!(answer(&mut bed, &["GET", "l"]), "$1\r\nv\r\n");
    bed.clock.jump_wall_to_ms(99_000_000);
    bed.shared.time_agreed_until_ns.store(u64::MAX, Ordering::Release);
    assert_eq!(answer(&mut bed, &["GET", "l"]), "$-1\r\n", "the others have the same time");
}

#[test]
fn an_agreement_is_about_the_clock_as_it_was() {
    let mut bed = Bed::new();
    let (now_ns, wall_ms) = (bed.shared.clock.monotonic_ns(), bed.shared.clock.wall_ms());
    bed.shared.agree_on_time(now_ns, wall_ms, 10_000_000_000);
    answer(&mut bed, &["SET", "k", "v", "PX", "4000"]);
    bed.clock.advance_ms(1_000);
    bed.clock.jump_wall_to_ms(wall_ms + 61_000);
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$1\r\nv\r\n", "stepped after the others were asked");
    bed.clock.advance_ms(3_100);
    assert_eq!(answer(&mut bed, &["GET", "k"]), "$-1\r\n");
}

#[test]
fn a_new_primary_waits_for_the_others_where_the_wall_clock_is_far_ahead() {
    let bed = Bed::new();
    let agreed = &bed.shared.time_agreed_until_ns;
    agreed.store(0, Ordering::Release);
    let mut state = bed.shard.lock();
    assert!(!state.waits_for_time(&bed.shared), "a journal without a time");
    bed.clock.jump_wall_to_ms(90_000_000);
    assert!(state.waits_for_time(&bed.shared));
    agreed.store(u64::MAX, Ordering::Release);
    assert!(!state.waits_for_time(&bed.shared));
    assert_eq!(state.time_ms, 90_000_000);
    agreed.store(0, Ordering::Release);
    bed.clock.jump_wall_to_ms(900_000_000);
    assert!(state.waits_for_time(&bed.shared));
    bed.clock.advance_ms(3_000);
    assert!(!state.waits_for_time(&bed.shared), "no node answers: it serves, at its own pace");
    assert_eq!(state.time_ms, 90_003_000);
}
