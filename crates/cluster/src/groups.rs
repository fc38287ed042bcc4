//! Raft groups for applications: a small replicated store inside the application's own processes.
//!
//! An [`AppGroup`] is this process's member of one application's group. The group's state machine is a
//! [`StateRepository`](crate::StateRepository): elections, locks, membership and assignments work on it as
//! on any other store, and every change is an entry of the group's log, applied by every member in the same
//! order. A new member gets a snapshot and the log after it.
//!
//! | file | owns |
//! |---|---|
//! | `identity.rs` | the permanent identity of a data folder in the group |
//! | `founding.rs` | bootstrap: the agreement of the founders |
//! | `join_requests.rs` | the group's side of a join: requests, approval, activation, expiry |
//! | `join.rs` | the joining node's side: ticket, acceptance, sync |
//! | `election.rs` | leadership that follows the Raft leader |
//! | `port.rs` | one port for the groups of a process |
//!
//! Invariants: a voter id belongs to one folder and is never reused; the founders bootstrap only when all of
//! them have exchanged the same list of folders; a joining node votes only after it has caught up; a join
//! request that is not completed in time leaves nothing behind, in the group or in the joining node's
//! folder.

mod election;
mod founding;
mod identity;
mod join;
mod join_requests;
mod port;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moim_base::Clock;
use moim_base::task::{Scope, Shutdown};
use moim_coord::{Coordinator, CoordinatorOptions};
use moim_journal::{DurableSink, RealDisk, Store, StoreOptions};
use moim_raft::{
    GroupId, GroupOptions, Host, LocalPeer, Member, PeerId, Router, TcpTransport, Timers, VoterId,
};
use serde::{Deserialize, Serialize};

pub use self::election::RaftElection;
use self::identity::Identity;
pub use self::join::{JoinAcceptance, JoinClient, JoinError, JoinRequest, JoinTicket};
use self::join_requests::JoinRequests;
pub use self::port::GroupPort;
use crate::CoordRepository;
use crate::clock::BootClock;
use crate::context::Context;
use crate::events::EventBus;
use crate::keys;
use crate::metrics::ClusterMetrics;
use crate::repository::{Expect, RepositoryError};

/// Timeout of a leadership transfer to one member.
const TRANSFER_TIMEOUT: Duration = Duration::from_millis(500);

/// A founding member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupPeer {
    /// Node id.
    pub node_id: String,
    /// Address of its group port, as `host:port`.
    pub address: String,
}

/// Configuration of an application's group.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Application name.
    pub app: String,
    /// Id of this node.
    pub node_id: String,
    /// Listen address for the other members; port 0 picks a free port.
    pub listen: SocketAddr,
    /// Advertised address; the listen address if empty.
    pub advertise: String,
    /// The shared port of this process, if it has one for all its groups; `listen` and `advertise` are
    /// ignored then.
    pub port: Option<GroupPort>,
    /// Folder of log and snapshots. Used by this member only.
    pub data: PathBuf,
    /// The resources that the group serves.
    pub equipment_group: String,
    /// True if join requests require an operator's approval.
    pub manual_approval: bool,
    /// Time limit of a join, from its request to its activation.
    pub join_timeout: Duration,
    /// Raft timers in milliseconds: heartbeat, minimum and maximum election timeout.
    pub timers_ms: (u64, u64, u64),
    /// Event bus for join events.
    pub events: EventBus,
    /// Metrics of joins.
    pub metrics: Arc<ClusterMetrics>,
}

impl GroupConfig {
    /// Default settings.
    pub fn new(app: impl Into<String>, node_id: impl Into<String>, data: impl Into<PathBuf>) -> Self {
        let timers = Timers::default();
        Self {
            app: app.into(),
            node_id: node_id.into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: String::new(),
            port: None,
            data: data.into(),
            equipment_group: String::new(),
            manual_approval: false,
            join_timeout: Duration::from_secs(30),
            timers_ms: (timers.heartbeat_ms, timers.election_min_ms, timers.election_max_ms),
            events: EventBus::new(),
            metrics: Arc::default(),
        }
    }
}

/// Failure to run a group member.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The data folder cannot be used.
    #[error("the group's folder: {0}")]
    Folder(String),
    /// The folder is empty, but the group was bootstrapped without it: a voter that lost its log must not
    /// vote again.
    #[error("the group of {0} has begun without this folder: join it under a new identity")]
    BegunWithout(String),
    /// The port cannot be bound.
    #[error("the group's port: {0}")]
    Port(std::io::Error),
    /// The Raft group could not be opened.
    #[error(transparent)]
    Open(#[from] moim_raft::OpenError),
    /// The Raft group rejected the operation.
    #[error(transparent)]
    Group(#[from] moim_raft::GroupError),
    /// The join failed.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The store failed or did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// Value of `cluster:raft/groups/{app}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GroupRecord {
    /// Raft group id.
    pub group_id: u64,
    /// Members of the group.
    pub peers: Vec<PeerRecord>,
    /// The resources that the group serves.
    pub equipment_group: String,
}

/// A member of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PeerRecord {
    /// Node id.
    pub node_id: String,
    /// Voter id.
    pub peer_id: u64,
    /// Address of its group port.
    pub address: String,
}

/// Forwards durability notifications of the disk.
struct Sink(Router);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        self.0.on_durable(advanced);
    }
}

/// This process's member of an application's group. Cheap to clone.
#[derive(Clone)]
pub struct AppGroup {
    inner: Arc<Inner>,
}

struct Inner {
    config: GroupConfig,
    identity: Identity,
    port: GroupPort,
    address: String,
    coordinator: Coordinator,
    repository: Arc<CoordRepository>,
    store: Store,
    join_requests: Arc<JoinRequests>,
    scope: Scope,
}

/// A reachable member whose identity in the group is not known yet.
struct Port {
    router: Router,
    local: LocalPeer,
    port: GroupPort,
    address: String,
    scope: Scope,
}

impl Port {
    async fn open(config: &GroupConfig) -> Result<Self, GroupError> {
        let (router, local, scope) = (Router::new(), LocalPeer::unjoined(), Scope::new(Shutdown::new()));
        let port = match &config.port {
            Some(port) => port.clone(),
            None => GroupPort::bind(config.listen, &config.advertise).await.map_err(GroupError::Port)?,
        };
        port.doors().open(local.clone(), router.clone());
        let address = port.address().to_owned();
        Ok(Self { router, local, port, address, scope })
    }
}

impl AppGroup {
    /// Founds the group together with the other peers, of which this node is one; or restarts an existing
    /// member.
    ///
    /// Returns when this member runs; a leader is elected once a majority runs.
    pub async fn found(config: GroupConfig, peers: &[GroupPeer]) -> Result<Self, GroupError> {
        let port = Port::open(&config).await?;
        let identity = match Identity::load(&config)? {
            Some(identity) if identity.voter > 0 => identity,
            begun => founding::agree(&config, &port, peers, begun).await?,
        };
        let founders: Vec<Member> = identity
            .founders
            .iter()
            .map(|one| Member { id: VoterId(one.voter), address: one.address.clone() })
            .collect();
        let group = Self::open(config, port, identity).await?;
        if !group.inner.coordinator.group().has_begun().await? {
            group.inner.coordinator.group().initialize(&founders).await?;
        }
        Ok(group)
    }

    /// Joins an existing group through any of its members; or restarts an existing member.
    pub async fn join(
        config: GroupConfig,
        members: &[String],
        request: JoinRequest,
    ) -> Result<Self, GroupError> {
        let client = JoinClient::new(&config.app, members);
        if let Some(identity) = Identity::load(&config)?.filter(|identity| identity.voter > 0) {
            let Some(ticket) = identity.joining.clone() else {
                let port = Port::open(&config).await?;
                return Self::open(config, port, identity).await;
            };
            match Self::sync(config.clone(), identity, &client, &ticket).await {
                // The previous join has ended, and its folder is set aside.
                Err(GroupError::Join(JoinError::Expired | JoinError::Rejected(_))) => {}
                done => return done,
            }
        }
        let port = Port::open(&config).await?;
        let ticket = client.request_join(&config.node_id, &port.address, &request).await?;
        let acceptance = client.await_acceptance(&ticket).await?;
        let identity = Identity {
            app: config.app.clone(),
            node_id: config.node_id.clone(),
            directory: identity::directory(),
            cluster: acceptance.cluster.clone(),
            voter: acceptance.peer_id,
            founders: Vec::new(),
            nonce: String::new(),
            secret: acceptance.secret.clone(),
            joining: Some(ticket.clone()),
        };
        identity.save(&config)?;
        Self::sync_on(port, config, identity, &client, &ticket).await
    }

    /// Resumes an accepted join.
    async fn sync(
        config: GroupConfig,
        identity: Identity,
        client: &JoinClient,
        ticket: &JoinTicket,
    ) -> Result<Self, GroupError> {
        let port = Port::open(&config).await?;
        Self::sync_on(port, config, identity, client, ticket).await
    }

    /// Runs as a learner until it is promoted to voter. An expired join leaves an empty folder for the next
    /// one.
    async fn sync_on(
        port: Port,
        config: GroupConfig,
        mut identity: Identity,
        client: &JoinClient,
        ticket: &JoinTicket,
    ) -> Result<Self, GroupError> {
        let group = Self::open(config.clone(), port, identity.clone()).await?;
        match client.complete(ticket, identity.voter).await {
            Ok(()) => {
                identity.joining = None;
                identity.save(&config)?;
                Ok(group)
            }
            Err(error) => {
                group.stop().await;
                if matches!(error, JoinError::Expired | JoinError::Rejected(_)) {
                    identity.set_aside(&config)?;
                }
                Err(error.into())
            }
        }
    }

    async fn open(config: GroupConfig, port: Port, identity: Identity) -> Result<Self, GroupError> {
        let folder = |error: &dyn std::fmt::Display| GroupError::Folder(error.to_string());
        std::fs::create_dir_all(&config.data).map_err(|error| folder(&error))?;
        let disk = Arc::new(RealDisk);
        let options =
            StoreOptions { recent_bytes: 8 << 20, min_free_bytes: 64 << 20, ..StoreOptions::default() };
        let clock: Arc<dyn Clock> = Arc::new(BootClock);
        let store = Store::open(&config.data, disk.clone(), Arc::clone(&clock), options);
        let store = store.map_err(|error| folder(&error))?;
        let Port { router, local, port, address, scope } = port;
        store.set_sink(Arc::new(Sink(router.clone())));
        store.start();
        let cluster = u128::from_str_radix(&identity.cluster, 16).map_err(|error| folder(&error))?;
        let secret = identity.secret_number();
        local.become_member(PeerId { cluster, voter: VoterId(identity.voter), secret });
        let transport = Arc::new(TcpTransport::new(local, scope.clone()));
        let host =
            Host { store: store.clone(), disk, root: config.data.clone(), router: router.clone(), transport };
        let mut group = GroupOptions::new(group_id(&config.app), VoterId(identity.voter), 1);
        let (heartbeat_ms, election_min_ms, election_max_ms) = config.timers_ms;
        group.timers = Timers { heartbeat_ms, election_min_ms, election_max_ms };
        group.folder = "raft".to_owned();
        let cluster_id = u64::try_from(cluster & u128::from(u64::MAX)).unwrap_or(1);
        let options = CoordinatorOptions::new(group, cluster_id);
        let coordinator = Coordinator::open(&host, options, clock, &scope).await?;
        let repository = Arc::new(CoordRepository::new(coordinator.clone()));
        let join_requests = Arc::new(JoinRequests::new(
            &config,
            &identity,
            &address,
            coordinator.clone(),
            repository.clone(),
        ));
        port.register_join_service(&config.app, join_requests.clone());
        let (tending, stop) = (Arc::clone(&join_requests), scope.shutdown().clone());
        scope.spawn("group desk", async move {
            tokio::select! {
                () = stop.stopped() => {}
                () = tending.run() => {}
            }
        });
        let inner =
            Inner { config, identity, port, address, coordinator, repository, store, join_requests, scope };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The group's replicated store.
    pub fn repository(&self) -> Arc<CoordRepository> {
        Arc::clone(&self.inner.repository)
    }

    /// Application name.
    pub fn app(&self) -> &str {
        &self.inner.config.app
    }

    /// Context of this node's services, with the group as their store.
    pub fn context(&self, scope: &Scope) -> Context {
        Context {
            events: self.inner.config.events.clone(),
            metrics: Arc::clone(&self.inner.config.metrics),
            ..Context::new(self.inner.config.node_id.as_str(), self.repository(), scope)
        }
    }

    /// Leadership that follows the Raft leader.
    pub fn election(&self, context: &Context) -> RaftElection {
        let lease = Duration::from_millis(self.inner.config.timers_ms.2);
        RaftElection::new(context, &self.inner.config.app, self.inner.coordinator.clone(), lease)
    }

    /// Advertised address of this member.
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// Voter id of this member.
    pub fn peer_id(&self) -> u64 {
        self.inner.identity.voter
    }

    /// The members known to this one: voters, then learners.
    pub fn members(&self) -> (Vec<PeerRecord>, Vec<PeerRecord>) {
        let metrics = self.inner.coordinator.group().metrics();
        let peer = |member: &Member| PeerRecord {
            node_id: String::new(),
            peer_id: member.id.0,
            address: member.address.clone(),
        };
        (metrics.voters.iter().map(peer).collect(), metrics.learners.iter().map(peer).collect())
    }

    /// True if this member considers itself the Raft leader.
    pub fn leads(&self) -> bool {
        self.inner.coordinator.group().is_leader()
    }

    /// Waits until the group can serve a linearizable read.
    pub async fn ready(&self, within: Duration) -> Result<(), GroupError> {
        let wait = async {
            while self.inner.coordinator.linearizable().await.is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        match tokio::time::timeout(within, wait).await {
            Ok(()) => Ok(()),
            Err(_) => Err(RepositoryError::Unavailable("the group has no majority".to_owned()).into()),
        }
    }

    /// Join requests that wait for approval.
    pub async fn pending(&self) -> Result<Vec<JoinRequest>, GroupError> {
        Ok(self.inner.join_requests.pending().await?)
    }

    /// Approves a join request.
    pub async fn approve(&self, node_id: &str) -> Result<(), GroupError> {
        Ok(self.inner.join_requests.decide(node_id, None).await?)
    }

    /// Rejects a join request.
    pub async fn reject(&self, node_id: &str, reason: &str) -> Result<(), GroupError> {
        Ok(self.inner.join_requests.decide(node_id, Some(reason)).await?)
    }

    /// Publishes the group's members to a shared store, for discovery.
    pub async fn publish(&self, store: &dyn crate::StateRepository) -> Result<(), GroupError> {
        let record = self.inner.join_requests.record().await?;
        let value = serde_json::to_vec(&record).expect("plain fields serialize to JSON");
        let addresses: Vec<&str> = record.peers.iter().map(|peer| peer.address.as_str()).collect();
        let metadata = serde_json::json!({ "addresses": addresses, "groupId": record.group_id });
        let app = &self.inner.config.app;
        store.compare_and_swap(&keys::raft_group(app), Expect::Any, Some(value.into()), None).await?;
        let metadata = Some(metadata.to_string().into());
        store.compare_and_swap(&keys::raft_metadata(app), Expect::Any, metadata, None).await?;
        Ok(())
    }

    /// Leaves the group permanently: this voter is removed, and its folder cannot be used again.
    pub async fn leave(&self) -> Result<(), GroupError> {
        self.step_down().await;
        let left = self.inner.coordinator.remove_member(VoterId(self.inner.identity.voter)).await;
        left.map_err(|error| RepositoryError::Unavailable(error.to_string()))?;
        self.stop().await;
        Ok(())
    }

    /// Transfers the leadership to another member, if this one is the leader and another is reachable.
    pub async fn step_down(&self) {
        let group = self.inner.coordinator.group();
        let me = VoterId(self.inner.identity.voter);
        let others = group.metrics().voters.into_iter().map(|member| member.id).filter(|id| *id != me);
        for other in others {
            if !group.is_leader() {
                return;
            }
            // An unreachable member does not take over: try the next.
            let moved =
                tokio::time::timeout(TRANSFER_TIMEOUT, self.inner.coordinator.move_leader(other)).await;
            match moved {
                Ok(Ok(())) => return,
                Ok(Err(error)) => tracing::debug!(%error, %other, "leadership transfer failed"),
                Err(_) => tracing::debug!(%other, "leadership transfer timed out"),
            }
        }
    }

    /// Stops this member. Durable data stays; [`found`](Self::found) or [`join`](Self::join) restarts it.
    pub async fn stop(&self) {
        self.inner.coordinator.stop().await;
        self.inner.scope.shutdown().stop();
        self.inner.port.unregister_join_service(&self.inner.config.app);
        if let Ok(cluster) = u128::from_str_radix(&self.inner.identity.cluster, 16) {
            let secret = self.inner.identity.secret_number();
            let voter = VoterId(self.inner.identity.voter);
            self.inner.port.doors().close(PeerId { cluster, voter, secret });
        }
        if self.inner.config.port.is_none() {
            self.inner.port.close();
        }
        let store = self.inner.store.clone();
        let closed = moim_base::task::offload(move || store.close().map_err(std::io::Error::other)).await;
        if let Err(error) = closed {
            // Equivalent to a crash, which the next start recovers from.
            tracing::warn!(%error, "group store close failed");
        }
    }
}

/// Group id of an application: the same on every member, below the ids of services.
fn group_id(app: &str) -> GroupId {
    let high = u64::from(crc32c::crc32c(app.as_bytes()));
    let low = u64::from(crc32c::crc32c_append(0x6d6f_696d, app.as_bytes()));
    GroupId(((high << 32) | low) >> 1)
}

#[cfg(test)]
pub(crate) mod tests;
