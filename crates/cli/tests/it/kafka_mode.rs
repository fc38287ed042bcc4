//! Kafka mode of the cluster library on Moim's queue and coordination core: partitions change owner on a rebalance,
//! after a crash and after kill -9 of a process, and the count of every press stays exact. Also the choice of the mode
//! per application.

#[path = "../../../cluster/examples/fleet_kafka.rs"]
pub(crate) mod fleet_kafka;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use fleet_kafka::Counter;
use moim_base::task::{Scope, Shutdown};
use moim_cluster::assignment::{AssignmentRecord, HandedOver, Owned, PartitionHandler, PartitionSpec};
use moim_cluster::config::{AppConfig, Mode, StoreConfig};
use moim_cluster::etcd::EtcdOptions;
use moim_cluster::leadership::LeaderElection as _;
use moim_cluster::{BoxFuture, Cluster, ClusterConfig, EtcdClient, EtcdRepository, StateRepository as _};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Node, PATIENCE, moim, moim_with_input};

const PRESSES: usize = 12;

/// Sends every press `rounds` strokes.
pub(crate) fn produce(kafka: &str, rounds: usize) {
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
    let poll = async {
        loop {
            let mut total: BTreeMap<String, u64> = BTreeMap::new();
            for worker in workers {
                let strokes = worker.strokes.lock().expect("not poisoned").clone();
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
    if tokio::time::timeout(PATIENCE, poll).await.is_err() {
        let all: Vec<_> =
            workers.iter().map(|worker| worker.strokes.lock().expect("not poisoned").clone()).collect();
        panic!("{what}: {rounds} of each press, but {all:?}");
    }
}

#[test]
fn partition_state_moves_on_rebalance_and_after_a_crash() {
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

        // A second worker joins: partitions move by a rebalance.
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

        // A third worker joins and crashes: it consumes no more and does not leave the group.
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

/// Environment variable that makes a test process a worker: `KAFKA ETCD NAME`.
const WORKER: &str = "MOIM_TEST_KAFKA_WORKER";

/// A worker in its own process, started and killed by another test. Without the variable it does nothing.
#[test]
fn worker_process() {
    let Ok(words) = std::env::var(WORKER) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [kafka, etcd, name] = words[..] else { panic!("{WORKER}: {words:?}") };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let scope = Scope::new(Shutdown::new());
        let _worker = fleet_kafka::start(kafka, etcd, name, Counter::default(), &scope).expect("it starts");
        // The worker runs until it is killed, or until its stdin closes with the parent process.
        let ended =
            tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
        let _ = ended.await;
        std::process::exit(0);
    });
}

/// A worker process, killed on drop.
pub(crate) struct Worker(Child);

impl Worker {
    pub(crate) fn start(kafka: &str, etcd: &str, name: &str) -> Self {
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["kafka_mode::worker_process", "--exact", "--nocapture"])
            .env(WORKER, format!("{kafka} {etcd} {name}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.expect("a worker starts"))
    }
}

impl Worker {
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("the worker runs");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Owners and stroke counts in the assignment records.
pub(crate) async fn recorded(store: &EtcdRepository) -> (BTreeSet<String>, BTreeMap<String, u64>) {
    let (mut owners, mut strokes) = (BTreeSet::new(), BTreeMap::new());
    let (_, entries) = store.list("cluster:assignments/presses/").await.expect("the store answers");
    for entry in entries {
        let record: AssignmentRecord = serde_json::from_slice(&entry.value).expect("a record");
        owners.insert(record.owner_node_id);
        let state = record.workflow_handoff.map(|handoff| handoff.checkpoint).unwrap_or_default();
        let presses: BTreeMap<String, u64> = serde_json::from_str(&state).unwrap_or_default();
        for (press, count) in presses {
            *strokes.entry(press).or_default() += count;
        }
    }
    (owners, strokes)
}

/// Waits until these workers own all partitions and have recorded this many strokes of every press, never more.
pub(crate) async fn until_recorded(store: &EtcdRepository, owners: &[&str], rounds: u64) {
    let wanted: BTreeMap<String, u64> =
        (0..PRESSES).map(|press| (format!("press-{press}"), rounds)).collect();
    let names: BTreeSet<String> = owners.iter().map(|name| (*name).to_owned()).collect();
    let poll = async {
        loop {
            let (owned, strokes) = recorded(store).await;
            assert!(strokes.values().all(|count| *count <= rounds), "too many: {strokes:?}");
            if owned == names && strokes == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    if tokio::time::timeout(PATIENCE * 2, poll).await.is_err() {
        panic!("{rounds} strokes by {owners:?}, but {:?}", recorded(store).await);
    }
}

#[test]
fn stolen_assignment_record_is_reclaimed_and_recreated_topic_consumed_from_its_start() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = Node::start(dir.path(), &[]);
    let (kafka, etcd) = (node.address("kafka").expect("kafka"), node.address("etcd").expect("etcd"));
    let create = || {
        let created = moim(&["topic", "create", "strokes", "-p", "2", "--kafka", kafka]);
        assert_eq!(created.status, 0, "{created:?}");
    };
    create();
    produce(kafka, 50);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let scope = Scope::new(Shutdown::new());
        let store = EtcdRepository::new(EtcdClient::new(EtcdOptions::new([etcd]), &scope), "");
        let strokes = Counter::default();
        let one = fleet_kafka::start(kafka, etcd, "one", strokes.clone(), &scope).expect("it starts");
        until_recorded(&store, &["one"], 50).await;
        let tokens = one.owned();

        // A worker that was disconnected from the store and no longer owns the partition overwrites its record.
        let key = "cluster:assignments/presses/strokes-0";
        let entry = store.get(key).await.expect("the store answers").expect("a record");
        let mut taken: AssignmentRecord = serde_json::from_slice(&entry.value).expect("a record");
        taken.owner_node_id = "two".to_owned();
        taken.version += 1;
        let taken = serde_json::to_vec(&taken).expect("JSON");
        store.txn(moim_cluster::Txn::new().put(key, taken)).await.expect("the store answers");
        tokio::task::block_in_place(|| produce(kafka, 50));
        until_recorded(&store, &["one"], 100).await;
        assert!(one.owned()["strokes-0"] > tokens["strokes-0"], "claimed again, with a larger token");
        one.stop().await;

        // Longer than the deleted topic: every committed offset exists again.
        tokio::task::block_in_place(|| {
            let deleted = moim(&["topic", "delete", "strokes", "--yes", "--kafka", kafka]);
            assert_eq!(deleted.status, 0, "{deleted:?}");
            create();
            produce(kafka, 150);
        });
        let one = fleet_kafka::start(kafka, etcd, "one", strokes.clone(), &scope).expect("it starts");
        until_recorded(&store, &["one"], 250).await;
        one.stop().await;
        scope.shutdown().stop();
    });
}

#[test]
fn killed_worker_process_loses_and_duplicates_no_record() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = Node::start(dir.path(), &[]);
    let (kafka, etcd) = (node.address("kafka").expect("kafka"), node.address("etcd").expect("etcd"));
    let created = moim(&["topic", "create", "strokes", "-p", "6", "--kafka", kafka]);
    assert_eq!(created.status, 0, "{created:?}");
    let mut one = Worker::start(kafka, etcd, "one");
    let _two = Worker::start(kafka, etcd, "two");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let scope = Scope::new(Shutdown::new());
        let store = EtcdRepository::new(EtcdClient::new(EtcdOptions::new([etcd]), &scope), "");
        tokio::task::block_in_place(|| produce(kafka, 50));
        until_recorded(&store, &["one", "two"], 50).await;
        // Killed while it consumes: the other worker counts the records since the last assignment record again.
        tokio::task::block_in_place(|| {
            produce(kafka, 100);
            one.0.kill().expect("kill -9");
            produce(kafka, 100);
        });
        until_recorded(&store, &["two"], 250).await;
        scope.shutdown().stop();
    });
}

/// A handler without work.
struct Idle;

impl PartitionHandler for Idle {
    fn on_assigned(&self, _owned: Owned, _handed_over: Option<HandedOver>) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn on_revoked<'a>(&'a self, _partition: &'a str) -> BoxFuture<'a, HandedOver> {
        Box::pin(async { HandedOver::default() })
    }

    fn on_lost(&self, _partition: &str) {}
}

#[test]
fn one_cluster_runs_an_application_in_each_mode() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = Node::start(dir.path(), &[]);
    let (kafka, etcd) = (node.address("kafka").expect("kafka"), node.address("etcd").expect("etcd"));
    let created = moim(&["topic", "create", "strokes", "-p", "3", "--kafka", kafka]);
    assert_eq!(created.status, 0, "{created:?}");
    produce(kafka, 20);
    let presses = AppConfig {
        mode: Mode::Kafka,
        bootstrap: kafka.to_owned(),
        group: "press-group".to_owned(),
        topics: vec!["strokes".to_owned()],
        equipment: BTreeMap::from([("strokes/1".to_owned(), vec!["press-7".to_owned()])]),
        settings: BTreeMap::from([("session.timeout.ms".to_owned(), "6000".to_owned())]),
        ..AppConfig::default()
    };
    let hall = |at| PartitionSpec { id: format!("hall-{at}"), ..PartitionSpec::default() };
    let halls = AppConfig { partitions: (0..4).map(hall).collect(), ..AppConfig::default() };
    let config = ClusterConfig {
        node_id: "n1".to_owned(),
        store: StoreConfig {
            kind: "etcd".to_owned(),
            endpoints: vec![etcd.to_owned()],
            prefix: "plant/".to_owned(),
        },
        apps: BTreeMap::from([("presses".to_owned(), presses), ("halls".to_owned(), halls)]),
        ..ClusterConfig::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let alone = Cluster::builder(config.clone()).app("halls", Arc::new(Idle)).start().await;
        assert!(
            alone.is_err_and(|error| error.to_string().contains("apps.presses")),
            "no handler for the application"
        );
        let counter = Counter::default();
        let builder = Cluster::builder(config).app("halls", Arc::new(Idle));
        let cluster =
            builder.kafka_app("presses", Box::new(counter.clone())).start().await.expect("it starts");
        counted(&[&counter], 20, "in Kafka mode").await;
        let both = async {
            while cluster.owned("halls").len() != 4 || cluster.owned("presses").len() != 3 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, both).await.expect("both are worked on");
        assert_eq!(cluster.health().await.partitions, 7);
        let active = cluster.kafka_election("presses", "strokes-1").expect("it is there").campaign().await;
        assert!(active.expect("it owns everything").is_valid());
        let store = &cluster.context().repository;
        let record = store.get("cluster:assignments/press-group/strokes-1").await.expect("an answer");
        let record: AssignmentRecord =
            serde_json::from_slice(&record.expect("a record").value).expect("a record");
        assert_eq!(
            (record.owner_node_id.as_str(), &record.equipment_ids[..]),
            ("n1", &["press-7".to_owned()][..])
        );
        cluster.stop().await.expect("it leaves");
    });
}
