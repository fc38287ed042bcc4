//! The store of a node: which shards it holds, what the cluster knows of them, and the right to answer for them.
//!
//! Follows the coordination core on a thread of its own: the shards' records go to the replica driver and decide which
//! journals are open here, the slot map and everybody's addresses make the view that redirections answer from, and one
//! key is read several times a second to keep the right to answer (docs/decisions/0012-serving-right.md).
//!
//! | key | says |
//! |---|---|
//! | `/moim/slots/config` | how many shards there are, and what they promise |
//! | `/moim/slots/map` | which shard owns which slot, and the moves of slots |
//! | `/moim/slots/progress/<move>` | how far a move is |
//! | `/moim/slots/nodes/<node>` | where clients reach the replicas of that node |
//! | `/moim/partitions/<shards>/<n>` | who holds shard n, and who leads it |

mod clocks;
mod give;
mod growth;
mod map;
mod metrics;
mod moves;
mod ops;
mod options;
mod pace;
mod report;
mod right;
mod take;
mod tell;

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
use moim_cluster::nodes;
use moim_cluster::{Compare, Entry, RepositoryError, StateRepository, Txn, TxnOutcome};
use moim_journal::{Durability, DurableSink, JournalId, JournalOptions, PlainFraming, Store};
use moim_replica::controller::Maker;
use moim_replica::keys::{self, SHARDS};
use moim_replica::{Dialler, Driver, PartitionId, PartitionState, ResetPolicy, Versioned};
use serde::{Deserialize, Serialize};

use self::map::SlotMap;
pub use self::options::Options;
pub use self::report::{MoveReport, MoveStep, Refused, Selection, ShardReport, SlotsReport, Step};
use crate::cluster::{NodeView, ShardView, View};
use crate::error::Error;
pub use crate::peer::MAGIC as PEER_MAGIC;
use crate::replicated::{Copy, ReplicatedLog};
use crate::server::Server;
use crate::shard::{Role, Shard};
use crate::shared::{Shared, lock};

/// Tags of shards' journals count from here.
pub const TAG: u64 = 1 << 40;

const MAP: &str = "/moim/slots/map";
const ADDRESSES: &str = "/moim/slots/nodes/";
const SLOTS_ROOT: &str = "/moim/slots/";
const PROGRESS: &str = "/moim/slots/progress/";
/// How long a founder waits for the others before it makes the shards without them.
const FOUNDERS_MS: u64 = 10_000;
const RETRY: Duration = Duration::from_millis(100);
/// Where nobody listens, shards are told apart by ports from here on.
const HERE_PORT: u16 = 6_379;
/// How long a node that is no shard's first choice waits to become one, before it serves another at its home port.
const HOME_MS: u64 = 5_000;
/// How often everything is read although nothing was heard.
const LOOK: Duration = Duration::from_secs(2);

/// What the store stands on.
pub struct Parts {
    /// The journals.
    pub store: Arc<Store>,
    /// The coordination core.
    pub repository: Arc<dyn StateRepository>,
    /// Runs the copies.
    pub driver: Arc<Driver>,
    /// Connects to other nodes.
    pub dialler: Arc<dyn Dialler>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Where counters are registered.
    pub metrics: Arc<Metrics>,
    /// Ends everything.
    pub shutdown: Shutdown,
}

/// The record of [`keys::SLOTS_CONFIG`].
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ConfigRecord {
    shards: i32,
    factor_asked: bool,
    durability: String,
    /// Shards that promise something else.
    #[serde(default)]
    shard_durability: BTreeMap<u16, String>,
}

impl ConfigRecord {
    /// What the answers of a shard promise: `fsync` or `async`.
    fn durability_of(&self, shard: u16) -> &str {
        self.shard_durability.get(&shard).unwrap_or(&self.durability)
    }
}

/// The record of a node's addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AddressRecord {
    host: String,
    /// By shard.
    ports: BTreeMap<u16, u16>,
}

/// A shard that is here.
struct Local {
    shard: Arc<Shard>,
    log: Arc<ReplicatedLog>,
    dropped: Arc<AtomicBool>,
    port: Option<u16>,
}

/// The store of a node.
pub struct Service {
    options: Options,
    parts: Parts,
    shared: Arc<Shared>,
    server: Server,
    locals: Mutex<BTreeMap<u16, Local>>,
    home: Mutex<Home>,
    published: Mutex<AddressRecord>,
    /// Records of shards, as last read.
    records: Mutex<BTreeMap<u16, PartitionState>>,
    right: Mutex<moim_replica::fence::ServingRight>,
    /// The slot map as last read, and at which revision.
    map: Mutex<(i64, Arc<SlotMap>)>,
    /// Wakes whoever sees to moves.
    moved: tokio::sync::Notify,
    /// Commands that had been run when keys were given last.
    served_before: AtomicU64,
    /// Moves whose keys this node takes in.
    at_work: Mutex<BTreeSet<u64>>,
    /// By source: the move that an image and the journal are kept for.
    giving: Mutex<give::Giving>,
    /// Since when a source waits for its target: by shard, move and attempt.
    frozen_since: Mutex<BTreeMap<(u16, u64, u32), u64>>,
    /// The other nodes that run.
    others: Mutex<BTreeSet<i32>>,
    /// Where connections of other stores go.
    streams: std::sync::OnceLock<tokio::sync::mpsc::Sender<std::net::TcpStream>>,
    /// When this node began, on the monotonic clock.
    began_ms: u64,
}

/// The listener of the home shard, and whose it is.
struct Home {
    listener: Option<std::net::TcpListener>,
    address: SocketAddr,
    shard: Option<u16>,
}

impl Service {
    /// Opens the shards that are on disk, before the node says that it is there. Blocks.
    pub fn recover(options: Options, parts: Parts, listener: std::net::TcpListener) -> io::Result<Arc<Self>> {
        let shared = Arc::new(Shared::new(Arc::clone(&parts.clock)));
        let server = Server::start(Arc::clone(&shared), options.loops, parts.shutdown.clone())?;
        let address = listener.local_addr()?;
        Self::open_all(options, parts, server, Some(listener), address)
    }

    /// The same on the runtime that calls, without threads and listeners: clients come by [`Service::adopt`], and what
    /// [`Service::serve`] starts is [`Service::run`].
    pub fn recover_here(options: Options, parts: Parts, scope: Scope) -> io::Result<Arc<Self>> {
        let server = Server::here(Arc::new(Shared::new(Arc::clone(&parts.clock))), scope);
        let address = SocketAddr::new(options.host, HERE_PORT);
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
        if !server.is_here() {
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
            right: Mutex::new(moim_replica::fence::ServingRight::new(tuning)),
            map: Mutex::default(),
            moved: tokio::sync::Notify::new(),
            served_before: AtomicU64::new(0),
            at_work: Mutex::default(),
            giving: Mutex::default(),
            frozen_since: Mutex::default(),
            others: Mutex::default(),
            streams: std::sync::OnceLock::new(),
            began_ms: parts.clock.monotonic_ms(),
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

    /// Ends the connections and the loops; give the shutdown signal first. Blocks.
    pub fn stop(&self) {
        self.parts.shutdown.stop();
        self.server.join();
    }

    /// Where the home shard is served.
    pub fn address(&self) -> SocketAddr {
        lock(&self.home).address
    }

    /// What clients are told for it.
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

    /// What all parts of the store share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Opens the journal of a shard, puts it under the driver and keeps it.
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
        // Its followers have what is new long before a megabyte of it is in the segment; everybody else reads it once. The keys
        // themselves are in memory already.
        journal.set_fleeting(true);
        let log = Arc::new(ReplicatedLog::new(Arc::clone(&journal), Arc::clone(&self.parts.store)));
        let id = replica_id(&self.options.cluster_id, self.options.node, index);
        let folder = crate::snapshot::folder(&self.options.data, index);
        let shard = Shard::new(index, id, log.clone(), self.server.loops(), Some(folder));
        shard.set_frame_limits(self.options.frames);
        shard.set_check_interval(self.options.check_interval_ms);
        // The right that this node has is every shard's: a new one does not wait for the next reading of the fence.
        shard.set_right(lock(&self.right).until_ms());
        shard.set_viewed(-1);
        let dropped = Arc::new(AtomicBool::new(false));
        let owner = Copy::new(Arc::clone(&shard), Arc::clone(&self.parts.clock), Arc::clone(&dropped));
        let local = Local { shard: Arc::clone(&shard), log: Arc::clone(&log), dropped, port: None };
        lock(&self.locals).insert(index, local);
        let partition = PartitionId { topic: SHARDS, index: u32::from(index) };
        let copy = self.parts.driver.attach(
            partition,
            journal,
            ResetPolicy::InstallSnapshot,
            moim_replica::Durability::Fsync,
            Arc::new(owner),
        );
        log.attach(copy);
        self.server.keep(&shard)
    }

    /// Takes a connection of another node's store; it begins with [`PEER_MAGIC`] and does not block.
    pub fn take_stream(&self, stream: std::net::TcpStream) {
        let taken = self.streams.get().is_some_and(|streams| streams.try_send(stream).is_ok());
        if !taken {
            tracing::debug!("a connection of another store came too early");
        }
    }

    /// The slot map as last read.
    fn map(&self) -> Arc<SlotMap> {
        Arc::clone(&lock(&self.map).1)
    }

    /// Follows the cluster, on a thread of its own, until the shutdown.
    pub fn serve(self: &Arc<Self>) -> io::Result<()> {
        let service = Arc::clone(self);
        std::thread::Builder::new().name("moim-slots".to_owned()).spawn(move || {
            let runtime = aligned(tokio::runtime::Builder::new_current_thread().enable_all());
            match runtime {
                Ok(runtime) => runtime.block_on(service.run()),
                Err(error) => {
                    tracing::error!(%error, "cannot start a runtime");
                    service.parts.shutdown.stop();
                }
            }
        })?;
        Ok(())
    }

    /// Serves a client that came by no listener, if the shard is here.
    pub fn adopt(&self, shard: u16, socket: Box<dyn Socket>) {
        let shard = lock(&self.locals).get(&shard).map(|local| Arc::clone(&local.shard));
        if let Some(shard) = shard {
            self.server.adopt(&shard, socket);
        }
    }

    /// Follows the cluster until the shutdown.
    pub async fn run(self: Arc<Self>) {
        let scope = Scope::new(self.parts.shutdown.clone());
        scope.spawn("slots-right", right::keep(Arc::clone(&self)));
        let (sender, receiver) = tokio::sync::mpsc::channel(1024);
        let _ = self.shared.ops.set(sender);
        scope.spawn("slots-ops", ops::run(Arc::clone(&self), receiver, scope.clone()));
        let (sender, receiver) = tokio::sync::mpsc::channel(4096);
        let _ = self.shared.pubsub.told.set(sender);
        scope.spawn("slots-told", tell::run(Arc::clone(&self), receiver, scope.clone()));
        let (sender, receiver) = tokio::sync::mpsc::channel(64);
        let _ = self.streams.set(sender);
        scope.spawn("slots-peers", tell::accept(Arc::clone(&self), receiver, scope.clone()));
        self.shared.time_agreed_until_ns.store(0, Ordering::Release);
        scope.spawn("slots-clocks", clocks::run(Arc::clone(&self)));
        scope.spawn("slots-moves", moves::run(Arc::clone(&self), scope.clone()));
        let shutdown = self.parts.shutdown.clone();
        tokio::select! {
            biased;
            () = shutdown.stopped() => {}
            () = self.follow() => {}
        }
    }

    /// Reads what the cluster says, again and again: when something changed, and now and then.
    async fn follow(&self) {
        let began = self.parts.clock.monotonic_ms();
        loop {
            let prefix = shards_prefix();
            let watches = tokio::try_join!(
                self.parts.repository.watch(&prefix, 0),
                self.parts.repository.watch(SLOTS_ROOT, 0),
                self.parts.repository.watch(keys::MEMBERS, 0),
            );
            let (mut shards, mut slots, mut members) = match watches {
                Ok(watches) => watches,
                Err(error) => {
                    tracing::debug!(%error, "the shards cannot be watched");
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
            };
            loop {
                let pause = match self.refresh(began).await {
                    Ok(true) => LOOK,
                    Ok(false) => RETRY,
                    Err(error) => {
                        tracing::debug!(%error, "the shards' records cannot be read");
                        RETRY
                    }
                };
                let more = tokio::select! {
                    biased;
                    event = shards.next() => matches!(event, Some(Ok(_))),
                    event = slots.next() => matches!(event, Some(Ok(_))),
                    event = members.next() => matches!(event, Some(Ok(_))),
                    () = self.shared.look.notified() => true,
                    () = rest(pause) => true,
                };
                if !more {
                    break;
                }
            }
        }
    }

    /// Acts on everything the cluster says. Answers whether there are shards at all.
    pub(crate) async fn refresh(&self, began: u64) -> Result<bool, RepositoryError> {
        self.read_records().await?;
        // Who leads by now leads before the map is read.
        let leads: Vec<(Arc<Shard>, Option<i32>)> = lock(&self.locals)
            .values()
            .map(|local| (Arc::clone(&local.shard), local.shard.log.leads()))
            .collect();
        let (revision, slots) = self.parts.repository.list(SLOTS_ROOT).await?;
        let Some(config) = slots.iter().find(|entry| entry.key == keys::SLOTS_CONFIG) else {
            self.found(began).await?;
            return Ok(false);
        };
        let (_, members) = nodes::members(self.parts.repository.as_ref()).await?;
        let up: Vec<i32> = members.iter().map(|live| live.record.node_id).collect();
        *lock(&self.others) = up.iter().copied().filter(|node| *node != self.options.node.0).collect();
        self.choose_home(members.len());
        self.open_listeners();
        self.publish().await?;
        self.follow_durability(&config.value);
        self.show(revision, &slots, &up, &leads);
        self.drop_strangers();
        self.grow(&slots, &members).await?;
        Ok(true)
    }

    /// Goes by a newer view from now on; an older one than there is changes nothing.
    fn show(&self, revision: i64, slots: &[Entry], up: &[i32], leads: &[(Arc<Shard>, Option<i32>)]) {
        let map = slots.iter().find(|entry| entry.key == MAP);
        let map = map.and_then(|entry| SlotMap::decode(&entry.value)).unwrap_or_default();
        {
            let mut known = lock(&self.map);
            if revision < known.0 {
                return;
            }
            let view = self.view(&map, slots, up);
            if *known.1 != map {
                self.moved.notify_one();
            }
            moves::mark(leads, &map);
            *known = (revision, Arc::new(map));
            let has_changed = **self.shared.view.load() != view;
            self.shared.view.store(Arc::new(view));
            if !has_changed
                && leads.iter().all(|(shard, lead)| lead.is_none_or(|lead| shard.has_viewed(lead)))
            {
                return;
            }
        }
        for (shard, lead) in leads {
            if let Some(lead) = lead {
                shard.set_viewed(*lead);
            }
            self.redirect(shard);
        }
        self.moved.notify_one();
    }

    /// Clients that wait for a slot try again; those that block on keys which have left hear where they went, and so do those
    /// that listen to their channels.
    fn redirect(&self, shard: &Arc<Shard>) {
        let view = self.shared.view.load_full();
        let me = shard.index;
        let moved = |key: &[u8]| {
            let slot = crate::slot_of(key);
            let owner = view.owner(slot)?;
            let comes = view.moving.iter().any(|(moving, _, to)| *moving == slot && *to == me);
            let to = view.primary(owner).filter(|_| owner != me && !comes)?;
            Some(Error::coded(format!("MOVED {slot} {}:{}", to.host, to.port)))
        };
        // Not while a script has the shard; the next look at the map does it then.
        if shard.role() == Role::Primary
            && let Some(mut state) = shard.lock_soon()
        {
            state.parked.wake();
            state.redirect_blocked(moved);
        }
        self.shared.pubsub.leave_slots(me, |channel| moved(channel).is_some());
    }

    /// What answers promise, as the cluster's record says.
    fn follow_durability(&self, config: &[u8]) {
        let Ok(config) = serde_json::from_slice::<ConfigRecord>(config) else { return };
        for (index, local) in lock(&self.locals).iter() {
            local.shard.is_async.store(config.durability_of(*index) == "async", Ordering::Release);
        }
    }

    /// Reads the shards' records and hands them to the driver. Gives the revision they were read at.
    pub(crate) async fn read_records(&self) -> Result<i64, RepositoryError> {
        let (revision, entries) = self.parts.repository.list(&shards_prefix()).await?;
        let mut records = BTreeMap::new();
        for entry in &entries {
            let Some(id) = keys::parse_partition(&entry.key) else { continue };
            let Ok(state) = PartitionState::decode(&entry.value) else {
                tracing::error!(key = entry.key, "a shard's record is not understood");
                continue;
            };
            let index = id.index as u16;
            records.insert(index, state.clone());
            if state.replicas.contains(&self.options.node) {
                if let Err(error) = self.open(index) {
                    tracing::error!(shard = index, %error, "a shard cannot be opened");
                    continue;
                }
                self.note_takeover(index, &state);
            }
            self.parts.driver.on_record(id, Versioned { revision: entry.mod_revision, value: state });
        }
        *lock(&self.records) = records;
        Ok(revision)
    }

    /// A new primary need not wait where nobody else can have led.
    fn note_takeover(&self, index: u16, state: &PartitionState) {
        let is_free = state.replicas == [self.options.node] || state.follows_a_release();
        if let Some(local) = lock(&self.locals).get(&index) {
            local.shard.on_epoch(state.leader_epoch.0, is_free);
        }
    }

    /// Makes the shards, once the founders are there: one for each.
    async fn found(&self, began: u64) -> Result<(), RepositoryError> {
        let repository = self.parts.repository.as_ref();
        let (_, members) = nodes::members(repository).await?;
        let waited = self.parts.clock.monotonic_ms() - began;
        if members.is_empty() || members.len() < self.options.founders && waited < FOUNDERS_MS {
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
            .put(keys::SLOTS_CONFIG, serde_json::to_vec(&config).unwrap_or_default())
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
            tracing::info!(shards, "made the shards of the store");
        }
        Ok(())
    }

    /// The home shard is the one that prefers this node as its primary, else any that is here. It stays for this run.
    fn choose_home(&self, members: usize) {
        let mut home = lock(&self.home);
        if home.shard.is_some() {
            return;
        }
        let records = lock(&self.records);
        let me = self.options.node;
        let preferred = records.iter().find(|(_, state)| state.replicas.first() == Some(&me));
        // A node that has just joined gets a shard of its own in a moment.
        let waits = records.len() < members.min(growth::MOST)
            && self.parts.clock.monotonic_ms() < self.began_ms + HOME_MS;
        let any = || records.iter().find(|(_, state)| !waits && state.replicas.contains(&me));
        home.shard = preferred.or_else(any).map(|(index, _)| *index);
    }

    fn open_listeners(&self) {
        let mut home = lock(&self.home);
        for (index, local) in lock(&self.locals).iter_mut() {
            // The home port is not given to another shard before it is clear whose it is.
            if local.port.is_some() || home.shard.is_none() {
                continue;
            }
            if self.server.is_here() {
                local.port = Some(HERE_PORT + *index);
                continue;
            }
            let listener =
                if home.shard == Some(*index) { home.listener.take() } else { self.bind_replica(*index) };
            let Some(listener) = listener else { continue };
            let port = listener.local_addr().map(|address| address.port());
            match port.and_then(|port| self.server.listen(&local.shard, listener).map(|()| port)) {
                Ok(port) => local.port = Some(port),
                Err(error) => tracing::error!(shard = *index, %error, "a shard cannot be served"),
            }
        }
    }

    /// A port for a shard that is not this node's home: its own of the range, or any other.
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
            tracing::error!(shard = index, first, last, "no port is free for a replica of a shard");
        }
        found
    }

    /// Says where clients reach the replicas of this node.
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
        let bytes = serde_json::to_vec(&record).unwrap_or_default();
        let key = format!("{ADDRESSES}{}", self.options.node);
        self.parts.repository.txn(Txn::new().put(key, bytes)).await?;
        *lock(&self.published) = record;
        Ok(())
    }

    /// What clients are shown.
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

    /// Deletes the copies that have no part in their shard any more.
    fn drop_strangers(&self) {
        // The lock is not kept: deleting waits for the disk, and whoever tells of its progress takes the lock.
        let gone: Vec<u16> = lock(&self.locals)
            .iter()
            .filter(|(_, local)| local.dropped.load(Ordering::Acquire))
            .map(|(index, _)| *index)
            .collect();
        for index in gone {
            tracing::info!(shard = index, "a copy of a shard was moved away");
            self.parts.driver.detach(PartitionId { topic: SHARDS, index: u32::from(index) });
            let id = JournalId { incarnation: SHARDS.0, part: u32::from(index) };
            if let Err(error) = self.parts.store.delete(id) {
                tracing::warn!(shard = index, %error, "the journal of a shard was not deleted");
            }
            let local = lock(&self.locals).remove(&index);
            if let Some(local) = local {
                self.let_go(&local.shard);
            }
        }
    }

    /// A shard is not here any more: its clients, its tasks and its snapshots go, too.
    fn let_go(&self, shard: &Shard) {
        shard.set_role(Role::Loading);
        shard.gone.stop();
        shard.void_answers();
        if let Some(folder) = shard.folder()
            && let Err(error) = std::fs::remove_dir_all(folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(shard = shard.index, %error, "the snapshots of a shard were not deleted");
        }
    }

    /// Waits until every shard that is here answers, or until patience ends.
    pub async fn settle(&self, patience: Duration) {
        let deadline = tokio::time::Instant::now() + patience;
        while tokio::time::Instant::now() < deadline {
            let has_view = !self.shared.view.load().shards.is_empty();
            let clock = self.parts.clock.as_ref();
            let serves = |local: &Local| match local.shard.role() {
                Role::Loading => false,
                Role::Replica => true,
                Role::Primary => local.shard.may_answer(clock),
            };
            let locals = lock(&self.locals).values().all(|local| serves(local) && local.port.is_some());
            if has_view && locals {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tracing::warn!("not all shards of this node answer yet");
    }

    /// The journals' sink told of progress: (tag, durable end).
    pub fn sink(self: &Arc<Self>) -> Arc<dyn DurableSink> {
        Arc::new(Sink(Arc::clone(self)))
    }
}

struct Sink(Arc<Service>);

impl DurableSink for Sink {
    fn on_durable(&self, advanced: &[(u64, i64)]) {
        for (tag, _) in advanced.iter().filter(|(tag, _)| (TAG..TAG + (1 << 16)).contains(tag)) {
            let log = lock(&self.0.locals).get(&((tag - TAG) as u16)).map(|local| Arc::clone(&local.log));
            if let Some(copy) = log.as_ref().and_then(|log| log.copy()) {
                copy.on_durable();
            }
        }
    }
}

fn shards_prefix() -> String {
    let first = keys::partition(PartitionId { topic: SHARDS, index: 0 });
    first.trim_end_matches('0').to_owned()
}

/// The id of a replica of a shard: the same in every run.
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
