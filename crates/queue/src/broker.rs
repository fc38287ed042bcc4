//! The broker: everything the handlers share, and how it starts and stops.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;

use moim_base::metrics::Metrics;
use moim_base::task::{Scope, Shutdown, offload};
use moim_base::{BrokerId, Clock, LayerBudget, MemoryBudget};
use moim_cluster::StateRepository;
use moim_journal::Store;
use moim_replica::controller::Maker;
use moim_replica::driver::Driver;
use moim_wire_kafka::ErrorCode;

use crate::brokers::{Brokers, LiveBroker, is_live};
use crate::config::Defaults;
use crate::connection;
use crate::fetch_sessions::FetchSessions;
use crate::group_service::GroupService;
use crate::log_budget::LogBudget;
use crate::loops::{Loops, Wake, lock};
use crate::metrics::QueueMetrics;
use crate::partition::{MAX_DECOMPRESSED_BYTES, Partition, Refused, RoleChange};
use crate::peers::{Peers, Reach};
use crate::producer_ids::ProducerIds;
use crate::producers::TurnedAway;
use crate::sasl::Users;
use crate::topics::{
    NewTopic, News, OFFSETS_TOPIC, PAUSE, Seat, TRANSACTIONS_TOPIC, TRIES, Topic, Topics, contended,
};
use crate::transaction_service::TransactionService;
use moim_base::socket::Socket;

/// Before a coordinator's log that could not be read is read again.
const READ_AGAIN: std::time::Duration = std::time::Duration::from_secs(1);

/// What one batch may take while it is decompressed: its records, in a buffer that doubles as it grows.
pub(crate) const DECOMPRESSION_BYTES: usize = 2 * MAX_DECOMPRESSED_BYTES;
/// What the decompression of batches reserves of the node's budget: one of the largest can always be done.
pub const DECOMPRESSION_RESERVE: usize = DECOMPRESSION_BYTES;
/// The most that it takes.
const DECOMPRESSION_LIMIT: usize = 2 * DECOMPRESSION_BYTES;

/// How a broker is to run. Every field has a default that suits one machine.
#[derive(Clone, Debug)]
pub struct BrokerOptions {
    /// The number clients know this broker by.
    pub node_id: BrokerId,
    /// The id of the cluster.
    pub cluster_id: String,
    /// The data folder, as clients are told it.
    pub data_dir: String,
    /// Where to listen; port 0 picks a free one.
    pub listen: SocketAddr,
    /// What clients are told to connect to; by default the address listened on.
    pub advertise: Option<(String, u16)>,
    /// Who may connect; nobody is asked when there are none.
    pub users: Users,
    /// The zone of this node, which clients know as its rack.
    pub rack: Option<String>,
    /// How many event loops serve connections.
    pub event_loops: usize,
    /// At most this many connections at a time.
    pub max_connections: usize,
    /// The largest request.
    pub max_request_bytes: usize,
    /// At most this much memory for requests that are being received.
    pub request_memory_bytes: usize,
    /// At most this much memory for records that wait in responses for clients to read them.
    pub response_memory_bytes: usize,
    /// The node's memory budget, of which the broker takes its layers; one of its own without.
    pub memory: Option<MemoryBudget>,
    /// The largest answer to a fetch.
    pub max_fetch_bytes: usize,
    /// No request waits longer than this, whatever it asks for.
    pub max_wait_ms: u64,
    /// How long another broker may take to answer.
    pub peer_timeout_ms: u64,
    /// A connection without traffic is closed after this.
    pub idle_connection_ms: u64,
    /// Whether asking for a topic makes it.
    pub auto_create_topics: bool,
    /// How many partitions a topic gets when nobody says.
    pub num_partitions: i32,
    /// Settings topics fall back to.
    pub topic_defaults: Defaults,
    /// Partitions of the topic that keeps group offsets; fixed once it exists.
    pub offsets_partitions: i32,
    /// Partitions of the topic that keeps transactions; fixed once it exists.
    pub transaction_partitions: i32,
    /// How long a new group waits for more members before its first generation.
    pub group_initial_rebalance_delay_ms: u64,
    /// The shortest session a member may ask for.
    pub group_min_session_timeout_ms: u64,
    /// The longest session a member may ask for.
    pub group_max_session_timeout_ms: u64,
    /// At most this many members in a group.
    pub group_max_size: usize,
    /// Offsets of a group without members are forgotten after this.
    pub offsets_retention_ms: i64,
    /// The longest metadata a commit may carry.
    pub offset_metadata_max_bytes: usize,
    /// The longest transaction a producer may ask for.
    pub transaction_max_timeout_ms: i32,
    /// An unused transactional id is forgotten after this.
    pub transactional_id_expiration_ms: u64,
    /// An idle idempotent producer is forgotten after this.
    pub producer_id_expiration_ms: i64,
    /// At most this many partitions on the node, internal ones included.
    pub max_partitions: usize,
    /// At most this many partitions in a topic.
    pub max_partitions_per_topic: i32,
    /// At most this many fetch sessions are remembered.
    pub max_fetch_sessions: usize,
    /// How often old segments are looked for.
    pub retention_check_ms: u64,
    /// How often compaction looks for work.
    pub compaction_check_ms: u64,
    /// How many bytes per second the background scrub reads.
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

/// What the broker stands on.
pub struct BrokerParts {
    /// All journals of the node.
    pub store: Arc<Store>,
    /// Where topics and ids are kept.
    pub repository: Arc<dyn StateRepository>,
    /// Replicates the partitions' journals.
    pub driver: Arc<Driver>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Where to count.
    pub metrics: Arc<Metrics>,
    /// Stops the broker.
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
    /// Ends when this node loses touch with the cluster, and every connection with it; then another one begins.
    spell: ArcSwap<Shutdown>,
    pub(crate) scope: Scope,
    pub(crate) loops: Arc<Loops>,
    pub(crate) topics: Arc<Topics>,
    pub(crate) brokers: Brokers,
    pub(crate) peers: Arc<Peers>,
    /// Everything up to this revision of the repository is taken in.
    pub(crate) revision: AtomicI64,
    /// News are acted on by one at a time, in order.
    following: std::sync::Mutex<()>,
    pub(crate) fetch_sessions: FetchSessions,
    pub(crate) groups: GroupService,
    pub(crate) transactions: TransactionService,
    pub(crate) producer_ids: ProducerIds,
    pub(crate) turned_away: TurnedAway,
    /// For requests that are being received, or wait for their turn off the loop.
    pub(crate) requests: LayerBudget,
    /// For records in responses that clients have not read yet.
    pub(crate) responses: LayerBudget,
    /// For batches that inflate, off the loops.
    pub(crate) decompression: LayerBudget,
    pub(crate) log_budget: LogBudget,
    pub(crate) metrics: QueueMetrics,
    /// The thread that must be done before the journals are closed.
    pub(crate) housekeeping: std::sync::Mutex<Option<std::thread::JoinHandle<()>>>,
    /// When this broker began; deadlines that may be coarse are counted from here.
    pub(crate) started: tokio::time::Instant,
    pub(crate) connections: AtomicUsize,
    pub(crate) next_connection: AtomicU64,
    /// Broker settings changed at run time.
    pub(crate) dynamic: ArcSwap<Defaults>,
    /// The topic of the repository's own journal is not ours: the node hands its progress on.
    pub(crate) address: std::sync::OnceLock<SocketAddr>,
}

impl Broker {
    /// Recovers topics, groups and transactions. The broker serves once its loops run (see `server`).
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
            log_budget: LogBudget::default(),
            scope: Scope::new(parts.shutdown.clone()),
            fetch_sessions: FetchSessions::new(options.max_fetch_sessions),
            housekeeping: std::sync::Mutex::new(None),
            started: tokio::time::Instant::now(),
            connections: AtomicUsize::new(0),
            next_connection: AtomicU64::new(1),
            dynamic: ArcSwap::default(),
            spell: ArcSwap::default(),
            turned_away: TurnedAway::default(),
            brokers: Brokers::default(),
            peers: Arc::new(Peers::new(
                options.users.clone(),
                std::time::Duration::from_millis(options.peer_timeout_ms),
            )),
            revision: AtomicI64::new(0),
            following: std::sync::Mutex::default(),
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
        // Nothing is written yet: the repository may stand on a journal that only runs once this returns.
        broker.read_repository(true).await?;
        Ok(broker)
    }

    /// Acts on what has become of topics. Called after every change, by whoever made it or was told of it.
    pub(crate) fn follow(&self) {
        let _following = lock(&self.following);
        for news in self.topics.take_news() {
            match news {
                News::Appeared(topic) => match &*topic.name {
                    OFFSETS_TOPIC => self.groups.on_topic(topic.count()),
                    TRANSACTIONS_TOPIC => self.transactions.on_topic(topic.count()),
                    _ => {}
                },
                News::Deleted(topic) => self.groups.on_topic_deleted(self, &topic.name),
            }
        }
    }

    /// Has coordinators begin and end with the leadership of the partitions that keep their state. Reads logs: not for
    /// an event loop. Gives back what is to be tried again: a leadership under which the log could not be read.
    pub(crate) fn follow_roles(&self, changes: Vec<RoleChange>) -> Vec<RoleChange> {
        // A partition that leads has a topic, and the coordinators must have heard of it.
        self.follow();
        let mut again = Vec::new();
        for change in changes {
            let (partition, epoch) = match &change {
                RoleChange::Leads(partition, epoch) => (partition, *epoch),
                RoleChange::Resigned(partition) if *partition.topic == *OFFSETS_TOPIC => {
                    self.groups.resign(partition);
                    continue;
                }
                RoleChange::Resigned(partition) => {
                    self.transactions.resign(partition);
                    continue;
                }
            };
            let read = match &*partition.topic {
                OFFSETS_TOPIC => self.groups.lead(self, partition, epoch),
                _ => self.transactions.lead(self, partition, epoch),
            };
            // One that ended while its log was read is no failure.
            if let Err(error) = read
                && partition.leading() == Some(epoch)
            {
                tracing::error!(topic = %partition.topic, partition = partition.index, %error, "a coordinator cannot read its state; trying again");
                again.push(change);
            }
        }
        again
    }

    /// Follows roles until the broker stops.
    pub(crate) async fn serve_roles(self: Arc<Self>) {
        loop {
            let changes = tokio::select! {
                changes = self.topics.roles.take() => changes,
                () = self.shutdown.stopped() => return,
            };
            let broker = Arc::clone(&self);
            let followed = offload(move || Ok(broker.follow_roles(changes))).await;
            match followed {
                Ok(again) if !again.is_empty() => {
                    tokio::time::sleep(READ_AGAIN).await;
                    again.into_iter().for_each(|change| self.topics.roles.push(change));
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(%error, "coordinators cannot follow the leadership of their partitions");
                    self.shutdown.stop();
                }
            }
        }
    }

    /// Makes a topic. Brokers that come or go meanwhile cost another try.
    pub(crate) async fn create_topic(&self, new: NewTopic) -> Result<Arc<Topic>, Refused> {
        for _ in 1..TRIES {
            match self.topics.create(new.clone(), self.maker()).await {
                Err(refused) if refused == contended() => tokio::time::sleep(PAUSE).await,
                created => {
                    self.follow();
                    return created;
                }
            }
        }
        let created = self.topics.create(new, self.maker()).await;
        self.follow();
        created
    }

    /// Makes one of the broker's own topics unless it is there.
    pub(crate) async fn ensure_internal(&self, name: &str, partitions: i32) -> Result<(), ErrorCode> {
        for _ in 0..TRIES {
            if self.topics.get(name).is_some() {
                return Ok(());
            }
            let made = self.topics.ensure_internal(name, partitions, self.maker()).await;
            self.follow();
            match made {
                Ok(()) => return Ok(()),
                Err(refused) if refused == contended() => tokio::time::sleep(PAUSE).await,
                Err(refused) => {
                    tracing::warn!(topic = name, %refused, "cannot make an internal topic");
                    break;
                }
            }
        }
        Err(ErrorCode::CoordinatorNotAvailable)
    }

    /// This broker as clients are told of it.
    pub(crate) fn me(&self) -> LiveBroker {
        let (host, port) = self.advertised();
        LiveBroker { id: self.options.node_id, host, port, rack: self.options.rack.clone() }
    }

    /// Memory held by records in responses that clients have not read yet.
    pub fn response_memory_bytes(&self) -> usize {
        self.responses.used()
    }

    /// Memory held by requests that are being received, or wait for their turn off the loop.
    pub fn request_memory_bytes(&self) -> usize {
        self.requests.used()
    }

    /// How many event loops have not turned for a second.
    pub fn stalled_loops(&self) -> usize {
        self.loops.stalled(self.clock.monotonic_ms(), 1_000)
    }

    /// Every broker that runs, by number.
    pub(crate) fn live(&self) -> Vec<LiveBroker> {
        self.brokers.live(self.me())
    }

    /// A broker, if it runs.
    pub(crate) fn live_broker(&self, id: BrokerId) -> Option<LiveBroker> {
        if id == self.options.node_id { Some(self.me()) } else { self.brokers.other(id) }
    }

    /// A node that has lost touch with the cluster is taken for dead by the others, so to clients it is dead too: their
    /// connections are closed, and every new one with its first request that is not about versions or authentication (a
    /// connection that ends before that is a broken broker to some clients, and fatal). A client that was answered would go on believing what this node
    /// believes, and would not find those who have taken over.
    pub fn set_in_touch(&self, in_touch: bool) {
        let spell = self.spell.load();
        if in_touch && spell.is_stopped() {
            tracing::info!("back in touch with the cluster; clients are served again");
            self.spell.store(Arc::default());
        } else if !in_touch && !spell.is_stopped() {
            tracing::warn!("out of touch with the cluster; clients are sent to the others");
            spell.stop();
        }
    }

    /// How long a connection made now may be served.
    pub(crate) fn spell(&self) -> Shutdown {
        Shutdown::clone(&self.spell.load())
    }

    /// Who leads a partition, if somebody does and runs.
    pub(crate) fn leader_of(&self, topic: &str, index: i32) -> Option<LiveBroker> {
        let leader = self.topics.get(topic)?.seat(index)?.place().leader()?;
        self.live_broker(leader)
    }

    /// Where a client that came here by mistake should go: who leads a partition, and under which leadership.
    pub(crate) fn hint(&self, topic: &Topic, index: i32) -> Option<(LiveBroker, i32)> {
        let seat = topic.seat(index)?;
        let place = seat.place();
        // A record that names this node while its copy does not lead is about to be replaced.
        let leader = place.leader().filter(|leader| *leader != self.options.node_id)?;
        Some((self.live_broker(leader)?, place.leader_epoch()))
    }

    /// A replica that a client in `rack` should read from instead of this leader: in sync there, and far enough.
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
        let place = topic.seat(leader.index)?.place();
        let near = |node: &i32| {
            let there = self.brokers.other(BrokerId(*node));
            there.is_some_and(|broker| broker.rack.as_deref() == Some(rack))
        };
        let far_enough = |node: &BrokerId| {
            let has = leader.replicated().and_then(|replicated| replicated.progress_of(*node));
            has.is_some_and(|(written, _)| written.0 >= from)
        };
        place.in_sync().into_iter().filter(near).map(BrokerId).find(far_enough)
    }

    /// Places new partitions on the brokers that run.
    pub(crate) fn maker(&self) -> Maker {
        self.brokers.maker(self.options.node_id)
    }

    /// Whether this node is registered, and every partition that it is to lead is led. Until then clients are told to come
    /// back.
    pub fn is_settled(&self) -> bool {
        let me = self.options.node_id;
        let is_led = |seat: &Arc<Seat>| {
            let (copy, place) = (seat.copy(), seat.place());
            // What only this node has is led by it or by nobody.
            let is_mine = place.leader() == Some(me) || place.leader().is_none() && place.is_only_on(me);
            !is_mine || copy.is_some_and(|copy| copy.leading().is_some())
        };
        self.brokers.member(me).is_some()
            && self.topics.all().iter().all(|topic| topic.seats.load().iter().all(is_led))
    }

    /// The broker clients send administrative requests to: where the controller is, though any would do.
    pub(crate) fn controller(&self) -> BrokerId {
        let live = self.live();
        let known = self.brokers.controller().filter(|id| is_live(&live, *id));
        known.map(BrokerId).or(live.first().map(|b| b.id)).unwrap_or(self.options.node_id)
    }

    /// What receives the journal's progress: give it to [`Store::set_sink`].
    pub fn sink(&self) -> Arc<dyn moim_journal::DurableSink> {
        Arc::clone(&self.loops) as Arc<dyn moim_journal::DurableSink>
    }

    /// The address clients are told.
    pub(crate) fn advertised(&self) -> (String, u16) {
        match (&self.options.advertise, self.address.get()) {
            (Some((host, 0)), Some(address)) => (host.clone(), address.port()),
            (Some(advertise), _) => advertise.clone(),
            (None, Some(address)) => (address.ip().to_string(), address.port()),
            (None, None) => (self.options.listen.ip().to_string(), self.options.listen.port()),
        }
    }

    /// Serves one client over any kind of socket until it goes: how tests and the simulator come in without TCP.
    pub async fn serve(self: &Arc<Self>, socket: Box<dyn Socket>, peer: SocketAddr) {
        let wake = Wake::new(0, self.next_connection.fetch_add(1, Ordering::Relaxed));
        connection::serve(Arc::clone(self), socket, wake, peer).await;
    }

    /// Other brokers are reached this way and not by TCP. Before anything is asked of them.
    pub fn reach_peers_by(&self, reach: Arc<dyn Reach>) {
        self.peers.reach_by(reach);
    }

    /// Does on this runtime what the loops and the threads of a server do, but for listening: how the simulator runs it.
    pub fn run_here(self: &Arc<Self>) {
        self.scope.spawn("drain", crate::server::drain(Arc::clone(self), 0));
        crate::housekeeping::spawn_here(self);
    }

    /// Numbers for the admin page.
    pub fn summary(&self) -> Summary {
        let (topics, partitions) = self.topics.counts();
        Summary {
            topics,
            partitions,
            connections: self.connections.load(Ordering::Relaxed),
            groups: self.groups.count(),
        }
    }

    /// Leaves things so that the next start is quick. Called after the loops have ended.
    pub fn close(&self) {
        let housekeeping = lock(&self.housekeeping).take();
        if housekeeping.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("housekeeping panicked");
        }
        for topic in self.topics.all() {
            for copy in topic.copies() {
                copy.snapshot_producers();
            }
        }
    }
}

/// Numbers for the admin page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Topics, internal ones included.
    pub topics: usize,
    /// Partitions, internal ones included.
    pub partitions: usize,
    /// Open connections.
    pub connections: usize,
    /// Consumer groups.
    pub groups: usize,
}
