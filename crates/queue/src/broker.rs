//! The broker: the state that all request handlers share, its startup and its shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;

use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown, offload};
use moim_base::{BrokerId, Clock, LayerBudget, MemoryBudget};
use moim_journal::Store;
use moim_replica::controller::Maker;
use moim_replica::driver::Driver;
use moim_state::StateRepository;
use moim_wire_kafka::ErrorCode;

use crate::brokers::{Brokers, LiveBroker, is_live};
use crate::config::Defaults;
use crate::connection;
use crate::fetch_sessions::FetchSessions;
use crate::group_service::GroupService;
use crate::log_rate_limit::LogRateLimit;
use crate::loops::{Loops, Wake, lock};
use crate::metrics::QueueMetrics;
use crate::partition::{MAX_DECOMPRESSED_BYTES, Partition, Refused, RoleChange};
use crate::peers::{Peers, Reach};
use crate::producer_ids::ProducerIds;
use crate::producer_state::EarlyBatches;
use crate::sasl::Users;
use crate::topics::{
    MAX_ATTEMPTS, NewTopic, OFFSETS_TOPIC, PartitionEntry, RETRY_BACKOFF, TRANSACTIONS_TOPIC, Topic,
    TopicEvent, Topics, contended,
};
use crate::transaction_service::TransactionService;
use moim_base::socket::Socket;

/// Backoff before a coordinator loads a partition again after a failed load.
const LOAD_RETRY_BACKOFF: std::time::Duration = std::time::Duration::from_secs(1);

/// Memory to decompress one batch of maximum size: its records, in a buffer that doubles as it grows.
pub(crate) const DECOMPRESSION_BYTES: usize = 2 * MAX_DECOMPRESSED_BYTES;
/// The decompression layer's reserve in the node's memory budget: one batch of maximum size can always be
/// decompressed.
pub const DECOMPRESSION_RESERVE: usize = DECOMPRESSION_BYTES;
/// The upper limit of the decompression layer.
const DECOMPRESSION_LIMIT: usize = 2 * DECOMPRESSION_BYTES;

/// Broker options. Every field has a default for a single machine.
#[derive(Clone, Debug)]
pub struct BrokerOptions {
    /// The broker id in client metadata.
    pub node_id: BrokerId,
    /// The cluster id in client metadata.
    pub cluster_id: String,
    /// The data directory, as DescribeLogDirs reports it.
    pub data_dir: String,
    /// The listen address; port 0 picks a free one.
    pub listen: SocketAddr,
    /// The advertised address; by default the listen address.
    pub advertise: Option<(String, u16)>,
    /// SASL PLAIN users; an empty set disables authentication.
    pub users: Users,
    /// The zone of this node, which is its rack in client metadata.
    pub rack: Option<String>,
    /// Number of event loops that serve connections.
    pub event_loops: usize,
    /// Maximum number of open connections.
    pub max_connections: usize,
    /// Maximum request size.
    pub max_request_bytes: usize,
    /// Memory limit for requests that are being received.
    pub request_memory_bytes: usize,
    /// Memory limit for records in responses that clients have not read yet.
    pub response_memory_bytes: usize,
    /// The node's memory budget, from which the broker takes its layers; without one the broker makes its own.
    pub memory: Option<MemoryBudget>,
    /// Maximum size of a fetch response.
    pub max_fetch_bytes: usize,
    /// Upper limit of every request's wait time, whatever the client asks for.
    pub max_wait_ms: u64,
    /// Timeout of a request to another broker.
    pub peer_timeout_ms: u64,
    /// A connection without traffic is closed after this time.
    pub idle_connection_ms: u64,
    /// True if a Metadata request for an unknown topic creates it.
    pub auto_create_topics: bool,
    /// Default partition count of a new topic.
    pub num_partitions: i32,
    /// Default topic settings.
    pub topic_defaults: Defaults,
    /// Partition count of `__consumer_offsets`; fixed once the topic exists.
    pub offsets_partitions: i32,
    /// Partition count of `__transaction_state`; fixed once the topic exists.
    pub transaction_partitions: i32,
    /// Wait of a new group for more members before its first generation.
    pub group_initial_rebalance_delay_ms: u64,
    /// Minimum session timeout of a member.
    pub group_min_session_timeout_ms: u64,
    /// Maximum session timeout of a member.
    pub group_max_session_timeout_ms: u64,
    /// Maximum number of members of a group.
    pub group_max_size: usize,
    /// Retention of committed offsets of a group without members.
    pub offsets_retention_ms: i64,
    /// Maximum metadata size of an offset commit.
    pub offset_metadata_max_bytes: usize,
    /// Maximum transaction timeout of a producer.
    pub transaction_max_timeout_ms: i32,
    /// Expiration of an unused transactional id.
    pub transactional_id_expiration_ms: u64,
    /// Expiration of an idle idempotent producer.
    pub producer_id_expiration_ms: i64,
    /// Maximum number of partitions on the node, internal topics included.
    pub max_partitions: usize,
    /// Maximum number of partitions of a topic.
    pub max_partitions_per_topic: i32,
    /// Maximum number of cached fetch sessions.
    pub max_fetch_sessions: usize,
    /// Interval of the retention check.
    pub retention_check_ms: u64,
    /// Interval of the compaction check.
    pub compaction_check_ms: u64,
    /// Read rate of the background scrub.
    pub scrub_bytes_per_second: u64,
}

impl Default for BrokerOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            node_id: BrokerId(1),
            cluster_id: "moim".into(),
            data_dir: "moim-data".into(),
            listen: SocketAddr::from(([127, 0, 0, 1], 9092)),
            advertise: None,
            users: Users::default(),
            rack: None,
            event_loops: cores.saturating_sub(1).max(1),
            max_connections: 10_000,
            max_request_bytes: 100 << 20,
            request_memory_bytes: 512 << 20,
            response_memory_bytes: 256 << 20,
            memory: None,
            max_fetch_bytes: 55 << 20,
            max_wait_ms: 300_000,
            peer_timeout_ms: 10_000,
            idle_connection_ms: 600_000,
            auto_create_topics: true,
            num_partitions: 1,
            topic_defaults: Defaults::new(),
            offsets_partitions: 50,
            transaction_partitions: 50,
            group_initial_rebalance_delay_ms: 500,
            group_min_session_timeout_ms: 6_000,
            group_max_session_timeout_ms: 1_800_000,
            group_max_size: 10_000,
            offsets_retention_ms: 7 * 24 * 3_600_000,
            offset_metadata_max_bytes: 4096,
            transaction_max_timeout_ms: 900_000,
            transactional_id_expiration_ms: 7 * 24 * 3_600_000,
            producer_id_expiration_ms: 24 * 3_600_000,
            max_partitions: 200_000,
            max_partitions_per_topic: 100_000,
            max_fetch_sessions: 10_000,
            retention_check_ms: 30_000,
            compaction_check_ms: 15_000,
            scrub_bytes_per_second: 4 << 20,
        }
    }
}

/// The components the broker depends on.
pub struct BrokerParts {
    /// All journals of the node.
    pub store: Arc<Store>,
    /// The state repository, which holds topics, partition registrations and producer-id blocks.
    pub repository: Arc<dyn StateRepository>,
    /// The replica driver, which replicates the partitions' journals.
    pub driver: Arc<Driver>,
    /// Monotonic and wall time.
    pub clock: Arc<dyn Clock>,
    /// The metrics registry.
    pub metrics: Arc<Metrics>,
    /// Signals broker shutdown.
    pub shutdown: Shutdown,
}

/// The shared state of all connections.
pub struct Broker {
    pub(crate) options: BrokerOptions,
    pub(crate) store: Arc<Store>,
    pub(crate) repository: Arc<dyn StateRepository>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) shutdown: Shutdown,
    /// Cancelled, with every connection, when this node loses contact with the cluster; replaced on each change.
    cluster_contact: ArcSwap<Shutdown>,
    pub(crate) scope: Scope,
    pub(crate) loops: Arc<Loops>,
    pub(crate) topics: Arc<Topics>,
    pub(crate) brokers: Brokers,
    pub(crate) peers: Arc<Peers>,
    /// Invariant: all repository changes up to this revision are applied.
    pub(crate) revision: AtomicI64,
    /// Serializes the handling of topic events, in order.
    applying_events: std::sync::Mutex<()>,
    pub(crate) fetch_sessions: FetchSessions,
    pub(crate) groups: GroupService,
    pub(crate) transactions: TransactionService,
    pub(crate) producer_ids: ProducerIds,
    pub(crate) early_batches: EarlyBatches,
    /// Memory of requests that are being received or that wait for off-loop work.
    pub(crate) requests: LayerBudget,
    /// Memory of records in responses that clients have not read yet.
    pub(crate) responses: LayerBudget,
    /// Memory of batches that are decompressed off the loops.
    pub(crate) decompression: LayerBudget,
    pub(crate) log_rate_limit: LogRateLimit,
    pub(crate) metrics: QueueMetrics,
    /// The housekeeping thread; it must end before the journals are closed.
    pub(crate) housekeeping: std::sync::Mutex<Option<std::thread::JoinHandle<()>>>,
    /// Broker start; coarse deadlines count from here.
    pub(crate) started: tokio::time::Instant,
    pub(crate) connections: AtomicUsize,
    pub(crate) next_connection: AtomicU64,
    /// Broker settings changed at run time (dynamic configuration).
    pub(crate) dynamic: ArcSwap<Defaults>,
    /// The bound listen address, set when the server starts.
    pub(crate) address: std::sync::OnceLock<SocketAddr>,
}

impl Broker {
    /// Recovers topics, groups and transactions. The broker serves requests once its loops run (see `server`).
    pub async fn open(options: BrokerOptions, parts: BrokerParts) -> Result<Arc<Self>, Refused> {
        let loops = Arc::new(Loops::new(options.event_loops));
        let metrics = QueueMetrics::register(&parts.metrics);
        let own = 2 * options.request_memory_bytes + options.response_memory_bytes + DECOMPRESSION_LIMIT;
        let memory = options.memory.clone().unwrap_or_else(|| MemoryBudget::new(own));
        let topics = Arc::new(Topics::new(
            Arc::clone(&parts.repository),
            Arc::clone(&parts.store),
            Arc::clone(&parts.clock),
            Arc::clone(&loops),
            Arc::clone(&parts.driver),
            &options,
        ));
        let broker = Arc::new(Self {
            groups: GroupService::new(&options),
            transactions: TransactionService::new(&options),
            producer_ids: ProducerIds::new(Arc::clone(&parts.repository)),
            requests: memory.layer(
                "queue requests",
                2 * options.request_memory_bytes,
                2 * options.request_memory_bytes,
            ),
            responses: memory.layer(
                "queue responses",
                options.response_memory_bytes,
                options.response_memory_bytes,
            ),
            decompression: memory.layer("queue decompression", DECOMPRESSION_RESERVE, DECOMPRESSION_LIMIT),
            log_rate_limit: LogRateLimit::default(),
            scope: Scope::new(parts.shutdown.clone()),
            fetch_sessions: FetchSessions::new(options.max_fetch_sessions),
            housekeeping: std::sync::Mutex::new(None),
            started: tokio::time::Instant::now(),
            connections: AtomicUsize::new(0),
            next_connection: AtomicU64::new(1),
            dynamic: ArcSwap::default(),
            cluster_contact: ArcSwap::default(),
            early_batches: EarlyBatches::default(),
            brokers: Brokers::default(),
            peers: Arc::new(Peers::new(
                options.users.clone(),
                std::time::Duration::from_millis(options.peer_timeout_ms),
            )),
            revision: AtomicI64::new(0),
            applying_events: std::sync::Mutex::default(),
            address: std::sync::OnceLock::new(),
            store: parts.store,
            repository: parts.repository,
            driver: parts.driver,
            clock: parts.clock,
            shutdown: parts.shutdown,
            options,
            loops,
            topics,
            metrics,
        });
        // Nothing is written yet: the repository may use a journal that only runs once this returns.
        broker.read_repository(true).await?;
        Ok(broker)
    }

    /// Applies pending topic events. Called after every change, whether this broker made it or the watch delivered
    /// it.
    pub(crate) fn apply_topic_events(&self) {
        let _following = lock(&self.applying_events);
        for event in self.topics.take_events() {
            match event {
                TopicEvent::Added(topic) => match &*topic.name {
                    OFFSETS_TOPIC => self.groups.on_topic(topic.count()),
                    TRANSACTIONS_TOPIC => self.transactions.on_topic(topic.count()),
                    _ => {}
                },
                TopicEvent::Deleted(topic) => self.groups.on_topic_deleted(self, &topic.name),
            }
        }
    }

    /// Loads and unloads coordinators as leadership of their partitions changes. Reads logs, so it must not run on an
    /// event loop. Returns the changes to retry: elections whose log could not be read.
    pub(crate) fn apply_role_changes(&self, changes: Vec<RoleChange>) -> Vec<RoleChange> {
        // A led partition has a topic, and the coordinators need that topic's partition count first.
        self.apply_topic_events();
        let mut retry = Vec::new();
        for change in changes {
            let (partition, epoch) = match &change {
                RoleChange::Elected(partition, epoch) => (partition, *epoch),
                RoleChange::Resigned(partition) if *partition.topic == *OFFSETS_TOPIC => {
                    self.groups.on_resignation(partition);
                    continue;
                }
                RoleChange::Resigned(partition) => {
                    self.transactions.on_resignation(partition);
                    continue;
                }
            };
            let read = match &*partition.topic {
                OFFSETS_TOPIC => self.groups.on_election(self, partition, epoch),
                _ => self.transactions.on_election(self, partition, epoch),
            };
            // A leadership that ended while its log was read is not a failure.
            if let Err(error) = read
                && partition.leading() == Some(epoch)
            {
                tracing::error!(
                    topic = %partition.topic, partition = partition.index, %error,
                    "coordinator load failed; retrying"
                );
                retry.push(change);
            }
        }
        retry
    }

    /// Applies role changes until the broker stops.
    pub(crate) async fn run_role_changes(self: Arc<Self>) {
        loop {
            let changes = tokio::select! {
                changes = self.topics.roles.take() => changes,
                () = self.shutdown.stopped() => return,
            };
            let broker = Arc::clone(&self);
            let followed = offload(move || Ok(broker.apply_role_changes(changes))).await;
            match followed {
                Ok(retry) if !retry.is_empty() => {
                    tokio::time::sleep(LOAD_RETRY_BACKOFF).await;
                    retry.into_iter().for_each(|change| self.topics.roles.push(change));
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(%error, "coordinator role change failed");
                    self.shutdown.stop();
                }
            }
        }
    }

    /// Creates a topic. Retries if a broker joins or leaves meanwhile.
    pub(crate) async fn create_topic(&self, new: NewTopic) -> Result<Arc<Topic>, Refused> {
        for _ in 1..MAX_ATTEMPTS {
            match self.topics.create(new.clone(), self.maker()).await {
                Err(refused) if refused == contended() => tokio::time::sleep(RETRY_BACKOFF).await,
                created => {
                    self.apply_topic_events();
                    return created;
                }
            }
        }
        let created = self.topics.create(new, self.maker()).await;
        self.apply_topic_events();
        created
    }

    /// Creates an internal topic unless it exists.
    pub(crate) async fn ensure_internal(&self, name: &str, partitions: i32) -> Result<(), ErrorCode> {
        for _ in 0..MAX_ATTEMPTS {
            if self.topics.get(name).is_some() {
                return Ok(());
            }
            let made = self.topics.ensure_internal(name, partitions, self.maker()).await;
            self.apply_topic_events();
            match made {
                Ok(()) => return Ok(()),
                Err(refused) if refused == contended() => tokio::time::sleep(RETRY_BACKOFF).await,
                Err(refused) => {
                    tracing::warn!(topic = name, %refused, "internal topic creation failed");
                    break;
                }
            }
        }
        Err(ErrorCode::CoordinatorNotAvailable)
    }

    /// This broker, as metadata responses describe it.
    pub(crate) fn me(&self) -> LiveBroker {
        let (host, port) = self.advertised();
        LiveBroker { id: self.options.node_id, host, port, rack: self.options.rack.clone() }
    }

    /// Memory of records in responses that clients have not read yet.
    pub fn response_memory_bytes(&self) -> usize {
        self.responses.used()
    }

    /// Memory of requests that are being received or that wait for off-loop work.
    pub fn request_memory_bytes(&self) -> usize {
        self.requests.used()
    }

    /// Number of event loops without a heartbeat for a second.
    pub fn stalled_loops(&self) -> usize {
        self.loops.stalled(self.clock.monotonic_ms(), 1_000)
    }

    /// All live brokers, by broker id.
    pub(crate) fn live(&self) -> Vec<LiveBroker> {
        self.brokers.live(self.me())
    }

    /// A live broker by id.
    pub(crate) fn live_broker(&self, id: BrokerId) -> Option<LiveBroker> {
        if id == self.options.node_id { Some(self.me()) } else { self.brokers.other(id) }
    }

    /// Sets whether this node is in contact with the cluster. The other nodes take a node without contact for dead,
    /// so clients must too: their connections are closed, and every new connection is closed at its first request
    /// other than ApiVersions and authentication (some clients treat a connection that closes earlier as a fatal
    /// broker error). A client that got responses would keep this node's stale metadata and would not find the new
    /// leaders.
    pub fn set_in_touch(&self, in_touch: bool) {
        let cluster_contact = self.cluster_contact.load();
        if in_touch && cluster_contact.is_stopped() {
            tracing::info!("cluster contact restored; serving clients");
            self.cluster_contact.store(Arc::default());
        } else if !in_touch && !cluster_contact.is_stopped() {
            tracing::warn!("cluster contact lost; closing client connections");
            cluster_contact.stop();
        }
    }

    /// The token that ends a connection accepted now when cluster contact changes.
    pub(crate) fn cluster_contact(&self) -> Shutdown {
        Shutdown::clone(&self.cluster_contact.load())
    }

    /// The live leader of a partition, if it has one.
    pub(crate) fn leader_of(&self, topic: &str, index: i32) -> Option<LiveBroker> {
        let leader = self.topics.get(topic)?.entry(index)?.registration().leader()?;
        self.live_broker(leader)
    }

    /// The current leader and leader epoch, for the response to a client that sent its request to the wrong broker.
    pub(crate) fn leader_hint(&self, topic: &Topic, index: i32) -> Option<(LiveBroker, i32)> {
        let entry = topic.entry(index)?;
        let registration = entry.registration();
        // A registration that names this node while its replica does not lead is about to be replaced.
        let leader = registration.leader().filter(|leader| *leader != self.options.node_id)?;
        Some((self.live_broker(leader)?, registration.leader_epoch()))
    }

    /// The preferred read replica for a client in `rack`: an in-sync replica there whose log reaches the fetch
    /// offset.
    pub(crate) fn nearer_replica(
        &self,
        topic: &Topic,
        leader: &Partition,
        rack: &str,
        from: i64,
    ) -> Option<BrokerId> {
        if leader.leading().is_none() || self.options.rack.as_deref() == Some(rack) {
            return None;
        }
        let registration = topic.entry(leader.index)?.registration();
        let near = |node: &i32| {
            let there = self.brokers.other(BrokerId(*node));
            there.is_some_and(|broker| broker.rack.as_deref() == Some(rack))
        };
        let far_enough = |node: &BrokerId| {
            let has = leader.replicated().and_then(|replicated| replicated.progress_of(*node));
            has.is_some_and(|(written, _)| written.0 >= from)
        };
        registration.in_sync().into_iter().filter(near).map(BrokerId).find(far_enough)
    }

    /// A replica placement over the live brokers.
    pub(crate) fn maker(&self) -> Maker {
        self.brokers.maker(self.options.node_id)
    }

    /// True if this node is registered and leads every partition it should lead. Until then clients get retriable
    /// errors.
    pub fn is_settled(&self) -> bool {
        let me = self.options.node_id;
        let is_led = |entry: &Arc<PartitionEntry>| {
            let (replica, registration) = (entry.replica(), entry.registration());
            // A partition whose only replica is here has this node as leader, or none.
            let is_mine = registration.leader() == Some(me)
                || registration.leader().is_none() && registration.is_only_on(me);
            !is_mine || replica.is_some_and(|replica| replica.leading().is_some())
        };
        self.brokers.member(me).is_some()
            && self.topics.all().iter().all(|topic| topic.partitions.load().iter().all(is_led))
    }

    /// The broker id that clients send administrative requests to: the controller's node, though any broker accepts
    /// them.
    pub(crate) fn controller(&self) -> BrokerId {
        let live = self.live();
        let known = self.brokers.controller().filter(|id| is_live(&live, *id));
        known.map(BrokerId).or(live.first().map(|b| b.id)).unwrap_or(self.options.node_id)
    }

    /// The receiver of the journal's durability notifications: pass it to [`Store::set_sink`].
    pub fn sink(&self) -> Arc<dyn moim_journal::DurableSink> {
        Arc::clone(&self.loops) as Arc<dyn moim_journal::DurableSink>
    }

    /// The advertised address.
    pub(crate) fn advertised(&self) -> (String, u16) {
        match (&self.options.advertise, self.address.get()) {
            (Some((host, 0)), Some(address)) => (host.clone(), address.port()),
            (Some(advertise), _) => advertise.clone(),
            (None, Some(address)) => (address.ip().to_string(), address.port()),
            (None, None) => (self.options.listen.ip().to_string(), self.options.listen.port()),
        }
    }

    /// Serves one client over any socket until it disconnects. Tests and the simulator use it to bypass TCP.
    pub async fn serve(self: &Arc<Self>, socket: Box<dyn Socket>, peer: SocketAddr) {
        let wake = Wake::new(0, self.next_connection.fetch_add(1, Ordering::Relaxed));
        connection::serve(Arc::clone(self), socket, wake, peer).await;
    }

    /// Connects to other brokers through `reach` instead of TCP. Call it before the first request to a peer.
    pub fn reach_peers_by(&self, reach: Arc<dyn Reach>) {
        self.peers.reach_by(reach);
    }

    /// Runs the work of the loops and threads of a server, except listening, on this runtime. The simulator uses it.
    pub fn run_here(self: &Arc<Self>) {
        self.scope.spawn("drain", crate::server::drain(Arc::clone(self), 0));
        crate::housekeeping::spawn_here(self);
    }

    /// Statistics for the admin page.
    pub fn summary(&self) -> Summary {
        let (topics, partitions) = self.topics.counts();
        Summary {
            topics,
            partitions,
            connections: self.connections.load(Ordering::Relaxed),
            groups: self.groups.count(),
        }
    }

    /// Writes the state that makes the next start fast. Called after the loops have ended.
    pub fn close(&self) {
        let housekeeping = lock(&self.housekeeping).take();
        if housekeeping.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("housekeeping thread panicked");
        }
        for topic in self.topics.all() {
            for replica in topic.replicas() {
                replica.snapshot_producers();
            }
        }
    }
}

/// Statistics for the admin page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Number of topics, internal topics included.
    pub topics: usize,
    /// Number of partitions, internal topics included.
    pub partitions: usize,
    /// Number of open connections.
    pub connections: usize,
    /// Number of consumer groups.
    pub groups: usize,
}
