//! The client against a real Redis Cluster with failovers, resharding, node loss, address changes and hung
//! nodes. Needs redis-server and redis-cli on PATH; prints a message and skips otherwise.

#![allow(clippy::unwrap_used)] // all of it is test

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use moim_base::task::{Scope, Shutdown};
use moim_slot_client::{Client, ReadFrom, Script, SetOptions, cmd};
use tokio::time::Instant;

mod cluster;

use cluster::{Cluster, cli, cluster_cli, id_of};

async fn client(cluster: &Cluster) -> Client {
    Client::builder(&cluster.seeds())
        .timeout(Duration::from_secs(20))
        .hung_after(Duration::from_millis(500))
        .connect()
        .await
        .unwrap()
}

/// Writes and reads back under load until stopped. Every write must succeed; every read must return the last
/// written value, unless `may_lose`: Redis itself loses acknowledged writes in a failover.
struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    errors: Arc<std::sync::Mutex<Vec<String>>>,
}

impl Load {
    fn start(client: &Client, may_lose: bool) -> Self {
        let scope = Scope::new(Shutdown::new());
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let errors = Arc::new(std::sync::Mutex::new(Vec::new()));
        let tasks = (0..8)
            .map(|worker| {
                let (client, stop, done, errors) =
                    (client.clone(), stop.clone(), done.clone(), errors.clone());
                scope.spawn("load", async move {
                    let mut round = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        round += 1;
                        let key = format!("load:{worker}:{}", round % 200);
                        let result = async {
                            client.set(&key, round).await?;
                            client.get::<Option<u64>>(&key).await
                        };
                        match result.await {
                            Ok(read) if read == Some(round) || may_lose => {
                                done.fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(read) => {
                                errors.lock().unwrap().push(format!("{key}: wrote {round}, read {read:?}"))
                            }
                            Err(error) => errors.lock().unwrap().push(format!("{key}: {error}")),
                        }
                    }
                })
            })
            .collect();
        Self { stop, done, tasks, errors }
    }

    fn count(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    async fn progress(&self, cluster: &Cluster) {
        let before = self.count();
        cluster.until("the load continues", || self.count() > before + 200).await;
    }

    async fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        let errors = self.errors.lock().unwrap();
        assert!(errors.is_empty(), "{} errors, the first: {:?}", errors.len(), errors.first());
        assert!(self.done.load(Ordering::Relaxed) > 200);
    }
}

#[tokio::test]
async fn commands_work_on_a_redis_cluster() {
    let Some(cluster) = Cluster::start().await else { return };
    let client = client(&cluster).await;
    assert_eq!((client.nodes().len(), client.uncovered_slots()), (6, 0));
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
    let script = Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])");
    assert_eq!(client.eval::<i64, _>(&script, ["{t}b"], [7]).await.unwrap(), 12);
    client.load_script(&script).await.unwrap();
    let mut pipeline = client.pipeline();
    for n in 0..1000 {
        pipeline.incr(format!("count:{}", n % 10));
    }
    assert!(pipeline.run().await.iter().all(Result::is_ok));
    assert_eq!(client.get::<u64>("count:7").await.unwrap(), 100);
    // WATCH on a dedicated connection detects another writer.
    let own = client.dedicated("stock").unwrap();
    own.run::<()>(cmd("WATCH").arg("stock")).await.unwrap();
    client.set("stock", 1).await.unwrap();
    own.run::<()>(cmd("MULTI")).await.unwrap();
    own.run::<()>(cmd("SET").arg(("stock", 2))).await.unwrap();
    assert_eq!(own.run::<Option<Vec<String>>>(cmd("EXEC")).await.unwrap(), None);
    // A blocking pop waits on an exclusive connection while other commands proceed.
    let (popped, _) = tokio::join!(client.blpop::<(String, String)>("list", 10), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        client.rpush("list", "element").await.unwrap()
    });
    assert_eq!(popped.unwrap(), ("list".to_owned(), "element".to_owned()));
    assert_eq!(client.lpop::<Option<Vec<String>>>("none", 1).await.unwrap(), None);
    assert_eq!(
        client.get::<String>("z").await.unwrap_err().to_string().len(),
        "expected bytes, got Null".len()
    );
    let replicas = client.clone().read_from(ReadFrom::Replica);
    cluster.until("replicas have the key", || cli(cluster.servers[3].port, &["DBSIZE"]).trim() != "0").await;
    let deadline = Instant::now() + Duration::from_secs(10);
    while replicas.get::<Option<u64>>("count:7").await.unwrap() != Some(100) {
        assert!(Instant::now() < deadline);
    }
    client.flushall().await.unwrap();
    assert_eq!(client.dbsize().await.unwrap(), 0);
}

#[tokio::test]
async fn killed_primary_causes_no_error() {
    let Some(mut cluster) = Cluster::start().await else { return };
    let client = client(&cluster).await;
    let mut messages = client.subscribe(["news"]).await.unwrap();
    let load = Load::start(&client, true);
    load.progress(&cluster).await;
    let victim = client.primary_of("load:0:0").unwrap().port;
    cluster.by_port(victim).kill();
    let start = Instant::now();
    cluster.until("a replica is promoted", || client.primary_of("load:0:0").unwrap().port != victim).await;
    eprintln!("failover after {:?}", start.elapsed());
    load.progress(&cluster).await;
    cluster.by_port(victim).run();
    load.progress(&cluster).await;
    load.finish().await;
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        client.publish("news", "still here").await.unwrap();
        match tokio::time::timeout(Duration::from_millis(200), messages.next()).await {
            Ok(Some(message)) => break assert_eq!(message.payload, "still here"),
            _ => assert!(Instant::now() < deadline, "the subscription continues"),
        }
    }
}

#[tokio::test]
async fn resharding_and_node_removal_cause_no_error() {
    let Some(mut cluster) = Cluster::start().await else { return };
    let client = client(&cluster).await;
    let load = Load::start(&client, false);
    load.progress(&cluster).await;
    let spare = cluster.spare().await;
    let first = cluster.servers[0].port;
    cluster_cli(vec!["add-node".into(), format!("127.0.0.1:{spare}"), format!("127.0.0.1:{first}")]).await;
    let ports: Vec<u16> = cluster.servers.iter().map(|server| server.port).collect();
    let knows = |port: &u16| {
        cli(*port, &["CLUSTER", "NODES"]).lines().filter(|line| line.contains(" connected")).count() == 7
            && cli(*port, &["CLUSTER", "INFO"]).contains("cluster_state:ok")
    };
    cluster.until("all nodes know the spare", || ports.iter().all(knows)).await;
    let reshard = |from: String, to: String, slots: u32| {
        let words = format!(
            "reshard 127.0.0.1:{first} --cluster-from {from} --cluster-to {to} --cluster-slots {slots} --cluster-yes --cluster-pipeline 50"
        );
        words.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    cluster_cli(reshard(id_of(first), id_of(spare), 300)).await;
    load.progress(&cluster).await;
    assert!(client.metrics().snapshot().iter().any(|(name, count)| *name == "moved" && *count > 0));
    cluster
        .until("the client knows the new node", || {
            client.nodes().iter().any(|node| node.address.port == spare && !node.slots.is_empty())
        })
        .await;
    cluster_cli(reshard(id_of(spare), id_of(first), 300)).await;
    cluster_cli(vec!["del-node".into(), format!("127.0.0.1:{first}"), id_of(spare)]).await;
    cluster.by_port(spare).kill();
    load.progress(&cluster).await;
    client.refresh();
    cluster
        .until("the client removes the node", || {
            client.refresh();
            client.nodes().iter().all(|node| node.address.port != spare)
        })
        .await;
    load.finish().await;
}

#[tokio::test]
async fn hung_primary_causes_no_error() {
    let Some(mut cluster) = Cluster::start().await else { return };
    let client = client(&cluster).await;
    let load = Load::start(&client, true);
    load.progress(&cluster).await;
    let victim = client.primary_of("load:0:0").unwrap().port;
    cluster.by_port(victim).freeze();
    cluster.until("a replica is promoted", || client.primary_of("load:0:0").unwrap().port != victim).await;
    load.progress(&cluster).await;
    cluster.by_port(victim).thaw();
    load.progress(&cluster).await;
    load.finish().await;
    assert!(client.metrics().snapshot().iter().any(|(name, count)| *name == "hung" && *count > 0));
}

#[tokio::test]
async fn nodes_with_changed_addresses_are_found() {
    let Some(mut cluster) = Cluster::start().await else { return };
    let client = client(&cluster).await;
    let load = Load::start(&client, true);
    load.progress(&cluster).await;
    let before = client.primary_of("load:0:0").unwrap().port;
    let spare = cluster.spare().await;
    cluster.by_port(spare).kill();
    cluster.by_port(before).move_to(spare);
    // The current owner of the slot is not at the old address.
    cluster
        .until("the old address is removed", || {
            client.refresh();
            client.nodes().iter().all(|node| node.address.port != before)
                && client.nodes().iter().any(|node| node.address.port == spare)
        })
        .await;
    load.progress(&cluster).await;
    load.finish().await;
}
