//! The verifier on real topics and a real store with planted faults: it must detect each, and locate it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use moim_interop::moim_binary;

use crate::gateway::Pipeline;

/// Sends a command to the node that owns the key; returns the raw reply.
pub(crate) fn redis(pipeline: &Pipeline, words: &[&str]) -> String {
    let first = pipeline.redis().split(',').next().unwrap();
    let answer = ask(first, words);
    match answer.strip_prefix("-MOVED ").and_then(|moved| moved.split_whitespace().nth(1)) {
        Some(node) => ask(node, words),
        None => answer,
    }
}

pub(crate) fn ask(node: &str, words: &[&str]) -> String {
    let mut stream = TcpStream::connect(node).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut command = format!("*{}\r\n", words.len());
    for word in words {
        command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    stream.write_all(command.as_bytes()).unwrap();
    let mut answer = vec![0; 4096];
    let length = stream.read(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer[..length]).into_owned();
    assert!(!answer.starts_with('-') || answer.starts_with("-MOVED"), "{words:?}: {answer}");
    answer
}

/// A client's state as a gateway leaves it: `sent` messages, all of them acknowledged and relayed.
pub(crate) fn client(pipeline: &Pipeline, name: &str, sent: u64) {
    let bucket = name.bytes().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte))) % 16;
    redis(pipeline, &["SADD", &format!("producer:index:{{{bucket}}}"), name]);
    let (state, sent) = (format!("producer:{{{name}}}:state"), sent.to_string());
    redis(pipeline, &["HSET", &state, "sent", &sent, "acked", &sent, "stored", &sent]);
}

/// Produces messages of a client to the topic, in this order.
pub(crate) fn relay(pipeline: &Pipeline, name: &str, numbers: &[u64]) {
    for sn in numbers {
        let mut produce = Command::new(moim_binary().unwrap())
            .args(["topic", "produce", "client_message", "--kafka", pipeline.kafka(), "-k", name])
            .args(["-H", &format!("cid={name}"), "-H", &format!("sn={sn}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        produce.stdin.take().unwrap().write_all(format!("line {sn}\n").as_bytes()).unwrap();
        assert!(produce.wait().unwrap().success());
    }
}

/// Waits until `count` messages of a client were counted.
pub(crate) fn counted(pipeline: &Pipeline, name: &str, count: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let expected = format!("\r\n{count}\r\n");
    while !redis(pipeline, &["GET", &format!("consumer:{{{name}}}:msg_cnt")]).ends_with(&expected) {
        assert!(Instant::now() < deadline, "{name}: not {count}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The verdict must eventually contain all of this; the aggregators may lag behind the counters.
pub(crate) fn check(pipeline: &Pipeline, expected: &[&str]) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let output = pipeline.verify(&[]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.code() == Some(8) && expected.iter().all(|line| text.contains(line)) {
            return;
        }
        let response = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(Instant::now() < deadline, "{}, not {expected:?}:\n{text}\n{response}", output.status);
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn planted_losses_duplicates_and_swaps_are_located() {
    let _turn = super::one_at_a_time();
    let mut pipeline = Pipeline::start("run", &[]);
    // 3 before 2, and never again: once 2 was counted, 3 is re-read.
    client(&pipeline, "swapped", 3);
    relay(&pipeline, "swapped", &[1, 3, 2]);
    counted(&pipeline, "swapped", 3);

    // 2 never reached the topic: 3 is dead-lettered, and counted once 2 arrives.
    client(&pipeline, "gap", 3);
    relay(&pipeline, "gap", &[1, 3]);
    counted(&pipeline, "gap", 1);
    check(
        &pipeline,
        &[
            "\"lost\": 2",
            "\"duplicated\": 0",
            "\"client\": \"gap\"",
            "\"sn\": 2",
            "\"stage\": \"relay\"",
            "\"blocked\": 2",
        ],
    );
    let letters = ["topic", "consume", "pipeline_dead_letter", "--kafka", pipeline.kafka()];
    let letters = Command::new(moim_binary().unwrap())
        .args(letters)
        .args(["--offset", "start", "-e", "-o", "json"])
        .current_dir(pipeline.folder())
        .output()
        .unwrap();
    let letters = String::from_utf8_lossy(&letters.stdout).into_owned();
    assert!(letters.contains("message 2 is missing before it") && letters.contains("line 3"), "{letters}");
    relay(&pipeline, "gap", &[2]);
    counted(&pipeline, "gap", 3);
    let fine = pipeline.verify(&["--wait", "60s"]);
    assert!(fine.status.success(), "{}", String::from_utf8_lossy(&fine.stdout));

    // A running aggregator would restore a count that the store has lost.
    pipeline.stop();
    // Counted twice for its client.
    redis(&pipeline, &["INCR", "consumer:{gap}:msg_cnt"]);
    check(&pipeline, &["\"duplicated\": 1", "\"client\": \"gap\"", "\"sn\": 3", "\"stage\": \"counter\""]);
    redis(&pipeline, &["DECR", "consumer:{gap}:msg_cnt"]);

    // Counted once too often, or once too few, by its text.
    let nodes = pipeline.redis().split(',');
    let keys: String = nodes.map(|node| ask(node, &["KEYS", "message:{*}:count"])).collect();
    let key = keys.lines().find(|line| line.starts_with("message:")).unwrap().to_owned();
    redis(&pipeline, &["INCR", &key]);
    check(&pipeline, &["\"duplicated\": 1", "\"count\": 3", "\"stage\": \"aggregator\"", "counted 3 times"]);
    redis(&pipeline, &["INCRBY", &key, "-2"]);
    check(&pipeline, &["\"lost\": 1", "\"count\": 1", "\"stage\": \"aggregator\"", "counted 1 times"]);
}
