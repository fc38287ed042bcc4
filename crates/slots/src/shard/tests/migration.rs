//! Slot migration as transactions, scripts and WATCH see it, and the time at which its effects are replayed.

use moim_wire_resp::OwnedArgs;

use super::super::*;
use super::frames::Fixture;
use crate::cluster::{NodeView, ShardView};
use crate::keyspace::Keyspace;
use crate::migration::state::{CLOCK, DROP, FREEZE, OWN, STAGE, THAW};
use crate::slot_of;
use crate::snapshot::LoadedSnapshot;

fn step(fixture: &Fixture, args: &[&[u8]]) {
    let mut turn = fixture.shard.turn(&fixture.shared).unwrap();
    turn.step(args);
    turn.finish();
}

/// The slot map view: all slots belong to this shard, the slot of `{a}` to `owner`.
fn set_view(fixture: &Fixture, owner: u16, moving: bool) {
    let mut view = View::clone(&fixture.shared.view.load());
    let slot = slot_of(b"{a}");
    let node = NodeView { id: "1".repeat(40), host: "target".to_owned(), port: 2, is_up: true };
    view.shards.truncate(1);
    view.shards.push(ShardView { nodes: vec![node], has_primary: true, epoch: 1 });
    view.owners[usize::from(slot)] = owner;
    view.moving = if moving { vec![(slot, 0, 1)] } else { Vec::new() };
    view.map_epoch += 1;
    fixture.shared.view.store(Arc::new(view));
}

fn answers(fixture: &mut Fixture, commands: &[&[&str]]) -> Vec<String> {
    fixture.turn(commands).into_iter().map(|(answer, _)| answer).collect()
}

const SCRIPT: &str = "return redis.call('SET', ARGV[1], 'x')";

#[test]
fn a_transaction_that_may_touch_a_frozen_slot_waits() {
    let slots = slot_of(b"{a}").to_string();
    let waiting: [&[&str]; 4] =
        [&["SET", "{a}1", "x"], &["EVAL", SCRIPT, "0", "{a}1"], &["FLUSHALL"], &["DBSIZE"]];
    for command in waiting {
        let mut fixture = Fixture::new();
        answers(&mut fixture, &[&["MULTI"], command]);
        step(&fixture, &[FREEZE, b"7", b"0", slots.as_bytes()]);
        answers(&mut fixture, &[&["EXEC"]]);
        assert!(fixture.session.held, "{command:?}");
        assert_eq!(fixture.shard.lock().db.len(), 0);
        // The source has dropped the slot, and its slot map view is still the old one.
        step(&fixture, &[DROP, b"7", slots.as_bytes(), b"2"]);
        answers(&mut fixture, &[&["EXEC"]]);
        assert!(fixture.session.held, "{command:?} after the drop");
        set_view(&fixture, 1, false);
        let answer = answers(&mut fixture, &[&["EXEC"]]).remove(0);
        assert!(!fixture.session.held);
        let written = fixture.shard.lock().db.slot_len(slot_of(b"{a}"));
        assert_eq!(written, 0, "{command:?}: {answer}");
    }
    let mut fixture = Fixture::new();
    answers(&mut fixture, &[&["MULTI"], &["EVAL", SCRIPT, "0", "{b}1"]]);
    step(&fixture, &[FREEZE, b"7", b"0", slots.as_bytes()]);
    answers(&mut fixture, &[&["EXEC"]]);
    assert!(fixture.session.held);
    step(&fixture, &[THAW, b"7"]);
    assert_eq!(answers(&mut fixture, &[&["EXEC"]]), ["*1\r\n+OK\r\n"]);
}

#[test]
fn a_script_gets_tryagain_for_an_importing_slot() {
    let mut fixture = Fixture::new();
    let slots = slot_of(b"{a}").to_string();
    step(&fixture, &[STAGE, b"7", slots.as_bytes()]);
    let refused = answers(&mut fixture, &[&["EVAL", SCRIPT, "0", "{a}1"]]).remove(0);
    assert!(refused.starts_with("-TRYAGAIN"), "{refused}");
    let transaction: [&[&str]; 3] = [&["MULTI"], &["EVAL", SCRIPT, "0", "{a}1"], &["EXEC"]];
    let refused = answers(&mut fixture, &transaction).remove(2);
    assert!(refused.contains("-TRYAGAIN"), "{refused}");
    assert_eq!(fixture.shard.lock().db.total(), 0);
    step(&fixture, &[OWN, b"7", slots.as_bytes()]);
    assert_eq!(answers(&mut fixture, &[&["EVAL", SCRIPT, "0", "{a}1"]]), ["+OK\r\n"]);
}

#[test]
fn exec_at_a_migrating_source_answers_ask_or_tryagain() {
    let mut fixture = Fixture::new();
    set_view(&fixture, 0, true);
    fixture.shard.lock().db.set_str(b"{a}1", b"x", None);
    fixture.shard.lock().db.set_str(b"{a}2", b"x", None);
    let queued: [&[&str]; 4] =
        [&["MULTI"], &["INCR", "{a}1"], &["APPEND", "{a}1", "x"], &["APPEND", "{a}2", "x"]];
    answers(&mut fixture, &queued);
    fixture.shard.lock().db.remove(b"{a}1");
    let tried = answers(&mut fixture, &[&["EXEC"]]).remove(0);
    assert!(tried.starts_with("-TRYAGAIN"), "{tried}");
    fixture.shard.lock().db.set_str(b"{a}1", b"x", None);
    answers(&mut fixture, &queued);
    fixture.shard.lock().db.remove(b"{a}1");
    fixture.shard.lock().db.remove(b"{a}2");
    let asked = answers(&mut fixture, &[&["EXEC"]]).remove(0);
    assert_eq!(asked, format!("-ASK {} target:2\r\n", slot_of(b"{a}")));
    assert_eq!(fixture.shard.lock().db.len(), 0, "nothing was written where the keys have left");
}

#[test]
fn asking_before_multi_lasts_until_exec() {
    let mut fixture = Fixture::new();
    let mut view = View::clone(&fixture.shared.view.load());
    let slot = slot_of(b"{a}");
    let node = NodeView { id: "1".repeat(40), host: "source".to_owned(), port: 2, is_up: true };
    view.shards.push(ShardView { nodes: vec![node], has_primary: true, epoch: 1 });
    view.owners[usize::from(slot)] = 1;
    view.moving = vec![(slot, 1, 0)];
    fixture.shared.view.store(Arc::new(view));
    let run: [&[&str]; 6] =
        [&["ASKING"], &["MULTI"], &["SET", "{a}1", "x"], &["GET", "{a}1"], &["EXEC"], &["GET", "{a}1"]];
    let answers = answers(&mut fixture, &run);
    assert_eq!(answers[4], "*2\r\n+OK\r\n$1\r\nx\r\n");
    assert_eq!(answers[5], format!("-MOVED {slot} source:2\r\n"), "EXEC ends ASKING");
}

#[test]
fn exec_fails_if_a_watched_key_may_have_changed_unseen() {
    let slots = slot_of(b"{a}").to_string();
    let slots = slots.as_bytes();
    type Happens<'a> = Box<dyn Fn(&Fixture) + 'a>;
    let loaded =
        || LoadedSnapshot { db: Keyspace::new(1), end: 9, time_ms: 1, migrations: Migrations::default() };
    let happens: [(&str, bool, Happens<'_>); 5] = [
        ("drop", true, Box::new(|fixture| step(fixture, &[DROP, b"7", slots, b"0"]))),
        ("import", true, Box::new(|fixture| step(fixture, &[OWN, b"7", slots]))),
        ("snapshot", true, Box::new(|fixture| fixture.shard.lock().install_snapshot(loaded()))),
        ("reset", true, Box::new(|fixture| fixture.shard.lock().reset())),
        ("import of another slot", false, Box::new(|fixture| step(fixture, &[OWN, b"7", b"1"]))),
    ];
    for (what, fails, happens) in &happens {
        let mut fixture = Fixture::new();
        answers(&mut fixture, &[&["WATCH", "{a}missing"], &["MULTI"], &["PING"]]);
        happens(&fixture);
        fixture.shard.lock().epoch = 1;
        let answer = answers(&mut fixture, &[&["EXEC"]]).remove(0);
        assert_eq!(answer == "*-1\r\n", *fails, "{what}: {answer}");
    }
}

#[test]
fn effects_of_a_migration_are_replayed_at_the_time_of_the_source() {
    let fixture = Fixture::new();
    let commands: [&[&[u8]]; 6] = [
        &[CLOCK, b"1000"],
        &[b"SET", b"lock", b"held", b"PXAT", b"1500"],
        &[CLOCK, b"1400"],
        &[b"PEXPIREAT", b"lock", b"9000"],
        &[b"INCR", b"counter"],
        &[CLOCK, b"5000"],
    ];
    let commands: Vec<OwnedArgs> = commands.iter().map(|command| OwnedArgs::from_slices(*command)).collect();
    let mut state = State::empty();
    // Shard time of the target is long past the first expiry.
    state.replay(&fixture.shared, &mut Session::internal(), 2_000, &commands).unwrap();
    assert_eq!(state.db.expiry(b"lock"), Some(Some(9_000)));
    assert!(state.db.contains(b"counter"));
    assert_eq!(state.time_ms, 2_000, "the time of the source does not change shard time of the target");
}

#[test]
fn replay_ends_at_an_unknown_or_failing_effect() {
    let fixture = Fixture::new();
    let wrong: [&[&str]; 4] =
        [&["NOSUCH", "k"], &["\0what", "1"], &["\0freeze", "x", "0", "1"], &["LPUSH", "string", "x"]];
    for command in wrong {
        let mut state = State::empty();
        let commands: [&[&str]; 3] = [&["SET", "string", "x"], command, &["SET", "after", "x"]];
        let commands: Vec<OwnedArgs> =
            commands.iter().map(|command| OwnedArgs::from_slices(*command)).collect();
        let error = state.replay(&fixture.shared, &mut Session::internal(), 1, &commands).unwrap_err();
        assert!(!state.db.contains(b"after"), "{error}");
    }
}
