//! Three nodes, each the leader of some partitions: clients find the leaders from any bootstrap node.

use std::collections::BTreeSet;

use moim_interop::cluster::Cluster;
use moim_interop::until;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::producer::Producer;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::support::*;

/// A dedicated cluster of three nodes; none if the suite runs against an external broker.
fn three() -> Option<Cluster> {
    match std::env::var_os("INTEROP_KAFKA") {
        Some(_) => None,
        None => Some(Cluster::moim(3, &options(), false).unwrap()),
    }
}

fn address(cluster: &Cluster, node: usize) -> &str {
    cluster.server(node).unwrap().kafka()
}

/// The leaders of a topic's partitions, once all nodes run and are in the metadata.
fn leaders(address: &str, topic: &str) -> Vec<i32> {
    until(PATIENCE, "every partition has a leader", || {
        let consumer: BaseConsumer = client(address, &[]).create().ok()?;
        let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).ok()?;
        let leaders: Vec<i32> = metadata.topics()[0].partitions().iter().map(|p| p.leader()).collect();
        (metadata.brokers().len() == 3 && !leaders.contains(&-1)).then_some(leaders)
    })
}

/// Creates a topic once all nodes know each other, so that it has partitions on all of them, with replication factor
/// 1.
fn spread_topic(cluster: &Cluster, what: &str, partitions: i32) -> String {
    await_all(cluster);
    let name = unique(what);
    create_replicated(address(cluster, 0), &name, partitions, 1, &[]);
    let nodes: BTreeSet<i32> = leaders(address(cluster, 1), &name).into_iter().collect();
    assert_eq!(nodes, BTreeSet::from([1, 2, 3]), "partitions on all nodes");
    name
}

#[test]
fn records_are_produced_to_and_consumed_from_all_nodes() {
    let Some(mut cluster) = three() else { return };
    let topic = spread_topic(&cluster, "spread", 6);
    let mut sender = Sender::new(address(&cluster, 1), &[("enable.idempotence", "true")]);
    for round in 0..10 {
        for partition in 0..6 {
            let offsets = sender.deliver(&topic, partition, &[Sample::value(format!("{partition}.{round}"))]);
            assert_eq!(offsets, [round]);
        }
    }
    assert_eq!(read_all(address(&cluster, 2), &topic, 6, &[]).len(), 60);
    // A node crashes: its partitions are unavailable until it returns, the others continue.
    let placed = leaders(address(&cluster, 0), &topic);
    cluster.kill(2).unwrap();
    let here = placed.iter().position(|leader| *leader != 3).unwrap() as i32;
    sender.deliver(&topic, here, &[Sample::value("meanwhile")]);
    cluster.restart(2).unwrap();
    assert_eq!(leaders(address(&cluster, 1), &topic), placed);
    for partition in 0..6 {
        sender.deliver(&topic, partition, &[Sample::value("after")]);
    }
    assert_eq!(read_all(address(&cluster, 2), &topic, 6, &[]).len(), 67);
}

#[test]
fn groups_commit_and_resume_on_any_coordinator() {
    let Some(cluster) = three() else { return };
    let topic = spread_topic(&cluster, "groups", 3);
    for partition in 0..3 {
        let texts: Vec<Sample> = (0..5).map(|n| Sample::value(format!("{partition}.{n}"))).collect();
        Sender::new(address(&cluster, 0), &[]).deliver(&topic, partition, &texts);
    }
    for number in 0..6 {
        let group = unique("group");
        let settings = [
            ("group.id", group.as_str()),
            ("auto.offset.reset", "earliest"),
            ("enable.auto.commit", "false"),
            ("session.timeout.ms", "6000"),
        ];
        let member: BaseConsumer = client(address(&cluster, number % 3), &settings).create().unwrap();
        member.subscribe(&[&topic]).unwrap();
        assert_eq!(take(&member, 15).len(), 15);
        member.commit_consumer_state(CommitMode::Sync).unwrap();
        drop(member);
        for partition in 0..3 {
            let node = (number + 1) % 3;
            assert_eq!(committed(address(&cluster, node), &group, &topic, partition), Some(5));
        }
    }
}

#[test]
fn transactions_are_atomic_across_nodes() {
    let Some(cluster) = three() else { return };
    let source = spread_topic(&cluster, "source", 3);
    let target = spread_topic(&cluster, "target", 3);
    let group = unique("mover");
    for number in 0..6 {
        let commit = number % 2 == 0;
        let id = unique("txn");
        let mut sender = Sender::new(address(&cluster, number % 3), &[("transactional.id", id.as_str())]);
        sender.inner.init_transactions(PATIENCE).unwrap();
        sender.inner.begin_transaction().unwrap();
        for partition in 0..3 {
            sender.deliver(&target, partition, &[Sample::value(format!("{number}"))]);
        }
        let settings = [("group.id", group.as_str())];
        let consumer: BaseConsumer = client(address(&cluster, 0), &settings).create().unwrap();
        let mut offsets = TopicPartitionList::new();
        offsets.add_partition_offset(&source, 0, Offset::Offset(number as i64 + 1)).unwrap();
        let metadata = consumer.group_metadata().unwrap();
        sender.inner.send_offsets_to_transaction(&offsets, &metadata, PATIENCE).unwrap();
        if commit {
            sender.inner.commit_transaction(PATIENCE).unwrap();
        } else {
            sender.inner.abort_transaction(PATIENCE).unwrap();
        }
    }
    let settings = [("isolation.level", "read_committed")];
    let mut seen: Vec<String> =
        read_all(address(&cluster, 1), &target, 3, &settings).iter().map(Seen::text).collect();
    seen.sort();
    assert_eq!(seen, ["0", "0", "0", "2", "2", "2", "4", "4", "4"]);
    assert_eq!(committed(address(&cluster, 2), &group, &source, 0), Some(5), "the last that was committed");
}
