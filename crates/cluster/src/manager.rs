//! The partition manager: owns the routing table of a namespace, and pushes it to servers and SDKs.
//!
//! ```text
//!                one watch               ┌──▶ SDKs      (any manager; snapshot, then deltas)
//!   store ◀────────────────── managers ──┤
//!         one elected, saves fenced      └──▶ servers   (the leader; commands and acks, too)
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `feed.rs` | tables and deltas, encoded once, shared by all subscribers |
//! | `hub.rs` | the connected servers, commands in progress |
//! | `leader.rs` | the elected manager: failover, rebalance, operations |
//! | `serve.rs`, `http2.rs` | the gRPC port |
//!
//! Invariants: the table changes by compare-and-swap only, fenced by the election; a range moves to another
//! server only after its owner drained it or the owner's registration has expired at the store; a slow
//! subscriber costs one message in memory, independent of its lag.

mod feed;
mod http2;
mod hub;
mod leader;
mod serve;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::net::TcpListener;
use tokio::sync::watch;

use self::feed::Feed;
use self::hub::Hub;
use self::leader::LeaderState;
use crate::context::Context;
use crate::follow::{Change, Follower};
use crate::leadership::{CasElection, ElectionOptions, LeaderChanges, LeaderElection as _};
use crate::registry::{self, ServerInfo};
use crate::routing::store::RoutingTableStore;

/// Options of a partition manager.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// Namespace of the routing table.
    pub namespace: String,
    /// Listen address for servers and SDKs; port 0 picks a free port.
    pub listen: SocketAddr,
    /// Advertised address; the listen address if empty.
    pub advertise: String,
    /// Election TTL: the time until a failed leader is replaced.
    pub election_ttl: Duration,
    /// Partitions of the initial table, with ranges of equal width over the first byte of a key.
    pub initial_partitions: usize,
    /// True if new servers get ranges of others.
    pub rebalance: bool,
    /// Minimum interval between two table pushes.
    pub debounce: Duration,
    /// Timeout of a server for one step of an operation.
    pub command_timeout: Duration,
}

impl ManagerOptions {
    /// Default settings for a namespace, on a free local port.
    pub fn new(namespace: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: String::new(),
            election_ttl: Duration::from_secs(3),
            initial_partitions: 16,
            rebalance: true,
            debounce: Duration::from_millis(10),
            command_timeout: Duration::from_secs(10),
        }
    }
}

/// A registered server and its incarnation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Registered {
    info: ServerInfo,
    epoch: i64,
}

type Servers = BTreeMap<String, Registered>;

struct Shared {
    context: Context,
    options: ManagerOptions,
    store: RoutingTableStore,
    feed: Feed,
    hub: Hub,
    servers: watch::Sender<Option<Servers>>,
    leader: LeaderChanges,
    /// Set while this manager is the leader.
    leader_state: Mutex<Option<Arc<LeaderState>>>,
}

/// A running manager. Dropping it does not stop it: the scope's stop signal does.
pub struct Manager {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Manager {
    /// Listens, joins the election, and follows the store. The context's node id should be the address of
    /// this manager: clients are redirected to it while this manager is the leader;
    /// [`ManagerOptions::advertise`] replaces it.
    pub async fn start(context: &Context, options: ManagerOptions) -> io::Result<Self> {
        let listener = TcpListener::from_std(moim_base::socket::listen(options.listen)?)?;
        let address = listener.local_addr()?;
        let mut context = context.clone();
        let advertise =
            if options.advertise.is_empty() { address.to_string() } else { options.advertise.clone() };
        context.node_id = advertise.into();
        let key = format!("/{}/manager", options.namespace.trim_matches('/'));
        let election = ElectionOptions { ttl: options.election_ttl, key };
        let election = CasElection::new(&context, options.namespace.clone(), election);
        let store = RoutingTableStore::new(&context, &options.namespace);
        let shared = Arc::new(Shared {
            store,
            feed: Feed::new(),
            hub: Hub::new(),
            servers: watch::channel(None).0,
            leader: election.observe(),
            leader_state: Mutex::default(),
            context: context.clone(),
            options,
        });
        let stop = context.scope.shutdown().clone();
        let parts = (Arc::clone(&shared), election);
        context.scope.spawn("partition manager", async move {
            let (shared, election) = parts;
            tokio::select! {
                () = stop.stopped() => {}
                () = shared.follow_table() => {}
                () = shared.follow_servers() => {}
                () = shared.campaign(election) => {}
            }
        });
        serve::spawn(&shared, listener);
        Ok(Self { shared, address })
    }

    /// Listen address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// True while this manager is the leader.
    pub fn leads(&self) -> bool {
        self.shared.leader_state().is_some_and(|state| state.is_valid())
    }

    /// Number of connected servers and SDKs.
    pub fn subscribers(&self) -> usize {
        self.shared.feed.subscribers()
    }

    /// Version of the pushed table.
    pub fn version(&self) -> i64 {
        self.shared.feed.current().table.version
    }
}

impl Shared {
    fn leader_state(&self) -> Option<Arc<LeaderState>> {
        self.leader_state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Pushes every table version in the store, from any writer.
    async fn follow_table(&self) {
        let mut tables = self.store.watch();
        while let Some(saved) = tables.next().await {
            self.feed.publish(saved.table, &self.context.metrics);
            // Debounce: changes in this interval are pushed together.
            tokio::time::sleep(self.options.debounce).await;
        }
    }

    async fn follow_servers(&self) {
        let prefix = registry::nodes_prefix(&self.options.namespace);
        let mut follower = Follower::start(&self.context, prefix.clone());
        let mut servers = Servers::new();
        let mut is_listed = false;
        while let Some(change) = follower.next().await {
            // Combine the changes that are already available: a thousand new servers are one update.
            let mut next = Some(change);
            while let Some(change) = next.take().or_else(|| follower.next().now_or_never().flatten()) {
                match change {
                    Change::Put(entry) => {
                        if let Some(info) = registry::read(&self.context, &entry)
                            && entry.key == format!("{prefix}{}", info.id)
                        {
                            let epoch = entry.create_revision;
                            servers.insert(info.id.clone(), Registered { info, epoch });
                        }
                    }
                    Change::Deleted(key) => {
                        if let Some(id) = key.strip_prefix(&prefix) {
                            servers.remove(id);
                        }
                    }
                    Change::Listed => is_listed = true,
                }
            }
            if is_listed {
                self.servers.send_if_modified(|known| {
                    let is_new = known.as_ref() != Some(&servers);
                    *known = Some(servers.clone());
                    is_new
                });
            }
        }
    }

    async fn campaign(self: &Arc<Self>, election: CasElection) {
        loop {
            let leadership = match election.campaign().await {
                Ok(leadership) => leadership,
                Err(error) => {
                    tracing::debug!(%error, "manager election failed");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    continue;
                }
            };
            tracing::info!(
                namespace = self.options.namespace,
                term = leadership.fencing_token(),
                "partition manager elected"
            );
            let state = LeaderState::new(self, leadership);
            *self.leader_state.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&state));
            tokio::select! {
                _ = state.lost() => {}
                () = state.run() => {}
            }
            *self.leader_state.lock().unwrap_or_else(PoisonError::into_inner) = None;
            // Disconnect the servers; they reconnect to the current leader.
            self.hub.disconnect_all();
        }
    }
}

#[cfg(test)]
mod tests;
