//! Commands in sequence: what waits, what is recorded, what RESP3 shows, which form a value has.

use moim_wire_resp::Protocol;

use super::trial::{Trial, check};
use crate::effects;

/// What was recorded since the last look, one command a line.
fn recorded(trial: &mut Trial) -> String {
    if trial.fx.is_empty() {
        return String::new();
    }
    let (_, commands) = effects::read(trial.fx.payload(0)).unwrap();
    trial.fx.clear();
    let words = |args: &moim_wire_resp::OwnedArgs| {
        args.args().iter().map(|arg| String::from_utf8_lossy(arg).into_owned()).collect::<Vec<_>>().join(" ")
    };
    commands.iter().map(words).collect::<Vec<_>>().join("; ")
}

#[test]
fn commands_wait_when_there_is_nothing() {
    check(
        "blpop a b 0 -> (waits)
         rpush b 1 2 -> :2
         blpop a b 0 -> [b 1]
         brpop a b 1.5 -> [b 2]
         blmove a b left right 0 -> (waits)
         blmpop 0 2 a b left -> (waits)
         bzpopmin z 0 -> (waits)
         zadd z 1 m 2 n -> :2
         bzpopmax z 0 -> [z n 2]
         bzmpop 0 1 z min count 5 -> [z [[m 1]]]
         exists z b -> :0
         blpop a -1 -> -ERR timeout is negative
         set s x -> OK
         blpop s 0 -> -WRONGTYPE Operation against a key holding the wrong kind of value",
    );
}

#[test]
fn a_client_that_waits_is_not_woken_by_another_type() {
    let mut trial = Trial::new();
    trial.run("set k x");
    trial.session.resumed = true;
    for command in
        ["blpop k 0", "blmove k l left left 0", "blmpop 0 1 k left", "bzpopmin k 0", "bzmpop 0 1 k min"]
    {
        assert_eq!(trial.run(command), "(waits)", "{command}");
    }
    trial.session.resumed = false;
    assert!(trial.run("blpop k 0").starts_with("-WRONGTYPE"));
}

#[test]
fn what_is_recorded_is_safe_to_replay() {
    let mut trial = Trial::new();
    for (command, wanted) in [
        ("rpush l a b c d", "rpush l a b c d"),
        ("blpop x l 0", "lpop l"),
        ("blmove l m left right 0", "LMOVE l m LEFT RIGHT"),
        ("blmpop 0 1 l right count 9", "rpop l 2"),
        ("llen l", ""),
        ("lpop nothing", ""),
        ("hincrbyfloat h f 1.5", "HSET h f 1.5"),
        ("sadd s a", "sadd s a"),
        ("sadd s a", ""),
        ("spop s", "DEL s"),
        ("zadd z 1 m", "zadd z 1 m"),
        ("zadd z gt 0 m", ""),
        ("bzpopmin z 0", "zpopmin z"),
        ("sunionstore gone nothing", ""),
    ] {
        trial.run(command);
        assert_eq!(recorded(&mut trial), wanted, "{command}");
    }
    trial.run("sadd s a b c");
    trial.fx.clear();
    let drawn = trial.run("spop s");
    assert_eq!(recorded(&mut trial), format!("SREM s {drawn}"));
}

#[test]
fn resp3_has_pairs_maps_sets_and_doubles() {
    let mut trial = Trial::new();
    trial.protocol = Protocol::Resp3;
    for (command, wanted) in [
        ("zadd z 1 a 2.5 b", ":2"),
        ("zrange z 0 -1 withscores", "[[a ,1] [b ,2.5]]"),
        ("zpopmin z", "[a ,1]"),
        ("zpopmin z 1", "[[b ,2.5]]"),
        ("zadd z incr 3 c", ",3"),
        ("hset h f v", ":1"),
        ("hgetall h", "%[f=v]"),
        ("hrandfield h 1 withvalues", "[[f v]]"),
        ("sadd s a", ":1"),
        ("smembers s", "~[a]"),
        ("lpop nothing 1", "(nil)"),
    ] {
        assert_eq!(trial.run(command), wanted, "{command}");
    }
}

#[test]
fn values_change_their_form_at_the_limits() {
    let mut trial = Trial::new();
    let encoding = |trial: &mut Trial, key: &str| trial.run(&format!("object encoding {key}"));
    for n in 0..129 {
        trial.run(&format!("hset h f{n} v"));
        trial.run(&format!("zadd z {n} m{n}"));
        trial.run(&format!("sadd s {n}"));
        if n == 127 {
            assert_eq!(encoding(&mut trial, "h"), "listpack");
            assert_eq!(encoding(&mut trial, "z"), "listpack");
        }
    }
    assert_eq!(encoding(&mut trial, "h"), "hashtable");
    assert_eq!(encoding(&mut trial, "z"), "skiplist");
    assert_eq!(encoding(&mut trial, "s"), "intset");
    trial.run("sadd s x");
    assert_eq!(encoding(&mut trial, "s"), "hashtable");
    trial.run("rpush l a");
    assert_eq!(encoding(&mut trial, "l"), "quicklist");
}
