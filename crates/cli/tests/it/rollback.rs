//! Rollback detection: data directories restored from an older copy, or cloned while their node runs.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::Path;

use rustix::process::Signal;

use crate::cluster::eventually;
use crate::nodes::{Peer, founders};
use crate::support::{PATIENCE, moim_with_input};

const TOPIC: &str = "orders";

fn brokers(peers: &[Peer]) -> String {
    peers.iter().map(Peer::kafka_address).collect::<Vec<_>>().join(",")
}

fn produce(peers: &[Peer], lines: std::ops::Range<u32>) {
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    let done = moim_with_input(&["topic", "produce", TOPIC, "--kafka", &brokers(peers)], &text);
    assert_eq!(done.status, 0, "{done:?}");
}

fn consumed(peers: &[Peer]) -> Vec<u32> {
    let done = moim_with_input(&["topic", "consume", TOPIC, "-e", "--kafka", &brokers(peers)], "");
    assert_eq!(done.status, 0, "{done:?}");
    let mut lines: Vec<u32> = done.stdout.lines().map(|line| line.parse().expect("a number")).collect();
    lines.sort_unstable();
    lines
}

/// Reply of the shard that owns the key; follows MOVED redirects.
fn redis(peers: &[Peer], words: &[&str]) -> String {
    let mut address = peers[0].listener("redis");
    let mut answer = String::new();
    eventually("a reply from the shard", || {
        let Ok(mut stream) = TcpStream::connect(&address) else {
            address = peers[0].listener("redis");
            return false;
        };
        stream.set_read_timeout(Some(PATIENCE)).expect("present");
        let mut command = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| command.push_str(&format!("${}\r\n{word}\r\n", word.len())));
        if stream.write_all(command.as_bytes()).is_err() {
            return false;
        }
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let Some(first) = lines.next() else { return false };
        if let Some(moved) = first.strip_prefix("-MOVED ") {
            address = moved.split(' ').nth(1).expect("an address").to_owned();
            return false;
        }
        if first.starts_with("-") {
            return false;
        }
        answer =
            if first.starts_with('$') && first != "$-1" { lines.next().unwrap_or_default() } else { first };
        true
    });
    answer
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("present");
    for entry in std::fs::read_dir(from).expect("present") {
        let entry = entry.expect("present");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("present").is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("present");
        }
    }
}

/// Copies node 2's data directory, acknowledges more writes, stops all nodes and restores the copy.
fn with_an_older_copy(stop: Signal) {
    let (mut peers, list) = founders();
    let flags = ["--initial-cluster", list.as_str()];
    assert_eq!(peers[0].kafka(&["topic", "create", TOPIC, "-p", "3", "-r", "3"]).status, 0);
    produce(&peers, 0..1_000);
    peers[0].put("k", "before");
    let older = tempfile::tempdir().expect("present");
    peers[1].signal(Signal::TERM);
    peers[1].wait();
    copy(&peers[1].data(), &older.path().join("data"));
    peers[1].start_ready(&flags);
    peers[0].healthy_with(3, 3);
    produce(&peers, 1_000..4_000);
    for number in 0..300 {
        assert_eq!(redis(&peers, &["SET", &format!("key {number}"), &number.to_string()]), "+OK");
    }
    peers[0].put("k", "after");
    peers[0].healthy_with(3, 3);
    let all = [1, 0, 2];
    all.iter().for_each(|at| peers[*at].signal(stop));
    for at in all {
        peers[at].wait();
    }
    peers[1].wipe();
    copy(&older.path().join("data"), &peers[1].data());
    // The node with the older copy starts first, and waits for confirmation.
    peers[1].start(&flags);
    eventually("waits for confirmation", || peers[1].readyz().contains("confirm"));
    peers[0].start(&flags);
    peers[2].start(&flags);
    for at in [0, 2, 1] {
        peers[at].ready();
    }
    peers[0].healthy_with(3, 3);
    assert_eq!(peers[1].get("k").as_deref(), Some("after"));
    assert_eq!(consumed(&peers), (0..4_000).collect::<Vec<_>>());
    for number in 0..300 {
        assert_eq!(redis(&peers, &["GET", &format!("key {number}")]), number.to_string());
    }
    // The node has a new voter id, the old content is set aside, and an event was reported.
    let report = peers[0].report().expect("present");
    assert_eq!(report["nodes"][1]["voter"], 4, "{report}");
    let aside = std::fs::read_dir(peers[1].data()).expect("present");
    let mut names = aside.map(|entry| entry.expect("present").file_name().into_string().expect("present"));
    assert!(names.any(|name| name.starts_with("rolled-back-")));
    let events = |peer: &Peer| peer.cluster(&["events", "-o", "json"]).stdout;
    let events = [events(&peers[0]), events(&peers[2])];
    let is_reported = |events: &String| events.contains("data directory of node 2 was rolled back");
    assert!(events.iter().any(is_reported), "{events:?}");
    // Its refetched replicas serve without node 1.
    peers[0].kill();
    eventually("all records are served by two nodes", || {
        let done = moim_with_input(&["topic", "consume", TOPIC, "-e", "--kafka", &brokers(&peers[1..])], "");
        done.status == 0 && done.stdout.lines().count() == 4_000
    });
}

#[test]
fn directory_restored_from_an_older_copy_loses_nothing_after_a_graceful_stop() {
    with_an_older_copy(Signal::TERM);
}

#[test]
fn directory_restored_from_an_older_copy_loses_nothing_after_kill_9_of_all_nodes() {
    with_an_older_copy(Signal::KILL);
}

#[test]
fn copy_made_within_a_run_is_detected_by_durability_marks() {
    let (mut peers, list) = founders();
    let flags = ["--initial-cluster", list.as_str()];
    assert_eq!(peers[0].kafka(&["topic", "create", TOPIC, "-p", "3", "-r", "3"]).status, 0);
    produce(&peers, 0..1_000);
    peers[0].healthy_with(3, 3);
    // Like a disk snapshot: the files of a killed node.
    peers[1].kill();
    let older = tempfile::tempdir().expect("present");
    copy(&peers[1].data(), &older.path().join("data"));
    peers[1].start_ready(&flags);
    peers[0].healthy_with(3, 3);
    let held = peers[0].report().expect("present")["applied"].as_u64().expect("present");
    produce(&peers, 1_000..2_000);
    eventually("the other nodes have recorded the durable Raft index", || {
        let known = |peer: &Peer| {
            let text = std::fs::read_to_string(peer.data().join("runs.json")).expect("present");
            let runs: serde_json::Value = serde_json::from_str(&text).expect("present");
            runs["2"]["index"].as_u64()
        };
        known(&peers[0]) > Some(held) && known(&peers[2]) > Some(held)
    });
    // The copy gets the confirmed run, as if it had been made within that run.
    let identity = peers[1].data().join("node.json");
    let current = std::fs::read_to_string(&identity).expect("present");
    peers.iter_mut().for_each(Peer::kill);
    peers[1].wipe();
    copy(&older.path().join("data"), &peers[1].data());
    std::fs::write(&identity, &current).expect("present");
    peers.iter_mut().for_each(|peer| peer.start(&flags));
    for at in [0, 2, 1] {
        peers[at].ready();
    }
    peers[0].healthy_with(3, 3);
    assert_eq!(consumed(&peers), (0..2_000).collect::<Vec<_>>());
    assert_eq!(peers[0].report().expect("present")["nodes"][1]["voter"], 4, "{}", peers[1].log());
}

#[test]
fn clone_of_a_running_node_exits_and_changes_nothing() {
    let (peers, _) = founders();
    peers[0].put("k", "v");
    let report = peers[0].report().expect("present");
    let mut clone = Peer::new(2);
    copy(&peers[1].data(), &clone.data());
    clone.start(&[]);
    assert_eq!(clone.wait(), 7, "{}", clone.log());
    assert!(
        clone.log().contains(&format!("node 2 is running at {}", peers[1].peer_address())),
        "{}",
        clone.log()
    );
    assert!(peers[1].readyz().starts_with("ready"), "{}", peers[1].readyz());
    peers[1].put("k", "w");
    let after = peers[0].report().expect("present");
    for field in ["voter", "peer", "incarnation"] {
        assert_eq!(after["nodes"][1][field], report["nodes"][1][field], "{after}");
    }
}

#[test]
fn repeatedly_killed_node_is_never_detected_as_rolled_back() {
    let (mut peers, list) = founders();
    assert_eq!(peers[0].kafka(&["topic", "create", TOPIC, "-p", "3", "-r", "3"]).status, 0);
    for round in 0..4_u32 {
        produce(&peers, round * 200..(round + 1) * 200);
        let at = round as usize % 3;
        peers[at].kill();
        peers[at].start_ready(&["--initial-cluster", &list]);
    }
    peers.iter_mut().for_each(Peer::kill);
    peers.iter_mut().for_each(|peer| peer.start(&["--initial-cluster", &list]));
    peers.iter_mut().for_each(|peer| drop(peer.ready()));
    peers[0].healthy_with(3, 3);
    assert_eq!(consumed(&peers), (0..800).collect::<Vec<_>>());
    let report = peers[0].report().expect("present");
    let voters: Vec<_> = (0..3).map(|at| report["nodes"][at]["voter"].as_u64()).collect();
    assert_eq!(voters, [Some(1), Some(2), Some(3)], "{report}");
}
