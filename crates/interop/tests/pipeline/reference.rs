//! The reference run (ten clients, the same 4,422 lines) with every event that once lost messages: partitions are
//! added to its topics, the store loses five counts, and all clients are killed and restarted. The verdict is `ok`,
//! and every count that is changed afterwards is located.

use std::process::Command;
use std::time::{Duration, Instant};

use moim_interop::moim_binary;

use crate::gateway::Pipeline;
use crate::planted::{ask, check, client, counted, redis, relay};

/// A key's value as a number.
fn number(pipeline: &Pipeline, key: &str) -> u64 {
    redis(pipeline, &["GET", key]).lines().nth(1).and_then(|line| line.parse().ok()).unwrap_or(0)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < deadline, "not {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn add_partitions(pipeline: &Pipeline, topic: &str, count: &str) {
    let added = Command::new(moim_binary().unwrap())
        .args(["topic", "add-partitions", topic, "--to", count, "--kafka", pipeline.kafka()])
        .output()
        .unwrap();
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
}

/// The store loses the last five counts of a client.
fn lose_counts(pipeline: &Pipeline, name: &str) {
    let keys = ["last_msg_sn", "msg_cnt"].map(|part| format!("consumer:{{{name}}}:{part}"));
    let script = "redis.call('DECRBY', KEYS[1], 5) return redis.call('DECRBY', KEYS[2], 5)";
    redis(pipeline, &["EVAL", script, "2", &keys[0], &keys[1]]);
}

fn plant_faults(pipeline: &mut Pipeline) {
    // A message that never reached the topic.
    client(pipeline, "planted", 4);
    relay(pipeline, "planted", &[1, 2, 4]);
    counted(pipeline, "planted", 2);
    let missing = ["\"client\": \"planted\"", "\"sn\": 3", "\"stage\": \"relay\"", "\"blocked\": 3"];
    check(pipeline, &[&["\"lost\": 2"], &missing[..]].concat());
    relay(pipeline, "planted", &[3]);
    counted(pipeline, "planted", 4);
    let fine = pipeline.verify(&["--wait", "60s"]);
    assert!(fine.status.success(), "{}", String::from_utf8_lossy(&fine.stdout));
    // A running aggregator would restore a count that the store has lost.
    pipeline.stop();
    // One line's counts are moved to another line: the sums are unchanged.
    let nodes = pipeline.redis().split(',');
    let keys: String = nodes.map(|node| ask(node, &["KEYS", "message:{*}:count"])).collect();
    let mut keys = keys.lines().filter(|line| line.starts_with("message:")).filter(|key| {
        // Not those of the client above.
        number(pipeline, key) == 10
    });
    let (gone, doubled) = (keys.next().unwrap().to_owned(), keys.next().unwrap().to_owned());
    let hash = |key: &str| key["message:{".len()..key.len() - "}:count".len()].to_owned();
    redis(pipeline, &["DEL", &gone]);
    redis(pipeline, &["INCRBY", &doubled, "10"]);
    check(
        pipeline,
        &[
            "\"lost\": 10",
            "\"duplicated\": 10",
            &format!("\"hash\": \"{}\"", hash(&gone)),
            &format!("\"hash\": \"{}\"", hash(&doubled)),
            "\"count\": 20",
            "\"stage\": \"aggregator\"",
        ],
    );
    redis(pipeline, &["SET", &gone, "10"]);
    redis(pipeline, &["INCRBY", &doubled, "-10"]);
    // One count of a client.
    redis(pipeline, &["DECR", "consumer:{client-7}:msg_cnt"]);
    check(
        pipeline,
        &["\"lost\": 1", "\"duplicated\": 0", "\"client\": \"client-7\"", "\"stage\": \"counter\""],
    );
}

#[test]
fn reference_run_survives_added_partitions_lost_store_counts_and_client_restarts() {
    let _turn = super::one_at_a_time();
    let mut pipeline = Pipeline::start("run", &[]);
    let so_far = |name: &str| number(&pipeline, &format!("consumer:{{{name}}}:msg_cnt"));
    let mut load = pipeline.loading(&["--clients", "10", "--rate", "300"]);
    until("a few hundred counted", || so_far("client-3") > 300);
    add_partitions(&pipeline, "client_message", "17");
    add_partitions(&pipeline, "message_aggregation", "13");
    let before = so_far("client-3");
    until("counting after partitions were added", || so_far("client-3") > before + 100);
    lose_counts(&pipeline, "client-3");
    until("counting after the store went back", || so_far("client-3") > before + 300);
    load.kill().unwrap();
    load.wait().unwrap();
    let again = pipeline.load(&["--clients", "10"]);
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    // Once more at the end, when no further message reveals the gap.
    until("all counted", || (0..10).all(|n| so_far(&format!("client-{n}")) == 4_422));
    lose_counts(&pipeline, "client-5");
    let verdict = pipeline.verify(&["--wait", "120s", "--expect-each", "10"]);
    let text = String::from_utf8_lossy(&verdict.stdout).into_owned();
    assert!(verdict.status.success(), "{text}\n{}", String::from_utf8_lossy(&verdict.stderr));
    for line in
        ["\"sent\": 44220", "\"counted\": 44220", "\"lost\": 0", "\"duplicated\": 0", "\"distinct\": 4422"]
    {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
    plant_faults(&mut pipeline);
}
