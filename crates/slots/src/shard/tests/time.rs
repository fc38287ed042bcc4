//! Expiry when the wall clock is stepped.

use std::sync::atomic::Ordering;

use super::frames::Fixture;
use crate::keyspace::Keyspace;
use crate::session::Session;
use crate::shard::State;
use crate::snapshot::LoadedSnapshot;

fn answer(fixture: &mut Fixture, command: &[&str]) -> String {
    fixture.turn(&[command]).remove(0).0
}

#[test]
fn keys_expire_although_the_wall_clock_was_stepped_back() {
    let mut fixture = Fixture::new();
    answer(&mut fixture, &["SET", "k", "v", "PX", "1000"]);
    fixture.clock.jump_wall_to_ms(1_000);
    fixture.clock.advance_ms(1_000);
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$1\r\nv\r\n", "half of its TTL has passed");
    fixture.clock.advance_ms(1_100);
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$-1\r\n");
}

#[test]
fn no_key_expires_early_when_a_clock_that_was_stepped_back_is_corrected() {
    let mut fixture = Fixture::new();
    answer(&mut fixture, &["SET", "other", "v"]);
    let wall_ms = fixture.shared.clock.wall_ms();
    fixture.clock.jump_wall_to_ms(wall_ms - 60_000);
    fixture.clock.advance_ms(2_000);
    answer(&mut fixture, &["SET", "k", "v", "PX", "4000"]);
    fixture.clock.advance_ms(1_000);
    fixture.clock.jump_wall_to_ms(wall_ms + 3_000);
    fixture.clock.advance_ms(2_900);
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$1\r\nv\r\n", "3.9 s have passed");
    fixture.clock.advance_ms(200);
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$-1\r\n");
}

/// Shard time of a replica that received the frames from `live_from` on live, and then becomes primary.
fn shard_time_of_new_primary(fixture: &Fixture, live_from: i64, since_ms: u64) -> i64 {
    let mut state = State { live_from, ..State::empty() };
    for (offset, payload) in fixture.frames() {
        assert_eq!(state.applied, offset);
        let frame = crate::effects::parse(&payload).unwrap();
        state.replay_frame(&fixture.shared, &mut Session::internal(), frame).unwrap();
        state.applied += 1;
    }
    fixture.clock.advance_ms(since_ms);
    assert!(!state.waits_for_clock_majority(&fixture.shared));
    state.epoch = 2;
    assert!(!state.waits_for_clock_majority(&fixture.shared));
    state.time_ms
}

#[test]
fn no_key_expires_early_on_a_failover_while_the_primarys_clock_is_behind() {
    let mut fixture = Fixture::new();
    answer(&mut fixture, &["SET", "k", "v", "PX", "60000"]);
    let set_ms = fixture.shared.clock.wall_ms();
    // The clock of the primary misses these 5 s; the clocks of the other nodes do not.
    fixture.clock.jump_wall_to_ms(set_ms + 5_000);
    assert_eq!(
        shard_time_of_new_primary(&fixture, 0, 1_000),
        set_ms + 1_007,
        "1 s and a slewed part of the lag"
    );
    assert_eq!(
        shard_time_of_new_primary(&fixture, 1, 1_000),
        set_ms + 7_000,
        "replayed at startup: the wall clock"
    );
}

#[test]
fn no_key_expires_early_on_a_restart_of_all_nodes_while_shard_time_lags() {
    let mut fixture = Fixture::new();
    answer(&mut fixture, &["SET", "other", "v"]);
    let wall_ms = fixture.shared.clock.wall_ms();
    fixture.clock.jump_wall_to_ms(wall_ms - 60_000);
    fixture.clock.advance_ms(4_000);
    answer(&mut fixture, &["SET", "other", "w"]);
    fixture.clock.jump_wall_to_ms(wall_ms + 4_000);
    answer(&mut fixture, &["SET", "k", "v", "PX", "4000"]);
    let set_ms = fixture.shard.lock().time_ms;
    assert_eq!(set_ms, wall_ms + 2_000, "half rate");
    let time_ms = shard_time_of_new_primary(&fixture, i64::MAX, 1_000);
    assert_eq!(
        time_ms,
        set_ms + 1_000,
        "a restart of a second; its age is known although the entry was replayed"
    );
}

#[test]
fn wrong_wall_clock_during_replay_does_not_move_shard_time() {
    let mut fixture = Fixture::new();
    answer(&mut fixture, &["SET", "k", "v", "PX", "60000"]);
    let set_ms = fixture.shared.clock.wall_ms();
    let mut state = State { live_from: i64::MAX, ..State::empty() };
    // A request that arrives while the journal is replayed, on a node whose clock is an hour ahead.
    fixture.clock.jump_wall_to_ms(set_ms + 3_600_000);
    state.advance_time(&fixture.shared);
    for (_, payload) in fixture.frames() {
        let frame = crate::effects::parse(&payload).unwrap();
        state.replay_frame(&fixture.shared, &mut Session::internal(), frame).unwrap();
        state.applied += 1;
        fixture.clock.jump_wall_to_ms(set_ms + 5_000);
        state.advance_time(&fixture.shared);
    }
    assert_eq!(state.time_ms, set_ms, "the time of the newest entry");
}

#[test]
fn shard_time_after_a_snapshot_is_not_extrapolated_from_an_earlier_moment() {
    let mut fixture = Fixture::new();
    answer(&mut fixture, &["SET", "k", "v"]);
    fixture.shared.time_agreed_until_ns.store(0, Ordering::Release);
    let (wall_ms, mut state) = (fixture.shared.clock.wall_ms(), State { epoch: 1, ..State::empty() });
    state.waits_for_clock_majority(&fixture.shared);
    fixture.clock.advance_ms(300_000);
    state.reset();
    let migrations = crate::migration::state::Migrations::default();
    state.install_snapshot(LoadedSnapshot { db: Keyspace::new(1), end: 1, time_ms: wall_ms, migrations });
    state.epoch = 2;
    fixture.clock.jump_wall_to_ms(wall_ms + 900_000);
    assert!(state.waits_for_clock_majority(&fixture.shared));
    assert_eq!(state.time_ms, wall_ms, "the age of the snapshot is unknown");
}

#[test]
fn a_clock_that_is_far_ahead_is_followed_only_with_a_majority() {
    let mut fixture = Fixture::new();
    fixture.shared.time_agreed_until_ns.store(0, Ordering::Release);
    answer(&mut fixture, &["SET", "k", "v", "PX", "1000"]);
    fixture.clock.jump_wall_to_ms(99_000_000);
    assert_eq!(answer(&mut fixture, &["SET", "l", "v", "PX", "5000"]), "+OK\r\n");
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$1\r\nv\r\n");
    // The clock is corrected: writes during the error have not moved shard time.
    fixture.clock.jump_wall_to_ms(1_000_000);
    fixture.clock.advance_ms(1_100);
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$-1\r\n");
    assert_eq!(answer(&mut fixture, &["GET", "l"]), "$1\r\nv\r\n");
    fixture.clock.jump_wall_to_ms(99_000_000);
    fixture.shared.time_agreed_until_ns.store(u64::MAX, Ordering::Release);
    assert_eq!(answer(&mut fixture, &["GET", "l"]), "$-1\r\n", "a majority of clocks agrees");
}

#[test]
fn a_clock_confirmation_ends_when_the_clock_is_stepped() {
    let mut fixture = Fixture::new();
    let (now_ns, wall_ms) = (fixture.shared.clock.monotonic_ns(), fixture.shared.clock.wall_ms());
    fixture.shared.agree_on_time(now_ns, wall_ms, 10_000_000_000);
    answer(&mut fixture, &["SET", "k", "v", "PX", "4000"]);
    fixture.clock.advance_ms(1_000);
    fixture.clock.jump_wall_to_ms(wall_ms + 61_000);
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$1\r\nv\r\n", "stepped after the majority was asked");
    fixture.clock.advance_ms(3_100);
    assert_eq!(answer(&mut fixture, &["GET", "k"]), "$-1\r\n");
}

#[test]
fn a_new_primary_waits_for_a_clock_majority_if_the_wall_clock_is_far_ahead() {
    let fixture = Fixture::new();
    let agreed = &fixture.shared.time_agreed_until_ns;
    agreed.store(0, Ordering::Release);
    let mut state = fixture.shard.lock();
    assert!(!state.waits_for_clock_majority(&fixture.shared), "a journal without a time");
    fixture.clock.jump_wall_to_ms(90_000_000);
    assert!(state.waits_for_clock_majority(&fixture.shared));
    agreed.store(u64::MAX, Ordering::Release);
    assert!(!state.waits_for_clock_majority(&fixture.shared));
    assert_eq!(state.time_ms, 90_000_000);
    agreed.store(0, Ordering::Release);
    fixture.clock.jump_wall_to_ms(900_000_000);
    assert!(state.waits_for_clock_majority(&fixture.shared));
    fixture.clock.advance_ms(3_000);
    assert!(
        !state.waits_for_clock_majority(&fixture.shared),
        "no node answers: it serves at its own shard time"
    );
    assert_eq!(state.time_ms, 90_003_000);
}
