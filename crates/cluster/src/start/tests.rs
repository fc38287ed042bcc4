//! Whole nodes, started by one call, cut off and stopped.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::assignment::{HandedOver, Owned};
use crate::config::{AppConfig, HeartbeatConfig, LeaseConfig, Time};
use crate::lock::LockOptions;
use crate::scenario::{Flaky, Mood, Store, everywhere, in_memory, until};

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
fn one_call_starts_it_all_and_one_ends_it() {
    everywhere(async |store| {
        let idle = Arc::new(Idle::default());
        let a = start(&store, "a", &idle).await;
        let b = start(&store, "b", &idle).await;
        until("work is shared", async || {
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
        let (told, mut heard) = tokio::sync::mpsc::channel(1_000);
        a.bridge(move |event| {
            let told = told.clone();
            async move { told.send(event).await.unwrap_or_default() }
        });
        b.stop().await.unwrap();
        until("everything is on one", async || (a.owned("press").len() == 6).then_some(())).await;
        let left = loop {
            let event: serde_json::Value = serde_json::from_slice(&heard.recv().await.unwrap()).unwrap();
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
fn a_node_that_was_cut_off_comes_back_by_itself() {
    in_memory(async |store| {
        let flaky = Flaky::new(store.repository.clone());
        let idle = Arc::new(Idle::default());
        let builder = Cluster::builder(config(&store, "a")).repository(flaky.clone());
        let a = builder.app("press", idle.clone()).lifecycle(idle.clone()).start().await.unwrap();
        until("it works", async || (a.owned("press").len() == 6).then_some(())).await;
        flaky.set(Mood { away: true, ..Mood::default() });
        until("it knows", async || (idle.lost.load(Ordering::SeqCst) == 1).then_some(())).await;
        let health = a.health().await;
        assert!(!health.ready && !health.member && !health.store, "{health:?}");
        assert!(a.owned("press").is_empty());
        flaky.set(Mood::default());
        until("it works again", async || (a.owned("press").len() == 6).then_some(())).await;
        assert_eq!(idle.joined.load(Ordering::SeqCst), 2);
        assert!(a.health().await.ready);
        a.stop().await.unwrap();
    });
}

#[test]
fn applications_that_do_not_fit_are_refused() {
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
