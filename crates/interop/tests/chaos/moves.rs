//! Partition reassignment under load: every partition is moved from node to node while clients produce, consume and
//! copy in transactions. No client may see an error, and no record may be lost, duplicated or reordered.
//!
//! The topics have two replicas on three nodes, so that each reassignment moves a replica, and a leadership, to
//! another node. The topics of groups and transactions have a replica on every node; their leaderships rotate.
//! `MOIM_CHAOS_MOVES` sets the number of rounds.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moim_interop::cluster::Cluster;
use moim_interop::moim_binary;

use super::load::{Load, topic};
use super::{
    COPY, ORIGINAL, PARTITIONS, await_whole, brokers, exclusive, number, options, verify, whole_within,
};

/// The replicas of a partition in a round: two nodes, never the pair of the previous round.
fn pair(round: u64, partition: i32) -> [u64; 2] {
    let first = (round + partition as u64) % 3;
    [first + 1, (first + 1) % 3 + 1]
}

/// The replicas of a partition with a replica on every node, rotated by round.
fn ring(round: u64, partition: i32) -> [u64; 3] {
    let first = (round + partition as u64) % 3;
    [first + 1, (first + 1) % 3 + 1, (first + 2) % 3 + 1]
}

/// A reassignment of every partition, in the JSON format of Kafka's own tool.
fn plan(round: u64) -> String {
    let one = |topic: &str, partition: i32, replicas: &[u64]| {
        format!("{{\"topic\":\"{topic}\",\"partition\":{partition},\"replicas\":{replicas:?}}}")
    };
    let mut all = Vec::new();
    for partition in 0..PARTITIONS {
        all.push(one(ORIGINAL, partition, &pair(round, partition)));
        all.push(one(COPY, partition, &pair(round + 1, partition)));
    }
    for (topic, partitions) in [("__consumer_offsets", GROUPS), ("__transaction_state", TRANSACTIONS)] {
        all.extend((0..partitions).map(|partition| one(topic, partition, &ring(round, partition))));
    }
    format!("{{\"version\":1,\"partitions\":[{}]}}", all.join(","))
}

/// Partition counts of the topics of groups and of transactions: few, so that a round is about the topics' data.
const GROUPS: i32 = 4;
const TRANSACTIONS: i32 = 4;

#[test]
fn reassignment_of_every_partition_under_load_causes_no_client_error() {
    let _alone = exclusive();
    let options = options()
        .set("kafka.offsets_topic_partitions", GROUPS)
        .set("kafka.transaction_topic_partitions", TRANSACTIONS);
    let mut cluster = Cluster::moim(3, &options, false).unwrap();
    await_whole(&mut cluster, "the start", std::time::Duration::from_secs(30));
    let brokers = brokers(&cluster);
    topic(&brokers, ORIGINAL, PARTITIONS, 2);
    topic(&brokers, COPY, PARTITIONS, 2);
    let stop = Arc::new(AtomicBool::new(false));
    let load = Load::start(&brokers, &stop);
    // The copier has its group and its transactional id before any reassignment.
    load.await_copied(&cluster);

    for round in 1..=number("MOIM_CHAOS_MOVES", 3) {
        let before = load.acked();
        reassign(&brokers, &plan(round));
        let acked = load.await_progress(before, &cluster);
        println!("round {round}: every partition moved, {acked} acknowledged");
    }
    await_whole(&mut cluster, "the moves", whole_within());
    stop.store(true, Ordering::SeqCst);
    let written = load.finish(&cluster);
    assert!(written.unknown.is_empty(), "the writer heard of it: {} records", written.unknown.len());
    assert!(written.copier_failures.is_empty(), "the copier heard of it: {:?}", written.copier_failures);
    assert_eq!(written.copier_hung, 0, "the copier hung");
    verify::check(&brokers, &written, &cluster);
}

/// Submits a reassignment and waits until it is complete.
fn reassign(brokers: &str, plan: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    std::fs::write(&file, plan).unwrap();
    let output = Command::new(moim_binary().unwrap())
        .args(["topic", "reassign", "--timeout", "120s", "-o", "json", "--kafka", brokers, "--plan"])
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let answer = String::from_utf8(output.stdout).unwrap();
    let states = answer.split("\"state\":").skip(1).map(|rest| rest.trim_start().split('"').nth(1));
    let states: Vec<Option<&str>> = states.collect();
    assert!(states.len() >= 2 * PARTITIONS as usize, "{answer}");
    assert!(states.iter().all(|state| *state == Some("moved")), "{answer}");
}
