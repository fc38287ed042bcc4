//! Command sequences: blocking, propagation, RESP3 replies and value encodings.

use moim_wire_resp::Protocol;

use super::harness::{Harness, check};
use crate::effects;

/// The effects since the last call, one command per line.
fn recorded(harness: &mut Harness) -> String {
    if harness.fx.is_empty() {
        return String::new();
    }
    let (_, commands) = effects::read(harness.fx.payload(0)).unwrap();
    harness.fx.clear();
    let words = |args: &moim_wire_resp::OwnedArgs| {
        args.args().iter().map(|arg| String::from_utf8_lossy(arg).into_owned()).collect::<Vec<_>>().join(" ")
    };
    commands.iter().map(words).collect::<Vec<_>>().join("; ")
}

#[test]
fn blocking_commands_block_on_empty_keys() {
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
fn blocked_client_stays_blocked_on_wrong_type() {
    let mut harness = Harness::new();
    harness.run("set k x");
    harness.session.resumed = true;
    for command in
        ["blpop k 0", "blmove k l left left 0", "blmpop 0 1 k left", "bzpopmin k 0", "bzmpop 0 1 k min"]
    {
        assert_eq!(harness.run(command), "(waits)", "{command}");
    }
    harness.session.resumed = false;
    assert!(harness.run("blpop k 0").starts_with("-WRONGTYPE"));
}

#[test]
fn propagated_effects_are_deterministic() {
    let mut harness = Harness::new();
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
        harness.run(command);
        assert_eq!(recorded(&mut harness), wanted, "{command}");
    }
    harness.run("sadd s a b c");
    harness.fx.clear();
    let drawn = harness.run("spop s");
    assert_eq!(recorded(&mut harness), format!("SREM s {drawn}"));
}

#[test]
fn resp3_replies_use_maps_sets_and_doubles() {
    let mut harness = Harness::new();
    harness.protocol = Protocol::Resp3;
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
        assert_eq!(harness.run(command), wanted, "{command}");
    }
}

#[test]
fn encodings_convert_at_the_limits() {
    let mut harness = Harness::new();
    let encoding = |harness: &mut Harness, key: &str| harness.run(&format!("object encoding {key}"));
    for n in 0..129 {
        harness.run(&format!("hset h f{n} v"));
        harness.run(&format!("zadd z {n} m{n}"));
        harness.run(&format!("sadd s {n}"));
        if n == 127 {
            assert_eq!(encoding(&mut harness, "h"), "listpack");
            assert_eq!(encoding(&mut harness, "z"), "listpack");
        }
    }
    assert_eq!(encoding(&mut harness, "h"), "hashtable");
    assert_eq!(encoding(&mut harness, "z"), "skiplist");
    assert_eq!(encoding(&mut harness, "s"), "intset");
    harness.run("sadd s x");
    assert_eq!(encoding(&mut harness, "s"), "hashtable");
    harness.run("rpush l a");
    assert_eq!(encoding(&mut harness, "l"), "quicklist");
}

/// Runs a command whose arguments may contain spaces.
fn run(harness: &mut Harness, words: &[&str]) -> String {
    let args = moim_wire_resp::OwnedArgs::from_slices(words);
    harness.run_args(&args).map_or("(waits)".into(), |reply| super::harness::show(&reply))
}

#[test]
fn function_libraries_are_propagated_and_restored() {
    let code = "#!lua name=lib\nlocal function get(keys, args) return redis.call('GET', keys[1]) end\nredis.register_function{function_name='get', callback=get, flags={'no-writes'}}\nredis.register_function('set', function(keys, args) return redis.call('SET', keys[1], args[1]) end)";
    let (mut one, mut other) = (Harness::new(), Harness::new());
    assert_eq!(run(&mut one, &["function", "load", code]), "lib");
    assert_eq!(run(&mut one, &["function", "load", code]), "-ERR Library 'lib' already exists");
    assert_eq!(run(&mut one, &["function", "load", "replace", code]), "lib");
    assert_eq!(run(&mut one, &["fcall", "set", "1", "k", "v"]), "OK");
    assert_eq!(run(&mut one, &["fcall_ro", "get", "1", "k"]), "v");
    let refused = run(&mut one, &["fcall_ro", "set", "1", "k", "w"]);
    assert_eq!(refused, "-ERR Can not execute a script with write flag using *_ro command.");
    assert_eq!(run(&mut one, &["fcall", "nothing", "0"]), "-ERR Function not found");
    // The propagated effects give the same result on another keyspace.
    one.replay(&mut other);
    assert_eq!(run(&mut other, &["fcall", "get", "1", "k"]), "v");
    let listed = run(&mut other, &["function", "list"]);
    assert!(listed.contains("library_name lib engine LUA"), "{listed}");
    // A payload transfers the libraries.
    let dump = moim_wire_resp::OwnedArgs::from_slices(["function", "dump"]);
    let Some(moim_wire_resp::Value::Bulk(payload)) = other.run_args(&dump) else { panic!("no payload") };
    assert_eq!(run(&mut other, &["function", "flush"]), "OK");
    assert_eq!(run(&mut other, &["fcall", "get", "1", "k"]), "-ERR Function not found");
    let restore = moim_wire_resp::OwnedArgs::from_slices([&b"function"[..], b"restore", &payload]);
    assert_eq!(super::harness::show(&other.run_args(&restore).unwrap()), "OK");
    assert_eq!(run(&mut other, &["fcall", "get", "1", "k"]), "v");
    assert_eq!(run(&mut other, &["function", "delete", "lib"]), "OK");
    assert_eq!(run(&mut other, &["function", "delete", "lib"]), "-ERR Library not found");
}

#[test]
fn invalid_function_library_is_rejected() {
    let mut harness = Harness::new();
    for (code, wanted) in [
        ("return 1", "Missing library metadata"),
        ("#!lua name=a\nreturn 1", "No functions registered"),
        ("#!lua name=a\nredis.register_function('f')", "only applicable to Lua table"),
        (
            "#!lua name=a\nredis.register_function('f', 1)",
            "second argument to redis.register_function must be a function",
        ),
        ("#!lua name=a\nredis.call('PING')", "attempted to access nonexistent global variable 'call'"),
        ("#!lua name=a\nthis is not lua", "Error compiling function"),
        ("#!lua name=a\nwhile true do end", "FUNCTION LOAD timeout"),
    ] {
        let reply = run(&mut harness, &["function", "load", code]);
        assert!(reply.starts_with("-ERR") && reply.contains(wanted), "{code}: {reply}");
    }
    assert_eq!(run(&mut harness, &["function", "list"]), "[]");
}

#[test]
fn scripts_accept_as_many_arguments_as_requests() {
    let many = vec!["x"; 20_000];
    let command = [&["eval", "return {#KEYS, #ARGV, ARGV[20000]}", "0"], many.as_slice()].concat();
    let reply = Harness::new().run_args(&moim_wire_resp::OwnedArgs::from_slices(command)).unwrap();
    assert_eq!(super::harness::show(&reply), "[:0 :20000 x]");
}

/// Runs a script with the key `k`.
fn eval(harness: &mut Harness, script: &str) -> String {
    let command = moim_wire_resp::OwnedArgs::from_slices(["eval", script, "1", "k"]);
    super::harness::show(&harness.run_args(&command).unwrap())
}

#[test]
fn cjson_settings_are_reset_between_scripts() {
    let mut harness = Harness::new();
    let mut eval = |script: &str| eval(&mut harness, script);
    assert_eq!(eval("return cjson.encode_max_depth(1)"), ":1");
    assert_eq!(eval("return cjson.encode({{1}})"), "[[1]]");
}

#[test]
fn large_script_reply_leaves_memory_for_the_next_script() {
    let mut harness = Harness::new();
    let mut eval = |script: &str| eval(&mut harness, script);
    assert_eq!(
        eval("return redis.call('setrange', KEYS[1], 140 * 1024 * 1024, 'x')"),
        format!(":{}", (140 << 20) + 1)
    );
    assert_eq!(eval("return redis.call('get', KEYS[1])").len(), (140 << 20) + 1);
    for number in 0..400 {
        assert_eq!(
            eval(&format!("return #string.rep('y', 1024 * 1024 + {number})")),
            format!(":{}", (1 << 20) + number)
        );
    }
}

#[test]
fn script_with_many_small_replies_hits_the_memory_limit() {
    let mut harness = Harness::new();
    let mut eval = |script: &str| eval(&mut harness, script);
    eval("local all = {} for n = 1, 16000 do all[n] = n end redis.call('set', KEYS[1], table.concat(all))");
    // Allocates the table first: the loop then allocates only replies.
    let keeps = "local kept = {} for n = 1, 6000 do kept[n] = false end
        for n = 1, 6000 do kept[n] = redis.call('getrange', KEYS[1], n, n + 58000) end
        return #kept";
    let failed = eval(keeps);
    assert!(failed.contains("not enough memory"), "{failed}");
    assert_eq!(eval("return 1"), ":1");
    // Garbage is collected in time even if much memory stays in use.
    let litters =
        "local kept = {} for n = 1, 1500 do kept[n] = redis.call('getrange', KEYS[1], n, n + 58000) end
        for n = 1, 9000 do local gone = redis.call('getrange', KEYS[1], n % 5000, n % 5000 + 50000 - n) end
        return #kept";
    assert_eq!(eval(litters), ":1500");
}

#[test]
fn xclaim_of_new_consumer_emits_createconsumer_event() {
    let mut harness = Harness::new();
    harness.events.notify = crate::events::class::KEYSPACE | crate::events::class::STREAM;
    for command in ["xadd s 1-1 f v", "xgroup create s g 0", "xreadgroup group g one streams s >"] {
        harness.run(command);
    }
    harness.events.notifications.clear();
    for _ in 0..2 {
        harness.run("xclaim s g two 0 1-1");
    }
    let told: Vec<&str> = harness.events.notifications.iter().map(|told| told.event).collect();
    assert_eq!(told, ["xgroup-createconsumer"], "once");
}

#[test]
fn subcommands_are_listed_without_keys() {
    let mut harness = Harness::new();
    let all = harness.run("command list");
    assert!(all.contains(" client|list ") && all.contains(" get "), "{all}");
    assert!(harness.run("command list filterby pattern config|*").contains("config|get"));
    assert_eq!(harness.run("command getkeys eval return 0"), "[]");
    assert!(harness.run("command getkeys get").starts_with("-ERR"));
    for (command, wanted) in [
        ("set k v", "[[k [OW update]]]"),
        ("set k v get", "[[k [RW access update]]]"),
        ("mset a 1 b 2", "[[a [OW update]] [b [OW update]]]"),
        ("lmove a b left right", "[[a [RW access delete]] [b [RW insert]]]"),
        ("sort a store b", "[[a [RO access]] [b [OW update]]]"),
        ("get k", "[[k [RO access]]]"),
    ] {
        assert_eq!(harness.run(&format!("command getkeysandflags {command}")), wanted, "{command}");
    }
}

#[test]
fn new_key_event_precedes_the_command_event() {
    let mut harness = Harness::new();
    use crate::events::class;
    harness.events.notify = class::KEYEVENT | class::NEW | class::STRING;
    for command in ["set a 1", "set a 2", "mset {a}1 1 {a}2 2", "get b"] {
        harness.run(command);
    }
    let told = harness.events.notifications.iter();
    let told: Vec<_> =
        told.map(|told| format!("{} {}", told.event, String::from_utf8_lossy(&told.key))).collect();
    let wanted = ["new a", "set a", "set a", "new {a}2", "new {a}1", "set {a}1", "set {a}2"];
    assert_eq!(told, wanted);
}

#[test]
fn scripts_cannot_write_above_maxmemory() {
    let mut harness = Harness::new();
    harness.run("set k 1");
    harness.run("config set maxmemory 1");
    let mut eval = |script: &str| eval(&mut harness, script);
    assert!(eval("return redis.call('set', KEYS[1], 2)").starts_with("-OOM command not allowed"));
    assert_eq!(eval("return redis.call('get', KEYS[1])"), "1");
    assert_eq!(eval("#!lua flags=allow-oom\nreturn redis.call('set', KEYS[1], 2)"), "OK");
    // A script that has started to write continues.
    assert_eq!(eval("redis.call('del', KEYS[1]) return redis.call('set', KEYS[1], 3)"), "OK");
}
