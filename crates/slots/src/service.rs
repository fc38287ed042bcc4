//! The store of a node: its shards, their records in the cluster, and the serving right.
//!
//! Follows the coordination core on its own thread: the shards' records go to the replica driver and decide which
//! journals are open here; slot map and node addresses become the view for redirections; the fence key is read several
//! times a second to renew the serving right (docs/decisions/0012-serving-right.md).
//!
//! | key | content |
//! |---|---|
//! | `/moim/slots/config` | the number of shards, and their durability |
//! | `/moim/slots/map` | the slot map: the owner of each slot, and the slot migrations |
//! | `/moim/slots/progress/<move>` | the progress of a slot migration |
//! | `/moim/slots/nodes/<node>` | the addresses of the Redis nodes (shard replicas) of that node |
//! | `/moim/partitions/<shards>/<n>` | replicas, in-sync set and leader of shard n |

mod clocks;
mod cluster_bus;
mod growth;
mod metrics;
mod ops;
mod options;
mod report;
mod serving_right;
pub(crate) mod slot_map;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use moim_base::metrics::Metrics;
use moim_base::rest::{aligned, rest};
use moim_base::socket::Socket;
use moim_base::task::{Scope, Shutdown};
use moim_base::{BrokerId, Clock};
use moim_journal::{Durability, DurableSink, JournalId, JournalOptions, PlainFraming, Store};
use moim_replica::controller::Maker;
use moim_replica::keys::{self, SHARDS};
use moim_replica::{Dialler, Driver, PartitionId, PartitionState, ResetPolicy, Versioned};
use moim_state::nodes;
use moim_state::{Compare, Entry, RepositoryError, StateRepository, Txn, TxnOutcome};
use serde::{Deserialize, Serialize};

pub use self::options::Options;
pub use self::report::{MoveReport, MoveStep, Refused, Selection, ShardReport, SlotsReport, Step};
use self::slot_map::SlotMap;
use crate::cluster::{NodeView, ShardView, View};
use crate::error::Error;
use crate::migration::driver;
use crate::migration::export::Exports;
pub use crate::peer::MAGIC as PEER_MAGIC;
use crate::replicated::{ReplicatedLog, ShardReplica};
use crate::server::Server;
use crate::shard::{Role, Shard};
use crate::shared::{Shared, lock};

/// The journal tag of shard 0; shard n has `TAG + n`.
pub const TAG: u64 = 1 << 40;

pub(crate) const MAP: &str = "/moim/slots/map";
const ADDRESSES: &str = "/moim/slots/nodes/";
const SLOTS_ROOT: &str = "/moim/slots/";
pub(crate) const PROGRESS: &str = "/moim/slots/progress/";
/// How long the founders are waited for before the initial shards are created without them.
const FOUNDERS_TIMEOUT_MS: u64 = 10_000;
const RETRY: Duration = Duration::from_millis(100);
/// Without listeners, shard n has this virtual port plus n.
const VIRTUAL_PORT: u16 = 6_379;
/// How long a node that no shard prefers waits for its own shard, before it serves another shard at its home port.
const HOME_TIMEOUT_MS: u64 = 5_000;
/// How often all records are read although no watch fired.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// The components that the store uses.
pub struct Parts {
    /// The journals.
    pub store: Arc<Store>,
    /// The coordination core.
    pub repository: Arc<dyn StateRepository>,
    /// The replica driver.
    pub driver: Arc<Driver>,
    /// Connects to other nodes.
    pub dialler: Arc<dyn Dialler>,
    /// The clocks.
    pub clock: Arc<dyn Clock>,
    /// The metrics registry.
    pub metrics: Arc<Metrics>,
    /// Stops all tasks.
    pub shutdown: Shutdown,
}

/// The record of [`keys::SLOTS_CONFIG`].
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ConfigRecord {
    shards: i32,
    factor_asked: bool,
    durability: String,
    /// Shards with another durability.
    #[serde(default)]
    shard_durability: BTreeMap<u16, String>,
}

impl ConfigRecord {
    /// The durability of a shard: `fsync` or `async`.
    fn durability_of(&self, shard: u16) -> &str {
        self.shard_durability.get(&shard).unwrap_or(&self.durability)
    }
}

/// The record of a node's addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AddressRecord {
    host: String,
    /// The port of each shard.
    ports: BTreeMap<u16, u16>,
}

/// A shard replica on this node.
pub(crate) struct Local {
    pub(crate) shard: Arc<Shard>,
    log: Arc<ReplicatedLog>,
    dropped: Arc<AtomicBool>,
    port: Option<u16>,
}

/// The store of a node.
pub struct Service {
    pub(crate) options: Options,
    pub(crate) parts: Parts,
    pub(crate) shared: Arc<Shared>,
    server: Server,
    pub(crate) locals: Mutex<BTreeMap<u16, Local>>,
    home: Mutex<Home>,
    published: Mutex<AddressRecord>,
    /// The shards' records, as last read.
    pub(crate) records: Mutex<BTreeMap<u16, PartitionState>>,
    serving_right: Mutex<moim_replica::fence::ServingRight>,
    /// The slot map as last read, with its revision.
    map: Mutex<(i64, Arc<SlotMap>)>,
    /// Wakes the migration driver.
    pub(crate) migration_wakeup: tokio::sync::Notify,
    /// The command counter when keys were exported last.
    pub(crate) served_before: AtomicU64,
    /// Migrations that this node imports.
    pub(crate) active_imports: Mutex<BTreeSet<u64>>,
    /// The exports of this node, with their images and retained journals.
    pub(crate) exports: Mutex<Exports>,
    /// When a source was frozen, by shard, migration and attempt.
    pub(crate) frozen_since: Mutex<BTreeMap<(u16, u64, u32), u64>>,
    /// The other live nodes.
    live_peers: Mutex<BTreeSet<i32>>,
    /// Receives connections of other stores.
    streams: std::sync::OnceLock<tokio::sync::mpsc::Sender<std::net::TcpStream>>,
    /// When this node started, on the monotonic clock.
    started_ms: u64,
}

/// The listener of the home shard.
struct Home {
    listener: Option<std::net::TcpListener>,
    address: SocketAddr,
    shard: Option<u16>,
}

impl Service {
    /// Opens the shards that are on disk, before the node announces itself. Blocks.
    pub fn recover(options: Options, parts: Parts, listener: std::net::TcpListener) -> io::Result<Arc<Self>> {
        let shared = Arc::new(Shared::new(Arc::clone(&parts.clock)));
        let server = Server::start(Arc::clone(&shared), options.loops, parts.shutdown.clone())?;
        let address = listener.local_addr()?;
        Self::open_all(options, parts, server, Some(listener), address)
    }

    /// The same on the current runtime, without threads and listeners: connections are given to [`Service::adopt`], and
    /// [`Service::run`] replaces [`Service::serve`].
    pub fn recover_here(options: Options, parts: Parts, scope: Scope) -> io::Result<Arc<Self>> {
        let server = Server::on_current_runtime(Arc::new(Shared::new(Arc::clone(&parts.clock))), scope);
        let address = SocketAddr::new(options.host, VIRTUAL_PORT);
        Self::open_all(options, parts, server, None, address)
    }

    fn open_all(
        options: Options,
        parts: Parts,
        server: Server,
        listener: Option<std::net::TcpListener>,
        address: SocketAddr,
    ) -> io::Result<Arc<Self>> {
        let shared = Arc::clone(server.shared());
        if options.max_memory > 0 {
            shared.settings.fix("maxmemory", options.max_memory.to_string());
        }
        shared.settings.fix("port", address.port().to_string());
        let store = Arc::downgrade(&parts.store);
        let on_rest = move |done| store.upgrade().into_iter().for_each(|store| store.rest(done));
        if !server.is_on_current_runtime() {
            let _ = shared.on_rest.set(Box::new(on_rest));
        }
        let tuning = moim_replica::fence::FenceTuning::default();
        let service = Arc::new(Self {
            shared,
            server,
            locals: Mutex::default(),
            home: Mutex::new(Home { listener, address, shard: None }),
            published: Mutex::default(),
            records: Mutex::default(),
            serving_right: Mutex::new(moim_replica::fence::ServingRight::new(tuning)),
            map: Mutex::default(),
            migration_wakeup: tokio::sync::Notify::new(),
            served_before: AtomicU64::new(0),
            active_imports: Mutex::default(),
            exports: Mutex::default(),
            frozen_since: Mutex::default(),
            live_peers: Mutex::default(),
            streams: std::sync::OnceLock::new(),
            started_ms: parts.clock.monotonic_ms(),
            options,
            parts,
        });
        for (id, _) in service.parts.store.journals() {
            if id.incarnation == SHARDS.0 {
                service.open(id.part as u16)?;
            }
        }
        service.register_metrics();
        Ok(service)
    }

    /// Closes the connections and joins the event loops; give the shutdown signal first. Blocks.
    pub fn stop(&self) {
        self.parts.shutdown.stop();
        self.server.join();
    }

    /// The listener address of the home shard.
    pub fn address(&self) -> SocketAddr {
        lock(&self.home).address
    }

    /// The advertised address of the home shard.
    pub fn advertised(&self) -> String {
        format!("{}:{}", self.advertised_host(), self.advertised_port(self.address().port()))
    }

    fn advertised_host(&self) -> String {
        match self.options.advertise_host.is_empty() {
            true => self.options.host.to_string(),
            false => self.options.advertise_host.clone(),
        }
    }

    fn advertised_port(&self, bound: u16) -> u16 {
        if self.options.advertise_port > 0 { self.options.advertise_port } else { bound }
    }

    /// The state that all shards and clients share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Opens the journal of a shard, attaches it to the replica driver and starts its tasks.
    fn open(&self, index: u16) -> io::Result<()> {
        if lock(&self.locals).contains_key(&index) {
            return Ok(());
        }
        let options = JournalOptions {
            folder: format!("slots/shard-{index}"),
            framing: Arc::new(PlainFraming),
            durability: Durability::Fsync,
            segment_bytes: 64 << 20,
            tag: TAG + u64::from(index),
        };
        let id = JournalId { incarnation: SHARDS.0, part: u32::from(index) };
        let journal = self.parts.store.journal(id, options).map_err(io::Error::other)?;
        // Followers fetch new frames long before a megabyte of them is in the segment; every other reader reads them
        // once. The keys themselves are in memory already.
        journal.set_uncached(true);
        let log = Arc::new(ReplicatedLog::new(Arc::clone(&journal), Arc::clone(&self.parts.store)));
        let id = replica_id(&self.options.cluster_id, self.options.node, index);
        let folder = crate::snapshot::folder(&self.options.data, index);
        let shard = Shard::new(index, id, log.clone(), self.server.loops(), Some(folder));
        shard.set_frame_limits(self.options.frames);
        shard.set_check_interval(self.options.check_interval_ms);
        // The serving right of this node covers every shard: a new one does not wait for the next read of the fence
        // key.
        shard.set_serving_right_until(lock(&self.serving_right).until_ms());
        shard.on_slot_map_read(-1);
        let dropped = Arc::new(AtomicBool::new(false));
        let owner =
            ShardReplica::new(Arc::clone(&shard), Arc::clone(&self.parts.clock), Arc::clone(&dropped));
        let local = Local { shard: Arc::clone(&shard), log: Arc::clone(&log), dropped, port: None };
        lock(&self.locals).insert(index, local);
        let partition = PartitionId { topic: SHARDS, index: u32::from(index) };
        let replica = self.parts.driver.attach(
            partition,
            journal,
            ResetPolicy::InstallSnapshot,
            moim_replica::Durability::Fsync,
            Arc::new(owner),
        );
        log.attach(replica);
        self.server.run_shard(&shard)
    }

    /// Accepts a connection of another node's store; it begins with [`PEER_MAGIC`] and is non-blocking.
    pub fn take_stream(&self, stream: std::net::TcpStream) {
        let taken = self.streams.get().is_some_and(|streams| streams.try_send(stream).is_ok());
        if !taken {
            tracing::debug!("peer connection refused: store not started");
        }
    }

    /// The slot map as last read.
    pub(crate) fn map(&self) -> Arc<SlotMap> {
        Arc::clone(&lock(&self.map).1)
    }

    /// Runs [`Service::run`] on its own thread until the shutdown.
    pub fn serve(self: &Arc<Self>) -> io::Result<()> {
        let service = Arc::clone(self);
        std::thread::Builder::new().name("moim-slots".to_owned()).spawn(move || {
            let runtime = aligned(tokio::runtime::Builder::new_current_thread().enable_all());
            match runtime {
                Ok(runtime) => runtime.block_on(service.run()),
                Err(error) => {
                    tracing::error!(%error, "store runtime failed to start");
                    service.parts.shutdown.stop();
                }
            }
        })?;
        Ok(())
    }

    /// Serves a client without a listener, if the shard is on this node.
    pub fn adopt(&self, shard: u16, socket: Box<dyn Socket>) {
        let shard = lock(&self.locals).get(&shard).map(|local| Arc::clone(&local.shard));
        if let Some(shard) = shard {
            self.server.adopt(&shard, socket);
        }
    }

    /// Follows the cluster until the shutdown.
    pub async fn run(self: Arc<Self>) {
        let scope = Scope::new(self.parts.shutdown.clone());
        scope.spawn("slots-serving-right", serving_right::keep(Arc::clone(&self)));
        let (sender, receiver) = tokio::sync::mpsc::channel(1024);
        let _ = self.shared.ops.set(sender);
        scope.spawn("slots-ops", ops::run(Arc::clone(&self), receiver, scope.clone()));
        let (sender, receiver) = tokio::sync::mpsc::channel(4096);
        let _ = self.shared.pubsub.cluster_sender.set(sender);
        scope.spawn("slots-publish", cluster_bus::run(Arc::clone(&self), receiver, scope.clone()));
        let (sender, receiver) = tokio::sync::mpsc::channel(64);
        let _ = self.streams.set(sender);
        scope.spawn("slots-peers", cluster_bus::accept(Arc::clone(&self), receiver, scope.clone()));
        self.shared.time_agreed_until_ns.store(0, Ordering::Release);
        scope.spawn("slots-clocks", clocks::run(Arc::clone(&self)));
        scope.spawn("slots-migration", driver::run(Arc::clone(&self), scope.clone()));
        let shutdown = self.parts.shutdown.clone();
        tokio::select! {
            biased;
            () = shutdown.stopped() => {}
            () = self.follow() => {}
        }
    }

    /// Reads all records whenever a watch fires, and every [`REFRESH_INTERVAL`].
    async fn follow(&self) {
        let began = self.parts.clock.monotonic_ms();
        loop {
            let prefix = shard_records_prefix();
            let watches = tokio::try_join!(
                self.parts.repository.watch(&prefix, 0),
                self.parts.repository.watch(SLOTS_ROOT, 0),
                self.parts.repository.watch(keys::MEMBERS, 0),
            );
            let (mut shards, mut slots, mut members) = match watches {
                Ok(watches) => watches,
                Err(error) => {
                    tracing::debug!(%error, "shard records: watch failed");
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            loop {
                let pause = match self.refresh(began).await {
                    Ok(true) => REFRESH_INTERVAL,
                    Ok(false) => RETRY,
                    Err(error) => {
                        tracing::debug!(%error, "shard records: read failed");
                        RETRY
                    }
                };
                let more = tokio::select! {
                    biased;
                    event = shards.next() => matches!(event, Some(Ok(_))),
                    event = slots.next() => matches!(event, Some(Ok(_))),
                    event = members.next() => matches!(event, Some(Ok(_))),
                    () = self.shared.refresh_wakeup.notified() => true,
                    () = rest(pause) => true,
                };
                if !more {
                    break;
                }
            }
        }
    }

    /// Reads all records and acts on them. Returns whether there are shards at all.
    pub(crate) async fn refresh(&self, began: u64) -> Result<bool, RepositoryError> {
        self.read_records().await?;
        // Leader epochs first: a leader in this list leads before the slot map is read.
        let leads: Vec<(Arc<Shard>, Option<i32>)> = lock(&self.locals)
            .values()
            .map(|local| (Arc::clone(&local.shard), local.shard.log.leader_epoch()))
            .collect();
        let (revision, slots) = self.parts.repository.list(SLOTS_ROOT).await?;
        let Some(config) = slots.iter().find(|entry| entry.key == keys::SLOTS_CONFIG) else {
            self.create_initial_shards(began).await?;
            return Ok(false);
        };
        let (_, members) = nodes::members(self.parts.repository.as_ref()).await?;
        let up: Vec<i32> = members.iter().map(|live| live.record.node_id).collect();
        *lock(&self.live_peers) = up.iter().copied().filter(|node| *node != self.options.node.0).collect();
        self.choose_home(members.len());
        self.open_listeners();
        self.publish().await?;
        self.follow_durability(&config.value);
        self.update_view(revision, &slots, &up, &leads);
        self.delete_removed_replicas();
        self.grow(&slots, &members).await?;
        Ok(true)
    }

    /// Installs a newer view and slot map; an older revision than the current one changes nothing.
    fn update_view(&self, revision: i64, slots: &[Entry], up: &[i32], leads: &[(Arc<Shard>, Option<i32>)]) {
        let map = slots.iter().find(|entry| entry.key == MAP);
        let map = map.and_then(|entry| SlotMap::decode(&entry.value)).unwrap_or_default();
        {
            let mut known = lock(&self.map);
            if revision < known.0 {
                return;
            }
            let view = self.view(&map, slots, up);
            if *known.1 != map {
                self.migration_wakeup.notify_one();
            }
            driver::mark_migrating(leads, &map);
            *known = (revision, Arc::new(map));
            let has_changed = **self.shared.view.load() != view;
            self.shared.view.store(Arc::new(view));
            if !has_changed
                && leads.iter().all(|(shard, lead)| lead.is_none_or(|lead| shard.has_read_slot_map(lead)))
            {
                return;
            }
        }
        for (shard, lead) in leads {
            if let Some(lead) = lead {
                shard.on_slot_map_read(*lead);
            }
            self.redirect_waiting_clients(shard);
        }
        self.migration_wakeup.notify_one();
    }

    /// Retries held commands; redirects clients that are blocked on keys, or subscribed to sharded channels, of slots
    /// that have left.
    fn redirect_waiting_clients(&self, shard: &Arc<Shard>) {
        let view = self.shared.view.load_full();
        let me = shard.index;
        let moved = |key: &[u8]| {
            let slot = crate::slot_of(key);
            let owner = view.owner(slot)?;
            let comes = view.moving.iter().any(|(moving, _, to)| *moving == slot && *to == me);
            let to = view.primary(owner).filter(|_| owner != me && !comes)?;
            Some(Error::coded(format!("MOVED {slot} {}:{}", to.host, to.port)))
        };
        // Skipped while a script holds the lock; the next refresh does it then.
        if shard.role() == Role::Primary
            && let Some(mut state) = shard.lock_soon()
        {
            state.held_connections.wake();
            state.redirect_blocked(moved);
        }
        self.shared.pubsub.unsubscribe_slots(me, |channel| moved(channel).is_some());
    }

    /// Follows the durability in the cluster's record.
    fn follow_durability(&self, config: &[u8]) {
        let Ok(config) = serde_json::from_slice::<ConfigRecord>(config) else { return };
        for (index, local) in lock(&self.locals).iter() {
            local.shard.is_async.store(config.durability_of(*index) == "async", Ordering::Release);
        }
    }

    /// Reads the shards' records and hands them to the replica driver. Returns their revision.
    pub(crate) async fn read_records(&self) -> Result<i64, RepositoryError> {
        let (revision, entries) = self.parts.repository.list(&shard_records_prefix()).await?;
        let mut records = BTreeMap::new();
        for entry in &entries {
            let Some(id) = keys::parse_partition(&entry.key) else { continue };
            let Ok(state) = PartitionState::decode(&entry.value) else {
                tracing::error!(key = entry.key, "undecodable shard record");
                continue;
            };
            let index = id.index as u16;
            records.insert(index, state.clone());
            if state.replicas.contains(&self.options.node) {
                if let Err(error) = self.open(index) {
                    tracing::error!(shard = index, %error, "shard open failed");
                    continue;
                }
                self.note_leader_epoch(index, &state);
            }
            self.parts.driver.on_record(id, Versioned { revision: entry.mod_revision, value: state });
        }
        *lock(&self.records) = records;
        Ok(revision)
    }

    /// A new primary need not wait for the serving right if no other node can hold it.
    fn note_leader_epoch(&self, index: u16, state: &PartitionState) {
        let is_free = state.replicas == [self.options.node] || state.follows_a_release();
        if let Some(local) = lock(&self.locals).get(&index) {
            local.shard.on_epoch(state.leader_epoch.0, is_free);
        }
    }

    /// Creates the initial shards, one per founder, once the founders are up.
    async fn create_initial_shards(&self, began: u64) -> Result<(), RepositoryError> {
        let repository = self.parts.repository.as_ref();
        let (_, members) = nodes::members(repository).await?;
        let waited = self.parts.clock.monotonic_ms() - began;
        if members.is_empty() || members.len() < self.options.founders && waited < FOUNDERS_TIMEOUT_MS {
            return Ok(());
        }
        let (_, all) = nodes::nodes(repository).await?;
        let orders = growth::orders(repository).await?;
        let mut maker = Maker::new(&all, &members, &orders);
        let shards = self.options.founders.clamp(1, growth::MOST);
        let config = ConfigRecord {
            shards: shards as i32,
            factor_asked: false,
            durability: "fsync".into(),
            shard_durability: BTreeMap::new(),
        };
        let mut txn = Txn::new()
            .when(Compare::Absent(keys::SLOTS_CONFIG.to_owned()))
            .put(keys::SLOTS_CONFIG, serde_json::to_vec(&config).expect("plain data encodes as JSON"))
            .put(MAP, SlotMap::even(shards as u16).encode());
        let mut alive = Vec::new();
        for index in 0..shards as u32 {
            let id = PartitionId { topic: SHARDS, index };
            let replicas = maker.place(maker.default_factor());
            let Some(change) = maker.create(id, replicas, None, moim_replica::Durability::Fsync) else {
                return Ok(());
            };
            alive.extend(change.members.iter().copied());
            if let Some(state) = &change.next {
                txn = txn.put(keys::partition(id), state.encode());
            }
        }
        alive.sort_unstable();
        alive.dedup();
        for (node, epoch) in alive {
            txn = txn.when(Compare::CreateRevision(keys::member(node), epoch.0));
        }
        if let TxnOutcome::Done { .. } = repository.txn(txn).await? {
            tracing::info!(shards, "initial shards created");
        }
        Ok(())
    }

    /// The home shard is the one that prefers this node as its primary, else any on this node. It stays the same until
    /// a restart.
    fn choose_home(&self, members: usize) {
        let mut home = lock(&self.home);
        if home.shard.is_some() {
            return;
        }
        let records = lock(&self.records);
        let me = self.options.node;
        let preferred = records.iter().find(|(_, state)| state.replicas.first() == Some(&me));
        // A node that has just joined gets its own shard in a moment.
        let waits = records.len() < members.min(growth::MOST)
            && self.parts.clock.monotonic_ms() < self.started_ms + HOME_TIMEOUT_MS;
        let any = || records.iter().find(|(_, state)| !waits && state.replicas.contains(&me));
        home.shard = preferred.or_else(any).map(|(index, _)| *index);
    }

    fn open_listeners(&self) {
        let mut home = lock(&self.home);
        for (index, local) in lock(&self.locals).iter_mut() {
            // The home port is not bound to another shard before the home shard is known.
            if local.port.is_some() || home.shard.is_none() {
                continue;
            }
            if self.server.is_on_current_runtime() {
                local.port = Some(VIRTUAL_PORT + *index);
                continue;
            }
            let listener =
                if home.shard == Some(*index) { home.listener.take() } else { self.bind_replica(*index) };
            let Some(listener) = listener else { continue };
            let port = listener.local_addr().map(|address| address.port());
            match port.and_then(|port| self.server.listen(&local.shard, listener).map(|()| port)) {
                Ok(port) => local.port = Some(port),
                Err(error) => tracing::error!(shard = *index, %error, "shard listener failed"),
            }
        }
    }

    /// A listener for a shard that is not the home shard: at its own port of the range, or at any other.
    fn bind_replica(&self, index: u16) -> Option<std::net::TcpListener> {
        let (first, last) = (*self.options.replica_ports.start(), *self.options.replica_ports.end());
        let own = if first == 0 { 0 } else { first.saturating_add(index) };
        let mut candidates: Vec<u16> = Vec::new();
        if own <= last || first == 0 {
            candidates.push(own);
        }
        candidates.extend((first..=last).filter(|port| *port != own && first != 0));
        let found =
            candidates.iter().find_map(|port| Server::bind(SocketAddr::new(self.options.host, *port)).ok());
        if found.is_none() {
            tracing::error!(
                shard = index,
                first,
                last,
                "shard listener failed: no free port in redis.replica_ports"
            );
        }
        found
    }

    /// Publishes the addresses of this node's shard replicas.
    async fn publish(&self) -> Result<(), RepositoryError> {
        let home = lock(&self.home).shard;
        let port = |(index, local): (&u16, &Local)| {
            let bound = local.port?;
            Some((*index, if home == Some(*index) { self.advertised_port(bound) } else { bound }))
        };
        let ports: BTreeMap<u16, u16> = lock(&self.locals).iter().filter_map(port).collect();
        let record = AddressRecord { host: self.advertised_host(), ports };
        if *lock(&self.published) == record {
            return Ok(());
        }
        let bytes = serde_json::to_vec(&record).expect("plain data encodes as JSON");
        let key = format!("{ADDRESSES}{}", self.options.node);
        self.parts.repository.txn(Txn::new().put(key, bytes)).await?;
        *lock(&self.published) = record;
        Ok(())
    }

    /// Builds the view for redirections and the CLUSTER commands.
    fn view(&self, map: &SlotMap, slots: &[Entry], up: &[i32]) -> View {
        let mut addresses: BTreeMap<i32, AddressRecord> = BTreeMap::new();
        for entry in slots {
            if let Some(node) = entry.key.strip_prefix(ADDRESSES).and_then(|node| node.parse().ok())
                && let Ok(record) = serde_json::from_slice(&entry.value)
            {
                addresses.insert(node, record);
            }
        }
        let records = lock(&self.records);
        let count = records.keys().last().map_or(0, |last| usize::from(*last) + 1);
        let shards = (0..count as u16)
            .map(|index| {
                let Some(state) = records.get(&index) else { return ShardView::default() };
                let node = |id: &BrokerId| {
                    let address = addresses.get(&id.0)?;
                    Some(NodeView {
                        id: replica_id(&self.options.cluster_id, *id, index),
                        host: address.host.clone(),
                        port: *address.ports.get(&index)?,
                        is_up: up.contains(&id.0),
                    })
                };
                let leader = state.leader.as_ref().and_then(node);
                let has_primary = leader.is_some();
                let others = state.replicas.iter().filter(|id| state.leader != Some(**id)).filter_map(node);
                let gained = map.gained.get(&index).copied().unwrap_or(0);
                let epoch = u64::try_from(state.leader_epoch.0).unwrap_or(0) + 1 + gained;
                ShardView { nodes: leader.into_iter().chain(others).collect(), has_primary, epoch }
            })
            .collect::<Vec<_>>();
        let epoch = map.epoch.max(shards.iter().map(|shard| shard.epoch).max().unwrap_or(1));
        View { owners: map.owners(), shards, epoch, moving: map.moving.clone(), map_epoch: map.epoch }
    }

    /// Deletes the replicas that were removed from their shard.
    fn delete_removed_replicas(&self) {
        // Without the lock: deleting waits for the disk, and the journal's sink takes the lock to report progress.
        let gone: Vec<u16> = lock(&self.locals)
            .iter()
            .filter(|(_, local)| local.dropped.load(Ordering::Acquire))
            .map(|(index, _)| *index)
            .collect();
        for index in gone {
            tracing::info!(shard = index, "shard replica removed from this node");
            self.parts.driver.detach(PartitionId { topic: SHARDS, index: u32::from(index) });
            let id = JournalId { incarnation: SHARDS.0, part: u32::from(index) };
            if let Err(error) = self.parts.store.delete(id) {
                tracing::warn!(shard = index, %error, "shard journal not deleted");
            }
            let local = lock(&self.locals).remove(&index);
            if let Some(local) = local {
                self.close_shard(&local.shard);
            }
        }
    }

    /// A shard has left this node: disconnects its clients, stops its tasks and deletes its snapshots.
    fn close_shard(&self, shard: &Shard) {
        shard.set_role(Role::Loading);
        shard.removed.stop();
        shard.void_pending_replies();
        if let Some(folder) = shard.folder()
            && let Err(error) = std::fs::remove_dir_all(folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(shard = shard.index, %error, "shard snapshots not deleted");
        }
    }

    /// Waits until every shard on this node serves, or until the timeout.
    pub async fn settle(&self, timeout: Duration) {
        let deadline = tokio::time::Instant::now() + timeout;
        while tokio::time::Instant::now() < deadline {
            let has_view = !self.shared.view.load().shards.is_empty();
            let clock = self.parts.clock.as_ref();
            let serves = |local: &Local| match local.shard.role() {
                Role::Loading => false,
                Role::Replica => true,
                Role::Primary => local.shard.holds_serving_right(clock),
            };
            let locals = lock(&self.locals).values().all(|local| serves(local) && local.port.is_some());
            if has_view && locals {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tracing::warn!("not all shards of this node serve yet");
    }

    /// The sink that the journals report durable ends to: (tag, durable end).
    pub fn sink(self: &Arc<Self>) -> Arc<dyn DurableSink> {
        Arc::new(Sink(Arc::clone(self)))
    }
}

struct Sink(Arc<Service>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        for (tag, _) in advanced.iter().filter(|(tag, _)| (TAG..TAG + (1 << 16)).contains(tag)) {
            let log = lock(&self.0.locals).get(&((tag - TAG) as u16)).map(|local| Arc::clone(&local.log));
            if let Some(replica) = log.as_ref().and_then(|log| log.replica()) {
                replica.on_durable();
            }
        }
    }
}

fn shard_records_prefix() -> String {
    let first = keys::partition(PartitionId { topic: SHARDS, index: 0 });
    first.trim_end_matches('0').to_owned()
}

/// The node id of a shard replica: the same after every restart.
fn replica_id(cluster: &str, node: BrokerId, shard: u16) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in cluster.bytes().chain(node.0.to_le_bytes()).chain(shard.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    let mut more = hash;
    let mut text = String::new();
    while text.len() < 24 {
        more ^= more >> 33;
        more = more.wrapping_mul(0xff51_afd7_ed55_8ccd);
        more ^= more >> 33;
        text.push_str(&format!("{more:016x}"));
    }
    text.truncate(24);
    format!("{text}{:08x}{shard:08x}", node.0)
}
