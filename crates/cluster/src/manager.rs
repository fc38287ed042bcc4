//! The partition manager: keeps the routing table of a namespace, and pushes it to servers and SDKs.
//!
//! ```text
//!                one watch               ┌──▶ SDKs      (any manager; snapshot, then deltas)
//!   store ◀────────────────── managers ──┤
//!         one elected, saves fenced      └──▶ servers   (the leader; commands and answers, too)
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `feed.rs` | tables and deltas, encoded once, shared by all subscribers |
//! | `hub.rs` | the servers that are connected, commands under way |
//! | `lead.rs` | what the elected manager does: reacts to servers, operations |
//! | `serve.rs`, `http2.rs` | the gRPC port |
//!
//! Invariants: the table changes by compare-and-swap only, fenced by the election; a range is given to another server
//! only after its owner drained it or the owner's registration has ended at the store; a subscriber that is slow costs one
//! message in memory, whatever it has missed.

mod feed;
mod http2;
mod hub;
mod lead;
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
use self::lead::Lead;
use crate::context::Context;
use crate::follow::{Change, Follower};
use crate::leadership::{CasElection, ElectionOptions, LeaderChanges, LeaderElection as _};
use crate::registry::{self, ServerInfo};
use crate::routing::store::RoutingTableStore;

/// How a manager works.
#[derive(Clone, Debug)]
pub struct ManagerOptions {
    /// Whose table.
    pub namespace: String,
    /// Where servers and SDKs connect; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The address that others are told; the one it listens on if empty.
    pub advertise: String,
    /// How long a manager that leads and is gone is waited for.
    pub election_ttl: Duration,
    /// Partitions of the first table, with ranges of equal width over the first byte of a key.
    pub initial_partitions: usize,
    /// Whether servers that come get their share of what others have.
    pub rebalance: bool,
    /// Tables are pushed at most this often.
    pub debounce: Duration,
    /// How long a server may take for one step of an operation.
    pub command_timeout: Duration,
}

impl ManagerOptions {
    /// The usual settings for a namespace, on any port of this machine.
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

/// A server that is registered, and which life of it.
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
    /// Set while this manager leads.
    lead: Mutex<Option<Arc<Lead>>>,
}

/// A manager that runs. Dropping it does not stop it: the scope's signal does.
pub struct Manager {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Manager {
    /// Listens, takes part in the election, and follows the store. The context's node id should be the address that
    /// others reach this manager by: it is what they are told while it leads; [`ManagerOptions::advertise`] replaces it.
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
            lead: Mutex::default(),
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it leads at this moment.
    pub fn leads(&self) -> bool {
        self.shared.lead().is_some_and(|lead| lead.is_valid())
    }

    /// Servers and SDKs that are connected.
    pub fn subscribers(&self) -> usize {
        self.shared.feed.subscribers()
    }

    /// The version of the table that is pushed.
    pub fn version(&self) -> i64 {
        self.shared.feed.current().table.version
    }
}

impl Shared {
    fn lead(&self) -> Option<Arc<Lead>> {
        self.lead.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Pushes every table that comes to be in the store, whoever saved it.
    async fn follow_table(&self) {
        let mut tables = self.store.watch();
        while let Some(saved) = tables.next().await {
            self.feed.publish(saved.table, &self.context.metrics);
            // What changes meanwhile is pushed together.
            tokio::time::sleep(self.options.debounce).await;
        }
    }

    async fn follow_servers(&self) {
        let prefix = registry::nodes_prefix(&self.options.namespace);
        let mut follower = Follower::start(&self.context, prefix.clone());
        let mut servers = Servers::new();
        let mut is_listed = false;
        while let Some(change) = follower.next().await {
            // What is known already is told together: a thousand servers that come are not a thousand tellings.
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
                    Change::Gone(key) => {
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
                    tracing::debug!(%error, "no election of a manager");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    continue;
                }
            };
            tracing::info!(
                namespace = self.options.namespace,
                term = leadership.fencing_token(),
                "this manager leads"
            );
            let lead = Lead::new(self, leadership);
            *self.lead.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&lead));
            tokio::select! {
                _ = lead.lost() => {}
                () = lead.run() => {}
            }
            *self.lead.lock().unwrap_or_else(PoisonError::into_inner) = None;
            // Servers look for the manager that leads now.
            self.hub.disconnect_all();
        }
    }
}

#[cfg(test)]
mod tests;
