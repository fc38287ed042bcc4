//! Slots on the move: what transactions, scripts and WATCH see of it, and at which time effects are replayed.

use moim_wire_resp::OwnedArgs;

use super::super::*;
use super::frames::Bed;
use crate::cluster::{NodeView, ShardView};
use crate::keyspace::Keyspace;
use crate::moves::{CLOCK, DROP, FREEZE, OWN, STAGE, THAW};
use crate::slot_of;
use crate::snapshot::Loaded;

fn step(bed: &Bed, args: &[&[u8]]) {
    let mut turn = bed.shard.turn(&bed.shared).unwrap();
    turn.step(args);
    turn.finish();
}

/// The map: everything is ours, the slots of `{a}` as this test says.
fn set_view(bed: &Bed, owner: u16, moving: bool) {
    let mut view = View::clone(&bed.shared.view.load());
    let slot = slot_of(b"{a}");
    let node = NodeView { id: "1".repeat(40), host: "target".to_owned(), port: 2, is_up: true };
    view.shards.truncate(1);
    view.shards.push(ShardView { nodes: vec![node], has_primary: true, epoch: 1 });
    view.owners[usize::from(slot)] = owner;
    view.moving = if moving { vec![(slot, 0, 1)] } else { Vec::new() };
    view.map_epoch += 1;
    bed.shared.view.store(Arc::new(view));
}

fn answers(bed: &mut Bed, commands: &[&[&str]]) -> Vec<String> {
    bed.turn(commands).into_iter().map(|(answer, _)| answer).collect()
}

const SCRIPT: &str = "return redis.call('SET', ARGV[1], 'x')";

#[test]
fn a_transaction_that_may_touch_a_frozen_slot_waits() {
    let slots = slot_of(b"{a}").to_string();
    let waiting: [&[&str]; 4] =
        [&["SET", "{a}1", "x"], &["EVAL", SCRIPT, "0", "{a}1"], &["FLUSHALL"], &["DBSIZE"]];
    for command in waiting {
        let mut bed = Bed::new();
        answers(&mut bed, &[&["MULTI"], command]);
        step(&bed, &[FREEZE, b"7", b"0", slots.as_bytes()]);
        answers(&mut bed, &[&["EXEC"]]);
        assert!(bed.session.held, "{command:?}");
        assert_eq!(bed.shard.lock().db.len(), 0);
        // The source has dropped the slot, and its view does not know yet.
        step(&bed, &[DROP, b"7", slots.as_bytes(), b"2"]);
        answers(&mut bed, &[&["EXEC"]]);
        assert!(bed.session.held, "{command:?} after the drop");
        set_view(&bed, 1, false);
        let answer = answers(&mut bed, &[&["EXEC"]]).remove(0);
        assert!(!bed.session.held);
        let written = bed.shard.lock().db.slot_len(slot_of(b"{a}"));
        assert_eq!(written, 0, "{command:?}: {answer}");
    }
    let mut bed = Bed::new();
    answers(&mut bed, &[&["MULTI"], &["EVAL", SCRIPT, "0", "{b}1"]]);
    step(&bed, &[FREEZE, b"7", b"0", slots.as_bytes()]);
    answers(&mut bed, &[&["EXEC"]]);
    assert!(bed.session.held);
    step(&bed, &[THAW, b"7"]);
    assert_eq!(answers(&mut bed, &[&["EXEC"]]), ["*1\r\n+OK\r\n"]);
}

#[test]
fn a_script_does_not_reach_a_slot_that_is_on_its_way_here() {
    let mut bed = Bed::new();
    let slots = slot_of(b"{a}").to_string();
    step(&bed, &[STAGE, b"7", slots.as_bytes()]);
    let refused = answers(&mut bed, &[&["EVAL", SCRIPT, "0", "{a}1"]]).remove(0);
    assert!(refused.starts_with("-TRYAGAIN"), "{refused}");
    let transaction: [&[&str]; 3] = [&["MULTI"], &["EVAL", SCRIPT, "0", "{a}1"], &["EXEC"]];
    let refused = answers(&mut bed, &transaction).remove(2);
    assert!(refused.contains("-TRYAGAIN"), "{refused}");
    assert_eq!(bed.shard.lock().db.total(), 0);
    step(&bed, &[OWN, b"7", slots.as_bytes()]);
    assert_eq!(answers(&mut bed, &[&["EVAL", SCRIPT, "0", "{a}1"]]), ["+OK\r\n"]);
}

#[test]
fn a_transaction_at_a_migrating_source_is_asked_to_go_where_its_keys_went() {
    let mut bed = Bed::new();
    set_view(&bed, 0, true);
    bed.shard.lock().db.set_str(b"{a}1", b"x", None);
    bed.shard.lock().db.set_str(b"{a}2", b"x", None);
    let queued: [&[&str]; 4] =
        [&["MULTI"], &["INCR", "{a}1"], &["APPEND", "{a}1", "x"], &["APPEND", "{a}2", "x"]];
    answers(&mut bed, &queued);
    bed.shard.lock().db.remove(b"{a}1");
    let tried = answers(&mut bed, &[&["EXEC"]]).remove(0);
    assert!(tried.starts_with("-TRYAGAIN"), "{tried}");
    bed.shard.lock().db.set_str(b"{a}1", b"x", None);
    answers(&mut bed, &queued);
    bed.shard.lock().db.remove(b"{a}1");
    bed.shard.lock().db.remove(b"{a}2");
    let asked = answers(&mut bed, &[&["EXEC"]]).remove(0);
    assert_eq!(asked, format!("-ASK {} target:2\r\n", slot_of(b"{a}")));
    assert_eq!(bed.shard.lock().db.len(), 0, "nothing was written where the keys are not any more");
}

#[test]
fn asking_before_multi_lasts_until_exec() {
    let mut bed = Bed::new();
    let mut view = View::clone(&bed.shared.view.load());
    let slot = slot_of(b"{a}");
    let node = NodeView { id: "1".repeat(40), host: "source".to_owned(), port: 2, is_up: true };
    view.shards.push(ShardView { nodes: vec![node], has_primary: true, epoch: 1 });
    view.owners[usize::from(slot)] = 1;
    view.moving = vec![(slot, 1, 0)];
    bed.shared.view.store(Arc::new(view));
    let run: [&[&str]; 6] =
        [&["ASKING"], &["MULTI"], &["SET", "{a}1", "x"], &["GET", "{a}1"], &["EXEC"], &["GET", "{a}1"]];
    let answers = answers(&mut bed, &run);
    assert_eq!(answers[4], "*2\r\n+OK\r\n$1\r\nx\r\n");
    assert_eq!(answers[5], format!("-MOVED {slot} source:2\r\n"), "it is over with EXEC");
}

#[test]
fn a_watched_key_that_may_have_changed_unseen_fails_the_transaction() {
    let slots = slot_of(b"{a}").to_string();
    let slots = slots.as_bytes();
    type Happens<'a> = Box<dyn Fn(&Bed) + 'a>;
    let loaded = || Loaded { db: Keyspace::new(1), end: 9, time_ms: 1, moves: Moves::default() };
    let happens: [(&str, bool, Happens<'_>); 5] = [
        ("drop", true, Box::new(|bed| step(bed, &[DROP, b"7", slots, b"0"]))),
        ("import", true, Box::new(|bed| step(bed, &[OWN, b"7", slots]))),
        ("snapshot", true, Box::new(|bed| bed.shard.lock().take_in(loaded()))),
        ("read anew", true, Box::new(|bed| bed.shard.lock().forget())),
        ("import of another slot", false, Box::new(|bed| step(bed, &[OWN, b"7", b"1"]))),
    ];
    for (what, fails, happens) in &happens {
        let mut bed = Bed::new();
        answers(&mut bed, &[&["WATCH", "{a}missing"], &["MULTI"], &["PING"]]);
        happens(&bed);
        bed.shard.lock().epoch = 1;
        let answer = answers(&mut bed, &[&["EXEC"]]).remove(0);
        assert_eq!(answer == "*-1\r\n", *fails, "{what}: {answer}");
    }
}

#[test]
fn effects_of_a_move_are_replayed_at_the_time_of_the_source() {
    let bed = Bed::new();
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
    // The target is long past the first expiry when it hears of it.
    state.replay(&bed.shared, &mut Session::nobody(), 2_000, &commands).unwrap();
    assert_eq!(state.db.expiry(b"lock"), Some(Some(9_000)));
    assert!(state.db.contains(b"counter"));
    assert_eq!(state.time_ms, 2_000, "the clock of the source is not ours");
}

#[test]
fn a_replay_ends_at_what_it_does_not_know_or_cannot_do() {
    let bed = Bed::new();
    let wrong: [&[&str]; 4] =
        [&["NOSUCH", "k"], &["\0what", "1"], &["\0freeze", "x", "0", "1"], &["LPUSH", "string", "x"]];
    for command in wrong {
        let mut state = State::empty();
        let commands: [&[&str]; 3] = [&["SET", "string", "x"], command, &["SET", "after", "x"]];
        let commands: Vec<OwnedArgs> =
            commands.iter().map(|command| OwnedArgs::from_slices(*command)).collect();
        let error = state.replay(&bed.shared, &mut Session::nobody(), 1, &commands).unwrap_err();
        assert!(!state.db.contains(b"after"), "{error}");
    }
}
