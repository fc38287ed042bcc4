//! Complete nodes, started by one call, isolated and stopped.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::assignment::{HandedOver, Owned};
use crate::config::{AppConfig, HeartbeatConfig, LeaseConfig, Time};
use crate::lock::LockOptions;
use crate::scenario::{Faults, Flaky, Store, everywhere, in_memory, until};

#[derive(Default)]
struct Idle {
    assigned: AtomicUsize,
    joined: AtomicUsize,
    lost: AtomicUsize,
}

impl PartitionHandler for Idle {
    fn on_assigned(&self, _owned: Owned, _handed_over: Option<HandedOver>) -> BoxFuture<'_, ()> {
        self.assigned.fetch_add(1, Ordering::SeqCst);
        Box::pin(async {})
    }

    fn on_revoked<'a>(&'a self, _partition: &'a str) -> BoxFuture<'a, HandedOver> {
        Box::pin(async { HandedOver::default() })
    }

    fn on_lost(&self, _partition: &str) {}
}

impl Lifecycle for Idle {
    fn on_joined(&self) -> BoxFuture<'_, ()> {
        self.joined.fetch_add(1, Ordering::SeqCst);
        Box::pin(async {})
    }

    fn on_lost(&self) {
        self.lost.fetch_add(1, Ordering::SeqCst);
    }
}

fn config(store: &Store, node: &str) -> ClusterConfig {
    let partition = |at| PartitionSpec { id: format!("p{at}"), ..PartitionSpec::default() };
    let app = AppConfig { partitions: (0..6).map(partition).collect(), ..AppConfig::default() };
    ClusterConfig {
        node_id: node.to_owned(),
        heartbeat: HeartbeatConfig { interval: Time(store.ttl / 8), timeout: Time(store.ttl / 2) },
        lease: LeaseConfig { duration: Time(store.ttl) },
        apps: BTreeMap::from([("press".to_owned(), app)]),
        ..ClusterConfig::default()
    }
}

async fn start(store: &Store, node: &str, idle: &Arc<Idle>) -> Cluster {
    let builder = Cluster::builder(config(store, node)).repository(store.repository.clone());
    builder.app("press", idle.clone()).lifecycle(idle.clone()).start().await.unwrap()
}

#[test]
fn start_and_stop_run_all_services() {
    everywhere(async |store| {
        let idle = Arc::new(Idle::default());
        let a = start(&store, "a", &idle).await;
        let b = start(&store, "b", &idle).await;
        until("partitions are balanced", async || {
            (a.owned("press").len() == 3 && b.owned("press").len() == 3).then_some(())
        })
        .await;
        let health = a.health().await;
        assert!(health.ready && health.members_up == 2 && health.partitions == 3, "{health:?}");
        let leadership = a.election("jobs").campaign().await.unwrap();
        let guard = b.locks().acquire("l", LockOptions::default()).await.unwrap();
        assert!(leadership.is_valid() && guard.is_valid());
        guard.release().await.unwrap();
        drop(leadership);
        let (sender, mut events) = tokio::sync::mpsc::channel(1_000);
        a.bridge(move |event| {
            let sender = sender.clone();
            async move { sender.send(event).await.unwrap_or_default() }
        });
        b.stop().await.unwrap();
        until("all partitions are on one node", async || (a.owned("press").len() == 6).then_some(())).await;
        let left = loop {
            let event: serde_json::Value = serde_json::from_slice(&events.recv().await.unwrap()).unwrap();
            if event["kind"] == "member" {
                break event;
            }
        };
        assert_eq!((&left["status"], &left["node"]["id"]), (&"LEFT".into(), &"b".into()), "{}", store.name);
        a.stop().await.unwrap();
        assert!(store.repository.list("cluster:nodes/").await.unwrap().1.is_empty());
    });
}

#[test]
fn isolated_node_rejoins_automatically() {
    in_memory(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let idle = Arc::new(Idle::default());
        let builder = Cluster::builder(config(&store, "a")).repository(flaky.clone());
        let a = builder.app("press", idle.clone()).lifecycle(idle.clone()).start().await.unwrap();
        until("the node owns all partitions", async || (a.owned("press").len() == 6).then_some(())).await;
        flaky.set(Faults { unreachable: true, ..Faults::default() });
        until("the loss is reported", async || (idle.lost.load(Ordering::SeqCst) == 1).then_some(())).await;
        let health = a.health().await;
        assert!(!health.ready && !health.member && !health.store, "{health:?}");
        assert!(a.owned("press").is_empty());
        flaky.set(Faults::default());
        until("the node owns all partitions again", async || (a.owned("press").len() == 6).then_some(()))
            .await;
        assert_eq!(idle.joined.load(Ordering::SeqCst), 2);
        assert!(a.health().await.ready);
        a.stop().await.unwrap();
    });
}

#[test]
fn mismatched_applications_are_rejected() {
    in_memory(async |store| {
        let missing = Cluster::start(config(&store, "a")).await;
        assert!(matches!(missing, Err(StartError::App(text)) if text.contains("apps.press")));
        let idle = Arc::new(Idle::default());
        let builder = Cluster::builder(ClusterConfig::default()).app("unknown", idle);
        assert!(matches!(builder.start().await, Err(StartError::App(text)) if text.contains("unknown")));
        let plain = Cluster::start(ClusterConfig::default()).await.unwrap();
        assert!(plain.health().await.ready && !plain.node_id().is_empty());
        plain.stop().await.unwrap();
    });
}

/// Two applications with their own Raft groups and one whose leader is elected in the store.
fn in_groups(node: &str, peers: &[String], data: &std::path::Path) -> ClusterConfig {
    let partition = |at| PartitionSpec { id: format!("p{at}"), ..PartitionSpec::default() };
    let partitions: Vec<_> = (0..6).map(partition).collect();
    let own = AppConfig {
        partitions: partitions.clone(),
        peers: peers.to_vec(),
        equipment_group: "hall-1".to_owned(),
        ..AppConfig::default()
    };
    let shared = AppConfig { partitions, ..AppConfig::default() };
    let apps = [("paint", own.clone()), ("press", own), ("store", shared)];
    ClusterConfig {
        node_id: node.to_owned(),
        raft: crate::config::RaftConfig {
            data: data.join(node).display().to_string(),
            ..crate::config::RaftConfig::default()
        },
        apps: apps.into_iter().map(|(name, app)| (name.to_owned(), app)).collect(),
        ..ClusterConfig::default()
    }
}

/// Waits until an application's six partitions are owned, at least `least` by each node.
async fn share(clusters: &[Cluster], app: &str, least: usize) {
    until(&format!("{app} is balanced"), async || {
        let owned: Vec<usize> = clusters.iter().map(|one| one.owned(app).len()).collect();
        (owned.iter().sum::<usize>() == 6 && owned.iter().all(|count| *count >= least)).then_some(())
    })
    .await;
}

#[test]
fn application_groups_share_one_port_and_nodes_join_them() {
    crate::groups::tests::run(async |dir| {
        let scope = Scope::new(Shutdown::new());
        let repository: Arc<dyn StateRepository> = MemoryRepository::started(Arc::new(BootClock), &scope);
        let idle = Arc::new(Idle::default());
        let start = |config: ClusterConfig| {
            let mut builder = Cluster::builder(config.clone()).repository(repository.clone());
            for name in config.apps.keys() {
                builder = builder.app(name, idle.clone());
            }
            builder.start()
        };
        let nodes = ["a", "b", "c"];
        let peers: Vec<String> =
            nodes.iter().map(|node| format!("{node}={}", crate::scenario::free_address())).collect();
        let started = nodes.map(|node| start(in_groups(node, &peers, dir.path())));
        let mut clusters: Vec<Cluster> = Vec::new();
        for started in futures_util::future::join_all(started).await {
            clusters.push(started.unwrap());
        }
        for app in ["paint", "press", "store"] {
            share(&clusters, app, 2).await;
        }
        let groups: Vec<_> = ["paint", "press"].map(|app| clusters[0].group(app).unwrap()).into();
        assert_eq!(groups[0].address(), groups[1].address(), "one port");
        assert!(clusters[0].group("store").is_none());
        assert!(groups[0].repository().get("cluster:assignments/press/p0").await.unwrap().is_none());
        assert!(
            repository.get("cluster:assignments/press/p0").await.unwrap().is_none(),
            "the node is in the group"
        );

        // A fourth node finds the groups in the store and gets partitions. The leader publishes the events.
        let mut subscriptions: Vec<EventStream> = clusters.iter().map(Cluster::events).collect();
        let mut config = in_groups("d", &["store".to_owned()], dir.path());
        config.apps.remove("paint");
        clusters.push(start(config).await.unwrap());
        share(&clusters, "press", 1).await;
        let active = subscriptions.iter_mut().map(|events| {
            Box::pin(async move {
                loop {
                    let event = events.next().await;
                    if let Some(Ok(crate::events::ClusterEvent::Join { app, node, step, .. })) = event
                        && step == "active"
                    {
                        return (app, node);
                    }
                }
            })
        });
        let (active, ..) = futures_util::future::select_all(active).await;
        assert_eq!(active, ("press".to_owned(), "d".to_owned()));
        let health = clusters[3].health().await;
        assert!(health.ready && health.partitions >= 1, "{health:?}");

        // It leaves, and the others take over its partitions.
        clusters.pop().unwrap().stop().await.unwrap();
        share(&clusters, "press", 1).await;
        for cluster in clusters {
            cluster.context().scope.shutdown().stop();
            for app in ["paint", "press"] {
                cluster.group(app).unwrap().stop().await;
            }
        }
        scope.shutdown().stop();
    });
}

#[test]
fn unknown_group_is_not_joined() {
    crate::groups::tests::run(async |dir| {
        let idle = Arc::new(Idle::default());
        let mut config = in_groups("d", &["store".to_owned()], dir.path());
        for app in config.apps.values_mut() {
            app.join_timeout = Time(Duration::from_millis(50));
        }
        let builder = Cluster::builder(config).app("paint", idle.clone()).app("press", idle.clone());
        let refused = builder.app("store", idle).start().await;
        assert!(matches!(refused, Err(StartError::App(text)) if text.contains("knows no members")));
    });
}
