//! One call that starts everything: [`Cluster::start`].
//!
//! In this order: the store, the membership, the view of the members; then each application that was registered, in the mode
//! that the configuration says. [`Cluster::stop`] goes the other way: partitions are handed over, leaderships given up, the
//! node says goodbye. A node whose membership was lost, because the store was away or the process was paused, joins again
//! by itself and goes on with what it is given then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown};
use serde::Serialize;
use tokio::sync::watch;

use crate::assignment::{
    AssignmentLeader, AssignmentWorker, HandoffOptions, HandoffStore, LeaderOptions, PartitionHandler,
    PartitionSpec,
};
use crate::backoff::Backoff;
use crate::clock::BootClock;
use crate::config::{ClusterConfig, ConfigError, Mode};
use crate::context::Context;
use crate::etcd::{EtcdClient, EtcdOptions, EtcdRepository};
use crate::events::{EventBus, EventStream};
use crate::leadership::{CasElection, ElectionOptions, LeaderElection};
use crate::lock::Locks;
use crate::membership::{HeartbeatOptions, JoinError, Membership, Monitor, NodeInfo};
use crate::memory::MemoryRepository;
use crate::repository::{BoxFuture, RepositoryError, StateRepository};

/// Why a cluster did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The node could not join.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The store gave no answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
    /// An application is configured and not registered, or the other way round, or its mode is not built in.
    #[error("{0}")]
    App(String),
}

/// What an application may do at the turns of the node's life.
pub trait Lifecycle: Send + Sync + 'static {
    /// The node is a member, for the first time or again.
    fn on_joined(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// The membership was lost: whatever stood under it has ended.
    fn on_lost(&self) {}

    /// The node is about to leave.
    fn on_leaving(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// An application of this node, in Raft mode.
struct App {
    handler: Arc<dyn PartitionHandler>,
    election: Option<Arc<dyn LeaderElection>>,
}

/// Collects what is to be started.
pub struct ClusterBuilder {
    config: ClusterConfig,
    repository: Option<Arc<dyn StateRepository>>,
    apps: BTreeMap<String, App>,
    lifecycle: Option<Arc<dyn Lifecycle>>,
    handoffs: HandoffOptions,
    metrics: Option<Arc<Metrics>>,
}

impl ClusterBuilder {
    /// Keeps state here instead of where the configuration says: an embedded Raft group, for example.
    #[must_use]
    pub fn repository(mut self, repository: Arc<dyn StateRepository>) -> Self {
        self.repository = Some(repository);
        self
    }

    /// Works on the partitions of an application that is configured in Raft mode.
    #[must_use]
    pub fn app(mut self, name: &str, handler: Arc<dyn PartitionHandler>) -> Self {
        self.apps.insert(name.to_owned(), App { handler, election: None });
        self
    }

    /// The same, led by whoever this election says: the leader of the application's Raft group, for example.
    #[must_use]
    pub fn app_led_by(
        mut self,
        name: &str,
        handler: Arc<dyn PartitionHandler>,
        election: Arc<dyn LeaderElection>,
    ) -> Self {
        self.apps.insert(name.to_owned(), App { handler, election: Some(election) });
        self
    }

    /// Tells the application about the turns of the node's life.
    #[must_use]
    pub fn lifecycle(mut self, lifecycle: Arc<dyn Lifecycle>) -> Self {
        self.lifecycle = Some(lifecycle);
        self
    }

    /// Sizes from which hand-offs are kept differently.
    #[must_use]
    pub fn handoffs(mut self, options: HandoffOptions) -> Self {
        self.handoffs = options;
        self
    }

    /// Shows the metrics in this registry.
    #[must_use]
    pub fn metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// Starts everything, on the current runtime.
    pub async fn start(self) -> Result<Cluster, StartError> {
        let Self { mut config, repository, apps, lifecycle, handoffs, metrics } = self;
        config.check()?;
        if config.node_id.is_empty() {
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            config.node_id = format!("{host}-{}", std::process::id());
        }
        check_apps(&config, &apps)?;
        let scope = Scope::new(Shutdown::new());
        let repository = match repository {
            Some(repository) => repository,
            None => open_store(&config, &scope),
        };
        let context = Context::new(config.node_id.as_str(), repository, &scope);
        if let Some(metrics) = &metrics {
            context.metrics.register(metrics);
        }
        let beats =
            HeartbeatOptions { interval: config.heartbeat.interval.0, timeout: config.heartbeat.timeout.0 };
        let monitor = Monitor::start(&context, &beats).await?;
        let membership = Membership::join(&context, info(&config), &beats).await?;
        let mut specs = BTreeMap::new();
        for (name, app) in &config.apps {
            if app.mode == Mode::Raft {
                specs.insert(name.clone(), watch::channel(app.partitions.clone()).0);
            }
        }
        let inner = Arc::new(Inner {
            config,
            context,
            monitor,
            specs,
            apps,
            lifecycle,
            handoffs,
            beats,
            state: Mutex::default(),
        });
        for name in inner.specs.keys() {
            inner.lead(name);
        }
        inner.become_member(membership).await;
        let (kept, stop) = (Arc::clone(&inner), scope.shutdown().clone());
        let keeper = scope.spawn("cluster", async move {
            tokio::select! {
                () = stop.stopped() => {}
                () = kept.keep() => {}
            }
        });
        inner.state().keeper = Some(keeper);
        Ok(Cluster { inner })
    }
}

fn check_apps(config: &ClusterConfig, apps: &BTreeMap<String, App>) -> Result<(), StartError> {
    for (name, app) in &config.apps {
        match app.mode {
            Mode::Raft if !apps.contains_key(name) => {
                return Err(StartError::App(format!(
                    "apps.{name}: nobody works on its partitions: register it"
                )));
            }
            // Kafka decides: the application starts a `kafka::KafkaWorker` itself.
            Mode::Raft | Mode::Kafka => {}
        }
    }
    match apps.keys().find(|name| config.apps.get(*name).is_none_or(|app| app.mode == Mode::Kafka)) {
        Some(name) => Err(StartError::App(format!("{name} is not configured in Raft mode: add apps.{name}"))),
        None => Ok(()),
    }
}

fn open_store(config: &ClusterConfig, scope: &Scope) -> Arc<dyn StateRepository> {
    if config.store.kind == "etcd" {
        let client = EtcdClient::new(EtcdOptions::new(&config.store.endpoints), scope);
        return Arc::new(EtcdRepository::new(client, config.store.prefix.clone()));
    }
    MemoryRepository::started(Arc::new(BootClock), scope)
}

fn info(config: &ClusterConfig) -> NodeInfo {
    NodeInfo {
        id: config.node_id.clone(),
        host: config.host.clone(),
        port: config.port,
        roles: config.roles.clone(),
        zone: config.zone.clone(),
        region: config.region.clone(),
        version: config.version.clone(),
        metadata: config.metadata.clone(),
    }
}

#[derive(Default)]
struct State {
    membership: Option<Arc<Membership>>,
    workers: Vec<AssignmentWorker>,
    leaders: Vec<tokio::task::JoinHandle<()>>,
    keeper: Option<tokio::task::JoinHandle<()>>,
}

struct Inner {
    config: ClusterConfig,
    context: Context,
    monitor: Monitor,
    specs: BTreeMap<String, watch::Sender<Vec<PartitionSpec>>>,
    apps: BTreeMap<String, App>,
    lifecycle: Option<Arc<dyn Lifecycle>>,
    handoffs: HandoffOptions,
    beats: HeartbeatOptions,
    state: Mutex<State>,
}

impl Inner {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn election(&self, name: &str) -> CasElection {
        let ttl = self.config.lease.duration.0;
        CasElection::new(&self.context, name, ElectionOptions { ttl, ..ElectionOptions::default() })
    }

    /// Campaigns for leading an application's assignment.
    fn lead(&self, name: &str) {
        let (Some(app), Some(specs)) = (self.apps.get(name), self.specs.get(name)) else { return };
        let options = LeaderOptions {
            interval: self.config.assignments.rebalance_interval.0,
            role: self.config.apps.get(name).map(|app| app.role.clone()).unwrap_or_default(),
            ..LeaderOptions::default()
        };
        let leader = AssignmentLeader::new(&self.context, name, specs.subscribe(), options);
        let election = app.election.clone().unwrap_or_else(|| Arc::new(self.election(name)));
        let stop = self.context.scope.shutdown().clone();
        let task = self.context.scope.spawn("cluster assignment leader", async move {
            tokio::select! {
                () = stop.stopped() => {}
                () = leader.run(election) => {}
            }
        });
        self.state().leaders.push(task);
    }

    /// Starts what stands under the membership.
    async fn become_member(&self, membership: Membership) {
        let workers = self.specs.keys().filter_map(|name| {
            let app = self.apps.get(name)?;
            let handoffs = HandoffStore::new(Arc::clone(&self.context.repository), self.handoffs.clone());
            let handler = Arc::clone(&app.handler);
            Some(AssignmentWorker::start(&self.context, &membership, name.as_str(), handoffs, handler))
        });
        let workers: Vec<_> = workers.collect();
        {
            let mut state = self.state();
            state.workers = workers;
            state.membership = Some(Arc::new(membership));
        }
        if let Some(lifecycle) = &self.lifecycle {
            lifecycle.on_joined().await;
        }
    }

    /// Joins again whenever the membership was lost.
    async fn keep(&self) {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        loop {
            let membership = self.state().membership.clone();
            if let Some(membership) = membership {
                let end = membership.lost().await;
                tracing::warn!(%end, node = %self.context.node_id, "the membership was lost");
                let (workers, gone) = {
                    let mut state = self.state();
                    (std::mem::take(&mut state.workers), state.membership.take())
                };
                drop((workers, gone, membership));
                if let Some(lifecycle) = &self.lifecycle {
                    lifecycle.on_lost();
                }
            }
            match Membership::join(&self.context, info(&self.config), &self.beats).await {
                Ok(membership) => {
                    backoff.reset();
                    self.become_member(membership).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "not joined yet");
                    backoff.pause().await;
                }
            }
        }
    }
}

/// Whether a node is well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Whether the node is a member and its store answers.
    pub ready: bool,
    /// Whether the node is a member at this moment.
    pub member: bool,
    /// Whether the store answers.
    pub store: bool,
    /// Leaderships that this node has.
    pub leaderships: i64,
    /// Members that are heard, silent, and gone.
    pub members_up: usize,
    /// Members that are silent.
    pub members_suspect: usize,
    /// Members that are gone.
    pub members_down: usize,
    /// Partitions that this node owns.
    pub partitions: usize,
}

/// A node's part in the cluster. Cheap to clone.
#[derive(Clone)]
pub struct Cluster {
    inner: Arc<Inner>,
}

impl Cluster {
    /// Begins to collect what is to be started.
    pub fn builder(config: ClusterConfig) -> ClusterBuilder {
        ClusterBuilder {
            config,
            repository: None,
            apps: BTreeMap::new(),
            lifecycle: None,
            handoffs: HandoffOptions::default(),
            metrics: None,
        }
    }

    /// Starts what the configuration says, without applications of its own.
    pub async fn start(config: ClusterConfig) -> Result<Self, StartError> {
        Self::builder(config).start().await
    }

    /// The surroundings: for services that are started by hand.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Who this node is.
    pub fn node_id(&self) -> &str {
        &self.inner.context.node_id
    }

    /// The members and how they are.
    pub fn members(&self) -> &Monitor {
        &self.inner.monitor
    }

    /// The locks of the cluster.
    pub fn locks(&self) -> Locks {
        Locks::new(&self.inner.context)
    }

    /// An election for work that nothing else coordinates.
    pub fn election(&self, name: &str) -> CasElection {
        self.inner.election(name)
    }

    /// Everything that happens, from now on.
    pub fn events(&self) -> EventStream {
        self.inner.context.events.subscribe()
    }

    /// The bus itself.
    pub fn bus(&self) -> &EventBus {
        &self.inner.context.events
    }

    /// Changes the partitions of an application, whoever leads; false when it is not one of this node's.
    pub fn set_partitions(&self, app: &str, partitions: Vec<PartitionSpec>) -> bool {
        let Some(specs) = self.inner.specs.get(app) else { return false };
        specs.send_replace(partitions);
        true
    }

    /// What this node owns of an application, with the fencing tokens.
    pub fn owned(&self, app: &str) -> BTreeMap<String, i64> {
        let at = self.inner.specs.keys().position(|name| name == app);
        let state = self.inner.state();
        at.and_then(|at| state.workers.get(at)).map(AssignmentWorker::owned).unwrap_or_default()
    }

    /// How this node is.
    pub async fn health(&self) -> Health {
        let key = crate::keys::node(self.node_id());
        let asked = self.inner.context.repository.get(&key);
        let store = matches!(tokio::time::timeout(Duration::from_secs(2), asked).await, Ok(Ok(_)));
        let (member, partitions) = {
            let state = self.inner.state();
            let member = state.membership.as_ref().is_some_and(|membership| membership.is_valid());
            (member, state.workers.iter().map(|worker| worker.owned().len()).sum())
        };
        let view = self.inner.monitor.view();
        let count = |status| view.iter().filter(|one| one.status == status).count();
        use crate::membership::MemberStatus::{Down, Suspect, Up};
        Health {
            ready: member && store,
            member,
            store,
            leaderships: self.inner.context.metrics.is_leader.get(),
            members_up: count(Up),
            members_suspect: count(Suspect),
            members_down: count(Down),
            partitions,
        }
    }

    /// Publishes every event through `publish`, as JSON: a topic, for example. Events that came faster than they could be
    /// published are counted, not waited for.
    pub fn bridge<F>(&self, mut publish: impl FnMut(Vec<u8>) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut events = self.events();
        let stop = self.inner.context.scope.shutdown().clone();
        self.inner.context.scope.spawn("cluster event bridge", async move {
            let forward = async {
                while let Some(event) = events.next().await {
                    let bytes = match event {
                        Ok(event) => serde_json::to_vec(&event).unwrap_or_default(),
                        Err(lagged) => {
                            format!("{{\"kind\":\"lagged\",\"missed\":{}}}", lagged.missed).into_bytes()
                        }
                    };
                    publish(bytes).await;
                }
            };
            tokio::select! {
                () = stop.stopped() => {}
                () = forward => {}
            }
        });
    }

    /// Hands over what this node owns, gives up what it leads, and says goodbye.
    pub async fn stop(self) -> Result<(), RepositoryError> {
        if let Some(lifecycle) = &self.inner.lifecycle {
            lifecycle.on_leaving().await;
        }
        let keeper = self.inner.state().keeper.take();
        if let Some(keeper) = keeper {
            keeper.abort();
            // Ended or aborted: either way it does not join again.
            let _ = keeper.await;
        }
        let (workers, leaders, membership) = {
            let mut state = self.inner.state();
            let membership = state.membership.take();
            (std::mem::take(&mut state.workers), std::mem::take(&mut state.leaders), membership)
        };
        for worker in workers {
            worker.stop().await;
        }
        for leader in leaders {
            leader.abort();
            // Its leadership is given back when it is dropped.
            let _ = leader.await;
        }
        let left = match membership {
            Some(membership) => membership.leave().await,
            None => Ok(()),
        };
        self.inner.context.scope.shutdown().stop();
        left
    }
}

#[cfg(test)]
mod tests;
