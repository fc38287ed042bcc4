//! What all shards and clients of a node share: settings, counters, the list of clients, the slow log.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use arc_swap::ArcSwap;
use moim_base::metrics::Counter;
use moim_base::{Clock, SystemClock};

use crate::cluster::View;
use crate::events::Notification;
use crate::monitor::Monitors;
use crate::pubsub::{Gate, PubSub};
use crate::script::Scripts;
use crate::session::Mailbox;
use crate::settings::Settings;
use crate::tracking::Tracking;

/// See the module.
pub struct Shared {
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// CONFIG.
    pub settings: Settings,
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
            stats: Stats::default(),
            pubsub: PubSub::default(),
            tracking: Tracking::default(),
            monitors: Monitors::default(),
            scripts: Scripts::default(),
            clients: Mutex::default(),
            connections: AtomicUsize::new(0),
            next_client: AtomicU64::new(1),
            slow: Mutex::default(),
            view: ArcSwap::from_pointee(View::default()),
            on_rest: OnceLock::new(),
            ops: OnceLock::new(),
            look: tokio::sync::Notify::new(),
            started_ms,
            run_id: hex_id(),
            this: OnceLock::new(),
            paused_ms: [AtomicI64::new(0), AtomicI64::new(0)],
            paused_clients: AtomicUsize::new(0),
            clock,
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
    pub fn publish_notifications(&self, notifications: &[Notification], shard: u16, gate: i64) {
        let wanted = self.settings.notify.load(Ordering::Relaxed);
        self.pubsub.notify(notifications, wanted, Gate { shard: Some(shard), end: gate });
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
