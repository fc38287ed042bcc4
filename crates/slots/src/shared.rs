//! The state that all shards and clients of a node share: settings, counters, the client list, the slow log.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use arc_swap::ArcSwap;
use moim_base::memory::{LayerBudget, MemoryBudget};
use moim_base::metrics::Counter;
use moim_base::{Clock, SystemClock};

use crate::cluster::View;
use crate::events::Notification;
use crate::memory::NodeMemory;
use crate::monitor::Monitors;
use crate::pubsub::{Gate, PubSub};
use crate::script::Scripts;
use crate::session::Mailbox;
use crate::settings::Settings;
use crate::tracking::Tracking;

/// The budget of all connection buffers: the largest request that RESP allows, and the other clients' buffers.
pub const BUFFER_BYTES: usize = (1 << 30) + (512 << 20);
/// The part of it that is reserved from other layers of the node: the largest request, and space for other clients.
pub const BUFFER_RESERVE: usize = (512 << 20) + (256 << 20);

/// The budget of the Lua interpreters of all threads, beyond the free allowance of each.
const SCRIPT_BYTES: usize = 1 << 30;
/// The part of it that is reserved from other layers of the node: one script of the largest size.
pub const SCRIPT_RESERVE: usize = 256 << 20;

/// The wall clock was stepped if its offset to the monotonic clock changes by more.
const STEP_MS: u64 = 1_000;

fn clock_offset_ms(now_ns: u64, wall_ms: i64) -> i64 {
    wall_ms.saturating_sub(i64::try_from(now_ns / 1_000_000).unwrap_or(i64::MAX))
}

/// The state that all shards and clients of a node share.
pub struct Shared {
    /// The clocks.
    pub clock: Arc<dyn Clock>,
    /// The settings of CONFIG.
    pub settings: Settings,
    /// The memory use of all shards of this node.
    pub memory: Arc<NodeMemory>,
    /// The budget of connection buffers.
    pub buffers: OnceLock<LayerBudget>,
    /// The budget of scripts.
    pub scripts_memory: OnceLock<LayerBudget>,
    /// The counters of INFO and the metrics.
    pub stats: Stats,
    /// The Pub/Sub subscriptions.
    pub pubsub: PubSub,
    /// Client-side caching: the keys that tracking clients have read.
    pub tracking: Tracking,
    /// The clients in MONITOR mode.
    pub monitors: Monitors,
    /// The script cache, by SHA1.
    pub scripts: Scripts,
    /// The connected clients, by id.
    pub clients: Mutex<BTreeMap<u64, Client>>,
    /// The number of connected clients.
    pub connections: AtomicUsize,
    /// The number of stalled event loops.
    pub stalled_loops: AtomicUsize,
    /// True while other nodes serve in place of this node: connections are closed when they are accepted.
    pub withdrawn: AtomicBool,
    /// True while no linearizable read has succeeded for [`crate::service`]'s limit: other nodes may serve in place of
    /// this node. Commands with keys get CLUSTERDOWN, as from a Redis node in a minority partition.
    pub isolated: AtomicBool,
    /// The id of the next client.
    pub next_client: AtomicU64,
    /// SLOWLOG.
    pub slow: Mutex<SlowLog>,
    /// The view of the cluster: slot owners and node addresses.
    pub view: ArcSwap<View>,
    /// Submits cluster operations to the service; set when the service runs.
    pub ops: OnceLock<tokio::sync::mpsc::Sender<crate::ops::Op>>,
    /// Called by an event loop that is about to park (`None`), or has done this much work for one of several clients.
    pub on_rest: OnceLock<Box<dyn Fn(Option<usize>) + Send + Sync>>,
    /// Until this moment of the monotonic clock a majority of the nodes' wall clocks is known to agree with this
    /// node's; `u64::MAX` on a standalone node.
    pub(crate) time_agreed_until_ns: AtomicU64,
    /// The offset of the wall clock to the monotonic clock at that confirmation, in milliseconds. A step of the wall
    /// clock invalidates the confirmation.
    pub(crate) time_agreed_offset_ms: AtomicI64,
    /// Notified by a shard that needs the wall clock confirmed.
    pub(crate) clock_unconfirmed: tokio::sync::Notify,
    /// Makes the service read the cluster's records now.
    pub refresh_wakeup: tokio::sync::Notify,
    /// The start time of this node, in milliseconds since 1970.
    pub started_ms: i64,
    /// The run id: forty hexadecimal digits, random for each start.
    pub run_id: String,
    /// A reference to itself, for offloaded commands; set when the server starts.
    pub this: OnceLock<Weak<Shared>>,
    /// CLIENT PAUSE: until when all commands, and write commands, are paused.
    pub paused_ms: [AtomicI64; 2],
    /// The number of clients that CLIENT PAUSE holds now.
    pub paused_clients: AtomicUsize,
}

impl Default for Shared {
    fn default() -> Self {
        Self::new(Arc::new(SystemClock::new()))
    }
}

/// A connected client, as CLIENT LIST shows it.
#[derive(Clone)]
pub struct Client {
    /// The mailbox of the connection.
    pub mailbox: Arc<Mailbox>,
    /// The properties of the connection, as it last updated them.
    pub about: Arc<Mutex<About>>,
}

/// The properties of a [`Client`].
#[derive(Clone, Default)]
#[allow(missing_docs)]
pub struct About {
    pub id: u64,
    pub peer: String,
    pub local: String,
    pub name: String,
    pub library: [String; 2],
    pub since_ms: i64,
    pub last_ms: i64,
    pub last_command: &'static str,
    pub multi: i64,
    pub subscriptions: usize,
    pub subscribed: [usize; 3],
    pub request_bytes: usize,
    pub protocol: u8,
    pub readonly: bool,
    pub blocked: bool,
    pub monitors: bool,
    pub broadcasts: bool,
    /// The id of the client that receives its invalidations (CLIENT TRACKING REDIRECT): 0 for itself, -1 for none.
    pub redirect: i64,
}

/// SLOWLOG: the slowest commands.
#[derive(Default)]
pub struct SlowLog {
    /// The entries, newest first.
    pub entries: VecDeque<Slow>,
    /// The id of the next entry.
    pub next: u64,
}

/// An entry of SLOWLOG.
#[derive(Clone)]
#[allow(missing_docs)]
pub struct Slow {
    pub id: u64,
    pub at_s: i64,
    pub took_us: i64,
    pub args: Vec<Vec<u8>>,
    pub peer: String,
    pub name: String,
}

/// The counters of INFO and the metrics.
#[derive(Default)]
pub struct Stats {
    /// Commands executed.
    pub commands: Counter,
    /// Connections accepted.
    pub connections: Counter,
    /// Connections refused.
    pub refused: Counter,
    /// Bytes read from clients.
    pub read_bytes: Counter,
    /// Bytes written to clients.
    pub written_bytes: Counter,
    /// Keys deleted because they expired.
    pub expired: Counter,
    /// Keys deleted by eviction.
    pub evicted: Counter,
    /// Lookups that found their key.
    pub hits: Counter,
    /// Lookups that did not find their key.
    pub misses: Counter,
    errors: Mutex<BTreeMap<String, u64>>,
}

impl Shared {
    /// The state of a node that has just started.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let started_ms = clock.wall_ms();
        Self {
            settings: Settings::default(),
            memory: Arc::default(),
            buffers: OnceLock::new(),
            scripts_memory: OnceLock::new(),
            stats: Stats::default(),
            pubsub: PubSub::default(),
            tracking: Tracking::default(),
            monitors: Monitors::default(),
            scripts: Scripts::default(),
            clients: Mutex::default(),
            connections: AtomicUsize::new(0),
            stalled_loops: AtomicUsize::new(0),
            withdrawn: AtomicBool::new(false),
            isolated: AtomicBool::new(false),
            next_client: AtomicU64::new(1),
            slow: Mutex::default(),
            view: ArcSwap::from_pointee(View::default()),
            on_rest: OnceLock::new(),
            ops: OnceLock::new(),
            time_agreed_until_ns: AtomicU64::new(u64::MAX),
            time_agreed_offset_ms: AtomicI64::new(0),
            clock_unconfirmed: tokio::sync::Notify::new(),
            refresh_wakeup: tokio::sync::Notify::new(),
            started_ms,
            run_id: hex_id(),
            this: OnceLock::new(),
            paused_ms: [AtomicI64::new(0), AtomicI64::new(0)],
            paused_clients: AtomicUsize::new(0),
            clock,
        }
    }

    /// Sets the memory budget of the node for buffers and scripts. Before the first connection is accepted.
    pub fn set_memory_budget(&self, node: &MemoryBudget) {
        let layer = node.layer("store buffers", BUFFER_RESERVE, BUFFER_BYTES);
        assert!(self.buffers.set(layer).is_ok(), "the memory budget is set once");
        let layer = node.layer("store scripts", SCRIPT_RESERVE, SCRIPT_BYTES);
        assert!(self.scripts_memory.set(layer).is_ok(), "the memory budget is set once");
    }

    /// The budget of scripts: the node's, or the store's own if the node has set none.
    pub(crate) fn script_budget(&self) -> &LayerBudget {
        self.scripts_memory.get_or_init(|| {
            MemoryBudget::new(SCRIPT_BYTES).layer("store scripts", SCRIPT_BYTES, SCRIPT_BYTES)
        })
    }

    /// The budget of connection buffers: the node's, or the store's own if the node has set none.
    pub(crate) fn buffer_budget(&self) -> &LayerBudget {
        self.buffers.get_or_init(|| {
            MemoryBudget::new(BUFFER_BYTES).layer("store buffers", BUFFER_BYTES, BUFFER_BYTES)
        })
    }

    /// A majority of the nodes' wall clocks agrees with this node's, which shows `wall_ms` at `now_ns`.
    pub(crate) fn agree_on_time(&self, now_ns: u64, wall_ms: i64, holds_ns: u64) {
        self.time_agreed_offset_ms.store(clock_offset_ms(now_ns, wall_ms), Ordering::Relaxed);
        self.time_agreed_until_ns.store(now_ns.saturating_add(holds_ns), Ordering::Release);
    }

    /// True if a majority has confirmed the wall clock, and it was not stepped since.
    pub(crate) fn is_time_agreed(&self, now_ns: u64, wall_ms: i64) -> bool {
        match self.time_agreed_until_ns.load(Ordering::Acquire) {
            u64::MAX => true,
            until_ns => {
                let then_ms = self.time_agreed_offset_ms.load(Ordering::Relaxed);
                until_ns > now_ns && clock_offset_ms(now_ns, wall_ms).abs_diff(then_ms) <= STEP_MS
            }
        }
    }

    /// Locks the list of clients.
    pub fn clients(&self) -> MutexGuard<'_, BTreeMap<u64, Client>> {
        lock(&self.clients)
    }

    /// Adds a slow command to SLOWLOG.
    pub fn on_slow(&self, took_us: i64, args: Vec<Vec<u8>>, peer: &str, name: &str) {
        let most = usize::try_from(self.settings.number("slowlog-max-len")).unwrap_or(0);
        let mut slow = lock(&self.slow);
        let id = slow.next;
        slow.next += 1;
        let at_s = self.clock.wall_ms() / 1_000;
        slow.entries.push_front(Slow {
            id,
            at_s,
            took_us,
            args,
            peer: peer.to_owned(),
            name: name.to_owned(),
        });
        slow.entries.truncate(most);
    }

    /// Sends keyspace notifications to their subscribers, when the journal is committed up to `gate`.
    pub fn publish_notifications(&self, notifications: &[Notification], gate: &Gate) {
        let wanted = self.settings.notify.load(Ordering::Relaxed);
        self.pubsub.notify(notifications, wanted, gate);
    }

    /// An event loop is about to park, or has done this much work for one of several clients.
    pub(crate) fn rest(&self, done: Option<usize>) {
        if let Some(on_rest) = self.on_rest.get() {
            on_rest(done);
        }
    }

    /// True if CLIENT PAUSE holds a command now.
    pub fn is_paused(&self, writes: bool, now: i64) -> bool {
        let until = |at: usize| self.paused_ms[at].load(Ordering::Relaxed);
        until(0) > now || writes && until(1) > now
    }
}

impl Stats {
    /// Counts an error reply with this code.
    pub fn on_error(&self, code: &str) {
        /// Scripts can invent codes.
        const MOST: usize = 128;
        let mut errors = lock(&self.errors);
        if let Some(count) = errors.get_mut(code) {
            *count += 1;
        } else if errors.len() < MOST {
            errors.insert(code.to_owned(), 1);
        }
    }

    /// The number of error replies by code.
    pub fn errors(&self) -> Vec<(String, u64)> {
        lock(&self.errors).iter().map(|(code, count)| (code.clone(), *count)).collect()
    }

    /// CONFIG RESETSTAT.
    pub fn reset(&self) {
        lock(&self.errors).clear();
    }
}

/// A random id of forty hexadecimal digits.
pub fn hex_id() -> String {
    (0..40).map(|_| char::from_digit(fastrand::u32(..16), 16).unwrap_or('0')).collect()
}

/// Locks a mutex; a panic under a lock stops the process through its task scope.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
