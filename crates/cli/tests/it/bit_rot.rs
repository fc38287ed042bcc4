//! Bit rot on the disk of a stopped node in a healthy cluster of three: no client ever reads the damaged bytes, the
//! replica is repaired from the others, and events are reported. A node with a damaged commit log or Raft log does not
//! start with it.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use crate::cluster::eventually;
use crate::nodes::{Peer, founders};
use crate::slots::{Client, addresses};
use crate::support::{Done, moim_with_input};

const TOPIC: &str = "orders";

fn brokers(peers: &[Peer]) -> String {
    peers.iter().map(Peer::kafka_address).collect::<Vec<_>>().join(",")
}

fn produce(peers: &[Peer], lines: std::ops::Range<u32>) -> Done {
    let text: String = lines.map(|line| format!("{line:0>100}\n")).collect();
    moim_with_input(&["topic", "produce", TOPIC, "--kafka", &brokers(peers)], &text)
}

/// All records of the topic, sorted; `None` if the consumption fails.
fn consumed(peers: &[Peer]) -> Option<Vec<u32>> {
    let done = moim_with_input(&["topic", "consume", TOPIC, "-e", "--kafka", &brokers(peers)], "");
    let mut lines: Vec<u32> = done.stdout.lines().map(|line| line.parse().expect("a number")).collect();
    lines.sort_unstable();
    (done.status == 0).then_some(lines)
}

fn all() -> Option<Vec<u32>> {
    Some((0..500).collect())
}

fn flip(path: &Path, byte: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("a file");
    let mut bytes = [0];
    file.read_exact_at(&mut bytes, byte).expect("a byte of it");
    file.write_all_at(&[bytes[0] ^ 0x04], byte).expect("a byte of it");
}

/// The segments of a journal, oldest first.
fn segments(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path());
    let mut logs: Vec<_> = files.filter(|path| path.extension().is_some_and(|end| end == "log")).collect();
    logs.sort();
    logs
}

/// Flips a bit in the middle of the newest non-empty segment.
fn flip_in_journal(folder: &Path) {
    let len = |path: &PathBuf| path.metadata().expect("a file").len();
    let active = segments(folder).into_iter().rfind(|path| len(path) > 200).expect("a segment");
    flip(&active, 64 + (len(&active) - 64) / 2);
}

fn stopped(peer: &mut Peer) {
    peer.signal(Signal::TERM);
    assert_eq!(peer.wait(), 0, "{}", peer.log());
}

fn events(peer: &Peer) -> String {
    peer.cluster(&["events", "-o", "json"]).stdout
}

/// Checks that every acknowledged write is read unchanged.
fn check(peers: &[Peer], written: &BTreeMap<String, String>) {
    let mut client = Client::new(&addresses(peers));
    for (key, value) in written {
        assert_eq!(&client.run(&["GET", key]), value, "{key}");
    }
    assert_eq!(consumed(peers), all());
}

#[test]
fn bit_flip_in_a_replica_is_never_served_and_the_replica_is_repaired() {
    let (mut peers, list) = founders();
    assert_eq!(peers[0].kafka(&["topic", "create", TOPIC, "-p", "1"]).status, 0);
    assert_eq!(produce(&peers, 0..500).status, 0);
    let mut client = Client::new(&addresses(&peers));
    let written: BTreeMap<_, _> = (0..300).map(|n| (format!("key:{n}"), format!("{n:0>200}"))).collect();
    for (key, value) in &written {
        assert_eq!(client.run(&["SET", key, value]), "+OK");
    }
    peers[0].healthy_with(3, 3);
    stopped(&mut peers[2]);
    let data = peers[2].data();
    flip_in_journal(&data.join("queue").join(TOPIC).join("Partition-0"));
    for shard in 0..3 {
        flip_in_journal(&data.join("slots").join(format!("shard-{shard}")));
    }
    peers[2].start_ready(&["--initial-cluster", &list]);
    check(&peers, &written);
    eventually("damage and repair events", || {
        let reported = events(&peers[0]);
        ["damaged on node 3", "repaired on node 3"].iter().all(|what| reported.contains(what))
            && peers[2].log().matches("damaged replica repaired").count() == 4
    });
    peers[0].healthy_with(3, 3);
    check(&peers, &written);
    // Without the other leaders, the repaired replica serves.
    for node in ["1", "2"] {
        assert_eq!(peers[2].cluster(&["drain", node]).status, 0);
    }
    check(&peers, &written);
}

/// The newest commit log file, and the positions of its groups.
fn groups(data: &Path) -> (PathBuf, Vec<u64>) {
    let mut newest = (0, PathBuf::new(), Vec::new());
    for path in segments(&data.join("commit")) {
        let bytes = std::fs::read(&path).expect("a file");
        for at in (4096..bytes.len().saturating_sub(96)).step_by(4096) {
            let generation = u64::from_le_bytes(bytes[at + 16..at + 24].try_into().expect("eight bytes"));
            let block = u32::from_le_bytes([bytes[at + 9], bytes[at + 10], bytes[at + 11], 0]);
            if &bytes[at..at + 4] != b"MMC2" || u64::from(block) * 4096 != at as u64 {
                continue;
            }
            if generation > newest.0 {
                newest = (generation, path.clone(), Vec::new());
            }
            if generation == newest.0 {
                newest.2.push(at as u64);
            }
        }
    }
    (newest.1, newest.2)
}

#[test]
fn replica_with_a_damaged_commit_log_is_not_elected_and_no_record_is_lost() {
    let (mut peers, list) = founders();
    // min.insync.replicas=2: both replicas acknowledge, so either may lead.
    let settings = ["-p", "1", "-r", "2", "-c", "min.insync.replicas=2"];
    assert_eq!(peers[0].kafka(&[&["topic", "create", TOPIC], &settings[..]].concat()).status, 0);
    assert_eq!(produce(&peers, 0..500).status, 0);
    let described = peers[0].kafka(&["topic", "describe", TOPIC, "-o", "json"]).json();
    let replicas = described["topics"][0]["partitions"][0]["replicas"].as_array().expect("replicas").clone();
    let at = |index: usize| replicas[index].as_i64().expect("a node") as usize - 1;
    let (damaged, whole) = (at(0), at(1));
    peers[damaged].signal(Signal::KILL);
    peers[whole].signal(Signal::KILL);
    peers[damaged].wait();
    peers[whole].wait();
    damage_commit_log(&peers[damaged]);

    peers[damaged].start(&["--initial-cluster", &list]);
    assert_ne!(peers[damaged].wait(), 0);
    let log = peers[damaged].log();
    assert!(log.contains("commit log damaged") && log.contains("moim cluster replace"), "{log}");
    peers[whole].start_ready(&["--initial-cluster", &list]);

    // The remedy from its hint.
    peers[damaged].wipe();
    let node = peers[damaged].id.to_string();
    peers[damaged].start(&["--initial-cluster", &list]);
    eventually("the node is replaced", || peers[whole].cluster(&["replace", &node, "--yes"]).status == 0);
    peers[damaged].ready();
    peers[whole].healthy_with(3, 3);
    eventually("all records are readable", || consumed(&peers) == all());
}

/// Flips a bit in a synced group of the commit log; a later group proves that it was synced.
fn damage_commit_log(peer: &Peer) {
    let (file, groups) = groups(&peer.data());
    assert!(groups.len() > 3, "{groups:?}");
    flip(&file, groups[groups.len() - 3] + 50);
}

#[test]
fn node_with_a_damaged_commit_log_rejoins_if_its_data_is_redundant() {
    let (mut peers, list) = founders();
    assert_eq!(peers[0].kafka(&["topic", "create", TOPIC, "-p", "1", "-r", "3"]).status, 0);
    assert_eq!(produce(&peers, 0..500).status, 0);
    peers[0].healthy_with(3, 3);
    peers[2].signal(Signal::KILL);
    peers[2].wait();
    damage_commit_log(&peers[2]);
    peers[2].start_ready(&["--initial-cluster", &list]);
    let log = peers[2].log();
    assert!(log.contains("commit log damaged") && log.contains("data directory set aside"), "{log}");
    peers[0].healthy_with(3, 3);
    let reported = events(&peers[0]);
    assert!(reported.contains("data directory of node 3 is damaged and refetched"), "{reported}");
    // Without the other leaders, the refetched replicas serve.
    for node in ["1", "2"] {
        assert_eq!(peers[2].cluster(&["drain", node]).status, 0);
    }
    eventually("all acknowledged records are served", || consumed(&peers) == all());

    // The only in-sync replica is never set aside without an operator.
    assert_eq!(peers[0].cluster(&["undrain", "1"]).status, 0);
    assert_eq!(peers[0].cluster(&["undrain", "2"]).status, 0);
    let alone = ["topic", "create", "alone", "-p", "3", "-r", "1"];
    assert_eq!(peers[0].kafka(&alone).status, 0);
    let lines: String = (0..100).map(|line| format!("{line:0>100}\n")).collect();
    let done = moim_with_input(&["topic", "produce", "alone", "--kafka", &brokers(&peers)], &lines);
    assert_eq!(done.status, 0);
    peers[1].signal(Signal::KILL);
    peers[1].wait();
    damage_commit_log(&peers[1]);
    peers[1].start(&["--initial-cluster", &list]);
    assert_ne!(peers[1].wait(), 0);
    let log = peers[1].log();
    assert!(log.contains("only in-sync replica") && log.contains("moim cluster replace"), "{log}");
}

/// Flips a bit in the oldest frame of a journal.
fn flip_oldest_frame(folder: &Path) {
    flip(segments(folder).first().expect("a segment"), 64 + 24);
}

/// Damages a journal of every Raft group of a stopped node: the node does not start, and the others go on.
fn raft_damage_stops_the_node(journal: &str, damage: fn(&Path)) {
    let (mut peers, list) = founders();
    (0..40).for_each(|n| peers[0].put(&format!("key{n}"), "a value that is long enough to be hit"));
    stopped(&mut peers[1]);
    // Killed in its second run: recovery finds the newest frames in the commit log and does not read the older ones.
    peers[1].start(&["--initial-cluster", &list]);
    peers[1].ready();
    peers[1].kill();
    let raft = std::fs::read_dir(peers[1].data().join("raft")).expect("a folder");
    let groups: Vec<_> = raft.map(|entry| entry.expect("an entry").path().join(journal)).collect();
    groups.iter().filter(|folder| folder.is_dir()).for_each(|folder| damage(folder));
    peers[1].start(&["--initial-cluster", &list]);
    assert_ne!(peers[1].wait(), 0);
    let log = peers[1].log();
    assert!(log.contains("is damaged") && log.contains("moim cluster replace"), "{log}");
    assert!(!log.contains("panicked"), "found before the node takes part: {log}");
    peers[0].put("the others", "go on");
}

#[test]
fn node_with_a_damaged_raft_log_stops_and_names_the_remedy() {
    raft_damage_stops_the_node("log", flip_in_journal);
}

#[test]
fn node_with_a_damaged_vote_record_stops_and_names_the_remedy() {
    raft_damage_stops_the_node("meta", flip_oldest_frame);
}
