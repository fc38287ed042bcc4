//! What all shards and clients of a node share: settings, counters, the list of clients, the slow log.

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

/// What the buffers of all connections take together at most: the largest request that RESP allows, and what others have meanwhile.
pub const BUFFER_BYTES: usize = (1 << 30) + (512 << 20);
/// What of it no other layer of the node can take: the largest request, and room for others.
pub const BUFFER_RESERVE: usize = (512 << 20) + (256 << 20);

/// What the Lua machines of all threads take together at most, beyond what each may take without asking.
const SCRIPT_BYTES: usize = 1 << 30;
/// What of it no other layer of the node can take: one script of the largest size.
pub const SCRIPT_RESERVE: usize = 256 << 20;

/// A wall clock whose difference to the monotonic one changes by more was stepped.
const STEP_MS: u64 = 1_000;

fn clock_offset_ms(now_ns: u64, wall_ms: i64) -> i64 {
    wall_ms.saturating_sub(i64::try_from(now_ns / 1_000_000).unwrap_or(i64::MAX))
}

/// See the module.
pub struct Shared {
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// CONFIG.
    pub settings: Settings,
    /// What all shards of this node take.
    pub memory: Arc<NodeMemory>,
    /// Where connections take the memory of their buffers from.
    pub buffers: OnceLock<LayerBudget>,
    /// What scripts take from.
    pub scripts_memory: OnceLock<LayerBudget>,
    /// Counters.
    pub stats: Stats,
    /// Who listens to what.
    pub pubsub: PubSub,
    /// Who has read what, and wants to hear of changes.
    pub tracking: Tracking,
    /// Who sees every command.
    pub monitors: Monitors,
    /// Scripts by name.
    pub scripts: Scripts,
    /// Who is connected.
    pub clients: Mutex<BTreeMap<u64, Client>>,
    /// How many are.
    pub connections: AtomicUsize,
    /// Event loops that have not turned for a second.
    pub stalled_loops: AtomicUsize,
    /// Whether other nodes serve in this node's place: connections are closed as they come in.
    pub withdrawn: AtomicBool,
    /// True while no linearizable read has succeeded for [`crate::service`]'s limit: the other nodes may serve in this node's
    /// place. Commands with keys are answered CLUSTERDOWN, as by a Redis node in a minority.
    pub isolated: AtomicBool,
    /// The number of the next client.
    pub next_client: AtomicU64,
    /// SLOWLOG.
    pub slow: Mutex<SlowLog>,
    /// Who owns which slot, and where everybody is.
    pub view: ArcSwap<View>,
    /// Where requests to the cluster go, once somebody takes them.
    pub ops: OnceLock<tokio::sync::mpsc::Sender<crate::ops::Op>>,
    /// Called by a loop that has nothing to do, or (with true) has served one client of several.
    pub on_rest: OnceLock<Box<dyn Fn(Option<usize>) + Send + Sync>>,
    /// Until when, on the monotonic clock, a majority of the nodes' wall clocks is known to agree with this node's: always where
    /// there are no others.
    pub(crate) time_agreed_until_ns: AtomicU64,
    /// By how much the wall clock was ahead of the monotonic one then, in milliseconds. If it is stepped later, nothing is agreed.
    pub(crate) time_agreed_offset_ms: AtomicI64,
    /// A shard does not know whether the wall clock is right.
    pub(crate) time_doubt: tokio::sync::Notify,
    /// Has the service look at the cluster's records now.
    pub look: tokio::sync::Notify,
    /// When this node started, in milliseconds since 1970.
    pub started_ms: i64,
    /// Forty hexadecimal digits that no other run has.
    pub run_id: String,
    /// Itself, for work that leaves the loops; set when the server starts.
    pub this: OnceLock<Weak<Shared>>,
    /// Until when CLIENT PAUSE holds commands back: all of them, and writes.
    pub paused_ms: [AtomicI64; 2],
    /// How many clients it holds back now.
    pub paused_clients: AtomicUsize,
}

impl Default for Shared {
    fn default() -> Self {
        Self::new(Arc::new(SystemClock::new()))
    }
}

/// What CLIENT LIST shows of somebody.
#[derive(Clone)]
pub struct Client {
    /// How to reach the connection.
    pub mailbox: Arc<Mailbox>,
    /// What the connection last said about itself.
    pub about: Arc<Mutex<About>>,
}

/// See [`Client`].
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
    pub listens: [usize; 3],
    pub request_bytes: usize,
    pub protocol: u8,
    pub readonly: bool,
    pub blocked: bool,
    pub monitors: bool,
    pub broadcasts: bool,
    /// Who hears of changes for it: 0 is itself, -1 nobody.
    pub redirect: i64,
}

/// The commands that took longest.
#[derive(Default)]
pub struct SlowLog {
    /// Newest first.
    pub entries: VecDeque<Slow>,
    /// The number of the next one.
    pub next: u64,
}

/// One of them.
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

/// Counters that INFO and the metrics show.
#[derive(Default)]
pub struct Stats {
    /// Commands run.
    pub commands: Counter,
    /// Connections taken.
    pub connections: Counter,
    /// Connections refused.
    pub refused: Counter,
    /// Bytes read from clients.
    pub read_bytes: Counter,
    /// Bytes written to clients.
    pub written_bytes: Counter,
    /// Keys deleted because their time had come.
    pub expired: Counter,
    /// Keys deleted to make room.
    pub evicted: Counter,
    /// Lookups that found their key.
    pub hits: Counter,
    /// Lookups that did not.
    pub misses: Counter,
    errors: Mutex<BTreeMap<String, u64>>,
}

impl Shared {
    /// With nothing in it.
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
            time_doubt: tokio::sync::Notify::new(),
            look: tokio::sync::Notify::new(),
            started_ms,
            run_id: hex_id(),
            this: OnceLock::new(),
            paused_ms: [AtomicI64::new(0), AtomicI64::new(0)],
            paused_clients: AtomicUsize::new(0),
            clock,
        }
    }

    /// Connections take their buffers from the node's budget from now on. Before the first of them is accepted.
    pub fn set_memory_budget(&self, node: &MemoryBudget) {
        let layer = node.layer("store buffers", BUFFER_RESERVE, BUFFER_BYTES);
        assert!(self.buffers.set(layer).is_ok(), "the memory budget is set once");
        let layer = node.layer("store scripts", SCRIPT_RESERVE, SCRIPT_BYTES);
        assert!(self.scripts_memory.set(layer).is_ok(), "the memory budget is set once");
    }

    /// The budget of scripts: the node's, or one of the store's own where the node has given none.
    pub(crate) fn script_budget(&self) -> &LayerBudget {
        self.scripts_memory.get_or_init(|| {
            MemoryBudget::new(SCRIPT_BYTES).layer("store scripts", SCRIPT_BYTES, SCRIPT_BYTES)
        })
    }

    /// The budget of the connections' buffers: the node's, or one of the store's own where the node has given none.
    pub(crate) fn buffer_budget(&self) -> &LayerBudget {
        self.buffers.get_or_init(|| {
            MemoryBudget::new(BUFFER_BYTES).layer("store buffers", BUFFER_BYTES, BUFFER_BYTES)
        })
    }

    /// A majority of the nodes' wall clocks agrees with this node's, which reads `wall_ms` at `now_ns`.
    pub(crate) fn agree_on_time(&self, now_ns: u64, wall_ms: i64, holds_ns: u64) {
        self.time_agreed_offset_ms.store(clock_offset_ms(now_ns, wall_ms), Ordering::Relaxed);
        self.time_agreed_until_ns.store(now_ns.saturating_add(holds_ns), Ordering::Release);
    }

    /// Whether a majority has agreed with this wall clock, as it is now.
    pub(crate) fn is_time_agreed(&self, now_ns: u64, wall_ms: i64) -> bool {
        match self.time_agreed_until_ns.load(Ordering::Acquire) {
            u64::MAX => true,
            until_ns => {
                let then_ms = self.time_agreed_offset_ms.load(Ordering::Relaxed);
                until_ns > now_ns && clock_offset_ms(now_ns, wall_ms).abs_diff(then_ms) <= STEP_MS
            }
        }
    }

    /// The clients, to look at or to change.
    pub fn clients(&self) -> MutexGuard<'_, BTreeMap<u64, Client>> {
        lock(&self.clients)
    }

    /// Notes a command that took long.
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

    /// A loop rests, or has done this much and goes on with another client.
    pub(crate) fn rest(&self, done: Option<usize>) {
        if let Some(on_rest) = self.on_rest.get() {
            on_rest(done);
        }
    }

    /// Whether CLIENT PAUSE holds back a command now.
    pub fn is_paused(&self, writes: bool, now: i64) -> bool {
        let until = |at: usize| self.paused_ms[at].load(Ordering::Relaxed);
        until(0) > now || writes && until(1) > now
    }
}

impl Stats {
    /// A command answered with an error of this code.
    pub fn on_error(&self, code: &str) {
        /// Scripts can make up codes.
        const MOST: usize = 128;
        let mut errors = lock(&self.errors);
        if let Some(count) = errors.get_mut(code) {
            *count += 1;
        } else if errors.len() < MOST {
            errors.insert(code.to_owned(), 1);
        }
    }

    /// How often each code was answered.
    pub fn errors(&self) -> Vec<(String, u64)> {
        lock(&self.errors).iter().map(|(code, count)| (code.clone(), *count)).collect()
    }

    /// CONFIG RESETSTAT.
    pub fn reset(&self) {
        lock(&self.errors).clear();
    }
}

/// Forty random hexadecimal digits.
pub fn hex_id() -> String {
    (0..40).map(|_| char::from_digit(fastrand::u32(..16), 16).unwrap_or('0')).collect()
}

/// Locks; a panic under a lock stops the process through its task scope.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
