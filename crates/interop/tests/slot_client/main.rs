//! Our client on our store, over the protocol. The tests are those against a real Redis Cluster
//! (`crates/slot-client/tests`), with one difference: no acknowledged write may be lost.

#![allow(clippy::unwrap_used)] // all of it is test

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_interop::Options;
use moim_interop::cluster::Cluster;
use moim_slot_client::{Client, Script, SetOptions, cmd};
use tokio::time::Instant;

/// Nodes on loopback, and a client with all of their addresses.
async fn start(nodes: usize) -> (Cluster, Client) {
    let cluster = moim_base::task::offload(move || {
        Cluster::moim(nodes, &Options::new(), false).map_err(std::io::Error::other)
    });
    let cluster = cluster.await.unwrap();
    let seeds: Vec<_> = (0..nodes).map(|node| cluster.server(node).unwrap().redis().to_owned()).collect();
    let client = Client::builder(&seeds.join(","))
        .timeout(Duration::from_secs(20))
        .hung_after(Duration::from_millis(1000))
        .connect()
        .await
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while client.uncovered_slots() > 0 {
        assert!(Instant::now() < deadline, "every slot gets a primary");
        client.refresh();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    (cluster, client)
}

/// The node whose home listener has this port.
fn node_at(cluster: &Cluster, port: u16) -> Option<usize> {
    let suffix = format!(":{port}");
    (0..cluster.len())
        .find(|node| cluster.server(*node).is_some_and(|server| server.redis().ends_with(&suffix)))
}

/// Workers that each own some keys: every write must succeed, and every read must return the last acknowledged value.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    wrong: Arc<Mutex<Vec<String>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(client: &Client) -> Self {
        let scope = Scope::new(Shutdown::new());
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let wrong = Arc::new(Mutex::new(Vec::new()));
        let worker = |number: u32| {
            let (client, stop, done, wrong) = (client.clone(), stop.clone(), done.clone(), wrong.clone());
            scope.spawn("load", async move {
                let mut known: HashMap<String, u64> = HashMap::new();
                let mut round = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    round += 1;
                    let key = format!("load:{number}:{}", round % 50);
                    match client.get::<Option<u64>>(&key).await {
                        Ok(read) if read == known.get(&key).copied() => {}
                        Ok(read) => {
                            wrong.lock().unwrap().push(format!("{key}: {read:?}, not {:?}", known.get(&key)));
                        }
                        Err(error) => wrong.lock().unwrap().push(format!("GET {key}: {error}")),
                    }
                    match client.set(&key, round).await {
                        Ok(()) => {
                            known.insert(key, round);
                        }
                        Err(error) => {
                            wrong.lock().unwrap().push(format!("SET {key}: {error}"));
                            // The outcome of the write is unknown.
                            if let Ok(Some(read)) = client.get::<Option<u64>>(&key).await {
                                known.insert(key, read);
                            }
                        }
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let tasks = (0..8).map(worker).collect();
        Self { stop, done, wrong, tasks }
    }

    async fn progress(&self) {
        let before = self.done.load(Ordering::Relaxed);
        let deadline = Instant::now() + Duration::from_secs(40);
        while self.done.load(Ordering::Relaxed) < before + 200 {
            let wrong = self.wrong.lock().unwrap().first().cloned();
            assert!(Instant::now() < deadline, "the load goes on; first trouble: {wrong:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        let wrong = self.wrong.lock().unwrap();
        assert!(wrong.is_empty(), "{} findings, the first: {:?}", wrong.len(), wrong.first());
    }
}

async fn commands_of_every_kind(nodes: usize) {
    let (_cluster, client) = start(nodes).await;
    let keys: Vec<String> = (0..300).map(|n| format!("key:{n}")).collect();
    client.mset(keys.iter().enumerate().map(|(n, key)| (key, n)).collect::<Vec<_>>()).await.unwrap();
    let read: Vec<Option<usize>> = client.mget(&keys).await.unwrap();
    assert_eq!(read, (0..300).map(Some).collect::<Vec<_>>());
    assert_eq!((client.dbsize().await.unwrap(), client.exists(&keys).await.unwrap()), (300, 300));
    let mut scan = client.scan(Some("key:1*"));
    let mut found = std::collections::HashSet::new();
    while let Some(page) = scan.next().await.unwrap() {
        found.extend(page);
    }
    assert_eq!(found.len(), 111);
    assert!(client.set_with::<bool>("once", 1, SetOptions::new().nx().px(60_000)).await.unwrap());
    assert!(!client.set_with::<bool>("once", 2, SetOptions::new().nx()).await.unwrap());
    client.zadd("z", [(1.5, "a"), (2.5, "b")]).await.unwrap();
    assert_eq!(client.zpopmin("z", 2).await.unwrap().0.len(), 2);
    let (one, two): (i64, i64) = client
        .transaction()
        .then(cmd("INCR").arg("{t}a"))
        .then(cmd("INCRBY").arg(("{t}b", 5)))
        .run()
        .await
        .unwrap();
    assert_eq!((one, two), (1, 5));
    let mut pipeline = client.pipeline();
    for n in 0..1000 {
        pipeline.incr(format!("count:{}", n % 10));
    }
    assert!(pipeline.run().await.iter().all(Result::is_ok));
    assert_eq!(client.get::<u64>("count:7").await.unwrap(), 100);
    let own = client.dedicated("stock").unwrap();
    own.run::<()>(cmd("WATCH").arg("stock")).await.unwrap();
    client.set("stock", 1).await.unwrap();
    own.run::<()>(cmd("MULTI")).await.unwrap();
    own.run::<()>(cmd("SET").arg(("stock", 2))).await.unwrap();
    assert_eq!(own.run::<Option<Vec<String>>>(cmd("EXEC")).await.unwrap(), None);
    client.flushall().await.unwrap();
    assert_eq!(client.dbsize().await.unwrap(), 0);
}

#[tokio::test]
async fn every_kind_of_command_on_one_node() {
    commands_of_every_kind(1).await;
}

#[tokio::test]
async fn every_kind_of_command_on_three_nodes() {
    commands_of_every_kind(3).await;
}

#[tokio::test]
async fn scripts_run_on_the_node_of_their_keys() {
    let (_cluster, client) = start(3).await;
    let script = Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])");
    for n in 0..20 {
        assert_eq!(client.eval::<i64, _>(&script, [format!("script:{n}")], [7]).await.unwrap(), 7);
    }
}

#[tokio::test]
async fn killed_node_causes_no_error_and_no_loss() {
    let (mut cluster, client) = start(3).await;
    let load = Load::start(&client);
    load.progress().await;
    let victim = node_at(&cluster, client.primary_of("load:0:0").unwrap().port).unwrap_or(0);
    cluster.kill(victim).unwrap();
    load.progress().await;
    cluster.restart(victim).unwrap();
    load.progress().await;
    load.finish().await;
}

#[tokio::test]
async fn hung_node_causes_no_error_and_no_loss() {
    let (cluster, client) = start(3).await;
    let load = Load::start(&client);
    load.progress().await;
    let victim = node_at(&cluster, client.primary_of("load:0:0").unwrap().port).unwrap_or(0);
    cluster.pause(victim).unwrap();
    load.progress().await;
    cluster.resume(victim).unwrap();
    load.progress().await;
    load.finish().await;
}
