//! Replicated partitions on three nodes: failover, drain, reassignment, node removal and join.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::cluster::eventually;
use crate::nodes::{Peer, founders};
use crate::support::{Done, moim_with_input};

const TOPIC: &str = "orders";
/// The store of three founders has three shards, each a partition with a replica on every node.
const SHARDS: u64 = 3;

/// Bootstrap servers of all nodes.
fn brokers(peers: &[Peer]) -> String {
    peers.iter().map(Peer::kafka_address).collect::<Vec<_>>().join(",")
}

fn produce(peers: &[Peer], lines: std::ops::Range<u32>) -> Done {
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    moim_with_input(&["topic", "produce", TOPIC, "--kafka", &brokers(peers)], &text)
}

/// All records of the topic, sorted.
fn consumed(peers: &[Peer]) -> Vec<u32> {
    let done = moim_with_input(&["topic", "consume", TOPIC, "-e", "--kafka", &brokers(peers)], "");
    assert_eq!(done.status, 0, "{done:?}");
    let mut lines: Vec<u32> = done.stdout.lines().map(|line| line.parse().expect("a number")).collect();
    lines.sort_unstable();
    lines
}

fn created(peer: &Peer, partitions: &str) {
    let done = peer.kafka(&["topic", "create", TOPIC, "-p", partitions]);
    assert_eq!(done.status, 0, "{done:?}");
}

/// Leader count and replica count of `node`, as `peer` reports them.
fn load(peer: &Peer, node: i32) -> Option<(u64, u64)> {
    let report = peer.report()?;
    let nodes = report["nodes"].as_array()?;
    let found = nodes.iter().find(|one| one["node_id"] == node)?;
    Some((found["leads"].as_u64()?, found["replicas"].as_u64()?))
}

fn leaderless(report: &Value) -> u64 {
    report["partitions"]["leaderless"].as_u64().expect("a number")
}

/// Time until `node` leads no partition and every partition has a leader.
#[allow(clippy::disallowed_methods)] // measures
fn time_to_fail_over(peer: &Peer, node: i32) -> Duration {
    let began = Instant::now();
    eventually("failover to other nodes", || {
        let leads = load(peer, node).is_some_and(|(leads, _)| leads == 0);
        leads && peer.report().is_some_and(|report| leaderless(&report) == 0)
    });
    began.elapsed()
}

/// Index of the node that is the coordination leader and the controller: the worst one to lose.
fn controller(peers: &[Peer]) -> usize {
    let report = peers[0].report().expect("a report");
    assert_eq!(report["controller"], report["leader"]);
    report["controller"].as_i64().expect("a controller") as usize - 1
}

#[test]
fn partitions_fail_over_from_a_killed_or_paused_node_without_loss() {
    let (mut peers, list) = founders();
    created(&peers[0], "6");
    assert_eq!(produce(&peers, 0..500).status, 0);

    let worst = controller(&peers);
    let witness = (worst + 1) % 3;
    let node = peers[worst].id;
    peers[worst].kill();
    let dead = time_to_fail_over(&peers[witness], node);
    assert_eq!(produce(&peers, 500..1_000).status, 0);
    peers[worst].start_ready(&["--initial-cluster", &list]);
    peers[witness].healthy_with(3, 3);

    let worst = controller(&peers);
    let witness = (worst + 1) % 3;
    peers[worst].signal(Signal::STOP);
    let paused = time_to_fail_over(&peers[witness], peers[worst].id);
    assert_eq!(produce(&peers, 1_000..1_500).status, 0);
    peers[worst].signal(Signal::CONT);
    peers[witness].healthy_with(3, 3);

    assert_eq!(consumed(&peers), (0..1_500).collect::<Vec<_>>());
    // The member lease alone would take three seconds; the bench measures the time on a quiet machine.
    println!("failover time: {dead:?} (killed), {paused:?} (stopped)");
}

#[test]
fn stopping_or_drained_node_hands_over_leadership() {
    let (mut peers, list) = founders();
    created(&peers[0], "6");
    let drained = peers[0].cluster(&["drain", "2"]);
    assert_eq!(drained.status, 0, "{drained:?}");
    assert_eq!(load(&peers[0], 2), Some((0, 6 + SHARDS)), "it still follows");
    assert!(peers[0].cluster(&["members"]).stdout.contains("up (drain)"));
    // A new topic is led by the other nodes too.
    assert_eq!(peers[0].kafka(&["topic", "create", "more", "-p", "6"]).status, 0);
    assert_eq!(load(&peers[0], 2).map(|(leads, _)| leads), Some(0));
    assert_eq!(peers[0].cluster(&["undrain", "2"]).status, 0);
    eventually("it leads again", || load(&peers[0], 2).is_some_and(|(leads, _)| leads > 0));

    peers[0].signal(Signal::TERM);
    assert_eq!(peers[0].wait(), 0, "{}", peers[0].log());
    // No failure detection was needed.
    let report = peers[1].report().expect("a report");
    assert_eq!(leaderless(&report), 0, "{report}");
    assert!(!peers[0].log().contains("hand-off timed out"), "{}", peers[0].log());
    let events = peers[1].cluster(&["events", "-o", "json"]).stdout;
    assert!(events.contains("node 1 shall drain") && events.contains("node 1 is down"), "{events}");
    let refused = peers[1].cluster(&["drain", "9"]);
    assert_eq!(refused.status, 3, "{refused:?}");
    peers[0].start_ready(&["--initial-cluster", &list]);
    peers[1].healthy_with(3, 3);
}

#[test]
fn partitions_replicate_to_joined_nodes_and_survive_the_loss_of_the_first() {
    let mut peers: Vec<_> = (1..=3).map(Peer::new).collect();
    peers[0].start_ready(&[]);
    created(&peers[0], "3");
    assert_eq!(produce(&peers[..1], 0..300).status, 0);
    // Consumption as a group creates the offsets topic.
    let read = peers[0].kafka(&["topic", "consume", TOPIC, "-g", "billing", "-n", "300"]);
    assert_eq!(read.status, 0, "{read:?}");
    let seed = peers[0].peer_address();
    peers[1].start_ready(&["--join", &seed]);
    peers[2].start_ready(&["--join", &seed]);
    peers[2].healthy_with(3, 3);
    let report = peers[2].report().expect("a report");
    assert_eq!(report["partitions"]["growing"], 0, "{report}");
    let replicas: Vec<_> = (1..=3).map(|node| load(&peers[2], node).expect("known").1).collect();
    assert!(replicas[0] > 0 && replicas.iter().all(|count| *count == replicas[0]), "{replicas:?}");

    peers[0].kill();
    time_to_fail_over(&peers[1], 1);
    assert_eq!(produce(&peers[1..], 300..400).status, 0);
    assert_eq!(consumed(&peers[1..]), (0..400).collect::<Vec<_>>());
    // The group resumes at its committed offset.
    let brokers = brokers(&peers[1..]);
    let rest =
        moim_with_input(&["topic", "consume", TOPIC, "-g", "billing", "-n", "100", "--kafka", &brokers], "");
    let mut rest: Vec<u32> = rest.stdout.lines().map(|line| line.parse().expect("a number")).collect();
    rest.sort_unstable();
    assert_eq!(rest, (300..400).collect::<Vec<_>>());
}

#[test]
fn replicas_move_on_reassignment_and_before_node_removal() {
    let (mut peers, _) = founders();
    let seed = peers[0].peer_address();
    let mut fourth = Peer::new(4);
    fourth.start_ready(&["--join", &seed]);
    peers.push(fourth);
    peers[0].healthy_with(4, 3);
    created(&peers[0], "4");
    assert_eq!(produce(&peers, 0..400).status, 0);

    let planned = peers[0].kafka(&["topic", "reassign", "--drain", "1", "--dry-run", "-o", "json"]).json();
    assert!(planned["moves"].as_array().is_some_and(|moves| !moves.is_empty()), "{planned}");
    let moved = peers[0].kafka(&["topic", "reassign", TOPIC, "-p", "0", "--to", "4,2", "-o", "json"]);
    assert_eq!((moved.status, moved.json()["moves"][0]["state"].as_str()), (0, Some("moved")), "{moved:?}");
    // Another broker than the one that got the request may update its metadata later.
    eventually("the reassignment is visible", || {
        let described = peers[0].kafka(&["topic", "describe", TOPIC, "-o", "json"]).json();
        described["topics"][0]["partitions"][0]["replicas"] == serde_json::json!([4, 2])
    });
    let none = peers[0].kafka(&["topic", "reassign", TOPIC, "--cancel"]);
    assert_eq!(none.status, 3, "{none:?}");

    let removed = peers[0].cluster(&["remove", "4", "--yes"]);
    assert_eq!(removed.status, 0, "{removed:?}");
    assert_eq!(peers[3].wait(), 0, "{}", peers[3].log());
    peers.pop();
    peers[0].healthy_with(3, 3);
    assert_eq!(consumed(&peers), (0..400).collect::<Vec<_>>());
}

#[test]
fn topic_deleted_while_a_node_was_down_is_deleted_there_after_restart() {
    let (mut peers, list) = founders();
    created(&peers[0], "2");
    assert_eq!(produce(&peers, 0..100).status, 0);
    let folder = peers[2].data().join("queue").join(TOPIC);
    peers[2].kill();
    time_to_fail_over(&peers[0], 3);
    let deleted = peers[0].kafka(&["topic", "delete", TOPIC, "--yes"]);
    assert_eq!(deleted.status, 0, "{deleted:?}");
    peers[2].start_ready(&["--initial-cluster", &list]);
    peers[0].healthy_with(3, 3);
    assert_eq!(peers[0].report().expect("a report")["partitions"]["total"], SHARDS);
    eventually("its replicas are deleted", || {
        std::fs::read_dir(&folder).is_ok_and(|mut files| files.next().is_none()) || !folder.exists()
    });
}
