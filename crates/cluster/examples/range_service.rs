//! A service sharded by key ranges: three servers, two managers, and an SDK that knows only the managers;
//! through a split, a drain and a server failure.
//!
//! ```text
//! cargo run -p moim-cluster --example range_service
//! ```
//!
//! The servers count per key. Their counts are on shared storage, from which the ranges of a failed server
//! are recovered; a graceful migration hands the state over.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moim_base::task::{Scope, Shutdown};
use moim_cluster::manager::{Manager, ManagerOptions};
use moim_cluster::registry::{NodeRegistry, ServerInfo};
use moim_cluster::routing::{CallError, Moved, RangeHooks, RouteEntry, RouteServer, RoutingClient};
use moim_cluster::{BoxFuture, Context, MemoryRepository, StateRepository};

type Counts = BTreeMap<String, u64>;

/// A server's state, and the storage behind it.
struct Counter {
    memory: Mutex<Counts>,
    storage: Arc<Mutex<Counts>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Step<'a, T> = BoxFuture<'a, Result<T, String>>;

impl RangeHooks for Counter {
    fn drain<'a>(&'a self, range: &'a RouteEntry) -> Step<'a, Bytes> {
        let mine: Counts = lock(&self.memory)
            .iter()
            .filter(|(key, _)| range.contains(key))
            .map(|(k, v)| (k.clone(), *v))
            .collect();
        let state = serde_json::to_vec(&mine).map(Bytes::from).map_err(|error| error.to_string());
        Box::pin(async move { state })
    }

    fn prepare<'a>(&'a self, _partition: &'a str, handoff: Bytes) -> Step<'a, ()> {
        let state: Result<Counts, String> = if handoff.is_empty() {
            Ok(lock(&self.storage).clone())
        } else {
            serde_json::from_slice(&handoff).map_err(|error| error.to_string())
        };
        Box::pin(async move {
            lock(&self.memory).extend(state?);
            Ok(())
        })
    }

    fn resume<'a>(&'a self, _range: &'a RouteEntry) -> Step<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn split<'a>(&'a self, _range: &'a RouteEntry, _key: &'a str, _upper: &'a str) -> Step<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn merge<'a>(&'a self, _range: &'a RouteEntry, _above: &'a RouteEntry) -> Step<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn released(&self, _partition: &str) {}
}

struct Server {
    route: RouteServer,
    counter: Arc<Counter>,
    scope: Scope,
    _listener: std::net::TcpListener,
}

/// The servers by name. A real service would have a connection to each.
type Servers = Arc<Mutex<HashMap<String, Arc<Server>>>>;

async fn start_server(
    name: &str,
    store: &Arc<dyn StateRepository>,
    managers: &[String],
    storage: &Arc<Mutex<Counts>>,
) -> Result<Server, Box<dyn Error>> {
    let scope = Scope::new(Shutdown::new());
    let context = Context::new(name, Arc::clone(store), &scope);
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let info = ServerInfo {
        id: name.to_owned(),
        address: listener.local_addr()?.to_string(),
        ..ServerInfo::default()
    };
    let counter = Arc::new(Counter { memory: Mutex::default(), storage: Arc::clone(storage) });
    let registry = NodeRegistry::new(&context, "counters", Duration::from_secs(2));
    let route = RouteServer::start(&context, &registry, "counters", info, managers, counter.clone()).await?;
    Ok(Server { route, counter, scope, _listener: listener })
}

/// Increments a key on the current server of its range.
async fn count(client: &RoutingClient, servers: &Servers, key: &str) -> Result<(), Box<dyn Error>> {
    let counted = client.call(key, Duration::from_secs(10), async |route: RouteEntry| {
        let server = lock(servers).get(&route.node_id).cloned();
        let Some(server) = server else { return Err(CallError::Unreachable("no such server".to_owned())) };
        let mut memory = lock(&server.counter.memory);
        // The server checks the range ownership and counts in one step.
        if let Err(Moved(newer)) = server.route.check(key) {
            return Err(CallError::Moved(newer.map(|newer| *newer)));
        }
        let count = memory.entry(key.to_owned()).or_default();
        *count += 1;
        lock(&server.counter.storage).insert(key.to_owned(), *count);
        Ok(())
    });
    counted.await.map_err(|error| error.to_string().into())
}

/// Runs the whole scenario; returns the sent and the counted increments.
pub(crate) async fn run() -> Result<(u64, u64), Box<dyn Error>> {
    let scope = Scope::new(Shutdown::new());
    let store: Arc<dyn StateRepository> =
        MemoryRepository::started(Arc::new(moim_cluster::clock::BootClock), &scope);
    let mut managers = Vec::new();
    for _ in 0..2 {
        let context = Context::new("manager", Arc::clone(&store), &scope);
        managers.push(Manager::start(&context, ManagerOptions::new("counters")).await?);
    }
    let addresses: Vec<String> = managers.iter().map(|manager| manager.address().to_string()).collect();
    let (storage, servers) = (Arc::new(Mutex::new(Counts::new())), Servers::default());
    for name in ["s1", "s2", "s3"] {
        let server = start_server(name, &store, &addresses, &storage).await?;
        lock(&servers).insert(name.to_owned(), Arc::new(server));
    }
    let client =
        RoutingClient::connect(&Context::new("sdk", Arc::clone(&store), &scope), "counters", &addresses);
    let keys: Vec<String> = ('a'..='z').map(String::from).collect();
    let mut sent = 0;
    let patience = Duration::from_secs(10);
    for round in 0..8 {
        for key in &keys {
            count(&client, &servers, key).await?;
            sent += 1;
        }
        match round {
            1 => {
                let hot = client.route("m").ok_or("a route")?.partition_id;
                client.split(&hot, "mm", patience).await?;
            }
            3 => drop(client.drain("s1", false, patience).await?),
            5 => {
                // Its process fails: the connection breaks and the listener closes.
                let failed = lock(&servers).remove("s2").ok_or("a server")?;
                failed.scope.shutdown().stop();
                drop(failed);
            }
            _ => {}
        }
    }
    let counted = lock(&storage).values().sum();
    scope.shutdown().stop();
    Ok((sent, counted))
}

#[allow(dead_code, clippy::print_stdout)] // the tests call `run`
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (sent, counted) = run().await?;
    println!("{sent} were sent, {counted} were counted");
    Ok(())
}
