//! A service that counts per key, in ranges, through splits, merges, migrations, drains and failures.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use moim_base::task::{Scope, Shutdown};

use super::*;
use crate::registry::NodeRegistry;
use crate::repository::{BoxFuture, StateRepository};
use crate::routing::{
    CallError, Moved, RangeHooks, RouteEntry, RouteServer, RoutingClient, RoutingError, RoutingTable,
};
use crate::scenario::{Faults, Flaky, Store, everywhere, in_memory, until};

/// Shared storage, from which the ranges of a failed server are recovered.
#[derive(Default)]
struct Disk(Mutex<BTreeMap<String, u64>>);

/// One server's state: key -> count.
struct Counts {
    memory: Mutex<BTreeMap<String, u64>>,
    disk: Arc<Disk>,
}

impl RangeHooks for Counts {
    fn drain<'a>(&'a self, range: &'a RouteEntry) -> BoxFuture<'a, Result<Bytes, String>> {
        Box::pin(async move {
            let memory = self.memory.lock().unwrap();
            let mine: BTreeMap<_, _> = memory.iter().filter(|(key, _)| range.contains(key)).collect();
            Ok(serde_json::to_vec(&mine).unwrap().into())
        })
    }

    fn prepare<'a>(&'a self, _partition: &'a str, handoff: Bytes) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let state = if handoff.is_empty() {
                self.disk.0.lock().unwrap().clone()
            } else {
                serde_json::from_slice(&handoff).map_err(|error| error.to_string())?
            };
            self.memory.lock().unwrap().extend(state);
            Ok(())
        })
    }

    fn resume<'a>(&'a self, _range: &'a RouteEntry) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn split<'a>(
        &'a self,
        range: &'a RouteEntry,
        key: &'a str,
        upper: &'a str,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            assert!(range.contains(key) && !upper.is_empty());
            Ok(())
        })
    }

    fn merge<'a>(
        &'a self,
        range: &'a RouteEntry,
        above: &'a RouteEntry,
    ) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            assert_eq!(range.key_range_end, above.key_range_start);
            Ok(())
        })
    }

    fn released(&self, _partition: &str) {}
}

struct Node {
    server: Option<RouteServer>,
    counts: Arc<Counts>,
    scope: Scope,
    flaky: Arc<Flaky>,
    /// Holds the address: a closed listener means that the process has failed.
    listener: Option<std::net::TcpListener>,
}

/// A service under test: managers, servers, and a client.
struct World {
    store: Store,
    disk: Arc<Disk>,
    managers: Vec<(Manager, Scope)>,
    nodes: Mutex<HashMap<String, Arc<Node>>>,
    sent: Mutex<BTreeMap<String, u64>>,
    calls: AtomicU64,
    /// The lease of the servers' registrations.
    lease: Duration,
}

impl World {
    /// Leases longer than any test: no result depends on a lease expiry.
    async fn start(store: Store, managers: usize, servers: &[&str]) -> Self {
        Self::with_lease(store, managers, servers, Duration::from_secs(60)).await
    }

    async fn with_lease(store: Store, managers: usize, servers: &[&str], lease: Duration) -> Self {
        let mut world = Self {
            store,
            lease,
            disk: Arc::default(),
            managers: Vec::new(),
            nodes: Mutex::default(),
            sent: Mutex::default(),
            calls: AtomicU64::new(0),
        };
        for _ in 0..managers {
            let scope = Scope::new(Shutdown::new());
            let mut context = world.store.node("m");
            context.scope = scope.clone();
            let mut options = ManagerOptions::new("svc");
            options.election_ttl = world.store.ttl;
            options.initial_partitions = 8;
            world.managers.push((Manager::start(&context, options).await.unwrap(), scope));
        }
        for id in servers {
            world.add(id).await;
        }
        world
    }

    fn addresses(&self) -> Vec<String> {
        self.managers.iter().map(|(manager, _)| manager.address().to_string()).collect()
    }

    async fn add(&self, id: &str) {
        let scope = Scope::new(Shutdown::new());
        let mut context = self.store.node(id);
        context.scope = scope.clone();
        let flaky = Flaky::new(context.repository.clone());
        context.repository = flaky.clone();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let counts = Arc::new(Counts { memory: Mutex::default(), disk: self.disk.clone() });
        let registry = NodeRegistry::new(&context, "svc", self.lease);
        let info = ServerInfo { id: id.to_owned(), address, ..ServerInfo::default() };
        let hooks = counts.clone();
        let server =
            RouteServer::start(&context, &registry, "svc", info, &self.addresses(), hooks).await.unwrap();
        let node = Node { server: Some(server), counts, scope, flaky, listener: Some(listener) };
        self.nodes.lock().unwrap().insert(id.to_owned(), Arc::new(node));
    }

    /// Equivalent to `kill -9`: connections break, the listener closes, nothing is sent.
    fn kill(&self, id: &str) {
        let node = self.nodes.lock().unwrap().remove(id).unwrap();
        let mut node = Arc::into_inner(node).expect("no call in progress");
        drop(node.listener.take());
        // The registration is left to its lease.
        node.flaky.set(Faults { unreachable: true, ..Faults::default() });
        node.scope.shutdown().stop();
        drop(node.server.take());
    }

    fn client(&self) -> RoutingClient {
        RoutingClient::connect(&self.store.node("sdk"), "svc", &self.addresses())
    }

    /// Increments the count of a key on its server.
    async fn count(&self, client: &RoutingClient, key: &str) {
        let called = client.call(key, Duration::from_secs(20), async |route: RouteEntry| {
            self.calls.fetch_add(1, Ordering::SeqCst);
            let node = self.nodes.lock().unwrap().get(&route.node_id).cloned();
            let Some(node) = node else { return Err(CallError::Unreachable("no such server")) };
            let Some(server) = &node.server else { return Err(CallError::Unreachable("stopped")) };
            // Check and count are atomic here: a service does both under its own lock.
            let mut memory = node.counts.memory.lock().unwrap();
            if let Err(Moved(newer)) = server.check(key) {
                return Err(CallError::Moved(newer.map(|newer| *newer)));
            }
            let count = memory.entry(key.to_owned()).or_default();
            *count += 1;
            node.counts.disk.0.lock().unwrap().insert(key.to_owned(), *count);
            Ok(())
        });
        called.await.unwrap();
        *self.sent.lock().unwrap().entry(key.to_owned()).or_default() += 1;
    }

    async fn load(&self, client: &RoutingClient, rounds: usize) {
        for round in 0..rounds {
            for letter in 'a'..='z' {
                self.count(client, &format!("{letter}{}", round % 3)).await;
            }
        }
    }

    /// Verifies that every count equals the number of sent increments.
    fn verify(&self, what: &str) {
        let disk = self.disk.0.lock().unwrap().clone();
        assert_eq!(disk, *self.sent.lock().unwrap(), "{}: {what}", self.store.name);
    }

    async fn settled(&self, client: &RoutingClient, servers: &[&str]) {
        until(&format!("{}: ranges are spread over {servers:?}", self.store.name), async || {
            let table = client.table();
            let mut owned: BTreeMap<&str, usize> = servers.iter().map(|id| (*id, 0)).collect();
            for entry in table.entries() {
                *owned.get_mut(entry.node_id.as_str())? += 1;
            }
            let (least, most) = (owned.values().min()?, owned.values().max()?);
            (!table.entries().is_empty() && most - least <= 1).then_some(())
        })
        .await;
    }
}

const TIMEOUT: Duration = Duration::from_secs(20);

#[test]
fn counts_are_exact_through_split_merge_migrate_drain_and_kill() {
    everywhere(async |store| {
        let lease = store.ttl;
        let world = World::with_lease(store, 2, &["a", "b", "c"], lease).await;
        let client = world.client();
        world.settled(&client, &["a", "b", "c"]).await;
        world.load(&client, 3).await;
        world.verify("at first");

        let route = client.route("m0").unwrap();
        let upper = client.split(&route.partition_id, "m1", TIMEOUT).await.unwrap();
        until("the split is seen", async || {
            (client.route("m1").unwrap().partition_id == upper).then_some(())
        })
        .await;
        assert_eq!(client.route("m0").unwrap().partition_id, route.partition_id);
        world.load(&client, 2).await;
        world.verify("after a split");

        let other = ["a", "b", "c"].into_iter().find(|id| *id != route.node_id).unwrap();
        client.migrate(&upper, other, TIMEOUT).await.unwrap();
        world.load(&client, 2).await;
        world.verify("after a migration");
        client.merge(&route.partition_id, &upper, TIMEOUT).await.unwrap();
        world.load(&client, 2).await;
        world.verify("after a merge");

        client.drain("a", false, TIMEOUT).await.unwrap();
        world.settled(&client, &["b", "c"]).await;
        let shown = client.show(TIMEOUT).await.unwrap();
        assert_eq!(shown.servers.iter().find(|server| server.node_id == "a").unwrap().partitions, 0);
        world.load(&client, 2).await;
        world.verify("after a drain");
        client.drain("a", true, TIMEOUT).await.unwrap();
        world.settled(&client, &["a", "b", "c"]).await;

        // Its connections break at once, which proves nothing: its ranges move when its lease has expired.
        world.kill("b");
        world.settled(&client, &["a", "c"]).await;
        world.load(&client, 2).await;
        world.verify("after a kill");
    });
}

#[test]
fn another_manager_takes_over_after_leader_failure() {
    everywhere(async |store| {
        let mut world = World::start(store, 2, &["a", "b"]).await;
        let client = world.client();
        world.settled(&client, &["a", "b"]).await;
        world.load(&client, 1).await;
        let at = world.managers.iter().position(|(manager, _)| manager.leads()).unwrap();
        let (failed, scope) = world.managers.remove(at);
        scope.shutdown().stop();
        drop(failed);
        world.load(&client, 1).await;
        let route = client.route("m0").unwrap();
        let split = async || client.split(&route.partition_id, "m00", Duration::from_secs(2)).await.ok();
        until("an operation succeeds again", split).await;
        // All clients know the addresses of both managers.
        world.add("c").await;
        world.settled(&client, &["a", "b", "c"]).await;
        world.load(&client, 1).await;
        world.verify("after a change of managers");
    });
}

#[test]
fn invalid_operations_are_rejected_with_a_reason() {
    in_memory(async |store| {
        let world = World::start(store, 1, &["a"]).await;
        let client = world.client();
        world.settled(&client, &["a"]).await;
        let first = client.table().entries()[0].clone();
        let last = client.table().entries().last().unwrap().clone();
        let cases = [
            (client.split("missing", "x", TIMEOUT).await.map(drop), "there is no partition missing"),
            (client.split(&first.partition_id, "~~", TIMEOUT).await.map(drop), "is not inside of partition"),
            (
                client.merge(&first.partition_id, &last.partition_id, TIMEOUT).await.map(drop),
                "does not begin where",
            ),
            (
                client.migrate(&first.partition_id, "missing", TIMEOUT).await.map(drop),
                "there is no server missing",
            ),
            (client.drain("a", false, TIMEOUT).await.map(drop), "no server is left"),
            (client.drain("missing", false, TIMEOUT).await.map(drop), "there is no server missing"),
        ];
        for (refused, text) in cases {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(text), "{message:?} contains {text:?}");
        }
        let stranger = RoutingClient::connect(&world.store.node("x"), "other", &world.addresses());
        let refused = stranger.show(TIMEOUT).await.unwrap_err().to_string();
        assert!(refused.contains("no namespace other"), "{refused}");
    });
}

#[test]
fn paused_server_serves_nothing_until_it_is_registered_again() {
    in_memory(async |store| {
        let world = World::start(store, 1, &["a", "b"]).await;
        let client = world.client();
        world.settled(&client, &["a", "b"]).await;
        let a = world.nodes.lock().unwrap()["a"].clone();
        let server = a.server.as_ref().unwrap();
        let mine = server.partitions();
        assert!(!mine.is_empty());
        // Its lease expires, as after a long pause.
        let created =
            async || world.store.repository.get("/svc/nodes/a").await.unwrap().map(|a| a.create_revision);
        let first = created().await.unwrap();
        NodeRegistry::new(&world.store.node("x"), "svc", world.store.ttl).deregister("a").await.unwrap();
        until("the server registers again", async || created().await.filter(|now| *now > first)).await;
        drop(a);
        world.settled(&client, &["a", "b"]).await;
        world.load(&client, 1).await;
        world.verify("after it came back");
    });
}

#[test]
fn reregistered_server_serves_nothing_from_a_stale_table() {
    in_memory(async |store| {
        let lease = store.ttl;
        let mut world = World::with_lease(store, 1, &["a", "b"], lease).await;
        let client = world.client();
        world.settled(&client, &["a", "b"]).await;
        let a = world.nodes.lock().unwrap()["a"].clone();
        let server = a.server.as_ref().unwrap();
        assert!(!server.partitions().is_empty());
        // Cut off from the store, but not from the manager, until its ranges belong to another server.
        a.flaky.set(Faults { unreachable: true, ..Faults::default() });
        world.settled(&client, &["b"]).await;
        let (manager, scope) = world.managers.pop().unwrap();
        scope.shutdown().stop();
        drop(manager);
        // As if the new table had never arrived: only the store shows that the server's table is stale.
        let old = Arc::new(
            RoutingTable::new(
                1,
                vec![RouteEntry {
                    partition_id: "p1".to_owned(),
                    node_id: "a".to_owned(),
                    ..RouteEntry::default()
                }],
            )
            .unwrap()
            .of(server.table().incarnation),
        );
        server.set_table(old);
        a.flaky.set(Faults::default());
        until("the server is registered again", async || server.is_registered().then_some(())).await;
        let deadline = tokio::time::Instant::now() + lease;
        while tokio::time::Instant::now() < deadline {
            assert_eq!(server.partitions(), [], "b serves these ranges");
            tokio::time::sleep(lease / 50).await;
        }
    });
}

#[test]
fn range_is_not_taken_from_a_reregistered_server() {
    in_memory(async |store| {
        let world = World::start(store, 1, &["a"]).await;
        let client = world.client();
        world.settled(&client, &["a"]).await;
        let tables = RoutingTableStore::new(&world.store.node("x"), "svc");
        let before = tables.load().await.unwrap().unwrap();
        let table = before.table.next(|entries| {
            entries.iter_mut().for_each(|entry| "b".clone_into(&mut Arc::make_mut(entry).node_id));
        });
        let absent = [crate::Compare::Absent("/svc/nodes/a".to_owned())];
        let saved = tables.swap(&before, table.unwrap(), Vec::new(), None, &absent).await;
        assert!(matches!(saved, Err(RoutingError::Fenced)), "{saved:?}");
    });
}

#[test]
fn slow_subscriber_costs_one_message_and_late_subscriber_gets_a_snapshot() {
    in_memory(async |store| {
        let world = World::start(store, 1, &["a"]).await;
        let early = world.client();
        world.settled(&early, &["a"]).await;
        let mut partition = early.route("m").unwrap().partition_id;
        for step in 0..20 {
            partition = early.split(&partition, &format!("m{step:03}"), TIMEOUT).await.unwrap();
        }
        let late = world.client();
        until("both have the same table", async || {
            let (early, late) = (early.table(), late.table());
            (early == late && early.version > 20).then_some(())
        })
        .await;
        assert_eq!(world.managers[0].0.version(), late.table().version);
        let repository: &dyn StateRepository = &*world.store.repository;
        assert!(repository.get("/svc/manager").await.unwrap().is_some());
    });
}
