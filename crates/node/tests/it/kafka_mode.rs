//! Kafka mode of the cluster library on our own queue and store: partitions change hands in order and by a crash, and every
//! press's count stays exact.

#[path = "../../../cluster/examples/fleet_kafka.rs"]
mod fleet_kafka;

use std::collections::BTreeMap;
use std::time::Duration;

use fleet_kafka::Counter;
use moim_base::task::{Scope, Shutdown};
use moim_cluster::leadership::LeaderElection as _;

use crate::support::{Node, PATIENCE, moim, moim_with_input};

const PRESSES: usize = 12;

/// Sends every press `rounds` strokes.
fn produce(kafka: &str, rounds: usize) {
    let mut input = String::new();
    for round in 0..rounds {
        for press in 0..PRESSES {
            input.push_str(&format!("press-{press}\t{round}\n"));
        }
    }
    let done = moim_with_input(&["topic", "produce", "strokes", "-f", "%k\t%v\n", "--kafka", kafka], &input);
    assert_eq!(done.status, 0, "{done:?}");
}

/// Waits until the workers together have counted `rounds` strokes of every press, and never more.
async fn counted(workers: &[&Counter], rounds: u64, what: &str) {
    let wanted: BTreeMap<String, u64> =
        (0..PRESSES).map(|press| (format!("press-{press}"), rounds)).collect();
    let look = async {
        loop {
            let mut total: BTreeMap<String, u64> = BTreeMap::new();
            for worker in workers {
                let strokes = worker.strokes.lock().expect("nobody panicked").clone();
                for (press, count) in strokes.into_values().flatten() {
                    *total.entry(press).or_default() += count;
                }
            }
            if total == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(PATIENCE, look).await.is_err() {
        let all: Vec<_> =
            workers.iter().map(|worker| worker.strokes.lock().expect("nobody panicked").clone()).collect();
        panic!("{what}: {rounds} of each press, but {all:?}");
    }
}

#[test]
fn state_moves_with_partitions_in_order_and_after_a_crash() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = Node::start(dir.path(), &[]);
    let (kafka, etcd) = (node.address("kafka").expect("kafka"), node.address("etcd").expect("etcd"));
    let created = moim(&["topic", "create", "strokes", "-p", "6", "--kafka", kafka]);
    assert_eq!(created.status, 0, "{created:?}");
    produce(kafka, 50);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let scope = Scope::new(Shutdown::new());
        let (a, b, c) = (Counter::default(), Counter::default(), Counter::default());
        let one = fleet_kafka::start(kafka, etcd, "one", a.clone(), &scope).expect("it starts");
        counted(&[&a], 50, "one alone").await;
        let election = one.election("strokes-0");
        let active = election.campaign().await.expect("it owns everything");
        assert!(active.is_valid() && active.fencing_token() >= 1);

        // A second one joins: partitions move in order.
        let two = fleet_kafka::start(kafka, etcd, "two", b.clone(), &scope).expect("it starts");
        let both = async {
            while one.owned().len() != 3 || two.owned().len() != 3 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, both).await.expect("they share");
        counted(&[&a, &b], 50, "after a rebalance").await;
        tokio::task::block_in_place(|| produce(kafka, 50));
        counted(&[&a, &b], 100, "two together").await;

        // A third one joins, and dies: it consumes nothing more and says nothing to anybody.
        let dying = Scope::new(Shutdown::new());
        let third = fleet_kafka::start(kafka, etcd, "three", c.clone(), &dying).expect("it starts");
        let all = async {
            while third.owned().len() != 2 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, all).await.expect("three share");
        tokio::task::block_in_place(|| produce(kafka, 50));
        counted(&[&a, &b, &c], 150, "three together").await;
        third.crash();
        tokio::task::block_in_place(|| produce(kafka, 50));
        counted(&[&a, &b], 200, "after a crash").await;

        two.stop().await;
        counted(&[&a], 200, "one is left").await;
        one.stop().await;
        scope.shutdown().stop();
    });
}
