//! Leader failover with three nodes and replication factor 3: the leader is killed, paused or isolated, and clients
//! continue. Every acknowledged record is there, once, in order; transactions are atomic; groups continue at their
//! committed offsets.
//!
//! `INTEROP_FAILOVER_ROUNDS` sets the number of faults, `INTEROP_SEED` repeats a run.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use moim_interop::cluster::Cluster;
use moim_interop::until;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::Producer;
use rdkafka::topic_partition_list::Offset;

use super::crash::{check, number};
use super::support::*;

const PARTITIONS: i32 = 3;

/// A fault of a node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// SIGKILL, and a restart.
    Death,
    /// SIGSTOP: the node resumes unaware of the pause.
    Pause,
    /// Isolated from the other nodes; clients reach it.
    Isolation,
}

impl Fault {
    fn strike(self, cluster: &mut Cluster, node: usize) {
        match self {
            Self::Death => cluster.kill(node).unwrap(),
            Self::Pause => cluster.pause(node).unwrap(),
            Self::Isolation => cluster.net().unwrap().isolate(node),
        }
    }

    fn heal(self, cluster: &mut Cluster, node: usize) {
        match self {
            Self::Death => cluster.restart(node).unwrap(),
            Self::Pause => cluster.resume(node).unwrap(),
            Self::Isolation => cluster.net().unwrap().heal(true),
        }
    }
}

/// A dedicated cluster of three nodes; none if the suite runs against an external broker.
fn three(fault: Fault) -> Option<Cluster> {
    if std::env::var_os("INTEROP_KAFKA").is_some() {
        return None;
    }
    let cluster = Cluster::moim(3, &options(), fault == Fault::Isolation).unwrap();
    await_all(&cluster);
    Some(cluster)
}

/// The addresses of all nodes, so that clients find a running one.
fn all_addresses(cluster: &Cluster) -> String {
    let addresses: Vec<&str> = (0..3).map(|node| cluster.server(node).unwrap().kafka()).collect();
    addresses.join(",")
}

/// The node (from 0) that leads a partition, once there is a leader.
fn leader(address: &str, topic: &str, partition: usize) -> usize {
    until(PATIENCE, "a leader", || {
        let consumer: BaseConsumer = client(address, &[]).create().ok()?;
        let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).ok()?;
        let leader = metadata.topics().first()?.partitions().get(partition)?.leader();
        usize::try_from(leader - 1).ok()
    })
}

/// Waits until all replicas of a topic are in sync again.
fn await_whole(address: &str, topic: &str) {
    until(PATIENCE, "all copies in sync", || {
        let consumer: BaseConsumer = client(address, &[]).create().ok()?;
        let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).ok()?;
        let partitions = metadata.topics().first()?.partitions();
        partitions.iter().all(|p| p.isr().len() == 3 && p.leader() > 0).then_some(())
    });
}

#[test]
fn acknowledged_records_survive_leader_crashes_without_duplicates() {
    check_failover(Fault::Death);
}

#[test]
fn acknowledged_records_survive_leader_pauses_without_duplicates() {
    check_failover(Fault::Pause);
}

#[test]
fn acknowledged_records_survive_leader_isolation_without_duplicates() {
    check_failover(Fault::Isolation);
}

/// Load while leaders fail in turn: during each fault everything is still acknowledged.
fn check_failover(fault: Fault) {
    let Some(mut cluster) = three(fault) else { return };
    let rounds = number("INTEROP_FAILOVER_ROUNDS", 3);
    let seed = number("INTEROP_SEED", fastrand::u64(..1_000_000));
    eprintln!("INTEROP_SEED={seed} INTEROP_FAILOVER_ROUNDS={rounds}");
    let mut random = fastrand::Rng::with_seed(seed);
    let address = all_addresses(&cluster);
    let topic = topic(&address, "failover", PARTITIONS, &[]);
    let settings = [
        ("enable.idempotence", "true"),
        ("linger.ms", "1"),
        ("batch.num.messages", "50"),
        ("message.timeout.ms", "120000"),
        // An isolated or paused leader does not answer: the client's timeout decides how long it waits.
        ("request.timeout.ms", "2000"),
        ("socket.timeout.ms", "3000"),
        ("topic.metadata.refresh.interval.ms", "500"),
        ("queue.buffering.max.messages", "200000"),
    ];
    let mut sender = Sender::new(&address, &settings);
    let mut homes = Vec::new();
    let mut load = |sender: &mut Sender, random: &mut fastrand::Rng, how_long: Duration| {
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            for _ in 0..random.usize(1..100) {
                let partition = random.i32(0..PARTITIONS);
                let text = format!("{} {}", homes.len(), "x".repeat(random.usize(0..300)));
                homes.push(partition);
                sender.send(&topic, Some(partition), &Sample::value(text));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    for round in 0..rounds {
        let before = Duration::from_millis(random.u64(50..300));
        load(&mut sender, &mut random, before);
        let victim = leader(&address, &topic, (round % 3) as usize);
        fault.strike(&mut cluster, victim);
        load(&mut sender, &mut random, Duration::from_millis(500));
        // A produce that is acknowledged although one of three nodes is unavailable.
        sender.deliver(&topic, (round % 3) as i32, &[]);
        fault.heal(&mut cluster, victim);
        await_whole(&address, &topic);
    }
    let reports = sender.reports();
    let failed = reports.iter().filter(|report| report.is_err()).count();
    assert_eq!(failed, 0, "seed {seed}: {:?}", reports.iter().find(|report| report.is_err()));
    check(&address, &topic, &homes, &reports, seed);
}

/// How a transactional producer handles an error, as the client documentation says.
enum Next {
    Again,
    Abort,
}

fn next_step(error: &KafkaError) -> Next {
    match error {
        KafkaError::Transaction(error) if error.txn_requires_abort() => Next::Abort,
        KafkaError::Transaction(error) if error.is_retriable() => Next::Again,
        error => panic!("fatal: {error:?}"),
    }
}

/// Commits one transaction over all partitions, with retries. `meanwhile` runs in its middle.
fn transact(sender: &mut Sender, topic: &str, text: &str, mut meanwhile: impl FnMut()) {
    loop {
        sender.inner.begin_transaction().unwrap();
        for partition in 0..PARTITIONS {
            sender.send(topic, Some(partition), &Sample::value(text));
            if partition == 0 {
                meanwhile();
            }
        }
        loop {
            match sender.inner.commit_transaction(PATIENCE) {
                Ok(()) => return,
                Err(error) => match next_step(&error) {
                    Next::Again => {}
                    Next::Abort => {
                        sender.inner.abort_transaction(PATIENCE).unwrap();
                        break;
                    }
                },
            }
        }
    }
}

#[test]
fn transactions_stay_atomic_when_nodes_crash_during_them() {
    let Some(mut cluster) = three(Fault::Death) else { return };
    let address = all_addresses(&cluster);
    let topic = topic(&address, "whole", PARTITIONS, &[]);
    let settings = [
        ("transactional.id", "failover"),
        ("transaction.timeout.ms", "60000"),
        ("topic.metadata.refresh.interval.ms", "1000"),
    ];
    let mut sender = Sender::new(&address, &settings);
    sender.inner.init_transactions(PATIENCE).unwrap();
    let mut expected = BTreeSet::new();
    for node in 0..3 {
        let calm = format!("calm-{node}");
        transact(&mut sender, &topic, &calm, || {});
        let storm = format!("storm-{node}");
        let mut killed = false;
        transact(&mut sender, &topic, &storm, || {
            // One of them leads the first partition, one is the transaction coordinator.
            if !std::mem::replace(&mut killed, true) {
                cluster.kill(node).unwrap();
            }
        });
        expected.extend([calm, storm]);
        cluster.restart(node).unwrap();
        await_whole(&address, &topic);
    }
    let committed = [("isolation.level", "read_committed")];
    let seen = read_all(&address, &topic, PARTITIONS, &committed);
    for partition in 0..PARTITIONS {
        let texts: Vec<String> = seen.iter().filter(|s| s.partition == partition).map(Seen::text).collect();
        let distinct: BTreeSet<String> = texts.iter().cloned().collect();
        assert_eq!(texts.len(), distinct.len(), "once each: {texts:?}");
        assert_eq!(distinct, expected, "partition {partition}");
    }
}

#[test]
fn committed_offsets_survive_a_crash_of_every_node() {
    let Some(mut cluster) = three(Fault::Death) else { return };
    let address = all_addresses(&cluster);
    let topic = topic(&address, "offsets", 1, &[]);
    for node in 0..3 {
        let next = i64::try_from(node).unwrap() + 1;
        let consumer: BaseConsumer = client(&address, &[("group.id", "failover")]).create().unwrap();
        until(PATIENCE, "a commit", || {
            let list = partition(&topic, 0, Offset::Offset(next));
            match consumer.commit(&list, CommitMode::Sync) {
                Ok(()) => Some(()),
                Err(error) => {
                    let code = error.rdkafka_error_code();
                    let is_transient = matches!(
                        code,
                        Some(
                            RDKafkaErrorCode::NotCoordinator
                                | RDKafkaErrorCode::CoordinatorNotAvailable
                                | RDKafkaErrorCode::CoordinatorLoadInProgress
                                | RDKafkaErrorCode::WaitingForCoordinator
                                | RDKafkaErrorCode::BrokerTransportFailure
                        )
                    );
                    assert!(is_transient, "{error:?}");
                    None
                }
            }
        });
        cluster.kill(node).unwrap();
        let found = until(PATIENCE, "the offsets from who is left", || {
            let consumer: BaseConsumer = client(&address, &[("group.id", "failover")]).create().ok()?;
            let list = partition(&topic, 0, Offset::Invalid);
            let found = consumer.committed_offsets(list, Duration::from_secs(5)).ok()?;
            match found.elements()[0].offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            }
        });
        assert_eq!(found, next, "what was committed");
        cluster.restart(node).unwrap();
        await_whole(&address, &topic);
    }
}
