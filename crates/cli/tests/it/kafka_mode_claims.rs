//! Kafka mode of the cluster library: a worker that lost the store, and then its place in the group, does not take over the
//! record of the worker that owns the partition now.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown as Half, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_cluster::assignment::AssignmentRecord;
use moim_cluster::etcd::EtcdOptions;
use moim_cluster::repository::Event;
use moim_cluster::{EtcdClient, EtcdRepository, StateRepository as _};
use rustix::process::Signal;

use crate::kafka_mode::fleet_kafka::{self, Counter};
use crate::kafka_mode::{Worker, produce, recorded, until_recorded};
use crate::support::{Node, PATIENCE, moim};

/// A TCP proxy that can be cut.
struct Proxy {
    address: SocketAddr,
    is_cut: Arc<AtomicBool>,
}

impl Proxy {
    fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (address, is_cut) =
            (listener.local_addr().expect("an address"), Arc::new(AtomicBool::new(false)));
        let (target, cut) = (target.to_owned(), Arc::clone(&is_cut));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if cut.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(&target) else { continue };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
                    let cut = Arc::clone(&cut);
                    std::thread::spawn(move || forward(from, to, &cut));
                }
            }
        });
        Self { address, is_cut }
    }

    fn cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::SeqCst);
    }
}

/// Forwards one direction until an end closes or the proxy is cut.
fn forward(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut buffer = [0; 16 << 10];
    let _ = from.set_read_timeout(Some(Duration::from_millis(20)));
    while !is_cut.load(Ordering::SeqCst) {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) if to.write_all(&buffer[..read]).is_err() => break,
            Err(error) if !matches!(error.kind(), std::io::ErrorKind::WouldBlock) => break,
            Ok(_) | Err(_) => {}
        }
    }
    let _ = (from.shutdown(Half::Both), to.shutdown(Half::Both));
}

/// Waits until a record has no owner: its worker has released the partition.
async fn until_released(store: &EtcdRepository) {
    let released = async {
        while !recorded(store).await.0.contains("") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, released).await.expect("a partition is released");
}

/// Changes of owner without a release in between.
fn thefts(history: &[(String, String)]) -> Vec<String> {
    let (mut owners, mut found) = (BTreeMap::new(), Vec::new());
    for (key, owner) in history {
        let before: Option<String> = owners.insert(key.clone(), owner.clone());
        if before.as_ref().is_some_and(|before| before != owner && !before.is_empty() && !owner.is_empty()) {
            found.push(format!("{key}: {before:?} -> {owner}"));
        }
    }
    found
}

#[test]
fn worker_that_lost_the_store_and_its_generation_does_not_take_the_record() {
    const RECORDS: &str = "cluster:assignments/presses/";
    let dir = tempfile::tempdir().expect("a folder");
    let node = Node::start(dir.path(), &[]);
    let (kafka, etcd) = (node.address("kafka").expect("kafka"), node.address("etcd").expect("etcd"));
    let created = moim(&["topic", "create", "strokes", "-p", "2", "--kafka", kafka]);
    assert_eq!(created.status, 0, "{created:?}");
    produce(kafka, 50);
    let proxy = Proxy::start(etcd);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let scope = Scope::new(Shutdown::new());
        let store = EtcdRepository::new(EtcdClient::new(EtcdOptions::new([etcd]), &scope), "");
        let mut watch = store.watch(RECORDS, 0).await.expect("a watch");
        let history = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&history);
        let watcher = scope.spawn("watch", async move {
            while let Some(Ok(event)) = watch.next().await {
                let Event::Put(entry) = event else { continue };
                let record: AssignmentRecord = serde_json::from_slice(&entry.value).expect("a record");
                seen.lock().expect("no panic").push((entry.key, record.owner_node_id));
            }
        });
        let one = fleet_kafka::start(kafka, etcd, "one", Counter::default(), &scope).expect("it starts");
        until_recorded(&store, &["one"], 50).await;

        // Kafka assigns a partition to a worker that cannot claim its record.
        proxy.cut(true);
        let two = Worker::start(kafka, &proxy.address.to_string(), "two");
        until_released(&store).await;
        // It stands still for longer than its session: the partition goes back.
        two.signal(Signal::STOP);
        until_recorded(&store, &["one"], 50).await;
        proxy.cut(false);
        two.signal(Signal::CONT);
        until_recorded(&store, &["one", "two"], 50).await;
        tokio::task::block_in_place(|| produce(kafka, 50));
        until_recorded(&store, &["one", "two"], 100).await;

        watcher.abort();
        let history = history.lock().expect("no panic").clone();
        assert!(history.iter().any(|(_, owner)| owner == "two"), "{history:?}");
        assert_eq!(thefts(&history), Vec::<String>::new(), "{history:?}");
        one.stop().await;
        scope.shutdown().stop();
    });
}
