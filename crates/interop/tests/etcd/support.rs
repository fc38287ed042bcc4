//! Shared support: clusters, per-case key prefixes, and responses with a deadline.

use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use etcd_client::{
    Client, ConnectOptions, Error, GetOptions, KeyValue, ResponseHeader, WatchResponse, WatchStream,
};
use moim_interop::cluster::{Cluster, RealEtcd};
use moim_interop::{Options, moim_binary, serves_etcd};

/// Timeout: long enough for a busy machine, short enough to notice.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Timeout of a case.
const CASE_PATIENCE: Duration = Duration::from_secs(120);

/// gRPC status codes.
pub(crate) const UNKNOWN: i32 = 2;
pub(crate) const INVALID_ARGUMENT: i32 = 3;
pub(crate) const NOT_FOUND: i32 = 5;
pub(crate) const RESOURCE_EXHAUSTED: i32 = 8;
pub(crate) const FAILED_PRECONDITION: i32 = 9;
pub(crate) const OUT_OF_RANGE: i32 = 11;

/// The system that the suite runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    Etcd,
    OneNode,
    ThreeNodes,
}

/// Whether other cases may use the cluster at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    Shared,
    Alone,
}

/// One case on one target: a client of all nodes, and a unique key prefix.
pub(crate) struct Scene {
    pub(crate) target: Target,
    pub(crate) client: Client,
    pub(crate) cluster: Arc<Cluster>,
    prefix: String,
}

/// Runs a case, unless its target is unavailable.
pub(crate) fn run<F: AsyncFnOnce(&mut Scene)>(target: Target, with: Use, case: F) {
    static GATES: [RwLock<()>; 3] = [const { RwLock::new(()) }; 3];
    let gate = &GATES[target as usize];
    let _shared = (with == Use::Shared).then(|| gate.read().unwrap_or_else(PoisonError::into_inner));
    let _alone = (with == Use::Alone).then(|| gate.write().unwrap_or_else(PoisonError::into_inner));
    let Some(cluster) = cluster(target) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = connect(&cluster.endpoints()).await;
        let mut scene = Scene { target, client, cluster, prefix: unique() };
        let case = tokio::time::timeout(CASE_PATIENCE, case(&mut scene));
        case.await.expect("the case ends in time");
    });
}

/// The shared cluster. It stops with the last case that holds it.
fn cluster(target: Target) -> Option<Arc<Cluster>> {
    static SHARED: [Mutex<Weak<Cluster>>; 3] = [const { Mutex::new(Weak::new()) }; 3];
    let mut shared = SHARED[target as usize].lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = shared.upgrade() {
        return Some(cluster);
    }
    let cluster = match target {
        Target::Etcd => match RealEtcd::find() {
            Some(real) => Cluster::etcd(&real, etcd_nodes(), false),
            None => {
                moim_base::require::skip("etcd", "no etcd on this machine and no MOIM_TEST_ETCD");
                return None;
            }
        },
        Target::OneNode | Target::ThreeNodes if !serves_etcd(moim_binary().unwrap()).unwrap() => {
            eprintln!("SKIPPED: this moim has no etcd port");
            return None;
        }
        Target::OneNode => Cluster::moim(1, &options(), false),
        Target::ThreeNodes => Cluster::moim(3, &options(), false),
    };
    let cluster = Arc::new(cluster.unwrap_or_else(|error| panic!("{error:#}")));
    *shared = Arc::downgrade(&cluster);
    Some(cluster)
}

/// Number of nodes of the real etcd: `INTEROP_ETCD_NODES`, to check that the suite is valid for three.
fn etcd_nodes() -> usize {
    std::env::var("INTEROP_ETCD_NODES").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// The configuration of every node.
pub(crate) fn options() -> Options {
    Options::new().set("node.log_level", std::env::var("INTEROP_LOG").unwrap_or("info".to_owned()))
}

/// A client of these servers.
pub(crate) async fn connect(endpoints: &[String]) -> Client {
    let options = ConnectOptions::new().with_connect_timeout(PATIENCE);
    Client::connect(endpoints, Some(options)).await.unwrap()
}

fn unique() -> String {
    format!("case-{}-{:08x}/", std::process::id(), fastrand::u32(..))
}

impl Scene {
    /// A key of this case, with its prefix.
    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The prefix of all keys of this case.
    pub(crate) fn prefix(&self) -> String {
        self.prefix.clone()
    }

    /// A client of one node.
    pub(crate) async fn node(&self, node: usize) -> Client {
        connect(&[self.cluster.endpoints()[node].clone()]).await
    }

    /// A client of each node.
    pub(crate) async fn nodes(&self) -> Vec<Client> {
        let mut clients = Vec::new();
        for endpoint in self.cluster.endpoints() {
            clients.push(connect(&[endpoint]).await);
        }
        clients
    }

    /// Puts a key and returns the revision.
    pub(crate) async fn put(&mut self, name: &str, value: &str) -> i64 {
        let key = self.key(name);
        revision(self.client.put(key, value, None).await.unwrap().header())
    }

    /// Deletes a key and returns the revision.
    pub(crate) async fn delete(&mut self, name: &str) -> i64 {
        let key = self.key(name);
        let response = self.client.delete(key, None).await.unwrap();
        assert_eq!(response.deleted(), 1);
        revision(response.header())
    }

    /// Reads one key.
    pub(crate) async fn get(&mut self, name: &str) -> Option<KeyValue> {
        let key = self.key(name);
        self.client.get(key, None).await.unwrap().take_kvs().pop()
    }

    /// The value of one key.
    pub(crate) async fn value(&mut self, name: &str) -> Option<String> {
        self.get(name).await.map(|kv| kv.value_str().unwrap().to_owned())
    }

    /// The names (without prefix) that a range returns, in order.
    pub(crate) async fn names(&mut self, from: &str, options: GetOptions) -> Vec<String> {
        let key = self.key(from);
        let response = self.client.get(key, Some(options)).await.unwrap();
        response.kvs().iter().map(|kv| self.name_of(kv)).collect()
    }

    /// A key without the prefix of this case.
    pub(crate) fn name_of(&self, kv: &KeyValue) -> String {
        kv.key_str().unwrap().strip_prefix(&self.prefix).expect("a key of this case").to_owned()
    }
}

/// The revision in a header.
pub(crate) fn revision(header: Option<&ResponseHeader>) -> i64 {
    let revision = header.expect("a header").revision();
    assert!(revision > 0);
    revision
}

/// The status code and message of an error.
#[track_caller]
pub(crate) fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> (i32, String) {
    match result {
        Err(Error::GRpcStatus(status)) => (status.code() as i32, status.message().to_owned()),
        other => panic!("a gRPC status was expected: {other:?}"),
    }
}

/// Asserts an error.
#[track_caller]
pub(crate) fn refused<T: std::fmt::Debug>(result: Result<T, Error>, code: i32, text: &str) {
    assert_eq!(refusal(result), (code, text.to_owned()));
}

/// The next message of a watch, within the timeout.
pub(crate) async fn next(watch: &mut WatchStream) -> WatchResponse {
    let message = tokio::time::timeout(PATIENCE, watch.message()).await.expect("a message in time");
    message.unwrap().expect("the stream goes on")
}

/// Creates a watch and returns the response to its creation.
pub(crate) async fn created(watch: &mut WatchStream) -> WatchResponse {
    let response = next(watch).await;
    assert!(response.created(), "{response:?}");
    assert!(response.events().is_empty(), "{response:?}");
    response
}

/// The next `count` events, as `+key=value@revision` and `-key@revision`, without `prefix`.
pub(crate) async fn events(watch: &mut WatchStream, prefix: &str, count: usize) -> Vec<String> {
    let mut seen = Vec::new();
    while seen.len() < count {
        let response = next(watch).await;
        assert!(!response.canceled(), "{response:?}");
        seen.extend(described(&response, prefix));
    }
    assert_eq!(seen.len(), count, "{seen:?}");
    seen
}

/// The events of one message, as text.
pub(crate) fn described(response: &WatchResponse, prefix: &str) -> Vec<String> {
    let describe = |event: &etcd_client::Event| {
        let kv = event.kv().expect("a key");
        let key = kv.key_str().unwrap();
        let key = key.strip_prefix(prefix).unwrap_or(key);
        match event.event_type() {
            etcd_client::EventType::Put => {
                format!("+{key}={}@{}", kv.value_str().unwrap(), kv.mod_revision())
            }
            etcd_client::EventType::Delete => format!("-{key}@{}", kv.mod_revision()),
        }
    };
    response.events().iter().map(describe).collect()
}

/// Polls until the condition holds.
pub(crate) async fn eventually<F: AsyncFnMut() -> bool>(what: &str, mut ask: F) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !ask().await {
        assert!(tokio::time::Instant::now() < deadline, "timed out after {PATIENCE:?} waiting for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
