//! Start of the library in one call: [`Cluster::start`].
//!
//! Start order: the store, the membership view, the Raft groups of applications that have one, the
//! membership in each domain (`domain.rs`); then each registered application, in its configured mode.
//! [`Cluster::stop`] is the reverse: consumers are closed, partitions handed over, leaderships resigned, and
//! the node leaves. A node whose membership was lost, because the store was unavailable or the process was
//! paused, joins again automatically and continues with its new assignment.

mod domain;
#[cfg(any(test, feature = "raft"))]
mod own_groups;

use std::collections::BTreeMap;
use std::sync::Arc;
#[cfg(feature = "kafka")]
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown};
use serde::Serialize;
use tokio::sync::watch;

use self::domain::Domain;
use crate::assignment::{HandoffOptions, PartitionHandler, PartitionSpec};
use crate::clock::BootClock;
use crate::config::{ClusterConfig, ConfigError, Mode, Peers};
use crate::context::Context;
use crate::etcd::{EtcdClient, EtcdOptions, EtcdRepository};
use crate::events::{EventBus, EventStream};
#[cfg(feature = "kafka")]
use crate::kafka::{KafkaElection, KafkaHandler, KafkaOptions, KafkaWorker};
use crate::leadership::{CasElection, ElectionOptions, LeaderElection};
use crate::lock::Locks;
use crate::membership::{HeartbeatOptions, JoinError, Monitor, NodeInfo};
use crate::memory::MemoryRepository;
use crate::repository::{BoxFuture, RepositoryError, StateRepository};

/// A failed start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The node could not join.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The store failed or did not answer.
    #[error(transparent)]
    Store(#[from] RepositoryError),
    /// An application is configured and not registered, or the reverse, or its mode is not compiled in.
    #[error("{0}")]
    App(String),
}

/// Application callbacks for changes of the node's membership.
pub trait Lifecycle: Send + Sync + 'static {
    /// The node is a member, for the first time or again.
    fn on_joined(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// The membership was lost: everything under its lease has ended.
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

/// Builder of a [`Cluster`].
pub struct ClusterBuilder {
    config: ClusterConfig,
    repository: Option<Arc<dyn StateRepository>>,
    apps: BTreeMap<String, App>,
    #[cfg(feature = "kafka")]
    kafka: BTreeMap<String, Box<dyn KafkaHandler>>,
    lifecycle: Option<Arc<dyn Lifecycle>>,
    handoffs: Option<HandoffOptions>,
    metrics: Option<Arc<Metrics>>,
}

impl ClusterBuilder {
    /// Replaces the configured store: by an embedded Raft group, for example.
    #[must_use]
    pub fn repository(mut self, repository: Arc<dyn StateRepository>) -> Self {
        self.repository = Some(repository);
        self
    }

    /// Registers the handler of an application that is configured in Raft mode.
    #[must_use]
    pub fn app(mut self, name: &str, handler: Arc<dyn PartitionHandler>) -> Self {
        self.apps.insert(name.to_owned(), App { handler, election: None });
        self
    }

    /// The same, with this leader election: the leader of the application's Raft group, for example.
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

    /// Registers the handler of an application that is configured in Kafka mode.
    #[cfg(feature = "kafka")]
    #[must_use]
    pub fn kafka_app(mut self, name: &str, handler: Box<dyn KafkaHandler>) -> Self {
        self.kafka.insert(name.to_owned(), handler);
        self
    }

    /// Registers the membership callbacks.
    #[must_use]
    pub fn lifecycle(mut self, lifecycle: Arc<dyn Lifecycle>) -> Self {
        self.lifecycle = Some(lifecycle);
        self
    }

    /// Replaces the configured hand-off options.
    #[must_use]
    pub fn handoffs(mut self, options: HandoffOptions) -> Self {
        self.handoffs = Some(options);
        self
    }

    /// Registers the metrics in this registry.
    #[must_use]
    pub fn metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.metrics = Some(metrics);
        self
    }

    /// Starts all services on the current runtime. With Raft groups it returns when they serve: founders
    /// wait for each other.
    pub async fn start(self) -> Result<Cluster, StartError> {
        let mut config = self.config.clone();
        config.check()?;
        if config.node_id.is_empty() {
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            config.node_id = format!("{host}-{}", std::process::id());
        }
        self.check_apps()?;
        let scope = Scope::new(Shutdown::new());
        let repository = match &self.repository {
            Some(repository) => Arc::clone(repository),
            None => open_store(&config, &scope),
        };
        let context = Context::new(config.node_id.as_str(), repository, &scope);
        if let Some(metrics) = &self.metrics {
            context.metrics.register(metrics);
        }
        let beats =
            HeartbeatOptions { interval: config.heartbeat.interval.0, timeout: config.heartbeat.timeout.0 };
        let monitor = Monitor::start(&context, &beats).await?;
        let raft = || config.apps.iter().filter(|(_, app)| app.mode == Mode::Raft);
        let specs = raft().map(|(name, app)| (name.clone(), watch::channel(app.partitions.clone()).0));
        let specs = specs.collect();
        let in_store = raft().filter(|(_, app)| app.members() == Ok(Peers::None));
        let in_store = in_store.map(|(name, _)| name.clone()).collect();
        #[cfg(any(test, feature = "raft"))]
        let groups = own_groups::open(&config, &context).await?;
        #[cfg(not(any(test, feature = "raft")))]
        let groups = Vec::new();
        let domains =
            std::iter::once(Domain::store(&context, in_store)).chain(groups).map(Arc::new).collect();
        let setup = Arc::new(Setup {
            handoffs: self.handoffs.unwrap_or_else(|| config.handoff.options()),
            config,
            specs,
            apps: self.apps,
            lifecycle: self.lifecycle,
            beats,
        });
        let inner = Inner {
            setup,
            context,
            monitor,
            domains,
            #[cfg(feature = "kafka")]
            kafka: Mutex::default(),
        };
        let cluster = Cluster { inner: Arc::new(inner) };
        for domain in &cluster.inner.domains {
            domain.start(&cluster.inner.setup).await?;
        }
        #[cfg(feature = "kafka")]
        cluster.inner.start_kafka(self.kafka)?;
        Ok(cluster)
    }

    /// Validates that the configured and the registered applications match.
    fn check_apps(&self) -> Result<(), StartError> {
        #[cfg(feature = "kafka")]
        let kafka: Vec<&String> = self.kafka.keys().collect();
        #[cfg(not(feature = "kafka"))]
        let kafka: Vec<&String> = Vec::new();
        let wrong = |text: String| Err(StartError::App(text));
        for (name, app) in &self.config.apps {
            let is_registered = match app.mode {
                Mode::Kafka if cfg!(not(feature = "kafka")) => {
                    return wrong(format!("apps.{name}: Kafka mode needs the feature `kafka`"));
                }
                Mode::Kafka => kafka.contains(&name),
                Mode::Raft if cfg!(not(any(test, feature = "raft"))) && !app.peers.is_empty() => {
                    return wrong(format!("apps.{name}: a Raft group of its own needs the feature `raft`"));
                }
                Mode::Raft => self.apps.contains_key(name),
            };
            if !is_registered {
                return wrong(format!("apps.{name}: no handler is registered: call ClusterBuilder::app"));
            }
        }
        let mode_of = |name: &str| self.config.apps.get(name).map(|app| app.mode);
        if let Some(name) = self.apps.keys().find(|name| mode_of(name.as_str()) != Some(Mode::Raft)) {
            return wrong(format!("{name} is not configured in Raft mode: add apps.{name}"));
        }
        match kafka.into_iter().find(|name| mode_of(name.as_str()) != Some(Mode::Kafka)) {
            Some(name) => wrong(format!("{name} is not configured in Kafka mode: add apps.{name}")),
            None => Ok(()),
        }
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

/// Shared start parameters of a node's domains.
struct Setup {
    config: ClusterConfig,
    specs: BTreeMap<String, watch::Sender<Vec<PartitionSpec>>>,
    apps: BTreeMap<String, App>,
    lifecycle: Option<Arc<dyn Lifecycle>>,
    handoffs: HandoffOptions,
    beats: HeartbeatOptions,
}

struct Inner {
    setup: Arc<Setup>,
    context: Context,
    monitor: Monitor,
    /// The cluster's store first.
    domains: Vec<Arc<Domain>>,
    #[cfg(feature = "kafka")]
    kafka: Mutex<BTreeMap<String, KafkaWorker>>,
}

#[cfg(feature = "kafka")]
impl Inner {
    fn kafka(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, KafkaWorker>> {
        self.kafka.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_kafka(&self, handlers: BTreeMap<String, Box<dyn KafkaHandler>>) -> Result<(), StartError> {
        for (name, handler) in handlers {
            let Some(app) = self.setup.config.apps.get(&name) else { continue };
            let topics: Vec<&str> = app.topics.iter().map(String::as_str).collect();
            let group = if app.group.is_empty() { name.as_str() } else { app.group.as_str() };
            let mut options = KafkaOptions::new(&app.bootstrap, group, &topics);
            options.handoffs = self.setup.handoffs.clone();
            options.settings.clone_from(&app.settings);
            let session = app.settings.get("session.timeout.ms").and_then(|text| text.parse().ok());
            if let Some(session) = session {
                options.session_timeout = Duration::from_millis(session);
            }
            let equipment = app.equipment.iter().filter_map(|(partition, equipment)| {
                let (topic, number) = partition.rsplit_once('/')?;
                Some((format!("{topic}-{number}"), equipment.clone()))
            });
            options.equipment = equipment.collect();
            let worker = KafkaWorker::start(&self.context, options, handler)
                .map_err(|error| StartError::App(format!("apps.{name}: {error}")))?;
            self.kafka().insert(name, worker);
        }
        Ok(())
    }
}

/// Health of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// True if the node is a member and its store responds.
    pub ready: bool,
    /// True if the node is a member, also of the groups of its applications.
    pub member: bool,
    /// True if the store responds.
    pub store: bool,
    /// Number of leaderships of this node.
    pub leaderships: i64,
    /// Members with status UP.
    pub members_up: usize,
    /// Members with status SUSPECT.
    pub members_suspect: usize,
    /// Members with status DOWN.
    pub members_down: usize,
    /// Number of partitions owned by this node.
    pub partitions: usize,
}

/// A node of the cluster. Cheap to clone.
#[derive(Clone)]
pub struct Cluster {
    inner: Arc<Inner>,
}

impl Cluster {
    /// Starts a builder.
    pub fn builder(config: ClusterConfig) -> ClusterBuilder {
        ClusterBuilder {
            config,
            repository: None,
            apps: BTreeMap::new(),
            #[cfg(feature = "kafka")]
            kafka: BTreeMap::new(),
            lifecycle: None,
            handoffs: None,
            metrics: None,
        }
    }

    /// Starts the configured services, without applications.
    pub async fn start(config: ClusterConfig) -> Result<Self, StartError> {
        Self::builder(config).start().await
    }

    /// The shared context, for services that are started separately.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Id of this node.
    pub fn node_id(&self) -> &str {
        &self.inner.context.node_id
    }

    /// The members and their status.
    pub fn members(&self) -> &Monitor {
        &self.inner.monitor
    }

    /// The locks of the cluster.
    pub fn locks(&self) -> Locks {
        Locks::new(&self.inner.context)
    }

    /// An election in the store.
    pub fn election(&self, name: &str) -> CasElection {
        let ttl = self.inner.setup.config.lease.duration.0;
        CasElection::new(&self.inner.context, name, ElectionOptions { ttl, ..ElectionOptions::default() })
    }

    /// The Raft group of an application that has one: to approve join requests, to list its members.
    #[cfg(any(test, feature = "raft"))]
    pub fn group(&self, app: &str) -> Option<crate::groups::AppGroup> {
        let mut groups = self.inner.domains.iter().filter_map(|domain| domain.group.clone());
        groups.find(|group| group.app() == app)
    }

    /// Leadership of a partition of an application in Kafka mode: valid while this node owns it.
    #[cfg(feature = "kafka")]
    pub fn kafka_election(&self, app: &str, partition: &str) -> Option<KafkaElection> {
        self.inner.kafka().get(app).map(|worker| worker.election(partition))
    }

    /// Subscribes to all events from now on.
    pub fn events(&self) -> EventStream {
        self.inner.context.events.subscribe()
    }

    /// The event bus.
    pub fn bus(&self) -> &EventBus {
        &self.inner.context.events
    }

    /// Changes the partitions of an application, independent of its leader; false when it is not configured
    /// on this node.
    pub fn set_partitions(&self, app: &str, partitions: Vec<PartitionSpec>) -> bool {
        let Some(specs) = self.inner.setup.specs.get(app) else { return false };
        specs.send_replace(partitions);
        true
    }

    /// Owned partitions of an application, with their fencing tokens.
    pub fn owned(&self, app: &str) -> BTreeMap<String, i64> {
        #[cfg(feature = "kafka")]
        if let Some(worker) = self.inner.kafka().get(app) {
            return worker.owned();
        }
        self.inner.domains.iter().find_map(|domain| domain.owned(app)).unwrap_or_default()
    }

    /// Health of this node.
    pub async fn health(&self) -> Health {
        let key = crate::keys::node(self.node_id());
        let read = self.inner.context.repository.get(&key);
        let store = matches!(tokio::time::timeout(Duration::from_secs(2), read).await, Ok(Ok(_)));
        let member = self.inner.domains.iter().all(|domain| domain.is_member());
        let partitions: usize = self.inner.domains.iter().map(|domain| domain.partitions()).sum();
        #[cfg(feature = "kafka")]
        let partitions =
            partitions + self.inner.kafka().values().map(|worker| worker.owned().len()).sum::<usize>();
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

    /// Publishes every event through `publish`, as JSON: to a topic, for example. Events that arrive faster
    /// than they are published are counted, not waited for.
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
                        Ok(event) => serde_json::to_vec(&event).expect("plain data encodes as JSON"),
                        Err(lagged) => {
                            format!("{{\"kind\":\"lagged\",\"missed\":{}}}", lagged.missed).into_bytes()
                        }
                    };
                    publish(bytes).await;
                }
            };
            tokio::select! {
                biased;
                () = stop.stopped() => {}
                () = forward => {}
            }
        });
    }

    /// Hands over the owned partitions, resigns the leaderships, and leaves.
    pub async fn stop(self) -> Result<(), RepositoryError> {
        if let Some(lifecycle) = &self.inner.setup.lifecycle {
            lifecycle.on_leaving().await;
        }
        #[cfg(feature = "kafka")]
        {
            let workers = std::mem::take(&mut *self.inner.kafka());
            for worker in workers.into_values() {
                worker.stop().await;
            }
        }
        let mut left = Ok(());
        for domain in self.inner.domains.iter().rev() {
            // Return the first failure; leave the other domains in any case.
            left = left.and(domain.stop(&self.inner.setup).await);
        }
        self.inner.context.scope.shutdown().stop();
        left
    }
}

#[cfg(test)]
mod tests;
