//! Raft groups for applications: a small replicated store inside the application's own processes.
//!
//! An [`AppGroup`] is this process's member of the group of one application. What the group keeps is a
//! [`StateRepository`](crate::StateRepository): elections, locks, members and assignments work on it as on any other
//! store, and every change of them is an entry of the group's log, applied by every member in the same order. A new
//! member gets a snapshot and the log after it.
//!
//! | file | owns |
//! |---|---|
//! | `identity.rs` | who this folder is in the group, for ever |
//! | `founding.rs` | how the first members agree that they are the first |
//! | `desk.rs` | the members' side of joining: requests, approval, activation, expiry |
//! | `join.rs` | the newcomer's side: ticket, acceptance, sync |
//! | `election.rs` | leadership by the group's own leader |
//! | `port.rs` | one port for the groups of a process |
//!
//! Invariants: a voter id belongs to one folder and is never given out again; the first members begin only when all of
//! them have shown the same list of folders; a newcomer votes only after it has caught up; a request that is not
//! completed in time leaves nothing behind, in the group or in the newcomer's folder.

mod desk;
mod election;
mod founding;
mod identity;
mod join;
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

use self::desk::Desk;
pub use self::election::RaftElection;
use self::identity::Identity;
pub use self::join::{JoinAcceptance, JoinClient, JoinError, JoinRequest, JoinTicket};
pub use self::port::GroupPort;
use crate::clock::BootClock;
use crate::context::Context;
use crate::embedded::CoordRepository;
use crate::events::EventBus;
use crate::keys;
use crate::metrics::ClusterMetrics;
use crate::repository::{Expect, RepositoryError};

/// How long a member may take to take the leadership over.
const TAKE_OVER: Duration = Duration::from_millis(500);

/// A member of the first hour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupPeer {
    /// The node.
    pub node_id: String,
    /// Where its group port is, as `host:port`.
    pub address: String,
}

/// How an application's group is run.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Whose group.
    pub app: String,
    /// This node.
    pub node_id: String,
    /// Where the other members reach it; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The address that others are told; the one it listens on if empty.
    pub advertise: String,
    /// The port of this process, where it has one for all its groups; `listen` and `advertise` say nothing then.
    pub port: Option<GroupPort>,
    /// Where log and snapshots are. Belongs to this member alone.
    pub data: PathBuf,
    /// The resources the group is for.
    pub equipment_group: String,
    /// Whether newcomers wait until somebody approves them.
    pub manual_approval: bool,
    /// How long a newcomer has from its request to its activation.
    pub join_timeout: Duration,
    /// Raft's timers, in milliseconds: heartbeat, least and most patience.
    pub timers_ms: (u64, u64, u64),
    /// Who is told about joins.
    pub events: EventBus,
    /// Where joins are counted.
    pub metrics: Arc<ClusterMetrics>,
}

impl GroupConfig {
    /// The usual settings.
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

/// Why a group does not run here.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The folder cannot be used.
    #[error("the group's folder: {0}")]
    Folder(String),
    /// The folder is empty, but the group has begun without it: a voter that lost its log must not vote again.
    #[error("the group of {0} has begun without this folder: join it under a new identity")]
    BegunWithout(String),
    /// The port cannot be listened on.
    #[error("the group's port: {0}")]
    Port(std::io::Error),
    /// The group could not be opened.
    #[error(transparent)]
    Open(#[from] moim_raft::OpenError),
    /// The group refused.
    #[error(transparent)]
    Group(#[from] moim_raft::GroupError),
    /// Joining failed.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The store gave no answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
}

/// What `cluster:raft/groups/{app}` holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GroupRecord {
    /// The group's number.
    pub group_id: u64,
    /// Its members.
    pub peers: Vec<PeerRecord>,
    /// The resources it is for.
    pub equipment_group: String,
}

/// A member of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PeerRecord {
    /// The node.
    pub node_id: String,
    /// Its voter id.
    pub peer_id: u64,
    /// Where it is reached.
    pub address: String,
}

/// Passes on what the disk says.
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
    desk: Arc<Desk>,
    scope: Scope,
}

/// A member before it is known who it is in the group: reached, and nobody yet.
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
    /// Founds the group together with the other peers, of which this node is one; or comes back to it.
    ///
    /// Returns when this member runs; a leader is there once a majority does.
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

    /// Joins a group that exists, through any of its members; or comes back to it.
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
                // The join before this one is over, and its folder set aside.
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

    /// Goes on with a join that was accepted.
    async fn sync(
        config: GroupConfig,
        identity: Identity,
        client: &JoinClient,
        ticket: &JoinTicket,
    ) -> Result<Self, GroupError> {
        let port = Port::open(&config).await?;
        Self::sync_on(port, config, identity, client, ticket).await
    }

    /// Runs as a learner until it has its vote. A join that has expired leaves an empty folder, for the next one.
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
        let desk = Arc::new(Desk::new(&config, &identity, &address, coordinator.clone(), repository.clone()));
        port.seat(&config.app, desk.clone());
        let (tending, stop) = (Arc::clone(&desk), scope.shutdown().clone());
        scope.spawn("group desk", async move {
            tokio::select! {
                () = stop.stopped() => {}
                () = tending.tend() => {}
            }
        });
        let inner = Inner { config, identity, port, address, coordinator, repository, store, desk, scope };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What the group keeps.
    pub fn repository(&self) -> Arc<CoordRepository> {
        Arc::clone(&self.inner.repository)
    }

    /// Whose group.
    pub fn app(&self) -> &str {
        &self.inner.config.app
    }

    /// The surroundings of this node's services, with the group as their store.
    pub fn context(&self, scope: &Scope) -> Context {
        Context {
            events: self.inner.config.events.clone(),
            metrics: Arc::clone(&self.inner.config.metrics),
            ..Context::new(self.inner.config.node_id.as_str(), self.repository(), scope)
        }
    }

    /// Leadership by the group's own leader.
    pub fn election(&self, context: &Context) -> RaftElection {
        let lease = Duration::from_millis(self.inner.config.timers_ms.2);
        RaftElection::new(context, &self.inner.config.app, self.inner.coordinator.clone(), lease)
    }

    /// Where this member is reached.
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// This member's voter id.
    pub fn peer_id(&self) -> u64 {
        self.inner.identity.voter
    }

    /// The members, as this one knows them: voter ids and addresses, those without a vote last.
    pub fn members(&self) -> (Vec<PeerRecord>, Vec<PeerRecord>) {
        let metrics = self.inner.coordinator.group().metrics();
        let peer = |member: &Member| PeerRecord {
            node_id: String::new(),
            peer_id: member.id.0,
            address: member.address.clone(),
        };
        (metrics.voters.iter().map(peer).collect(), metrics.learners.iter().map(peer).collect())
    }

    /// Whether this member believes that it leads.
    pub fn leads(&self) -> bool {
        self.inner.coordinator.group().is_leader()
    }

    /// Waits until the group answers.
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

    /// Who waits to be let in.
    pub async fn pending(&self) -> Result<Vec<JoinRequest>, GroupError> {
        Ok(self.inner.desk.pending().await?)
    }

    /// Lets a node in that waits for approval.
    pub async fn approve(&self, node_id: &str) -> Result<(), GroupError> {
        Ok(self.inner.desk.decide(node_id, None).await?)
    }

    /// Turns a node away that waits for approval.
    pub async fn reject(&self, node_id: &str, reason: &str) -> Result<(), GroupError> {
        Ok(self.inner.desk.decide(node_id, Some(reason)).await?)
    }

    /// Writes who is in the group into a store that others read, so that they find it.
    pub async fn publish(&self, store: &dyn crate::StateRepository) -> Result<(), GroupError> {
        let record = self.inner.desk.record().await?;
        let value = serde_json::to_vec(&record).expect("plain fields can be written down");
        let addresses: Vec<&str> = record.peers.iter().map(|peer| peer.address.as_str()).collect();
        let metadata = serde_json::json!({ "addresses": addresses, "groupId": record.group_id });
        let app = &self.inner.config.app;
        store.compare_and_swap(&keys::raft_group(app), Expect::Any, Some(value.into()), None).await?;
        let metadata = Some(metadata.to_string().into());
        store.compare_and_swap(&keys::raft_metadata(app), Expect::Any, metadata, None).await?;
        Ok(())
    }

    /// Leaves the group for good: this voter is removed, and its folder is of no more use.
    pub async fn leave(&self) -> Result<(), GroupError> {
        self.step_down().await;
        let left = self.inner.coordinator.remove_member(VoterId(self.inner.identity.voter)).await;
        left.map_err(|error| RepositoryError::Unavailable(error.to_string()))?;
        self.stop().await;
        Ok(())
    }

    /// Hands the leadership to another member, if this one has it and one is there to take it.
    pub async fn step_down(&self) {
        let group = self.inner.coordinator.group();
        let me = VoterId(self.inner.identity.voter);
        let others = group.metrics().voters.into_iter().map(|member| member.id).filter(|id| *id != me);
        for other in others {
            if !group.is_leader() {
                return;
            }
            // One that is gone takes nothing: the next is asked.
            let moved = tokio::time::timeout(TAKE_OVER, self.inner.coordinator.move_leader(other)).await;
            match moved {
                Ok(Ok(())) => return,
                Ok(Err(error)) => tracing::debug!(%error, %other, "the leadership was not handed over"),
                Err(_) => tracing::debug!(%other, "the leadership was not taken over in time"),
            }
        }
    }

    /// Stops this member. What is durable stays; [`found`](Self::found) or [`join`](Self::join) brings it back.
    pub async fn stop(&self) {
        self.inner.coordinator.stop().await;
        self.inner.scope.shutdown().stop();
        self.inner.port.unseat(&self.inner.config.app);
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
            // As after a crash, which the next start repairs.
            tracing::warn!(%error, "the group's store was not closed in order");
        }
    }
}

/// The number of an application's group: the same on every member, below those of services.
fn group_id(app: &str) -> GroupId {
    let high = u64::from(crc32c::crc32c(app.as_bytes()));
    let low = u64::from(crc32c::crc32c_append(0x6d6f_696d, app.as_bytes()));
    GroupId(((high << 32) | low) >> 1)
}

#[cfg(test)]
pub(crate) mod tests;
